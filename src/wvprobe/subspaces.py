"""Overlap of subspaces of the stream, by principal angles, against random subspaces.

Do two layers' values read the same part of the stream? Does what a head writes lie where a later
head reads? Subspaces say nothing of how strongly; :func:`wvprobe.composition` weighs by that.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._circuit_ends import reading, writing
from wvprobe._decompositions import svdvals
from wvprobe._factors import check_heads, provenance_of
from wvprobe._linalg import Basis, column_space
from wvprobe._products import Readers, core_norms, layer_blocks
from wvprobe._statistics import haar_moments
from wvprobe._types import Result
from wvprobe._validate import at_least, finite, one_of
from wvprobe.heads import HeadWeights

# Numbers in memory at a time: the bases of a block of layers.
_NUMBERS = 2**27
_LAYERS = ("layer", "other_layer")
_PAIR = ("writer_layer", "writer_head", "reader_layer", "reader_head")


@dataclass(frozen=True)
class OverlapResult(Result):
    """Overlaps of pairs of subspaces, with what random ones would give.

    Axes are [layer, other_layer] for the kind ``V``, [writer_layer, writer_head, reader_layer,
    reader_head] for the others, where reader heads are key-value heads for ``OV`` and ``OK``;
    there entries are NaN where the writer does not come before the reader.

    Attributes:
        overlap: mean cos² of the principal angles, ‖U_aᵀ U_b‖² / min(rank): 1 if one space
            holds the other, 0 if they are orthogonal.
        expected: its mean over random (Haar) subspaces of the same ranks: max(rank) / dimension.
        deviation: its standard deviation over such.
        z: (overlap − expected) / deviation; NaN where nothing can vary (a space that is the whole
            stream), and on the diagonal of ``V``.
        cosines: [..., angle] the largest cosines of principal angles, descending; NaN beyond
            the smaller rank, and where the first layer is not the earlier one.
        writer_ranks: [layer] for ``V``, else [layer, head].
        reader_ranks: likewise; the same for ``V``.
        dimension: of the space that all of them lie in: d_model, less 1 where a folded LayerNorm
            has centred what is read.
        control: mean overlap of pairs for which the question does not arise, less their mean
            expectation: for ``V`` the layers' W_K, for the others pairs whose writer comes later.
        kind: what was asked for.

    Examples:
        >>> found = wvprobe.subspace_overlap(heads, "OV")
        >>> found.dimension
        42
    """

    overlap: Float[Tensor, "*pair"]
    expected: Float[Tensor, "*pair"]
    deviation: Float[Tensor, "*pair"]
    z: Float[Tensor, "*pair"]
    cosines: Float[Tensor, "*pair angle"]
    writer_ranks: Int[Tensor, " layer *head"]
    reader_ranks: Int[Tensor, " layer *reader_head"]
    dimension: int
    control: float
    kind: str

    AXES: ClassVar = {
        "overlap": _PAIR,
        "expected": _PAIR,
        "deviation": _PAIR,
        "z": _PAIR,
        "cosines": (*_PAIR, "angle"),
        "writer_ranks": ("layer", "head"),
        "reader_ranks": ("layer", "head"),
    }

    def axes(self) -> tuple[str, ...]:
        """Return the names of the axes of `overlap`."""
        return _LAYERS if self.kind == "V" else _PAIR

    @property
    def excess(self) -> float:
        """Mean of overlap − expected over all pairs (of two layers); NaN where there is none."""
        pairs = self._pairs()
        return float((self.overlap - self.expected)[pairs].nanmean())

    @property
    def trivial(self) -> bool:
        """Whether every pair has a space that is the whole stream, so that nothing is measured."""
        return not bool((self.deviation[self._pairs()] > 0).any())

    def to_frame(self) -> Any:
        """Return one row a pair (for ``V`` one a pair of layers, the earlier first).

        Columns: those of :meth:`axes`, then overlap expected deviation z cosine (the largest).
        """
        import pandas

        at = self._pairs()
        columns: dict[str, Any] = {
            name: values.tolist() for name, values in zip(self.axes(), at, strict=True)
        }
        for name in ("overlap", "expected", "deviation", "z"):
            columns[name] = getattr(self, name)[at].tolist()
        if self.cosines.shape[-1]:
            columns["cosine"] = self.cosines[..., 0][at].tolist()
        return pandas.DataFrame(columns)

    def _pairs(self) -> tuple[Tensor, ...]:
        layers = torch.arange(len(self.overlap), device=self.overlap.device)
        ahead = layers[:, None] < layers
        if self.kind != "V":
            ahead = ahead[:, None, :, None].expand(self.overlap.shape)
        return ahead.nonzero(as_tuple=True)


def subspace_overlap(
    heads: HeadWeights,
    kind: str,
    *,
    energy: float | int = 1.0,
    n_cosines: int = 3,
    part: str | None = None,
) -> OverlapResult:
    """Measure how much subspaces that heads read and write have in common.

    * ``V``: between layers, what all values of a layer read (the column space of its W_V, every
      key-value head). A layer with n_kv_heads · d_head_v ≥ d_model reads the whole stream: its
      overlap is 1 by necessity (`trivial`); ask for less than all `energy` there.
    * ``OV``, ``OQ``, ``OK``: between what a head writes (the row space of its W_O) and what a
      head of a later layer reads by W_V, W_Q or W_K.

    Principal angles after Björck & Golub 1973 (Numerical Methods for Computing Angles Between
    Linear Subspaces). Where a LayerNorm is folded, the direction of equal entries, which no norm
    lets pass, is taken out of what is written as it is out of what is read. Ranks are numerical.

    Args:
        heads: the weights, read layer by layer.
        kind: which subspaces: ``V``, ``OV``, ``OQ`` or ``OK``.
        energy: below 1, each space is cut to its leading singular directions: the fewest that
            hold this share of Σσ².
        n_cosines: how many of the largest cosines to keep; 0 saves most of the time.
        part: which of the two QK circuits of latent attention, ``content`` or ``rotary``; for
            ``V`` whose keys are the control, ``content`` where None is given.

    Raises:
        InputError: unknown kind, or energy or n_cosines out of bounds.

    Examples:
        >>> found = wvprobe.subspace_overlap(heads, "OV")
        >>> overlap = found.overlap.nan_to_num()  # NaN for pairs that cannot be
        >>> bool(((overlap >= 0) & (overlap <= 1 + 1e-5)).all())
        True
    """
    check_heads(heads)
    one_of("kind", kind, ("V", "OV", "OQ", "OK"))
    energy = finite("energy", energy, above=0.0, most=1.0)
    n_cosines = at_least("n_cosines", n_cosines)
    centred = heads.folded and all(
        norm is not None and norm.kind == "layer" for norm in heads.norms
    )
    dimension = heads.d_model - centred
    if kind == "V":
        # The control of values under latent attention: keys of the part that shares their latent.
        part = "content" if heads.latent is not None and part is None else part
        found = _measure(_jointly(heads, "V", energy, part), heads.n_layers, n_cosines)
        keys = _measure(_jointly(heads, "K", energy, part), heads.n_layers, 0)
        fields = _compared(found, dimension)
        control = _mean_excess(_compared(keys, dimension), reverse=False)
        fields = {name: values.squeeze((1, 3)) for name, values in fields.items()}
        for layer in range(heads.n_layers):
            fields["z"][layer, layer] = torch.nan
        ranks = found.writer_ranks[:, 0], found.reader_ranks[:, 0]
    else:
        spaces = _by_head(heads, kind, energy, part, centred)
        found = _measure(spaces, heads.n_layers, n_cosines)
        fields = _compared(found, dimension)
        control = _mean_excess(fields, reverse=True)
        possible = _ahead(fields["overlap"])
        for values in fields.values():
            values[~possible] = torch.nan
        ranks = found.writer_ranks, found.reader_ranks
    return OverlapResult(
        provenance=provenance_of(heads, kind=kind, energy=energy, part=part),
        **fields,
        writer_ranks=ranks[0],
        reader_ranks=ranks[1],
        dimension=dimension,
        control=control,
        kind=kind,
    )


class _Measured(NamedTuple):
    """‖U_aᵀ U_b‖² and largest cosines of all pairs, and the ranks.

    Attributes:
        squares: [layer, n, layer, m].
        cosines: [layer, n, layer, m, angle]; NaN where the writer's layer is not the earlier one.
        writer_ranks: [layer, n].
        reader_ranks: [layer, m].
    """

    squares: Tensor
    cosines: Tensor
    writer_ranks: Tensor
    reader_ranks: Tensor


_Spaces = Callable[[int], Basis]


def _jointly(
    heads: HeadWeights, which: str, energy: float, part: str | None
) -> tuple[_Spaces, _Spaces]:
    """Return a function from a layer to the one space that all its values (or keys) read."""

    def spaces(layer: int) -> Basis:
        read = reading(heads, layer, which, part=part)
        return column_space(read.permute(1, 0, 2).flatten(1)[None], energy)

    return spaces, spaces


def _by_head(
    heads: HeadWeights, kind: str, energy: float, part: str | None, centred: bool
) -> tuple[_Spaces, _Spaces]:
    """Return functions from a layer to what its heads write, and to what they read."""

    def written(layer: int) -> Basis:
        right = writing(heads, layer)[1]
        if centred:
            right = right - right.mean(dim=-1, keepdim=True)
        return column_space(right.mT, energy)

    def read(layer: int) -> Basis:
        return column_space(reading(heads, layer, kind[1], part=part), energy)

    return written, read


def _measure(spaces: tuple[_Spaces, _Spaces], layers: int, n_cosines: int) -> _Measured:
    """Compare all pairs, holding the readers of a block of layers at a time."""
    write, read = spaces
    first = read(0).vectors
    writer_ranks: dict[int, Tensor] = {}
    reader_ranks, columns, angles = [], [], []
    for block in layer_blocks(layers, first.numel(), _NUMBERS):
        held = [read(layer) for layer in block]
        reader_ranks += [basis.rank for basis in held]
        together = Readers(torch.cat([basis.vectors for basis in held]), None)
        for layer in range(layers):
            written = write(layer)
            writer_ranks[layer] = written.rank
            rows = written.vectors.mT
            columns.append((layer, block, core_norms(rows, together) ** 2))
            for later, basis in zip(block, held, strict=True):
                if n_cosines and layer < later:
                    angles.append((layer, later, _cosines(rows, basis.vectors, n_cosines)))
    n, m = len(writer_ranks[0]), len(first)
    squares = first.new_empty(layers, n, layers, m)
    for layer, block, values in columns:
        squares[layer, :, block.start : block.stop] = values.view(n, len(block), m)
    width = angles[0][2].shape[-1] if angles else 0
    cosines = first.new_full((layers, n, layers, m, width), torch.nan)
    for layer, later, values in angles:
        cosines[layer, :, later] = values
    ranks = torch.stack([writer_ranks[layer] for layer in range(layers)])
    return _Measured(squares, cosines, ranks, torch.stack(reader_ranks))


def _cosines(rows: Tensor, columns: Tensor, k: int) -> Tensor:
    """Return the k largest cosines of each pair's principal angles: [n, m, at most k]."""
    cores = torch.einsum("nsd,mdr->nmsr", rows, columns)
    return svdvals(cores)[..., :k].clamp(max=1.0)


def _compared(found: _Measured, dimension: int) -> dict[str, Tensor]:
    """Hold measured overlaps against random spaces of the same ranks."""
    like = found.squares
    one = found.writer_ranks.to(like)[:, :, None, None]
    other = found.reader_ranks.to(like)
    mean, deviation = haar_moments(one, one, other, other, dimension)  # projections: P² = P
    smaller = torch.minimum(one, other)  # 0 / 0, NaN, where a space has no direction at all
    overlap, expected = like / smaller, mean / smaller
    deviation = deviation / smaller
    z = torch.where(deviation > 0, (overlap - expected) / deviation, torch.nan)
    places = torch.arange(found.cosines.shape[-1], device=like.device)
    cosines = torch.where(places < smaller[..., None], found.cosines, torch.nan)
    return {
        "overlap": overlap,
        "expected": expected.expand_as(overlap).clone(),
        "deviation": deviation.expand_as(overlap).clone(),
        "z": z,
        "cosines": cosines,
    }


def _ahead(values: Tensor) -> Tensor:
    """Return [layer, n, layer, m], True where the first layer is the earlier one."""
    layers = torch.arange(len(values), device=values.device)
    return (layers[:, None] < layers)[:, None, :, None].expand(values.shape[:4])


def _mean_excess(fields: dict[str, Tensor], *, reverse: bool) -> float:
    """Return the mean of overlap − expected over pairs of two layers, or over the reverse ones."""
    excess = fields["overlap"] - fields["expected"]
    ahead = _ahead(excess)
    # [layer, n, layer, m] with both layers exchanged: the later one writes.
    chosen = ahead.transpose(0, 2) if reverse else ahead
    return float(excess[chosen.expand(excess.shape)].nanmean())
