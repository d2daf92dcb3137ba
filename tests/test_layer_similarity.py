"""Likeness of streams against published formulas, rotations and unrelated spaces."""

import pytest
import torch

from wvprobe._types import Result
from wvprobe.contextual_drift import layer_similarity
from wvprobe.errors import InputError


def hsic1(k, m):
    """Song et al. 2012, eq. 5, written out."""
    n = len(k)
    k, m = k.clone().fill_diagonal_(0.0), m.clone().fill_diagonal_(0.0)
    one = torch.ones(n, dtype=k.dtype)
    third = one @ k @ m @ one
    second = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    return ((k @ m).trace() + second - 2 / (n - 2) * third) / (n * (n - 3))


def linear_cka(x, y):
    k, m = x @ x.T, y @ y.T
    return float(hsic1(k, m) / (hsic1(k, k) * hsic1(m, m)).sqrt())


def spaces(n=37, d=11):
    """Three streams: a random one, a rotated, scaled and shifted copy, and an unrelated one."""
    generator = torch.Generator().manual_seed(0)
    first, other = torch.randn(2, n, d, generator=generator)
    turn = torch.linalg.qr(torch.randn(d, d, generator=generator)).Q
    return torch.stack([first, 3 * first @ turn + 1, other], dim=1)


def test_cka_is_the_published_one():
    x = spaces()
    got = layer_similarity(x)
    for a in range(3):
        for b in range(3):
            expected = linear_cka(x[:, a].double(), x[:, b].double())
            assert float(got.cka[a, b]) == pytest.approx(expected, abs=1e-5)
    assert float(got.cka[0, 1]) == pytest.approx(1.0, abs=1e-5)
    assert got.n == got.n_procrustes == 37


def test_cka_of_unrelated_spaces_is_0_even_with_few_tokens():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 2, 400, generator=generator)
    got = layer_similarity(x)
    assert abs(float(got.cka[0, 1])) < 0.05
    centred = [(x[:, k] - x[:, k].mean(dim=0)).double() for k in (0, 1)]
    biased = (centred[0].T @ centred[1]).norm() ** 2 / (
        (centred[0].T @ centred[0]).norm() * (centred[1].T @ centred[1]).norm()
    )
    assert float(biased) > 0.8


@pytest.mark.parametrize("d", [11, 53])
def test_procrustes_and_its_chance(d):
    x = spaces(d=d)
    got = layer_similarity(x)
    assert float(got.procrustes[0]) == pytest.approx(1.0, abs=1e-5)
    a, b = ((x[:, k] - x[:, k].mean(dim=0)).double() for k in (1, 2))
    expected = torch.linalg.svdvals(a.T @ b).sum() / (a.norm() * b.norm())
    assert float(got.procrustes[1]) == pytest.approx(float(expected), abs=1e-5)
    # The copy's rows shuffled are unrelated, and with more dimensions than tokens look alike.
    assert float(got.procrustes_chance[0]) == pytest.approx(float(expected), abs=0.12)


def test_an_offset_common_to_all_items_changes_nothing():
    """Streams lie far from 0 in a few dimensions; single precision has no digits to lose there."""
    x = spaces()
    offset = 3e3 * torch.randn(1, 3, 11, generator=torch.Generator().manual_seed(5))
    got, far = layer_similarity(x), layer_similarity(x + offset)
    torch.testing.assert_close(far.cka, got.cka, atol=2e-3, rtol=0)
    torch.testing.assert_close(far.procrustes, got.procrustes, atol=2e-3, rtol=0)
    still = x.clone()
    still[:, 1] = 1.0  # a stream where nothing varies
    assert layer_similarity(still).procrustes.isnan().all()


def test_words_are_taken_off():
    generator = torch.Generator().manual_seed(2)
    words = [f"word {k}" for k in range(12) for _ in range(5)]
    what = torch.randn(12, 1, 13, generator=generator).repeat_interleave(5, dim=0)
    context = torch.randn(60, 2, 13, generator=generator)
    got = layer_similarity(5 * what + context, words)
    assert float(got.cka[0, 1]) > 0.8 and abs(float(got.cka_within[0, 1])) < 0.2
    x = (5 * what + context).double()
    means = x.reshape(12, 5, 2, 13).mean(dim=1).repeat_interleave(5, dim=0)
    expected = linear_cka((x - means)[:, 0], (x - means)[:, 1])
    assert float(got.cka_within[0, 1]) == pytest.approx(expected, abs=1e-5)
    assert bool(layer_similarity(x.float()).cka_within.isnan().all())


def test_the_error_is_the_jackknifes():
    x = spaces(n=20)
    words = [str(k) for k in range(20)]
    got = layer_similarity(x, words, seed=3)
    again = layer_similarity(x, words, seed=3)
    assert torch.equal(got.cka_error, again.cka_error)
    # Independent draws of such data spread as much as the error says.
    generator = torch.Generator().manual_seed(4)
    shared = torch.randn(400, 60, 1, 7, generator=generator)
    noise = torch.randn(400, 60, 2, 7, generator=generator)
    draws = [layer_similarity(s + n) for s, n in zip(shared[:60], noise[:60], strict=True)]
    spread = torch.stack([draw.cka[0, 1] for draw in draws]).std()
    error = torch.stack([draw.cka_error[0, 1] for draw in draws]).mean()
    assert 0.6 < float(error / spread) < 1.6


def test_frame_saving_and_wrong_inputs(tmp_path):
    got = layer_similarity(spaces())
    frame = got.to_frame()
    assert len(frame) == 6 and frame["procrustes"].notna().sum() == 2
    pairs = list(zip(frame["layer"], frame["layer2"], strict=True))
    assert pairs == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)]
    assert frame["cka"].tolist() == [float(got.cka[pair]) for pair in pairs]
    assert got.provenance.settings == {"items": 37, "groups": 10, "words": False}
    assert Result.load(got.save(tmp_path)).to_frame().equals(frame)
    with pytest.raises(InputError, match="at least four items"):
        layer_similarity(spaces(n=3))
    x = spaces()
    x[0, 0, 0] = torch.nan
    with pytest.raises(InputError, match="finite"):
        layer_similarity(x)
