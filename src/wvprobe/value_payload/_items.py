"""Which words are probed, for what, and which of them are independent of one another."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wvprobe._validate import length, message, one_of
from wvprobe.datasets import LabelledDataset, SenseDataset
from wvprobe.errors import InputError
from wvprobe.labelled import LabelledWords, labelled_words
from wvprobe.words import WordSpan

# Labels that no dataset need carry: they are read off the tokens.
TOKEN, POSITION = "token", "position"
DERIVED = (TOKEN, POSITION)
GROUPS = ("auto", "sentence", "lemma", "word")
_TOKENS = 30  # token identity: so many of the most frequent
_BINS = 5  # position: so many bins of like size


@dataclass(frozen=True)
class Selection:
    """How words are chosen, as `payload` and `erase` take it.

    Attributes:
        limit: at most so many words.
        per_sentence: at most so many of a sentence.
        per_label: at most so many words of a label.
        min_count: a label of fewer words is left out (a sense of fewer than 2 always is).
        groups: what folds and resamples keep together.
        seed: of what is drawn.
        prepend_bos: as in :func:`wvprobe.find_word`.
    """

    limit: int | None = 4_000
    per_sentence: int | None = 2
    per_label: int | None = None
    min_count: int = 20
    groups: str = "auto"
    seed: int = 0
    prepend_bos: bool | None = None


@dataclass(frozen=True)
class Items:
    """Words with one label each.

    Attributes:
        spans: where each word is.
        labels: its label.
        groups: the independent unit that it belongs to.
        strata: within which labels can be compared (the lemma of a sense), or None: anywhere.
        same_pos: strata whose labels share one part of speech; empty where that is not known.
        dataset: the dataset's name.
        label: what the labels say.
        prepend_bos: as the words were found.
        settings: what shaped the choice, for a provenance.
    """

    spans: tuple[WordSpan, ...]
    labels: tuple[str, ...]
    groups: tuple[Any, ...]
    strata: tuple[str, ...] | None
    same_pos: frozenset[str]
    dataset: str
    label: str
    prepend_bos: bool | None
    settings: Mapping[str, Any]

    def __len__(self) -> int:
        """Return the number of words."""
        return len(self.spans)

    @property
    def texts(self) -> list[str]:
        """Each word's text."""
        return [span.text for span in self.spans]

    @property
    def types(self) -> list[str]:
        """Each word's type, for a control task: its form, whatever its case."""
        return [span.word.casefold() for span in self.spans]


def items_of(
    model: Any,
    dataset: LabelledDataset | SenseDataset | LabelledWords,
    label: str | None,
    chosen: Selection,
) -> Items:
    """Find the words of a dataset, with the labels asked for.

    Raises:
        InputError: no such label; or fewer than two labels, or than two in any lemma, are left.
    """
    one_of("groups", chosen.groups, GROUPS)
    for name in ("limit", "per_sentence", "per_label"):
        if getattr(chosen, name) is not None:
            length(name, getattr(chosen, name))
    length("min_count", chosen.min_count)
    words = _words(model, dataset, label, chosen)
    derived = label in DERIVED and label != words.column
    labels, kept = list(words.labels), _drawn(words, dataset, chosen)
    if derived:
        labels, kept = _derived(str(label), words.spans, chosen.min_count)
    strata = None
    if words.within is not None and not derived:
        strata = words.lemmas
        kept = _comparable(labels, strata)
    if not kept:
        hint = "Give more words, or a smaller `min_count`."
        raise InputError(message("dataset", "such that two labels can be told apart", 0, hint))
    groups = _groups(words, dataset, strata, chosen.groups, derived)
    return Items(
        spans=tuple(words.spans[i] for i in kept),
        labels=tuple(labels[i] for i in kept),
        groups=tuple(groups[i] for i in kept),
        strata=None if strata is None else tuple(strata[i] for i in kept),
        same_pos=_same_pos(words, dataset, kept) if strata is not None else frozenset(),
        dataset=words.dataset,
        label=str(label) if derived else words.column,
        prepend_bos=words.settings["prepend_bos"],
        settings={
            **words.settings,
            "per_label": chosen.per_label,
            "groups": chosen.groups,
            "items": len(kept),
        },
    )


def _words(model: Any, dataset: Any, label: str | None, chosen: Selection) -> LabelledWords:
    if isinstance(dataset, LabelledWords):
        one_of("label", label or dataset.column, (dataset.column, *DERIVED))
        return dataset
    if not isinstance(dataset, LabelledDataset | SenseDataset):
        hint = "load_conllu, load_iob2, load_senses and labelled_words return such."
        expected = "a LabelledDataset, a SenseDataset or LabelledWords"
        raise InputError(message("dataset", expected, type(dataset).__name__, hint))
    columns = dataset.columns if isinstance(dataset, LabelledDataset) else ("sense", "pos", "lemma")
    column = None if label in DERIVED and label not in columns else label
    senses = isinstance(dataset, SenseDataset) and column in (None, "sense")
    later = senses or chosen.per_label is not None  # drawn once labels are known
    return labelled_words(
        model,
        dataset,
        column=column,
        per_sentence=None if later else chosen.per_sentence,
        limit=None if later else chosen.limit,
        min_count=0 if senses or (label in DERIVED and column is None) else chosen.min_count,
        seed=chosen.seed,
        prepend_bos=chosen.prepend_bos,
    )


def _drawn(words: LabelledWords, dataset: Any, chosen: Selection) -> list[int]:
    """Return which words are taken: all, unless there is a most for each label."""
    if chosen.per_label is None or isinstance(dataset, LabelledWords):
        return list(range(len(words)))
    generator = torch.Generator().manual_seed(chosen.seed)
    taken: list[int] = []
    of_label, of_sentence = Counter[str](), Counter[int]()
    for i in torch.randperm(len(words), generator=generator).tolist():
        label, sentence = words.labels[i], words.sentences[i]
        full = chosen.per_sentence is not None and of_sentence[sentence] >= chosen.per_sentence
        if not full and of_label[label] < chosen.per_label:
            of_label[label] += 1
            of_sentence[sentence] += 1
            taken.append(i)
    taken = taken if chosen.limit is None else taken[: chosen.limit]
    rare = {label for label, count in of_label.items() if count < chosen.min_count}
    return sorted(i for i in taken if words.labels[i] not in rare)


def _derived(label: str, spans: Sequence[WordSpan], min_count: int) -> tuple[list[str], list[int]]:
    """Return labels read off the tokens, and which items have one."""
    if label == TOKEN:
        labels = ["·".join(span.strings) for span in spans]
        most = Counter(labels).most_common(_TOKENS)
        known = {name for name, count in most if count >= max(2, min_count)}
        kept = [i for i, name in enumerate(labels) if name in known]
        return labels, kept if len(known) > 1 else []
    places = torch.tensor([float(span.tokens[-1]) for span in spans])
    edges = torch.quantile(places, torch.linspace(0, 1, _BINS + 1)[1:-1]).unique()
    bins = torch.bucketize(places, edges).tolist()
    found: defaultdict[int, list[int]] = defaultdict(list)
    for number, place in zip(bins, places.int().tolist(), strict=True):
        found[number].append(place)
    # Padded, so that names sort as numbers do.
    names = {number: f"{min(own):03d}-{max(own):03d}" for number, own in found.items()}
    labels = [names[number] for number in bins]
    return labels, list(range(len(labels))) if len(names) > 1 else []


def _comparable(labels: Sequence[str], strata: Sequence[str]) -> list[int]:
    """Return the items of senses that occur twice, in lemmas that have two of these."""
    counts = Counter(zip(strata, labels, strict=True))
    senses = Counter(lemma for (lemma, _), count in counts.items() if count > 1)
    pairs = enumerate(zip(strata, labels, strict=True))
    return [i for i, (lemma, sense) in pairs if counts[lemma, sense] > 1 and senses[lemma] > 1]


def _groups(
    words: LabelledWords, dataset: Any, strata: Any, groups: str, derived: bool
) -> Sequence[Any]:
    """Return each word's group: the lemma for labels of words in context, else the sentence."""
    if strata is not None:
        if groups not in ("auto", "lemma"):
            hint = "Senses are told apart within a lemma, so lemmas are what is resampled."
            raise InputError(message("groups", "'auto' or 'lemma' for senses", groups, hint))
        return strata
    if groups == "auto":
        # Which token it is a lemma would settle.
        groups = "lemma" if isinstance(dataset, SenseDataset) and not derived else "sentence"
    if groups == "sentence":
        return words.sentences
    if groups == "word":
        return [word.casefold() for word in words.words]
    if not all(words.lemmas):
        hint = "The dataset has no lemmas: use 'word' or 'sentence'."
        raise InputError(message("groups", "what the dataset has", groups, hint))
    return words.lemmas


def _same_pos(words: LabelledWords, dataset: Any, kept: Sequence[int]) -> frozenset[str]:
    if not isinstance(dataset, SenseDataset):
        return frozenset()
    found: defaultdict[str, set[str]] = defaultdict(set)
    for i in kept:
        found[words.lemmas[i]].add(dataset.items[words.places[i][0]].pos)
    return frozenset(lemma for lemma, pos in found.items() if len(pos) == 1)
