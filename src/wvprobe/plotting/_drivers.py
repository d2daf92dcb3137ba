"""Figure of what pulls senses apart."""

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wvprobe.contextual_drift import DriversResult
from wvprobe.plotting._style import ACCENT, BAD, INK, MUTED, TOP_WITH_PANELS

_SHOWN = 24


def drivers(result: DriversResult) -> go.Figure:
    """Contributions beside their control; predicted beside measured, of the strongest heads."""
    frame = result.to_frame()
    titles = (
        f"{min(_SHOWN, len(frame))} largest contributions to (x_b − x_a) · u",
        f"strongest heads: output exchanged in {len(result.words)} words",
    )
    drawn = make_subplots(2, 1, subplot_titles=titles, vertical_spacing=0.2)
    largest = frame.head(_SHOWN)
    drawn.add_trace(_bars(largest, "contribution", "low", "high", "two senses", ACCENT), 1, 1)
    drawn.add_trace(
        _bars(largest, "control", "control_low", "control_high", "one sense (control)", MUTED), 1, 1
    )
    names = [str(name) for name in result.components]
    order = [f"L{layer}H{head}" for layer, head in result.heads]
    checked = frame.set_index("component").loc[[n for n in order if n in names]].reset_index()
    for name, label, colour in (
        ("predicted", "predicted: the direct path", INK),
        ("measured", "measured: output of the other sense", ACCENT),
        ("measured_same", "measured: output of the same sense (control)", BAD),
    ):
        drawn.add_trace(_bars(checked, name, f"{name}_low", f"{name}_high", label, colour), 2, 1)
    drawn.update_annotations(font_size=13)
    drawn.update_yaxes(zeroline=True, zerolinecolor=INK)
    return drawn.update_layout(
        title_text=_title(result, frame),
        height=760,
        barmode="group",
        margin_t=TOP_WITH_PANELS,
        legend={"orientation": "h", "y": -0.08},
    )


def _bars(rows: Any, name: str, low: str, high: str, label: str, colour: str) -> go.Bar:
    """Return bars with their intervals; none for a single word."""
    spread: dict[str, Any] = {}
    if not rows[low].isna().all():
        spread["error_y"] = {
            "array": (rows[high] - rows[name]).tolist(),
            "arrayminus": (rows[name] - rows[low]).tolist(),
            "thickness": 1,
        }
    return go.Bar(
        x=rows["component"].tolist(),
        y=rows[name].tolist(),
        name=label,
        marker_color=colour,
        **spread,
    )


def _title(result: DriversResult, frame: Any) -> str:
    """Say which component has most, and how well exchanges bear the direct paths out."""
    best = frame.loc[frame["contribution"].idxmax()]
    found = result.agreement().iloc[-1]
    return (
        f"{best['component']} pulls senses apart most: {best['share']:.0%} of the separation at "
        f"stream {result.layer}; {int(frame['driver'].sum())} of {len(frame)} components are "
        f"drivers;<br>exchanges against direct paths: correlation {found['correlation']:.2f}, "
        f"slope {found['slope']:.2f} ({len(result.heads)} heads in {len(result.words)} words)"
    )
