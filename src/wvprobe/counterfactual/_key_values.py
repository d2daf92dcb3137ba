"""What keys and values of every layer are like, and what is read of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._writes import output_map
from wvprobe.adapters import Architecture
from wvprobe.counterfactual._shared_maps import LayerMoments, rotation_average
from wvprobe.counterfactual._streams import each_layer


def key_value_moments(
    model: Any,
    arch: Architecture,
    texts: Sequence[str],
    planes: Int[Tensor, "plane 2"] | None,
    heads: Float[Tensor, "layer head d d"] | None = None,
    progress: bool = False,
) -> list[LayerMoments]:
    """Measure every layer's keys before rotation, values and queries, float64.

    Tokens weigh by the attention that they get, mean over the layer's query heads: a head that
    looks at one token most of the time has that token's values in all it puts out. Of a layer
    (Σ d_head + Σ d_head_v of its key-value heads)² numbers are held.

    Args:
        model: a TransformerBridge.
        arch: its architecture.
        texts: calibration texts.
        planes: the dimensions of each plane that rotation turns, or None.
        heads: [layer, head, d_head_v, d_head_v] maps that act on z before W_O, or None.
        progress: whether to show a bar.
    """
    group = arch.n_heads // arch.n_kv_heads
    both = arch.n_kv_heads * (arch.d_head + arch.d_head_v)
    total = torch.zeros(arch.n_layers, both, dtype=torch.float64)
    outer = torch.zeros(arch.n_layers, both, both, dtype=torch.float64)
    square = (arch.d_head, arch.d_head)
    queries = torch.zeros(arch.n_layers, arch.n_kv_heads, *square, dtype=torch.float64)
    weight, count = torch.zeros(arch.n_layers, dtype=torch.float64), 0

    def add(layer: int, seen: Mapping[str, Tensor], mask: Bool[Tensor, "text pos"]) -> None:
        nonlocal count
        # Padding attends too, and must not be counted.
        looks = torch.einsum("bhij,bi->bj", seen["pattern"], mask.double())[mask] / arch.n_heads
        x = torch.cat([seen[site][mask].flatten(1) for site in ("k", "v")], dim=1)
        total[layer] += looks @ x
        outer[layer] += (x * looks[:, None]).mT @ x
        weight[layer] += looks.sum()
        q = seen["q"][mask].unflatten(1, (arch.n_kv_heads, group))
        queries[layer] += torch.einsum("nkgd,nkge->kde", q, q)
        count += len(x) if layer == 0 else 0

    each_layer(model, arch, texts, ["pattern", "q", "k", "v"], add, progress=progress)
    found = []
    for layer in range(arch.n_layers):
        mean = total[layer] / weight[layer]
        written = output_map(model, arch, layer)
        if heads is not None:
            written = heads[layer] @ written
        outputs = (written @ written.mT).unflatten(0, (arch.n_kv_heads, group)).sum(dim=1)
        covariance = outer[layer] / weight[layer] - mean[:, None] * mean
        scale = _score_factors(model, arch, layer, planes)
        read = scale[:, None] * queries[layer] * scale / count
        found.append(LayerMoments(mean, covariance, rotation_average(read, planes), outputs))
    return found


def _score_factors(
    model: Any, arch: Architecture, layer: int, planes: Int[Tensor, "plane 2"] | None
) -> Float[Tensor, " d_head"]:
    """Return what each dimension of a query counts in a score: the scale, and YaRN's factor."""
    factors = torch.full((arch.d_head,), adapters.score_scale(model, layer), dtype=torch.float64)
    turn = adapters.rotary(model, arch, layer)
    if turn is not None and planes is not None:
        factors[planes.flatten()] *= turn.scaling**2  # of the query and of the key
    return factors
