"""Figures and tables as the page holds them: all that fits, the largest tables as files."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wvprobe.report.exhibits import Kept
from wvprobe.report.storing import write_whole

# Characters of figures and tables: with plotly's script of 5 MB the page stays below 12 MB.
_ROOM = 6_000_000
_ROWS = 200  # of a table that are shown, and all that is left of one written to a file
_FOLDER = "tables"


class Embedded(NamedTuple):
    """An exhibit in the page.

    Attributes:
        id: of its figure and table in the page's data.
        title: of the figure.
        text: what its reader should know.
        height: of the figure, in pixels.
        panels: side by side in the figure.
        rows: of the whole table.
        file: that the whole table lies in, from the page's folder; "" where the page holds it.
    """

    id: str
    title: str
    text: str
    height: int
    panels: int
    rows: int
    file: str


class Held(NamedTuple):
    """All exhibits by their step, and the data of their figures and tables by their ids."""

    exhibits: dict[str, list[Embedded]]
    figures: dict[str, Any]
    tables: dict[str, Any]


def embedded(exhibits: Mapping[str, Sequence[Kept]], folder: Path) -> Held:
    """Return exhibits for the page; what it has no room for is written to ``folder/tables``."""
    kept = {
        f"{step}-{number}": one
        for step, several in exhibits.items()
        for number, one in enumerate(several, start=1)
    }
    figures = {name: one.figure for name, one in kept.items()}
    tables = {name: {"columns": one.columns, "rows": one.rows} for name, one in kept.items()}
    sizes = {name: len(script_json(table)) for name, table in tables.items()}
    spare = _ROOM - len(script_json(figures)) - sum(sizes.values())
    files: dict[str, str] = {}
    for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if spare >= 0 or len(kept[name].rows) <= _ROWS:
            continue
        files[name] = f"{_FOLDER}/{name}.csv"
        (folder / _FOLDER).mkdir(exist_ok=True)
        write_whole(folder / files[name], csv_text(kept[name].columns, kept[name].rows))
        tables[name]["rows"] = kept[name].rows[:_ROWS]
        spare += sizes[name] - len(script_json(tables[name]))
    found = {
        step: [
            _embedded(f"{step}-{number}", one, files) for number, one in enumerate(several, start=1)
        ]
        for step, several in exhibits.items()
    }
    return Held(found, figures, tables)


def _embedded(name: str, one: Kept, files: Mapping[str, str]) -> Embedded:
    layout = one.figure["layout"]
    axes = [axis for key, axis in layout.items() if key.startswith("xaxis")]
    starts = {round(axis.get("domain", [0])[0], 2) for axis in axes}
    return Embedded(
        id=name,
        title=one.title,
        text=one.text,
        height=layout["height"],
        panels=max(1, len(starts)),
        rows=len(one.rows),
        file=files.get(name, ""),
    )


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as CSV, nothing in the cells that are missing."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([["" if cell is None else cell for cell in row] for row in rows])
    return text.getvalue()


def script_json(value: Any) -> str:
    """Return plain data as JSON that can stand in a script element: no text can end it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
