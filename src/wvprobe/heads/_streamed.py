"""Weights of heads that stay on disk: a layer is read, upcast and folded when it is asked for."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wvprobe import adapters
from wvprobe._reading import read_skeleton
from wvprobe._shards import Shards
from wvprobe._types import Provenance
from wvprobe.adapters import PER_LAYER, Skeleton
from wvprobe.heads._stacks import LayerStack, PerLayer

# Layers kept in memory: a writer's and a reader's.
_KEPT = 2


class _Reader:
    """Reads layers of a checkpoint as HeadWeights of one layer."""

    def __init__(self, skeleton: Skeleton, build: Callable[..., Any], fold_norm: bool) -> None:
        self.skeleton, self.build, self.fold_norm = skeleton, build, fold_norm
        self.kept: OrderedDict[int, Any] = OrderedDict()

    def layer(self, layer: int) -> Any:
        """Return HeadWeights of one layer, from memory where it was read not long ago."""
        if layer not in self.kept:
            while len(self.kept) >= _KEPT:
                self.kept.popitem(last=False)
            self.kept[layer] = self._one(layer)
        self.kept.move_to_end(layer)
        return self.kept[layer]

    def _one(self, layer: int) -> Any:
        arch = self.skeleton.arch
        with self.skeleton.layer(layer) as bridge:
            parts = adapters.layer_weight_parts(bridge, arch, [layer])
            facts = adapters.layer_fact_parts(bridge, arch, [layer])
        nowhere = dict.fromkeys(("slopes", "W_E", "W_pos", "embedding_norm", "effective_W_E"))
        found = self.build(
            **{**parts, **facts, **nowhere},
            folded=False,
            causal=arch.causal,
            unembedding="",
            tokenizer=None,
            provenance=Provenance.of("", ""),
        )
        return found.fold() if self.fold_norm else found


def streamed_fields(
    folder: str | Path, build: Callable[..., Any], *, fold_norm: bool
) -> dict[str, Any]:
    """Return every field of HeadWeights; see :meth:`HeadWeights.from_safetensors`.

    Args:
        folder: the checkpoint.
        build: makes HeadWeights of one layer's fields.
        fold_norm: fold the norm before attention into each layer.
    """
    read = read_skeleton(folder)
    shards = Shards(folder, read.model.base_model_prefix)
    skeleton = Skeleton(read.model, read.boot_tokenizer, shards, name=Path(folder).name)
    arch, layers = skeleton.arch, range(skeleton.arch.n_layers)
    reader = _Reader(skeleton, build, fold_norm)
    with skeleton.outside() as bridge:
        fields = adapters.outside_parts(bridge, arch, upcast=False)
    fields |= _facts(skeleton)
    first = reader.layer(0)
    stacks: dict[str, Any] = {
        name: LayerStack(
            lambda layer, name=name: getattr(reader.layer(layer), name)[0],
            (len(layers), *getattr(first, name).shape[1:]),
            getattr(first, name).dtype,
        )
        for name in PER_LAYER
    }
    latent = None
    if first.latent is not None:
        latent = PerLayer(lambda layer: reader.layer(layer).latent[0], len(layers))
    settings: dict[str, Any] = {
        "folder": Path(folder).name,
        "weights": "read layer by layer, not hashed",
    }
    return {
        **fields,
        **stacks,
        "latent": latent,
        "folded": first.folded,
        "tokenizer": read.tokenizer,
        "provenance": Provenance.of(Path(folder).name, "", **settings),
    }


def _facts(skeleton: Skeleton) -> dict[str, Any]:
    """Return what holds a number, a norm or a rotation a layer, without reading any matrix."""
    found: dict[str, list[Any]] = {}
    for layer in range(skeleton.arch.n_layers):
        with skeleton.layer(layer, norms_alone=True) as bridge:
            facts = adapters.layer_fact_parts(bridge, skeleton.arch, [layer])
        for name, value in facts.items():
            found.setdefault(name, []).extend(value)
    return {name: tuple(values) for name, values in found.items()}
