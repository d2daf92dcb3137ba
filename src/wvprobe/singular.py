"""Spectra of all heads' OV and QK circuits, and the singular vectors of one.

Everything comes from the thin factors of a layer, a layer at a time: a triangular factor of W_V
(a key-value head once) and of W_O, and a small core for each query head.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Inexact, Int
from torch import Tensor

from wvprobe._decompositions import svdvals
from wvprobe._factors import (
    check_heads,
    digest,
    layer_factors,
    of_head,
    paired,
    product_or_why,
    provenance_of,
    vocabulary_eigenvalues,
)
from wvprobe._linalg import (
    SVD,
    degenerate_groups,
    effective_rank,
    energy_in_top,
    factored_eigenvalues,
    factored_svd,
    fix_signs,
    participation_ratio,
    positivity,
    round_off,
    stable_rank,
    subspace_distance,
    triangular,
)
from wvprobe._metric import Metric
from wvprobe._progress import progress as progress_bar
from wvprobe._types import HeadId, Result
from wvprobe._validate import finite, index, length, message, one_of
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.heads import HeadWeights

# A value nearer to its neighbour than this many round-off bounds counts as one with it, so that
# every vector outside a group is determined to 1/25 rad (Wedin 1972: sin θ ≤ ‖E‖ / gap).
_GAP = 25
_LONG_WORK = 50_000  # layers · d_model from which on progress is shown


@dataclass(frozen=True)
class SpectraResult(Result):
    """Singular values and eigenvalues of every head's circuit.

    Query heads that share a key-value head share one of a circuit's two factors, so their numbers
    are not independent: statistics over heads begin with :meth:`by_kv_head`.

    Attributes:
        which: ``OV`` or ``QK``.
        offset: Δ of QK; None for OV and where nothing is rotated.
        weighted: whether a metric weighted the singular values.
        singular_values: [layer, head, rank] descending; rank is min(d_model, d_head).
        round_off: [layer, head] how far off a singular value can be; smaller ones count as 0.
        eigenvalues: [layer, head, d_head] complex, by descending magnitude; of the circuit itself,
            whatever the metric.
        vocabulary: [layer, head, d_head] complex eigenvalues of W_E OV W_U; or why there are none.
        k: how many singular values the column `energy` is the share of.
        n_kv_heads: key-value heads of a layer.

    Examples:
        >>> found = wvprobe.spectra(heads, "OV", progress=False)
        >>> found.ranks.shape, bool((found.ranks == 14).all())
        (torch.Size([3, 6]), True)
    """

    which: str
    offset: float | int | None
    weighted: bool
    singular_values: Float[Tensor, "layer head rank"]
    round_off: Float[Tensor, "layer head"]
    eigenvalues: Inexact[Tensor, "layer head d_head"]
    vocabulary: Inexact[Tensor, "layer head d_head"] | str
    k: int
    n_kv_heads: int

    AXES: ClassVar = {
        "singular_values": ("layer", "head", "rank"),
        "round_off": ("layer", "head"),
        "eigenvalues": ("layer", "head", "d_head"),
        "vocabulary": ("layer", "head", "d_head"),
    }

    @property
    def vocabulary_eigenvalues(self) -> Inexact[Tensor, "layer head d_head"]:
        """Eigenvalues of W_E OV W_U, [layer, head, d_head], complex.

        Raises:
            UnsupportedError: they were not or cannot be computed; the message says why.
        """
        if isinstance(self.vocabulary, str):
            raise UnsupportedError(
                f"no eigenvalues over the vocabulary: {self.vocabulary}. Use .eigenvalues, those "
                "of the circuit itself."
            )
        return self.vocabulary

    @property
    def ranks(self) -> Int[Tensor, "layer head"]:
        """Numerical rank: how many singular values exceed round-off."""
        return (self.singular_values > self.round_off[..., None]).sum(dim=-1)

    @property
    def degenerate(self) -> Int[Tensor, "layer head"]:
        """How many singular values other than 0 lie too near a neighbour for vectors of their own.

        See :func:`singular_vectors`, which returns their subspaces.
        """
        floor = self.round_off[..., None]
        values = self.singular_values
        above = values > floor
        close = (values[..., :-1] - values[..., 1:] <= _GAP * floor) & above[..., 1:]
        edge = torch.zeros_like(above[..., :1])
        return (torch.cat((close, edge), -1) | torch.cat((edge, close), -1)).sum(dim=-1)

    def to_frame(self) -> Any:
        """Return one row a head.

        Columns: layer head kv_head stable_rank effective_rank participation_ratio energy rank
        degenerate largest norm positivity, and vocabulary_positivity where there is a vocabulary.
        Stable rank is ‖A‖²/σ₁²; effective rank exp of the entropy of σ/Σσ; participation ratio
        (Σσ²)²/Σσ⁴; energy the k largest values' share of Σσ²; largest σ₁; norm ‖A‖ (Frobenius);
        positivity Σλ/Σ|λ|. All are 0 for a head that is 0.
        """
        import pandas

        values = self.singular_values
        clean = torch.where(values > self.round_off[..., None], values, torch.zeros_like(values))
        n_layers, n_heads = self.round_off.shape
        cells = torch.cartesian_prod(torch.arange(n_layers), torch.arange(n_heads))
        layer, head = cells.unbind(1)
        columns = {
            "layer": layer,
            "head": head,
            "kv_head": head // (n_heads // self.n_kv_heads),
            "stable_rank": stable_rank(clean),
            "effective_rank": effective_rank(clean),
            "participation_ratio": participation_ratio(clean),
            "energy": energy_in_top(clean, self.k),
            "rank": self.ranks,
            "degenerate": self.degenerate,
            "largest": clean[..., 0],
            "norm": clean.norm(dim=-1),
            "positivity": positivity(self.eigenvalues),
        }
        if isinstance(self.vocabulary, Tensor):
            columns["vocabulary_positivity"] = positivity(self.vocabulary)
        return pandas.DataFrame({k: v.flatten().tolist() for k, v in columns.items()})

    def values_frame(self) -> Any:
        """Return one row a singular value: layer head index value relative energy.

        `relative` is σ/σ₁, `energy` the share of Σσ² up to and including this value.
        """
        import pandas

        values = self.singular_values
        energy = values.square().cumsum(dim=-1)
        columns = {
            "value": values,
            "relative": _quotient(values, values[..., :1]),
            "energy": _quotient(energy, energy[..., -1:]),
        }
        cells = torch.cartesian_prod(*(torch.arange(size) for size in values.shape))
        named = dict(zip(("layer", "head", "index"), cells.unbind(1), strict=True))
        return pandas.DataFrame({k: v.flatten().tolist() for k, v in {**named, **columns}.items()})

    def by_kv_head(self) -> Any:
        """Return :meth:`to_frame` with the query heads of a key-value head averaged.

        One row a key-value head: layer kv_head and the means of all other columns.
        """
        frame = self.to_frame().drop(columns="head")
        return frame.groupby(["layer", "kv_head"], as_index=False).mean()


@dataclass(frozen=True)
class SingularVectorsResult(Result):
    """Singular vectors of one head, and which of them are determined one by one.

    ``A = Σ_i values[i] · outer(left[:, i], right[i])``, with A = Σ^½ OV or the like under a metric.
    For OV, x̂ is read along ``left[:, i]`` (under a metric: along ``Σ^½ left[:, i]`` over the data)
    and ``right[i]`` is written; for QK `left` is the query's side and `right` the key's.

    Attributes:
        head: the head.
        which: ``OV`` or ``QK``.
        offset: Δ of QK; None for OV and where nothing is rotated.
        left: [d_model, rank] orthonormal columns, the entry of largest magnitude positive.
        values: [rank] descending; values that are 0 to precision have no vectors and are left out.
        right: [rank, d_model] orthonormal rows.
        groups: (start, stop) of each run of values too close to tell apart: there only the span
            of the vectors is determined, together on both sides.
        tolerance: neighbours nearer than this share a group.
        round_off: how far off a value can be.

    Examples:
        >>> from wvprobe.singular import singular_vectors
        >>> found = singular_vectors(heads, "OV", 1, 2)
        >>> bool((found.left.T @ found.left - torch.eye(14)).abs().max() < 1e-4)
        True
    """

    head: HeadId
    which: str
    offset: float | int | None
    left: Float[Tensor, "d_model rank"]
    values: Float[Tensor, " rank"]
    right: Float[Tensor, "rank d_model"]
    groups: tuple[tuple[int, int], ...]
    tolerance: float
    round_off: float

    AXES: ClassVar = {
        "left": ("d_model", "rank"),
        "values": ("rank",),
        "right": ("rank", "d_model"),
    }

    def group(self, number: int) -> tuple[int, int]:
        """Return (start, stop) of the values that `number` cannot be told apart from."""
        number = index("number", number, len(self.values), "singular values above round-off")
        return next((g for g in self.groups if g[0] <= number < g[1]), (number, number + 1))

    def subspace(
        self, number: int
    ) -> tuple[Float[Tensor, "d_model n"], Float[Tensor, "d_model n"]]:
        """Return orthonormal bases, as columns, of the left and right space that `number` is in."""
        start, stop = self.group(number)
        return self.left[:, start:stop], self.right[start:stop].mT

    def distance(self, other: "SingularVectorsResult", number: int) -> tuple[float, float]:
        """Return how far `other`'s left and right spaces are from these, at a singular value.

        The group of `number` here is held against the same indices of `other`: the sine of the
        largest principal angle, 0 for the same space, whatever basis of it each holds.

        Raises:
            InputError: `other` has fewer singular values.
        """
        start, stop = self.group(number)
        if len(other.values) < stop:
            raise InputError(
                message("other", f"a result of {stop} singular values or more", len(other.values))
            )
        return (
            subspace_distance(self.left[:, start:stop], other.left[:, start:stop]),
            subspace_distance(self.right[start:stop].mT, other.right[start:stop].mT),
        )

    def to_frame(self) -> Any:
        """Return one row a singular value: index value gap group determined.

        `gap` is the distance to the nearest other value, 0 to precision among them.
        """
        import pandas

        size = len(self.values)
        below = torch.cat((self.values, self.values.new_zeros(1)))
        down = below[:-1] - below[1:]
        up = torch.cat((down.new_full((1,), torch.inf), down[:-1]))[:size]
        starts = [self.group(i)[0] for i in range(size)]
        single = [stop - start == 1 for start, stop in map(self.group, range(size))]
        columns = {"value": self.values.tolist(), "gap": torch.minimum(down, up).tolist()}
        return pandas.DataFrame(
            {"index": range(size), **columns, "group": starts, "determined": single}
        )


def spectra(
    heads: HeadWeights,
    which: str,
    *,
    offset: float | int | None = 0,
    metric: Any = None,
    seq_len: int | None = None,
    part: str | None = None,
    k: int = 10,
    vocabulary: bool | None = None,
    progress: bool = True,
) -> SpectraResult:
    """Compute singular values and eigenvalues of all heads' OV or QK circuits.

    Elhage et al. 2021 (A Mathematical Framework for Transformer Circuits): OV = W_V W_O,
    QK(Δ) = c · W_Q R(Δ) W_Kᵀ. From the factors: singular values of the core R_left R_rightᵀ of two
    QR factorisations, eigenvalues of the d_head × d_head product in the other order.

    Args:
        heads: the weights. Norms before attention are part of them where they are folded.
        which: ``OV`` or ``QK``.
        offset: Δ of a rotary model's QK; None leaves the rotation out; ignored by OV.
        metric: Σ, a covariance of x̂ [d_model, d_model] or [layer, d_model, d_model], float64 for
            choice (float32 loses variances below 1e-7 · d_model of the largest): singular values
            of Σ^½ OV, or of Σ^½ QK Σ^½. A pair (Σ_left, Σ_right), either
            None, weights each side by its own. See ``wvprobe.inputs.input_covariance``.
        seq_len: length of the input in tokens, where the rotation depends on it.
        part: ``content`` or ``rotary`` for the QK of latent attention, which is two circuits.
        k: how many singular values the column `energy` is the share of.
        vocabulary: compute the eigenvalues of W_E OV W_U: True to insist, None where it can be
            done, False to save 2 · d_vocab · d_model² operations. They are those of the
            d_head × d_head matrix W_O W_U W_E W_V, with W_U W_E multiplied out once for the model.
            The gain of a norm behind attention (Gemma-2) is included, its positive scale is not;
            nor is the σ that x̂ divides each token by.
        progress: show progress on long work.

    Raises:
        InputError: an argument cannot be used, or weights hold NaN.
        UnsupportedError: `vocabulary` is True and there is no W_E, no linear W_U, or `which` is QK.
        ShapeError: the metric has another shape.

    Examples:
        >>> found = wvprobe.spectra(heads, "OV", progress=False)
        >>> found.to_frame()[["layer", "head", "rank"]].values.tolist()[:2]
        [[0, 0, 14], [0, 1, 14]]
    """
    check_heads(heads)
    one_of("which", which, ("OV", "QK"))
    k = length("k", k)
    turned: dict[str, Any] = {"offset": offset, "seq_len": seq_len, "part": part}
    weights = Metric(metric, which, heads.n_layers, heads.d_model)
    inner = product_or_why(heads, which, vocabulary)
    values, floors, eigenvalues, tokens = [], [], [], []
    long = progress and heads.n_layers * heads.d_model >= _LONG_WORK
    with progress_bar(heads.n_layers, "layers", long) as advance:
        for layer in range(heads.n_layers):
            left, right = layer_factors(heads, which, layer, **turned)
            eigenvalues.append(factored_eigenvalues(*paired(left, right.mT)))
            if isinstance(inner, Tensor):
                tokens.append(vocabulary_eigenvalues(heads, layer, left, right, inner))
            left, right = weights.left(left, layer), weights.right(right, layer)
            left, right = paired(triangular(left), triangular(right).mT)
            values.append(svdvals(left @ right))
            floors.append(round_off(left, right))
            advance(1)
    return SpectraResult(
        provenance=provenance_of(heads, which=which, **turned, k=k, metric=digest(metric)),
        which=which,
        offset=_offset(heads, which, offset),
        weighted=weights.given,
        singular_values=torch.stack(values),
        round_off=torch.stack(floors),
        eigenvalues=torch.stack(eigenvalues),
        vocabulary=inner if isinstance(inner, str) else torch.stack(tokens),
        k=k,
        n_kv_heads=heads.n_kv_heads,
    )


def singular_vectors(
    heads: HeadWeights,
    which: str,
    layer: int,
    head: int,
    *,
    offset: float | int | None = 0,
    metric: Any = None,
    seq_len: int | None = None,
    part: str | None = None,
    tolerance: float | None = None,
) -> SingularVectorsResult:
    """Compute one head's singular vectors, and group those that are not determined one by one.

    A perturbation E turns the vectors of a value by at most ‖E‖ / gap (Wedin 1972), gap being the
    distance to the nearest other value. Values with a smaller gap than `tolerance` therefore form a
    group, of which only the subspace is to be used.

    Args:
        heads: the weights.
        which: ``OV`` or ``QK``.
        layer: layer, from 0.
        head: query head, from 0.
        offset: as in :func:`spectra`.
        metric: as in :func:`spectra`. The vectors are then those of Σ^½ A with the symmetric root.
        seq_len: as in :func:`spectra`.
        part: as in :func:`spectra`.
        tolerance: smallest gap, relative to the largest value, at which vectors stand alone. None:
            25 times the round-off of the weights' dtype, so that vectors outside the groups are
            within 1/25 rad of exact arithmetic's. Weights that were themselves rounded (bf16: 2⁻⁹
            of each) want a larger one.

    Raises:
        InputError: an argument cannot be used, or weights hold NaN.
        ShapeError: the metric has another shape.

    Examples:
        >>> from wvprobe.singular import singular_vectors
        >>> found = singular_vectors(heads, "OV", 1, 2)
        >>> bool((found.values - heads.ov(1, 2).singular_values).abs().max() < 1e-4)
        True
    """
    check_heads(heads)
    one_of("which", which, ("OV", "QK"))
    layer = index("layer", layer, heads.n_layers, "layers")
    head = index("head", head, heads.n_heads, "heads")
    if tolerance is not None:
        tolerance = finite("tolerance", tolerance, least=0.0, most=1.0)
    turned: dict[str, Any] = {"offset": offset, "seq_len": seq_len, "part": part}
    weights = Metric(metric, which, heads.n_layers, heads.d_model)
    left, right = (
        of_head(factor, head, heads.n_heads)
        for factor in layer_factors(heads, which, layer, **turned)
    )
    left, right = weights.left(left, layer), weights.right(right, layer)
    floor = float(round_off(triangular(left), triangular(right).mT))
    svd = factored_svd(left, right.mT)
    rank = int((svd.S > floor).sum())
    svd = fix_signs(SVD(svd.U[:, :rank], svd.S[:rank], svd.Vh[:rank]))
    largest = float(svd.S[0]) if rank else 0.0
    near = _GAP * floor if tolerance is None else tolerance * largest
    settings = {"layer": layer, "head": head, "tolerance": tolerance, "metric": digest(metric)}
    return SingularVectorsResult(
        provenance=provenance_of(heads, which=which, **turned, **settings),
        head=HeadId(layer, head),
        which=which,
        offset=_offset(heads, which, offset),
        left=svd.U,
        values=svd.S,
        right=svd.Vh,
        groups=degenerate_groups(svd.S, near),
        tolerance=near,
        round_off=floor,
    )


def _offset(heads: HeadWeights, which: str, offset: float | int | None) -> float | int | None:
    rotates = any(rotary is not None for rotary in heads.rotary)
    return offset if which == "QK" and rotates else None


def _quotient(value: Tensor, by: Tensor) -> Tensor:
    return value / torch.where(by > 0, by, torch.ones_like(by))
