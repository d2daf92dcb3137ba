"""Figures: one a result type, with titles that say the finding."""

from dataclasses import dataclass

import pytest

from wvprobe._types import Provenance, Result
from wvprobe.activations import capture
from wvprobe.auditing import audit
from wvprobe.budget import known_architectures
from wvprobe.contextual_drift import drift_pair
from wvprobe.errors import InputError
from wvprobe.first_layer import first_layer_shares
from wvprobe.influence import context_influence
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
    monkeypatch.setattr("wvprobe.contextual_drift._pair._BASELINE_SENTENCES", 50)
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
    shares = first_layer_shares(tiny("llama"), *TEXTS, query="bank", key="river")
    assert list(figure(shares).data[2].y) == shares.shares[2].tolist()


def test_architectures_are_drawn_against_the_even_split():
    known = known_architectures()
    drawn = figure(known)
    apart = next(trace for trace in drawn.data if trace.name == "does not")
    names = "; ".join(apart.text).split("; ")
    assert "T5-11B" in names and "GPT-3" not in names
    assert drawn.layout.title.text.startswith(f"{len(names)} of {len(known)}")
    together = next(trace for trace in drawn.data if trace.name == "splits d_model evenly")
    assert "BERT-base; GPT-2" in together.text


def test_cosine_is_drawn_beside_its_controls(tiny, monkeypatch):
    monkeypatch.setattr("wvprobe.contextual_drift._pair._BASELINE_SENTENCES", 50)
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
