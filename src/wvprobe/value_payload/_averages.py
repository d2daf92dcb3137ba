"""Means over items with paired cluster bootstrap: a score, and the score of every resample."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from wvprobe.probes.scores import Bootstrap, Sampled

__all__ = ["Averages", "Sampled", "interval", "mean_of"]


class Averages:
    """Weighted means over items, and those of resampled groups, the same groups each time.

    Efron & Tibshirani 1993, chapter 13. The probes are not fitted anew.
    """

    def __init__(
        self,
        weights: Float[Tensor, " item"],
        groups: Int[Tensor, " item"],
        seed: int,
        chosen: Bool[Tensor, " item"] | None = None,
    ) -> None:
        """Draw the resamples.

        Args:
            weights: each item's share.
            groups: each item's independent unit.
            seed: of the draws.
            chosen: some of the items, where not all.
        """
        self._chosen = torch.ones_like(groups).bool() if chosen is None else chosen
        numbers, own = groups[self._chosen].unique(return_inverse=True)
        self._units = numbers
        self.n_groups, self.n_items = len(numbers), len(own)
        self._bootstrap = Bootstrap(own, len(numbers), seed)
        self._weights = weights[self._chosen].double()
        self._total = self._bootstrap.sums(self._weights[:, None])

    def __call__(self, right: Float[Tensor, "*row item"]) -> Sampled:
        """Return the mean of each row."""
        columns = right.reshape(-1, right.shape[-1])[:, self._chosen].T.double()
        both = self._bootstrap.sums(columns * self._weights[:, None]) / self._total
        return Sampled(both[0], both[1:])

    def of_units(self, scores: Float[Tensor, "*row unit"]) -> Float[Tensor, "*row"]:
        """Return scores that are given unit by unit (or as one for all items), as their mean."""
        return (scores if scores.shape[-1] == 1 else scores[..., self._units]).mean(dim=-1)


def interval(one: Sampled) -> tuple[Tensor, Tensor]:
    """Return the 95 % percentile interval; NaN where the value is."""
    low, high = torch.full_like(one.value, torch.nan), torch.full_like(one.value, torch.nan)
    known = ~one.value.isnan()
    if bool(known.any()):
        ends = torch.tensor([0.025, 0.975], dtype=one.draws.dtype)
        low[known], high[known] = torch.quantile(one.draws[:, known], ends, dim=0)
    return low, high


def mean_of(one: Sampled, shape: tuple[int, ...], dims: int) -> Sampled:
    """Return means over the last `dims` axes of sites of this shape."""
    axes = tuple(range(-dims, 0))
    value = one.value.reshape(shape).mean(dim=axes)
    draws = one.draws.reshape(-1, *shape).mean(dim=axes)
    return Sampled(value.reshape(-1), draws.reshape(len(draws), -1))
