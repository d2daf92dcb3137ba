"""Figures of what scores are made of: ledgers, their causal check, shares between two texts."""

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from torch import Tensor

from wvprobe.context_shares import ContextResult
from wvprobe.ledger import CausalCheckResult, LedgerResult, Part
from wvprobe.plotting._style import ACCENT, BAD, INK, MUTED, TOP_WITH_PANELS, short, waterfall

_SHOWN = 12  # terms of a waterfall that have a bar of their own
_PART_NAMES = ("query content", "key content", "offset")


def ledger(result: LedgerResult) -> go.Figure:
    """A waterfall of the largest terms up to the score, and a matrix of query against key."""
    titles = ("the largest terms", f"all terms: {_matrix_of(result)}")
    drawn = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.16)
    drawn.add_trace(_waterfall(result), row=1, col=1)
    drawn.add_trace(_matrix(result), row=1, col=2)
    drawn.update_yaxes(title_text="raw score", zeroline=True, row=1, col=1)
    drawn.update_yaxes(title_text="query", autorange="reversed", row=1, col=2)
    drawn.update_xaxes(title_text="key", row=1, col=2)
    drawn.update_annotations(font_size=13)
    first = result.top(1).iloc[0]
    masked = " (masked)" * result.masked
    constant = float(result.terms[result.is_gauge].sum())
    title = (
        f"{result.query}→{result.key}{masked} at L{result.layer}H{result.head}: raw score "
        f"{result.total:.2f}, of which {first['query_component']} × {first['key_component']} "
        f"{first['term']:+.2f}<br>in “{short(result.text)}”; {constant:+.2f} of it is constant "
        "over keys, which softmax ignores"
    )
    return drawn.update_layout(
        title_text=title, height=480, showlegend=False, margin_t=TOP_WITH_PANELS
    )


def _waterfall(result: LedgerResult) -> go.Waterfall:
    top = result.top(min(_SHOWN, result.terms.numel()))
    names = (top["query_component"] + " × " + top["key_component"]).tolist()
    values = top["term"].tolist()
    others = result.terms.numel() - len(values)
    if others:
        names, values = [*names, f"{others} others"], [*values, result.total - sum(values)]
    return waterfall(names, values, "+.2f", "score")


def _matrix(result: LedgerResult) -> go.Heatmap:
    (rows, at), (columns, to) = (_bins(parts) for parts in (result.query_parts, result.key_parts))
    summed = torch.zeros(len(rows), len(columns), dtype=torch.float64)
    summed.index_put_((at[:, None], to[None]), result.terms, accumulate=True)
    bound = float(summed.abs().max())
    return go.Heatmap(
        x=columns,
        y=rows,
        z=summed.tolist(),
        zmin=-bound,
        zmax=bound,
        colorscale="RdBu_r",
        colorbar={"title": "sum of<br>terms"},
        hovertemplate="query %{y}<br>key %{x}<br>%{z:.3f}<extra></extra>",
    )


def _matrix_of(result: LedgerResult) -> str:
    return "source tokens" if result.group == "source" else "by kind"


def _bins(parts: tuple[Part, ...]) -> tuple[list[str], Tensor]:
    """Return the rows of the matrix, and the row of each part: source tokens, or kinds."""
    names = [part.name if part.kind == "source" else part.kind for part in parts]
    rows = list(dict.fromkeys(names))
    return rows, torch.tensor([rows.index(name) for name in names])


def causal_check(result: CausalCheckResult) -> go.Figure:
    """Measured against predicted changes, a panel a side; the line is where both are equal."""
    frame, summary = result.to_frame(), result.summary().query("terms == 'all'")
    titles = ("query's component out", "key's component out", "their one term")
    drawn = make_subplots(1, 3, subplot_titles=titles, horizontal_spacing=0.07)
    for column, (_, rows) in enumerate(frame.groupby("side", sort=False), start=1):
        bound = float(rows[["predicted", "direct"]].abs().max().max())
        line = go.Scatter(
            x=[-bound, bound], y=[-bound, bound], mode="lines", line={"color": MUTED, "width": 1}
        )
        drawn.add_trace(line.update(showlegend=False, hoverinfo="skip"), row=1, col=column)
        names = (rows["query_component"] + " × " + rows["key_component"]).tolist()
        for measure, colour in (("direct", ACCENT), ("total", BAD)):
            dots = go.Scatter(
                x=rows["predicted"].tolist(),
                y=rows[measure].tolist(),
                mode="markers",
                name=measure,
                text=names,
                marker={"color": colour, "size": 7, "opacity": 0.7},
                showlegend=column == 1,
                hovertemplate="%{text}<br>predicted %{x:.3g}, measured %{y:.3g}<extra></extra>",
            )
            drawn.add_trace(dots, row=1, col=column)
    drawn.update_xaxes(title_text="predicted: scales frozen")
    drawn.update_yaxes(title_text="measured", col=1)
    drawn.update_annotations(font_size=13)
    one = summary[summary["side"] == "both"].set_index("measured")["correlation"]
    title = (
        f"Terms foretell removal with norms anew at r = {one['direct']:.2f}, in the whole model at "
        f"r = {one['total']:.2f} (n = {len(result.components)})<br>{short(result.ledger, 90)}"
    )
    return drawn.update_layout(title_text=title, height=440, margin_t=TOP_WITH_PANELS)


def context_shares(result: ContextResult) -> go.Figure:
    """Mean size of each part's share over a layer's heads, stacked, beside the change's own."""
    sizes = (result.shares.abs() / result.scale).mean(dim=-1)
    whole = ((result.scores[1] - result.scores[0]).abs() / result.scale).mean(dim=-1)
    layers, drawn = list(range(len(whole))), go.Figure()
    for name, size, colour in zip(_PART_NAMES, sizes, (MUTED, BAD, ACCENT), strict=True):
        drawn.add_bar(x=layers, y=size.tolist(), name=name, marker_color=colour)
    drawn.add_trace(
        go.Scatter(
            x=layers,
            y=whole.tolist(),
            mode="lines+markers",
            name="the change itself",
            line={"color": INK, "width": 1},
        )
    )
    total = sizes.sum(dim=1)
    most = int(total.argmax())
    shares = [f"{float(size / total.sum()):.0%}" for size in total]
    others = " and ".join(
        f"{name} {share}"
        for n, (name, share) in enumerate(zip(_PART_NAMES, shares, strict=True))
        if n != most
    )
    content = float(sizes[:2, 0].max())
    first = "position alone" if content <= 1e-5 and float(sizes[2, 0]) > 1e-5 else "not it alone"
    title = (
        f"{result.pair()}: {_PART_NAMES[most]} makes up {shares[most]} of the shares in its "
        f"scores' changes, {others};<br>at layer 0 {first}. Opposite shares cancel in a change"
    )
    drawn.update_yaxes(title_text="mean over heads of |share| / c‖q‖‖k‖")
    return drawn.update_layout(
        title_text=title, height=420, barmode="stack", xaxis={"title": "layer"}
    )
