"""What stands before and after a word, exchanged."""

import pytest
import torch

from wvprobe.activations import capture
from wvprobe.errors import InputError, WordError
from wvprobe.influence import context_influence
from wvprobe.words import find_word

TEXT = "a power bank dropped into the river."


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "bert"])
def test_a_decoder_does_not_see_what_comes_later_and_an_encoder_does(family, tiny):
    found = context_influence(tiny(family), TEXT, word="bank", draws=5)
    earlier, later = found.values
    assert float(earlier[-1]) > 1e-3
    assert (float(later.max()) < 1e-5) == (family != "bert")
    assert float(earlier[0]) < 1e-5  # the embedding knows of neither side
    assert (found.low <= found.values + 1e-12).all() and (found.values <= found.high + 1e-12).all()


def test_one_draw_by_brute_force(tiny):
    model = tiny("bert")
    found = context_influence(model, TEXT, word="bank", draws=2, seed=3)
    _, exchanged = found.examples
    span, other = find_word(model, TEXT, "bank"), find_word(model, exchanged, "bank")
    assert exchanged.startswith("a power bank ") and exchanged != TEXT
    assert span.tokens == other.tokens
    assert model.to_tokens(TEXT).shape == model.to_tokens(exchanged).shape
    x, y = capture(model, [TEXT, exchanged], "stream", words="bank")["stream"].double()
    one = (x - y).norm(dim=-1) / x.norm(dim=-1)
    assert (found.low[1] - 1e-6 <= one).all() and (one <= found.high[1] + 1e-6).all()
    again = context_influence(model, TEXT, word="bank", draws=2, seed=3)
    assert torch.equal(again.values, found.values)


def test_a_side_with_nothing_on_it_has_no_influence(tiny):
    found = context_influence(tiny("llama"), "bank of the river", word="bank", draws=2)
    assert found.values[0].isnan().all() and not found.values[1].isnan().any()
    frame = found.to_frame()
    assert frame[frame["side"] == "earlier"]["influence"].isna().all()


def test_wrong_inputs(tiny):
    with pytest.raises(WordError, match="sea"):
        context_influence(tiny("llama"), TEXT, word="sea")
    with pytest.raises(InputError, match="at least 2"):
        context_influence(tiny("llama"), TEXT, word="bank", draws=1)
