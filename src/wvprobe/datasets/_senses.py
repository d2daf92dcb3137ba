"""Words in context with a sense each: the data."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from wvprobe._validate import one_of


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

    Examples:
        >>> item = wvprobe.load_senses().only("bank").items[0]
        >>> item.sentence[item.start : item.end] == item.target
        True
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
    """Sentences with a marked word of known sense, in the source's order.

    Examples:
        >>> senses = wvprobe.load_senses()
        >>> senses.only("bank").words, "bank" in senses.words
        (('bank',), True)
    """

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
