"""Related words of a treebank, and whether a head's strongest key is the one related."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from wvprobe._sinks import sinks_among, special_tokens
from wvprobe.adapters import Architecture
from wvprobe.behaviour._rows import Masks
from wvprobe.behaviour._streaming import Tokens, each_layer
from wvprobe.datasets import LabelledSentence
from wvprobe.errors import TextLengthError
from wvprobe.labelled import Loss, align
from wvprobe.words import WordSpan, encode

DIRECTIONS = ("dependent→governor", "governor→dependent")


class Pair(NamedTuple):
    """Two related words of a sentence, one asking, the other to be found.

    Attributes:
        relation: the dependency relation.
        direction: which of the two asks, of :data:`DIRECTIONS`.
        query: which of the sentence's found words asks.
        key: which of them it is to find.
        offset: words from the query to the key, negative where the key comes first.
    """

    relation: str
    direction: str
    query: int
    key: int
    offset: int


@dataclass(frozen=True)
class Parsed:
    """A sentence's tokens, its words that have tokens of their own, and their relations."""

    tokens: Tokens
    words: tuple[tuple[int, ...], ...]
    pairs: tuple[Pair, ...]


def parsed(model: Any, sentence: LabelledSentence, exclude: Sequence[str]) -> Parsed | None:
    """Return a sentence's related words in both directions; None if it exceeds the context."""
    try:
        encoding = encode(model, sentence.text)
    except TextLengthError:
        return None
    aligned: list[WordSpan | Loss] = align(encoding, sentence)
    found = {i: word.tokens for i, word in enumerate(aligned) if isinstance(word, WordSpan)}
    place = {index: number for number, index in enumerate(found)}
    return Parsed(
        Tokens(encoding.ids, encoding.special),
        tuple(found.values()),
        tuple(_pairs(sentence, place, exclude)),
    )


def _pairs(
    sentence: LabelledSentence, place: Mapping[int, int], exclude: Sequence[str]
) -> Iterator[Pair]:
    for dependent, governor in enumerate(sentence.heads or ()):
        relation = sentence.labels["deprel"][dependent]
        if dependent not in place or governor not in place or not relation or relation in exclude:
            continue
        for direction, (query, key) in zip(
            DIRECTIONS, ((dependent, governor), (governor, dependent)), strict=True
        ):
            yield Pair(relation, direction, place[query], place[key], key - query)


@dataclass(frozen=True)
class Found:
    """What heads found of all pairs, in the order of the sentences and of their pairs.

    Attributes:
        hits: [pair, layer, head], True where the strongest key is a token of the word to find.
        possible: [pair, layer], True where the query sees a token of it that is no sink.
    """

    hits: Bool[Tensor, "pair layer head"]
    possible: Bool[Tensor, "pair layer"]


def found_words(
    model: Any,
    arch: Architecture,
    sentences: Sequence[Parsed],
    batch_size: int | Literal["auto"],
    progress: bool,
) -> Found:
    """Ask every head of every layer for every pair.

    A query is a word's last token in a decoder, which alone has seen the whole word, and the mean
    over its tokens in an encoder. Its strongest key is taken among the tokens that are neither
    sinks nor the word's own.
    """
    starts = torch.tensor([0, *(len(s.pairs) for s in sentences)]).cumsum(0).tolist()
    hits = torch.zeros(starts[-1], arch.n_layers, arch.n_heads, dtype=torch.bool)
    possible = torch.zeros(starts[-1], arch.n_layers, dtype=torch.bool)
    masks, words = Masks(model, arch), [_Words(s, arch.causal) for s in sentences]
    special = [special_tokens(model, *s.tokens) for s in sentences]

    def use(item: int, layer: int, seen: Mapping[str, Tensor]) -> None:
        norms = seen["resid_pre"].norm(dim=-1).cpu()
        keys = masks(layer, len(norms)) & ~sinks_among(special[item], norms)
        rows = slice(starts[item], starts[item + 1])
        hits[rows, layer], possible[rows, layer] = words[item].found(seen["pattern"].cpu(), keys)

    sites, tokens = ("pattern", "resid_pre"), [s.tokens for s in sentences]
    each_layer(model, arch, tokens, sites, use, batch_size=batch_size, progress=progress)
    return Found(hits, possible)


class _Words:
    """A sentence's words as rows over its tokens."""

    def __init__(self, sentence: Parsed, causal: bool) -> None:
        size = len(sentence.tokens.ids)
        self.members = torch.zeros(len(sentence.words), size, dtype=torch.bool)
        self.asks = torch.zeros(len(sentence.words), size)
        for number, tokens in enumerate(sentence.words):
            self.members[number, list(tokens)] = True
            asking = tokens[-1:] if causal else tokens
            self.asks[number, list(asking)] = 1 / len(asking)
        self.query = torch.tensor([pair.query for pair in sentence.pairs])
        self.key = torch.tensor([pair.key for pair in sentence.pairs])

    def found(
        self, pattern: Float[Tensor, "head query key"], keys: Bool[Tensor, "query key"]
    ) -> tuple[Bool[Tensor, "pair head"], Bool[Tensor, " pair"]]:
        """Return whether each head finds each pair's word, and whether it could.

        Args:
            pattern: attention of one layer.
            keys: those that a query may name.
        """
        rows = torch.einsum("wq,hqk->hwk", self.asks.to(pattern), pattern)
        named = (self.asks @ keys.float() > 0) & ~self.members
        strongest: Int[Tensor, "head word"] = rows.masked_fill(~named, -1).argmax(dim=-1)
        # [pair, key]: the tokens of the word that each pair's query is to find.
        wanted = self.members[self.key]
        hits = wanted.gather(1, strongest[:, self.query].T)
        possible = (wanted & named[self.query]).any(dim=-1)
        return hits & possible[:, None], possible
