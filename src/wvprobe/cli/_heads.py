"""Commands about heads: their circuits, and their scores between two words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wvprobe.cli._app import Model, Rows, app, examples
from wvprobe.cli._printing import AsCsv, AsJson, Table, joined, say, show
from wvprobe.errors import InputError

if TYPE_CHECKING:
    from wvprobe.heads import HeadWeights

_TEXTS = ("a power bank dropped into the river.", "The river bank is close to here.")


@app.command(
    epilog=examples(
        "wvprobe circuits smollm2-135m -k 5",
        'wvprobe circuits smollm2-135m --layer 28 --head 5 --token " river"',
        "wvprobe circuits smollm2-135m --compose K --csv",
    )
)
def circuits(
    model: Model = "smollm2-135m",
    layer: int | None = typer.Option(None, "--layer", help="With --head: one head alone."),
    head: int | None = typer.Option(None, "--head", help="Query head, counted from 0."),
    token: str | None = typer.Option(
        None, "--token", help="What the head promotes for it, and which keys it seeks."
    ),
    offset: int = typer.Option(0, "--offset", help="Query position minus key position, for QK."),
    compose: str | None = typer.Option(None, "--compose", help="Q, K or V: which heads compose."),
    k: Rows = 10,
    streamed: bool = typer.Option(
        False, "--streamed", help="Read a folder's shards a layer at a time, with no model."
    ),
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Print ranks of all heads' OV and QK, one head's tokens, or the heads that compose.

    As CSV or JSON: ranks of all heads, or the rows of the tables.
    """
    heads = _heads(model, streamed)
    if compose is not None:
        from wvprobe.compose import composition

        say(f"{compose}-composition of all pairs of heads")
        frame = composition(heads, compose).top(k)
        tables = [(f"{compose}-composition, strongest first", frame)]
    elif layer is None and head is None and token is None:
        tables, frame = _all_heads(heads, offset, k)
    else:
        tables, frame = _one_head(heads, layer or 0, head or 0, token, offset, k)
    show(tables, whole=frame, as_json=as_json, as_csv=as_csv)


def _heads(model: str, streamed: bool) -> "HeadWeights":
    from wvprobe.heads import HeadWeights
    from wvprobe.models import load

    say(f"opening {model}")
    return HeadWeights.from_safetensors(model) if streamed else HeadWeights.from_model(load(model))


def _all_heads(heads: "HeadWeights", offset: int, k: int) -> tuple[list[Table], Any]:
    from wvprobe.singular import spectra

    tables: list[Table] = []
    frames: list[Table] = []
    for kind in ("OV", "QK"):
        say(f"spectra of {kind}")
        if kind == "QK" and heads.latent is not None:
            say("QK is two circuits under latent attention; spectra(heads, 'QK', part=...)")
            continue
        # What the vocabulary adds costs more than all the rest; the Python call gives it.
        frame = spectra(heads, kind, offset=offset, vocabulary=False).to_frame()
        columns = ["layer", "head", "stable_rank", "effective_rank", "positivity"]
        ordered = frame.sort_values("effective_rank", kind="stable")[columns]
        name = kind if kind == "OV" else f"QK at offset {offset}"
        tables.append((f"{name}, lowest effective rank of {heads.d_head}", ordered.head(k)))
        tables.append((f"{name}, highest", ordered.tail(k)[::-1]))
        frames.append((kind, frame))
    return tables, joined(frames, "circuit")


def _one_head(
    heads: "HeadWeights", layer: int, head: int, token: str | None, offset: int, k: int
) -> tuple[list[Table], Any]:
    from wvprobe.vocabulary import top_tokens

    columns = ["rank", "side", "token", "string", "score"]
    tables: list[Table] = []
    frames: list[Table] = []
    for kind in ("OV", "QK"):
        if kind == "OV" and isinstance(heads.unembedding, str):
            say(f"no tokens for OV: {heads.unembedding}")
            continue
        parts = ("content", "rotary") if kind == "QK" and heads.latent is not None else (None,)
        for part in parts:
            found = top_tokens(heads, kind, layer, head, token, k=k, offset=offset, part=part)
            name = f"{kind}{f' ({part})' * bool(part)}"
            left = f"; left out: {', '.join(found.left_out)}" if found.left_out else ""
            frame = found.to_frame()[columns]
            tables.append((f"{name} of layer {layer}, head {head}, in {found.unit}{left}", frame))
            frames.append((name, frame))
    return tables, joined(frames, "circuit")


@app.command(
    epilog=examples(
        "wvprobe scores smollm2-135m",
        'wvprobe scores minilm-l6 --text "The bat flew by." --query bat --key flew',
        "wvprobe scores smollm2-135m --layer 16 --head 0",
    )
)
def scores(
    model: Model = "smollm2-135m",
    texts: Annotated[
        list[str] | None,
        typer.Option(
            "--text",
            help="A text, or given twice two of them; without, the two with 'bank' and 'river'.",
            show_default=False,
        ),
    ] = None,
    query: str = typer.Option("bank", "--query", help="The word whose query it is."),
    key: str = typer.Option("river", "--key", help="The word whose key it is."),
    layer: int | None = typer.Option(None, "--layer", help="With --head: what its score holds."),
    head: int | None = typer.Option(None, "--head", help="Query head, counted from 0."),
    k: Rows = 10,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Print scores between two words: of one text, what differs in two, or one head's parts.

    Of one text: scores in both directions. Of two: the shares that query, key and offset have in
    the difference of their scores. With --layer and --head: the largest terms of the score, which
    sum to it. As CSV or JSON: all rows.
    """
    from wvprobe.models import load

    given = list(texts or _TEXTS)
    if len(given) > 2:
        raise InputError(f"--text must be given once or twice. Got {len(given)} texts instead.")
    if (layer is None) != (head is None):
        raise InputError("--layer and --head must be given together.")
    say(f"opening {model}")
    bridge = load(model)
    if layer is not None and head is not None:
        tables, frame = _terms(bridge, given, (query, key), (layer, head), k)
    elif len(given) == 1:
        tables, frame = _in_one(bridge, given, (query, key), k)
    else:
        tables, frame = _in_two(bridge, given, (query, key), k)
    show(tables, whole=frame, as_json=as_json, as_csv=as_csv)


def _in_one(
    model: Any, texts: Sequence[str], words: tuple[str, str], k: int
) -> tuple[list[Table], Any]:
    from wvprobe.word_pairs import pair_scores

    frame = pair_scores(model, texts, *words).to_frame()
    tables = []
    for direction, rows in frame.groupby("direction", sort=False):
        masked = bool(rows["masked"].iloc[0])
        by = "gauge_fixed" if masked else "attention"
        told = "masked: its attention is 0; largest score first" if masked else "most attention"
        best = rows.sort_values(by, ascending=False, kind="stable").head(k)
        columns = ["layer", "head", "score", "gauge_fixed", "attention"]
        tables.append((f"{direction} in “{texts[0]}” ({told})", best[columns]))
    return tables, frame


def _in_two(
    model: Any, texts: Sequence[str], words: tuple[str, str], k: int
) -> tuple[list[Table], Any]:
    from wvprobe.context_shares import context_dependence

    found = context_dependence(model, *texts, query=words[0], key=words[1])
    frame = found.to_frame()
    change = ((frame["score_b"] - frame["score_a"]) / frame["scale"]).abs()
    best = frame.loc[change.sort_values(ascending=False, kind="stable").index[:k]]
    columns = ["layer", "head", "score_a", "score_b", "query_content", "key_content", "offset"]
    hidden = [f"the {n}" for n, name in (("first", "masked_a"), ("second", "masked_b"))
              if bool(frame[name].iloc[0])]  # fmt: skip
    masked = f"; masked in {' and '.join(hidden)} text" if hidden else ""
    title = f"{found.pair()}, raw scores that differ most, and shares of the difference{masked}"
    return [(title, best[columns])], frame


def _terms(
    model: Any, texts: Sequence[str], words: tuple[str, str], head: tuple[int, int], k: int
) -> tuple[list[Table], Any]:
    from wvprobe.ledger import score_ledger

    tables: list[Table] = []
    frames: list[Table] = []
    for text in texts:
        found = score_ledger(model, text, query=words[0], key=words[1], layer=head[0], head=head[1])
        columns = ["query_component", "key_component", "term", "gauge_fixed"]
        title = (
            f"{words[0]}→{words[1]} at layer {head[0]}, head {head[1]} in “{text}”: score "
            f"{found.total:.4g}, of which"
        )
        tables.append((title, found.top(k)[columns]))
        frames.append((text, found.to_frame()))
    return tables, joined(frames, "text")
