"""What the measures of behaviour share: scores by sample, masks, tokens of a text."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wvprobe import adapters
from wvprobe._masks import visible
from wvprobe.adapters import Architecture
from wvprobe.behaviour._streaming import Tokens
from wvprobe.words import encode


class Rows:
    """Scores by sample, filled layer by layer.

    Attributes:
        names: the scores.
        values: [score, sample, layer, head], NaN where no query of a sample counts.
        chance: same axes; what uniform attention gives the same queries.
    """

    def __init__(self, names: Sequence[str], samples: int, arch: Architecture) -> None:
        """Begin with NaN everywhere."""
        shape = (len(names), samples, arch.n_layers, arch.n_heads)
        self.names = tuple(names)
        self.values = torch.full(shape, torch.nan, dtype=torch.float64)
        self.chance = self.values.clone()

    def put(self, first: int, sample: int, layer: int, found: tuple[Tensor, Tensor]) -> None:
        """Write scores of one sample and layer, from the `first` on: [score, head], [score]."""
        values, chance = found
        span = slice(first, first + len(values))
        self.values[span, sample, layer] = values
        self.chance[span, sample, layer] = chance.double()[:, None]


class Masks:
    """Which keys a query sees, by layer and length; made once each."""

    def __init__(self, model: Any, arch: Architecture) -> None:
        """Read the layers' windows."""
        self.causal = arch.causal
        self.windows = [adapters.sliding_window(model, layer) for layer in range(arch.n_layers)]
        self._made: dict[tuple[int, int | None], Tensor] = {}

    def __call__(self, layer: int, size: int) -> Tensor:
        """Return [query, key], True where the query looks."""
        key = (size, self.windows[layer])
        if key not in self._made:
            self._made[key] = visible(size, causal=self.causal, window=key[1])
        return self._made[key]


def tokenized(model: Any, text: str) -> Tokens:
    """Return a text's tokens, BOS and the like as the bridge adds them."""
    encoding = encode(model, text)
    return Tokens(encoding.ids, encoding.special)
