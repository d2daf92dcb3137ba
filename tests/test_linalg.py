"""Factored linear algebra against dense brute force, in float64."""

import pytest
import torch

from wvprobe._extremes import extreme_products
from wvprobe._linalg import (
    degenerate_groups,
    effective_rank,
    energy_in_top,
    factored_eigenvalues,
    factored_frobenius_norm,
    factored_singular_values,
    factored_svd,
    participation_ratio,
    positivity,
    round_off,
    stable_rank,
    subspace_distance,
    triangular,
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


def test_the_triangular_factor_keeps_all_but_the_orientation():
    left, right = factors((2,), 13, 5, 11)
    for x in (left, right):  # tall, and wide: 5 × 11 leaves 5 × 11
        r = triangular(x)
        assert r.shape == (2, 5, x.shape[-1])
        torch.testing.assert_close(r.mT @ r, x.mT @ x)


def test_measures_do_not_depend_on_scale_and_are_0_where_all_values_are():
    values = torch.tensor([[4.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    for scale in (1.0, 1e-30, 1e30):  # squares of these leave float32
        assert stable_rank(scale * values).tolist() == pytest.approx([1.5, 0.0])
        assert effective_rank(scale * values).tolist() == pytest.approx([2**1.5, 0.0])
        assert participation_ratio(scale * values).tolist() == pytest.approx([2.0, 0.0])
        assert energy_in_top(scale * values, 2).tolist() == pytest.approx([5 / 6, 0.0])
        eigenvalues = scale * torch.tensor([[2j, -2j, 1.0], [0.0, 0.0, 0.0]])
        assert positivity(eigenvalues).tolist() == pytest.approx([1 / 5, 0.0])
    assert energy_in_top(values, 9).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("rank", [0, 1, 3, 7])
def test_round_off_tells_values_that_are_there_from_those_that_are_not(rank):
    left, right = factors((40,), 101, 7, 89, torch.float32)
    spare = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(1))).Q
    kept = spare[:, :rank] @ spare[:, :rank].T
    left = left @ kept
    right = right if rank else kept @ right
    values = factored_singular_values(left, right)
    assert ((values > round_off(left, right)[:, None]).sum(dim=-1) == rank).all()


def test_round_off_is_of_each_matrix_alone():
    left, right = factors((5,), 13, 3, 11, torch.float32)
    right = right * torch.logspace(-9, 9, 5)[:, None, None]
    alone = [round_off(a, b) for a, b in zip(left, right, strict=True)]
    torch.testing.assert_close(round_off(left, right), torch.stack(alone))
    # By hand: 4 ε · 2 · 3 of factors whose only entries are 2 and 3.
    two, three = torch.full((1, 1), 2.0), torch.full((1, 1), 3.0)
    assert float(round_off(two, three)) == 24 * 2.0**-23


def test_groups_are_runs_of_neighbours():
    values = torch.tensor([9.0, 8.9, 8.8, 5.0, 3.0, 2.95])
    assert degenerate_groups(values, 0.15) == ((0, 3), (4, 6))
    assert degenerate_groups(values, 0.01) == ()
    assert degenerate_groups(values, 9.0) == ((0, 6),)
    assert degenerate_groups(values[:1], 9.0) == degenerate_groups(values[:0], 9.0) == ()


def test_distance_of_subspaces_is_that_of_their_projectors():
    a, b = (torch.linalg.qr(factors((), 13, 3, 5)[0]).Q, torch.linalg.qr(torch.eye(13)[:, 2:5]).Q)
    b = b.double()
    expected = torch.linalg.matrix_norm(a @ a.T - b @ b.T, 2)
    assert subspace_distance(a, b) == pytest.approx(float(expected))
    turn = torch.linalg.qr(factors((), 3, 3, 3)[0]).Q
    assert subspace_distance(a, a @ turn) < 1e-14
    # A tiny angle, which 1 − cos² would lose.
    near = torch.linalg.qr(a + 1e-11 * b).Q
    assert 1e-12 < subspace_distance(a, near) < 1e-10
    assert subspace_distance(a, a[:, :2]) == 1.0
    assert subspace_distance(a[:, :0], b[:, :0]) == 0.0


@pytest.mark.parametrize("tile", [1, 7, 64, 1024])
@pytest.mark.parametrize("shape", [(1, 97), (83, 1), (83, 97), (1, 1)])
def test_extreme_products_equal_a_sorted_dense_product(shape, tile):
    left, right = factors((), shape[0], 5, shape[1])
    dense = (left @ right).flatten()
    done = []
    for ends in (extreme_products(left, right.T.contiguous(), 11, tile=tile, done=done.append),):
        for end, signed in zip(ends, (dense, -dense), strict=True):
            best = signed.topk(min(11, len(signed)))
            assert torch.equal(end.rows * shape[1] + end.columns, best.indices)
            torch.testing.assert_close(end.values, dense[best.indices], rtol=1e-12, atol=1e-12)
    assert sum(done) == shape[0]


@pytest.mark.parametrize("alike", [True, False])
def test_the_search_leaves_out_what_norms_rule_out(alike, monkeypatch):
    """Of 225 tiles all are looked at where rows are of one length, few where they are not."""
    left, right = (torch.nn.functional.normalize(t) for t in factors((), 300, 5, 300)[:1] * 2)
    right = right.roll(1, dims=1)
    if not alike:
        left = left * torch.linspace(0, 15, 300).exp()[:, None]
    dense = (left @ right.T).flatten()
    looked, find = [], torch.Tensor.aminmax
    monkeypatch.setattr(torch.Tensor, "aminmax", lambda x: looked.append(1) or find(x))
    high, low = extreme_products(left, right, 5, tile=20)
    for end, signed in ((high, dense), (low, -dense)):
        assert torch.equal(end.rows * 300 + end.columns, signed.topk(5).indices)
    assert len(looked) == 225 if alike else len(looked) < 60


def test_of_equal_products_the_first_come_first():
    """All entries tie, then all but one; neither norms nor tiles may choose among them."""
    ones = torch.ones(40, 3)
    high, low = extreme_products(ones, ones, 5, tile=7)
    assert high.rows.tolist() == low.rows.tolist() == [0] * 5
    assert high.columns.tolist() == low.columns.tolist() == [0, 1, 2, 3, 4]
    ones[33] = 2
    high, low = extreme_products(ones, ones, 3, tile=7)
    assert list(zip(high.rows.tolist(), high.columns.tolist(), strict=True)) == [
        (33, 33), (0, 33), (1, 33),
    ]  # fmt: skip
    zeros = torch.zeros(40, 3)
    assert extreme_products(zeros, zeros, 2, tile=7)[1].columns.tolist() == [0, 1]


def test_rounding_in_a_tile_does_not_choose():
    """Products that float32 cannot tell apart are ordered by their float64 values."""
    left = torch.tensor([[1.0, 1.0]])
    right = torch.tensor([[4096.0, 0.0], [4096.0, 1e-4], [4096.0, 2e-4]])
    assert len((left @ right.T).unique()) == 1
    high, _ = extreme_products(left, right, 1)
    assert high.columns.tolist() == [2]


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
