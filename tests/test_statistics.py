"""Many tests at once, and moments of random orientations."""

import pytest
import scipy.stats
import torch

from wvprobe._statistics import benjamini_hochberg, haar_moments


def test_benjamini_hochberg_equals_scipy():
    p = torch.rand(7, 11, generator=torch.Generator().manual_seed(3), dtype=torch.float64) ** 3
    p[0, :3] = p[5, 2]  # ties
    expected = scipy.stats.false_discovery_control(p.flatten().numpy())
    torch.testing.assert_close(benjamini_hochberg(p).flatten(), torch.from_numpy(expected))


def test_what_is_not_tested_is_not_counted():
    nan = float("nan")
    q = benjamini_hochberg(torch.tensor([nan, 0.01, 0.04, nan, 0.9]))
    torch.testing.assert_close(
        q, torch.tensor([nan, 0.03, 0.06, nan, 0.9]), equal_nan=True, rtol=1e-6, atol=0
    )
    assert benjamini_hochberg(torch.full((2,), nan)).isnan().all()
    assert benjamini_hochberg(torch.empty(0)).shape == (0,)


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
