"""What all figures share: colours, margins, and how texts are shortened."""

from collections.abc import Sequence

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

INK, ACCENT, MUTED, BAD = "#1f2933", "#1f5fa8", "#9aa5b1", "#b3261e"
# Okabe & Ito 2008, which people with any kind of colour vision tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1f2933")
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
        colorway=_COLOURS,
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
