"""Out-of-fold predictions of all sites, a block at a time; penalties chosen inside folds."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._progress import progress
from wvprobe.probes import closed_forms, logistic
from wvprobe.probes.features import Block, Frame, blocks_of, frame_of, in_own_units, outputs
from wvprobe.probes.folds import Plan
from wvprobe.probes.sources import Sites

METHODS = ("logistic", "least_squares", "lda", "mean_difference")
# Methods whose outputs are log probabilities up to what classes share.
PROBABILISTIC = ("logistic", "lda")
# From which penalties are chosen: C, ridge, shrinkage.
GRIDS = {
    "logistic": (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0),
    "least_squares": (1e-1, 1.0, 1e1, 1e2, 1e3, 1e4, 1e5),
    "lda": (1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 6e-1, 9e-1),
    "mean_difference": (0.0,),
}
# Numbers that a block of sites holds at a time: few enough for a processor's cache to be of use.
_NUMBERS = 2**24
# Predictions that are scored together: few enough not to matter beside the features.
TOGETHER = 2**23
# What only ranks penalties need not be solved as far as what is reported.
_LOOSER = 10.0


class Settings(NamedTuple):
    """How probes are fitted.

    Attributes:
        method: one of METHODS.
        grid: penalties to choose from; one of them: no choice.
        standardise: features to mean 0 and variance 1, by the training items.
        tolerance: of the gradient.
        most_iterations: of the logistic solver.
        dtype: of the computation.
        block: sites at a time, or None for what memory suggests.
        show: a progress bar.
    """

    method: str
    grid: tuple[float, ...]
    standardise: bool
    tolerance: float
    most_iterations: int
    dtype: torch.dtype
    block: int | None = None
    show: bool = False


class Outcome(NamedTuple):
    """What probes said of items that they had not seen.

    Attributes:
        predicted: [site, item] classes.
        bits: [site, item] −log2 of the probability given to the item's own class; None where
            the method gives none.
        penalty: [site, fold] chosen.
        gradient: [site, fold] largest entry of the gradient (0 for a closed form).
        weights: [site, fold, row, feature] in the features' own units, where asked for.
        intercepts: [site, fold, row] likewise.
    """

    predicted: Int[Tensor, "site item"]
    bits: Float[Tensor, "site item"] | None
    penalty: Float[Tensor, "site fold"]
    gradient: Float[Tensor, "site fold"]
    weights: Float[Tensor, "site fold row feature"] | None = None
    intercepts: Float[Tensor, "site fold row"] | None = None


def out_of_fold(
    x: Sites,
    y: Int[Tensor, " item"],
    n_classes: int,
    plan: Plan,
    settings: Settings,
    *,
    folds: Sequence[int] | None = None,
    coefficients: bool = False,
) -> Iterator[tuple[slice, Outcome]]:
    """Fit every site in every fold; yield what is said of the items that a fold holds out.

    Sites come in their order, some at a time: what is said of all of them may be too much to hold.

    Args:
        x: features, shared by all folds.
        y: classes.
        n_classes: how many.
        plan: the folds.
        settings: how to fit.
        folds: some of the folds: items held out by others are then not predicted (−1, NaN).
        coefficients: whether to keep weights and intercepts.
    """
    chosen = tuple(range(plan.n_folds)) if folds is None else tuple(folds)
    size = settings.block or _sites_at_once(x, n_classes, plan, len(chosen), settings)
    parts: list[Outcome] = []
    start = 0
    with progress(x.count, "Fitting probes", settings.show) as advance:
        for sites, block in blocks_of(x, size, settings.dtype):
            parts.append(_block(block, y, n_classes, plan, settings, chosen, coefficients))
            advance(sites.stop - sites.start)
            if sites.stop == x.count or (sites.stop - start) * x.n >= TOGETHER:
                yield slice(start, sites.stop), joined(parts)
                parts, start = [], sites.stop


def joined(parts: Sequence[Outcome]) -> Outcome:
    """Return what was said of neighbouring sites as one."""
    columns = zip(*parts, strict=True)
    every = (None if column[0] is None else torch.cat(column) for column in columns)
    return Outcome(*every)  # pyright: ignore[reportArgumentType]


def _sites_at_once(x: Sites, n_classes: int, plan: Plan, folds: int, settings: Settings) -> int:
    n, width = x.n, x.width
    rows = 1 if n_classes == 2 else n_classes
    outputs_at_once = rows * folds
    if settings.method == "logistic" and len(settings.grid) > 1:
        outputs_at_once *= int(plan.inner.max()) + 1
    numbers = n * (3 * outputs_at_once + 2 * (width + 1)) + 8 * width * width
    return max(1, _NUMBERS // numbers)


def _block(
    block: Block,
    y: Tensor,
    n_classes: int,
    plan: Plan,
    settings: Settings,
    folds: Sequence[int],
    coefficients: bool,
) -> Outcome:
    penalty = _chosen_penalty(block, y, n_classes, plan, settings, folds)
    mask = torch.stack([plan.fold != fold for fold in folds]).to(block.z)
    linear, gradient = _fit(block, mask, y, n_classes, penalty, settings)
    raw = outputs(block, linear)
    place = torch.zeros(plan.n_folds, dtype=torch.long, device=y.device)
    place[list(folds)] = torch.arange(len(folds), device=y.device)
    own = place[plan.fold].expand(len(raw), 1, raw.shape[2], -1)
    said = all_rows(raw.gather(1, own)[:, 0])
    held = torch.isin(plan.fold, torch.tensor(folds, device=y.device))
    predicted = torch.where(held, said.argmax(dim=1), -1)
    bits = None
    if settings.method in PROBABILISTIC:
        bits = torch.where(held, -log2_of_class(said, y), torch.nan)
    units = in_own_units(block, linear) if coefficients else (None, None)
    return Outcome(predicted, bits, penalty, gradient, *units)


def all_rows(raw: Float[Tensor, "*at row item"]) -> Float[Tensor, "*at class item"]:
    """Return outputs with a row a class: two classes with one row have 0 as the other's."""
    if raw.shape[-2] > 1:
        return raw
    return torch.cat([torch.zeros_like(raw), raw], dim=-2)


def log2_of_class(raw: Float[Tensor, "*at class item"], y: Int[Tensor, " item"]) -> Tensor:
    """Return log2 of the probability of each item's own class: [*at, item]."""
    index = y.expand(*raw.shape[:-2], 1, -1)
    return (raw.log_softmax(dim=-2).gather(-2, index)[..., 0, :]) / torch.log(raw.new_tensor(2.0))


def _fit(
    block: Block,
    mask: Tensor,
    y: Tensor,
    n_classes: int,
    penalty: Float[Tensor, "site job"],
    settings: Settings,
) -> tuple[Tensor, Tensor]:
    """Fit every training set; return weights and intercepts on z, and the gradient left."""
    frame = frame_of(block, mask, settings.standardise)
    if settings.method == "logistic":
        found = logistic.fit(
            block,
            mask,
            frame,
            y,
            n_classes,
            penalty.to(block.z),
            tolerance=settings.tolerance,
            most_iterations=settings.most_iterations,
        )
        return frame.outward(found.theta), found.gradient
    jobs = closed_forms.moments(
        block, mask, frame, y, n_classes, second=settings.method != "mean_difference"
    )
    fits = [_closed(settings.method, m, penalty[:, job]) for job, m in enumerate(jobs)]
    linear = frame.outward(torch.stack(fits, dim=1).to(block.z))
    return linear, torch.zeros_like(penalty)


def _closed(method: str, found: closed_forms.Moments, penalty: Tensor) -> Tensor:
    if method == "mean_difference":
        return closed_forms.mean_difference(found)
    form = closed_forms.lda if method == "lda" else closed_forms.least_squares
    return form(found, penalty.double())


def _chosen_penalty(
    block: Block,
    y: Tensor,
    n_classes: int,
    plan: Plan,
    settings: Settings,
    folds: Sequence[int],
) -> Float[Tensor, "site fold"]:
    """Return, for every site and fold, the penalty of least loss in the folds inside."""
    grid = torch.tensor(settings.grid, dtype=torch.float64, device=y.device)
    if len(grid) == 1:
        return grid.expand(len(block.z), len(folds)).clone()
    train, held, of_fold = [], [], []
    for place, fold in enumerate(folds):
        for number in range(int(plan.inner[fold].max()) + 1):
            within = plan.inner[fold]
            train.append((within >= 0) & (within != number))
            held.append(within == number)
            of_fold.append(place)
    masks = torch.stack(train).to(block.z), torch.stack(held)
    search = _search_logistic if settings.method == "logistic" else _search_closed
    losses = search(block, *masks, y, n_classes, settings)  # [penalty, site, job]
    shape = (*losses.shape[:2], len(folds))
    places = torch.tensor(of_fold, device=y.device)
    total = losses.new_zeros(shape).index_add_(2, places, losses)
    return grid[total.argmin(dim=0)]


def _search_logistic(
    block: Block, mask: Tensor, held: Tensor, y: Tensor, n_classes: int, settings: Settings
) -> Float[Tensor, "penalty site job"]:
    """Return the cross-entropy of held-out items, each C started from the one before."""
    frame = frame_of(block, mask, settings.standardise)
    found: list[Tensor] = []
    start = None
    for C in settings.grid:
        fit = logistic.fit(
            block,
            mask,
            frame,
            y,
            n_classes,
            torch.full(mask.shape[:1], C).expand(len(block.z), -1).to(block.z),
            tolerance=_LOOSER * settings.tolerance,
            most_iterations=settings.most_iterations,
            start=start,
        )
        start = fit.theta
        bits = -log2_of_class(all_rows(outputs(block, frame.outward(start))), y)
        found.append((bits * held).sum(dim=-1).double())
        if len(found) > 1 and bool((found[-1] > torch.stack(found[:-1]).amin(dim=0)).all()):
            break  # the loss has a single valley: beyond it, everywhere, C is too large
    left = len(settings.grid) - len(found)
    return torch.stack(found + [torch.full_like(found[0], torch.inf)] * left)


def _search_closed(
    block: Block, mask: Tensor, held: Tensor, y: Tensor, n_classes: int, settings: Settings
) -> Float[Tensor, "penalty site job"]:
    """Return the loss of held-out items: cross-entropy, or squared error of least squares."""
    frame = frame_of(block, mask, settings.standardise)
    jobs = closed_forms.moments(block, mask, frame, y, n_classes)
    found = []
    for job, m in enumerate(jobs):
        items = held[job].nonzero()[:, 0]
        fits = [
            _closed(settings.method, m, torch.full((len(block.z),), p, device=y.device))
            for p in settings.grid
        ]
        here = Frame(frame.mean[:, job, None], frame.scale[:, job, None])
        raw = outputs(block.at(items), here.outward(torch.stack(fits, dim=1).to(block.z)))
        if settings.method == "lda":
            losses = -log2_of_class(raw, y[items])
        else:
            onehot = torch.nn.functional.one_hot(y[items], n_classes).T
            losses = (raw - onehot).square().sum(dim=2)
        found.append(losses.sum(dim=-1).double().T)
    return torch.stack(found, dim=2)
