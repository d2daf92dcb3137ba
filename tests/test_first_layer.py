"""Layer-0 scores taken apart, against the model's own scores and cases with known answers."""

import pytest
import torch

from wvprobe.activations import capture
from wvprobe.errors import UnsupportedError, WordError
from wvprobe.first_layer import first_layer_shares
from wvprobe.testing import FAMILIES, tiny_model

TEXTS = ("a power bank dropped into the river.", "The river bank is close to here.")


# Learned positions, ALiBi, rotary (whole, partial, with norms of q and k), latents, post-norm.
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_models_and_shares_sum_to_their_difference(family, tiny):
    found = first_layer_shares(tiny(family), *TEXTS, query="bank", key="river")
    assert found.same_tokens
    assert found.reconstruction_error < 1e-5
    difference = found.scores[1] - found.scores[0]
    torch.testing.assert_close(found.shares.sum(dim=0), difference, atol=1e-5, rtol=1e-4)
    # The same two tokens: position alone makes the difference, and it makes some.
    assert float((found.shares[:2].abs() / found.scale).max()) <= 1e-5
    assert float((found.shares[2].abs() / found.scale).max()) > 1e-3


def test_raw_scores_are_captured_ones(tiny):
    model = tiny("llama")
    found = first_layer_shares(model, *TEXTS, query="river", key="bank")
    seen = capture(model, TEXTS, "scores", layers=0)["scores"]
    for item, (query, key) in enumerate(found.positions):
        torch.testing.assert_close(found.scores[item], seen[item, 0, :, query, key])
    frame = found.to_frame()
    assert frame["score_b"].tolist() == found.scores[1].tolist()
    assert list(frame.columns)[3:6] == ["query_token", "key_token", "position"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "bloom"])
def test_the_same_places_leave_nothing_to_position(family, tiny):
    texts = ("The bank by the river.", "The bank by the river is far.")
    found = first_layer_shares(tiny(family), *texts, query="bank", key="river")
    assert float((found.shares.abs() / found.scale).max()) < 1e-5
    with pytest.raises(WordError, match="sea"):
        first_layer_shares(tiny(family), *texts, query="bank", key="sea")


def test_another_token_has_a_share_of_its_own(tiny):
    """Byte BPE spells a word at the start of a text, without its space, as another token."""
    found = first_layer_shares(
        tiny("gpt2"), "bank by the river.", "A bank by the river.", query="bank", key="river"
    )
    assert not found.same_tokens
    query, key, _ = (found.shares.abs() / found.scale).amax(dim=1).tolist()
    assert query > 1e-2 and key < 1e-5
    assert found.reconstruction_error < 1e-5


def test_shapley_values_by_hand(tiny):
    """worth = 1·q + 2·k + 4·p + 8·q·p: the product is shared by its two players alike."""
    from itertools import product

    from wvprobe.first_layer import _shapley

    worth = {
        (q, k, p): torch.tensor([float(q + 2 * k + 4 * p + 8 * q * p)])
        for q, k, p in product((0, 1), repeat=3)
    }
    assert [float(_shapley(worth, player)) for player in range(3)] == pytest.approx([5, 2, 8])


def test_changes_of_query_and_key(tiny):
    """'bank' stands at one place in both texts, 'river' does not; rotation is told apart."""
    rotary = first_layer_shares(tiny("llama"), *TEXTS, query="bank", key="river")
    (q_plain, q_turned), (k_plain, k_turned) = rotary.queries, rotary.keys
    same = rotary.positions[0][0] == rotary.positions[1][0]
    assert q_plain < 1e-5 and k_plain < 1e-5 and k_turned > 1e-3
    assert (q_turned < 1e-5) == same
    learned = first_layer_shares(tiny("gpt2"), *TEXTS, query="bank", key="river")
    assert learned.keys[0] == learned.keys[1] > 1e-3


@pytest.mark.real_model
def test_real_models(smollm2, minilm):
    for model in (smollm2, minilm):
        found = first_layer_shares(model, *TEXTS, query="bank", key="river")
        assert found.reconstruction_error < 1e-5
        assert float((found.shares[:2].abs() / found.scale).max()) <= 1e-5
        assert float((found.shares[2].abs() / found.scale).max()) > 1e-2
        assert found.positions[0][0] == found.positions[1][0] == 3
        assert found.queries[1] < 1e-5 < found.keys[1]


def test_texts_that_are_rotated_otherwise_are_refused():
    model = tiny_model(
        "llama",
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        max_position_embeddings=13,
    )
    found = first_layer_shares(model, *TEXTS, query="bank", key="river")
    assert found.reconstruction_error < 1e-5
    longer = "The river bank is close to here, and the old boat by the bank is ours."
    with pytest.raises(UnsupportedError, match="of one length"):
        first_layer_shares(model, TEXTS[0], longer, query="bank", key="river")
