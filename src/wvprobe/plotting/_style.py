"""What all figures share: colours, margins, and how texts are shortened."""

import plotly.graph_objects as go

INK, ACCENT, MUTED, BAD = "#1f2933", "#1f5fa8", "#9aa5b1", "#b3261e"
STREAM_AXIS = "stream (0: embedding)"
# Room above a plot for a title of two lines; figures with titled panels ask for more.
TOP, TOP_WITH_PANELS = 85, 130


def dressed(drawn: go.Figure) -> go.Figure:
    """Give a figure the house's fonts and margins; its own top margin is kept."""
    top = drawn.layout.margin.t
    return drawn.update_layout(
        margin={"l": 60, "r": 20, "t": TOP if top is None else top, "b": 50},
        template="plotly_white",
        font={"family": "system-ui, sans-serif", "color": INK, "size": 13},
        title={"x": 0, "xref": "paper", "y": 1, "yref": "container", "yanchor": "top"},
        title_pad={"t": 22},
        title_font={"size": 16},
    )


def short(text: str, length: int = 60) -> str:
    """Cut a text to `length` characters."""
    return text if len(text) <= length else text[: length - 1] + "…"
