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
    """Read one random token of each of up to 1,000 sentences, see :class:`RandomTokenDraw`."""
    return RandomTokenDraw(reader, items, generator).tokens()


class RandomTokenDraw:
    """One random token of each of up to 1,000 sentences; never a target, never a sink.

    With ``position="last_token"`` it is each sentence's last token: what is measured then, too.
    Sentences that are read for something else are taken as they pass (:meth:`see`), so that none
    runs twice.
    """

    def __init__(
        self,
        reader: Reader,
        items: Sequence[SenseItem],
        generator: torch.Generator,
        sentences: int | None = None,
    ) -> None:
        self.reader, self.generator = reader, generator
        self.users: dict[str, list[SenseItem]] = {}
        for item in items:
            self.users.setdefault(item.sentence, []).append(item)
        texts = list(self.users)
        chosen = torch.randperm(len(texts), generator=generator)[: sentences or SENTENCES].tolist()
        self.rows = {texts[number]: row for row, number in enumerate(chosen)}
        self.draws = torch.rand(len(chosen), generator=generator).tolist()
        self.encodings = {text: reader.encode(text) for text in self.rows}
        longest = max(len(encoding.ids) for encoding in self.encodings.values())
        width = (reader.streams, int(reader.model.cfg.d_model))
        self.x = torch.zeros(len(chosen), *width)
        self.sums, self.counts = torch.zeros(2, longest, *width), torch.zeros(2, longest)
        self.found = torch.zeros(len(chosen), dtype=torch.bool)
        self.unseen = dict.fromkeys(self.rows)

    def see(self, chunk: Chunk, texts: Sequence[str]) -> None:
        """Take what is wanted of some sentences; `texts` are those that the chunk's rows count."""
        places = [place for place, row in enumerate(chunk.rows) if texts[row] in self.unseen]
        if not places:
            return
        wanted = [texts[chunk.rows[place]] for place in places]
        numbers = [self.rows[text] for text in wanted]
        # A copy: what is a target here is none of the positions' random tokens either.
        x, own = chunk.x[places], chunk.own[places]
        for place, (text, row) in enumerate(zip(wanted, numbers, strict=True)):
            del self.unseen[text]
            own[place, _targets(self.reader, self.encodings[text], self.users[text])] = False
            free = own[place].nonzero()[:, 0].tolist()
            if free:
                last = self.reader.position == "last_token"
                at = free[-1] if last else free[int(self.draws[row] * len(free))]
                self.x[row], self.found[row] = x[place, at], True
        self._add_positions(x, own, torch.tensor(numbers))

    def _add_positions(self, x: Tensor, own: Tensor, numbers: Tensor) -> None:
        """Add the unit vectors of each position to its half: sentences of even and odd number."""
        weight = own.float()[:, :, None] / x.norm(dim=-1).clamp(min=1e-30)
        # A batch may be padded further than the longest sentence of these.
        size = min(x.shape[1], self.counts.shape[1])
        for half in (0, 1):
            mine = numbers % 2 == half
            sums = torch.einsum("spld,spl->pld", x[mine], weight[mine])
            self.sums[half, :size] += sums[:size]
            self.counts[half, :size] += own[mine].sum(dim=0)[:size]

    def tokens(self) -> RandomTokens:
        """Read the sentences that have not passed yet, and return the tokens of all.

        Raises:
            InputError: fewer than two sentences have such a token.
        """
        texts = list(self.unseen)
        for chunk in self.reader.chunks([self.encodings[text] for text in texts]):
            self.see(chunk, texts)
        count = int(self.found.sum())
        if count < 2:
            raise InputError(message("dataset", "at least two different sentences", count))
        return RandomTokens(self.x[self.found], self.sums, self.counts, self.generator)


def _targets(reader: Reader, encoding: Encoding, items: Sequence[SenseItem]) -> list[int]:
    """Return the positions that a random token must not have."""
    if reader.position == "last_token":
        return []
    spans = (word_at(encoding, item.start, item.end) for item in items)
    return [position for span in spans for position in span.tokens]
