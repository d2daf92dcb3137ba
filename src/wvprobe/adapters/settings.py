"""What shapes a model's numbers beside its weights: all that two runs must share to be one."""

import hashlib
import json
from typing import Any

import torch

# Whose hooks stay behind and change nothing: the bridge's own, and those that transformers reads
# hidden states and attention with, from the first call on that asks for them.
_LISTENERS = ("transformer_lens.model_bridge", "transformers.utils.output_capturing")
# Config entries that say where a model came from, and not what it does.
_ORIGIN = ("_name_or_path", "transformers_version")


def run_settings(model: Any) -> dict[str, Any]:
    """Return, by name and as plain data, what shapes the numbers that a forward gives.

    Of hooks it can be told where they stand, and not what they do.
    """
    device = torch.device(model.cfg.device)
    return {
        "config": config_hash(model),
        "tokenizer": tokenizer_hash(model.tokenizer),
        "dtype": str(model.cfg.dtype),
        "device": device.type,
        "processor": _processor(device),
        "threads": torch.get_num_threads(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "hooks": hooked(model),
    }


def config_hash(model: Any) -> str:
    """Return the sha256 of what the model's config says, its origin left out."""
    config = model.original_model.config
    entries = {k: v for k, v in config.to_dict().items() if k not in _ORIGIN}
    # Which attention kernel runs is not among them.
    entries["attention"] = getattr(config, "_attn_implementation", None)
    return _digest(json.dumps(entries, sort_keys=True, default=str))


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the sha256 of what decides which tokens a text has."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        vocabulary = sorted(tokenizer.get_vocab().items())
        return _digest(repr((type(tokenizer).__name__, vocabulary, tokenizer.special_tokens_map)))
    document = json.loads(fast.to_str())
    # Left behind by the last call that padded or truncated.
    for passing in ("padding", "truncation"):
        document.pop(passing, None)
    return _digest(
        json.dumps([document, tokenizer.special_tokens_map], sort_keys=True, default=str)
    )


def hooked(model: Any) -> list[str]:
    """Return the names of the modules that carry a hook that may change what they give."""
    return [
        name
        for name, module in model.named_modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not str(getattr(hook, "__module__", "")).startswith(_LISTENERS)
    ]


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return torch.backends.cpu.get_cpu_capability()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
