"""Intervals of means and shares, and many tests at once."""

import math
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor

_DRAWS = 2000


def mean_interval(
    values: Float[Tensor, " n ..."], *, seed: int = 0
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Return the 95 % percentile-bootstrap interval of the mean over the first axis.

    Efron & Tibshirani 1993, chapter 13. The rows are what is resampled: where observations come
    in clusters (sentences of a word), a row is a cluster's mean.
    """
    means = resampled_totals(values, seed=seed) / len(values)
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    return low, high


def resampled_totals(
    values: Float[Tensor, " n ..."], *, seed: int = 0
) -> Float[Tensor, "draw ..."]:
    """Return the sums over the rows of 2,000 bootstrap resamples of them, in double precision.

    Statistics of sums, such as a ratio of two, have their interval in the quantiles over draws.
    """
    generator = torch.Generator().manual_seed(seed)
    n = len(values)
    chosen = torch.randint(n, (_DRAWS, n), generator=generator)
    # Counts of each row in each resample turn resampling into one matrix product.
    counts = torch.zeros(_DRAWS, n, dtype=torch.float64)
    counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))
    return (counts @ values.double().reshape(n, -1)).reshape(_DRAWS, *values.shape[1:])


def ratio_interval(
    parts: Float[Tensor, " n *shape"], sizes: Float[Tensor, " n *shape"], *, seed: int = 0
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Return the 95 % percentile-bootstrap interval of Σ parts / Σ sizes over the first axis.

    For shares of things that come in clusters of unequal size: a row is a cluster, such as the
    sentence that words stand in, with how many of its things count and how many it has.
    """
    above, below = (resampled_totals(values, seed=seed) for values in (parts, sizes))
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    # A resample in which nothing counts has no share.
    low, high = torch.nanquantile(above / below, ends, dim=0)
    return low, high


def t_interval(
    values: Float[Tensor, " n ..."],
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """Return the 95 % interval of the mean over the first axis, by Student's t (Student 1908).

    For a handful of independent runs: a percentile bootstrap of five is too narrow (its quantiles
    are those of a normal whose variance is 4/5 of the unbiased one: ± .78 s where t gives ± 1.24
    s). Of a single one there is no interval: NaN.
    """
    n, mean = len(values), values.double().mean(dim=0)
    if n < 2:
        return torch.full_like(mean, torch.nan), torch.full_like(mean, torch.nan)
    half = _t_quantile(n - 1) * values.double().std(dim=0) / n**0.5
    return mean - half, mean + half


@cache
def _t_quantile(freedom: int) -> float:
    """Return the .975 quantile of Student's t: P(|T| < t) = .95, by bisection."""
    low, high = 0.0, 13.0  # the widest, of one degree of freedom, is 12.706
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < 0.95 else (low, middle)
    return low


def _within(t: float, freedom: int) -> float:
    """Return P(|T| < t), the finite sums of Abramowitz & Stegun 1964, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, freedom**0.5)
    cosine, sine = math.cos(angle), math.sin(angle)
    # Even: 1 + c²/2 + 1·3/(2·4) c⁴ + …; odd: c + 2/3 c³ + 2·4/(3·5) c⁵ + …; up to c^(ν−2).
    odd = freedom % 2
    term, total = cosine if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * cosine**2
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def wilson_interval(successes: float | int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson 1927), which stays within 0 and 1.

    Half a success counts as one half: a tie of two answers.
    """
    z = 1.959963984540054
    share, spread = successes / n, z * z / n
    middle = share + spread / 2
    half = z * (share * (1 - share) / n + spread / (4 * n)) ** 0.5
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def benjamini_hochberg(p: Float[Tensor, "*tests"]) -> Float[Tensor, "*tests"]:
    """Return q-values: the false discovery rate at which each test is still found.

    Step-up procedure of Benjamini & Hochberg 1995, as adjusted p-values: with m tests and p
    in ascending order, q_(i) = min over j ≥ i of p_(j) m / j.

    Args:
        p: p-values of any shape. NaN is no test: it is not counted, and stays NaN.
    """
    q = torch.full_like(p, torch.nan)
    tested = ~p.isnan()
    values, order = p[tested].sort()
    count = len(values)
    ranks = torch.arange(1, count + 1, dtype=p.dtype, device=p.device)
    adjusted = (values * count / ranks).flip(0).cummin(0).values.flip(0).clamp(max=1.0)
    q[tested] = torch.empty_like(adjusted).scatter(0, order, adjusted)
    return q


def spearman(
    x: Float[Tensor, " n"], y: Float[Tensor, " n"], counts: Float[Tensor, "draw n"]
) -> Float[Tensor, " draw"]:
    """Return Spearman's ρ of each resample: Pearson's of ranks, ties at their mean rank.

    Args:
        x: values.
        y: others of the same things.
        counts: how often each resample holds each of them; one row of ones for ρ itself.

    Returns:
        [draw]; NaN where a resample has one value only.
    """
    total = counts.sum(dim=1, keepdim=True)
    ranks = [_ranks(values, counts) for values in (x, y)]
    ranks = [own - (counts * own).sum(dim=1, keepdim=True) / total for own in ranks]
    (xx, yy), xy = [(counts * own * own).sum(dim=1) for own in ranks], ranks[0] * ranks[1] * counts
    return xy.sum(dim=1) / (xx * yy).sqrt()


def _ranks(values: Float[Tensor, " n"], counts: Float[Tensor, "draw n"]) -> Float[Tensor, "draw n"]:
    """Return each one's mean rank in a resample, each counted so many times."""
    known, which = values.unique(return_inverse=True)
    held = counts.new_zeros(len(counts), len(known)).index_add_(1, which, counts)
    return (held.cumsum(dim=1) - held / 2)[:, which]


def haar_moments(
    trace_a: Tensor, square_a: Tensor, trace_b: Tensor, square_b: Tensor, d: int
) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of tr(A U B Uᵀ) over random orthogonal U.

    A and B are symmetric [d, d], known by their traces and squared Frobenius norms; U is drawn by
    Haar's measure on O(d). From its second and fourth moments (Collins & Śniady 2006, Integration
    with Respect to the Haar Measure on Unitary, Orthogonal and Symplectic Group):
    E = tr A tr B / d, and with the traceless parts ‖A₀‖² = ‖A‖² − tr(A)²/d,
    Var = 2 ‖A₀‖² ‖B₀‖² / ((d − 1)(d + 2)).

    Args:
        trace_a: traces of A; all four arguments broadcast.
        square_a: ‖A‖².
        trace_b: traces of B.
        square_b: ‖B‖².
        d: dimension.

    Returns:
        Both; the deviation is 0 where A or B is a multiple of the identity (to rounding), which
        no rotation changes.
    """
    variance = 2.0 * _traceless(trace_a, square_a, d) * _traceless(trace_b, square_b, d)
    return trace_a * trace_b / d, (variance / max((d - 1) * (d + 2), 1)).sqrt()


def _traceless(trace: Tensor, square: Tensor, d: int) -> Tensor:
    rest = square - trace**2 / d
    return torch.where(rest > 16 * torch.finfo(rest.dtype).eps * square, rest, 0.0)
