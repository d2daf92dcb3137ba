"""What a report has finished, kept in a folder so that an interrupted one can go on."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from wvprobe.errors import DiskSpaceError, InputError

FOLDER = ".wvprobe-run"
_MANIFEST = "manifest.json"


class Store:
    """Finished steps of a report, a JSON file each, written whole or not at all."""

    def __init__(self, out: Path) -> None:
        """Look into the report's folder; nothing is made or read yet."""
        self._out, self._folder = out, out / FOLDER

    def begin(self, manifest: Mapping[str, Any], *, resume: bool) -> None:
        """Make room for a run, or find the one to go on with.

        Args:
            manifest: what shapes the numbers, as plain data.
            resume: whether to go on with what is there; without, it is thrown away.

        Raises:
            InputError: what is there was measured otherwise; the message says what differs.
            DiskSpaceError: the folder cannot be written to.
        """
        wanted = json.loads(json.dumps(manifest))
        found = self._read(_MANIFEST) if resume else None
        if found is not None:
            different = differences(found, wanted)
            if different:
                raise InputError(
                    f"--resume cannot go on with {self._folder}, which was measured otherwise: "
                    f"{'; '.join(different)}. Without --resume the report starts over."
                )
            return
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder.mkdir(parents=True)
        except OSError as error:
            raise DiskSpaceError(f"cannot make the folder {self._folder}: {error}.") from error
        self._write(_MANIFEST, wanted)

    def read(self, step: str) -> Any:
        """Return what a step left, or None."""
        return self._read(f"{step}.json")

    def write(self, step: str, document: Any) -> None:
        """Keep what a step found.

        Raises:
            DiskSpaceError: it cannot be written.
        """
        self._write(f"{step}.json", document)

    def _read(self, name: str) -> Any:
        try:
            return json.loads((self._folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise InputError(
                f"cannot read {self._folder / name}: {error}. Without --resume the report "
                "starts over."
            ) from error

    def _write(self, name: str, document: Any) -> None:
        write_whole(self._folder / name, json.dumps(document, ensure_ascii=False))


def write_whole(path: Path, text: str) -> None:
    """Write a file by one rename, so that whoever interrupts leaves the old one or the new one.

    Raises:
        DiskSpaceError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise DiskSpaceError(f"cannot write {path}: {error}. Name another folder.") from error


def differences(found: Any, wanted: Any, name: str = "") -> list[str]:
    """Return where two documents of plain data differ, a phrase each."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        keys = dict.fromkeys([*found, *wanted])
        return [
            phrase
            for key in keys
            for phrase in differences(
                found.get(key), wanted.get(key), f"{name} {key}" if name else key
            )
        ]
    return [] if found == wanted else [f"{name} was {_short(found)} and is {_short(wanted)}"]


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:79]}…"


@cache
def source_digest() -> str:
    """Return a hash of wvprobe's own files: numbers of two states of it are not mixed."""
    digest = hashlib.sha256()
    root = Path(str(resources.files("wvprobe")))
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()
