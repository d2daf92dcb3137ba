"""Exchanged patterns and values against other forwards, written out one by one."""

import pytest
import torch

from wvprobe import adapters
from wvprobe._paths import StraightPath
from wvprobe._swaps import read_attention
from wvprobe._types import HeadId, Result
from wvprobe.activations import read_sites
from wvprobe.errors import InputError, UnsupportedError, WordError
from wvprobe.exchanges import ExchangeResult, exchange
from wvprobe.heads import HeadWeights
from wvprobe.plotting import figure
from wvprobe.testing import FAMILIES, induction_model, tiny_model
from wvprobe.words import encode

TEXTS = ("The bank by the river.", "The boat by the river.")
SAME = {"atol": 1e-5, "rtol": 1e-4}


def _read(model, sites, changes=None, layers=None, texts=TEXTS):
    arch = adapters.architecture(model)
    with adapters.changing(model, arch, changes or {}):
        return read_sites(model, texts, sites, layers=layers, batch_size=len(texts))


def _set(row, heads, new):
    """Return a change of z that puts `new` [pos, head, r] in the place of some heads of one row."""

    def change(z):
        z = z.clone()
        z[row, :, heads] = new[:, heads].to(z)
        return z

    return change


@pytest.mark.parametrize("family", FAMILIES)
def test_pattern_and_values_of_all_heads_are_the_other_texts_attention(family, tiny):
    model = tiny(family)
    arch = adapters.architecture(model)
    own, other = read_attention(model, arch, TEXTS, [1])
    plain = _read(model, ["z", "attn_out", "attn_added"], layers=1)
    torch.testing.assert_close(own.z[0].transpose(0, 1), plain["z"][0, :, 0].double(), **SAME)
    z = own.with_part("head", other, 0).transpose(0, 1)
    torch.testing.assert_close(other.with_part("pattern", other, 0), other.z[0])
    every = list(range(arch.n_heads))
    changed = _read(model, ["attn_out", "attn_added"], {("z", 1): _set(0, every, z)}, layers=1)
    for site in ("attn_out", "attn_added"):
        expected = plain[site][1]
        torch.testing.assert_close(changed[site][0], expected, atol=2e-5, rtol=1e-4)
        assert not torch.allclose(plain[site][0], expected, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_zero_ablation_takes_away_a_heads_output(family, tiny):
    model = tiny(family)
    arch = adapters.architecture(model)
    found = exchange(model, TEXTS[0], part="head", method="zero", layers=1)
    assert found.local.shape == (1, 1, 1, arch.n_heads) and found.donors == ((),)
    at = found.destinations[0]
    seen = _read(model, ["head_out", "attn_added"], layers=1, texts=TEXTS[:1])
    added = seen["attn_added"][0, at, 0].double()
    for head in range(arch.n_heads):
        zero = torch.zeros(len(seen.tokens[0]), arch.n_heads, arch.d_head_v)
        changes = {("z", 1): _set(0, [head], zero)}
        without = _read(model, ["attn_added"], changes, 1, TEXTS[:1])["attn_added"][0, at, 0]
        expected = (added - without.double()).norm() / added.norm()
        assert float(found.local[0, 0, 0, head]) == pytest.approx(float(expected), abs=1e-5)
        if not arch.sandwich:
            part = seen["head_out"][0, at, 0, head].double()
            torch.testing.assert_close(added - part, without.double(), **SAME)
    # Nothing is left of z whichever part is set to zero.
    for part in ("pattern", "value"):
        same = exchange(model, TEXTS[0], part=part, method="zero", layers=1)
        assert torch.equal(same.local, found.local)


@pytest.mark.parametrize(
    "family, part",
    [(family, "value") for family in FAMILIES]
    + [(family, part) for family in ("gemma2", "bert") for part in ("pattern", "head")],
)
def test_every_row_is_a_forward_of_its_own(family, part, tiny):
    """One head of one layer, changed alone in a forward of that text alone."""
    model = tiny(family)
    arch = adapters.architecture(model)
    reader, layer, head = HeadId(2, 1), 1, 2
    words = {"query": 4, "key": 2}
    found = exchange(model, *TEXTS, part=part, reader=reader, token=7, heads=[head, 0], **words)
    seen = _read(model, ["pattern", "v", "attn_added"], layers=layer)
    values = seen["v"][:, :, 0].repeat_interleave(arch.n_heads // arch.n_kv_heads, dim=2)
    for into, text in enumerate(TEXTS):
        donor = 1 - into
        pattern = seen["pattern"][donor if part != "value" else into, 0]
        v = values[donor if part != "pattern" else into]
        z = torch.einsum("hij,jhe->ihe", pattern, v)
        changes = {("z", layer): _set(0, [head], z)}
        at, cell = found.destinations[into], (into, 0, layer, 0)
        for site, measure, where in (("attn_added", "local", layer), ("stream", "stream", 3)):
            old = _read(model, [site], None, where, [text])[site][0, at, 0].double()
            new = _read(model, [site], changes, where, [text])[site][0, at, 0].double()
            change = float((new - old).norm() / old.norm())
            assert float(getattr(found, measure)[cell]) == pytest.approx(change, abs=1e-5)
        scores = [
            _read(model, ["scores"], c, reader.layer, [text])["scores"][0, 0, reader.head]
            for c in (None, changes)
        ]
        query, key = found.reader_positions[into]
        change = float(scores[1][query, key] - scores[0][query, key])
        assert float(found.reader_score[cell]) == pytest.approx(change, abs=1e-4)
        tokens = torch.tensor([encode(model, text).ids])
        logs = []
        for c in ({}, changes):
            with adapters.changing(model, arch, c):
                logits = adapters.logits(model, tokens, torch.ones_like(tokens))[0, at]
            logs.append(logits.double().log_softmax(dim=-1))
        kl = float((logs[0].exp() * (logs[0] - logs[1])).sum())
        assert float(found.kl[cell]) == pytest.approx(kl, abs=1e-4, rel=1e-3)
        change = float(logs[1][7] - logs[0][7])
        assert float(found.log_prob[cell]) == pytest.approx(change, abs=1e-4)
    # The same layer and later ones come too late for the reader.
    assert not found.reader_score[:, :, 2].any() and not found.reader_attention[:, :, 2].any()
    assert found.reader_score[:, :, :2].any()


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_beside_transformer_lens_patching(family):
    """Its cache and hooks give the same for a head's values, exchanged for those of its text."""
    model = tiny_model(family)
    arch = adapters.architecture(model)
    found = exchange(model, *TEXTS, part="value")
    with torch.no_grad():
        tokens = [model.to_tokens(text) for text in TEXTS]
        (clean, cache), (_, other) = (model.run_with_cache(t) for t in tokens)
    layer, head = 1, 3
    group = arch.n_heads // arch.n_kv_heads
    pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0, head]
    v = other[f"blocks.{layer}.attn.v.hook_out"].reshape(1, -1, arch.n_kv_heads, arch.d_head_v)
    new = pattern @ v[0, :, head // group]

    def patch(z, hook):
        z = z.clone().reshape(*z.shape[:2], arch.n_heads, arch.d_head_v)
        z[0, :, head] = new
        return z.reshape(1, z.shape[1], -1) if family == "llama" else z.flatten(2)

    with torch.no_grad(), model.hooks(fwd_hooks=[(f"blocks.{layer}.attn.o.hook_in", patch)]):
        changed = model(tokens[0])
    logs = [x[0, found.destinations[0]].double().log_softmax(-1) for x in (clean, changed)]
    kl = float((logs[0].exp() * (logs[0] - logs[1])).sum())
    assert float(found.kl[0, 0, layer, head]) == pytest.approx(kl, abs=1e-6, rel=1e-3)
    assert kl > 1e-5


def test_a_query_head_is_changed_and_not_the_others_of_its_key_value_head(tiny):
    """GQA: exchanged values of one query head leave z of the others that read them as it was."""
    model = tiny("llama")
    arch = adapters.architecture(model)
    own, other = read_attention(model, arch, TEXTS, [1])
    weight = adapters.output_weight(model, arch, 1).double()
    change = own.with_part("value", other, 0) - own.z[0]
    assert bool((change.norm(dim=-1) > 1e-3).any(dim=-1).all())  # all six heads would change
    added = _read(model, ["attn_added"], layers=1)["attn_added"][0, :, 0].double()
    one = exchange(model, *TEXTS, part="value", layers=1)
    at = one.destinations[0]
    parts = change[:, at, None] @ weight  # [head, 1, d_model]
    expected = parts[:, 0].norm(dim=-1) / added[at].norm()
    torch.testing.assert_close(one.local[0, 0, 0], expected, **SAME)
    together = exchange(model, *TEXTS, part="value", layers=1, level="kv")
    assert together.local.shape[-1] == 2 and together.heads == (0, 1)
    groups = parts[:, 0].unflatten(0, (2, 3)).sum(dim=1).norm(dim=-1) / added[at].norm()
    torch.testing.assert_close(together.local[0, 0, 0], groups, **SAME)
    assert list(together.to_frame().columns)[:3] == ["into", "layer", "kv_head"]
    # The forward at level kv: the key-value head's own values changed, all its readers with it.
    changes = {("v", 1): lambda v: torch.stack([torch.cat((v[1, :, :1], v[0, :, 1:]), 1), v[1]])}
    new = _read(model, ["stream"], changes, 3)["stream"][0, at, 0].double()
    old = _read(model, ["stream"], None, 3)["stream"][0, at, 0].double()
    assert float(together.stream[0, 0, 0, 0]) == pytest.approx(
        float((new - old).norm() / old.norm()), abs=1e-5
    )
    with pytest.raises(InputError, match="KV heads"):
        exchange(model, *TEXTS, level="kv", heads=2)


@pytest.mark.parametrize(
    "family, part", [("gpt2", "pattern"), ("gemma2", "value"), ("bert", "head")]
)
def test_identical_texts_change_nothing(family, part, tiny):
    words = {"reader": (2, 0), "query": 3, "key": 2, "path": "q"}
    found = exchange(tiny(family), TEXTS[0], TEXTS[0], part=part, **words)
    for name in ("local", "path_linear", "path_measured"):
        assert not getattr(found, name).any()
    for name in ("stream", "kl", "logit", "reader_score", "reader_gauge_fixed"):
        assert float(getattr(found, name).abs().max()) < 1e-4, name


def _frozen_path(model, text, reader, layer, z, at):
    """Run a text with everything between sender and reader set to what it was."""
    sites = ["attn_out", "mlp_out", "resid_pre"]
    clean = _read(model, sites, texts=[text])

    def put(site, block):
        return lambda _value: clean[site][:1, :, block]

    changes = {("z", layer): z}
    for block in range(layer, reader.layer):
        changes[("mlp_out", block)] = put("mlp_out", block)
        if block > layer:
            changes[("attn_out", block)] = put("attn_out", block)

    def only(value):
        kept = clean["resid_pre"][:1, :, reader.layer].clone()
        kept[:, at] = value[:, at]
        return kept

    changes[("resid_pre", reader.layer)] = only
    return _read(model, ["scores", "v"], changes, reader.layer, [text])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_straight_path_is_a_forward_with_all_between_held(family, tiny):
    model = tiny(family)
    arch = adapters.architecture(model)
    reader, layer, head, query, key = HeadId(2, 1), 0, 2, 4, 2
    own, other = read_attention(model, arch, TEXTS, [layer])
    z = own.with_part("value", other, 0)
    weight = adapters.output_weight(model, arch, layer).double()
    written = ((z - own.z[0]) @ weight)[[head]]
    path = StraightPath(model, arch, TEXTS[0], reader, (query, key))
    plain = _read(model, ["scores", "v", "pattern"], None, reader.layer, TEXTS[:1])
    change = _set(0, [head], z.transpose(0, 1))
    for route, at in (("q", [query]), ("k", [key]), ("v", slice(None))):
        run = _frozen_path(model, TEXTS[0], reader, layer, change, at)
        if route == "v":
            kv = reader.head // (arch.n_heads // arch.n_kv_heads)
            row = plain["pattern"][0, 0, reader.head, query].double()
            output = adapters.output_weight(model, arch, reader.layer)[reader.head].double()
            norm = adapters.post_attention_norm(model, arch, reader.layer)
            out = [row @ seen["v"][0, :, 0, kv].double() @ output for seen in (plain, run)]
            if norm is not None:
                out = [norm.linear(vector, torch.ones(1).double()) for vector in out]
            expected = float((out[1] - out[0]).norm() / out[0].norm())
        else:
            cell = (0, 0, reader.head, query, key)
            expected = float(run["scores"][cell] - plain["scores"][cell])
        _, measured = path.effects(route, layer, written)
        assert float(measured[0]) == pytest.approx(expected, abs=2e-5, rel=1e-3)


def test_an_exchange_has_the_straight_paths_effects(tiny):
    """Both texts, layers in the order asked for, senders of the level asked for."""
    model = tiny("llama")
    arch = adapters.architecture(model)
    words = {"reader": (2, 1), "query": 4, "key": 2, "path": "k"}
    found = exchange(model, *TEXTS, part="value", layers=[1, 0], heads=[1], level="kv", **words)
    assert found.layers == (1, 0)
    texts = read_attention(model, arch, TEXTS, [1, 0])
    for into, text in enumerate(TEXTS):
        path = StraightPath(model, arch, text, HeadId(2, 1), (4, 2))
        for row, layer in enumerate((1, 0)):
            change = texts[into].with_part("value", texts[1 - into], row) - texts[into].z[row]
            weight = adapters.output_weight(model, arch, layer).double()
            written = (change @ weight)[3:].sum(dim=0, keepdim=True)
            linear, measured = path.effects("k", layer, written)
            torch.testing.assert_close(found.path_linear[into, 0, row], linear)
            torch.testing.assert_close(found.path_measured[into, 0, row], measured)
            assert float((linear - measured).abs()) > 1e-6


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("bert", "deepseek_v3")])
def test_the_linear_path_is_the_circuit_with_scales_held(family, tiny):
    """x̂ QK(Δ) x̂ᵀ of folded weights, once with what the sender adds to the query over σ."""
    model = tiny(family)
    arch = adapters.architecture(model)
    reader, layer, query, key = HeadId(2, 1), 1, 4, 2
    path = StraightPath(model, arch, TEXTS[0], reader, (query, key))
    generator = torch.Generator().manual_seed(0)
    written = torch.randn(3, 6, arch.d_model, generator=generator, dtype=torch.float64)
    written = torch.cat((written, torch.zeros(3, len(path.x) - 6, arch.d_model).double()), dim=1)
    heads = HeadWeights.from_model(model)
    seen = _read(model, ["resid_pre", "attn_out", "q", "k"], texts=TEXTS[:1])
    x = seen["resid_pre"][0, :, 2].double()
    added = written
    norm = adapters.post_attention_norm(model, arch, layer)
    if norm is not None:
        added = norm.linear(written, norm.scale(seen["attn_out"][0, :, layer].double()))
    scale = heads.norms[2].scale(x)
    qk = heads.qk(reader.layer, reader.head, offset=query - key)
    old, new = x / scale, (x + added) / scale
    divisor = 1.0
    if arch.qk_norm:
        raw = []
        for letter, at, which in (("Q", reader.head, query), ("K", heads.kv_head(1), key)):
            weight = getattr(heads, f"W_{letter}")[2, at].double()
            scale_of = heads.qk_norms[2]["QK".index(letter)].scale
            raw.append(float(scale_of(old[which] @ weight)))
        divisor = raw[0] * raw[1]
    for route, pairs in (("q", (new[:, query], old[key])), ("k", (old[query], new[:, key]))):
        pairs = [p.float().expand(3, -1) for p in pairs]
        base = qk.bilinear(old[query].float()[None], old[key].float()[None])
        expected = (qk.bilinear(*pairs) - base) / divisor
        linear, _ = path.effects(route, layer, written)
        torch.testing.assert_close(linear.float(), expected.float(), atol=1e-4, rtol=1e-3)
        both, _ = path.effects(route, layer, 2 * written)
        torch.testing.assert_close(both, 2 * linear)


@pytest.mark.parametrize("route", ["q", "k", "v"])
def test_frozen_latent_scales_by_hand(route, tiny):
    """MLA: what the projection of x̂ + δ̂ gives, its latent's scale put back to x̂'s."""
    model = tiny("deepseek_v3")
    arch = adapters.architecture(model)
    path = StraightPath(model, arch, TEXTS[0], HeadId(2, 1), (4, 2))
    heads = path.heads
    generator = torch.Generator().manual_seed(1)
    written = torch.randn(2, len(path.x), arch.d_model, generator=generator, dtype=torch.float64)
    linear, _ = path.effects(route, 1, written)
    norm = heads.norms[0]
    moved = path.x_hat + norm.linear(written, norm.scale(path.x))
    old, new = (heads.latent_scales(x, 0) for x in (path.x_hat, moved))
    if route == "q":
        query = heads.queries(moved[:, 4], 0) * (old.query[4] / new.query[:, 4])[:, None, None]
        change = (query - heads.queries(path.x_hat[4], 0))[:, 1]
        expected = path._scores("q", change)
    elif route == "k":
        keys = heads.keys(moved[:, 2], 0)
        n_content = heads.latent[0].n_content
        ratio = (old.key_value[2] / new.key_value[:, 2])[:, None, None]
        keys = torch.cat((keys[..., :n_content] * ratio, keys[..., n_content:]), dim=-1)
        expected = path._scores("k", (keys - heads.keys(path.x_hat[2], 0))[:, 1])
    else:
        values = heads.values(moved, 0) * (old.key_value / new.key_value)[..., None, None]
        change = (values - heads.values(path.x_hat, 0))[:, :, 1]
        weight = adapters.output_weight(model, arch, 2)[1].double()
        out = path.row @ heads.values(path.x_hat, 0)[:, 1] @ weight
        expected = (torch.einsum("j,sje->se", path.row, change) @ weight).norm(dim=-1) / out.norm()
    torch.testing.assert_close(linear, expected, atol=1e-9, rtol=1e-7)


def test_the_previous_token_head_reaches_the_induction_heads_keys():
    """Known answer: of layer 0's heads L0H0 feeds L1H1's keys, and reaches its score by them."""
    model = induction_model()
    text = "bank river boat bank"
    words = {"reader": (1, 1), "query": len(encode(model, text).ids) - 1, "key": "river"}
    keys, queries = (
        exchange(model, text, part="head", method="zero", path=path, **words).path_measured[0, 0, 0]
        for path in "kq"
    )
    assert int(keys.abs().argmax()) == 0
    assert float(keys[0].abs()) > 3 * float(keys[1:].abs().max())
    assert float(queries[0].abs()) < 0.2 * float(keys[0].abs())


def test_means_and_resamples_come_from_prose_of_the_same_length(tiny):
    model = tiny("qwen2")
    arch = adapters.architecture(model)
    drawn = exchange(model, TEXTS[0], part="value", method="resample", draws=3, layers=1, seed=5)
    size = len(encode(model, TEXTS[0]).ids)
    assert len(drawn.donors[0]) == 3 == len(set(drawn.donors[0]))
    assert all(len(encode(model, text).ids) == size for text in drawn.donors[0])
    # Each draw is an exchange with that text.
    for number, text in enumerate(drawn.donors[0]):
        pair = exchange(model, TEXTS[0], text, part="value", layers=1)
        torch.testing.assert_close(pair.local[0, 0], drawn.local[0, number])
        torch.testing.assert_close(pair.kl[0, 0], drawn.kl[0, number], atol=1e-6, rtol=1e-3)
    mean = exchange(model, TEXTS[0], part="value", method="mean", draws=3, layers=1, seed=5)
    assert mean.donors == drawn.donors and mean.local.shape[1] == 1
    own, *others = read_attention(model, arch, [TEXTS[0], *drawn.donors[0]], [1])
    z = own.pattern[0].double() @ torch.stack([a.values[0] for a in others]).mean(dim=0)
    at = mean.destinations[0]
    added = _read(model, ["attn_added"], layers=1, texts=TEXTS[:1])["attn_added"][0, at, 0].double()
    change = (z - own.z[0])[:, at, None] @ adapters.output_weight(model, arch, 1).double()
    expected = change[:, 0].norm(dim=-1) / added.norm()
    torch.testing.assert_close(mean.local[0, 0, 0], expected, **SAME)
    other_seed = exchange(model, TEXTS[0], part="value", method="mean", draws=3, layers=1, seed=6)
    assert other_seed.donors != mean.donors
    frame = drawn.to_frame()
    assert ((frame["kl_low"] <= frame["kl"]) & (frame["kl"] <= frame["kl_high"])).all()
    assert "kl_low" not in mean.to_frame().columns


def test_what_cannot_be_exchanged_is_refused(tiny):
    model = tiny("llama")
    with pytest.raises(InputError, match=r"Got 7 in .* and 9 in"):
        exchange(model, TEXTS[0], "The old boat by the river is.")
    with pytest.raises(InputError, match="text_b"):
        exchange(model, TEXTS[0])
    for bad in (
        {"layers": -1},
        {"layers": 3},
        {"heads": -1},
        {"heads": 6},
        {"part": "values"},
        {"method": "noise"},
        {"level": "group"},
        {"destination": 99},
    ):
        with pytest.raises(InputError):
            exchange(model, *TEXTS, **bad)
    with pytest.raises(WordError, match="sea"):
        exchange(model, *TEXTS, destination="sea")
    words = {"query": 4, "key": 2}
    with pytest.raises(InputError, match="before layer 1"):
        exchange(model, *TEXTS, reader=(1, 0), path="q", layers=[0, 1], **words)
    with pytest.raises(InputError, match="others before it"):
        exchange(model, *TEXTS, reader=(0, 0), path="q", **words)
    with pytest.raises(InputError, match=r"reader\[1\]"):
        exchange(model, *TEXTS, reader=(1, 6), **words)
    with pytest.raises(InputError, match="reader"):
        exchange(model, *TEXTS, path="q")
    with pytest.raises(InputError, match="`query` and `key`"):
        exchange(model, *TEXTS, reader=(1, 0))
    with pytest.raises(InputError, match="at least 2"):
        exchange(model, TEXTS[0], method="mean", draws=1)
    broken = tiny_model("llama")
    with torch.no_grad():
        broken.blocks[1].attn.v.original_component.weight[0, 0] = torch.nan
    with pytest.raises(InputError, match="NaN"):
        exchange(broken, *TEXTS)


def test_files_frames_and_figures(tiny, tmp_path):
    model = tiny("gpt2")
    found = exchange(
        model,
        *TEXTS,
        part="pattern",
        layers=[2, 0],
        heads=[1, 3],
        reader=(2, 1),
        query="river",
        key=2,
    )
    frame = found.to_frame()
    assert len(frame) == 2 * 2 * 2
    row = frame[(frame.into == "b") & (frame.layer == 0) & (frame["head"] == 3)].iloc[0]
    assert row["local"] == float(found.local[1, 0, 1, 1])
    assert row["log_prob"] == float(found.log_prob[1, 0, 1, 1])
    loaded = Result.load(found.save(tmp_path / "exchange"))
    assert isinstance(loaded, ExchangeResult) and loaded.reader == HeadId(2, 1)
    assert torch.equal(loaded.kl, found.kl) and loaded.path_linear is None
    for name, axes in ExchangeResult.AXES.items():
        value = getattr(found, name)
        assert value is None or value.dim() == len(axes)
    drawn = figure(found)
    assert len(drawn.data) == 4
    assert drawn.data[1].z[1][0] == float(found.kl[0, 0, 0, 1])
    flat = int(found.kl.flatten().argmax())
    layer, head = divmod(flat % 4, 2)
    name = f"L{found.layers[layer]}H{found.heads[head]} matters most, its pattern alone"
    assert name in drawn.layout.title.text


def test_models_without_a_head(tiny, monkeypatch):
    """What the stream shows remains; what needs logits is absent, and refused where asked for."""
    model = tiny_model("bert")
    model._wvprobe_missing_head = "the checkpoint has no head"
    found = exchange(model, *TEXTS)
    assert found.kl is found.logit is found.log_prob is None and found.tokens == ()
    assert float(found.stream.max()) > 1e-3 and "kl" not in found.to_frame().columns
    assert "last stream" in figure(found).layout.title.text
    with pytest.raises(UnsupportedError, match="a token's logit"):
        exchange(model, *TEXTS, token=7)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_precisions(dtype):
    found, exact = (
        exchange(m, *TEXTS, part="value", layers=1, reader=(2, 1), query=4, key=2, path="k")
        for m in (tiny_model("llama", dtype=dtype), tiny_model("llama"))
    )
    rough = 0.2 if dtype == "bfloat16" else 1e-4
    for name in ("local", "stream", "kl", "path_measured"):
        ours, theirs = getattr(found, name), getattr(exact, name)
        assert float((ours - theirs).norm() / theirs.norm()) < rough, name


@pytest.mark.slow
@pytest.mark.real_model
def test_real_models(smollm2, minilm):
    texts = ("The bank by the river was muddy.", "The bank in the city was closed.")
    found = exchange(smollm2, *texts, part="value", layers=[0, 12], destination="was")
    assert found.kl.shape == (2, 1, 2, 9) and float(found.kl.min()) >= 0
    assert exchange(minilm, *texts, layers=3).kl is None
