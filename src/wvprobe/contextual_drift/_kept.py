"""What drift() keeps of each word, in tensors made beforehand.

Thousands of small results between large temporary ones would leave a heap full of holes, which the
process holds on to; so results are written into place.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe.contextual_drift._measures import SHUFFLES, WordMeasures
from wvprobe.datasets import SenseItem


class Kept:
    """Measures of words, sentence by sentence outcomes, and a sample of vectors."""

    def __init__(
        self, names: Sequence[str], *, words: int, items: int, sample: int, streams: int, d: int
    ) -> None:
        """Make room; `names` are the measures, `sample` how many vectors are kept."""
        self.names = tuple(names)
        shape = (len(names), words, streams)
        self._values = torch.full(shape, torch.nan, dtype=torch.float64)
        self._outcomes = torch.full((3, items, streams), torch.nan, dtype=torch.float64)
        self._control = torch.zeros(SHUFFLES, streams, dtype=torch.float64)
        self._controlled = 0
        self._size = 0
        self._sample = torch.zeros(sample, streams, d)
        self.sample_words: list[str] = []
        self.words: list[str] = []
        self.items: list[tuple[SenseItem, ...]] = []

    def add_vector(self, word: str, x: Float[Tensor, "layer d_model"]) -> None:
        """Keep a sampled vector."""
        self._sample[len(self.sample_words)] = x
        self.sample_words.append(word)

    def add(
        self,
        word: str,
        items: Sequence[SenseItem],
        values: Mapping[str, Float[Tensor, " layer"]],
        raw: WordMeasures,
    ) -> None:
        """Keep a word's measures."""
        rows = slice(self._size, self._size + len(items))
        self._size = rows.stop
        for number, name in enumerate(self.names):
            self._values[number, len(self.words)] = values[name]
        for number, outcome in enumerate((raw.centroid, raw.neighbour, raw.item_gap)):
            self._outcomes[number, rows] = outcome
        if raw.control is not None:
            self._control += raw.control
            self._controlled += 1
        self.words.append(word)
        self.items.append(tuple(items))

    def values(self) -> dict[str, Float[Tensor, "word layer"]]:
        """Return every measure."""
        found = self._values[:, : len(self.words)]
        return {name: found[number].clone() for number, name in enumerate(self.names)}

    def outcomes(self) -> list[Float[Tensor, "item layer"]]:
        """Return centroid, neighbour and gap, item by item."""
        return [outcome[: self._size].clone() for outcome in self._outcomes]

    def item_words(self) -> Tensor:
        """Return the number of each item's word."""
        sizes = torch.tensor([len(items) for items in self.items])
        return torch.arange(len(self.items)).repeat_interleave(sizes)

    def sample(self) -> Float[Tensor, "item layer d_model"]:
        """Return the sampled vectors."""
        return self._sample[: len(self.sample_words)]

    def control(self) -> Float[Tensor, "quantity layer"]:
        """Return mean and 95th percentile, over shuffles, of the mean accuracy over words."""
        if not self._controlled:
            return torch.full((2, self._control.shape[1]), torch.nan, dtype=torch.float64)
        means = self._control / self._controlled
        return torch.stack([means.mean(dim=0), means.quantile(0.95, dim=0)])
