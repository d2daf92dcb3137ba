"""Drift of a pair against brute force, known cases and an independent measurement."""

import pytest
import torch

from wvprobe import adapters
from wvprobe.activations import capture
from wvprobe.contextual_drift import drift_baseline, drift_pair, normalised_distance
from wvprobe.datasets import SenseDataset, load_senses
from wvprobe.errors import InputError, WordError
from wvprobe.testing import FAMILIES
from wvprobe.words import find_word

TEXTS = ("a power bank dropped into the river.", "The river bank is close to here.")


@pytest.fixture(scope="module")
def baseline():
    """One cheap baseline for tests that look at other things."""
    from wvprobe.testing import tiny_model

    few = SenseDataset("few", load_senses().items[::97])
    return drift_baseline(tiny_model("llama"), few)


@pytest.mark.parametrize("family", FAMILIES)
def test_contributions_sum_to_the_difference(family, baseline, tiny):
    result = drift_pair(tiny(family), *TEXTS, word="bank", baseline=baseline, layer=3)
    assert result.contributions.reconstruction_error < 1e-4
    assert float(result.contributions.shares.sum()) == pytest.approx(1.0, abs=1e-4)
    frame = result.contributions.to_frame()
    assert list(frame) == ["kind", "layer", "head", "share"]
    heads = adapters.architecture(tiny(family)).n_heads
    assert len(frame[frame["kind"] == "head"]) == 3 * heads
    assert frame["share"].abs().is_monotonic_decreasing


def test_frame_against_brute_force(tiny):
    model = tiny("llama")
    result = drift_pair(model, *TEXTS, word="bank")
    frame = result.to_frame()
    seen = capture(model, TEXTS, "stream", words="bank")["stream"].double()
    for layer in range(4):
        a, b = seen[:, layer]
        cosine = float(a @ b / a.norm() / b.norm())
        row = frame.loc[layer]
        assert row["cosine"] == pytest.approx(cosine)
        assert row["distance"] == pytest.approx(float(2 * (a - b).norm() / (a.norm() + b.norm())))
        assert row["cosine_adjusted"] == pytest.approx(cosine - row["baseline"])
    items = [i for i in load_senses().only("bank") if i.sense == "money"]
    texts = [i.sentence for i in items]
    vectors = capture(model, texts, "stream", words="bank")["stream"][:, 2].double()
    unit = vectors / vectors.norm(dim=-1, keepdim=True)
    at = [find_word(model, text, "bank").tokens[-1] for text in texts]
    shift = abs(result.positions[0][-1] - result.positions[1][-1])
    close = [[i < j and abs(at[i] - at[j]) <= shift for j in range(16)] for i in range(16)]
    pairs = (unit @ unit.T)[torch.tensor(close)]
    assert result.same_shift == shift and len(pairs) < result.n_same < 480  # 480 at any place
    assert frame.loc[2, "same_low"] <= pairs.max() and pairs.min() <= frame.loc[2, "same_high"]
    assert (frame["same_low"] <= frame["same_median"]).all()
    assert (frame["same_median"] <= frame["same_high"]).all()


def test_positions_and_lengths_are_reported(baseline, tiny):
    model = tiny("gpt2")
    result = drift_pair(model, *TEXTS, word="bank", baseline=baseline)
    assert result.positions == tuple(find_word(model, t, "bank").tokens for t in TEXTS)
    assert result.lengths == tuple(model.to_tokens(t).shape[1] for t in TEXTS)


def test_baseline_equals_brute_force_and_follows_the_seed(tiny):
    model = tiny("bert")
    few = SenseDataset("few", load_senses().items[:11])
    one, again, other = (drift_baseline(model, few, seed=s) for s in (0, 0, 1))
    assert torch.equal(one.cosine, again.cosine) and not torch.equal(one.cosine, other.cosine)
    assert one.n == 11
    frame = one.to_frame()
    assert list(frame) == ["layer", "cosine", "distance"] and len(frame) == 4
    assert frame["distance"].tolist() == one.distance.tolist()
    x = torch.randn(7, 13, dtype=torch.float64)
    from wvprobe.contextual_drift._pair import _mean_distance

    distance = _mean_distance(x)
    pairs = [(i, j) for i in range(7) for j in range(7) if i != j]
    expected = sum(float(normalised_distance(x[i], x[j])) for i, j in pairs) / 42
    assert distance == pytest.approx(expected)


@pytest.mark.slow
def test_a_word_that_the_set_lacks_is_held_against_all_words(baseline, tiny, monkeypatch):
    texts = ("The boat is closed.", "He keeps a boat on the river.")
    result = drift_pair(tiny("gpt2"), *texts, word="boat", baseline=baseline)
    assert result.same_words == "all words of the bundled set"
    senses = {(i.word, i.sense) for i in load_senses()}
    assert result.same_shift is not None and 20 <= result.n_same < 6 * len(senses)
    monkeypatch.setattr("wvprobe.contextual_drift._pair._LEAST_PAIRS", 10_000)
    result = drift_pair(tiny("gpt2"), *texts, word="boat", baseline=baseline)
    assert result.same_shift is None
    assert result.n_same == 6 * len(senses)  # four sentences a sense make six pairs


def test_the_same_text_twice_does_not_drift(baseline, tiny):
    result = drift_pair(tiny("llama"), TEXTS[0], TEXTS[0], word="bank", baseline=baseline)
    torch.testing.assert_close(result.cosine, torch.ones(4, dtype=torch.float64))
    assert result.distance.max() < 1e-8 and not result.contributions.shares.any()


def test_wrong_inputs(baseline, tiny):
    with pytest.raises(WordError, match="sea"):
        drift_pair(tiny("gpt2"), *TEXTS, word="sea", baseline=baseline)
    with pytest.raises(InputError, match=r"`layer` must be in 0\.\.3. Got 4"):
        drift_pair(tiny("gpt2"), *TEXTS, word="bank", baseline=baseline, layer=4)
    with pytest.raises(InputError, match="at least two different sentences"):
        drift_baseline(tiny("gpt2"), SenseDataset("one", load_senses().items[:1]))


@pytest.mark.slow
@pytest.mark.real_model
def test_real_models(smollm2, minilm):
    """Distance 0 at the embedding and .31 at stream 8: measured before, with transformers alone."""
    texts = ("A power bank dropped into the river.", TEXTS[1])
    few = SenseDataset("few", load_senses().items[::31])
    result = drift_pair(smollm2, *texts, word="bank", baseline=drift_baseline(smollm2, few))
    assert abs(float(result.cosine[0]) - 1) < 1e-6
    assert float(1 - result.cosine[8]) == pytest.approx(0.31, abs=0.005)
    assert result.contributions.reconstruction_error < 1e-4
    encoder = drift_pair(minilm, *texts, word="bank", baseline=drift_baseline(minilm, few))
    assert encoder.contributions.reconstruction_error < 1e-4
