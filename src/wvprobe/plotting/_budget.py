"""Figures of head budgets: published models, alternatives, scaling, and the clock."""

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wvprobe.attention_clock import AttentionTimes
from wvprobe.budget import Alternatives, HeadScaling, KnownArchitectures
from wvprobe.plotting._style import (
    ACCENT,
    BAD,
    GREEN,
    INK,
    MUTED,
    OCHRE,
    TOP_WITH_PANELS,
    VEIL,
    VIOLET,
)

_KINDS = {"MHA": ACCENT, "GQA": GREEN, "MQA": OCHRE, "MLA": BAD}
_GIVEN = {"size": 17, "symbol": "circle-open", "color": INK, "line": {"width": 2}}
_KERNELS = {
    "flash": ACCENT,
    "efficient": GREEN,
    "cudnn": OCHRE,
    "math": VIOLET,
    "eager": BAD,
}


def architectures(result: KnownArchitectures) -> go.Figure:
    """Width of all heads on d_model with the even split as a line; head width over the years."""
    frame = result.to_frame()
    frame["width"] = frame["n_heads"] * frame["d_head"]
    titles = ("all heads together against d_model", "d_head of queries and keys by year")
    drawn = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.1)
    sizes = [float(frame["d_model"].min()), float(frame["d_model"].max())]
    line = {"color": MUTED, "dash": "dot"}
    drawn.add_scatter(
        x=sizes, y=sizes, mode="lines", line=line, name="n_heads · d_head = d_model", row=1, col=1
    )
    for fills, models in frame.groupby("fills_d_model", sort=False):
        # Models of one size share a point, and its label.
        joined = {column: ("; ".join) for column in ("name", "source")}
        rows = models.groupby(["d_model", "width", "n_heads", "d_head"], as_index=False).agg(joined)
        drawn.add_scatter(
            x=rows["d_model"].tolist(),
            y=rows["width"].tolist(),
            mode="markers",
            text=rows["name"].tolist(),
            marker={"size": 8, "color": ACCENT if fills else BAD},
            name="splits d_model evenly" if fills else "does not",
            customdata=rows[["n_heads", "d_head", "source"]].values.tolist(),
            hovertemplate="%{text}: %{customdata[0]} heads of %{customdata[1]}"
            "<br>%{customdata[2]}<extra></extra>",
            row=1,
            col=1,
        )
    _by_year(drawn, frame)
    apart, undivided = (~frame["fills_d_model"]).sum(), (~frame["divides_d_model"]).sum()
    common = frame["d_head"].isin((64, 128)).mean()
    drawn.update_xaxes(type="log", title_text="d_model", row=1, col=1)
    drawn.update_yaxes(type="log", title_text="n_heads · d_head", row=1, col=1)
    drawn.update_xaxes(title_text="year", dtick=1, row=1, col=2)
    ticks = sorted(frame["d_head"].unique().tolist())
    drawn.update_yaxes(type="log", title_text="d_head", tickvals=ticks, row=1, col=2)
    drawn.update_annotations(font_size=13)
    title = (
        f"{apart} of {len(frame)} published models do not split d_model evenly, and in {undivided} "
        f"n_heads does not divide it;<br>{common:.0%} have heads of 64 or 128 dimensions"
    )
    return drawn.update_layout(
        title_text=title,
        height=520,
        margin_t=TOP_WITH_PANELS,
        legend={"orientation": "h", "y": -0.18},
    )


def _by_year(drawn: go.Figure, frame: Any) -> None:
    """Add d_head by year, a point for all models alike, sized by how many they are."""
    for shift, (kind, models) in enumerate(frame.groupby("kind", sort=False)):
        rows = models.groupby(["year", "d_head"], as_index=False).agg(
            name=("name", "; ".join), n=("name", "size")
        )
        drawn.add_scatter(
            x=(rows["year"] + 0.18 * (shift - 1.5)).tolist(),  # side by side
            y=rows["d_head"].tolist(),
            mode="markers",
            text=rows["name"].tolist(),
            customdata=rows["year"].tolist(),
            marker={
                "size": (7 + 4 * rows["n"] ** 0.5).tolist(),
                "color": _KINDS[str(kind)],
                "opacity": 0.65,
            },
            name=str(kind),
            hovertemplate="%{customdata}, %{y}: %{text}<extra></extra>",
            row=1,
            col=2,
        )


def scaling(result: HeadScaling) -> go.Figure:
    """Heads on d_model, with the fitted line and that of a constant head width."""
    d_model, n_heads, d_head = result.sizes.T.tolist()
    slope, low, high = result.slope("n_heads")
    logs = result.sizes.log()
    middle = logs[:, :2].mean(dim=0)
    ends = [min(d_model), max(d_model)]

    def line(steepness: float) -> list[float]:
        at = logs[:, 0].new_tensor(ends).log() - middle[0]
        return (middle[1] + steepness * at).exp().tolist()

    drawn = go.Figure()
    drawn.add_scatter(
        x=d_model,
        y=n_heads,
        mode="markers",
        text=list(result.names),
        customdata=list(zip(result.families, d_head, strict=True)),
        marker={
            "size": 9,
            "color": d_head,
            "colorscale": "Viridis",
            "colorbar": {"title": "d_head"},
        },
        hovertemplate="%{text} (%{customdata[0]}): %{y} heads of %{customdata[1]}<extra></extra>",
        showlegend=False,
    )
    fitted = f"slope {slope:.2f} ({low:.2f} to {high:.2f})"
    drawn.add_scatter(x=ends, y=line(slope), mode="lines", line={"color": ACCENT}, name=fitted)
    dashed = {"color": MUTED, "dash": "dash"}
    drawn.add_scatter(
        x=ends, y=line(1.0), mode="lines", line=dashed, name="slope 1: constant d_head"
    )
    wider = result.slope("d_head")
    drawn.update_xaxes(type="log", title_text="d_model")
    drawn.update_yaxes(type="log", title_text="n_heads")
    title = (
        f"n_heads grows as d_model to the {slope:.2f} ({low:.2f} to {high:.2f}), d_head to the "
        f"{wider[0]:.2f} ({wider[1]:.2f} to {wider[2]:.2f});<br>{len(d_model)} models, intervals "
        f"from resampling {len(set(result.families))} families"
    )
    legend = {"x": 0.02, "y": 0.98, "bgcolor": VEIL}
    return drawn.update_layout(title_text=title, height=460, legend=legend)


def alternatives(result: Alternatives) -> go.Figure:
    """Parameters and cached bytes of each alternative relative to the model as it is."""
    frame = result.to_frame()
    cached = bool(frame["kv_ratio"].notna().all())
    measure = "kv_ratio" if cached else "flops_ratio"
    drawn = go.Figure()
    for kind, rows in frame[::-1].groupby("kind", sort=False):
        labels = [
            f"{row.n_heads} heads of {row.d_head}"
            + (f" to {row.d_head_max}" if row.d_head_max != row.d_head else "")
            + f", {row.n_kv_heads} KV heads<br>{row.breaks or 'nothing breaks'}"
            for row in rows.itertuples()
        ]
        drawn.add_scatter(
            x=rows["parameters_ratio"].tolist(),
            y=rows[measure].tolist(),
            mode="markers",
            text=labels,
            marker=_GIVEN if kind == "as given" else {"size": 9, "opacity": 0.75},
            name=str(kind),
            hovertemplate="%{text}<br>parameters × %{x:.3g}, %{y:.3g}<extra></extra>",
        )
    full = frame[frame["kind"] == "full width"]["parameters_ratio"].iloc[0]
    least = frame.loc[frame[measure].idxmin()]
    what = "a token's cache" if cached else "FLOPs"
    drawn.update_xaxes(type="log", title_text="parameters of attention, relative")
    drawn.update_yaxes(type="log", title_text=f"{what}, relative")
    name = f"{result.budget.name}: " if result.budget.name else ""
    title = (
        f"{name}full-width heads cost {full:,.3g} times the parameters; least of {what}: "
        f"{least['kind']} with {least[measure]:.3g} of it"
    )
    return drawn.update_layout(title_text=title, height=460)


def attention_times(result: AttentionTimes) -> go.Figure:
    """Median times over d_head with quartiles, a line a kernel, over the floor."""
    frame = result.to_frame()
    panels = [key for key, _ in frame.groupby(["device", "direction"], sort=False)]
    titles = [f"{direction} on {device}" for device, direction in panels]
    drawn = make_subplots(1, len(panels), subplot_titles=titles, shared_yaxes=True)
    for column, (device, direction) in enumerate(panels, start=1):
        here = frame[(frame["device"] == device) & (frame["direction"] == direction)]
        for trace in _kernel_traces(here):
            drawn.add_trace(trace.update(showlegend=column == 1), row=1, col=column)
    widths = sorted(frame[frame["layout"] == "even"]["d_head"].unique().tolist())
    drawn.update_xaxes(type="log", title_text="d_head", tickvals=widths)
    drawn.update_yaxes(type="log")
    drawn.update_yaxes(title_text="milliseconds (bars: quartiles)", col=1)
    drawn.update_annotations(font_size=13)
    direction = result.timed[0].direction
    kernel = result.fastest_kernel(direction)
    head = f"d_model {result.d_model}, {result.n_tokens} tokens: "
    if len(widths) > 1:
        found = result.spread(kernel, direction)
        head += (
            f"{kernel} {direction} takes {found.ratio:.2f} times as long with heads of "
            f"{found.slowest} as of {found.fastest}<br>({found.low:.2f} to {found.high:.2f}; a "
            f"configuration's own median moves by up to {found.noise:.0%} between halves)"
        )
    else:
        head += f"{kernel} is fastest"
    return drawn.update_layout(
        title_text=head,
        height=480,
        margin_t=TOP_WITH_PANELS,
        legend={"orientation": "h", "y": -0.2},
    )


def _kernel_traces(frame: Any) -> list[go.Scatter]:
    """Return a line a kernel for even splits, markers for uneven ones, and the floor."""
    traces = []
    for (kernel, layout), rows in frame.groupby(["kernel", "layout"], sort=False):
        rows = rows.sort_values("d_head")
        even = layout == "even"
        milliseconds = 1e3 * rows["seconds"]
        traces.append(
            go.Scatter(
                x=(rows["d_head"] if even else _SHIFTS[layout] * _mean_width(rows)).tolist(),
                y=milliseconds.tolist(),
                error_y={
                    "array": (1e3 * rows["high"] - milliseconds).tolist(),
                    "arrayminus": (milliseconds - 1e3 * rows["low"]).tolist(),
                },
                mode="lines+markers" if even else "markers",
                marker={"symbol": _SYMBOLS[layout], "size": 8},
                line={"color": _KERNELS[kernel]},
                text=rows["ran"].tolist(),
                name=kernel if even else f"{kernel}, uneven {layout}",
                hovertemplate="d_head %{x}: %{y:.3g} ms<br>%{text}<extra></extra>",
            )
        )
    even = frame[frame["layout"] == "even"].drop_duplicates("d_head").sort_values("d_head")
    dotted = {"color": MUTED, "dash": "dot"}
    floor = go.Scatter(
        x=even["d_head"].tolist(),
        y=(1e3 * even["floor"]).tolist(),
        mode="lines",
        line=dotted,
        name="floor: FLOPs or bytes",
    )
    return [*traces, floor]


_SHIFTS = {"padded": 0.85, "looped": 1.0, "grouped": 1.18}  # side by side
_SYMBOLS = {"even": "circle", "padded": "x", "looped": "triangle-up", "grouped": "diamond"}


def _mean_width(rows: Any) -> Any:
    """Return an uneven split's place on the axis: between its narrowest and widest head."""
    return (rows["d_head"] * rows["d_head_max"]) ** 0.5
