"""Figures of a model as a whole: its audit, and what was captured of it."""

import plotly.graph_objects as go

from wvprobe.activations import Activations
from wvprobe.adapters import PAIR_SITES
from wvprobe.auditing import AuditResult
from wvprobe.errors import InputError
from wvprobe.plotting._style import ACCENT, BAD

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
        means = []
        for row in range(len(layers)):  # one by one, since they may lie on disk
            norms = value[(slice(None),) * at + (row,)].float().flatten(at).norm(dim=-1)
            count = norms.numel() if result.mask is None else result.mask.sum()
            means.append(float(norms.sum() / count))
        drawn.add_trace(go.Scatter(x=list(layers), y=means, name=site, mode="lines+markers"))
    if not drawn.data:
        raise InputError("pattern and scores have no vector lengths to draw; use .to_frame().")
    return drawn.update_layout(
        title_text=f"Length of vectors by layer, mean over {len(result.texts)} text(s)",
        xaxis_title="layer",
        yaxis={"title": "‖x‖, heads together", "type": "log"},
        height=430,
    )
