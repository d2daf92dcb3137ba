"""What an architecture is made of, read from the modules that run, and refused where unknown."""

from dataclasses import dataclass
from typing import Any, Literal

import torch

from wvprobe.adapters.boot import check_bridge, context_length
from wvprobe.errors import UnsupportedError

Wiring = Literal["sequential", "parallel", "post_norm"]

# Only what has been held against the model's own numbers is let through; see tests.
_BLOCKS = ("BlockBridge", "ParallelBlockBridge", "BloomBlockBridge", "_OptBlockBridge")
_MLA_BLOCKS = ("MLABlockBridge",)
_MLA_ATTENTIONS = ("MLAAttentionBridge",)
_ATTENTIONS = (
    "AttentionBridge",
    "JointQKVAttentionBridge",
    "JointQKVPositionEmbeddingsAttentionBridge",
    "PositionEmbeddingsAttentionBridge",
    "BloomAttentionBridge",
)
_POST_NORM = ("bert", "roberta")
# Attributes of an attention module that change scores or values in ways not modelled here.
_UNMODELLED = {
    "sinks": "learned attention sinks",
    "key_multiplier": "a key multiplier",
    "clip_qkv": "clipped queries, keys and values",
}


@dataclass(frozen=True)
class Architecture:
    """The facts about a model that everything else is computed from.

    Attributes:
        family: the config's model_type.
        wiring: how a block adds up: attention then MLP (``sequential``), both from the same
            input (``parallel``), or with the norm after each sum (``post_norm``, BERT).
        sandwich: whether a second norm acts on what attention and MLP put out (Gemma-2).
        causal: whether a token sees only what comes before it.
        position: ``rotary``, ``learned``, ``alibi`` or ``none``.
        mla: whether keys and values come through a latent (DeepSeek).
        qk_norm: whether queries and keys are normed before rotation.
        n_ctx: longest input in tokens, or None where nothing limits it.
    """

    family: str
    wiring: Wiring
    sandwich: bool
    causal: bool
    position: Literal["rotary", "learned", "alibi", "none"]
    mla: bool
    qk_norm: bool
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    d_head_v: int
    d_vocab: int
    n_ctx: int | None


def architecture(model: Any) -> Architecture:
    """Read the facts from a bridge.

    Raises:
        InputError: `model` is no bridge.
        UnsupportedError: a part of it is not modelled exactly here; the part is named.
    """
    check_bridge(model)
    cfg, config = model.cfg, model.original_model.config
    blocks = _checked_blocks(model)
    attention = blocks[0].attn
    mla = type(blocks[0]).__name__ in _MLA_BLOCKS
    raw = attention.original_component
    n_heads = int(cfg.n_heads)
    d_head = int(raw.qk_head_dim) if mla else int(cfg.d_head)
    return Architecture(
        family=config.model_type,
        wiring=_wiring(model, blocks[0]),
        sandwich=has(blocks[0], "ln1_post"),
        causal=getattr(cfg, "attention_dir", "causal") == "causal",
        position=_position(model, attention),
        mla=mla,
        qk_norm=has(attention, "q_norm"),
        n_layers=len(blocks),
        n_heads=n_heads,
        n_kv_heads=n_heads if mla else _n_kv_heads(attention, d_head),
        d_model=int(cfg.d_model),
        d_head=d_head,
        d_head_v=int(raw.v_head_dim) if mla else d_head,
        d_vocab=int(embedding_table(model).shape[0]),
        n_ctx=context_length(config),
    )


def has(component: Any, name: str) -> bool:
    """Whether a bridge component has a working submodule of this name."""
    part = component._modules.get(name)
    return part is not None and getattr(part, "original_component", None) is not None


def first_position(model: Any) -> int:
    """Return the id of the first position: RoBERTa counts from behind its padding index."""
    config = model.original_model.config
    return int(config.pad_token_id) + 1 if config.model_type == "roberta" else 0


def embedding_table(model: Any) -> torch.Tensor:
    """Return the token embedding as stored, [d_vocab, d_model]."""
    return model.embed.original_component.weight


def _checked_blocks(model: Any) -> list[Any]:
    blocks = list(getattr(model, "blocks", ()))
    name = model.cfg.model_name
    if not blocks:
        raise UnsupportedError(
            f"{name} has no stack of blocks under one name; wvprobe reads decoder-only and "
            "encoder-only transformers."
        )
    for layer, block in enumerate(blocks):
        kind = type(block).__name__
        if kind not in _BLOCKS + _MLA_BLOCKS:
            raise UnsupportedError(
                f"layer {layer} of {name} is a {kind}, which wvprobe does not model exactly. "
                "Use TransformerLens's own hooks for it."
            )
        if not has(block, "attn"):
            raise UnsupportedError(f"layer {layer} of {name} has no attention (hybrid model).")
        _check_attention(name, layer, block.attn, mla=kind in _MLA_BLOCKS)
    return blocks


def _check_attention(name: str, layer: int, attention: Any, mla: bool) -> None:
    kind = type(attention).__name__
    if kind not in (_MLA_ATTENTIONS if mla else _ATTENTIONS):
        raise UnsupportedError(
            f"attention of layer {layer} of {name} is a {kind}, which wvprobe does not model "
            "exactly. Use HeadWeights.from_tensors with weights of your own."
        )
    raw = attention.original_component
    for attribute, what in _UNMODELLED.items():
        value = getattr(raw, attribute, None)
        value = getattr(getattr(raw, "config", None), attribute, None) if value is None else value
        if value is not None:
            raise UnsupportedError(
                f"layer {layer} of {name} has {what} ({attribute}), which wvprobe does not model."
            )


def _wiring(model: Any, block: Any) -> Wiring:
    config = model.original_model.config
    if not has(block, "ln1"):
        raise UnsupportedError(
            f"{model.cfg.model_name} norms what attention puts out and not what it reads, which "
            "wvprobe does not model. Use another model, or TransformerLens's own hooks."
        )
    if config.model_type in _POST_NORM:
        return "post_norm"
    if getattr(config, "do_layer_norm_before", True) is False:
        raise UnsupportedError(
            f"{model.cfg.model_name} is an OPT with norms after the sum (do_layer_norm_before="
            "False), which wvprobe does not model. Use another size of OPT."
        )
    parallel = "Parallel" in type(block).__name__
    stated = getattr(config, "use_parallel_residual", None)
    if stated is not None:
        parallel = bool(stated)
    return "parallel" if parallel else "sequential"


def _n_kv_heads(attention: Any, d_head: int) -> int:
    """Count key heads by what the key projection gives; a config may carry an unused number."""
    return attention.k.original_component.weight.shape[0] // d_head


def _position(model: Any, attention: Any) -> Any:
    known = {"standard": "learned", "rotary": "rotary", "alibi": "alibi", "none": "none"}
    kind, name = str(model.cfg.positional_embedding_type), model.cfg.model_name
    if kind not in known:
        raise UnsupportedError(
            f"{name} has positions of kind {kind!r}; wvprobe models {', '.join(known.values())}."
        )
    if kind == "standard" and not has(model, "pos_embed"):
        raise UnsupportedError(f"{name} has positions without a learned table (sinusoidal ones).")
    if kind == "rotary" and not hasattr(attention, "hook_cos"):
        raise UnsupportedError(
            f"{name} rotates inside an attention module that TransformerLens does not open. "
            "Use HeadWeights.from_tensors with weights of your own."
        )
    return known[kind]
