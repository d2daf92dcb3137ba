"""How many parameters a model's attention has, and which of its matrices have a bias."""

from typing import Any, NamedTuple

from wvprobe.adapters.boot import canonical_parameters
from wvprobe.adapters.structure import Architecture, has

# Norms of the block that some modules keep inside attention (BERT).
_BLOCK_NORMS = ("ln1", "ln1_post", "ln2")
# Matrix in DeepSeek-V2's names -> the component that holds it.
_LATENT = {"DQ": "q_a_proj", "DKV": "kv_a_proj_with_mqa", "KR": "kv_a_proj_with_mqa", "O": "o"}
_PLAIN = {"Q": "q", "K": "k", "V": "v", "O": "o"}


class AttentionFacts(NamedTuple):
    """What a budget needs to know of attention beside the architecture's sizes.

    Attributes:
        biases: names of the matrices that have a bias.
        kv_rank: width of the latent of keys and values, or None.
        q_rank: width of the latent of queries, or None.
        d_shared_key: dimensions of a key that are one for all heads.
        counts: by layer, the parameters of its attention, norms of the block left out.
    """

    biases: tuple[str, ...]
    kv_rank: int | None
    q_rank: int | None
    d_shared_key: int
    counts: tuple[int, ...]


def attention_facts(model: Any, arch: Architecture) -> AttentionFacts:
    """Read the facts of layer 0, and count the parameters of every layer's attention."""
    attention = model.blocks[0].attn
    raw = attention.original_component
    held = _LATENT if arch.mla else _PLAIN
    return AttentionFacts(
        biases=tuple(name for name, part in held.items() if _has_bias(attention, part)),
        kv_rank=int(raw.kv_lora_rank) if arch.mla else None,
        q_rank=None if not arch.mla or raw.q_lora_rank is None else int(raw.q_lora_rank),
        d_shared_key=int(raw.qk_rope_head_dim) if arch.mla else 0,
        counts=_counts(model),
    )


def _has_bias(attention: Any, part: str) -> bool:
    if not has(attention, part):
        return False
    return getattr(getattr(attention, part).original_component, "bias", None) is not None


def _counts(model: Any) -> tuple[int, ...]:
    # A bridge splits fused projections and keeps both; the canonical ones are those that run.
    canonical = {id(parameter): parameter.numel() for _, parameter in canonical_parameters(model)}
    counts = []
    for block in model.blocks:
        norms = [getattr(block, name) for name in _BLOCK_NORMS if has(block, name)]
        outside = {id(p) for norm in norms for p in norm.parameters()}
        inside = {id(p) for p in block.attn.parameters()} - outside
        counts.append(sum(canonical.get(key, 0) for key in inside))
    return tuple(counts)
