"""What a ledger foretells against what happens when components are taken out of the model."""

import pytest
import torch

from wvprobe import adapters
from wvprobe.activations import capture
from wvprobe.components import Component, stream_components
from wvprobe.errors import InputError, MemoryLimitError
from wvprobe.ledger import CausalCheckResult, check_terms, score_ledger
from wvprobe.testing import FAMILIES, tiny_model

TEXT = "The river bank is close to here."
PRE_NORM = [family for family in FAMILIES if family != "bert"]


def ledger(model, layer=2, head=1, query="bank", key="river", **other):
    return score_ledger(model, TEXT, query=query, key=key, layer=layer, head=head, **other)


def without(model, removed, found):
    """Return the captured score with vectors taken off what a layer's block reads."""
    arch = adapters.architecture(model)

    def less(value):
        value = value.clone()
        for at, vector in removed:
            value[:, at] -= vector.to(value.dtype)
        return value

    with adapters.changing(model, arch, {("resid_pre", found.layer): less}):
        seen = capture(model, TEXT, "scores", layers=found.layer)["scores"]
    return float(seen[0, 0, found.head][found.positions])


@pytest.mark.parametrize("family", FAMILIES)
def test_direct_changes_are_those_of_the_models_own_layer(family, tiny):
    """Norms, norms of queries and keys and latents of the model itself, on less of the stream."""
    model = tiny(family)
    found = ledger(model)
    checked = check_terms(model, found, terms=[("L1H1", "token"), ("MLP 0", "L0H2")])
    parts = stream_components(model, TEXT, layer=2)
    i, j = found.positions
    names = {str(name): vector for name, vector in zip(parts.names, parts.vectors, strict=True)}
    for term, (a, b) in enumerate(checked.components):
        less = ((i, names[a][i]), (j, names[b][j]))
        s = [without(model, removed, found) for removed in ((), less[:1], less[1:], less)]
        expected = (s[0] - s[1], s[0] - s[2], s[0] - s[1] - s[2] + s[3])
        got = checked.direct[:, term].tolist()
        assert got == pytest.approx(expected, abs=2e-5 * found.scale)
        assert max(map(abs, got)) > 1e-3 * found.scale
    queries, keys = (found.marginal(side).set_index("component") for side in ("query", "key"))
    assert float(checked.predicted[0, 0]) == pytest.approx(queries["term"]["L1H1"])
    assert float(checked.predicted[1, 1]) == pytest.approx(keys["term"]["L0H2"])
    at = (queries.index.get_loc("MLP 0"), keys.index.get_loc("L0H2"))
    assert float(checked.predicted[2, 1]) == float(found.terms[at])
    if family == "bert":  # no norm stands between the stream and the score: nothing is frozen
        torch.testing.assert_close(checked.direct, checked.predicted)
        assert not checked.scale_changes.any()
    else:
        assert checked.scale_changes.abs().max() > 1e-3


@pytest.mark.parametrize("family", PRE_NORM)
def test_what_nothing_reads_in_between_has_no_indirect_effect(family, tiny):
    """The last MLP before the layer, and in a parallel block its heads too: total is direct."""
    model = tiny(family)
    last = [("MLP 1", "MLP 1")]
    if adapters.architecture(model).wiring == "parallel":
        last += [("L1H0", "L1H2"), ("L1H2", "MLP 1")]
    checked = check_terms(model, ledger(model), terms=last)
    error = (checked.total - checked.direct).abs().max()
    assert error < 1e-5 * checked.scale
    earlier = check_terms(model, ledger(model), terms=[("L0H0", "L0H2"), ("token", "MLP 0")])
    assert (earlier.total - earlier.direct).abs().max() > 1e-4 * checked.scale


@pytest.mark.parametrize("family", ["gpt2", "bert", "phi", "gemma2", "deepseek_v3"])
def test_at_layer_0_the_embedding_is_all(family, tiny):
    model = tiny(family)
    found = ledger(model, layer=0)
    names = [part.name for part in found.query_parts if part.name not in ("b_Q", "b_K")]
    pairs = [(a, b) for a in names for b in names]
    checked = check_terms(model, found, terms=pairs)
    assert (checked.total - checked.direct).abs().max() < 1e-5 * checked.scale


def test_total_changes_by_hooks_of_ones_own():
    """A head's z, an MLP's output and b_O set to 0 at one position by hooks of TransformerLens."""
    model = tiny_model("phi")
    arch = adapters.architecture(model)
    found = ledger(model)
    i, j = found.positions
    terms = [("L0H2", "MLP 0"), ("MLP 0", "L0H1"), ("bias 0", "L1H1")]
    checked = check_terms(model, found, terms=terms)
    bias = adapters.output_bias(model, 0)

    def head(layer, head, at):
        def hook(z, hook):
            z = z.clone()
            z.reshape(1, -1, arch.n_heads, arch.d_head_v)[:, at, head] = 0
            return z

        return (f"blocks.{layer}.attn.o.hook_in", hook)

    def off(point, at, value=None):
        def hook(x, hook):
            x = x.clone()
            x[:, at] = 0 if value is None else x[:, at] - value
            return x

        return (point, hook)

    mlp = "blocks.0.mlp.out.hook_out"
    hooks = [
        (head(0, 2, i), off(mlp, j)),
        (off(mlp, i), head(0, 1, j)),
        (off("blocks.0.attn.o.hook_out", i, bias), head(1, 1, j)),
    ]

    def score(*fwd_hooks):
        with model.hooks(fwd_hooks=list(fwd_hooks)):
            seen = capture(model, TEXT, "scores", layers=2)["scores"]
        return float(seen[0, 0, 1, i, j])

    plain = score()
    for term, (a, b) in enumerate(hooks):
        s_a, s_b, neither = score(a), score(b), score(a, b)
        expected = (plain - s_a, plain - s_b, plain - s_a - s_b + neither)
        got = checked.total[:, term].tolist()
        assert got == pytest.approx(expected, abs=1e-5 * found.scale)


def test_biases_of_a_post_norm_block_go_where_they_are_added():
    """All three of one name: the model with them at 0, at the query's position alone."""
    model = tiny_model("bert")
    found = ledger(model, query="bank", key=0)
    checked = check_terms(model, found, terms=[("bias 1", "token")])
    arch = adapters.architecture(model)
    parts = stream_components(model, TEXT, layer=2)
    # Behind the block's last norm nothing scales that norm's own bias any more.
    biases = [
        vector
        for name, vector in zip(parts.names, parts.vectors, strict=True)
        if name == Component("bias", 1)
    ]
    block, i = model.blocks[1], found.positions[0]
    modules = (block.attn.o, block.ln1, block.ln2)
    values = [module.original_component.bias.detach() for module in modules]
    torch.testing.assert_close(biases[-1][0], values[-1].double())

    def less(vector):
        def change(value):
            value = value.clone()
            value[:, i] -= vector
            return value

        return change

    sites = ("attn_out", "resid_mid", "resid_post")
    changes = {(site, 1): less(value) for site, value in zip(sites, values, strict=True)}
    with adapters.changing(model, arch, changes):
        seen = capture(model, TEXT, "scores", layers=2)["scores"]
    expected = found.model_score - float(seen[0, 0, 1][found.positions])
    assert float(checked.total[0, 0]) == pytest.approx(expected, abs=1e-5 * found.scale)


def test_scale_changes_are_those_of_sigma(tiny):
    model = tiny("llama")
    checked = check_terms(model, ledger(model), terms=[("MLP 1", "token")])
    parts = stream_components(model, TEXT, layer=2)
    i, j = ledger(model).positions
    for end, (at, name) in enumerate(((i, "MLP 1"), (j, "token"))):
        part = parts.vectors[[str(n) for n in parts.names].index(name), at]
        rms = [
            x.pow(2).mean().add(1e-6).sqrt() for x in (parts.stream[at], parts.stream[at] - part)
        ]
        assert float(checked.scale_changes[end, 0]) == pytest.approx(float(rms[1] / rms[0] - 1))
    # An RMS norm without a bias: σ is all that stands between the term and what happens.
    s, p = ledger(model).total, checked.predicted[:2, 0]
    expected = s - (s - p) / (1 + checked.scale_changes[:, 0])
    torch.testing.assert_close(checked.direct[:2, 0], expected)
    # Where queries have a norm of their own σ cancels; what is frozen is the length of x̂ W.
    normed = tiny("qwen3")
    found = ledger(normed)
    checked = check_terms(normed, found, terms=[("MLP 1", "token")])
    parts = stream_components(normed, TEXT, layer=2)
    gain = normed.blocks[2].ln1.original_component.weight.detach().double()
    weight = normed.blocks[2].attn.W_Q[1].detach().double()
    part = parts.vectors[[str(n) for n in parts.names].index("MLP 1"), found.positions[0]]
    stream = parts.stream[found.positions[0]]
    lengths = [(gain * x @ weight).norm() for x in (stream, stream - part)]
    change = float(checked.scale_changes[0, 0])
    assert change == pytest.approx(float(lengths[1] / lengths[0] - 1), rel=1e-3)


def test_terms_are_drawn_by_seed_and_read_in_frames(tiny, tmp_path):
    model = tiny("llama")
    found = ledger(model)
    checked = check_terms(model, found, n=30, seed=3)
    again = check_terms(model, found, n=30, seed=3)
    assert checked.components == again.components and checked.provenance.seed == 3
    i, j = found.positions
    given = {"text": TEXT, "layer": 2, "head": 1, "query": i, "key": j, "n": 30, "terms": None}
    assert given.items() <= checked.provenance.settings.items()
    torch.testing.assert_close(checked.total, again.total)
    assert check_terms(model, found, n=30, seed=4).components != checked.components
    assert len(set(checked.components)) == 30
    frame, summary = checked.to_frame(), checked.summary()
    assert frame["side"].tolist() == ["query"] * 30 + ["key"] * 30 + ["both"] * 30
    assert frame["direct"].tolist() == checked.direct.flatten().tolist()
    both = frame[frame["side"] == "both"]
    row = summary.query("side == 'both' and measured == 'total' and terms == 'all'").iloc[0]
    assert row["correlation"] == pytest.approx(both["predicted"].corr(both["total"]))
    ranks = both["predicted"].corr(both["total"], method="spearman")
    assert row["rank_correlation"] == pytest.approx(ranks)
    assert row["low"] <= row["correlation"] <= row["high"]
    x, y = both["predicted"], both["total"]
    assert row["slope"] == pytest.approx((x * y).sum() / (x * x).sum())
    counts = summary.query("side == 'both' and measured == 'total'").set_index("terms")["n"]
    assert counts["all"] == 30 == counts["steady"] + counts["moved"]
    steady = (both[["query_scale_change", "key_scale_change"]].abs() <= 0.1).all(axis=1)
    assert counts["steady"] == steady.sum()
    # A component in several terms is one observation of its own side.
    queries = frame[frame["side"] == "query"].drop_duplicates("query_component")
    row = summary.query("side == 'query' and measured == 'direct' and terms == 'all'").iloc[0]
    assert row["n"] == len(queries) < 30
    assert row["correlation"] == pytest.approx(queries["predicted"].corr(queries["direct"]))
    few = check_terms(model, found, n=4).summary()
    assert few["correlation"].isna().all() and few["n"].max() == 4
    five = check_terms(model, found, n=5).summary().query("side == 'both' and terms == 'all'")
    assert (five["n"] == 5).all() and five["correlation"].notna().all()
    loaded = CausalCheckResult.load(checked.save(tmp_path / "check"))
    assert torch.equal(loaded.total, checked.total)


def test_one_token_as_query_and_key_has_no_total(tiny):
    model = tiny("gpt2")
    checked = check_terms(model, ledger(model, key="bank"), n=5)
    assert checked.total.isnan().all() and checked.direct.isfinite().all()
    totals = checked.summary().query("measured == 'total'")
    assert (totals["n"] == 0).all() and totals["correlation"].isna().all()


def test_copies_that_do_not_fit_into_memory_are_told(tiny, monkeypatch):
    """Halved, a batch would have other rows: no number rather than a wrong one."""
    from wvprobe.activations import Run

    model, found, real = tiny("llama"), ledger(tiny("llama")), Run.batch

    def small(self, items):
        if len(items) > 2:
            raise MemoryError("out of memory")
        real(self, items)

    monkeypatch.setattr(Run, "batch", small)
    with pytest.raises(MemoryLimitError, match="copies of the text do not fit"):
        check_terms(model, found, n=3)


def test_wrong_inputs(tiny):
    model = tiny("gpt2")
    found = ledger(model)
    with pytest.raises(InputError, match="grouped by 'component'. Got 'kind'"):
        check_terms(model, ledger(model, group="kind"))
    with pytest.raises(InputError, match="must be one of `model`"):
        check_terms(tiny("gpt2", seed=1), found)
    with pytest.raises(InputError, match="`key component` must be one of.*Got 'b_K'"):
        check_terms(model, found, terms=[("token", "b_K")])
    with pytest.raises(InputError, match="`query component` must be one of.*Got 'ALiBi'"):
        check_terms(tiny("bloom"), ledger(tiny("bloom")), terms=[("ALiBi", "token")])
    with pytest.raises(InputError, match="`terms` must be at least one pair"):
        check_terms(model, found, terms=[])
    with pytest.raises(InputError, match="`n` must be an int of at least 1"):
        check_terms(model, found, n=0)
