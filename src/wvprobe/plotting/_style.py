"""What all figures share: colours, margins, and how texts are shortened."""

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

# Told apart with any of the three kinds of colour blindness, and 3 : 1 or more against white.
INK, ACCENT, MUTED, BAD = "#1f2933", "#1f5fa8", "#7b8794", "#b3261e"
GREEN, OCHRE, VIOLET = "#009e73", "#b7791f", "#a05195"
# The same on a dark ground: what stands for each of them there.
DARK = {
    INK: "#e6ebf0",
    ACCENT: "#6cb0ff",
    MUTED: MUTED,
    BAD: "#ff6b5b",
    GREEN: "#3ddc9f",
    OCHRE: "#d9a441",
    VIOLET: "#b877d6",
}
# In the order in which they are taken where a figure does not choose; marks beside colours.
COLOURS = (ACCENT, BAD, GREEN, OCHRE, VIOLET, INK, MUTED)
MARKS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")
# Behind a legend that lies in its plot.
VEIL, _DARK_VEIL = "rgba(255,255,255,0.7)", "rgba(18,24,31,0.7)"
_LINES, _DARK_LINES = "#e4e7eb", "#33414e"
STREAM_AXIS = "stream (0: embedding)"
# Of a longer text, a map shows tiles: a cell a pair would be megabytes.
_MOST_TOKENS = 200
# Room above a plot for a title of two lines; figures with titled panels ask for more.
TOP, TOP_WITH_PANELS = 85, 130


def dressed(drawn: go.Figure) -> go.Figure:
    """Give a figure the house's fonts and margins; its own top margin is kept."""
    top = drawn.layout.margin.t
    return drawn.update_layout(
        margin={"l": 60, "r": 20, "t": TOP if top is None else top, "b": 50},
        template="plotly_white",
        colorway=COLOURS,
        font={"family": "system-ui, sans-serif", "color": INK, "size": 13},
        title={"x": 0, "xref": "paper", "y": 1, "yref": "container", "yanchor": "top"},
        title_pad={"t": 22},
        title_font={"size": 16},
    )


def tiled(
    values: Float[Tensor, "query key"], names: Sequence[str]
) -> tuple[list[list[float]], list[str], str]:
    """Return a map of tokens that a page can hold: of long texts the largest value of each tile.

    Returns:
        the values, what the rows and columns are called, and a note for the map's title ("" where
        every pair of tokens has a cell of its own).
    """
    size = -(-len(names) // _MOST_TOKENS)
    if size == 1:
        return values.tolist(), list(names), ""
    tiles = torch.nn.functional.max_pool2d(values[None].float(), size, ceil_mode=True)[0]
    return tiles.tolist(), list(names[::size]), f" (largest of {size} × {size} tokens)"


def waterfall(names: Sequence[str], values: Sequence[float], form: str, total: str) -> go.Waterfall:
    """Return bars that lead from 0 to the sum of `values`, which `total` names.

    Args:
        names: of the bars.
        values: their heights.
        form: how a height is written on its bar, as in ``+.2f``; without the sign for the sum.
        total: name of the last bar.
    """
    texts = [*(f"{value:{form}}" for value in values), f"{sum(values):{form.lstrip('+')}}"]
    return go.Waterfall(
        x=[*names, total],
        y=[*values, 0.0],
        measure=[*["relative"] * len(values), "total"],
        text=texts,
        textposition="outside",
        increasing={"marker": {"color": ACCENT}},
        decreasing={"marker": {"color": BAD}},
        totals={"marker": {"color": MUTED}},
        connector={"line": {"color": MUTED, "width": 1}},
        hovertemplate="%{x}: %{text}<extra></extra>",
    )


def short(text: str, length: int = 60) -> str:
    """Cut a text to `length` characters."""
    return text if len(text) <= length else text[: length - 1] + "…"


def faint(colour: str, share: float = 0.18) -> str:
    """Return a colour of six digits, mostly transparent: for bands, which others show through."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red},{green},{blue},{share})"


def themes() -> dict[str, Any]:
    """Return plotly's templates for a light and a dark ground, transparent both.

    ``swaps`` says which colour of a figure becomes which on the dark ground.
    """
    return {
        "light": _template("plotly_white", INK, _LINES),
        "dark": _template("plotly_dark", DARK[INK], _DARK_LINES),
        "swaps": DARK | {VEIL: _DARK_VEIL} | {faint(c): faint(dark) for c, dark in DARK.items()},
    }


def _template(name: str, ink: str, lines: str) -> dict[str, Any]:
    import plotly.io

    axis = {"gridcolor": lines, "linecolor": lines, "zerolinecolor": lines, "automargin": True}
    template = go.layout.Template(plotly.io.templates[name])
    layout: Any = template.layout
    layout.update(
        font_color=ink,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        xaxis=axis,
        yaxis=axis,
    )
    return template.to_plotly_json()
