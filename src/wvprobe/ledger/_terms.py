"""The ledger of a score: what the query is made of against what the key is made of.

With all scales frozen at what they were (of the norm before attention, of norms of queries and
keys, of latents) a query is a sum of parts, one for everything that wrote into the stream, and so
is a key. Their product is then a sum over pairs of parts, exact.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._masks import visible
from wvprobe._score_parts import FrozenHead, Word, one_layer, word_at
from wvprobe._sinks import sink_keys
from wvprobe._types import Result
from wvprobe._validate import index, length, one_of
from wvprobe.activations import read_sites
from wvprobe.components import Component, stream_components, stream_sources
from wvprobe.heads import HeadWeights
from wvprobe.words import Encoding, encode

GROUPS = ("component", "source", "kind")
KINDS = ("token", "position", "context", "bias")
_CONSTANT = 1e-6  # of c‖q‖‖k‖: what a term may vary over keys and still count as constant
_COLUMNS = ("term", "gauge_fixed", "sink", "is_gauge")


class Part(NamedTuple):
    """A part of a query or of a key.

    Attributes:
        name: ``token``, ``position``, ``L5H1``, ``MLP 5``, ``bias 5`` (b_O of block 5, or what is
            added by norms behind it), ``b_Q``, ``b_K`` (that of the norm before attention
            included), ``ALiBi``, ``context``; of a source token its string and position.
        kind: ``token``, ``position``, ``head``, ``mlp``, ``bias``, ``context`` or ``source``.
        layer: the block that wrote it, or None.
        head: the head, or None.
        position: the source token's position, or None.

    Examples:
        >>> text = "The river bank is closed."
        >>> ledger = wvprobe.score_ledger(model, text, query="bank", key="river", layer=1, head=1)
        >>> [part.name for part in ledger.key_parts][:2], ledger.key_parts[1].kind
        (['token', 'L0H0'], 'head')
    """

    name: str
    kind: str
    layer: int | None = None
    head: int | None = None
    position: int | None = None


@dataclass(frozen=True)
class LedgerResult(Result):
    """One score as a double sum of terms, parts of the query by parts of the key.

    Attributes:
        total: Σ terms, the raw score: before a soft cap, c and rotation included, ALiBi as the
            model adds it (slope times the key's position).
        model_score: the model's own raw score.
        capped: the score behind the soft cap, cap · tanh(total / cap); `total` without one.
        scale: c ‖q‖ ‖k‖, what a term is large or small against.
        reconstruction_error: |total − model_score| / scale.
        terms: [query_part, key_part], float64.
        gauge_fixed: [query_part, key_part], each term minus its own mean over the keys that the
            query sees and that are no sinks. They sum to the gauge-fixed score of
            :func:`wvprobe.word_pairs.pair_scores`. NaN where a query sees sinks alone.
        sink: [query_part, key_part], the same term at the sinks that the query sees, the mean
            over them: what the sink gets. NaN where there is none.
        is_gauge: [query_part, key_part], True where the term varies by at most 1e-6 of `scale`
            over all keys that the query sees, and this key: softmax ignores it.
        query_parts: names of the first axis.
        key_parts: names of the second axis.
        masked: whether the mask keeps the query from the key. The score exists all the same.
        group: ``component``, ``source`` or ``kind``.
        text: the text.
        query: the query's word.
        key: the key's word.
        positions: token positions of query and key.
        layer: the layer.
        head: the head.

    Examples:
        >>> text = "The river bank is closed."
        >>> ledger = wvprobe.score_ledger(model, text, query="bank", key="river", layer=1, head=1)
        >>> float(ledger.terms.sum()) == ledger.total, len(ledger.top(3, by="gauge_fixed"))
        (True, 3)
    """

    total: float
    model_score: float
    capped: float
    scale: float
    reconstruction_error: float
    terms: Float[Tensor, "query_part key_part"]
    gauge_fixed: Float[Tensor, "query_part key_part"]
    sink: Float[Tensor, "query_part key_part"]
    is_gauge: Bool[Tensor, "query_part key_part"]
    query_parts: tuple[Part, ...]
    key_parts: tuple[Part, ...]
    masked: bool
    group: str
    text: str
    query: str
    key: str
    positions: tuple[int, int]
    layer: int
    head: int

    AXES: ClassVar = {
        name: ("query_part", "key_part") for name in ("terms", "gauge_fixed", "sink", "is_gauge")
    }

    def to_frame(self) -> Any:
        """Return one row a term.

        Columns: query_component key_component (names), query_kind query_layer query_head key_kind
        key_layer key_head, query_position key_position (of source tokens), term gauge_fixed sink
        is_gauge.
        """
        import pandas

        sides = {"query": self.query_parts, "key": self.key_parts}
        rows = torch.cartesian_prod(*(torch.arange(len(parts)) for parts in sides.values())).T
        columns: dict[str, Any] = {}
        for (side, parts), at in zip(sides.items(), rows.tolist(), strict=True):
            columns |= {f"{side}_component": [parts[n].name for n in at]}
        for field in ("kind", "layer", "head", "position"):
            for (side, parts), at in zip(sides.items(), rows.tolist(), strict=True):
                columns |= {f"{side}_{field}": [getattr(parts[n], field) for n in at]}
        values = (self.terms, self.gauge_fixed, self.sink, self.is_gauge)
        columns |= {c: v.flatten().tolist() for c, v in zip(_COLUMNS, values, strict=True)}
        return pandas.DataFrame(columns)

    def top(self, k: int = 10, *, by: str = "term") -> Any:
        """Return the k rows of :meth:`to_frame` that are largest in size, largest first.

        Args:
            k: how many.
            by: ``term``, ``gauge_fixed`` (what attention sees) or ``sink``.
        """
        frame = self.to_frame()
        order = frame[one_of("by", by, _COLUMNS[:3])].abs().sort_values(ascending=False)
        return frame.loc[order.index[: length("k", k)]].reset_index(drop=True)

    def marginal(self, side: str) -> Any:
        """Return one row a part of one side, terms summed over the other side's parts.

        Columns: component kind layer head position term gauge_fixed sink, in the order of the
        parts. What taking a part out would change if all scales stayed as they are.

        Args:
            side: ``query`` or ``key``.
        """
        import pandas

        query = one_of("side", side, ("query", "key")) == "query"
        frame = pandas.DataFrame(
            list(self.query_parts if query else self.key_parts), columns=list(Part._fields)
        ).rename(columns={"name": "component"})
        for column, value in zip(_COLUMNS, (self.terms, self.gauge_fixed, self.sink), strict=False):
            frame[column] = value.sum(dim=1 if query else 0).tolist()
        return frame


def score_ledger(
    model: Any,
    text: str,
    *,
    query: Word,
    key: Word,
    layer: int,
    head: int,
    group: str = "component",
) -> LedgerResult:
    """Write one attention score as an exact double sum over what query and key are made of.

    s = Σ_a Σ_b c · q_a R(Δ) k_bᵀ (+ ALiBi), where q_a and k_b are what the components a and b of
    the two streams make of query and key (Elhage et al. 2021, A Mathematical Framework for
    Transformer Circuits, the expansion of attention scores; scales frozen as for logit
    attribution there). Norms, norms of queries and keys, and latent scales are frozen at what
    they were in this text, so that a term says what a component brings to this score, and not
    what would happen without it: :func:`wvprobe.ledger.check_terms` holds it against that.

    Args:
        model: a TransformerBridge.
        text: the text.
        query: the word whose query it is, a WordSpan or a token position; of several tokens the
            last counts.
        key: the word whose key it is, likewise. A key that the mask hides is computed and marked.
        layer: layer, from 0.
        head: query head, from 0.
        group: ``component``: token, position, every earlier head and MLP, every bias. ``source``:
            tokens of the text; what a head wrote is split by the tokens that it looked at, one
            step back and not further, all else belongs to the position itself. ``kind``: token,
            position (learned ones and ALiBi; a rotation acts through R(Δ) and has no part of its
            own), context (heads and MLPs) and bias.

    Raises:
        WordError: a word is not in the text.
        InputError: no such layer, head, position or group.
        UnsupportedError: the architecture's scores are not modelled exactly.

    Examples:
        >>> text = "The river bank is closed."
        >>> ledger = wvprobe.score_ledger(model, text, query="bank", key="river", layer=2, head=1)
        >>> ledger.reconstruction_error < 1e-5
        True
    """
    arch = adapters.architecture(model)
    layer = index("layer", layer, arch.n_layers, "layers")
    head = index("head", head, arch.n_heads, "heads")
    encoding = encode(model, text)
    one_of("group", group, GROUPS)
    (i, query_name), (j, key_name) = (
        word_at(encoding, word, name) for word, name in ((query, "query"), (key, "key"))
    )
    seen = read_sites(model, text, ["scores", "resid_pre"], layers=layer)
    grouping = _grouped(model, encoding, layer, group)
    row = _Row(one_layer(model, arch, layer), head, i, grouping, seen["resid_pre"][0, :, 0])
    window = adapters.sliding_window(model, layer)
    sees = visible(len(encoding.ids), causal=arch.causal, window=window)[i]
    sinks = sees & sink_keys(model, seen, 0)[0]
    terms, found = row.terms(j), row.over(sees, sinks, j)
    total, own = float(terms.sum()), float(seen["scores"][0, 0, head, i, j])
    scale, cap = row.scale(j), adapters.soft_cap(model, layer)
    settings: dict[str, Any] = {"query": i, "key": j, "layer": layer, "head": head, "group": group}
    return LedgerResult(
        provenance=adapters.provenance(model, text=text, **settings),
        total=total,
        model_score=own,
        capped=total if cap is None else cap * float(torch.tanh(terms.sum() / cap)),
        scale=scale,
        reconstruction_error=abs(total - own) / scale,
        terms=terms,
        gauge_fixed=terms - found.mean,
        sink=found.sink,
        is_gauge=found.spread <= _CONSTANT * scale,
        query_parts=row.names["Q"],
        key_parts=row.names["K"],
        masked=not bool(sees[j]),
        group=group,
        text=text,
        query=query_name,
        key=key_name,
        positions=(i, j),
        layer=layer,
        head=head,
    )


class _Grouping(NamedTuple):
    """Parts of a stream, and which of them a token's own bias and ALiBi's slope belong to.

    Attributes:
        parts: names of the parts.
        vectors: [part, pos, d_model], float64; they add up to the stream.
        bias: [pos] the part that b_Q and b_K are added to; None where they are parts themselves.
        slope: [pos] likewise, for ALiBi.
    """

    parts: tuple[Part, ...]
    vectors: Tensor
    bias: Tensor | None = None
    slope: Tensor | None = None


def _grouped(model: Any, encoding: Encoding, layer: int, group: str) -> _Grouping:
    size = len(encoding.ids)
    if group == "source":
        strings = enumerate(encoding.strings)
        parts = tuple(
            Part(f"{s.strip() or repr(s)} @{n}", "source", position=n) for n, s in strings
        )
        own = torch.arange(size)
        return _Grouping(parts, stream_sources(model, encoding.text, layer=layer), own, own)
    found = stream_components(model, encoding.text, layer=layer)
    if group == "component":
        # A post-norm block has three biases of one name: b_O and those of its norms.
        names = tuple(dict.fromkeys(found.names))
        place = [names.index(name) for name in found.names]
        parts = tuple(Part(str(name), *name) for name in names)
        return _Grouping(parts, _summed(found.vectors, place, len(names)))
    kinds = [_kind(name) for name in found.names]
    vectors = _summed(found.vectors, [KINDS.index(kind) for kind in kinds], len(KINDS))
    own = {kind: torch.full((size,), KINDS.index(kind)) for kind in ("bias", "position")}
    parts = tuple(Part(kind, kind) for kind in KINDS)
    return _Grouping(parts, vectors, own["bias"], own["position"])


def _kind(name: Component) -> str:
    return "context" if name.kind in ("head", "mlp") else name.kind


def _summed(vectors: Tensor, place: list[int], size: int) -> Tensor:
    """Sum vectors [component, ...] whose `place` is the same."""
    total = vectors.new_zeros(size, *vectors.shape[1:])
    return total.index_add_(0, torch.tensor(place), vectors)


class _Over(NamedTuple):
    """Terms over the keys that a query sees: mean without sinks, mean of sinks, spread."""

    mean: Tensor
    sink: Tensor
    spread: Tensor


class _Row:
    """One query's terms with any key, [query_part, key_part]."""

    def __init__(
        self, heads: HeadWeights, head: int, query: int, grouping: _Grouping, stream: Tensor
    ) -> None:
        frozen = FrozenHead(heads, head, stream.double())
        self.query, self.coefficient = query, heads.scale[0]
        self.lengths = {"Q": frozen.query.norm(dim=-1), "K": frozen.key.norm(dim=-1)}
        self.slope = None if heads.slopes is None else float(heads.slopes[head])
        self.home = grouping.slope
        self.names: dict[str, tuple[Part, ...]] = {}
        self.turned: dict[str, Tensor] = {}  # [part, pos, d_head]
        for side in "QK":
            names, made = list(grouping.parts), frozen.parts(side, grouping.vectors)
            bias = frozen.bias(side)
            if bias is not None and grouping.bias is not None:
                made[grouping.bias, torch.arange(len(stream))] += bias
            elif bias is not None:
                names.append(Part(f"b_{side}", "bias"))
                made = torch.cat((made, bias[None]))
            if self.slope is not None and self.home is None:
                names.append(Part("ALiBi", "position"))
                made = torch.cat((made, torch.zeros_like(made[:1])))
            self.names[side] = tuple(names)
            at = torch.arange(len(stream), device=made.device)
            self.turned[side] = frozen.turned(made, at, len(stream)).cpu()

    def terms(self, key: int) -> Tensor:
        """Return the terms of the query with the key at a position."""
        queries, keys = self.turned["Q"][:, self.query], self.turned["K"][:, key]
        terms = self.coefficient * queries @ keys.T
        if self.slope is not None:
            cell = (-1, -1) if self.home is None else (self.home[self.query], self.home[key])
            terms[cell] += self.slope * key
        return terms

    def scale(self, key: int) -> float:
        """Return c ‖q‖ ‖k‖."""
        return self.coefficient * float(self.lengths["Q"][self.query] * self.lengths["K"][key])

    def over(self, sees: Tensor, sinks: Tensor, key: int) -> _Over:
        """Return means over the keys that the query sees, and the spread over these and `key`."""
        low = high = self.terms(key)
        sums = {sink: torch.zeros_like(low) for sink in (True, False)}
        for seen in sees.nonzero()[:, 0].tolist():
            terms = self.terms(seen)
            low, high = torch.minimum(low, terms), torch.maximum(high, terms)
            sums[bool(sinks[seen])] += terms
        # 0 / 0 where there are none of the kind: NaN, and no number.
        counts = {True: sinks.sum().double(), False: (sees & ~sinks).sum().double()}
        return _Over(sums[False] / counts[False], sums[True] / counts[True], high - low)
