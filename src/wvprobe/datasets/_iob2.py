"""Named entities in IOB2 (Tjong Kim Sang & Veenstra 1999), as Universal NER lays them out."""

import re
from collections.abc import Sequence
from pathlib import Path

from wvprobe.datasets._files import blocks, comments, existing, fail
from wvprobe.datasets._labels import LabelledDataset, LabelledSentence, Skipped
from wvprobe.datasets._places import Unplaced, joined, places
from wvprobe.errors import DataError


def load_iob2(path: str | Path) -> LabelledDataset:
    r"""Read named entities: a line a word, with index, word and tag between tabs.

    Tags are ``O``, ``B-TYPE`` for an entity's first word and ``I-TYPE`` for its others. The text
    is the ``# text`` comment's, or the words with spaces between them where there is none. A
    sentence whose words do not spell its text is listed in `skipped`.

    Args:
        path: a file, or a folder whose ``*.iob2`` files are read in the order of their names.

    Returns:
        Sentences with the columns entity (PER, LOC, ORG, ..., O), which is chosen, and iob2 (the
        tag as it stands).

    Raises:
        DataError: a file is not of this layout, or an I- tag follows no tag of its type; file,
            line and reason are named.

    Examples:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "small.iob2")
        ...     _ = path.write_text("1\tAnna\tB-PER\n2\tsings\tO\n\n")
        ...     wvprobe.load_iob2(path).labels
        ('PER', 'O')
    """
    source = existing(path)
    files = sorted(source.glob("*.iob2")) if source.is_dir() else [source]
    if not files:
        raise DataError(f"{source} holds no *.iob2 files.")
    found: list[LabelledSentence] = []
    skipped: list[Skipped] = []
    for file in files:
        for number, block in enumerate(blocks(file)):
            told = comments(block)
            name = told.get("sent_id", f"{file.name}:{number}")
            words, tags = _columns(file, block)
            try:
                found.append(_sentence(name, told.get("text"), words, tags))
            except Unplaced as error:
                skipped.append(Skipped(file.name, block[0][0], name, str(error)))
    if not found:
        told_why = f": {skipped[0].reason}" if skipped else ""
        raise DataError(f"{source} holds no sentences{told_why}.")
    return LabelledDataset(source.name, tuple(found), "entity", tuple(skipped))


def _columns(file: Path, block: list[tuple[int, str]]) -> tuple[list[str], list[str]]:
    words: list[str] = []
    tags: list[str] = []
    for number, line in block:
        if line.startswith("#"):
            continue
        cells = line.split("\t")
        if len(cells) < 3:
            reason = f"expected index, word and tag between tabs, got {len(cells)} column(s)"
            raise fail(file, number, reason)
        index, word, tag = cells[:3]
        if index != str(len(words) + 1):
            raise fail(
                file, number, f"the index {index!r} does not count: {len(words) + 1} is next"
            )
        if not word.strip():
            raise fail(file, number, "the word is empty")
        if not re.fullmatch(r"O|[BI]-\S+", tag):
            raise fail(file, number, f"the tag must be O, B-TYPE or I-TYPE, got {tag!r}")
        if tag.startswith("I-") and (not tags or tags[-1][2:] != tag[2:]):
            raise fail(file, number, f"{tag} follows no B-{tag[2:]} or I-{tag[2:]}")
        words.append(word)
        tags.append(tag)
    return words, tags


def _sentence(
    name: str, text: str | None, words: Sequence[str], tags: Sequence[str]
) -> LabelledSentence:
    if not words:
        raise Unplaced("there are comments, but no words")
    text = text or joined(words, [True] * len(words))
    starts, ends = zip(*places(text, words), strict=True)
    labels = {"entity": tuple(tag[2:] or "O" for tag in tags), "iob2": tuple(tags)}
    return LabelledSentence(text, tuple(words), starts, ends, labels, None, name)
