"""Sizes read from transformers configs and from loaded models, held against real counts."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from wvprobe import adapters
from wvprobe._validate import message
from wvprobe.budget._arithmetic import HeadBudget
from wvprobe.budget._rest import Rest
from wvprobe.errors import InputError, UnsupportedError


class _Sizes(NamedTuple):
    """What a family's config says: keywords of HeadBudget, and keywords of Rest."""

    attention: dict[str, Any]
    rest: dict[str, Any]


def from_config(config: Any) -> HeadBudget:
    """Read the sizes from a transformers config (see HeadBudget.from_config)."""
    config = _config(config)
    headless = _names_no_head(config)
    found = _described(config, headless)
    real = _built(config, headless)
    if found.n_parameters != real:
        raise UnsupportedError(
            f"this {type(config).__name__} has options that are not known here: its sizes explain "
            f"{found.n_parameters:,} parameters, the model that transformers builds of it has "
            f"{real:,}. Load the model and use HeadBudget.from_model."
        )
    return found


def from_model(model: Any) -> HeadBudget:
    """Read the sizes from a loaded model (see HeadBudget.from_model)."""
    arch = adapters.architecture(model)
    facts = adapters.attention_facts(model, arch)
    found = HeadBudget(
        d_model=arch.d_model,
        n_heads=arch.n_heads,
        d_head=arch.d_head,
        n_kv_heads=arch.n_kv_heads,
        d_head_v=arch.d_head_v,
        n_layers=arch.n_layers,
        kv_rank=facts.kv_rank,
        q_rank=facts.q_rank,
        d_shared_key=facts.d_shared_key,
        biases=facts.biases,
        qk_norm=arch.qk_norm,
        causal=arch.causal,
        name=model.cfg.model_name,
        family=arch.family,
    )
    expected = sum(found.layer_parameters.values())
    for layer, count in enumerate(facts.counts):
        if count != expected:
            raise UnsupportedError(
                f"attention of layer {layer} of {found.name} has {count:,} parameters, of which "
                f"its sizes explain {expected:,}: it has parts, or layers of other sizes, that a "
                "HeadBudget does not know. Give HeadBudget the numbers of one layer yourself."
            )
    outside = adapters.n_parameters(model) - found.n_attention
    return replace(found, rest=_taken_apart(model, found, outside))


def _taken_apart(model: Any, found: HeadBudget, outside: int) -> Rest | int:
    """Return what stands outside attention as sizes, or as a number where they do not add up."""
    headless = bool(adapters.why_no_head(model))
    try:
        rest = _described(model.original_model.config, headless).rest
    except UnsupportedError:
        return outside
    if not isinstance(rest, Rest):
        return outside
    whole = sum(rest.parameters(found.d_model, found.n_layers).values())
    return rest if whole == outside else outside


def _config(config: Any) -> Any:
    import transformers

    if isinstance(config, transformers.PretrainedConfig):
        return config
    if not isinstance(config, Mapping) or "model_type" not in config:
        expected = "a transformers PreTrainedConfig, or its dictionary with model_type"
        raise InputError(message("config", expected, config))
    settings = dict(config)
    try:
        return transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    except (ValueError, TypeError) as error:
        raise InputError(f"transformers cannot read this config: {error}") from error


def _names_no_head(config: Any) -> bool:
    """Whether the config names the family's class without a head, such as BertModel."""
    import transformers

    bare = transformers.MODEL_MAPPING.get(type(config), None)
    return getattr(bare, "__name__", None) in (config.architectures or ())


def _described(config: Any, headless: bool) -> HeadBudget:
    """Return the budget that a config of a known family describes, unchecked."""
    read = _FAMILIES.get(config.model_type)
    if read is None:
        raise UnsupportedError(
            f"configs of model_type {config.model_type!r} are not known here; known are "
            f"{', '.join(_FAMILIES)}. Load the model and use HeadBudget.from_model, or give "
            "HeadBudget the numbers."
        )
    attention, rest = read(config)
    head = "tied" if config.tie_word_embeddings else "untied"
    rest = {"d_vocab": config.vocab_size, "head": head} | rest
    if headless:
        rest |= {"head": "none", "head_bias": False, "head_transform": False}
    return HeadBudget(**attention, rest=Rest(**rest), family=config.model_type)


def _built(config: Any, headless: bool) -> int:
    """Count the parameters of the model that transformers makes of a config, without memory."""
    import torch
    import transformers

    masked = config.model_type in _MASKED
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(config)
    body = f"{model.base_model_prefix}." if headless else ""
    return sum(p.numel() for name, p in model.named_parameters() if name.startswith(body))


def _heads(config: Any) -> dict[str, Any]:
    """Return the sizes that most configs call by the same names."""
    heads = config.num_attention_heads
    return {
        "d_model": config.hidden_size,
        "n_heads": heads,
        "d_head": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "n_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "n_layers": config.num_hidden_layers,
    }


def _layer_norms(d_mlp: int, **rest: Any) -> dict[str, Any]:
    """Return the rest of a model whose norms and MLPs have biases (GPT-2 and its heirs)."""
    return {"d_mlp": d_mlp, "mlp_biases": True, "norm_biases": True} | rest


def _gpt2(config: Any) -> _Sizes:
    width = config.n_inner or 4 * config.hidden_size
    rest = _layer_norms(width, n_positions=config.n_positions)
    return _Sizes(_heads(config) | {"biases": "QKVO"}, rest)


def _opt(config: Any) -> _Sizes:
    # Positions are counted from 2.
    rest = _layer_norms(config.ffn_dim, n_positions=config.max_position_embeddings + 2)
    rest |= {"mlp_biases": config.enable_bias}
    rest |= {"outer_norms": int(config.do_layer_norm_before)}
    return _Sizes(_heads(config) | {"biases": "QKVO" if config.enable_bias else ""}, rest)


def _bloom(config: Any) -> _Sizes:
    rest = _layer_norms(4 * config.hidden_size, outer_norms=2)
    return _Sizes(_heads(config) | {"biases": "QKVO"}, rest)


def _gpt_neox(config: Any) -> _Sizes:
    biases = "QKVO" if config.attention_bias else ""
    return _Sizes(_heads(config) | {"biases": biases}, _layer_norms(config.intermediate_size))


def _phi(config: Any) -> _Sizes:
    rest = _layer_norms(config.intermediate_size, norms_per_layer=1, head_bias=True)
    return _Sizes(_heads(config) | {"biases": "QKVO"}, rest)


def _bert(config: Any) -> _Sizes:
    rest = _layer_norms(
        config.intermediate_size,
        n_positions=config.max_position_embeddings,
        n_token_types=config.type_vocab_size,
        head_bias=True,
        head_transform=True,
    )
    return _Sizes(_heads(config) | {"biases": "QKVO", "causal": config.is_decoder}, rest)


def _llama(config: Any) -> _Sizes:
    biased = getattr(config, "attention_bias", False)
    rest = {
        "d_mlp": config.intermediate_size,
        "gated": True,
        "mlp_biases": getattr(config, "mlp_bias", False),
    }
    return _Sizes(_heads(config) | {"biases": "QKVO" if biased else ""}, rest)


def _qwen2(config: Any) -> _Sizes:
    attention, rest = _llama(config)
    return _Sizes(attention | {"biases": "QKV"}, rest)


def _qwen3(config: Any) -> _Sizes:
    attention, rest = _llama(config)
    return _Sizes(attention | {"qk_norm": True}, rest)


def _gemma2(config: Any) -> _Sizes:
    attention, rest = _llama(config)
    return _Sizes(attention, rest | {"norms_per_layer": 4})


def _gemma3(config: Any) -> _Sizes:
    attention, rest = _gemma2(config)
    return _Sizes(attention | {"qk_norm": True}, rest)


def _mixtral(config: Any) -> _Sizes:
    attention, rest = _llama(config)
    experts = {
        "n_experts": config.num_local_experts,
        "d_expert": config.intermediate_size,
        "n_active_experts": config.num_experts_per_tok,
    }
    return _Sizes(attention, rest | experts)


def _deepseek_v3(config: Any) -> _Sizes:
    biases = ("DKV", "KR", "O") if config.attention_bias else ()
    attention = _heads(config) | {
        "n_kv_heads": config.num_attention_heads,
        "d_head": config.qk_nope_head_dim + config.qk_rope_head_dim,
        "d_head_v": config.v_head_dim,
        "kv_rank": config.kv_lora_rank,
        "q_rank": config.q_lora_rank,
        "d_shared_key": config.qk_rope_head_dim,
        "biases": ("DQ", *biases) if biases and config.q_lora_rank else biases,
    }
    rest = {
        "d_mlp": config.intermediate_size,
        "gated": True,
        "n_experts": config.n_routed_experts,
        "d_expert": config.moe_intermediate_size,
        "n_active_experts": config.num_experts_per_tok,
        "d_shared_expert": config.n_shared_experts * config.moe_intermediate_size,
        "n_dense_layers": config.first_k_dense_replace,
    }
    return _Sizes(attention, rest)


_MASKED = ("bert",)
_FAMILIES: dict[str, Callable[[Any], _Sizes]] = {
    "gpt2": _gpt2,
    "opt": _opt,
    "bloom": _bloom,
    "gpt_neox": _gpt_neox,
    "phi": _phi,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "phi3": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _llama,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "bert": _bert,
    "deepseek_v3": _deepseek_v3,
}
