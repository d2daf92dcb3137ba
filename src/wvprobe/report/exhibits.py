"""A result as the page keeps it: its figure, slim, and the table behind it, as plain data."""

import base64
import json
import math
import re
from typing import Any, NamedTuple

import numpy

from wvprobe.plotting import figure
from wvprobe.report.claims import Exhibit

DIGITS = 6  # of numbers that are drawn
_TABLE_DIGITS = 9  # of numbers in tables: no single-precision number loses any of its own
# What plotly reads as markup in a figure's texts; everything else is text.
_MARKUP = re.compile(r"</?(?:br|b|i|sub|sup|extra)\s*/?>")
_OPENS = re.compile(r"<(?!/?(?:br|b|i|sub|sup|extra)\s*/?>)")
_ENTITY = re.compile(r"&(?=#?\w+;)")
# A title stands above its figure as text, so that it wraps and can be read aloud.
_TITLE_ROOM, _PANEL_ROOM = 65, 45


class Kept(NamedTuple):
    """An exhibit as plain data.

    Attributes:
        title: what the figure shows, as text.
        text: what its reader should know.
        figure: plotly's ``data`` and ``layout``.
        columns: of the table behind it.
        rows: of the table behind it.
    """

    title: str
    text: str
    figure: dict[str, Any]
    columns: list[str]
    rows: list[list[Any]]


def kept(exhibit: Exhibit) -> Kept:
    """Return an exhibit as plain data: its figure drawn, its frame written out."""
    drawn = json.loads(str(figure(exhibit.result).to_json()))
    title = _plain(drawn["layout"].get("title", {}).get("text", ""))
    columns, rows = table(exhibit.result.to_frame())
    return Kept(title, exhibit.text, _slim(drawn), columns, rows)


def table(frame: Any) -> tuple[list[str], list[list[Any]]]:
    """Return a frame's columns and rows as JSON knows them; None for NaN."""
    columns = [[_cell(value) for value in frame[name]] for name in frame.columns]
    return [str(name) for name in frame.columns], [list(row) for row in zip(*columns, strict=True)]


def _cell(value: Any) -> Any:
    if isinstance(value, numpy.generic):
        value = value.item()
    if isinstance(value, float):
        if math.isinf(value):
            return str(value)
        return None if math.isnan(value) else _rounded(value, _TABLE_DIGITS)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)


def _rounded(value: float | int, digits: int) -> float | int:
    found = float(f"{value:.{digits}g}")
    return int(found) if found.is_integer() and abs(found) < 10**digits else found


def _plain(title: str) -> str:
    """Return a figure's title without its markup."""
    return " ".join(_MARKUP.sub(" ", title).split())


def _slim(drawn: dict[str, Any]) -> dict[str, Any]:
    """Return a figure without what the page gives all of them, its numbers rounded."""
    layout = drawn["layout"]
    for name in ("template", "title"):
        layout.pop(name, None)
    top = layout["margin"]["t"]
    layout["margin"]["t"] = min(top - _TITLE_ROOM, _PANEL_ROOM)
    layout["height"] = layout.get("height", 450) + layout["margin"]["t"] - top
    return {"data": _shortened(drawn["data"]), "layout": _shortened(layout)}


def _shortened(value: Any) -> Any:
    """Return plain data with shorter numbers, and texts in which no markup is left but plotly's."""
    if isinstance(value, float):
        return _rounded(value, DIGITS)
    if isinstance(value, str):
        return _OPENS.sub("&lt;", _ENTITY.sub("&amp;", value))
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, dict) and value.get("dtype") == "f8":
        numbers = numpy.frombuffer(base64.b64decode(value["bdata"]), "<f8").astype("<f4")
        return value | {"dtype": "f4", "bdata": base64.b64encode(numbers.tobytes()).decode()}
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    return value
