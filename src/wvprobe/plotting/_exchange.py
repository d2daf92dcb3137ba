"""Figures of what exchanged patterns and values do."""

import plotly.graph_objects as go
from plotly.subplots import make_subplots
from torch import Tensor

from wvprobe.dissociation import DissociationResult
from wvprobe.exchanges import ExchangeResult
from wvprobe.plotting._style import ACCENT, BAD, MUTED, TOP_WITH_PANELS, short

_WAYS = {
    "exchange": "taken from the other text",
    "mean": "replaced by its mean over other texts",
    "zero": "set to zero",
    "resample": "taken from other texts",
}
_PARTS = {"pattern": "its pattern alone", "value": "its values alone", "head": "pattern and values"}


def exchange(result: ExchangeResult) -> go.Figure:
    """Maps layer × head, a row a text that runs: change at the head's layer, and at the end."""
    last = result.stream if result.kl is None else result.kl
    name = "‖Δ last stream‖ / ‖x‖" if result.kl is None else "KL of the prediction (nats)"
    shown = ((result.local, "‖Δ attn_added‖ / ‖attn_added‖", "Blues"), (last, name, "Purples"))
    titles = [
        f"{title}<br><i>{short(text, 44)}</i>" for text in result.texts for _, title, _ in shown
    ]
    n_texts = len(result.texts)
    drawn = make_subplots(n_texts, 2, subplot_titles=titles, vertical_spacing=0.3 / n_texts)
    heads = "head" if result.level == "query" else "KV head"
    for row in range(n_texts):
        for column, (values, title, colours) in enumerate(shown, start=1):
            heatmap = go.Heatmap(
                z=values[row].mean(dim=0).T.tolist(),
                x=list(result.layers),
                y=list(result.heads),
                zmin=0,
                zmax=float(values.mean(dim=1).max()),
                colorscale=colours,
                colorbar={"len": 0.9, "x": 0.46 if column == 1 else 1.0},
                showscale=row == 0,
                hovertemplate=f"layer %{{x}}, {heads} %{{y}}<br>{title} %{{z:.3f}}<extra></extra>",
            )
            drawn.add_trace(heatmap, row=row + 1, col=column)
    drawn.update_xaxes(type="category")
    drawn.update_xaxes(title_text="layer", row=n_texts)
    drawn.update_yaxes(title_text=heads, col=1)
    drawn.update_annotations(font_size=13)
    return drawn.update_layout(
        title_text=_strongest(result, last, name),
        height=200 + 200 * n_texts,
        margin_t=TOP_WITH_PANELS,
    )


def _strongest(result: ExchangeResult, last: Tensor, name: str) -> str:
    mean = last.mean(dim=1)
    flat = int(mean.flatten().argmax())
    into, rest = divmod(flat, mean[0].numel())
    layer, head = divmod(rest, mean.shape[-1])
    kind = "H" if result.level == "query" else "KV"
    unit = f"L{result.layers[layer]}{kind}{result.heads[head]}"
    way = f"{_PARTS[result.part]} {_WAYS[result.method]}"
    where = f"{name} {float(mean.max()):.3f} in “{short(result.texts[into])}”"
    return f"{unit} matters most, {way}:<br>{where}"


def dissociation(result: DissociationResult) -> go.Figure:
    """Content and routing contrasts of every head, and of each layer beside the control."""
    titles = ("content: values − pattern", "routing: pattern − values", "mean over a layer's heads")
    drawn = make_subplots(1, 3, subplot_titles=titles, horizontal_spacing=0.11)
    for column, name in enumerate(("content", "routing"), start=1):
        mean, low, high = result.interval(name)
        bound = float(mean.abs().nan_to_num().max())
        heatmap = go.Heatmap(
            z=mean.T.tolist(),
            x=list(result.layers),
            customdata=[
                [f"{lo:.3f} to {hi:.3f}" for lo, hi in zip(*ends, strict=True)]
                for ends in zip(low.T.tolist(), high.T.tolist(), strict=True)
            ],
            zmin=-bound,
            zmax=bound,
            colorscale="RdBu_r",
            colorbar={
                "orientation": "h",
                "x": (0.13, 0.5)[column - 1],
                "y": -0.42,
                "len": 0.28,
                "thickness": 12,
            },
            hovertemplate="layer %{x}, head %{y}<br>%{z:.3f} (%{customdata})<extra></extra>",
        )
        drawn.add_trace(heatmap, row=1, col=column)
        for control in (False, True)[: 1 + (result.control is not None)]:
            layer_mean = result.interval(name, control=control)[0].nanmean(dim=1)
            line = {"color": (ACCENT, BAD)[column - 1], "dash": "dot" if control else "solid"}
            label = f"{name}, {'control' if control else 'one word'}"
            drawn.add_scatter(
                x=list(result.layers), y=layer_mean.tolist(), line=line, name=label, row=1, col=3
            )
    drawn.update_yaxes(rangemode="tozero", zerolinecolor=MUTED, row=1, col=3)
    drawn.update_xaxes(title_text="layer", type="category", nticks=10)
    drawn.update_yaxes(title_text="head", dtick=1, row=1, col=1)
    drawn.update_annotations(font_size=13)
    found = result.summary().set_index(["pairs", "contrast"])
    content, routing = found.loc[("matched", "content")], found.loc[("matched", "routing")]
    interval = f"{content['mean']:+.2f}, {content['low']:+.2f} to {content['high']:+.2f}"
    more, less, heads, pairs, groups, routed = (
        int(row[name])
        for row, name in (
            *((content, name) for name in ("above", "below", "heads", "n_pairs", "n_groups")),
            (routing, "above"),
        )
    )
    title = (
        f"Values move the destination more than patterns do in {more} of {heads} heads, less in "
        f"{less} ({interval});<br>patterns move where the output comes from more in {routed} "
        f"({pairs} pairs, {groups} groups)"
    )
    return drawn.update_layout(
        title_text=title,
        height=520,
        margin_t=TOP_WITH_PANELS,
        legend={"orientation": "h", "y": -0.45},
    )
