"""Intervals and corrections that several measurements share."""

import torch
from jaxtyping import Float
from torch import Tensor


def benjamini_hochberg(p: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Return q-values: the false discovery rate at which each hypothesis is rejected.

    Benjamini & Hochberg 1995: q of the i-th smallest of m is min over j ≥ i of m p_j / j.
    A NaN is no hypothesis, and stays.
    """
    flat = p.flatten()
    tested = (~flat.isnan()).nonzero()[:, 0]
    order = tested[flat[tested].argsort()]
    ranks = torch.arange(1, len(order) + 1, dtype=p.dtype, device=p.device)
    stepped = flat[order] * len(order) / ranks
    out = flat.clone()
    out[order] = stepped.flip(0).cummin(0).values.flip(0).clamp(max=1) if len(order) else stepped
    return out.reshape(p.shape)


def mean_interval(
    values: Float[Tensor, " n *shape"],
    generator: torch.Generator,
    *,
    draws: int = 1000,
    level: float = 0.95,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """Return the percentile bootstrap interval of the mean over the first axis.

    Whole rows are drawn with replacement, the same for all of `shape`.
    """
    n = len(values)
    drawn = torch.randint(n, (draws, n), generator=generator)
    weights = torch.zeros(draws, n, dtype=values.dtype)
    weights.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=values.dtype))
    means = (weights / n) @ values.cpu().flatten(1)
    tail = (1 - level) / 2
    low, high = means.quantile(torch.tensor([tail, 1 - tail], dtype=values.dtype), dim=0)
    return low.reshape(values.shape[1:]), high.reshape(values.shape[1:])
