"""Which keys a query may look at."""

import torch
from jaxtyping import Bool
from torch import Tensor


def visible(n_pos: int, *, causal: bool, window: int | None) -> Bool[Tensor, "pos pos"]:
    """Return [query, key], True where the query may look.

    Args:
        n_pos: number of tokens.
        causal: whether keys after the query are masked.
        window: how many tokens a query sees, itself included; on both sides where not causal.
    """
    positions = torch.arange(n_pos)
    offset = positions[:, None] - positions
    seen = offset >= 0 if causal else torch.ones_like(offset, dtype=torch.bool)
    return seen if window is None else seen & (offset.abs() < window)
