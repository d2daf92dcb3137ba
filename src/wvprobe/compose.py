"""Composition of heads: how much of what one writes another reads, against what cannot compose.

Scores after Elhage et al. 2021 (A Mathematical Framework for Transformer Circuits, "Composition
of heads"): ‖W_OV^a M_b‖ / (‖W_OV^a‖ ‖M_b‖) in Frobenius norms, in row vectors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe._circuit_ends import readers, writers
from wvprobe._factors import check_heads, digest, provenance_of
from wvprobe._metric import Metric
from wvprobe._products import (
    Readers,
    core_norms,
    gram_norms,
    joined,
    layer_blocks,
    prefer_grams,
)
from wvprobe._progress import progress as progress_bar
from wvprobe._statistics import benjamini_hochberg, haar_moments
from wvprobe._types import Result
from wvprobe._validate import finite, message, one_of, whole
from wvprobe.errors import InputError
from wvprobe.heads import HeadWeights

# An edge is held against at least as many impossible pairs, as far as there are so many.
ENOUGH_REFERENCES = 3000
# Numbers in memory at a time: of the readers of a block of layers, and of the writers of one.
_READER_NUMBERS, _WRITER_NUMBERS = 2**27, 2**26
_PAIR = ("writer_layer", "writer_head", "reader_layer", "reader_head")


@dataclass(frozen=True)
class CompositionResult(Result):
    """Composition scores of all pairs of heads, and what they are held against.

    Attributes:
        scores: [writer layer, writer head, reader layer, reader head] in 0..1; 0 where the writer
            does not come before the reader, and where one of the two is the zero matrix.
        z: same axes; the squared score's distance from its mean over random (Haar) orientations of
            the pair, in standard deviations. Descriptive: most pairs of a trained model, and
            nearly half of those that cannot compose, lie beyond 3. NaN where `scores` is 0 by rule.
        p_values: same axes; (1 + impossible pairs over a like number of layers that score as high)
            / (1 + all such), the writer being the later one of an impossible pair. Pairs within a
            layer are left out: they share more than any two layers do, and no edge is like them.
            NaN where `scores` is 0 by rule.
        q_values: same axes; Benjamini-Hochberg over all possible pairs. Reader heads that share a
            key-value head share W_K and W_V, so that their scores are not independent.
        impossible: same axes; scores of the pairs whose writer does not come before the reader,
            the reference of `p_values`; NaN elsewhere.
        impossible_z: same axes; their z.
        n_references: [distance], how many impossible pairs an edge over so many layers was held
            against (0 for distance 0). The smallest p is 1 / (1 + this).
        zero_writers: [layer, head], True where OV is the zero matrix to rounding.
        zero_readers: [layer, head], True where the reader's circuit is.
        mode: ``Q``, ``K`` or ``V``.

    Examples:
        >>> found = wvprobe.composition(heads, "V")
        >>> found.top(1).score.item() == found.scores.max().item()
        True
    """

    scores: Float[Tensor, "layer head layer head"]
    z: Float[Tensor, "layer head layer head"]
    p_values: Float[Tensor, "layer head layer head"]
    q_values: Float[Tensor, "layer head layer head"]
    impossible: Float[Tensor, "layer head layer head"]
    impossible_z: Float[Tensor, "layer head layer head"]
    n_references: tuple[int, ...]
    zero_writers: Bool[Tensor, "layer head"]
    zero_readers: Bool[Tensor, "layer head"]
    mode: str

    AXES: ClassVar = {
        "scores": _PAIR,
        "z": _PAIR,
        "p_values": _PAIR,
        "q_values": _PAIR,
        "impossible": _PAIR,
        "impossible_z": _PAIR,
        "zero_writers": ("layer", "head"),
        "zero_readers": ("layer", "head"),
    }

    def to_frame(self) -> Any:
        """Return one row a possible pair.

        Columns: writer_layer writer_head reader_layer reader_head score z p q. z, p and q are NaN
        where one of the two heads is the zero matrix.
        """
        return self._rows(_possible(self.scores).nonzero())

    def top(self, k: int = 10, *, level: float | int | None = None) -> Any:
        """Return the k possible pairs of highest score as a frame, the highest first.

        They are ordered by score alone; what an edge's score is worth, q says. With `level`, only
        pairs whose q lies below it.

        Raises:
            InputError: k is not a positive int, or `level` no number above 0 and at most 1.
        """
        if not whole(k) or k < 1:
            raise InputError(message("k", "a positive int", k))
        level = None if level is None else finite("level", level, above=0.0, most=1.0)
        possible = _possible(self.scores)
        if level is not None:
            possible = possible & (self.q_values < level)
        ranked = torch.where(possible, self.scores, -1.0).flatten()
        best = ranked.argsort(descending=True, stable=True)[: min(k, int(possible.sum()))]
        return self._rows(torch.stack(torch.unravel_index(best, self.scores.shape), dim=1))

    def _rows(self, pairs: Tensor) -> Any:
        import pandas

        at = tuple(pairs.unbind(1))
        columns = {axis: at[place].tolist() for place, axis in enumerate(_PAIR)}
        for name, values in (
            ("score", self.scores),
            ("z", self.z),
            ("p", self.p_values),
            ("q", self.q_values),
        ):
            columns[name] = values[at].tolist()
        return pandas.DataFrame(columns)


def composition(
    heads: HeadWeights,
    mode: str,
    *,
    offset: float | int | None = 0,
    metric: Float[Tensor, "*layer d_model d_model"] | None = None,
    seq_len: int | None = None,
    part: str | None = None,
    progress: bool = False,
) -> CompositionResult:
    """Score how much of what each head writes enters the queries, keys or values of each other.

    The score of writer a and reader b is ‖OV_a M_b‖ / (‖OV_a‖ ‖M_b‖) in Frobenius norms, with
    M_b = QK_b for ``Q``, QK_bᵀ for ``K``, OV_b for ``V``: a number in 0..1 that does not depend on
    the scale of any weight (Elhage et al. 2021, equation in "Composition of heads").

    Folded weights read the stream through the gain of the norm before attention (and write it
    through that of a norm after it, Gemma's), so their scores are of what the heads meet; scales
    1/σ are left out, they cancel in the score. Unfolded weights at ``offset=None`` give
    TransformerLens's ``all_composition_scores`` where a model has no norm of queries and keys,
    whose gains are included here. In a post-norm model (BERT) the norms between writer and reader
    are left out: scores are of the bare weights. Biases take no part.

    Args:
        heads: the weights, read layer by layer.
        mode: what the writer's output enters: ``Q``, ``K`` or ``V``.
        offset: query position − key position for rotary models; None leaves the rotation out.
        metric: Σ, [d_model, d_model] or one a layer, the data's covariance of x̂: OV_a is weighted
            by what its head meets, ‖Σ^½ OV_a M_b‖ / (‖Σ^½ OV_a‖ ‖M_b‖).
        seq_len: length of the input in tokens, where the rotation depends on it.
        part: which of the two QK circuits of latent attention, ``content`` or ``rotary``.
        progress: whether to show a bar.

    Returns:
        Scores, their z against random orientation, and p and q against impossible pairs.

    Raises:
        InputError: unknown mode, weights that are not finite, or a metric that is no covariance.
        ShapeError: a metric of another size.

    Examples:
        >>> found = wvprobe.composition(heads, "K")
        >>> found.scores.shape, bool(found.scores[2, :, 1].any())  # none writes backwards
        (torch.Size([3, 6, 3, 6]), False)
    """
    check_heads(heads)
    one_of("mode", mode, ("Q", "K", "V"))
    weights = Metric(metric, "OV", heads.n_layers, heads.d_model)
    turned: dict[str, Any] = {"offset": offset, "seq_len": seq_len, "part": part}
    pairs = _score_pairs(heads, mode, turned, weights, progress)
    possible = _possible(pairs.scores)
    tested = ~(pairs.zero_writers[:, :, None, None] | pairs.zero_readers)
    z = _haar_z(pairs, heads.d_model)
    z = torch.where(tested, z, torch.nan)
    impossible = torch.where(possible, torch.nan, pairs.scores)
    scores = torch.where(possible, pairs.scores, 0.0)
    reference = torch.where(tested, impossible, torch.nan)
    p_values, n_references = _p_values(torch.where(tested & possible, scores, torch.nan), reference)
    return CompositionResult(
        provenance=provenance_of(heads, mode=mode, **turned, metric=digest(metric)),
        scores=scores,
        z=torch.where(possible, z, torch.nan),
        p_values=p_values,
        q_values=benjamini_hochberg(p_values),
        impossible=impossible,
        impossible_z=torch.where(possible, torch.nan, z),
        n_references=n_references,
        zero_writers=pairs.zero_writers,
        zero_readers=pairs.zero_readers,
        mode=mode,
    )


def _possible(scores: Tensor) -> Tensor:
    """Return [layer, 1, layer, 1], True where the writer comes before the reader."""
    layers = torch.arange(len(scores), device=scores.device)
    ahead = layers[:, None] < layers
    return ahead[:, None, :, None].expand(scores.shape)


class _PairScores(NamedTuple):
    """Scores of all pairs, possible or not, with what their moments need.

    Attributes:
        scores: [layer, head, layer, head].
        writer_spread: [layer, head] ‖A Aᵀ‖ of unit writers.
        reader_spread: [layer, head] ‖Bᵀ B‖ of unit readers.
        zero_writers: [layer, head].
        zero_readers: [layer, head].
    """

    scores: Tensor
    writer_spread: Tensor
    reader_spread: Tensor
    zero_writers: Tensor
    zero_readers: Tensor


def _score_pairs(
    heads: HeadWeights,
    mode: str,
    turned: dict[str, Any],
    weights: Metric,
    shown: bool,
) -> _PairScores:
    """Hold blocks of readers, and stream the writers past each."""
    layers, n = heads.n_layers, heads.n_heads
    norms, reader_blocks, writer_blocks = _plan(heads, mode)
    columns, reader_facts, writer_facts = [], [], []
    with progress_bar(len(reader_blocks) * layers, f"{mode}-composition", shown) as done:
        for block in reader_blocks:
            read = joined((readers(heads, i, mode, **turned) for i in block), len(block))
            reader_facts.append((read.zero, read.spread))
            column = []
            for among in writer_blocks:
                written = joined((writers(heads, i, weights) for i in among), len(among))
                if block.start == 0:
                    writer_facts.append((written.zero, written.spread))
                column.append(norms(written.matrices, Readers(read.left, read.right)))
                del written  # before the next block is formed
                done(len(among))
            columns.append(torch.cat(column))
            del read
    zero_writers, writer_spread = (torch.cat(facts) for facts in zip(*writer_facts, strict=True))
    zero_readers, reader_spread = (torch.cat(facts) for facts in zip(*reader_facts, strict=True))
    return _PairScores(
        torch.cat(columns, dim=1).view(layers, n, layers, n),
        writer_spread.view(layers, n),
        reader_spread.view(layers, n),
        zero_writers.view(layers, n),
        zero_readers.view(layers, n),
    )


def _plan(
    heads: HeadWeights, mode: str
) -> tuple[Callable[[Tensor, Readers], Tensor], list[range], list[range]]:
    """Choose the cheaper way to norms; return it with blocks of layers of readers and writers."""
    layers, n, d = heads.n_layers, heads.n_heads, heads.d_model
    size = heads.d_head_v if mode == "V" else heads.d_head
    group = 1 if mode == "Q" else n // heads.n_kv_heads
    writer_blocks = layer_blocks(layers, n * heads.d_head_v * d, _WRITER_NUMBERS)
    blocks = layer_blocks(layers, n * size * d, _READER_NUMBERS)  # Grams are of whole readers
    cuts = (len(writer_blocks), len(blocks))
    if prefer_grams(layers * n, layers * n, group, d, heads.d_head_v, size, cuts):
        return gram_norms, blocks, writer_blocks
    return core_norms, layer_blocks(layers, n // group * size * d, _READER_NUMBERS), writer_blocks


def _haar_z(pairs: _PairScores, d: int) -> Tensor:
    """Return the z of every squared score among random orientations of its two matrices."""
    one = pairs.scores.new_ones(())
    mean, deviation = haar_moments(
        one, pairs.writer_spread[:, :, None, None] ** 2, one, pairs.reader_spread**2, d
    )
    return torch.where(deviation > 0, (pairs.scores**2 - mean) / deviation, torch.nan)


def _p_values(scores: Tensor, impossible: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Hold each possible pair against impossible ones over a like number of layers, at least one.

    The window around an edge's distance is the narrowest that holds :data:`ENOUGH_REFERENCES`;
    NaN in either is no pair. Returns p-values and how many references each distance had.
    """
    layers = len(scores)
    by_distance = [scores.new_empty(0)]
    for distance in range(1, layers):
        found = impossible.diagonal(-distance, dim1=0, dim2=2)
        by_distance.append(found[~found.isnan()])
    p_values, counts = torch.full_like(scores, torch.nan), [0]
    for distance in range(1, layers):
        pool = _pool(by_distance, distance)
        counts.append(len(pool))
        if not len(pool):
            continue
        edges = scores.diagonal(distance, dim1=0, dim2=2)
        as_high = len(pool) - torch.searchsorted(pool, edges.contiguous())
        p = (1.0 + as_high) / (1.0 + len(pool))
        p_values.diagonal(distance, dim1=0, dim2=2).copy_(torch.where(edges.isnan(), edges, p))
    return p_values, tuple(counts)


def _pool(by_distance: Sequence[Tensor], distance: int) -> Tensor:
    """Return the sorted references of a distance, its neighbours taken in until they suffice."""
    reach, pool = 0, by_distance[distance]
    while len(pool) < ENOUGH_REFERENCES and reach < len(by_distance):
        reach += 1
        pool = torch.cat(list(by_distance[max(0, distance - reach) : distance + reach + 1]))
    return pool.sort().values
