"""How a total of ranks is shared out among heads: evenly, or to where it counts most."""

from math import lcm

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._validate import message
from wvprobe.errors import InputError

# Where remainders tie, extra steps are spread over the heads by multiples of the golden section.
_GOLDEN = 0.6180339887498949


def even_ranks(n_heads: int, d_head: int, total: int, step: int) -> Int[Tensor, " head"]:
    """Return the same rank for every head, as far as whole steps of a fixed total allow."""
    return rounded_ranks(torch.full((n_heads,), total / n_heads).double(), d_head, total, step)


def greedy_ranks(
    gains: Float[Tensor, "head d_head"], total: int, step: int
) -> Int[Tensor, " head"]:
    """Return the ranks of given total that keep most, of what each coordinate adds.

    Coordinates come in their heads' order, which need not be that of their gains; so gains are
    first evened out to the nearest non-increasing sequence (pool adjacent violators, Ayer et al.
    1955), whose sums are the concave envelope: taking the largest first is then optimal, but for
    where the total ends within a pool.

    Args:
        gains: what keeping each coordinate brings, when those before it in its head are kept.
        total: of all heads' ranks together.
        step: how many coordinates come or go together, but for the last of an odd number.
    """
    n_heads, d = gains.shape
    starts = range(0, d, step)
    sizes = [min(step, d - start) for start in starts]
    values = torch.stack([gains[:, at : at + step].mean(dim=1) for at in starts], dim=1)
    even = torch.tensor([_evened(row, sizes) for row in values.tolist()], dtype=torch.float64)
    ranks, left = [0] * n_heads, total
    # A stable sort keeps the steps of a head in their order.
    for flat in even.flatten().argsort(descending=True, stable=True).tolist():
        head, block = divmod(flat, len(sizes))
        if ranks[head] == block * step and sizes[block] <= left:
            ranks[head] += sizes[block]
            left -= sizes[block]
    return torch.tensor(ranks)


def rounded_ranks(
    targets: Float[Tensor, " head"], d_head: int, total: int, step: int
) -> Int[Tensor, " head"]:
    """Return whole steps near the targets, of the given total as far as whole steps reach it.

    Largest remainders (Hamilton's method): every target is rounded down, and what is left of the
    total goes, a step each, to where most was cut off. A head at full rank keeps it.
    """
    ranks = (targets / step + 1e-9).floor() * step
    ranks = torch.where(targets >= d_head, float(d_head), ranks)
    cut_off = targets - ranks
    spread = (torch.arange(len(targets)).double() * _GOLDEN) % 1
    found, left = ranks.long().tolist(), total - int(ranks.sum())
    order = sorted(range(len(found)), key=lambda i: (-round(float(cut_off[i]), 6), spread[i]))
    while left:
        before = left
        for head in order:
            more = min(step, d_head - found[head])
            if 0 < more <= left:
                found[head] += more
                left -= more
        if left == before:
            break
    return torch.tensor(found)


def total_rank(budget: float | int, whole: int, step: int) -> int:
    """Return the total that a fraction of the whole rank allows.

    Raises:
        InputError: not a fraction in (0, 1], or not even one step.
    """
    is_number = isinstance(budget, int | float) and not isinstance(budget, bool)
    if not is_number or not 0 < budget <= 1:  # which NaN fails too
        raise InputError(message("budget", "a fraction of the total rank in (0, 1]", budget))
    total = round(float(budget) * whole)
    if total < step:
        expected = f"enough for a rank of {step} of {whole}"
        raise InputError(message("budget", expected, budget, "Give a larger one."))
    return total


def common_step(step: int, multiple_of: int) -> int:
    """Return the step that fits both a rotation's planes and what kernels want."""
    return lcm(step, multiple_of)


def _evened(values: list[float], sizes: list[int]) -> list[float]:
    """Return the non-increasing sequence nearest to `values`, weighted by `sizes`."""
    pools: list[tuple[float, int, int]] = []  # mean, weight, how many
    for value, size in zip(values, sizes, strict=True):
        pools.append((value, size, 1))
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (a, m, i), (b, n, j) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n, i + j)]
    return [value for value, _, count in pools for _ in range(count)]
