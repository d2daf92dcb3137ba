"""Multi-head latent attention: weights of the stream against the model's own queries and keys."""

import pytest
import torch

from wvprobe.activations import capture
from wvprobe.adapters import architecture
from wvprobe.auditing import audit
from wvprobe.components import stream_components
from wvprobe.compose import composition
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.heads import HeadWeights
from wvprobe.singular import spectra
from wvprobe.testing import tiny_model
from wvprobe.vocabulary import top_tokens
from wvprobe.word_pairs import pair_scores

TEXT = "The river bank is close to here."
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 31,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
VARIANTS = {
    "as in DeepSeek-V3": {},
    "halves turned": {"rope_interleave": False},
    "queries from the stream": {"q_lora_rank": None},
    "biases": {"attention_bias": True},
    "YaRN with mscale": {"rope_parameters": YARN},
    "one head, one layer": {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
    },
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0},
        "max_position_embeddings": 9,
    },
}


def dense(**changes):
    """Return a float64 model; transformers' experts do not run in float64, so it has none."""
    return tiny_model("deepseek_v3", dtype="float64", first_k_dense_replace=3, **changes)


@pytest.fixture(params=VARIANTS, ids=lambda name: name.replace(" ", "_"))
def model(request):
    return dense(**VARIANTS[request.param])


def own(model, layer):
    """Return the model's own raw scores, patterns, head outputs and values, heads first."""
    attention = model.blocks[layer].attn
    seen = {}
    points = {"q": attention.hook_q, "k": attention.hook_k, "pattern": attention.hook_pattern}
    points.update(v=attention.hook_v, z=attention.o.hook_in)
    handles = [
        point.register_forward_hook(lambda _m, _i, out, name=name: seen.update({name: out[0]}))
        for name, point in points.items()
    ]
    with torch.no_grad():
        model(model.to_tokens(TEXT))
    for handle in handles:
        handle.remove()
    # Queries and keys here are rotated: theirs is a score for every pair, masked ones included.
    scores = attention.original_component.scaling * seen["q"] @ seen["k"].mT
    facts = architecture(model)
    w_o = attention.o.original_component.weight.T.unflatten(0, (facts.n_heads, facts.d_head_v))
    z = seen["z"].unflatten(-1, (facts.n_heads, facts.d_head_v))
    return scores, seen["pattern"], torch.einsum("phe,hed->hpd", z, w_o), seen["v"]


def size(model, layer):
    """Return c‖q_i‖‖k_j‖, [head, query, key]."""
    seen = capture(model, TEXT, ["q", "k"], layers=layer)
    q, k = (seen[site][0, :, 0].norm(dim=-1).T for site in ("q", "k"))
    return model.blocks[layer].attn.original_component.scaling * q[:, :, None] * k[:, None]


@pytest.mark.parametrize("fold", [False, True])
def test_scores_patterns_values_and_head_outputs_are_the_models(model, fold):
    heads = HeadWeights.from_model(model, fold_norm=fold)
    assert heads.folded == fold and heads.n_kv_heads == heads.n_heads
    for layer in range(heads.n_layers):
        scores, pattern, head_out, v = own(model, layer)
        x = capture(model, TEXT, "resid_pre", layers=layer)["resid_pre"][0, :, 0]
        x_hat = heads.normalize(x, layer)
        found = heads.scores(x_hat, layer)
        assert ((found - scores).abs() / size(model, layer)).max() < 2e-6
        assert (heads.pattern(found, layer) - pattern).abs().max() < 2e-6
        values = heads.values(x_hat, layer).transpose(0, 1)
        torch.testing.assert_close(values, v, rtol=2e-6, atol=2e-6)
        _, r_kv = heads.latent_scales(x_hat, layer)
        for head in range(heads.n_heads):
            written = r_kv[:, None] * heads.ov(layer, head).apply(x_hat)
            error = (pattern[head] @ written - head_out[head]).norm() / head_out[head].norm()
            assert error < 2e-6


def test_captured_queries_keys_and_scores_are_the_models(model):
    seen = capture(model, TEXT, ["q", "k", "v", "scores", "pattern", "attn_in"])
    for layer in range(seen["q"].shape[2]):
        scores, pattern, _, v = own(model, layer)
        error = (seen["scores"][0, layer] - scores).abs() / size(model, layer)
        assert error.max() < 2e-6
        torch.testing.assert_close(seen["pattern"][0, layer], pattern)
        torch.testing.assert_close(seen["v"][0, :, layer].transpose(0, 1), v)
        # From what attention itself read, only our own algebra and theirs in float32 differ.
        heads = HeadWeights.from_model(model, fold_norm=False)
        x_hat = seen["attn_in"][0, :, layer]
        for site, project in (("q", heads.queries), ("k", heads.keys)):
            found = project(x_hat, layer)
            assert (found - seen[site][0, :, layer]).norm() / found.norm() < 1e-6


def test_the_two_circuits_and_their_scales_give_every_score(model):
    """s_ij = r_q(i) [r_kv(j) · content + rotary(Δ)], to float64's own precision."""
    heads = HeadWeights.from_model(model)
    layer = heads.n_layers - 1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, heads.d_model, dtype=torch.float64, generator=generator)
    scores = heads.scores(x, layer)
    r_q, r_kv = heads.latent_scales(x, layer)
    for head in (0, heads.n_heads - 1):
        for i, j in ((9, 4), (4, 9), (10, 10)):
            here = {"offset": i - j, "seq_len": 11}
            content = heads.qk(layer, head, **here, part="content")
            rotary = heads.qk(layer, head, **here, part="rotary")
            found = r_q[i] * (r_kv[j] * content.bilinear(x[i], x[j]) + rotary.bilinear(x[i], x[j]))
            torch.testing.assert_close(found, scores[head, i, j], rtol=1e-9, atol=1e-9)
            assert (content.part, content.offset) == ("content", None)
            assert (rotary.part, rotary.offset) == ("rotary", i - j)
            assert content.left.shape == (44, 7) and rotary.left.shape == (44, 6)
            for part, circuit in (("content", content), ("rotary", rotary)):
                left, right = heads.qk_factors(layer, **here, part=part)
                torch.testing.assert_close(left[head] @ right[head].mT, circuit.matrix())


def test_one_joint_circuit_would_be_wrong():
    """Why there are two: with one latent scale for both parts scores miss by far."""
    heads = HeadWeights.from_model(dense())
    x = torch.randn(11, 44, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = heads.scores(x, 1)
    r_q, r_kv = heads.latent_scales(x, 1)
    parts = [heads.qk(1, 2, offset=5, part=part).bilinear(x[9], x[4]) for part in PARTS]
    joint = r_q[9] * r_kv[4] * sum(parts)
    assert (joint - scores[2, 9, 4]).abs() / scores[2, 9, 4].abs() > 0.05


PARTS = ("content", "rotary")


def test_the_rotary_key_is_one_for_all_heads_and_reads_the_stream_itself():
    model = dense()
    heads = HeadWeights.from_model(model, fold_norm=False)
    shared = model.blocks[1].attn.kv_a_proj_with_mqa.original_component.weight[19:].T
    for head in range(3):
        assert torch.equal(heads.W_K[1, head][:, 7:], shared)


def test_weights_are_products_of_the_models_factors():
    model = dense()
    attention = model.blocks[1].attn
    heads = HeadWeights.from_model(model, fold_norm=False)
    down, gain, up = (
        getattr(attention, name).original_component.weight
        for name in ("kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj")
    )
    # Head 2 has rows 36 to 54 of W_UKV: seven for the key's content, eleven for the value.
    expected = down[:19].T @ gain.diag() @ up[36 + 7 : 54].T
    torch.testing.assert_close(heads.W_V[1, 2], expected)
    torch.testing.assert_close(heads.ov(1, 2).left, expected)
    down, gain, up = (
        getattr(attention, name).original_component.weight
        for name in ("q_a_proj", "q_a_layernorm", "q_b_proj")
    )
    torch.testing.assert_close(heads.W_Q[1, 2], down.T @ gain.diag() @ up[26:39].T)
    assert torch.linalg.matrix_rank(heads.W_Q[1].transpose(0, 1).flatten(1)) == 17


def test_parts_are_asked_for_by_name(tiny):
    heads = HeadWeights.from_model(tiny("deepseek_v3"))
    for refused in (heads.qk_factors, lambda layer: heads.qk(layer, 1)):
        with pytest.raises(UnsupportedError, match="no single circuit.*part='content' or"):
            refused(0)
    with pytest.raises(InputError, match="`part` must be one of 'content', 'rotary'"):
        heads.qk(0, 1, part="contents")
    plain = HeadWeights.from_model(tiny("llama"))
    with pytest.raises(InputError, match="`part` must be None for tiny:llama"):
        plain.qk(0, 1, part="content")
    with pytest.raises(UnsupportedError, match="tiny:llama has no latent attention"):
        plain.latent_scales(torch.zeros(3, 42), 0)


def test_without_a_latent_of_queries_their_scale_is_one():
    heads = HeadWeights.from_model(tiny_model("deepseek_v3", q_lora_rank=None))
    r_q, r_kv = heads.latent_scales(torch.randn(5, 44), 1)
    assert torch.equal(r_q, torch.ones(5)) and (r_kv - 1).abs().min() > 1e-3


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda name: name.replace(" ", "_"))
def test_the_audit_holds_with_experts_too(variant):
    result = audit(tiny_model("deepseek_v3", **VARIANTS[variant]))
    frame = result.to_frame().set_index("identity")
    assert result.ok and frame["error"].max() < 1e-5, frame.to_string()
    lacking = frame.index[frame["status"] != "ok"]
    # Texts of several lengths are turned by frequencies of their own.
    padded = ["a left-padded batch = its sentences alone"]
    assert list(lacking) == (padded if variant == "dynamic" else [])


def test_half_precision_is_upcast_before_factors_are_multiplied():
    # Experts of multiples of 8, which their kernel wants in half precision.
    sizes = {"hidden_size": 48, "moe_intermediate_size": 16}
    model = tiny_model("deepseek_v3", dtype="bfloat16", **sizes)
    heads = HeadWeights.from_model(model, fold_norm=False)
    attention = model.blocks[0].attn
    down, gain, up = (
        getattr(attention, name).original_component.weight.float()
        for name in ("q_a_proj", "q_a_layernorm", "q_b_proj")
    )
    assert heads.W_Q.dtype == heads.W_K.dtype == heads.W_V.dtype == torch.float32
    torch.testing.assert_close(heads.W_Q[0, 0], down.T @ (gain[:, None] * up[:13].T))
    assert audit(model).ok


def test_a_nan_in_a_factor_is_refused():
    model = tiny_model("deepseek_v3")
    with torch.no_grad():
        model.blocks[1].attn.q_b_proj.original_component.weight[30, 3] = float("nan")
    with pytest.raises(InputError, match="`W_Q` must be finite.*layer 1, head 2"):
        HeadWeights.from_model(model)
    with torch.no_grad():
        model.blocks[1].attn.q_b_proj.original_component.weight[30, 3] = 0.0
        model.blocks[2].attn.kv_a_layernorm.original_component.weight[3] = float("nan")
    with pytest.raises(InputError, match=r"weight of blocks\.2\.self_attn\.kv_a_layernorm"):
        HeadWeights.from_model(model)


def test_embeddings_and_logits(tiny):
    model = tiny("deepseek_v3")
    heads, tokens = HeadWeights.from_model(model), model.to_tokens(TEXT)[0]
    stream = capture(model, TEXT, "stream")["stream"][0]
    assert torch.equal(heads.W_E[tokens], stream[:, 0])
    final = stream[:, -1]
    found = final / heads.unembedding.norm.scale(final) @ heads.W_U + heads.b_U
    torch.testing.assert_close(found, model(model.to_tokens(TEXT))[0], rtol=1e-4, atol=1e-4)


def test_pair_scores_and_components_work(tiny):
    model = tiny("deepseek_v3")
    found = pair_scores(model, [TEXT], "bank", "river")
    assert found.scores.shape == (1, 2, 3, 3) and found.masked.tolist() == [[False, True]]
    assert found.scores.isfinite().all()
    assert stream_components(model, TEXT, layer=3).reconstruction_error < 1e-5


def test_spectra_and_composition_take_latent_circuits(tiny):
    heads = HeadWeights.from_model(tiny("deepseek_v3"))

    def dense(layer, head, part=None):
        circuit = heads.qk(layer, head, offset=3, part=part) if part else heads.ov(layer, head)
        return circuit.matrix().double()

    for part in (None, "content", "rotary"):
        kind = "QK" if part else "OV"
        values = spectra(heads, kind, offset=3, part=part).singular_values
        for layer, head in ((0, 0), (2, 1)):
            expected = torch.linalg.svdvals(dense(layer, head, part))[: values.shape[-1]]
            torch.testing.assert_close(
                values[layer, head].double(), expected, rtol=1e-4, atol=1e-5 * float(expected[0])
            )
    for mode, part in (("V", None), ("K", "content"), ("Q", "rotary")):
        scores = composition(heads, mode, offset=3, part=part).scores
        read = dense(2, 1, part).T if mode == "K" else dense(2, 1, part)
        wrote = dense(0, 2)
        expected = (wrote @ read).norm() / (wrote.norm() * read.norm())
        assert float(scores[0, 2, 2, 1]) == pytest.approx(float(expected), rel=1e-4)
    for call in (
        lambda: spectra(heads, "QK"),
        lambda: composition(heads, "K"),
        lambda: top_tokens(heads, "QK", 0, 0, 5),
    ):
        with pytest.raises(UnsupportedError, match="part='content'"):
            call()
