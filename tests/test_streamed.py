"""Weights read from shards a layer at a time, against the same model in memory."""

import json
import shutil

import pytest
import torch

from wvprobe._packaged import packaged_models
from wvprobe._types import Provenance
from wvprobe.errors import InputError, ModelFileError, UnsupportedError
from wvprobe.heads import HeadWeights
from wvprobe.heads._stacks import LayerStack
from wvprobe.testing import FAMILIES, _hf_model, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return a folder with a small model's shards, several of them."""

    def saved(family, dtype=torch.float32):
        folder = tmp_path_factory.mktemp(family)
        model = _hf_model(family, 0, {}).to(dtype)
        model.save_pretrained(folder, max_shard_size="60KB")
        tiny_tokenizer(family).save_pretrained(folder)
        assert len(list(folder.glob("*.safetensors"))) > 1
        return folder

    return saved


@pytest.mark.parametrize("fold_norm", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_streamed_weights_are_those_of_the_model(family, fold_norm, checkpoint):
    streamed = HeadWeights.from_safetensors(checkpoint(family), fold_norm=fold_norm)
    whole = HeadWeights.from_model(tiny_model(family), fold_norm=fold_norm)
    for name in HeadWeights.__dataclass_fields__:
        got, expected = getattr(streamed, name), getattr(whole, name)
        if isinstance(got, LayerStack):
            assert got.shape == expected.shape and got.dtype == expected.dtype
            for layer in range(whole.n_layers):
                assert torch.equal(got[layer], expected[layer]), (name, layer)
            assert torch.equal(got[1, 0], expected[1, 0])
        elif isinstance(got, Provenance) or name == "tokenizer":
            continue
        else:
            assert _same(got, expected), name
    assert streamed.tokenizer.get_vocab() == whole.tokenizer.get_vocab()
    part = "content" if streamed.latent else None
    ours, theirs = (h.qk(2, 1, offset=3, part=part) for h in (streamed, whole))
    assert torch.equal(ours.matrix(), theirs.matrix())
    x = torch.randn(1, 5, whole.d_model)
    assert torch.equal(streamed.scores(x, 1), whole.scores(x, 1))


def _same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if hasattr(a, "__dataclass_fields__"):
        return all(_same(getattr(a, f), getattr(b, f)) for f in a.__dataclass_fields__)
    if hasattr(a, "__len__") and not isinstance(a, str):
        pairs = zip(a, b, strict=True)
        return len(a) == len(b) and all(_same(x, y) for x, y in pairs)
    return a == b


def test_half_precision_is_upcast_layer_by_layer_and_tables_stay_as_stored(checkpoint):
    streamed = HeadWeights.from_safetensors(checkpoint("llama", torch.bfloat16))
    whole = HeadWeights.from_model(tiny_model("llama", dtype="bfloat16"))
    assert streamed.W_Q.dtype == streamed.W_Q[0].dtype == torch.float32
    assert torch.equal(streamed.W_Q[2], whole.W_Q[2])
    assert streamed.W_E.dtype == torch.bfloat16 and torch.equal(streamed.W_E.float(), whole.W_E)
    torch.testing.assert_close(streamed.W_U, whole.W_U)


def test_no_more_than_two_layers_are_kept(checkpoint):
    streamed = HeadWeights.from_safetensors(checkpoint("gpt2"))
    first = streamed.W_Q[0]
    assert streamed.W_Q[0].data_ptr() == first.data_ptr()
    kept = streamed.W_K[1], streamed.W_K[2]
    assert streamed.W_Q[0].data_ptr() != first.data_ptr() and len(kept) == 2
    with pytest.raises(InputError, match="a layer at a time"):
        streamed.W_Q[0:2]
    with pytest.raises(InputError, match=r"in 0\.\.2"):
        streamed.W_Q[3]


def test_a_folder_of_weights_alone_has_no_tokenizer(checkpoint):
    folder = checkpoint("qwen2")
    for path in folder.glob("*token*"):
        path.unlink()
    streamed = HeadWeights.from_safetensors(folder)
    assert streamed.tokenizer is None and streamed.n_layers == 3


def test_a_body_without_its_head_and_prefix(tmp_path):
    """A checkpoint of the base class names its tensors otherwise, and has no head."""
    model = _hf_model("llama", 0, {})
    model.model.save_pretrained(tmp_path)
    streamed = HeadWeights.from_safetensors(tmp_path)
    whole = HeadWeights.from_model(tiny_model("llama"))
    assert torch.equal(streamed.W_O[1], whole.W_O[1])
    with pytest.raises(UnsupportedError, match="lacks a head"):
        _ = streamed.W_U


def test_what_is_wrong_with_a_checkpoint_is_named(checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    with pytest.raises(ModelFileError, match="no config"):
        HeadWeights.from_safetensors(tmp_path)
    with pytest.raises((InputError, ModelFileError), match="nowhere"):
        HeadWeights.from_safetensors(tmp_path / "nowhere")
    folder = checkpoint("llama")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = "model.layers.1.self_attn.k_proj.weight"

    def spoiled(change):
        copy = tmp_path / change.__name__
        shutil.copytree(folder, copy)
        tensors = load_file(copy / index[name])
        change(tensors, copy)
        if (copy / index[name]).exists():
            save_file(tensors, copy / index[name], metadata={"format": "pt"})
        return copy

    def not_a_number(tensors, copy):
        tensors[name][3, 4] = torch.nan

    def other_shape(tensors, copy):
        tensors[name] = tensors[name][:-1].clone()

    def lost_file(tensors, copy):
        (copy / index[name]).unlink()

    def lost_tensor(tensors, copy):
        del tensors[name]
        found = json.loads((copy / "model.safetensors.index.json").read_text())
        del found["weight_map"][name]
        (copy / "model.safetensors.index.json").write_text(json.dumps(found))

    heads = HeadWeights.from_safetensors(spoiled(not_a_number))
    with pytest.raises(InputError, match="`W_K` must be finite.*layer 1"):
        heads.W_Q[1]
    with pytest.raises(ModelFileError, match=r"k_proj.weight .*must have shape"):
        HeadWeights.from_safetensors(spoiled(other_shape)).W_K[1]
    with pytest.raises(ModelFileError, match="lacks model-0"):
        HeadWeights.from_safetensors(spoiled(lost_file))
    with pytest.raises(ModelFileError, match=r"lacks model\.layers\.1\.self_attn\.k_proj"):
        HeadWeights.from_safetensors(spoiled(lost_tensor)).W_K[1]


@pytest.mark.real_model
def test_a_real_encoder_without_a_head(minilm):
    (folder,) = (model.folder for model in packaged_models() if model.alias == "minilm-l6")
    streamed = HeadWeights.from_safetensors(folder)
    whole = HeadWeights.from_model(minilm)
    assert all(torch.equal(streamed.W_V[k], whole.W_V[k]) for k in range(6))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "deepseek_v3"])
def test_measures_of_streamed_weights_are_those_of_the_model(family, checkpoint):
    from wvprobe.compose import composition
    from wvprobe.copying import copying_scores
    from wvprobe.singular import spectra
    from wvprobe.subspaces import subspace_overlap
    from wvprobe.vocabulary import top_tokens

    streamed = HeadWeights.from_safetensors(checkpoint(family))
    whole = HeadWeights.from_model(tiny_model(family))
    part = "content" if whole.latent else None
    for measure in (
        lambda heads: spectra(heads, "OV").singular_values,
        lambda heads: spectra(heads, "OV").vocabulary_eigenvalues.abs(),
        lambda heads: spectra(heads, "QK", offset=2, part=part).singular_values,
        lambda heads: composition(heads, "K", part=part).scores,
        lambda heads: composition(heads, "V").p_values,
        lambda heads: subspace_overlap(heads, "V").overlap,
        lambda heads: top_tokens(heads, "OV", 1, 2, 100, special=True).scores,
        lambda heads: copying_scores(heads, rows=20, progress=False).ranks,
    ):
        torch.testing.assert_close(measure(streamed), measure(whole), equal_nan=True)
    # What has no hash says why, in every result made of it.
    made = (spectra(streamed, "OV"), composition(streamed, "V"), subspace_overlap(streamed, "V"))
    assert all("not hashed" in result.provenance.settings["weights"] for result in made)
