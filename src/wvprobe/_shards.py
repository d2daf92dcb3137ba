"""Tensors of a checkpoint's safetensors files, each read when it is asked for."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from wvprobe._validate import message
from wvprobe.errors import InputError, ModelFileError

# Names that older checkpoints use for what transformers now calls otherwise.
_RENAMED = {"lm_head.weight": "embed_out.weight"}
_OLD_ENDINGS = {".weight": ".gamma", ".bias": ".beta"}


class Shards:
    """A folder of safetensors files, with or without an index."""

    def __init__(self, folder: str | Path, prefix: str) -> None:
        """Read which file holds which tensor.

        Args:
            folder: the folder.
            prefix: what a model with a head writes before the names of its body's tensors.

        Raises:
            InputError: there is no such folder.
            ModelFileError: it holds no safetensors files, or a file is broken or missing.
        """
        self.folder, self.prefix = Path(folder), prefix
        if not self.folder.is_dir():
            raise InputError(message("folder", "a folder with safetensors files", str(folder)))
        self.files = self._files()

    def _files(self) -> dict[str, Path]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            files = {name: self.folder / file for name, file in _weight_map(index).items()}
            missing = sorted({path.name for path in files.values() if not path.is_file()})
            if missing:
                raise ModelFileError(
                    f"{self.folder} lacks {', '.join(missing)}, which its index names. Get the "
                    "checkpoint again."
                )
            return files
        found = sorted(self.folder.glob("*.safetensors"))
        if not found:
            raise ModelFileError(
                f"{self.folder} holds no safetensors files. Use load(), which reads other formats "
                "too, and HeadWeights.from_model."
            )
        return {name: path for path in found for name in self._names(path)}

    @staticmethod
    def _names(path: Path) -> list[str]:
        with _opened(path) as file:
            return list(file.keys())

    def find(self, name: str) -> str | None:
        """Return the name that the checkpoint gives a model's parameter, or None."""
        for wanted in self._spellings(name):
            if wanted in self.files:
                return wanted
        return None

    def _spellings(self, name: str) -> Sequence[str]:
        """Return the ways to write a name: with and without the body's prefix, and old ones."""
        bare = name.removeprefix(f"{self.prefix}.")
        ways = [name, bare, f"{self.prefix}.{bare}"]
        ways += [_RENAMED[way] for way in ways if way in _RENAMED]
        for new, old in _OLD_ENDINGS.items():
            ways += [way.removesuffix(new) + old for way in ways if way.endswith(new)]
        return ways

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return tensors by the names that the checkpoint gives them, in the dtype it holds.

        Each file is opened and closed again, so that no more than these tensors stays in memory.
        """
        tensors: dict[str, torch.Tensor] = {}
        for path in dict.fromkeys(self.files[name] for name in names):
            with _opened(path) as file:
                for name in (name for name in names if self.files[name] == path):
                    tensors[name] = file.get_tensor(name)
        return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Return which file of an index's own folder holds which tensor."""
    try:
        weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        # A name with a folder in it would have other files read than those of the checkpoint.
        strange = [file for file in weights.values() if Path(file).name != file]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{index} is broken: {error}. Get it again.") from error
    if strange:
        raise ModelFileError(
            f"{index} names {strange[0]!r}, which is no file of its folder. Get the checkpoint "
            "from somewhere else."
        )
    return dict(weights)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelFileError(f"{path} is broken: {error}. Get the checkpoint again.") from error
