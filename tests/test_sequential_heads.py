"""Heads in sequence: against plain forwards, plain loops, and what holds of any such rewrite."""

from contextlib import nullcontext

import pytest
import torch

import wvprobe
from wvprobe import adapters
from wvprobe._types import Result
from wvprobe.activations import read_sites
from wvprobe.counterfactual import SequentialResult, sequential_heads
from wvprobe.counterfactual._rewrites import in_sequence
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.plotting import figure
from wvprobe.testing import FAMILIES, _hf_model, tiny_model
from wvprobe.words import encode

TEXTS = ("The bank by the river was old and grey.", "The old boat.")
LAYER = 1


def precise(family):
    """Return a model of the family's own, in double precision where transformers has it."""
    # Its experts are multiplied by a kernel that knows no double precision.
    return tiny_model(family, dtype="float32" if family == "deepseek_v3" else "float64")


def tolerance(family):
    # transformers casts norms and softmax to single precision in double precision, too.
    return 1e-4 if family == "deepseek_v3" else 2e-6


def sequence(model, order, layers=(LAYER,)):
    arch = adapters.architecture(model)
    return adapters.rewriting(model, arch, {layer: in_sequence(order) for layer in layers})


def last(model, context=None, texts=TEXTS):
    with context or nullcontext():
        return read_sites(model, texts, "resid_post", layers=2)["resid_post"][:, :, 0].double()


def distance(a, b):
    return float((a - b).norm() / b.norm())


def out_weight(model, layer):
    """Return W_O as a parameter and its axis of heads times d_head_v."""
    component = model.blocks[layer].attn.o.original_component
    return component.weight, 0 if type(component).__name__ == "Conv1D" else 1


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_in_sequence_is_what_forwards_with_changed_inputs_say(family):
    """Head after head by whole forwards: the block's input changed, one head's z read."""
    model = precise(family)
    arch = adapters.architecture(model)
    order = torch.randperm(arch.n_heads, generator=torch.Generator().manual_seed(3)).tolist()
    weight = adapters.output_weight(model, arch, LAYER)
    norm = adapters.post_attention_norm(model, arch, LAYER)
    text = TEXTS[:1]
    seen = read_sites(model, text, ["z", "attn_out"], layers=LAYER)
    out = seen["attn_out"][:, :, 0]
    scale = 1.0 if norm is None else norm.scale(out)
    z, before = torch.zeros_like(seen["z"][:, :, 0]), torch.zeros_like(out)
    for head in order:
        moved = {("resid_pre", LAYER): lambda x, by=before: x + by}
        with adapters.changing(model, arch, moved):
            z[:, :, head] = read_sites(model, text, "z", layers=LAYER)["z"][:, :, 0, head]
        share = z[:, :, head] @ weight[head]
        before = before + (share if norm is None else norm.linear(share, scale))
    bias = adapters.output_bias(model, LAYER)
    if norm is not None:
        # No model has both: the norm acts on heads' shares and b_O alike.
        bias = None if bias is None else norm.linear(bias, scale)
    added = before if bias is None else before + bias
    with sequence(model, order):
        found = read_sites(model, text, ["z", "attn_added"], layers=LAYER)
    assert distance(found["z"][:, :, 0], z) < tolerance(family)
    assert distance(found["attn_added"][:, :, 0], added) < tolerance(family)
    assert distance(found["z"], seen["z"]) > 1e-3
    with adapters.changing(model, arch, {("attn_added", LAYER): lambda _value: added}):
        expected = last(model, texts=text)
    assert distance(last(model, sequence(model, order), text), expected) < tolerance(family)


def _llama(weights, ids, order, n_heads=6, n_kv=2, d=14, base=10_000.0, eps=1e-6):
    """Run tiny llama with its heads in sequence; norms, softmax, angles in float32 as there."""
    x = weights["model.embed_tokens.weight"][ids]
    n = len(ids)
    frequency = 1.0 / base ** (torch.arange(0, d, 2).float() / d)
    angle = torch.arange(n).float()[:, None] * frequency
    cos, sin = (torch.cat((t, t), dim=-1).double() for t in (angle.cos(), angle.sin()))
    ahead = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)

    def norm(x, gain):
        wide = x.float()
        return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).double()

    def turn(x):
        return x * cos + torch.cat((-x[:, d // 2 :], x[:, : d // 2]), dim=-1) * sin

    for layer in range(3):
        own = {
            name.split(f"layers.{layer}.")[1]: value
            for name, value in weights.items()
            if f"layers.{layer}." in name
        }
        for head in order:
            kv = head // (n_heads // n_kv)
            x_hat = norm(x, own["input_layernorm.weight"])
            q = turn(x_hat @ own["self_attn.q_proj.weight"][head * d : (head + 1) * d].T)
            k = turn(x_hat @ own["self_attn.k_proj.weight"][kv * d : (kv + 1) * d].T)
            v = x_hat @ own["self_attn.v_proj.weight"][kv * d : (kv + 1) * d].T
            scores = (q @ k.T * d**-0.5).masked_fill(ahead, -torch.inf)
            pattern = scores.softmax(dim=-1, dtype=torch.float32).double()
            x = x + pattern @ v @ own["self_attn.o_proj.weight"][:, head * d : (head + 1) * d].T
        y = norm(x, own["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(y @ own["mlp.gate_proj.weight"].T)
        x = x + (gate * (y @ own["mlp.up_proj.weight"].T)) @ own["mlp.down_proj.weight"].T
    return x


def _gpt2(weights, ids, order, n_heads=5, d=7, eps=1e-5):
    """Run tiny GPT-2 with its heads in sequence; b_O once, after them."""
    size, n = n_heads * d, len(ids)
    x = weights["transformer.wte.weight"][ids] + weights["transformer.wpe.weight"][:n]
    ahead = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
    for layer in range(3):
        own = {
            name.split(f"h.{layer}.")[1]: value
            for name, value in weights.items()
            if f".h.{layer}." in name
        }

        def norm(x, name, own=own):
            gain, bias = own[f"{name}.weight"], own[f"{name}.bias"]
            return torch.nn.functional.layer_norm(x, (size,), gain, bias, eps)

        for head in order:
            fused = norm(x, "ln_1") @ own["attn.c_attn.weight"] + own["attn.c_attn.bias"]
            q, k, v = (part[:, head * d : (head + 1) * d] for part in fused.split(size, dim=-1))
            scores = (q @ k.T * d**-0.5).masked_fill(ahead, -torch.inf)
            x = x + scores.softmax(-1) @ v @ own["attn.c_proj.weight"][head * d : (head + 1) * d]
        x = x + own["attn.c_proj.bias"]
        y = norm(x, "ln_2") @ own["mlp.c_fc.weight"] + own["mlp.c_fc.bias"]
        y = torch.nn.functional.gelu(y, approximate="tanh")
        x = x + y @ own["mlp.c_proj.weight"] + own["mlp.c_proj.bias"]
    return x


@pytest.mark.parametrize(("family", "plain"), [("llama", _llama), ("gpt2", _gpt2)])
def test_all_blocks_in_sequence_are_plain_loops(family, plain):
    model = tiny_model(family, dtype="float64")
    weights = {k: v.double() for k, v in _hf_model(family, 0, {}).state_dict().items()}
    n_heads = adapters.architecture(model).n_heads
    ids = torch.tensor(encode(model, TEXTS[0]).ids)
    for order in (range(n_heads), [3, 0, 4, 2, 1, *range(5, n_heads)]):
        expected = plain(weights, ids, order)
        found = last(model, sequence(model, order, range(3)), TEXTS[:1])
        assert distance(found[0], expected) < 1e-9
    assert distance(last(model, texts=TEXTS[:1])[0], expected) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_that_write_nothing_to_each_other_run_as_they_did(family):
    """All of W_O zero but one head's: the cross-terms vanish, in any order, b_O staying."""
    model = precise(family)
    arch = adapters.architecture(model)
    for layer in range(3):
        weight, axis = out_weight(model, layer)
        with torch.no_grad():
            per_head = weight.movedim(axis, 0).unflatten(0, (arch.n_heads, arch.d_head_v))
            per_head[[head for head in range(arch.n_heads) if head != 1]] = 0.0
    parallel = last(model)
    for order in (range(arch.n_heads), range(arch.n_heads)[::-1]):
        assert distance(last(model, sequence(model, order, range(3))), parallel) < tolerance(family)


QUICK = ("gpt2", "gemma2", "bert", "phi")  # one of each wiring; the others are slow tests


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in QUICK else pytest.mark.slow)
        for family in FAMILIES
        if family != "deepseek_v3"
    ],
)
def test_the_difference_shrinks_as_the_square_of_the_heads_scale(family):
    model = precise(family)
    arch = adapters.architecture(model)
    norm = model.blocks[LAYER].ln1_post.original_component.weight if arch.sandwich else None
    weight = out_weight(model, LAYER)[0] if norm is None else norm
    whole, found = weight.detach().clone(), []
    for factor in (1 / 16, 1 / 32):
        with torch.no_grad():
            # A norm takes the scale of W_O away; its own gain, 1 + g, has it (which transformers
            # takes in single precision).
            weight.copy_(whole * factor if norm is None else ((1 + whole) * factor - 1).float())
        change = last(model, sequence(model, range(arch.n_heads))) - last(model)
        found.append(float(change.norm()))
    assert found[0] / found[1] == pytest.approx(4.0, rel=0.1)


@pytest.mark.parametrize("family", ["opt", "bloom", "mistral", "bert", "deepseek_v3"])
def test_texts_of_unlike_length_run_together_as_alone(family, tiny):
    model = tiny(family)
    arch = adapters.architecture(model)
    assert len({len(encode(model, text).ids) for text in TEXTS}) == 2

    def run(size):
        with sequence(model, range(arch.n_heads), range(3)):
            return read_sites(model, TEXTS, "resid_post", batch_size=size)["resid_post"]

    assert distance(run(2), run(1)) < 2e-5


def test_readers_see_one_call_and_hooks_that_change_act_in_all(tiny):
    model = tiny("llama")
    arch = adapters.architecture(model)
    sites = ["attn_in", "q", "k", "v", "pattern", "z", "attn_out"]
    plain = read_sites(model, TEXTS, sites, layers=LAYER)
    with sequence(model, range(6)):
        inside = read_sites(model, TEXTS, sites, layers=LAYER)
    for site in sites[:5]:
        assert torch.equal(inside[site].nan_to_num(), plain[site].nan_to_num()), site
    assert torch.equal(inside["z"][..., 0, :], plain["z"][..., 0, :])
    assert not torch.allclose(inside["z"], plain["z"], atol=1e-3)
    weight = adapters.output_weight(model, arch, LAYER)
    expected = torch.einsum("bplhr,hrd->bpld", inside["z"], weight)
    torch.testing.assert_close(inside["attn_out"], expected, atol=1e-5, rtol=1e-4)
    # A head without values moves nobody, whether it comes first or last.
    calls = []

    def silent(z):
        calls.append(1)
        return z * (torch.arange(6) != 0)[:, None]

    with adapters.changing(model, arch, {("z", LAYER): silent}):
        found = [last(model, sequence(model, order)) for order in (range(6), [*range(1, 6), 0])]
    torch.testing.assert_close(*found)
    # Two runs of one batch, attention once a head in each.
    assert len(calls) == 2 * 6


@pytest.mark.parametrize("family", ["llama", "bloom", "phi", "bert"])
def test_a_changed_input_is_what_heads_start_from(family, tiny):
    """Whichever of the two is opened first."""
    model = tiny(family)
    arch = adapters.architecture(model)

    def moved():
        return adapters.changing(model, arch, {("resid_pre", LAYER): lambda x: x.flip(-1)})

    def run(first, second):
        with first, second:
            return read_sites(model, TEXTS[:1], "z", layers=LAYER)["z"]

    order = range(arch.n_heads)
    outside, inside = run(moved(), sequence(model, order)), run(sequence(model, order), moved())
    torch.testing.assert_close(inside, outside)
    assert distance(outside, run(sequence(model, order), nullcontext())) > 1e-2


def test_callers_own_hooks_stay(tiny):
    model, seen = tiny("gpt2"), []
    handle = model.blocks[LAYER].attn.hook_pattern.register_forward_hook(
        lambda _module, _inputs, value: seen.append(value.shape)
    )
    try:
        last(model, sequence(model, range(5)), TEXTS[:1])
        assert len(seen) == 5
        last(model, texts=TEXTS[:1])
        assert len(seen) == 6
    finally:
        handle.remove()


def test_nothing_is_left_behind(tiny):
    model = tiny("gemma2")
    arch = adapters.architecture(model)
    before, weights = last(model), adapters.weight_hash(model)

    def hooks():
        parts = model.modules()
        return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in parts)

    count = hooks()

    def fail(_call):
        raise UnsupportedError("not here")

    with pytest.raises(UnsupportedError, match="not here"):
        last(model, adapters.rewriting(model, arch, {0: in_sequence(range(6)), 1: fail}))
    with pytest.raises(UnsupportedError, match="not here"), sequence(model, range(6)):
        deep = {("q", LAYER): fail}
        last(model, adapters.changing(model, arch, deep))
    sequential_heads(model, TEXTS, layers="all")
    assert hooks() == count and adapters.weight_hash(model) == weights
    assert torch.equal(last(model), before)


def test_a_cache_is_refused(tiny):
    model = tiny("llama")
    ids = torch.tensor([encode(model, TEXTS[1]).ids])
    with pytest.raises(UnsupportedError, match="use_cache=False"), sequence(model, range(6)):
        model.original_model(input_ids=ids, use_cache=True)


def test_settings_and_their_rows(tiny, tmp_path):
    model = tiny("llama")
    found = sequential_heads(model, TEXTS, orders=4, seed=7)
    frame = found.to_frame()
    assert found.settings[:4] == (
        "block 0, natural",
        "block 1, natural",
        "block 2, natural",
        "all blocks, natural",
    )
    assert found.settings[-2:] == ("all blocks, random 2", "bf16 rounding") and len(frame) == 17
    assert found.order_names == ("natural", "reversed", "random 1", "random 2")
    assert frame["layers"].tolist()[:4] == ["0", "1", "2", "all"]
    assert frame["order"].tolist()[-2:] == ["random 2", ""]
    assert found.permutations.shape == (4, 3, 6)
    assert torch.equal(found.permutations.sort(dim=-1).values, torch.arange(6).expand(4, 3, 6))
    assert found.permutations[1, 2].tolist() == [5, 4, 3, 2, 1, 0]
    assert not torch.equal(found.permutations[2, 0], found.permutations[2, 1])
    again = sequential_heads(model, TEXTS, layers=[[0, 2], [1]], orders=["random"], seed=7)
    assert again.settings == ("blocks 0, 2, random 1", "block 1, random 1", "bf16 rounding")
    assert torch.equal(again.permutations[0], found.permutations[2])
    row = found.settings.index("block 1, random 1")
    torch.testing.assert_close(again.kl[1], found.kl[row])
    assert again.provenance.settings["layers"] == [[0, 2], [1]]
    one = sequential_heads(model, TEXTS, layers=[2, 0])
    assert one.settings[0] == "blocks 0, 2, natural" and one.layers == ((0, 2), ())
    loaded = Result.load(found.save(tmp_path / "found"))
    assert isinstance(loaded, SequentialResult) and loaded.layers == found.layers
    assert set(found.AXES) <= set(vars(found))


def test_a_row_is_its_rewrite(tiny):
    """Each setting against a run of its own, by the measures' own formulas."""
    model = tiny("qwen2")
    found = sequential_heads(model, TEXTS, layers=[[1], [0, 1, 2]], orders=2)
    order = [5, 4, 3, 2, 1, 0]
    row = found.settings.index("all blocks, reversed")
    mask = torch.tensor([[not s for s in encode(model, TEXTS[0]).special]])[0]
    before, after = (
        last(model, texts=TEXTS[:1])[0],
        last(model, sequence(model, order, range(3)), TEXTS[:1])[0],
    )
    change = ((after - before).norm(dim=-1) / before.norm(dim=-1))[mask].mean()
    assert float(found.relative_change[row, 0]) == pytest.approx(float(change), rel=1e-4)
    assert float(found.kl.min()) > 0 and float(found.kl[-1].max()) < float(found.kl[:-1].min())


def test_one_head_is_no_sequence():
    model = tiny_model("gpt2", n_head=1)
    found = sequential_heads(model, TEXTS, orders=2)
    assert float(found.relative_change[:-1].max()) == 0.0


@pytest.mark.parametrize("missing", ["", "the checkpoint has no head"])
def test_encoders_and_models_without_a_head(missing):
    model = tiny_model("bert")
    model._wvprobe_missing_head = missing
    found = sequential_heads(model, TEXTS, layers="all")
    assert found.loss.isnan().all() and found.loss_delta.isnan().all()
    assert bool(found.kl.isnan().all()) == bool(missing)
    assert found.measure == ("relative_change" if missing else "kl")
    for values in (found.relative_change, found.final_distance, found.pooled_distance):
        assert float(values[0].min()) > 10 * float(values[-1].max()) > 0
    title = figure(found).layout.title.text
    assert ("last stream" if missing else "KL") in title


def test_what_is_no_set_of_blocks_or_order_is_refused(tiny):
    model = tiny("llama")
    for bad in (
        {"layers": "every"},
        {"layers": -1},
        {"layers": 3},
        {"layers": []},
        {"layers": [[0], []]},
        {"layers": [0, 0]},
        {"orders": 0},
        {"orders": True},
        {"orders": []},
        {"orders": ["shuffled"]},
        {"orders": ["natural", "natural"]},
        {"texts": ["  "]},
    ):
        with pytest.raises(InputError):
            sequential_heads(model, **{"texts": TEXTS, **bad})


def test_blocks_are_drawn_beside_all_of_them_over_the_rounding(tiny):
    found = sequential_heads(tiny("llama"), TEXTS, orders=2)
    drawn = figure(found)
    mean, low, high = found.interval("kl")
    natural = drawn.data[0]
    assert natural.name == "natural" and list(natural.y) == mean[:4].tolist()
    assert list(natural.x) == ["0", "1", "2", "all"]
    torch.testing.assert_close(torch.tensor(natural.error_y.array), (high - mean)[:4].float())
    torch.testing.assert_close(torch.tensor(natural.error_y.arrayminus), (mean - low)[:4].float())
    assert drawn.data[1].name == "reversed" and list(drawn.data[1].y) == mean[4:8].tolist()
    line, label = drawn.layout.shapes[0], drawn.layout.annotations[0]
    assert line.y0 == pytest.approx(float(mean[-1])) == pytest.approx(10**label.y)
    ends = sorted((float(mean[row]), found.orders[row]) for row in (3, 7))
    said = " to ".join(f"{value:.3g} ({order})" for value, order in ends)
    assert f"all blocks: {said}" in drawn.layout.title.text
    assert f"{float(torch.cat((mean[:3], mean[4:7])).max()):.3g}" in drawn.layout.title.text


def test_half_precision_is_the_same_rewrite():
    models = tiny_model("llama", dtype="bfloat16"), tiny_model("llama")
    rough, exact = (sequential_heads(model, TEXTS, layers="all") for model in models)
    ratio = rough.relative_change[0] / exact.relative_change[0]
    assert float((ratio - 1).abs().max()) < 0.1


@pytest.mark.slow
@pytest.mark.real_model
def test_early_blocks_matter_most(smollm2, minilm):
    texts = wvprobe.datasets.load_prose("held-out")[:20:4]
    found = sequential_heads(smollm2, texts, layers=[[0], [25], range(30)])
    loss, kl = found.loss_delta.mean(dim=1), found.kl.mean(dim=1)
    assert float(loss[2]) > 0.2 and float(kl[2]) > 0.4 > float(kl[0]) > 0.05
    assert abs(float(loss[1])) < 0.01 and float(kl[1]) < 0.002
    assert float(found.kl[2].min()) > 100 * float(found.kl[-1].max())
    found = sequential_heads(minilm, texts, layers="all")
    assert float(found.relative_change[0].min()) > 3 * float(found.relative_change[-1].max())
