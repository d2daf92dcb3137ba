"""Value flow against vectors formed one by one, effects against the model's own logits."""

import pytest
import torch

from wvprobe import adapters
from wvprobe._types import Result
from wvprobe.activations import read_sites
from wvprobe.errors import InputError, UnsupportedError, WordError
from wvprobe.flow import FlowResult, value_flow
from wvprobe.heads import HeadWeights
from wvprobe.plotting import figure
from wvprobe.testing import FAMILIES, induction_model, tiny_model

TEXT = "The river bank is close to here."


def _logits(model, text=TEXT):
    tokens = model.to_tokens(text)
    return adapters.logits(model, tokens, torch.ones_like(tokens))[0].double()


@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_formed_one_by_one_have_these_norms_and_sum_to_what_heads_add(family, tiny):
    model = tiny(family)
    arch = adapters.architecture(model)
    found = value_flow(model, TEXT)
    seen = read_sites(model, TEXT, ["pattern", "v", "head_out", "attn_out"])
    for layer in range(arch.n_layers):
        weight = adapters.output_weight(model, arch, layer).double()
        norm = adapters.post_attention_norm(model, arch, layer)
        for head in range(arch.n_heads):
            kv = head // (arch.n_heads // arch.n_kv_heads)
            vectors = seen["v"][0, :, layer, kv].double() @ weight[head]  # [key, d_model]
            pairs = seen["pattern"][0, layer, head].double()[..., None] * vectors
            if norm is not None:
                scale = norm.scale(seen["attn_out"][0, :, layer].double())[:, None]
                pairs = norm.linear(pairs, scale)
            expected = pairs.norm(dim=-1)
            torch.testing.assert_close(found.norms[layer, head].double(), expected)
            out = seen["head_out"][0, :, layer, head].double()
            torch.testing.assert_close(pairs.sum(dim=1), out, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "bert"])
@pytest.mark.parametrize("position", [3, None])
def test_parts_sum_to_the_models_logit(family, position, tiny):
    """Before a final soft cap; at an inner position and at the last."""
    model = tiny(family)
    found = value_flow(model, TEXT, position=position, token=7).effects
    assert found.reconstruction_error < 1e-6
    parts = found.heads.sum() + found.mlps.sum() + found.biases.sum() + found.embedding.sum()
    logit = float(parts) + found.constant
    cap = found.soft_cap
    shown = logit if cap is None else cap * float(torch.tensor(logit / cap).tanh())
    expected = _logits(model)[-1 if position is None else position, 7]
    assert shown == pytest.approx(float(expected), abs=1e-4)
    assert found.to_frame()["effect"].sum() == pytest.approx(found.logit, abs=1e-4)
    assert found.heads.shape[1] == adapters.architecture(model).n_heads


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama", "gemma2", "deepseek_v3"])
def test_a_source_taken_away_is_missed_by_its_effect(family):
    """With the norm's scale held, the logit without a_ij v_j is lower by just the effect."""
    model = tiny_model(family)
    arch = adapters.architecture(model)
    last = arch.n_layers - 1
    found = value_flow(model, TEXT, token=5).effects
    head, source = 1, 2
    unembedding = adapters.unembedding(model, arch)
    streams = read_sites(model, TEXT, "stream", layers=last + 1, positions="last")["stream"][0, 0]
    seen = read_sites(model, TEXT, ["pattern", "v", "attn_out"], layers=last)
    kv = head // (arch.n_heads // arch.n_kv_heads)
    vector = seen["v"][0, source, 0, kv] @ adapters.output_weight(model, arch, last)[head]
    vector = (seen["pattern"][0, 0, head, -1, source] * vector).double()
    norm = adapters.post_attention_norm(model, arch, last)
    if norm is not None:
        vector = norm.linear(vector, norm.scale(seen["attn_out"][0, -1, 0].double()))
    final = unembedding.norm
    moved = final.linear(vector, final.scale(streams.double())) @ unembedding.weight[5].double()
    assert float(found.heads[last, head, source]) == pytest.approx(float(moved), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "phi"])
def test_each_stream_is_read_with_its_own_scale(family, tiny):
    model = tiny(family)
    arch = adapters.architecture(model)
    head = adapters.unembedding(model, arch)
    found = value_flow(model, TEXT, token=11).effects
    streams = read_sites(model, TEXT, "stream", positions="last")["stream"][0].double()
    logits = head.norm(streams) @ head.weight.double().T
    logits = logits if head.bias is None else logits + head.bias.double()
    torch.testing.assert_close(found.lens.logits, logits[:, 11])
    capped = logits if head.soft_cap is None else head.soft_cap * (logits / head.soft_cap).tanh()
    expected = capped.log_softmax(dim=-1)[:, 11]
    torch.testing.assert_close(found.lens.log_probs, expected, atol=1e-5, rtol=1e-5)
    ranks = (logits > logits[:, 11, None]).sum(dim=-1)
    assert found.lens.ranks.tolist() == ranks.tolist()
    # A head's write, in the scale of the stream that its own block leaves.
    scale = head.norm.scale(streams)[:, 0]
    own = found.heads.sum(dim=-1) * scale[-1] / scale[1:, None]
    torch.testing.assert_close(found.lens.heads, own)
    assert not torch.allclose(found.lens.heads[0], found.heads[0].sum(dim=-1), rtol=1e-2)
    assert found.lens.to_frame()["rank"].tolist() == ranks.tolist()


@pytest.mark.parametrize("family", ["gpt2", "phi", "llama", "gemma2"])
def test_contrasts_and_centred_logits(family, tiny):
    model = tiny(family)
    alone = [value_flow(model, TEXT, token=token).effects for token in (7, 9)]
    contrast = value_flow(model, TEXT, token=7, against=9).effects
    torch.testing.assert_close(contrast.heads, alone[0].heads - alone[1].heads)
    torch.testing.assert_close(contrast.mlps, alone[0].mlps - alone[1].mlps)
    assert contrast.logit == pytest.approx(alone[0].logit - alone[1].logit, abs=1e-6)
    assert contrast.target == f"{contrast.token!r} − {contrast.against!r}"
    centred = value_flow(model, TEXT, token=7, centred=True).effects
    head = adapters.unembedding(model, adapters.architecture(model))
    stream = read_sites(model, TEXT, "stream", layers=3, positions="last")["stream"][0, 0].double()
    logits = head.norm(stream) @ head.weight.double().T
    logits = logits if head.bias is None else logits + head.bias.double()
    assert centred.logit == pytest.approx(float(logits[7] - logits.mean()), abs=1e-6)
    assert centred.reconstruction_error < 1e-6 and contrast.reconstruction_error < 1e-6
    with pytest.raises(InputError, match="not both"):
        value_flow(model, TEXT, against=9, centred=True)


def test_the_default_target_is_the_models_first_choice(tiny):
    """Also where a soft cap saturates: in single precision many capped logits are alike."""
    for family in ("qwen2", "gemma2"):
        model = tiny(family)
        found = value_flow(model, TEXT, position="bank").effects
        logits = _logits(model)[value_flow(model, TEXT, position="bank").position]
        assert float(logits[found.token_id]) == float(logits.max())
        assert found.lens.ranks[-1] == 0


def test_biases_of_values_are_constants_of_the_block(tiny):
    """Without the bias the rest varies with the text; the bias's own part does not."""
    model = tiny("gpt2")
    arch = adapters.architecture(model)
    found = value_flow(model, TEXT, token=7)
    weight = adapters.layer_weights(model, 1)
    vector = weight.b_V[2].double() @ weight.W_O[2].double()
    assert float(found.bias_norms[1, 2]) == pytest.approx(float(vector.norm()), rel=1e-6)
    head = adapters.unembedding(model, arch)
    stream = read_sites(model, TEXT, "stream", layers=3, positions="last")["stream"][0, 0].double()
    effect = head.norm.linear(vector, head.norm.scale(stream)) @ head.weight[7].double()
    assert float(found.effects.value_bias[1, 2]) == pytest.approx(float(effect), rel=1e-5)
    assert not value_flow(tiny("llama"), TEXT).bias_norms.any()
    biased = tiny_model("deepseek_v3", attention_bias=True)
    assert value_flow(biased, TEXT).bias_norms.isnan().all()  # scaled token by token


@torch.no_grad()
@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen2"])
def test_beside_transformer_lens(family):
    """Its stack of head outputs is right; its direct logit attribution is right once folded.

    On the raw weights of a bridge `logit_attrs` divides by σ but leaves out the final norm's gain,
    so that the parts do not sum to the logit. Folded and with the unembedding centred it is
    the centred effect.
    """
    model = tiny_model(family)
    token = 7
    tokens = model.to_tokens(TEXT)
    found = value_flow(model, TEXT, token=token).effects
    centred = value_flow(model, TEXT, token=token, centred=True).effects
    ours = found.heads.sum(dim=-1).flatten()
    _, cache = model.run_with_cache(tokens)
    stack = cache.stack_head_results(layer=-1, pos_slice=-1)
    norm = adapters.final_norm(model, adapters.architecture(model))
    scale = norm.scale(cache["blocks.2.hook_resid_post"][0, -1])
    theirs = norm.linear(stack[:, 0], scale) @ model.W_U[:, token]
    torch.testing.assert_close(theirs.double(), ours, atol=1e-5, rtol=1e-4)
    raw = cache.logit_attrs(stack, tokens=token, pos_slice=-1)[:, 0].double()
    assert (raw - ours).norm() > 0.1 * ours.norm()  # the gain is missing

    folded = tiny_model(family)
    folded.enable_compatibility_mode()
    _, cache = folded.run_with_cache(tokens)
    stack = cache.stack_head_results(layer=-1, pos_slice=-1)
    theirs = cache.logit_attrs(stack, tokens=token, pos_slice=-1)[:, 0].double()
    # Folding moves b_V, with what the norm's bias gives values, into b_O: a constant of the block.
    heads = HeadWeights.from_model(model)
    groups = heads.n_heads // heads.n_kv_heads
    constant = heads.b_V.repeat_interleave(groups, dim=1)[:, :, None] @ heads.W_O
    column = model.W_U[:, token] - model.W_U.mean(dim=-1)
    own = norm.linear(constant[:, :, 0], scale) @ column
    expected = centred.heads.sum(dim=-1).flatten() - own.flatten()
    torch.testing.assert_close(theirs, expected, atol=1e-5, rtol=1e-4)


def test_a_known_head_copies(tiny):
    """The hand-written induction head moves the token after the earlier occurrence."""
    model = induction_model()
    text = "bank river boat bank"
    tokens = model.to_tokens(text)[0].tolist()
    first = tokens.index(tokens[-1])
    assert first < len(tokens) - 1
    found = value_flow(model, text, token=tokens[first + 1], centred=True).effects
    best = found.to_frame().iloc[0]
    assert (best["kind"], best["layer"], best["head"]) == ("head", 1, 1)
    assert int(found.heads[1, 1].argmax()) == first + 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_precisions(dtype):
    model = tiny_model("llama", dtype=dtype)
    found, exact = (value_flow(m, TEXT, token=7) for m in (model, tiny_model("llama")))
    rough = 1e-6 if dtype == "float64" else 0.1
    error = (found.norms.double() - exact.norms.double()).norm() / exact.norms.double().norm()
    assert float(error) < rough and found.norms.dtype in (torch.float32, torch.float64)
    assert found.effects.logit == pytest.approx(exact.effects.logit, abs=max(rough, 1e-4))
    # Parts are read as rounded, one by one, so they sum to the logit to the dtype's precision.
    assert found.effects.reconstruction_error < (1e-6 if dtype == "float64" else 1e-2)


def test_models_without_a_linear_head(tiny):
    bert = tiny("bert")
    found = value_flow(bert, TEXT)
    assert found.effects is None and found.to_frame()["effect"].isna().all()
    for asked in ({"token": 7}, {"against": 7}, {"centred": True}):
        with pytest.raises(UnsupportedError, match="linear in the final stream.*tiny:bert"):
            value_flow(bert, TEXT, **asked)


def test_arguments_that_cannot_be_used(tiny):
    model = tiny("llama")
    for layer in (-1, 3, [0, 3]):
        with pytest.raises(InputError, match="layer"):
            value_flow(model, TEXT, layer=layer)
    with pytest.raises(InputError, match="position"):
        value_flow(model, TEXT, position=-1)
    with pytest.raises(WordError, match="boat"):
        value_flow(model, TEXT, position="boat")
    with pytest.raises(WordError, match="one token"):
        value_flow(model, TEXT, token="no such token")
    with pytest.raises(InputError, match="against"):
        value_flow(model, TEXT, against=10**6)
    broken = tiny_model("llama")
    with torch.no_grad():
        broken.blocks[1].attn.v.original_component.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match="NaN"):
        value_flow(broken, TEXT)


def test_frames_layers_and_files(tiny, tmp_path):
    model = tiny("qwen3")
    found = value_flow(model, TEXT, layer=[2, 0], position="bank")
    whole = value_flow(model, TEXT, position="bank")
    torch.testing.assert_close(found.norms, whole.norms[[2, 0]])
    frame = found.to_frame()
    assert list(frame.columns) == "layer head source token attention norm effect".split()
    assert len(frame) == found.pattern[:, :, 0].numel()
    row = frame[(frame.layer == 0) & (frame["head"] == 4) & (frame.source == 1)].iloc[0]
    at = found.position
    assert row["norm"] == pytest.approx(float(whole.norms[0, 4, at, 1]), rel=1e-5)
    assert row["effect"] == float(whole.effects.heads[0, 4, 1])
    assert row["attention"] == float(whole.pattern[0, 4, at, 1])
    loaded = Result.load(found.save(tmp_path / "flow"))
    assert isinstance(loaded, FlowResult) and loaded.effects.logit == found.effects.logit
    assert torch.equal(loaded.effects.lens.ranks, found.effects.lens.ranks)
    for name, axes in FlowResult.AXES.items():
        assert getattr(found, name).dim() == len(axes)


def test_figures_show_a_head_beside_its_twin(tiny):
    found = value_flow(tiny("llama"), TEXT, layer=[1, 2])
    attention, norms, bars = figure(found).data
    best = found.effects.heads[1:].sum(dim=-1)
    row, head = divmod(int(best.abs().argmax()), best.shape[1])
    assert f"L{row + 1}H{head}" in figure(found).layout.title.text
    assert list(attention.z[-1]) == list(found.pattern[row, head, -1].tolist())
    assert list(norms.z[-1]) == list(found.norms[row, head, -1].tolist())
    assert max(map(abs, bars.x)) == float(found.effects.heads[1:].abs().max())
    assert len(figure(value_flow(tiny("bert"), TEXT)).data) == 2


@pytest.mark.slow
@pytest.mark.real_model
def test_real_models(smollm2, minilm):
    found = value_flow(smollm2, "a power bank dropped into the river.", layer=8)
    assert found.effects.reconstruction_error < 1e-6
    assert found.effects.lens.ranks[-1] == 0
    plain = value_flow(minilm, "The river bank is close to here.")
    assert plain.effects is None and plain.norms.shape[:2] == (6, 12)
    with pytest.raises(UnsupportedError, match="minilm"):
        value_flow(minilm, "The river bank is close to here.", token=7)
