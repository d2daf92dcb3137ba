"""Heads cut to ranks, against dense optima, the model's own scores, and planted answers."""

import itertools

import pytest
import torch

import wvprobe
from wvprobe import adapters
from wvprobe._types import Result
from wvprobe._writes import on_cpu
from wvprobe.activations import read_sites
from wvprobe.counterfactual import ResizeResult, head_ranks, resize_heads
from wvprobe.counterfactual._allocation import (
    even_ranks,
    greedy_ranks,
    rounded_ranks,
    total_rank,
)
from wvprobe.counterfactual._cuts import output_cut, score_cut
from wvprobe.counterfactual._plans import cut_plan, measured_cut
from wvprobe.counterfactual._sensitivity import _between, loss_costs
from wvprobe.datasets import load_prose
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.plotting import figure
from wvprobe.testing import FAMILIES, tiny_model
from wvprobe.words import encode

TEXT = "The old bank by the river had been closed for years."
TEXTS = (TEXT, "A boat went slowly down to the sea.", "Nobody had asked the clerk why.")
QUICK = ("gpt2", "llama", "gemma2", "deepseek_v3")
EVERY = [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES]


def _normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _moments(x):
    return x.mT @ x / x.shape[-2]


def _changed(model, sites, changes, texts=(TEXT,)):
    arch = adapters.architecture(model)
    with adapters.changing(model, arch, changes):
        return read_sites(model, texts, sites, layers=0, batch_size=len(texts))


class TestCuts:
    """Pure tensors in double precision."""

    def test_the_error_of_values_is_the_sum_of_dropped_energies_and_the_dense_optimum(self):
        z = _normal(2, 3, 50, 5) @ _normal(2, 3, 5, 5, seed=1)
        weight = _normal(2, 3, 5, 11, seed=2)
        cut = output_cut(torch.zeros(2, 3, 5).double(), _moments(z), weight)
        dense = torch.linalg.svdvals(z @ weight).square()[..., :5] / 50
        for rank in range(6):
            maps = cut.maps(torch.full((2, 3), rank))
            error = ((z - z @ maps) @ weight).square().sum(dim=(-2, -1)) / 50
            torch.testing.assert_close(error, cut.gains[..., rank:].sum(dim=-1))
            torch.testing.assert_close(error, dense[..., rank:].sum(dim=-1))
            assert int(torch.linalg.matrix_rank(maps).max()) == rank

    def test_no_other_map_of_the_rank_does_better(self):
        z, weight = _normal(1, 1, 40, 4) @ _normal(4, 4, seed=1), _normal(1, 1, 4, 7, seed=2)
        cut = output_cut(torch.zeros(1, 1, 4).double(), _moments(z), weight)
        best = float(cut.gains[..., 2:].sum())
        a = cut.maps(torch.tensor([[2]]))
        for seed in range(200):
            step = 0.3 * _normal(4, 2, seed=seed)
            other = (cut.left[..., :2] + step) @ cut.right[..., :2, :]
            error = ((z - z @ other) @ weight).square().sum() / 40
            assert float(error) >= best - 1e-12
        free = (z - z @ a) @ weight
        assert float(free.square().sum() / 40) == pytest.approx(best)

    @pytest.mark.parametrize(
        "planes", [None, [[0, 2], [1, 3]], [[0, 1]], [[0, 3], [1, 4], [2, 5]]], ids=str
    )
    def test_the_error_of_scores_is_the_sum_of_dropped_energies(self, planes):
        """Queries and keys of every pair, with means that only keys may lose."""
        d = 6 if planes and len(planes) == 3 else 7
        q = _normal(1, 2, 40, d) + 2 * _normal(d, seed=3)
        k = _normal(1, 2, 30, d, seed=1) @ _normal(d, d, seed=2) + 5 * _normal(d, seed=4)
        centred = k - k.mean(dim=-2, keepdim=True)
        turned = None if planes is None else torch.tensor(planes)
        cut = score_cut(_moments(q), _moments(centred), turned)
        step = 1 if planes is None else 2
        for rank in [*range(0, d, step), d]:
            scores = (q - q @ cut.maps(torch.full((1, 2), rank))) @ k.mT
            lost = (scores - scores.mean(dim=-1, keepdim=True)).square().mean(dim=(-2, -1))
            torch.testing.assert_close(lost, cut.gains[..., rank:].sum(dim=-1))
        if planes is None:
            dense = torch.linalg.svdvals(q @ centred.mT).square()[..., :d] / (40 * 30)
            torch.testing.assert_close(cut.gains, dense)

    def test_planes_go_whole_and_the_cheapest_first(self):
        planes = torch.tensor([[0, 3], [1, 4], [2, 5]])
        q, k = _normal(1, 1, 40, 6), _normal(1, 1, 30, 6, seed=1)
        k = k - k.mean(dim=-2, keepdim=True)
        cut = score_cut(_moments(q), _moments(k), planes)
        kept = cut.maps(torch.tensor([[4]]))[0, 0].diagonal()
        costs = [float((q[..., plane] @ k[..., plane].mT).square().mean()) for plane in planes]
        dropped = planes[costs.index(min(costs))]
        assert kept[dropped].tolist() == [0.0, 0.0] and float(kept.sum()) == 4
        assert float(cut.gains[0, 0, 4:].sum()) == pytest.approx(min(costs))

    def test_deficient_and_empty_heads(self):
        """Energy in two directions; a head that writes nothing; one of a single dimension."""
        z = _normal(1, 2, 30, 2) @ _normal(1, 2, 2, 5, seed=1)
        weight = torch.stack((_normal(5, 9, seed=2), torch.zeros(5, 9).double()))[None]
        cut = output_cut(torch.zeros(1, 2, 5).double(), _moments(z), weight)
        assert float(cut.gains[0, 0, 2:].sum()) < 1e-20 * float(cut.gains[0, 0].sum()) + 1e-25
        assert not bool(cut.gains[0, 1].any()) and bool(cut.left.isfinite().all())
        free = (z - z @ cut.maps(torch.tensor([[2, 0]]))) @ weight
        assert float(free.abs().max()) < 1e-10
        narrow = output_cut(
            torch.zeros(1, 1, 1).double(), torch.ones(1, 1, 1, 1).double(), z[:, :1, :1, :1]
        )
        assert narrow.maps(torch.ones(1, 1).long()).item() == 1.0

    def test_a_stream_narrower_than_its_heads(self):
        z, weight = _normal(1, 1, 30, 5), _normal(1, 1, 5, 3, seed=1)
        cut = output_cut(torch.zeros(1, 1, 5).double(), _moments(z), weight)
        assert not bool(cut.gains[..., 3:].any())
        torch.testing.assert_close(z @ cut.maps(torch.tensor([[3]])) @ weight, z @ weight)


class TestAllocation:
    """Ranks that sum to the total, against enumeration."""

    def test_greedy_is_the_best_of_all_allocations(self):
        gains = _normal(3, 4).abs().sort(dim=1, descending=True).values
        for total in range(1, 13):
            ranks = greedy_ranks(gains, total, 1)
            kept = max(
                sum(float(gains[h, :r].sum()) for h, r in enumerate(each))
                for each in itertools.product(range(5), repeat=3)
                if sum(each) == total
            )
            own = sum(float(gains[h, :r].sum()) for h, r in enumerate(ranks.tolist()))
            assert own == pytest.approx(kept) and int(ranks.sum()) == total

    def test_gains_out_of_order_are_pooled(self):
        gains = torch.tensor([[0.0, 10.0, 0.0], [4.0, 3.0, 2.0]]).double()
        assert greedy_ranks(gains, 2, 1).tolist() == [2, 0]  # 10 together, against 7
        assert greedy_ranks(gains, 4, 1).tolist() == [2, 2]

    def test_whole_steps_and_the_last_odd_dimension(self):
        gains = torch.tensor([[9.0, 9.0, 1.0, 1.0, 5.0], [8.0, 8.0, 2.0, 2.0, 2.0]]).double()
        assert greedy_ranks(gains, 7, 2).tolist() == [5, 2]
        assert greedy_ranks(gains, 10, 2).tolist() == [5, 5]
        assert int(greedy_ranks(gains, 5, 2).sum()) == 4

    def test_rounding_keeps_the_total_and_cuts_off_least(self):
        targets = torch.tensor([15.0, 9.0, 12.0, 28.0, 32.0]).double()
        assert rounded_ranks(targets, 32, 96, 8).tolist() == [16, 8, 16, 24, 32]
        even = even_ranks(6, 11, 33, 1)
        assert int(even.sum()) == 33 and set(even.tolist()) == {5, 6}
        assert even_ranks(6, 14, 42, 2).tolist().count(6) == 3
        assert even_ranks(4, 8, 32, 8).tolist() == [8] * 4

    @pytest.mark.parametrize("budget", [0, -0.1, 1.01, float("nan"), True])
    def test_budgets_that_are_none(self, budget):
        with pytest.raises(InputError, match="in \\(0, 1\\]"):
            total_rank(budget, 100, 1)

    def test_a_budget_of_less_than_a_step(self):
        with pytest.raises(InputError, match="enough for a rank of 8 of 100"):
            total_rank(0.05, 100, 8)


@pytest.mark.parametrize("family", EVERY)
def test_a_full_budget_changes_nothing_nor_do_maps_of_full_rank(family, tiny):
    model = tiny(family)
    arch = adapters.architecture(model)
    plain = read_sites(model, TEXTS, ["resid_post"], layers=2)["resid_post"]
    for part, site in (("OV", "z"), ("QK", "q")):
        found = resize_heads(model, TEXTS, budget=1, part=part, calibration=TEXTS)
        assert found.settings == (f"{part}, uniform, 1.00", "bf16 rounding")
        assert float(found.relative_change[0].max()) == 0.0
        assert float(found.relative_change[1].min()) > 0.0
        cut = measured_cut(model, arch, part, TEXTS)
        whole = (cut.left @ cut.right).float()  # the identity, but for rounding

        def turned(x, whole=whole):
            return torch.einsum("bphd,hde->bphe", x, whole[0])

        with adapters.changing(model, arch, {(site, 0): turned}):
            same = read_sites(model, TEXTS, ["resid_post"], layers=2)["resid_post"]
        assert float((same - plain).norm() / plain.norm()) < 1e-4


def test_a_full_budget_in_double_precision():
    model = tiny_model("qwen2", dtype="float64")
    arch = adapters.architecture(model)
    for part in ("OV", "QK"):
        cut = measured_cut(model, arch, part, TEXTS)
        whole = torch.eye(arch.d_head).double().expand_as(cut.left)
        torch.testing.assert_close(cut.left @ cut.right, whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", EVERY)
def test_what_a_cut_head_adds_changes_by_the_dropped_energies(family, tiny):
    model = tiny(family)
    arch = adapters.architecture(model)
    cut = measured_cut(model, arch, "OV", TEXTS)
    ranks = torch.full((arch.n_layers, arch.n_heads), arch.d_head_v)
    ranks[0, 1] = 3
    changes = cut_plan("", "OV", cut, ranks).changes
    assert list(changes) == [("z", 0)]
    before = _changed(model, ["attn_out"], {}, TEXTS)
    after = _changed(model, ["attn_out"], changes, TEXTS)
    difference = (after["attn_out"] - before["attn_out"])[before.mask].double()[:, 0]
    norm = on_cpu(adapters.post_attention_norm(model, arch, 0))
    if norm is not None:
        difference = norm.linear(difference, torch.ones(()))
    lost = float(difference.square().sum(dim=-1).mean())
    assert lost == pytest.approx(float(cut.gains[0, 1, 3:].sum()), rel=1e-3)


@pytest.mark.parametrize("family", EVERY)
def test_scores_change_by_the_dropped_energies(family, tiny):
    """Over all pairs of a text, masked ones included, each query's mean taken out."""
    model = tiny(family)
    arch = adapters.architecture(model)
    cut = measured_cut(model, arch, "QK", [TEXT])
    assert cut.step == (2 if arch.position == "rotary" else 1)
    ranks = torch.full((arch.n_layers, arch.n_heads), 4)
    changes = {("q", 0): cut_plan("", "QK", cut, ranks).changes["q", 0]}
    before, after = (_changed(model, ["scores"], each)["scores"] for each in ({}, changes))
    difference = (after - before)[0, 0].double()
    difference = difference - difference.mean(dim=-1, keepdim=True)
    lost = difference.square().mean(dim=(-2, -1))
    torch.testing.assert_close(lost, cut.gains[0, :, 4:].sum(dim=-1), rtol=1e-3, atol=1e-6)


def _plant(model, ranks):
    """Make what heads of the first layers write of given ranks."""
    arch = adapters.architecture(model)
    for layer, row in enumerate(ranks):
        weight = model.blocks[layer].attn.o.original_component.weight
        heads = weight.data.T.reshape(arch.n_heads, arch.d_head_v, -1).clone()
        for head, rank in enumerate(row):
            u, s, vh = torch.linalg.svd(heads[head], full_matrices=False)
            heads[head] = (u[:, :rank] * s[:rank]) @ vh[:rank]
        weight.data.copy_(heads.reshape(weight.shape[1], -1).T)


def test_planted_ranks_are_found_and_cut_free_of_charge():
    model = tiny_model("llama")
    planted = [[2, 14, 5, 1, 9, 0], [3, 3, 3, 12, 2, 8], [6, 1, 7, 4, 11, 2]]
    _plant(model, planted)
    texts = (*TEXTS, "They all sat down at the long table and waited for the letter to be read.")
    budget = sum(map(sum, planted)) / (18 * 14)
    found = resize_heads(
        model, texts, budget=budget, allocation=("uniform", "energy"), calibration=texts
    )
    assert found.ranks[1].tolist() == planted
    even, uneven = found.relative_change[:2].mean(dim=1).tolist()
    assert uneven < 1e-5 < 1e-2 < even
    assert found.kept[1].tolist() == pytest.approx([1.0] * 3)
    gains = found.gain_frame().set_index("measure")
    assert float(gains.loc["relative_change", "low"]) > 0
    needed = head_ranks(model, texts, share=1.0).needed("OV")
    assert (needed <= torch.tensor(planted)).all()


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "gemma2", "bloom"])
def test_gradients_are_those_of_finite_differences(family):
    """Of a text's whole loss, on z and on q, by scaling one head's part."""
    model = tiny_model(family, dtype="float64")
    arch = adapters.architecture(model)
    for parameter in model.original_model.parameters():
        parameter.requires_grad_(False)
    tokens = torch.tensor([encode(model, TEXT).ids])
    mask = torch.ones_like(tokens)

    def loss(logits):
        log_p = logits[0, :-1].log_softmax(dim=-1)
        return -log_p.gather(1, tokens[0, 1:, None]).sum()

    found = adapters.gradients(model, arch, tokens, mask, [("z", 1), ("q", 1)], loss)
    for site in ("z", "q"):
        value, slope = found[site, 1]
        expected = float((value[:, :, 1] * slope[:, :, 1]).sum())
        each = []
        for step in (1e-2, -1e-2):
            scale = torch.ones(arch.n_heads, 1).double()
            scale[1] += step
            with adapters.changing(model, arch, {(site, 1): lambda x, s=scale: x * s}):
                each.append(float(loss(adapters.logits(model, tokens, mask))))
        assert (each[0] - each[1]) / 2e-2 == pytest.approx(expected, rel=1e-2, abs=1e-3)
    assert all(parameter.grad is None for parameter in model.original_model.parameters())


@pytest.mark.parametrize(
    "family", ["gpt2", "qwen3", pytest.param("deepseek_v3", marks=pytest.mark.slow)]
)
def test_costs_are_squared_slopes_along_a_cut(family, tiny):
    """By hand for each text: one layer is cut, and what it puts out is read."""
    model = tiny(family)
    arch = adapters.architecture(model)
    for part, rank in (("OV", 4), ("QK", 2)):
        cut = measured_cut(model, arch, part, TEXTS)
        found = loss_costs(model, arch, TEXTS, cut, part)
        assert found.shape == (*cut.gains.shape[:2], cut.gains.shape[2] + 1)
        assert not bool(found[..., -1].any())
        ranks = torch.full((arch.n_layers, arch.n_heads), rank)
        plan = cut_plan("", part, cut, ranks)
        changes = {key: new for key, new in plan.changes.items() if key[1] == 2}
        expected, count = torch.zeros(arch.n_heads).double(), 0
        for text in TEXTS:
            encoding = encode(model, text)
            tokens = torch.tensor([encoding.ids])

            def loss(logits, tokens=tokens, special=encoding.special):
                log_p = logits[0, :-1].log_softmax(dim=-1)
                each = -log_p.gather(1, tokens[0, 1:, None])[:, 0]
                return each[~torch.tensor(special[1:])].sum()

            mask = torch.ones_like(tokens)
            z, slope = adapters.gradients(model, arch, tokens, mask, [("z", 2)], loss)["z", 2]
            with adapters.changing(model, arch, changes):
                after = read_sites(model, [text], ["z"], layers=2)["z"][:, :, 0]
            expected += ((after - z) * slope)[0].sum(dim=-1).double().square().sum(dim=0)
            count += tokens.shape[1]
        torch.testing.assert_close(found[2, :, rank], expected / count, rtol=1e-2, atol=1e-6)


def test_costs_of_ranks_that_were_not_run_lie_on_straight_lines():
    costs = torch.tensor([[[8.0, 2.0, 0.0]]]).double()
    assert _between(costs, [0, 2, 6])[0, 0].tolist() == [8.0, 5.0, 2.0, 1.5, 1.0, 0.5, 0.0]


class TestResult:
    """Frames, gains, bytes, and what is refused."""

    @pytest.fixture(scope="class")
    @classmethod
    def found(cls, tiny):
        return resize_heads(
            tiny("llama"),
            TEXTS,
            budget=(0.25, 0.5),
            allocation=("uniform", "energy", "loss"),
            multiple_of=4,
            calibration=TEXTS,
        )

    def test_settings_and_columns(self, found):
        frame = found.to_frame()
        assert frame["setting"][4] == "OV, loss, 0.25"
        assert frame["setting"][11] == "OV, loss, 0.50, multiples of 4"
        named = "setting layers budget allocation part multiple_of total_rank kl low high".split()
        assert set(named) <= set(frame)
        totals = frame["total_rank"].tolist()
        assert totals[0:12:2] == [63] * 3 + [126] * 3 and totals[-1] == 252
        assert all(
            0 <= whole - own < 4 for whole, own in zip(totals[::2], totals[1::2], strict=False)
        )
        assert (found.ranks[1:12:2] % 4 == 0).logical_or(found.ranks[1:12:2] == 14).all()
        assert found.kept[-1].tolist() == [1.0] * 3 and found.AXES["ranks"][0] == "setting"

    def test_gains_are_paired_over_texts(self, found):
        frame = found.gain_frame()
        row = frame[(frame["setting"] == "OV, loss, 0.50") & (frame["measure"] == "kl")].iloc[0]
        assert row["versus"] == "OV, uniform, 0.50" and row["n_texts"] == len(TEXTS)
        difference = found.kl[6] - found.kl[10]
        assert row["gain"] == pytest.approx(float(difference.mean()))
        assert row["low"] <= row["gain"] <= row["high"]
        rounded = frame[frame["setting"] == "OV, energy, 0.25, multiples of 4"]
        assert set(rounded["versus"]) == {"OV, uniform, 0.25, multiples of 4", "OV, energy, 0.25"}

    def test_bytes_of_shared_and_of_own_values(self, found):
        a_layer = 2 * (14 + 14)  # two key-value heads
        assert found.kv_bytes.tolist() == [2 * 3 * a_layer] * 13
        assert int(found.kv_bytes_own[0]) == 2 * (3 * 2 * 14 + 63)
        assert int(found.kv_bytes_own[-1]) == 2 * (3 * 2 * 14 + 252)
        assert found.kv_note.startswith("3 query heads share")

    def test_it_is_saved_and_drawn(self, found, tmp_path):
        again = Result.load(found.save(tmp_path))
        assert isinstance(again, ResizeResult) and torch.equal(again.ranks, found.ranks)
        drawn = figure(found)
        assert "OV at 25% of the rank" in drawn.layout.title.text
        heat = drawn.data[-1]
        assert [list(row) for row in heat.z] == found.ranks[4].T.tolist()
        lines = [trace.name for trace in drawn.data if trace.name]
        assert "loss" in lines and "energy, multiples of 4" in lines
        plan = found.plan("OV, energy, 0.50")
        assert torch.equal(plan.ranks, found.ranks[8]) and plan.part == "OV"
        torch.testing.assert_close(again.plan("OV, energy, 0.50").maps, plan.maps)
        rank = torch.linalg.matrix_rank(plan.maps)
        assert torch.equal(rank, plan.ranks)

    def test_each_layer_alike(self, tiny):
        found = resize_heads(
            tiny("gpt2"),
            TEXTS,
            budget=0.6,
            allocation=("uniform", "energy"),
            scope="layer",
            calibration=TEXTS,
        )
        assert found.settings[1] == "OV, energy, 0.60, each layer alike"
        assert found.ranks[:2].sum(dim=-1).tolist() == [[21] * 3] * 2

    def test_a_latent_is_cached_whatever_heads_do(self, tiny):
        found = resize_heads(tiny("deepseek_v3"), TEXTS, budget=0.5, calibration=TEXTS)
        assert found.kv_bytes.tolist() == found.kv_bytes_own.tolist() == [2 * 3 * (19 + 6)] * 2

    def test_what_is_refused(self, tiny):
        model = tiny("llama")
        for settings, hint in (
            ({"budget": 0}, "in \\(0, 1\\]"),
            ({"budget": float("nan")}, "in \\(0, 1\\]"),
            ({"budget": (0.5, 0.5)}, "none twice"),
            ({"budget": 0.5, "allocation": "fair"}, "'uniform', 'energy', 'loss'"),
            ({"budget": 0.5, "part": "VO"}, "'OV', 'QK'"),
            ({"budget": 0.5, "scope": "head"}, "'model', 'layer'"),
            ({"budget": 0.5, "multiple_of": 15}, "at most 14"),
            ({"budget": 0.01, "multiple_of": 14}, "enough for a rank of 14"),
        ):
            with pytest.raises(InputError, match=hint):
                resize_heads(model, TEXTS, calibration=TEXTS, **settings)
        with pytest.raises(UnsupportedError, match="looks|sees"):
            resize_heads(tiny("bert"), TEXTS, budget=0.5, allocation="loss", calibration=TEXTS)
        alone = resize_heads(model, TEXTS, budget=0.5, allocation="energy", calibration=TEXTS)
        with pytest.raises(InputError, match="'uniform' and another"):
            alone.gain_frame()
        with pytest.raises(InputError, match="one of"):
            alone.plan("OV, energy, 0.51")


def test_ranks_needed_of_spectra_known_by_hand(tiny):
    found = head_ranks(tiny("opt"), TEXTS, share=0.9)
    energies = found.ov[0, 0]
    share = energies.cumsum(dim=0) / energies.sum()
    assert int(found.needed("OV")[0, 0]) == int((share < 0.9).sum()) + 1
    assert found.within("OV", 7) == (1.0, 1.0, 1.0)
    inside = float((found.needed("QK") <= 4).double().mean())
    assert found.within("QK", 4)[0] == pytest.approx(inside)
    frame = found.to_frame()
    assert len(frame) == 2 * 3 * 5 and frame["d_head"].unique().tolist() == [7]
    assert "of 7" in figure(found).layout.title.text
    assert frame["n_tokens"].unique().tolist() == [
        sum(len(encode(tiny("opt"), t).ids) for t in TEXTS)
    ]
    with pytest.raises(InputError, match="of at least 28 tokens"):
        head_ranks(tiny("opt"), "Short.")
    with pytest.raises(InputError, match="share"):
        head_ranks(tiny("opt"), TEXTS, share=1.5)


def test_the_root_has_them():
    assert wvprobe.resize_heads is resize_heads


@pytest.mark.slow
@pytest.mark.real_model
def test_what_was_seen_on_a_real_model(smollm2):
    """Energy goes where the loss needs it: less is lost than by an even cut; sinks are no trap."""
    held, fitted = (
        [text for text in load_prose(split) if len(text) <= 160][:12]
        for split in ("held-out", "calibration")
    )
    settings = {"budget": 0.25, "calibration": fitted * 2}
    for part, allocation in (("OV", "energy"), ("QK", "loss")):
        found = resize_heads(
            smollm2, held, allocation=("uniform", allocation), part=part, **settings
        )
        gain = found.gain_frame().set_index("measure").loc["kl"]
        assert float(gain["low"]) > 0
        assert float(found.kl[:2].min()) > 10 * float(found.kl[2].mean())
