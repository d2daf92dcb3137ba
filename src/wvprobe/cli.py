"""The command line: each subcommand parses its arguments and calls one function."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer

from wvprobe.errors import InputError, WvprobeError

if TYPE_CHECKING:
    from wvprobe.heads import HeadWeights

app = typer.Typer(
    name="wvprobe",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def options(debug: bool = typer.Option(False, "--debug", help="Show tracebacks.")) -> None:
    """Measure what attention heads carry, with weights that are checked against the model."""
    # main() takes --debug out wherever it stands; the option is here for the help text.


@app.command()
def models() -> None:
    """List the packaged models: sizes, licences, cached or not."""
    from rich.console import Console
    from rich.table import Table

    from wvprobe._packaged import cache_root, packaged_models

    table = Table("alias", "parameters", "download", "on disk", "licence", "cached")
    for model in packaged_models():
        table.add_row(
            model.alias,
            f"{model.parameters / 1e6:.1f} M",
            f"{model.download_mb} MB",
            f"{model.disk_mb} MB",
            model.licence,
            "yes" if model.cached else "no",
        )
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for model in packaged_models():
        console.print(f"{model.alias}: {model.description}", markup=False)
    console.print(f"cache: {cache_root()} (WVPROBE_CACHE names another)", markup=False)


@app.command()
def report(
    model: str = typer.Argument("smollm2-135m", help="Alias, folder, GGUF file or hub name."),
    out: str = typer.Option("report", "--out", help="Folder of the page."),
    quick: bool = typer.Option(False, "--quick", help="Only what takes under two minutes."),
    conllu: str | None = typer.Option(
        None, "--conllu", help="A treebank, for claims about dependencies and parts of speech."
    ),
) -> None:
    """Measure a model and write index.html and results.json."""
    from wvprobe.datasets import load_conllu
    from wvprobe.models import load
    from wvprobe.report import write_report

    treebank = None if conllu is None else load_conllu(conllu)
    _say(f"opening {model}")
    # The page shows the audit of all layers, and a failed one has to be seen rather than refused.
    loaded = load(model, audit=False)
    written = write_report(loaded, out, treebank=treebank, quick=quick, progress=_say)
    typer.echo(f"page:    {written.page.resolve()}")
    typer.echo(f"numbers: {written.results.resolve()}")
    if not written.audit.ok:
        _say("the audit failed: numbers that rest on extracted weights are not to be trusted")
        raise typer.Exit(1)


@app.command()
def audit(
    model: str = typer.Argument("smollm2-135m", help="Alias, folder, GGUF file or hub name."),
) -> None:
    """Hold weights read out of a model against what the model computes; exit 1 if they differ."""
    from wvprobe.auditing import audit as run
    from wvprobe.models import load

    result = run(load(model, audit=False))
    for row in result.identities:
        error = "" if row.status == "not applicable" else f"{row.error:.1e}"
        typer.echo(f"{row.status:<15} {error:>8}  {row.identity}  ({row.reason})")
    if not result.ok:
        raise typer.Exit(1)


@app.command()
def circuits(
    model: str = typer.Argument("smollm2-135m", help="Alias, folder, GGUF file or hub name."),
    layer: int | None = typer.Option(None, "--layer", help="With --head: one head alone."),
    head: int | None = typer.Option(None, "--head", help="Query head, counted from 0."),
    token: str | None = typer.Option(
        None, "--token", help="What the head promotes for it, and which keys it seeks."
    ),
    offset: int = typer.Option(0, "--offset", help="Query position minus key position, for QK."),
    compose: str | None = typer.Option(None, "--compose", help="Q, K or V: which heads compose."),
    k: int = typer.Option(10, "-k", help="How many rows of each table."),
    streamed: bool = typer.Option(
        False, "--streamed", help="Read a folder's shards a layer at a time, with no model."
    ),
) -> None:
    """Print ranks of all heads' OV and QK, one head's tokens, or the heads that compose."""
    heads = _heads(model, streamed)
    if compose is not None:
        from wvprobe.compose import composition

        _say(f"{compose}-composition of all pairs of heads")
        _table(f"{compose}-composition, strongest first", composition(heads, compose).top(k))
    elif layer is None and head is None and token is None:
        _all_heads(heads, offset, k)
    else:
        _one_head(heads, layer or 0, head or 0, token, offset, k)


@app.command()
def budget(
    model: str | None = typer.Argument(
        None, help="A published model's name, alias, folder, config.json, GGUF file or hub name."
    ),
    d_model: int | None = typer.Option(None, "--d-model", help="Width of the stream."),
    heads: int | None = typer.Option(None, "--heads", help="Query heads of a layer."),
    kv_heads: int | None = typer.Option(None, "--kv-heads", help="Key-value heads of a layer."),
    d_head: int | None = typer.Option(None, "--d-head", help="Width of queries and keys."),
    d_head_v: int | None = typer.Option(None, "--d-head-v", help="Width of values."),
    layers: int | None = typer.Option(None, "--layers", help="Layers of attention."),
    context: int = typer.Option(2048, "--context", help="Tokens that a token looks at."),
    dtype: str = typer.Option("bfloat16", "--dtype", help="Of the cache."),
    others: bool = typer.Option(False, "--alternatives", help="What else the heads could be."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead."),
) -> None:
    """Print what a model's heads cost, and what other heads would."""
    from wvprobe.budget._tables import budget_of, described

    numbers = {
        "d_model": d_model,
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "d_head": d_head,
        "d_head_v": d_head_v,
        "n_layers": layers,
    }
    found = budget_of(model, numbers)
    document, tables = described(found, context=context, dtype=dtype, others=others)
    if as_json:
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
        return
    for title, frame in tables:
        _table(title, frame)


@app.command()
def payload(
    model: str = typer.Argument("smollm2-135m", help="Alias, folder, GGUF file or hub name."),
    conllu: str | None = typer.Option(None, "--conllu", help="A treebank: file or folder."),
    senses: str | None = typer.Option(None, "--senses", help="Words in context: file or folder."),
    iob2: str | None = typer.Option(None, "--iob2", help="Named entities: file or folder."),
    column: str = typer.Option("upos", "--column", help="Of the treebank's labels."),
    label: str | None = typer.Option(
        None, "--label", help="Another label: token, position, or (of senses) pos."
    ),
    balanced: bool = typer.Option(False, "--balanced", help="Let all labels count alike."),
    words: int = typer.Option(4_000, "--words", help="At most so many words."),
    draws: int = typer.Option(200, "--draws", help="Random projections a layer."),
    site: str = typer.Option("v", "--site", help="Whose heads are listed: v, q or k."),
    by: str = typer.Option("random", "--by", help="The reference that heads are ranked by."),
    erased: int = typer.Option(0, "--erase", help="Erase the label from so many of the best."),
    out: str | None = typer.Option(None, "--out", help="Folder to save the result in."),
    k: int = typer.Option(10, "-k", help="How many rows of each table."),
) -> None:
    """Print which heads' values carry a label beyond random projections, and v against q, k.

    Without a data set: senses of the bundled sentences.
    """
    from wvprobe.models import load
    from wvprobe.value_payload import payload as run

    data = _labelled(conllu, column, senses, iob2)
    score = "balanced_accuracy" if balanced else "accuracy"
    _say(f"opening {model}")
    bridge = load(model)
    _say(f"probing {data.name}")
    given: dict[str, Any] = {"label": label, "score": score, "limit": words}
    found = run(bridge, data, draws=draws, progress=True, **given)
    told = f"{found.label}, {found.score_name} of {found.n_items} words, {found.n_groups} groups"
    columns = ["layer", "head", "score", "low", "high"]
    columns += [f"excess_{name}" for name in found.references]
    best = found.best(k, site=site, by=by)
    shown = [c for c in columns if not best[c].isna().all()] + ["p", "q", "p_family"]
    _table(f"{site}, largest excess over {by} ({told})", best[shown])
    if found.labour is not None:
        _table("v against q and k, mean over layers", found.labour.contrasts_frame())
    if erased:
        _erased(bridge, data, best, erased, given)
    if out is not None:
        typer.echo(f"saved: {found.save(out).resolve()}")


def _labelled(conllu: str | None, column: str, senses: str | None, iob2: str | None) -> Any:
    from wvprobe.datasets import load_conllu, load_iob2, load_senses

    if sum(given is not None for given in (conllu, senses, iob2)) > 1:
        raise InputError("give one of --conllu, --senses and --iob2, not several.")
    if conllu is not None:
        return load_conllu(conllu, column=column)
    return load_senses(senses) if iob2 is None else load_iob2(iob2)


def _erased(model: Any, data: Any, best: Any, count: int, given: dict[str, Any]) -> None:
    from wvprobe.value_payload import erase

    heads = [(int(a), int(b)) for a, b in best[["layer", "head"]].head(count).to_numpy()]
    _say(f"erasing {len(heads)} heads")
    frame = erase(model, data, heads=heads, progress=True, **given).to_frame()
    columns = ["layer", "head", "place", "before", "erased", "control"]
    columns += ["excess_loss", "excess_loss_low", "excess_loss_high", "p_family"]
    _table("label erased from v, against random directions of equal energy", frame[columns])


@app.command()
def drift(
    model: str = typer.Argument("smollm2-135m", help="Alias, folder, GGUF file or hub name."),
    senses: str | None = typer.Option(
        None, "--senses", help="A file of words in context; the bundled set without."
    ),
    word: str | None = typer.Option(None, "--word", help="One word of the set."),
    out: str | None = typer.Option(None, "--out", help="Folder for the result and its figure."),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON document instead."),
) -> None:
    """Print, layer by layer, how far the senses of words part ways."""
    from wvprobe.contextual_drift import drift as run
    from wvprobe.contextual_drift._tables import described
    from wvprobe.datasets import load_senses
    from wvprobe.models import load

    data = load_senses(senses)
    data = data if word is None else data.only(word)
    _say(f"opening {model}")
    bridge = load(model)
    _say(f"reading {len(data)} sentences")
    result = run(bridge, data)
    document, title, table = described(result)
    if out is not None:
        page = result.save(out) / "figure.html"
        result.figure().write_html(page)
        _say(f"wrote {page.parent.resolve()}: result.json, tensors.safetensors, figure.html")
    if as_json:
        typer.echo(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        _table(title, table)


def _heads(model: str, streamed: bool) -> "HeadWeights":
    from wvprobe.heads import HeadWeights
    from wvprobe.models import load

    _say(f"opening {model}")
    return HeadWeights.from_safetensors(model) if streamed else HeadWeights.from_model(load(model))


def _all_heads(heads: "HeadWeights", offset: int, k: int) -> None:
    from wvprobe.singular import spectra

    for kind in ("OV", "QK"):
        _say(f"spectra of {kind}")
        if kind == "QK" and heads.latent is not None:
            _say("QK is two circuits under latent attention; spectra(heads, 'QK', part=...)")
            continue
        # What the vocabulary adds costs more than all the rest; the Python call gives it.
        frame = spectra(heads, kind, offset=offset, vocabulary=False).to_frame()
        columns = ["layer", "head", "stable_rank", "effective_rank", "positivity"]
        ordered = frame.sort_values("effective_rank", kind="stable")[columns]
        name = kind if kind == "OV" else f"QK at offset {offset}"
        _table(f"{name}, lowest effective rank of {heads.d_head}", ordered.head(k))
        _table(f"{name}, highest", ordered.tail(k)[::-1])


def _one_head(
    heads: "HeadWeights", layer: int, head: int, token: str | None, offset: int, k: int
) -> None:
    from wvprobe.vocabulary import top_tokens

    columns = ["rank", "side", "token", "string", "score"]
    for kind in ("OV", "QK"):
        if kind == "OV" and isinstance(heads.unembedding, str):
            _say(f"no tokens for OV: {heads.unembedding}")
            continue
        parts = ("content", "rotary") if kind == "QK" and heads.latent is not None else (None,)
        for part in parts:
            found = top_tokens(heads, kind, layer, head, token, k=k, offset=offset, part=part)
            what = f"{kind}{f' ({part})' * bool(part)} of layer {layer}, head {head}"
            left = f"; left out: {', '.join(found.left_out)}" if found.left_out else ""
            _table(f"{what}, in {found.unit}{left}", found.to_frame()[columns])


def _table(title: str, frame: Any) -> None:
    typer.echo(f"\n{title}")
    typer.echo(frame.to_string(index=False, float_format=lambda value: f"{value:.4g}"))


def _say(step: str) -> None:
    """Tell what goes on, on stderr, so that stdout holds results alone."""
    typer.echo(f"wvprobe: {step}", err=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: an error that a user can cause is one line and exit code 1."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    try:
        app([argument for argument in given if argument != "--debug"], prog_name="wvprobe")
    except WvprobeError as error:
        if debug:
            raise
        print(f"wvprobe: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
