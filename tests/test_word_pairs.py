"""Scores between two words against whole captured maps."""

from dataclasses import replace

import pytest
import torch

from wvprobe._sinks import sink_keys
from wvprobe.activations import capture
from wvprobe.adapters import architecture, sliding_window
from wvprobe.errors import WordError
from wvprobe.testing import tiny_model
from wvprobe.word_pairs import pair_scores
from wvprobe.words import find_word

TEXTS = ("a power bank dropped into the river.", "The river bank is close to here.")


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_scores_are_those_of_the_pair(family, tiny):
    model = tiny(family)
    found = pair_scores(model, TEXTS, "bank", "river")
    seen = capture(model, TEXTS, ["scores", "pattern"])
    for item, text in enumerate(TEXTS):
        bank, river = (find_word(model, text, w).tokens[-1] for w in ("bank", "river"))
        assert torch.equal(found.scores[item, 0], seen["scores"][item, :, :, bank, river])
        assert torch.equal(found.scores[item, 1], seen["scores"][item, :, :, river, bank])
        assert torch.equal(found.attention[item, 1], seen["pattern"][item, :, :, river, bank])


def test_a_decoder_masks_what_lies_ahead_and_an_encoder_does_not(tiny):
    decoder = pair_scores(tiny("gpt2"), TEXTS, "bank", "river")
    assert decoder.masked.tolist() == [[True, False], [False, True]]
    assert not decoder.attention[decoder.masked].any()
    assert decoder.scores[decoder.masked].isfinite().all()
    assert decoder.attention[~decoder.masked].all()
    assert not pair_scores(tiny("bert"), TEXTS, "bank", "river").masked.any()
    frame = decoder.to_frame()
    assert len(frame) == 2 * 2 * 3 * 5
    row = frame[(frame["layer"] == 2) & (frame["head"] == 4)].iloc[1]
    assert row["score"] == float(decoder.scores[0, 1, 2, 4]) and row["direction"] == "river→bank"


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "bert", "bloom"])
def test_gauge_fixed_scores_by_brute_force(family, tiny):
    """What softmax ignores is gone: the mean over what each query sees, sinks left out."""
    model = tiny(family)
    found = pair_scores(model, TEXTS, "bank", "river")
    arch = architecture(model)
    for item, text in enumerate(TEXTS):
        seen = capture(model, text, ["scores"])
        special = seen.special[0]
        for direction, (query, key) in enumerate(
            (found.positions[item], found.positions[item][::-1])
        ):
            for layer in range(arch.n_layers):
                window = sliding_window(model, layer) or 99
                row = seen["scores"][0, layer, 1, query].double()
                kept = [
                    float(row[j])
                    for j in range(len(special))
                    if not special[j] and (j <= query or not arch.causal)
                    if abs(query - j) < window
                ]
                expected = float(row[key]) - sum(kept) / len(kept)
                got = float(found.gauge_fixed[item, direction, layer, 1])
                assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_constant_over_keys_changes_raw_scores_alone():
    """A bias on keys that all queries like equally: b_K along a query's own direction."""
    model = tiny_model("gpt2")
    before = pair_scores(model, TEXTS, "bank", "river")
    attention = model.blocks[0].attn
    with torch.no_grad():
        attention.k.original_component.bias += 3.0
    after = pair_scores(model, TEXTS, "bank", "river")
    raw = (after.scores - before.scores)[:, :, 0].abs().max()
    assert raw > 0.1
    torch.testing.assert_close(
        after.gauge_fixed[:, :, 0], before.gauge_fixed[:, :, 0], atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(after.attention, before.attention, atol=1e-6, rtol=1e-4)


def test_sinks_are_told_by_id_and_by_length():
    model = tiny_model("llama")
    seen = capture(model, TEXTS[0], ["resid_pre"])
    assert sink_keys(model, seen, 0).tolist() == [list(seen.special[0])] * 3
    grown = seen["resid_pre"].clone()
    grown[0, 3, 2] *= 1000  # one token at layer 2, wherever it stands
    longer = replace(seen, values={"resid_pre": grown})
    at = sink_keys(model, longer, 0) & ~torch.tensor(seen.special[0])
    assert at.nonzero().tolist() == [[2, 3]]


def test_wrong_inputs(tiny):
    with pytest.raises(WordError, match="sea"):
        pair_scores(tiny("gpt2"), TEXTS, "bank", "sea")
