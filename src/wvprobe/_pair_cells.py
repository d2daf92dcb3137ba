"""Pairs of tokens in texts, and those that come again in another text.

What recurs is a cell: the query's token, the key's token and the offset between the two.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from wvprobe._masks import visible
from wvprobe.errors import WordError
from wvprobe.words import Encoding, word_at


@dataclass(frozen=True)
class Pairs:
    """Pairs of query and key, an entry a pair, in the order of the texts.

    Attributes:
        text: which text.
        row: which query: a number for every query of every text.
        query: position of the query in its text.
        key: position of the key.
        token: number of the query's token.
        pair: number of the pair of tokens.
        cell: number of the pair of tokens at its offset.
        offset: number of the offset.
        evaluated: whether the pair is asked about; others only take part in their row.
    """

    text: Int[Tensor, " n"]
    row: Int[Tensor, " n"]
    query: Int[Tensor, " n"]
    key: Int[Tensor, " n"]
    token: Int[Tensor, " n"]
    pair: Int[Tensor, " n"]
    cell: Int[Tensor, " n"]
    offset: Int[Tensor, " n"]
    evaluated: Bool[Tensor, " n"]

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self.text)

    def only(self, kept: Tensor) -> "Pairs":
        """Return the pairs of a mask, or of indices."""
        return Pairs(*(getattr(self, name)[kept] for name in self.__dataclass_fields__))


def visible_pairs(
    encodings: Sequence[Encoding],
    special: Collection[int],
    *,
    causal: bool,
    window: int | None,
    query: Collection[str] | None = None,
    key: Collection[str] | None = None,
) -> Pairs:
    """List the pairs of two of a text's own tokens of which one sees the other.

    Added tokens and special ids are no query and no key, and a token is no pair with itself.

    Args:
        encodings: the texts.
        special: ids that are special wherever they stand.
        causal: whether a query sees earlier keys only.
        window: how many tokens a query sees, itself included, or None.
        query: words whose queries are listed; None for all. A word of several tokens is read at
            its last one, which is then another token than the same id elsewhere.
        key: words whose keys are evaluated; None for all.
    """
    words = {word: number for number, word in enumerate({*(query or ()), *(key or ())}, start=1)}
    size = 1 + max(max(encoding.ids) for encoding in encodings)
    parts: list[tuple[Tensor, ...]] = []
    tokens: list[Tensor] = []
    first = 0  # a query's row, and a key's token, is its place in all texts laid end to end
    for text, encoding in enumerate(encodings):
        named = {at: word for word in words for at in _ends(encoding, word)}
        numbers = torch.tensor([words.get(named.get(at, ""), 0) for at in range(len(encoding.ids))])
        tokens.append(torch.tensor(encoding.ids) + size * numbers)
        own = torch.tensor(
            [
                not added and number not in special
                for number, added in zip(encoding.ids, encoding.special, strict=True)
            ]
        )
        seen = visible(len(own), causal=causal, window=window) & own[:, None] & own
        seen.fill_diagonal_(False)
        at_query, at_key = (seen & _asked(named, query, own)[:, None]).nonzero(as_tuple=True)
        asked = _asked(named, key, own)[at_key]
        parts.append((torch.full_like(at_query, text), at_query, at_key, asked, at_key + first))
        parts[-1] += (at_query + first,)
        first += len(own)
    texts, at_query, at_key, evaluated, key_token, row = map(torch.cat, zip(*parts, strict=True))
    token = _numbered(torch.cat(tokens))
    pair = _numbered(token[row] * len(token) + token[key_token])
    offset = _numbered(at_query - at_key)
    cell = _numbered(pair * (len(offset) + 1) + offset)
    return Pairs(texts, row, at_query, at_key, token[row], pair, cell, offset, evaluated)


def _numbered(values: Tensor) -> Tensor:
    """Number distinct values from 0 on."""
    return torch.unique(values, return_inverse=True)[1]


def _ends(encoding: Encoding, word: str) -> Iterator[int]:
    """Yield the last token of every place where the word stands whole and has its own tokens."""
    start = encoding.text.find(word)
    while start >= 0:
        try:
            yield word_at(encoding, start, start + len(word)).tokens[-1]
        except WordError:  # a part of another word, or of a token that stands for more
            pass
        start = encoding.text.find(word, start + 1)


def _asked(named: dict[int, str], words: Collection[str] | None, own: Tensor) -> Tensor:
    """Return [pos] which tokens are among the words asked about."""
    if words is None:
        return torch.ones_like(own)
    return torch.tensor([named.get(at) in words for at in range(len(own))])


def recurring(pairs: Pairs, in_row: int) -> Bool[Tensor, " n"]:
    """Return which pairs recur: their cell stands in two texts, with `in_row` such in their row.

    Both are asked of what is left when the others are gone. So is a third thing: that the query's
    token is that of an evaluated pair, since rows of other tokens say nothing about such pairs.
    """
    n_tokens = int(pairs.token.max()) + 1 if len(pairs) else 0
    kept = torch.ones(len(pairs), dtype=torch.bool)
    while True:
        left = kept.nonzero()[:, 0]
        good = _in_two(pairs.cell[left], pairs.text[left])
        good &= torch.bincount(pairs.row[left])[pairs.row[left]] >= in_row
        token, asked = pairs.token[left], pairs.evaluated[left]
        good &= torch.zeros(n_tokens, dtype=torch.bool).index_fill(0, token[asked], True)[token]
        if bool(good.all()):
            return kept
        kept[left[~good]] = False


def _in_two(cell: Tensor, text: Tensor) -> Tensor:
    """Return which entries belong to a cell that at least two texts have."""
    if not len(cell):
        return torch.ones(0, dtype=torch.bool)
    span = int(text.max()) + 1
    distinct = torch.unique(cell * span + text) // span
    return torch.bincount(distinct, minlength=int(cell.max()) + 1)[cell] >= 2
