"""The command line: each subcommand parses its arguments and calls one function."""

import sys
from collections.abc import Sequence

import typer

from wvprobe.errors import WvprobeError

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
) -> None:
    """Measure a model and write index.html and results.json."""
    from wvprobe.models import load
    from wvprobe.report import write_report

    _say(f"opening {model}")
    # Every measure of this version is a quick one, so --quick changes nothing yet. The page shows
    # the audit of all layers, and a failed one has to be seen rather than refused.
    written = write_report(load(model, audit=False), out, progress=_say)
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
