"""A model's rotations, read from the module that computes them and held against its output."""

from collections.abc import Callable
from typing import Any

import torch

from wvprobe._rotary import Rotary
from wvprobe._shapes import check_there
from wvprobe.adapters.structure import Architecture
from wvprobe.errors import UnsupportedError

# Scalings whose frequencies change with the length of the input.
LENGTH_DEPENDENT = ("dynamic", "longrope")


def rotary(model: Any, arch: Architecture, layer: int) -> Rotary | None:
    """Read a layer's rotation from the module that computes it, and hold it against its output.

    The config is not asked for the base: its `rope_theta` may be a default that the model does
    not use.

    Raises:
        UnsupportedError: frequencies are not what turns, or depend on the input's length in a
            way of a layer's own.
    """
    if arch.position != "rotary":
        return None
    module = _module(model)
    kinds = getattr(model.original_model.config, "layer_types", None)
    layer_type = kinds[layer] if kinds else ""
    # Gemma-3 keeps a table for each type of layer, with a base of its own.
    prefix = f"{layer_type}_" if hasattr(module, f"{layer_type}_inv_freq") else ""
    names = _kinds(module)
    kind = names.get(layer_type, names.get("", "default"))
    if kind in LENGTH_DEPENDENT:
        if prefix:
            raise UnsupportedError(
                f"{model.cfg.model_name} scales the rotation of its {layer_type} layers by "
                f"{kind!r}, whose frequencies depend on the input's length, and of others by "
                "something else; wvprobe does not extract that. Open it with load(..., "
                "audit=False); capture(model, texts, 'scores') holds there."
            )
        return _length_dependent(model, module, kind, first_rotated(model, arch, layer))
    inv_freq = getattr(module, f"{prefix}inv_freq").detach().to(torch.float64)
    scaling = float(getattr(module, f"{prefix}attention_scaling", 1.0))
    start = first_rotated(model, arch, layer)
    found = Rotary(inv_freq, scaling, turns_neighbours(model), kind, start)
    _check(model, module, found, 24, (layer_type,) if prefix else ())
    return found


def turns_neighbours(model: Any) -> bool:
    """Whether a plane of the rotation is made of neighbouring dimensions (Cohere, DeepSeek)."""
    config = model.original_model.config
    if getattr(config, "model_type", "") == "deepseek_v2":  # which turns complex numbers
        return True
    flags = ("rotary_adjacent_pairs", "rotary_interleaved_cos_sin")
    return bool(getattr(config, "rope_interleave", False)) or any(
        bool(getattr(model.cfg, flag, False)) for flag in flags
    )


def first_rotated(model: Any, arch: Architecture, layer: int) -> int:
    """Return the first rotated dimension of a head; those from a latent stand before it."""
    if not arch.mla:
        return 0
    return int(model.blocks[layer].attn.original_component.qk_nope_head_dim)


def fresh_rotation(model: Any) -> None:
    """Set frequencies that grew with an earlier, longer input back to what they were.

    Under dynamic scaling transformers keeps the frequencies of the longest input so far for all
    inputs beyond the original length, so that a text's numbers would depend on what ran before.
    """
    module = _module(model)
    for layer_type, kind in _kinds(module).items():
        prefix = f"{layer_type}_" if layer_type else ""
        longest = getattr(module, f"{prefix}max_seq_len_cached", 0)
        if kind == "dynamic" and longest > module.original_max_seq_len:
            original = getattr(module, f"{prefix}original_inv_freq")
            now = getattr(module, f"{prefix}inv_freq")
            setattr(module, f"{prefix}inv_freq", original.to(now.device))
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def length_regime(model: Any, arch: Architecture) -> Callable[[int], int]:
    """Return what maps an input's length to a number that lengths share in one padded batch.

    A batch is turned by the frequencies of its longest text.
    """
    kinds = _kinds(_module(model))
    if not any(kind in LENGTH_DEPENDENT for kind in kinds.values()):
        return lambda _length: 0
    found = rotary(model, arch, 0) if len(kinds) == 1 else None
    return (lambda length: length) if found is None else found.regime


def _kinds(module: Any) -> dict[str, str]:
    """Return the scaling's name by type of layer, "" where one holds for all."""
    found = getattr(module, "rope_type", "default")
    return dict(found) if isinstance(found, dict) else {"": str(found)}


def _module(model: Any) -> Any:
    module = getattr(model.original_model.base_model, "rotary_emb", None)
    return getattr(module, "original_component", module)


def _length_dependent(model: Any, module: Any, kind: str, start: int) -> Rotary:
    """Read a dynamic or LongRoPE rotation, and check it below and beyond its original length."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = module.config.rope_parameters
    device = module.inv_freq.device
    dynamic = kind == "dynamic"
    if dynamic:
        original = int(module.original_max_seq_len)
    else:
        original = int(parameters["original_max_position_embeddings"])
    # The frequencies of this many tokens are, under dynamic scaling, those that it starts from.
    longer = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=original + (not dynamic))[0]
    found = Rotary(
        # Not inv_freq, which an earlier input may have changed.
        inv_freq=module.original_inv_freq.detach().to(device, torch.float64),
        scaling=float(module.attention_scaling),
        adjacent=turns_neighbours(model),
        kind=kind,
        start=start,
        original_length=original,
        long_inv_freq=longer.detach().to(torch.float64),
        growth=float(parameters["factor"]) if dynamic else None,
    )
    for seq_len in (original, original + 1, 2 * original + 1):
        fresh_rotation(model)
        _check(model, module, found, seq_len, ())
    fresh_rotation(model)
    return found


def _check(
    model: Any, module: Any, found: Rotary, seq_len: int, layer_type: tuple[str, ...]
) -> None:
    # The last position tells the module the length; far angles are not exact in its float32.
    check_there(f"the frequencies of {model.cfg.model_name}", found.inv_freq)
    at = torch.tensor([0, 1, 5, 23], device=found.inv_freq.device).clamp(max=seq_len - 1)
    positions = torch.cat((at, at.new_tensor([seq_len - 1])))[None]
    with torch.no_grad():
        like = torch.zeros(1, 5, 1, dtype=torch.float32, device=positions.device)
        tables = module(like, positions, *layer_type)
    # DeepSeek-V2 gives complex numbers.
    cos = (tables[0] if isinstance(tables, tuple) else tables.real)[:, :4]
    angles = at.to(torch.float64)[:, None] * found.frequencies(seq_len)
    expected = (found.scaling * angles.cos()).to(cos.dtype)
    interleaved = bool(getattr(model.cfg, "rotary_interleaved_cos_sin", False))
    planes = cos[0, :, 0::2] if interleaved else cos[0, :, : found.inv_freq.shape[0]]
    if planes.shape != expected.shape or (planes - expected).abs().max() > 1e-4:
        raise UnsupportedError(
            f"{type(module).__name__} of {model.cfg.model_name} does not turn by its own "
            "inv_freq; wvprobe does not model it."
        )
