"""Probes of stored activations: the numbers of memory, in a memory that does not grow."""

import dataclasses

import pytest
import torch

from wvprobe import fit_probes
from wvprobe.activations import capture
from wvprobe.adapters import broken_too
from wvprobe.errors import InputError, ShapeError
from wvprobe.probes import complement, haar_complements, haar_projections, top_components
from wvprobe.probes.results import ProbeResult
from wvprobe.store import Store

ADJECTIVES = ("old", "green", "open", "closed", "first", "left")
TEXTS = [
    f"{start} {adjective} {'bank' if kind else 'boat'} {end}"
    for start in ("The", "She left the")
    for adjective in ADJECTIVES
    for kind in (0, 1)
    for end in ("is close to here.", "was heavier than the light.", "dropped.")
]
Y = [number % 3 for number in range(len(TEXTS))]
GROUPS = [number // 6 for number in range(len(TEXTS))]
GIVEN = {"positions": 3, "batch_size": 7}


@pytest.fixture(scope="module")
def both(tiny, tmp_path_factory):
    """The same activations in memory and on disk."""
    model, sites = tiny("llama"), ["v", "attn_in", "scores"]
    folder = tmp_path_factory.mktemp("stores") / "store"
    plain = capture(model, TEXTS, sites, **GIVEN)
    return plain, capture(model, TEXTS, sites, out=folder, **GIVEN)


def assert_same(one: ProbeResult, other: ProbeResult):
    for field in dataclasses.fields(ProbeResult):
        name = field.name
        first, second = getattr(one, name), getattr(other, name)
        if isinstance(first, dict):
            assert first.keys() == second.keys()
            for key in first:
                assert torch.equal(first[key].nan_to_num(7), second[key].nan_to_num(7)), (name, key)
        elif isinstance(first, torch.Tensor):
            assert torch.equal(first, second), name
        elif name not in ("provenance", "site_axes", "site_labels"):
            assert first == second, name


@pytest.mark.parametrize("block", [None, 1, 4])
@pytest.mark.parametrize("method", ["logistic", "least_squares", "lda", "mean_difference"])
def test_results_are_those_of_memory(method, block, both):
    plain, stored = both
    given = dict(method=method, block=block, groups=GROUPS, folds=3, n_permutations=19)
    given |= dict(coefficients=True, predictions=True, seed=3)
    expected = fit_probes(plain["v"], Y, **given)
    found = fit_probes(stored["v"], Y, **given)
    assert_same(found, expected)
    assert found.p_family is not None
    assert found.site_axes == ("layer", "kv_head")
    assert found.site_labels == ((0, 1, 2), (0, 1))
    assert found.provenance.settings["features"].startswith("store sha256")


def test_references_are_those_of_memory(both):
    def probed(seen):
        x = seen["attn_in"]
        references = {
            "haar": haar_projections(x, 5, draws=3),
            "rest": haar_complements(x, 5, draws=2),
            "pca": top_components(x, 5),
            "full": x,
        }
        return fit_probes(
            x, Y, references=references, method="lda", penalty=0.3, groups=GROUPS, folds=3
        )

    plain, stored = map(probed, both)
    assert set(stored.excess) == {"haar", "rest", "pca", "full", "majority"}
    assert_same(stored, plain)
    assert not stored.excess["full"].any(), "a site against itself"


def test_what_a_map_drops_of_a_stored_input(both, tiny):
    plain, stored = both
    weight = torch.randn(3, 42, 10, generator=torch.Generator().manual_seed(0))
    given = dict(method="lda", penalty=0.3, groups=GROUPS, folds=3)
    expected = fit_probes(complement(plain["attn_in"], weight), Y, **given)
    found = fit_probes(complement(stored["attn_in"], weight), Y, **given)
    torch.testing.assert_close(found.scores["accuracy"], expected.scores["accuracy"])
    torch.testing.assert_close(
        found.scores["cross_entropy"], expected.scores["cross_entropy"], rtol=1e-4, atol=1e-5
    )
    with pytest.raises(ShapeError, match="`weight` must be"):
        complement(stored["attn_in"], weight[:, None])


def test_no_more_than_a_block_is_read(both, monkeypatch):
    """With a site at a time, no tensor has more than one site of all items."""
    _, stored = both
    sizes = []
    real = Store.read

    def read(self, site, at, rows, heads, out):
        sizes.append(out.numel())
        return real(self, site, at, rows, heads, out)

    monkeypatch.setattr(Store, "read", read)
    monkeypatch.setattr("wvprobe.probes.arguments._NUMBERS", 1)
    fit_probes(stored["v"], Y, groups=GROUPS, folds=3, method="lda", n_permutations=5, block=1)
    n, width = len(TEXTS), stored["v"].shape[-1]
    assert set(sizes) == {n * width}
    assert len(sizes) == 6 * 4  # finite or not, permutations, probes, the code


def test_scores_in_parts_are_those_of_all_at_once(both, monkeypatch):
    _, stored = both
    given = dict(method="logistic", penalty=1.0, groups=GROUPS, folds=3, block=2, predictions=True)
    given |= {"references": {"pca": top_components(stored["attn_in"], 3)}}
    whole = fit_probes(stored["attn_in"], Y, **given)
    for module in ("fitting", "online", "reference_scores"):
        monkeypatch.setattr(f"wvprobe.probes.{module}.TOGETHER", 1)
    parts = fit_probes(stored["attn_in"], Y, **given)
    for name, value in whole.scores.items():
        torch.testing.assert_close(parts.scores[name], value, rtol=1e-6, atol=1e-6)
    assert torch.equal(parts.predictions, whole.predictions)
    torch.testing.assert_close(parts.excess_p["pca"], whole.excess_p["pca"], rtol=0.05, atol=0.01)


def test_what_is_no_feature_is_refused(both, tiny, tmp_path):
    _, stored = both
    with pytest.raises(ShapeError, match=r"Got '\[item, layer, head, query, key\]'.*no features"):
        fit_probes(stored["scores"], Y)
    texts = capture(tiny("llama"), TEXTS[:4], "v", out=tmp_path / "texts")
    with pytest.raises(ShapeError, match="Capture it with words= or positions="):
        fit_probes(texts["v"], Y[:4])
    with pytest.raises(ShapeError, match="`X` has 72 items"):
        fit_probes(stored["v"], Y[:-1])


def test_what_is_not_finite_is_named(tmp_path):
    from wvprobe.testing import tiny_model

    model = tiny_model("llama")
    with torch.no_grad():
        model.blocks[1].attn.v.original_component.weight[13] = torch.nan
    with broken_too():
        seen = capture(model, TEXTS, "v", out=tmp_path / "store", **GIVEN)
    with pytest.raises(InputError, match="nan at layer 1, kv_head 0, item 0, feature 13"):
        fit_probes(seen["v"], Y)
    given = dict(method="lda", penalty=0.3, groups=GROUPS, folds=3)
    finite = seen["v"].tensor().nan_to_num()
    for reference in (seen["v"], top_components(seen["v"], 3), haar_projections(seen["v"], 3)):
        with pytest.raises(InputError, match="`features` must be finite. Got 'NaN .* sites 2 to"):
            fit_probes(finite, Y, references={"it": reference}, block=2, **given)
