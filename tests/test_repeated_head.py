"""One head of full width: where it must be the model itself, and by whole forwards."""

import pytest
import torch

from wvprobe import adapters
from wvprobe._types import Result
from wvprobe.activations import read_sites
from wvprobe.counterfactual import RepeatedResult, repeated_head
from wvprobe.counterfactual._rewrites import full_width
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.plotting import figure
from wvprobe.testing import FAMILIES, tiny_model
from wvprobe.words import encode

TEXTS = ("The bank by the river was old and grey.", "The old boat.")
LAYER = 1
ONE_HEAD = {"gpt2": {"n_head": 1}, "bloom": {"n_head": 1}}


def one_head(family):
    """Return a tiny model of one head, and of one key-value head."""
    config = ONE_HEAD.get(family, {"num_attention_heads": 1})
    if family in ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "deepseek_v3"):
        config = {**config, "num_key_value_heads": 1}
    if family == "opt":
        config = {**config, "hidden_size": 34, "word_embed_proj_dim": 34}
    if family in ("gpt_neox", "phi"):
        config = {**config, "hidden_size": 40}  # rotary: half of an even width
    return tiny_model(family, **config)


def distance(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_of_one_head_it_is_the_model_itself(family):
    """Masks, windows, padding, soft caps, slopes and rotations: all of them in one identity."""
    model = one_head(family)
    arch = adapters.architecture(model)
    assert arch.n_heads == 1
    layers = range(arch.n_layers)
    plain = read_sites(model, TEXTS, ["z", "resid_post"], batch_size=2)
    with adapters.rewriting(
        model, arch, {layer: full_width(model, arch, layer, 1, 1.0) for layer in layers}
    ):
        found = read_sites(model, TEXTS, ["z", "resid_post"], batch_size=2)
    for site in ("z", "resid_post"):
        assert distance(found[site], plain[site]) < 1e-5, site


def _copied(family, factor):
    """Return a model whose heads all have head 0's queries and keys, the queries times `factor`."""
    model = tiny_model(family)
    arch = adapters.architecture(model)
    for layer in range(arch.n_layers):
        attention = model.blocks[layer].attn
        for letter, n_heads in (("q", arch.n_heads), ("k", arch.n_kv_heads)):
            component = getattr(attention, letter).original_component
            for parameter in (component.weight, component.bias):
                if parameter is None:
                    continue
                with torch.no_grad():
                    heads = parameter.unflatten(0, (n_heads, -1))
                    heads.copy_(heads[:1].clone().expand_as(heads))
                    if letter == "q" and not arch.qk_norm:
                        parameter.mul_(factor)
        if arch.qk_norm:
            gain = attention.q_norm.original_component.weight
            offset = 1.0 if family == "gemma3" else 0.0  # which keeps 1 + g
            with torch.no_grad():
                gain.copy_((gain + offset) * factor - offset)
    return model


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("bloom", "deepseek_v3")])
def test_of_heads_that_score_alike_it_is_the_model_too(family):
    """Heads of scores s/√h have Σ_h s_h/√h = s, which is what heads of scores s do in parallel.

    Not so with ALiBi, whose slopes differ; queries of a latent are no matrix a head to be copied.
    """
    whole = _copied(family, 1.0)
    arch = adapters.architecture(whole)
    damped = _copied(family, arch.n_heads**-0.5)
    rewrites = {layer: full_width(damped, arch, layer, 1, 1.0) for layer in range(arch.n_layers)}
    expected = read_sites(whole, TEXTS, "resid_post")["resid_post"]
    with adapters.rewriting(damped, arch, rewrites):
        found = read_sites(damped, TEXTS, "resid_post")["resid_post"]
    assert distance(found, expected) < 2e-5
    assert distance(read_sites(damped, TEXTS, "resid_post")["resid_post"], expected) > 1e-3


@pytest.mark.parametrize("family", FAMILIES)
def test_repeats_are_what_forwards_with_changed_inputs_say(family, tiny):
    """Scores and values of each run by a whole forward, the pattern by a plain loop."""
    model = tiny(family)
    arch = adapters.architecture(model)
    text, h = TEXTS[:1], arch.n_heads
    size = len(encode(model, text[0]).ids)
    weight = adapters.output_weight(model, arch, LAYER)
    norm = adapters.post_attention_norm(model, arch, LAYER)
    window, cap = adapters.sliding_window(model, LAYER), adapters.soft_cap(model, LAYER)
    out = read_sites(model, text, "attn_out", layers=LAYER)["attn_out"][:, :, 0]
    total, before = 0.0, torch.zeros_like(out)
    for _ in range(2):
        moved = {("resid_pre", LAYER): lambda x, by=before: x + by}
        with adapters.changing(model, arch, moved):
            seen = read_sites(model, text, ["scores", "v"], layers=LAYER)
        scores = seen["scores"][0, 0].sum(dim=0) / h**0.5
        if cap:
            scores = cap * torch.tanh(scores / cap)
        for query in range(size):
            for key in range(size):
                ahead = arch.causal and key > query
                if ahead or (window and query - key >= window):
                    scores[query, key] = -torch.inf
        values = seen["v"][0, :, 0]
        heads = [head // (h // arch.n_kv_heads) for head in range(h)]
        z = torch.stack([scores.softmax(-1) @ values[:, kv] for kv in heads], dim=1)
        total = total + 0.5 * z
        share = torch.einsum("qhr,hrd->qd", z, weight)
        before = before + 0.5 * (share if norm is None else norm(share))
    with adapters.rewriting(model, arch, {LAYER: full_width(model, arch, LAYER, 2, 0.5)}):
        found = read_sites(model, text, ["z", "attn_added"], layers=LAYER)
    assert distance(found["z"][0, :, 0], total) < 1e-5
    bias = adapters.output_bias(model, LAYER)
    added = before if bias is None else before + bias
    assert distance(found["attn_added"][0, :, 0], added[0]) < 1e-5


@pytest.mark.parametrize("family", ["opt", "bert"])
def test_texts_of_unlike_length_run_together_as_alone(family, tiny):
    model = tiny(family)
    arch = adapters.architecture(model)

    def run(size):
        rewrites = {LAYER: full_width(model, arch, LAYER, 3, 1.0)}
        with adapters.rewriting(model, arch, rewrites):
            return read_sites(model, TEXTS, "resid_post", batch_size=size)["resid_post"]

    assert distance(run(2), run(1)) < 2e-5
    together = repeated_head(model, TEXTS, layers=LAYER)
    for row, text in enumerate(TEXTS):
        alone = repeated_head(model, text, layers=LAYER)
        torch.testing.assert_close(together.kl[:-1, row], alone.kl[:-1, 0], atol=1e-6, rtol=1e-3)


def test_settings_and_their_rows(tiny, tmp_path):
    model = tiny("llama")
    found = repeated_head(model, TEXTS)
    assert found.settings[:5] == (
        "block 0, once",
        "block 1, once",
        "block 2, once",
        "all blocks, once",
        "block 0, 6 times, step 1",
    )
    assert found.settings[-2:] == ("all blocks, 6 times, step 1/6", "bf16 rounding")
    assert found.times == (1,) * 4 + (6,) * 8 + (0,)
    assert found.steps == (1.0,) * 8 + (1 / 6,) * 4 + (0.0,)
    frame = found.to_frame()
    assert frame["times"].tolist() == list(found.times) and len(frame) == 13
    # Steps of 1 go further than steps that sum to one.
    change = found.relative_change.mean(dim=1)
    assert float(change[7]) > float(change[11]) > 10 * float(change[12])
    loaded = Result.load(found.save(tmp_path / "found"))
    assert isinstance(loaded, RepeatedResult) and loaded.steps == found.steps
    mean = found.interval("kl")[0]
    drawn = figure(found)
    assert [bars.name for bars in drawn.data] == ["once", "6 times, step 1", "6 times, step 1/6"]
    assert list(drawn.data[1].y) == mean[4:8].tolist()
    assert drawn.layout.shapes[0].y0 == pytest.approx(float(mean[-1]))
    assert f"all blocks, 6 times, step 1: {float(mean[7]):.3g}" in drawn.layout.title.text
    with pytest.raises(InputError, match="layers"):
        repeated_head(model, TEXTS, layers=[3])


def test_a_mask_that_is_no_row_of_tokens_is_refused(tiny):
    model = tiny("llama")
    arch = adapters.architecture(model)
    ids = torch.tensor([encode(model, TEXTS[1]).ids])
    size = ids.shape[1]
    mask = torch.zeros(1, 1, size, size)
    rewrites = {LAYER: full_width(model, arch, LAYER, 1, 1.0)}
    with pytest.raises(UnsupportedError, match="4 dimensions"):
        with adapters.rewriting(model, arch, rewrites):
            model.original_model(input_ids=ids, attention_mask=mask, use_cache=False)


def test_scores_that_are_not_read_exactly_are_refused(tiny, monkeypatch):
    def refuse(*_):
        raise UnsupportedError("no such scores")

    monkeypatch.setattr("wvprobe.counterfactual._rewrites.adapters.recipe", refuse)
    with pytest.raises(UnsupportedError, match="no such scores"):
        repeated_head(tiny("llama"), TEXTS)
