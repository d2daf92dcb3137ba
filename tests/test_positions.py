"""Circuits and positions: learned, sloped, windowed; the embedding after layer 0's MLP."""

import pytest
import torch

from wvprobe import adapters
from wvprobe.activations import capture
from wvprobe.auditing import audit
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.heads import HeadWeights
from wvprobe.testing import tiny_model

TEXT = "The river bank is close to here."
KINDS = ("token", "position")


class TestLearned:
    """Token and position as circuits of their own."""

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    @pytest.mark.parametrize("family", ["gpt2", "opt"])
    def test_four_parts_over_two_scales_and_biases_are_the_score(self, family, dtype):
        model = tiny_model(family, dtype=dtype)
        heads = HeadWeights.from_model(model)
        seen = capture(model, TEXT, ["scores", "q", "k"], layers=0)
        tokens = torch.tensor(seen.tokens[0])
        n = len(tokens)
        x = heads.W_E[tokens] + heads.W_pos[:n]
        sigma = heads.norms[0].scale(x)
        for head in (0, heads.n_heads - 1):
            entries = torch.zeros(n, n, dtype=x.dtype)
            for query in KINDS:
                for key in KINDS:
                    circuit = heads.qk_between(0, head, query=query, key=key)
                    sizes = {"token": 409, "position": 257}
                    assert circuit.left.shape == (sizes[query], heads.d_head)
                    assert circuit.right.shape == (heads.d_head, sizes[key])
                    assert circuit.left_bias is None and circuit.right_bias is None
                    rows, columns = (
                        tokens if kind == "token" else torch.arange(n) for kind in (query, key)
                    )
                    entries += circuit.matrix()[rows][:, columns]
            qk = heads.qk(0, head)
            found = entries / (sigma * sigma.mT)
            found += (x / sigma) @ qk.left @ qk.right_bias[:, None]
            found += ((x / sigma) @ qk.right.mT @ qk.left_bias[:, None]).mT
            found += qk.left_bias @ qk.right_bias
            q, k = (seen[site][0, :, 0, head].norm(dim=-1) for site in ("q", "k"))
            error = (found - seen["scores"][0, 0, head]).abs() / (heads.scale[0] * q[:, None] * k)
            assert error.max() < (2e-6 if dtype == "float64" else 1e-5)

    def test_no_part_is_negligible(self, tiny):
        """So that a part left out above would show."""
        heads = HeadWeights.from_model(tiny("gpt2"))
        for query in KINDS:
            for key in KINDS:
                entries = heads.qk_between(0, 2, query=query, key=key).matrix()[:50, :50]
                assert entries.abs().mean() > 0.1

    def test_a_norm_on_the_sum_is_refused(self, tiny):
        heads = HeadWeights.from_model(tiny("bert"))
        assert heads.embedding_norm is not None
        with pytest.raises(UnsupportedError, match="tiny:bert norms the sum of token and position"):
            heads.qk_between(0, 0, query="token", key="position")
        assert HeadWeights.from_model(tiny("gpt2")).embedding_norm is None
        assert HeadWeights.from_model(tiny("bloom")).embedding_norm is None

    @pytest.mark.parametrize("family", ["llama", "bloom"])
    def test_without_learned_positions_it_is_refused(self, family, tiny):
        heads = HeadWeights.from_model(tiny(family))
        with pytest.raises(UnsupportedError, match=f"tiny:{family} does not add learned.*offset="):
            heads.qk_between(0, 0, query="token", key="token")

    def test_wrong_inputs(self, tiny):
        heads = HeadWeights.from_model(tiny("gpt2"))
        with pytest.raises(InputError, match="`query` must be one of 'token', 'position'"):
            heads.qk_between(0, 0, query="tokens", key="token")
        with pytest.raises(InputError, match="`head` must be in"):
            heads.qk_between(0, 5, query="token", key="token")
        unfolded = HeadWeights.from_model(tiny("gpt2"), fold_norm=False)
        with pytest.raises(InputError, match="`HeadWeights` must be folded"):
            unfolded.qk_between(0, 0, query="token", key="token")

    def test_tensors_of_ones_own_need_no_norm(self):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        w_e, w_pos, w_q, w_k = draw(17, 13), draw(7, 13), draw(1, 1, 13, 5), draw(1, 1, 13, 5)
        w_v, w_o = draw(1, 1, 13, 3), draw(1, 1, 3, 13)
        heads = HeadWeights.from_tensors(
            W_Q=w_q, W_K=w_k, W_V=w_v, W_O=w_o, W_E=w_e, W_pos=w_pos, scale=2
        )
        found = heads.qk_between(0, 0, query="position", key="token").matrix()
        torch.testing.assert_close(found, 2 * w_pos @ w_q[0, 0] @ w_k[0, 0].T @ w_e.T)


class TestSlopes:
    """ALiBi."""

    def test_the_slope_times_the_keys_position_completes_the_score(self, tiny):
        model = tiny("bloom")
        heads = HeadWeights.from_model(model)
        seen = capture(model, TEXT, ["scores", "resid_pre"], layers=1)
        x_hat = heads.normalize(seen["resid_pre"][0, :, 0], 1)
        for head in range(5):
            circuit = heads.qk(1, head, offset=3)
            assert circuit.slope == float(heads.slopes[head]) > 0
            for i, j in ((7, 4), (2, 6)):
                score = circuit.bilinear(x_hat[i], x_hat[j]) + circuit.slope * j
                expected = seen["scores"][0, 0, head, i, j]
                torch.testing.assert_close(score, expected, rtol=1e-4, atol=1e-4)

    def test_less_the_slope_at_the_query_a_pair_scores_alike_wherever_it_stands(self, tiny):
        heads = HeadWeights.from_model(tiny("bloom"))
        x = torch.randn(2, 35, generator=torch.Generator().manual_seed(0))
        scores = [heads.scores(torch.stack([x[0]] * shift + [x[0], x[1]]), 0) for shift in (0, 7)]
        last, slopes = [s[:, -2, -1] for s in scores], heads.slopes
        assert not torch.allclose(last[0], last[1])
        torch.testing.assert_close(last[0] - slopes * 0, last[1] - slopes * 7)

    def test_other_models_have_none(self, tiny):
        assert HeadWeights.from_model(tiny("llama")).qk(0, 0).slope is None


class TestWindows:
    """What a query may look at."""

    @pytest.mark.parametrize("family", ["mistral", "gemma3", "bert", "llama", "gpt2"])
    def test_circuits_say_what_the_mask_says(self, family, tiny):
        heads = HeadWeights.from_model(tiny(family))
        for layer in range(2):
            seen = heads.visible(9, layer)
            for i, j in ((8, 8), (8, 4), (8, 3), (3, 8), (4, 5)):
                circuit = heads.qk(layer, 0, offset=i - j)
                assert circuit.visible == bool(seen[i, j])
                assert circuit.window == heads.sliding_window[layer]

    def test_by_hand(self, tiny):
        heads = HeadWeights.from_model(tiny("mistral"))
        visible = {offset: heads.qk(0, 1, offset=offset).visible for offset in (-1, 0, 4, 5)}
        assert visible == {-1: False, 0: True, 4: True, 5: False}
        assert heads.qk(0, 1, offset=None).visible and heads.ov(0, 1).visible


SCALINGS = {
    "default": {"rope_type": "default", "rope_theta": 777.0},
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 31,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 31,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize(
    ("family", "part"), [("llama", {}), ("phi", {"partial_rotary_factor": 0.5})]
)
def test_scaled_rotations_give_the_models_scores(family, part, kind):
    """Full and partial: the audit holds circuits at offsets against the model's own tables."""
    model = tiny_model(family, rope_parameters={**SCALINGS[kind], **part})
    heads = HeadWeights.from_model(model)
    assert heads.rotary[0].kind == kind
    assert heads.rotary[0].dim == (14 if family == "llama" else 6)
    frame = audit(model).to_frame().set_index("identity")
    assert set(frame["status"]) == {"ok"} and frame["error"].max() < 1e-5, frame.to_string()


def brute_force(model, family):
    """Return W_E + what layer 0's MLP makes of its norm, from the family's own modules."""
    backbone = model.original_model.base_model
    backbone = getattr(backbone, "decoder", backbone)
    block = (backbone.h if hasattr(backbone, "h") else backbone.layers)[0].original_component
    x = model.original_model.get_input_embeddings().weight.detach()
    if family == "gpt2":
        return x + block.mlp(block.ln_2(x))
    if family == "bloom":
        x = model.original_model.base_model.word_embeddings_layernorm(x)
        return block.mlp(block.post_attention_layernorm(x), x)
    if family == "opt":
        return x + block.fc2(block.activation_fn(block.fc1(block.final_layer_norm(x))))
    if family in ("phi", "gpt_neox"):
        norm = block.input_layernorm if family == "phi" else block.post_attention_layernorm
        return x + block.mlp(norm(x))
    if family in ("gemma2", "gemma3"):
        x = x * 42**0.5
        inner = block.mlp(block.pre_feedforward_layernorm(x))
        return x + block.post_feedforward_layernorm(inner)
    inner = block.mlp(block.post_attention_layernorm(x[:, None]))
    return x + inner.reshape(x.shape)


class TestEffectiveEmbedding:
    """W_E + MLP_0(norm(W_E))."""

    @pytest.mark.parametrize(
        "family",
        ["gpt2", "opt", "bloom", "gpt_neox", "phi", "llama", "qwen3", "gemma2", "gemma3"]
        + ["deepseek_v3"],
    )
    def test_it_is_what_the_models_own_modules_make(self, family, tiny, monkeypatch):
        monkeypatch.setattr("wvprobe.adapters.effective._TILE", 100)  # five, the last one shorter
        model = tiny(family)
        heads = HeadWeights.from_model(model, effective_embedding=True)
        with torch.no_grad():
            expected = brute_force(model, family)
        assert heads.effective_W_E.shape == (409, heads.d_model)
        error = (heads.effective_W_E - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert error.max() < 2e-6
        assert (expected - heads.W_E).norm() > 0.1 * expected.norm()

    def test_float64_stays_and_half_is_upcast(self):
        for dtype, kept in (("float64", torch.float64), ("bfloat16", torch.float32)):
            model = tiny_model("llama", dtype=dtype)
            heads = HeadWeights.from_model(model, effective_embedding=True)
            assert heads.effective_W_E.dtype == heads.W_E.dtype == kept

    def test_it_needs_no_hook_afterwards_and_leaves_the_model_as_it_was(self, tiny):
        model = tiny("gemma2")
        before = capture(model, TEXT, "stream")["stream"]
        HeadWeights.from_model(model, effective_embedding=True)
        assert torch.equal(capture(model, TEXT, "stream")["stream"], before)

    def test_it_is_stored_only_when_asked_for(self, tiny):
        assert HeadWeights.from_model(tiny("llama")).effective_W_E is None

    def test_a_post_norm_model_is_refused_by_name(self, tiny):
        with pytest.raises(UnsupportedError, match="tiny:bert norms sums.*effective_embedding=F"):
            HeadWeights.from_model(tiny("bert"), effective_embedding=True)


@pytest.mark.slow
@pytest.mark.real_model
def test_effective_embedding_of_a_real_model(smollm2):
    heads = HeadWeights.from_model(smollm2, effective_embedding=True)
    block = smollm2.original_model.base_model.layers[0].original_component
    rows = torch.tensor([17, 4_096, 49_151])
    with torch.no_grad():
        expected = heads.W_E[rows] + block.mlp(block.post_attention_layernorm(heads.W_E[rows]))
    torch.testing.assert_close(heads.effective_W_E[rows], expected, rtol=1e-4, atol=1e-5)
    assert adapters.architecture(smollm2).position == "rotary"
