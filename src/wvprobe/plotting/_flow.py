"""Figures of what flows along attention, and of what exchanging it does."""

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from plotly.subplots import make_subplots
from torch import Tensor

from wvprobe._types import HeadId
from wvprobe.flow import FlowResult
from wvprobe.plotting._style import ACCENT, BAD, TOP_WITH_PANELS, short, tiled

_BARS = 12  # pairs of head and source that have a bar of their own


def flow(result: FlowResult) -> go.Figure:
    """One head's attention beside its value-weighted twin, and the largest effects on the logit."""
    row, head, reason = _shown_head(result)
    layer = result.layers[row]
    tokens = [f"{at} {string}" for at, string in enumerate(result.strings)]
    attention, names, note = tiled(result.pattern[row, head], tokens)
    norms, _, _ = tiled(result.norms[row, head], tokens)
    titles = [f"attention of L{layer}H{head}{note}", f"‖a v W_O‖{note}"]
    if result.effects is not None:
        titles.append(f"direct effects on the logit of {result.effects.target}")
    rows = len(titles) - 1
    drawn = make_subplots(
        rows,
        2,
        subplot_titles=titles,
        specs=[[{}, {}], [{"colspan": 2}, None]][:rows],
        vertical_spacing=0.2,
    )
    highest = float(result.norms[row, head].max())
    maps = ((attention, 1.0, "Blues"), (norms, highest, "Greens"))
    for column, (values, most, colours) in enumerate(maps, start=1):
        heatmap = go.Heatmap(
            z=values,
            x=names,
            y=names,
            zmin=0,
            zmax=most,
            colorscale=colours,
            showscale=False,
            hovertemplate="%{y} → %{x}: %{z:.3f}<extra></extra>",
        )
        drawn.add_trace(heatmap, row=1, col=column)
    drawn.update_yaxes(autorange="reversed", title_text="query", row=1, col=1)
    drawn.update_yaxes(autorange="reversed", showticklabels=False, row=1, col=2)
    if result.effects is not None:
        effects = result.effects.heads[list(result.layers)]
        drawn.add_trace(_bars(effects, result), row=2, col=1)
        drawn.update_yaxes(autorange="reversed", row=2, col=1)
    drawn.update_annotations(font_size=13)
    where = f"“{short(result.text)}”"
    return drawn.update_layout(
        title_text=f"{reason}<br>{where}",
        height=60 + 400 * rows,
        margin_t=TOP_WITH_PANELS,
        showlegend=False,
    )


def _shown_head(result: FlowResult) -> tuple[int, int, str]:
    """Return which head is drawn, and the finding that it stands for."""
    if result.effects is not None:
        found = result.effects.heads[list(result.layers)].sum(dim=-1)
        row, head = divmod(int(found.abs().argmax()), found.shape[1])
        name = f"L{result.layers[row]}H{head}"
        effect = float(found[row, head])
        return row, head, f"{name} moves the logit of {result.effects.target} by {effect:+.2f}"
    norms = result.norms.double()
    shares = norms / norms.sum(dim=-1, keepdim=True).clamp(min=1e-30)
    moved = (shares - result.pattern).abs().sum(dim=-1).mean(dim=-1) / 2
    row, head = divmod(int(moved.argmax()), moved.shape[1])
    name = f"L{result.layers[row]}H{head}"
    return (
        row,
        head,
        f"{name}: {float(moved[row, head]):.0%} of what it moves is not where it looks",
    )


def _bars(effects: Float[Tensor, "layer head source"], result: FlowResult) -> go.Bar:
    order = effects.abs().flatten().argsort(descending=True, stable=True)[:_BARS]
    places = torch.stack(torch.unravel_index(order, effects.shape), dim=1).tolist()
    names = [
        f"{HeadId(result.layers[row], head)} ← {source} {result.strings[source]}"
        for row, head, source in places
    ]
    values = [float(effects[*place]) for place in places]
    colours = [ACCENT if value > 0 else BAD for value in values]
    return go.Bar(y=names, x=values, orientation="h", marker_color=colours)
