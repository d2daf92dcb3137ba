"""What every result has in common: named heads, provenance, saving and loading."""

import dataclasses
import json
import math
import platform
import sys
import typing
from collections.abc import Mapping
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch

from wvprobe._validate import file_path
from wvprobe.errors import DiskSpaceError, InputError, ModelFileError, WvprobeError

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects

# Not typing.Self, which run-time checkers of annotations refuse on a single method.
AnyResult = TypeVar("AnyResult", bound="Result")

FORMAT_VERSION = 1
_VERSIONED_PACKAGES = ("wvprobe", "torch", "transformers", "transformer-lens", "numpy")


class HeadId(NamedTuple):
    """An attention head: layer and head, both counted from 0.

    Examples:
        >>> str(heads.ov(1, 2).head)
        'L1H2'
    """

    layer: int
    head: int

    def __str__(self) -> str:
        """Return the field's short form, such as ``L5H1``."""
        return f"L{self.layer}H{self.head}"


@dataclasses.dataclass(frozen=True)
class Provenance:
    """Where a number comes from: enough to compute it again.

    Attributes:
        model: name of the model, or what kind of object held the weights.
        weight_hash: sha256 over the weights under their canonical names ("" where there
            is no model behind a result).
        versions: versions of the packages that took part, of Python and of the machine.
        seed: seed of every random draw, or None where nothing is drawn.
        settings: the arguments that shaped the number.

    Examples:
        >>> heads.provenance.model, len(heads.provenance.weight_hash)
        ('tiny:llama', 64)
    """

    model: str
    weight_hash: str
    versions: Mapping[str, str]
    seed: int | None
    settings: Mapping[str, Any]

    @classmethod
    def of(
        cls, model: str, weight_hash: str, *, seed: int | None = None, **settings: Any
    ) -> "Provenance":
        """Record the versions in use now beside what is given."""
        return cls(model, weight_hash, dict(_versions()), seed, settings)


@cache
def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "machine": platform.machine()}
    for package in _VERSIONED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


@dataclasses.dataclass(frozen=True)
class Result:
    """Base of every result: a frozen dataclass whose fields are tensors, frames and plain data.

    A subclass gives ``to_frame`` and names the axes of its tensors in ``AXES``; its figure
    lives in :mod:`wvprobe.plotting` under the class's own name.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> audit = wvprobe.audit(model, "The river bank.")
        >>> with TemporaryDirectory() as folder:
        ...     again = wvprobe.Result.load(audit.save(folder))
        >>> again.ok, again.provenance.model
        (True, 'tiny:llama')
    """

    provenance: Provenance
    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def to_frame(self) -> "pandas.DataFrame":
        """Return the numbers as a tidy frame, one observation a row."""
        raise NotImplementedError(f"{type(self).__name__} must define to_frame()")

    def figure(self) -> "plotly.graph_objects.Figure":
        """Return the result's figure."""
        # The plotter stands above every result in the import order, hence the late look-up.
        return import_module("wvprobe.plotting").figure(self)

    def save(self, path: str | Path) -> Path:
        """Write the result to the folder `path` as ``tensors.safetensors`` and ``result.json``.

        Raises:
            DiskSpaceError: nothing can be written there.
            InputError: `path` is none.
        """
        from safetensors.torch import save_file

        folder = file_path("path", path)
        tensors: dict[str, torch.Tensor] = {}
        fields = {
            field.name: _encode(getattr(self, field.name), field.name, tensors)
            for field in dataclasses.fields(self)
        }
        document = {
            "format": FORMAT_VERSION,
            "class": f"{type(self).__module__}:{type(self).__qualname__}",
            "fields": fields,
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, folder / "tensors.safetensors")
            (folder / "result.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
        except OSError as error:
            raise DiskSpaceError(f"cannot write to {folder}: {error}. Name another.") from error
        return folder

    @classmethod
    def load(cls: type[AnyResult], path: str | Path) -> AnyResult:
        """Read a result that :meth:`save` wrote.

        Raises:
            ModelFileError: the folder holds no result, one of a later format, a broken one, or one
                whose class has other fields in this version.
            InputError: the folder holds a result of another class than the one asked for.
        """
        folder = file_path("path", path)
        document, tensors = _read(folder)
        try:
            found = _class_named(document["class"])
            fields = {k: _decode(v, tensors) for k, v in document["fields"].items()}
        except WvprobeError:
            raise
        except Exception as error:  # whatever a file may hold that `save` does not write
            raise ModelFileError(f"{folder} is broken: {type(error).__name__}: {error}") from error
        if not issubclass(found, cls):
            raise InputError(
                f"{folder} holds a {found.__name__}, not a {cls.__name__}. "
                f"Use {found.__name__}.load or Result.load."
            )
        _check_fields(folder, found, fields)
        return found(**fields)


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return what a saved result's two files hold, if they are of a format that is known."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        document = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "tensors.safetensors")
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ModelFileError(f"{folder} holds no saved result: {error}") from error
    version = document.get("format") if isinstance(document, dict) else None
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise ModelFileError(f"{folder} holds no saved result: its result.json names no format.")
    if version > FORMAT_VERSION:
        raise ModelFileError(
            f"{folder} has result format {version}; this version reads up to "
            f"{FORMAT_VERSION}. Install a newer wvprobe."
        )
    return document, tensors


def _check_fields(folder: Path, found: Any, fields: Mapping[str, Any]) -> None:
    """Refuse fields that the class of this version does not have, or that lack."""
    own = {field.name: field for field in dataclasses.fields(found)}
    unset = dataclasses.MISSING
    needed = {n for n, f in own.items() if f.default is unset and f.default_factory is unset}
    lacking, unknown = sorted(needed - set(fields)), sorted(set(fields) - set(own))
    if lacking or unknown:
        told = [f"lacks {', '.join(lacking)}"] * bool(lacking)
        told += [f"has {', '.join(unknown)}, which this version does not know"] * bool(unknown)
        versions = getattr(fields.get("provenance"), "versions", {})
        raise ModelFileError(
            f"the {found.__name__} in {folder} {' and '.join(told)}. It was saved by wvprobe "
            f"{versions.get('wvprobe', 'of an unknown version')}: load it with that, or measure "
            "anew."
        )
    wrong = [n for n in found.AXES if not isinstance(fields.get(n), torch.Tensor | None)]
    if wrong or not isinstance(fields["provenance"], Provenance):
        named = ", ".join(wrong) or "provenance"
        raise ModelFileError(f"{folder} is broken: {named} of its {found.__name__} is none.")


def _class_named(name: str) -> Any:
    """Return one of wvprobe's own dataclasses; a file names no other."""
    found = _named(name)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ModelFileError(f"a saved result names the class {name}, which does not exist.")
    return found


def _tuple_named(name: str) -> Any:
    """Return one of wvprobe's own named tuples: a file has no function called."""
    found = _named(name)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise ModelFileError(f"a saved result names the tuple {name}, which does not exist.")
    return found


def _named(name: str) -> Any:
    module, _, qualname = name.partition(":")
    if not module.startswith("wvprobe.") and module not in sys.modules:
        raise ModelFileError(f"a saved result names the class {name}, which is none of wvprobe's.")
    try:
        return getattr(import_module(module), qualname, None)
    except ImportError as error:
        raise ModelFileError(f"a saved result names {name}: {error}") from error


def _encode(value: Any, key: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return `value` as JSON, its tensors moved to `tensors` under `key` and below."""
    import numpy
    import pandas

    if isinstance(value, torch.Tensor) and value.is_complex():
        # safetensors knows one complex type at most, so pairs of reals are written.
        return {"$complex": _encode(torch.view_as_real(value.resolve_conj()), key, tensors)}
    if isinstance(value, torch.Tensor):
        tensors[key] = value.detach().cpu().contiguous().clone()
        return {"$tensor": key}
    if isinstance(value, pandas.DataFrame):
        columns = {str(c): value[c].tolist() for c in value.columns}
        return {"$frame": _encode(columns, key, tensors)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [_encode(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]
        return {"$named": f"{type(value).__module__}:{type(value).__qualname__}", "items": items}
    if isinstance(value, tuple):
        return {"$tuple": [_encode(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(v, f"{key}.{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, Mapping):
        pairs = [
            [_encode(k, key, tensors), _encode(v, f"{key}.{i}", tensors)]
            for i, (k, v) in enumerate(value.items())
        ]
        return {"$mapping": pairs}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        fields = {
            f.name: _encode(getattr(value, f.name), f"{key}.{f.name}", tensors)
            for f in dataclasses.fields(value)
        }
        return {"$dataclass": name, "fields": fields}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(float(value))}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, numpy.generic):
        return _encode(value.item(), key, tensors)
    raise InputError(f"a result's field {key} holds a {type(value).__name__}, which is not saved.")


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    import pandas

    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$complex" in value:
        return torch.view_as_complex(_decode(value["$complex"], tensors))
    if "$frame" in value:
        return pandas.DataFrame(_decode(value["$frame"], tensors))
    if "$named" in value:
        return _tuple_named(value["$named"])(*_decode(value["items"], tensors))
    if "$tuple" in value:
        return tuple(_decode(value["$tuple"], tensors))
    if "$mapping" in value:
        return {_decode(k, tensors): _decode(v, tensors) for k, v in value["$mapping"]}
    if "$dataclass" in value:
        fields = {k: _decode(v, tensors) for k, v in value["fields"].items()}
        return typing.cast(Any, _class_named(value["$dataclass"]))(**fields)
    return float(value["$float"])
