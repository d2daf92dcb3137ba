"""Figures of word pairs and of drifting words."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wvprobe.contextual_drift import DriftBaseline, PairDriftResult
from wvprobe.plotting._style import ACCENT, MUTED, STREAM_AXIS, TOP_WITH_PANELS, short
from wvprobe.word_pairs import PairScores


def pair_scores(result: PairScores) -> go.Figure:
    """Maps layer × head on one scale around 0, a panel a text and direction."""
    names, (texts, directions, layers, heads) = result.directions(), result.scores.shape
    titles = [
        f"{names[d]}{' (masked)' * bool(result.masked[t, d])}<br><i>{short(result.texts[t])}</i>"
        for t in range(texts)
        for d in range(directions)
    ]
    drawn = make_subplots(texts, directions, subplot_titles=titles, vertical_spacing=0.2)
    bound = float(result.scores.abs().max())
    for text in range(texts):
        for direction in range(directions):
            attention = result.attention[text, direction]
            heat = go.Heatmap(
                z=result.scores[text, direction].T.tolist(),
                customdata=attention.T.tolist(),
                zmin=-bound,
                zmax=bound,
                colorscale="RdBu_r",
                zmid=0,
                opacity=0.55 if result.masked[text, direction] else 1.0,
                colorbar={"title": "raw score"},
                showscale=text == direction == 0,
                hovertemplate="layer %{x}, head %{y}<br>score %{z:.2f}"
                "<br>attention %{customdata:.3f}<extra></extra>",
            )
            drawn.add_trace(heat, row=text + 1, col=direction + 1)
    drawn.update_xaxes(title_text="layer", dtick=max(1, layers // 10))
    drawn.update_yaxes(title_text="head", dtick=max(1, heads // 6))
    strongest = _strongest(result)
    return drawn.update_layout(
        title_text=strongest, height=230 + 260 * texts, margin_t=TOP_WITH_PANELS
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
    """The two vectors' cosine over streams, with the bands of same-sense and of random words."""
    frame = result.to_frame()
    layers = frame["layer"].tolist()
    drawn = go.Figure()
    drawn.add_trace(
        go.Scatter(
            x=layers + layers[::-1],
            y=frame["same_high"].tolist() + frame["same_low"].tolist()[::-1],
            fill="toself",
            fillcolor="rgba(154,165,177,0.25)",
            mode="lines",
            line={"width": 0},
            hoverinfo="skip",
            name=f"same sense ({result.same_words}), 5th to 95th percentile, n = {result.n_same}",
        )
    )
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
        drawn.add_trace(
            go.Scatter(x=layers, y=frame[column].tolist(), mode=mode, line=line, name=name)
        )
    below = int((frame["cosine"] < frame["same_low"]).sum())
    least = int(frame["cosine"].idxmin())
    title = (
        f"“{result.word}” in two texts: cosine {frame['cosine'][0]:.2f} at the embedding, "
        f"{frame['cosine'][least]:.2f} at stream {least}, {frame['cosine'].iloc[-1]:.2f} at the "
        f"last;<br>below the same-sense band at {below} of {len(frame)} streams"
    )
    return drawn.update_layout(
        title_text=title,
        height=450,
        xaxis_title=STREAM_AXIS,
        yaxis={"title": "cosine", "range": [-0.1, 1.05]},
        legend={"orientation": "h", "y": -0.22},
    )


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
