"""The largest and smallest entries of a product too large to be formed."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Sides of the tile in which a large product is looked through: 4 MB in float32, which stay in a
# core's cache between the product and the search for its extremes.
TILE = 1024
# How many entries beyond those asked for are kept until they are computed anew in float64, so that
# rounding in a tile does not decide which of two near equals is among them.
_SPARE = 64


class Entries(NamedTuple):
    """Some entries of a matrix, in order.

    Attributes:
        values: [k] the entries, computed in float64 from the factors.
        rows: [k] their rows.
        columns: [k] their columns.
    """

    values: Float[Tensor, " k"]
    rows: Int[Tensor, " k"]
    columns: Int[Tensor, " k"]


def extreme_products(
    left: Float[Tensor, "rows r"],
    right: Float[Tensor, "columns r"],
    k: int,
    *,
    tile: int | None = None,
    done: Callable[[int], None] | None = None,
) -> tuple[Entries, Entries]:
    """Return the k largest and the k smallest entries of ``left @ right.T``, exactly.

    The product is looked through in tiles of `tile` × `tile`, never formed. Rows and columns are
    taken by descending norm, so that by Cauchy-Schwarz, |⟨l, r⟩| ≤ ‖l‖‖r‖, the rest of a strip is
    left out as soon as none of it can be among the k. Of equal entries the one of lower row, then
    of lower column, comes first. Fewer than k come back where the product has fewer entries.

    Args:
        left: factor, [rows, r].
        right: factor, [columns, r].
        k: how many at each end, at least 1.
        tile: side of a tile; None for `TILE`.
        done: called with the number of rows finished since the last call.

    Returns:
        The largest in descending order, and the smallest in ascending order.
    """
    tile = TILE if tile is None else tile
    count = min(k, left.shape[0] * right.shape[0])
    kept = min(k + _SPARE, left.shape[0] * right.shape[0])
    (left_order, left_norms), (right_order, right_norms) = _by_norm(left), _by_norm(right)
    lefts, rights = left[left_order], right[right_order]
    high, low = _Best(kept, right.shape[0], 1), _Best(kept, right.shape[0], -1)
    # A computed product may exceed the product of computed norms by their rounding.
    slack = 1 + 4 * (left.shape[1] + 2) * torch.finfo(left.dtype).eps
    for top in range(0, len(lefts), tile):
        rows, row_ids = lefts[top : top + tile], left_order[top : top + tile]
        for start in range(0, len(rights), tile):
            bound = slack * left_norms[top] * right_norms[start]
            if bound < high.least and bound < low.least:
                break
            product = rows @ rights[start : start + tile].T
            smallest, largest = (float(end) for end in product.aminmax())
            column_ids = right_order[start : start + tile]
            for best, extreme in ((high, largest), (low, -smallest)):
                if best.wants(extreme, row_ids, column_ids):
                    best.add(product, row_ids, column_ids)
        if done is not None:
            done(len(rows))
    return high.entries(left, right, count), low.entries(left, right, count)


def _by_norm(rows: Tensor) -> tuple[Tensor, list[float]]:
    """Return the order of rows by descending norm, equal ones as they come, and the norms."""
    norms = rows.norm(dim=1)
    order = norms.argsort(descending=True, stable=True)
    return order, norms[order].tolist()


class _Best:
    """The k largest entries seen so far of sign · matrix; of equals those of lowest number.

    An entry's number is row · columns + column.
    """

    def __init__(self, k: int, columns: int, sign: int) -> None:
        self.k, self.columns, self.sign = k, columns, sign
        self.values: Tensor | None = None
        self.numbers: Tensor | None = None
        self.least, self.last = -float("inf"), -1

    def wants(self, extreme: float, rows: Tensor, columns: Tensor) -> bool:
        """Whether a tile with this largest entry may hold one of the k."""
        if extreme != self.least:
            return extreme > self.least
        return int(rows.min()) * self.columns + int(columns.min()) < self.last

    def add(self, tile: Tensor, rows: Tensor, columns: Tensor) -> None:
        """Take in what a tile has."""
        signed = (self.sign * tile).flatten()
        floor = self.least
        if len(signed) > self.k:
            floor = max(floor, float(signed.topk(self.k).values[-1]))
        at = (signed >= floor).nonzero()[:, 0]
        numbers = rows[at // len(columns)] * self.columns + columns[at % len(columns)]
        values = signed[at]
        if self.values is not None and self.numbers is not None:
            values = torch.cat((self.values, values))
            numbers = torch.cat((self.numbers, numbers))
        self.values, self.numbers = _first(values, numbers, self.k)
        if len(self.values) == self.k:
            self.least = float(self.values[-1])
            self.last = int(self.numbers[self.values == self.least].max())

    def entries(self, left: Tensor, right: Tensor, k: int) -> Entries:
        """Return the best k, their values computed anew in float64."""
        if self.numbers is None:
            empty = torch.zeros(0, dtype=torch.int64)
            return Entries(empty.to(torch.float64), empty, empty)
        rows, columns = self.numbers // self.columns, self.numbers % self.columns
        pairs = (left[rows].cpu().to(torch.float64), right[columns].cpu().to(torch.float64))
        values = self.sign * (pairs[0] * pairs[1]).sum(dim=-1)
        values, numbers = _first(values, self.numbers.cpu(), k)
        return Entries(self.sign * values, numbers // self.columns, numbers % self.columns)


def _first(values: Tensor, numbers: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values in order, of equals those of lowest number first."""
    if len(values) > 4 * k:
        # Sorting a whole tile would cost more than the product.
        kth = values.topk(k).values[-1]
        above, tied = values > kth, values == kth
        fill = numbers[tied].topk(k - int(above.sum()), largest=False).values
        values = torch.cat((values[above], kth.expand(len(fill))))
        numbers = torch.cat((numbers[above], fill))
    order = numbers.argsort()
    order = order[values[order].argsort(descending=True, stable=True)][:k]
    return values[order], numbers[order]
