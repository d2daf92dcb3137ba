"""The map of what fixes attention scores: the pair of tokens, its offset, or context."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wvprobe.pair_variance import CONTEXT_MARGIN, KINDS, SHARES, VarianceResult
from wvprobe.plotting._style import INK, TOP_WITH_PANELS

_PANELS = {
    "pair": ("the pair of tokens", "lexical"),
    "offset": ("its offset, beyond the pair", "positional"),
    "context": ("context", "contextual"),
}


def score_variance(result: VarianceResult) -> go.Figure:
    """Maps layer × head of the three shares; heads of a kind are ringed in its panel."""
    titles = [title for title, _ in _PANELS.values()]
    drawn = make_subplots(1, 3, subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.03)
    kinds = result.kind
    for column, (share, (_, kind)) in enumerate(_PANELS.items(), start=1):
        at = SHARES.index(share)
        hover = [result.held_out[at], result.corrected_low[at], result.corrected_high[at]]
        heat = go.Heatmap(
            z=result.corrected[at].T.tolist(),
            customdata=[
                [[float(value[layer, head]) for value in hover] for layer in range(len(kinds))]
                for head in range(len(kinds[0]))
            ],
            zmin=0,
            zmax=1,
            colorscale="Blues",
            showscale=column == 1,
            colorbar={"title": "share of<br>variance", "tickformat": ".0%"},
            hovertemplate="layer %{x}, head %{y}<br>%{z:.1%} (%{customdata[1]:.1%} to "
            "%{customdata[2]:.1%})<br>held-out R²: %{customdata[0]:.2f}<extra></extra>",
        )
        named = [
            (x, y) for x, row in enumerate(kinds) for y, name in enumerate(row) if name == kind
        ]
        ring = {"symbol": "circle-open", "size": 7, "color": INK, "line": {"width": 1.5}}
        marks = go.Scatter(
            x=[x for x, _ in named],
            y=[y for _, y in named],
            mode="markers",
            marker=ring,
            name=kind,
            showlegend=False,
            hoverinfo="skip",
        )
        drawn.add_trace(heat, row=1, col=column)
        drawn.add_trace(marks, row=1, col=column)
    drawn.update_xaxes(title_text="layer", dtick=max(1, len(kinds) // 10))
    drawn.update_yaxes(title_text="head", col=1)
    drawn.update_annotations(font_size=13)
    return drawn.update_layout(title_text=_finding(result), height=420, margin_t=TOP_WITH_PANELS)


def _finding(result: VarianceResult) -> str:
    """Say how much context decides, and how many heads are of which kind."""
    names = [name for row in result.kind for name in row]
    counted = ", ".join(f"{names.count(kind)} {kind}" for kind in KINDS.values())
    inner = result.corrected[SHARES.index("context"), 1:]
    above, low, high = result.heads_above
    first = f"{counted} of {len(names)} heads (ringed)"
    if not inner.numel():
        return first
    middle = float(inner.nanquantile(0.5))
    return (
        f"Context decides {middle:.0%} of what a score varies by (median head above layer 0),<br>"
        f"over {CONTEXT_MARGIN:.0%} in {above:.0%} of them ({low:.0%} to {high:.0%}); {first}"
    )
