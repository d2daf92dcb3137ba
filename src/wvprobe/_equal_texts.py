"""Texts of one length in tokens: prose to draw from, and pairs of sentences about one word."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from wvprobe import adapters
from wvprobe._validate import message
from wvprobe.datasets import SenseItem, load_prose, load_senses
from wvprobe.errors import InputError, WordError
from wvprobe.words import Encoding, encode, word_at

# How often a window's number of words is adjusted before another place is tried.
_TRIES = 8


class MatchedPair(NamedTuple):
    """Two texts of one length with one word at one position.

    Attributes:
        texts: the two texts.
        position: the position of the word's last token, the same in both.
        group: the word, or whatever else pairs have in common that are not independent.
    """

    texts: tuple[str, str]
    position: int
    group: str


def check_equal_lengths(texts: Sequence[str], encodings: Sequence[Encoding]) -> int:
    """Return the common length in tokens.

    Raises:
        InputError: two of them differ; the message says both lengths.
    """
    first = len(encodings[0].ids)
    for text, encoding in zip(texts, encodings, strict=True):
        if len(encoding.ids) != first:
            raise InputError(
                f"the texts must have the same number of tokens. Got {first} in {texts[0]!r} and "
                f"{len(encoding.ids)} in {text!r} instead. Positions are exchanged one for one: "
                "add or take away words."
            )
    return first


def prose_of_length(
    model: Any, size: int, count: int, generator: torch.Generator
) -> tuple[str, ...]:
    """Return windows of the bundled held-out prose that are `size` tokens long, all different.

    Each begins where a sentence begins, and ends where a word does.

    Raises:
        InputError: there are not as many.
    """
    words, starts = _prose()
    found: list[str] = []
    order = torch.randperm(len(starts), generator=generator).tolist()
    for at in order if count <= len(starts) else ():
        if len(found) == count:
            break
        window = _window(model, words[starts[at] :], size)
        if window is not None and window not in found:
            found.append(window)
    if len(found) < count:
        expected = f"a length that {count} windows of the bundled prose have"
        raise InputError(message("text", expected, f"{size} tokens", "Use a shorter text."))
    return tuple(found)


def _prose() -> tuple[list[str], list[int]]:
    """Return the words of the held-out prose, and which of them begin a sentence."""
    words: list[str] = []
    starts: list[int] = []
    for paragraph in load_prose("held-out"):
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", paragraph):
            starts.append(len(words))
            words += sentence.split()
    return words, starts


def _window(model: Any, words: Sequence[str], size: int) -> str | None:
    """Return the words up to one with which they are `size` tokens; None where none is."""
    count, tried = max(1, (3 * size) // 4), set()
    for _ in range(_TRIES):
        count = min(count, len(words))
        if count < 1 or count in tried:
            return None
        tried.add(count)
        text = " ".join(words[:count])
        try:
            tokens = len(encode(model, text).ids)
        except InputError:  # longer than the model takes
            tokens = 2 * size
        if tokens == size:
            return text
        guess = round(count * size / tokens)
        # Close to it one word at a time: how many tokens the next word has is not known.
        count = guess if guess not in tried else count + (1 if tokens < size else -1)
    return None


def sense_pairs(model: Any, count: int, generator: torch.Generator) -> tuple[MatchedPair, ...]:
    """Return pairs of the bundled sentences, with one word in two senses at one position.

    The word is spelled by the same tokens and stands behind as many tokens in both. The longer
    sentence, or both, is cut behind the word, at the end of a word, to the largest length that the
    two can share. No sentence is used twice. In a decoder, whose word sees only what
    precedes it, only sentences are taken in which something before the word tells its sense.
    Words take turns, so that each has about as many pairs.

    Raises:
        InputError: the tokenizer leaves fewer than two pairs.
    """
    causal = adapters.architecture(model).causal
    dataset = load_senses()
    streams: list[Iterator[MatchedPair]] = []
    for word in dataset.words:
        items = [i for i in dataset.only(word) if not causal or i.context in ("before", "both")]
        order = torch.randperm(len(items), generator=generator).tolist()
        streams.append(_pairs_of_word(model, [items[at] for at in order]))
    found: list[MatchedPair] = []
    while streams and len(found) < count:
        for stream in list(streams):
            pair = next(stream, None)
            if pair is None:
                streams.remove(stream)
            elif len(found) < count:
                found.append(pair)
    if len(found) < 2:
        raise InputError(
            f"the bundled sentences give {len(found)} pairs of equal length with this tokenizer. "
            "Pass pairs= of your own."
        )
    return tuple(found)


class _Placed(NamedTuple):
    item: SenseItem
    encoding: Encoding
    position: int


def _pairs_of_word(model: Any, items: Sequence[SenseItem]) -> Iterator[MatchedPair]:
    """Yield pairs of one word, each sentence once, two senses a pair."""
    waiting: dict[Any, list[_Placed]] = {}
    for item in items:
        encoding = encode(model, item.sentence)
        try:
            span = word_at(encoding, item.start, item.end)
        except WordError:  # its tokens are not its own
            continue
        placed = _Placed(item, encoding, span.tokens[-1])
        spelled = (span.tokens, tuple(encoding.ids[at] for at in span.tokens))
        others = waiting.setdefault(spelled, [])
        for other in others:
            texts = None
            if other.item.sense != item.sense:
                texts = _cut_alike(model, other, placed)
            if texts is not None:
                others.remove(other)
                yield MatchedPair(texts, placed.position, item.word)
                break
        else:
            others.append(placed)


def _cut_alike(model: Any, first: _Placed, second: _Placed) -> tuple[str, str] | None:
    """Return both sentences, cut to the largest length that both can have; None without one."""
    cuts = [_cuts(placed) for placed in (first, second)]
    for size in sorted(cuts[0].keys() & cuts[1].keys(), reverse=True):
        texts = cuts[0][size], cuts[1][size]
        encodings = [encode(model, text) for text in texts]
        kept = all(
            cut.ids[: placed.position + 1] == placed.encoding.ids[: placed.position + 1]
            for cut, placed in zip(encodings, (first, second), strict=True)
        )
        if kept and len(encodings[0].ids) == len(encodings[1].ids):
            return texts
    return None


def _cuts(placed: _Placed) -> dict[int, str]:
    """Return, by its number of tokens of its own, what is left of a sentence cut behind a word.

    A sentence ends behind its target at least, and is whole at most.
    """
    text, spans = placed.item.sentence, placed.encoding.spans
    found: dict[int, str] = {}
    own = 0
    for at, span in enumerate(spans):
        if span is None:
            continue
        own += 1
        end = span[1]
        if at >= placed.position and (end == len(text) or text[end].isspace()):
            found[own] = text[:end]
    return found
