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

from wvprobe.errors import InputError, ModelFileError

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
        """Write the result to the folder `path` as ``tensors.safetensors`` and ``result.json``."""
        from safetensors.torch import save_file

        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
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
        save_file(tensors, folder / "tensors.safetensors")
        (folder / "result.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
        return folder

    @classmethod
    def load(cls: type[AnyResult], path: str | Path) -> AnyResult:
        """Read a result that :meth:`save` wrote.

        Raises:
            ModelFileError: the folder holds no result, or one of a later format.
            InputError: the folder holds a result of another class than the one asked for.
        """
        from safetensors.torch import load_file

        folder = Path(path)
        try:
            document = json.loads((folder / "result.json").read_text(encoding="utf-8"))
            tensors = load_file(folder / "tensors.safetensors")
        except (OSError, ValueError) as error:
            raise ModelFileError(f"{folder} holds no saved result: {error}") from error
        if document.get("format", 0) > FORMAT_VERSION:
            raise ModelFileError(
                f"{folder} has result format {document['format']}; this version reads up to "
                f"{FORMAT_VERSION}. Install a newer wvprobe."
            )
        found = _class_named(document["class"])
        if not issubclass(found, cls):
            raise InputError(
                f"{folder} holds a {found.__name__}, not a {cls.__name__}. "
                f"Use {found.__name__}.load or Result.load."
            )
        return found(**{k: _decode(v, tensors) for k, v in document["fields"].items()})


def _class_named(name: str) -> Any:
    """Return one of wvprobe's own dataclasses; a file names no other."""
    module, _, qualname = name.partition(":")
    if not module.startswith("wvprobe.") and module not in sys.modules:
        raise ModelFileError(f"a saved result names the class {name}, which is none of wvprobe's.")
    found = getattr(import_module(module), qualname, None)
    if not (isinstance(found, type) and dataclasses.is_dataclass(found)):
        raise ModelFileError(f"a saved result names the class {name}, which does not exist.")
    return found


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
        module, _, name = value["$named"].partition(":")
        if not module.startswith("wvprobe."):
            raise ModelFileError(f"a saved result names the class {value['$named']}.")
        return getattr(import_module(module), name)(*_decode(value["items"], tensors))
    if "$tuple" in value:
        return tuple(_decode(value["$tuple"], tensors))
    if "$mapping" in value:
        return {_decode(k, tensors): _decode(v, tensors) for k, v in value["$mapping"]}
    if "$dataclass" in value:
        fields = {k: _decode(v, tensors) for k, v in value["fields"].items()}
        return typing.cast(Any, _class_named(value["$dataclass"]))(**fields)
    return float(value["$float"])
