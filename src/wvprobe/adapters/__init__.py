"""The one place that knows TransformerLens and the architectures behind it.

What the rest of the library may ask of a model stands here, and nothing else does.
"""

from wvprobe.adapters.boot import (
    TransformerBridge,
    boot,
    canonical_parameters,
    check_bridge,
    n_parameters,
    provenance,
    require_head,
    weight_hash,
    why_no_head,
)
from wvprobe.adapters.counts import AttentionFacts, attention_facts
from wvprobe.adapters.effective import effective_embedding
from wvprobe.adapters.hooks import Raw, changing, hook_point, logits, reading, run_backbone, shaped
from wvprobe.adapters.latent import Latent
from wvprobe.adapters.parts import (
    PER_LAYER,
    head_parts,
    layer_fact_parts,
    layer_weight_parts,
    outside_parts,
)
from wvprobe.adapters.rotation import fresh_rotation, length_regime, rotary
from wvprobe.adapters.sites import PAIR_SITES, SITES, Recipe, layers_of, recipe
from wvprobe.adapters.skeleton import Skeleton
from wvprobe.adapters.structure import Architecture, architecture, embedding_table
from wvprobe.adapters.weights import (
    LayerWeights,
    Norm,
    Unembedding,
    alibi_slopes,
    attention_norm,
    embedding_norm,
    embedding_scale,
    final_norm,
    layer_weights,
    output_bias,
    output_weight,
    position_table,
    post_attention_norm,
    qk_norms,
    score_scale,
    sliding_window,
    soft_cap,
    stream_norms,
    token_type_embedding,
    unembedding,
)

__all__ = [
    "PAIR_SITES",
    "PER_LAYER",
    "SITES",
    "Architecture",
    "AttentionFacts",
    "Latent",
    "LayerWeights",
    "Norm",
    "Raw",
    "Recipe",
    "Skeleton",
    "TransformerBridge",
    "Unembedding",
    "alibi_slopes",
    "architecture",
    "attention_facts",
    "attention_norm",
    "boot",
    "canonical_parameters",
    "changing",
    "check_bridge",
    "effective_embedding",
    "embedding_norm",
    "embedding_scale",
    "embedding_table",
    "final_norm",
    "fresh_rotation",
    "head_parts",
    "layer_fact_parts",
    "layer_weight_parts",
    "outside_parts",
    "hook_point",
    "layer_weights",
    "layers_of",
    "length_regime",
    "logits",
    "n_parameters",
    "output_bias",
    "output_weight",
    "position_table",
    "post_attention_norm",
    "provenance",
    "qk_norms",
    "reading",
    "recipe",
    "require_head",
    "rotary",
    "run_backbone",
    "score_scale",
    "shaped",
    "sliding_window",
    "soft_cap",
    "stream_norms",
    "token_type_embedding",
    "unembedding",
    "weight_hash",
    "why_no_head",
]
