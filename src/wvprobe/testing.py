"""Small models of many architectures, for anyone's tests.

    model = wvprobe.testing.tiny_model("llama")       # a TransformerBridge, in half a second
    model = wvprobe.testing.induction_model()         # weights by hand, known answers

Weights are random but not small: norm gains and biases lie well away from 1 and 0, scores are
peaked, and dimensions are distinct primes where the architecture allows, so that a swapped axis,
a missed bias or a missed fold changes numbers.
"""

from dataclasses import dataclass
from typing import Any

import torch

from wvprobe._induction import induction_config, write_induction_weights
from wvprobe._tokenizers import tiny_tokenizer
from wvprobe._validate import one_of
from wvprobe._validate import seed as checked_seed
from wvprobe.adapters import boot
from wvprobe.errors import InputError

_VOCABULARY = 409
_ROTARY_GQA = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 42,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_hidden_layers": 3,
    "intermediate_size": 53,
    "max_position_embeddings": 257,
}
_PARTIAL_ROTARY = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 39,
    "num_attention_heads": 3,
    "num_hidden_layers": 3,
    "intermediate_size": 53,
    "max_position_embeddings": 257,
}


@dataclass(frozen=True)
class _Family:
    """How a family is built: its model_type, its config, its exact number of parameters."""

    model_type: str
    config: dict[str, Any]
    parameters: int
    masked: bool = False


FAMILIES: dict[str, _Family] = {
    "gpt2": _Family(
        "gpt2",
        {
            "vocab_size": _VOCABULARY,
            "n_embd": 35,
            "n_head": 5,
            "n_layer": 3,
            "n_inner": 53,
            "n_positions": 257,
        },
        50_314,
    ),
    "opt": _Family(
        "opt",
        {
            "vocab_size": _VOCABULARY,
            "hidden_size": 35,
            "word_embed_proj_dim": 35,
            "num_attention_heads": 5,
            "num_hidden_layers": 3,
            "ffn_dim": 53,
            "max_position_embeddings": 257,
        },
        50_384,
    ),
    "bloom": _Family(
        "bloom", {"vocab_size": _VOCABULARY, "hidden_size": 35, "n_head": 5, "n_layer": 3}, 59_920
    ),
    "gpt_neox": _Family("gpt_neox", {**_PARTIAL_ROTARY, "rotary_pct": 0.5}, 63_846),
    "phi": _Family("phi", {**_PARTIAL_ROTARY, "partial_rotary_factor": 0.5}, 64_021),
    "llama": _Family("llama", {**_ROTARY_GQA, "head_dim": 14}, 82_908),
    "mistral": _Family("mistral", {**_ROTARY_GQA, "sliding_window": 5}, 74_844),
    "qwen2": _Family("qwen2", _ROTARY_GQA, 75_144),
    "qwen3": _Family("qwen3", _ROTARY_GQA, 74_904),
    "gemma2": _Family(
        "gemma2",
        {
            **_ROTARY_GQA,
            "query_pre_attn_scalar": 13,
            "sliding_window": 5,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 7.0,
        },
        57_918,
    ),
    "gemma3": _Family(
        "gemma3_text",
        {
            **_ROTARY_GQA,
            "query_pre_attn_scalar": 13,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        57_978,
    ),
    "bert": _Family(
        "bert",
        {
            "vocab_size": _VOCABULARY,
            "hidden_size": 35,
            "num_attention_heads": 5,
            "num_hidden_layers": 3,
            "intermediate_size": 53,
            "max_position_embeddings": 257,
        },
        52_123,
        masked=True,
    ),
    "deepseek_v3": _Family(
        "deepseek_v3",
        {
            "vocab_size": _VOCABULARY,
            "hidden_size": 44,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "num_hidden_layers": 3,
            "intermediate_size": 53,
            "moe_intermediate_size": 12,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": 17,
            "kv_lora_rank": 19,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 7,
            "v_head_dim": 11,
            "n_shared_experts": 1,
            "max_position_embeddings": 257,
        },
        74_563,
    ),
}


def tiny_model(family: str, seed: int = 0, *, dtype: str = "float32", **overrides: Any) -> Any:
    """Build a small random model of a family, with a tokenizer of the family's kind.

    Args:
        family: one of ``FAMILIES``.
        seed: seed of the weights; the caller's random state is left as it was.
        dtype: ``float32``, ``float64``, ``bfloat16`` or ``float16``.
        **overrides: keys of the family's Hugging Face config, such as ``num_hidden_layers=5``.

    Returns:
        A TransformerBridge named ``tiny:<family>``.

    Raises:
        InputError: unknown family, or an override that the config does not know.

    Examples:
        >>> from wvprobe.testing import tiny_model
        >>> tiny_model("gpt2", n_layer=1).cfg.n_layers
        1
    """
    seed = checked_seed(seed)
    one_of("dtype", dtype, ("float32", "float64", "bfloat16", "float16"))
    with torch.random.fork_rng(devices=[]):
        hf_model = _hf_model(family, seed, overrides).to(getattr(torch, dtype))
        return boot(hf_model, tiny_tokenizer(family), name=f"tiny:{family}")


def induction_model(seed: int = 0) -> Any:
    """Build the two-layer, attention-only model whose circuit is written by hand.

    Known answers: L0H0 attends to the token before; its output reaches the keys of L1H1 (the one
    pair with K-composition to speak of); L1H1 attends to the token after an earlier occurrence of
    the current one, and its OV circuit copies that token to the logits.

    Args:
        seed: seed of the tokens' codes and of the other heads' small noise.

    Returns:
        A TransformerBridge named ``induction``, with the tokenizer of ``tiny_model("llama")``.

    Examples:
        >>> from wvprobe.testing import induction_model
        >>> planted = wvprobe.HeadWeights.from_model(induction_model())
        >>> scores = wvprobe.composition(planted, "K").scores
        >>> [int(n) for n in torch.unravel_index(scores.argmax(), scores.shape)]  # L0H0 into L1H1
        [0, 0, 1, 1]
    """
    seed = checked_seed(seed)
    import transformers

    tokenizer = tiny_tokenizer("llama")
    config = transformers.LlamaConfig(
        **induction_config(_VOCABULARY),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        model = transformers.LlamaForCausalLM(config)
        write_induction_weights(model, seed)
        return boot(model, tokenizer, name="induction")


def _hf_model(family: str, seed: int, overrides: dict[str, Any]) -> Any:
    import transformers

    one_of("family", family, tuple(FAMILIES))
    spec = FAMILIES[family]
    tokenizer = tiny_tokenizer(family)
    ids = {
        name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    config = transformers.AutoConfig.for_model(spec.model_type, **{**spec.config, **ids})
    for key, value in overrides.items():
        if not hasattr(config, key):
            raise InputError(
                f"`{key}` must be a key of {type(config).__name__}. Got {value!r} for it. "
                "See the family's Hugging Face configuration."
            )
    if overrides:
        settings = {**spec.config, **ids, **overrides}
        config = transformers.AutoConfig.for_model(spec.model_type, **settings)
    auto = transformers.AutoModelForMaskedLM if spec.masked else transformers.AutoModelForCausalLM
    model = auto.from_config(config)
    _randomise(model, seed)
    count = sum(p.numel() for p in model.parameters())
    if not overrides and count != spec.parameters:
        raise InputError(
            f"tiny {family} has {count} parameters, not {spec.parameters}: this version of "
            "transformers reads its config differently, so tests on it would not test the family."
        )
    return model


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter a value that matters."""
    generator = torch.Generator().manual_seed(seed)

    def normal(shape: torch.Size) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    conv = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if type(module).__name__ == "Conv1D"
    }
    for name, parameter in sorted(model.named_parameters()):
        with torch.no_grad():
            if parameter.dim() == 1:
                is_gain = name.endswith("weight")
                # Gains on both sides of 1 (of 0 where the family adds 1), none near it.
                side = torch.sign(normal(parameter.shape))
                value = 0.2 + 0.3 * normal(parameter.shape).abs()
                centre = 1.0 if is_gain and bool((parameter == 1).all()) else 0.0
                parameter.copy_(centre + side * value)
            elif "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
                parameter.copy_(normal(parameter.shape))
            else:
                fan_in = parameter.shape[0] if name in conv else parameter.shape[-1]
                parameter.copy_(1.3 * normal(parameter.shape) / fan_in**0.5)
