"""Figures of heads of other ranks, of shared keys and values, and of the ranks heads need."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wvprobe.counterfactual import HeadRanks, ResizeResult, ShareResult
from wvprobe.plotting._style import ACCENT, BAD, INK, MUTED, TOP_WITH_PANELS

_COLOURS = {"uniform": INK, "energy": ACCENT, "loss": BAD}
_METHODS = {"mean": MUTED, "lstsq": INK, "svd": ACCENT, "mla": BAD}
_MEASURES = {
    "loss_delta": "change of loss (nats a token)",
    "kl": "KL(as it is ‖ changed) (nats)",
    "relative_change": "‖Δ last stream‖ / ‖x‖",
}


def resized(result: ResizeResult) -> go.Figure:
    """Change against budget, a band a way of sharing out; and the ranks that heads ask for."""
    measure = "loss_delta" if not bool(result.loss_delta.isnan().all()) else result.measure
    frame = result.to_frame()
    asked = _asked(result)
    titles = [f"{_MEASURES[measure]}, 95 % bands", f"ranks: {result.settings[asked]}"]
    drawn = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.12)
    for allocation, colour in _COLOURS.items():
        for multiple in dict.fromkeys(result.multiples):
            rows = frame.query("allocation == @allocation and multiple_of == @multiple")
            name = allocation if multiple == 1 else f"{allocation}, multiples of {multiple}"
            dash = "solid" if multiple == 1 else "dot"
            _band(drawn, rows, "budget", measure, (name, colour, dash))
    _yardstick(drawn, frame, "budget", measure)
    heat = go.Heatmap(
        z=result.ranks[asked].T.tolist(),
        zmin=0,
        zmax=int(result.ranks.max()),
        colorscale="Blues",
        colorbar={"title": "rank", "thickness": 12},
        hovertemplate="layer %{x}, head %{y}: rank %{z}<extra></extra>",
    )
    drawn.add_trace(heat, row=1, col=2)
    drawn.update_xaxes(title_text="share of the total rank", row=1, col=1)
    drawn.update_xaxes(title_text="layer", row=1, col=2)
    drawn.update_yaxes(title_text="head", row=1, col=2)
    drawn.update_annotations(font_size=13)
    return drawn.update_layout(
        title_text=_gained(result, measure),
        height=440,
        margin_t=TOP_WITH_PANELS,
        legend={"orientation": "h", "y": -0.22},
    )


def shared(result: ShareResult) -> go.Figure:
    """Change against the bytes a token leaves in the cache, a band a method."""
    measure = "loss_delta" if not bool(result.loss_delta.isnan().all()) else result.measure
    frame = result.to_frame()
    drawn = make_subplots(1, 1)
    for method, colour in _METHODS.items():
        for grouping, dash in (("order", "solid"), ("similarity", "dot")):
            # Where all heads share, grouping is none: both lines end there.
            rows = frame.query("method == @method and grouping in [@grouping, 'none']")
            if grouping == "order" or bool((rows["grouping"] == grouping).any()):
                name = method if grouping == "order" else f"{method}, by similarity"
                _band(drawn, rows, "bytes_per_token", measure, (name, colour, dash))
    _yardstick(drawn, frame, "bytes_per_token", measure)
    drawn.update_xaxes(title_text="bytes a token in the cache (bfloat16)")
    drawn.update_yaxes(title_text=f"{_MEASURES[measure]}, 95 % bands")
    few = frame[frame["bytes_per_token"] == frame["bytes_per_token"].min()]
    best = few.loc[few[measure].idxmin()]
    whole = int(result.bytes_per_token[-1])
    after = f" after “{result.after}”" if result.after else ""
    title = (
        f"{best['setting']}{after}: {best['bytes_per_token'] / whole:.0%} of the bytes for "
        f"{_told(best, measure)}<br>least of {len(few)} ways at these bytes"
    )
    return drawn.update_layout(
        title_text=title, height=460, legend={"orientation": "h", "y": -0.22}
    )


def head_ranks(result: HeadRanks) -> go.Figure:
    """Maps layer × head of the share of its width that a head needs, for OV and QK."""
    titles, told = [], []
    for part in ("OV", "QK"):
        needed, d = result.needed(part).double(), result.energies(part).shape[-1]
        titles.append(f"{part}: dimensions for {result.share:.0%} of the energy")
        told.append(f"{part} {float(needed.flatten().quantile(0.5)):.0f} of {d}")
    drawn = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.08)
    for column, part in enumerate(("OV", "QK"), start=1):
        heat = go.Heatmap(
            z=result.needed(part).T.tolist(),
            zmin=0,
            zmax=result.energies(part).shape[-1],
            colorscale="Blues",
            colorbar={"thickness": 12, "x": 0.46 if column == 1 else 1.0},
            hovertemplate=f"layer %{{x}}, head %{{y}}: {part} %{{z}}<extra></extra>",
        )
        drawn.add_trace(heat, row=1, col=column)
    drawn.update_xaxes(title_text="layer")
    drawn.update_yaxes(title_text="head", col=1)
    drawn.update_annotations(font_size=13)
    title = f"The median head holds {result.share:.0%} of its energy in {', '.join(told)}"
    return drawn.update_layout(title_text=title, height=420, margin_t=TOP_WITH_PANELS)


def _asked(result: ResizeResult) -> int:
    """Return the setting whose ranks are shown: an uneven one, at the smallest budget."""

    def prefer(at: int) -> tuple[int, float]:
        ways = ("loss", "energy", "uniform", "none")
        return ways.index(result.allocations[at]), result.budgets[at]

    return min(range(len(result.settings)), key=prefer)


def _gained(result: ResizeResult, measure: str) -> str:
    """Return the title: what the uneven split gains at the smallest budget."""
    at = _asked(result)
    budget = result.budgets[at]
    pairs = [
        other
        for other in range(len(result.settings))
        if (result.budgets[other], result.allocations[other]) == (budget, "uniform")
    ]
    frame = result.to_frame()
    if not pairs or result.allocations[at] == "uniform":
        return f"{result.settings[at]}: {_told(frame.iloc[at], measure)}"
    rows = result.gain_frame().query("measure == @measure")
    row = rows[(rows["setting"] == result.settings[at]) & rows["versus"].isin(frame["setting"])]
    gain = row.iloc[0]
    return (
        f"{result.part} at {budget:.0%} of the rank: {_told(frame.iloc[pairs[0]], measure)} "
        f"shared out evenly,<br>ranks by {result.allocations[at]} gain {gain['gain']:.3f} "
        f"({gain['low']:.3f} to {gain['high']:.3f})"
    )


def _told(row: Any, measure: str) -> str:
    what = {
        "loss_delta": "{:+.3f} nats",
        "kl": "a KL of {:.3f}",
        "relative_change": "‖Δx‖ / ‖x‖ of {:.1%}",
    }
    return what[measure].format(row[measure])


def _yardstick(drawn: go.Figure, frame: Any, x: str, measure: str) -> None:
    """Draw what rounding to bf16 does, as a dashed line."""
    value = float(frame[measure].iloc[-1])
    line = go.Scatter(
        x=[frame[x].min(), frame[x].max()],
        y=[value, value],
        mode="lines",
        line={"color": MUTED, "dash": "dash", "width": 1},
        name="bf16 rounding",
    )
    drawn.add_trace(line, row=1, col=1)


def _band(drawn: go.Figure, rows: Any, x: str, measure: str, style: Sequence[str]) -> None:
    """Add a line with its band to the first panel."""
    if not len(rows):
        return
    name, colour, dash = style
    rows = rows.sort_values(x)
    at = rows[x].tolist()
    if not bool(rows[f"{measure}_low"].isna().all()):
        ends = rows[f"{measure}_high"].tolist() + rows[f"{measure}_low"].tolist()[::-1]
        area = go.Scatter(
            x=at + at[::-1],
            y=ends,
            mode="lines",
            fill="toself",
            opacity=0.2,
            fillcolor=colour,
            line={"width": 0},
            showlegend=False,
            hoverinfo="skip",
        )
        drawn.add_trace(area, row=1, col=1)
    line = go.Scatter(
        x=at,
        y=rows[measure].tolist(),
        mode="lines+markers",
        name=name,
        line={"color": colour, "dash": dash},
        text=rows["setting"].tolist(),
        hovertemplate="%{text}: %{y:.4f}<extra></extra>",
    )
    drawn.add_trace(line, row=1, col=1)
