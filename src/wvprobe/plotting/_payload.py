"""Figures of what values carry: maps of heads, values against queries and keys, erasures."""

from typing import Any

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from torch import Tensor

from wvprobe._types import HeadId
from wvprobe.plotting._style import ACCENT, BAD, INK, MUTED, OCHRE, TOP_WITH_PANELS, faint
from wvprobe.value_payload import EraseResult, LabourResult, PayloadMap, PayloadResult

_LEVEL = 0.05
_SHOWN = 15  # heads that have bars of their own
_COLOURS = {"v": ACCENT, "q": BAD, "k": OCHRE}
_BANDS = {site: faint(colour) for site, colour in _COLOURS.items()}
_PLACES = {"v": "v at the target", "z": "z at the destination", "attn_added": "attn_added there"}


def payload(result: PayloadResult) -> go.Figure:
    """Maps layer × head of the first site: score, excess over random projections, over q."""
    site = result.site[0]
    panels = [("score", result.score, None)]
    panels += [
        (f"excess over {_name(name)}", result.excess[name], result.p)
        for name in ("random", "q", "pca")
        if name in result.excess and not bool(result.grid(site, result.excess[name]).isnan().any())
    ][:2]
    drawn = make_subplots(
        1, len(panels), subplot_titles=[title for title, _, _ in panels], horizontal_spacing=0.1
    )
    ends = [axis.domain[1] for axis in drawn.select_xaxes()]
    # Excesses share one scale around 0.
    bound = _bound([result.grid(site, values) for _, values, p in panels if p is not None])
    for column, (title, values, p) in enumerate(panels, start=1):
        grid = result.grid(site, values)
        heat = _score_map(grid) if p is None else _excess_map(grid, bound)
        bar = {"thickness": 10, "len": 0.9, "x": ends[column - 1] + 0.005}
        heat.update(
            colorbar=bar,
            showscale=p is None or column == len(panels),
            hovertemplate=f"layer %{{x}}, head %{{y}}<br>{title} %{{z:.3f}}<extra></extra>",
        )
        drawn.add_trace(heat, row=1, col=column)
    _head_axes(drawn, result.grid(site, result.score))
    return drawn.update_layout(
        title_text=_title(result, site), height=430, margin_t=TOP_WITH_PANELS
    )


def _title(result: PayloadResult, site: str) -> str:
    frame = result.best(1, site=site).iloc[0]
    own = [name == site for name in result.site]
    count = sum(own)
    found = int((result.p_family[torch.tensor(own)] < _LEVEL).sum())
    head = HeadId(int(frame["layer"]), int(frame["head"]))
    units = "lemmas" if result.method == "centroid" else "independent groups"
    return (
        f"{result.label} in {site}: {head} has {frame['score']:.3f}, "
        f"{frame['excess_random']:+.3f} over random projections "
        f"[{frame['excess_random_low']:+.3f}, {frame['excess_random_high']:+.3f}];<br>"
        f"{found} of {count} heads beat a random projection (family-wise p < {_LEVEL}), "
        f"{result.n_items:,} words, {result.n_groups:,} {units}"
    )


def payload_map(result: PayloadMap) -> go.Figure:
    """Every property's map of excess over random projections, on one scale around 0."""
    names = list(result.results)
    grids = {n: one.grid(one.site[0], one.excess["random"]) for n, one in result.results.items()}
    bound = _bound(list(grids.values()))
    titles = [f"{name} ({one.site[0]})" for name, one in result.results.items()]
    drawn = make_subplots(1, len(names), subplot_titles=titles, horizontal_spacing=0.06)
    for column, name in enumerate(names, start=1):
        heat = _excess_map(grids[name], bound).update(
            showscale=column == len(names),
            colorbar={"title": "excess", "thickness": 10},
            hovertemplate="layer %{x}, head %{y}<br>%{z:+.3f}<extra></extra>",
        )
        drawn.add_trace(heat, row=1, col=column)
    _head_axes(drawn, next(iter(grids.values())))
    parts = []
    for name, one in result.results.items():
        row = one.best(1, site=one.site[0]).iloc[0]
        head = HeadId(int(row["layer"]), int(row["head"]))
        parts.append(f"{name} {head} ({row['excess_random']:+.3f})")
    title = "Largest excess over random projections of the input:<br>" + ", ".join(parts)
    return drawn.update_layout(title_text=title, height=400, margin_t=TOP_WITH_PANELS)


def labour(result: LabourResult) -> go.Figure:
    """Mean score of v, q and k by layer with bands, and v − q, v − k around 0."""
    titles = ["mean over a layer's heads", "v − q, v − k"]
    drawn = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.1)
    layers = list(range(result.score.shape[1]))
    for place, site in enumerate(("v", "q", "k")):
        band = (result.low[place], result.high[place])
        for trace in _band(layers, result.score[place], band, site, site):
            drawn.add_trace(trace, row=1, col=1)
    for place, other in enumerate(("q", "k")):
        band = (result.contrast_low[place], result.contrast_high[place])
        for trace in _band(layers, result.contrast[place], band, other, f"v − {other}"):
            drawn.add_trace(trace, row=1, col=2)
    drawn.add_hline(y=0.0, line={"color": MUTED, "dash": "dot"}, row=1, col=2)  # pyright: ignore[reportArgumentType]
    drawn.update_xaxes(title_text="layer", dtick=max(1, len(layers) // 10))
    drawn.update_yaxes(title_text=result.score_name.replace("_", " "), row=1, col=1)
    frame = result.contrasts_frame()
    parts = []
    for other in ("q", "k"):
        rows = frame[frame["against"] == other]
        row = rows[rows["reference"] == "majority"].iloc[0]
        parts.append(f"v − {other} {row['value']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}]")
    value, low, high = result.range.tolist()
    title = (
        f"{result.label}, mean over layers: {', '.join(parts)};<br>v ranges over "
        f"{value:.3f} [{low:.3f}, {high:.3f}] between layers"
    )
    return drawn.update_layout(
        title_text=title,
        height=430,
        margin_t=TOP_WITH_PANELS,
        legend={"orientation": "h", "y": -0.2},
    )


def _band(
    layers: list[int], values: Tensor, ends: tuple[Tensor, Tensor], site: str, name: str
) -> list[go.Scatter]:
    low, high = (end.tolist() for end in ends)
    return [
        go.Scatter(
            x=layers + layers[::-1],
            y=high + low[::-1],
            fill="toself",
            fillcolor=_BANDS[site],
            mode="lines",
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
        ),
        go.Scatter(
            x=layers,
            y=values.tolist(),
            mode="lines+markers",
            line={"color": _COLOURS[site], "width": 2},
            marker={"size": 5},
            name=name,
        ),
    ]


def erasure(result: EraseResult) -> go.Figure:
    """What erasing the label and random directions cost, head by head, at each place."""
    frame = result.to_frame()
    order = frame[frame["place"] == "z"].sort_values("excess_loss", ascending=False, kind="stable")
    chosen = [(int(a), int(b)) for a, b in order[["layer", "head"]].head(_SHOWN).to_numpy()]
    names = [str(HeadId(*head)) for head in chosen]
    places = list(_PLACES)
    drawn = make_subplots(
        len(places), 1, subplot_titles=[_PLACES[p] for p in places], shared_xaxes=True
    )
    for row, place in enumerate(places, start=1):
        own = frame[frame["place"] == place].set_index(["layer", "head"]).loc[chosen]
        for column, name, colour in (
            ("loss", "label erased", BAD),
            ("control_loss", "random directions of equal rank and energy", MUTED),
        ):
            bar = go.Bar(
                x=names,
                y=own[column].tolist(),
                error_y=_errors(own, column),
                marker={"color": colour},
                name=name,
                showlegend=row == 1,
            )
            drawn.add_trace(bar, row=row, col=1)
    drawn.update_yaxes(title_text="loss", zeroline=True, zerolinecolor=INK)
    return drawn.update_layout(
        title_text=_erasure_title(result, order),
        barmode="group",
        height=620,
        margin_t=TOP_WITH_PANELS,
        legend={"orientation": "h", "y": -0.08},
    )


def _erasure_title(result: EraseResult, order: Any) -> str:
    first = order.iloc[0]
    head = HeadId(int(first["layer"]), int(first["head"]))
    found = int((order["p_family"] < _LEVEL).sum())
    where = "itself" if result.destination == "target" else "the last token"
    return (
        f"Erasing {result.label} from {head}'s values costs z of {where} {first['loss']:.3f}, "
        f"random directions {first['control_loss']:.3f};<br>it costs z more than they do in "
        f"{found} of {len(order)} heads (family-wise p < {_LEVEL})"
    )


def _errors(frame: Any, column: str) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": (frame[f"{column}_high"] - frame[column]).tolist(),
        "arrayminus": (frame[column] - frame[f"{column}_low"]).tolist(),
        "thickness": 1,
    }


def _score_map(grid: Tensor) -> go.Heatmap:
    return go.Heatmap(z=grid.T.tolist(), colorscale="Viridis")


def _excess_map(grid: Tensor, bound: float) -> go.Heatmap:
    return go.Heatmap(z=grid.T.tolist(), zmin=-bound, zmax=bound, colorscale="RdBu_r")


def _bound(grids: list[Tensor]) -> float:
    return max((float(grid.abs().max()) for grid in grids), default=1.0) or 1.0


def _head_axes(drawn: go.Figure, grid: Tensor) -> None:
    drawn.update_xaxes(title_text="layer", dtick=max(1, len(grid) // 6))
    drawn.update_yaxes(dtick=max(1, grid.shape[1] // 6))
    drawn.update_yaxes(title_text="head", col=1)
    drawn.update_annotations(font_size=13)


def _name(reference: str) -> str:
    return {
        "random": "random projections",
        "q": "the layer's q",
        "pca": "principal components",
    }[reference]
