"""Labelled words and their tokens: what probes and measures of behaviour read.

    treebank = load_conllu("en_ewt-ud-dev.conllu")
    words = labelled_words(model, treebank, per_sentence=1)
    seen = read_sites(model, words.texts, "v", words=words.spans, share=True)["v"]

Row i of `seen` belongs to ``words.labels[i]``, and ``words.sentences[i]`` is its group. With
``share=True`` the words of one text are read in one forward. A word that has no tokens of its own
is listed in ``words.losses`` with the reason: nothing is guessed, and nothing goes silently.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

import torch

from wvprobe._validate import at_least, instance, length, listed, message, one_of
from wvprobe._validate import seed as checked_seed
from wvprobe.datasets import (
    LabelledDataset,
    LabelledSentence,
    SenseDataset,
    Skipped,
    labelled_senses,
)
from wvprobe.errors import (
    InputError,
    NoTokenError,
    SharedTokenError,
    SpellingError,
    TextLengthError,
    WvprobeError,
)
from wvprobe.words import Encoding, WordSpan, characters_at, encode

# Why a word is lost.
SHARED_TOKEN = "a token of it stands for characters around it, too"
NO_TOKEN = "the tokenizer leaves it out"
SHARED_CHARACTERS = "written as one with other words"
TOO_LONG = "its text is longer than the model's context"
UNREADABLE = "its text cannot be tokenized"
REASONS = (SHARED_TOKEN, NO_TOKEN, SHARED_CHARACTERS, TOO_LONG, UNREADABLE)


@dataclass(frozen=True)
class Loss:
    """A labelled word that has no tokens of its own.

    Attributes:
        sentence: the id of its sentence.
        index: which word of the sentence, from 0.
        word: the word.
        reason: one of ``REASONS``.
        detail: what exactly was found.
        label: the word's label, where labels were asked for: losses fall on some more than others.

    Examples:
        >>> from wvprobe.labelled import Loss
        >>> Loss("s-1", 2, "n't", "the tokenizer leaves it out", "don't").word
        "n't"
    """

    sentence: str
    index: int
    word: str
    reason: str
    detail: str
    label: str = ""


@dataclass(frozen=True)
class LabelledWords:
    """Words with their tokens and labels, in the order of the dataset.

    Attributes:
        dataset: the dataset's name.
        column: what the labels say.
        within: a column (``lemma``) within whose values alone labels can be compared, or None.
        spans: each word in its text, see :class:`wvprobe.words.WordSpan`.
        labels: each word's label.
        lemmas: each word's lemma; "" where the dataset has none.
        sentences: each word's group: a number that words of the same sentence share, also where
            it stands in the dataset twice, whatever its case and spacing.
        places: (number of the sentence in the dataset, index of the word in it), both from 0.
        heads: where in this very list each word's governor is; None for a root, for a governor
            that is not in the list, and where there are no dependencies.
        losses: the words that have no tokens of their own.
        left_out: how many words were left out by choice, by reason.
        skipped: the sentences that the dataset's reader left out.
        settings: what shaped the selection, for a provenance.

    Examples:
        >>> from wvprobe.labelled import labelled_words
        >>> words = labelled_words(model, wvprobe.load_senses().only("bank"))
        >>> len(words.spans) == len(words.labels), dict(words.loss_counts)
        (True, {})
    """

    dataset: str
    column: str
    within: str | None
    spans: tuple[WordSpan, ...]
    labels: tuple[str, ...]
    lemmas: tuple[str, ...]
    sentences: tuple[int, ...]
    places: tuple[tuple[int, int], ...]
    heads: tuple[int | None, ...]
    losses: tuple[Loss, ...]
    left_out: Mapping[str, int]
    skipped: tuple[Skipped, ...]
    settings: Mapping[str, Any]

    def __len__(self) -> int:
        """Return the number of words."""
        return len(self.spans)

    @property
    def texts(self) -> tuple[str, ...]:
        """Each word's text, as `read_sites` takes it beside ``words=self.spans``."""
        return tuple(span.text for span in self.spans)

    @property
    def words(self) -> tuple[str, ...]:
        """Each word as it stands in its text."""
        return tuple(span.word for span in self.spans)

    @property
    def loss_counts(self) -> Mapping[str, int]:
        """How many words were lost, by reason."""
        return dict(Counter(loss.reason for loss in self.losses))

    def to_frame(self) -> Any:
        """Return one row a word: word label lemma group sentence index head tokens text."""
        import pandas

        sentence, index = zip(*self.places, strict=True)
        columns = {
            "word": self.words,
            "label": self.labels,
            "lemma": self.lemmas,
            "group": self.sentences,
            "sentence": sentence,
            "index": index,
            "head": pandas.array(list(self.heads), dtype="Int64"),
            "tokens": [span.tokens for span in self.spans],
            "text": self.texts,
        }
        return pandas.DataFrame(columns)

    def losses_frame(self) -> Any:
        """Return one row a lost word: sentence index word reason detail label."""
        import pandas

        columns = [field.name for field in fields(Loss)]
        return pandas.DataFrame([astuple(loss) for loss in self.losses], columns=columns)


def align(
    encoding: Encoding, sentence: LabelledSentence, words: Iterable[int] | None = None
) -> list[WordSpan | Loss]:
    """Find the tokens of a sentence's words.

    A word's tokens are those that stand for its characters and for nothing around them, as the
    source cuts the text: "n't" needs a token of its own, or several. Words that share their
    characters ("à" and "le" of "au") would have the same vectors under different labels, so they
    are losses.

    Args:
        encoding: the sentence's text, of :func:`wvprobe.words.encode`.
        sentence: the sentence.
        words: indices of the words wanted; None for all.

    Returns:
        For each word where its tokens are, or why it has none of its own.

    Raises:
        InputError: the encoding is of another text.

    Examples:
        >>> from wvprobe.datasets import labelled_senses
        >>> from wvprobe.labelled import align
        >>> from wvprobe.words import encode
        >>> sentence = labelled_senses(wvprobe.load_senses().only("bank")).sentences[0]
        >>> [span.word for span in align(encode(model, sentence.text), sentence)]
        ['bank']
    """
    if encoding.text != sentence.text:
        raise InputError(message("encoding", f"of {sentence.text!r}", encoding.text))
    places = list(zip(sentence.starts, sentence.ends, strict=True))
    writers = Counter(places)
    wanted = range(len(sentence)) if words is None else words
    return [_aligned(encoding, sentence, index, writers[places[index]]) for index in wanted]


def _aligned(
    encoding: Encoding, sentence: LabelledSentence, index: int, writers: int
) -> WordSpan | Loss:
    start, end = sentence.starts[index], sentence.ends[index]
    if writers > 1:
        detail = f"{writers} words share {sentence.text[start:end]!r} at {start}..{end}"
        return Loss(sentence.id, index, sentence.words[index], SHARED_CHARACTERS, detail)
    try:
        return characters_at(encoding, start, end)
    except SharedTokenError as error:
        return Loss(sentence.id, index, sentence.words[index], SHARED_TOKEN, str(error))
    except NoTokenError as error:
        return Loss(sentence.id, index, sentence.words[index], NO_TOKEN, str(error))


def labelled_words(
    model: Any,
    dataset: LabelledDataset | SenseDataset,
    *,
    column: str | None = None,
    per_sentence: int | None = None,
    labels: Sequence[str] | None = None,
    min_count: int = 0,
    limit: int | None = None,
    seed: int = 0,
    prepend_bos: bool | None = None,
) -> LabelledWords:
    """Find the tokens of a dataset's labelled words, and choose among the words.

    Words without a label, or with another than those wanted, are left out; then those without
    tokens of their own (`losses`); then labels of fewer words than `min_count`. Of what is left,
    `per_sentence` and `limit` draw at random; labels that are then rarer than `min_count` go,
    too.

    Args:
        model: a bridge with a tokenizer.
        dataset: labelled sentences, or words in context: of these the label is the sense (or
            ``pos``, by `column`), and a sense means something within its lemma only.
        column: the column of labels; None for the dataset's own choice.
        per_sentence: at most so many words of a sentence, so that words are independent; None
            for all. Sentences of one text count as one.
        labels: the labels wanted; None for all.
        min_count: a label of fewer words is left out.
        limit: at most so many words in all; None for no limit.
        seed: seed of what is drawn.
        prepend_bos: as for :func:`wvprobe.words.encode`; the model has to read the texts so, too.

    Raises:
        InputError: no such column or label, or no word is left.
        TokenizerError: there is no tokenizer, or it does not fit the model.

    Examples:
        >>> from wvprobe.labelled import labelled_words
        >>> words = labelled_words(model, wvprobe.load_senses().only("bank"), limit=10)
        >>> len(words.spans), words.column
        (10, 'sense')
    """
    seed = checked_seed(seed)
    hint = "load_conllu, load_iob2, load_labels and load_senses return such."
    instance("dataset", dataset, (LabelledDataset, SenseDataset), hint)
    data = labelled_senses(dataset) if isinstance(dataset, SenseDataset) else dataset
    data = data if column is None else data.with_column(column)
    if labels is not None:
        known = tuple(sorted(set(data.labels) - {""}))
        labels = tuple(one_of("labels", own, known) for own in listed("labels", labels, "labels"))
    for name, value in (("per_sentence", per_sentence), ("limit", limit)):
        if value is not None:
            length(name, value)
    min_count = at_least("min_count", min_count)
    search = _Search(model, data, labels, prepend_bos)
    chosen = _chosen(search, data, per_sentence, min_count, limit, seed)
    if not chosen:
        losses = dict(Counter(loss.reason for loss in search.losses))
        given = f"{len(data.labels)} words; lost: {losses}; left out: {dict(search.left_out)}"
        raise InputError(message("dataset", "a set with labelled words left to read", given))
    settings = {
        "dataset": data.name,
        "column": data.column,
        "per_sentence": per_sentence,
        "labels": None if labels is None else list(labels),
        "min_count": min_count,
        "limit": limit,
        "seed": seed,
        "prepend_bos": prepend_bos,
        "words": len(chosen),
        "lost": len(search.losses),
    }
    return _assembled(data, chosen, search, settings)


@dataclass(frozen=True)
class _Word:
    """A word that has its tokens: where it is in the dataset, and its label."""

    sentence: int
    index: int
    label: str
    span: WordSpan


class _Search:
    """All wanted words of a dataset with their tokens, and what was lost and left out."""

    def __init__(
        self,
        model: Any,
        data: LabelledDataset,
        labels: Sequence[str] | None,
        prepend_bos: bool | None,
    ) -> None:
        self.model, self.prepend_bos = model, prepend_bos
        self.words: list[_Word] = []
        self.losses: list[Loss] = []
        self.left_out: Counter[str] = Counter()
        self.read: dict[str, Encoding | WvprobeError] = {}
        for number, sentence in enumerate(data.sentences):
            own = sentence.labels[data.column]
            wanted = [i for i, x in enumerate(own) if x and (labels is None or x in labels)]
            unlabelled = own.count("")
            self._leave_out("no label", unlabelled)
            self._leave_out("another label", len(own) - unlabelled - len(wanted))
            if wanted:
                self._find(number, sentence, wanted, own)
        failed = [e for e in self.read.values() if isinstance(e, WvprobeError)]
        if failed and len(failed) == len(self.read):
            raise failed[0]  # not a matter of single texts

    def _leave_out(self, reason: str, count: int) -> None:
        if count:
            self.left_out[reason] += count

    def _find(
        self, number: int, sentence: LabelledSentence, wanted: list[int], own: Sequence[str]
    ) -> None:
        encoding = self._encoding(sentence.text)
        if isinstance(encoding, WvprobeError):
            reason = TOO_LONG if isinstance(encoding, TextLengthError) else UNREADABLE
            detail = str(encoding)
            lost = [Loss(sentence.id, i, sentence.words[i], reason, detail, own[i]) for i in wanted]
            self.losses += lost
            return
        for index, found in zip(wanted, align(encoding, sentence, wanted), strict=True):
            if isinstance(found, Loss):
                self.losses.append(replace(found, label=own[index]))
            else:
                self.words.append(_Word(number, index, own[index], found))

    def _encoding(self, text: str) -> Encoding | WvprobeError:
        if text not in self.read:
            try:
                self.read[text] = encode(self.model, text, prepend_bos=self.prepend_bos)
            except (InputError, SpellingError) as error:
                self.read[text] = error
        return self.read[text]


def _chosen(
    search: _Search,
    data: LabelledDataset,
    per_sentence: int | None,
    min_count: int,
    limit: int | None,
    seed: int,
) -> list[_Word]:
    """Return the words that are drawn, in the order of the dataset; say what is left out."""
    words = _frequent(search, search.words, min_count)
    if per_sentence is None and limit is None:
        return words
    order = torch.randperm(len(words), generator=torch.Generator().manual_seed(seed)).tolist()
    groups, taken = data.groups, Counter[int]()
    drawn = []
    for position in order:
        group = groups[words[position].sentence]
        taken[group] += 1
        if per_sentence is None or taken[group] <= per_sentence:
            drawn.append(position)
    within = drawn if limit is None else drawn[:limit]
    search.left_out["not drawn, by per_sentence"] += len(words) - len(drawn)
    search.left_out["not drawn, by limit"] += len(drawn) - len(within)
    return _frequent(search, [words[position] for position in sorted(within)], min_count)


def _frequent(search: _Search, words: list[_Word], min_count: int) -> list[_Word]:
    counts = Counter(word.label for word in words)
    kept = [word for word in words if counts[word.label] >= min_count]
    search.left_out["a label rarer than min_count"] += len(words) - len(kept)
    return kept


def _assembled(
    data: LabelledDataset, chosen: list[_Word], search: _Search, settings: Mapping[str, Any]
) -> LabelledWords:
    groups = data.groups
    sentences = [data.sentences[word.sentence] for word in chosen]
    rows = {(word.sentence, word.index): row for row, word in enumerate(chosen)}
    pairs = list(zip(chosen, sentences, strict=True))
    return LabelledWords(
        dataset=data.name,
        column=data.column,
        within=data.within,
        spans=tuple(word.span for word in chosen),
        labels=tuple(word.label for word in chosen),
        lemmas=tuple(s.labels["lemma"][w.index] if "lemma" in s.labels else "" for w, s in pairs),
        sentences=tuple(groups[word.sentence] for word in chosen),
        places=tuple(rows),
        heads=tuple(
            rows.get((w.sentence, s.heads[w.index])) if s.heads else None for w, s in pairs
        ),
        losses=tuple(search.losses),
        left_out={reason: count for reason, count in search.left_out.items() if count},
        skipped=data.skipped,
        settings=settings,
    )
