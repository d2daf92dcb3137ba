"""Axes of a model's attention weights, and the check that a set of tensors agrees on them."""

from collections.abc import Mapping, Sequence

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


# How a message names a place along an axis; the other axes are left out.
_PLACES = {
    "layer": "layer",
    "head": "head",
    "kv_head": "key-value head",
    "d_vocab": "token",
    "pos": "position",
}


def check_finite(
    name: str, tensor: Tensor, axes: Sequence[str], layers: Sequence[int] | None = None
) -> None:
    """Raise InputError, saying where, if a tensor holds NaN or infinity.

    Args:
        name: the tensor's name.
        tensor: the tensor.
        axes: the names of its axes.
        layers: the numbers of the layers on its layer axis; None for 0, 1, …
    """
    check_there(name, tensor)
    wrong = ~torch.isfinite(tensor)
    if not bool(wrong.any()):
        return
    first = [int(i) for i in wrong.nonzero()[0]]
    places = dict(zip(axes, first, strict=True))
    if layers is not None and "layer" in places:
        places["layer"] = layers[places["layer"]]
    where = ", ".join(f"{_PLACES[axis]} {at}" for axis, at in places.items() if axis in _PLACES)
    hint = f"The first is in {where}. Look at the checkpoint."
    raise InputError(message(name, "finite", "NaN or infinity", hint))


def floating(
    name: str, value: object, axes: Sequence[str], *, batch: bool = False, hint: str = ""
) -> Tensor:
    """Return a tensor of finite floating numbers that has these axes, none of them empty.

    Args:
        name: what messages call it.
        value: what was given.
        axes: the names of its axes.
        batch: whether others may go before them.
        hint: what to do instead.

    Raises:
        InputError: it is no such tensor, holds NaN or infinity, or has no numbers (``meta``).
        ShapeError: it has other axes, or an empty one.
    """
    expected = f"[{'…, ' * batch}{', '.join(axes)}]"
    if not isinstance(value, Tensor):
        hint = hint or "torch.from_numpy makes one of an array."
        raise InputError(message(name, f"a tensor {expected}", type(value).__name__, hint))
    if not value.is_floating_point():
        raise InputError(message(name, "of floating numbers", str(value.dtype), hint))
    fits = value.dim() >= len(axes) if batch else value.dim() == len(axes)
    if not fits or 0 in value.shape:
        raise ShapeError(message(name, expected, f"shape {list(value.shape)}", hint))
    check_there(name, value)
    if not bool(torch.isfinite(value).all()):
        raise InputError(message(name, "finite", "NaN or infinity", hint))
    return value


def check_there(name: str, tensor: Tensor) -> None:
    """Raise InputError where a tensor has a shape and no numbers."""
    if tensor.is_meta:
        hint = "Load the weights, or make it on another device."
        raise InputError(message(name, "a tensor with numbers", "one on device 'meta'", hint))


def check_shapes(
    tensors: Mapping[str, Tensor], layers: Sequence[int] | None = None
) -> dict[str, int]:
    """Return the size of every axis, or raise ShapeError naming the tensor that disagrees.

    Args:
        tensors: tensors by their names in HEAD_AXES.
        layers: the numbers of the layers on the layer axes; None for 0, 1, …
    """
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, tensor in tensors.items():
        axes = HEAD_AXES[name]
        if tensor.dim() != len(axes):
            hint = f"Add the layer axis: {name}[None]." if tensor.dim() == len(axes) - 1 else ""
            raise ShapeError(
                message(name, f"[{', '.join(axes)}]", f"shape {list(tensor.shape)}", hint)
            )
        check_finite(name, tensor, axes, layers)
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
