"""One batch on disk: its tensors, and an index that says what they are and that they are whole."""

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wvprobe.store._files import clear_errors, index_path, remove, sha256, shard_path, written
from wvprobe.store._items import Item

_IDENTITY, _SHA256, _BYTES = b"wvprobe.manifest", b"wvprobe.shard_sha256", b"wvprobe.shard_bytes"


class Sealed(NamedTuple):
    """What an index says of its shard as a whole.

    Attributes:
        identity: of the manifest that it belongs to.
        sha256: of the shard's file.
        size: the file's bytes.
    """

    identity: str
    sha256: str
    size: int


def write_shard(
    folder: Path,
    identity: str,
    number: int,
    values: Mapping[str, Tensor],
    layers: Mapping[str, Sequence[int]],
    items: Mapping[int, Item],
) -> None:
    """Write one batch; it counts from the moment at which its index is there.

    Any process may, for a batch that nobody else writes.

    Args:
        folder: of the store.
        identity: of its manifest.
        number: of the batch.
        values: site -> [layer, row, …].
        layers: site -> the layers on its axis.
        items: number -> item, in the order of the rows.

    Raises:
        DiskSpaceError: the disk is full, or the folder cannot be written to.
    """
    from safetensors.torch import save

    held = {site: value.contiguous() for site, value in values.items()}
    content = save(held)
    sealed = Sealed(identity, hashlib.sha256(content).hexdigest(), len(content))
    with clear_errors(folder):
        # An index must never stand beside a shard that is not its own.
        remove(index_path(folder, number))
        with written(shard_path(folder, number)) as file:
            file.write(content)
        with written(index_path(folder, number)) as file:
            file.write(_encoded(_rows(number, held, layers, items), sealed))


def _rows(
    number: int,
    values: Mapping[str, Tensor],
    layers: Mapping[str, Sequence[int]],
    items: Mapping[int, Item],
) -> dict[str, list[Any]]:
    """Return the index as columns: a row a vector (where all positions are read, a text)."""
    columns: dict[str, list[Any]] = {name: [] for name, _ in _COLUMNS}
    ends = {
        item: (0, len(one.tokens))
        if one.positions is None
        else (min(one.positions), max(one.positions) + 1)
        for item, one in items.items()
    }
    for site, value in values.items():
        sums = checksums(value)
        for place, layer in enumerate(layers[site]):
            for row, (item, one) in enumerate(items.items()):
                entry = (item, one.text, one.word, *ends[item], site, layer)
                entry += (number, row, sums[place][row])
                for name, part in zip(columns, entry, strict=True):
                    columns[name].append(part)
    return columns


def checksums(value: Tensor) -> list[list[int]]:
    """Return the CRC-32 of the bytes of each [layer, row]."""
    raw = value.flatten(2) if value.dim() > 2 else value[..., None]
    plain = raw.contiguous().view(torch.uint8).numpy()
    return [[zlib.crc32(row.data) for row in layer] for layer in plain]


_COLUMNS = (
    ("item", "int32"),
    ("text", "string"),
    ("word", "string"),
    ("start", "int32"),
    ("end", "int32"),
    ("site", "string"),
    ("layer", "int16"),
    ("shard", "int32"),
    ("row", "int32"),
    ("checksum", "uint32"),
)


def _encoded(columns: Mapping[str, list[Any]], sealed: Sealed) -> bytes:
    import pyarrow
    import pyarrow.parquet

    kinds = {name: pyarrow.type_for_alias(kind) for name, kind in _COLUMNS}
    schema = pyarrow.schema(list(kinds.items())).with_metadata(
        {_IDENTITY: sealed.identity, _SHA256: sealed.sha256, _BYTES: str(sealed.size)}
    )
    table = pyarrow.table(dict(columns), schema=schema)
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def sealed_by(folder: Path, number: int) -> Sealed | None:
    """Return what a batch's index says of its shard; None where there is none that can be read."""
    import pyarrow
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_schema(index_path(folder, number)).metadata or {}
        identity, digest, size = (metadata[key].decode() for key in (_IDENTITY, _SHA256, _BYTES))
        return Sealed(identity, digest, int(size))
    except (OSError, ValueError, KeyError, pyarrow.ArrowException):
        return None


def is_whole(folder: Path, number: int, identity: str) -> bool:
    """Whether a batch is there, belongs to a manifest, and holds the bytes that were written."""
    sealed, path = sealed_by(folder, number), shard_path(folder, number)
    if sealed is None or sealed.identity != identity or not path.is_file():
        return False
    return path.stat().st_size == sealed.size and sha256(path) == sealed.sha256


def damaged(folder: Path, number: int) -> list[tuple[int, str, int]]:
    """Return the vectors (item, site, layer) of a shard that are not what was written."""
    import pyarrow.parquet
    from safetensors import SafetensorError
    from safetensors.torch import load

    rows = pyarrow.parquet.read_table(index_path(folder, number)).to_pylist()
    every = [(row["item"], row["site"], row["layer"]) for row in rows]
    try:
        values = load(shard_path(folder, number).read_bytes())
        found = {site: checksums(value) for site, value in values.items()}
        return [
            key
            for key, row, at in zip(every, rows, _places(rows), strict=True)
            if found[row["site"]][at][row["row"]] != row["checksum"]
        ]
    except (SafetensorError, KeyError, IndexError):
        return every  # not even its header is


def _places(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the place of each row's layer on its site's axis."""
    known: dict[str, dict[int, int]] = {}
    return [
        known.setdefault(row["site"], {}).setdefault(row["layer"], len(known[row["site"]]))
        for row in rows
    ]
