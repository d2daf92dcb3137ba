"""All that HeadWeights holds of a model, read layer by layer."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wvprobe._linalg import at_least_float32
from wvprobe._shapes import HEAD_AXES, check_finite, check_shapes
from wvprobe.adapters import rotation
from wvprobe.adapters import weights as read
from wvprobe.adapters.latent import Latent, latent_weights
from wvprobe.adapters.structure import Architecture, embedding_table

PER_LAYER = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")


def head_parts(
    model: Any, arch: Architecture, layers: Sequence[int], *, tables: bool = True
) -> dict[str, Any]:
    """Return the fields of an unfolded HeadWeights of some layers, but its provenance.

    Without `tables` the embedding is left out, which Gemma's scale and BLOOM's norm copy.

    Raises:
        UnsupportedError: a part of the model is not modelled exactly.
        InputError: a weight holds NaN or infinity; the message says which, and where.
    """
    return {
        **layer_weight_parts(model, arch, layers),
        **layer_fact_parts(model, arch, layers),
        **outside_parts(model, arch, tables=tables),
    }


def layer_weight_parts(model: Any, arch: Architecture, layers: Sequence[int]) -> dict[str, Any]:
    """Return the fields that are weights of layers, stacked, and the latents behind them."""
    found, latent = _in_one_place(model, _layers(model, arch, layers))
    stacked = {name: _stack(found, name, arch) for name in PER_LAYER}
    check_shapes(stacked, layers)
    return {**stacked, "latent": latent}


def layer_fact_parts(model: Any, arch: Architecture, layers: Sequence[int]) -> dict[str, Any]:
    """Return the fields that hold a number, a norm or a rotation for each layer."""
    facts = {
        "scale": tuple(read.score_scale(model, layer) for layer in layers),
        "rotary": tuple(rotation.rotary(model, arch, layer) for layer in layers),
        "soft_cap": tuple(read.soft_cap(model, layer) for layer in layers),
        "sliding_window": tuple(read.sliding_window(model, layer) for layer in layers),
        "qk_norms": tuple(read.qk_norms(model, arch, layer) for layer in layers),
        "norms": tuple(read.attention_norm(model, arch, layer) for layer in layers),
        "post_norms": tuple(read.post_attention_norm(model, arch, layer) for layer in layers),
    }
    return {name: _in_one_place(model, each) for name, each in facts.items()}


def _in_one_place(model: Any, value: Any) -> Any:
    """Return what was read of layers on the embedding's device.

    A checkpoint that is read layer by layer has its embedding on none.
    """
    device = embedding_table(model).device
    return value if device.type == "meta" else together(value, device)


def together(value: Any, device: torch.device) -> Any:
    """Return tuples, lists and dataclasses with all their tensors on one device.

    Layers of a model that is spread over several devices have theirs each.
    """
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(together(part, device) for part in value))
    if isinstance(value, tuple | list):
        return type(value)(together(part, device) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        moved = {name: together(part, device) for name, part in parts.items()}
        same = all(moved[name] is part for name, part in parts.items())
        return value if same else dataclasses.replace(value, **moved)
    return value


def outside_parts(
    model: Any, arch: Architecture, *, tables: bool = True, upcast: bool = True
) -> dict[str, Any]:
    """Return the fields that belong to no layer: embedding, positions, unembedding, masks.

    Without `upcast` an embedding that enters the stream as it is stored keeps its dtype.
    """
    positions = read.position_table(model, arch)
    embeddings = {
        "W_E": _embedding(model, arch, upcast) if tables else None,
        "W_pos": None if positions is None else at_least_float32(positions),
    }
    check_shapes({name: table for name, table in embeddings.items() if table is not None})
    head = _in_one_place(model, read.unembedding(model, arch))
    if tables and isinstance(head, read.Unembedding):
        check_finite("W_U", head.weight, ("d_vocab", "d_model"))
    return {
        **embeddings,
        "slopes": read.alibi_slopes(model, arch),
        "folded": False,
        "causal": arch.causal,
        "embedding_norm": _norm_of_sum(model, arch),
        "effective_W_E": None,
        "unembedding": head,
        "tokenizer": model.tokenizer,
    }


def _layers(
    model: Any, arch: Architecture, layers: Sequence[int]
) -> tuple[list[read.LayerWeights], tuple[Latent, ...] | None]:
    if not arch.mla:
        return [read.layer_weights(model, layer) for layer in layers], None
    both = [latent_weights(model, arch, layer) for layer in layers]
    return [weights for weights, _ in both], tuple(latent for _, latent in both)


def _stack(found: list[read.LayerWeights], name: str, arch: Architecture) -> Tensor:
    given = [getattr(weights, name) for weights in found]
    if given[0] is not None:
        return at_least_float32(torch.stack(given))
    sizes = {
        "layer": len(found),
        "head": arch.n_heads,
        "kv_head": arch.n_kv_heads,
        "d_head": arch.d_head,
        "d_head_v": arch.d_head_v,
        "d_model": arch.d_model,
    }
    like = at_least_float32(found[0].W_Q[:0])
    return like.new_zeros([sizes[axis] for axis in HEAD_AXES[name]])


def _norm_of_sum(model: Any, arch: Architecture) -> read.Norm | None:
    """Return the norm on the sum of token and position (BERT), or None."""
    return read.embedding_norm(model, arch) if arch.position == "learned" else None


def _embedding(model: Any, arch: Architecture, upcast: bool) -> Tensor:
    table = embedding_table(model).detach()
    scale = read.embedding_scale(model)
    # With learned positions the norm acts on a sum, and has no meaning on the table alone.
    norm = None if arch.position == "learned" else read.embedding_norm(model, arch)
    if scale == 1.0 and norm is None:
        return at_least_float32(table) if upcast else table
    table = scale * at_least_float32(table)
    return table if norm is None else norm(table)
