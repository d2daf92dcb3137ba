"""Frobenius norms of all products of two families of thin matrices; no d × d is formed for a pair.

A writer is a [s, d] factor A, a reader the matrix B = left @ rightᵀ with left [d, r] and a small
right [t, r]; readers in groups share a left. Two ways lead to ‖A B‖:

* **cores**: (A left) rightᵀ, with A left once a group. Exact to the precision of the numbers.
* **Grams**: ‖A B‖² = ⟨AᵀA, B Bᵀ⟩, one matrix product of Grams, flattened, for all pairs.
  Cheaper where d < 2 s · r or so, but it squares errors: pairs whose norm is small are computed
  anew by cores.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

Fields = TypeVar("Fields", bound=tuple)

# Largest absolute error of a norm that Grams may cause, for factors of unit norm; and a bound of
# what a product of Grams is off by, in eps · ‖AᵀA‖ ‖B Bᵀ‖: 1.3 was the most measured.
GRAM_ERROR = 1e-6
_GRAM_ROUNDING = 2.0
_CHUNK_BYTES = 2**26
# Side of a tile of a Gram: smaller ones save more of the mirrored half, but multiply slower.
_TILE = 128


class Readers(NamedTuple):
    """Readers B_i = left[i // group] @ right[i].mT of unit Frobenius norm.

    Attributes:
        left: [n_left, d, r].
        right: [n, t, r] with n a multiple of n_left, or None where B_i is left[i] itself.
    """

    left: Tensor
    right: Tensor | None

    def whole(self) -> Float[Tensor, "n d t"]:
        """Return every reader as one matrix."""
        if self.right is None:
            return self.left
        group = len(self.right) // len(self.left)
        right = self.right.unflatten(0, (len(self.left), group))
        return (self.left[:, None] @ right.mT).flatten(0, 1)


def frobenius(x: Float[Tensor, "*shape"], rows: int = -2, columns: int = -1) -> Tensor:
    """Return Frobenius norms over two axes, one after the other.

    PyTorch sums over both at once one number after another: in float32 7e-6 off at 128 × 128.
    """
    along = torch.linalg.vector_norm(x, dim=columns, keepdim=True)
    return torch.linalg.vector_norm(along, dim=rows, keepdim=True).squeeze((rows, columns))


def joined(parts: Iterable[Fields], count: int) -> Fields:
    """Join named tuples of tensors of like shapes field by field, along the first axis.

    Parts are taken one at a time, so that no more than one stands in memory beside the whole.

    Args:
        parts: the tuples, at least one; a field that is None is None in all.
        count: how many there are.
    """
    wholes: list[Tensor | None] = []
    kind: Any = None
    for place, part in enumerate(parts):
        if kind is None:
            kind = type(part)
            wholes = [None if x is None else x.new_empty(count, *x.shape) for x in part]
        for whole, field in zip(wholes, part, strict=True):
            if whole is not None:
                whole[place] = field
    return kind(*(None if whole is None else whole.flatten(0, 1) for whole in wholes))


def core_norms(writers: Float[Tensor, "n_w s d"], readers: Readers) -> Float[Tensor, "n_w n_r"]:
    """Return ‖A B‖ of every writer and reader, through A left, once for readers that share it."""
    n, s, d = writers.shape
    n_left, r = len(readers.left), readers.left.shape[-1]
    right = None if readers.right is None else readers.right.unflatten(0, (n_left, -1))
    wide = r if right is None else r + right.shape[1] * right.shape[2]
    step = max(1, _CHUNK_BYTES // (n * s * wide * writers.element_size()))
    rows = writers.reshape(n * s, d)
    norms = []
    for start in range(0, n_left, step):
        left = readers.left[start : start + step]
        core = rows @ left.permute(1, 0, 2).reshape(d, -1)  # one product of large matrices
        core = core.view(n, s, len(left), r)
        if right is None:
            norms.append(frobenius(core, 1, 3))
            continue
        turned = right[start : start + step].flatten(1, 2).mT  # [left, r, group · t]
        core = core.permute(2, 0, 1, 3).reshape(len(left), n * s, r) @ turned
        core = core.view(len(left), n, s, right.shape[1], right.shape[2])
        norms.append(frobenius(core, 2, 4).permute(1, 0, 2).flatten(1))
    return torch.cat(norms, dim=1)


def gram_norms(writers: Float[Tensor, "n_w s d"], readers: Readers) -> Float[Tensor, "n_w n_r"]:
    """Return ‖A B‖ of every writer and reader of unit norm through Grams, small ones by cores.

    Grams are symmetric: they are formed tile by tile on and above the diagonal, and none is ever
    held whole. A sum over tiles is off by some eps · ‖AᵀA‖ ‖B Bᵀ‖ in the square, so a norm that
    this could move by more than :data:`GRAM_ERROR` is computed anew.
    """
    matrices = readers.whole()
    d = writers.shape[-1]
    tiles = [slice(start, min(start + _TILE, d)) for start in range(0, d, _TILE)]
    squares = writers.new_zeros(len(writers), len(matrices))
    for place, rows in enumerate(tiles):
        for columns in tiles[place:]:
            grams = writers[:, :, rows].mT @ writers[:, :, columns]
            others = matrices[:, rows] @ matrices[:, columns].mT
            twice = 1.0 if rows == columns else 2.0  # the tile below the diagonal is its mirror
            squares.addmm_(grams.flatten(1), others.flatten(1).mT, alpha=twice)
    norms = squares.clamp(min=0.0).sqrt()
    size = frobenius(writers @ writers.mT)[:, None] * frobenius(matrices.mT @ matrices)
    error = _GRAM_ROUNDING * torch.finfo(squares.dtype).eps * size
    poor = (error > 2.0 * GRAM_ERROR * norms).nonzero()
    bytes_a_pair = (writers[0].numel() + matrices[0].numel()) * writers.element_size()
    for part in poor.split(max(1, _CHUNK_BYTES // bytes_a_pair)):
        core = writers[part[:, 0]] @ matrices[part[:, 1]]
        norms[part[:, 0], part[:, 1]] = frobenius(core)
    return norms


def prefer_grams(
    n_writers: int, n_readers: int, group: int, d: int, s: int, r: int, blocks: tuple[int, int]
) -> bool:
    """Say whether Grams cost fewer multiplications than cores.

    Args:
        n_writers: number of writers.
        n_readers: number of readers.
        group: how many readers share a left.
        d: dimension in which writers and readers meet.
        s: rows of a writer.
        r: columns of a left.
        blocks: into how many blocks memory cuts writers and readers; a block's Grams are formed
            anew for each block of the other side.
    """
    pairs = n_writers * n_readers
    tiles = -(-d // _TILE)
    half = d * d * (tiles + 1) / (2 * tiles)  # of a symmetric matrix
    grams = half * (pairs + n_writers * s * blocks[1] + n_readers * r * blocks[0])
    cores = pairs * s * r * d / group + (pairs * s * r * r if group > 1 else 0)
    return grams < cores


def layer_blocks(layers: int, numbers: int, most: int) -> list[range]:
    """Cut layers of so many numbers each into blocks of at most `most`, a layer at least."""
    step = max(1, most // max(1, numbers))
    return [range(start, min(start + step, layers)) for start in range(0, layers, step)]
