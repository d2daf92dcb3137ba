"""Figures of word pairs and of drifting words."""

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wvprobe.contextual_drift import DriftBaseline, PairContributions, PairDriftResult
from wvprobe.plotting._style import (
    ACCENT,
    MUTED,
    STREAM_AXIS,
    TOP_WITH_PANELS,
    faint,
    short,
    waterfall,
)
from wvprobe.word_pairs import PairScores

_SHOWN = 16  # components of a waterfall that have a bar of their own


def pair_scores(result: PairScores) -> go.Figure:
    """Maps layer × head, a row a text and direction: gauge-fixed scores, and attention beside."""
    names, (texts, directions, layers, heads) = result.directions(), result.scores.shape
    rows = [(text, direction) for text in range(texts) for direction in range(directions)]
    titles = []
    for text, direction in rows:
        masked = " (masked)" * bool(result.masked[text, direction])
        where = f"{names[direction]}{masked}<br><i>{short(result.texts[text], 44)}</i>"
        titles += [where, f"attention{masked}"]
    drawn = make_subplots(len(rows), 2, subplot_titles=titles, vertical_spacing=0.3 / len(rows))
    bound = float(result.gauge_fixed.abs().nan_to_num().max())
    most = float(result.attention.max())
    for row, at in enumerate(rows, start=1):
        faint = 0.55 if result.masked[at] else 1.0
        scores = go.Heatmap(
            z=result.gauge_fixed[at].T.tolist(),
            customdata=result.scores[at].T.tolist(),
            zmin=-bound,
            zmax=bound,
            colorscale="RdBu_r",
            opacity=faint,
            colorbar={"title": "score −<br>row mean", "len": 0.45, "y": 0.77},
            showscale=row == 1,
            hovertemplate="layer %{x}, head %{y}<br>gauge-fixed %{z:.2f}"
            "<br>raw %{customdata:.2f}<extra></extra>",
        )
        attention = go.Heatmap(
            z=result.attention[at].T.tolist(),
            zmin=0,
            zmax=most,
            colorscale="Blues",
            opacity=faint,
            colorbar={"title": "attention", "len": 0.45, "y": 0.22},
            showscale=row == 1,
            hovertemplate="layer %{x}, head %{y}<br>attention %{z:.3f}<extra></extra>",
        )
        drawn.add_trace(scores, row=row, col=1)
        drawn.add_trace(attention, row=row, col=2)
    drawn.update_xaxes(dtick=max(1, layers // 10))
    drawn.update_xaxes(title_text="layer", row=len(rows))
    drawn.update_yaxes(title_text="head", dtick=max(1, heads // 6), col=1)
    drawn.update_annotations(font_size=13)
    return drawn.update_layout(
        title_text=_strongest(result), height=200 + 190 * len(rows), margin_t=TOP_WITH_PANELS
    )


def _strongest(result: PairScores) -> str:
    """Say which visible pair attends most, and with what weight."""
    flat = int(result.attention.flatten().argmax())
    text, rest = divmod(flat, result.attention[0].numel())
    direction, rest = divmod(rest, result.attention[0, 0].numel())
    layer, head = divmod(rest, result.attention.shape[-1])
    weight = float(result.attention.max())
    return (
        f"Strongest link: {result.directions()[direction]} at layer {layer}, head {head} puts "
        f"{weight:.0%} of its attention there<br>in “{short(result.texts[text])}”"
    )


def pair_drift(result: PairDriftResult) -> go.Figure:
    """The two vectors' cosine over streams with the same-sense band, raw and corrected."""
    frame = result.to_frame()
    titles = ("raw", "corrected: minus the mean of random words")
    drawn = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.09)
    for column, corrected in enumerate((False, True), start=1):
        taken = frame["baseline"] if corrected else 0 * frame["baseline"]
        for trace in _curves(result, frame, taken):
            drawn.add_trace(trace.update(showlegend=not corrected), row=1, col=column)
    drawn.update_xaxes(title_text=STREAM_AXIS)
    drawn.update_yaxes(range=[-0.35, 1.05])
    drawn.update_yaxes(title_text="cosine", col=1)
    drawn.update_annotations(font_size=13)
    below = int((frame["cosine"] < frame["same_low"]).sum())
    least = int(frame["cosine"].idxmin())
    title = (
        f"“{result.word}” in two texts: cosine {frame['cosine'][0]:.2f} at the embedding, "
        f"{frame['cosine'][least]:.2f} at stream {least}, {frame['cosine'].iloc[-1]:.2f} at the "
        f"last;<br>below the same-sense band at {below} of {len(frame)} streams"
    )
    return drawn.update_layout(
        title_text=title, height=470, legend={"orientation": "h", "y": -0.22}, margin_t=105
    )


def _curves(result: PairDriftResult, frame: Any, taken: Any) -> list[go.Scatter]:
    """Return band, medians and the pair's own curve, with `taken` off all of them."""
    layers = frame["layer"].tolist()
    band = (frame["same_high"] - taken).tolist() + (frame["same_low"] - taken).tolist()[::-1]
    curves = [
        go.Scatter(
            x=layers + layers[::-1],
            y=band,
            fill="toself",
            fillcolor=faint(MUTED, 0.25),
            mode="lines",
            line={"width": 0},
            hoverinfo="skip",
            name=f"same sense ({result.same_words}), 5th to 95th percentile, n = {result.n_same}",
        )
    ]
    lines = {
        "same_median": ("same sense, median", {"color": MUTED}),
        "baseline": (
            f"random words, mean (n = {result.baseline.n})",
            {"color": MUTED, "dash": "dot"},
        ),
        "cosine": (f"“{result.word}” in the two texts", {"color": ACCENT, "width": 3}),
    }
    for column, (name, line) in lines.items():
        mode = "lines+markers" if column == "cosine" else "lines"
        y = (frame[column] - taken).tolist()
        curves.append(go.Scatter(x=layers, y=y, mode=mode, line=line, name=name))
    return curves


def contributions(result: PairContributions) -> go.Figure:
    """A waterfall from 0 to the whole difference: the largest shares in the order of depth."""
    frame = result.to_frame()
    shown = frame.head(_SHOWN).sort_values("layer", kind="stable", na_position="first")
    shares = shown["share"].tolist()
    rest = float(frame["share"][_SHOWN:].sum())
    labels = [_component(*row) for row in shown[["kind", "layer", "head"]].itertuples(index=False)]
    if len(frame) > _SHOWN:
        labels, shares = [*labels, f"{len(frame) - _SHOWN} others"], [*shares, rest]
    drawn = go.Figure(waterfall(labels, shares, "+.0%", "all"))
    first = frame.iloc[0]
    name = _component(first["kind"], first["layer"], first["head"])
    title = (
        f"What parts the two vectors of “{result.word}” at stream {result.layer}: {name} most, "
        f"{first['share']:+.0%};<br>shares along the difference; below 0: brings them together"
    )
    drawn.update_yaxes(title_text="share of the difference", tickformat=".0%", zeroline=True)
    return drawn.update_layout(title_text=title, height=430, showlegend=False)


def _component(kind: str, layer: float, head: float) -> str:
    """Name a component; a frame holds NaN where it has no layer or head."""
    if kind == "head":
        return f"L{int(layer)}H{int(head)}"
    name = "MLP" if kind == "mlp" else kind
    return name if layer != layer else f"{name} {int(layer)}"


def baseline(result: DriftBaseline) -> go.Figure:
    """Mean cosine of random words over streams."""
    frame = result.to_frame()
    drawn = go.Figure(
        go.Scatter(x=frame["layer"].tolist(), y=frame["cosine"].tolist(), mode="lines+markers")
    )
    title = f"Random words: mean cosine up to {frame['cosine'].max():.2f} (n = {result.n})"
    return drawn.update_layout(
        title_text=title, height=400, xaxis_title="stream", yaxis_title="mean cosine"
    )
