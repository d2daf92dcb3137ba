"""Learning curves of small models, a panel a task."""

from collections.abc import Mapping

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wvprobe.counterfactual import BiasResult, Difference
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
    layers = dict(result.final_frame()[["architecture", "layers"]].itertuples(index=False))
    leads = result.difference("sequential", "parallel")
    drawn = make_subplots(
        1,
        len(result.tasks),
        subplot_titles=[_lead(task, lead) for task, lead in leads.items()],
        shared_yaxes=True,
        horizontal_spacing=0.03,
    )
    for column, task in enumerate(result.tasks, start=1):
        for name in result.architectures:
            rows = frame[(frame["task"] == task) & (frame["architecture"] == name)]
            label = f"{name} ({layers[name]})"
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
        title_text=_found(result, leads),
        height=470,
        margin_t=TOP_WITH_PANELS,
        legend={"orientation": "h", "y": -0.18},
    )


def _lead(task: str, lead: Difference) -> str:
    """Return a panel's title."""
    interval = "" if lead.low != lead.low else f" ({lead.low:+.2f} to {lead.high:+.2f})"
    return f"{task}: sequential − parallel {lead.value:+.2f}{interval}"


def _found(result: BiasResult, leads: Mapping[str, Difference]) -> str:
    """Say on which tasks heads in a row end ahead of heads side by side, and on which behind."""
    told: dict[str, list[str]] = {"ahead": [], "behind": [], "neither": []}
    for task, lead in leads.items():
        place = "ahead" if lead.low > 0 else "behind" if lead.high < 0 else "neither"
        told[place].append(task)
    found = "; ".join(f"{place} on {', '.join(tasks)}" for place, tasks in told.items() if tasks)
    short = "; a quick run, from which nothing follows" if result.quick else ""
    return (
        f"Heads in a row (sequential) against heads side by side (parallel): {found}<br>"
        f"n = {result.n_seeds} seeds, 95 % intervals by Student's t{short}"
    )
