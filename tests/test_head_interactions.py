"""What a head would do to another of its block: by whole forwards, and in models known by hand."""

import pytest
import torch

from wvprobe import adapters
from wvprobe._types import Provenance, Result
from wvprobe.activations import read_sites
from wvprobe.compose import composition
from wvprobe.counterfactual import InteractionResult, head_interactions
from wvprobe.errors import InputError
from wvprobe.heads import HeadWeights
from wvprobe.plotting import figure
from wvprobe.testing import FAMILIES, tiny_model
from wvprobe.words import encode

TEXTS = ("The bank by the river was old and grey.", "The old boat.")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pair_is_what_a_forward_with_the_writers_output_says(family, tiny):
    model, layer, writer = tiny(family), 1, 1
    arch = adapters.architecture(model)
    weight = adapters.output_weight(model, arch, layer).double()
    norm = adapters.post_attention_norm(model, arch, layer)
    found = head_interactions(model, TEXTS, layers=[2, layer])
    assert found.values.shape == (2, arch.n_heads, arch.n_heads, 2) and found.layers == (2, 1)
    for row, text in enumerate(TEXTS):
        own = ~torch.tensor(encode(model, text).special)
        seen = read_sites(model, text, ["head_out", "z"], layers=layer)
        before = seen["head_out"][0, :, 0]
        moved = {("resid_pre", layer): lambda x, by=before[:, writer]: x + by}
        with adapters.changing(model, arch, moved):
            z = read_sites(model, text, "z", layers=layer)["z"][0, :, 0].double()
        after = torch.einsum("phr,hrd->phd", z, weight)
        if norm is not None:
            out = read_sites(model, text, "attn_out", layers=layer)["attn_out"][0, :, 0]
            after = norm.linear(after, norm.scale(out.double())[:, None])
        ratio = (after - before).norm(dim=-1) / before.norm(dim=-1)
        expected = ratio[own].mean(dim=0)
        torch.testing.assert_close(
            found.values[1, writer, :, row], expected.double(), atol=1e-5, rtol=1e-3
        )
    assert found.n_tokens.tolist() == [sum(not s for s in encode(model, t).special) for t in TEXTS]


def test_a_head_that_writes_nothing_changes_nobody_and_has_no_change_of_its_own():
    model = tiny_model("gpt2")
    arch = adapters.architecture(model)
    with torch.no_grad():
        weight = model.blocks[1].attn.o.original_component.weight
        weight[2 * arch.d_head_v : 3 * arch.d_head_v] = 0.0
    found = head_interactions(model, TEXTS, layers=1)
    others = [0, 1, 3, 4]
    assert not found.values[0, 2, others].any()
    assert found.values[0, :, 2].isnan().all()
    assert float(found.values[0, 0][others].min()) > 0
    assert found.agreement()["rho"].notna().all()


def test_the_model_is_left_as_it_is(tiny):
    model = tiny("gemma2")
    before = read_sites(model, TEXTS, "resid_post")["resid_post"]
    head_interactions(model, TEXTS)
    assert torch.equal(read_sites(model, TEXTS, "resid_post")["resid_post"], before)


@pytest.mark.parametrize("family", ["llama", "bert", "deepseek_v3"])
def test_compositions_are_those_of_pairs_that_cannot_compose(family, tiny):
    model = tiny(family)
    found = head_interactions(model, TEXTS, layers=[0, 2])
    part = "content" if family == "deepseek_v3" else None
    for place, mode in enumerate(found.modes):
        scores = composition(
            HeadWeights.from_model(model), mode, part=None if mode == "V" else part
        )
        assert torch.equal(found.compositions[place, 1], scores.impossible[2, :, 2])
        assert not scores.scores[2, :, 2].any()
    assert float(found.compositions.min()) > 0
    frame = found.to_frame()
    row = frame.query("layer == 2 and writer == 1 and reader == 0").iloc[0]
    assert row["k_composition"] == float(found.compositions[1, 1, 1, 0])
    assert row["interaction"] == float(found.values[1, 1, 0].mean())


def _made(values, compositions):
    return InteractionResult(
        provenance=Provenance.of("none", "", seed=0),
        values=values,
        compositions=compositions,
        n_tokens=torch.tensor([5] * values.shape[-1]),
        layers=tuple(range(len(values))),
        modes=("Q", "K", "V"),
    )


def test_the_relation_is_of_pairs_of_two_heads_within_a_layer():
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(4, 3, 3, generator=generator, dtype=torch.float64)
    depth = torch.tensor([0.0, 10.0, 20.0, 30.0])[:, None, None]
    mean = scores.exp() + depth
    mean[:, range(3), range(3)] = 1000.0  # a head's change of itself takes no part
    values = torch.stack((mean - 0.1, mean + 0.1), dim=-1)
    # Q: the same order; K: the opposite; V: the order of depth alone, which is none within a layer.
    found = _made(values, torch.stack((scores, -scores, depth.expand(4, 3, 3).double())))
    assert found.by_layer()[:2].tolist() == [[pytest.approx(1.0)] * 4, [pytest.approx(-1.0)] * 4]
    assert found.by_layer()[2].isnan().all()
    frame = found.agreement().set_index("mode")
    assert frame.loc["Q", ["rho", "low", "high"]].tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert frame.loc["K", "n_layers"] == 4 and frame.loc["V", "n_layers"] == 0
    torch.testing.assert_close(found.interval()[0], mean)


def test_intervals_are_over_texts():
    values = torch.zeros(1, 2, 2, 3, dtype=torch.float64)
    values[0, 0, 1] = torch.tensor([1.0, 2.0, 3.0])
    found = _made(values, torch.ones(3, 1, 2, 2))
    mean, low, high = found.interval()
    assert float(mean[0, 0, 1]) == 2.0
    assert 1.0 <= float(low[0, 0, 1]) < 2.0 < float(high[0, 0, 1]) <= 3.0
    assert _made(values[..., :1], torch.ones(3, 1, 2, 2)).interval()[1].isnan().all()
    # Two heads have two pairs, of which no rank correlation is taken.
    assert found.agreement()["rho"].isna().all()


def test_files_and_figures(tiny, tmp_path):
    found = head_interactions(tiny("llama"), TEXTS, layers=[0, 2])
    loaded = Result.load(found.save(tmp_path / "found"))
    assert isinstance(loaded, InteractionResult) and torch.equal(loaded.values, found.values)
    drawn = figure(found)
    maps = [trace for trace in drawn.data if trace.type == "heatmap"]
    assert len(maps) == 2 and maps[1].z[1][3] == pytest.approx(float(found.values[1, 1, 3].mean()))
    assert all(maps[0].z[head][head] != maps[0].z[head][head] for head in range(6))
    frame = found.to_frame().query("writer != reader")
    top = frame.loc[frame["interaction"].idxmax()]
    name = f"L{top['layer']:.0f}H{top['writer']:.0f} would change"
    assert drawn.layout.title.text.startswith(name)
    assert f"Q {found.agreement()['rho'][0]:+.2f}" in drawn.layout.title.text
    with pytest.raises(InputError, match="layers"):
        head_interactions(tiny("llama"), TEXTS, layers=3)
    single = head_interactions(tiny_model("gpt2", n_head=1), TEXTS)
    assert "No two heads" in figure(single).layout.title.text
