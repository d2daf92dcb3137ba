"""Small decompositions run on one thread, and leave the number of threads as it was."""

import pytest
import torch

from wvprobe import _decompositions
from wvprobe._decompositions import LARGE, eigh, eigvalsh, svd, svdvals


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(7, 5, 5), (3, LARGE), (LARGE, LARGE)])
def test_threads_are_one_for_small_matrices_and_come_back(shape, two_threads):
    seen = []
    counting = _decompositions._on_one_thread(lambda x: seen.append(torch.get_num_threads()))
    counting(torch.zeros(shape))
    assert seen == [1 if min(shape[-2:]) < LARGE else 2]
    assert torch.get_num_threads() == 2


def test_threads_come_back_when_it_fails(two_threads):
    with pytest.raises(RuntimeError):
        eigh(torch.zeros(2, 3))
    assert torch.get_num_threads() == 2


def test_numbers_are_torchs_own(two_threads):
    x = torch.randn(5, 13, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u, s, vh = svd(x, full_matrices=False)
    torch.testing.assert_close(u * s[:, None] @ vh, x)
    torch.testing.assert_close(svdvals(x), s)
    square = x.mT @ x
    values, vectors = eigh(square)
    torch.testing.assert_close(vectors * values[:, None] @ vectors.mT, square)
    torch.testing.assert_close(eigvalsh(square), values)
    torch.testing.assert_close(values.flip(-1).sqrt(), s)
