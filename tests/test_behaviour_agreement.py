"""Rank correlations against pandas, and a bootstrap that knows its clusters."""

from dataclasses import replace

import pandas
import pytest
import torch

from wvprobe._statistics import spearman
from wvprobe._types import Result
from wvprobe.behaviour import behaviour_agreement, composed_with, head_behaviour
from wvprobe.behaviour._agreement import _counts
from wvprobe.compose import composition
from wvprobe.errors import InputError, ShapeError
from wvprobe.heads import HeadWeights
from wvprobe.inputs import mean_input
from wvprobe.offsets import offset_profile
from wvprobe.plotting import figure
from wvprobe.testing import induction_model

TEXTS = ("the bank by the river and the bank by the sea", "a boat and a bank and a boat")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
def behaviour(tiny):
    """A result of 11 layers of 7 heads, whose numbers are drawn."""
    found = head_behaviour(tiny("llama"), texts="a bank", samples=2, length=4, progress=False)
    values = random(len(found.names), 11, 7)
    values[found.names.index("next_token")] = torch.nan
    fields = {name: values for name in ("values", "low", "high", "chance")}
    n = torch.full((len(found.names), 11), 2)
    return replace(found, **fields, n=n, positional_offset=random(11, 7))


def test_spearman_is_pandas_with_ties_and_repeats():
    x, y = (random(13, seed=s).mul(2).round() for s in (1, 2))
    counts = torch.randint(4, (5, 13), generator=torch.Generator().manual_seed(3)).double()
    found = spearman(x, y, counts)
    for row, count in enumerate(counts.long()):
        frame = pandas.DataFrame({"x": x.repeat_interleave(count), "y": y.repeat_interleave(count)})
        expected = frame.rank().corr().loc["x", "y"]
        assert float(found[row]) == pytest.approx(expected)
    assert spearman(x, torch.ones(13).double(), counts).isnan().all()


def test_layers_are_drawn_whole():
    counts = _counts(torch.tensor([0, 0, 2, 2, 2, 7]), seed=0)
    assert torch.equal(counts[:, 0], counts[:, 1]) and torch.equal(counts[:, 2], counts[:, 4])
    assert not torch.equal(counts[:, 0], counts[:, 2])
    assert (counts[:, [0, 2, 5]].sum(dim=1) == 3).all()


def test_agreement_within_and_across_layers(behaviour):
    """A score that only follows depth agrees over all heads and not within a layer."""
    depth = torch.arange(11).double()[:, None].expand(11, 7)
    deep = replace(behaviour, values=behaviour.values * 0.5 + depth)
    weights = {"depth": depth + 0.1 * random(11, 7, seed=9), "same": deep["induction"].exp()}
    found = behaviour_agreement(deep, weights, pairs=[("induction", name) for name in weights])
    frame = found.to_frame().set_index("weights")
    assert frame.loc["depth", "rho"] > 0.9 and abs(frame.loc["depth", "within"]) < 0.35
    assert frame.loc["depth", "within_low"] < 0 < frame.loc["depth", "within_high"]
    assert frame.loc["same", "rho"] == pytest.approx(1) == frame.loc["same", "within"]
    flat = pandas.DataFrame({"x": deep["induction"].flatten(), "y": weights["depth"].flatten()})
    assert frame.loc["depth", "rho"] == pytest.approx(flat.rank().corr().loc["x", "y"])
    assert (found.low <= found.rho + 1e-12).all() and (found.rho <= found.high + 1e-12).all()


def test_clusters_widen_the_interval(behaviour):
    """Heads that repeat their layer's value are no more than their layers."""
    layers = random(11, 1, seed=4).expand(11, 7)
    copies = replace(behaviour, values=layers.expand(len(behaviour.names), 11, 7).clone())
    weights = {"noisy": layers + random(11, 1, seed=5)}
    widths = {}
    for unit in ("layer", "head"):
        found = behaviour_agreement(copies, weights, pairs=[("sink", "noisy")], resample=unit)
        widths[unit] = float(found.high - found.low)
        assert found.resample == unit
    assert widths["layer"] > 1.5 * widths["head"]


def test_intervals_are_as_wide_as_theory_says(behaviour):
    """Independent heads: atanh ρ has a variance of (1 + ρ²/2) / (n − 3) (Bonett & Wright 2000)."""
    weights = behaviour["sink"] + random(11, 7, seed=8)
    found = behaviour_agreement(
        behaviour, {"noisy": weights}, pairs=[("sink", "noisy")], resample="head"
    )
    width = float(found.high.atanh() - found.low.atanh())
    variance = (1 + float(found.rho) ** 2 / 2) / 74
    assert width == pytest.approx(2 * 1.96 * variance**0.5, rel=0.25)


def test_heads_without_a_number_take_no_part(behaviour, tmp_path):
    weights = random(11, 7, seed=6)
    weights[:4] = torch.nan
    found = behaviour_agreement(behaviour, {"late": weights})
    assert [name for name, _ in found.names] == [n for n in behaviour.names if n != "next_token"]
    assert (found.n_heads == 49).all() and (found.n_layers == 7).all()
    frame = found.heads_frame()
    assert len(frame) == 49 * len(found.names) and frame["layer"].min() == 4
    again = Result.load(found.save(tmp_path / "found"))
    assert torch.equal(again.rho, found.rho) and again.names == found.names
    assert found.provenance.model == behaviour.provenance.model
    drawn = figure(found)
    assert len(drawn.data) == len(found.names) and len(drawn.data[0].x) == 49
    best = int(found.rho.argmax())
    assert f"ρ {float(found.rho[best]):.2f}" in drawn.layout.title.text


def test_the_hand_made_circuit_agrees_with_its_weights():
    model = induction_model()
    found = head_behaviour(model, texts=TEXTS, progress=False)
    heads = HeadWeights.from_model(model)
    offsets = offset_profile(heads, range(32), mean_input=mean_input(model, TEXTS).mean)
    assert float(offsets.weights()[0, 0, 1]) > 0.9
    first = found.named(1, kinds=["previous_token"]).iloc[0]
    writer = int(first["layer"]), int(first["head"])
    fed = composed_with(composition(heads, "K").scores, *writer)
    assert fed[0].isnan().all() and float(fed[1, 1]) > 1.3 * float(fed[1, 0])
    result = behaviour_agreement(
        found, {"b(1)": offsets.weights()[..., 1]}, pairs=[("previous_token", "b(1)")]
    )
    assert int(result.n_heads[0]) == 4 and result.within.isnan().all()


def test_wrong_inputs(behaviour):
    with pytest.raises(ShapeError, match=r"\[layer, head\] = \[11, 7\]"):
        behaviour_agreement(behaviour, {"b(1)": torch.zeros(7, 11)})
    with pytest.raises(InputError, match="'layer', 'head'"):
        behaviour_agreement(behaviour, {"b(1)": torch.zeros(11, 7)}, resample="model")
    with pytest.raises(InputError, match="copying"):
        behaviour_agreement(behaviour, {"b(1)": torch.zeros(11, 7)}, pairs=[("copy", "b(1)")])
    nothing = torch.full((11, 7), torch.nan)
    with pytest.raises(InputError, match="0 heads"):
        behaviour_agreement(behaviour, {"b(1)": nothing}, pairs=[("sink", "b(1)")])
    with pytest.raises(InputError, match="at least one score"):
        behaviour_agreement(behaviour, {})
    with pytest.raises(InputError, match="`layer`"):
        composed_with(torch.zeros(2, 3, 2, 3), 2, 0)
