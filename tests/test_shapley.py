"""Shapley values against games worked by hand and against all orders of joining."""

from itertools import permutations

import pytest
import torch

from wvprobe._shapley import shapley


def game(worth, players):
    """Return a game given as a function of who has joined as a tensor."""
    values = torch.zeros((2,) * players, dtype=torch.float64)
    for joined in torch.cartesian_prod(*[torch.arange(2)] * players).tolist():
        values[tuple(joined)] = worth(*joined)
    return values


def test_by_hand():
    """worth = 1·q + 2·k + 4·p + 8·q·p: the product is shared by its two players alike."""
    shares = shapley(game(lambda q, k, p: 3 + q + 2 * k + 4 * p + 8 * q * p, 3), 3)
    assert shares.tolist() == pytest.approx([5, 2, 8])
    # A product of three is shared by three, a player who changes nothing gets nothing.
    shares = shapley(game(lambda q, k, p, _: 6 * q * k * p, 4), 4)
    assert shares.tolist() == pytest.approx([2, 2, 2, 0])


@pytest.mark.parametrize("players", [1, 2, 3, 4, 5])
def test_the_mean_over_all_orders(players):
    worth = torch.randn(*(2,) * players, 3, 2, dtype=torch.float64)
    shares = shapley(worth, players)
    orders = list(permutations(range(players)))
    expected = torch.zeros(players, 3, 2, dtype=torch.float64)
    for order in orders:
        joined = [0] * players
        for player in order:
            before = worth[tuple(joined)]
            joined[player] = 1
            expected[player] += (worth[tuple(joined)] - before) / len(orders)
    torch.testing.assert_close(shares, expected)
    whole = worth[(1,) * players] - worth[(0,) * players]
    torch.testing.assert_close(shares.sum(dim=0), whole)
