"""Maps that let heads of a layer share keys and values: tensors only, one layer at a time.

A map takes all heads' keys (or values), side by side, to what each head gets back of what its
group shares. Maps of keys commute with rotation: on a plane (a, b), read as the complex number
a + ib, they multiply by complex numbers, which W_Q can undo.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from wvprobe._decompositions import eigh, svd, svdvals
from wvprobe.counterfactual._cuts import root

Groups = Sequence[Sequence[int]]
_ROUNDS = 50  # of alignment, each of which can only bring heads nearer to their mean


class LayerMoments(NamedTuple):
    """What one layer's keys and values are like, and what is read of them.

    Attributes:
        mean: of keys and values, all heads' keys before all heads' values.
        covariance: of the same, tokens weighted by the attention that they get.
        queries: E qᵀq summed over the query heads of each key head, averaged over rotations.
        outputs: Σ W_O W_Oᵀ over the query heads of each value head.
    """

    mean: Float[Tensor, " both"]
    covariance: Float[Tensor, "both both"]
    queries: Float[Tensor, "kv_head d_head d_head"]
    outputs: Float[Tensor, "kv_head d_head_v d_head_v"]

    @property
    def n_keys(self) -> int:
        """How many of the coordinates are keys."""
        return self.queries.shape[0] * self.queries.shape[1]

    def keys(self, planes: Int[Tensor, "plane 2"] | None) -> Float[Tensor, "keys keys"]:
        """Return second moments of keys: centred, but for dimensions that turn.

        What does not turn, and is the same for all keys, softmax ignores.
        """
        n_heads, d = self.queries.shape[:2]
        mean = torch.zeros(n_heads, d, dtype=self.mean.dtype)
        if planes is not None:
            turned = planes.flatten()
            mean[:, turned] = self.mean[: self.n_keys].reshape(n_heads, d)[:, turned]
        flat = mean.flatten()
        return self.covariance[: self.n_keys, : self.n_keys] + flat[:, None] * flat

    def values(self) -> Float[Tensor, "values values"]:
        """Return the covariance of values."""
        return self.covariance[self.n_keys :, self.n_keys :]


def rotation_average(
    moments: Float[Tensor, "*b d d"], planes: Int[Tensor, "plane 2"] | None
) -> Float[Tensor, "*b d d"]:
    """Return second moments averaged over independent rotations of all planes.

    A plane becomes half its trace times the identity; what it shares with other dimensions
    vanishes.
    """
    if planes is None:
        return moments
    d = moments.shape[-1]
    turned = torch.zeros(d, dtype=torch.bool)
    turned[planes.flatten()] = True
    still = (~turned).to(moments.dtype)
    averaged = moments * (still[:, None] * still)
    first, second = planes.T
    half = (moments[..., first, first] + moments[..., second, second]) / 2
    for dims in (first, second):
        averaged[..., dims, dims] = half
    return averaged


def key_map(
    moments: LayerMoments, groups: Groups, method: str, planes: Int[Tensor, "plane 2"] | None
) -> Float[Tensor, "keys keys"]:
    """Return the map on keys: plane by plane where they turn, freely where they do not."""
    n_heads, d = moments.queries.shape[:2]
    turned = torch.zeros(0, 2, dtype=torch.long) if planes is None else planes
    second = moments.keys(planes).reshape(n_heads, d, n_heads, d)
    found = torch.zeros_like(second)
    if len(turned):
        first, other = turned.T
        weights = moments.queries[:, first, first].T
        made = _plane_maps(_complex_moments(second, turned), weights, groups, method)
        for ins, outs, part in (
            (first, first, made.real),
            (other, other, made.real),
            (first, other, made.imag),
            (other, first, -made.imag),
        ):
            found[:, ins, :, outs] = part  # plane first: both index lists are advanced
    still = sorted(set(range(d)) - set(turned.flatten().tolist()))
    if still:
        free, n = torch.tensor(still), len(still)
        block = second[:, free][:, :, :, free].reshape(n_heads * n, -1)
        metric = moments.queries[:, free[:, None], free]
        made = free_map(block, metric, groups, method).reshape(n_heads, n, n_heads, n)
        heads = torch.arange(n_heads)
        found[heads[:, None, None, None], free[:, None, None], heads[:, None], free] = made
    return found.reshape(n_heads * d, n_heads * d)


def free_map(
    second: Float[Tensor, "all all"],
    metric: Float[Tensor, "head d d"],
    groups: Groups,
    method: str,
) -> Float[Tensor, "all all"]:
    """Return the map of heads whose coordinates may be mixed at will.

    ``mean``: x′_h = (1/m Σ_g x_g R_g) R_hᵀ, R orthogonal, turned to bring heads together
    (generalised Procrustes, Gower 1975). ``lstsq``: x′ = Σ_g x_g G_g (Σ_g G_g)⁺, which of all
    vectors shared as they are is least Σ_h (x_h − x′) G_h (x_h − x′)ᵀ. ``svd``: of all maps of
    rank d the one of least Σ_h E (x_h − x′_h) G_h (x_h − x′_h)ᵀ.

    Args:
        second: second moments of all heads' x, side by side.
        metric: G of each head: what an error in it costs.
        groups: heads that share.
        method: one of these three.
    """
    n_heads, d = metric.shape[:2]
    blocks = second.reshape(n_heads, d, n_heads, d).transpose(1, 2)
    found = torch.zeros_like(blocks)
    for group in groups:
        at = torch.tensor(list(group))
        own = blocks[at[:, None], at]
        if method == "mean":
            turns = _aligned(own)
            made = torch.einsum("gab,hcb->ghac", turns, turns) / len(group)
        elif method == "lstsq":
            inverse = torch.linalg.pinv(metric[at].sum(dim=0), hermitian=True)
            made = (metric[at] @ inverse)[:, None].expand(-1, len(group), -1, -1)
        else:
            flat = own.transpose(1, 2).reshape(len(group) * d, -1)
            weight = torch.block_diag(*root(metric[at]))
            made = low_rank(flat, weight, d).reshape(len(group), d, -1, d).transpose(1, 2)
        found[at[:, None], at] = made
    return found.transpose(1, 2).reshape(n_heads * d, n_heads * d)


def low_rank(
    second: Float[Tensor, "n n"], weight: Float[Tensor, "n n"], rank: int
) -> Float[Tensor, "n n"]:
    """Return the map A of a rank that is least E‖x (I − A) F‖²: F V Vᵀ F⁺, as for a cut."""
    _, vectors = eigh(weight.mT @ second @ weight)
    kept = vectors[:, -rank:]
    return weight @ kept @ (kept.mT @ torch.linalg.pinv(weight))


def latent_map(moments: LayerMoments, width: int) -> Float[Tensor, "both both"]:
    """Return the map of all keys and values of a layer through one latent.

    Errors of keys count in scores, those of values in what is added, each over its whole, so that
    neither's unit matters. Keys turn after they come back from the latent, so no map need commute.
    """
    weights = []
    for metric, second in (
        (moments.queries, moments.covariance[: moments.n_keys, : moments.n_keys]),
        (moments.outputs, moments.values()),
    ):
        weight = torch.block_diag(*root(metric))
        whole = float((weight.mT @ second @ weight).diagonal().sum())
        weights.append(weight / whole**0.5 if whole > 0 else weight)
    return low_rank(moments.covariance, torch.block_diag(*weights), width)


def relative_errors(
    made: Float[Tensor, "both both"], moments: LayerMoments, planes: Int[Tensor, "plane 2"] | None
) -> tuple[float, float]:
    """Return what a map of keys and values loses of scores and of what is added, as shares.

    E Σ_h (x_h − x′_h) G_h (x_h − x′_h)ᵀ over the same of x, G what is read of keys and of values.
    A map through one latent keeps the mean of keys; others are linear where keys turn.
    """
    n, whole = moments.n_keys, len(moments.mean)
    crossed = bool(made[n:, :n].any() or made[:n, n:].any())
    seconds = torch.zeros_like(moments.covariance)
    seconds[:n, :n], seconds[n:, n:] = moments.keys(planes), moments.values()
    seconds = moments.covariance if crossed else seconds
    found = []
    for part, metric in ((slice(0, n), moments.queries), (slice(n, whole), moments.outputs)):
        weight = torch.zeros_like(made)[:, part]
        weight[part] = torch.block_diag(*root(metric))
        left = weight - made[:, part] @ weight[part]
        before, after = (float((x.mT @ seconds @ x).diagonal().sum()) for x in (weight, left))
        found.append(after / before if before > 0 else 0.0)
    return found[0], found[1]


def similarity(
    moments: LayerMoments, planes: Int[Tensor, "plane 2"] | None
) -> Float[Tensor, "kv_head kv_head"]:
    """Return how alike heads' keys and values are, at their best alignment, 0 to 1.

    Half Σσ of the cross moments of two heads' values, weighted by the roots of what is read of
    them, over the roots of their own energies, and half the same of keys (of planes, the absolute
    complex moments): no turning of a head's coordinates changes it.
    """
    n_heads, d = moments.queries.shape[:2]
    d_v = moments.outputs.shape[1]
    values = moments.values().reshape(n_heads, d_v, n_heads, d_v).transpose(1, 2)
    alike = [_nuclear(values, root(moments.outputs))]
    keys = moments.keys(planes).reshape(n_heads, d, n_heads, d)
    turned = [] if planes is None else planes.tolist()
    still = sorted(set(range(d)) - {dim for plane in turned for dim in plane})
    together = torch.zeros(n_heads, n_heads, dtype=keys.dtype)
    if planes is not None:
        weights = moments.queries[:, planes[:, 0], planes[:, 0]].T.sqrt()
        alone = _complex_moments(keys, planes).abs()
        together += (weights[:, :, None] * alone * weights[:, None]).sum(dim=0)
    if still:
        free = torch.tensor(still)
        block = keys[:, free][:, :, :, free].transpose(1, 2)
        together += _nuclear(block, root(moments.queries[:, free[:, None], free]))
    alike.append(together)
    return sum((_relative(each) for each in alike), torch.zeros_like(together)) / len(alike)


def balanced_groups(alike: Float[Tensor, "head head"], n_groups: int) -> list[list[int]]:
    """Return groups of equal size, of heads that are alike.

    Greedy: the most similar pair that is left opens a group, which takes in whichever head is most
    similar to it on average until it is full.
    """
    size = len(alike) // n_groups
    left = list(range(len(alike)))
    groups = []
    while left:
        group = [left[0]]
        if size > 1:
            pairs = [(a, b) for i, a in enumerate(left) for b in left[i + 1 :]]
            group = list(max(pairs, key=lambda pair: float(alike[pair])))
        while len(group) < size:
            others = [head for head in left if head not in group]
            group.append(max(others, key=lambda head: float(alike[head, group].mean())))
        left = [head for head in left if head not in group]
        groups.append(sorted(group))
    return sorted(groups)


def _complex_moments(
    second: Float[Tensor, "head d head d"], planes: Int[Tensor, "plane 2"]
) -> Complex[Tensor, "plane head head"]:
    """Return E conj(x_h) x_g of every plane's coordinates, read as complex numbers."""
    first, other = planes.T

    def block(a: Tensor, b: Tensor) -> Tensor:
        return second[:, a, :, b]

    real = block(first, first) + block(other, other)
    return torch.complex(real, block(first, other) - block(other, first))


def _plane_maps(
    second: Complex[Tensor, "plane head head"],
    weights: Float[Tensor, "plane head"],
    groups: Groups,
    method: str,
) -> Complex[Tensor, "plane head head"]:
    """Return every plane's complex map; the three methods are those of :func:`free_map`."""
    found = torch.zeros_like(second)
    for group in groups:
        at = torch.tensor(list(group))
        own, weight = second[:, at[:, None], at], weights[:, at]
        if method == "mean":
            turns = _phases(own)
            made = turns[:, :, None] * turns.conj()[:, None] / len(group)
        elif method == "lstsq":
            whole = weight.sum(dim=1, keepdim=True)
            share = torch.where(whole > 0, weight / whole, 0.0)
            made = share[:, :, None].expand_as(own).to(second.dtype)
        else:
            factor = weight.sqrt().to(second.dtype)
            _, vectors = eigh(factor[:, :, None] * own * factor[:, None])
            best = vectors[..., -1]
            inverse = torch.where(weight > 0, 1 / weight.sqrt(), 0.0)
            made = (factor * best)[:, :, None] * (best.conj() * inverse)[:, None]
        found[:, at[:, None], at] = made
    return found


def _aligned(blocks: Float[Tensor, "head head d d"]) -> Float[Tensor, "head d d"]:
    """Return turns R that bring heads' x_h R_h near their mean; blocks are E x_hᵀ x_g."""
    turns = _polar(blocks[:, 0])
    for _ in range(_ROUNDS):
        turns = _polar(torch.einsum("ghab,hbc->gac", blocks, turns))
    return turns


def _polar(x: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
    u, _, vh = svd(x)
    return u @ vh


def _phases(second: Complex[Tensor, "plane head head"]) -> Complex[Tensor, "plane head"]:
    """Return numbers of size 1 that bring heads' planes near their mean."""
    turns = torch.sgn(second[..., 0])
    for _ in range(_ROUNDS):
        turns = torch.sgn(torch.einsum("pgh,ph->pg", second, turns))
    return torch.where(turns == 0, torch.ones_like(turns), turns)


def _nuclear(
    blocks: Float[Tensor, "head head d d"], roots: Float[Tensor, "head d d"]
) -> Float[Tensor, "head head"]:
    return svdvals(roots[:, None].mT @ blocks @ roots).sum(dim=-1)


def _relative(x: Float[Tensor, "head head"]) -> Float[Tensor, "head head"]:
    own = x.diagonal().clamp(min=torch.finfo(x.dtype).tiny).sqrt()
    return x / own[:, None] / own
