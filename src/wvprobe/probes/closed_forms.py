"""Probes with a closed form: least squares, linear discriminant analysis, nearest class mean.

All three need no more of a training set than its class sums and its second moments. Those of a
training set are the whole's less those of the items it leaves out, whichever are fewer.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._validate import message
from wvprobe.errors import InputError
from wvprobe.probes.features import Block, Frame, centred_on, class_sums


class Moments(NamedTuple):
    """What a closed form takes of one training set, float64, in the training set's frame.

    Attributes:
        means: [site, class, feature] class means; 0 for a class without items.
        second: [site, feature, feature] Σ x xᵀ around the mean; None where not asked for.
        counts: [class] items.
        rounding: [site] how large a trace of `second` may be from rounding alone.
    """

    means: Float[Tensor, "site row feature"]
    second: Float[Tensor, "site feature feature"] | None
    counts: Float[Tensor, " row"]
    rounding: Float[Tensor, " site"] | None = None


def moments(
    block: Block,
    mask: Float[Tensor, "job item"],
    frame: Frame,
    y: Int[Tensor, " item"],
    n_classes: int,
    *,
    second: bool = True,
) -> Iterator[Moments]:
    """Yield the moments of each training set in turn."""
    onehot = torch.nn.functional.one_hot(y, n_classes).T.to(block.z.dtype)
    whole = block.features @ block.features.mT if second else None
    for job, chosen in enumerate(mask > 0):
        mean, scale = frame.mean[:, job], frame.scale[:, job]
        counts = (onehot * chosen).sum(dim=1).double()
        # Directly where that is less work, or the difference of two sums would have no digits.
        if 2 * int(chosen.sum()) < len(chosen) or bool((mean.square() > 10 * scale.square()).any()):
            sums, around, size = _directly(block, chosen, mean, onehot, second)
        else:
            sums, around, size = _by_difference(block, chosen, mean, onehot, whole)
        wide = scale.double()
        means = sums / counts.clamp(min=1.0)[:, None] / wide[:, None]
        if around is None:
            yield Moments(means, None, counts)
            continue
        rounding = (size / wide.square()).sum(dim=-1) * 64 * torch.finfo(block.z.dtype).eps
        yield Moments(means, around / (wide[:, :, None] * wide[:, None]), counts, rounding)


_Sums = tuple[Tensor, Tensor | None, Tensor]


def _directly(block: Block, chosen: Tensor, mean: Tensor, onehot: Tensor, second: bool) -> _Sums:
    """Return class sums and second moments around the mean, and what was added up for these."""
    centred = centred_on(block, mean, chosen)
    sums = (onehot[:, chosen] @ centred.mT).double()
    around = (centred @ centred.mT).double() if second else None
    return sums, around, centred.double().square().sum(dim=-1)


def _by_difference(
    block: Block, chosen: Tensor, mean: Tensor, onehot: Tensor, whole: Tensor | None
) -> _Sums:
    """Return the same from the moments of all items and those of the items left out."""
    wide, mask = mean.double(), chosen[None].to(block.z)
    sums = class_sums(block, mask, onehot)[:, 0].double()
    sums = sums[..., :-1] - sums[..., -1:] * wide[:, None]
    if whole is None:
        return sums, None, wide
    rest = block.features[..., ~chosen]
    raw = whole.double() - (rest @ rest.mT).double()
    around = raw - chosen.sum().double() * wide[:, :, None] * wide[:, None]
    return sums, around, raw.diagonal(dim1=-2, dim2=-1)


def least_squares(found: Moments, penalty: Float[Tensor, " site"]) -> Tensor:
    """Return ridge regression on one-hot labels: [site, class, feature + 1], intercepts last.

    w = (Σ x xᵀ + penalty · I)⁻¹ Σ x (t − t̄)ᵀ with x and t centred: scikit-learn's Ridge.
    """
    second = _given(found.second)
    shares = found.counts / found.counts.sum()
    factor = _factor(second, penalty)
    weights = torch.cholesky_solve((found.means * found.counts[:, None]).mT, factor).mT
    return torch.cat([weights, shares[:, None].expand(*weights.shape[:2], 1)], dim=-1)


def lda(found: Moments, shrinkage: Float[Tensor, " site"]) -> Tensor:
    """Return linear discriminant analysis: rows give log posteriors up to what classes share.

    Pooled covariance within classes, Σ = S_w / n, shrunk to (1 − a) Σ + a tr(Σ)/d · I; weights
    Σ⁻¹ m_k, intercepts log π_k − ½ m_kᵀ Σ⁻¹ m_k (Hastie, Tibshirani & Friedman 2009, section 4.3).
    """
    second = _given(found.second)
    n = found.counts.sum()
    weighted = found.means * found.counts[:, None]
    within = (second - found.means.mT @ weighted) / n
    width = within.shape[-1]
    trace = within.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    # Nothing varies within classes where each has one item: the nearest mean, then.
    varies = trace * n > _given(found.rounding)
    rest = torch.where(varies, 1.0 - shrinkage, 0.0)
    added = torch.where(varies, shrinkage * trace / width, 1.0)
    factor = _factor(within * rest[:, None, None], added)
    weights = torch.cholesky_solve(found.means.mT, factor).mT
    priors = (found.counts / n).log()  # −inf for a class without items: never predicted
    intercepts = priors - (weights * found.means).sum(dim=-1) / 2
    return torch.cat([weights, intercepts[..., None]], dim=-1)


def mean_difference(found: Moments) -> Tensor:
    """Return the nearest class mean: ‖x − m_k‖² is least where x·m_k − ½‖m_k‖² is greatest."""
    intercepts = -found.means.square().sum(dim=-1) / 2
    return torch.cat([found.means, intercepts[..., None]], dim=-1)


def _given(part: Tensor | None) -> Tensor:
    if part is None:
        raise ValueError("moments were made without second ones")
    return part


def _factor(matrix: Tensor, added: Tensor) -> Tensor:
    """Return the Cholesky factor of matrix + added · I."""
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    factor, failed = torch.linalg.cholesky_ex(matrix + added[:, None, None] * eye)
    pivots = factor.diagonal(dim1=-2, dim2=-1)
    smallest = pivots.amin(dim=-1) / pivots.amax(dim=-1)
    if bool((failed > 0).any() | (smallest < 1e-7).any()):
        hint = "Features depend on one another linearly: without a penalty nothing is fixed."
        raise InputError(message("penalty", "greater", float(added.min()), hint))
    return factor
