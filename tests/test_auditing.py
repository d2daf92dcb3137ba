"""The audit passes what is right, and catches adapters broken on purpose."""

import dataclasses

import pytest
import torch

from wvprobe import adapters
from wvprobe.adapters import rotation
from wvprobe.adapters import weights as read
from wvprobe.auditing import AuditResult, audit, quick_audit
from wvprobe.errors import AuditError
from wvprobe.testing import FAMILIES, induction_model, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_families_pass(family, tiny):
    result = audit(tiny(family))
    frame = result.to_frame()
    assert list(frame.columns) == ["identity", "status", "error", "tolerance", "reason"]
    assert result.ok, frame.to_string()
    assert frame["error"].max() < 1e-5
    assert int((frame["status"] == "ok").sum()) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 10))
@pytest.mark.parametrize("family", FAMILIES)
def test_more_seeds_pass(family, seed):
    result = audit(tiny_model(family, seed))
    assert result.ok and result.to_frame()["error"].max() < 1e-4, result.to_frame().to_string()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("family", ["gpt2", "qwen2", "gemma2", "bert"])
def test_other_precisions_pass(family, dtype):
    result = audit(tiny_model(family, dtype=dtype))
    assert result.ok, result.to_frame().to_string()


def test_induction_model_passes():
    assert audit(induction_model()).ok


@pytest.mark.slow
@pytest.mark.real_model
def test_packaged_models_pass(smollm2, minilm):
    for model in (smollm2, minilm):
        frame = audit(model).to_frame()
        assert set(frame["status"]) <= {"ok", "not applicable"}, frame.to_string()
        assert frame["error"].max() < 1e-4


def changed_weights(**change):
    """Return layer_weights with some of its tensors put through functions."""

    def changed(model, layer, real=read.layer_weights):
        found = real(model, layer)
        new = {name: function(getattr(found, name)) for name, function in change.items()}
        return dataclasses.replace(found, **new)

    return changed


def wrong_base(model, arch, layer, real=rotation.rotary):
    found = real(model, arch, layer)
    return dataclasses.replace(found, inv_freq=found.inv_freq**0.9)


def without_bias(model, arch, layer, real=read.attention_norm):
    return dataclasses.replace(real(model, arch, layer), bias=None)


def gain_of_one_more(model, arch, layer, real=read.attention_norm):
    found = real(model, arch, layer)
    return dataclasses.replace(found, gain=found.gain - 1)  # Gemma's 1 + g forgotten


def swap(tensor):
    return tensor.flip(0)


NORM = "norm(x) from the formula = what attention reads"
PROJECTIONS = "x̂ W + b = q, k, v"
SCORES = "q·k, rotated and scaled = scores"
PATTERN = "softmax of masked scores = pattern"
OV = "Σ pattern x̂ OV + biases = head output"

BROKEN = {
    "wrong rotary base": ("llama", "rotary", wrong_base, SCORES),
    "partial rotary of the wrong base": ("phi", "rotary", wrong_base, PATTERN),
    "no rotary": ("qwen3", "rotary", lambda *_: None, SCORES),
    "swapped query heads": ("gpt2", "layer_weights", changed_weights(W_Q=swap), PROJECTIONS),
    "swapped key-value heads": (
        "llama",
        "layer_weights",
        changed_weights(W_K=swap, W_V=swap),
        PROJECTIONS,
    ),
    "swapped output heads": ("opt", "output_weight", None, "Σ head_out + b_O's share = attn_added"),
    "missed bias": ("qwen2", "layer_weights", changed_weights(b_K=lambda _: None), PROJECTIONS),
    "missed value bias": ("gpt2", "layer_weights", changed_weights(b_V=lambda _: None), OV),
    "missed gate of the norm": ("gemma2", "attention_norm", gain_of_one_more, NORM),
    "missed bias of the norm": ("gpt_neox", "attention_norm", without_bias, NORM),
    "wrong scale": ("gemma3", "score_scale", lambda *_: 10**-0.5, SCORES),
    "missed soft cap": ("gemma2", "soft_cap", lambda *_: None, PATTERN),
    "missed window": ("mistral", "sliding_window", lambda *_: None, PATTERN),
    "missed norm of queries and keys": ("qwen3", "qk_norms", lambda *_: None, PROJECTIONS),
    "halves turned for neighbours": ("deepseek_v3", "turns_neighbours", lambda _: False, PATTERN),
    "missed slopes": ("bloom", "alibi_slopes", lambda *_: None, PATTERN),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_adapters_are_caught(fault, monkeypatch):
    family, name, broken, identity = BROKEN[fault]
    model = tiny_model(family)
    if broken is None:

        def broken(model, arch, layer, real=read.output_weight):
            return real(model, arch, layer).flip(0)

        monkeypatch.setattr("wvprobe.adapters.sites.output_weight", broken)
    for home in (read, rotation, adapters):
        if hasattr(home, name):
            monkeypatch.setattr(home, name, broken)
    result = audit(model)
    assert not result.ok
    failed = {row.identity for row in result.identities if row.status == "failed"}
    assert identity in failed, failed
    with pytest.raises(AuditError, match="do not reproduce it") as caught:
        quick_audit(model)
    assert any(name in str(caught.value) for name in failed)


def unscaled(latent, which, projected, x_hat):
    return projected


def rotary_scaled_too(latent, which, projected, x_hat, real=adapters.Latent.scaled):
    return real(dataclasses.replace(latent, n_content=projected.shape[-1]), which, projected, x_hat)


@pytest.mark.parametrize("broken", [unscaled, rotary_scaled_too])
def test_wrong_scales_of_latents_are_caught(broken, monkeypatch, tiny):
    monkeypatch.setattr(adapters.Latent, "scaled", broken)
    failed = {r.identity for r in audit(tiny("deepseek_v3")).identities if r.status == "failed"}
    assert {PROJECTIONS, SCORES, PATTERN} <= failed


def test_a_latent_that_is_not_folded_is_caught(monkeypatch, tiny):
    monkeypatch.setattr(adapters.Latent, "folded", lambda latent, _norm: latent)
    failed = [r.identity for r in audit(tiny("deepseek_v3")).identities if r.status == "failed"]
    assert failed == ["folding the norm changes no q, k, v"]


def test_a_missed_fold_is_caught(monkeypatch, tiny):
    monkeypatch.setattr(adapters.Norm, "fold", lambda norm, weight: weight)
    for family in ("gpt2", "llama"):
        failed = [r.identity for r in audit(tiny(family)).identities if r.status == "failed"]
        assert failed == ["folding the norm changes no q, k, v"]


def test_padding_without_its_positions_is_caught(monkeypatch):
    """Field line 20: a left-padded batch whose positions start at the padding."""
    real = adapters.run_backbone

    def careless(model, tokens, mask):
        real(model, tokens, torch.ones_like(mask))

    monkeypatch.setattr(adapters, "run_backbone", careless)
    failed = [r.identity for r in audit(tiny_model("gpt2")).identities if r.status == "failed"]
    assert "a left-padded batch = its sentences alone" in failed


def test_unmasked_padding_is_caught_in_an_encoder(monkeypatch):
    real = adapters.run_backbone
    monkeypatch.setattr(
        adapters, "run_backbone", lambda model, t, mask: real(model, t, torch.ones_like(mask))
    )
    failed = [r.identity for r in audit(tiny_model("bert")).identities if r.status == "failed"]
    assert "a batch = its sentences alone" in failed


def test_nan_is_a_failure():
    model = tiny_model("gpt2")
    with torch.no_grad():
        model.blocks[1].mlp.out.original_component.bias[0] = float("nan")
    assert not audit(model).ok


def test_one_text_and_texts_of_ones_own(tiny):
    result = audit(tiny("llama"), "The light bag felt heavier.")
    rows = {row.identity: row for row in result.identities}
    assert rows["a batch = its sentences alone"].status == "not applicable"
    assert result.provenance.settings["texts"] == ["The light bag felt heavier."]


def test_saved_and_read_back(tmp_path, tiny):
    result = audit(tiny("bert"))
    back = AuditResult.load(result.save(tmp_path))
    assert back.to_frame().equals(result.to_frame())
