"""OV and QK circuits as pairs of thin factors, after Elhage et al. 2021.

https://transformer-circuits.pub/2021/framework: W_OV = W_V W_O moves what a head has read to
what it writes; W_QK = W_Q W_Kᵀ turns two tokens' vectors into a score. Both have rank ≤ d_head,
so the factors say everything and d_model × d_model need not be formed.
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Inexact
from torch import Tensor

from wvprobe._linalg import (
    SVD,
    at_least_float32,
    factored_eigenvalues,
    factored_frobenius_norm,
    factored_singular_values,
    factored_svd,
    round_off,
)
from wvprobe._types import HeadId
from wvprobe._validate import message
from wvprobe.errors import ShapeError


@dataclass(frozen=True)
class Circuit:
    """A matrix ``left @ right`` of one head (or of a batch of heads), with its bias terms.

    Attributes:
        kind: ``OV`` or ``QK``.
        left: [..., d_model, r]; W_V for OV, c · W_Q R(Δ) for QK (gains of a qk-norm included).
        right: [..., r, d_model]; W_O for OV, W_Kᵀ for QK.
        left_bias: [..., r]; b_V for OV, c · b_Q R(Δ) for QK; None without biases.
        right_bias: [..., r]; b_K for QK; None without one, and for OV, whose b_O is the block's.
        head: which head it is, where it is one head of a model.
        offset: Δ = query position − key position that a QK circuit stands for, None unrotated.
        seq_len: length of the input that a rotation depends on, where it does.
        part: ``content`` or ``rotary``, one of the two QK circuits of latent attention.
        slope: ALiBi's slope m of a QK circuit, or None. The score is ``bilinear(x̂_i, x̂_j)`` plus
            m · j, j the key's position. Between texts compare it only less m · i, where it is
            bilinear − m · Δ: m · j alone grows with where in a text the two words stand.
        window: how many tokens back, itself included, a query of the layer sees; None for all.
        visible: whether a query may look at a key at the offset asked for: False beyond the
            window, and for a key ahead of a decoder's query. The raw score exists all the same.

    Examples:
        >>> circuit = heads.ov(0, 1)
        >>> bool((circuit.svd().S - torch.linalg.svdvals(circuit.matrix())[:14]).abs().max() < 1e-4)
        True
    """

    kind: Literal["OV", "QK"]
    left: Float[Tensor, "*b d_left r"]
    right: Float[Tensor, "*b r_right d_right"]  # r_right = r, which __post_init__ tells better
    left_bias: Float[Tensor, "*b r"] | None = None
    right_bias: Float[Tensor, "*b r"] | None = None
    head: HeadId | None = None
    offset: float | int | None = None
    seq_len: int | None = None
    part: str | None = None
    slope: float | None = None
    window: int | None = None
    visible: bool = True

    def __post_init__(self) -> None:
        """Check that the factors can be multiplied."""
        if self.left.shape[-1] != self.right.shape[-2]:
            raise ShapeError(
                message(
                    "right",
                    f"[..., r, d_model] with r = {self.left.shape[-1]} as in `left`",
                    f"shape {list(self.right.shape)}",
                )
            )

    @property
    def singular_values(self) -> Float[Tensor, "*b r"]:
        """Singular values of the matrix, descending; at most r of them differ from 0."""
        return factored_singular_values(self.left, self.right)

    @property
    def rank(self) -> int:
        """Numerical rank (of the fullest matrix in a batch): values beyond the factors' round-off.

        Where factors cancel, what is left is noise and counts as 0.
        """
        floor = round_off(self.left, self.right)[..., None]
        return int((self.singular_values > floor).sum(dim=-1).max())

    def svd(self) -> SVD:
        """Singular value decomposition of the matrix, from the factors."""
        return factored_svd(self.left, self.right)

    @property
    def eigenvalues(self) -> Inexact[Tensor, "*b r"]:
        """The r complex eigenvalues that can differ from 0, by descending magnitude."""
        return factored_eigenvalues(self.left, self.right)

    @property
    def frobenius_norm(self) -> Float[Tensor, "*b"]:
        """Frobenius norm of the matrix."""
        return factored_frobenius_norm(self.left, self.right)

    def matrix(self) -> Float[Tensor, "*b d_left d_right"]:
        """The dense matrix without biases, [..., d_model, d_model]: for small models and tests."""
        return at_least_float32(self.left) @ at_least_float32(self.right)

    def apply(self, x: Float[Tensor, "*x d_left"]) -> Float[Tensor, "*x d_right"]:
        """Return x (left @ right), the left bias included: for OV, what the head writes for x."""
        return self._read(x) @ self.right

    def bilinear(
        self, x: Float[Tensor, "*x d_left"], y: Float[Tensor, "*x d_right"]
    ) -> Float[Tensor, "*x"]:
        """Return x (left @ right) yᵀ with all bias terms: for QK, the score of x̂_i and x̂_j."""
        keys = y @ self.right.mT
        if self.right_bias is not None:
            keys = keys + self.right_bias
        return (self._read(x) * keys).sum(dim=-1)

    def _read(self, x: Tensor) -> Tensor:
        read = x @ self.left
        return read if self.left_bias is None else read + self.left_bias
