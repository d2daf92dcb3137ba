"""A model's modules without its weights, filled a layer at a time from a checkpoint's shards.

Everything that the other adapters read from a model they read from its modules. Here the modules
stand on torch's meta device, where a tensor has a shape and no memory; one layer's attention is
given its weights, read, and emptied again. So whatever holds for a model in memory holds for one
that would not fit, and no family has a second description.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from wvprobe._shards import Shards
from wvprobe.adapters.boot import boot
from wvprobe.adapters.structure import architecture, has
from wvprobe.errors import ModelFileError

_ATTENTION = ("ln1", "ln1_post", "attn")
# Parts that stand outside the blocks and that weights of heads are read with.
_OUTSIDE = ("embed", "pos_embed", "embed_ln", "token_type_embed", "ln_final", "unembed")
# Modules that hold queries, keys and values together; booting splits them.
_FUSED = re.compile(r"\.(c_attn|query_key_value)$")


class _Slot(NamedTuple):
    """A parameter's place in a module, and the names it goes by (several where it is tied)."""

    module: nn.Module
    attribute: str
    names: tuple[str, ...]


class Skeleton:
    """A TransformerBridge without weights, and the shards that its weights are in.

    Attributes:
        bridge: the bridge; outside of :meth:`layer` and :meth:`outside` its weights are void.
        arch: its architecture.
    """

    def __init__(self, hf_model: Any, tokenizer: Any, shards: Shards, *, name: str) -> None:
        """Wrap a transformers model that stands on the meta device.

        Raises:
            UnsupportedError: the architecture is none that wvprobe models exactly.
        """
        self.shards = shards
        self._slots = _slots(hf_model)
        _give_what_booting_reads(hf_model)
        head = hf_model.get_output_embeddings()
        headless = head is not None and self._stored(self._slots[id(head)][0]) is None
        missing = "the checkpoint lacks a head" if headless else ""
        self.bridge: Any = boot(hf_model, tokenizer, name=name, missing=missing)
        self.bridge.cfg.device = "cpu"  # where what is computed from the weights belongs
        self.arch = architecture(self.bridge)
        _give_zero_bias(self.bridge)
        for layer in range(self.arch.n_layers):
            self._empty(self._block(layer))

    @contextlib.contextmanager
    def layer(self, layer: int, *, norms_alone: bool = False) -> Iterator[Any]:
        """Give one layer's attention (or no more than its norms) its weights for a while.

        Raises:
            ModelFileError: the checkpoint lacks one of them.
        """
        modules = self._block(layer)
        try:
            self._fill(modules, vectors_alone=norms_alone)
            if not norms_alone:
                self._split(layer)
            yield self.bridge
        finally:
            self._empty(modules)

    @contextlib.contextmanager
    def outside(self) -> Iterator[Any]:
        """Give what stands outside the blocks its weights for a while."""
        modules = _parts(self.bridge, _OUTSIDE)
        try:
            self._fill(modules)
            yield self.bridge
        finally:
            self._empty(modules)

    def _block(self, layer: int) -> list[nn.Module]:
        return _parts(self.bridge.blocks[layer], _ATTENTION)

    def _split(self, layer: int) -> None:
        """Split a fused projection anew: a bridge does so once, in booting."""
        attention = self.bridge.blocks[layer].attn
        if not hasattr(attention, "split_qkv_matrix"):
            return
        split = attention.split_qkv_matrix(attention.original_component)
        for letter, linear in zip("qkv", split, strict=True):
            getattr(attention, letter).set_original_component(linear)

    def _stored(self, slot: _Slot) -> str | None:
        """Return the name under which the checkpoint holds a parameter, or None."""
        found = (self.shards.find(name) for name in slot.names)
        return next((name for name in found if name is not None), None)

    def _fill(self, modules: Sequence[nn.Module], *, vectors_alone: bool = False) -> None:
        slots = [slot for module in modules for slot in self._slots.get(id(module), ())]
        if vectors_alone:
            slots = [s for s in slots if getattr(s.module, s.attribute).dim() == 1]
        stored = {slot: self._stored(slot) for slot in slots}
        # What stands outside the body is the head, and a checkpoint may have none.
        body = f"{self.shards.prefix}."
        lacking = [
            s.names[0] for s, n in stored.items() if n is None and s.names[0].startswith(body)
        ]
        if lacking:
            raise ModelFileError(
                f"{self.shards.folder} lacks {', '.join(lacking[:3])}. Get the checkpoint again; "
                "or its config does not belong to it."
            )
        tensors = self.shards.read([name for name in stored.values() if name is not None])
        for slot, name in stored.items():
            if name is None:
                continue
            shape = getattr(slot.module, slot.attribute).shape
            if tensors[name].shape != shape:
                raise ModelFileError(
                    f"{name} in {self.shards.folder} must have shape {list(shape)}. Got "
                    f"{list(tensors[name].shape)} instead. Its config does not belong to it."
                )
            setattr(slot.module, slot.attribute, nn.Parameter(tensors[name], requires_grad=False))

    @staticmethod
    def _empty(modules: Sequence[nn.Module]) -> None:
        for module in modules:
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    void = torch.empty_like(parameter, device="meta")
                    module._parameters[attribute] = nn.Parameter(void, requires_grad=False)


def _parts(owner: Any, names: Sequence[str]) -> list[nn.Module]:
    """Return all modules within an owner's components of these names."""
    present = [owner._modules[name] for name in names if has(owner, name)]
    return [module for part in present for module in part.modules()]


def _slots(hf_model: Any) -> dict[int, list[_Slot]]:
    names: dict[int, list[str]] = {}
    for name, parameter in hf_model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: dict[int, list[_Slot]] = {}
    for key, module in hf_model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                own = f"{key}.{attribute}"
                others = [name for name in names[id(parameter)] if name != own]
                slot = _Slot(module, attribute, (own, *others))
                found.setdefault(id(module), []).append(slot)
    return found


def _give_what_booting_reads(hf_model: Any) -> None:
    """Give the rotation its frequencies, and fused projections zeros that take no memory."""
    body = hf_model.base_model
    if hasattr(body, "rotary_emb"):
        body.rotary_emb = type(body.rotary_emb)(hf_model.config)
    for key, module in hf_model.named_modules():
        if _FUSED.search(key):
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
                    module._parameters[attribute] = nn.Parameter(zeros, requires_grad=False)


def _give_zero_bias(bridge: Any) -> None:
    """Give zeros to the bias that booting adds, as a buffer, to a head without one."""
    if has(bridge, "unembed"):
        buffers = bridge.unembed.original_component._buffers
        if buffers.get("bias") is not None:
            buffers["bias"] = torch.zeros(buffers["bias"].shape)
