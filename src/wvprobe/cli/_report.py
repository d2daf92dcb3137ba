"""The command that writes a report, and how it tells its progress."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wvprobe.cli._app import app, examples, known_models
from wvprobe.cli._printing import say

if TYPE_CHECKING:
    from wvprobe.report import Pair, Step

_QUICK = ("smollm2-135m",)
_FULL = ("smollm2-135m", "minilm-l6")


@app.command(
    epilog=examples(
        "wvprobe report --quick",
        "wvprobe report smollm2-135m ./my-model --conllu en_ewt-ud-dev.conllu --out report",
        'wvprobe report --quick --pair "He sat by the bank." "The bank lent it." bank --other the',
    )
)
def report(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Aliases, folders, GGUF files or hub names, side by side on one page; without, "
            "both packaged models, or with --quick the first alone.",
            autocompletion=known_models,
            show_default=False,
        ),
    ] = None,
    texts: Annotated[
        str | None, typer.Option("--texts", help="Texts to judge on: a file, one a line.")
    ] = None,
    senses: Annotated[
        str | None, typer.Option("--senses", help="Words in context with their senses.")
    ] = None,
    conllu: Annotated[
        str | None,
        typer.Option("--conllu", help="A treebank, for dependencies and parts of speech."),
    ] = None,
    pair: Annotated[
        tuple[str, str, str] | None,
        typer.Option(
            "--pair",
            help="Two sentences and a word of both, in place of the two with 'bank'.",
            metavar="A B WORD",
            show_default=False,
        ),
    ] = None,
    other: Annotated[
        str | None,
        typer.Option(
            "--other", help="The second word of --pair; without, the longest that both share."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller samples, in minutes.")] = False,
    out: Annotated[str, typer.Option("--out", help="Folder of the page.")] = "report",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a run that was interrupted.")
    ] = False,
) -> None:
    """Measure models and write index.html and results.json.

    Exit code 1 if a step failed or an audit does not hold; the page shows what and why.
    """
    from wvprobe.datasets import load_conllu, load_senses, load_texts
    from wvprobe.report import FULL, QUICK, write_report

    named = {"texts": texts, "senses": senses, "conllu": conllu}
    with _told_steps() as tell:
        try:
            written = write_report(
                list(models or (_QUICK if quick else _FULL)),
                out,
                texts=None if texts is None else load_texts(texts),
                senses=None if senses is None else load_senses(senses),
                treebank=None if conllu is None else load_conllu(conllu),
                pair=_pair(pair, other),
                sizes=QUICK if quick else FULL,
                files={name: file for name, file in named.items() if file is not None},
                resume=resume,
                progress=tell,
            )
        except KeyboardInterrupt:
            say("interrupted. What is finished is kept: the same command with --resume goes on.")
            raise typer.Exit(130) from None
    for sentence in written.told:
        typer.echo(sentence)
    typer.echo(f"page:    {written.page.resolve()}")
    typer.echo(f"numbers: {written.results.resolve()}")
    if written.failed:
        say(f"failed: {'; '.join(written.failed)}. See errors.log beside the page.")
    if not written.audited:
        say("the audit failed: numbers that rest on extracted weights are not to be trusted")
    if not written.ok:
        raise typer.Exit(1)


def _pair(given: tuple[str, str, str] | None, other: str | None) -> "Pair":
    from wvprobe.report import BANK, Pair

    if given is None and other is None:
        return BANK
    if given is None:
        return Pair.of(BANK.text_a, BANK.text_b, BANK.word, other)
    return Pair.of(*given, other)


@contextmanager
def _told_steps() -> Iterator[Callable[["Step"], None]]:
    """Yield what tells steps: a bar on a terminal, a line each where stderr goes elsewhere."""
    if not sys.stderr.isatty():
        yield lambda step: say(f"{step.what} ({step.done:.0%} done{_left(step, ', ')})")
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=30),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("opening models", total=1.0, left="")
        yield lambda step: bar.update(
            task, completed=step.done, description=_short(step.what), left=_left(step)
        )


def _short(what: str) -> str:
    return what if len(what) <= 60 else f"{what[:59]}…"


def _left(step: "Step", before: str = "") -> str:
    if step.left is None or step.done >= 1:
        return ""
    minutes = round(step.left / 60)
    return f"{before}about {minutes} min left" if minutes else f"{before}less than a minute left"
