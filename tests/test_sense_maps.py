"""Sense maps against scikit-learn, brute force and planted clusters."""

import pytest
import torch

from wvprobe._types import Result
from wvprobe.activations import capture
from wvprobe.datasets import SenseDataset, load_senses
from wvprobe.errors import InputError
from wvprobe.sense_maps import _plane, _told_apart, _turned, sense_map, sense_map_by_layer


def test_the_plane_is_that_of_scikit_learn():
    from sklearn.decomposition import PCA

    x = torch.randn(19, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    points, explained = _plane(x)
    pca = PCA(2).fit(x.numpy())
    expected = torch.from_numpy(pca.transform(x.numpy()))
    signs = (points * expected).sum(dim=0).sign()
    torch.testing.assert_close(points, expected * signs)
    assert explained.tolist() == pytest.approx(pca.explained_variance_ratio_.tolist())


def test_left_out_centroids_by_brute_force():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(29, 7, dtype=torch.float64, generator=generator)
    labels = torch.randint(3, (29,), generator=generator)
    right = 0
    for i in range(29):
        kept = torch.arange(29) != i
        others = [x[kept & (labels == sense)].mean(dim=0) for sense in range(3)]
        likeness = torch.stack([torch.cosine_similarity(x[i], c, dim=0) for c in others])
        right += int(likeness.argmax() == labels[i])
    assert _told_apart(x, labels) == right


def test_planted_senses_are_told_apart_and_shuffled_ones_are_not():
    labels = torch.arange(3).repeat_interleave(8)
    generator = torch.Generator().manual_seed(2)
    x = torch.eye(11, dtype=torch.float64)[labels] + 0.05 * torch.randn(
        24, 11, dtype=torch.float64, generator=generator
    )
    assert _told_apart(x, labels) == 24
    assert _told_apart(x, labels[torch.randperm(24, generator=generator)]) < 16


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_map_of_a_word(family, tiny, tmp_path):
    model = tiny(family)
    found = sense_map(model, "bank")
    items = load_senses().only("bank").items
    assert found.layer == 2 and len(found.points) == len(items)
    vectors = capture(model, [i.sentence for i in items], "stream", words="bank", layers=2)
    expected, _ = _plane(vectors["stream"][:, 0].double())
    torch.testing.assert_close(found.points, expected)
    assert found.interval[0] < found.accuracy < found.interval[1]
    assert 0.1 < found.control[0] < 0.4 and found.control[0] < found.control[1]
    frame = found.to_frame()
    assert list(frame["sense"]) == [item.sense for item in items]
    assert Result.load(found.save(tmp_path)).to_frame().equals(frame)
    assert sense_map(model, "bank", seed=1).control != found.control


def test_planes_of_all_streams_are_those_of_one(tiny, tmp_path):
    model = tiny("llama")
    found = sense_map_by_layer(model, "bank")
    assert found.points.shape == (4, len(found.senses), 2)
    for layer in range(1, 4):
        one = sense_map(model, "bank", layer=layer)
        # A plane that is turned and scaled keeps its distances, but for the scale.
        distances = torch.cdist(one.points, one.points)
        turned = torch.cdist(found.points[layer], found.points[layer])
        scale = one.points.square().mean().sqrt()
        torch.testing.assert_close(turned * scale, distances, rtol=1e-4, atol=1e-4)
        assert float(found.accuracy[layer]) == pytest.approx(one.accuracy)
        assert float(found.control[layer]) == one.control[1]
        assert float(found.explained[layer]) == pytest.approx(float(one.explained.sum()))
    frame = found.to_frame()
    assert len(frame) == 4 * len(found.senses)
    assert Result.load(found.save(tmp_path)).to_frame().equals(frame)


def test_a_turned_plane_lies_on_the_one_before():
    points = torch.randn(9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mirrored = points @ torch.tensor([[0.6, 0.8], [0.8, -0.6]], dtype=torch.float64)
    torch.testing.assert_close(_turned(mirrored, points), points)


def test_wrong_inputs(tiny):
    with pytest.raises(InputError, match="boat"):
        sense_map(tiny("llama"), "boat")
    with pytest.raises(InputError, match=r"`layer` must be in 0\.\.3"):
        sense_map(tiny("llama"), "bank", layer=4)
    one = SenseDataset("one", load_senses().only("bank").items[:3])
    with pytest.raises(InputError, match="two senses and two sentences of each"):
        sense_map(tiny("llama"), "bank", dataset=one)


@pytest.mark.slow
@pytest.mark.real_model
def test_real_models_tell_the_senses_of_bank_apart(smollm2, minilm):
    for model in (smollm2, minilm):
        found = sense_map(model, "bank")
        assert found.interval[0] > found.control[1]
