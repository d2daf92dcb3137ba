"""What commands print: tables for people, JSON and CSV for programs, steps on stderr."""

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print one table as CSV instead, all rows.")]
Table = tuple[str, Any]


def say(step: str) -> None:
    """Tell what goes on, on stderr, so that stdout holds results alone."""
    typer.echo(f"wvprobe: {step}", err=True)


def show(
    tables: Iterable[Table],
    *,
    whole: Any,
    document: Any = None,
    as_json: bool = False,
    as_csv: bool = False,
) -> None:
    """Print a command's finding in the form asked for.

    Args:
        tables: titles and frames, for people; read only where they are printed.
        whole: the frame that CSV holds, and JSON as a list of rows where there is no `document`.
        document: what JSON holds.
        as_json: print JSON.
        as_csv: print CSV.
    """
    if as_json and as_csv:
        raise typer.BadParameter("give --json or --csv, not both.")
    if as_json:
        found = records(whole) if document is None else document
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    elif as_csv:
        typer.echo(whole.to_csv(index=False), nl=False)
    else:
        for title, frame in tables:
            table(title, frame)


def table(title: str, frame: Any) -> None:
    """Print a frame: ruled on a terminal, plain where the output goes elsewhere."""
    if not sys.stdout.isatty():
        typer.echo(f"\n{title}")
        typer.echo(frame.to_string(index=False, float_format=lambda value: f"{value:.4g}"))
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table as Ruled
    from rich.text import Text

    ruled = Ruled(title=Text(title), title_justify="left", box=box.SIMPLE_HEAD)
    for name in frame.columns:
        numeric = getattr(frame[name].dtype, "kind", "O") in "iuf"
        ruled.add_column(Text(str(name)), justify="right" if numeric else "left", overflow="fold")
    for row in frame.itertuples(index=False):
        ruled.add_row(*(Text(_written(cell)) for cell in row))
    Console(highlight=False).print(ruled)


def _written(cell: Any) -> str:
    if isinstance(cell, float):
        return "" if math.isnan(cell) else f"{cell:.4g}"
    return str(cell)


def records(frame: Any) -> list[dict[str, Any]]:
    """Return a frame as one object a row, None for what JSON does not know."""
    return [
        {str(name): _plain(value) for name, value in row.items()}
        for row in frame.to_dict(orient="records")
    ]


def _plain(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else str(value)


def joined(frames: Sequence[tuple[str, Any]], column: str) -> Any:
    """Return frames below each other, what tells them apart in a first column."""
    import pandas

    named = [frame.copy() for _, frame in frames]
    for (name, _), frame in zip(frames, named, strict=True):
        frame.insert(0, column, name)
    return pandas.concat(named, ignore_index=True)
