"""Labelled text: words in sentences, each with its sense.

    senses = load_senses()                       # the bundled set, written for this project
    senses = load_senses("homonyms_en.csv")      # or a file or folder of a known format
    senses.only("bank").to_frame()

Formats: ``senses`` (the bundled set's columns), ``homonyms`` (paired sentences, two senses a row),
``coarsewsd`` (a folder of CoarseWSD-20, Loureiro et al. 2021) and ``wic`` (pairs judged same or
different, Pilehvar & Camacho-Collados 2019).
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from wvprobe._validate import one_of
from wvprobe.errors import DataError, InputError

PROSE_SPLITS = ("calibration", "held-out")
PROSE_GENRES = ("narrative", "explanation", "dialogue")
FORMATS = ("senses", "homonyms", "coarsewsd", "wic")
_SENSE_COLUMNS = ("word", "sense", "gloss", "pos", "sentence", "start", "end")
_HOMONYM_COLUMNS = tuple(f"{name}{n}" for n in "12" for name in ("POS", "Meaning", "Sentence"))
_CONTEXTS = ("before", "after", "both")
# Endings of regular inflection; of several candidates the first in this order is the target.
_ENDINGS = ("s", "es", "ed", "d", "ing")


@dataclass(frozen=True)
class SenseItem:
    """One word in one sentence.

    Attributes:
        word: the lemma.
        sense: identifier of the sense, meaningful within the word (WiC: within the pair).
        gloss: what the sense means; "" where the source does not say.
        pos: part of speech, lower case.
        sentence: the sentence.
        start: where the target begins in it.
        end: where it ends; ``sentence[start:end]`` may be inflected or capitalised.
        context: where the words stand that tell the sense: ``before`` the target, ``after`` it
            or ``both``; "" where the source does not say.
        split: the source's own part (``train``, ``test``), or "".
        pair: number of the pair that the item belongs to in a paired source, or None.
    """

    word: str
    sense: str
    gloss: str
    pos: str
    sentence: str
    start: int
    end: int
    context: str = ""
    split: str = ""
    pair: int | None = None

    @property
    def target(self) -> str:
        """The target as it stands in the sentence."""
        return self.sentence[self.start : self.end]


@dataclass(frozen=True)
class SenseDataset:
    """Sentences with a marked word of known sense, in the source's order."""

    name: str
    items: tuple[SenseItem, ...]

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.items)

    def __iter__(self) -> Iterator[SenseItem]:
        """Iterate over the items."""
        return iter(self.items)

    @property
    def words(self) -> tuple[str, ...]:
        """The distinct lemmas, in order of appearance."""
        return tuple(dict.fromkeys(item.word for item in self.items))

    def senses(self, word: str) -> tuple[str, ...]:
        """Return the senses of a word, in order of appearance."""
        return tuple(dict.fromkeys(item.sense for item in self.only(word)))

    def only(self, word: str) -> "SenseDataset":
        """Return the items of one word.

        Raises:
            InputError: the set does not have the word; near ones are offered.
        """
        one_of("word", word, self.words)
        return replace(self, items=tuple(item for item in self.items if item.word == word))

    def to_frame(self) -> Any:
        """Return one row an item, a column for each attribute of :class:`SenseItem`."""
        import pandas

        columns = list(SenseItem.__dataclass_fields__)
        rows = [[getattr(item, column) for column in columns] for item in self.items]
        return pandas.DataFrame(rows, columns=columns)


def load_senses(path: str | Path | None = None, *, format: str = "auto") -> SenseDataset:
    """Read a set of words in context.

    Args:
        path: a file or folder; None for the set that comes with wvprobe.
        format: one of ``senses homonyms coarsewsd wic``, or ``auto`` to tell from the content.

    Raises:
        DataError: the content is not of the format; file, line and reason are named.
        InputError: unknown format, or one that cannot be told from the content.
    """
    if path is None:
        with resources.as_file(resources.files("wvprobe") / "data" / "polysemy.csv") as bundled:
            return _dataset("wvprobe polysemy", bundled, _read_senses)
    one_of("format", format, ("auto", *FORMATS))
    source = Path(path).expanduser()
    if not source.exists():
        raise DataError(f"there is no file or folder {source}. Check the path.")
    chosen = _told_format(source) if format == "auto" else format
    return _dataset(source.name, source, _READERS[chosen])


def load_prose(split: str, genre: str | None = None) -> tuple[str, ...]:
    """Return paragraphs of the bundled prose, written for this project.

    Args:
        split: ``calibration``, to take means and the like from, or ``held-out``, to judge on; they
            share no stories and no subjects.
        genre: ``narrative``, ``explanation`` or ``dialogue``; None for all, in this order.

    Raises:
        InputError: unknown split or genre.
    """
    one_of("split", split, PROSE_SPLITS)
    if genre is not None:
        one_of("genre", genre, PROSE_GENRES)
    text = resources.files("wvprobe").joinpath("data/prose.txt").read_text(encoding="utf-8")
    sections = re.split(r"^== (\S+) / (\S+)$", text, flags=re.MULTILINE)[1:]
    found: list[str] = []
    for kind, part, content in zip(*[iter(sections)] * 3, strict=True):
        if part == split and genre in (None, kind):
            found += [p.replace("\n", " ").strip() for p in content.split("\n\n") if p.strip()]
    return tuple(found)


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


def _fail(source: Path, line: int, reason: str) -> DataError:
    return DataError(f"{source}, line {line}: {reason}")


def _rows(source: Path, needed: Iterable[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield each row of a CSV with the number of the line it ends on."""
    with source.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        if missing := sorted(set(needed) - set(reader.fieldnames or ())):
            raise _fail(source, 1, f"the column(s) {', '.join(missing)} are missing")
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise _fail(source, reader.line_num, "not as many fields as the header has")
                yield reader.line_num, row
        except csv.Error as error:
            raise _fail(source, reader.reader.line_num, str(error)) from error


def _read_senses(source: Path) -> Iterator[SenseItem]:
    for line, row in _rows(source, _SENSE_COLUMNS):
        try:
            start, end = int(row["start"]), int(row["end"])
        except ValueError:
            given = f"{row['start']!r}, {row['end']!r}"
            raise _fail(source, line, f"start and end must be ints, got {given}") from None
        sentence, context = row["sentence"], row.get("context", "")
        if not 0 <= start < end <= len(sentence):
            raise _fail(source, line, f"{start}..{end} lies outside the sentence")
        for column in ("word", "sense"):
            if not row[column].strip():
                raise _fail(source, line, f"{column} is empty")
        if context and context not in _CONTEXTS:
            raise _fail(source, line, f"context must be one of {_CONTEXTS}, got {context!r}")
        if not sentence[start:end].casefold().startswith(row["word"].casefold()[:1]):
            told = f"{start}..{end} reads {sentence[start:end]!r}, not {row['word']!r}"
            raise _fail(source, line, told)
        yield SenseItem(
            row["word"], row["sense"], row["gloss"], row["pos"], sentence, start, end, context
        )


def _read_homonyms(source: Path) -> Iterator[SenseItem]:
    """Read pairs of sentences; a sense is a distinct meaning of the word."""
    known: dict[tuple[str, str], str] = {}
    counts: Counter[str] = Counter()
    for pair, (line, row) in enumerate(_rows(source, ("Word", *_HOMONYM_COLUMNS))):
        word = row["Word"].strip()
        for number in "12":
            meaning, sentence = row[f"Meaning{number}"].strip(), row[f"Sentence{number}"]
            span = _find_target(sentence, word)
            if span is None:
                raise _fail(source, line, f"{word!r} is not in Sentence{number}: {sentence!r}")
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
        raise _fail(
            source / "classes_map.txt", 1, f"no readable map of classes ({error})"
        ) from None
    for split in ("train", "test"):
        data, gold = source / f"{split}.data.txt", source / f"{split}.gold.txt"
        for path in (data, gold):
            if not path.is_file():
                raise DataError(f"{path} is missing: {source} is no folder of CoarseWSD-20.")
        texts = data.read_text(encoding="utf-8").splitlines()
        labels = gold.read_text(encoding="utf-8").splitlines()
        if len(texts) != len(labels):
            reason = f"{len(texts)} sentences, but {len(labels)} labels in {gold.name}"
            raise _fail(data, min(len(texts), len(labels)) + 1, reason)
        for line, (text, label) in enumerate(zip(texts, labels, strict=True), start=1):
            if label.strip() not in classes:
                raise _fail(gold, line, f"the class {label.strip()!r} is not in classes_map.txt")
            position, _, sentence = text.partition("\t")
            start, end = _nth_token(data, line, position, sentence)
            sense = classes[label.strip()]
            yield SenseItem(source.name, sense, "", "noun", sentence, start, end, split=split)


def _nth_token(source: Path, line: int, position: str, sentence: str) -> tuple[int, int]:
    tokens = list(re.finditer(r"\S+", sentence))
    if not position.strip().isdecimal() or int(position) >= len(tokens):
        reason = f"{position!r} is not the index of one of the {len(tokens)} tokens"
        raise _fail(source, line, reason)
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
        raise _fail(source, min(len(lines), len(labels)) + 1, reason)
    for line, (text, label) in enumerate(zip(lines, labels, strict=True), start=1):
        fields = text.split("\t")
        if len(fields) != 5 or not re.fullmatch(r"\d+-\d+", fields[2]):
            raise _fail(source, line, "expected word, pos, i-j and two sentences between tabs")
        if label not in ("T", "F"):
            raise _fail(gold, line, f"the label must be T or F, got {label!r}")
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
