"""Shares of a score's difference between two texts, against the model run on every combination."""

import math
from itertools import product

import pytest
import torch

from wvprobe import adapters
from wvprobe._sinks import sink_keys
from wvprobe.activations import capture, read_sites
from wvprobe.components import position_parts
from wvprobe.context_shares import ContextResult, context_dependence
from wvprobe.errors import InputError, UnsupportedError, WordError
from wvprobe.testing import FAMILIES, tiny_model
from wvprobe.word_pairs import pair_scores
from wvprobe.words import find_word

TEXTS = ("a power bank dropped into the river.", "The river bank is close to here.")
SEEN = ("The bank by the river.", "Our old bank near the wide river.")
PROMISED = ["layer", "head", "score_a", "score_b", "query_content", "key_content", "offset"]
PROMISED += ["masked_a", "masked_b"]


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_models_and_shares_sum_to_their_difference(family, tiny):
    model = tiny(family)
    pairs = pair_scores(model, TEXTS, "bank", "river")
    slopes = adapters.alibi_slopes(model, adapters.architecture(model))
    for direction, (query, key) in enumerate((("bank", "river"), ("river", "bank"))):
        found = context_dependence(model, *TEXTS, query=query, key=key)
        assert found.reconstruction_error < 1e-6 and found.same_tokens
        scores = pairs.scores[:, direction].double()
        if slopes is not None:
            at = torch.tensor([i for i, _ in found.positions]).double()
            scores = scores - slopes.double() * at[:, None, None]
        assert ((found.scores - scores).abs() / found.scale).max() < 1e-6
        difference = found.scores[1] - found.scores[0]
        assert ((found.shares.sum(dim=0) - difference).abs() / found.scale).max() < 1e-12
        fixed = pairs.gauge_fixed[:, direction]
        assert ((found.gauge_fixed - fixed).abs() / found.scale).max() < 1e-6
        difference = found.gauge_fixed[1] - found.gauge_fixed[0]
        assert ((found.gauge_shares.sum(dim=0) - difference).abs() / found.scale).max() < 1e-12
        # The row takes nothing from the key, and from the offset only where it is in the query.
        torch.testing.assert_close(found.gauge_shares[1], found.shares[1])
        moved = found.positions[0][0] != found.positions[1][0]
        enters = adapters.architecture(model).position == "learned" and (moved or family == "bert")
        assert torch.allclose(found.gauge_shares[2], found.shares[2]) != enters
        # Layer 0, the same two tokens: position alone makes the difference, and it makes some.
        shares = (found.shares / found.scale).abs()[:, 0]
        assert shares[:2].max() <= 1e-5 and shares[2].max() > 1e-3
        # Above, what stands around the words has come in.
        assert (found.shares / found.scale).abs()[:2, 1:].max() > 1e-3


class Run:
    """The model itself on every combination: one text's contents put into the other's places."""

    def __init__(self, model, layer, head, query, key):
        self.model, self.layer, self.head = model, layer, head
        self.arch = adapters.architecture(model)
        self.sites = ["q", "k", "resid_pre", "attn_added", "mlp_out"]
        self.seen = read_sites(model, TEXTS, self.sites)
        self.at = [
            [find_word(model, text, word).tokens[-1] for word in (query, key)] for text in TEXTS
        ]
        self.positions = [position_parts(model, self.arch, self.seen, t) for t in (0, 1)]

    def put(self, site, at, value):
        def change(now):
            now = now.clone()
            now[:, at] = value.to(now.dtype)
            return now

        return {(site, self.layer): change}

    def changes(self, end, content, offset, text):
        """Put a content with an offset in the place of query (0) or key (1) of a running text."""
        place, source = self.at[text][end], self.at[content][end]
        if self.arch.position != "learned":
            site = "qk"[end]
            return self.put(site, place, self.seen[site][content, source, self.layer])
        stream = self.seen["resid_pre"][content, source, self.layer].double()
        part = self.positions[content][self.layer, source]
        other = self.positions[offset][self.layer, self.at[offset][end]]
        return self.put("resid_pre", place, stream - part + other)

    def row(self, text, changes):
        """Return the raw scores of the query's row, ALiBi counted from the query."""
        with adapters.changing(self.model, self.arch, changes):
            seen = read_sites(self.model, TEXTS[text], "scores", layers=self.layer)
        query = self.at[text][0]
        row = seen["scores"][0, 0, self.head, query].double()
        slopes = adapters.alibi_slopes(self.model, self.arch)
        return row if slopes is None else row - float(slopes[self.head]) * query

    def worth(self, x, y, z):
        """Return the pair's score where text z has them stand."""
        changes = [self.changes(end, of, z, z) for end, of in enumerate((x, y))]
        both = changes[0]
        for raw, change in changes[1].items():
            first = both.get(raw)
            both[raw] = change if first is None else lambda v, a=first, b=change: b(a(v))
        return float(self.row(z, both)[self.at[z][1]])

    def mean(self, x, z, w):
        """Return the mean of the query's scores with the row's own keys."""
        place = self.at[w][0]
        own = self.put("k", place, self.seen["k"][w, place, self.layer])
        row = self.row(w, self.changes(0, x, z, w) | own)
        size = len(self.seen.tokens[w])
        window = adapters.sliding_window(self.model, self.layer) or 99
        sinks = sink_keys(self.model, self.seen, w)[self.layer]
        kept = [
            float(row[j])
            for j in range(size)
            if (j <= place or not self.arch.causal) and abs(j - place) < window and not sinks[j]
        ]
        return sum(kept) / len(kept)


def by_orders(worth, player, players):
    """Return a Shapley value by its textbook sum over coalitions."""
    total = 0.0
    for joined in product((0, 1), repeat=players - 1):
        without = (*joined[:player], 0, *joined[player:])
        joins = (*joined[:player], 1, *joined[player:])
        weight = 1 / (players * math.comb(players - 1, sum(joined)))
        total += weight * (worth[joins] - worth[without])
    return total


# Rotary (whole, with norms of queries and keys, windows), ALiBi, learned, behind norms on the sum.
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "bloom", "gpt2", "opt", "bert"])
@pytest.mark.parametrize("words", [("bank", "river"), ("river", "bank")])
def test_every_combination_run_by_the_model_itself(family, words, tiny):
    model, layer, head = tiny(family), 2, 1
    found = context_dependence(model, *TEXTS, query=words[0], key=words[1])
    run = Run(model, layer, head, *words)
    worth = {c: run.worth(*c) for c in product((0, 1), repeat=3)}
    means = {c: run.mean(*c) for c in product((0, 1), repeat=3)}
    game = {
        (x, y, z, w): worth[x, y, z] - means[x, z, w] for x, y, z, w in product((0, 1), repeat=4)
    }
    within = 1e-5 * float(found.scale[layer, head])
    for player in range(3):
        expected = by_orders(worth, player, 3)
        assert float(found.shares[player, layer, head]) == pytest.approx(expected, abs=within)
    for player in range(4):
        expected = by_orders(game, player, 4)
        assert float(found.gauge_shares[player, layer, head]) == pytest.approx(expected, abs=within)
    assert max(abs(worth[c] - worth[0, 0, 0]) for c in worth) > 100 * within


def test_at_layer_0_a_norm_on_the_embeddings_is_evaluated_anew(tiny):
    """BERT: norm(token + position + type), by the model's own modules."""
    model = tiny("bert")
    texts = ("bank near a river", "A river near a bank")
    found = context_dependence(model, *texts, query="bank", key="river")
    seen, embeddings = capture(model, texts, "resid_pre"), model.original_model.bert.embeddings
    attention = model.blocks[0].attn
    parts = {
        name: getattr(embeddings, f"{name}_embeddings").weight for name in ("word", "position")
    }
    kind = embeddings.token_type_embeddings.weight[0]

    def vector(end, content, offset, letter):
        token = seen.tokens[content][found.positions[content][end]]
        x = parts["word"][token] + parts["position"][found.positions[offset][end]] + kind
        x = embeddings.LayerNorm(x)
        weight, bias = (getattr(attention, f"{kind}_{letter}") for kind in "Wb")
        return torch.einsum("d,hde->he", x, weight) + bias

    with torch.no_grad():
        worth = {
            (x, y, z): (vector(0, x, z, "Q") * vector(1, y, z, "K")).sum(dim=-1) / 7**0.5
            for x, y, z in product((0, 1), repeat=3)
        }
    for player in range(3):
        expected = by_orders(worth, player, 3).double()
        assert ((found.shares[player, 0] - expected).abs() / found.scale[0]).max() < 1e-6


@pytest.mark.parametrize("family", ["bert", "llama", "gemma2", "bloom", "mistral"])
def test_the_change_of_attention_is_that_of_the_score_less_the_rows(family, tiny):
    model = tiny(family)
    found = context_dependence(model, *SEEN, query="river", key="bank")
    frame = found.to_frame()
    pattern = pair_scores(model, SEEN, "river", "bank").attention[:, 0].double()
    visible = ~found.masked.any(dim=0)
    for text, column in enumerate(("attention_a", "attention_b")):
        got = torch.tensor(frame[column]).reshape(pattern.shape[1:])
        shown = ~found.masked[text]
        torch.testing.assert_close(got[shown], pattern[text][shown], atol=1e-6, rtol=1e-4)
        assert got[~shown].isnan().all()
    change = torch.tensor(frame["log_attention_change"]).reshape(pattern.shape[1:])
    expected = (pattern[1] / pattern[0]).log()
    torch.testing.assert_close(change[visible], expected[visible], atol=1e-4, rtol=1e-4)
    assert change[~visible].isnan().all()
    apart = frame["score_change"] - frame["logsumexp_change"] - frame["log_attention_change"]
    assert apart.abs().fillna(0).max() < 1e-12
    if family == "gemma2":
        cap = adapters.soft_cap(model, 1)
        torch.testing.assert_close(found.capped, cap * torch.tanh(found.scores / cap))
    if family == "mistral":  # five tokens wide, and in the second text the two are further apart
        (i, j), (k, m) = found.positions
        assert found.masked.tolist() == [[i - j >= 5] * 3, [k - m >= 5] * 3] != [[False] * 3] * 2


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "bloom", "deepseek_v3"])
def test_the_same_text_twice_has_no_difference(family, tiny):
    found = context_dependence(tiny(family), TEXTS[1], TEXTS[1], query="bank", key="river")
    for zeros in (found.shares, found.gauge_shares, found.queries, found.keys):
        assert float(zeros.abs().max()) < 1e-6


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "bloom"])
def test_the_same_places_leave_nothing_to_the_offset_at_layer_0(family, tiny):
    texts = ("The bank by the river.", "The bank by the river is far.")
    found = context_dependence(tiny(family), *texts, query="bank", key="river")
    assert float((found.shares / found.scale).abs()[:, 0].max()) < 1e-5
    if family != "bert":  # where the offset is the position's part, and other norms scaled it
        assert float((found.shares / found.scale).abs()[2].max()) < 1e-12


def test_another_token_has_a_share_of_its_own(tiny):
    """Byte BPE spells a word at the start of a text, without its space, as another token."""
    texts = ("bank by the river.", "A bank by the river.")
    found = context_dependence(tiny("gpt2"), *texts, query="bank", key="river")
    assert not found.same_tokens
    query, key, _ = (found.shares / found.scale).abs()[:, 0].amax(dim=1).tolist()
    assert query > 1e-2 and key < 1e-5


def test_changes_of_query_and_key(tiny):
    """'bank' stands at one place in both texts, 'river' does not; rotation is told apart."""
    rotary = context_dependence(tiny("llama"), *TEXTS, query="bank", key="river")
    (q_plain, q_turned), (k_plain, k_turned) = rotary.queries[0].tolist(), rotary.keys[0].tolist()
    same = rotary.positions[0][0] == rotary.positions[1][0]
    assert q_plain < 1e-5 and k_plain < 1e-5 and k_turned > 1e-3
    assert (q_turned < 1e-5) == same
    assert (rotary.queries[1:] > 1e-3).all()
    learned = context_dependence(tiny("gpt2"), *TEXTS, query="bank", key="river")
    assert learned.keys[0, 0] == learned.keys[0, 1] > 1e-3
    seen = capture(tiny("llama"), TEXTS, "k", words="river")["k"].double()
    change = 2 * (seen[1] - seen[0]).flatten(1).norm(dim=1)
    change = change / (seen[1].flatten(1).norm(dim=1) + seen[0].flatten(1).norm(dim=1))
    torch.testing.assert_close(rotary.keys[:, 0], change)


def test_frames_say_what_the_tensors_hold(tiny, tmp_path):
    found = context_dependence(tiny("mistral"), *SEEN, query="river", key="bank")
    frame = found.to_frame()
    assert list(frame.columns)[:9] == PROMISED and len(frame) == 3 * 6
    row = frame.iloc[6 + 4]
    assert (row["layer"], row["head"]) == (1, 4)
    assert row["score_b"] == float(found.scores[1, 1, 4])
    parts = row["query_content"] + row["key_content"] + row["offset"]
    assert parts == pytest.approx(row["score_b"] - row["score_a"], abs=1e-12)
    parts = row["query_content_gauge"] + row["key_content"] + row["offset_gauge"] + row["row"]
    assert parts == pytest.approx(row["gauge_b"] - row["gauge_a"], abs=1e-12)
    assert row["masked_b"] == bool(found.masked[1, 1]) and row["row"] == found.gauge_shares[3, 1, 4]
    loaded = ContextResult.load(found.save(tmp_path / "shares"))
    assert torch.equal(loaded.shares, found.shares) and loaded.positions == found.positions


def test_words_of_several_tokens_and_words_of_each_text(tiny):
    model = tiny("gpt2")
    texts = ("The embankments by the river.", "Old embankments are near the river.")
    spans = [find_word(model, text, "embankments") for text in texts]
    assert all(len(span.tokens) > 1 for span in spans)
    found = context_dependence(model, *texts, query="embankments", key="river")
    assert [q for q, _ in found.positions] == [span.tokens[-1] for span in spans]
    again = context_dependence(model, *texts, query=spans, key=[k for _, k in found.positions])
    assert torch.equal(again.shares, found.shares)
    mixed = context_dependence(model, *texts, query=("embankments", "near"), key="river")
    assert mixed.query == ("embankments", "near") and not mixed.same_tokens
    assert mixed.pair() == "embankments→river / near→river"


def test_wrong_inputs(tiny):
    model = tiny("gpt2")
    with pytest.raises(WordError, match="sea"):
        context_dependence(model, *TEXTS, query="bank", key="sea")
    with pytest.raises(InputError, match="`query` must be a word, or one for each"):
        context_dependence(model, *TEXTS, query=("bank", "bank", "bank"), key="river")
    with pytest.raises(InputError, match="`key` must be in 0"):
        context_dependence(model, *TEXTS, query="bank", key=99)


def test_texts_that_are_rotated_otherwise_are_refused():
    model = tiny_model(
        "llama",
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        max_position_embeddings=13,
    )
    found = context_dependence(model, *TEXTS, query="bank", key="river")
    assert found.reconstruction_error < 1e-5
    longer = "The river bank is close to here, and the old boat by the bank is ours."
    with pytest.raises(UnsupportedError, match="of one length"):
        context_dependence(model, TEXTS[0], longer, query="bank", key="river")


@pytest.mark.slow
@pytest.mark.real_model
def test_real_models(smollm2, minilm):
    for model in (smollm2, minilm):
        for query, key in (("bank", "river"), ("river", "bank")):
            found = context_dependence(model, *TEXTS, query=query, key=key)
            assert found.reconstruction_error < 1e-5
            shares = (found.shares / found.scale).abs()[:, 0]
            assert float(shares[:2].max()) <= 1e-5 and float(shares[2].max()) > 1e-2
        assert found.positions[0][1] == found.positions[1][1] == 3
        assert found.keys[0, 1] < 1e-5 < found.queries[0, 1]
