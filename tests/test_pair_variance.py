"""Which pairs recur, and shares of score variance on models whose answer is known."""

from itertools import product

import pandas
import pytest
import torch

import wvprobe
from wvprobe._pair_cells import recurring, visible_pairs
from wvprobe._types import Result
from wvprobe.activations import capture
from wvprobe.datasets import load_prose
from wvprobe.errors import InputError
from wvprobe.pair_variance import SHARES, VarianceResult, _limited, score_variance
from wvprobe.plotting import figure
from wvprobe.testing import FAMILIES, induction_model, tiny_model
from wvprobe.words import encode

NOUNS = ("bank", "river", "boat", "dog", "old man", "sea")
# Words in many orders at many places: tokens recur at an offset, in other contexts.
TEXTS = [
    f"{start}the {a} by the {b} is {end}"
    for (a, b), (start, end) in zip(
        [(a, b) for a, b in product(NOUNS, NOUNS) if a != b],
        3
        * list(
            product(("", "So ", "Now and then ", "Yes, "), ("old.", "close to the sea.", "ours."))
        ),
        strict=False,
    )
]
FUNCTION_OF_OFFSET = [f for f in FAMILIES if f not in ("gpt2", "opt", "bert")]
GAUGES = pytest.mark.parametrize("gauge", [True, False], ids=["gauge", "raw"])


def pairs_in(model, texts, **options):
    encodings = [encode(model, text) for text in texts]
    special = model.tokenizer.all_special_ids
    return encodings, visible_pairs(
        encodings, special, **{"causal": True, "window": None, **options}
    )


@GAUGES
@pytest.mark.parametrize("family", FUNCTION_OF_OFFSET)
def test_both_tokens_and_their_offset_fix_layer_0(family, gauge, tiny):
    """Rotary positions, ALiBi: no context at layer 0; later layers have some."""
    found = score_variance(tiny(family), TEXTS, gauge=gauge, progress=False)
    context = SHARES.index("context")
    assert float(found.held_out[context, 0].abs().max()) < 1e-6
    assert float(found.corrected[context, 0].abs().max()) < 1e-6
    assert float(found.corrected[context, 1:].max()) > 1e-2
    for shares in (found.held_out, found.corrected):
        torch.testing.assert_close(shares[:3].sum(0), torch.ones_like(shares[0]))
    assert float(found.shuffled.abs().max()) < 0.2


@pytest.mark.parametrize("family", ["gpt2", "opt", "bert"])
def test_learned_positions_leave_a_rest_at_layer_0(family, tiny):
    found = score_variance(tiny(family), TEXTS, progress=False)
    assert float(found.corrected_low[SHARES.index("context"), 0].min()) > 1e-3


def test_without_positions_the_pair_alone_fixes_layer_0():
    model = tiny_model("gpt2")
    model.pos_embed.original_component.weight.data.zero_()
    found = score_variance(model, TEXTS, progress=False)
    pair = found.held_out[SHARES.index("pair"), 0]
    torch.testing.assert_close(pair, torch.ones_like(pair), atol=1e-6, rtol=0)
    assert set(found.kind[0]) == {"lexical"}


def test_induction_model_gives_the_known_kinds():
    """L0H0 looks at the token before, whatever it is; L1H1 at what followed the token earlier."""
    texts = [t for paragraph in load_prose("calibration") for t in paragraph.split(". ")]
    found = score_variance(induction_model(), [t for t in texts if len(t) < 60][:60])
    assert found.kind[0][0] == "positional" and found.kind[1][1] == "contextual"
    offset_alone = found.corrected[SHARES.index("offset_alone")]
    assert float(offset_alone[0, 0]) > 0.9 and float(offset_alone[1, 1]) < 0.1
    assert found.heads_above[0] >= 0.5


def test_pairs_are_those_that_a_look_at_each_text_finds(tiny):
    model = tiny("llama")
    encodings, pairs = pairs_in(model, TEXTS[:5], window=4)
    assert all(encoding.special[0] for encoding in encodings)
    expected = [
        (text, i, j)
        for text, encoding in enumerate(encodings)
        for i in range(1, len(encoding.ids))
        for j in range(max(1, i - 3), i)
    ]
    places = (getattr(pairs, name).tolist() for name in ("text", "query", "key"))
    assert list(zip(*places, strict=True)) == expected
    cells: dict[tuple[int, ...], set[int]] = {}
    for number, (text, i, j) in enumerate(expected):
        ids = encodings[text].ids
        cells.setdefault((ids[i], ids[j], i - j), set()).add(int(pairs.cell[number]))
    assert all(len(numbers) == 1 for numbers in cells.values())
    assert len(set().union(*cells.values())) == len(cells)
    both_ways = pairs_in(tiny("bert"), TEXTS[:2], causal=False)[1]
    size = len(encode(tiny("bert"), TEXTS[0]).ids) - 2
    assert int((both_ways.text == 0).sum()) == size * (size - 1)


@pytest.mark.parametrize("in_row", [1, 2])
def test_recurring_pairs_are_what_is_left_when_nothing_more_goes(in_row, tiny):
    _, pairs = pairs_in(tiny("llama"), TEXTS[:6])
    text, cell, row = pairs.text.tolist(), pairs.cell.tolist(), pairs.row.tolist()
    kept = set(range(len(pairs)))
    while True:
        gone = set()
        for number in kept:
            texts = {text[n] for n in kept if cell[n] == cell[number]}
            if len(texts) < 2 or sum(row[n] == row[number] for n in kept) < in_row:
                gone.add(number)
        if not gone:
            break
        kept -= gone
    assert set(recurring(pairs, in_row).nonzero()[:, 0].tolist()) == kept
    assert 0 < len(kept) < len(pairs)


def test_words_are_whole_and_read_at_their_last_token(tiny):
    model = tiny("llama")
    texts = ["An old man by the bank.", "The embankment and the old men.", "A bank, a man, a bank."]
    encodings, pairs = pairs_in(model, texts, query=["bank"], key=["old man", "man"])
    assert set(pairs.text.tolist()) == {0, 2}
    ends = {(0, wvprobe.find_word(model, texts[0], "bank").tokens[-1])}
    ends |= {
        (2, wvprobe.find_word(model, texts[2], "bank", occurrence=n).tokens[-1]) for n in (0, 1)
    }
    assert set(zip(pairs.text.tolist(), pairs.query.tolist(), strict=True)) == ends
    asked = pairs.evaluated
    man = [wvprobe.find_word(model, text, "man").tokens[-1] for text in (texts[0], texts[2])]
    assert set(pairs.key[asked & (pairs.text == 0)].tolist()) == {man[0]}
    assert set(pairs.key[asked & (pairs.text == 2)].tolist()) == {man[1]}
    # The last token of "old man" is another key than that of the "man" in another text.
    plain, whole = (pairs_in(model, texts, key=key)[1] for key in (None, ["old man"]))
    assert len(whole) == len(plain) and len(whole.pair.unique()) > len(plain.pair.unique())


def test_rows_of_tokens_that_never_meet_the_key_are_left_out(tiny):
    _, pairs = pairs_in(tiny("llama"), TEXTS, key=["river"])
    kept = recurring(pairs, 2)
    meeting = set(pairs.token[kept & pairs.evaluated].tolist())
    assert set(pairs.token[kept].tolist()) == meeting
    assert bool((kept & ~pairs.evaluated).any())


@GAUGES
def test_key_and_query_choose_what_is_measured(gauge, tiny):
    model = tiny("llama")
    every = score_variance(model, TEXTS, gauge=gauge)
    some = score_variance(model, TEXTS, query=["is", "the"], key="the", gauge=gauge)
    assert 30 <= some.counts["pairs predicted"] < every.counts["pairs predicted"] / 5
    assert float(some.held_out[SHARES.index("context"), 0].abs().max()) < 1e-6
    assert some.provenance.settings["key"] == ["the"]
    with pytest.raises(InputError, match=r"at least 30 pairs.*0 pairs visible"):
        score_variance(model, TEXTS, query="camel", gauge=gauge)
    with pytest.raises(InputError, match="pairs recurring"):
        score_variance(model, TEXTS[:3], gauge=gauge)
    with pytest.raises(InputError, match="`key` must be a word"):
        score_variance(model, TEXTS, key=[])


def test_equal_texts_count_once_and_cannot_leak(tiny):
    model = tiny("qwen3")
    once = score_variance(model, TEXTS, progress=False)
    twice = score_variance(model, [*TEXTS, *TEXTS[::-1]], progress=False)
    assert twice.counts == {**once.counts, "texts given": 2 * len(TEXTS)}
    torch.testing.assert_close(once.held_out, twice.held_out)


def test_context_is_the_variance_within_cells(tiny):
    """Held against analysis of variance on captured scores, which knows no folds."""
    model = tiny("llama")
    found = score_variance(model, TEXTS, folds=2, gauge=False, progress=False)
    encodings, pairs = pairs_in(model, TEXTS)
    seen = capture(model, TEXTS, "scores", layers=2)["scores"][:, 0]
    values: dict[int, list[torch.Tensor]] = {}
    for text, i, j, cell in zip(pairs.text, pairs.query, pairs.key, pairs.cell, strict=True):
        values.setdefault(int(cell), []).append(seen[text, :, i, j])
    stacks = [torch.stack(v).double() for v in values.values() if len(v) > 1]
    within = sum((v - v.mean(dim=0)).square().sum(0) for v in stacks)
    degrees = sum(len(v) - 1 for v in stacks)
    whole = torch.cat(stacks)
    expected = within / degrees / whole.var(dim=0)
    context = found.corrected[SHARES.index("context"), 2]
    torch.testing.assert_close(context, expected, atol=0.12, rtol=0.15)


def test_fewer_pairs_by_leaving_texts_out(tiny):
    model = tiny("llama")
    whole = score_variance(model, TEXTS, progress=False)
    most = whole.counts["pairs recurring"] // 2
    less = score_variance(model, TEXTS, max_pairs=most, progress=False)
    assert 0 < less.counts["pairs recurring"] <= most
    assert less.counts["texts"] < whole.counts["texts"]
    _, pairs = pairs_in(model, TEXTS)
    assert len(_limited(pairs, 2, len(pairs), 0)) == len(pairs)
    for name, value in (("max_pairs", 0), ("folds", 1)):
        with pytest.raises(InputError, match=name):
            score_variance(model, TEXTS, **{name: value})


def test_texts_are_read_as_far_as_their_pairs_can_be_listed(tiny, monkeypatch):
    model = tiny("llama")
    size = max(len(encode(model, text).ids) for text in TEXTS)
    monkeypatch.setattr("wvprobe.pair_variance._MOST_VISIBLE", 10 * size**2)
    counts = score_variance(model, TEXTS, progress=False).counts
    assert 10 <= counts["texts read"] < counts["texts given"] == len(TEXTS)
    monkeypatch.setattr("wvprobe.pair_variance._MOST_VISIBLE", 9)
    with pytest.raises(InputError, match="a text of .* tokens"):
        score_variance(model, TEXTS)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_precisions(dtype, tiny):
    found = score_variance(tiny_model("llama", dtype=dtype), TEXTS, progress=False)
    single = score_variance(tiny("llama"), TEXTS, progress=False)
    at = SHARES.index("context")
    assert float(found.corrected[at, 0].abs().max()) < (1e-6 if dtype == "float64" else 2e-4)
    tolerance = 1e-4 if dtype == "float64" else 0.05
    torch.testing.assert_close(found.corrected, single.corrected, atol=tolerance, rtol=0)


def test_special_ids_and_sinks_are_no_pairs(tiny):
    model = tiny_model("llama")
    plain = score_variance(model, TEXTS, progress=False)
    assert plain.counts["pairs without sinks"] == plain.counts["pairs recurring"]
    number = encode(model, " sea").ids[-1]
    model.embed.original_component.weight.data[number] *= 60
    found = score_variance(model, TEXTS, progress=False)
    assert found.counts["pairs without sinks"] < found.counts["pairs recurring"]
    assert float(found.held_out[SHARES.index("context"), 0].abs().max()) < 1e-6


def test_heads_without_variance_have_no_shares():
    model = tiny_model("llama")
    attention = model.blocks[1].attn
    attention.q.original_component.weight.data[: 14 * 2] = 0.0  # its first two heads
    found = score_variance(model, TEXTS, progress=False)
    assert bool(found.held_out[:, 1, :2].isnan().all()) and not bool(
        found.held_out[:, 0].isnan().any()
    )
    assert found.kind[1][:2] == ("constant", "constant") and "constant" not in found.kind[1][2:]
    assert 0.0 <= found.heads_above[0] <= 1.0
    model.blocks[2].attn.k.original_component.weight.data[0] = float("nan")
    with pytest.raises(InputError, match="NaN or infinity in k of layer 2"):
        score_variance(model, TEXTS, progress=False)


def test_a_single_layer_has_no_heads_above(tiny):
    found = score_variance(tiny("llama", num_hidden_layers=1), TEXTS, progress=False)
    assert all(value != value for value in found.heads_above)
    assert "Context decides" not in figure(found).layout.title.text


def test_frame_and_figure_and_file(tiny, tmp_path):
    found = score_variance(tiny("llama"), TEXTS, progress=False)
    frame = found.to_frame()
    assert list(frame.columns[:7]) == ["layer", "head", "pair", "offset", "context", "low", "high"]
    assert {"offset_alone", "kind", "n", "n_cells", "context_corrected_low"} <= set(frame.columns)
    row = frame.iloc[6 + 2]
    assert (row["layer"], row["head"]) == (1, 2)
    assert row["context"] == float(found.held_out[2, 1, 2])
    assert row["low"] == float(found.low[2, 1, 2]) <= row["context"] <= row["high"]
    assert row["offset_alone_corrected_high"] == float(found.corrected_high[3, 1, 2])
    assert row["kind"] == found.kind[1][2] and row["n"] == found.counts["pairs predicted"]
    drawn = figure(found)
    maps = [trace for trace in drawn.data if trace.type == "heatmap"]
    rings = {trace.name: trace for trace in drawn.data if trace.type == "scatter"}
    assert [trace.z[2][1] for trace in maps] == found.corrected[:3, 1, 2].tolist()
    assert all((trace.zmin, trace.zmax) == (0, 1) for trace in maps)
    for kind, trace in rings.items():
        ringed = {(row.layer, row.head) for row in frame[frame.kind == kind].itertuples()}
        assert set(zip(trace.x, trace.y, strict=True)) == ringed
    median = frame[frame.layer > 0]["context_corrected"].median()
    assert f"{median:.0%}" in drawn.layout.title.text
    found.save(tmp_path)
    loaded = Result.load(tmp_path)
    assert isinstance(loaded, VarianceResult)
    pandas.testing.assert_frame_equal(loaded.to_frame(), frame)
    assert set(found.AXES) == {n for n, v in vars(found).items() if isinstance(v, torch.Tensor)}


@pytest.mark.real_model
@pytest.mark.slow
def test_context_decides_in_most_heads_of_a_real_model(smollm2):
    """Claim 2.4 on some sentences of the bundled prose."""
    found = score_variance(smollm2, load_prose("held-out")[:30], progress=False)
    assert float(found.corrected[SHARES.index("context"), 0].abs().max()) < 1e-6
    share, low, _ = found.heads_above
    assert share > 0.9 and low > 0.8


@pytest.mark.slow
@pytest.mark.real_model
def test_two_thousand_sentences(smollm2, minilm, shared_data):
    """Claim 2.4 on the English Web Treebank, for a decoder and an encoder."""
    lines = [
        line.removeprefix("# text = ").strip()
        for path in sorted((shared_data / "ud_english_ewt").glob("*.conllu"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("# text = ")
    ]
    context = SHARES.index("context")
    for model, least in ((smollm2, 0.9), (minilm, 0.75)):
        found = score_variance(model, lines[:2000], progress=False)
        assert found.heads_above[1] > least
        assert float(found.shuffled.abs().max()) < 0.05
        assert (float(found.corrected[context, 0].abs().max()) < 1e-6) == (model is smollm2)
