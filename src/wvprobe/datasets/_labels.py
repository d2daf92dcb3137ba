"""Sentences of words with labels in columns: the data that every reader of such files returns."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from wvprobe._validate import instance, one_of
from wvprobe.datasets._senses import SenseDataset


class Skipped(NamedTuple):
    """Something that a reader left out.

    Attributes:
        file: the file's name.
        line: the line where it begins, counted from 1; in a frame the row, from 0.
        sentence: the sentence's id.
        reason: why it was left out.

    Examples:
        >>> from wvprobe.datasets import Skipped
        >>> Skipped("small.conllu", 12, "s-3", "words do not spell the text").line
        12
    """

    file: str
    line: int
    sentence: str
    reason: str


@dataclass(frozen=True)
class LabelledSentence:
    """A sentence, its words and their labels.

    Attributes:
        text: the sentence as a model reads it.
        words: the words as the source writes them. A word of a multiword token that is written
            otherwise than its words ("au" for "à" and "le") is not a piece of the text.
        starts: where each word begins in the text.
        ends: where it ends. Words that are written as one share its characters.
        labels: column -> a label a word; "" where the source gives none.
        heads: index of each word's governor among the words, −1 for the root; None where the
            source has no dependencies.
        id: the source's name for the sentence.

    Examples:
        >>> import pandas
        >>> from wvprobe.datasets import load_labels
        >>> rows = [{"sentence": "The cat sat.", "word": "cat", "label": "animal", "lemma": "cat"}]
        >>> sentence = load_labels(pandas.DataFrame(rows), name="mine").sentences[0]
        >>> sentence.words, sentence.text[sentence.starts[0] : sentence.ends[0]]
        (('cat',), 'cat')
    """

    text: str
    words: tuple[str, ...]
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    labels: Mapping[str, tuple[str, ...]]
    heads: tuple[int, ...] | None
    id: str

    def __len__(self) -> int:
        """Return the number of words."""
        return len(self.words)


@dataclass(frozen=True)
class LabelledDataset:
    """Sentences with labelled words, in the source's order.

    Attributes:
        name: what the set is called.
        sentences: the sentences; ``len`` counts them, and iteration goes over them.
        column: the labels that are meant where no other column is named.
        skipped: what the reader left out, with the reason.
        within: a column within whose values alone the labels of `column` can be compared (a
            sense belongs to a lemma), or None.

    Examples:
        >>> import pandas
        >>> from wvprobe.datasets import load_labels
        >>> rows = [{"sentence": "The cat sat.", "word": "cat", "label": "animal", "lemma": "cat"}]
        >>> found = load_labels(pandas.DataFrame(rows), name="mine")
        >>> found.column, found.with_column("lemma").labels
        ('label', ('cat',))
    """

    name: str
    sentences: tuple[LabelledSentence, ...]
    column: str
    skipped: tuple[Skipped, ...] = ()
    within: str | None = None

    def __len__(self) -> int:
        """Return the number of sentences."""
        return len(self.sentences)

    def __iter__(self) -> Iterator[LabelledSentence]:
        """Iterate over the sentences."""
        return iter(self.sentences)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of labels."""
        return tuple(self.sentences[0].labels)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of `column`, of all words in order."""
        return tuple(label for s in self.sentences for label in s.labels[self.column])

    @property
    def words(self) -> tuple[str, ...]:
        """All words in order."""
        return tuple(word for sentence in self.sentences for word in sentence.words)

    @property
    def groups(self) -> tuple[int, ...]:
        """A number for each sentence that sentences of the same text share.

        Case and spacing do not tell texts apart here: what one fold of a cross-validation has
        seen must not come back in another.
        """
        known: dict[str, int] = {}
        keys = (" ".join(s.text.casefold().split()) for s in self.sentences)
        return tuple(known.setdefault(key, len(known)) for key in keys)

    def with_column(self, column: str) -> "LabelledDataset":
        """Return the same sentences with another column chosen.

        Raises:
            InputError: there is no such column; the message lists those there are.
        """
        one_of("column", column, self.columns)
        return replace(self, column=column, within=self.within if column == self.column else None)

    def to_frame(self) -> Any:
        """Return one row a word: sentence id group index word start end, head, each column.

        `sentence` counts the sentences and `index` the words of one, both from 0.
        """
        import pandas

        rows = []
        for number, (sentence, group) in enumerate(zip(self.sentences, self.groups, strict=True)):
            heads = sentence.heads or (None,) * len(sentence)
            places = zip(sentence.words, sentence.starts, sentence.ends, heads, strict=True)
            labels = zip(*(sentence.labels[column] for column in self.columns), strict=True)
            rows += [
                (number, sentence.id, group, index, *place, *own)
                for index, (place, own) in enumerate(zip(places, labels, strict=True))
            ]
        fixed = ["sentence", "id", "group", "index", "word", "start", "end", "head"]
        return pandas.DataFrame(rows, columns=[*fixed, *self.columns])


def labelled_senses(dataset: SenseDataset) -> LabelledDataset:
    """Return words in context as labelled sentences: one item each, columns sense pos lemma.

    Raises:
        InputError: it is no SenseDataset.

    Examples:
        >>> from wvprobe.datasets import labelled_senses
        >>> labelled_senses(wvprobe.load_senses().only("bank")).columns
        ('sense', 'pos', 'lemma')
    """
    instance("dataset", dataset, SenseDataset, "load_senses returns one.")
    return LabelledDataset(dataset.name, tuple(_one_word(dataset)), "sense", within="lemma")


def _one_word(dataset: SenseDataset) -> Iterable[LabelledSentence]:
    for number, item in enumerate(dataset):
        labels = {"sense": (item.sense,), "pos": (item.pos,), "lemma": (item.word,)}
        places = ((item.target,), (item.start,), (item.end,))
        yield LabelledSentence(item.sentence, *places, labels, None, f"{dataset.name}:{number}")
