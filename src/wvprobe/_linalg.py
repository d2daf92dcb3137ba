"""Linear algebra on products of thin factors; d_model × d_model is never formed here."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Inexact
from torch import Tensor

from wvprobe._decompositions import svd, svdvals


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
    u, s, vh = svd(r_left @ r_right.mT)
    return fix_signs(SVD(q_left @ u, s, vh @ q_right.mT))


def factored_singular_values(
    left: Float[Tensor, "*b d_left r"], right: Float[Tensor, "*b r d_right"]
) -> Float[Tensor, "*b r"]:
    """Return the singular values of ``left @ right``, descending, without the vectors."""
    return svdvals(triangular(left) @ triangular(right.mT).mT)


def triangular(x: Float[Tensor, "*b d r"]) -> Float[Tensor, "*b k r"]:
    """Return R of ``x = Q R``, k = min(d, r): all of a thin factor but its orientation."""
    return torch.linalg.qr(at_least_float32(x), mode="r").R


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
    return (triangular(left) @ triangular(right.mT).mT).flatten(-2).norm(dim=-1)


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


def round_off(left: Float[Tensor, "*b m r"], right: Float[Tensor, "*b r n"]) -> Float[Tensor, "*b"]:
    """Return how far off a singular value of ``left @ right`` can be: 4 ε ‖left‖ ‖right‖.

    Frobenius norms, which exceed spectral ones by up to √r, stand in for the constants of an
    error analysis; beside a float64 run no float32 value was further off (d_model up to 4,096).
    Where the factors cancel, σ₁ would say nothing about the error, so it plays no part.
    """
    left, right = at_least_float32(left), at_least_float32(right)
    norms = left.flatten(-2).norm(dim=-1) * right.flatten(-2).norm(dim=-1)
    return 4 * torch.finfo(norms.dtype).eps * norms


def stable_rank(values: Float[Tensor, "*b r"]) -> Float[Tensor, "*b"]:
    """Return ‖A‖_F² / σ₁² of singular values (Rudelson & Vershynin 2007); 0 where all are 0."""
    return _relative(values).square().sum(dim=-1)


def effective_rank(values: Float[Tensor, "*b r"]) -> Float[Tensor, "*b"]:
    """Return exp of the entropy (in nats) of σ / Σσ (Roy & Vetterli 2007); 0 where all are 0."""
    relative = _relative(values)
    total = relative.sum(dim=-1, keepdim=True)
    shares = relative / torch.where(total > 0, total, torch.ones_like(total))
    return torch.special.entr(shares).sum(dim=-1).exp() * (total[..., 0] > 0)


def participation_ratio(values: Float[Tensor, "*b r"]) -> Float[Tensor, "*b"]:
    """Return (Σσ²)² / Σσ⁴; 0 where all are 0."""
    squares = _relative(values).square()
    fourth = squares.square().sum(dim=-1)
    return squares.sum(dim=-1).square() / torch.where(fourth > 0, fourth, torch.ones_like(fourth))


def energy_in_top(values: Float[Tensor, "*b r"], k: int) -> Float[Tensor, "*b"]:
    """Return Σσ² of the k largest (the first k) over Σσ² of all; 0 where all are 0."""
    squares = _relative(values).square()
    total = squares.sum(dim=-1)
    return squares[..., :k].sum(dim=-1) / torch.where(total > 0, total, torch.ones_like(total))


def positivity(eigenvalues: Inexact[Tensor, "*b r"]) -> Float[Tensor, "*b"]:
    """Return Re Σλ / Σ|λ| (Elhage et al. 2021): 1 all positive, −1 all negative; 0 where all 0."""
    size = eigenvalues.abs().sum(dim=-1)
    return eigenvalues.real.sum(dim=-1) / torch.where(size > 0, size, torch.ones_like(size))


def degenerate_groups(values: Float[Tensor, " r"], tolerance: float) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of every run of two or more values, each within `tolerance` of the next.

    Within such a run singular vectors are determined up to a rotation only.
    """
    close = ((values[:-1] - values[1:]) <= tolerance).tolist()
    groups: list[tuple[int, int]] = []
    start = 0
    for at, together in enumerate([*close, False], start=1):
        if together:
            continue
        if at - start > 1:
            groups.append((start, at))
        start = at
    return tuple(groups)


def subspace_distance(a: Float[Tensor, "d m"], b: Float[Tensor, "d n"]) -> float:
    """Return ‖P_a − P_b‖, spectral, of the projectors on the columns of two orthonormal bases.

    For equal dimensions the sine of the largest principal angle (Golub & Van Loan 2013, §2.5.3):
    0 for the same subspace, 1 where a direction of one is orthogonal to the other, and 1 for
    different dimensions. From ``b − a aᵀ b``, which keeps small angles that a cosine would lose.
    """
    if a.shape[1] != b.shape[1]:
        return 1.0
    if not a.shape[1]:
        return 0.0
    return float(torch.linalg.matrix_norm(b - a @ (a.mT @ b), 2).clamp(max=1.0))


def _relative(values: Tensor) -> Tensor:
    """Return singular values over the largest, so that squares neither overflow nor vanish."""
    largest = values.amax(dim=-1, keepdim=True)
    return values / torch.where(largest > 0, largest, torch.ones_like(largest))


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
    u, s, _ = svd(at_least_float32(x), full_matrices=False)
    floor = s[..., :1] * max(x.shape[-2:]) * torch.finfo(s.dtype).eps
    kept = s > floor
    if energy < 1:
        squares = s.double() ** 2
        before = squares.cumsum(-1) - squares
        kept = kept & (before < energy * squares.sum(-1, keepdim=True))
    return Basis(u * kept[..., None, :], kept.sum(-1))
