"""Closed-form probes of an input and of its linear images, from one pass over the items.

Least squares and LDA take of a training set its class means and second moments, and for features
x Q these are those of x times Q: hundreds of projections cost no further pass over the items.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from wvprobe.errors import InputError
from wvprobe.probes import closed_forms
from wvprobe.probes.folds import Plan

METHODS = ("lda", "least_squares")
# A feature that varies by less than this share of its size does so by rounding.
_CONSTANT = 1e-11
_RIDGE = 1.0


class Probe(NamedTuple):
    """Which probe is fitted.

    Attributes:
        method: ``lda`` or ``least_squares``.
        penalty: LDA's shrinkage or least squares' ridge; None for the method's own: the
            oracle-approximating shrinkage, and 1.
        equal_priors: whether classes count as equally frequent, as balanced accuracy takes them.
    """

    method: str
    penalty: float | None
    equal_priors: bool


class Training(NamedTuple):
    """What a probe takes of a training set, features less what `shifted` took off.

    Attributes:
        counts: [class] items.
        mean: [site, feature].
        means: [site, class, feature] class means less the mean.
        second: [site, feature, feature] Σ x xᵀ around the mean.
        size: [site, feature] how large the features are as they come.
    """

    counts: Float[Tensor, " class"]
    mean: Float[Tensor, "site feature"]
    means: Float[Tensor, "site class feature"]
    second: Float[Tensor, "site feature feature"]
    size: Float[Tensor, "site feature"]


class Linear(NamedTuple):
    """A fitted probe: the class of largest x W + b, x less what `shifted` took off."""

    weights: Float[Tensor, "site feature class"]
    bias: Float[Tensor, "site class"]


class Shifted(NamedTuple):
    """Features around their mean over all items, which changes no probe but keeps digits.

    Attributes:
        x: [site, item, feature].
        size: [site, feature] largest magnitude before.
    """

    x: Float[Tensor, "site item feature"]
    size: Float[Tensor, "site feature"]


def shifted(x: Float[Tensor, "item site feature"]) -> Shifted:
    """Return features, sites first, less their mean.

    Raises:
        InputError: some are NaN or infinite.
    """
    if not bool(x.isfinite().all()):
        item, site, feature = (~x.isfinite()).nonzero()[0].tolist()
        raise InputError(f"the model's values are not finite: item {item}, {site=}, {feature=}.")
    moved = x.permute(1, 0, 2).contiguous()
    return Shifted(moved - moved.mean(dim=1, keepdim=True), moved.abs().amax(dim=1))


def trainings(
    given: Shifted, labellings: Int[Tensor, "labelling item"], n_classes: int, plan: Plan
) -> Iterator[tuple[int, int, Training]]:
    """Yield (labelling, fold, training set); second moments are taken once for all labellings."""
    parts = [given.x[:, plan.fold == fold] for fold in range(plan.n_folds)]
    seconds = [(part.mT @ part).double() for part in parts]
    totals = [part.double().sum(dim=1) for part in parts]
    onehot = torch.nn.functional.one_hot(labellings, n_classes).to(given.x)
    sums = [  # [labelling, site, class, feature]
        torch.einsum("lik,sid->lskd", onehot[:, plan.fold == fold], part).double()
        for fold, part in enumerate(parts)
    ]
    counts = torch.stack([onehot[:, plan.fold == f].sum(dim=1) for f in range(plan.n_folds)])
    for fold in range(plan.n_folds):
        rest = [other for other in range(plan.n_folds) if other != fold]
        n = float((plan.fold != fold).sum())
        mean = _sum(totals, rest) / n
        second = _sum(seconds, rest) - n * mean[:, :, None] * mean[:, None]
        classes = _sum(sums, rest)
        for labelling in range(len(labellings)):
            own = counts[rest, labelling].sum(dim=0).double()
            means = classes[labelling] / own.clamp(min=1.0)[:, None] - mean[:, None]
            means = torch.where(own[:, None] > 0, means, 0.0)
            yield labelling, fold, Training(own, mean, means, second, given.size)


def training_of(
    given: Shifted, y: Int[Tensor, " item"], n_classes: int, chosen: Bool[Tensor, " item"]
) -> Training:
    """Return the training set of some items, for features that differ from fold to fold."""
    x, labels = given.x[:, chosen], y[chosen]
    mean = x.double().mean(dim=1)
    centred = x - mean[:, None].to(x)
    onehot = torch.nn.functional.one_hot(labels, n_classes).to(x)
    counts = onehot.sum(dim=0).double()
    sums = (onehot.mT @ centred).double()
    means = sums / counts.clamp(min=1.0)[:, None]
    return Training(counts, mean, means, (centred.mT @ centred).double(), given.size)


def projected(one: Training, frames: Float[Tensor, "draw feature width"]) -> Training:
    """Return the training set of features x Q for each Q of `frames`; `one` has a single site."""
    draws, _, width = frames.shape
    wide = frames.permute(1, 0, 2).reshape(-1, draws * width)
    # The one large product, in the frames' own precision: what it loses is 1e-7 of the largest
    # variance, far below the shrinkage.
    half = (one.second[0].to(frames) @ wide).view(-1, draws, width).transpose(0, 1)
    exact = frames.double()
    return Training(
        one.counts,
        one.mean[0] @ exact,
        one.means[0] @ exact,
        (frames.mT @ half).double(),
        one.size[0].norm().expand(draws, width),
    )


def fit(found: Training, probe: Probe) -> Linear:
    """Fit the probe at every site, features standardised by the training set."""
    n = found.counts.sum()
    variance = found.second.diagonal(dim1=-2, dim2=-1) / n
    scale = torch.where(variance > _CONSTANT * found.size.square(), variance, 1.0).sqrt()
    means = found.means / scale[:, None]
    second = found.second / (scale[:, :, None] * scale[:, None])
    trace = second.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    rounding = trace * 64 * torch.finfo(torch.float32).eps
    moments = closed_forms.Moments(means, second, found.counts, rounding)
    if probe.method == "lda":
        shrinkage = (
            oracle_shrinkage(moments)
            if probe.penalty is None
            else torch.full_like(trace, probe.penalty)
        )
        theta = closed_forms.lda(moments, shrinkage)
        if probe.equal_priors:
            priors = (found.counts / n).log()
            theta[..., -1] -= torch.where(found.counts > 0, priors, 0.0)
    else:
        ridge = _RIDGE if probe.penalty is None else probe.penalty
        theta = closed_forms.least_squares(moments, torch.full_like(trace, ridge))
    weights = theta[..., :-1] / scale[:, None]
    bias = theta[..., -1] - (weights * found.mean[:, None]).sum(dim=-1)
    return Linear(weights.mT, bias)


def oracle_shrinkage(moments: closed_forms.Moments) -> Float[Tensor, " site"]:
    """Return the shrinkage a of the covariance within classes S towards tr(S)/d · I.

    The oracle-approximating shrinkage of Chen, Wiesel, Eldar & Hero 2010 (Shrinkage Algorithms for
    MMSE Covariance Estimation, equation 23), with m = n − classes degrees of freedom:
    a = min(1, ((1 − 2/d) tr S² + tr² S) / ((m + 1 − 2/d) (tr S² − tr² S / d))). It needs no
    held-out items, and so is the same rule for a head, a projection and the whole input.
    """
    second = moments.second
    if second is None:
        raise ValueError("moments were made without second ones")
    n = moments.counts.sum()
    within = (second - moments.means.mT @ (moments.means * moments.counts[:, None])) / n
    return shrinkage_of(within, (n - (moments.counts > 0).sum()).clamp(min=1.0))


def shrinkage_of(
    covariance: Float[Tensor, "site feature feature"], freedom: Float[Tensor, ""]
) -> Float[Tensor, " site"]:
    """Return the same of covariances, given their degrees of freedom."""
    width = covariance.shape[-1]
    trace = covariance.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    square = covariance.square().sum(dim=(-1, -2))
    above = (1.0 - 2.0 / width) * square + trace.square()
    below = (freedom + 1.0 - 2.0 / width) * (square - trace.square() / width)
    return torch.where(above < below, above / below, 1.0)


def predictions(x: Float[Tensor, "site item feature"], probe: Linear) -> Int[Tensor, "site item"]:
    """Return the classes that probes give."""
    raw = torch.baddbmm(probe.bias.to(x)[:, None], x, probe.weights.to(x))
    return raw.argmax(dim=-1)


def back(probe: Linear, frames: Float[Tensor, "draw feature width"]) -> Linear:
    """Return probes on x Q as probes on x, all draws' classes side by side in one site."""
    weights = frames.double() @ probe.weights
    wide = weights.permute(1, 0, 2).reshape(1, weights.shape[1], -1)
    return Linear(wide, probe.bias.reshape(1, -1))


def draws_at_once(d_model: int, width: int) -> int:
    """Return how many projections are taken at a time: some 200 MB."""
    return max(1, math.floor(2**24 / (d_model * width)))


def _sum(parts: list[Tensor], chosen: list[int]) -> Tensor:
    total = parts[chosen[0]].clone()
    for number in chosen[1:]:
        total += parts[number]
    return total
