"""Which blocks are rewritten together, and runs of texts under such rewrites."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from wvprobe import adapters
from wvprobe._effects import Effects, Setting, measure_effects
from wvprobe._validate import indices, message
from wvprobe.adapters import Architecture, Rewrite
from wvprobe.counterfactual._changes import ROUNDING
from wvprobe.errors import InputError

Layers = str | int | Sequence[int | Sequence[int]]


def block_sets(arch: Architecture, layers: Layers) -> dict[str, tuple[int, ...]]:
    """Return sets of blocks, named: ``block 3``, ``blocks 0, 2``, ``all blocks``.

    Args:
        arch: the architecture.
        layers: ``each`` for every block alone and all together, ``all`` for all together, ints
            for one set, or sequences of ints for a set each.

    Raises:
        InputError: none of these, or no such block.
    """
    every = range(arch.n_layers)
    if isinstance(layers, str):
        if layers not in ("each", "all"):
            expected = "'each', 'all', or the layers of the set"
            raise InputError(message("layers", expected, layers))
        alone = [(layer,) for layer in every] if layers == "each" else []
        sets: list[Any] = [*alone, every]
    elif isinstance(layers, Iterable) and any(isinstance(one, Iterable) for one in layers):
        sets = list(layers)
    else:
        sets = [layers]
    checked = [tuple(sorted(indices("layers", one, arch.n_layers, "layers"))) for one in sets]
    return {_name(blocks, arch.n_layers): blocks for blocks in checked}


def _name(blocks: tuple[int, ...], n_layers: int) -> str:
    if len(blocks) == 1:
        return f"block {blocks[0]}"
    return "all blocks" if len(blocks) == n_layers else f"blocks {', '.join(map(str, blocks))}"


def measure_rewrites(
    model: Any,
    arch: Architecture,
    texts: Sequence[str],
    rewrites: Mapping[str, Mapping[int, Rewrite]],
    *,
    prepend_bos: bool | None,
    progress: bool,
) -> Effects:
    """Measure what rewrites do, and last what rounding to bf16 does.

    Args:
        model: a TransformerBridge.
        arch: its architecture.
        texts: the texts.
        rewrites: setting -> layer -> its rewrite.
        prepend_bos: as in the bridge's ``to_tokens``.
        progress: whether to show a bar.
    """
    settings: dict[str, Setting] = {
        name: _opens(model, arch, chosen) for name, chosen in rewrites.items()
    }
    settings[ROUNDING] = lambda: adapters.rounded(model, arch, torch.bfloat16)
    return measure_effects(model, texts, settings, prepend_bos=prepend_bos, progress=progress)


def _opens(model: Any, arch: Architecture, chosen: Mapping[int, Rewrite]) -> Setting:
    return lambda: adapters.rewriting(model, arch, chosen)


def told(texts: str | Sequence[str] | None) -> str | list[str]:
    """Return texts as a provenance keeps them."""
    if texts is None:
        return "the bundled held-out prose"
    return [texts] if isinstance(texts, str) else list(texts)
