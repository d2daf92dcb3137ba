"""Intervals and corrections against values worked out by hand, and against theory."""

import pytest
import scipy.stats
import torch

from wvprobe._statistics import (
    benjamini_hochberg,
    haar_moments,
    mean_interval,
    t_interval,
    wilson_interval,
)


def test_benjamini_hochberg_by_hand():
    """m p / rank: .04, .02, .16/3, .8; from the largest down, each at most the one above it."""
    p = torch.tensor([[0.01, 0.005], [0.04, 0.8]], dtype=torch.float64)
    expected = torch.tensor([[0.02, 0.02], [0.16 / 3, 0.8]], dtype=torch.float64)
    torch.testing.assert_close(benjamini_hochberg(p), expected)


def test_a_nan_is_no_hypothesis():
    p = torch.tensor([0.02, torch.nan, 0.03], dtype=torch.float64)
    found = benjamini_hochberg(p)
    torch.testing.assert_close(found[[0, 2]], torch.tensor([0.03, 0.03], dtype=torch.float64))
    assert bool(found[1].isnan())
    assert bool(benjamini_hochberg(torch.tensor([torch.nan])).isnan().all())


def test_the_interval_of_a_mean_is_as_wide_as_theory_says():
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(400, 2, 5, generator=generator, dtype=torch.float64)
    low, high = mean_interval(values)
    assert low.shape == (2, 5)
    width = 2 * 1.96 * values.std(dim=0) / 400**0.5
    torch.testing.assert_close(high - low, width, rtol=0.08, atol=0)
    middle = (low + high) / 2
    torch.testing.assert_close(middle, values.mean(dim=0), rtol=0, atol=0.01)


def test_the_interval_repeats_with_its_seed():
    values = torch.rand(50, 1)
    first, again, other = (mean_interval(values, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first[0], again[0]) and not torch.equal(first[0], other[0])


def test_a_constant_has_an_interval_of_no_width():
    low, high = mean_interval(torch.full((9, 1), 0.25))
    assert float(low) == pytest.approx(0.25) and float(high) == pytest.approx(0.25)


def test_interval_of_a_share_as_published():
    """Newcombe 1998, table I: 81 of 263 gives .2553 to .3662; 0 of 20 gives 0 to .1611."""
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert wilson_interval(20, 20)[1] == 1.0


def test_benjamini_hochberg_equals_scipy():
    p = torch.rand(7, 11, generator=torch.Generator().manual_seed(3), dtype=torch.float64) ** 3
    p[0, :3] = p[5, 2]  # ties
    expected = scipy.stats.false_discovery_control(p.flatten().numpy())
    torch.testing.assert_close(benjamini_hochberg(p).flatten(), torch.from_numpy(expected))


def test_moments_are_those_of_random_rotations():
    d, draws = 7, 20_000
    generator = torch.Generator().manual_seed(5)
    a, b = (torch.randn(d, r, generator=generator, dtype=torch.float64) for r in (2, 5))
    a, b = a @ a.T, b @ b.T
    q, r = torch.linalg.qr(torch.randn(draws, d, d, generator=generator, dtype=torch.float64))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # Haar, and not QR's convention
    values = torch.einsum("ij,njk,kl,nil->n", a, q, b, q)
    mean, deviation = haar_moments(a.trace(), (a**2).sum(), b.trace(), (b**2).sum(), d)
    assert float(values.mean()) == pytest.approx(float(mean), abs=4 * float(deviation) / draws**0.5)
    assert float(values.std()) == pytest.approx(float(deviation), rel=0.03)


def test_what_no_rotation_changes_has_no_deviation():
    one = torch.ones(())
    assert float(haar_moments(7 * one, 7 * one, 3 * one, 3 * one, 7)[1]) == 0.0
    mean, deviation = haar_moments(one, one, 2 * one, 4 * one, 1)
    assert (float(mean), float(deviation)) == (2.0, 0.0)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 11, 40])
def test_t_intervals_are_scipys(n):
    values = torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    low, high = t_interval(values)
    mean, error = values.mean(dim=0), values.std(dim=0) / n**0.5
    expected = scipy.stats.t.interval(0.95, n - 1, loc=mean, scale=error)
    for found, wanted in zip((low, high), expected, strict=True):
        torch.testing.assert_close(found, torch.as_tensor(wanted), atol=1e-12, rtol=1e-12)


def test_one_value_has_no_t_interval_and_equal_ones_have_no_width():
    low, high = t_interval(torch.ones(1, 2))
    assert bool(low.isnan().all()) and bool(high.isnan().all())
    low, high = t_interval(torch.full((5,), 0.25))
    assert float(low) == float(high) == 0.25
