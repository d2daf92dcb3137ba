"""Figures: one a result type, with titles that say the finding."""

import math
import subprocess
import sys
from dataclasses import dataclass, replace

import pytest
import torch

from wvprobe._types import Provenance, Result
from wvprobe.activations import capture
from wvprobe.attention_clock import time_attention
from wvprobe.auditing import audit
from wvprobe.budget import alternatives, head_scaling, known_architectures
from wvprobe.compose import composition
from wvprobe.context_shares import context_dependence
from wvprobe.contextual_drift import drift_pair
from wvprobe.errors import InputError
from wvprobe.flow import value_flow
from wvprobe.heads import HeadWeights
from wvprobe.influence import context_influence
from wvprobe.ledger import check_terms, score_ledger
from wvprobe.plotting import figure
from wvprobe.sense_maps import sense_map
from wvprobe.word_pairs import pair_scores

TEXTS = ("a power bank dropped into the river.", "The river bank is close to here.")


def test_scores_share_one_scale_around_zero_with_attention_beside(tiny):
    result = pair_scores(tiny("llama"), TEXTS, "bank", "river")
    drawn = result.figure()
    scores, attention = drawn.data[0::2], drawn.data[1::2]
    assert len(scores) == len(attention) == 4
    bound = float(result.gauge_fixed.abs().max())
    assert all(trace.zmin == -bound and trace.zmax == bound for trace in scores)
    assert all(trace.zmin == 0 and trace.zmax == attention[0].zmax for trace in attention)
    assert scores[1].z[3][2] == pytest.approx(float(result.gauge_fixed[0, 1, 2, 3]))
    assert scores[1].customdata[3][2] == pytest.approx(float(result.scores[0, 1, 2, 3]))
    assert attention[2].z[1][0] == pytest.approx(float(result.attention[1, 0, 0, 1]))
    masked = [a.text for a in drawn.layout.annotations if "(masked)" in a.text]
    assert len(masked) == 4
    best = result.to_frame().sort_values("attention").iloc[-1]
    assert f"layer {best['layer']}, head {best['head']}" in drawn.layout.title.text


def test_contributions_fall_from_nothing_to_the_whole(tiny, monkeypatch):
    monkeypatch.setattr("wvprobe.contextual_drift._baseline.SENTENCES", 50)
    result = drift_pair(tiny("llama"), *TEXTS, word="bank", layer=3).contributions
    (bars,) = figure(result).data
    assert sum(bars.y) == pytest.approx(1.0, abs=1e-4)
    assert bars.measure[-1] == "total" and bars.x[-1] == "all"
    frame = result.to_frame()
    assert bars.x[-2] == f"{len(frame) - 16} others"
    first = frame.iloc[0]
    layer, head = first["layer"], first["head"]
    name = f"MLP {layer:.0f}" if first["kind"] == "mlp" else f"L{layer:.0f}H{head:.0f}"
    assert f": {name} most, {first['share']:+.0%}" in figure(result).layout.title.text
    depths = [int(x.split("H")[0].strip("LMPtokenbias ") or -1) for x in bars.x[:-2]]
    assert depths == sorted(depths)


def test_figures_of_contexts_show_their_controls(tiny):
    found = sense_map(tiny("llama"), "bank")
    drawn = figure(found)
    assert {trace.name for trace in drawn.data} == set(found.senses)
    assert sum(len(trace.x) for trace in drawn.data) == len(found.sentences)
    assert drawn.data[0].text[0] == found.sentences[0]
    assert f"{found.control[1]:.0%}" in drawn.layout.title.text
    assert drawn.layout.yaxis.scaleanchor == "x"
    changed = context_influence(tiny("bert"), TEXTS[0], word="bank", draws=3)
    drawn = figure(changed)
    assert drawn.data[1].y[-1] == float(changed.values[1, -1])
    assert f"{float(changed.values[1, -1]):.1%}" in drawn.layout.title.text


def test_a_ledger_is_a_waterfall_to_the_score_beside_a_matrix(tiny):
    found = score_ledger(tiny("qwen2"), TEXTS[1], query="bank", key="river", layer=2, head=1)
    drawn = figure(found)
    falls, matrix = drawn.data
    assert sum(falls.y) == pytest.approx(found.total)
    top = found.top(12)
    assert list(falls.y)[:12] == top["term"].tolist() and falls.measure[-1] == "total"
    first = f"{top['query_component'][0]} × {top['key_component'][0]}"
    assert falls.x[0] == first and first in drawn.layout.title.text
    assert matrix.x == matrix.y == ("token", "head", "mlp", "bias")
    assert sum(map(sum, matrix.z)) == pytest.approx(found.total)
    frame = found.to_frame().query("query_kind == 'mlp' and key_kind == 'head'")
    assert matrix.z[2][1] == pytest.approx(frame["term"].sum())
    assert matrix.zmin == -matrix.zmax
    sources = score_ledger(
        tiny("qwen2"), TEXTS[1], query="bank", key="river", layer=2, head=1, group="source"
    )
    matrix = figure(sources).data[1]
    assert [list(row) for row in matrix.z] == sources.terms.tolist()
    assert list(matrix.x) == [part.name for part in sources.key_parts]


def test_predictions_are_drawn_against_both_measures(tiny):
    model = tiny("llama")
    found = score_ledger(model, TEXTS[1], query="bank", key="river", layer=2, head=1)
    checked = check_terms(model, found, n=8)
    drawn = figure(checked)
    direct, total = drawn.data[7], drawn.data[8]
    assert list(direct.x) == checked.predicted[2].tolist()
    assert list(direct.y) == checked.direct[2].tolist()
    assert list(total.y) == checked.total[2].tolist()
    summary = checked.summary().query("side == 'both' and terms == 'all'")
    assert f"r = {summary['correlation'].iloc[0]:.2f}" in drawn.layout.title.text


def test_shares_are_stacked_by_layer(tiny):
    found = context_dependence(tiny("llama"), *TEXTS, query="bank", key="river")
    drawn = figure(found)
    sizes = (found.shares.abs() / found.scale).mean(dim=-1)
    assert [list(bar.y) for bar in drawn.data[:3]] == sizes.tolist()
    difference = (found.scores[1] - found.scores[0]).abs() / found.scale
    assert list(drawn.data[3].y) == difference.mean(dim=-1).tolist()
    assert drawn.layout.barmode == "stack"
    assert "at layer 0 position alone" in drawn.layout.title.text


def test_architectures_are_drawn_against_the_even_split_and_the_years():
    known = known_architectures()
    drawn = figure(known)
    apart = next(trace for trace in drawn.data if trace.name == "does not")
    names = "; ".join(apart.text).split("; ")
    assert "T5-11B" in names and "GPT-3" not in names
    assert drawn.layout.title.text.startswith(f"{len(names)} of {len(known)}")
    together = next(trace for trace in drawn.data if trace.name == "splits d_model evenly")
    assert any("BERT-base; GPT-2" in text for text in together.text)
    years = [trace for trace in drawn.data if trace.name in ("MHA", "GQA", "MQA", "MLA")]
    shown = [name for trace in years for text in trace.text for name in text.split("; ")]
    assert sorted(shown) == sorted(budget.name for budget in known)
    latent = next(trace for trace in years if trace.name == "MLA")
    assert set(latent.y) == {192}


def test_scaling_and_alternatives_say_what_they_found():
    found = head_scaling()
    drawn = figure(found)
    slope = found.slope("n_heads")[0]
    assert f"n_heads grows as d_model to the {slope:.2f}" in drawn.layout.title.text
    points, fitted, constant = drawn.data
    assert len(points.x) == len(found.names)
    (x0, x1), (y0, y1) = fitted.x, fitted.y
    assert math.log(y1 / y0) / math.log(x1 / x0) == pytest.approx(slope)
    assert constant.y[1] / constant.y[0] == pytest.approx(x1 / x0)
    others = figure(alternatives(known_architectures()["GPT-3"]))
    assert "full-width heads cost 96 times" in others.layout.title.text
    assert "MQA with 0.0104" in others.layout.title.text
    full = next(trace for trace in others.data if trace.name == "full width")
    assert list(full.x) == list(full.y) == [96.0]
    encoder = figure(alternatives(known_architectures()["BERT-base"]))
    assert encoder.layout.yaxis.title.text == "FLOPs, relative"


def test_the_clock_is_drawn_over_its_floor():
    found = time_attention(
        32, 16, d_heads=(8, 16), uneven=(16, 8, 8), seconds=0.0, device="cpu", kernels=["eager"]
    )
    drawn = figure(found)
    frame = found.to_frame()
    even = frame[(frame["layout"] == "even") & (frame["direction"] == "forward")]
    line = drawn.data[0]
    assert list(line.x) == [8, 16]
    assert list(line.y) == pytest.approx((1e3 * even["seconds"]).tolist())
    assert list(line.error_y.array) == pytest.approx(
        (1e3 * (even["high"] - even["seconds"])).tolist()
    )
    names = [trace.name for trace in drawn.data]
    assert names.count("floor: FLOPs or bytes") == 2 and "eager, uneven padded" in names
    assert f"{found.spread('eager').ratio:.2f} times" in drawn.layout.title.text
    single = time_attention(
        32, 16, d_heads=(8,), uneven=(), seconds=0.0, device="cpu", kernels=["eager"]
    )
    assert "eager is fastest" in figure(single).layout.title.text


def test_cosine_is_drawn_beside_its_controls(tiny, monkeypatch):
    monkeypatch.setattr("wvprobe.contextual_drift._baseline.SENTENCES", 50)
    result = drift_pair(tiny("llama"), *TEXTS, word="bank")
    drawn = figure(result)
    raw, corrected = drawn.data[:4], drawn.data[4:]
    assert list(raw[-1].y) == result.cosine.tolist()
    assert list(corrected[-1].y) == result.to_frame()["cosine_adjusted"].tolist()
    assert f"n = {result.n_same}" in raw[0].name and "(bank)" in raw[0].name
    assert list(raw[2].y) == result.baseline.cosine.tolist() and not any(corrected[2].y)
    assert f"n = {result.baseline.n}" in figure(result.baseline).layout.title.text


def test_audit_and_activations(tiny):
    assert "10 identities hold" in figure(audit(tiny("bert"))).layout.title.text
    whole = capture(tiny("llama"), TEXTS, ["v", "stream"])
    drawn = figure(whole)
    assert [trace.name for trace in drawn.data] == ["v", "stream"]
    size = len(whole.tokens[0]) + len(whole.tokens[1])
    mean = float(whole["stream"][:, :, 2].norm(dim=-1).sum()) / size
    assert drawn.data[1].y[2] == pytest.approx(mean, rel=1e-5)
    with pytest.raises(InputError, match="to_frame"):
        figure(capture(tiny("llama"), TEXTS, "pattern"))


def test_a_result_without_a_figure_is_refused():
    @dataclass(frozen=True)
    class Plain(Result):
        pass

    with pytest.raises(InputError, match="Got Plain instead"):
        figure(Plain(Provenance.of("none", "")))


def test_figures_stay_light_for_long_texts_and_many_heads(tiny):
    model = tiny("gpt2")
    short = value_flow(model, TEXTS[1], layer=1, token=3)
    size = 700
    long = replace(
        short,
        strings=tuple(f"t{place}" for place in range(size)),
        pattern=torch.rand(1, short.pattern.shape[1], size, size),
        value_norms=torch.rand(1, short.value_norms.shape[1], size),
        scales=torch.ones(1, size),
        effects=None,
    )
    maps = figure(long).data
    assert len(maps[0].z) == len(maps[0].z[0]) == len(maps[0].x) == 175
    head = int(figure(long).layout.title.text.split("H")[1].split(":")[0])
    assert maps[0].z[1][2] == pytest.approx(float(long.pattern[0, head, 4:8, 8:12].max()))
    assert "largest of 4 × 4 tokens" in figure(long).layout.annotations[0].text
    assert len(figure(long).to_json()) < 2e6
    layers, heads = 32, 32
    scores = torch.rand(layers, heads, layers, heads)
    few = composition(HeadWeights.from_model(model), "K")
    alike = dict.fromkeys(("scores", "z", "p_values", "impossible", "impossible_z"), scores)
    zero = dict.fromkeys(("zero_writers", "zero_readers"), torch.zeros(layers, heads).bool())
    found = replace(few, **alike, **zero, q_values=scores.clamp(min=0.04))
    drawn = figure(found)
    assert len(drawn.to_json()) < 2e6
    lines = list(drawn.select_traces({"mode": "lines"}))
    assert len(lines) == 60  # the strongest of thousands below the level


@pytest.mark.slow
def test_nothing_is_chosen_for_the_callers_notebook():
    """Renderer and template are the caller's: one set at import leaves figures blank elsewhere."""
    script = """
import plotly.io as pio
before = pio.renderers.default, pio.templates.default
import wvprobe.cli, wvprobe.plotting, wvprobe.report
wvprobe.plotting.figure(wvprobe.known_architectures())
assert (pio.renderers.default, pio.templates.default) == before
"""
    subprocess.run([sys.executable, "-c", script], check=True)
