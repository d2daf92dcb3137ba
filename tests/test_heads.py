"""HeadWeights against the model, dense brute force and TransformerLens."""

import copy
from dataclasses import replace

import pytest
import torch

from wvprobe._rotary import Rotary
from wvprobe.activations import capture
from wvprobe.adapters import architecture, reading, run_backbone, shaped
from wvprobe.errors import InputError, ShapeError, UnsupportedError
from wvprobe.heads import HeadWeights
from wvprobe.testing import FAMILIES, tiny_model

TEXT = "The river bank is close to here."


def raw(model, sites, layer=1):
    """Read hook points on one text: {site: [pos, ...] or [head, query, key]}."""
    arch, seen = architecture(model), {}
    tokens = model.to_tokens(TEXT)

    def receive(site, _layer, value):
        seen[site] = shaped(arch, site, value, 1, tokens.shape[1])[0]

    with reading(model, arch, [(site, layer) for site in sites], receive):
        run_backbone(model, tokens, torch.ones_like(tokens))
    return seen


@pytest.fixture(params=[family for family in FAMILIES if family != "deepseek_v3"])
def family(request):
    """Return each family whose scores are one circuit; test_latent.py has the other."""
    return request.param


def test_weights_reproduce_projections_in_float64(family):
    model = tiny_model(family, dtype="float64")
    seen = raw(model, ["resid_pre", "attn_in", "q", "k", "v"])
    for fold in (False, True):
        heads = HeadWeights.from_model(model, fold_norm=fold)
        x_hat = heads.normalize(seen["resid_pre"], 1)
        for site, project in (("q", heads.queries), ("k", heads.keys), ("v", heads.values)):
            error = (project(x_hat, 1) - seen[site]).norm() / seen[site].norm()
            assert error < 2e-6, (site, fold)
    unfolded = HeadWeights.from_model(model, fold_norm=False)
    # From what attention itself read, only our own algebra is at work.
    values = unfolded.values(seen["attn_in"], 1)
    torch.testing.assert_close(values, seen["v"], rtol=1e-9, atol=1e-9)


def test_circuits_equal_scores_and_values_in_float64(family):
    heads = HeadWeights.from_model(tiny_model(family, dtype="float64"))
    x = torch.randn(11, heads.d_model, dtype=torch.float64)
    scores = heads.scores(x, 2)
    for head in (0, heads.n_heads - 1):
        i, j = 9, 4
        circuit = heads.qk(2, head, offset=i - j)
        found = circuit.bilinear(x[i], x[j])
        if heads.qk_norms[2] is not None:
            kv = heads.kv_head(head)
            q = x[i] @ heads.W_Q[2, head] + heads.b_Q[2, head]
            k = x[j] @ heads.W_K[2, kv] + heads.b_K[2, kv]
            found = found / (heads.qk_norms[2][0].scale(q) * heads.qk_norms[2][1].scale(k))[0]
        if heads.slopes is not None:
            found = found + heads.slopes[head] * j
        torch.testing.assert_close(found, scores[head, i, j], rtol=1e-9, atol=1e-9)
        ov = heads.ov(2, head)
        written = heads.values(x, 2)[:, heads.kv_head(head)] @ heads.W_O[2, head]
        torch.testing.assert_close(ov.apply(x), written, rtol=1e-9, atol=1e-9)


def test_folding_is_none_for_a_post_norm_model(tiny):
    heads = HeadWeights.from_model(tiny("bert"))
    assert not heads.folded
    x = torch.randn(3, heads.d_model)
    assert heads.normalize(x, 0) is x


def test_folding_centres_layer_norms_and_only_them(tiny):
    centred = HeadWeights.from_model(tiny("gpt2")).W_V.mean(dim=-2).abs().max()
    assert centred < 1e-7
    assert HeadWeights.from_model(tiny("llama")).W_V.mean(dim=-2).abs().max() > 1e-3


def test_unembedding_gives_the_logits(family, tiny):
    model = tiny(family)
    heads = HeadWeights.from_model(model)
    if family == "bert":
        with pytest.raises(UnsupportedError, match="not linear in the final stream"):
            _ = heads.W_U
        return
    final = raw(model, ["resid_post"], layer=2)["resid_post"]
    found = final / heads.unembedding.norm.scale(final) @ heads.W_U + heads.b_U
    if heads.unembedding.soft_cap is not None:
        cap = heads.unembedding.soft_cap
        found = cap * torch.tanh(found / cap)
    torch.testing.assert_close(found, model(model.to_tokens(TEXT))[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "bloom", "llama", "gemma2", "opt"])
def test_embedding_is_what_enters_the_stream(family, tiny):
    model = tiny(family)
    heads, tokens = HeadWeights.from_model(model), model.to_tokens(TEXT)[0]
    expected = raw(model, ["resid_pre"], layer=0)["resid_pre"]
    found = heads.W_E[tokens]
    if heads.W_pos is not None:
        found = found + heads.W_pos[: len(tokens)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_map_of_grouped_heads_is_right(tiny):
    """Field line 1: with 6 query and 2 key-value heads, query heads 0-2 read 0, 3-5 read 1."""
    heads = HeadWeights.from_model(tiny("llama"))
    assert [heads.kv_head(h) for h in range(6)] == [0, 0, 0, 1, 1, 1]
    assert heads.W_V.shape[1] == 2 and heads.W_O.shape[1] == 6
    assert torch.equal(heads.ov(1, 4).left, heads.W_V[1, 1])
    assert torch.equal(heads.ov(1, 4).right, heads.W_O[1, 4])


def test_a_patched_kv_head_reaches_its_own_group_of_query_heads():
    """Field line 2: hooks on keys and values where there are fewer of them than query heads."""
    model = tiny_model("llama")

    def without_head_one(value, hook):
        value = value.clone()
        value[:, :, 1] = 0
        return value

    plain = capture(model, TEXT, ["head_out", "v"], layers=1)
    with model.hooks(fwd_hooks=[("blocks.1.attn.v.hook_out", without_head_one)]):
        patched = capture(model, TEXT, ["head_out", "v"], layers=1)
    assert patched["v"].shape[-2] == 2
    assert torch.equal(patched["v"][..., 0, :], plain["v"][..., 0, :])
    heads = patched["head_out"][0, :, 0]
    torch.testing.assert_close(heads[:, :3], plain["head_out"][0, :, 0, :3])
    assert not heads[:, 3:].any()


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "bert"])
def test_the_value_bias_is_a_constant_of_the_block(family, tiny):
    """Field line 5: pattern rows sum to 1, so b_V adds the same to every token's output."""
    model = tiny(family)
    heads = HeadWeights.from_model(model, fold_norm=False)
    seen = raw(model, ["attn_in", "pattern", "attn_out"])
    group = heads.n_heads // heads.n_kv_heads
    values = torch.einsum("pd,kde->kpe", seen["attn_in"], heads.W_V[1])
    values = values.repeat_interleave(group, dim=0)
    without = torch.einsum("hqp,hpe,hed->qd", seen["pattern"], values, heads.W_O[1])
    biases = heads.b_V[1].repeat_interleave(group, dim=0)
    constant = torch.einsum("he,hed->d", biases, heads.W_O[1]) + heads.b_O[1]
    torch.testing.assert_close(without + constant, seen["attn_out"], rtol=1e-4, atol=1e-5)
    assert constant.norm() > 0.1


def test_unfolded_circuits_equal_transformer_lens(tiny):
    """Their QK leaves out scale and rotation, which ours at offset None without scale does too."""
    model = tiny("llama")
    heads = HeadWeights.from_model(model, fold_norm=False)
    theirs = model.OV[1, 4].AB
    torch.testing.assert_close(heads.ov(1, 4).matrix(), theirs, rtol=1e-5, atol=1e-5)
    ours = heads.qk(1, 4, offset=None).matrix() / heads.scale[1]
    torch.testing.assert_close(ours, model.QK[1, 4].AB, rtol=1e-5, atol=1e-5)


def test_scale_soft_cap_and_windows_are_the_models_own(tiny):
    """Field line 10: Gemma-2's scale is no 1/√d_head."""
    gemma = HeadWeights.from_model(tiny("gemma2"))
    assert gemma.scale[0] == pytest.approx(13**-0.5)
    assert gemma.soft_cap == (3.0,) * 3
    assert gemma.sliding_window == (5, None, 5)
    assert HeadWeights.from_model(tiny("mistral")).sliding_window == (5,) * 3
    assert HeadWeights.from_model(tiny("llama")).scale[0] == pytest.approx(14**-0.5)


@pytest.mark.parametrize(
    ("parameters", "scaling"),
    [
        ({"rope_type": "default", "rope_theta": 777.0}, 1.0),
        ({"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}, 1.0),
        (
            {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 31,
            },
            1.0,
        ),
        (
            {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 31,
            },
            1.1386294361119891,  # 0.1 ln 4 + 1, Peng et al. 2023, eq. 22
        ),
    ],
)
def test_rope_scaling_is_read_from_what_turns(parameters, scaling):
    model = tiny_model("llama", rope_parameters=parameters)
    heads = HeadWeights.from_model(model)
    assert heads.rotary[0].kind == parameters["rope_type"]
    assert heads.rotary[0].scaling == pytest.approx(scaling)
    seen = raw(model, ["resid_pre", "pattern"])
    x_hat = heads.normalize(seen["resid_pre"], 1)
    pattern = heads.pattern(heads.scores(x_hat, 1), 1)
    torch.testing.assert_close(pattern, seen["pattern"], rtol=1e-4, atol=1e-5)


def test_gemma3_has_two_bases(tiny):
    rotary = HeadWeights.from_model(tiny("gemma3")).rotary
    assert torch.equal(rotary[0].inv_freq, rotary[2].inv_freq)
    assert not torch.equal(rotary[0].inv_freq, rotary[1].inv_freq)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_are_held_in_float32(dtype):
    assert HeadWeights.from_model(tiny_model("qwen2", dtype=dtype)).W_Q.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_learned_positions_and_factors_are_upcast_too(dtype):
    heads = HeadWeights.from_model(tiny_model("gpt2", dtype=dtype))
    assert heads.W_pos.dtype == heads.W_E.dtype == heads.W_U.dtype == torch.float32
    circuit = heads.qk(1, 2)
    assert circuit.left.dtype == circuit.right_bias.dtype == torch.float32
    assert circuit.eigenvalues.isfinite().all()  # field line 3: bf16 has no LAPACK


def test_float64_stays():
    heads = HeadWeights.from_model(tiny_model("qwen3", dtype="float64"))
    factors = (*heads.ov_factors(1), *heads.qk_factors(1, offset=3), heads.W_E, heads.W_U)
    assert {t.dtype for t in factors} == {torch.float64}


def test_one_layer_of_one_head():
    """Field line 3: leading dimensions of 1."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    heads = HeadWeights.from_model(tiny_model("llama", **sizes))
    assert (heads.n_layers, heads.n_heads, heads.n_kv_heads) == (1, 1, 1)
    assert heads.ov(0, 0).singular_values.shape == (14,) and heads.qk(0, 0).svd().U.shape == (
        42,
        14,
    )
    left, right = heads.qk_factors(0, offset=2)
    assert left.shape == right.shape == (1, 42, 14)
    assert heads.scores(torch.randn(1, 42), 0).shape == (1, 1, 1)


@pytest.mark.parametrize(
    ("path", "at", "told"),
    [
        ("blocks.1.attn.q.weight", (30, 3), "`W_Q` must be finite.*layer 1, head 2. Look"),
        ("blocks.2.attn.v.weight", (15, 3), "`W_V` must be finite.*layer 2, key-value head 1"),
        ("blocks.0.attn.o.weight", (3, 80), "`W_O` must be finite.*layer 0, head 5"),
        ("embed.weight", (77, 3), "`W_E` must be finite.*token 77"),
        ("unembed.weight", (78, 3), "`W_U` must be finite.*token 78"),
        ("blocks.1.ln1.weight", (3,), r"weight of blocks\.1\.input_layernorm.* holds NaN"),
        ("ln_final.weight", (3,), r"weight of ln_final in tiny:llama holds NaN"),
    ],
)
def test_nan_in_a_model_is_named(path, at, told):
    model = tiny_model("llama")
    component, _, name = path.rpartition(".")
    with torch.no_grad():
        getattr(model.get_submodule(component).original_component, name)[at] = float("nan")
    with pytest.raises(InputError, match=told):
        HeadWeights.from_model(model)


class ALayerAtATime:
    """What a field read from disk can do, and nothing else."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tensor.shape
        self.dtype, self.device = tensor.dtype, tensor.device

    def __getitem__(self, at):
        layer, *head = at if isinstance(at, tuple) else (at,)
        assert isinstance(layer, int) and all(isinstance(h, int) for h in head) and len(head) < 2
        return self.tensor[at]


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "bloom", "deepseek_v3"])
def test_methods_read_a_layer_at_a_time(family, tiny):
    """So that an 8-billion-parameter model needs no more memory than one of its layers."""
    whole = HeadWeights.from_model(tiny(family))
    lazy = copy.copy(whole)
    for name in (f"{kind}_{x}" for kind in "Wb" for x in "QKVO"):
        object.__setattr__(lazy, name, ALayerAtATime(getattr(whole, name)))
    part = {"part": "rotary"} if whole.latent is not None else {}
    x = torch.randn(7, whole.d_model)

    def read(heads):
        yield from (heads.n_layers, heads.n_heads, heads.n_kv_heads, heads.d_model, heads.d_head)
        yield from (heads.d_head_v, heads.device, heads.kv_head(2))
        yield from (heads.ov(1, 2).left, heads.qk(1, 2, offset=3, **part).left)
        yield from (*heads.ov_factors(1), *heads.qk_factors(1, offset=3, **part))
        yield from (heads.queries(x, 1), heads.keys(x, 1), heads.values(x, 1))
        yield from (heads.scores(x, 1), heads.pattern(heads.scores(x, 1), 1), heads.W_U)
        if family == "gpt2":
            yield heads.qk_between(0, 2, query="token", key="position").left

    for one, other in zip(read(whole), read(lazy), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


class TestFromTensors:
    """Anyone's own model."""

    @staticmethod
    def tensors(**changed):
        shapes = {
            "W_Q": (2, 6, 13, 5),
            "W_K": (2, 3, 13, 5),
            "W_V": (2, 3, 13, 7),
            "W_O": (2, 6, 7, 13),
        }
        shapes.update(changed)
        return {name: torch.randn(shape) for name, shape in shapes.items()}

    def test_a_custom_model_gives_circuits(self):
        given = self.tensors()
        heads = HeadWeights.from_tensors(**given)
        assert heads.scale == (5**-0.5,) * 2
        expected = given["W_V"][1, 2] @ given["W_O"][1, 5]
        torch.testing.assert_close(heads.ov(1, 5).matrix(), expected)
        expected = given["W_Q"][0, 3] @ given["W_K"][0, 1].T / 5**0.5
        torch.testing.assert_close(heads.qk(0, 3).matrix(), expected)

    def test_rotation_acts_through_the_offset_only(self):
        rotary = Rotary(torch.tensor([1.0, 0.1], dtype=torch.float64))
        heads = HeadWeights.from_tensors(**self.tensors(), rotary=rotary)
        x = torch.randn(9, 13)
        scores = heads.scores(x, 0)[4]
        torch.testing.assert_close(heads.qk(0, 4, offset=3).bilinear(x[8], x[5]), scores[8, 5])
        torch.testing.assert_close(heads.qk(0, 4, offset=-3).bilinear(x[5], x[8]), scores[5, 8])

    @pytest.mark.parametrize(
        ("changed", "told"),
        [
            (
                {"W_K": (2, 3, 13, 4)},
                r"`W_K` must be .*d_head = 5 as in `W_Q`.*shape \[2, 3, 13, 4",
            ),
            ({"W_V": (2, 2, 13, 7)}, "`W_V` must be .*kv_head = 3 as in `W_K`"),
            ({"W_O": (2, 6, 13, 7)}, "`W_O` must be .*d_head_v = 7 as in `W_V`"),
            ({"W_Q": (6, 13, 5)}, r"`W_Q` must be .*Add the layer axis: W_Q\[None\]"),
            ({"W_K": (2, 4, 13, 5), "W_V": (2, 4, 13, 7)}, "6 heads and `W_K` 4"),
        ],
    )
    def test_shape_errors_say_which(self, changed, told):
        with pytest.raises(ShapeError, match=told):
            HeadWeights.from_tensors(**self.tensors(**changed))

    def test_nan_weights_are_named(self):
        given = self.tensors()
        given["W_V"][1, 2, 0, 0] = float("nan")
        with pytest.raises(InputError, match="`W_V` must be finite.*layer 1, key-value head 2"):
            HeadWeights.from_tensors(**given)

    def test_heads_and_layers_out_of_range_are_refused(self):
        heads = HeadWeights.from_tensors(**self.tensors())
        with pytest.raises(InputError, match=r"`head` must be in 0\.\.5. Got 6 instead"):
            heads.ov(0, 6)
        with pytest.raises(InputError, match=r"`layer` must be in 0\.\.1. Got -1 instead"):
            heads.qk(-1, 0)

    def test_no_head_is_refused_by_name(self):
        with pytest.raises(UnsupportedError, match="no W_U was given"):
            _ = HeadWeights.from_tensors(**self.tensors()).W_U


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma2"])
def test_factors_of_a_layer_are_those_of_its_circuits(family, tiny):
    heads = HeadWeights.from_model(tiny(family))
    left, right = heads.qk_factors(1, offset=5)
    values, outputs = heads.ov_factors(1)
    for head in range(heads.n_heads):
        kv = heads.kv_head(head)
        torch.testing.assert_close(left[head] @ right[kv].mT, heads.qk(1, head, offset=5).matrix())
        torch.testing.assert_close(values[kv] @ outputs[head], heads.ov(1, head).matrix())
        assert heads.qk(1, head).head == heads.ov(1, head).head == (1, head)
    # Unless told otherwise, a token and itself: rotations by 0.
    for one, other in zip(heads.qk_factors(1), heads.qk_factors(1, offset=None), strict=True):
        torch.testing.assert_close(one, other)


def test_large_key_biases_in_half_precision_neither_overflow_nor_cancel():
    """Pythia's keys have biases of norm 300: rotation keeps them alive."""
    model = tiny_model("gpt_neox", dtype="float16")
    with torch.no_grad():
        for layer in range(3):
            bias = model.blocks[layer].attn.k.original_component.bias
            bias.add_(300 / bias.numel() ** 0.5)
    heads = HeadWeights.from_model(model)
    assert float(heads.b_K[0].norm()) > 250
    x_hat = 3 * torch.randn(1, 9, heads.d_model, generator=torch.Generator().manual_seed(0))
    scores = heads.scores(x_hat, 0)
    names = ("W_Q", "W_K", "b_Q", "b_K")
    exact = replace(heads, **{name: getattr(heads, name).double() for name in names})
    expected = exact.scores(x_hat.double(), 0)
    assert scores.isfinite().all()
    torch.testing.assert_close(scores.double(), expected, rtol=0, atol=1e-5 * expected.abs().max())
    # What b_K adds to a row varies with the key's distance; without rotation it would not.
    added = expected - replace(exact, b_K=0 * exact.b_K).scores(x_hat.double(), 0)
    assert float(added.std(dim=-1).min()) > 1
    still = replace(exact, rotary=(None,) * 3)
    added = still.scores(x_hat.double(), 0) - replace(still, b_K=0 * still.b_K).scores(
        x_hat.double(), 0
    )
    assert float(added.std(dim=-1).max()) < 1e-9 * float(added.abs().max())
