"""Figures of probes: scores by site, and what they add to a reference."""

from itertools import product
from typing import Any

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from torch import Tensor

from wvprobe.plotting._style import ACCENT, MUTED, TOP_WITH_PANELS
from wvprobe.probes.results import ProbeResult

_LEVEL = 0.05
_WORDS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro F1",
    "cross_entropy": "cross-entropy (bits)",
}


def probes(result: ProbeResult) -> go.Figure:
    """Score and excess over a reference: maps of two site axes, points with intervals of one."""
    reference = next(iter(result.excess))
    if not result.site_axes:
        drawn = _references(result)
    elif len(result.site_axes) == 1:
        drawn = _points(result, reference)
    else:
        drawn = _maps(result, reference)
    return drawn.update_layout(title_text=_title(result, reference), margin_t=TOP_WITH_PANELS)


def _references(result: ProbeResult) -> go.Figure:
    """One site: its excess over every reference."""
    names = list(result.excess)
    values, low, high = (
        [float(part[name]) for name in names]
        for part in (result.excess, result.excess_low, result.excess_high)
    )
    drawn = go.Figure(_with_intervals(names, values, low, high, ACCENT))
    drawn.add_hline(y=0.0, line={"color": MUTED, "dash": "dot"})
    drawn.update_xaxes(title_text="reference")
    drawn.update_yaxes(title_text=f"{_WORDS[result.score]}: excess")
    return drawn.update_layout(height=430, showlegend=False)


def _points(result: ProbeResult, reference: str) -> go.Figure:
    """One axis of sites: score beside the reference's, and the excess."""
    word = _WORDS[result.score]
    drawn = make_subplots(1, 2, subplot_titles=[word, f"excess over {reference}"])
    sites = [str(label) for label in result.site_labels[0]]
    parts = (
        (result.scores[result.score], result.low[result.score], result.high[result.score]),
        (result.excess[reference], result.excess_low[reference], result.excess_high[reference]),
    )
    for column, part in enumerate(parts, start=1):
        value, low, high = (values.tolist() for values in part)
        trace = _with_intervals(sites, value, low, high, ACCENT)
        drawn.add_trace(trace.update(name="sites"), row=1, col=column)
    held = go.Scatter(
        x=sites,
        y=result.reference_scores[reference].tolist(),
        mode="markers",
        marker={"color": MUTED, "symbol": "line-ew-open", "size": 10},
        name=reference,
    )
    drawn.add_trace(held, row=1, col=1)
    drawn.add_hline(y=0.0, line={"color": MUTED, "dash": "dot"}, row=1, col=2)  # pyright: ignore[reportArgumentType]
    drawn.update_xaxes(title_text=result.site_axes[0])
    return drawn.update_layout(height=430, showlegend=False)


def _with_intervals(x: Any, y: Any, low: Any, high: Any, colour: str) -> go.Scatter:
    bars = {
        "type": "data",
        "symmetric": False,
        "array": [top - at for top, at in zip(high, y, strict=True)],
        "arrayminus": [at - bottom for bottom, at in zip(low, y, strict=True)],
        "thickness": 1,
    }
    return go.Scatter(x=x, y=y, error_y=bars, mode="markers", marker={"color": colour})


def _maps(result: ProbeResult, reference: str) -> go.Figure:
    """Two axes of sites (the later ones side by side): score, and excess around 0."""
    word = _WORDS[result.score]
    drawn = make_subplots(1, 2, subplot_titles=[word, f"excess over {reference}"])
    score = _grid(result.scores[result.score])
    excess, p = _grid(result.excess[reference]), _grid(result.excess_p[reference])
    bound = float(excess.abs().max())
    first, *rest = result.site_axes
    at = f"{first} %{{x}}, {' · '.join(rest)} %{{y}}"
    labels, *others = result.site_labels
    x = [str(label) for label in labels]
    y = [" · ".join(map(str, row)) for row in product(*others)]
    drawn.add_trace(
        go.Heatmap(
            x=x,
            y=y,
            z=score.T.tolist(),
            colorscale="Blues" if result.score != "cross_entropy" else "Blues_r",
            colorbar={"x": 0.46, "thickness": 10},
            hovertemplate=f"{at}<br>%{{z:.3f}}<extra></extra>",
        ),
        row=1,
        col=1,
    )
    drawn.add_trace(
        go.Heatmap(
            x=x,
            y=y,
            z=excess.T.tolist(),
            customdata=p.T.tolist(),
            zmin=-bound,
            zmax=bound,
            zmid=0,
            colorscale="RdBu_r",
            colorbar={"x": 1.0, "thickness": 10},
            hovertemplate=f"{at}<br>%{{z:+.3f}}, p %{{customdata:.3g}}<extra></extra>",
        ),
        row=1,
        col=2,
    )
    # Categories, since labels need not follow one another.
    drawn.update_xaxes(title_text=first, type="category", tickvals=x[:: max(1, len(x) // 10)])
    drawn.update_yaxes(type="category", tickvals=y[:: max(1, len(y) // 6)])
    drawn.update_yaxes(title_text=" · ".join(rest), col=1)
    return drawn.update_layout(height=430, xaxis_domain=[0, 0.45], xaxis2_domain=[0.55, 0.99])


def _grid(values: Tensor) -> Tensor:
    return values.reshape(values.shape[0], -1)


def _title(result: ProbeResult, reference: str) -> str:
    excess = result.excess[reference].flatten()
    best = int(excess.nan_to_num(-torch.inf).argmax())
    rows = list(product(*result.site_labels))
    pairs = zip(result.site_axes, rows[best], strict=True)
    where = ", ".join(f"{axis.replace('_', ' ')} {label}" for axis, label in pairs)
    parts = (result.excess_low[reference], result.excess_high[reference])
    low, high = (float(part.flatten()[best]) for part in parts)
    score = float(result.scores[result.score].flatten()[best])
    found = int((result.excess_p[reference] < _LEVEL).sum())
    count = result.gradient.numel()
    return (
        f"{where[:1].upper() + where[1:] + ': ' if where else ''}"
        f"{_WORDS[result.score]} {score:.3f}, {float(excess[best]):+.3f} over {reference} "
        f"[{low:+.3f}, {high:+.3f}];<br>{found} of {count} site{'s' * (count != 1)} above "
        f"{reference} (family-wise p < {_LEVEL}), {result.n_groups:,} independent units"
    )
