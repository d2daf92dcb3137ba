"""From a transformers model to a TransformerBridge, and the names its weights go by."""

import copy
import hashlib
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformer_lens.model_bridge import TransformerBridge

from wvprobe._types import Provenance
from wvprobe._validate import message
from wvprobe.errors import DeviceError, InputError, TokenizerError, UnsupportedError

# TransformerLens takes some model names ('opt') for deprecated aliases of others; booting
# under a name of our own and setting the real one afterwards keeps it from guessing.
_BOOT_NAME = "wvprobe-local-model"
_MISSING_HEAD = "_wvprobe_missing_head"

_hashes: "WeakKeyDictionary[Any, tuple[tuple[Any, ...], str]]" = WeakKeyDictionary()


def boot(hf_model: Any, tokenizer: Any, *, name: str, missing: str = "") -> TransformerBridge:
    """Wrap a transformers model, in place, in a TransformerBridge.

    Args:
        hf_model: a PreTrainedModel. Its submodules are replaced by hooked ones: parameter
            names change and its own ``save_pretrained`` no longer works.
        tokenizer: its tokenizer, one that was loaded from a folder.
        name: the name that results carry.
        missing: why the model has no usable head ("" where it has one).

    Raises:
        UnsupportedError: TransformerLens knows no adapter for the architecture.
        TokenizerError: there is no tokenizer; TransformerLens would ask a hub for one.
    """
    config = hf_model.config
    if not config.architectures:
        # Detection looks here, and configs made in memory leave it empty.
        config.architectures = [type(hf_model).__name__]
    device = next(hf_model.parameters()).device
    if tokenizer is None:
        raise TokenizerError(f"a {config.architectures[0]} needs its tokenizer; pass tokenizer=.")
    try:
        bridge = TransformerBridge.boot_transformers(
            _BOOT_NAME,
            hf_model=hf_model.eval(),
            # It is changed in booting, and a second boot with it would lose its [CLS].
            tokenizer=copy.deepcopy(tokenizer),
            device=str(device),
            dtype=hf_model.dtype,
        )
    except (ValueError, NotImplementedError, KeyError) as error:
        reason = textwrap.shorten(str(error), 300, placeholder=" …")  # it lists all that it knows
        raise UnsupportedError(
            f"TransformerLens cannot wrap a {config.architectures[0]} "
            f"(model_type {config.model_type!r}): {reason}"
        ) from error
    bridge.cfg.model_name = name
    if is_dynamic(config):  # whose frequencies are there to go beyond the length in the config
        bridge.cfg.n_ctx = context_length(config) or 0
    bridge.eval()
    setattr(bridge, _MISSING_HEAD, missing)
    return bridge


def placement(device_map: Any, n_devices: int | None) -> dict[str, Any]:
    """Return what ``from_pretrained`` is told so that a model is spread over devices.

    TransformerLens decides, as where it loads a model itself: `device_map` as it is given, or
    `n_devices` GPUs with layers shared out among them. {}, where there is nothing to spread.

    Raises:
        DeviceError: there are not so many GPUs.
        InputError: the map cannot be used.
    """
    from transformer_lens.utilities.multi_gpu import resolve_device_map

    try:
        found, memory = resolve_device_map(n_devices, device_map, None)
    except ValueError as error:
        if device_map is None:
            raise DeviceError(f"{error} Give fewer `n_devices`, or none.") from error
        raise InputError(
            message("device_map", "one that TransformerLens takes", device_map, str(error))
        ) from error
    options = {"device_map": found, "max_memory": memory}
    return {name: value for name, value in options.items() if value is not None}


def is_spread(hf_model: Any) -> bool:
    """Whether a transformers model lies on several devices by a map of its own."""
    return len(set((getattr(hf_model, "hf_device_map", None) or {}).values())) > 1


def reinitialised(model: Any, seed: int) -> TransformerBridge:
    """Return a model of the same configuration and tokenizer, its weights drawn anew.

    They are drawn as transformers draws them before a training. The caller's random state is left
    as it was.
    """
    original = model.original_model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        fresh = type(original)(copy.deepcopy(original.config))
        fresh = fresh.to(device=original.device, dtype=original.dtype)
        name = f"{model.cfg.model_name}, re-initialised"
        bridge = boot(fresh, model.tokenizer, name=name, missing=why_no_head(model))
    # Wrapped a second time, as by the property's setter, a tokenizer can lose its [CLS]; texts have
    # to be read the same way.
    bridge._tokenizer = model.tokenizer
    for name in ("default_prepend_bos", "tokenizer_prepends_bos", "tokenizer_appends_eos"):
        setattr(bridge.cfg, name, getattr(model.cfg, name))
    return bridge


def is_dynamic(config: Any) -> bool:
    """Whether dynamic scaling stretches the rotation for inputs beyond the model's own length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters.get("rope_type") == "dynamic"


def context_length(config: Any) -> int | None:
    """Return the longest input in tokens, or None where nothing limits it."""
    for key in ("max_position_embeddings", "n_positions"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return int(value * config.rope_parameters["factor"]) if is_dynamic(config) else value
    return None


def check_bridge(model: object) -> None:
    """Raise InputError unless `model` is a TransformerBridge."""
    if not isinstance(model, TransformerBridge):
        raise InputError(
            "`model` must be a TransformerBridge, as wvprobe.load returns. Got "
            f"{type(model).__name__} instead. Use wvprobe.load(model, tokenizer=tokenizer)."
        )


def why_no_head(model: Any) -> str:
    """Return why the model has no usable head for tokens, or "" where it has one."""
    return getattr(model, _MISSING_HEAD, "")


def require_head(model: Any, what: str) -> None:
    """Raise UnsupportedError, naming `what`, where the checkpoint carried no head."""
    reason = why_no_head(model)
    if reason:
        raise UnsupportedError(
            f"{what} needs a model with a language-modelling head; {model.cfg.model_name} has "
            f"none: {reason}. Use measures on the residual stream (capture, drift) instead."
        )


def canonical_parameters(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that run, under the names they have without hooks, each once.

    A bridge splits a fused projection into q, k and v, which run, and keeps the fused one, which
    does not: that one is left out, as are second names of tied weights.
    """
    named = {
        name.replace("._original_component", ""): parameter
        for name, parameter in model.original_model.named_parameters()
    }
    for name, parameter in sorted(named.items()):
        if ".qkv." not in name or name.replace(".qkv.", ".q.") not in named:
            yield name, parameter


def n_parameters(model: Any) -> int:
    """Return how many parameters the model has, without a head that its checkpoint lacks."""
    # Whatever stands outside the body is the head.
    body = f"{model.original_model.base_model_prefix}." if why_no_head(model) else ""
    named = canonical_parameters(model)
    return sum(parameter.numel() for name, parameter in named if name.startswith(body))


def weight_hash(model: Any) -> str:
    """Return one sha256 over those of all weights with their canonical names (64 hex digits).

    Kept until a weight is written to: the parameters' version counters are the cache's key.
    """
    parameters = list(canonical_parameters(model))
    state = tuple((n, p.data_ptr(), p._version, p.dtype) for n, p in parameters)
    known = _hashes.get(model)
    if known is not None and known[0] == state:
        return known[1]
    # hashlib lets go of the interpreter's lock, so parameters are hashed side by side.
    with ThreadPoolExecutor() as pool:
        digests = pool.map(_parameter_digest, parameters)
        found = hashlib.sha256(b"".join(digests)).hexdigest()
    _hashes[model] = (state, found)
    return found


def _parameter_digest(named: tuple[str, torch.Tensor]) -> bytes:
    name, parameter = named
    digest = hashlib.sha256(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
    raw = parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    digest.update(raw.numpy().data)
    return digest.digest()


def provenance(model: Any, *, seed: int | None = None, **settings: Any) -> Provenance:
    """Return the provenance of a number computed on `model` now."""
    return Provenance.of(model.cfg.model_name, weight_hash(model), seed=seed, **settings)
