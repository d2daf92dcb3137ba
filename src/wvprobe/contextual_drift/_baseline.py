"""What random tokens have in common: the anisotropy that measures of words are held against."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._validate import message
from wvprobe.contextual_drift._measures import leading_share
from wvprobe.contextual_drift._vectors import Chunk, Reader
from wvprobe.datasets import SenseItem
from wvprobe.errors import InputError
from wvprobe.words import Encoding, word_at

SENTENCES = 1000
# A position counts where at least so many sentences of each half have a token there.
_LEAST = 10
_SUBSETS = 8


class Rogue(NamedTuple):
    """Dimensions that make up most of the mean cosine of random tokens, stream by stream.

    Attributes:
        dimensions: [layer, rank], largest share first.
        shares: [layer, rank] of the mean cosine; those of all dimensions sum to 1.
    """

    dimensions: Int[Tensor, "layer rank"]
    shares: Float[Tensor, "layer rank"]


@dataclass
class RandomTokens:
    """Random tokens, one of each sentence, and what stands where in these sentences.

    Attributes:
        x: [token, layer, d_model], float32.
        sums: [half, pos, layer, d_model] sums of unit vectors by position, of two halves of the
            sentences, so that two tokens of different sentences can be compared.
        counts: [half, pos] how many.
        generator: of the subsets of :meth:`explained`.
    """

    x: Float[Tensor, "token layer d_model"]
    sums: Float[Tensor, "half pos layer d_model"]
    counts: Float[Tensor, "half pos"]
    generator: torch.Generator
    _explained: dict[tuple[int, bool], Tensor] = field(default_factory=dict)

    def cosine(self) -> Float[Tensor, " layer"]:
        """Return the mean cosine of pairs."""
        return mean_cosine(self.x)

    def explained(self, n: int, *, centred: bool) -> Float[Tensor, " layer"]:
        """Return the maximum explainable variance of `n` tokens, the mean over 8 random sets.

        It falls with the number of tokens, so that a word is held against as many.
        """
        key = (min(n, len(self.x)), centred)
        if key not in self._explained:
            total = torch.zeros(self.x.shape[1], dtype=torch.float64)
            for _ in range(_SUBSETS):
                order = torch.randperm(len(self.x), generator=self.generator)[: key[0]]
                for layer in range(len(total)):
                    x = self.x[order, layer].double()
                    total[layer] += leading_share(x, centred=centred)
            self._explained[key] = total / _SUBSETS
        return self._explained[key]

    def matched(self, positions: Sequence[int]) -> Float[Tensor, " layer"]:
        """Return the mean cosine of random tokens that stand at these positions.

        Over all pairs of different places of the list; a position that too few sentences reach
        is replaced by the nearest that enough do. NaN where none does, or for one position.
        """
        usable = (self.counts.amin(dim=0) >= _LEAST).nonzero()[:, 0]
        layers = self.sums.shape[2]
        if not len(usable) or len(positions) < 2:
            return torch.full((layers,), torch.nan, dtype=torch.float64)
        distance = (torch.tensor(list(positions))[:, None] - usable).abs()
        at = usable[distance.argmin(dim=1)]
        places, counts = torch.unique(at, return_counts=True)
        weight = counts.double()
        means = self.sums[:, places].double() / self.counts[:, places, None, None]
        one, other = torch.einsum("hpld,p->hld", means, weight)
        both = (one * other).sum(dim=-1)
        # A place is not paired with itself.
        itself = torch.einsum("pld,pld,p->l", means[0], means[1], weight)
        return (both - itself) / (len(positions) * (len(positions) - 1))

    def rogue(self, rank: int = 5) -> Rogue:
        """Return the dimensions with the largest shares of the mean cosine.

        Timkey & van Schijndel 2021, eq. 3: a dimension's share is the mean over pairs of its
        product of two unit vectors, over the mean cosine.
        """
        n, layers, d = self.x.shape
        shares = torch.empty(layers, d, dtype=torch.float64)
        for layer in range(layers):
            unit = _unit(self.x[:, layer].double())
            products = unit.sum(dim=0).square() - unit.square().sum(dim=0)
            shares[layer] = products / products.sum()
        found = shares.topk(min(rank, d), dim=-1)
        return Rogue(found.indices, found.values)


def _unit(x: Tensor) -> Tensor:
    sizes = x.norm(dim=-1, keepdim=True)
    return x / torch.where(sizes > 0, sizes, 1.0)


def mean_cosine(x: Float[Tensor, "token layer d_model"]) -> Float[Tensor, " layer"]:
    """Return the mean cosine of all pairs of rows."""
    n, layers, _ = x.shape
    found = torch.empty(layers, dtype=torch.float64)
    for layer in range(layers):
        unit = _unit(x[:, layer].double())
        found[layer] = (unit.sum(dim=0).square().sum() - unit.square().sum()) / (n * (n - 1))
    return found


def random_tokens(
    reader: Reader, items: Sequence[SenseItem], generator: torch.Generator
) -> RandomTokens:
    """Read one random token of each of up to 1,000 sentences; never a target, never a sink.

    With ``position="last_token"`` it is each sentence's last token: what is measured then, too.

    Raises:
        InputError: fewer than two sentences have such a token.
    """
    users: dict[str, list[SenseItem]] = {}
    for item in items:
        users.setdefault(item.sentence, []).append(item)
    texts = list(users)
    chosen = torch.randperm(len(texts), generator=generator)[:SENTENCES].tolist()
    texts = [texts[number] for number in chosen]
    draws = torch.rand(len(texts), generator=generator).tolist()
    encodings = [reader.encode(text) for text in texts]
    longest = max(len(encoding.ids) for encoding in encodings)
    width = (reader.streams, int(reader.model.cfg.d_model))
    x = torch.zeros(len(texts), *width)
    sums, counts = torch.zeros(2, longest, *width), torch.zeros(2, longest)
    found = torch.zeros(len(texts), dtype=torch.bool)
    for chunk in reader.chunks(encodings):
        for place, row in enumerate(chunk.rows):
            # A view: what is a target here is none of the positions' random tokens either.
            free = chunk.own[place]
            free[_targets(reader, encodings[row], users[texts[row]])] = False
            places = free.nonzero()[:, 0].tolist()
            if places:
                last = reader.position == "last_token"
                at = places[-1] if last else places[int(draws[row] * len(places))]
                x[row], found[row] = chunk.x[place, at], True
        _add_positions(chunk, sums, counts)
    if int(found.sum()) < 2:
        raise InputError(message("dataset", "at least two different sentences", int(found.sum())))
    return RandomTokens(x[found], sums, counts, generator)


def _targets(reader: Reader, encoding: Encoding, items: Sequence[SenseItem]) -> list[int]:
    """Return the positions that a random token must not have."""
    if reader.position == "last_token":
        return []
    spans = (word_at(encoding, item.start, item.end) for item in items)
    return [position for span in spans for position in span.tokens]


def _add_positions(chunk: Chunk, sums: Tensor, counts: Tensor) -> None:
    """Add the unit vectors of each position to its half: sentences of even and of odd number."""
    weight = chunk.own.float()[:, :, None] / chunk.x.norm(dim=-1).clamp(min=1e-30)
    for half in (0, 1):
        mine = torch.tensor([row % 2 == half for row in chunk.rows])
        size = chunk.x.shape[1]
        sums[half, :size] += torch.einsum("spld,spl->pld", chunk.x[mine], weight[mine])
        counts[half, :size] += chunk.own[mine].sum(dim=0)
