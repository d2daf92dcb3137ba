"""A block of sites as the solvers read it, and what standardising inside a training fold takes.

Every feature is shifted and scaled once, which changes no probe (its coefficients are carried back
at the end) but keeps float32 accurate where a feature's mean is far greater than its spread.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe.probes.sources import Sites

# A variance of less than this share of the squared mean is computed again, mean first.
_CANCELLED = 1e-2


class Block(NamedTuple):
    """Features of some sites: x = z · unit + shift, and a row of ones below z.

    Attributes:
        z: [site, feature + 1, item].
        shift: [site, feature].
        unit: [site, feature]; 1 where a feature is constant.
    """

    z: Float[Tensor, "site feature_and_one item"]
    shift: Float[Tensor, "site feature"]
    unit: Float[Tensor, "site feature"]

    @property
    def features(self) -> Tensor:
        """[site, feature, item], without the ones."""
        return self.z[:, :-1]

    def at(self, items: Tensor | slice) -> "Block":
        """Return the block of some items, in their order."""
        return self._replace(z=self.z[..., items])


class Frame(NamedTuple):
    """The coordinates that a training set's penalty lives in: (z − mean) / scale.

    Attributes:
        mean: [site, job, feature] of the training items.
        scale: [site, job, feature] their standard deviation, 1 where they are all the same; or,
            without standardising, what brings features back to their own units.
    """

    mean: Float[Tensor, "site job feature"]
    scale: Float[Tensor, "site job feature"]

    def outward(self, theta: Float[Tensor, "site job row feature_and_one"]) -> Tensor:
        """Return weights and intercept on (z − mean) / scale as those on z."""
        weights = theta[..., :-1] / self.scale[:, :, None]
        intercept = theta[..., -1] - (weights * self.mean[:, :, None]).sum(dim=-1)
        return torch.cat([weights, intercept[..., None]], dim=-1)

    def inward(self, gradient: Float[Tensor, "site job row feature_and_one"]) -> Tensor:
        """Return a gradient by weights and intercept on z as one by those on (z − mean) / scale."""
        last = gradient[..., -1:]
        rest = (gradient[..., :-1] - self.mean[:, :, None] * last) / self.scale[:, :, None]
        return torch.cat([rest, last], dim=-1)


def blocks_of(x: Sites, size: int, dtype: torch.dtype) -> Iterator[tuple[slice, Block]]:
    """Yield the sites `size` at a time, each block in `dtype`.

    Raises:
        InputError: they hold NaN or infinity. Of features that are read or made block by block
            this is known no earlier.
    """
    for start in range(0, x.count, size):
        sites = slice(start, min(start + size, x.count))
        yield sites, block_of(x.finite(sites), dtype)


def block_of(x: Float[Tensor, "item site feature"], dtype: torch.dtype) -> Block:
    """Return sites as a block, every feature with mean 0 and variance 1 over all items."""
    n, sites, width = x.shape
    z = torch.ones(sites, width + 1, n, dtype=dtype, device=x.device)
    z[:, :-1] = x.permute(1, 2, 0)
    inner = z[:, :-1]
    # The first item goes first: a constant feature is then exactly 0, and no digits are lost.
    shift = inner[..., :1].clone()
    inner -= shift
    mean = inner.mean(dim=-1, keepdim=True)
    inner -= mean
    deviation = torch.linalg.vector_norm(inner, dim=-1, keepdim=True) / n**0.5
    unit = torch.where(deviation > 0, deviation, 1.0)
    inner /= unit
    return Block(z, (shift + mean)[..., 0], unit[..., 0])


def frame_of(block: Block, mask: Float[Tensor, "job item"], standardise: bool) -> Frame:
    """Return the coordinates of each training set, given as a row of ones and zeros."""
    weights = (mask / mask.sum(dim=1, keepdim=True)).T
    mean = (block.features @ weights).mT
    if not standardise:
        scale = (1.0 / block.unit)[:, None].expand(mean.shape)
        return Frame(mean, scale.clone())
    variance = (block.features.square() @ weights).mT - mean.square()
    # Where a feature hardly varies in a training set, that difference has no digits left.
    doubtful = (variance < _CANCELLED * mean.square()).any(dim=-1).any(dim=0)
    for job in doubtful.nonzero()[:, 0].tolist():
        centred = centred_on(block, mean[:, job], mask[job] > 0)
        variance[:, job] = centred.square().mean(dim=-1)
    rounding = (32 * torch.finfo(mean.dtype).eps * mean).square()
    return Frame(mean, torch.where(variance > rounding, variance, 1.0).sqrt())


def centred_on(
    block: Block, mean: Float[Tensor, "site feature"], items: Bool[Tensor, " item"]
) -> Float[Tensor, "site feature some"]:
    """Return the features of some items less their mean."""
    return block.features[..., items.nonzero()[:, 0]] - mean[..., None]


def outputs(block: Block, linear: Float[Tensor, "site job row feature_and_one"]) -> Tensor:
    """Return what probes (weights and intercepts on z) give for all items: [site, job, row, item].

    One matrix product serves the training sets of a site, since they share their items.
    """
    sites, jobs, rows, width = linear.shape
    return torch.bmm(linear.reshape(sites, jobs * rows, width), block.z).view(
        sites, jobs, rows, block.z.shape[-1]
    )


def class_sums(
    block: Block, mask: Float[Tensor, "job item"], onehot: Float[Tensor, "row item"]
) -> Tensor:
    """Return Σ z over the training items of each class: [site, job, row, feature + 1].

    The last entries, of the ones, are the numbers of items.
    """
    chosen = (mask[:, None] * onehot).flatten(0, 1)
    sums = chosen @ block.z.mT
    return sums.view(len(block.z), len(mask), len(onehot), -1)


def in_own_units(block: Block, linear: Tensor) -> tuple[Tensor, Tensor]:
    """Return probes on z as coefficients [site, job, row, feature] and intercepts on x itself."""
    weights = linear[..., :-1].double() / block.unit.double()[:, None, None]
    moved = (weights * block.shift.double()[:, None, None]).sum(dim=-1)
    return weights, linear[..., -1].double() - moved
