"""Figures of drift over many words, and the sense map with a slider."""

from dataclasses import replace

import pytest
import torch

from wvprobe.contextual_drift import drift, growth_law, held_out_senses, score_drift
from wvprobe.datasets import SenseDataset, load_senses
from wvprobe.plotting import figure
from wvprobe.sense_maps import sense_map_by_layer
from wvprobe.testing import tiny_model

BUNDLED = load_senses()
FEW = SenseDataset("few", BUNDLED.only("bank").items[::6] + BUNDLED.only("bat").items[::6])
SPLIT = SenseDataset(
    "split",
    tuple(
        replace(item, split="train" if number % 2 else "test")
        for number, item in enumerate(BUNDLED.only("bank").items[::2])
    ),
)


@pytest.fixture(scope="module")
def found():
    return drift(tiny_model("llama"), FEW, correction="mean")


def test_measures_are_drawn_with_bands_and_controls(found):
    drawn = figure(found)
    named = {trace.name: trace for trace in drawn.data if trace.name}
    mean = found["gap"].mean(dim=0).tolist()
    assert list(named["gap"].y) == pytest.approx(mean)
    assert "gap (mean corrected)" in named and named["gap (mean corrected)"].line.dash == "dash"
    assert list(named["senses shuffled, 95th percentile"].y) == found.control[1].tolist()
    assert list(named[f"random words (n = {found.n_baseline})"].y) == found.baseline.tolist()
    band = drawn.data[list(drawn.data).index(named["gap"]) - 1]
    rows = found.summary().query("measure == 'gap'")
    assert list(band.y) == rows["high"].tolist() + rows["low"].tolist()[::-1]
    best = int(found["centroid_accuracy"].mean(dim=0).argmax())
    assert f"at stream {best}" in drawn.layout.title.text
    alone = figure(drift(tiny_model("llama"), FEW.only("bank")))
    assert not any(trace.fill == "toself" for trace in alone.data)
    assert "“bank”" in alone.layout.title.text


def test_likeness_of_streams(found):
    drawn = figure(found.layers)
    assert [list(row) for row in drawn.data[0].z] == found.layers.cka.tolist()
    assert list(drawn.data[2].y) == found.layers.procrustes.tolist()
    assert f"{float(found.layers.cka[0, -1]):.2f}" in drawn.layout.title.text


def test_growth_laws_and_why_there_are_none():
    x = torch.arange(1, 20, dtype=torch.float64)
    result = growth_law({"cosine": (0.1 * x).exp().repeat(3, 1), "score": x.repeat(3, 1)})
    drawn = figure(result)
    assert [bar.name for bar in drawn.data][:4] == list(result.laws)
    assert list(drawn.data[2].y) == [1, 0]
    assert "100% in cosine, 0% in score" in drawn.layout.title.text
    assert "not testable" in figure(growth_law({"cosine": torch.rand(3, 7)})).layout.title.text


def test_held_out_senses_and_own_scores(tiny):
    result = held_out_senses(tiny("llama"), SPLIT)
    drawn = figure(result)
    assert list(drawn.data[1].y) == result.balanced[0].tolist()
    assert drawn.layout.shapes[0].y0 == float(result.chance[0])
    scores = score_drift(tiny("llama"), FEW.only("bank"))
    drawn = figure(scores)
    assert list(drawn.data[0].y) == pytest.approx(scores.difference[0].tolist())
    assert f"{float(scores.same[0, -1]):.2f} for one" in drawn.layout.title.text


def test_a_slider_goes_through_the_streams(tiny):
    result = sense_map_by_layer(tiny("llama"), "bank")
    drawn = figure(result)
    senses = list(dict.fromkeys(result.senses))
    (slider,) = drawn.layout.sliders
    assert slider.active == 2 and [step.label for step in slider.steps] == ["0", "1", "2", "3"]
    assert [trace.visible for trace in drawn.data] == [k // len(senses) == 2 for k in range(16)]
    for layer, step in enumerate(slider.steps):
        shown, title = step.args
        traces = [t for t, on in zip(drawn.data, shown["visible"], strict=True) if on]
        assert sum(len(trace.x) for trace in traces) == len(result.senses)
        first = result.points[layer, :, 0].tolist()
        assert sorted(x for trace in traces for x in trace.x) == sorted(first)
        assert f"{float(result.accuracy[layer]):.0%}" in title["title.text"]
    # All streams fit the axes that they share.
    reach = drawn.layout.xaxis.range[1]
    assert float(result.points.abs().max()) < reach
