"""How much of a head's attention the offset of query and key alone foretells."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from wvprobe.behaviour._streaming import Tokens

# Offsets have a bin each up to here; beyond, two bins for every doubling.
_SINGLE, _SIDE = 16, 64
# Squared deviations from uniform attention that float32 alone can bring about.
_ROUNDING = 1e-12


def offset_attention(
    pattern: Float[Tensor, "head query key"],
    tokens: Tokens,
    seen: Bool[Tensor, "query key"],
    offsets: Sequence[int],
) -> tuple[Float[Tensor, "offset head"], Float[Tensor, " offset"]]:
    """Return mean attention at each offset, and what uniform attention would give it.

    Queries and keys are tokens of the text's own; NaN where an offset is seen by none of them.
    """
    own = tokens.own
    block = pattern[:, own, own].cpu()
    visible = seen[own, own]
    uniform = 1 / seen[own].sum(dim=-1).double()
    n = len(uniform)
    values = torch.full((len(offsets), len(pattern)), torch.nan, dtype=torch.float64)
    chance = torch.full((len(offsets),), torch.nan, dtype=torch.float64)
    for place, offset in enumerate(offsets):
        # Masks depend on the offset alone, so that an offset is seen by all queries or by none.
        if abs(offset) >= n or not bool(visible.diagonal(-offset)[0]):
            continue
        values[place] = block.diagonal(-offset, dim1=-2, dim2=-1).double().mean(dim=-1)
        chance[place] = uniform[max(offset, 0) : n + min(offset, 0)].mean()
    return values, chance


class OffsetProfile:
    """Attention by offset over what uniform attention would be, taken from some texts.

    Attention is taken among the text's own tokens without sinks, and every row is divided by its
    sum over them, so that what a sink takes does not count.
    """

    def __init__(self, layers: int, heads: int) -> None:
        """Begin with no text."""
        self.attention = torch.zeros(layers, heads, 2 * _SIDE, dtype=torch.float64)
        self.uniform = torch.zeros(layers, 2 * _SIDE, dtype=torch.float64)
        self._ratios: dict[int, Tensor] = {}

    def add(
        self,
        layer: int,
        pattern: Float[Tensor, "head query key"],
        tokens: Tokens,
        seen: Bool[Tensor, "query key"],
        sinks: Bool[Tensor, " pos"],
    ) -> None:
        """Take a text in."""
        shares, uniform = _shares(pattern, tokens, seen, sinks)
        keys = uniform > 0
        bins = _bins(len(keys))[keys]
        self.uniform[layer].index_add_(0, bins, uniform[keys])
        self.attention[layer].index_add_(1, bins, shares[:, keys])
        self._ratios.pop(layer, None)

    def explained(
        self,
        layer: int,
        pattern: Float[Tensor, "head query key"],
        tokens: Tokens,
        seen: Bool[Tensor, "query key"],
        sinks: Bool[Tensor, " pos"],
    ) -> Float[Tensor, " head"]:
        """Return R² of a text's attention, 1 − Σ (a − foretold)² / Σ (a − uniform)².

        Foretold is the profile at the offsets that a query sees, divided by its sum over them.
        NaN for a head whose attention is uniform to rounding.
        """
        shares, uniform = _shares(pattern, tokens, seen, sinks)
        foretold = self._profile(layer)[:, _bins(len(uniform))] * (uniform > 0)
        total = foretold.sum(dim=-1, keepdim=True)
        foretold = torch.where(total > 0, foretold / total, uniform)
        error = (shares - foretold).square().sum(dim=(-2, -1))
        spread = (shares - uniform).square().sum(dim=(-2, -1))
        return torch.where(spread > _ROUNDING, 1 - error / spread, torch.nan)

    def _profile(self, layer: int) -> Float[Tensor, "head bin"]:
        if layer not in self._ratios:
            counts = self.uniform[layer]
            ratio = self.attention[layer] / torch.where(counts > 0, counts, 1.0)
            for place in range(1, 2 * _SIDE):
                # An offset longer than any taken in is foretold as the longest was.
                if not counts[place] and place != _SIDE:
                    ratio[:, place] = ratio[:, place - 1]
            self._ratios[layer] = ratio
        return self._ratios[layer]


def _shares(
    pattern: Tensor, tokens: Tokens, seen: Tensor, sinks: Tensor
) -> tuple[Float[Tensor, "head query key"], Float[Tensor, "query key"]]:
    """Return attention among own tokens that are no sinks, rows summing to 1, and uniform rows.

    Only queries with two such keys or more take part; the others' rows are zeros.
    """
    counted = torch.zeros(len(tokens.ids), dtype=torch.bool)
    counted[tokens.own] = True
    counted &= ~sinks
    keys = seen & counted & counted[:, None]
    number = keys.sum(dim=-1, keepdim=True)
    keys &= number >= 2
    uniform = keys / number.clamp(min=1).double()
    shares = pattern.cpu().double() * keys
    total = shares.sum(dim=-1, keepdim=True)
    # A sink can leave nothing at all to the others in floating point.
    return torch.where(total > 0, shares / total, uniform), uniform


def _bins(n: int) -> Int[Tensor, "query key"]:
    """Return each pair's bin: offsets from 0 on in the first half, negative ones in the second."""
    positions = torch.arange(n)
    offset = positions[:, None] - positions
    far = offset.abs().double()
    coarse = _SINGLE + (2 * (far / _SINGLE).clamp(min=1).log2()).floor()
    bins = torch.where(far < _SINGLE, far, coarse).long().clamp(max=_SIDE - 1)
    return torch.where(offset < 0, bins + _SIDE, bins)
