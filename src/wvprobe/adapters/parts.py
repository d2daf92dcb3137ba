"""All that HeadWeights holds of a model, read layer by layer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wvprobe._linalg import at_least_float32
from wvprobe._shapes import HEAD_AXES, check_shapes
from wvprobe.adapters import weights as read
from wvprobe.adapters.structure import Architecture, embedding_table
from wvprobe.errors import UnsupportedError

_PER_LAYER = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")


def head_parts(
    model: Any, arch: Architecture, layers: Sequence[int], *, tables: bool = True
) -> dict[str, Any]:
    """Return the fields of an unfolded HeadWeights of some layers, but its provenance.

    Without `tables` the embedding is left out, which Gemma's scale and BLOOM's norm copy.

    Raises:
        UnsupportedError: the model's queries and keys are no single matrices of the stream.
    """
    if arch.mla:
        raise UnsupportedError(
            f"{model.cfg.model_name} has multi-head latent attention, whose queries and keys are "
            "not single matrices of the stream; HeadWeights cannot hold them. Use "
            "capture(model, texts, ['pattern', 'v', 'z', 'attn_out']) instead."
        )
    found = [read.layer_weights(model, layer) for layer in layers]
    stacked = {name: _stack(found, name, arch) for name in _PER_LAYER}
    check_shapes(stacked)
    return {
        **stacked,
        "scale": tuple(read.score_scale(model, layer) for layer in layers),
        "rotary": tuple(read.rotary(model, arch, layer) for layer in layers),
        "soft_cap": tuple(read.soft_cap(model, layer) for layer in layers),
        "sliding_window": tuple(read.sliding_window(model, layer) for layer in layers),
        "qk_norms": tuple(read.qk_norms(model, arch, layer) for layer in layers),
        "norms": tuple(read.attention_norm(model, arch, layer) for layer in layers),
        "post_norms": tuple(read.post_attention_norm(model, arch, layer) for layer in layers),
        "slopes": read.alibi_slopes(model, arch),
        "folded": False,
        "causal": arch.causal,
        "W_E": _embedding(model, arch) if tables else None,
        "W_pos": read.position_table(model, arch),
        "unembedding": read.unembedding(model, arch),
        "tokenizer": model.tokenizer,
        # Elsewhere the norm is part of the table, see _embedding.
        "embedding_norm": read.embedding_norm(model, arch) if arch.position == "learned" else None,
    }


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


def _embedding(model: Any, arch: Architecture) -> Tensor:
    table = at_least_float32(embedding_table(model).detach())
    scale = read.embedding_scale(model)
    table = table if scale == 1.0 else table * scale
    norm = read.embedding_norm(model, arch)
    # With learned positions the norm acts on a sum, and has no meaning on the table alone.
    return table if norm is None or arch.position == "learned" else norm(table)
