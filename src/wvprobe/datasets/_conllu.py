"""CoNLL-U, the format of Universal Dependencies (Nivre et al. 2020).

The package conllu reads the cells. Lines are walked here, since every fault is to be named with
its line, and since the package takes lines that are not CoNLL-U (fewer columns, double spaces).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conllu.exceptions import ParseException
from conllu.parser import parse_dict_value, parse_id_value, parse_int_value

from wvprobe._validate import message, one_of
from wvprobe.datasets._files import blocks, comments, existing, fail
from wvprobe.datasets._labels import LabelledDataset, LabelledSentence, Skipped
from wvprobe.datasets._places import Unplaced, joined, places, split_places
from wvprobe.errors import DataError, InputError

# Where CoNLL-U's ten cells stand; `deps` (8) is not read.
_ID, _FORM, _LEMMA, _UPOS, _XPOS, _FEATS, _HEAD, _DEPREL, _MISC = 0, 1, 2, 3, 4, 5, 6, 7, 9
_COLUMNS = {"upos": _UPOS, "xpos": _XPOS, "lemma": _LEMMA, "deprel": _DEPREL}


def load_conllu(path: str | Path, column: str = "upos") -> LabelledDataset:
    r"""Read a treebank in CoNLL-U.

    A word of a multiword token ("don't", "au") has its own characters where the words' forms
    spell the token one behind the other, and shares all of the token's characters where not.
    Empty nodes ("8.1") have no characters and are left out; no head refers to them. The text is
    the ``# text`` comment's, or made from the forms and ``SpaceAfter=No`` where there is none. A
    sentence whose words do not spell its text is listed in `skipped`.

    Args:
        path: a file, or a folder whose ``*.conllu`` files are read in the order of their names.
        column: ``upos``, ``xpos``, ``lemma``, ``deprel``, or a feature (``Number``, or
            ``feats:Number``). The first four and the heads are there in any case.

    Returns:
        Sentences with heads and the columns upos xpos lemma deprel, and the feature's if one is
        asked for; "" where a word has no such label.

    Raises:
        DataError: a file is not CoNLL-U; file, line and reason are named.
        InputError: no such column, and no word has such a feature.

    Examples:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> row = "{}\t{}\t{}\t{}\t_\t_\t{}\t{}\t_\t_\n".format
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "small.conllu")
        ...     birds = row(1, "Birds", "bird", "NOUN", 2, "nsubj")
        ...     _ = path.write_text(birds + row(2, "sing", "sing", "VERB", 0, "root") + "\n")
        ...     treebank = wvprobe.load_conllu(path)
        >>> treebank.words, treebank.labels
        (('Birds', 'sing'), ('NOUN', 'VERB'))
    """
    if not isinstance(column, str):
        raise InputError(message("column", "the name of a column", column))
    source = existing(path)
    files = sorted(source.glob("*.conllu")) if source.is_dir() else [source]
    if not files:
        raise DataError(f"{source} holds no *.conllu files.")
    read = [_Sentence(file, block) for file in files for block in blocks(file)]
    if not any(sentence.forms for sentence in read):
        raise DataError(f"{source} holds no sentences.")
    chosen = column.removeprefix("feats:")
    if column not in _COLUMNS:
        features = {name for s in read for own in s.features for name in own}
        one_of("column", chosen, (*_COLUMNS, *sorted(features)))
    found: list[LabelledSentence] = []
    skipped: list[Skipped] = []
    for number, sentence in enumerate(read):
        name = sentence.comments.get("sent_id", f"{sentence.file.name}:{number}")
        try:
            found.append(sentence.labelled(name, chosen))
        except Unplaced as error:
            skipped.append(Skipped(sentence.file.name, sentence.line, name, str(error)))
    if not found:
        raise DataError(f"{source}: no sentence's words spell its text; {skipped[0].reason}.")
    return LabelledDataset(source.name, tuple(found), chosen, tuple(skipped))


@dataclass
class _Sentence:
    """One sentence as it is written."""

    file: Path
    block: list[tuple[int, str]]
    forms: list[str] = field(default_factory=list)
    cells: list[list[str]] = field(default_factory=list)
    heads: list[int | None] = field(default_factory=list)
    features: list[dict[str, str | None]] = field(default_factory=list)
    # What is written as one: first word, one past the last, form, whether a space follows.
    units: list[tuple[int, int, str, bool]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.comments = comments(self.block)
        self.line = self.block[0][0]
        for number, line in self.block:
            if not line.startswith("#"):
                self._take(number, line)
        if self.units and self.units[-1][1] > len(self.forms):
            raise fail(
                self.file, self.block[-1][0], "a multiword token goes on behind the sentence"
            )
        self._check_heads()

    def _take(self, number: int, line: str) -> None:
        cells = line.split("\t")
        if len(cells) != 10:
            raise fail(self.file, number, f"expected 10 columns between tabs, got {len(cells)}")
        if not cells[_FORM].strip():
            raise fail(self.file, number, "the form is empty")
        where = self._parsed(number, parse_id_value, cells[_ID])
        spaced = (parse_dict_value(cells[_MISC]) or {}).get("SpaceAfter") != "No"
        within = bool(self.units) and self.units[-1][1] > len(self.forms)
        match where:
            case int() if where == len(self.forms) + 1:
                if not within:
                    self.units.append((len(self.forms), where, cells[_FORM], spaced))
                self._word(number, cells)
            case (first, "-", last) if first == len(self.forms) + 1 and not within:
                self.units.append((first - 1, last, cells[_FORM], spaced))
            case (before, ".", _) if before == len(self.forms):
                pass
            case _:
                expected = f"expected {len(self.forms) + 1}"
                raise fail(self.file, number, f"the ID {cells[_ID]!r} does not count: {expected}")

    def _word(self, number: int, cells: list[str]) -> None:
        self.lines.append(number)
        self.forms.append(cells[_FORM])
        self.cells.append(cells)
        self.heads.append(self._parsed(number, parse_int_value, cells[_HEAD]))
        self.features.append(parse_dict_value(cells[_FEATS]) or {})

    def _parsed(self, number: int, parse: Callable[[str], Any], cell: str) -> Any:
        try:
            return parse(cell)
        except ParseException as error:
            raise fail(self.file, number, str(error)) from error

    def _check_heads(self) -> None:
        if all(head is None for head in self.heads):
            return
        for index, (number, head) in enumerate(zip(self.lines, self.heads, strict=True)):
            if head is None or not 0 <= head <= len(self.heads) or head == index + 1:
                reason = f"the head {self.cells[index][_HEAD]!r} is no other word of the sentence"
                raise fail(self.file, number, f"{reason}, 1 to {len(self.heads)}, nor 0")

    def labelled(self, name: str, chosen: str) -> LabelledSentence:
        """Return the sentence with its words placed in its text, or raise Unplaced."""
        forms = [form for *_, form, _ in self.units]
        text = self.comments.get("text") or joined(forms, [spaced for *_, spaced in self.units])
        if not forms:
            raise Unplaced("there are comments, but no words")
        found: list[tuple[int, int]] = []
        for place, (first, stop, _, _) in zip(places(text, forms), self.units, strict=True):
            found += split_places(place, text, self.forms[first:stop])
        starts, ends = zip(*found, strict=True)
        labels = {name: tuple(self._cells(cell)) for name, cell in _COLUMNS.items()}
        if chosen not in _COLUMNS:
            labels[chosen] = tuple(own.get(chosen) or "" for own in self.features)
        return LabelledSentence(text, tuple(self.forms), starts, ends, labels, self._heads(), name)

    def _cells(self, column: int) -> Iterator[str]:
        """Yield a column's cells; an underscore stands for none, unless the word is one."""
        for cells in self.cells:
            literal = column == _LEMMA and cells[_FORM] == "_"
            yield "" if cells[column] == "_" and not literal else cells[column]

    def _heads(self) -> tuple[int, ...] | None:
        heads: Sequence[int] = [head - 1 for head in self.heads if head is not None]
        return tuple(heads) if heads else None
