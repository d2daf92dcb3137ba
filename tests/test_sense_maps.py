"""Sense maps against scikit-learn, brute force and planted clusters."""

import pytest
import torch

from wvprobe._types import Result
from wvprobe.activations import capture
from wvprobe.datasets import SenseDataset, load_senses
from wvprobe.errors import InputError
from wvprobe.sense_maps import _plane, _told_apart, sense_map


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


def test_wrong_inputs(tiny):
    with pytest.raises(InputError, match="boat"):
        sense_map(tiny("llama"), "boat")
    with pytest.raises(InputError, match=r"`layer` must be in 0\.\.3"):
        sense_map(tiny("llama"), "bank", layer=4)
    one = SenseDataset("one", load_senses().only("bank").items[:3])
    with pytest.raises(InputError, match="two senses and two sentences of each"):
        sense_map(tiny("llama"), "bank", dataset=one)


@pytest.mark.real_model
def test_real_models_tell_the_senses_of_bank_apart(smollm2, minilm):
    for model in (smollm2, minilm):
        found = sense_map(model, "bank")
        assert found.interval[0] > found.control[1]
