"""One figure a result type; the only module that draws."""

from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wvprobe._types import Result
from wvprobe.activations import Activations
from wvprobe.adapters import PAIR_SITES
from wvprobe.auditing import AuditResult
from wvprobe.contextual_drift import DriftBaseline, PairDriftResult
from wvprobe.errors import InputError
from wvprobe.word_pairs import PairScores

_INK, _ACCENT, _MUTED, _BAD = "#1f2933", "#1f5fa8", "#9aa5b1", "#b3261e"
_STATUS = {"ok": _ACCENT, "failed": _BAD}


def figure(result: Result) -> go.Figure:
    """Return a result's figure.

    Raises:
        InputError: there is none for this type.
    """
    drawer = _DRAWERS.get(type(result))
    if drawer is None:
        known = ", ".join(kind.__name__ for kind in _DRAWERS)
        raise InputError(
            f"`result` must be one of {known}. Got {type(result).__name__} instead. "
            "Use .to_frame() and draw it yourself."
        )
    drawn = drawer(result)
    drawn.update_layout(
        margin={"l": 60, "r": 20, "t": 130 if isinstance(result, PairScores) else 85, "b": 50},
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "color": _INK, "size": 13},
        title={"x": 0, "xref": "paper", "y": 1, "yref": "container", "yanchor": "top"},
        title_pad={"t": 22},
        title_font={"size": 16},
    )
    return drawn


def script() -> str:
    """Return plotly's own JavaScript, for a page that opens without a network."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _pair_scores(result: PairScores) -> go.Figure:
    """Maps layer × head on one scale around 0, a panel a text and direction."""
    names, (texts, directions, layers, heads) = result.directions(), result.scores.shape
    titles = [
        f"{names[d]}{' (masked)' * bool(result.masked[t, d])}<br><i>{_short(result.texts[t])}</i>"
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
    return drawn.update_layout(title_text=strongest, height=230 + 260 * texts)


def _strongest(result: PairScores) -> str:
    """Say which visible pair attends most, and with what weight."""
    flat = int(result.attention.flatten().argmax())
    text, rest = divmod(flat, result.attention[0].numel())
    direction, rest = divmod(rest, result.attention[0, 0].numel())
    layer, head = divmod(rest, result.attention.shape[-1])
    weight = float(result.attention.max())
    return (
        f"Strongest link: {result.directions()[direction]} at layer {layer}, head {head} puts "
        f"{weight:.0%} of its attention there<br>in “{_short(result.texts[text])}”"
    )


def _pair_drift(result: PairDriftResult) -> go.Figure:
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
        "same_median": ("same sense, median", {"color": _MUTED}),
        "baseline": (
            f"random words, mean (n = {result.baseline.n})",
            {"color": _MUTED, "dash": "dot"},
        ),
        "cosine": (f"“{result.word}” in the two texts", {"color": _ACCENT, "width": 3}),
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
        xaxis_title="stream (0: embedding; k: after block k − 1)",
        yaxis={"title": "cosine", "range": [-0.1, 1.05]},
        legend={"orientation": "h", "y": -0.22},
    )


def _baseline(result: DriftBaseline) -> go.Figure:
    """Mean cosine of random words over streams."""
    frame = result.to_frame()
    drawn = go.Figure(
        go.Scatter(x=frame["layer"].tolist(), y=frame["cosine"].tolist(), mode="lines+markers")
    )
    title = f"Random words: mean cosine up to {frame['cosine'].max():.2f} (n = {result.n})"
    return drawn.update_layout(
        title_text=title, height=400, xaxis_title="stream", yaxis_title="mean cosine"
    )


def _audit(result: AuditResult) -> go.Figure:
    """Errors of all identities on a logarithmic axis, with the tolerance."""
    frame = result.to_frame()
    held = frame[frame["status"] != "not applicable"][::-1]
    smallest = 1e-9  # an error of 0 gets a bar too
    drawn = go.Figure(
        go.Bar(
            x=held["error"].clip(lower=smallest).tolist(),
            y=held["identity"].tolist(),
            orientation="h",
            marker_color=[_STATUS[status] for status in held["status"]],
            hovertemplate="%{y}<br>error %{x:.1e}<extra></extra>",
        )
    )
    drawn.add_vline(x=float(frame["tolerance"].max()), line={"color": _BAD, "dash": "dash"})
    failed = int((frame["status"] == "failed").sum())
    worst = float(held["error"].max())
    title = (
        f"{len(held)} identities hold; the largest error is {worst:.1e}"
        if not failed
        else f"{failed} of {len(held)} identities failed"
    )
    drawn.update_xaxes(
        type="log", exponentformat="power", title_text="largest relative error (dashed: tolerance)"
    )
    return drawn.update_layout(title_text=title, height=160 + 28 * len(held))


def _activations(result: Activations) -> go.Figure:
    """Mean vector length by layer, a line a site."""
    drawn = go.Figure()
    for site, value in result.values.items():
        if site in PAIR_SITES:
            continue
        layers = result.layers[site]
        at = result.axes(site).index("layer")
        norms = value.float().flatten(at + 1).norm(dim=-1)
        if result.mask is not None:
            mean = norms.sum(dim=(0, 1)) / result.mask.sum()
        else:
            mean = norms.mean(dim=0)
        drawn.add_trace(
            go.Scatter(x=list(layers), y=mean.tolist(), name=site, mode="lines+markers")
        )
    if not drawn.data:
        raise InputError("pattern and scores have no vector lengths to draw; use .to_frame().")
    return drawn.update_layout(
        title_text=f"Length of vectors by layer, mean over {len(result.texts)} text(s)",
        xaxis_title="layer",
        yaxis={"title": "‖x‖, heads together", "type": "log"},
        height=430,
    )


def _short(text: str, length: int = 60) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


_DRAWERS: dict[type, Callable[[Any], go.Figure]] = {
    Activations: _activations,
    AuditResult: _audit,
    DriftBaseline: _baseline,
    PairDriftResult: _pair_drift,
    PairScores: _pair_scores,
}
