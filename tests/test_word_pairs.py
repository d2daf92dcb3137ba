"""Scores between two words, and how alike one word's vectors are, against brute force."""

import pytest
import torch

from wvprobe.activations import capture
from wvprobe.errors import InputError, UnsupportedError, WordError
from wvprobe.word_pairs import pair_cosine, pair_scores
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


def test_cosine_and_its_baseline_equal_brute_force(tiny):
    model = tiny("llama")
    found = pair_cosine(model, *TEXTS, "bank")
    stream = capture(model, TEXTS, "stream")
    at = [find_word(model, text, "bank").tokens for text in TEXTS]
    cosine = torch.nn.functional.cosine_similarity
    for layer in (0, 3):
        a, b = (stream["stream"][i, :, layer].double() for i in (0, 1))
        assert float(found.cosine[layer]) == pytest.approx(
            float(cosine(a[at[0][-1]], b[at[1][-1]], dim=0))
        )
        others = [
            float(cosine(a[i], b[j], dim=0))
            for i in range(1, len(stream.tokens[0]))
            for j in range(1, len(stream.tokens[1]))
            if i not in at[0] and j not in at[1] and stream.tokens[0][i] != stream.tokens[1][j]
        ]
        assert found.n_baseline == len(others)
        assert float(found.baseline[layer]) == pytest.approx(sum(others) / len(others))
        assert float(found.low[layer]) <= sorted(others)[len(others) // 10]


def test_the_same_text_twice_gives_one(tiny):
    found = pair_cosine(tiny("gpt2"), TEXTS[0], TEXTS[0], "bank")
    torch.testing.assert_close(found.cosine, torch.ones(4, dtype=torch.float64))


def test_wrong_inputs(tiny):
    with pytest.raises(WordError, match="sea"):
        pair_scores(tiny("gpt2"), TEXTS, "bank", "sea")
    with pytest.raises(UnsupportedError, match="latent"):
        pair_scores(tiny("deepseek_v3"), TEXTS, "bank", "river")
    with pytest.raises(InputError, match="Use longer texts"):
        pair_cosine(tiny("qwen2"), "bank", "bank", "bank")


@pytest.mark.real_model
def test_published_distances_of_the_two_banks(smollm2):
    """0 at the embedding and 0.31 at stream 8, measured with the bare transformers model."""
    texts = ("A power bank dropped into the river.", TEXTS[1])
    distance = 1 - pair_cosine(smollm2, *texts, "bank").cosine
    assert abs(float(distance[0])) < 1e-6
    assert float(distance[8]) == pytest.approx(0.31, abs=0.005)
