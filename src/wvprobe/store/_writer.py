"""The one writer of a store: what is there is checked and kept, what is missing is told."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from wvprobe.errors import StoreError
from wvprobe.store._files import (
    INDEX,
    ITEMS,
    LOCK,
    MANIFEST,
    SHARDS,
    TEMPORARY,
    clear_errors,
    sha256,
    sync_folder,
    tidy,
    written,
)
from wvprobe.store._items import ItemsFile
from wvprobe.store._manifest import Manifest
from wvprobe.store._shards import is_whole

_OWN = {MANIFEST, ITEMS, SHARDS, INDEX, LOCK}


class Writer:
    """A folder under lock. The lock ends with the process that holds it, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Use :meth:`of`."""
        self.folder = folder
        self.manifest: Manifest | None = None

    @classmethod
    @contextlib.contextmanager
    def of(cls, folder: Path) -> Iterator["Writer"]:
        """Lock a folder, made if it is not there.

        Raises:
            StoreError: another process writes to it, or it holds something else.
            DiskSpaceError: it cannot be written to.
        """
        from filelock import FileLock, Timeout

        with clear_errors(folder):
            _check_empty(folder)
            new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(folder / LOCK)
            try:
                lock.acquire(blocking=False)
            except Timeout as error:
                raise StoreError(
                    f"{folder} is being written to by another process. Wait for it, or name "
                    "another folder; what it has written so far opens with "
                    "wvprobe.activations.open_store(folder, partial=True)."
                ) from error
        try:
            with clear_errors(folder):
                for place in (SHARDS, INDEX):
                    (folder / place).mkdir(exist_ok=True)
                tidy(folder)
            yield cls(folder)
        finally:
            if new and not (folder / MANIFEST).exists():
                _withdraw(folder)
            lock.release()

    def start(self, items: Callable[[ItemsFile], Callable[[str], Manifest]]) -> Manifest:
        """Write the table of items and the manifest, or hold them against those there.

        Args:
            items: adds all items to a file, and returns what makes a manifest of its sha256.

        Raises:
            StoreError: the folder holds what other settings gave; each that differs is named.
            DiskSpaceError: it cannot be written to.
        """
        known = (self.folder / MANIFEST).exists()
        with clear_errors(self.folder):
            fresh = self.folder / f".{ITEMS}.new{TEMPORARY}"
            with written(fresh) as file:
                table = ItemsFile(file)
                finish = items(table)
                table.close()
            try:
                manifest = finish(sha256(fresh))
                if known:
                    self._check_same(manifest)
                fresh.replace(self.folder / ITEMS)
            finally:
                fresh.unlink(missing_ok=True)
            if not known:
                with written(self.folder / MANIFEST) as file:
                    file.write(manifest.encoded())
            sync_folder(self.folder)
        self.manifest = manifest
        return manifest

    def _check_same(self, manifest: Manifest) -> None:
        differences = Manifest.read(self.folder).differences(manifest)
        if differences:
            listed = "; ".join(differences)
            raise StoreError(
                f"{self.folder} holds activations of another capture, and two are never mixed. "
                f"What differs: {listed}. Name another folder, capture as before, or delete it."
            )

    def missing(self) -> list[int]:
        """Return the batches that are not there, or not as they were written."""
        if self.manifest is None:
            raise StoreError(f"{self.folder} has not been started.")
        identity = self.manifest.identity
        with clear_errors(self.folder):
            numbers = range(self.manifest.n_batches)
            return [n for n in numbers if not is_whole(self.folder, n, identity)]

    def tidy(self) -> None:
        """Remove what workers left half written that were killed; none may be at work."""
        with clear_errors(self.folder):
            tidy(self.folder)


def _check_empty(folder: Path) -> None:
    """Refuse a folder that holds anything but a store."""
    if folder.is_dir() and not (folder / MANIFEST).exists():
        others = sorted({path.name for path in folder.iterdir() if path.name[0] != "."} - _OWN)
        if others:
            raise StoreError(
                f"{folder} holds other files ({', '.join(others[:3])}…). Name a new folder."
            )


def _withdraw(folder: Path) -> None:
    """Remove a folder in which nothing was begun; what is not ours keeps it."""
    with contextlib.suppress(OSError):
        for place in (SHARDS, INDEX):
            (folder / place).rmdir()
        for name in (ITEMS, LOCK):
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
