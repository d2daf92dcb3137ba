"""Shared keys and values against dense optima, rotation, and heads planted to be alike."""

import pytest
import torch

from wvprobe import adapters
from wvprobe._rotary import Rotary
from wvprobe._types import Result
from wvprobe.activations import read_sites
from wvprobe.counterfactual import ResizePlan, ShareResult, resize_heads, share_kv_heads
from wvprobe.counterfactual._key_values import key_value_moments
from wvprobe.counterfactual._plans import planes_of
from wvprobe.counterfactual._shared_maps import (
    LayerMoments,
    balanced_groups,
    free_map,
    key_map,
    latent_map,
    relative_errors,
    rotation_average,
    similarity,
)
from wvprobe.datasets import load_prose
from wvprobe.errors import InputError, ShapeError, UnsupportedError
from wvprobe.plotting import figure
from wvprobe.testing import FAMILIES, tiny_model

TEXTS = (
    "The old bank by the river had been closed for years.",
    "A boat went slowly down to the sea.",
    "Nobody had asked the clerk why.",
)
QUICK = ("gpt2", "phi", "qwen3")
WITH_HEADS = [
    family if family in QUICK else pytest.param(family, marks=pytest.mark.slow)
    for family in FAMILIES
    if family != "deepseek_v3"
]
HALVES = torch.tensor([[0, 2], [1, 3]])
NEIGHBOURS = torch.tensor([[0, 1], [2, 3]])


def _normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _turn(d, seed=0):
    return torch.linalg.qr(_normal(d, d, seed=seed)).Q


def _square(*shape, seed=0):
    x = _normal(*shape, shape[-1], seed=seed)
    return x @ x.mT


def _layer(keys, values, planes=None, seed=5):
    """Return moments of keys [token, head, d] and values, and random ones of what is read."""
    both = torch.cat((keys.flatten(1), values.flatten(1)), dim=1)
    mean = both.mean(dim=0)
    queries = rotation_average(_square(*keys.shape[1:], seed=seed), planes)
    outputs = _square(*values.shape[1:], seed=seed + 1)
    return LayerMoments(mean, (both - mean).mT @ (both - mean) / len(both), queries, outputs)


def _lost(x, after, metric):
    """Return E Σ_h (x_h − x′_h) G_h (x_h − x′_h)ᵀ of tensors [token, head, d]."""
    left = x - after
    return float(torch.einsum("nhd,hde,nhe->", left, metric, left) / len(x))


class TestFreeMaps:
    """Heads whose coordinates may be mixed at will."""

    def setup_method(self):
        self.x = _normal(80, 4, 3) @ _normal(4, 3, 3, seed=1).mean(dim=0)
        self.x = self.x + 0.5 * _normal(80, 1, 3, seed=2)
        flat = self.x.flatten(1)
        self.second, self.metric = flat.mT @ flat / 80, _square(4, 3, seed=3)

    def _error(self, made):
        return _lost(self.x, (self.x.flatten(1) @ made).reshape(self.x.shape), self.metric)

    def test_svd_is_the_dense_optimum_and_better_than_the_others(self):
        errors = {
            method: self._error(free_map(self.second, self.metric, [range(4)], method))
            for method in ("mean", "lstsq", "svd")
        }
        weight = torch.block_diag(*[torch.linalg.cholesky(g) for g in self.metric])
        dense = torch.linalg.svdvals(self.x.flatten(1) @ weight)[3:].square().sum() / 80
        assert errors["svd"] == pytest.approx(float(dense))
        assert errors["svd"] < min(errors["mean"], errors["lstsq"])

    def test_no_shared_value_serves_all_heads_better_than_least_squares(self):
        made = free_map(self.second, self.metric, [range(4)], "lstsq")
        shared = (self.x.flatten(1) @ made).reshape(self.x.shape)
        torch.testing.assert_close(shared, shared[:, :1].expand_as(shared))
        best = _lost(self.x, shared, self.metric)
        for seed in range(100):
            other = shared + 0.2 * _normal(80, 1, 3, seed=seed)
            assert _lost(self.x, other, self.metric) > best

    def test_groups_do_not_mix(self):
        for method in ("mean", "lstsq", "svd"):
            made = free_map(self.second, self.metric, [[0, 3], [1, 2]], method).reshape(4, 3, 4, 3)
            assert not bool(made[[0, 3]][:, :, [1, 2]].any())
            assert int(torch.linalg.matrix_rank(made.reshape(12, 12))) == 6

    def test_heads_that_are_turned_copies_share_without_loss(self):
        one = _normal(60, 3)
        x = torch.stack([one @ _turn(3, seed) for seed in range(4)], dim=1)
        flat = x.flatten(1)
        for method in ("mean", "svd"):
            made = free_map(flat.mT @ flat / 60, self.metric, [range(4)], method)
            torch.testing.assert_close(flat @ made, flat)
        worse = free_map(flat.mT @ flat / 60, self.metric, [range(4)], "lstsq")
        assert not torch.allclose(flat @ worse, flat, atol=0.1)

    def test_what_is_never_read_may_be_lost(self):
        metric = self.metric.clone()
        metric[:, 2] = metric[:, :, 2] = 0.0
        for method in ("lstsq", "svd"):
            made = free_map(self.second, metric, [range(4)], method)
            assert bool(made.isfinite().all())


@pytest.mark.parametrize("planes", [HALVES, NEIGHBOURS], ids=["halves", "neighbours"])
class TestKeysThatTurn:
    """Two planes that turn and one dimension that does not."""

    @staticmethod
    def _rotary(planes):
        adjacent = planes.tolist() == NEIGHBOURS.tolist()
        return Rotary(torch.tensor([0.7, 0.1], dtype=torch.float64), adjacent=adjacent)

    @staticmethod
    def _complex(x, planes):
        return torch.complex(x[..., planes[:, 0]], x[..., planes[:, 1]])

    def test_planes_are_those_of_the_rotation(self, planes):
        assert self._rotary(planes).planes().tolist() == planes.tolist()

    def test_maps_commute_with_rotation(self, planes):
        keys = _normal(50, 3, 5) + _normal(5, seed=4)
        turn = self._rotary(planes)
        for method in ("mean", "lstsq", "svd"):
            made = key_map(_layer(keys, keys, planes), [range(3)], method, planes)
            at = torch.arange(50)[:, None]
            first = turn.rotate((keys.flatten(1) @ made).reshape(keys.shape), at)
            later = (turn.rotate(keys, at).flatten(1) @ made).reshape(keys.shape)
            torch.testing.assert_close(first, later)

    def test_one_number_a_plane_is_the_best_there_is(self, planes):
        """Against the dense complex SVD, weighted by what queries read of each plane."""
        keys = _normal(50, 3, 5) @ _normal(5, 5, seed=1) + 2 * _normal(3, 5, seed=4)
        moments = _layer(keys, keys, planes)
        made = key_map(moments, [range(3)], "svd", planes)
        after = (keys.flatten(1) @ made).reshape(keys.shape)
        for plane, (first, _) in enumerate(planes.tolist()):
            z, shared = (self._complex(x, planes)[..., plane] for x in (keys, after))
            weights = moments.queries[:, first, first].sqrt()
            dense = torch.linalg.svdvals(z * weights)[1:].square().sum()
            lost = ((z - shared) * weights).abs().square().sum()
            assert float(lost) == pytest.approx(float(dense))
        error = relative_errors(torch.block_diag(made, torch.eye(15).double()), moments, planes)
        assert error[1] == pytest.approx(0.0, abs=1e-12) and 0 < error[0] < 1
        others = [key_map(moments, [range(3)], way, planes) for way in ("mean", "lstsq")]
        for other in others:
            whole = torch.block_diag(other, torch.eye(15).double())
            assert relative_errors(whole, moments, planes)[0] > error[0]

    def test_keys_that_are_copies_but_for_phases_share_without_loss(self, planes):
        one, turn = _normal(60, 5), self._rotary(planes)
        copies = [turn.rotate(one, torch.tensor(float(h))) for h in (0, 3, 8)]
        keys = torch.stack(copies, dim=1)
        keys[..., 4] *= torch.tensor([1.0, -1.0, -1.0])  # what does not turn, mirrored
        for method in ("mean", "svd"):
            made = key_map(_layer(keys, keys, planes), [range(3)], method, planes)
            torch.testing.assert_close(keys.flatten(1) @ made, keys.flatten(1))


def test_rotation_average_is_the_mean_over_angles():
    moments, turn = _square(2, 5), TestKeysThatTurn._rotary(HALVES)
    total = torch.zeros_like(moments)
    for a in range(8):  # eighths of a turn, of either plane alone: frequencies 1 and 8
        for b in range(8):
            both = Rotary(torch.tensor([a, b], dtype=torch.float64) * torch.pi / 4)
            total += both.rotate(both.rotate(moments, torch.ones(())).mT, torch.ones(()))
    torch.testing.assert_close(rotation_average(moments, HALVES), total / 64)
    assert torch.equal(rotation_average(moments, None), moments) and turn.dim == 4


def test_one_latent_is_the_best_of_its_width():
    keys, values = _normal(90, 3, 4) @ _normal(4, 4, seed=1), _normal(90, 3, 2, seed=2)
    moments = _layer(keys + 3.0, values, HALVES)
    made = latent_map(moments, 6)
    x = torch.cat((keys.flatten(1), values.flatten(1)), dim=1)
    x = x - x.mean(dim=0)
    parts = []
    for metric, part in ((moments.queries, x[:, :12]), (moments.outputs, x[:, 12:])):
        weight = torch.block_diag(*[torch.linalg.cholesky(g) for g in metric])
        parts.append(weight / (part @ weight).square().mean(dim=0).sum().sqrt())
    weight = torch.block_diag(*parts)
    lost = ((x - x @ made) @ weight).square().sum() / 90
    dense = torch.linalg.svdvals(x @ weight)[6:].square().sum() / 90
    assert float(lost) == pytest.approx(float(dense))
    assert sum(relative_errors(made, moments, HALVES)) == pytest.approx(float(dense))


def test_groups_of_heads_that_are_alike():
    a, b = _normal(70, 5), _normal(70, 5, seed=1)
    turn = TestKeysThatTurn._rotary(HALVES)
    keys = torch.stack([a, b, turn.rotate(a, torch.tensor(2.0)), b], dim=1)
    values = torch.stack([a, b, a @ _turn(5), b @ _turn(5, 1)], dim=1)
    moments = _layer(keys, values, HALVES)
    equal = moments._replace(
        outputs=torch.eye(5).double().expand(4, 5, 5), queries=torch.eye(5).double().expand(4, 5, 5)
    )
    alike = similarity(equal, HALVES)
    torch.testing.assert_close(alike.diagonal(), torch.ones(4).double())
    assert float(alike[0, 2]) == pytest.approx(1) and float(alike[1, 3]) == pytest.approx(1)
    assert float(alike[0, 1]) < 0.5
    assert balanced_groups(alike, 2) == [[0, 2], [1, 3]]
    assert balanced_groups(alike, 4) == [[0], [1], [2], [3]]
    assert balanced_groups(alike, 1) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("family", WITH_HEADS)
def test_sharing_in_every_family(family, tiny):
    """The full number changes nothing; what passes is the map of what would have passed."""
    model = tiny(family)
    arch = adapters.architecture(model)
    methods = ("mean", "lstsq", "svd", "mla")
    found = share_kv_heads(
        model, TEXTS, n_kv_heads=(1, arch.n_kv_heads), method=methods, calibration=TEXTS
    )
    assert found.settings[0] == f"{arch.n_kv_heads} → 1, mean"
    change = found.relative_change.mean(dim=1)
    assert bool((change[4:8] == 0).all()) and bool((change[:4] > change[8]).all())
    frame = found.to_frame()
    a_head = 2 * arch.n_layers * (arch.d_head + arch.d_head_v)
    assert frame["bytes_per_token"].tolist()[::4] == [a_head, *[arch.n_kv_heads * a_head] * 2]
    assert frame["bytes_saved"].tolist()[0] == (arch.n_kv_heads - 1) * a_head
    errors = found.value_errors[:4].mean(dim=1)
    assert bool((errors[2] < errors[:2]).all()) and found.key_errors[2:3].max() < 1
    assert not bool(found.key_errors[4:].any())


@pytest.mark.parametrize("family", WITH_HEADS)
def test_what_passes_is_the_map_of_what_would_have_passed(family, tiny):
    from wvprobe.counterfactual._sharing import _Choice, _Sharing

    model = tiny(family)
    arch = adapters.architecture(model)
    planes = planes_of(model, arch)
    moments = key_value_moments(model, arch, TEXTS, planes)
    alike = torch.stack([similarity(one, planes) for one in moments])
    plain = read_sites(model, TEXTS, ["k", "v"], layers=0)
    for method in ("svd", "mla"):
        made = _Sharing(arch, moments, alike, planes, _Choice(1, method, "none"))
        with made.applied(model):
            seen = read_sites(model, TEXTS, ["k", "v"], layers=0)
        both, shared = (
            torch.cat([x[site][plain.mask].flatten(1).double() for site in ("k", "v")], dim=1)
            for x in (plain, seen)
        )
        one = made.maps[0]
        expected = one.mean + (both - one.mean) @ one.both
        torch.testing.assert_close(shared, expected, atol=1e-4, rtol=1e-4)
        rank = int(torch.linalg.matrix_rank(shared - shared.mean(dim=0), rtol=1e-4))
        assert rank <= arch.d_head + arch.d_head_v


@pytest.mark.parametrize("family", ["llama", "phi", pytest.param("opt", marks=pytest.mark.slow)])
def test_planted_copies_share_without_loss(family):
    """Keys that are copies but for phases (free turns where nothing turns), values for turns."""
    model = tiny_model(family)
    arch = adapters.architecture(model)
    d, planes = arch.d_head, planes_of(model, arch)
    for layer in range(arch.n_layers):
        attention = model.blocks[layer].attn
        for letter in ("k", "v"):
            linear = getattr(attention, letter).original_component
            for head in range(1, arch.n_kv_heads):
                turn = _turn(d, seed=head + layer)
                if letter == "k" and planes is not None:
                    at = torch.arange(len(planes), dtype=torch.float64) + 1
                    rotary = Rotary(at, adjacent=False)
                    turn = rotary.rotate(torch.eye(d).double(), torch.tensor(float(head)))
                for name in ("weight", "bias"):
                    own = getattr(linear, name, None)
                    if own is not None:
                        own.data[head * d : (head + 1) * d] = turn.T.float() @ own.data[:d]
    found = share_kv_heads(
        model, TEXTS, n_kv_heads=1, method=("mean", "lstsq", "svd"), calibration=TEXTS
    )
    mean, lstsq, svd = found.relative_change[:3].mean(dim=1).tolist()
    assert max(mean, svd) < 1e-4 < 1e-2 < lstsq


def test_after_a_resize_the_cut_model_is_what_is_shared(tiny):
    model = tiny("llama")
    settings = {"n_kv_heads": 1, "method": "svd", "calibration": TEXTS}
    resized = resize_heads(model, TEXTS, budget=0.3, calibration=TEXTS)
    plan = resized.plan("OV, uniform, 0.30")
    found = share_kv_heads(model, TEXTS, after=plan, **settings)
    torch.testing.assert_close(found.loss, resized.loss + resized.loss_delta[0])
    assert found.after == "OV, uniform, 0.30" and found.to_frame()["after"][0] == found.after
    plain = share_kv_heads(model, TEXTS, **settings)
    whole = resized.plan("bf16 rounding")
    torch.testing.assert_close(share_kv_heads(model, TEXTS, after=whole, **settings).kl, plain.kl)
    # Of values of a third of the rank one head's width holds nearly all.
    assert float(found.value_errors[0].max()) < float(plain.value_errors[0].min())
    queries = resize_heads(model, TEXTS, budget=0.3, part="QK", calibration=TEXTS)
    fewer = share_kv_heads(model, TEXTS, after=queries.plan("QK, uniform, 0.30"), **settings)
    assert float(fewer.key_errors[0].mean()) != pytest.approx(float(plain.key_errors[0].mean()))


def test_grouping_saving_and_drawing(tiny, tmp_path):
    model = tiny("gpt2", n_embd=36, n_head=6)
    found = share_kv_heads(
        model,
        TEXTS,
        n_kv_heads=(2, 1, 3),
        method=("mean", "svd"),
        grouping=("order", "similarity"),
        calibration=TEXTS,
    )
    assert len(found.settings) == 2 * 2 + 2 + 2 * 2 + 1
    assert found.settings[1] == "6 → 2, mean, by similarity" and found.groupings[4] == "none"
    assert found.groups[0, 0].tolist() == [0, 0, 0, 1, 1, 1]
    assert all(g.bincount().tolist() == [2, 2, 2] for g in found.groups[7])
    again = Result.load(found.save(tmp_path))
    assert isinstance(again, ShareResult) and torch.equal(again.groups, found.groups)
    drawn = figure(found)
    assert "17% of the bytes" in drawn.layout.title.text
    lines = {trace.name: trace for trace in drawn.data}
    assert list(lines["svd"].x) == sorted(lines["svd"].x) and len(lines["svd"].x) == 3


def test_what_is_refused(tiny):
    model = tiny("llama")
    for count in (3, 4, 0, -1, True):
        with pytest.raises(InputError, match="n_kv_heads"):
            share_kv_heads(model, TEXTS, n_kv_heads=count, calibration=TEXTS)
    with pytest.raises(InputError, match="'mean', 'lstsq', 'svd', 'mla'"):
        share_kv_heads(model, TEXTS, n_kv_heads=1, method="pca", calibration=TEXTS)
    with pytest.raises(InputError, match="'order', 'similarity'"):
        share_kv_heads(model, TEXTS, n_kv_heads=1, grouping="chance", calibration=TEXTS)
    with pytest.raises(UnsupportedError, match="caches a latent"):
        share_kv_heads(tiny("deepseek_v3"), TEXTS, n_kv_heads=1)
    maps = torch.eye(14).double().expand(2, 6, 14, 14)
    other = ResizePlan("other", "OV", torch.full((2, 6), 14), maps, None)
    with pytest.raises(ShapeError, match="after"):
        share_kv_heads(model, TEXTS, n_kv_heads=1, after=other, calibration=TEXTS)


@pytest.mark.slow
@pytest.mark.real_model
def test_what_was_seen_on_a_real_model(smollm2):
    """Three key-value heads to one: a latent before SVD, means and unaligned least squares."""
    held, fitted = (
        [text for text in load_prose(split) if len(text) <= 160][:16]
        for split in ("held-out", "calibration")
    )
    methods = ("mla", "svd", "mean", "lstsq")
    found = share_kv_heads(smollm2, held, n_kv_heads=1, method=methods, calibration=fitted)
    change = found.kl[:4].mean(dim=1).tolist()
    assert change == sorted(change) and change[0] > 10 * float(found.kl[4].mean())
    assert found.bytes_per_token.tolist() == [7_680] * 4 + [23_040]
