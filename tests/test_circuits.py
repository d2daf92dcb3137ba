"""Circuits against dense matrices and hand-worked cases."""

import pytest
import torch

from wvprobe.circuits import Circuit
from wvprobe.errors import ShapeError


@pytest.fixture
def circuit():
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Circuit("QK", draw(13, 5), draw(5, 13), draw(5), draw(5))


def test_everything_equals_the_dense_matrix(circuit):
    dense = circuit.matrix()
    assert dense.shape == (13, 13)
    torch.testing.assert_close(circuit.singular_values, torch.linalg.svdvals(dense)[:5])
    torch.testing.assert_close(circuit.frobenius_norm, dense.norm())
    torch.testing.assert_close(circuit.eigenvalues.sum().real, dense.trace())
    svd = circuit.svd()
    torch.testing.assert_close(svd.U @ svd.S.diag() @ svd.Vh, dense)


def test_bilinear_is_the_product_with_all_bias_terms(circuit):
    x, y = torch.randn(2, 7, 13, dtype=torch.float64).unbind(0)
    q = x @ circuit.left + circuit.left_bias
    k = y @ circuit.right.mT + circuit.right_bias
    torch.testing.assert_close(circuit.bilinear(x, y), (q * k).sum(-1))
    plain = Circuit("QK", circuit.left, circuit.right)
    torch.testing.assert_close(
        plain.bilinear(x, y), torch.einsum("pd,de,pe->p", x, circuit.matrix(), y)
    )


def test_apply_writes_the_bias_too(circuit):
    x = torch.randn(7, 13, dtype=torch.float64)
    expected = x @ circuit.matrix() + circuit.left_bias @ circuit.right
    torch.testing.assert_close(circuit.apply(x), expected)


def test_rank_counts_what_is_there():
    left = torch.zeros(7, 3)
    assert Circuit("OV", left, torch.randn(3, 7)).rank == 0
    left[0, 0] = 2.0
    left[1, 1] = 5.0
    right = torch.zeros(3, 7)
    right[0, 4] = 1.0
    right[1, 4] = 1.0
    circuit = Circuit("OV", left, right)
    assert circuit.rank == 1
    assert float(circuit.singular_values[0]) == pytest.approx(29**0.5)


def test_wrong_inputs_are_told():
    with pytest.raises(ShapeError, match="r = 3 as in `left`"):
        Circuit("OV", torch.zeros(7, 3), torch.zeros(2, 7))


def test_factors_that_cancel_leave_no_rank_of_noise():
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(17, 5, generator=generator)
    q = torch.linalg.qr(torch.randn(5, 5, generator=generator)).Q
    reads, writes = left @ q[:, :2] @ q[:, :2].T, q[:, 2:] @ torch.randn(3, 11, generator=generator)
    assert reads.norm() > 1 and writes.norm() > 1
    assert Circuit("OV", reads, writes).rank == 0
    assert Circuit("OV", reads, reads.mT).rank == 2
