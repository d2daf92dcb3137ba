"""Shapley values: what each of a few players brings to a game, averaged over all orders."""

from itertools import product
from math import factorial

import torch
from jaxtyping import Float
from torch import Tensor


def shapley(worth: Float[Tensor, "..."], players: int) -> Float[Tensor, "player ..."]:
    """Return every player's share of worth[1, …, 1] − worth[0, …, 0], exactly.

    Shapley 1953 (A Value for n-Person Games): the mean over all orders of what a player's joining
    changes. All 2ⁿ coalitions are given, so nothing is sampled; the shares sum to the difference.

    Args:
        worth: the first `players` axes are of size 2, index 1 where that player has joined; any
            further axes hold games side by side.
        players: how many players.
    """
    others = players - 1
    shares = []
    for player in range(players):
        gain = worth.select(player, 1) - worth.select(player, 0)
        share = torch.zeros_like(gain[(0,) * others])
        for joined in product((0, 1), repeat=others):
            before = sum(joined)
            weight = factorial(before) * factorial(others - before) / factorial(players)
            share = share + weight * gain[joined]
        shares.append(share)
    return torch.stack(shares)
