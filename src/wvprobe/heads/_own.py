"""Tensors of anyone's own model, checked and completed to the fields of HeadWeights."""

from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor

from wvprobe._linalg import at_least_float32
from wvprobe._rotary import Rotary
from wvprobe._shapes import HEAD_AXES, check_shapes, floating
from wvprobe._types import Provenance
from wvprobe._validate import finite, instance, listed, message
from wvprobe.adapters import Unembedding
from wvprobe.errors import InputError, ShapeError

_PER_LAYER = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")


def own_fields(
    given: dict[str, Tensor | None],
    *,
    scale: float | int | Sequence[float | int] | None,
    rotary: Rotary | None,
    soft_cap: float | int | None,
    causal: bool,
    W_U: Tensor | None,
    tokenizer: Any,
    name: str,
) -> dict[str, Any]:
    """Return every field of HeadWeights; see :meth:`HeadWeights.from_tensors`."""
    tensors = {
        name: at_least_float32(_tensor(name, one).detach())
        for name, one in given.items()
        if one is not None or name in ("W_Q", "W_K", "W_V", "W_O")
    }
    sizes = check_shapes(tensors)
    for axis, size in sizes.items():
        if size < 1:
            raise ShapeError(f"the axis {axis} must be at least 1 long. Got {size} instead.")
    if sizes["head"] % sizes["kv_head"]:
        raise ShapeError(
            f"`W_Q` has {sizes['head']} heads and `W_K` {sizes['kv_head']}: the number of "
            "query heads must be a multiple of the number of key-value heads."
        )
    if soft_cap is not None:
        soft_cap = finite("soft_cap", soft_cap, above=0.0)
    if rotary is not None:
        instance("rotary", rotary, Rotary)
    layers = sizes["layer"]
    for bias in ("b_Q", "b_K", "b_V", "b_O"):
        if bias not in tensors:
            shape = [sizes[axis] for axis in HEAD_AXES[bias]]
            tensors[bias] = tensors["W_Q"].new_zeros(shape)
    none = (None,) * layers
    return {
        **{k: tensors[k] for k in _PER_LAYER},
        "scale": _scales(scale, layers, sizes["d_head"]),
        "rotary": (rotary,) * layers,
        "soft_cap": (soft_cap,) * layers,
        "sliding_window": none,
        "qk_norms": none,
        "norms": none,
        "post_norms": none,
        "slopes": None,
        "folded": False,
        "causal": causal,
        "W_E": tensors.get("W_E"),
        "W_pos": tensors.get("W_pos"),
        "embedding_norm": None,
        "effective_W_E": None,
        "latent": None,
        "unembedding": "no W_U was given to from_tensors"
        if W_U is None
        else _unembedding(W_U, sizes["d_model"]),
        "tokenizer": tokenizer,
        "provenance": Provenance.of(name, ""),
    }


def _tensor(name: str, given: object) -> Tensor:
    if not isinstance(given, Tensor):
        expected = f"a tensor [{', '.join(HEAD_AXES[name])}]"
        hint = "torch.from_numpy makes one of an array."
        raise InputError(message(name, expected, type(given).__name__, hint))
    if not given.is_floating_point():
        raise InputError(message(name, "of floating numbers", str(given.dtype)))
    return given


def _scales(
    scale: float | int | Sequence[float | int] | None, layers: int, d_head: int
) -> tuple[float, ...]:
    if scale is None:
        return (d_head**-0.5,) * layers
    if isinstance(scale, Real):
        return (_scale(scale),) * layers
    scales = tuple(_scale(one) for one in listed("scale", scale, "one number, or one a layer"))
    if len(scales) != layers:
        raise ShapeError(message("scale", f"one number, or {layers} (a layer)", scales))
    return scales


def _scale(given: object) -> float:
    value = finite("scale", given)
    if value == 0:
        raise InputError(message("scale", "other than 0", given))
    return value


def _unembedding(given: Tensor, d_model: int) -> Unembedding:
    weight = floating("W_U", given, ("d_model", "d_vocab"))
    if len(weight) != d_model:
        expected = f"[d_model, d_vocab] with d_model = {d_model} as in `W_Q`"
        raise ShapeError(message("W_U", expected, f"shape {list(weight.shape)}"))
    return Unembedding(at_least_float32(weight.detach()).T, None, None)
