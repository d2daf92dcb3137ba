"""Figures of heads run one after another, of one head for several, and of what heads could do."""

from collections.abc import Sequence
from math import ceil, log10

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wvprobe.counterfactual import InteractionResult, RepeatedResult, SequentialResult
from wvprobe.counterfactual._changes import ROUNDING, ChangeResult
from wvprobe.plotting._style import ACCENT, BAD, INK, MUTED, TOP_WITH_PANELS

_COLOURS = (ACCENT, BAD, MUTED, INK, "#2e7d32", "#b7791f")
_MEASURES = {
    "kl": "KL of the next token (nats)",
    "relative_change": "‖Δ last stream‖ / ‖x‖",
}
_COLUMNS = 6  # of maps, one a layer


def sequential(result: SequentialResult) -> go.Figure:
    """Bars by block for every order, all blocks beside them, over the rounding's line."""
    drawn = _by_block(result, result.orders)
    parts = [_largest(result), _over_orders(result)]
    if float(result.interval(result.measure)[0][:-1].max()) == 0.0:
        parts = ["nothing changes"]
    title = f"Heads one after another, {_measured(result)}:<br>{'; '.join(p for p in parts if p)}"
    return drawn.update_layout(title_text=title)


def _over_orders(result: SequentialResult) -> str:
    """Say what rewriting all blocks does, from the mildest order to the harshest."""
    mean = result.interval(result.measure)[0]
    rows = [row for row, name in enumerate(result.settings) if name.startswith("all blocks, ")]
    if len(rows) < 2:
        return _together(result, result.orders[rows[0]]) if rows else ""
    ends = (pick(rows, key=lambda row: float(mean[row])) for pick in (min, max))
    return "all blocks: " + " to ".join(f"{mean[r]:.3g} ({result.orders[r]})" for r in ends)


def repeated(result: RepeatedResult) -> go.Figure:
    """Bars by block for every schedule of the one head, over the rounding's line."""
    drawn = _by_block(result, result.schedules)
    names = list(dict.fromkeys(name for name in result.schedules if name))
    parts = [_together(result, name) or _largest(result, name) for name in names]
    title = f"One head of full width, {_measured(result)}:<br>{'; '.join(p for p in parts if p)}"
    return drawn.update_layout(title_text=title)


def _measured(result: ChangeResult) -> str:
    rounding = float(result.interval(result.measure)[0][-1])
    return f"{_MEASURES[result.measure]}, {ROUNDING} {rounding:.2g}"


def _by_block(result: ChangeResult, groups: Sequence[str]) -> go.Figure:
    """Draw every setting but the rounding, which comes last, as a bar of its group's colour."""
    drawn = go.Figure()
    mean, low, high = (ends.tolist() for ends in result.interval(result.measure))
    names = result.to_frame()["layers"].tolist()
    for place, group in enumerate(dict.fromkeys(groups[:-1])):
        rows = [row for row, own in enumerate(groups[:-1]) if own == group]
        drawn.add_bar(
            x=[names[row] for row in rows],
            y=[mean[row] for row in rows],
            error_y={
                "array": [high[row] - mean[row] for row in rows],
                "arrayminus": [mean[row] - low[row] for row in rows],
                "thickness": 1,
            },
            name=group,
            marker_color=_COLOURS[place % len(_COLOURS)],
            hovertemplate=f"blocks %{{x}}, {group}<br>%{{y:.3g}}<extra></extra>",
        )
    drawn.update_xaxes(title_text="blocks changed", type="category")
    drawn.update_yaxes(title_text=_MEASURES[result.measure], exponentformat="power")
    drawn.add_hline(y=mean[-1], line={"color": INK, "dash": "dot"}, opacity=0.8)
    shown = [value for value in (*mean, *low, *high) if value > 0]  # NaN is not
    if mean[-1] > 0:
        # Blocks differ by orders of magnitude. On a log axis only a line's place is no logarithm.
        bottom, top = log10(min(shown) / 2), log10(2 * max(shown))
        drawn.update_yaxes(type="log", range=[bottom, top])
        label = {"x": 1, "xref": "paper", "xanchor": "right", "yanchor": "bottom"}
        drawn.add_annotation(y=log10(mean[-1]), text=ROUNDING, showarrow=False, **label)
    return drawn.update_layout(barmode="group", height=450)


def _largest(result: ChangeResult, group: str = "") -> str:
    """Name the single block that matters most, in a group of settings or in any."""
    mean = result.interval(result.measure)[0]
    alone = [
        row
        for row, blocks in enumerate(result.layers)
        if len(blocks) == 1 and result.settings[row].endswith(group)
    ]
    if not alone:
        return ""
    row = max(alone, key=lambda place: float(mean[place]))
    return f"{result.settings[row]}, matters most alone: {float(mean[row]):.3g}"


def _together(result: ChangeResult, group: str) -> str:
    name = f"all blocks, {group}"
    if name not in result.settings:
        return ""
    row = result.settings.index(name)
    mean, low, high = (float(ends[row]) for ends in result.interval(result.measure))
    return f"{name}: {mean:.3g} ({low:.3g} to {high:.3g})"


def interactions(result: InteractionResult) -> go.Figure:
    """A map a layer: whose output would change whom, the diagonal left out."""
    mean, low, high = result.interval()
    n_layers, h = len(result.layers), mean.shape[-1]
    apart = mean.clone()
    apart[:, range(h), range(h)] = float("nan")
    columns = min(_COLUMNS, n_layers)
    rows = ceil(n_layers / columns)
    drawn = make_subplots(
        rows,
        columns,
        subplot_titles=[f"layer {layer}" for layer in result.layers],
        vertical_spacing=0.35 / rows,
        horizontal_spacing=0.03,
    )
    for place, values in enumerate(apart):
        ends = zip(low[place].tolist(), high[place].tolist(), strict=True)
        heatmap = go.Heatmap(
            z=values.tolist(),
            customdata=[
                [f"{a:.3f} to {b:.3f}" for a, b in zip(*pair, strict=True)] for pair in ends
            ],
            coloraxis="coloraxis",
            hovertemplate=(
                f"layer {result.layers[place]}: head %{{y}} into head %{{x}}<br>"
                "%{z:.3f} (%{customdata})<extra></extra>"
            ),
        )
        drawn.add_trace(heatmap, row=place // columns + 1, col=place % columns + 1)
    drawn.update_yaxes(autorange="reversed", showticklabels=False)
    drawn.update_xaxes(showticklabels=False)
    drawn.update_yaxes(title_text="writer", showticklabels=True, col=1)
    drawn.update_xaxes(title_text="reader", showticklabels=True, row=rows)
    drawn.update_annotations(font_size=12)
    return drawn.update_layout(
        title_text=_strongest(result),
        coloraxis={"colorscale": "Blues", "cmin": 0, "colorbar": {"title": "‖Δ‖ / ‖head‖"}},
        height=200 + 150 * rows,
        margin_t=TOP_WITH_PANELS,
    )


def _strongest(result: InteractionResult) -> str:
    frame = result.to_frame().query("writer != reader").dropna(subset=["interaction"])
    found = result.agreement()
    rho = ", ".join(
        f"{row['mode']} {row['rho']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})"
        for _, row in found.iterrows()
    )
    relation = f"rank correlation with composition within layers: {rho}"
    if frame.empty:
        return f"No two heads of a block;<br>{relation}"
    top = frame.loc[frame["interaction"].idxmax()]
    layer, writer, reader = (int(top[name]) for name in ("layer", "writer", "reader"))
    return (
        f"L{layer}H{writer} would change L{layer}H{reader} most, by {top['interaction']:.2f} of "
        f"what it writes (median pair {frame['interaction'].median():.2f});<br>{relation}"
    )
