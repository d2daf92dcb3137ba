"""Growth laws: planted ones are found, fits are no worse than scipy's, and what is not testable."""

import numpy
import pytest
import torch
from scipy.optimize import curve_fit

from wvprobe._types import Result
from wvprobe.contextual_drift import LAWS, growth_law
from wvprobe.contextual_drift._laws import fit_law
from wvprobe.errors import InputError, ShapeError

X = torch.arange(1, 31, dtype=torch.float64)
PLANTED = {
    "linear": (2.0, 0.7),
    "power": (1.3, 0.6),
    "exponential": (0.4, 0.17),
    "logistic": (5.0, 0.6, 12.5),
}
FORMULAS = {
    "linear": lambda x, a, b: a + b * x,
    "power": lambda x, a, b: a * x**b,
    "exponential": lambda x, a, b: a * numpy.exp(b * x),
    "logistic": lambda x, a, b, c: a / (1 + numpy.exp(-b * (x - c))),
}


def curve(law, noise=0.0, seed=0):
    y = torch.from_numpy(FORMULAS[law](X.numpy(), *PLANTED[law]))
    return y + noise * torch.randn(30, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("law", LAWS)
def test_an_exact_curve_gives_its_parameters(law, relative):
    fit = fit_law(law, X, curve(law)[None], relative=relative)
    size = len(PLANTED[law])
    assert fit.parameters[0, :size].tolist() == pytest.approx(PLANTED[law], rel=1e-4)
    assert bool(fit.parameters[0, size:].isnan().all()) and bool(fit.converged)
    torch.testing.assert_close(fit.curve[0], curve(law), rtol=1e-5, atol=0)


@pytest.mark.parametrize("fitted", LAWS)
@pytest.mark.parametrize("law", LAWS)
def test_fits_are_no_worse_than_scipys(law, fitted):
    curves = torch.stack([curve(law, noise=0.15, seed=seed) for seed in range(3)])
    fit = fit_law(fitted, X, curves)
    for row, y in enumerate(curves.numpy()):
        formula, best = FORMULAS[fitted], numpy.inf
        starts = {
            "linear": [(1, 0.1)],
            "power": [(1, 0.5), (0.01, 2)],
            "exponential": [(1, 0.1), (y.mean(), 0.01)],
            "logistic": [(y.max(), 0.5, 15), (y.max(), 0.1, 5), (10 * y.max(), 0.15, 40)],
        }[fitted]
        for start in starts:
            try:
                found, _ = curve_fit(formula, X.numpy(), y, p0=start, maxfev=20_000)
            except RuntimeError:
                continue
            best = min(best, float(((formula(X.numpy(), *found) - y) ** 2).sum()))
        # A logistic that turns beyond the range is an exponential, and says so.
        slack = 1e-4 if bool(fit.converged[row]) else 0.05
        assert float(fit.residual[row]) <= best * (1 + slack) + 1e-12
        if bool(fit.converged[row]):
            values = fit.parameters[row, : len(PLANTED[fitted])].tolist()
            residual = float(((formula(X.numpy(), *values) - y) ** 2).sum())
            assert residual == pytest.approx(float(fit.residual[row]), rel=1e-6)


def test_the_law_behind_noisy_curves_wins():
    curves = {
        law: torch.stack([curve(law, noise=0.05, seed=seed).abs() for seed in range(8)])
        for law in LAWS
    }
    found = growth_law(curves)
    assert found.metrics == LAWS and found.n.tolist() == [8] * 4
    for number in range(4):
        assert float(found.shares[number, number]) >= 0.85
        assert found.low[number, number] <= found.shares[number, number]
    torch.testing.assert_close(found.shares.sum(dim=1), torch.ones(4, dtype=torch.float64))
    summary = found.summary().set_index(["metric", "law"])
    assert summary.loc[("power", "power"), "median_r2"] > 0.98
    assert len(found.to_frame()) == 4 * 8 * 4


def test_aicc_by_hand():
    y = curve("linear", noise=0.3)[None]
    found = growth_law({"y": y})
    slope, intercept = numpy.polyfit(X.numpy(), y[0].numpy(), 1)
    rss = ((intercept + slope * X.numpy() - y[0].numpy()) ** 2).sum()
    expected = 30 * numpy.log(rss / 30) + 2 * 3 + 2 * 3 * 4 / (30 - 3 - 1)
    assert float(found.aicc[0, 0, 0]) == pytest.approx(expected)
    total = ((y[0] - y[0].mean()) ** 2).sum()
    assert float(found.r2[0, 0, 0]) == pytest.approx(1 - rss / float(total))


def test_curves_begin_where_they_are_not_zero():
    y = torch.cat([torch.zeros(3, dtype=torch.float64), curve("power")])[None]
    found = growth_law({"y": y})
    assert int(found.first) == 3
    assert found.parameters[0, 0, 1, :2].tolist() == pytest.approx(PLANTED["power"], rel=1e-6)
    # 1e-9 of the largest is rounding, and no distance.
    y[0, 2] = 1e-9
    assert int(growth_law({"y": y}).first) == 3


def test_what_falls_is_no_growth():
    falling = curve("exponential").flip(0)[None]
    found = growth_law({"y": falling.repeat(3, 1)})
    assert found.laws[int(found.winner[0, 0])] == "exponential" and not bool(found.rising.any())
    assert found.shares[0].tolist() == [0, 0, 0, 0, 1]
    both = growth_law({"y": torch.cat([falling, curve("power")[None], falling])})
    assert both.shares[0].tolist() == pytest.approx([0, 1 / 3, 0, 0, 2 / 3])
    summary = both.summary()
    assert summary["law"].tolist() == [*LAWS, "falling"] and set(summary["n"]) == {3}
    assert summary["share"].tolist() == both.shares[0].tolist()
    assert summary["low"].tolist() == both.low[0].tolist()
    assert set(summary["median_r2"]) == {float(both.to_frame().query("winner")["r2"].median())}
    assert both.to_frame()["law"].tolist() == [*LAWS] * 3


def test_relative_errors_let_early_layers_count():
    """Multiplicative noise around an exponential, with a late jump that rules absolute errors."""
    noise = torch.randn(30, generator=torch.Generator().manual_seed(0)).double()
    y = (curve("exponential") * (0.2 * noise).exp())[None]
    for errors in ("absolute", "relative"):
        found = growth_law({"y": y}, errors=errors)
        assert found.errors == errors == found.provenance.settings["errors"]
        target = y.log() if errors == "relative" else y
        if errors == "relative":
            slope, intercept = numpy.polyfit(X.numpy(), target[0].numpy(), 1)
            a, b = found.parameters[0, 0, 2, :2].tolist()
            assert (a, b) == pytest.approx((numpy.exp(intercept), slope), rel=1e-5)


def test_what_is_not_fitted():
    y = torch.stack([curve("linear"), torch.zeros(30).double(), curve("linear"), curve("linear")])
    y[2, 5] = torch.nan
    y[3, :25] = 0
    touching = curve("linear")[None].clone()
    touching[0, 10] = 0  # ln 0
    assert int(growth_law({"y": touching}, errors="relative").winner) == -1
    assert int(growth_law({"y": touching}).winner) >= 0
    found = growth_law({"y": y}, words=["a", "b", "c", "d"])
    assert (found.winner[0] >= 0).tolist() == [True, False, False, False]
    assert found.n.tolist() == [1] and bool(found.low.isnan().all())
    assert set(found.to_frame()["word"]) == {"a"}


def test_few_layers_are_not_testable(tmp_path):
    found = growth_law({"cosine": torch.rand(5, 7), "score": torch.rand(5, 6)})
    assert "6 layers" in found.untestable and not len(found.to_frame())
    assert bool(found.shares.isnan().all()) and (found.winner == -1).all()
    assert not growth_law({"cosine": torch.rand(5, 13)}).untestable
    assert growth_law({"score": torch.rand(5, 12)}).untestable
    assert not growth_law({"score": torch.rand(5, 12)}, n_layers=12).untestable
    assert Result.load(found.save(tmp_path)).untestable == found.untestable


def test_saving_and_wrong_inputs(tmp_path):
    found = growth_law({"y": curve("logistic", noise=0.1)[None].abs()}, seed=5)
    assert Result.load(found.save(tmp_path)).to_frame().equals(found.to_frame())
    assert found.provenance.seed == 5
    with pytest.raises(InputError, match="at least one metric"):
        growth_law({})
    with pytest.raises(InputError, match="distances"):
        growth_law({"y": -torch.rand(2, 30)})
    with pytest.raises(ShapeError, match="the same words"):
        growth_law({"y": torch.rand(2, 30), "z": torch.rand(3, 30)})
    with pytest.raises(InputError, match="one name a curve"):
        growth_law({"y": torch.rand(2, 30)}, words=["a"])
    with pytest.raises(InputError, match="absolute"):
        growth_law({"y": torch.rand(2, 30)}, errors="log")
