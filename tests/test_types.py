"""Results saved and read back, provenance, and the shared checks' messages."""

import json
from dataclasses import dataclass

import pandas
import pytest
import torch

from wvprobe import _validate
from wvprobe._types import HeadId, Provenance, Result
from wvprobe.adapters import n_parameters, provenance, weight_hash
from wvprobe.errors import InputError, ModelFileError, WvprobeError
from wvprobe.testing import FAMILIES, tiny_model


@dataclass(frozen=True)
class Sample(Result):
    """Every kind of field that a result may hold."""

    tensor: torch.Tensor
    complex_one: torch.Tensor
    complex_pair: torch.Tensor
    by_name: dict[str, torch.Tensor]
    by_head: dict[HeadId, float]
    frame: pandas.DataFrame
    nested: tuple[tuple[HeadId, ...], ...]
    number: float
    words: list[str]
    nothing: None


@dataclass(frozen=True)
class Other(Result):
    """Another class than the one saved."""


@pytest.fixture
def sample():
    return Sample(
        provenance=Provenance.of("a model", "0" * 64, seed=3, layers=(1, 2), ratio=0.5),
        tensor=torch.tensor([1.5, float("nan")], dtype=torch.float64),
        complex_one=torch.tensor([1 + 2j]),
        complex_pair=torch.tensor([1 + 2j, -3j], dtype=torch.complex128).conj(),
        by_name={"v": torch.arange(6).reshape(2, 3), "a.b": torch.zeros(0)},
        by_head={HeadId(5, 1): -1.25},
        frame=pandas.DataFrame({"layer": [0, 1], "score": [0.1, float("nan")], "t": ["a", "ż"]}),
        nested=((HeadId(0, 0),), ()),
        number=float("inf"),
        words=["bank", "“river”"],
        nothing=None,
    )


def test_a_result_comes_back_as_it_was(sample, tmp_path):
    back = Sample.load(sample.save(tmp_path / "deep" / "folder"))
    for name in ("provenance", "by_head", "nested", "number", "words", "nothing"):
        assert getattr(back, name) == getattr(sample, name), name
    assert isinstance(next(iter(back.by_head)), HeadId)
    torch.testing.assert_close(back.tensor, sample.tensor, equal_nan=True)
    assert back.tensor.dtype == torch.float64
    for name in ("complex_one", "complex_pair"):
        assert getattr(back, name).dtype == getattr(sample, name).dtype
        assert torch.equal(getattr(back, name), getattr(sample, name))
    assert torch.equal(back.by_name["v"], sample.by_name["v"])
    assert back.frame.equals(sample.frame)
    assert isinstance(Result.load(tmp_path / "deep" / "folder"), Sample)


def test_the_json_is_readable_by_any_parser(sample, tmp_path):
    text = (sample.save(tmp_path) / "result.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_wrong_folders_and_classes_are_told(sample, tmp_path):
    sample.save(tmp_path / "here")
    with pytest.raises(InputError, match="holds a Sample, not a Other"):
        Other.load(tmp_path / "here")
    with pytest.raises(ModelFileError, match="no saved result"):
        Sample.load(tmp_path / "nowhere")
    document = json.loads((tmp_path / "here" / "result.json").read_text())
    (tmp_path / "here" / "result.json").write_text(json.dumps({**document, "format": 99}))
    with pytest.raises(ModelFileError, match="Install a newer wvprobe"):
        Sample.load(tmp_path / "here")
    (tmp_path / "here" / "result.json").write_text(json.dumps({**document, "class": "os:system"}))
    with pytest.raises(ModelFileError, match="os:system"):
        Sample.load(tmp_path / "here")
    (tmp_path / "here" / "result.json").write_text("{")
    with pytest.raises(ModelFileError, match="no saved result"):
        Sample.load(tmp_path / "here")


def test_results_cannot_be_changed(sample):
    with pytest.raises(AttributeError):
        sample.number = 1.0


class TestWeightHash:
    """Field line 6 and the bridge's renaming: one hash for the same weights."""

    def test_it_follows_every_weight(self):
        model = tiny_model("llama")
        before = weight_hash(model)
        assert weight_hash(model) == before
        with torch.no_grad():
            model.blocks[2].attn.o.original_component.weight[3, 4] += 1e-3
        assert weight_hash(model) != before

    def test_names_are_canonical(self):
        from wvprobe.adapters import canonical_parameters
        from wvprobe.testing import _hf_model

        model = tiny_model("llama")
        names = [name for name, _ in canonical_parameters(model)]
        assert names == sorted(name for name, _ in _hf_model("llama", 0, {}).named_parameters())

    @pytest.mark.parametrize("family", FAMILIES)
    def test_parameters_are_counted_once(self, family, tiny):
        """Field line 6: fused views, expanded KV heads and tied embeddings inflate counts."""
        assert n_parameters(tiny(family)) == FAMILIES[family].parameters

    def test_provenance_names_the_model_and_versions(self, tiny):
        found = provenance(tiny("bert"), seed=5, k=3)
        assert (found.model, found.seed, found.settings) == ("tiny:bert", 5, {"k": 3})
        assert {"torch", "transformers", "transformer-lens", "wvprobe"} <= set(found.versions)


class TestValidation:
    """What was expected, what came, what to do."""

    def test_messages(self):
        with pytest.raises(InputError) as caught:
            _validate.index("head", 9, 9, "heads")
        assert str(caught.value) == (
            "`head` must be in 0..8. Got 9 instead. The model has 9 heads, counted from 0."
        )
        with pytest.raises(InputError, match="Did you mean 'pattern'"):
            _validate.one_of("site", "patern", ("pattern", "scores"))

    @pytest.mark.parametrize("value", [-1, 9, 1.0, "1", True, None])
    def test_indices_that_are_none(self, value):
        with pytest.raises(InputError, match="`layer` must be"):
            _validate.index("layer", value, 9, "layers")

    @pytest.mark.parametrize("values", [[], [1, 1], [0, 9], "01"])
    def test_lists_of_indices(self, values):
        with pytest.raises(InputError, match="`layers` must be"):
            _validate.indices("layers", values, 9, "layers")
        assert _validate.indices("layers", 3, 9, "layers") == (3,)
        assert _validate.indices("layers", torch.tensor([2, 0]).tolist(), 9, "layers") == (2, 0)

    def test_every_error_is_a_wvprobe_error_and_a_built_in(self):
        from wvprobe import errors

        for name, found in vars(errors).items():
            if isinstance(found, type) and found is not WvprobeError:
                assert issubclass(found, WvprobeError), name
                assert any(base.__module__ == "builtins" for base in found.__mro__[1:-3]), name
