"""Files of labelled text, line by line: whatever is wrong is named with its file and line."""

import csv
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from wvprobe._validate import file_path
from wvprobe.errors import DataError


def existing(path: str | Path) -> Path:
    """Return the path of a file or folder that is there.

    Raises:
        DataError: it is not.
        InputError: it is no path.
    """
    source = Path(os.path.expanduser(file_path("path", path)))
    if not os.path.exists(source):  # which is False, too, for what no path can be
        raise DataError(f"there is no file or folder {source}. Check the path.")
    return source


def fail(source: Path | str, line: int, reason: str) -> DataError:
    """Return the error that names a line."""
    return DataError(f"{source}, line {line}: {reason}")


def lines(source: Path) -> Iterator[tuple[int, str]]:
    """Yield each line of a UTF-8 file with its number, counted from 1.

    Lines end at a line feed and nowhere else: Unicode's other separators occur inside words.
    """
    try:
        content = source.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise DataError(f"{source} cannot be read: {error}") from error
    for number, raw in enumerate(content.split(b"\n"), start=1):
        try:
            yield number, raw.removesuffix(b"\r").decode("utf-8")
        except UnicodeDecodeError as error:
            raise fail(source, number, f"not UTF-8 ({error}). Convert it first.") from error


def blocks(source: Path) -> Iterator[list[tuple[int, str]]]:
    """Yield the lines between blank lines, as CoNLL's formats set sentences apart."""
    block: list[tuple[int, str]] = []
    for number, line in lines(source):
        if line.strip():
            block.append((number, line))
        elif block:
            yield block
            block = []
    if block:
        yield block


def comments(block: Iterable[tuple[int, str]]) -> dict[str, str]:
    """Return the ``# key = value`` comments of a block."""
    found = {}
    for _, line in block:
        key, equals, value = line[1:].partition("=")
        if line.startswith("#") and equals:
            found[key.strip()] = value.strip()
    return found


def csv_rows(source: Path, needed: Iterable[str]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yield each row of a CSV with the number of the line it ends on."""
    if source.is_dir():
        raise DataError(f"{source} is a folder. Name a CSV file.")
    with source.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        if missing := sorted(set(needed) - set(reader.fieldnames or ())):
            raise fail(source, 1, f"the column(s) {', '.join(missing)} are missing")
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise fail(source, reader.line_num, "not as many fields as the header has")
                yield reader.line_num, row
        except csv.Error as error:
            raise fail(source, reader.reader.line_num, str(error)) from error
