"""Overlaps of subspaces: known ones, dense ones, and random ones."""

from dataclasses import replace

import pytest
import torch

from wvprobe import subspaces
from wvprobe._linalg import column_space
from wvprobe._types import Result
from wvprobe.errors import InputError
from wvprobe.heads import HeadWeights
from wvprobe.subspaces import subspace_overlap

KINDS = ("V", "OV", "OQ", "OK")


def heads_of(layers=3, n=4, kv=2, d=23, r=3, r_v=5, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return HeadWeights.from_tensors(
        W_Q=normal(layers, n, d, r),
        W_K=normal(layers, kv, d, r),
        W_V=normal(layers, kv, d, r_v),
        W_O=normal(layers, n, r_v, d),
    )


def projection(columns):
    return columns @ torch.linalg.pinv(columns)


def cosines(one, other):
    """By the definition: one best pair of unit vectors after another, through projections."""
    values = torch.linalg.svdvals(projection(one) @ projection(other))
    return values[: min(one.shape[1], other.shape[1])]


@pytest.mark.parametrize("kind", ["OV", "OQ", "OK"])
def test_what_heads_write_against_what_they_read(kind, monkeypatch):
    heads = heads_of()
    found = subspace_overlap(heads, kind)
    weights = {"V": heads.W_V, "Q": heads.W_Q, "K": heads.W_K}[kind[1]]
    r = weights.shape[-1]
    assert found.overlap.shape == (3, 4, 3, weights.shape[1])  # a key-value head once
    assert found.axes() == found.AXES["overlap"]
    for w, h, later, read in ((0, 1, 2, 1), (1, 3, 2, 0), (0, 0, 1, 1)):
        expected = cosines(heads.W_O[w, h].T, weights[later, read])
        at = (w, h, later, read)
        torch.testing.assert_close(found.overlap[at], (expected**2).sum() / min(5, r))
        torch.testing.assert_close(found.cosines[at], expected[:3])
        assert float(found.expected[at]) == pytest.approx(max(5, r) / 23)
    for w, later in ((0, 0), (2, 1)):
        assert found.overlap[w, :, later].isnan().all() and found.z[w, :, later].isnan().all()
    assert found.writer_ranks.unique().tolist() == [5]
    assert found.reader_ranks.unique().tolist() == [r]
    later_writers = [
        (cosines(heads.W_O[w, h].T, weights[earlier, read]) ** 2).sum() / min(5, r)
        for w in range(3)
        for earlier in range(w)
        for h in range(4)
        for read in range(weights.shape[1])
    ]
    control = float(torch.stack(later_writers).mean()) - max(5, r) / 23
    assert found.control == pytest.approx(control, abs=1e-9)
    monkeypatch.setattr(subspaces, "_NUMBERS", 1)  # a layer of readers at a time
    again = subspace_overlap(heads, kind)
    torch.testing.assert_close(again.overlap, found.overlap, equal_nan=True)
    torch.testing.assert_close(again.cosines, found.cosines, equal_nan=True)


def test_layers_values_together():
    heads = heads_of()
    found = subspace_overlap(heads, "V", n_cosines=20)
    assert found.axes() == ("layer", "other_layer") and found.overlap.shape == (3, 3)

    def joint(weights, layer):
        return torch.cat(list(weights[layer]), dim=1)

    expected = cosines(joint(heads.W_V, 0), joint(heads.W_V, 2))
    torch.testing.assert_close(found.overlap[0, 2], (expected**2).mean())
    torch.testing.assert_close(found.cosines[0, 2], expected)  # all 10 there are
    torch.testing.assert_close(found.overlap, found.overlap.T)
    torch.testing.assert_close(found.overlap.diagonal(), torch.ones(3).double())
    assert found.z.diagonal().isnan().all() and found.cosines[2, 0].isnan().all()
    assert found.writer_ranks.tolist() == [10] * 3
    assert float(found.expected[0, 1]) == pytest.approx(10 / 23)
    pairs = [(0, 1), (0, 2), (1, 2)]
    excess = [float(found.overlap[p]) - 10 / 23 for p in pairs]
    assert found.excess == pytest.approx(sum(excess) / 3)
    keys = [(cosines(joint(heads.W_K, a), joint(heads.W_K, b)) ** 2).mean() for a, b in pairs]
    assert found.control == pytest.approx(float(torch.stack(keys).mean()) - 6 / 23)


def test_random_weights_have_what_is_expected_of_random_spaces():
    """Gaussian matrices have Haar column spaces: z has mean 0 and variance 1."""
    found = subspace_overlap(heads_of(layers=9, n=6, kv=3, d=61, r=5, r_v=7), "OK", n_cosines=0)
    z = found.to_frame()["z"]
    assert len(z) == 36 * 18 and "cosine" not in found.to_frame()
    assert abs(z.mean()) < 4 / len(z) ** 0.5 and 0.85 < z.std() < 1.15
    assert abs(found.excess) < 0.005 and abs(found.control) < 0.005


def test_known_spaces():
    heads = heads_of(kv=4)
    W_V = heads.W_V.clone()
    eye = torch.eye(23, dtype=torch.float64)
    mix = torch.randn(5, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    written = heads.W_O[0, 2]
    W_V[1, 0] = written.T @ mix  # the same space by other vectors
    W_V[1, 1] = torch.linalg.svd(written).Vh[5:10].T  # orthogonal to it
    W_V[1, 2] = torch.cat([written[:2].T, eye[:, :3] - projection(written.T)[:, :3]], 1)
    found = subspace_overlap(replace(heads, W_V=W_V), "OV")
    expected = torch.tensor([1.0, 0.0, 2 / 5], dtype=torch.float64)
    torch.testing.assert_close(found.overlap[0, 2, 1, :3], expected, atol=1e-9, rtol=0)
    shown = found.cosines[0, 2, 1, 2]
    torch.testing.assert_close(shown, torch.tensor([1.0, 1.0, 0.0]).double(), atol=1e-7, rtol=0)
    assert found.z[0, 2, 1, 0] > 10 > -1 > found.z[0, 2, 1, 1]


def test_ranks_are_numerical():
    heads = heads_of()
    W_O, W_V = heads.W_O.clone().float(), heads.W_V.clone().float()
    W_O[0, 1, 2:] = W_O[0, 1, :1]  # two rows that differ
    W_O[0, 2] = 0.0
    W_V[2, 0, :, 4] = 2 * W_V[2, 0, :, 3]
    low = replace(heads, W_O=W_O, W_V=W_V)
    found = subspace_overlap(low, "OV")
    assert found.writer_ranks[0].tolist() == [5, 2, 0, 5]
    assert found.reader_ranks[2].tolist() == [4, 5]
    expected = cosines(W_O[0, 1, :2].T, W_V[2, 0, :, :4])
    torch.testing.assert_close(found.overlap[0, 1, 2, 0], (expected**2).sum() / 2)
    assert float(found.expected[0, 1, 2, 0]) == pytest.approx(4 / 23)
    assert found.cosines[0, 1, 2, 0, 2].isnan() and not found.cosines[0, 1, 2, 0, :2].isnan().any()
    assert found.overlap[0, 2].isnan().all()  # a head that writes nothing has no space
    assert found.excess == found.excess and found.control == found.control


def test_a_whole_stream_is_said_to_measure_nothing(tiny):
    found = subspace_overlap(heads_of(kv=4, d=19), "V")  # 4 · 5 values for 19 dimensions
    assert found.trivial and found.z.isnan().all() and found.writer_ranks.tolist() == [19] * 3
    torch.testing.assert_close(found.overlap, found.expected)
    assert "whole stream" in found.figure().layout.title.text
    # GPT-2's values together read everything that a LayerNorm lets pass, one dimension less.
    gpt2 = subspace_overlap(HeadWeights.from_model(tiny("gpt2")), "V")
    assert gpt2.dimension == 34 and gpt2.writer_ranks.tolist() == [34] * 3 and gpt2.trivial
    part = subspace_overlap(HeadWeights.from_model(tiny("gpt2")), "V", energy=0.5)
    assert not part.trivial and part.writer_ranks.max() < 20


def test_what_no_layer_norm_lets_pass_is_left_out_of_what_is_written(tiny):
    heads = HeadWeights.from_model(tiny("gpt2"))
    found = subspace_overlap(heads, "OK")
    centred = heads.W_O[0, 3].T - heads.W_O[0, 3].mean(-1)
    expected = cosines(centred.double(), heads.W_K[2, 1].double())
    assert float(found.overlap[0, 3, 2, 1]) == pytest.approx(float((expected**2).mean()), rel=1e-4)
    assert float(found.expected[0, 3, 2, 1]) == pytest.approx(7 / 34)
    assert subspace_overlap(HeadWeights.from_model(tiny("llama")), "OK").dimension == 42


def test_energy_cuts_spaces():
    x = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0]))  # shares 9, 4, 1 of 14
    assert [int(column_space(x, e).rank) for e in (0.6, 0.65, 0.95, 1.0)] == [1, 2, 3, 3]
    basis = column_space(x, 0.9).vectors
    torch.testing.assert_close((basis @ basis.T).diagonal(), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert column_space(torch.zeros(2, 3, 5)).rank.tolist() == [0, 0]
    heads = heads_of()
    assert subspace_overlap(heads, "V", energy=0.5).writer_ranks.max() < 10


def test_arguments_are_checked():
    heads = heads_of()
    with pytest.raises(InputError, match="'V', 'OV', 'OQ', 'OK'"):
        subspace_overlap(heads, "QK")
    for energy in (0, 1.5, float("nan")):
        with pytest.raises(InputError, match="`energy` must be a finite number above 0"):
            subspace_overlap(heads, "V", energy=energy)
    with pytest.raises(InputError, match="`n_cosines` must be an int of at least 0"):
        subspace_overlap(heads, "V", n_cosines=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_frame_figure_and_file(kind, tiny, tmp_path):
    found = subspace_overlap(HeadWeights.from_model(tiny("llama")), kind)
    frame = found.to_frame()
    numbers = ["overlap", "expected", "deviation", "z", "cosine"]
    assert list(frame.columns) == [*found.axes(), *numbers]
    readers = 6 if kind == "OQ" else 2
    assert len(frame) == (3 if kind == "V" else 3 * 6 * readers)
    at = tuple(frame.iloc[-1][: len(found.axes())].astype(int))
    assert frame["overlap"].iloc[-1] == pytest.approx(float(found.overlap[at]))
    assert not frame.isna().any().any()
    title = found.figure().layout.title.text
    assert f"{frame['overlap'].mean():.3f}" in title and f"{frame['expected'].mean():.3f}" in title
    heat = found.figure().data[0]
    assert heat.zmin == -heat.zmax and heat.zmid == 0
    back = Result.load(found.save(tmp_path))
    assert torch.equal(back.overlap.nan_to_num(), found.overlap.nan_to_num())


def test_one_layer_has_no_pair():
    found = subspace_overlap(heads_of(layers=1), "OV")
    assert len(found.to_frame()) == 0 and found.excess != found.excess
    assert "One layer" in found.figure().layout.title.text


@pytest.mark.slow
@pytest.mark.real_model
def test_layers_values_of_a_trained_model_overlap_little_more_than_random(smollm2):
    found = subspace_overlap(HeadWeights.from_model(smollm2), "V")
    assert found.writer_ranks.tolist() == [192] * 30 and found.dimension == 576
    assert 0.01 < found.excess < 0.03 and found.control > found.excess
