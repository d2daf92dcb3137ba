"""A block's attention called again inside its own call, with another stream as its input.

What is called is the model's own module, with the arguments that it was called with, so that masks,
windows, rotations, norms of queries and keys, soft caps and ALiBi are those of the model. A call
inside ends where z has been read; what replaces z then goes on through W_O, b_O and whatever else
the module and its block do with it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wvprobe._linalg import at_least_float32
from wvprobe.adapters.hooks import Raw, deeper, depth, hook_point, reading, shaped
from wvprobe.adapters.structure import Architecture
from wvprobe.adapters.weights import Norm, output_bias, output_weight, post_attention_norm
from wvprobe.errors import UnsupportedError


@dataclass(frozen=True)
class AttentionCall:
    """A call of one block's attention that is under way.

    Attributes:
        model: the bridge.
        arch: its architecture.
        layer: the block.
        norm: the norm on what attention puts out (Gemma-2), or None.
        x: [batch, pos, d_model] the block's input.
        z: [batch, pos, head, d_head_v] what the heads hold as they run, side by side.
        mask: [batch, pos] 1 for tokens, 0 for padding, or None where the model was given none.
        arguments: what attention was called with, by place and by name.
    """

    model: Any
    arch: Architecture
    layer: int
    norm: Norm | None
    x: Tensor
    z: Tensor
    mask: Tensor | None
    arguments: tuple[tuple[Any, ...], dict[str, Any]]

    @cached_property
    def weight(self) -> Tensor:
        """W_O, [head, d_head_v, d_model], in single precision at least."""
        return at_least_float32(output_weight(self.model, self.arch, self.layer))

    def scale(self, z: Tensor) -> Tensor | None:
        """Return the scale, [batch, pos, 1], that a norm on the output has for z of all heads.

        None where there is no such norm.
        """
        if self.norm is None:
            return None
        out = at_least_float32(z).flatten(2) @ self.weight.flatten(0, 1)
        bias = output_bias(self.model, self.layer)
        return self.norm.scale(out if bias is None else out + bias.to(out))

    def share(self, z: Tensor, heads: Sequence[int], scale: Tensor | None) -> Tensor:
        """Return what some heads add to the stream, [batch, pos, d_model], b_O left out.

        Args:
            z: of all heads.
            heads: whose share.
            scale: that of a norm on the output, with which it is linear.
        """
        own = list(heads)
        out = at_least_float32(z[:, :, own]).flatten(2) @ self.weight[own].flatten(0, 1)
        return out if self.norm is None or scale is None else self.norm.linear(out, scale)

    def bias_share(self, scale: Tensor) -> Tensor:
        """Return what b_O and a norm's own bias add behind that norm, [batch, pos, d_model]."""
        if self.norm is None:
            raise RuntimeError("no norm stands behind the output of this block's attention")
        found = torch.zeros_like(self.x, dtype=scale.dtype)
        bias = output_bias(self.model, self.layer)
        if bias is not None:
            found = found + self.norm.linear(bias.to(scale), scale)
        return found if self.norm.bias is None else found + self.norm.bias.to(found)

    def read(self, stream: Tensor, wanted: Sequence[Raw]) -> dict[Raw, Tensor]:
        """Run attention on another stream and return what passes at some of its sites.

        Args:
            stream: [batch, pos, d_model], in the place of the block's input.
            wanted: raw sites of this layer's attention, none behind z.
        """
        block, found = self.model.blocks[self.layer], {}

        def receive(site: str, layer: int, value: Tensor) -> None:
            found[site, layer] = shaped(self.arch, site, value, *self.x.shape[:2])

        args, named = self.arguments
        # The bridge's own norm and module, so that hooks on them act here as in the call itself.
        with deeper(), reading(self.model, self.arch, list(wanted), receive):
            stream = stream.to(self.x.dtype)
            x_hat = stream if self.arch.wiring == "post_norm" else block.ln1(stream)
            if "hidden_states" in named:
                block.attn(*args, **{**named, "hidden_states": x_hat})
            else:
                block.attn(x_hat, *args[1:], **named)
        return found

    def z_of(self, stream: Tensor) -> Tensor:
        """Return z of all heads, [batch, pos, head, d_head_v], were this the block's input."""
        at = ("z", self.layer)
        return self.read(stream, [at])[at]


class Rewritten(NamedTuple):
    """What comes in the place of a block's own.

    Attributes:
        z: [batch, pos, head, d_head_v].
        added: [batch, pos, d_model] what a norm on attention's output (Gemma-2) is to give; None
            leaves it to that norm, whose scale is then that of `z`.
    """

    z: Tensor
    added: Tensor | None = None


Rewrite = Callable[[AttentionCall], Rewritten | None]


@contextmanager
def rewriting(model: Any, arch: Architecture, rewrites: Mapping[int, Rewrite]) -> Iterator[None]:
    """Put another z in the place of some blocks' own, computed while their attention runs.

    Whatever else reads or changes the forward keeps its place: :func:`reading` from outside sees a
    block's own call, whose q, k, v and pattern are of the block's input, and the new z. Hooks that
    change something act in every call; one on z itself does so if it was there before.

    Args:
        model: the bridge.
        arch: its architecture.
        rewrites: layer -> what maps its call to what comes in its place, or to None, which
            changes nothing.

    Raises:
        UnsupportedError: keys and values come from a cache, which calls again would fill twice.
    """
    handles: list[Any] = []
    try:
        masks = _noted_masks(model, handles)
        for layer, rewrite in rewrites.items():
            _hook_block(model, arch, layer, rewrite, masks, handles)
        yield
    finally:
        for handle in handles:
            handle.remove()


def _noted_masks(model: Any, handles: list[Any]) -> list[Tensor | None]:
    """Return a list that holds the mask of the forward under way."""
    body = model.original_model.base_model
    masks: list[Tensor | None] = [None]

    def note(_module: Any, args: Any, named: Any) -> None:
        given = signature(body.forward).bind_partial(*args, **named).arguments
        masks[:] = [given.get("attention_mask")]

    handles.append(body.register_forward_pre_hook(note, with_kwargs=True))
    return masks


def _hook_block(
    model: Any,
    arch: Architecture,
    layer: int,
    rewrite: Rewrite,
    masks: list[Tensor | None],
    handles: list[Any],
) -> None:
    """Hook what a call consists of, in the order in which it passes."""
    level, seen = depth(), dict[str, Any]()
    norm = post_attention_norm(model, arch, layer)
    block = model.blocks[layer]

    def note_x(_module: Any, inputs: Any) -> None:
        if depth() == level:
            seen["x"] = inputs[0]

    def note_arguments(_module: Any, args: Any, named: Any) -> None:
        if depth() == level:
            _refuse_cache(model, (*args, *named.values()))
            seen["arguments"] = args, dict(named)
            if arch.wiring == "post_norm":
                seen["x"] = named["hidden_states"] if "hidden_states" in named else args[0]

    def change_z(_module: Any, _inputs: Any, value: Tensor) -> Tensor | None:
        if depth() != level:
            return None
        x = seen["x"]
        z = shaped(arch, "z", value, *x.shape[:2])
        call = AttentionCall(model, arch, layer, norm, x, z, masks[0], seen["arguments"])
        new = rewrite(call)
        seen["added"] = None if new is None else new.added
        return None if new is None else new.z.to(value.dtype).reshape(value.shape)

    def put_added(_module: Any, _inputs: Any, value: Tensor) -> Tensor | None:
        added = seen["added"]
        return None if added is None else added.to(value.dtype).reshape(value.shape)

    if arch.wiring != "post_norm":
        # What the norm is given, not what the block is: a hook may have changed it in between.
        handles.append(block.ln1.register_forward_pre_hook(note_x))
    handles.append(block.attn.register_forward_pre_hook(note_arguments, with_kwargs=True))
    point = hook_point(model, arch, "z", layer)
    handles.append(point.register_forward_hook(change_z))
    if norm is not None:
        point = hook_point(model, arch, "attn_added", layer)
        handles.append(point.register_forward_hook(put_added))


def _refuse_cache(model: Any, arguments: tuple[Any, ...]) -> None:
    from transformers import Cache

    if any(isinstance(value, Cache) for value in arguments):
        raise UnsupportedError(
            f"{model.cfg.model_name} runs with a cache of keys and values, which attention called "
            "again would fill twice. Run it with use_cache=False."
        )
