"""A ledger's terms held against the model: the component is taken out, and the score read again.

A ledger's terms have frozen scales. Taking a component out of the stream also changes σ, and what
later blocks make of the stream; how far a term foretells what happens is measured here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._score_parts import FrozenHead, one_layer
from wvprobe._types import Result
from wvprobe._validate import instance, length, message, one_of
from wvprobe._validate import pairs as checked_pairs
from wvprobe._validate import seed as checked_seed
from wvprobe.components import Component, stream_components
from wvprobe.errors import InputError
from wvprobe.ledger._removal import Removal, Score, scores_without
from wvprobe.ledger._terms import LedgerResult, Part

SIDES: tuple[Literal["query", "key", "both"], ...] = ("query", "key", "both")
MEASURES = ("direct", "total")
_STEADY = 0.1  # a frozen scale that moves by less than this counts as kept
_DRAWS, _FEWEST = 2000, 5


@dataclass(frozen=True)
class CausalCheckResult(Result):
    """Predicted beside measured changes of a score when components are taken out.

    Attributes:
        predicted: [side, term] what the ledger says: the sum of the component's terms (sides
            query, key), or the one term (both). The score with it minus the score without.
        direct: [side, term] measured with the component taken off what this layer reads, norms
            evaluated anew, all else as it was. For both: s − s(−a) − s(−b) + s(−a, −b).
        total: [side, term] measured with the component taken out where it is written, and the
            model run again. NaN where query and key are one token, which both sides would lose.
        scale_changes: [end, term] relative change of what was frozen (σ, times the rms of query
            or key, over a latent's scale) when the component is taken off: of the query, then of
            the key. Zeros in a post-norm model, whose attention reads the stream itself.
        components: the query's and the key's component of each term.
        scale: c ‖q‖ ‖k‖ of the score.
        ledger: text, layer, head and words of the ledger.

    Examples:
        >>> from wvprobe.ledger import check_terms
        >>> text = "The river bank is closed."
        >>> ledger = wvprobe.score_ledger(model, text, query="bank", key="river", layer=1, head=1)
        >>> checked = check_terms(model, ledger, terms=[("token", "MLP 0")])
        >>> checked.to_frame().side.tolist()
        ['query', 'key', 'both']
    """

    predicted: Float[Tensor, "side term"]
    direct: Float[Tensor, "side term"]
    total: Float[Tensor, "side term"]
    scale_changes: Float[Tensor, "end term"]
    components: tuple[tuple[str, str], ...]
    scale: float
    ledger: str

    AXES: ClassVar = {
        **{name: ("side", "term") for name in ("predicted", "direct", "total")},
        "scale_changes": ("end", "term"),
    }

    def to_frame(self) -> Any:
        """Return one row a side and term.

        Columns: side query_component key_component predicted direct total query_scale_change
        key_scale_change.
        """
        import pandas

        rows = []
        for side, name in enumerate(SIDES):
            for term, (query, key) in enumerate(self.components):
                values = (t[side, term].item() for t in (self.predicted, self.direct, self.total))
                changes = self.scale_changes[:, term].tolist()
                rows.append((name, query, key, *values, *changes))
        columns = ["side", "query_component", "key_component", "predicted", *MEASURES]
        return pandas.DataFrame(rows, columns=[*columns, "query_scale_change", "key_scale_change"])

    def summary(self) -> Any:
        """Return how well predictions hold, one row a side, measure and set of terms.

        Columns: side measured terms n correlation low high rank_correlation slope. Terms are all,
        those whose frozen scales move by at most 10 % (``steady``), and the others
        (``moved``). A component that stands in several terms counts once on its own side.
        Pearson's correlation with its 95 % percentile bootstrap over terms (Efron & Tibshirani
        1993), Spearman's beside it since a few large terms rule the first; the slope is of
        measured on predicted by least squares through 0. NaN for fewer than five.
        """
        import pandas

        seed, rows = self.provenance.seed or 0, []
        for side, name in enumerate(SIDES):
            steady, distinct = self._steady(name), self._distinct(name)
            for measure in MEASURES:
                measured = getattr(self, measure)[side]
                once = distinct & measured.isfinite()
                sets = {"all": once, "steady": once & steady, "moved": once & ~steady}
                for terms, at in sets.items():
                    found = _agreement(self.predicted[side][at], measured[at], seed)
                    rows.append((name, measure, terms, int(at.sum()), *found))
        columns = ["side", "measured", "terms", "n", "correlation", "low", "high"]
        return pandas.DataFrame(rows, columns=[*columns, "rank_correlation", "slope"])

    def _distinct(self, side: str) -> Tensor:
        """Return which terms are the first with their component, or pair of components."""
        ends = {"query": 0, "key": 1}
        names = [pair[ends[side]] if side in ends else pair for pair in self.components]
        return torch.tensor([names.index(name) == n for n, name in enumerate(names)])

    def _steady(self, side: str) -> Tensor:
        ends = {"query": [0], "key": [1], "both": [0, 1]}[side]
        return (self.scale_changes[ends].abs() <= _STEADY).all(dim=0)


def check_terms(
    model: Any,
    ledger: LedgerResult,
    *,
    n: int = 50,
    seed: int = 0,
    terms: Sequence[tuple[str, str]] | None = None,
) -> CausalCheckResult:
    """Take the components of a ledger's terms out, and hold what happens against what it says.

    For a term of the query's component a and the key's component b three things are predicted and
    measured: the score's change without a in the query, without b in the key, and the double
    difference of both, in which nothing but their one term is left while scales stay.

    Args:
        model: the TransformerBridge of the ledger.
        ledger: of :func:`score_ledger` with group ``component``.
        n: how many terms to draw; each needs up to three forwards of the text.
        seed: seed of the draw, uniform over all pairs of components of the stream; biases of the
            projection and ALiBi are no components of it.
        terms: instead of drawing: (query component, key component) by name, as in the ledger's
            frame.

    Raises:
        InputError: the ledger is grouped, or of another model; no such component; a component is
            none of the stream (``b_Q``, ``b_K``, ``ALiBi``).

    Examples:
        >>> from wvprobe.ledger import check_terms
        >>> text = "The river bank is closed."
        >>> ledger = wvprobe.score_ledger(model, text, query="bank", key="river", layer=1, head=1)
        >>> check_terms(model, ledger, terms=[("token", "MLP 0")]).predicted.shape  # side, term
        torch.Size([3, 1])
    """
    seed = checked_seed(seed)
    arch = adapters.architecture(model)
    _check_ledger(model, ledger)
    pairs = _drawn(ledger, length("n", n), seed) if terms is None else _named(ledger, terms)
    found = _Removed(model, arch, ledger, pairs)
    predicted = torch.stack(
        [
            torch.stack([ledger.terms[a].sum() for a, _ in pairs]),
            torch.stack([ledger.terms[:, b].sum() for _, b in pairs]),
            torch.stack([ledger.terms[a, b] for a, b in pairs]),
        ]
    )
    names = [(ledger.query_parts[a].name, ledger.key_parts[b].name) for a, b in pairs]
    settings: dict[str, Any] = {"text": ledger.text, "layer": ledger.layer, "head": ledger.head}
    settings |= {"query": ledger.positions[0], "key": ledger.positions[1]}
    settings |= {"n": len(pairs), "terms": None if terms is None else [list(t) for t in names]}
    return CausalCheckResult(
        provenance=adapters.provenance(model, seed=seed, **settings),
        predicted=predicted,
        direct=found.direct(),
        total=found.total(),
        scale_changes=found.scale_changes(),
        components=tuple(names),
        scale=ledger.scale,
        ledger=f"{ledger.query}→{ledger.key} at L{ledger.layer}H{ledger.head} in “{ledger.text}”",
    )


def _check_ledger(model: Any, ledger: LedgerResult) -> None:
    instance("ledger", ledger, LedgerResult, "score_ledger(model, ...) returns one.")
    if ledger.group != "component":
        hint = "Only components can be taken out where they are written."
        raise InputError(message("ledger", "grouped by 'component'", ledger.group, hint))
    if ledger.provenance.weight_hash != adapters.weight_hash(model):
        hint = "Its weights differ from the model's. Make the ledger anew."
        raise InputError(message("ledger", "one of `model`", ledger.provenance.model, hint))


def _of_stream(parts: tuple[Part, ...]) -> list[int]:
    return [n for n, part in enumerate(parts) if part.name not in ("b_Q", "b_K", "ALiBi")]


def _drawn(ledger: LedgerResult, n: int, seed: int) -> list[tuple[int, int]]:
    queries, keys = _of_stream(ledger.query_parts), _of_stream(ledger.key_parts)
    order = torch.randperm(len(queries) * len(keys), generator=torch.Generator().manual_seed(seed))
    return [(queries[k // len(keys)], keys[k % len(keys)]) for k in order[:n].tolist()]


def _named(ledger: LedgerResult, terms: Sequence[tuple[str, str]]) -> list[tuple[int, int]]:
    chosen = checked_pairs("terms", terms, "pairs of components' names")
    if not chosen:
        raise InputError(message("terms", "at least one pair of components", terms))
    sides = []
    for parts in (ledger.query_parts, ledger.key_parts):
        sides.append({parts[n].name: n for n in _of_stream(parts)})
    return [
        (
            sides[0][one_of("query component", query, tuple(sides[0]))],
            sides[1][one_of("key component", key, tuple(sides[1]))],
        )
        for query, key in chosen
    ]


class _Vectors(NamedTuple):
    """One end of a score: its stream, and the vectors of the components taken off it."""

    stream: Tensor
    parts: Tensor


class _Removed:
    """The scores without one component, without the other, and without both, of each term."""

    def __init__(
        self, model: Any, arch: Any, ledger: LedgerResult, pairs: list[tuple[int, int]]
    ) -> None:
        self.model, self.arch, self.ledger, self.pairs = model, arch, ledger, pairs
        found = stream_components(model, ledger.text, layer=ledger.layer)
        self.n_tokens = len(found.tokens)
        self.names = list(dict.fromkeys(found.names))
        self.ends = [self._end(found, end, [pair[end] for pair in pairs]) for end in (0, 1)]
        self.heads = one_layer(model, arch, ledger.layer)

    def _end(self, found: Any, end: int, chosen: list[int]) -> _Vectors:
        at = self.ledger.positions[end]
        total = torch.zeros(len(self.names), found.vectors.shape[-1], dtype=torch.float64)
        place = torch.tensor([self.names.index(name) for name in found.names])
        return _Vectors(found.stream[at], total.index_add_(0, place, found.vectors[:, at])[chosen])

    def _frozen(self, end: int) -> tuple[FrozenHead, FrozenHead]:
        """Return an end as it was, [1], and without each component, [term]."""
        stream, parts = self.ends[end]
        head = self.ledger.head
        return (
            FrozenHead(self.heads, head, stream[None]),
            FrozenHead(self.heads, head, stream - parts),
        )

    def direct(self) -> Tensor:
        """Return the measured changes with the rest of the model as it was, [side, term]."""
        (query, without_a), (key, without_b) = (self._frozen(end) for end in (0, 1))
        i, j = (torch.tensor(at, device=self.heads.device) for at in self.ledger.positions)
        q = [query.turned(side.query, i, self.n_tokens) for side in (query, without_a)]
        k = [key.turned(side.key, j, self.n_tokens) for side in (key, without_b)]
        scores = {
            (a, b): self.heads.scale[0] * (q[a] * k[b]).sum(dim=-1) for a in (0, 1) for b in (0, 1)
        }
        return _changes(scores[0, 0], scores[1, 0], scores[0, 1], scores[1, 1]).cpu()

    def scale_changes(self) -> Tensor:
        """Return the relative change of the frozen scales of query and key, [end, term]."""
        changes = []
        for end, side in enumerate("QK"):
            before, after = (frozen.frozen(side) for frozen in self._frozen(end))
            changes.append(after / before - 1)
        return torch.stack(changes).cpu()

    def total(self) -> Tensor:
        """Return the measured changes of the whole model, [side, term]."""
        i, j = self.ledger.positions
        if i == j:
            return torch.full((3, len(self.pairs)), torch.nan, dtype=torch.float64)
        sets: dict[frozenset[Any], list[Removal]] = {frozenset(): []}
        keys = []
        for term, (a, b) in enumerate(self.pairs):
            ends = {("q", a): self._removal(0, a, term), ("k", b): self._removal(1, b, term)}
            chosen = [frozenset(), *(frozenset([end]) for end in ends), frozenset(ends)]
            sets |= {key: [ends[end] for end in key] for key in chosen}
            keys.append(chosen)
        score = Score(self.ledger.layer, self.ledger.head, i, j)
        read = scores_without(self.model, self.arch, self.ledger.text, list(sets.values()), score)
        at = {key: n for n, key in enumerate(sets)}
        columns = torch.tensor([[at[key] for key in chosen] for chosen in keys]).T
        return _changes(*read[columns])

    def _removal(self, end: int, part: int, term: int) -> Removal:
        name: Component = self.names[part]
        embedded = None
        if name.layer is None:
            embedded = self._embedded[name][self.ledger.positions[end]]
        return Removal(name, self.ledger.positions[end], embedded)

    @cached_property
    def _embedded(self) -> dict[Component, Tensor]:
        """What the embedding wrote, before any norm of a block: [pos, d_model] by component."""
        found = stream_components(self.model, self.ledger.text, layer=0)
        return dict(zip(found.names, found.vectors, strict=True))


def _changes(score: Tensor, without_a: Tensor, without_b: Tensor, neither: Tensor) -> Tensor:
    """Return what a, b and their one term make of a score, [side, term]."""
    both = score - without_a - without_b + neither
    return torch.stack(torch.broadcast_tensors(score - without_a, score - without_b, both))


def _agreement(
    predicted: Tensor, measured: Tensor, seed: int
) -> tuple[float, float, float, float, float]:
    """Return Pearson's correlation, its interval, Spearman's, and the slope through 0."""
    n = len(predicted)
    if n < _FEWEST:
        return math.nan, math.nan, math.nan, math.nan, math.nan
    correlation = float(_pearson(predicted, measured))
    generator = torch.Generator().manual_seed(seed)
    at = torch.randint(n, (_DRAWS, n), generator=generator)
    drawn = _pearson(predicted[at], measured[at])
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    low, high = torch.nanquantile(drawn, ends).tolist()
    ranks = (x.argsort().argsort().double() for x in (predicted, measured))
    slope = float(predicted @ measured / (predicted @ predicted))
    return correlation, low, high, float(_pearson(*ranks)), slope


def _pearson(a: Tensor, b: Tensor) -> Tensor:
    a, b = (x - x.mean(dim=-1, keepdim=True) for x in (a, b))
    return (a * b).sum(dim=-1) / (a.norm(dim=-1) * b.norm(dim=-1))
