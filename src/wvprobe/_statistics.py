"""Intervals of means, by resampling what was observed."""

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
    generator = torch.Generator().manual_seed(seed)
    n = len(values)
    chosen = torch.randint(n, (_DRAWS, n), generator=generator)
    # Counts of each row in each resample turn resampling into one matrix product.
    counts = torch.zeros(_DRAWS, n, dtype=torch.float64)
    counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))
    means = (counts @ values.double().reshape(n, -1) / n).reshape(_DRAWS, *values.shape[1:])
    low, high = torch.quantile(means, torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    return low, high


def wilson_interval(successes: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a proportion (Wilson 1927), which stays within 0 and 1."""
    z = 1.959963984540054
    share, spread = successes / n, z * z / n
    middle = share + spread / 2
    half = z * (share * (1 - share) / n + spread / (4 * n)) ** 0.5
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))
