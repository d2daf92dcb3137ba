"""What a report is asked for: how much of everything, and what its reader brings along."""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from wvprobe._validate import message
from wvprobe._validate import texts as checked_texts
from wvprobe.datasets import LabelledDataset, SenseDataset, load_prose, load_senses
from wvprobe.errors import WordError


@dataclass(frozen=True)
class Sizes:
    """How much of everything a report takes.

    Attributes:
        name: what the page calls it.
        sentences: words in context, or texts, at most; evenly spaced where there are more.
        paragraphs: short ones of held-out prose that changed models are judged on, at most.
        baseline: sentences with a random word each, for what random words have in common.
        draws: random projections a layer.
        controls: control tasks.
        exchanged: pairs of texts whose values and patterns are exchanged.
        treebank: sentences of a treebank, at most.
        clock: seconds that attention is timed for.
        full_training: whether small models are trained to the end.

    Examples:
        >>> from wvprobe.report import FULL, QUICK
        >>> QUICK.draws < FULL.draws
        True
    """

    name: str
    sentences: int
    paragraphs: int
    baseline: int
    draws: int
    controls: int
    exchanged: int
    treebank: int
    clock: float | int
    full_training: bool


SHORT = 240  # characters
QUICK = Sizes("quick", 384, 11, 200, 20, 2, 20, 1_000, 5, False)
FULL = Sizes("full", 20_000, 1_000, 1_000, 200, 5, 200, 4_000, 30, True)


@dataclass(frozen=True)
class Pair:
    """Two texts and two words of both, whose vectors and scores claims are about.

    Attributes:
        text_a: a text.
        text_b: another.
        word: the word whose two vectors are compared, and whose query is read.
        other: the word whose key is read; None where the texts share no other word.

    Examples:
        >>> from wvprobe.report import Pair
        >>> Pair.of("He sat by the bank.", "The bank lent it.", "bank", "the").word
        'bank'
    """

    text_a: str
    text_b: str
    word: str
    other: str | None

    @classmethod
    def of(cls, text_a: str, text_b: str, word: str, other: str | None = None) -> "Pair":
        """Return a pair; without `other` it is the longest other word that both texts hold.

        Raises:
            InputError: a text is empty.
            WordError: a text does not hold a word; or the two words are one.
        """
        checked_texts([text_a, text_b])
        words = [re.findall(r"\w+", text) for text in (text_a, text_b)]
        if other is None:
            shared = [w for w in dict.fromkeys(words[0]) if w in words[1] and w != word]
            other = max(shared, key=len, default=None)
        if word == other:
            hint = "A word's score with itself is not what the claims are about."
            raise WordError(message("other", f"another word than {word!r}", other, hint))
        return cls(text_a, text_b, word, other)

    @property
    def texts(self) -> list[str]:
        """Both texts."""
        return [self.text_a, self.text_b]

    @property
    def later(self) -> str:
        """The first and the last word after `word` in the first text; "" where none follows."""
        words = re.findall(r"\w+", self.text_a.partition(self.word)[2])
        return " … ".join(dict.fromkeys([*words[:1], *words[-1:]]))

    @property
    def told(self) -> dict[str, str]:
        """What stands for the placeholders in claims."""
        return {
            "word": self.word,
            "other": self.other or "another word",
            "later": self.later or "what follows it",
        }


BANK = Pair(
    "a power bank dropped into the river.", "The river bank is close to here.", "bank", "river"
)


@dataclass(frozen=True)
class Given:
    """What the reader of a report brings along, and where from.

    Attributes:
        texts: texts to judge on, in place of the bundled ones.
        senses: words in context, in place of the bundled ones.
        treebank: sentences with dependencies; the claims that need some are not testable without.
        pair: two texts and two words.
        files: option -> file that it was read from, for the lines of Python on the page.
    """

    texts: tuple[str, ...] | None = None
    senses: SenseDataset | None = None
    treebank: LabelledDataset | None = None
    pair: Pair = BANK
    files: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse texts that cannot be used.

        Raises:
            InputError: no texts, or an empty one.
        """
        if self.texts is not None:
            checked_texts(self.texts)

    def told(self) -> dict[str, Any]:
        """Return what shaped the numbers, as plain data for a provenance and a manifest."""
        texts, senses, treebank = self.texts, self.senses, self.treebank
        return {
            "texts": self.pair.texts,
            "words": [self.pair.word, self.pair.other],
            "judged on": None if texts is None else f"{len(texts)} texts, {_digest(texts)}",
            "senses": None if senses is None else _described(senses, senses.items),
            "treebank": None if treebank is None else _described(treebank, treebank.sentences),
        }


def _described(data: Any, items: Sequence[Any]) -> str:
    return f"{data.name}, {len(items)} sentences, {_digest([repr(item) for item in items])}"


def _digest(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def short_prose(split: str = "held-out") -> list[str]:
    """Return paragraphs of bundled prose that are short enough for any model."""
    return [text for text in load_prose(split) if len(text) < SHORT]


def spaced(items: Sequence[Any], most: int) -> Sequence[Any]:
    """Return every k-th item, k the least that leaves no more than `most`."""
    return items[:: spacing(len(items), most)]


def spacing(size: int, most: int) -> int:
    """Return the least k for which every k-th of `size` items are no more than `most`."""
    return max(1, -(-size // most))


def lines_of(given: Given, sizes: Sizes) -> dict[str, str]:
    """Return what stands for the placeholders in claims' lines of Python, each as Python."""
    bundled = load_senses()
    senses = bundled if given.senses is None else given.senses
    loaded = "wvprobe.load_senses()"
    if given.senses is not None:
        loaded = f"wvprobe.load_senses({quoted(given.files.get('senses', senses.name))})"
    every = spacing(len(senses), sizes.sentences)
    texts = f"[item.sentence for item in {loaded}][::{every}]"
    short = f"[t for t in wvprobe.datasets.load_prose({{}}) if len(t) < {SHORT}]"
    prose, fitted = (short.format(quoted(split)) for split in ("held-out", "calibration"))
    n_prose, n_fitted = len(short_prose()), len(short_prose("calibration"))
    if given.texts is not None:
        n_prose = len(given.texts)
        prose = f"wvprobe.datasets.load_texts({quoted(given.files.get('texts', 'TEXTS'))})"
        texts = f"{prose}[::{spacing(n_prose, sizes.sentences)}]"
    return {
        "fitted": f"{fitted}[::{spacing(n_fitted, 3 * sizes.paragraphs)}]",
        "ranked": f"{fitted}[::{spacing(n_fitted, 6 * sizes.paragraphs)}]",
        "prose": f"{prose}[::{spacing(n_prose, sizes.paragraphs)}]",
        "word": quoted(given.pair.word),
        "other": quoted(given.pair.other or ""),
        "senses": loaded,
        "every": str(every),
        "every_bundled": str(spacing(len(bundled), sizes.sentences)),
        "texts": texts,
        "draws": str(sizes.draws),
        "controls": str(sizes.controls),
        "exchanged": str(sizes.exchanged),
        "treebank": str(sizes.treebank),
        "clock": str(sizes.clock),
        "brief": str(not sizes.full_training),
    }


def quoted(text: str) -> str:
    """Return a text as Python writes it, in double quotes."""
    return json.dumps(text, ensure_ascii=False)
