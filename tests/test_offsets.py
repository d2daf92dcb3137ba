"""Scores by offset against the scores of all pairs, and against attention on real text."""

import math
from dataclasses import replace

import pytest
import torch

from wvprobe._rotary import Rotary
from wvprobe._types import Result
from wvprobe.activations import read_sites
from wvprobe.datasets import load_prose
from wvprobe.errors import InputError, ShapeError, UnsupportedError
from wvprobe.heads import HeadWeights
from wvprobe.inputs import mean_input
from wvprobe.offsets import offset_profile
from wvprobe.testing import induction_model, tiny_model

OFFSETS = (0, 1, 2, 7, 18, -1, -18)


def a_mean(heads, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads.n_layers, heads.d_model, generator=generator).double()


def scores_by_offset(heads, mean, layer):
    """b(Δ) from the scores of all pairs of 19 tokens that all are μ, [head, offset]."""
    scores = heads.scores(mean[layer].expand(19, -1), layer)
    if heads.slopes is not None:  # the slope multiplies the key's position, not the offset
        scores = scores - heads.slopes.double()[:, None, None] * torch.arange(19)[:, None]
    pairs = [(18, 18 - offset) if offset >= 0 else (18 + offset, 18) for offset in OFFSETS]
    return torch.stack([scores[:, i, j] for i, j in pairs], dim=-1)


@pytest.mark.parametrize(
    "family", ["bloom", "gpt_neox", "phi", "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3"]
)
def test_profiles_equal_the_scores_of_all_pairs_in_float64(family):
    heads = HeadWeights.from_model(tiny_model(family, dtype="float64"))
    mean = a_mean(heads)
    found = offset_profile(heads, OFFSETS, mean_input=mean)
    assert found.profile.dtype == torch.float64
    for layer in range(heads.n_layers):
        expected = scores_by_offset(heads, mean, layer)
        torch.testing.assert_close(found.profile[layer], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("adjacent", [False, True])
def test_partial_neighbouring_and_scaled_rotation(adjacent):
    """Against the circuit itself: 2 of 3 planes turn, and YaRN's factor enters squared."""
    shape = {"W_Q": (2, 6, 13, 7), "W_K": (2, 3, 13, 7), "W_V": (2, 3, 13, 5), "W_O": (2, 6, 5, 13)}
    shape |= {"b_Q": (2, 6, 7), "b_K": (2, 3, 7)}
    generator = torch.Generator().manual_seed(4)
    given = {name: torch.randn(s, generator=generator).double() for name, s in shape.items()}
    frequencies = torch.tensor([1.0, 0.01], dtype=torch.float64)
    rotary = Rotary(frequencies, scaling=1.3, adjacent=adjacent)
    heads = HeadWeights.from_tensors(**given, rotary=rotary)
    mean = a_mean(heads)
    found = offset_profile(heads, OFFSETS, mean_input=mean)
    for layer, head, place in ((0, 0, 3), (1, 5, 4), (1, 2, 5)):
        circuit = heads.qk(layer, head, offset=OFFSETS[place])
        expected = circuit.bilinear(mean[layer], mean[layer])
        torch.testing.assert_close(found.profile[layer, head, place], expected, rtol=1e-9, atol=0)
    # A layer may be without rotation (SmolLM3), or turn fewer planes.
    mixed = replace(heads, rotary=(None, Rotary(frequencies[:1], adjacent=adjacent)))
    found = offset_profile(mixed, OFFSETS, mean_input=mean)
    assert not found.shares[0].any() and float(found.unrotated[0].min()) == pytest.approx(1.0)
    assert found.frequencies.isnan().tolist() == [[True], [False]]
    flat = mixed.qk(0, 4).bilinear(mean[0], mean[0])
    torch.testing.assert_close(found.profile[0, 4], flat.expand(len(OFFSETS)), rtol=1e-9, atol=0)
    assert set(found.shares_frame()["layer"] * 10 + found.shares_frame()["plane"]) == {-1, 9, 10}


@pytest.mark.parametrize("family", ["bloom", "phi", "llama", "qwen3", "gemma3"])
def test_shares_are_inner_products_of_the_planes(family):
    heads = HeadWeights.from_model(tiny_model(family, dtype="float64"))
    found = offset_profile(heads, OFFSETS, mean_input=a_mean(heads))
    total = found.shares.sum(dim=-1) + found.unrotated
    torch.testing.assert_close(total, torch.ones_like(total), rtol=1e-12, atol=0)
    both = found.position_share + found.content_share
    torch.testing.assert_close(both, torch.ones_like(both), rtol=1e-12, atol=0)
    layer, head = 1, heads.n_heads - 1
    circuit = heads.qk(layer, head, offset=0)
    dense = circuit.matrix()
    planes = 0 if heads.rotary[layer] is None else heads.rotary[layer].inv_freq.shape[0]
    for plane in range(planes):
        dims = [plane, plane + planes]
        part = circuit.left[:, dims] @ circuit.right[dims]
        expected = (part * dense).sum() / dense.square().sum()
        torch.testing.assert_close(found.shares[layer, head, plane], expected)
    frame = found.shares_frame()
    sums = frame.groupby(["layer", "head"])["share"].sum()
    assert sums.tolist() == pytest.approx([1.0] * len(sums))


def test_position_is_what_turns_a_full_circle_in_time():
    """Frequencies 1 and 0.01 have wavelengths of 6.3 and 628 tokens."""
    shape = {"W_Q": (1, 1, 5, 6), "W_K": (1, 1, 5, 6), "W_V": (1, 1, 5, 2), "W_O": (1, 1, 2, 5)}
    generator = torch.Generator().manual_seed(4)
    given = {name: torch.randn(s, generator=generator).double() for name, s in shape.items()}
    rotary = Rotary(torch.tensor([1.0, 0.01], dtype=torch.float64))
    heads = HeadWeights.from_tensors(**given, rotary=rotary)
    mean = a_mean(heads)

    def position(offsets, **given):
        return float(offset_profile(heads, offsets, mean_input=mean, **given).position_share)

    fast, slow = offset_profile(heads, [0], mean_input=mean).shares[0, 0].tolist()
    assert position(range(100)) == pytest.approx(fast)
    assert position([-629]) == pytest.approx(fast + slow)
    assert position([0, 1]) == 0.0  # 1 radian a token closes no circle within 2 π
    assert position([0, 1], wavelength=7) == pytest.approx(fast)
    with pytest.raises(InputError, match="`wavelength` must be a finite number above 0"):
        position([0], wavelength=0)


def test_windows_and_the_future_are_masked_and_never_preferred(tiny):
    heads = HeadWeights.from_model(tiny("gemma2"))
    assert heads.sliding_window == (5, None, 5)
    offsets = (-2, 0, 1, 4, 5, 40)
    found = offset_profile(heads, offsets, mean_input=a_mean(heads))
    assert found.masked.tolist()[0] == [True, False, False, False, True, True]
    assert found.masked.tolist()[1] == [True] + [False] * 5
    assert not found.profile.isnan().any()  # the raw score exists all the same
    weights = found.weights()
    assert not weights.masked_select(found.masked[:, None].expand(weights.shape)).any()
    capped = 3.0 * torch.tanh(found.profile[1, 2, 1:] / 3.0)  # Gemma's cap acts before the softmax
    torch.testing.assert_close(weights[1, 2, 1:], capped.softmax(-1))
    frame = found.to_frame()
    for row in frame.to_dict("records"):
        layer, head = row["layer"], row["head"]
        seen = [p for p in range(6) if not found.masked[layer, p]]
        best = max(seen, key=lambda p: float(found.profile[layer, head, p]))
        assert row["preferred_offset"] == offsets[best]
        assert row["preferred_weight"] == pytest.approx(float(weights[layer, head, best]))
        assert row["score"] == pytest.approx(float(found.profile[layer, head, best]))
    long = found.profile_frame()
    assert len(long) == found.profile.numel()
    assert long.query("layer == 0 and offset == 5")["masked"].all()
    assert list(long.columns) == ["layer", "head", "offset", "score", "weight", "masked"]


def test_where_nothing_is_visible_nothing_is_preferred(tiny):
    heads = HeadWeights.from_model(tiny("mistral"))
    found = offset_profile(heads, [7, 9], mean_input=a_mean(heads))
    assert found.masked.all()
    frame = found.to_frame()
    assert frame["preferred_offset"].isna().all() and frame["preferred_weight"].isna().all()
    assert frame["score"].isna().all()
    assert "No layer sees" in found.figure().layout.title.text


def test_a_zero_head_has_no_shares_and_no_nan(tiny):
    heads = HeadWeights.from_model(tiny("llama"))
    queries = heads.W_Q.clone()
    queries[1, 3] = 0
    found = offset_profile(replace(heads, W_Q=queries), range(9), mean_input=a_mean(heads))
    assert not found.shares[1, 3].any() and not found.unrotated[1, 3].any()
    assert not found.profile[1, 3].any() and not found.profile.isnan().any()
    assert found.to_frame().query("layer == 1 and head == 3")["preferred_weight"].iloc[
        0
    ] == pytest.approx(1 / 9)


def test_positions_without_offsets_are_refused_by_name(tiny):
    for family in ("gpt2", "opt", "bert"):
        heads = HeadWeights.from_model(tiny(family))
        with pytest.raises(UnsupportedError, match=f"tiny:{family} has learned positions.*W_pos"):
            offset_profile(heads, range(5), mean_input=a_mean(heads))
    bare = HeadWeights.from_tensors(
        W_Q=torch.ones(1, 1, 5, 2),
        W_K=torch.ones(1, 1, 5, 2),
        W_V=torch.ones(1, 1, 5, 2),
        W_O=torch.ones(1, 1, 2, 5),
    )
    with pytest.raises(UnsupportedError, match="no positions.*'pattern'"):
        offset_profile(bare, range(5), mean_input=torch.ones(1, 5))


def test_wrong_arguments_are_told(tiny):
    heads = HeadWeights.from_model(tiny("llama"))
    mean = a_mean(heads)
    with pytest.raises(InputError, match=r"`mean_input` must be .*mean_input\(model\)"):
        offset_profile(heads, range(5))
    with pytest.raises(ShapeError, match=r"\[3, 42\].*Got shape \[42\]"):
        offset_profile(heads, range(5), mean_input=mean[0])
    with pytest.raises(InputError, match="`mean_input` must be finite"):
        offset_profile(heads, range(5), mean_input=mean * float("nan"))
    with pytest.raises(InputError, match="`mean_input` must be a tensor. Got 'InputResult'"):
        offset_profile(heads, range(5), mean_input=mean_input(tiny("llama"), "a power bank"))
    for offsets in ([], [1, 1], [0.5], [True]):
        with pytest.raises(InputError, match="`offsets` must be"):
            offset_profile(heads, offsets, mean_input=mean)
    assert offset_profile(heads, torch.arange(3), mean_input=mean).offsets == (0, 1, 2)


def test_the_previous_token_head_of_the_induction_model_prefers_offset_one(tmp_path):
    model = induction_model()
    heads = HeadWeights.from_model(model)
    short = [text for text in load_prose("calibration") if len(text) < 250]
    mean = mean_input(model, short).mean
    found = offset_profile(heads, range(40), mean_input=mean)
    frame = found.to_frame().set_index(["layer", "head"])
    assert frame.loc[(0, 0), "preferred_offset"] == 1
    assert frame.loc[(0, 0), "preferred_weight"] > 0.99
    # Three planes that look one step back: at Δ = 0 each has the cosine of one step's angle.
    angles = 1e12 ** (-torch.arange(3) / 27)
    expected = angles.cos() / angles.cos().sum()
    assert found.shares[0, 0, :3].tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    # Two of them, of wavelengths 6.3 and 17, close a circle within 39 tokens; the third needs 49.
    assert frame.loc[(0, 0), "position_share"] == pytest.approx(float(found.shares[0, 0, :2].sum()))
    # The induction head matches content: slow planes, and no offset of its own.
    assert frame.loc[(1, 1), "content_share"] == pytest.approx(1.0)
    assert frame.loc[(1, 1), "preferred_weight"] < 0.05
    title = found.figure().layout.title.text
    assert "L0H0" in title and "at offset 1" in title
    again = Result.load(found.save(tmp_path / "profile"))
    assert again.to_frame().equals(found.to_frame())


def attention_by_offset(model, texts, size):
    """Mean weight at each offset over all queries that reach so far, BOS left out, [.., offset]."""
    total, count = 0.0, torch.zeros(size, dtype=torch.float64)
    for text in texts:
        seen = read_sites(model, text, "pattern")
        pattern = seen["pattern"][0].double()[..., 1:, 1:]
        pattern = pattern / pattern.sum(dim=-1, keepdim=True)
        rows = torch.zeros(*pattern.shape[:2], size, dtype=torch.float64)
        for offset in range(min(size, pattern.shape[-1])):
            diagonal = pattern.diagonal(-offset, -2, -1)
            rows[..., offset] = diagonal.sum(dim=-1)
            count[offset] += diagonal.shape[-1]
        total = total + rows
    return total / count


def spearman(a, b):
    ranks = [x.argsort(dim=-1).argsort(dim=-1).double() for x in (a, b)]
    centred = [x - x.mean(dim=-1, keepdim=True) for x in ranks]
    return torch.cosine_similarity(*centred, dim=-1)


@pytest.mark.slow
@pytest.mark.real_model
def test_profiles_foretell_the_attention_of_smollm2(smollm2):
    """μ from one half of the prose, attention on paragraphs of the other half."""
    heads = HeadWeights.from_model(smollm2)
    mean = mean_input(smollm2, load_prose("calibration")[::6]).mean
    found = offset_profile(heads, range(32), mean_input=mean)
    texts = [text for text in load_prose("held-out")[::4] if len(text) > 150][:10]
    attention = attention_by_offset(smollm2, texts, 32)
    assert spearman(found.profile, attention).median() > 0.9
    strong = attention[..., 1] > 0.4
    assert int(strong.sum()) >= 7
    preferred = torch.tensor(found.to_frame()["preferred_offset"].tolist()).reshape(30, 9)
    assert (preferred[strong] == 1).all()
    assert found.wavelength == 31 and math.isclose(float(found.frequencies[0, 0]), 1.0)
