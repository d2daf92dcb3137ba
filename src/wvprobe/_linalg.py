"""Linear algebra on products of thin factors; d_model × d_model is never formed here."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Inexact
from torch import Tensor


class SVD(NamedTuple):
    """A = U diag(S) Vh, with Vh as its name says: rows are right singular vectors.

    Attributes:
        U: [..., d_left, r] left singular vectors as columns, the entry of largest magnitude of
            each positive, so that devices and versions agree on signs.
        S: [..., r] singular values, descending.
        Vh: [..., r, d_right] right singular vectors as rows.
    """

    U: Tensor
    S: Tensor
    Vh: Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """Upcast half precision, which LAPACK does not know, and leave the rest as it is."""
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


def factored_svd(left: Float[Tensor, "*b d_left r"], right: Float[Tensor, "*b r d_right"]) -> SVD:
    """Return the SVD of ``left @ right`` from QR of both factors and an r × r core."""
    q_left, r_left = torch.linalg.qr(at_least_float32(left))
    q_right, r_right = torch.linalg.qr(at_least_float32(right).mT)
    u, s, vh = torch.linalg.svd(r_left @ r_right.mT)
    return fix_signs(SVD(q_left @ u, s, vh @ q_right.mT))


def factored_singular_values(
    left: Float[Tensor, "*b d_left r"], right: Float[Tensor, "*b r d_right"]
) -> Float[Tensor, "*b r"]:
    """Return the singular values of ``left @ right``, descending, without the vectors."""
    r_left = torch.linalg.qr(at_least_float32(left), mode="r").R
    r_right = torch.linalg.qr(at_least_float32(right).mT, mode="r").R
    return torch.linalg.svdvals(r_left @ r_right.mT)


def factored_eigenvalues(
    left: Float[Tensor, "*b d r"], right: Float[Tensor, "*b r d"]
) -> Inexact[Tensor, "*b r"]:
    """Return the r eigenvalues of ``left @ right`` that can differ from 0, by magnitude.

    AB and BA share their non-zero eigenvalues, so the r × r matrix ``right @ left`` has them.
    """
    values = torch.linalg.eigvals(at_least_float32(right) @ at_least_float32(left))
    order = values.abs().argsort(dim=-1, descending=True, stable=True)
    return values.gather(-1, order)


def factored_frobenius_norm(
    left: Float[Tensor, "*b d_left r"], right: Float[Tensor, "*b r d_right"]
) -> Float[Tensor, "*b"]:
    """Return ‖left @ right‖, from the triangular factors of QR: the Gram would square errors."""
    r_left = torch.linalg.qr(at_least_float32(left), mode="r").R
    r_right = torch.linalg.qr(at_least_float32(right).mT, mode="r").R
    return (r_left @ r_right.mT).flatten(-2).norm(dim=-1)


def triangular_factor(x: Float[Tensor, "*b d r"]) -> Float[Tensor, "*b s r"]:
    """Return an R with Rᵀ R = xᵀ x, of min(d, r) rows: ‖x M‖ = ‖R M‖ for every M.

    The Gram of single-precision numbers is exact enough in double precision: its rounding moves
    singular values by 1e-8 of the largest, less than single precision itself. Its Cholesky factor
    costs a quarter of a QR, which serves all else: double precision, and ranks below r.
    """
    x = at_least_float32(x)
    if x.dtype == torch.float32 and x.shape[-2] >= x.shape[-1]:
        wide = x.double()
        factor, failed = torch.linalg.cholesky_ex(wide.mT @ wide, upper=True)
        if not bool(failed.any()):
            return factor.to(x.dtype)
    return torch.linalg.qr(x, mode="r").R


def fix_signs(svd: SVD) -> SVD:
    """Turn each pair of singular vectors so that U's entry of largest magnitude is positive."""
    largest = svd.U.abs().argmax(dim=-2, keepdim=True)
    sign = svd.U.gather(-2, largest).sign()
    sign = torch.where(sign == 0, torch.ones_like(sign), sign)
    return SVD(svd.U * sign, svd.S, svd.Vh * sign.mT)


class Basis(NamedTuple):
    """Orthonormal bases of column spaces, padded to one width.

    Attributes:
        vectors: [..., d, r] orthonormal columns; those beyond the rank are 0.
        rank: [...] dimension of each space.
    """

    vectors: Tensor
    rank: Tensor


def column_space(x: Float[Tensor, "*b d r"], energy: float | int = 1.0) -> Basis:
    """Return bases of the column spaces of matrices, to float precision.

    Args:
        x: the matrices; d < r is allowed.
        energy: below 1, only the leading left singular vectors: the fewest that hold this share
            of Σσ².
    """
    u, s, _ = torch.linalg.svd(at_least_float32(x), full_matrices=False)
    floor = s[..., :1] * max(x.shape[-2:]) * torch.finfo(s.dtype).eps
    kept = s > floor
    if energy < 1:
        squares = s.double() ** 2
        before = squares.cumsum(-1) - squares
        kept = kept & (before < energy * squares.sum(-1, keepdim=True))
    return Basis(u * kept[..., None, :], kept.sum(-1))
