"""Measures of one word's occurrences, stream by stream: tensors only."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._decompositions import eigvalsh
from wvprobe._told_apart import (
    indicator,
    left_out_centroids,
    left_out_neighbours,
    shuffled,
)

SHUFFLES = 200
# Inner products of all pairs at several streams that are held at once.
_BLOCK_BYTES = 48 << 20


@dataclass(frozen=True)
class WordMeasures:
    """One word's measures.

    Attributes:
        values: measure -> [layer]; NaN where the word has not what it takes.
        centroid: [item, layer] whether the nearest centroid tells the sense, NaN where the sense
            has one sentence alone.
        neighbour: [item, layer] whether the nearest neighbour does.
        item_gap: [item, layer] mean cosine with the others of the sense, minus with other senses.
        control: [shuffle, layer] nearest-centroid accuracy of shuffled senses, or None.
    """

    values: Mapping[str, Float[Tensor, " layer"]]
    centroid: Float[Tensor, "item layer"]
    neighbour: Float[Tensor, "item layer"]
    item_gap: Float[Tensor, "item layer"]
    control: Float[Tensor, "shuffle layer"] | None


def measure_word(
    x: Float[Tensor, "item layer d_model"],
    senses: Int[Tensor, " item"],
    generator: torch.Generator | None = None,
) -> WordMeasures:
    """Measure one word's occurrences.

    Args:
        x: its vectors.
        senses: number of each occurrence's sense. Senses of one sentence take no part in what
            compares senses.
        generator: of the shuffles of the control; None for no control.
    """
    n, layers, _ = x.shape
    sizes = torch.bincount(senses)
    kept = (sizes[senses] >= 2).nonzero()[:, 0]
    renamed = torch.unique(senses[kept], return_inverse=True)[1]
    orders = None
    if generator is not None and len(renamed) and int(renamed.max()) >= 1:
        orders = shuffled(renamed, SHUFFLES, generator)
    step = max(1, _BLOCK_BYTES // (8 * n * n))
    blocks = [
        _Block(block.double().transpose(0, 1), kept, renamed, orders)
        for block in x.split(step, dim=1)
    ]
    names = dict.fromkeys(name for block in blocks for name in block.values)
    per_item = [torch.full((n, layers), torch.nan, dtype=torch.float64) for _ in range(3)]
    if blocks[0].items is not None:
        for target, number in zip(per_item, range(3), strict=True):
            target[kept] = torch.cat([b.items[number] for b in blocks if b.items is not None]).T
    controls = [block.control for block in blocks if block.control is not None]
    return WordMeasures(
        {name: torch.cat([block.values[name] for block in blocks]) for name in names},
        *per_item,
        control=torch.cat(controls, dim=-1) if controls else None,
    )


class _Block:
    """Measures of a block of streams, all from inner products of all pairs."""

    def __init__(self, x: Tensor, kept: Tensor, senses: Tensor, orders: Tensor | None) -> None:
        products = x @ x.mT
        squares = products.diagonal(dim1=-2, dim2=-1)
        norms = squares.sqrt()
        sizes = norms[:, :, None] * norms[:, None]
        cosines = torch.where(sizes > 0, products / torch.where(sizes > 0, sizes, 1.0), 0.0)
        self.values = {
            "self_similarity": off_diagonal_mean(cosines),
            "max_explainable_variance": leading_share(x),
            "max_explainable_variance_centred": leading_share(x, centred=True),
        }
        self.items: tuple[Tensor, Tensor, Tensor] | None = None
        self.control = None
        nothing = torch.full((len(x),), torch.nan, dtype=torch.float64)
        for name in _COMPARED:
            self.values[name] = nothing
        if len(kept):
            pick = (slice(None), kept[:, None], kept)
            self._compare(products[pick], cosines[pick], squares[:, kept], senses, orders)

    def _compare(
        self,
        products: Tensor,
        cosines: Tensor,
        squares: Tensor,
        senses: Tensor,
        orders: Tensor | None,
    ) -> None:
        """Compare the senses that have at least two sentences each."""
        member = indicator(senses, int(senses.max()) + 1)
        sizes = member.sum(dim=0)
        same, _ = _between(cosines, member)
        self.values["same_sense"] = same
        if len(sizes) < 2:
            return
        self.values["different_sense"] = _between(cosines, member)[1]
        self.values["gap"] = same - self.values["different_sense"]
        distances = (squares[:, :, None] + squares[:, None] - 2 * products).clamp(min=0).sqrt()
        self.values["euclidean"] = _between(distances, member)[1]
        norms = squares.sqrt()
        lengths = (norms[:, :, None] + norms[:, None]) / 2
        distances = torch.where(lengths > 0, distances / torch.where(lengths > 0, lengths, 1.0), 0)
        self.values["normalised_distance"] = _between(distances, member)[1]
        self.values["cosine_distance"] = (1 - self.values["different_sense"]).clamp(min=0)
        centroid = left_out_centroids(products, member)
        neighbour = left_out_neighbours(cosines, senses)
        self.values["centroid_accuracy"] = centroid.mean(dim=-1)
        self.values["balanced_accuracy"] = (centroid @ member / sizes).mean(dim=-1)
        self.values["knn_accuracy"] = neighbour.mean(dim=-1)
        n = len(senses)
        chance = (sizes * (sizes - 1)).sum() / (n * (n - 1))
        self.values["knn_chance"] = chance.expand(len(products))
        self.items = (centroid, neighbour, _item_gap(cosines, member))
        if orders is not None:
            others = indicator(orders, len(sizes))
            self.control = left_out_centroids(products[:, None], others).mean(dim=-1).T
            self.values["centroid_chance"] = self.control.mean(dim=0)


_COMPARED = (
    *("same_sense", "different_sense", "gap", "centroid_accuracy", "centroid_chance"),
    *("balanced_accuracy", "knn_accuracy", "knn_chance"),
    *("euclidean", "normalised_distance", "cosine_distance"),
)


def off_diagonal_mean(values: Float[Tensor, "*b n n2"]) -> Float[Tensor, "*b"]:
    """Return the mean over pairs of different items; NaN for a single item."""
    n = values.shape[-1]
    total = values.sum(dim=(-2, -1)) - values.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    return total / (n * (n - 1)) if n > 1 else torch.full_like(total, torch.nan)


def leading_share(x: Float[Tensor, "*b n d"], *, centred: bool = False) -> Float[Tensor, "*b"]:
    """Return σ₁² / Σσ² of the rows, from the smaller Gram matrix; NaN where nothing varies."""
    size = x.square().sum(dim=(-2, -1))
    if centred:
        x = x - x.mean(dim=-2, keepdim=True)
    gram = x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x
    total = gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    # What rounding leaves of identical rows is no variance.
    varies = total > 1e-12 * size
    largest = eigvalsh(gram)[..., -1]
    return torch.where(varies, largest / torch.where(varies, total, 1.0), torch.nan)


def _between(values: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
    """Return means of a symmetric measure within senses, and between senses.

    Each sense, and each pair of senses, counts alike, however many sentences it has.
    """
    sizes = member.sum(dim=0)
    sums = member.T @ values @ member
    diagonal = values.diagonal(dim1=-2, dim2=-1) @ member
    own = sums.diagonal(dim1=-2, dim2=-1) - diagonal
    within = (own / (sizes * (sizes - 1))).mean(dim=-1)
    return within, off_diagonal_mean(sums / (sizes[:, None] * sizes))


def _item_gap(cosines: Tensor, member: Tensor) -> Tensor:
    """Return each item's mean cosine with the others of its sense, minus with other senses."""
    sizes = member.sum(dim=0)
    sums = cosines @ member
    own = (sums * member).sum(dim=-1) - cosines.diagonal(dim1=-2, dim2=-1)
    others = (sums / sizes * (1 - member)).sum(dim=-1) / (len(sizes) - 1)
    return own / ((member @ sizes) - 1) - others
