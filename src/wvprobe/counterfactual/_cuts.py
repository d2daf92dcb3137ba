"""Maps of lower rank on what heads carry, best in the data's metric, for every rank at once.

A head's coordinates come in an order: the map of rank r keeps the first r of them. Its values are
cut on z, its scores on q alone, since a score is a sum over the coordinates of queries and keys.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._decompositions import eigh, svd


class Cut(NamedTuple):
    """Coordinates of every head, the ones that carry most first.

    A vector x becomes ``centre + (x − centre) left[:, :r] right[:r]``.

    Attributes:
        left: from vectors to coordinates.
        right: back, the pseudo-inverse of `left`.
        gains: what each coordinate adds to the energy kept, when those before it are there;
            Σ of a head's gains is the energy of what it adds (or of its scores).
        step: how many coordinates stand or fall together, but for the last of an odd number.
        centre: [layer, head, d] what passes unchanged, or None.
    """

    left: Float[Tensor, "layer head d d"]
    right: Float[Tensor, "layer head d d"]
    gains: Float[Tensor, "layer head d"]
    step: int
    centre: Float[Tensor, "layer head d"] | None

    def maps(self, ranks: Int[Tensor, "layer head"]) -> Float[Tensor, "layer head d d"]:
        """Return every head's map of its rank; the identity, exactly, at full rank."""
        d = self.left.shape[-1]
        kept = torch.arange(d) < ranks[..., None]
        cut = (self.left * kept[..., None, :]) @ self.right
        whole = torch.eye(d, dtype=cut.dtype)
        return torch.where((ranks == d)[..., None, None], whole, cut)


def output_cut(
    mean: Float[Tensor, "layer head d"],
    covariance: Float[Tensor, "layer head d d"],
    weight: Float[Tensor, "layer head d k"],
) -> Cut:
    """Return the maps on z that change what heads add least, E‖Δz W_O‖², of all maps of a rank.

    With W_O = F Q, Q of orthonormal rows, the error of a map A is ‖Σ^½ (I − A) F‖², Σ the
    covariance of z. By Eckart & Young 1936 it is least where Σ^½ A F is the SVD of Σ^½ F cut to
    rank r, so at A = F V_r V_rᵀ F⁺: the head's output projected on its first r principal
    components. Gains are the squared singular values, and the error the sum of those dropped. The
    mean passes: rows of a pattern sum to 1, so it is part of b_O.

    Args:
        mean: E z.
        covariance: Σ.
        weight: W_O, or any factor F of it.
    """
    basis, values = _principal(root(covariance), weight)
    return Cut(*basis, values.square(), 1, mean)


def score_cut(
    queries: Float[Tensor, "layer head d d"],
    keys: Float[Tensor, "layer head d d"],
    planes: Int[Tensor, "plane 2"] | None,
) -> Cut:
    """Return the maps on q that change scores least, over pairs of tokens, and fit rotation.

    Without the dropped coordinates a score lacks q (I − A) kᵀ, of which softmax ignores what is
    constant over keys; its mean square over pairs is tr((I − A)ᵀ Q (I − A) K), Q = E qᵀq and K
    the covariance of keys within a text, both turned to their positions. Dimensions that do not
    turn are free: A = F V_r V_rᵀ F⁺ with K = F Fᵀ and Q^½ F = U S Vᵀ, as for values. Of those
    that turn only whole planes can go: q without a plane scores as if the key lacked it too. Planes
    share pairs of tokens, so what dropping a set D costs is Σ_{p,p′ ∈ D} H_pp′ with
    H = Q ∘ K summed over a plane's dimensions; the order is that of backward elimination, where
    the next to go is what adds least to the cost.

    Args:
        queries: Q of every head.
        keys: K of the key head that every query head reads.
        planes: the dimensions of each plane that rotation turns; None without rotation.
    """
    d = queries.shape[-1]
    turned = torch.zeros(0, 2, dtype=torch.long) if planes is None else planes
    static = torch.tensor([i for i in range(d) if i not in set(turned.flatten().tolist())]).long()
    left, right = torch.zeros_like(queries), torch.zeros_like(queries)
    if len(static):
        block = (..., static[:, None], static)
        (left[block], right[block]), _ = _principal(root(queries[block]), root(keys[block]))
    # Coordinates: the planes' own dimensions, then the directions of what does not turn.
    order = torch.cat((turned.flatten(), static))
    left[..., turned.flatten(), turned.flatten()] = 1.0
    right[..., turned.flatten(), turned.flatten()] = 1.0
    left, right = left[..., order], right[..., order, :]
    step = 1 if planes is None else 2
    cost = (left.mT @ queries @ left) * (right @ keys @ right.mT)
    place, gains = _ordered(cost, step)
    at = place[..., None, :].expand_as(left)
    return Cut(left.gather(-1, at), right.gather(-2, at.mT), gains, step, None)


def root(matrix: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
    """Return the symmetric root of second moments; what round-off made negative counts as 0."""
    values, vectors = eigh(matrix)
    floor = matrix.shape[-1] * torch.finfo(matrix.dtype).eps * values.abs().amax(-1, keepdim=True)
    return (vectors * torch.where(values > floor, values, 0.0).sqrt()[..., None, :]) @ vectors.mT


def _principal(
    metric: Float[Tensor, "*b d d"], weight: Float[Tensor, "*b d k"]
) -> tuple[tuple[Tensor, Tensor], Float[Tensor, "*b d"]]:
    """Return F V and Vᵀ F⁺ with metric · F = U S Vᵀ, and S; F is `weight`, d columns at most."""
    factor = weight
    if factor.shape[-1] > factor.shape[-2]:
        factor = torch.linalg.qr(factor.mT, mode="r").R.mT
    _, values, vh = svd(metric @ factor)
    left, right = factor @ vh.mT, vh @ torch.linalg.pinv(factor)
    missing = metric.shape[-1] - factor.shape[-1]
    if missing:  # a stream narrower than the head: nothing is written from the other coordinates
        left = torch.nn.functional.pad(left, (0, missing))
        right = torch.nn.functional.pad(right, (0, 0, 0, missing))
        values = torch.nn.functional.pad(values, (0, missing))
    return (left, right), values


def _ordered(
    cost: Float[Tensor, "*b d d"], step: int
) -> tuple[Int[Tensor, "*b d"], Float[Tensor, "*b d"]]:
    """Return coordinates from the last to be dropped to the first, and what dropping each adds.

    Coordinates go `step` at a time; the last of an odd number goes first, so that whatever is
    left is whole steps.
    """
    shape, d = cost.shape[:-2], cost.shape[-1]
    n = -(-d // step)
    padded = torch.nn.functional.pad(cost.reshape(-1, d, d), (0, n * step - d, 0, n * step - d))
    units = padded.reshape(-1, n, step, n, step).sum(dim=(2, 4))
    units = (units + units.mT) / 2
    sizes = torch.full((n,), float(step), dtype=cost.dtype)
    sizes[-1] = d - step * (n - 1)
    rows = torch.arange(len(units))
    dropped = torch.zeros(len(units), n, dtype=cost.dtype)
    order, added = [], []
    for turn in range(n):
        more = units.diagonal(dim1=-2, dim2=-1) + 2 * torch.einsum("bpq,bq->bp", units, dropped)
        candidates = (more / sizes).masked_fill(dropped > 0, torch.inf)
        next_one = candidates.argmin(dim=-1)
        if turn == 0 and d % step:
            next_one = torch.full_like(next_one, n - 1)
        order.append(next_one)
        added.append(more[rows, next_one] / sizes[next_one])
        dropped[rows, next_one] = 1.0
    first = torch.stack(order[::-1], dim=-1)
    place = (step * first[..., None] + torch.arange(step)).flatten(1)[:, :d]
    gains = torch.stack(added[::-1], dim=-1).repeat_interleave(step, dim=-1)[:, :d]
    return place.reshape(*shape, d), gains.reshape(*shape, d)
