"""Figures of a model as a whole: its audit, and what was captured of it."""

import plotly.graph_objects as go

from wvprobe.activations import Activations
from wvprobe.adapters import PAIR_SITES
from wvprobe.auditing import AuditResult
from wvprobe.budget import KnownArchitectures
from wvprobe.errors import InputError
from wvprobe.plotting._style import ACCENT, BAD, MUTED

_STATUS = {"ok": ACCENT, "failed": BAD}


def audit(result: AuditResult) -> go.Figure:
    """Errors of all identities on a logarithmic axis, with the tolerance."""
    frame = result.to_frame()
    held = frame[frame["status"] != "not applicable"][::-1]
    smallest = 1e-9  # an error of 0 gets a bar too
    drawn = go.Figure(
        go.Bar(
            x=held["error"].clip(lower=smallest).tolist(),
            y=held["identity"].tolist(),
            orientation="h",
            marker_color=[_STATUS[status] for status in held["status"]],
            hovertemplate="%{y}<br>error %{x:.1e}<extra></extra>",
        )
    )
    drawn.add_vline(x=float(frame["tolerance"].max()), line={"color": BAD, "dash": "dash"})
    failed = int((frame["status"] == "failed").sum())
    worst = float(held["error"].max())
    title = (
        f"{len(held)} identities hold; the largest error is {worst:.1e}"
        if not failed
        else f"{failed} of {len(held)} identities failed"
    )
    drawn.update_xaxes(
        type="log", exponentformat="power", title_text="largest relative error (dashed: tolerance)"
    )
    return drawn.update_layout(title_text=title, height=160 + 28 * len(held))


def activations(result: Activations) -> go.Figure:
    """Mean vector length by layer, a line a site."""
    drawn = go.Figure()
    for site, value in result.values.items():
        if site in PAIR_SITES:
            continue
        layers = result.layers[site]
        at = result.axes(site).index("layer")
        norms = value.float().flatten(at + 1).norm(dim=-1)
        if result.mask is not None:
            mean = norms.sum(dim=(0, 1)) / result.mask.sum()
        else:
            mean = norms.mean(dim=0)
        drawn.add_trace(
            go.Scatter(x=list(layers), y=mean.tolist(), name=site, mode="lines+markers")
        )
    if not drawn.data:
        raise InputError("pattern and scores have no vector lengths to draw; use .to_frame().")
    return drawn.update_layout(
        title_text=f"Length of vectors by layer, mean over {len(result.texts)} text(s)",
        xaxis_title="layer",
        yaxis={"title": "‖x‖, heads together", "type": "log"},
        height=430,
    )


def architectures(result: KnownArchitectures) -> go.Figure:
    """Width of all heads together on d_model; on the line the heads split d_model evenly."""
    frame, drawn = result.to_frame(), go.Figure()
    sizes = [float(frame["d_model"].min()), float(frame["d_model"].max())]
    line = {"color": MUTED, "dash": "dot"}
    drawn.add_scatter(x=sizes, y=sizes, mode="lines", line=line, name="n_heads · d_head = d_model")
    frame["width"] = frame["n_heads"] * frame["d_head"]
    for fills, models in frame.groupby("fills_d_model"):
        # Models of one size share a point, and its label.
        joined = {column: ("; ".join) for column in ("name", "source")}
        rows = models.groupby(["d_model", "width", "n_heads", "d_head"], as_index=False).agg(joined)
        drawn.add_scatter(
            x=rows["d_model"].tolist(),
            y=rows["width"].tolist(),
            mode="markers+text",
            text=rows["name"].tolist(),
            textposition="bottom right" if fills else "top center",
            textfont={"size": 11},
            marker={"size": 9, "color": ACCENT if fills else BAD},
            name="splits d_model evenly" if fills else "does not",
            customdata=rows[["n_heads", "d_head", "source"]].values.tolist(),
            hovertemplate="%{text}: %{customdata[0]} heads of %{customdata[1]}"
            "<br>%{customdata[2]}<extra></extra>",
        )
    apart = int((~frame["fills_d_model"]).sum())
    drawn.update_xaxes(type="log", title_text="d_model")
    drawn.update_yaxes(type="log", title_text="n_heads · d_head")
    return drawn.update_layout(
        title_text=f"{apart} of {len(frame)} published models do not split d_model evenly",
        height=480,
    )
