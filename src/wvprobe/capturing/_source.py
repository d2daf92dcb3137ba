"""What is to be read: texts, a file of them, or the marked words of labelled text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wvprobe._validate import message
from wvprobe._validate import texts as checked_texts
from wvprobe.datasets import LabelledDataset, SenseDataset, load_texts
from wvprobe.errors import InputError
from wvprobe.labelled import LabelledWords, labelled_words


@dataclass(frozen=True)
class Source:
    """What is to be read, and where in it.

    Attributes:
        texts: a text an item.
        words: what of each is read: a word for all or one each; None where positions are, or all.
        positions: likewise.
        labelled: the words that it was made of, with their labels and with those that were lost.
    """

    texts: Sequence[str]
    words: Any = None
    positions: Any = None
    labelled: LabelledWords | None = None


def read_source(
    source: Any,
    model: Any,
    *,
    words: Any = None,
    positions: Any = None,
    prepend_bos: bool | None = None,
) -> Source:
    """Return the texts and places that a source stands for; see `capture_dataset`.

    Raises:
        InputError: it is of no known kind, or has words marked and others are asked for.
        DataError: a file is missing, empty or not UTF-8.
    """
    if isinstance(source, LabelledDataset | SenseDataset):
        source = labelled_words(model, source, prepend_bos=prepend_bos)
    if isinstance(source, LabelledWords):
        for name, value in (("words", words), ("positions", positions)):
            if value is not None:
                raise InputError(message(name, "None where the source marks words itself", value))
        return Source(source.texts, words=source.spans, labelled=source)
    if isinstance(source, str | Path):
        return Source(load_texts(source), words, positions)
    if not isinstance(source, Sequence):
        expected = "texts, a path of texts, a LabelledDataset, a SenseDataset or LabelledWords"
        raise InputError(message("source", expected, type(source).__name__))
    return Source(checked_texts(source), words, positions)
