"""Files of words in context, of four formats, read as one kind of set."""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from importlib import resources
from pathlib import Path

from wvprobe._validate import instance, one_of
from wvprobe.datasets._files import csv_rows, existing, fail
from wvprobe.datasets._senses import SenseDataset, SenseItem
from wvprobe.errors import DataError, InputError

FORMATS = ("senses", "homonyms", "coarsewsd", "wic")
_SENSE_COLUMNS = ("word", "sense", "gloss", "pos", "sentence", "start", "end")
_HOMONYM_COLUMNS = tuple(f"{name}{n}" for n in "12" for name in ("POS", "Meaning", "Sentence"))
_CONTEXTS = ("before", "after", "both")
# Endings of regular inflection; of several candidates the first in this order is the target.
_ENDINGS = ("s", "es", "ed", "d", "ing")


def load_senses(path: str | Path | None = None, *, format: str = "auto") -> SenseDataset:
    """Read a set of words in context.

    Args:
        path: a file or folder; None for the set that comes with wvprobe.
        format: one of ``senses homonyms coarsewsd wic``, or ``auto`` to tell from the content.

    Raises:
        DataError: the content is not of the format; file, line and reason are named.
        InputError: unknown format, or one that cannot be told from the content.

    Examples:
        >>> senses = wvprobe.load_senses()
        >>> sorted({item.sense for item in senses.only("bank").items})
        ['device', 'money', 'river_side', 'tilt']
    """
    one_of("format", format, ("auto", *FORMATS))
    if path is None:
        with resources.as_file(resources.files("wvprobe") / "data" / "polysemy.csv") as bundled:
            return _dataset("wvprobe polysemy", bundled, _read_senses)
    source = existing(path)
    chosen = _told_format(source) if format == "auto" else format
    return _dataset(source.name, source, _READERS[chosen])


def senses_or_bundled(dataset: SenseDataset | None) -> SenseDataset:
    """Return the words in context that were given; None is the set that comes with wvprobe.

    Raises:
        InputError: they are no SenseDataset.

    Examples:
        >>> from wvprobe.datasets import senses_or_bundled
        >>> senses_or_bundled(None).name
        'wvprobe polysemy'
    """
    if dataset is None:
        return load_senses()
    instance("dataset", dataset, SenseDataset, "load_senses returns one.")
    return dataset


def _dataset(name: str, source: Path, read: Callable[[Path], Iterable[SenseItem]]) -> SenseDataset:
    try:
        items = tuple(read(source))
    except UnicodeDecodeError as error:
        raise DataError(f"{source} is not UTF-8: {error}. Convert it first.") from error
    if not items:
        raise DataError(f"{source} holds no sentences.")
    return SenseDataset(name, items)


def _told_format(source: Path) -> str:
    if source.is_dir():
        if list(source.glob("*.data.txt")) and not list(source.glob("*.gold.txt")):
            raise DataError(f"{source} has *.data.txt without *.gold.txt: labels are missing.")
        if (source / "classes_map.txt").is_file():
            return "coarsewsd"
        raise InputError(f"{source} is a folder of no known format; name it with format=.")
    with source.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        first = file.readline()
    header = set(next(csv.reader([first]), []))
    if header.issuperset(_SENSE_COLUMNS):
        return "senses"
    if header.issuperset(_HOMONYM_COLUMNS):
        return "homonyms"
    if len(first.rstrip("\n").split("\t")) == 5:
        return "wic"
    raise InputError(
        f"{source} is of no known format (first line {first[:80]!r}). Name it with format=, one of "
        f"{', '.join(FORMATS)}."
    )


def _read_senses(source: Path) -> Iterator[SenseItem]:
    for line, row in csv_rows(source, _SENSE_COLUMNS):
        try:
            start, end = int(row["start"]), int(row["end"])
        except ValueError:
            given = f"{row['start']!r}, {row['end']!r}"
            raise fail(source, line, f"start and end must be ints, got {given}") from None
        sentence, context = row["sentence"], row.get("context", "")
        if not 0 <= start < end <= len(sentence):
            raise fail(source, line, f"{start}..{end} lies outside the sentence")
        for column in ("word", "sense"):
            if not row[column].strip():
                raise fail(source, line, f"{column} is empty")
        if context and context not in _CONTEXTS:
            raise fail(source, line, f"context must be one of {_CONTEXTS}, got {context!r}")
        if not sentence[start:end].casefold().startswith(row["word"].casefold()[:1]):
            told = f"{start}..{end} reads {sentence[start:end]!r}, not {row['word']!r}"
            raise fail(source, line, told)
        yield SenseItem(
            row["word"], row["sense"], row["gloss"], row["pos"], sentence, start, end, context
        )


def _read_homonyms(source: Path) -> Iterator[SenseItem]:
    """Read pairs of sentences; a sense is a distinct meaning of the word."""
    known: dict[tuple[str, str], str] = {}
    counts: Counter[str] = Counter()
    for pair, (line, row) in enumerate(csv_rows(source, ("Word", *_HOMONYM_COLUMNS))):
        word = row["Word"].strip()
        for number in "12":
            meaning, sentence = row[f"Meaning{number}"].strip(), row[f"Sentence{number}"]
            span = _find_target(sentence, word)
            if span is None:
                raise fail(source, line, f"{word!r} is not in Sentence{number}: {sentence!r}")
            if (word, meaning) not in known:
                counts[word] += 1
                known[word, meaning] = f"{word}.{counts[word]}"
            pos = row[f"POS{number}"].strip().lower()
            yield SenseItem(word, known[word, meaning], meaning, pos, sentence, *span, pair=pair)


def _find_target(sentence: str, word: str) -> tuple[int, int] | None:
    """Find a word, whole and in any case, or else regularly inflected."""
    for ending in ("", *_ENDINGS):
        pattern = rf"(?<!\w){re.escape(word + ending)}(?!\w)"
        if found := re.search(pattern, sentence, re.IGNORECASE):
            return found.span()
    return None


def _read_coarsewsd(source: Path) -> Iterator[SenseItem]:
    try:
        classes = json.loads((source / "classes_map.txt").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise fail(source / "classes_map.txt", 1, f"no readable map of classes ({error})") from None
    for split in ("train", "test"):
        data, gold = source / f"{split}.data.txt", source / f"{split}.gold.txt"
        for path in (data, gold):
            if not path.is_file():
                raise DataError(f"{path} is missing: {source} is no folder of CoarseWSD-20.")
        texts = data.read_text(encoding="utf-8").splitlines()
        labels = gold.read_text(encoding="utf-8").splitlines()
        if len(texts) != len(labels):
            reason = f"{len(texts)} sentences, but {len(labels)} labels in {gold.name}"
            raise fail(data, min(len(texts), len(labels)) + 1, reason)
        for line, (text, label) in enumerate(zip(texts, labels, strict=True), start=1):
            if label.strip() not in classes:
                raise fail(gold, line, f"the class {label.strip()!r} is not in classes_map.txt")
            position, _, sentence = text.partition("\t")
            start, end = _nth_token(data, line, position, sentence)
            sense = classes[label.strip()]
            yield SenseItem(source.name, sense, "", "noun", sentence, start, end, split=split)


def _nth_token(source: Path, line: int, position: str, sentence: str) -> tuple[int, int]:
    tokens = list(re.finditer(r"\S+", sentence))
    if not position.strip().isdecimal() or int(position) >= len(tokens):
        reason = f"{position!r} is not the index of one of the {len(tokens)} tokens"
        raise fail(source, line, reason)
    return tokens[int(position)].span()


def _read_wic(source: Path) -> Iterator[SenseItem]:
    """Read pairs judged T or F: those judged T share a sense, which is known within a pair only."""
    gold = source.with_name(source.name.replace(".data.", ".gold."))
    labels = gold.read_text(encoding="utf-8").split() if gold != source and gold.is_file() else None
    lines = source.read_text(encoding="utf-8").splitlines()
    if labels is None:
        raise DataError(f"{source} needs its labels (T or F, a line a pair) in {gold.name}.")
    if len(labels) != len(lines):
        reason = f"{len(lines)} pairs, but {len(labels)} labels in {gold.name}"
        raise fail(source, min(len(lines), len(labels)) + 1, reason)
    for line, (text, label) in enumerate(zip(lines, labels, strict=True), start=1):
        fields = text.split("\t")
        if len(fields) != 5 or not re.fullmatch(r"\d+-\d+", fields[2]):
            raise fail(source, line, "expected word, pos, i-j and two sentences between tabs")
        if label not in ("T", "F"):
            raise fail(gold, line, f"the label must be T or F, got {label!r}")
        word, pos, at, *sentences = fields
        for number, (index, sentence) in enumerate(zip(at.split("-"), sentences, strict=True)):
            sense = f"{line}" if label == "T" else f"{line}.{number}"
            span = _nth_token(source, line, index, sentence)
            kind = {"N": "noun", "V": "verb"}.get(pos, pos.lower())
            yield SenseItem(word, sense, "", kind, sentence, *span, pair=line - 1)


_READERS: dict[str, Callable[[Path], Iterable[SenseItem]]] = {
    "senses": _read_senses,
    "homonyms": _read_homonyms,
    "coarsewsd": _read_coarsewsd,
    "wic": _read_wic,
}
