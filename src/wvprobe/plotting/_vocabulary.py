"""Figures over the vocabulary: tokens that a circuit joins, and heads that copy."""

from html import escape

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wvprobe._types import HeadId
from wvprobe.copying import EXTREME, CopyingResult
from wvprobe.plotting._style import ACCENT, BAD, TOP_WITH_PANELS
from wvprobe.vocabulary import TopTokensResult


def top_tokens(result: TopTokensResult) -> go.Figure:
    """Bars on one scale around 0: the highest downwards from the top, then the lowest."""
    drawn = go.Figure()
    ranks = result.ids.shape[1]
    ends = (("highest", ACCENT, range(ranks)), ("lowest", BAD, range(2 * ranks, ranks, -1)))
    places, labels = [], []
    for side, (name, colour, at) in enumerate(ends):
        scores = result.scores[side].tolist()
        shown = [_entry(result, side, rank) for rank in range(ranks)]
        ids = result.ids[side].tolist()
        bars = go.Bar(
            x=scores,
            y=list(at),
            orientation="h",
            marker_color=colour,
            name=name,
            customdata=[[label, i] for label, i in zip(shown, ids, strict=True)],
            hovertemplate="%{customdata[0]} (id %{customdata[1]})<br>%{x:.4g}<extra></extra>",
        )
        drawn.add_trace(bars)
        places += list(at)
        labels += shown
    bound = float(result.scores.abs().max()) if ranks else 1.0
    unit = escape(result.unit)
    if result.left_out:
        unit += f"<br><i>left out: {escape('; '.join(result.left_out), quote=False)}</i>"
    drawn.update_xaxes(title_text=unit, range=[-1.05 * bound, 1.05 * bound], title_font_size=13)
    drawn.update_yaxes(tickvals=places, ticktext=labels, autorange="reversed", automargin=True)
    height = 190 + 2 * 22 * max(ranks, 1)
    return drawn.update_layout(title_text=_finding(result), height=height, showlegend=False)


def _entry(result: TopTokensResult, side: int, rank: int) -> str:
    found = _quoted(result.strings[side][rank])
    return f"{_quoted(result.token_strings[side][rank])} → {found}" if result.pairs else found


def _quoted(string: str) -> str:
    """Put a token between quotes, so that its spaces show, and its line breaks on one line."""
    for plain, shown in (("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        string = string.replace(plain, shown)
    return f"“{escape(string, quote=False)}”"


def _finding(result: TopTokensResult) -> str:
    given, found = result.roles
    at = f"{result.head} {result.circuit}" + (
        f" at offset {result.offset}" if result.offset is not None else ""
    )
    if not result.ids.shape[1]:
        return f"{at}: no token to choose from"
    high, low = (f"{_entry(result, side, 0)} ({result.scores[side, 0]:.3g})" for side in (0, 1))
    if result.pairs:
        asked = f"strongest {given} → {found} pairs of all"
    else:
        token = result.token_strings[0][0]
        named = "a direction" if result.token_ids[0, 0] < 0 else _quoted(token)
        asked = f"with {named} as {given}, {found} tokens"
    return f"{at}, {asked}:<br>highest {high}, lowest {low}, of {result.n_targets:,}"


def copying(result: CopyingResult) -> go.Figure:
    """Two maps layer × head around 0: the eigenvalue score, and the mean rank less chance."""
    maps = (
        ("eigenvalue score Σ Re λ / Σ |λ|", result.eigenvalue_score, 1.0, 0.46),
        ("mean rank of the token's own logit, less chance", result.rank - 0.5, 0.5, 1.0),
    )
    names = [str(layer) for layer in result.layers]
    drawn = make_subplots(1, 2, subplot_titles=[name for name, *_ in maps])
    for column, (_, values, bound, bar_at) in enumerate(maps, start=1):
        heat = go.Heatmap(
            x=names,
            # Plotly leaves a place without a number blank, but takes no NaN.
            z=[[None if v != v else v for v in row] for row in values.T.tolist()],
            zmin=-bound,
            zmax=bound,
            zmid=0,
            colorscale="RdBu_r",
            colorbar={"x": bar_at, "thickness": 10},
            hovertemplate="layer %{x}, head %{y}<br>%{z:.3f}<extra></extra>",
        )
        drawn.add_trace(heat, row=1, col=column)
    # Categories, since the layers chosen need not follow one another.
    every = max(1, len(names) // 10)
    drawn.update_xaxes(title_text="layer", type="category", tickvals=names[::every])
    drawn.update_yaxes(dtick=max(1, result.rank.shape[1] // 6))
    drawn.update_yaxes(title_text="head", col=1)
    drawn.update_layout(xaxis_domain=[0, 0.45], xaxis2_domain=[0.55, 0.99])
    most, least = (_head_at(result, int(at)) for at in (result.rank.argmax(), result.rank.argmin()))
    title = (
        f"{most[0]} ranks a token's own logit highest: mean rank {result.rank[most[1]]:.3f}, in "
        f"the top {EXTREME:.0%} for {result.promoted[most[1]]:.0%} of {len(result.token_ids):,} "
        f"tokens;<br>{least[0]} lowest: {result.rank[least[1]]:.3f}, in the bottom {EXTREME:.0%} "
        f"for {result.suppressed[least[1]]:.0%} (chance: .5 and {EXTREME:.0%})"
    )
    return drawn.update_layout(title_text=title, height=430, margin_t=TOP_WITH_PANELS)


def _head_at(result: CopyingResult, flat: int) -> tuple[HeadId, tuple[int, int]]:
    row, head = divmod(flat, result.rank.shape[1])
    return HeadId(result.layers[row], head), (row, head)
