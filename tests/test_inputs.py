"""Means and covariances of what attention reads, against capture()."""

import pytest
import torch

from wvprobe.activations import capture
from wvprobe.datasets import load_prose
from wvprobe.errors import InputError
from wvprobe.heads import HeadWeights
from wvprobe.inputs import input_covariance, mean_input
from wvprobe.testing import tiny_model

TEXTS = ("The river bank is close to here.", "a power bank", "dropped into the river.")


def own_vectors(model, site, layer):
    """All tokens' vectors of a site, those that the tokenizer added left out, text by text."""
    rows = []
    for text in TEXTS:
        seen = capture(model, text, site)
        kept = [p for p, added in enumerate(seen.special[0]) if not added]
        rows.append(seen[site][0, kept, layer])
    return torch.cat(rows).double()


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "bert", "deepseek_v3"])
def test_moments_are_those_of_the_norms_output(family, tiny):
    model = tiny(family)
    found = input_covariance(model, TEXTS, fold_norm=False)
    for layer in (0, 2):
        x_hat = own_vectors(model, "attn_in", layer)
        assert found.n == len(x_hat)
        torch.testing.assert_close(found.mean[layer], x_hat.mean(0), rtol=1e-4, atol=1e-5)
        covariance = torch.cov(x_hat.T, correction=0)
        torch.testing.assert_close(found.covariance[layer], covariance, rtol=1e-4, atol=1e-5)
        second = x_hat.T @ x_hat / len(x_hat)
        torch.testing.assert_close(found.second_moment()[layer], second, rtol=1e-4, atol=1e-5)
        square = x_hat.square().sum(dim=1).mean()
        torch.testing.assert_close(found.mean_square[layer], square, rtol=1e-4, atol=1e-5)


def test_folded_means_are_what_folded_weights_read():
    model = tiny_model("gpt2", dtype="float64")
    heads = HeadWeights.from_model(model)
    found = mean_input(model, TEXTS)
    x_hat = heads.normalize(own_vectors(model, "resid_pre", 1), 1)
    torch.testing.assert_close(found.mean[1], x_hat.mean(dim=0), rtol=1e-12, atol=1e-12)
    assert found.covariance is None
    with pytest.raises(InputError, match="Use input_covariance"):
        found.second_moment()


def test_added_tokens_and_padding_do_not_count(tiny):
    assert own_vectors(tiny("bert"), "attn_in", 0).shape[0] == mean_input(tiny("bert"), TEXTS).n
    seen = capture(tiny("bert"), TEXTS, "attn_in")
    added = sum(sum(special) for special in seen.special)
    assert added == 6  # CLS and SEP of three texts
    assert mean_input(tiny("bert"), TEXTS).n == sum(map(len, seen.tokens)) - added


def test_chunks_change_nothing(tiny, monkeypatch):
    whole = input_covariance(tiny("llama"), TEXTS)
    monkeypatch.setattr("wvprobe.inputs._CHUNK_FLOATS", 1)
    split = input_covariance(tiny("llama"), TEXTS)
    torch.testing.assert_close(split.covariance, whole.covariance, rtol=1e-4, atol=1e-6)
    assert split.n == whole.n


def test_frame_and_figure(tiny):
    found = mean_input(tiny("llama"), TEXTS)
    frame = found.to_frame()
    assert frame["mean_share"].between(0, 1).all() and len(frame) == 3
    expected = found.mean[1].square().sum() / found.mean_square[1]
    assert frame["mean_share"][1] == pytest.approx(float(expected))
    title = found.figure().layout.title.text
    most = frame.loc[frame["mean_share"].idxmax()]
    assert f"{most['mean_share']:.0%}" in title and f"layer {int(most['layer'])}" in title
    assert f"n = {found.n}" in title


@pytest.mark.slow
def test_the_bundled_prose_is_the_default(tiny):
    model = tiny("gpt2", n_positions=1024)
    whole, short = mean_input(model, progress=False), mean_input(model, TEXTS)
    assert whole.n > 5000 and whole.provenance.settings["texts"] == len(load_prose("calibration"))
    assert not torch.allclose(whole.mean, short.mean)


def test_texts_without_words_are_refused(tiny):
    with pytest.raises(InputError, match="at least one text"):
        mean_input(tiny("llama"), [])
