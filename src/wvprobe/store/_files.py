"""Files that are there whole or not at all, and what a disk may refuse."""

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

from wvprobe.errors import DiskSpaceError, WvprobeError

MANIFEST, ITEMS, SHARDS, INDEX, LOCK = "manifest.json", "items.arrow", "shards", "index", "lock"
TEMPORARY = ".tmp"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def shard_path(folder: Path, number: int) -> Path:
    """Return where a batch's tensors lie."""
    return folder / SHARDS / f"{number:06d}.safetensors"


def index_path(folder: Path, number: int) -> Path:
    """Return where a batch's index lies."""
    return folder / INDEX / f"{number:06d}.parquet"


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """Yield a file beside `path`; once all is written and synced, it takes the place of `path`."""
    # A leading dot keeps readers of a whole folder (pandas, DuckDB) from it.
    temporary = path.with_name(f".{path.name}.{uuid4().hex}{TEMPORARY}")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make what was renamed in a folder outlast a loss of power, where the system can."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, if it is there, for good."""
    if path.exists():
        path.unlink()
        sync_folder(path.parent)


def tidy(folder: Path) -> None:
    """Remove what killed writers left half written; none may be at work."""
    for place in (folder, folder / SHARDS, folder / INDEX):
        for leftover in place.glob(f".*{TEMPORARY}"):
            leftover.unlink()


def count_try(folder: Path, number: int) -> int:
    """Note that a batch is begun, and return how often it was before, since the last `tidy`."""
    notes = folder / f".{number:06d}.tries{TEMPORARY}"
    with open(notes, "ab") as file:
        before = file.tell()
        file.write(b".")
    return before


def present(folder: Path, n_batches: int) -> list[int]:
    """Return the batches that have both their files."""
    shards = {path.name for path in (folder / SHARDS).glob("*.safetensors")}
    indices = {path.name for path in (folder / INDEX).glob("*.parquet")}
    return [
        number
        for number in range(n_batches)
        if shard_path(folder, number).name in shards and index_path(folder, number).name in indices
    ]


def sha256(path: Path) -> str:
    """Return the sha256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def clear_errors(folder: Path) -> Iterator[None]:
    """Turn what the system says of a disk into errors that say what to do."""
    try:
        yield
    except WvprobeError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise DiskSpaceError(
                f"the disk is full, or no file may grow further, in {folder}: {error}. What is "
                "there stays valid: make room, and the same call goes on where it stopped."
            ) from error
        raise DiskSpaceError(
            f"cannot write to {folder}: {error}. What is there stays valid. Name a folder that "
            "can be written, or read this one with wvprobe.activations.open_store."
        ) from error
