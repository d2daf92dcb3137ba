"""Figures of composition: the strongest edges, maps of all pairs, overlaps of subspaces."""

from typing import Any

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from torch import Tensor

from wvprobe._types import HeadId
from wvprobe.compose import CompositionResult
from wvprobe.plotting._style import ACCENT, MUTED, TOP_WITH_PANELS
from wvprobe.subspaces import OverlapResult

_EDGES, _FEWER_EDGES = 60, 20
_LEVEL = 0.05
# Beyond so many heads a map shows the highest of each pair of layers.
_MOST_HEADS = 400
_ENTERS = {"Q": "queries", "K": "keys", "V": "values"}


def composition(result: CompositionResult) -> go.Figure:
    """Strongest edges between heads by layer above, a map writer × reader below."""
    edges, which = _drawn_edges(result)
    drawn = make_subplots(
        2,
        1,
        row_heights=[0.45, 0.55],
        vertical_spacing=0.14,
        subplot_titles=[which, "score of every pair whose writer comes first"],
    )
    layers, heads = result.scores.shape[:2]
    dots = torch.cartesian_prod(torch.arange(layers), torch.arange(heads)).reshape(-1, 2)
    drawn.add_trace(
        go.Scatter(
            x=dots[:, 0].tolist(),
            y=dots[:, 1].tolist(),
            mode="markers",
            marker={"color": MUTED, "size": 4},
            text=[str(HeadId(*dot)) for dot in dots.tolist()],
            hovertemplate="%{text}<extra></extra>",
        ),
        row=1,
        col=1,
    )
    highest = float(edges["score"].max()) if len(edges) else 1.0
    for edge in edges.itertuples():
        label = f"{_name(edge)}: score {edge.score:.3f}, q {edge.q:.2g}"
        drawn.add_trace(
            go.Scatter(
                x=[edge.writer_layer, edge.reader_layer],
                y=[edge.writer_head, edge.reader_head],
                mode="lines",
                line={"color": ACCENT, "width": 0.5 + 4.5 * edge.score / highest},
                opacity=0.5,
                text=[label, label],
                hovertemplate="%{text}<extra></extra>",
            ),
            row=1,
            col=1,
        )
    scores = torch.where(_ahead(result.scores), result.scores, torch.nan)
    drawn.add_trace(
        go.Heatmap(
            **_pair_map(scores),
            colorscale="Blues",
            zmin=0,
            zmax=highest,
            colorbar={"title": "score", "len": 0.5, "y": 0.25},
        ),
        row=2,
        col=1,
    )
    drawn.update_xaxes(title_text="layer", row=1, col=1)
    drawn.update_yaxes(title_text="head", row=1, col=1)
    unit = "head" if layers * heads <= _MOST_HEADS else "layer (highest of its heads)"
    drawn.update_xaxes(title_text=f"reader, {unit}", row=2, col=1)
    drawn.update_yaxes(title_text="writer", autorange="reversed", row=2, col=1)
    return drawn.update_layout(
        title_text=_composition_title(result),
        height=1000,
        showlegend=False,
        margin_t=TOP_WITH_PANELS,
    )


def _drawn_edges(result: CompositionResult) -> tuple[Any, str]:
    """Return the edges to draw: those found, or the strongest where none is."""
    found = result.top(_EDGES + 1, level=_LEVEL)
    if len(found) > _EDGES:
        return found.head(_EDGES), f"strongest {_EDGES} of the pairs at q < {_LEVEL}"
    if len(found):
        return found, f"pairs at q < {_LEVEL}"
    strongest = result.top(_FEWER_EDGES)
    return strongest, f"strongest {len(strongest)} pairs"


def _composition_title(result: CompositionResult) -> str:
    possible = _ahead(result.scores)
    if not bool(possible.any()):
        return "One layer: no head comes before another"
    edge = next(result.top(1).itertuples())
    pairs = int(possible.sum())
    found = int((result.q_values[possible] < _LEVEL).sum())
    return (
        f"{_name(edge)} feeds {_ENTERS[result.mode]} most: {result.mode}-composition "
        f"{edge.score:.3f}, q {edge.q:.2g};<br>{found:,} of {pairs:,} pairs stand out from "
        f"those that cannot compose (q < {_LEVEL})"
    )


def _name(edge: Any) -> str:
    writer = HeadId(edge.writer_layer, edge.writer_head)
    reader = HeadId(edge.reader_layer, edge.reader_head)
    return f"{writer} → {reader}"


def overlap(result: OverlapResult) -> go.Figure:
    """Overlap less what random subspaces have, of every pair, around zero."""
    excess = result.overlap - result.expected
    by_layer = result.kind == "V"
    if by_layer:
        off = ~torch.eye(len(excess), dtype=torch.bool, device=excess.device)
        excess = torch.where(off, excess, torch.nan)[:, None, :, None]
    bound = float(excess.abs().nan_to_num().max())
    drawn = go.Figure(
        go.Heatmap(
            **_pair_map(excess),
            colorscale="RdBu_r",
            zmid=0,
            zmin=-bound,
            zmax=bound,
            colorbar={"title": "overlap −<br>random"},
        )
    )
    drawn.update_xaxes(title_text="other layer" if by_layer else "reader")
    drawn.update_yaxes(title_text="layer" if by_layer else "writer", autorange="reversed")
    return drawn.update_layout(title_text=_overlap_title(result), height=620)


def _overlap_title(result: OverlapResult) -> str:
    frame = result.to_frame()
    if not len(frame):
        return "One layer: there is no pair to compare"
    if result.trivial:
        return (
            "Nothing to measure: one space of every pair is the whole stream<br>"
            "(ask for less than all of the energy)"
        )
    what = {
        "V": "What two layers' values read",
        "OV": "What a head writes and a later head's values read",
        "OQ": "What a head writes and a later head's queries read",
        "OK": "What a head writes and a later head's keys read",
    }[result.kind]
    control = "two layers' keys" if result.kind == "V" else "pairs in reverse order"
    return (
        f"{what} overlaps by {frame['overlap'].mean():.3f},<br>random spaces by "
        f"{frame['expected'].mean():.3f} ({control}: {result.control:+.3f} beyond random)"
    )


def _ahead(values: Tensor) -> Tensor:
    layers = torch.arange(len(values), device=values.device)
    return (layers[:, None] < layers)[:, None, :, None].expand(values.shape)


def _pair_map(values: Tensor) -> dict[str, Any]:
    """Return z, x and y of a heat map writer × reader; of layers where heads are too many."""
    layers, n, _, m = values.shape
    if layers * n > _MOST_HEADS:
        highest = values.nan_to_num(nan=-torch.inf).amax(dim=(1, 3), keepdim=True)
        values = torch.where(highest.isinf(), torch.nan, highest)
        n = m = 1
    names = [
        [str(HeadId(layer, head)) if size > 1 else f"L{layer}" for layer in range(layers)
         for head in range(size)]
        for size in (n, m)
    ]  # fmt: skip
    return {
        "z": values.reshape(layers * n, layers * m).tolist(),
        "y": names[0],
        "x": names[1],
        "hovertemplate": "%{y} → %{x}<br>%{z:.3f}<extra></extra>",
    }
