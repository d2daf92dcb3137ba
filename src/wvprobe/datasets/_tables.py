"""Labels in a table: a row a word, in a CSV or a pandas frame."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from wvprobe._validate import message
from wvprobe._word_places import occurrences
from wvprobe.datasets._files import csv_rows, existing, fail
from wvprobe.datasets._labels import LabelledDataset, LabelledSentence, Skipped
from wvprobe.errors import DataError, InputError

_NEEDED = ("sentence", "label")


class _Row(NamedTuple):
    """A labelled word; `place` is its characters, `number` the line or row that it comes from."""

    number: int
    sentence: str
    place: tuple[int, int]
    labels: Mapping[str, str]


def load_labels(table: "str | Path | Any", *, name: str | None = None) -> LabelledDataset:
    """Read labelled words from a table of one's own.

    Columns: ``sentence`` and ``label``, and either ``start`` and ``end`` (characters of the
    sentence) or ``word``, by which the word is found as :func:`wvprobe.words.find_word` finds it:
    whole, in the same case. A word that stands in its sentence more than once needs start and
    end. Every further column (``lemma``, say) is a column of labels, too. Rows of one sentence
    become one sentence with several words.

    Args:
        table: a CSV file in UTF-8, or a pandas frame.
        name: what the set is called; the file's name if None.

    Raises:
        DataError: a row cannot be used; file, line (frame: row, counted from 0) and reason are
            named.
        InputError: neither a path nor a frame.

    Examples:
        >>> import pandas
        >>> from wvprobe.datasets import load_labels
        >>> rows = [{"sentence": "The cat sat.", "word": "cat", "label": "animal"}]
        >>> load_labels(pandas.DataFrame(rows), name="mine").labels
        ('animal',)
    """
    if isinstance(table, str | Path):
        source = existing(table)
        try:
            rows = list(_placed(source, csv_rows(source, _NEEDED)))
        except UnicodeDecodeError as error:
            raise DataError(f"{source} is not UTF-8: {error}. Convert it first.") from error
    elif hasattr(table, "to_dict") and hasattr(table, "columns"):
        source, rows = None, list(_placed(None, _frame_rows(table)))
    else:
        raise InputError(message("table", "a CSV file or a pandas frame", table))
    told, unit = ("frame", "row") if source is None else (source.name, "line")
    if not rows:
        raise DataError(f"{told} holds no rows.")
    sentences: dict[str, dict[tuple[int, int], _Row]] = {}
    skipped: list[Skipped] = []
    for row in rows:
        known = sentences.setdefault(row.sentence, {}).setdefault(row.place, row)
        if known.labels["label"] != row.labels["label"]:
            first, second = known.labels["label"], row.labels["label"]
            reason = f"the word is labelled {second!r}, and {first!r} in {unit} {known.number}"
            raise _fail(source, row.number, reason)
        if known is not row:
            reason = f"the same word and label as in {unit} {known.number}"
            skipped.append(Skipped(told, row.number, row.sentence, reason))
    made = tuple(_sentence(text, words) for text, words in sentences.items())
    return LabelledDataset(name or told, made, "label", tuple(skipped))


def _fail(source: Path | None, number: int, reason: str) -> DataError:
    if source is None:
        return DataError(f"frame, row {number}: {reason}")
    return fail(source, number, reason)


def _frame_rows(frame: Any) -> Iterator[tuple[int, Mapping[str, str]]]:
    if missing := sorted(set(_NEEDED) - set(frame.columns)):
        raise DataError(f"frame: the column(s) {', '.join(missing)} are missing")
    for number, row in enumerate(frame.to_dict("records")):
        for column, value in row.items():
            if value != value or value is None:  # NaN
                raise _fail(None, number, f"{column} is missing")
        yield number, {str(column): str(value) for column, value in row.items()}


def _placed(source: Path | None, rows: Iterable[tuple[int, Mapping[str, str]]]) -> Iterator[_Row]:
    for number, row in rows:
        for column in _NEEDED:
            if not row[column].strip():
                raise _fail(source, number, f"{column} is empty")
        place = _place(source, number, row)
        labels = {k: v for k, v in row.items() if k not in ("sentence", "start", "end", "word")}
        yield _Row(number, row["sentence"], place, labels)


def _place(source: Path | None, number: int, row: Mapping[str, str]) -> tuple[int, int]:
    sentence = row["sentence"]
    if "start" in row and "end" in row:
        try:
            start, end = int(row["start"]), int(row["end"])
        except ValueError:
            given = f"{row['start']!r}, {row['end']!r}"
            raise _fail(source, number, f"start and end must be ints, got {given}") from None
        if not 0 <= start < end <= len(sentence):
            raise _fail(source, number, f"{start}..{end} lies outside the sentence")
        found = sentence[start:end]
        if found != found.strip() or (start, end) not in occurrences(sentence, found):
            raise _fail(source, number, f"{start}..{end} reads {found!r}, which is no whole word")
        return start, end
    if "word" not in row:
        raise _fail(source, number, "the columns start and end, or word, are missing")
    word = row["word"].strip()
    there = list(occurrences(sentence, word)) if word else []
    if len(there) != 1:
        reason = f"{word!r} stands {len(there)} times as a whole word in {sentence!r}"
        raise _fail(source, number, reason + (": give start and end" if there else ""))
    return there[0]


def _sentence(text: str, words: Mapping[tuple[int, int], _Row]) -> LabelledSentence:
    ordered = sorted(words)
    starts, ends = zip(*ordered, strict=True)
    forms = tuple(text[start:end] for start, end in ordered)
    first = words[ordered[0]]
    labels = {c: tuple(words[place].labels[c] for place in ordered) for c in first.labels}
    return LabelledSentence(text, forms, starts, ends, labels, None, f"row {first.number}")
