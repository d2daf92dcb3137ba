"""Figures: one a result type, with titles that say the finding."""

from dataclasses import dataclass

import pytest

from wvprobe._types import Provenance, Result
from wvprobe.activations import capture
from wvprobe.auditing import audit
from wvprobe.contextual_drift import drift_pair
from wvprobe.errors import InputError
from wvprobe.plotting import figure
from wvprobe.word_pairs import pair_scores

TEXTS = ("a power bank dropped into the river.", "The river bank is close to here.")


def test_scores_share_one_scale_around_zero(tiny):
    result = pair_scores(tiny("llama"), TEXTS, "bank", "river")
    drawn = result.figure()
    assert len(drawn.data) == 4
    bound = float(result.scores.abs().max())
    assert all(trace.zmin == -bound and trace.zmax == bound for trace in drawn.data)
    assert drawn.data[1].z[3][2] == pytest.approx(float(result.scores[0, 1, 2, 3]))
    masked = [a.text for a in drawn.layout.annotations if "(masked)" in a.text]
    assert len(masked) == 2
    best = result.to_frame().sort_values("attention").iloc[-1]
    assert f"layer {best['layer']}, head {best['head']}" in drawn.layout.title.text


def test_cosine_is_drawn_beside_its_controls(tiny, monkeypatch):
    monkeypatch.setattr("wvprobe.contextual_drift._BASELINE_SENTENCES", 50)
    result = drift_pair(tiny("llama"), *TEXTS, word="bank")
    drawn = figure(result)
    assert list(drawn.data[-1].y) == result.cosine.tolist()
    assert f"n = {result.n_same}" in drawn.data[0].name and "(bank)" in drawn.data[0].name
    assert list(drawn.data[2].y) == result.baseline.cosine.tolist()
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
