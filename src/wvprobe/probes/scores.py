"""Scores of predictions, and the same scores of resampled groups."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe.probes.fitting import Outcome

SCORES = ("accuracy", "balanced_accuracy", "macro_f1", "cross_entropy")
LOWER_IS_BETTER = ("cross_entropy", "description_length")
DRAWS = 1000
_ROWS = 250  # resamples at a time, or fewer where these would be too many
_NUMBERS = 2**25
_SITES = 512  # sites whose counts by class are held at a time


class Sampled(NamedTuple):
    """A score, and the score of each resample of groups.

    Attributes:
        value: [site].
        draws: [draw, site]; the same groups in the same draw whatever was scored.
    """

    value: Float[Tensor, " site"]
    draws: Float[Tensor, "draw site"]

    def interval(self) -> tuple[Tensor, Tensor]:
        """Return the 95 % percentile interval."""
        ends = torch.tensor([0.025, 0.975], dtype=self.draws.dtype, device=self.draws.device)
        low, high = torch.nanquantile(self.draws, ends, dim=0)
        return low, high

    def at(self, sites: Tensor) -> "Sampled":
        """Return some sites, each as often as it is named."""
        return Sampled(self.value[sites], self.draws[:, sites])

    @classmethod
    def joined(cls, parts: "Sequence[Sampled]") -> "Sampled":
        """Return the scores of neighbouring sites as one."""
        draws = [part.draws for part in parts]
        return cls(torch.cat([part.value for part in parts]), torch.cat(draws, dim=1))

    def above(self, other: "Sampled", name: str) -> "Sampled":
        """Return by how much this is better than another: below it, for a loss."""
        sign = -1.0 if name in LOWER_IS_BETTER else 1.0
        return Sampled(sign * (self.value - other.value), sign * (self.draws - other.draws))


class Bootstrap:
    """Resamples of groups, drawn once and used for all scores, so that differences are paired.

    Efron & Tibshirani 1993, chapter 13; whole groups are drawn (items, where each is its own).
    The probes are not fitted anew: intervals are about the items, given the training sets.
    """

    def __init__(self, groups: Int[Tensor, " item"], n_groups: int, seed: int) -> None:
        """Draw.

        Args:
            groups: each item's group.
            n_groups: how many groups there are.
            seed: of the draws.
        """
        generator = torch.Generator().manual_seed(seed)
        # A group is drawn once on average: a byte holds how often, and four take more memory.
        few = DRAWS * n_groups <= _NUMBERS
        counts = torch.zeros(DRAWS + 1, n_groups, dtype=torch.float32 if few else torch.uint8)
        counts[0] = 1
        at_once = min(_ROWS, max(1, _NUMBERS // (4 * n_groups)))
        for start in range(1, DRAWS + 1, at_once):
            rows = counts[start : start + at_once]
            # Drawn some rows at a time, they are those of one draw of all.
            chosen = torch.randint(n_groups, tuple(rows.shape), generator=generator)
            rows.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=counts.dtype))
        self._rows = at_once
        self._counts = counts.to(groups.device)
        self._groups = groups

    def sums(self, columns: Float[Tensor, "item column"]) -> Float[Tensor, "draw_and_all column"]:
        """Return column sums of all items (first row), then of every resample; float64."""
        by_group = columns.new_zeros(self._counts.shape[1], columns.shape[1])
        by_group.index_add_(0, self._groups, columns)
        rows = (part.to(by_group) @ by_group for part in self._counts.split(self._rows))
        return torch.cat(list(rows)).double()


def scored(
    names: Sequence[str],
    outcome: Outcome,
    y: Int[Tensor, " item"],
    n_classes: int,
    bootstrap: Bootstrap,
) -> dict[str, Sampled]:
    """Return scores of each site, by name.

    * accuracy: share of items; balanced_accuracy: mean over classes of the same within a class.
    * macro_f1: mean over classes of 2 tp / (items + predictions), as in scikit-learn.
    * cross_entropy: mean of −log2 p(own class), bits.

    A resample that lacks a class takes the mean over those it has.
    """
    found = {}
    n = bootstrap.sums(torch.ones(len(y), 1, device=y.device))
    if "accuracy" in names:
        found["accuracy"] = bootstrap.sums((outcome.predicted == y).T.float()) / n
    if "cross_entropy" in names:
        bits = torch.full_like(outcome.predicted, torch.nan, dtype=torch.float32)
        bits = bits if outcome.bits is None else outcome.bits
        found["cross_entropy"] = bootstrap.sums(bits.T) / n
    by_class = [name for name in names if name in ("balanced_accuracy", "macro_f1")]
    if by_class:
        items = bootstrap.sums(torch.nn.functional.one_hot(y, n_classes).float())
        parts = [
            _by_class(by_class, predicted, y, items, bootstrap)
            for predicted in outcome.predicted.split(_SITES)
        ]
        found |= {name: torch.cat([part[name] for part in parts], dim=1) for name in by_class}
    return {name: Sampled(found[name][0], found[name][1:]) for name in names}


def _by_class(
    names: Sequence[str], predicted: Tensor, y: Tensor, items: Tensor, bootstrap: Bootstrap
) -> dict[str, Tensor]:
    """Return means over classes, [draw and all, site] each; `items` are [draw and all, class]."""
    totals = {name: torch.zeros(1, dtype=items.dtype, device=y.device) for name in names}
    present = dict(totals)
    for k in range(items.shape[1]):
        own = items[:, k, None]
        called = predicted == k
        hits = bootstrap.sums((called & (y == k)).T.float())
        for name in names:
            if name == "balanced_accuracy":
                share, there = hits / own.clamp(min=1.0), own > 0
            else:
                either = own + bootstrap.sums(called.T.float())
                share, there = 2.0 * hits / either.clamp(min=1.0), either > 0
            totals[name] = totals[name] + torch.where(there, share, 0.0)
            present[name] = present[name] + there
    return {name: totals[name] / present[name] for name in names}


def confusion(
    predicted: Int[Tensor, "site item"], y: Int[Tensor, " item"], n_classes: int
) -> Int[Tensor, "site true predicted"]:
    """Return how many items of each class were called each class."""
    cells = (y * n_classes + predicted).long()
    counts = torch.zeros(len(predicted), n_classes**2, dtype=torch.long, device=y.device)
    counts.scatter_add_(1, cells, torch.ones_like(cells))
    return counts.view(-1, n_classes, n_classes)


def against_overlap(excess: Sampled, folds: int) -> Sampled:
    """Return an excess whose draws are wider by √(1 + folds / (folds − 1)): 1.5 for 5 folds.

    Folds share training items, and one fold's test items train the others, which a bootstrap of
    items does not see: with labels that mean nothing its variance of an excess is too small by a
    factor of 1.2 to 2.1. Nadeau & Bengio 2003 (Inference for the Generalization Error) add to 1/J
    the ratio of test to training items, 1 / (folds − 1) here.
    """
    factor = (1.0 + folds / (folds - 1.0)) ** 0.5
    return Sampled(excess.value, excess.value + factor * (excess.draws - excess.value))


def against_a_draw(excess: Sampled, of_draws: Float[Tensor, "m site"], seed: int) -> Sampled:
    """Return an excess over the mean of m random references as one over a single one of them.

    A site that is itself no more than such a draw lies above their mean half the time. So draws
    are widened by Student's t of m − 1 degrees of freedom, times the deviation of the references'
    scores and √(1 + 1/m): the prediction of one more draw.
    """
    m = len(of_draws)
    generator = torch.Generator().manual_seed(seed)
    shape = excess.draws.shape
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    squares = torch.randn(shape[0], m - 1, generator=generator, dtype=torch.float64).square()
    noise = noise / squares.mean(dim=1).sqrt()[:, None]
    deviation = of_draws.std(dim=0) * (1.0 + 1.0 / m) ** 0.5
    return Sampled(excess.value, excess.draws + deviation * noise.to(deviation))


def family_wise(excess: Sampled) -> Float[Tensor, " site"]:
    """Return one-sided p-values of excess > 0, corrected for the number of sites.

    The bootstrap's maximum over sites of (e* − e) / sd(e*), Romano & Wolf 2005 (single step): p is
    the share of draws whose maximum reaches a site's own e / sd(e*), (b + 1) / (m + 1).
    """
    deviation = excess.draws.std(dim=0)
    known = deviation > 0
    deviation = torch.where(known, deviation, 1.0)
    centred = torch.where(known, (excess.draws - excess.value) / deviation, -torch.inf)
    highest = centred.amax(dim=1).sort().values
    own = excess.value / deviation
    reached = len(highest) - torch.searchsorted(highest, own.contiguous())
    p = (reached + 1.0) / (len(highest) + 1.0)
    # Where no resample differs there is nothing to test.
    return torch.where(known, p.to(own), 1.0)
