"""Architectures beyond the tiny families: exact, or refused by name, never silently wrong."""

import pytest
import torch
import transformers

import wvprobe
from wvprobe._tokenizers import tiny_tokenizer
from wvprobe.auditing import audit
from wvprobe.errors import AuditError, UnsupportedError
from wvprobe.testing import _randomise

COMMON = {
    "vocab_size": 409,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 53,
    "max_position_embeddings": 67,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"vocab_size": 409, "n_embd": 48, "n_head": 6, "n_layer": 2, "n_positions": 67}
OPT = {"vocab_size": 409, "hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2}
MLA = {
    **{key: value for key, value in COMMON.items() if key != "head_dim"},
    "num_key_value_heads": 6,
    "q_lora_rank": 17,
    "kv_lora_rank": 19,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 7,
    "v_head_dim": 11,
}
EXPERTS = {
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
BERT = {**OPT, "intermediate_size": 53, "max_position_embeddings": 67}


def built(model_type, config, masked=False):
    """Return a random model of a type, and its tokenizer."""
    auto = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto.from_config(transformers.AutoConfig.for_model(model_type, **config))
    _randomise(model, 0)
    return model, tiny_tokenizer("bert" if masked else "llama")


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("cohere", {}),  # neighbours turned, parallel blocks of one norm, scaled logits
        ("falcon", {}),  # one key-value head for all
        ("gemma", {}),
        ("glm", {"partial_rotary_factor": 0.5}),  # neighbours turned, half of the dimensions
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gpt_neox", {"use_parallel_residual": False, "num_key_value_heads": 6}),
        ("olmo", {}),  # norms without a gain
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("stablelm", {"partial_rotary_factor": 0.5}),
        ("roberta", {"pad_token_id": 2}),  # positions counted from behind the padding index
        ("starcoder2", {}),
        # Keys and values from a latent; the first turns complex numbers.
        ("deepseek_v2", {**EXPERTS, "topk_method": "greedy"}),
        ("deepseek_v2", {**EXPERTS, "topk_method": "greedy", "q_lora_rank": None}),
        ("glm4_moe_lite", EXPERTS),
        ("youtu", {}),
        # Other frequencies beyond 13 tokens.
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 500.0,
                    "short_factor": [1.0, 1.5, 2.0, 2.5],
                    "long_factor": [2.0, 3.0, 4.0, 5.0],
                    "original_max_position_embeddings": 13,
                }
            },
        ),
    ],
)
def test_exact(model_type, changes):
    own = {"gpt2": GPT2, "roberta": BERT, "falcon": {**OPT, "bos_token_id": 1, "eos_token_id": 2}}
    own.update(dict.fromkeys(("deepseek_v2", "glm4_moe_lite", "youtu"), MLA))
    config = {**own.get(model_type, COMMON), **changes}
    model, tokenizer = built(model_type, config, masked=model_type == "roberta")
    result = audit(wvprobe.load(model, tokenizer=tokenizer))
    assert result.ok and result.to_frame()["error"].max() < 1e-4, result.to_frame().to_string()


REFUSED = {
    # Field line 14: residuals that are scaled, norms after a block.
    "granite": (COMMON, "ScaledResidualBlockBridge"),
    "olmo2": (COMMON, "norms what attention puts out and not what it reads"),
    "glm_moe_dsa": ({**MLA, **EXPERTS}, "GlmMoeDsaAttentionBridge"),  # looks at few keys
    "gpt_oss": ({**COMMON, "num_local_experts": 4}, "learned attention sinks"),
    "gptj": ({**GPT2, "rotary_dim": 4}, "rotates inside an attention module"),
    "mamba": ({"vocab_size": 409, "hidden_size": 48, "num_hidden_layers": 2}, "SSMBlockBridge"),
    "nemotron": (COMMON, "NemotronLayerNorm1P"),
    "opt": ({**OPT, "word_embed_proj_dim": 48, "do_layer_norm_before": False}, "after the sum"),
    "smollm3": (COMMON, "_SmolLM3AttentionBridge"),
    "helium": (COMMON, "cannot wrap a HeliumForCausalLM"),
    "xglm": (
        {"vocab_size": 409, "d_model": 48, "attention_heads": 6, "num_layers": 2, "ffn_dim": 53},
        "without a learned table",
    ),
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_by_name(model_type):
    config, told = REFUSED[model_type]
    model, tokenizer = built(model_type, config)
    with pytest.raises(UnsupportedError, match=told) as caught:
        wvprobe.load(model, tokenizer=tokenizer)
    assert type(model).__name__ in str(caught.value)
    assert len(str(caught.value)) < 600


def test_what_is_not_known_to_differ_is_caught_by_the_audit():
    config = {"vocab_size": 409, "hidden_size": 48, "n_head": 6, "n_layer": 2}
    config["apply_residual_connection_post_layernorm"] = True
    model, tokenizer = built("bloom", config)
    with pytest.raises(AuditError, match="do not reproduce it"):
        wvprobe.load(model, tokenizer=tokenizer)
