"""Figures of drift over many words: measures with bands, likeness of streams, growth laws."""

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wvprobe.contextual_drift import (
    DriftResult,
    GrowthResult,
    HeldOutSenses,
    LayerSimilarity,
    ScoreDrift,
)
from wvprobe.plotting._style import (
    ACCENT,
    BAD,
    GREEN,
    INK,
    MUTED,
    OCHRE,
    STREAM_AXIS,
    TOP_WITH_PANELS,
    faint,
)

# Panels of a drift figure: measures as (column, name, colour); corrected ones are dashed.
_PANELS = (
    (
        "likeness of a word's occurrences (mean cosine)",
        (
            ("self_similarity", "all occurrences", INK),
            ("same_sense", "one sense", ACCENT),
            ("different_sense", "different senses", BAD),
        ),
    ),
    (
        "senses told apart",
        (
            ("centroid_accuracy", "nearest centroid", ACCENT),
            ("knn_accuracy", "nearest neighbour", INK),
        ),
    ),
    ("gap: one sense minus different senses", (("gap", "gap", ACCENT),)),
    (
        "within sentences, and one direction's share",
        (
            ("intra_sentence", "tokens with their sentence's mean", ACCENT),
            ("max_explainable_variance", "maximum explainable variance", INK),
            ("max_explainable_variance_centred", "the same, centred", MUTED),
        ),
    ),
)


def drift(result: DriftResult) -> go.Figure:
    """Four panels over streams, each a mean over words with its 95 % band."""
    frame = result.summary().set_index("measure")
    drawn = make_subplots(
        2,
        2,
        subplot_titles=[title for title, _ in _PANELS],
        vertical_spacing=0.16,
        horizontal_spacing=0.09,
    )
    for place, (_, measures) in enumerate(_PANELS):
        row, column = divmod(place, 2)
        for name, label, colour in measures:
            for ending, dash in (("", "solid"), ("_corrected", "dash")):
                if name + ending in frame.index:
                    lines = frame.loc[[name + ending]]
                    shown = label + (f" ({result.correction} corrected)" if ending else "")
                    for trace in banded(lines, shown, colour, dash):
                        drawn.add_trace(trace, row=row + 1, col=column + 1)
    layers = list(range(len(result.baseline)))
    dotted = {"color": MUTED, "dash": "dot"}
    references = (
        (1, 1, result.baseline, f"random words (n = {result.n_baseline})"),
        (1, 2, result.control[1], "senses shuffled, 95th percentile"),
    )
    for row, column, values, label in references:
        trace = go.Scatter(x=layers, y=values.tolist(), mode="lines", line=dotted, name=label)
        drawn.add_trace(trace, row=row, col=column)
    drawn.update_xaxes(title_text=STREAM_AXIS, row=2)
    drawn.update_yaxes(tickformat=".0%", row=1, col=2)
    drawn.update_annotations(font_size=13)
    return drawn.update_layout(
        title_text=_parted(result),
        height=760,
        margin_t=TOP_WITH_PANELS,
        legend={"orientation": "h", "y": -0.13},
    )


def _parted(result: DriftResult) -> str:
    """Say how well senses are told, and where the gap is widest."""
    read = "" if result.position == "target" else ", read at the sentence's last token"
    words = f"{len(result.words)} words" if len(result.words) > 1 else f"“{''.join(result.words)}”"
    mean = result["centroid_accuracy"].nanmean(dim=0)
    gap = result["gap"].nanmean(dim=0)
    if bool(mean.isnan().all()):
        return f"{words}{read}: no senses to be compared"
    best, widest = int(mean.argmax()), int(gap.argmax())
    return (
        f"{words}{read}: nearest centroid tells {float(mean[0]):.0%} of senses at the embedding, "
        f"{float(mean[best]):.0%} at stream {best}<br>(senses shuffled: "
        f"{float(result.control[0, best]):.0%}); the gap in cosine is widest at stream {widest}, "
        f"{float(gap[widest]):.2f}"
    )


def banded(frame: Any, label: str, colour: str, dash: str = "solid") -> list[go.Scatter]:
    """Return a line with its band; columns layer mean low high."""
    layers = frame["layer"].tolist()
    line = go.Scatter(
        x=layers,
        y=frame["mean"].tolist(),
        mode="lines",
        name=label,
        legendgroup=label,
        line={"color": colour, "dash": dash},
    )
    if frame["low"].isna().all():
        return [line]
    band = go.Scatter(
        x=layers + layers[::-1],
        y=frame["high"].tolist() + frame["low"].tolist()[::-1],
        fill="toself",
        fillcolor=faint(colour),
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
        legendgroup=label,
    )
    return [band, line]


def layers(result: LayerSimilarity) -> go.Figure:
    """CKA of all pairs of streams, with and without what words are; Procrustes of neighbours."""
    titles = ("CKA", "CKA, each word's mean taken off", "Procrustes, stream k and k + 1")
    drawn = make_subplots(1, 3, subplot_titles=titles, horizontal_spacing=0.08)
    for column, values in enumerate((result.cka, result.cka_within), start=1):
        heat = go.Heatmap(
            z=values.tolist(),
            zmin=0,
            zmax=1,
            colorscale="Blues",
            showscale=column == 2,
            colorbar={"x": 0.635, "thickness": 10},
            hovertemplate="streams %{y}, %{x}<br>%{z:.2f}<extra></extra>",
        )
        drawn.add_trace(heat, row=1, col=column)
    steps = list(range(len(result.procrustes)))
    lines = (
        (result.procrustes, "same tokens", {"color": ACCENT}),
        (result.procrustes_chance, "tokens shuffled", {"color": MUTED, "dash": "dot"}),
    )
    for values, name, line in lines:
        trace = go.Scatter(x=steps, y=values.tolist(), mode="lines+markers", name=name, line=line)
        drawn.add_trace(trace, row=1, col=3)
    drawn.update_yaxes(range=[0, 1.02], col=3)
    drawn.update_xaxes(title_text="stream")
    drawn.update_annotations(font_size=13)
    first, last = float(result.cka[0, -1]), float(result.cka[-2, -1])
    title = (
        f"The last stream's likeness (CKA) to the embedding is {first:.2f}, to its neighbour "
        f"{last:.2f};<br>unbiased, n = {result.n} tokens; Procrustes n = {result.n_procrustes}"
    )
    return drawn.update_layout(
        title_text=title,
        height=430,
        margin_t=TOP_WITH_PANELS,
        legend={"orientation": "h", "x": 0.7, "y": -0.2},
    )


def growth(result: GrowthResult) -> go.Figure:
    """Shares of words in which each law is best, a group of bars a metric."""
    drawn, frame = go.Figure(), result.summary()
    if result.untestable or not len(frame):
        why = result.untestable or "No curve has enough layers that are not zero."
        return drawn.update_layout(title_text=f"Growth laws are not testable here<br>{why}")
    colours = (MUTED, OCHRE, ACCENT, GREEN, BAD)
    for (law, rows), colour in zip(frame.groupby("law", sort=False), colours, strict=True):
        drawn.add_bar(
            x=rows["metric"].tolist(),
            y=rows["share"].tolist(),
            name=str(law),
            marker_color=colour,
            error_y={
                "array": (rows["high"] - rows["share"]).tolist(),
                "arrayminus": (rows["share"] - rows["low"]).tolist(),
                "thickness": 1,
            },
        )
    shares = frame[frame["law"] == "exponential"]
    told = ", ".join(f"{row.share:.0%} in {row.metric}" for row in shares.itertuples(index=False))
    title = (
        f"Exponential growth is the best of four laws in these shares of words:<br>{told}"
        f";<br>least {result.errors} errors, AICc; median R² of the best law "
        f"{frame['median_r2'].min():.2f} to {frame['median_r2'].max():.2f}"
    )
    drawn.update_yaxes(title_text="share of words", tickformat=".0%", range=[0, 1.05])
    return drawn.update_layout(title_text=title, height=450, barmode="group", margin_t=105)


def score_drift(result: ScoreDrift) -> go.Figure:
    """|Δs| over blocks, of different senses and of one."""
    frame, drawn = result.summary(), go.Figure()
    kinds = (("different", "different senses", BAD), ("same", "one sense", ACCENT))
    for kind, label, colour in kinds:
        for trace in banded(frame[frame["kind"] == kind], label, colour):
            drawn.add_trace(trace)
    last = frame[frame["layer"] == frame["layer"].max()].set_index("kind")["mean"]
    title = (
        "A word's raw score with itself, between two sentences: the mean of |Δs| at the last block"
        f"<br>is {last.get('different', float('nan')):.2f} for different senses, "
        f"{last.get('same', float('nan')):.2f} for one"
    )
    drawn.update_yaxes(title_text="|Δs|", rangemode="tozero")
    return drawn.update_layout(title_text=title, height=400, xaxis_title="block")


def held_out(result: HeldOutSenses) -> go.Figure:
    """Balanced accuracy on the test part over streams, a line a word."""
    frame, drawn = result.to_frame(), go.Figure()
    colours = (ACCENT, BAD, INK, GREEN, OCHRE, MUTED)
    for number, (word, rows) in enumerate(frame.groupby("word", sort=False)):
        shown = rows.rename(columns={"balanced_accuracy": "mean"})
        for trace in banded(shown, str(word), colours[number % len(colours)]):
            drawn.add_trace(trace)
    for chance in sorted(set(frame["chance"].dropna())):
        drawn.add_hline(y=chance, line={"color": MUTED, "dash": "dot"}, annotation_text="chance")
    best = frame.loc[frame["balanced_accuracy"].idxmax()]
    title = (
        f"Centroids of the training part tell {best['balanced_accuracy']:.0%} of the senses of "
        f"“{best['word']}” at stream {best['layer']:.0f};<br>balanced accuracy on {best['n_test']} "
        f"test sentences, {best['low']:.0%} to {best['high']:.0%}"
    )
    drawn.update_yaxes(title_text="balanced accuracy", tickformat=".0%")
    return drawn.update_layout(title_text=title, height=430, xaxis_title=STREAM_AXIS)
