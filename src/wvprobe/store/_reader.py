"""A store that is open: what is asked for is read, and nothing else."""

import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from wvprobe._validate import file_path, index, message
from wvprobe.errors import InputError, IntegrityError, StoreError
from wvprobe.store._files import INDEX, ITEMS, present, sha256, shard_path
from wvprobe.store._items import Column, StoredItems, mapped
from wvprobe.store._manifest import Manifest
from wvprobe.store._shards import damaged, is_whole, sealed_by

# Mapped files that are kept open: each holds a descriptor, not memory.
_OPEN = 32
_BLOCK_BYTES = 64 << 20


def items_of(folder: Path, manifest: Manifest) -> StoredItems:
    """Return the items of a store, complete or not.

    Raises:
        StoreError: there are none.
        IntegrityError: they are not what was written.
    """
    return StoredItems(_checked_items(folder, manifest))


def _checked_items(folder: Path, manifest: Manifest) -> Path:
    path = folder / ITEMS
    if not path.is_file():
        raise StoreError(f"{path} is missing. Capture anew to another folder.")
    if sha256(path) != manifest.items:
        raise IntegrityError(f"{path} is not what was written. Capture again to write it anew.")
    return path


class Store:
    """The files of a store, each checked when it is first read.

    Attributes:
        folder: where it lies.
        manifest: what it was captured with.
        items: [item] the items that are there, by their numbers in the capture: all of them, but
            for a partial store.
    """

    def __init__(self, folder: str | Path, *, partial: bool = False) -> None:
        """Open a store.

        Args:
            folder: where it lies.
            partial: whether to open one that is not complete; the items of missing batches are
                then left out.

        Raises:
            StoreError: there is none, it cannot be read, or it is not complete.
            IntegrityError: its table of items is not what was written.
        """
        self.folder = file_path("folder", folder)
        self.manifest = Manifest.read(self.folder)
        there = present(self.folder, self.manifest.n_batches)
        self._check_complete(there, partial)
        self._table = mapped(_checked_items(self.folder, self.manifest))
        sizes, order = self.manifest.sizes.long(), self.manifest.order.long()
        starts = sizes.cumsum(dim=0) - sizes
        known = torch.zeros(len(sizes), dtype=torch.bool)
        known[there] = True
        shard = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        row = torch.arange(len(order)) - torch.repeat_interleave(starts, sizes)
        self.items: Int[Tensor, " item"] = order[known[shard]].sort().values
        self.is_complete = len(self.items) == len(order)
        self._shard, self._row = torch.empty_like(order), torch.empty_like(order)
        self._shard[order], self._row[order] = shard, row
        self._shard, self._row = self._shard[self.items], self._row[self.items]
        self._there = there
        self._whole: set[int] = set()
        self._handles: OrderedDict[int, Any] = OrderedDict()

    def _check_complete(self, there: list[int], partial: bool) -> None:
        n = self.manifest.n_batches
        if len(there) == n or (partial and there):
            return
        raise StoreError(
            f"{self.folder} is not complete: {len(there)} of {n} shards are there. Call capture "
            "with the same arguments to go on where it stopped"
            + (", or open it with partial=True." if there else ".")
        )

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.items)

    def column(self, name: str) -> Column:
        """Return a field of all items (see :class:`~wvprobe.store.Item`), read one by one."""
        return Column(self._table.column(name), None if self.is_complete else self.items)

    def is_null(self, name: str) -> bool:
        """Whether no item has such a field."""
        column = self._table.column(name)
        return column.null_count == len(column)

    def lengths(self) -> Int[Tensor, " item"]:
        """Return how many tokens each text has."""
        from pyarrow import compute

        counted = compute.list_value_length(self._table.column("tokens")).to_numpy()  # pyright: ignore[reportAttributeAccessIssue]
        return torch.from_numpy(counted.copy()).long()[self.items]

    def index(self) -> Any:
        """Return the whole index as a frame: a row a vector."""
        import pandas

        return pandas.read_parquet(self.folder / INDEX)

    def verify(self) -> None:
        """Read everything and hold it against its checksums.

        Raises:
            IntegrityError: a shard is not what was written; the first one is named, with its
                damaged vectors.
        """
        for number in self._shard.unique().tolist():
            self._whole.discard(number)
            self._check(number)

    def fingerprint(self, site: str) -> str:
        """Return what tells a site's numbers from others, from the checksums of the shards."""
        digest = hashlib.sha256(f"{self.manifest.identity} {site}".encode())
        for number in self._shard.unique().tolist():
            sealed = sealed_by(self.folder, number)
            digest.update(b"" if sealed is None else sealed.sha256.encode())
        return f"store sha256 {digest.hexdigest()[:16]}"

    def _check(self, number: int) -> None:
        if number in self._whole:
            return
        if not is_whole(self.folder, number, self.manifest.identity):
            raise IntegrityError(
                f"{shard_path(self.folder, number)} is not what was written: "
                f"{self._damage(number)}. Call capture again with the same arguments to write it "
                "anew."
            )
        self._whole.add(number)

    def _damage(self, number: int) -> str:
        """Say which vectors are wrong, as far as their own checksums tell."""
        sealed = sealed_by(self.folder, number)
        if sealed is None:
            return "its index cannot be read"
        if sealed.identity != self.manifest.identity:
            return "it belongs to another manifest"
        if not shard_path(self.folder, number).is_file():
            return "it is missing"
        wrong = damaged(self.folder, number)
        if not wrong:
            return "its vectors are, but what stands around them is not"
        item, site, layer = wrong[0]
        return f"{len(wrong)} vectors differ, first {site} of item {item} at layer {layer}"

    def _slice(self, number: int, site: str) -> Any:
        """Return a site of a shard, mapped: nothing is read before it is indexed."""
        from safetensors import safe_open

        self._check(number)
        if number in self._handles:
            self._handles.move_to_end(number)
        else:
            path = shard_path(self.folder, number)
            self._handles[number] = safe_open(path, framework="pt")
            if len(self._handles) > _OPEN:
                self._handles.popitem(last=False)
        return self._handles[number].get_slice(site)

    def sample(self, site: str) -> tuple[list[int], torch.dtype]:
        """Return [layer, row, …] lengths and dtype of a site in the first shard that is whole."""
        for number in self._there:
            with contextlib.suppress(IntegrityError):
                one = self._slice(number, site)
                return list(one.get_shape()), one[0:1, 0:1].dtype
        self._check(self._there[0])
        raise StoreError(f"{self.folder} has no site {site!r}.")

    def batches(self) -> Iterator[Int[Tensor, " item"]]:
        """Yield the places of the items of each shard, in the order of its rows."""
        order = torch.argsort(self._shard * (1 + int(self._row.max())) + self._row)
        _, counts = torch.unique_consecutive(self._shard[order], return_counts=True)
        yield from order.split(counts.tolist())

    def read(
        self,
        site: str,
        at: Int[Tensor, " some"],
        rows: Sequence[int],
        heads: slice,
        out: Tensor,
    ) -> None:
        """Fill `out` with some items of some layers.

        Args:
            site: which.
            at: places of the items.
            rows: places of the layers on the site's axis.
            heads: what is read of the axis that follows row and layer on disk.
            out: [some, row, …]; where a shard is shorter, what stands there stays.
        """
        order = torch.argsort(self._shard[at], stable=True)
        numbers, counts = torch.unique_consecutive(self._shard[at][order], return_counts=True)
        parts = order.split(counts.tolist())
        for number, places in zip(numbers.tolist(), parts, strict=True):
            wanted = self._row[at[places]]
            low, high = int(wanted.min()), int(wanted.max()) + 1
            source = self._slice(number, site)
            for place, row in enumerate(rows):
                found = source[row : row + 1, low:high, heads][0][wanted - low]
                # A text may be asked for with less room than its shard has: beyond is padding.
                sizes = zip(found.shape[1:], out.shape[2:], strict=True)
                inner = tuple(slice(0, min(pair)) for pair in sizes)
                out[(places, place, *inner)] = found[(slice(None), *inner)]


class StoredSite:
    """A site on disk, indexed as a tensor is; only what is asked for is read.

        store["v"][rows, 3]          # [row, kv_head, d_head]: the shards of these rows, layer 3
        store["v"].tensor()          # everything
        for items, values in store["v"].blocks(): ...

    Attributes:
        name: the site.
        layers: the layers on its axis.
        axes: names of its axes.
        shape: lengths of these.
        dtype: of its numbers.
    """

    def __init__(self, store: Store, name: str) -> None:
        """Look at a site of a store."""
        facts = store.manifest.sites[name]
        self.store, self.name = store, name
        self.layers, self.axes, self._facts = facts.layers, facts.axes, facts
        self._layer_axis = facts.axes.index("layer")
        sample, self.dtype = store.sample(name)
        inner = iter(sample[2:])
        sizes = {"item": len(store), "layer": len(facts.layers)}
        lengths = [sizes[axis] if axis in sizes else next(inner) for axis in facts.axes]
        ragged = [axis in facts.ragged for axis in facts.axes]
        longest = store.manifest.longest
        self.shape = torch.Size(
            longest if loose else own for own, loose in zip(lengths, ragged, strict=True)
        )

    def __len__(self) -> int:
        """Return the number of items."""
        return self.shape[0]

    def __repr__(self) -> str:
        """Return the axes with their lengths, and the folder."""
        named = ", ".join(f"{a} {n}" for a, n in zip(self.axes, self.shape, strict=True))
        return f"<{self.name} [{named}] of {self.dtype} in {self.store.folder}>"

    def dim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the bytes that the whole tensor would take."""
        return self.shape.numel() * self.dtype.itemsize

    def __iter__(self) -> Iterator[Tensor]:
        """Yield item after item; :meth:`blocks` is quicker."""
        return (self[item] for item in range(len(self)))

    def __getitem__(self, key: Any) -> Tensor:
        """Return what a tensor with this shape would: ints, slices, and one list or mask at most.

        Raises:
            InputError: an index is out of range, negative, or of another kind.
            IntegrityError: a shard that is read is not what was written.
        """
        given = _spread(key, self.dim())
        lists = [part for part in given if not isinstance(part, int | slice)]
        if len(lists) > 1:
            hint = "Index one axis, then the other: site[items][:, layers]."
            raise InputError(message("index", "with one list at most", key, hint))
        items, layer = given[0], given[self._layer_axis]
        at = _numbers("item", items, len(self), "items")
        rows = _numbers("layer", layer, len(self.layers), "layers here")
        found = self.read(at, rows.tolist())
        # Axes are taken from the last one on, so that those before keep their places.
        for axis in range(self.dim() - 1, -1, -1):
            if axis in (0, self._layer_axis):
                found = found.squeeze(axis) if isinstance(given[axis], int) else found
            elif given[axis] != slice(None):
                size, name = self.shape[axis], self.axes[axis]
                chosen = _numbers(name, given[axis], size, f"places on the axis {name}")
                found = found.index_select(axis, chosen)
                found = found.squeeze(axis) if isinstance(given[axis], int) else found
        return found

    def read(
        self,
        items: Int[Tensor, " some"],
        rows: Sequence[int] | None = None,
        longest: int | None = None,
        heads: slice | None = None,
    ) -> Tensor:
        """Return some items, with some places of the layer axis (None: all).

        Args:
            items: places of the items, in any order.
            rows: places on the layer axis.
            longest: length of axes that are padded; None for that of the longest text.
            heads: places on the first axis beside item and layer; None for all.
        """
        chosen = range(len(self.layers)) if rows is None else rows
        sizes = [
            (longest or own) if axis in self._facts.ragged else own
            for axis, own in zip(self.axes, self.shape, strict=True)
        ]
        del sizes[self._layer_axis], sizes[0]
        inner = slice(None) if heads is None else heads
        sizes[0] = len(range(sizes[0])[inner])
        out = torch.full((len(items), len(chosen), *sizes), self._facts.value, dtype=self.dtype)
        self.store.read(self.name, items, chosen, inner, out)
        return out.movedim(1, self._layer_axis)

    def tensor(self) -> Tensor:
        """Return everything."""
        return self.read(torch.arange(len(self))).contiguous()

    def blocks(
        self, size: int | None = None, rows: Sequence[int] | None = None
    ) -> Iterator[tuple[Int[Tensor, " block"], Tensor]]:
        """Yield places of items and their values, in the order in which they lie on disk.

        Args:
            size: items of a block, at least; None for some 64 MB. Shards are not split.
            rows: places on the layer axis; None for all.
        """
        layers = len(self.layers) if rows is None else len(rows)
        an_item = max(1, self.nbytes // (len(self) * len(self.layers)) * layers)
        least = size or max(1, _BLOCK_BYTES // an_item)
        waiting: list[Tensor] = []
        for items in self.store.batches():
            waiting.append(items)
            if sum(map(len, waiting)) >= least:
                block = torch.cat(waiting)
                yield block, self.read(block, rows)
                waiting.clear()
        if waiting:
            block = torch.cat(waiting)
            yield block, self.read(block, rows)


def _spread(key: Any, dims: int) -> list[Any]:
    """Return one index an axis."""
    parts = list(key) if isinstance(key, tuple) else [key]
    dots = [place for place, part in enumerate(parts) if isinstance(part, EllipsisType)]
    missing = dims - len(parts) + len(dots)
    if len(dots) > 1 or missing < 0:
        raise InputError(message("index", f"for {dims} axes at most", key))
    if dots:
        parts[dots[0] : dots[0] + 1] = [slice(None)] * missing
        return parts
    return parts + [slice(None)] * missing


def _numbers(name: str, given: Any, size: int, what: str) -> Int[Tensor, " some"]:
    """Return the places that an index of one axis stands for."""
    if isinstance(given, slice):
        return torch.arange(size)[given]
    if isinstance(given, Tensor) and given.dtype == torch.bool:
        if given.shape != (size,):
            raise InputError(message(name, f"a mask of length {size}", f"shape {given.shape}"))
        return given.nonzero()[:, 0]
    if isinstance(given, int):
        return torch.tensor([index(name, given, size, what)])
    listed = given.tolist() if hasattr(given, "tolist") else list(given)
    found = [index(name, one, size, what) for one in listed]
    return torch.tensor(found, dtype=torch.long)
