"""What makes one pair's score differ between two texts: query, key, or where they stand.

A score is c · q R(Δ) kᵀ. Exchange the query, the key and the offset one after another, in every
order, and the mean effect of each is its exact share of the difference (Shapley). Softmax ignores
what a whole row has in common, so the same is done for the score minus its row's mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._masks import visible
from wvprobe._score_parts import Word, one_layer, word_at
from wvprobe._shapley import shapley
from wvprobe._sinks import sink_keys
from wvprobe._types import Result
from wvprobe._validate import listed, message
from wvprobe.activations import Activations, read_sites
from wvprobe.adapters import Architecture
from wvprobe.components import EmbeddingParts, embedding_parts, position_parts
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.words import WordSpan, encode

PLAYERS = ("query_content", "key_content", "offset")
# Where the layers of a result stand among its axes.
_LAYER_AXIS = {
    **dict.fromkeys(("scores", "shares", "gauge_fixed", "gauge_shares", "capped", "logsumexp"), 1),
    **dict.fromkeys(("scale", "queries", "keys"), 0),
}


@dataclass(frozen=True)
class ContextResult(Result):
    """One pair's scores in two texts, at every head, and what their differences are made of.

    Attributes:
        scores: [text, layer, head] raw scores, before a soft cap, masked ones included; ALiBi's
            slope counted from the query, as −slope · Δ, which softmax cannot tell from the
            model's own.
        shares: [part, layer, head] Shapley shares of query content, key content and offset in the
            second score minus the first, to which they sum. With learned positions the content is
            the stream without what the position brought into it.
        scale: [layer, head] c ‖q‖ ‖k‖, the larger of the two texts: what a share is small against.
        gauge_fixed: [text, layer, head] raw scores minus their mean over the keys that the query
            sees and that are no sinks, as in :func:`wvprobe.word_pairs.pair_scores`. NaN where a
            query sees sinks alone.
        gauge_shares: [part, layer, head] shares of query content, key content, offset and row (the
            other keys of the query's row, where they stand included) in the second gauge-fixed
            score minus the first.
        masked: [text, layer] whether the layer's mask keeps the query from the key.
        capped: [text, layer, head] the score behind a soft cap; `scores` where there is none.
        logsumexp: [text, layer, head] log Σ exp of the row's capped scores over the keys seen.
        queries: [layer, rotation] relative change of the queries between the texts,
            ‖q_b − q_a‖ / ½(‖q_a‖ + ‖q_b‖) over all heads, as they are multiplied: before and after
            rotation. Both are alike in a model without rotation.
        keys: [layer, rotation] likewise of the keys.
        reconstruction_error: largest |s − the model's own raw score| / c‖q‖‖k‖ over texts, layers
            and heads, of the pair and of all other keys of its row.
        texts: the two texts.
        query: the query's word, in each text.
        key: the key's word, in each text.
        positions: [text] token positions of query and key.
        same_tokens: whether query and key are the same token ids in both texts.

    Examples:
        >>> texts = "The river bank is closed.", "A bank by the river is closed."
        >>> found = wvprobe.context_dependence(model, *texts, query="bank", key="river")
        >>> found.scores.shape, found.masked.any(dim=1).tolist()  # text, layer, head
        (torch.Size([2, 3, 6]), [False, True])
    """

    scores: Float[Tensor, "text layer head"]
    shares: Float[Tensor, "part layer head"]
    scale: Float[Tensor, "layer head"]
    gauge_fixed: Float[Tensor, "text layer head"]
    gauge_shares: Float[Tensor, "gauge_part layer head"]
    masked: Bool[Tensor, "text layer"]
    capped: Float[Tensor, "text layer head"]
    logsumexp: Float[Tensor, "text layer head"]
    queries: Float[Tensor, "layer rotation"]
    keys: Float[Tensor, "layer rotation"]
    reconstruction_error: float
    texts: tuple[str, str]
    query: tuple[str, str]
    key: tuple[str, str]
    positions: tuple[tuple[int, int], tuple[int, int]]
    same_tokens: bool

    AXES: ClassVar = {
        "scores": ("text", "layer", "head"),
        "shares": ("part", "layer", "head"),
        "scale": ("layer", "head"),
        "gauge_fixed": ("text", "layer", "head"),
        "gauge_shares": ("gauge_part", "layer", "head"),
        "masked": ("text", "layer"),
        "capped": ("text", "layer", "head"),
        "logsumexp": ("text", "layer", "head"),
        "queries": ("layer", "rotation"),
        "keys": ("layer", "rotation"),
    }

    @property
    def attention(self) -> Float[Tensor, "text layer head"]:
        """The pattern's weight, exp(capped − logsumexp); NaN where masked."""
        return (self.capped - self.logsumexp).exp().masked_fill(self.masked[..., None], torch.nan)

    def pair(self) -> str:
        """Return the pair's name, such as ``bank→river``."""
        names = dict.fromkeys(f"{q}→{k}" for q, k in zip(self.query, self.key, strict=True))
        return " / ".join(names)

    def to_frame(self) -> Any:
        """Return one row a layer and head.

        Columns: layer head score_a score_b query_content key_content offset (these three sum to
        score_b − score_a) masked_a masked_b scale; gauge_a gauge_b and, for their difference,
        query_content_gauge row offset_gauge, which sum to it together with key_content;
        attention_a attention_b, NaN where masked; log_attention_change = score_change (behind the
        soft cap) − logsumexp_change, NaN where either text masks the pair.
        """
        import pandas

        _, layers, heads = self.scores.shape
        seen = ~self.masked.any(dim=0)[:, None].expand(layers, heads)
        masked = self.masked[..., None].expand(-1, layers, heads)
        query_gauge, _, offset_gauge, row = self.gauge_shares
        change, whole = (
            (t[1] - t[0]).where(seen, torch.nan) for t in (self.capped, self.logsumexp)
        )
        at = torch.cartesian_prod(torch.arange(layers), torch.arange(heads)).T
        columns = {
            "layer": at[0],
            "head": at[1],
            **dict(zip(("score_a", "score_b"), self.scores, strict=True)),
            **dict(zip(PLAYERS, self.shares, strict=True)),
            **dict(zip(("masked_a", "masked_b"), masked, strict=True)),
            "scale": self.scale,
            **dict(zip(("gauge_a", "gauge_b"), self.gauge_fixed, strict=True)),
            "query_content_gauge": query_gauge,
            "row": row,
            "offset_gauge": offset_gauge,
            **dict(zip(("attention_a", "attention_b"), self.attention, strict=True)),
            "log_attention_change": change - whole,
            "score_change": change,
            "logsumexp_change": whole,
        }
        return pandas.DataFrame({k: v.reshape(-1).tolist() for k, v in columns.items()})


def context_dependence(
    model: Any,
    text_a: str,
    text_b: str,
    *,
    query: Word | Sequence[Word],
    key: Word | Sequence[Word],
) -> ContextResult:
    """Take the difference of a pair's scores in two texts apart, exactly, at every head.

    The shares of a difference are Shapley values (Shapley 1953) of a game whose players are the
    query's content x, the key's content y and the offset z, each taken from one text or the
    other: worth(x, y, z) = c · q_x R(Δ_z) k_yᵀ, raw. ALiBi counts as −slope · Δ_z. Learned
    positions act through what attention reads: there z is the position's part of the stream, the
    content is the stream without it, and the norm before attention is evaluated anew for every
    combination of the two. A post-norm model norms their sum before its blocks: at layer 0 that
    norm is evaluated anew; above, the position's part is what the norms of its own text, with
    their scales frozen, have made of it.

    Gauge-fixed, worth(x, y, z, w) = worth(x, y, z) − mean of the score of q_x with the keys of the
    row of text w where they stand there: those that the query sees and that are no sinks. Learned
    positions of the query enter this mean too.

    For pairs that no mask hides, Δ log attention = Δ capped score − Δ logsumexp, exactly.

    Args:
        model: a TransformerBridge.
        text_a: a text with both words.
        text_b: another, of any length.
        query: the word whose query it is: a word of both texts, or one (a word, a WordSpan or a
            token position) a text; of several tokens the last counts.
        key: the word whose key it is, likewise; before the query or after it.

    Raises:
        WordError: a word is not in a text.
        InputError: no such position; not two words for two texts.
        UnsupportedError: the rotation depends on the texts' lengths, and these differ in it.

    Examples:
        >>> texts = "The river bank is closed.", "A bank by the river is closed."
        >>> found = wvprobe.context_dependence(model, *texts, query="bank", key="river")
        >>> frame = found.to_frame()
        >>> shares = frame.query_content + frame.key_content + frame.offset
        >>> bool(((frame.score_b - frame.score_a - shares).abs() < 1e-3).all())
        True
    """
    texts = (text_a, text_b)
    arch = adapters.architecture(model)
    encodings = [encode(model, text) for text in texts]
    named = {
        name: [word_at(*of, name) for of in zip(encodings, _each(word, name), strict=True)]
        for name, word in (("query", query), ("key", key))
    }
    at = [(i, j) for (i, _), (j, _) in zip(named["query"], named["key"], strict=True)]
    _check_lengths(model, arch, [len(encoding.ids) for encoding in encodings])
    read = _Read(model, arch, texts, at)
    layers = [_layer(read, layer) for layer in range(arch.n_layers)]
    found = {
        name: torch.stack([getattr(one, name) for one in layers], dim=dim)
        for name, dim in _LAYER_AXIS.items()
    }
    ids = [[e.ids[p] for p in pair] for e, pair in zip(encodings, at, strict=True)]
    positions = [list(pair) for pair in at]
    return ContextResult(
        provenance=adapters.provenance(model, texts=list(texts), positions=positions),
        **found,
        masked=torch.stack([~read.sees[t][:, at[t][1]] for t in (0, 1)]),
        reconstruction_error=max(one.error for one in layers),
        texts=texts,
        query=(named["query"][0][1], named["query"][1][1]),
        key=(named["key"][0][1], named["key"][1][1]),
        positions=(at[0], at[1]),
        same_tokens=ids[0] == ids[1],
    )


def _each(word: Any, name: str) -> list[Word]:
    """Return a word for each of the two texts."""
    if isinstance(word, Integral):
        return [word, word]  # pyright: ignore[reportReturnType]
    if isinstance(word, str | WordSpan):
        return [word, word]
    both = listed(name, word, "a word, or one for each of the two texts")
    if len(both) != 2:
        raise InputError(message(name, "a word, or one for each of the two texts", word))
    return both


def _check_lengths(model: Any, arch: Architecture, lengths: list[int]) -> None:
    """Refuse texts that a rotation treats differently because of their lengths."""
    regime = adapters.length_regime(model, arch)
    if regime(lengths[0]) != regime(lengths[1]):
        raise UnsupportedError(
            f"the texts of {lengths[0]} and {lengths[1]} tokens are rotated by different "
            f"frequencies in {model.cfg.model_name}, which is neither content nor offset. Use "
            "texts of one length."
        )


class _Learned(NamedTuple):
    """What learned positions are in a text: [pos, …] at the embedding, [layer, pos, …] carried."""

    embedded: EmbeddingParts
    carried: Tensor


def _learned(model: Any, arch: Architecture, seen: Activations, item: int) -> _Learned | None:
    embedded = embedding_parts(model, arch, seen.tokens[item])
    carried = position_parts(model, arch, seen, item)
    return None if embedded is None or carried is None else _Learned(embedded, carried)


class _Read:
    """What the two texts' forwards left: queries, keys and scores of the pair's rows."""

    def __init__(
        self, model: Any, arch: Architecture, texts: tuple[str, str], at: list[tuple[int, int]]
    ) -> None:
        self.model, self.arch, self.at = model, arch, at
        self.slopes = adapters.alibi_slopes(model, arch)
        norms_streams = arch.position == "learned" and arch.wiring == "post_norm"
        sites = ("k", "resid_pre", *(("attn_added", "mlp_out") if norms_streams else ()))
        self.rows = read_sites(model, texts, ["q", "scores"], positions=[i for i, _ in at])
        self.whole = read_sites(model, texts, sites)
        self.lengths = [len(tokens) for tokens in self.whole.tokens]
        found = (_learned(model, arch, self.whole, item) for item in (0, 1))
        self.learned = [text for text in found if text is not None]
        self.sees = [self._row_seen(item) for item in (0, 1)]  # [layer, key]
        sinks = [sink_keys(model, self.whole, item) for item in (0, 1)]
        self.counted = [seen & ~sink for seen, sink in zip(self.sees, sinks, strict=True)]

    def _row_seen(self, item: int) -> Tensor:
        windows = [
            adapters.sliding_window(self.model, layer) for layer in range(self.arch.n_layers)
        ]
        size, query = self.lengths[item], self.at[item][0]
        rows = [visible(size, causal=self.arch.causal, window=w)[query] for w in windows]
        return torch.stack(rows)

    def by_head(self, keys: Tensor) -> Tensor:
        """Repeat keys [..., kv_head, d_head] for every query head that reads them."""
        return keys.double().repeat_interleave(self.arch.n_heads // self.arch.n_kv_heads, dim=-2)

    def row_keys(self, item: int, layer: int) -> Tensor:
        """Return the keys of a text, [pos, head, d_head], before rotation."""
        return self.by_head(self.whole["k"][item, : self.lengths[item], layer])

    def model_row(self, item: int, layer: int) -> Tensor:
        """Return the model's own raw scores of the query's row, [pos, head], ALiBi as −slope Δ."""
        row = self.rows["scores"][item, layer, :, 0, : self.lengths[item]].double().T
        return row if self.slopes is None else row - self.slopes.cpu().double() * self.at[item][0]

    def combined(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return queries and keys of every content with every offset.

        [content's text, offset's text, head, d_head] each, before rotation. Only learned positions
        make a difference on the second axis.
        """
        if not self.learned:
            queries = self.rows["q"][:, layer].double()
            keys = [self.row_keys(t, layer)[self.at[t][1]] for t in (0, 1)]
            both = (queries[:, None], torch.stack(keys)[:, None])
            return both[0].expand(2, 2, -1, -1), both[1].expand(2, 2, -1, -1)
        heads = one_layer(self.model, self.arch, layer)
        read = [heads.normalize(self._streams(layer, end).to(heads.device), 0) for end in (0, 1)]
        return heads.queries(read[0], 0).cpu(), self.by_head(heads.keys(read[1], 0).cpu())

    def _streams(self, layer: int, end: int) -> Tensor:
        """Return [content's text, position's text, d_model] of the query (0) or the key (1)."""
        at = [pair[end] for pair in self.at]
        norm = self.learned[0].embedded.norm if layer == 0 else None
        if norm is not None:
            embedded = [text.embedded for text in self.learned]
            content = [e.token[p] + e.constant[p] for e, p in zip(embedded, at, strict=True)]
            parts = [e.position[p] for e, p in zip(embedded, at, strict=True)]
        else:
            parts = [text.carried[layer, p] for text, p in zip(self.learned, at, strict=True)]
            streams = [self.whole["resid_pre"][t, at[t], layer].double() for t in (0, 1)]
            content = [stream - part for stream, part in zip(streams, parts, strict=True)]
        both = torch.stack(content)[:, None] + torch.stack(parts)[None]
        return both if norm is None else norm(both)


class _LayerShares(NamedTuple):
    """The fields of a :class:`ContextResult` of one layer."""

    scores: Tensor
    shares: Tensor
    scale: Tensor
    gauge_fixed: Tensor
    gauge_shares: Tensor
    capped: Tensor
    logsumexp: Tensor
    queries: Tensor
    keys: Tensor
    error: float


def _layer(read: _Read, layer: int) -> _LayerShares:
    maths = _Layer(read, layer)
    worth, rows = maths.worth(), [maths.rows(text) for text in (0, 1)]
    means = torch.stack([maths.mean(row, text) for text, row in enumerate(rows)], dim=2)
    # Players on the axes: query content, key content, offset, row.
    game = worth[:, :, :, None] - means[:, None]
    scores = torch.stack([worth[t, t, t] for t in (0, 1)])
    own = [row[t, t] for t, row in enumerate(rows)]
    scales = [maths.scale(t) for t in (0, 1)]
    pairs = [scale[read.at[t][1]] for t, scale in enumerate(scales)]
    errors = [maths.error(t, own[t], scores[t], scales[t]) for t in (0, 1)]
    capped = maths.capped(scores)
    sums = [maths.capped(own[t])[read.sees[t][layer]].logsumexp(dim=0) for t in (0, 1)]
    return _LayerShares(
        scores=scores,
        shares=shapley(worth, 3),
        scale=torch.maximum(*pairs),
        gauge_fixed=torch.stack([game[t, t, t, t] for t in (0, 1)]),
        gauge_shares=shapley(game, 4),
        capped=capped,
        logsumexp=torch.stack(sums),
        queries=maths.changes(0),
        keys=maths.changes(1),
        error=max(errors),
    )


class _Layer:
    """Scores of one layer, at all heads, with each of their parts taken from either text."""

    def __init__(self, read: _Read, layer: int) -> None:
        self.read, self.layer = read, layer
        self.rotary = adapters.rotary(read.model, read.arch, layer)
        self.coefficient = adapters.score_scale(read.model, layer)
        self.ends = read.combined(layer)  # queries, keys: [content, offset, head, d_head]

    def turned(self, vectors: Tensor, at: Tensor | int) -> Tensor:
        """Return vectors [..., head, d_head] turned to a position, or each to its own."""
        if self.rotary is None:
            return vectors
        # Both texts' lengths are turned alike, see _check_lengths.
        positions = torch.as_tensor(at)[..., None]
        return self.rotary.rotate(vectors, positions, self.read.lengths[0])

    def slope(self, offset: Tensor | int) -> Tensor:
        """Return what ALiBi adds at an offset, [..., head]."""
        offset = torch.as_tensor(offset, dtype=torch.float64)[..., None]
        slopes = self.read.slopes
        return 0.0 * offset if slopes is None else -slopes.cpu().double() * offset

    def worth(self) -> Tensor:
        """Return raw scores, [query content, key content, offset, head]."""
        scores = []
        for text, (i, j) in enumerate(self.read.at):
            q, k = self.turned(self.ends[0][:, text], i), self.turned(self.ends[1][:, text], j)
            product = self.coefficient * torch.einsum("xhd,yhd->xyh", q, k)
            scores.append(product + self.slope(i - j))
        return torch.stack(scores, dim=2)

    def rows(self, text: int) -> Tensor:
        """Return scores with every key of a text, [query content, offset, key, head]."""
        i, at = self.read.at[text][0], torch.arange(self.read.lengths[text])
        keys = self.turned(self.read.row_keys(text, self.layer), at)
        queries = self.turned(self.ends[0], i)
        scores = self.coefficient * torch.einsum("xzhd,jhd->xzjh", queries, keys)
        return scores + self.slope(i - at)

    def mean(self, rows: Tensor, text: int) -> Tensor:
        """Return a row's mean over the keys that count, [..., head]; NaN where none does."""
        return rows[:, :, self.read.counted[text][self.layer]].mean(dim=2)

    def capped(self, scores: Tensor) -> Tensor:
        """Return scores behind the soft cap."""
        cap = adapters.soft_cap(self.read.model, self.layer)
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def scale(self, text: int) -> Tensor:
        """Return c ‖q‖ ‖k‖ of the query with every key of its text, [key, head]."""
        q = self.ends[0][text, text].norm(dim=-1)
        return self.coefficient * q * self.read.row_keys(text, self.layer).norm(dim=-1)

    def error(self, text: int, row: Tensor, score: Tensor, scale: Tensor) -> float:
        """Return the largest distance from the model's own scores, relative to the scale."""
        own, key = self.read.model_row(text, self.layer), self.read.at[text][1]
        apart = torch.cat(
            ((row - own).abs() / scale, ((score - own[key]).abs() / scale[key])[None])
        )
        return float(apart.max())

    def changes(self, end: int) -> Tensor:
        """Return the relative change of queries (0) or keys (1), before and after rotation."""
        plain = [self.ends[end][t, t] for t in (0, 1)]
        turned = [self.turned(x, self.read.at[t][end]) for t, x in enumerate(plain)]
        pairs = (plain, turned)
        return torch.stack([2 * (b - a).norm() / (a.norm() + b.norm()) for a, b in pairs])
