"""Axes of a model's attention weights, and the check that a set of tensors agrees on them."""

import torch
from torch import Tensor

from wvprobe._validate import message
from wvprobe.errors import InputError, ShapeError

HEAD_AXES = {
    "W_Q": ("layer", "head", "d_model", "d_head"),
    "W_K": ("layer", "kv_head", "d_model", "d_head"),
    "W_V": ("layer", "kv_head", "d_model", "d_head_v"),
    "W_O": ("layer", "head", "d_head_v", "d_model"),
    "b_Q": ("layer", "head", "d_head"),
    "b_K": ("layer", "kv_head", "d_head"),
    "b_V": ("layer", "kv_head", "d_head_v"),
    "b_O": ("layer", "d_model"),
    "W_E": ("d_vocab", "d_model"),
    "W_pos": ("pos", "d_model"),
}


def check_shapes(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return the size of every axis, or raise ShapeError naming the tensor that disagrees."""
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, tensor in tensors.items():
        axes = HEAD_AXES[name]
        if tensor.dim() != len(axes):
            hint = f"Add the layer axis: {name}[None]." if tensor.dim() == len(axes) - 1 else ""
            raise ShapeError(
                message(name, f"[{', '.join(axes)}]", f"shape {list(tensor.shape)}", hint)
            )
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(message(name, "finite", "NaN or infinity", "Look at the checkpoint."))
        for axis, size in zip(axes, tensor.shape, strict=True):
            known = sizes.setdefault(axis, size)
            if known != size:
                raise ShapeError(
                    message(
                        name,
                        f"[{', '.join(axes)}] with {axis} = {known} as in `{owner[axis]}`",
                        f"shape {list(tensor.shape)}",
                    )
                )
            owner.setdefault(axis, name)
    return sizes
