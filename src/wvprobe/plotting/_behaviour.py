"""Figures of what heads do: maps of scores, agreement with weights, dependency relations."""

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torch import Tensor

from wvprobe._types import HeadId
from wvprobe.behaviour import AgreementResult, BehaviourResult, DependencyResult
from wvprobe.plotting._style import MUTED, TOP_WITH_PANELS

_COLUMNS = 3
# Shares of attention, which one colour scale serves; `copying` is in logits and has its own.
_MAPS = {
    "previous_token": "previous token",
    "duplicate": "same token, earlier",
    "induction": "what followed it (induction)",
    "next_token": "next token",
    "sink": "sinks, on text",
    "positional": "best offset, on text",
}
_MARGIN = 0.05


def behaviour(result: BehaviourResult) -> go.Figure:
    """Maps layer × head of each score less uniform attention, around zero."""
    shown = [name for name in _MAPS if bool((~result[name].isnan()).any())]
    copies = bool((~result["copying"].isnan()).any())
    titles = [_MAPS[name] for name in shown] + ["copying, logits"] * copies
    rows = -(-len(titles) // _COLUMNS)
    drawn = make_subplots(
        rows, _COLUMNS, subplot_titles=titles, vertical_spacing=0.3 / rows, horizontal_spacing=0.06
    )
    bound = max(float(result.excess(name).abs().nan_to_num().max()) for name in shown)
    scale = {"title": "attention −<br>uniform", "thickness": 10, "len": 0.5, "y": 0.78}
    for place, name in enumerate(shown):
        heat = _map(result, name, bound).update(colorbar=scale, showscale=place == 0)
        drawn.add_trace(heat, row=place // _COLUMNS + 1, col=place % _COLUMNS + 1)
    if copies:
        own = float(result["copying"].abs().nan_to_num().max())
        bar = {"title": "logits", "thickness": 10, "len": 0.4, "y": 0.2}
        heat, place = _map(result, "copying", own).update(colorbar=bar), len(shown)
        drawn.add_trace(heat, row=place // _COLUMNS + 1, col=place % _COLUMNS + 1)
    _, layers, heads = result.values.shape
    drawn.update_xaxes(dtick=max(1, layers // 8))
    drawn.update_xaxes(title_text="layer", row=rows)
    drawn.update_yaxes(dtick=max(1, heads // 6))
    drawn.update_yaxes(title_text="head", col=1)
    drawn.update_annotations(font_size=13)
    return drawn.update_layout(
        title_text=_behaviour_title(result), height=190 + 210 * rows, margin_t=TOP_WITH_PANELS
    )


def _map(result: BehaviourResult, name: str, bound: float) -> go.Heatmap:
    # A map of zeros alone still needs a scale.
    bound = bound or 1.0
    return go.Heatmap(
        z=_blank(result.excess(name).T),
        customdata=_blank(result[name].T),
        zmin=-bound,
        zmax=bound,
        zmid=0,
        colorscale="RdBu_r",
        hovertemplate=f"layer %{{x}}, head %{{y}}<br>{name} %{{customdata:.3f}}"
        "<br>less chance %{z:.3f}<extra></extra>",
    )


def _blank(values: Tensor) -> list[list[float | None]]:
    """Return rows; plotly leaves a place without a number blank, but takes no NaN."""
    return [[None if v != v else v for v in row] for row in values.tolist()]


def _behaviour_title(result: BehaviourResult) -> str:
    said = []
    phrases = {
        "previous_token": "puts {} of its attention on the token before",
        "induction": "{} on what followed the token earlier",
    }
    for kind, phrase in phrases.items():
        top = result.named(1, kinds=[kind])
        if len(top):
            row = top.iloc[0]
            head = HeadId(int(row["layer"]), int(row["head"]))
            share = f"{row['score']:.0%} (uniform: {row['chance']:.0%})"
            said.append(f"{head} {phrase.format(share)}")
    if not said:
        return "Attention on repeated random tokens and on text, less uniform attention"
    return "On repeated random tokens " + ",<br>".join(said)


def agreement(result: AgreementResult) -> go.Figure:
    """A panel a pair of scores: a point a head, coloured by layer."""
    pairs = len(result.names)
    columns = min(_COLUMNS, pairs)
    rows = -(-pairs // columns)
    rho = zip(result.rho, result.low, result.high, result.within, strict=True)
    titles = [
        f"ρ = {r:.2f} ({low:.2f} to {high:.2f}); within layers {within:.2f}"
        for r, low, high, within in (map(float, found) for found in rho)
    ]
    drawn = make_subplots(rows, columns, subplot_titles=titles, vertical_spacing=0.35 / rows)
    frame = result.heads_frame()
    for place, (score, name) in enumerate(result.names):
        own = frame[(frame["behaviour"] == score) & (frame["weights"] == name)]
        heads = [str(HeadId(*cell)) for cell in zip(own["layer"], own["head"], strict=True)]
        points = go.Scatter(
            x=own["weights_value"].tolist(),
            y=own["behaviour_value"].tolist(),
            mode="markers",
            text=heads,
            marker={
                "color": own["layer"].tolist(),
                "colorscale": "Viridis",
                "cmin": 0,
                "cmax": result.behaviour.shape[1] - 1,
                "size": 6,
                "showscale": place == 0,
                "colorbar": {"title": "layer", "thickness": 10},
            },
            showlegend=False,
            hovertemplate="%{text}<br>weights %{x:.3f}, behaviour %{y:.3f}<extra></extra>",
        )
        row, col = place // columns + 1, place % columns + 1
        drawn.add_trace(points, row=row, col=col)
        drawn.update_xaxes(title_text=f"weights: {name}", row=row, col=col)
        drawn.update_yaxes(title_text=f"behaviour: {score}", row=row, col=col)
    drawn.update_annotations(font_size=12)
    return drawn.update_layout(
        title_text=_agreement_title(result), height=160 + 300 * rows, margin_t=TOP_WITH_PANELS
    )


def _agreement_title(result: AgreementResult) -> str:
    best = int(result.rho.nan_to_num(nan=-2.0).argmax())
    score, name = result.names[best]
    above = int((result.low > 0).sum())
    return (
        f"{name} foretells {score} best: Spearman's ρ {result.rho[best]:.2f} over "
        f"{int(result.n_heads[best])} heads;<br>{above} of {len(result.names)} pairs of scores "
        f"agree beyond zero (95 %, {result.resample}s resampled)"
    )


def dependency(result: DependencyResult) -> go.Figure:
    """The best head of every layer at every relation, less the best fixed offset."""
    best = result.best()
    order = best.groupby("relation")["excess"].max().sort_values().index.tolist()
    layers = list(range(result.accuracy.shape[1]))
    cells: dict[tuple[str, int], Any] = {
        (row.relation, row.layer): row for row in best.itertuples(index=False)
    }

    def grid(read: Any) -> list[list[Any]]:
        return [[read(cells.get((name, layer))) for layer in layers] for name in order]

    bound = max(float(best["excess"].abs().max()), _MARGIN)
    drawn = go.Figure(
        go.Heatmap(
            x=layers,
            y=order,
            z=grid(lambda row: None if row is None else row.excess),
            text=grid(lambda row: "" if row is None else str(row.head)),
            customdata=grid(_described),
            texttemplate="%{text}",
            textfont={"size": 10},
            zmin=-bound,
            zmax=bound,
            zmid=0,
            colorscale="RdBu_r",
            colorbar={"title": "accuracy −<br>best offset", "thickness": 10},
            hovertemplate="%{customdata}<extra></extra>",
        )
    )
    drawn.update_xaxes(title_text="layer (in the cell: its best head)", dtick=1)
    drawn.update_yaxes(automargin=True, gridcolor=MUTED)
    return drawn.update_layout(title_text=_dependency_title(result), height=210 + 24 * len(order))


def _described(row: Any) -> str:
    if row is None:
        return "not measured"
    head, interval = HeadId(row.layer, row.head), f"{row.low:.0%} to {row.high:.0%}"
    return (
        f"{head}: {row.relation}, {row.direction}<br>found {row.accuracy:.0%} ({interval}) of "
        f"{row.n}<br>offset {row.offset:+d}: {row.baseline:.0%}"
    )


def _dependency_title(result: DependencyResult) -> str:
    table = result.specialists(_MARGIN)
    most = table.sort_values(["certain", "heads"], ascending=False, kind="stable").iloc[0]
    layers = int((table["certain"] >= 3).sum())
    return (
        f"Layer {most['layer']} has {most['heads']} heads that are each its best at another "
        f"relation, by over {_MARGIN}: {most['certain']} of them<br>with their whole interval; "
        f"{layers} of {len(table)} layers have three such or more ({result.sentences:,} sentences)"
    )
