"""Frobenius norms of all products of two families of thin matrices, d × d never formed for a pair.

A writer is a [s, d] factor A, a reader the matrix B = left @ rightᵀ with left [d, r] and a small
right [t, r]; readers in groups share a left. Two ways lead to ‖A B‖:

* **cores**: (A left) rightᵀ, with A left once a group. Exact to the precision of the numbers.
* **Grams**: ‖A B‖² = ⟨AᵀA, B Bᵀ⟩, one matrix product of flattened d × d Grams. Cheaper where
  d² < s · r · d, but it squares errors: pairs whose norm is small are computed anew by cores.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

# Largest absolute error of a norm that Grams may cause, for factors of unit norm, and what a
# flattened product of Grams was measured to be off by at most, in units of eps · ‖AᵀA‖ ‖B Bᵀ‖.
GRAM_ERROR = 1e-6
_GRAM_ROUNDING = 2.0
_CHUNK_BYTES = 2**26


class Readers(NamedTuple):
    """Readers B_i = left[i // group] @ right[i].mT of unit Frobenius norm.

    Attributes:
        left: [n_left, d, r].
        right: [n, t, r] with n a multiple of n_left, or None where B_i is left[i] itself.
    """

    left: Tensor
    right: Tensor | None

    @property
    def n(self) -> int:
        """Number of readers."""
        return len(self.left if self.right is None else self.right)

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


def stack(readers: list[Readers]) -> Readers:
    """Join readers of several layers; all with a `right`, or all without."""
    rights = [reader.right for reader in readers if reader.right is not None]
    return Readers(
        torch.cat([reader.left for reader in readers]), torch.cat(rights) if rights else None
    )


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


class GramReaders(NamedTuple):
    """Readers with their Grams B Bᵀ.

    Attributes:
        matrices: [n, d, t], of unit Frobenius norm.
        grams: [n, d · d].
        norms: [n] ‖B Bᵀ‖.
    """

    matrices: Tensor
    grams: Tensor
    norms: Tensor


def gram_readers(readers: Readers) -> GramReaders:
    """Form the Grams of readers: n · d² numbers."""
    matrices = readers.whole()
    grams = matrices @ matrices.mT
    return GramReaders(matrices, grams.flatten(1), frobenius(grams))


def gram_norms(writers: Float[Tensor, "n_w s d"], readers: GramReaders) -> Float[Tensor, "n_w n_r"]:
    """Return ‖A B‖ of every writer and reader through Grams, small ones through cores.

    Both are of unit norm. A product of Grams is off by some eps · ‖AᵀA‖ ‖B Bᵀ‖ in the square, so a
    norm that this could move by more than :data:`GRAM_ERROR` is computed anew.
    """
    grams = writers.mT @ writers
    squares = (grams.flatten(1) @ readers.grams.mT).clamp(min=0.0)
    size = frobenius(grams)[:, None] * readers.norms
    error = _GRAM_ROUNDING * torch.finfo(squares.dtype).eps * size
    norms = squares.sqrt()
    poor = (error > 2.0 * GRAM_ERROR * norms).nonzero()
    bytes_a_pair = (writers[0].numel() + readers.matrices[0].numel()) * writers.element_size()
    for part in poor.split(max(1, _CHUNK_BYTES // bytes_a_pair)):
        core = writers[part[:, 0]] @ readers.matrices[part[:, 1]]
        norms[part[:, 0], part[:, 1]] = frobenius(core)
    return norms


def prefer_grams(
    n_writers: int, n_readers: int, group: int, d: int, s: int, r: int, most_numbers: int
) -> bool:
    """Say whether Grams cost less than cores and all readers' Grams are `most_numbers` at most.

    Args:
        n_writers: number of writers.
        n_readers: number of readers.
        group: how many readers share a left.
        d: dimension in which writers and readers meet.
        s: rows of a writer.
        r: columns of a left.
        most_numbers: limit of memory, in numbers.
    """
    pairs = n_writers * n_readers
    grams = pairs * d * d + (n_writers * s + n_readers * r) * d * d
    cores = pairs * s * r * d // group + (pairs * s * r * r if group > 1 else 0)
    return grams < cores and n_readers * d * d <= most_numbers


def layer_blocks(layers: int, numbers: int, most: int) -> list[range]:
    """Cut layers of so many numbers each into blocks of at most `most`, a layer at least."""
    step = max(1, most // max(1, numbers))
    return [range(start, min(start + step, layers)) for start in range(0, layers, step)]
