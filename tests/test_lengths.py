"""Rotations whose frequencies depend on the input's length: dynamic scaling and LongRoPE."""

import math

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from wvprobe._rotary import Rotary
from wvprobe.activations import capture
from wvprobe.adapters import architecture, fresh_rotation, length_regime
from wvprobe.auditing import audit
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.heads import HeadWeights
from wvprobe.testing import tiny_model
from wvprobe.words import find_word

ORIGINAL = 5
DYNAMIC = {
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0},
    "max_position_embeddings": ORIGINAL,
}
LONGROPE = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 1.7, 1.9],
        "long_factor": [1.0, 2.3, 3.1, 4.7, 5.9, 7.1, 8.3],
        "original_max_position_embeddings": ORIGINAL,
    },
    "max_position_embeddings": 31,
}
SCALINGS = {"dynamic": DYNAMIC, "longrope": LONGROPE}
SHORT, MIDDLE, LONG = (
    "a bank here",
    "the river bank, a boat",
    "the light was on and the river bank was near",
)


@pytest.fixture(params=SCALINGS)
def scaling(request):
    return SCALINGS[request.param]


def rotated(model, text, layer=1):
    """Return the model's own raw scores, from the queries and keys that it has rotated itself."""
    attention, seen = model.blocks[layer].attn, {}
    points = {"q": attention.hook_rot_q, "k": attention.hook_rot_k}
    points["pattern"] = attention.hook_pattern
    handles = [
        point.register_forward_hook(lambda _m, _i, out, name=name: seen.update({name: out[0]}))
        for name, point in points.items()
    ]
    with torch.no_grad():
        model(model.to_tokens(text))
    for handle in handles:
        handle.remove()
    k = seen["k"].repeat_interleave(3, dim=0)
    return attention.original_component.scaling * seen["q"] @ k.mT, seen["pattern"]


def n_tokens(model, text):
    return model.to_tokens(text).shape[1]


def test_texts_lie_on_both_sides_of_the_original_length(scaling):
    model = tiny_model("llama", **scaling)
    short, middle, long = (n_tokens(model, text) for text in (SHORT, MIDDLE, LONG))
    assert short < ORIGINAL < middle < long


@pytest.mark.parametrize("text", [SHORT, MIDDLE, LONG])
def test_scores_and_patterns_are_the_models(scaling, text):
    model = tiny_model("llama", dtype="float64", **scaling)
    expected, pattern = rotated(model, text)  # of a model on which nothing has run before
    heads = HeadWeights.from_model(model)
    seen = capture(model, text, ["resid_pre", "scores", "q", "k"], layers=1)
    x_hat = heads.normalize(seen["resid_pre"][0, :, 0], 1)
    found = heads.scores(x_hat, 1)
    q, k = (seen[site][0, :, 0].norm(dim=-1).T for site in ("q", "k"))
    size = heads.scale[1] * q[:, :, None] * k.repeat_interleave(3, dim=0)[:, None]
    for scores in (found, seen["scores"][0, 0]):
        assert ((scores - expected).abs() / size).max() < 2e-6
    assert (heads.pattern(found, 1) - pattern).abs().max() < 2e-6
    # Circuits at this length, and only at this length, give the same scores.
    n = n_tokens(model, text)
    circuit = heads.qk(1, 4, offset=3, seq_len=n)
    assert (circuit.offset, circuit.seq_len) == (3, n)
    torch.testing.assert_close(circuit.bilinear(x_hat[3], x_hat[0]), found[4, 3, 0])
    left, right = heads.qk_factors(1, offset=3, seq_len=n)
    torch.testing.assert_close(left[4] @ right[1].mT, circuit.matrix())
    other = heads.qk(1, 4, offset=3, seq_len=ORIGINAL if n > ORIGINAL else 2 * ORIGINAL)
    assert (other.matrix() - circuit.matrix()).norm() / circuit.matrix().norm() > 0.01


def test_a_length_is_asked_for_by_name(scaling):
    heads = HeadWeights.from_model(tiny_model("llama", **scaling))
    kind = scaling["rope_parameters"]["rope_type"]
    for refused in (heads.qk_factors, lambda layer: heads.qk(layer, 0, offset=3)):
        with pytest.raises(InputError, match=f"`seq_len` must be .*'{kind}'.*Pass seq_len="):
            refused(0)
    with pytest.raises(InputError, match="`seq_len` must be an int of at least 1. Got 0"):
        heads.qk(0, 0, seq_len=0)
    assert heads.qk(0, 0, offset=None).seq_len is None  # nothing is turned


def test_a_fixed_rotation_ignores_the_length(tiny):
    heads = HeadWeights.from_model(tiny("llama"))
    one, other = (heads.qk(1, 2, offset=3, seq_len=n).matrix() for n in (5, 5_000))
    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_ran_before_changes_nothing(dtype):
    """Under dynamic scaling transformers keeps the frequencies of the longest input so far."""
    alone = capture(tiny_model("llama", dtype=dtype, **DYNAMIC), MIDDLE, "resid_post")
    model = tiny_model("llama", dtype=dtype, **DYNAMIC)
    capture(model, LONG, "resid_post")
    stale = rotated(model, MIDDLE)[0]
    after = capture(model, MIDDLE, "resid_post")
    assert torch.equal(after["resid_post"], alone["resid_post"])
    fresh_rotation(model)
    assert not torch.equal(rotated(model, MIDDLE)[0], stale)
    assert HeadWeights.from_model(model).rotary[0].original_length == ORIGINAL


def test_texts_of_different_frequencies_are_not_padded_to_one_batch(scaling):
    model = tiny_model("llama", **scaling)
    texts = [MIDDLE, SHORT, LONG, MIDDLE]
    together = capture(model, texts, ["resid_post", "scores"], words="bank")
    for item, text in enumerate(texts[:3]):
        alone = capture(model, text, ["resid_post", "scores"], words="bank")
        torch.testing.assert_close(together["resid_post"][item], alone["resid_post"][0])
        n = n_tokens(model, text)
        scores = together["scores"][item, ..., :n]
        torch.testing.assert_close(scores, alone["scores"][0], rtol=1e-4, atol=1e-5)
    regime = length_regime(model, architecture(model))
    assert regime(3) == regime(ORIGINAL) != regime(ORIGINAL + 1)
    assert (regime(20) == regime(30)) == (scaling is LONGROPE)


def test_the_audit_holds(scaling):
    result = audit(tiny_model("llama", **scaling), [SHORT, MIDDLE, LONG])
    assert result.ok and result.to_frame()["error"].max() < 1e-5, result.to_frame().to_string()


@pytest.mark.parametrize("seq_len", [1, ORIGINAL, ORIGINAL + 1, 17, 40])
def test_frequencies_are_those_of_transformers(scaling, seq_len):
    model = tiny_model("llama", **scaling)
    rotary = HeadWeights.from_model(model).rotary[0]
    config = model.original_model.config
    kind = ROPE_INIT_FUNCTIONS[scaling["rope_parameters"]["rope_type"]]
    expected, factor = kind(config, "cpu", seq_len=seq_len)
    found = rotary.frequencies(seq_len)
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=0)
    assert rotary.scaling == pytest.approx(factor)
    if scaling is LONGROPE:  # √(1 + ln (31/5) / ln 5), Ding et al. 2024
        assert rotary.scaling == pytest.approx((1 + math.log(31 / 5) / math.log(5)) ** 0.5)


def test_dynamic_growth_by_hand():
    """With d = 4, f = 2, L = 10 and n = 30 the base grows by 5², so that ω_1 shrinks by 5."""
    rotary = Rotary(
        torch.tensor([1.0, 0.1], dtype=torch.float64),
        kind="dynamic",
        original_length=10,
        long_inv_freq=torch.tensor([1.0, 0.1], dtype=torch.float64),
        growth=2.0,
    )
    expected = torch.tensor([1.0, 0.02], dtype=torch.float64)
    torch.testing.assert_close(rotary.frequencies(30), expected)
    assert torch.equal(rotary.frequencies(10), rotary.inv_freq)


def test_a_scaling_of_some_layers_alone_is_refused_by_name():
    config = transformers.Gemma3TextConfig()
    parameters = {
        **config.rope_parameters,
        "full_attention": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0},
    }
    model = tiny_model("gemma3", rope_parameters=parameters)
    with pytest.raises(UnsupportedError, match="full_attention layers by 'dynamic'"):
        HeadWeights.from_model(model)
    # What is captured is the model's own all the same, whatever ran before or beside it.
    regime = length_regime(model, architecture(model))
    assert regime(3) != regime(4)
    model = tiny_model("gemma3", rope_parameters=parameters, max_position_embeddings=ORIGINAL)
    model.cfg.n_ctx = 31
    alone = capture(model, MIDDLE, "resid_post")["resid_post"]
    both = capture(model, [LONG, MIDDLE], "resid_post", words="bank")["resid_post"]
    again = capture(model, MIDDLE, "resid_post")["resid_post"]
    assert torch.equal(again, alone)
    bank = capture(model, MIDDLE, "resid_post", words="bank")["resid_post"]
    torch.testing.assert_close(both[1], bank[0])


def test_a_text_is_not_cut_where_that_would_turn_it_otherwise(scaling):
    """A word is read below the original length, in a text beyond it."""
    model = tiny_model("llama", **scaling)
    at = find_word(model, LONG, "light").tokens[-1]
    assert at + 1 < ORIGINAL < n_tokens(model, LONG)
    read = capture(model, LONG, "resid_post", positions=at)["resid_post"][0]
    whole = capture(model, LONG, "resid_post")["resid_post"][0, at]
    torch.testing.assert_close(read, whole)
    alone = capture(model, "the light", "resid_post")["resid_post"][0, at]
    assert (alone - whole).norm() > 1e-4 * whole.norm()
