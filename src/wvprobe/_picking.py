"""Positions picked out of a batch: what turns a sequence's vectors into a word's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

POOLS = ("last", "first", "mean")

Pick = Callable[[Tensor], Tensor]


def whole(value: Tensor) -> Tensor:
    """Pick every position."""
    return value


def picker(at: Sequence[Sequence[tuple[int, ...]]], pool: str, device: Any) -> Pick:
    """Return what reduces [row, pos, ...] to [row, slot, ...].

    Args:
        at: for every row its slots, for every slot its positions. Rows may differ in the number
            of slots; what stands in the slots that a row lacks has no meaning.
        pool: ``last`` or ``first`` of a slot's positions, or their ``mean``.
        device: where the values are, as a rule: those of a model that is spread over several
            devices are followed to theirs.
    """
    slots = max(map(len, at))
    full = [[*own, *[own[0]] * (slots - len(own))] for own in at]
    rows = torch.arange(len(at), device=device)[:, None]
    if pool != "mean":
        end = 0 if pool == "first" else -1
        where = torch.tensor([[p[end] for p in own] for own in full], device=device)
        return lambda value: value[rows.to(value.device), where.to(value.device)]
    widest = max(len(p) for own in full for p in own)
    places = [[p + p[:1] * (widest - len(p)) for p in own] for own in full]
    shares = [[[1 / len(p)] * len(p) + [0.0] * (widest - len(p)) for p in own] for own in full]
    where = torch.tensor(places, device=device)
    weight = torch.tensor(shares, device=device)

    def pick(value: Tensor) -> Tensor:
        chosen = value[rows[:, :, None].to(value.device), where.to(value.device)]
        own = weight.to(chosen.device, chosen.dtype).reshape(
            *weight.shape, *(1,) * (chosen.dim() - 3)
        )
        return (chosen * own).sum(dim=2)

    return pick
