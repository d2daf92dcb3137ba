"""A worker: it opens a model, holds it against the manifest, and writes the shards it is given."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wvprobe import adapters
from wvprobe._types import Provenance
from wvprobe.activations import ShardMaker, SitePlan
from wvprobe.errors import StoreError, WorkerError
from wvprobe.models import opened
from wvprobe.store import Manifest, StoredItems, count_try, is_whole, items_of

ANY = "any"  # in a manifest, of a setting in which workers may differ
# A batch at which so many workers have died, one after the other, would be the next one's end, too.
DEATHS = 3


@dataclass(frozen=True)
class Order:
    """What every worker of a run is told; plain data, but for a function that opens the model.

    Attributes:
        model: what opens it: a name or path that `load` takes, or a function that returns a bridge.
        device: where a model opened by name is put; None: the CPU.
        threads: how many threads torch works with.
        folder: the store, which every worker sees under this path.
        identity: of its manifest.
        sites: as in `capture`.
        layers: likewise.
        pool: how several tokens become one vector.
        placed: whether words or positions are read.
    """

    model: Any
    device: str | None
    threads: int
    folder: str
    identity: str
    sites: tuple[str, ...]
    layers: Sequence[int] | int | None
    pool: str
    placed: bool


class Worker:
    """Writes shards of one store. The model is opened when the first one is to be made."""

    def __init__(self, order: Order) -> None:
        """Take what is to be done."""
        self.order, self.folder = order, Path(order.folder)
        self._store: tuple[Manifest, StoredItems] | None = None
        self._maker: ShardMaker | None = None

    def write(self, batch: int) -> None:
        """Write a batch's shard, unless it is there: it may have been done before a worker died.

        Raises:
            StoreError: the store is not there, or is another.
            WorkerError: the model here, or what it runs on, is not what the manifest says; or
                workers have died at this batch.
            WvprobeError: as of `capture`.
        """
        self._store = self._store or _opened_store(self.folder, self.order.identity)
        manifest, items = self._store
        if is_whole(self.folder, batch, manifest.identity):
            return
        # Opening the model may be what a worker dies of.
        _check_deaths(self.folder, batch)
        self._maker = self._maker or self._opened_maker(manifest)
        own = {number: items[number] for number in manifest.batch(batch)}
        self._maker.write_items(self.folder, manifest, batch, own)

    def _opened_maker(self, manifest: Manifest) -> ShardMaker:
        order = self.order
        torch.set_num_threads(order.threads)
        model = opened(order.model, device=order.device, audit=False)
        _check_alike(manifest, model)
        plan = SitePlan(model, adapters.architecture(model), order.sites, order.layers)
        return ShardMaker(model, plan, order.pool, order.placed)


def _opened_store(folder: Path, identity: str) -> tuple[Manifest, StoredItems]:
    """Return a store's manifest and items, if they are those that the run began with."""
    manifest = Manifest.read(folder)
    if manifest.identity != identity:
        raise StoreError(
            f"{folder} on {socket.gethostname()} is another store. Name a folder that all workers "
            "share under one path."
        )
    return manifest, items_of(folder, manifest)


def _check_deaths(folder: Path, batch: int) -> None:
    if count_try(folder, batch) > DEATHS:
        raise WorkerError(
            f"{DEATHS + 1} workers died at batch {batch}, perhaps for lack of memory. What is "
            "there stays valid, and the same call goes on: with fewer `workers`, or on machines "
            "with more memory. A smaller `batch_size` needs another folder."
        )


def _check_alike(manifest: Manifest, model: Any) -> None:
    found = {"weights": adapters.weight_hash(model), **adapters.run_settings(model)}
    alike = {k: v for k, v in found.items() if manifest.settings.get(k) != ANY}
    differences = manifest.unlike(alike, Provenance.of("", "").versions)
    if differences:
        raise WorkerError(
            f"a worker on {socket.gethostname()} would give other numbers than the manifest says. "
            f"What differs: {'; '.join(differences)}. Run workers with the same packages and "
            "machines; same_processor=False allows other processors."
        )
