"""Norms of all products of two families, both ways, against dense ones in float64."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from wvprobe import _products
from wvprobe._products import (
    Readers,
    core_norms,
    frobenius,
    gram_norms,
    joined,
    layer_blocks,
    prefer_grams,
)

WAYS = pytest.mark.parametrize("norms", [core_norms, gram_norms])
# n writers, n lefts, readers a left, d, s, r, t; the last is wider than a tile of a Gram.
SHAPES = [
    (3, 2, 1, 13, 5, 3, 3),
    (5, 2, 3, 11, 7, 5, 3),
    (1, 1, 1, 7, 1, 2, 2),
    (2, 3, 2, 277, 5, 7, 7),
]


def families(n, n_left, group, d, s, r, t, dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    writers, left, right = normal(n, s, d), normal(n_left, d, r), normal(n_left * group, t, r)
    whole = torch.stack([left[i // group] @ right[i].T for i in range(n_left * group)])
    size = frobenius(whole)[:, None, None]
    writers = writers / frobenius(writers)[:, None, None]
    readers = Readers(left.to(dtype), (right / size).to(dtype))
    expected = torch.stack([torch.stack([(a @ b).norm() for b in whole / size]) for a in writers])
    return writers.to(dtype), readers, expected


@WAYS
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_to_dense(norms, shape, monkeypatch):
    writers, readers, expected = families(*shape)
    torch.testing.assert_close(norms(writers, readers), expected, rtol=1e-9, atol=1e-9)
    whole = Readers(readers.whole(), None)
    torch.testing.assert_close(norms(writers, whole), expected, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(_products, "_CHUNK_BYTES", 1)
    torch.testing.assert_close(norms(writers, readers), expected, rtol=1e-9, atol=1e-9)


@WAYS
@pytest.mark.parametrize("shape", SHAPES)
def test_single_precision(norms, shape):
    writers, readers, expected = families(*shape, dtype=torch.float32)
    assert (norms(writers, readers) - expected).abs().max() < 1e-6


@WAYS
def test_orthogonal_pairs_have_none(norms):
    """Grams alone would leave the root of a rounding error, 1e-4."""
    generator = torch.Generator().manual_seed(1)
    turn = torch.linalg.qr(torch.randn(40, 40, generator=generator, dtype=torch.float64)).Q
    writers = torch.zeros(3, 1, 40, dtype=torch.float64)
    writers[:, :, :20] = torch.randn(3, 1, 20, generator=generator)
    readers = torch.zeros(4, 40, 1, dtype=torch.float64)
    readers[1:, 20:] = torch.randn(3, 20, 1, generator=generator)
    readers[0, 3] = 1.0
    writers, readers = (writers @ turn.T).float(), (turn @ readers).float()
    writers = writers / frobenius(writers)[:, None, None]
    readers = readers / frobenius(readers)[:, None, None]
    found = norms(writers, Readers(readers, None))
    assert found[:, 1:].max() < 1e-6
    torch.testing.assert_close(found[:, 0], (writers @ readers[0]).abs()[:, 0, 0])


def test_norms_in_single_precision_are_accurate():
    x = torch.randn(3, 300, 200, generator=torch.Generator().manual_seed(2))
    expected = x.double().pow(2).sum((1, 2)).sqrt()
    assert ((frobenius(x) - expected) / expected).abs().max() < 1e-6


def test_readers_of_layers_join():
    _, readers, _ = families(3, 2, 3, 11, 7, 5, 3)
    both = joined(iter([readers, readers]), 2)
    assert isinstance(both, Readers)
    torch.testing.assert_close(both.whole(), readers.whole().repeat(2, 1, 1))
    assert joined([Readers(readers.left, None)] * 2, 2).right is None


def test_the_cheaper_way_is_taken():
    # SmolLM2's and GPT-2 small's shapes; then Llama-3-8B's keys, shared by four heads each.
    assert prefer_grams(270, 270, 3, 576, 64, 64, (1, 1))
    assert prefer_grams(144, 144, 1, 768, 64, 64, (1, 1))
    assert not prefer_grams(1024, 1024, 4, 4096, 128, 128, (8, 4))
    assert not prefer_grams(32, 32, 1, 1024, 8, 8, (1, 1))  # small heads in a wide stream


@pytest.mark.parametrize(
    ("n", "n_left", "group", "d", "s", "r"),
    [
        (13, 11, 1, 53, 23, 29),
        (13, 11, 1, 53, 3, 5),
        (7, 5, 6, 61, 31, 11),
        (7, 5, 6, 277, 31, 37),
        (11, 13, 1, 383, 127, 131),
        (17, 2, 2, 191, 67, 31),
        (3, 2, 3, 197, 23, 41),
    ],
)
def test_the_way_taken_multiplies_less(n, n_left, group, d, s, r):
    """As torch counts multiplications; Grams of well-conditioned pairs are computed once."""
    writers, readers, _ = families(n, n_left, group, d, s, r, r)
    if group == 1:
        readers = Readers(readers.whole(), None)
    counts = {}
    for way in (core_norms, gram_norms):
        with FlopCounterMode(display=False) as counted:
            way(writers, readers)
        counts[way] = counted.get_total_flops()
    grams = prefer_grams(n, n_left * group, group, d, s, r, (1, 1))
    assert grams == (counts[gram_norms] < counts[core_norms])
    assert not 0.9 < counts[gram_norms] / counts[core_norms] < 1.1  # or it would hang on a hair


def test_blocks_cover_all_layers():
    assert layer_blocks(7, 10, 30) == [range(0, 3), range(3, 6), range(6, 7)]
    assert layer_blocks(2, 10, 3) == [range(0, 1), range(1, 2)]
