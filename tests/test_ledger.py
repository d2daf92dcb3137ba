"""The ledger of a score against the model's own scores and weights, and a circuit made by hand."""

import pytest
import torch

from wvprobe import adapters
from wvprobe.activations import capture
from wvprobe.components import Component, stream_components
from wvprobe.errors import InputError, WordError
from wvprobe.ledger import LedgerResult, score_ledger
from wvprobe.testing import FAMILIES, induction_model, tiny_model
from wvprobe.word_pairs import pair_scores
from wvprobe.words import find_word

TEXT = "The river bank is close to here."
HEAD = 1


def ledger(model, query="bank", key="river", layer=2, group="component", head=HEAD, text=TEXT):
    return score_ledger(model, text, query=query, key=key, layer=layer, head=head, group=group)


@pytest.mark.parametrize("family", FAMILIES)
def test_terms_add_up_to_the_models_own_score_masked_or_not(family, tiny):
    model = tiny(family)
    seen = capture(model, TEXT, "scores")["scores"][0, :, HEAD]
    pairs = pair_scores(model, [TEXT], "river", "bank")
    cases = [(layer, "component") for layer in range(3)] + [(2, "source"), (2, "kind")]
    for layer, group in cases:
        for direction, words in enumerate((("river", "bank"), ("bank", "river"))):
            found = ledger(model, *words, layer, group)
            assert found.model_score == float(seen[layer, *found.positions])
            assert found.reconstruction_error < 1e-5
            # A sum of terms and not one that is fitted: the model's score is no part of it.
            assert found.total == pytest.approx(float(found.terms.sum()))
            assert found.masked == bool(pairs.masked[0, direction])
            fixed = float(pairs.gauge_fixed[0, direction, layer, HEAD])
            assert abs(float(found.gauge_fixed.sum()) - fixed) < 1e-5 * found.scale


def test_a_masked_pair_is_marked(tiny):
    assert ledger(tiny("llama"), "river", "bank").masked
    assert not ledger(tiny("llama"), "bank", "river").masked
    assert not ledger(tiny("bert"), "river", "bank").masked
    # A window of five tokens hides what lies before it.
    at = [score_ledger(tiny("mistral"), TEXT, query=7, key=j, layer=0, head=0) for j in (2, 3)]
    assert [found.masked for found in at] == [True, False]


def turned(x, angle, base=10_000.0):
    """Turn halves of a vector as complex numbers, by hand."""
    half = x.shape[-1] // 2
    turn = torch.polar(
        torch.ones(half, dtype=torch.float64),
        angle * base ** (-torch.arange(half, dtype=torch.float64) / half),
    )
    out = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat((out.real, out.imag), dim=-1)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_terms_from_the_models_own_weights(family, tiny):
    """c · q_a R(Δ) k_b written out with TransformerLens's weights, no folding."""
    model = tiny(family)
    found, parts = ledger(model), stream_components(model, TEXT, layer=2)
    i, j = found.positions
    block, arch = model.blocks[2], adapters.architecture(model)
    gain = block.ln1.original_component.weight.detach().double()
    w_q, w_k = block.attn.W_Q[HEAD].detach().double(), block.attn.W_K.detach().double()
    w_k = w_k[HEAD // (arch.n_heads // arch.n_kv_heads)]

    def side(at, weight):
        x, part = parts.stream[at], parts.vectors[:, at]
        if family == "gpt2":
            x, part = x - x.mean(), part - part.mean(dim=-1, keepdim=True)
        eps = 1e-5 if family == "gpt2" else 1e-6
        return gain * part / (x.pow(2).mean() + eps).sqrt() @ weight

    q, k = side(i, w_q), side(j, w_k)
    if family == "llama":
        q, k = turned(q, i), turned(k, j)
    expected = q @ k.T / arch.d_head**0.5
    size = len(parts.names)
    error = (found.terms[:size, :size] - expected).abs().max()
    seen = capture(model, TEXT, ["q", "k"], layers=2)
    lengths = [
        seen[site][0, at, 0, HEAD * seen[site].shape[3] // arch.n_heads].double().norm()
        for site, at in (("q", i), ("k", j))
    ]
    assert found.scale == pytest.approx(float(lengths[0] * lengths[1]) / arch.d_head**0.5, rel=1e-5)
    assert error < 1e-6 * found.scale
    assert float(expected.abs().max()) > 1e-2 * found.scale
    assert [(p.kind, p.layer, p.head) for p in found.query_parts[:size]] == list(parts.names)
    if family == "gpt2":  # the norm's bias through W_Q, and b_Q itself
        shift = block.ln1.original_component.bias.detach().double() @ w_q
        own = block.attn.b_Q[HEAD].detach().double() + shift
        error = (found.terms[-1, :size] - own @ k.T / arch.d_head**0.5).abs().max()
        assert error < 1e-6 * found.scale
        assert (found.query_parts[-1].name, found.key_parts[-1].name) == ("b_Q", "b_K")


@pytest.mark.parametrize("family", ["bloom", "gemma2", "bert", "deepseek_v3"])
def test_kinds_are_sums_of_components(family, tiny):
    found, kinds = ledger(tiny(family)), ledger(tiny(family), group="kind")
    names = ("token", "position", "context", "bias")
    assert tuple(part.name for part in kinds.query_parts) == names
    for row, query in enumerate(names):
        for column, key in enumerate(names):
            rows, columns = (
                torch.tensor([
                    (part.kind if part.kind in names else "context") == kind for part in parts
                ])
                for parts, kind in ((found.query_parts, query), (found.key_parts, key))
            )  # fmt: skip
            expected = found.terms[rows][:, columns].sum()
            assert abs(float(kinds.terms[row, column] - expected)) < 1e-9 * found.scale


@pytest.mark.parametrize("family", ["gpt2", "mistral", "gemma3", "bert", "bloom"])
def test_gauge_and_sink_by_brute_force(family, tiny):
    """Every key's own ledger: means over visible ones, what does not vary, what the sink gets."""
    model = tiny(family)
    found = ledger(model)
    i, _ = found.positions
    special = capture(model, TEXT, "resid_pre", layers=0).special[0]
    window = adapters.sliding_window(model, 2) or 99
    causal = adapters.architecture(model).causal
    sees = [j for j in range(len(special)) if (j <= i or not causal) and abs(i - j) < window]
    terms = {j: score_ledger(model, TEXT, query=i, key=j, layer=2, head=HEAD).terms for j in sees}
    plain = torch.stack([terms[j] for j in sees if not special[j]])
    torch.testing.assert_close(found.gauge_fixed, found.terms - plain.mean(dim=0))
    sinks = [terms[j] for j in sees if special[j]]
    if sinks:
        torch.testing.assert_close(found.sink, torch.stack(sinks).mean(dim=0))
    else:
        assert found.sink.isnan().all()
    every = torch.stack(list(terms.values()))
    spread = every.amax(dim=0) - every.amin(dim=0)
    assert torch.equal(found.is_gauge, spread <= 1e-6 * found.scale)
    names = [part.name for part in found.key_parts]
    if family in ("gpt2", "bert"):  # nothing turns b_K, and nothing scales it
        assert found.is_gauge[:, names.index("b_K")].all()
        assert not found.is_gauge[:, names.index("MLP 1")].all()


def test_what_is_constant_does_not_hang_on_how_large_scores_are(tiny):
    expected = ledger(tiny("llama"))
    small = tiny_model("llama")
    with torch.no_grad():
        small.blocks[2].attn.q.original_component.weight.mul_(1e-5)
    found = ledger(small)
    assert found.scale == pytest.approx(1e-5 * expected.scale, rel=1e-4)
    assert torch.equal(found.is_gauge, expected.is_gauge)


def test_the_masked_keys_own_source_is_no_constant(tiny):
    """No visible key has it, so that it is 0 over them all; on the masked key it is not."""
    found = ledger(tiny("llama"), "river", "bank", group="source")
    i, j = found.positions
    assert found.masked and not bool(found.is_gauge[i, j])
    assert float(found.gauge_fixed[i, j]) == float(found.terms[i, j]) != 0


def test_a_query_that_sees_the_sink_alone(tiny):
    found = score_ledger(tiny("llama"), TEXT, query=0, key=0, layer=1, head=0)
    assert found.gauge_fixed.isnan().all() and found.is_gauge.all()
    assert torch.equal(found.sink, found.terms)


def test_alibi_is_a_term_of_its_own(tiny):
    model = tiny("bloom")
    slopes = adapters.alibi_slopes(model, adapters.architecture(model))
    found = ledger(model)
    i, j = found.positions
    assert found.query_parts[-1] == found.key_parts[-1] == ("ALiBi", "position", None, None, None)
    assert float(found.terms[-1, -1]) == pytest.approx(float(slopes[HEAD]) * j)
    assert not found.terms[-1, :-1].any() and not found.terms[:-1, -1].any()
    assert not bool(found.is_gauge[-1, -1])
    kinds = ledger(model, group="kind")
    assert float(kinds.terms[1, 1]) == pytest.approx(float(slopes[HEAD]) * j)
    assert len(ledger(model, group="source").terms) == len(capture(model, TEXT, "z").tokens[0])


@pytest.mark.parametrize("family", ["llama", "mistral", "bert"])
def test_sources_stand_where_the_heads_looked(family, tiny):
    model = tiny(family)
    found = ledger(model, "close", "bank", layer=1, group="source")
    i, j = found.positions
    sources = found.terms.abs().sum(dim=1) > 0
    size = len(sources)
    window = adapters.sliding_window(model, 0) or 99
    causal = adapters.architecture(model).causal
    expected = [abs(i - s) < window and (s <= i or not causal) for s in range(size)]
    assert sources.tolist() == expected
    assert found.query_parts[i].position == i and "close" in found.query_parts[i].name
    frame = found.to_frame()
    row = frame[(frame["query_position"] == i) & (frame["key_position"] == j)]
    assert float(row["term"].item()) == float(found.terms[i, j])


def test_a_soft_cap_comes_last(tiny):
    found = ledger(tiny("gemma2"))
    assert found.capped == pytest.approx(3 * float(torch.tanh(torch.tensor(found.total / 3))))
    assert ledger(tiny("llama")).capped == ledger(tiny("llama")).total


def test_components_of_a_post_norm_model_have_one_name_each(tiny):
    found = ledger(tiny("bert"))
    names = [part.name for part in found.query_parts]
    assert len(set(names)) == len(names)
    assert {"token", "position", "bias", "bias 0", "bias 1", "MLP 1", "L1H4", "b_Q"} <= set(names)
    repeated = stream_components(tiny("bert"), TEXT, layer=2).names.count(Component("bias", 1))
    assert repeated == 3


def test_the_induction_head_reads_what_the_previous_token_head_wrote():
    """Known answer: the query's token against the key's part from L0H0, and nothing else."""
    model = induction_model()
    text = "The river bank and the river"
    again = find_word(model, text, "river", occurrence=1).tokens[-1]
    after = find_word(model, text, "bank").tokens[-1]
    found = score_ledger(model, text, query=again, key=after, layer=1, head=1)
    first = found.top(1).iloc[0]
    assert (first["query_component"], first["key_component"]) == ("token", "L0H0")
    assert first["term"] == pytest.approx(found.total, rel=0.05)
    assert found.top(1, by="gauge_fixed").iloc[0]["key_component"] == "L0H0"
    # One step back, the key's part comes from the river that stands before the bank.
    sources = score_ledger(
        model, text, query=again, key=after, layer=1, head=1, group="source"
    ).top(1)
    assert sources["query_position"].item() == again
    assert sources["key_position"].item() == after - 1


def test_frames_say_what_the_tensors_hold(tiny, tmp_path):
    found = ledger(tiny("llama"))
    frame = found.to_frame()
    assert len(frame) == found.terms.numel() and frame["term"].sum() == pytest.approx(found.total)
    row = frame[(frame["query_component"] == "L1H3") & (frame["key_component"] == "MLP 0")].iloc[0]
    at = [[p.name for p in parts].index(name) for parts, name in (
        (found.query_parts, "L1H3"), (found.key_parts, "MLP 0"))]  # fmt: skip
    assert row["term"] == float(found.terms[tuple(at)])
    assert (row["query_kind"], row["query_layer"], row["query_head"]) == ("head", 1, 3)
    assert row["key_kind"] == "mlp" and row["sink"] == float(found.sink[tuple(at)])
    top = found.top(4)
    assert top["term"].abs().tolist() == found.terms.abs().flatten().topk(4).values.tolist()
    queries, keys = found.marginal("query"), found.marginal("key")
    assert queries["term"].tolist() == pytest.approx(found.terms.sum(dim=1).tolist())
    assert keys["gauge_fixed"].tolist() == pytest.approx(found.gauge_fixed.sum(dim=0).tolist())
    assert queries["component"].tolist() == [part.name for part in found.query_parts]
    named = ledger(tiny("gpt2")).marginal("key")["component"]  # b_K is no part of a query
    assert named.iloc[-1] == "b_K"
    loaded = LedgerResult.load(found.save(tmp_path / "ledger"))
    assert torch.equal(loaded.terms, found.terms) and loaded.key_parts == found.key_parts
    i, j = found.positions
    given = {"text": TEXT, "query": i, "key": j, "layer": 2, "head": HEAD, "group": "component"}
    assert given.items() <= found.provenance.settings.items()


def test_words_spans_and_positions_are_one_thing(tiny):
    model = tiny("gpt2")
    found = ledger(model)
    spans = [find_word(model, TEXT, word) for word in ("bank", "river")]
    assert torch.equal(ledger(model, *spans).terms, found.terms)
    by_position = ledger(model, *found.positions)
    assert torch.equal(by_position.terms, found.terms)
    assert "bank" in by_position.query and by_position.positions == found.positions
    several = "The embankments of the river."
    whole = score_ledger(model, several, query="embankments", key="The", layer=0, head=0)
    tokens = find_word(model, several, "embankments").tokens
    assert len(tokens) > 1 and whole.positions[0] == tokens[-1]


def test_wrong_inputs(tiny):
    model = tiny("gpt2")
    with pytest.raises(InputError, match=r"`layer` must be in 0\.\.2. Got 3"):
        ledger(model, layer=3)
    with pytest.raises(InputError, match=r"`head` must be in 0\.\.4. Got -1"):
        ledger(model, head=-1)
    with pytest.raises(InputError, match="`group` must be one of 'component'.*Got 'sources'"):
        ledger(model, group="sources")
    with pytest.raises(WordError, match="sea"):
        ledger(model, "sea")
    with pytest.raises(InputError, match=r"`key` must be in 0"):
        ledger(model, key=99)
    other = find_word(model, "A bank.", "bank")
    with pytest.raises(InputError, match="`query` must be a span of 'The river"):
        ledger(model, other)
    with pytest.raises(InputError, match="`side` must be one of 'query', 'key'"):
        ledger(model).marginal("both")
    with pytest.raises(InputError, match="`k` must be an int of at least 1"):
        ledger(model).top(0)
    for by in ("size", "is_gauge"):
        with pytest.raises(InputError, match="`by` must be one of"):
            ledger(model).top(by=by)


@pytest.mark.real_model
@pytest.mark.slow
def test_real_models(smollm2, minilm):
    for model, layer in ((smollm2, 29), (smollm2, 12), (minilm, 5)):
        for query, key in (("bank", "river"), ("river", "bank"), ("bank", 0), (0, "bank")):
            for group in ("component", "source", "kind"):
                found = ledger(model, query, key, layer, group, head=3)
                assert found.reconstruction_error < 1e-4
