"""Exchanged values and patterns: exact splits, hand-made heads, pairs that are what they claim."""

import pytest
import torch

from wvprobe import adapters
from wvprobe._equal_texts import prose_of_length, sense_pairs
from wvprobe._types import Result
from wvprobe.activations import read_sites
from wvprobe.datasets import load_senses
from wvprobe.dissociation import (
    CONTRASTS,
    MEASURES,
    DissociationResult,
    double_dissociation,
    moves,
)
from wvprobe.errors import InputError, WordError
from wvprobe.plotting import figure
from wvprobe.testing import FAMILIES, tiny_model
from wvprobe.words import encode, find_word

PAIRS = (
    ("The bank by the river.", "The boat by the river."),
    ("The river by the bank.", "The river by the boat."),
)


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _random(seed=0, keys=5, r=3):
    generator = _generator(seed)
    patterns = torch.rand(2, 7, keys, generator=generator, dtype=torch.float64)
    values = torch.randn(2, 7, keys, r, generator=generator, dtype=torch.float64)
    return patterns / patterns.sum(dim=-1, keepdim=True), values


def _named(measures):
    return dict(zip(MEASURES, measures, strict=True))


def test_the_ways_of_both_parts_add_up_to_the_whole():
    patterns, values = _random()
    found = _named(moves(*patterns, *values))
    out = torch.einsum("phj,vhjr->pvhr", patterns, values)
    whole = out[1, 1] - out[0, 0]
    energy = (out[0, 0].square().sum(-1) + out[1, 1].square().sum(-1)) / 2
    torch.testing.assert_close(
        found["toward_value"] + found["toward_pattern"], whole.square().sum(-1) / energy
    )
    # The Shapley value of the values: their effect before and after the pattern's, averaged.
    shapley = (out[0, 1] - out[0, 0] + out[1, 1] - out[1, 0]) / 2
    torch.testing.assert_close(found["toward_value"], (shapley * whole).sum(-1) / energy)
    interaction = out[1, 1] - out[1, 0] - out[0, 1] + out[0, 0]
    torch.testing.assert_close(found["interaction"], interaction.norm(dim=-1) / energy.sqrt())
    content = ((out[0, 1] - out[0, 0]).norm(dim=-1) + (out[1, 0] - out[1, 1]).norm(dim=-1)) / 2
    torch.testing.assert_close(found["content_value"], content / energy.sqrt())
    # Which text comes first makes no difference.
    torch.testing.assert_close(moves(*patterns.flip(0), *values.flip(0)), moves(*patterns, *values))


def test_a_constant_pattern_moves_nothing_and_constant_values_neither():
    patterns, values = _random(1)
    same = _named(moves(patterns[0], patterns[0], *values))
    for name in ("content_pattern", "toward_pattern", "routing_pattern", "interaction"):
        assert float(same[name].abs().max()) < 1e-12
    assert float(same["content_value"].min()) > 0 and float(same["routing_value"].min()) > 0
    same = _named(moves(*patterns, values[0], values[0]))
    for name in ("content_value", "toward_value", "routing_value", "interaction"):
        assert float(same[name].abs().max()) < 1e-12
    assert float(same["content_pattern"].min()) > 0 and float(same["routing_pattern"].min()) > 0
    # Known numbers: all weight moves from one key to another, whose values are orthogonal units.
    eye = torch.eye(2, dtype=torch.float64)
    known = _named(moves(eye[0], eye[1], eye, eye))
    assert float(known["content_pattern"]) == pytest.approx(2**0.5)
    assert float(known["routing_pattern"]) == 1.0
    assert float(known["toward_pattern"]) == pytest.approx(2.0)


def test_a_head_without_output_has_no_measures():
    patterns, values = _random(2)
    values[:, 3] = 0
    found = moves(*patterns, *values)
    assert found[:, 3].isnan().all() and not found[:, :3].isnan().any()


@pytest.mark.parametrize("family", FAMILIES)
def test_measures_are_those_of_the_models_own_heads(family, tiny):
    """Outputs formed one by one in d_model dimensions, behind a second norm where there is one."""
    model = tiny(family)
    arch = adapters.architecture(model)
    found = double_dissociation(model, PAIRS, layers=[2, 0], control=False)
    assert found.values.shape == (7, 2, 2, arch.n_heads) and found.control is None
    layer, head = 2, 1
    weight = adapters.output_weight(model, arch, layer)[head].double()
    norm = adapters.post_attention_norm(model, arch, layer)
    if norm is not None:
        weight = norm.linear(weight, torch.ones(1).double())
    kv = head // (arch.n_heads // arch.n_kv_heads)
    for number, (pair, at) in enumerate(zip(PAIRS, found.positions, strict=True)):
        seen = [read_sites(model, text, ["pattern", "v"], layers=layer) for text in pair]
        rows = [s["pattern"][0, 0, head, at].double() for s in seen]
        written = [s["v"][0, :, 0, kv].double() @ weight for s in seen]
        expected = moves(*rows, *written)
        torch.testing.assert_close(found.values[:, number, 0, head], expected, atol=1e-5, rtol=1e-4)


def test_a_head_made_to_look_evenly_has_no_routing():
    """A head whose queries are 0 looks at all alike, whatever the text."""
    model = tiny_model("gpt2")
    with torch.no_grad():
        queries = model.blocks[1].attn.q.original_component
        queries.weight[14:21] = 0  # of head 2, 7 wide
        queries.bias[14:21] = 0
    found = double_dissociation(model, PAIRS, control=False)
    assert float(found.measure("content_pattern")[:, 1, 2].abs().max()) < 1e-6
    assert float(found.measure("content_value")[:, 1, 2].min()) > 1e-2
    others = found.measure("content_pattern")[:, 1, [0, 1, 3, 4]]
    assert float(others.min()) > 1e-3


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt2", "bert"))]
)
def test_pairs_have_one_word_at_one_place_in_texts_of_one_length(family, tiny):
    model = tiny(family)
    causal = adapters.architecture(model).causal
    pairs = sense_pairs(model, 43, _generator())
    assert len(pairs) == 43 and len({pair.group for pair in pairs}) > 20
    items, used = list(load_senses()), []
    for pair in pairs:
        a, b = (encode(model, text) for text in pair.texts)
        assert len(a.ids) == len(b.ids) and a.ids[pair.position] == b.ids[pair.position]
        # A sentence cut short may be the beginning of several.
        known = [[i for i in items if i.sentence.startswith(text)] for text in pair.texts]
        mine = [[i for i in found if i.word == pair.group] for found in known]
        assert any(one.sense != other.sense for one in mine[0] for other in mine[1])
        contexts = {i.context for found in mine for i in found if len(found) == 1}
        assert not causal or contexts <= {"before", "both"}
        used += [found[0].sentence for found in mine if len(found) == 1]
    assert len(used) == len(set(used)) > len(pairs)
    assert sense_pairs(model, 43, _generator()) == pairs
    assert sense_pairs(model, 43, _generator(1)) != pairs


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_prose_has_the_length_asked_for(family, tiny):
    model = tiny(family)
    texts = prose_of_length(model, 31, 5, _generator())
    assert len(set(texts)) == 5
    assert all(len(encode(model, text).ids) == 31 for text in texts)
    with pytest.raises(InputError, match="10000 windows"):
        prose_of_length(model, 31, 10_000, _generator())


@pytest.mark.slow
def test_bundled_pairs_with_their_control(tiny, tmp_path):
    model = tiny("qwen2")
    found = double_dissociation(model, n_pairs=30, layers=1, seed=3)
    assert found.control is not None and found.control.shape == found.values.shape
    assert not torch.equal(found.control, found.values)
    assert len(found.texts) == len(found.groups) == len(found.positions) == 30
    texts, at, word = found.texts[0], found.positions[0], found.groups[0]
    ids = [encode(model, text).ids[at] for text in texts]
    assert ids[0] == ids[1] and any(word in text for text in texts)
    mean, low, high = found.interval("content")
    assert ((low <= mean) & (mean <= high)).all() and (low < high).any()
    # Groups are what is averaged: each word counts once.
    each = found.measure("content")
    groups = list(dict.fromkeys(found.groups))
    rows = [each[[g == name for g in found.groups]].mean(dim=0) for name in groups]
    torch.testing.assert_close(mean, torch.stack(rows).mean(dim=0))
    summary = found.summary()
    assert summary["pairs"].tolist() == ["matched"] * 3 + ["control"] * 3
    assert summary["contrast"].tolist() == list(CONTRASTS) * 2
    row = summary.iloc[0]
    assert row["mean"] == pytest.approx(float(mean.mean())) and row["n_groups"] == len(groups)
    assert row["above"] == int((low > 0).sum()) and row["positive"] == int((mean > 0).sum())
    assert row["low"] <= row["mean"] <= row["high"]
    frame = found.to_frame()
    assert len(frame) == 6 and frame["layer"].tolist() == [1] * 6
    assert frame["content"].tolist() == mean.flatten().tolist()
    difference = frame["content_value"] - frame["content_pattern"]
    assert difference.tolist() == pytest.approx(frame["content"].tolist())
    control = found.interval("routing", control=True)[0]
    assert frame["control_routing"].tolist() == control.flatten().tolist()
    loaded = Result.load(found.save(tmp_path / "dissociation"))
    assert isinstance(loaded, DissociationResult) and torch.equal(loaded.values, found.values)
    drawn = figure(found)
    assert drawn.data[0].zmin == -drawn.data[0].zmax and drawn.data[0].z[2][0] == mean[0, 2]
    assert f"in {row['above']} of 6 heads" in drawn.layout.title.text
    with pytest.raises(InputError, match="content_value"):
        found.measure("contents")
    again = double_dissociation(model, n_pairs=30, layers=1, seed=3)
    assert torch.equal(again.values, found.values) and torch.equal(again.control, found.control)


def test_pairs_of_ones_own(tiny):
    model = tiny("llama")
    found = double_dissociation(model, [PAIRS[0]] * 2, destination="by", control=False)
    assert found.positions == (find_word(model, PAIRS[0][0], "by").tokens[-1],) * 2
    assert found.groups == ("0", "1")
    with pytest.raises(InputError, match="no control"):
        found.measure("content", control=True)
    with pytest.raises(InputError, match="same number of tokens"):
        double_dissociation(model, [PAIRS[0], ("The bank.", "The bank is closed.")])
    with pytest.raises(InputError, match="one position in both texts of pair 1"):
        double_dissociation(
            model,
            [PAIRS[0], ("The river by the bank.", "The bank by the river.")],
            destination="river",
        )
    with pytest.raises(WordError, match="sea"):
        double_dissociation(model, PAIRS, destination="sea")
    with pytest.raises(InputError, match="at least two"):
        double_dissociation(model, PAIRS[:1])
    for bad in ({"layers": -1}, {"layers": 3}, {"n_pairs": 0}):
        with pytest.raises(InputError):
            double_dissociation(model, **bad)
    broken = tiny_model("llama")
    with torch.no_grad():
        broken.blocks[1].attn.v.original_component.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match="NaN"):
        double_dissociation(broken, PAIRS)


@pytest.mark.slow
@pytest.mark.real_model
def test_real_models(smollm2, minilm):
    """In most heads values move the destination more, and patterns where its output comes from."""
    for model in (smollm2, minilm):
        found = double_dissociation(model, n_pairs=43, layers=[1, 5], control=False, progress=False)
        summary = found.summary().set_index("contrast")
        assert summary.loc["content", "low"] > 0.05 and summary.loc["routing", "low"] > 0.05
        assert summary.loc["routing", "above"] == summary.loc["routing", "heads"]
