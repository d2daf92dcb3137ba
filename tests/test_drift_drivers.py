"""Drivers of drift: exact sums, hand-made answers, and exchanges against single forwards."""

import pytest
import torch

import wvprobe
from wvprobe import adapters
from wvprobe._types import HeadId, Result
from wvprobe.activations import capture
from wvprobe.components import stream_components
from wvprobe.contextual_drift._driver_looks import KINDS
from wvprobe.contextual_drift._driver_pairs import (
    contributions,
    directions,
    drawn_pairs,
    occurrences,
)
from wvprobe.contextual_drift._driver_swaps import exchange_heads
from wvprobe.contextual_drift._vectors import Reader
from wvprobe.datasets import SenseDataset, SenseItem, load_senses
from wvprobe.errors import InputError
from wvprobe.plotting import figure
from wvprobe.testing import FAMILIES, induction_model, tiny_model

BUNDLED = load_senses()
FEW = SenseDataset("few", tuple(i for w in ("bank", "bat") for i in BUNDLED.only(w).items[::5]))


def told_before(words=("bank", "bat", "seal", "spring"), fillers=("dry", "cold", "grey", "long")):
    """Senses told by one word at a fixed place before the target, with fillers between."""
    cues = (("river", "money"), ("cave", "game"), ("sea", "letter"), ("water", "season"))
    items = []
    for word, (one, other) in zip(words, cues, strict=False):
        for sense in (one, other):
            for filler in fillers:
                sentence = f"They saw the {filler} {sense} {word} there."
                start = sentence.index(f" {word} ") + 1
                end = start + len(word)
                items.append(SenseItem(word, sense, "", "noun", sentence, start, end, "before"))
    return SenseDataset("told before", tuple(items))


@pytest.fixture(scope="module")
def found():
    return wvprobe.drift_drivers(tiny_model("llama"), FEW, n_pairs=3, n_heads=4, n_checked=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_contributions_add_up_and_exchanges_are_single_forwards(family, tiny):
    """Batches, padding and rows change nothing: one text at a time gives the same."""
    model = tiny(family)
    arch = adapters.architecture(model)
    reader = Reader.of(model, "target", None, None)
    occ = occurrences(reader, FEW, 2)
    pairs = drawn_pairs(occ, 1, torch.Generator().manual_seed(1))
    u = directions(occ, pairs)
    read = contributions(reader, occ, pairs, u, 2)
    assert read.error < 1e-5
    assert len(read.names) == len(set(read.names))
    difference = (occ.x[[p.b for p in pairs]] - occ.x[[p.a for p in pairs]]) * u
    scale = float(occ.x.norm(dim=-1).mean())
    torch.testing.assert_close(
        read.different.sum(dim=-1), difference.sum(dim=-1), rtol=0, atol=1e-5 * scale
    )
    head = HeadId(1, arch.n_heads - 1)
    moved = exchange_heads(reader, occ, pairs, u, [HeadId(0, 1), head], 2)
    pair = pairs[1]
    ways = {"different": (pair.b, pair.a), "same": (pair.same_a, pair.same_b)}
    for kind, donors in ways.items():
        expected = 0.0
        for into, donor, sign in zip((pair.a, pair.b), donors, (0.5, -0.5), strict=True):
            given = capture(model, occ.items[donor].sentence, "z", layers=1)["z"][0, :, 0]

            def change(z, into=into, donor=donor, given=given):
                z = z.clone()
                for here, there in zip(occ.at[into], occ.at[donor], strict=True):
                    z[0, here, head.head] = given[there, head.head]
                return z

            text = occ.items[into].sentence
            with adapters.changing(model, arch, {("z", 1): change}):
                x = capture(model, text, "stream", layers=2)["stream"][0, list(occ.at[into]), 0]
            expected += sign * float((x.double().mean(dim=0) - occ.x[into]) @ u[1])
        assert float(getattr(moved, kind)[1, 1]) == pytest.approx(expected, abs=1e-5 * scale)


@pytest.mark.parametrize("family", ["gpt2", "bert", "gemma2", "phi"])
def test_contributions_by_brute_force(family, tiny):
    """Directions without the pair's sentences, components of whole texts, one pair at a time."""
    model = tiny(family)
    reader = Reader.of(model, "target", None, None)
    occ = occurrences(reader, FEW, 3)
    pairs = drawn_pairs(occ, 1, torch.Generator().manual_seed(2))
    read = contributions(reader, occ, pairs, directions(occ, pairs), 3)
    whole = {
        n: stream_components(model, occ.items[n].sentence, layer=3)
        for pair in pairs
        for n in (pair.a, pair.b, *pair.control)
    }
    for number, pair in enumerate(pairs):
        kinds = [occ.items[n].sense for n in pair[1:5]]
        assert kinds[0] == kinds[2] != kinds[1] == kinds[3] and len(set(pair[1:5])) == 4
        assert occ.items[pair.control[0]].sense == occ.items[pair.control[1]].sense
        assert set(pair.control) in ({pair.a, pair.same_a}, {pair.b, pair.same_b})
        centroids = []
        for sense in kinds[:2]:
            rest = [
                occ.x[n]
                for n, item in enumerate(occ.items)
                if (item.word, item.sense) == (occ.items[pair.a].word, sense)
                and n not in (pair.a, pair.b, pair.same_a, pair.same_b)
            ]
            centroids.append(torch.stack(rest).mean(dim=0))
        direction = centroids[1] - centroids[0]
        direction = direction / direction.norm()
        for values, ends in ((read.different, (pair.a, pair.b)), (read.same, pair.control)):
            expected = dict.fromkeys(read.names, 0.0)
            for n, sign in zip(ends, (-1, 1), strict=True):
                parts = whole[n].vectors[:, list(occ.at[n])].mean(dim=1) @ direction
                for name, value in zip(whole[n].names, parts.tolist(), strict=True):
                    expected[name] += sign * value
            got = dict(zip(read.names, values[number].tolist(), strict=True))
            assert got == pytest.approx(expected, abs=1e-4)


def test_one_head_alone_carries_the_sense():
    """All other heads and the MLPs write nothing: the head has all, and its exchange undoes it."""
    model, head = tiny_model("llama"), HeadId(1, 4)
    width = adapters.architecture(model).d_head_v
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            block.mlp.original_component.down_proj.weight.zero_()
            weight = block.attn.o.original_component.weight
            kept = weight[:, 4 * width : 5 * width].clone()
            weight.zero_()
            if layer == 1:
                weight[:, 4 * width : 5 * width] = kept
    got = wvprobe.drift_drivers(model, told_before(), layer=3, n_pairs=2, n_heads=3, n_checked=2)
    assert got.heads[0] == head and bool((got.separation > 0).all())
    frame = got.to_frame().set_index("component")
    assert frame["driver"].sum() == 1 and frame.loc["L1H4", "driver"]
    assert frame.loc["L1H4", "share"] == pytest.approx(1, abs=1e-5)
    rest = frame.drop("L1H4")[["contribution", "control"]]
    assert float(rest.abs().max().max()) < 1e-6
    # What the exchange does is what was predicted: nothing comes after.
    torch.testing.assert_close(got.measured, got.predicted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.measured[:, 0], got.separation, rtol=1e-4, atol=1e-5)
    assert float(got.measured[:, 1:].abs().max()) < 1e-5
    assert bool((got.measured_same[:, 0].abs() < got.measured[:, 0]).all())
    agreement = got.agreement()
    assert agreement["correlation"].tolist() == pytest.approx([1, 1], abs=1e-4)
    assert agreement["slope"].tolist() == pytest.approx([1, 1], abs=1e-4)
    drawn = figure(got)
    assert "L1H4" in drawn.layout.title.text
    bars = drawn.data[0]
    assert list(bars.y)[list(bars.x).index("L1H4")] == pytest.approx(
        float(frame.loc["L1H4", "contribution"])
    )


def test_the_head_that_looks_one_back_is_seen_to():
    """L0H0 of the hand-made model looks at the token before, here the word that tells the sense."""
    model = induction_model()
    got = wvprobe.drift_drivers(model, told_before(), layer=1, n_pairs=2, n_heads=99)
    place, word = got.heads.index(HeadId(0, 0)), got.words.index("bank")  # one token
    kinds = dict(zip(KINDS, got.attention[word, place].tolist(), strict=True))
    assert kinds["content_before"] > 0.99
    even = dict(zip(KINDS, got.attention_uniform[word, place].tolist(), strict=True))
    assert kinds["sink"] < 0.01 < even["sink"] < even["content_before"] < 0.7
    (source,) = (s for s in got.sources[place] if s.target == "bank")
    assert source.source in ("river", "money") and source.attention > 0.99
    # Other words are several tokens, of which the last looks at the one before.
    frame = got.looks_frame().set_index(["layer", "head", "kind"])["attention"]
    assert frame[0, 0, "content_before"] + frame[0, 0, "self"] > 0.99


def test_kinds_of_keys_by_hand(tiny):
    """A copy, function words, content and a period, on both sides of an encoder's target."""
    text = "The bank of a river is a bank where boats land."
    start = text.rindex("bank")
    items = [SenseItem("bank", "a", "", "noun", text, start, start + 4)] + [
        SenseItem("bank", sense, "", "noun", f"{cue} bank {n} stays.", 6, 10)
        for sense, cue in (("a", "River"), ("b", "Money"))
        for n in ("one", "two", "three", "four")[sense == "a" :]
    ]
    got = wvprobe.drift_drivers(tiny("bert"), SenseDataset("kinds", tuple(items)), n_pairs=8)
    assert got.words == ("bank",) and got.attention.shape[0] == 1
    for values in (got.attention, got.attention_uniform):
        torch.testing.assert_close(values.sum(dim=-1), torch.ones(1, 10, dtype=torch.float64))
    kinds = dict(zip(KINDS, got.attention_uniform[0, 0].tolist(), strict=True))
    assert all(kinds[kind] > 0 for kind in KINDS)
    assert kinds["content_after"] > kinds["copy"]


def test_frame_intervals_and_saving(found, tmp_path):
    frame = found.to_frame()
    assert list(frame)[:10] == (
        "component kind layer head contribution low high control control_low control_high".split()
    )
    assert frame["contribution"].sum() == pytest.approx(float(found.separation.mean()), rel=1e-5)
    assert frame["share"].sum() == pytest.approx(1, rel=1e-5)
    assert frame["predicted"].notna().sum() == 4 and bool((frame["low"] <= frame["high"]).all())
    strongest = frame[frame["kind"] == "head"].sort_values("contribution", ascending=False)[:4]
    assert list(map(list, found.heads)) == strongest[["layer", "head"]].values.tolist()
    again = Result.load(found.save(tmp_path))
    assert again.to_frame().equals(frame) and again.sources == found.sources
    assert found.provenance.settings["layer"] == 2 == found.layer
    assert float((found.separation / found.distance).abs().max()) <= 1


def test_agreement_by_hand(found):
    """Heads' means, and heads in each word: Pearson's, the slope through 0, Spearman's."""
    frame = found.agreement().set_index("unit")
    ends = [f"{name}{end}" for name in ("correlation", "slope") for end in ("", "_low", "_high")]
    assert list(frame) == ["n", *ends, "rank_correlation"]
    cells = {
        "heads": (found.predicted.mean(dim=0), found.measured.mean(dim=0)),
        "heads and words": (found.predicted.flatten(), found.measured.flatten()),
    }
    for unit, (predicted, measured) in cells.items():
        row = frame.loc[unit]
        assert row["n"] == len(predicted)
        pearson = torch.corrcoef(torch.stack([predicted, measured]))[0, 1]
        assert row["correlation"] == pytest.approx(float(pearson))
        slope = (predicted * measured).sum() / predicted.square().sum()
        assert row["slope"] == pytest.approx(float(slope))
        ranks = [x.argsort().argsort().double() for x in (predicted, measured)]
        spearman = torch.corrcoef(torch.stack(ranks))[0, 1]
        assert row["rank_correlation"] == pytest.approx(float(spearman))
        assert row["slope_low"] <= row["slope"] <= row["slope_high"]


def test_controls_are_of_either_sense_by_turns(tiny):
    reader = Reader.of(tiny("llama"), "target", None, None)
    occ = occurrences(reader, FEW, 2)
    pairs = drawn_pairs(occ, 6, torch.Generator().manual_seed(0))
    for word in range(len(occ.groups)):
        own = [pair for pair in pairs if pair.word == word]
        for number, pair in enumerate(own):
            ends = {pair.a, pair.same_a} if number % 2 == 0 else {pair.b, pair.same_b}
            assert set(pair.control) == ends
    # Which of the two comes first is drawn.
    assert {pair.control[0] in (pair.a, pair.b) for pair in pairs} == {True, False}


def test_one_word_has_no_interval_and_no_driver(tiny):
    got = wvprobe.drift_drivers(tiny("llama"), FEW.only("bank"), n_pairs=2, n_heads=2)
    frame = got.to_frame()
    assert bool(frame["low"].isna().all()) and not frame["driver"].any()
    assert bool(got.agreement()["correlation_low"].isna().all())


def test_all_pairs_checked_are_all_pairs(tiny):
    got = wvprobe.drift_drivers(tiny("qwen2"), FEW, n_pairs=2, n_heads=2, n_checked=2)
    columns = [list(map(str, got.components)).index(str(head)) for head in got.heads]
    torch.testing.assert_close(got.predicted, got.contribution[:, columns])


def test_a_decoder_s_first_word_sees_nothing_and_is_left_out(tiny):
    items = told_before(("bank",)).items
    first = [
        SenseItem("bank", sense, "", "noun", f"bank {n} by the {sense}.", 0, 4, "after")
        for sense in ("river", "money")
        for n in ("one", "two")
    ]
    data = SenseDataset("first", (*items, *first))
    for family, n in (("llama", len(first)), ("bert", 0)):
        got = wvprobe.drift_drivers(tiny(family), data, n_pairs=2, n_heads=2)
        assert len(got.dropped) == n
        assert {sentence for _, sentence in got.dropped} <= {item.sentence for item in first}


def test_wrong_inputs(tiny):
    model = tiny("llama")
    with pytest.raises(InputError, match=r"`layer` must be in 1\.\.3. Got 0"):
        wvprobe.drift_drivers(model, FEW, layer=0)
    with pytest.raises(InputError, match="`n_pairs` must be an int of at least 1"):
        wvprobe.drift_drivers(model, FEW, n_pairs=0)
    one = SenseDataset("one", tuple(i for i in FEW if i.sense == FEW.items[0].sense))
    with pytest.raises(InputError, match="two senses, each in three sentences"):
        wvprobe.drift_drivers(model, one)


@pytest.mark.slow
@pytest.mark.real_model
def test_real_models(smollm2, minilm):
    for model in (smollm2, minilm):
        got = wvprobe.drift_drivers(model, FEW, n_pairs=2, n_heads=2)
        assert got.error < 1e-5
