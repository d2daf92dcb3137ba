"""Figures of one word in its contexts: its senses, and its neighbours' influence."""

import plotly.graph_objects as go

from wvprobe.influence import SIDES, InfluenceResult
from wvprobe.plotting._style import ACCENT, MARKS, MUTED, STREAM_AXIS, short
from wvprobe.sense_maps import SenseLayers, SenseMap


def sense_map(result: SenseMap) -> go.Figure:
    """Occurrences on the plane of the first two components, a colour a sense."""
    frame, drawn = result.to_frame(), go.Figure()
    for number, (sense, rows) in enumerate(frame.groupby("sense", sort=False)):
        drawn.add_trace(
            go.Scatter(
                x=rows["first"].tolist(),
                y=rows["second"].tolist(),
                mode="markers",
                name=str(sense),
                marker={"size": 10, "opacity": 0.8, "symbol": MARKS[number % len(MARKS)]},
                text=rows["sentence"].tolist(),
                hovertemplate="%{text}<extra>" + str(sense) + "</extra>",
            )
        )
    low, high = result.interval
    first, second = result.explained.tolist()
    title = (
        f"“{result.word}” at stream {result.layer}: nearest centroid tells {result.accuracy:.0%} "
        f"of senses ({low:.0%} to {high:.0%});<br>senses shuffled: {result.control[0]:.0%}, 95th "
        f"percentile {result.control[1]:.0%}; the plane shows {first + second:.0%} of the variance"
    )
    # One unit is as long on both axes: distances on the plane are distances.
    drawn.update_yaxes(scaleanchor="x", scaleratio=1, title_text=f"component 2 ({second:.0%})")
    drawn.update_xaxes(title_text=f"component 1 ({first:.0%})")
    return drawn.update_layout(title_text=title, height=520)


def sense_layers(result: SenseLayers) -> go.Figure:
    """Occurrences on a plane, a colour a sense; a slider goes through the streams."""
    senses, layers = list(dict.fromkeys(result.senses)), range(len(result.points))
    start = len(layers) // 2
    # All streams are there and one is shown: an animation's frames would play by themselves.
    drawn = go.Figure(
        [
            _cloud(result, layer, sense).update(visible=layer == start)
            for layer in layers
            for sense in senses
        ]
    )
    steps = [
        {
            "args": [
                {"visible": [layer == shown for layer in layers for _ in senses]},
                {"title.text": _layer_title(result, shown)},
            ],
            "label": str(shown),
            "method": "update",
        }
        for shown in layers
    ]
    reach = 1.05 * float(result.points.abs().max())
    drawn.update_yaxes(range=[-reach, reach], scaleanchor="x", scaleratio=1)
    drawn.update_xaxes(range=[-reach, reach])
    slider = {"active": start, "steps": steps, "currentvalue": {"prefix": "stream "}}
    return drawn.update_layout(
        title_text=_layer_title(result, start), height=620, sliders=[{**slider, "pad": {"t": 40}}]
    )


def _cloud(result: SenseLayers, layer: int, sense: str) -> go.Scatter:
    mine = [place for place, found in enumerate(result.senses) if found == sense]
    first, second = result.points[layer, mine].T.tolist()
    return go.Scatter(
        x=first,
        y=second,
        mode="markers",
        name=sense,
        marker={"size": 10, "opacity": 0.8},
        text=[result.sentences[place] for place in mine],
        hovertemplate="%{text}<extra>" + sense + "</extra>",
    )


def _layer_title(result: SenseLayers, layer: int) -> str:
    return (
        f"“{result.word}” at stream {layer}: nearest centroid tells "
        f"{float(result.accuracy[layer]):.0%} of senses;<br>senses shuffled, 95th percentile: "
        f"{float(result.control[layer]):.0%}; the plane shows {float(result.explained[layer]):.0%} "
        "of the variance"
    )


def influence(result: InfluenceResult) -> go.Figure:
    """Relative change by stream, for what stands before the word and after it."""
    drawn = go.Figure()
    streams = list(range(result.values.shape[1]))
    for side, colour in enumerate((MUTED, ACCENT)):
        mean = result.values[side]
        above, below = result.high[side] - mean, mean - result.low[side]
        drawn.add_trace(
            go.Scatter(
                x=streams,
                y=mean.tolist(),
                error_y={"array": above.tolist(), "arrayminus": below.tolist(), "thickness": 1},
                name=f"{SIDES[side]} words exchanged",
                mode="lines+markers",
                line={"color": colour},
            )
        )
    earlier, later = result.values[:, -1].tolist()
    title = (
        f"“{result.word}” in “{short(result.text)}”: other words after it change its last<br>"
        f"vector by {later:.1%}, other words before it by {earlier:.1%} (n = {result.n} each)"
    )
    drawn.update_yaxes(title_text="‖x − x′‖ / ‖x‖", rangemode="tozero")
    return drawn.update_layout(title_text=title, height=400, xaxis_title=STREAM_AXIS)
