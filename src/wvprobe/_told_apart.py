"""How well vectors tell labels apart, each vector left out in turn: nearest centroid and neighbour.

All comes from the vectors' inner products, so that one matrix serves any number of labellings.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

# Likenesses this close are equal: two vectors of one token in one context differ by the rounding
# of single precision alone, and which of two labels rounding favours is no finding.
TIED = 1e-6


def indicator(labels: Int[Tensor, "*b item"], n_labels: int) -> Float[Tensor, "*b item label"]:
    """Return 1 where an item has a label."""
    return torch.nn.functional.one_hot(labels, n_labels).double()


def left_out_centroids(
    products: Float[Tensor, "*b item item2"], member: Float[Tensor, "*c item label"]
) -> Float[Tensor, "*d item"]:
    """Say which items the nearest centroid gives their own label, the item itself left out.

    Nearest by cosine, a centroid being the mean of a label's vectors as they are (Reif et al.
    2019). An item's own centroid is that of the others with its label: Σ − x. Then
    x · (Σ − x) = x · Σ − ‖x‖² and ‖Σ − x‖² = ‖Σ‖² − 2 x · Σ + ‖x‖², which is exact.

    Args:
        products: inner products of the vectors, in double precision.
        member: of :func:`indicator`; leading axes broadcast against those of `products`.

    Returns:
        1 for right, 0 for wrong; where several centroids tie, 1 over their number if the item's
        own is among them. An item that alone has its label is wrong.
    """
    sums = products @ member  # [*d, item, label]: an item's products with the sum of a label
    squares = torch.diagonal(products, dim1=-2, dim2=-1)[..., None].expand_as(sums)
    lengths = (member * sums).sum(dim=-2, keepdim=True).expand_as(sums)
    own = member.expand_as(sums).bool()
    alone = own & (member.sum(dim=-2, keepdim=True).expand_as(sums) < 2)
    along = torch.where(own, sums - squares, sums)
    lengths = torch.where(own, lengths - 2 * sums + squares, lengths)
    sizes = (lengths.clamp(min=0) * squares).sqrt()
    likeness = torch.where(sizes > 0, along / torch.where(sizes > 0, sizes, 1.0), 0.0)
    likeness = torch.where(alone, -torch.inf, likeness)
    tied = likeness >= likeness.amax(dim=-1, keepdim=True) - TIED
    return (tied & own).any(dim=-1).double() / tied.sum(dim=-1)


def left_out_neighbours(
    cosines: Float[Tensor, "*b item item2"], labels: Int[Tensor, " item"]
) -> Float[Tensor, "*b item"]:
    """Say which items have the label of their nearest neighbour by cosine.

    Args:
        cosines: cosines of all pairs.
        labels: the items' labels.

    Returns:
        1 for right, 0 for wrong; where several neighbours tie, the share of them that is right.
    """
    itself = torch.eye(len(labels), dtype=torch.bool)
    others = cosines.masked_fill(itself, -torch.inf)
    tied = others >= others.amax(dim=-1, keepdim=True) - TIED
    same = labels[:, None] == labels
    return (tied & same).sum(dim=-1).double() / tied.sum(dim=-1)


def shuffled(labels: Int[Tensor, " item"], times: int, generator: torch.Generator) -> Tensor:
    """Return [times, item], the labels in random order."""
    orders = [torch.randperm(len(labels), generator=generator) for _ in range(times)]
    return torch.stack([labels[order] for order in orders])
