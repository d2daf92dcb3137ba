"""Scores between two words against whole captured maps."""

import pytest
import torch

from wvprobe.activations import capture
from wvprobe.errors import WordError
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


def test_wrong_inputs(tiny):
    with pytest.raises(WordError, match="sea"):
        pair_scores(tiny("gpt2"), TEXTS, "bank", "sea")
