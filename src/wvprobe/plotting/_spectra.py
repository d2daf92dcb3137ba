"""Figures of spectra, of singular vectors, and of scores by offset."""

from typing import Any

import plotly.graph_objects as go
import torch
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from wvprobe._types import HeadId
from wvprobe.inputs import InputResult
from wvprobe.offsets import OffsetResult
from wvprobe.plotting._style import ACCENT, BAD, MUTED, TOP_WITH_PANELS
from wvprobe.singular import SingularVectorsResult, SpectraResult

_ROWS = 30  # heads in a heat map of offset profiles


def spectra(result: SpectraResult) -> go.Figure:
    """Effective rank as a map layer × head, and singular values of each layer's median head."""
    frame = result.to_frame()
    n_layers, _, rank = result.singular_values.shape
    name = _circuit(result.which, result.offset, result.weighted)
    drawn = make_subplots(
        1,
        2,
        subplot_titles=["effective rank", "singular values over the largest, a layer's median"],
        horizontal_spacing=0.16,
    )
    heat = go.Heatmap(
        z=frame.pivot(index="head", columns="layer", values="effective_rank").to_numpy().tolist(),
        zmin=0,
        zmax=rank,
        colorscale="Viridis",
        colorbar={"x": 0.43, "thickness": 12},
        hovertemplate="layer %{x}, head %{y}<br>effective rank %{z:.1f}<extra></extra>",
    )
    drawn.add_trace(heat, row=1, col=1)
    largest = result.singular_values[..., :1]
    relative = result.singular_values / torch.where(largest > 0, largest, 1)
    for layer, values in enumerate(relative.median(dim=1).values):
        colour = sample_colorscale("Viridis", [layer / max(1, n_layers - 1)])[0]
        line = go.Scatter(
            x=list(range(rank)),
            y=values.tolist(),
            mode="lines",
            line={"color": colour, "width": 1.3},
            name=f"layer {layer}",
            showlegend=layer in (0, n_layers - 1),
            hovertemplate=f"layer {layer}, value %{{x}}<br>%{{y:.3f}} of σ₁<extra></extra>",
        )
        drawn.add_trace(line, row=1, col=2)
    drawn.update_xaxes(title_text="layer", row=1, col=1)
    drawn.update_yaxes(title_text="head", row=1, col=1)
    drawn.update_xaxes(title_text="singular value, from the largest", row=1, col=2)
    drawn.update_yaxes(range=[0, 1.02], row=1, col=2)
    return drawn.update_layout(
        title_text=_spectra_title(result, frame, name),
        height=430,
        margin_t=TOP_WITH_PANELS,
        legend={"x": 0.98, "xanchor": "right", "y": 0.98},
    )


def _spectra_title(result: SpectraResult, frame: Any, name: str) -> str:
    """Say how much of its rank a head uses; heads that share keys or values count as one."""
    shared = result.by_kv_head()["effective_rank"]
    least = frame.loc[frame["effective_rank"].idxmin()]
    most = frame.loc[frame["effective_rank"].idxmax()]
    heads = [str(HeadId(int(row["layer"]), int(row["head"]))) for row in (least, most)]
    groups = "heads"
    if result.n_kv_heads < result.round_off.shape[1]:
        groups = "key-value heads, their query heads averaged"
    return (
        f"{name}: effective rank {shared.median():.1f} of {result.singular_values.shape[-1]} "
        f"(median of {len(shared)} {groups}),<br>from {least['effective_rank']:.1f} ({heads[0]}) "
        f"to {most['effective_rank']:.1f} ({heads[1]})"
    )


def _circuit(which: str, offset: float | int | None, weighted: bool) -> str:
    name = which if offset is None else f"{which} at offset {offset:g}"
    return f"{name}, weighted by a metric" if weighted else name


def singular_vectors(result: SingularVectorsResult) -> go.Figure:
    """A head's singular values; those of which only a subspace is determined stand out."""
    frame = result.to_frame()
    colours = [ACCENT if alone else BAD for alone in frame["determined"]]
    drawn = go.Figure(
        go.Bar(
            x=frame["index"].tolist(),
            y=frame["value"].tolist(),
            marker_color=colours,
            customdata=frame[["gap", "group"]].to_numpy().tolist(),
            hovertemplate="value %{x}: %{y:.4g}<br>gap %{customdata[0]:.2g}, group from "
            "%{customdata[1]}<extra></extra>",
        )
    )
    alone = int(frame["determined"].sum())
    title = (
        f"{result.head} {_circuit(result.which, result.offset, False)}: {alone} of {len(frame)} "
        f"singular vectors are determined one by one,<br>{len(frame) - alone} only within "
        f"{len(result.groups)} subspace(s) (red)"
    )
    return drawn.update_layout(
        title_text=title, height=400, xaxis_title="singular value", yaxis_title="σ"
    )


def offsets(result: OffsetResult) -> go.Figure:
    """Profiles of the heads that prefer one offset most, each about its own mean."""
    frame = result.to_frame()
    held = frame[frame["preferred_weight"].notna()]
    top = held.sort_values("preferred_weight", ascending=False, kind="stable")[:_ROWS]
    picked = [HeadId(layer, head) for layer, head in top[["layer", "head"]].to_numpy().tolist()]
    prefers = top["preferred_offset"].tolist()
    rows = []
    for layer, head in picked:
        seen = ~result.masked[layer]
        row = result.profile[layer, head] - result.profile[layer, head][seen].mean()
        rows.append(row.masked_fill(~seen, torch.nan))
    bound = max((float(row.nan_to_num().abs().max()) for row in rows), default=1.0)
    drawn = go.Figure(
        go.Heatmap(
            x=list(result.offsets),
            y=[f"{head} → {offset}" for head, offset in zip(picked, prefers, strict=True)],
            z=[row.tolist() for row in rows],
            zmin=-bound,
            zmax=bound,
            zmid=0,
            colorscale="RdBu_r",
            colorbar={"title": "b(Δ) − mean"},
            hovertemplate="%{y}<br>Δ = %{x}: %{z:.2f}<extra></extra>",
        )
    )
    drawn.update_yaxes(autorange="reversed", title_text="head → offset it prefers")
    return drawn.update_layout(
        title_text=_offset_title(held, top, picked, prefers),
        height=200 + 18 * len(picked),
        xaxis_title="offset Δ = query position − key position, tokens (blank: masked)",
    )


def _offset_title(held: Any, top: Any, picked: list[HeadId], prefers: list[int]) -> str:
    if not picked:
        return "No layer sees any of these offsets"
    counts = held["preferred_offset"].value_counts()
    first = top.iloc[0]
    return (
        f"{counts.iloc[0]} of {len(held)} heads score offset {counts.index[0]} highest, more than "
        "any other offset;<br>the most decided is "
        f"{picked[0]}: {first['preferred_weight']:.0%} of its attention at offset {prefers[0]}, "
        "were all tokens average"
    )


def inputs(result: InputResult) -> go.Figure:
    """How much of what attention reads all tokens share, by layer."""
    frame = result.to_frame()
    drawn = go.Figure(
        go.Scatter(
            x=frame["layer"].tolist(),
            y=frame["mean_share"].tolist(),
            mode="lines+markers",
            line={"color": ACCENT},
            hovertemplate="layer %{x}: %{y:.1%}<extra></extra>",
        )
    )
    drawn.add_hline(y=0, line={"color": MUTED, "width": 1})
    most = frame.loc[frame["mean_share"].idxmax()]
    title = (
        f"The mean makes up {frame['mean_share'].min():.0%} to {most['mean_share']:.0%} of what "
        f"attention reads, most at layer {int(most['layer'])} (n = {result.n} tokens)"
    )
    return drawn.update_layout(
        title_text=title,
        height=400,
        xaxis_title="layer",
        yaxis={"title": "‖μ‖² / E‖x̂‖²", "tickformat": ".0%", "rangemode": "tozero"},
    )
