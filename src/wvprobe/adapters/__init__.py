"""The one place that knows TransformerLens and the architectures behind it.

What the rest of the library may ask of a model stands here, and nothing else does.
"""

from wvprobe.adapters.boot import (
    boot,
    canonical_parameters,
    check_bridge,
    provenance,
    require_head,
    weight_hash,
    why_no_head,
)
from wvprobe.adapters.hooks import RAW_SITES, hook_point, reading, run_backbone, shaped
from wvprobe.adapters.structure import Architecture, architecture, embedding_table
from wvprobe.adapters.weights import (
    LayerWeights,
    Norm,
    alibi_slopes,
    attention_norm,
    embedding_norm,
    embedding_scale,
    final_norm,
    layer_weights,
    post_attention_norm,
    qk_norms,
    rotary,
    score_scale,
    sliding_window,
    soft_cap,
    stream_norms,
)

__all__ = [
    "RAW_SITES",
    "Architecture",
    "LayerWeights",
    "Norm",
    "alibi_slopes",
    "architecture",
    "attention_norm",
    "boot",
    "canonical_parameters",
    "check_bridge",
    "embedding_norm",
    "embedding_scale",
    "embedding_table",
    "final_norm",
    "hook_point",
    "layer_weights",
    "post_attention_norm",
    "provenance",
    "qk_norms",
    "reading",
    "require_head",
    "rotary",
    "run_backbone",
    "score_scale",
    "shaped",
    "sliding_window",
    "soft_cap",
    "stream_norms",
    "weight_hash",
    "why_no_head",
]
