"""Factored linear algebra against dense brute force, in float64."""

import pytest
import torch

from wvprobe._linalg import (
    factored_eigenvalues,
    factored_frobenius_norm,
    factored_singular_values,
    factored_svd,
    triangular_factor,
)

SHAPES = [((), 13, 5, 11), ((1,), 11, 3, 11), ((1, 1), 7, 5, 7), ((2, 3), 13, 5, 13)]


def factors(batch, d_left, r, d_right, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    left = torch.randn(*batch, d_left, r, generator=generator, dtype=torch.float64)
    right = torch.randn(*batch, r, d_right, generator=generator, dtype=torch.float64)
    return left.to(dtype), right.to(dtype)


@pytest.mark.parametrize(("batch", "d_left", "r", "d_right"), SHAPES)
def test_svd_equals_dense(batch, d_left, r, d_right):
    left, right = factors(batch, d_left, r, d_right)
    svd = factored_svd(left, right)
    dense = left @ right
    rebuilt = svd.U * svd.S[..., None, :] @ svd.Vh
    torch.testing.assert_close(rebuilt, dense, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(svd.S, torch.linalg.svdvals(dense)[..., :r])
    torch.testing.assert_close(factored_singular_values(left, right), svd.S)
    eye = torch.eye(r, dtype=torch.float64).expand(*batch, r, r)
    torch.testing.assert_close(svd.U.mT @ svd.U, eye)
    torch.testing.assert_close(svd.Vh @ svd.Vh.mT, eye)  # rows of Vh, not columns of V


def test_signs_do_not_depend_on_the_factors_signs():
    left, right = factors((), 13, 5, 11)
    flipped = factored_svd(-left, -right)
    svd = factored_svd(left, right)
    torch.testing.assert_close(flipped.U, svd.U)
    largest = svd.U.gather(-2, svd.U.abs().argmax(-2, keepdim=True))
    assert bool((largest > 0).all())


def test_eigenvalues_equal_dense_ones():
    left, right = factors((2,), 11, 3, 11)
    found = factored_eigenvalues(left, right)
    dense = torch.linalg.eigvals(left @ right)
    order = dense.abs().argsort(dim=-1, descending=True)
    expected = dense.gather(-1, order)[..., :3]
    # Conjugate pairs tie in magnitude, so compare what does not depend on their order.
    torch.testing.assert_close(found.abs(), expected.abs())
    torch.testing.assert_close(
        found.sum(-1).real, (left @ right).diagonal(dim1=-2, dim2=-1).sum(-1)
    )


def test_norm_equals_dense_even_where_products_cancel():
    left, right = factors((3,), 13, 5, 11)
    torch.testing.assert_close(
        factored_frobenius_norm(left, right), (left @ right).flatten(-2).norm(dim=-1)
    )
    # A Gram product would lose this: two large factors whose product is tiny.
    left = torch.tensor([[1.0, 1.0], [1.0, 1.0 + 1e-6], [0.0, 0.0]], dtype=torch.float64)
    right = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    expected = (left @ right).norm()
    assert factored_frobenius_norm(left, right) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_upcast(dtype):
    left, right = factors((), 13, 5, 13, dtype)
    assert factored_singular_values(left, right).dtype == torch.float32
    assert factored_eigenvalues(left, right).dtype == torch.complex64
    torch.testing.assert_close(
        factored_svd(left, right).S, torch.linalg.svdvals(left.float() @ right.float())[:5]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("d", "r"), [(13, 5), (5, 13), (7, 7), (7, 1)])
def test_triangular_factor_stands_for_its_matrix(d, r, dtype):
    x, m = factors((1, 3), d, r, 11, dtype)
    found = triangular_factor(x)
    assert found.shape == (1, 3, min(d, r), r)
    exact = (x.double() @ m.double()).flatten(-2).norm(dim=-1)
    kept = (found.double() @ m.double()).flatten(-2).norm(dim=-1)
    torch.testing.assert_close(kept, exact, rtol=1e-6 if dtype != torch.float64 else 1e-12, atol=0)


def test_triangular_factor_keeps_small_singular_values():
    """A Gram in single precision would lose 1e-5, and one without full rank has no Cholesky."""
    x, _ = factors((), 29, 5, 7)
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    values = torch.tensor([1.0, 0.3, 1e-3, 1e-5, 0.0], dtype=torch.float64)
    found = torch.linalg.svdvals(triangular_factor((u * values @ vh).float()).double())
    torch.testing.assert_close(found, values, rtol=1e-2, atol=1e-7)
    assert torch.equal(triangular_factor(torch.zeros(2, 5, 3)), torch.zeros(2, 3, 3))
