"""Learning curves of small models, a panel a task."""

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wvprobe.counterfactual import BiasResult
from wvprobe.plotting._drift import banded
from wvprobe.plotting._style import INK, MUTED, TOP_WITH_PANELS

# Okabe & Ito 2008, which people with any kind of colour vision tell apart.
_COLOURS = {
    "parallel": "#0072b2",
    "sequential": "#d55e00",
    "wide": "#e69f00",
    "uneven": "#56b4e9",
    "halves": "#009e73",
}


def biases(result: BiasResult) -> go.Figure:
    """Accuracy over steps by architecture, bands of the mean over seeds; chance, and the best."""
    frame = result.to_frame().rename(columns={"step": "layer", "accuracy": "mean"})
    final = result.final_frame().set_index(["task", "architecture"])
    drawn = make_subplots(
        1,
        len(result.tasks),
        subplot_titles=result.tasks,
        shared_yaxes=True,
        horizontal_spacing=0.03,
    )
    for column, task in enumerate(result.tasks, start=1):
        for name in result.architectures:
            rows = frame[(frame["task"] == task) & (frame["architecture"] == name)]
            label = f"{name} ({final.loc[(task, name), 'layers']})"
            for trace in banded(rows, label, _COLOURS.get(name, INK)):
                # The legend names an architecture once, and hides or shows it in all panels.
                trace.showlegend = column == 1 and trace.name is not None
                drawn.add_trace(trace, row=1, col=column)
        references = (("best", result.best, "dash"), ("chance", result.chance, "dot"))
        for name, values, dash in references:
            line = go.Scatter(
                x=result.steps[[0, -1]].tolist(),
                y=[float(values[column - 1])] * 2,
                mode="lines",
                name=name,
                legendgroup=name,
                showlegend=column == 1,
                line={"color": MUTED, "dash": dash},
            )
            drawn.add_trace(line, row=1, col=column)
    drawn.update_xaxes(title_text="step")
    drawn.update_yaxes(tickformat=".0%", range=[0, 1.03])
    drawn.update_yaxes(title_text="held-out answers right", col=1)
    drawn.update_annotations(font_size=13)
    return drawn.update_layout(
        title_text=_found(result, final),
        height=470,
        margin_t=TOP_WITH_PANELS,
        legend={"orientation": "h", "y": -0.18},
    )


def _found(result: BiasResult, final: Any) -> str:
    """Say where heads side by side and heads in a row end, task by task."""
    told = []
    for task, found in result.difference("sequential", "parallel").items():
        one, other = (final.loc[(task, name), "accuracy"] for name in ("sequential", "parallel"))
        told.append(
            f"{task} {one:.0%} against {other:.0%} ({found.value:+.2f}, "
            f"{found.low:+.2f} to {found.high:+.2f})"
        )
    seeds = f"{result.n_seeds} seed" + ("s" if result.n_seeds > 1 else "")
    short = "; a quick run, from which nothing follows" if result.quick else ""
    return f"Heads in a row against heads side by side: {'; '.join(told)}<br>{seeds}{short}"
