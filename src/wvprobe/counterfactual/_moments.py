"""Second moments of what heads put out and of their queries and keys, over calibration text.

Every token of a text counts, those that the tokenizer adds too: many heads look at them most.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe import adapters
from wvprobe.adapters import Architecture
from wvprobe.counterfactual._streams import each_layer


class OutputMoments(NamedTuple):
    """Moments of z = Σ_j pattern v, what a head reads before W_O.

    Attributes:
        mean: E z.
        covariance: E (z − E z)ᵀ(z − E z).
    """

    mean: Float[Tensor, "layer head d_head_v"]
    covariance: Float[Tensor, "layer head d_head_v d_head_v"]


class ScoreMoments(NamedTuple):
    """Moments of queries and keys as they meet: normed, and turned to their positions.

    Attributes:
        queries: E qᵀq, not centred: what all queries share moves scores.
        keys: E (k − k̄)ᵀ(k − k̄), k̄ the mean of a text's own keys: what all keys of a text share
            softmax ignores.
    """

    queries: Float[Tensor, "layer head d_head d_head"]
    keys: Float[Tensor, "layer kv_head d_head d_head"]


def output_moments(
    model: Any, arch: Architecture, texts: Sequence[str], progress: bool = False
) -> OutputMoments:
    """Measure the moments of every head's z, float64."""
    sums = _OutputSums(arch)
    each_layer(model, arch, texts, sums.SITES, sums.add, progress=progress)
    return sums.moments()


def score_moments(
    model: Any, arch: Architecture, texts: Sequence[str], progress: bool = False
) -> ScoreMoments:
    """Measure the moments of every head's queries and keys, float64.

    Raises:
        UnsupportedError: the layers' rotation is not modelled exactly.
    """
    sums = _ScoreSums(model, arch)
    each_layer(model, arch, texts, sums.SITES, sums.add, progress=progress)
    return sums.moments()


def both_moments(
    model: Any, arch: Architecture, texts: Sequence[str], progress: bool = False
) -> tuple[OutputMoments, ScoreMoments]:
    """Measure both at once."""
    outputs, scores = _OutputSums(arch), _ScoreSums(model, arch)

    def add(layer: int, seen: Mapping[str, Tensor], mask: Bool[Tensor, "text pos"]) -> None:
        outputs.add(layer, seen, mask)
        scores.add(layer, seen, mask)

    sites = (*outputs.SITES, *scores.SITES)
    each_layer(model, arch, texts, sites, add, progress=progress)
    return outputs.moments(), scores.moments()


class _OutputSums:
    """Sums that moments of z are made of."""

    SITES = ("z",)

    def __init__(self, arch: Architecture) -> None:
        size = (arch.n_layers, arch.n_heads, arch.d_head_v)
        self.total = torch.zeros(size, dtype=torch.float64)
        self.outer = torch.zeros(*size, arch.d_head_v, dtype=torch.float64)
        self.count = 0

    def add(self, layer: int, seen: Mapping[str, Tensor], mask: Bool[Tensor, "text pos"]) -> None:
        z = seen["z"][mask].transpose(0, 1)
        self.total[layer] += z.sum(dim=1)
        self.outer[layer] += z.mT @ z
        self.count += z.shape[1] if layer == 0 else 0

    def moments(self) -> OutputMoments:
        mean = self.total / self.count
        square = mean[..., :, None] * mean[..., None, :]
        return OutputMoments(mean, self.outer / self.count - square)


class _ScoreSums:
    """Sums that moments of queries and keys are made of."""

    SITES = ("q", "k")

    def __init__(self, model: Any, arch: Architecture) -> None:
        self.turns = [adapters.rotary(model, arch, layer) for layer in range(arch.n_layers)]
        square = (arch.d_head, arch.d_head)
        self.queries = torch.zeros(arch.n_layers, arch.n_heads, *square, dtype=torch.float64)
        self.keys = torch.zeros(arch.n_layers, arch.n_kv_heads, *square, dtype=torch.float64)
        self.count = 0

    def add(self, layer: int, seen: Mapping[str, Tensor], mask: Bool[Tensor, "text pos"]) -> None:
        q, k = seen["q"], seen["k"]
        turn = self.turns[layer]
        if turn is not None:
            positions = torch.arange(mask.shape[1])[:, None]
            q, k = (turn.rotate(x, positions, mask.shape[1]) for x in (q, k))
        k = k - text_means(k, mask)
        q, k = (x[mask].transpose(0, 1) for x in (q, k))
        self.queries[layer] += q.mT @ q
        self.keys[layer] += k.mT @ k
        self.count += int(mask.sum()) if layer == 0 else 0

    def moments(self) -> ScoreMoments:
        return ScoreMoments(self.queries / self.count, self.keys / self.count)


def text_means(
    x: Float[Tensor, "text pos head d"], mask: Bool[Tensor, "text pos"]
) -> Float[Tensor, "text 1 head d"]:
    """Return the mean over each text's tokens."""
    weight = mask.to(x.dtype)
    total = torch.einsum("bp,bphd->bhd", weight, x)
    return (total / weight.sum(dim=1)[:, None, None])[:, None]
