"""`capture(out=...)`: batch by batch to disk, so that memory holds one of them."""

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from wvprobe import adapters
from wvprobe._progress import progress as progress_bar
from wvprobe._types import Provenance
from wvprobe._validate import file_path
from wvprobe._validate import texts as checked_texts
from wvprobe.activations._batches import batches_of
from wvprobe.activations._places import Places, Positions, Words
from wvprobe.activations._run import LONG_WORK, Run, SitePlan, checked_pool
from wvprobe.activations._stored import StoredActivations, open_store
from wvprobe.adapters import PAIR_SITES, SITES
from wvprobe.store import Item, ItemsFile, Manifest, SiteFacts, Writer, write_shard
from wvprobe.words import Encoding, encode

# Encodings of texts that come again soon: words of one sentence stand beside each other.
_KNOWN = 1024


def capture_to(
    out: str | Path,
    model: Any,
    texts: str | Sequence[str],
    sites: str | Sequence[str],
    *,
    words: Words | None,
    positions: Positions | None,
    layers: Sequence[int] | int | None,
    pool: str | None,
    batch_size: int | Literal["auto"],
    progress: bool,
    prepend_bos: bool | None,
) -> StoredActivations:
    """Capture to a folder; arguments and errors are those of :func:`~wvprobe.capture`.

    The batches are those of a capture in memory, so that the numbers are the same bit for bit.
    """
    folder = file_path("out", out)
    capture = StoredCapture.of(
        model,
        texts,
        sites,
        words=words,
        positions=positions,
        layers=layers,
        pool=pool,
        batch_size=batch_size,
        prepend_bos=prepend_bos,
    )
    with Writer.of(folder) as writer:
        manifest = writer.start(capture.prepare)
        missing = writer.missing()
        total = int(manifest.sizes.sum())
        with progress_bar(total, "texts read", progress and len(missing) >= LONG_WORK) as advance:
            advance(total - sum(int(manifest.sizes[number]) for number in missing))
            for number in missing:
                capture.write(folder, manifest, number)
                advance(int(manifest.sizes[number]))
    return open_store(folder)


class ShardMaker:
    """Runs the items of a batch and writes them as a shard; of other items it knows nothing."""

    def __init__(self, model: Any, plan: SitePlan, pool: str, placed: bool) -> None:
        """Take a model and what is read.

        Args:
            model: the bridge.
            plan: the sites.
            pool: how several tokens become one vector.
            placed: whether words or positions are read; else all positions.
        """
        self.model, self.plan, self.pool, self.placed = model, plan, pool, placed
        self.arch = adapters.architecture(model)

    def facts(self, site: str) -> SiteFacts:
        """Return a site's layers and axes."""
        if site in PAIR_SITES:
            ragged = ("key",) if self.placed else ("query", "key")
            return SiteFacts(self.plan.layers[site], ("item", *SITES[site]), ragged, "nan")
        leading = ("item",) if self.placed else ("item", "pos")
        return SiteFacts(self.plan.layers[site], leading + SITES[site], leading[1:], "zero")

    def values(self, items: Mapping[int, Item]) -> dict[str, Tensor]:
        """Run the items of a batch together; return site -> [layer, item, …]."""
        picked = [item.positions for item in items.values() if item.positions is not None]
        run = Run(
            self.model,
            self.arch,
            self.plan,
            [
                item.tokens[: self.plan.n_read(len(item.tokens), item.positions)]
                for item in items.values()
            ],
            picked if self.placed else None,
            self.pool,
            numbers=list(items),
        )
        run.all([list(range(len(items)))], progress=False)
        axes = {site: self.facts(site).axes.index("layer") for site in self.plan.sites}
        return {site: run.results[site].movedim(axis, 0) for site, axis in axes.items()}

    def write_items(
        self, folder: Path, manifest: Manifest, batch: int, items: Mapping[int, Item]
    ) -> None:
        """Run a batch of the plan, whose items these are, and write its shard.

        Raises:
            MemoryLimitError: not even one of its texts fits into memory.
            DiskSpaceError: the disk is full, or the folder cannot be written to.
        """
        layers = {site: facts.layers for site, facts in manifest.sites.items()}
        write_shard(folder, manifest.identity, batch, self.values(items), layers, items)


class StoredCapture(ShardMaker):
    """What is to be captured, a batch at a time and in any order.

    Nothing is kept of a text but its length: it is encoded again when its batch runs.
    """

    def __init__(
        self,
        model: Any,
        plan: SitePlan,
        texts: Sequence[str],
        places: Places,
        pool: str,
        batch_size: int | Literal["auto"],
        prepend_bos: bool | None,
    ) -> None:
        """Take what :func:`~wvprobe.capture` is asked for, checked."""
        super().__init__(model, plan, pool, places.given)
        self.texts, self.places, self.batch_size = texts, places, batch_size
        default = bool(model.cfg.default_prepend_bos)
        self.prepend_bos = default if prepend_bos is None else prepend_bos
        self.encode: Callable[[str], Encoding] = lru_cache(_KNOWN)(
            lambda text: encode(model, text, prepend_bos=self.prepend_bos)
        )

    @classmethod
    def of(
        cls,
        model: Any,
        texts: str | Sequence[str],
        sites: str | Sequence[str],
        *,
        words: Words | None = None,
        positions: Positions | None = None,
        layers: Sequence[int] | int | None = None,
        pool: str | None = None,
        batch_size: int | Literal["auto"] = "auto",
        prepend_bos: bool | None = None,
    ) -> "StoredCapture":
        """Check what :func:`~wvprobe.capture` is asked for; arguments and errors are its own."""
        arch = adapters.architecture(model)
        plan = SitePlan(model, arch, sites, layers)
        given = checked_texts(texts)
        places = Places(words, positions, len(given))
        return cls(model, plan, given, places, checked_pool(arch, pool), batch_size, prepend_bos)

    def prepare(self, table: ItemsFile) -> Callable[[str], Manifest]:
        """Encode all texts, add them to a table, and return what makes a manifest of its sha256."""
        lengths, longest = array("i"), 0
        hashes = {name: hashlib.sha256() for name in ("texts", "tokens", "places")}
        for number in range(len(self.texts)):
            item = self.item(number)
            lengths.append(self.plan.n_read(len(item.tokens), item.positions))
            longest = max(longest, len(item.tokens))
            table.add(item)
            for name, part in (
                ("texts", item.text),
                ("tokens", item.tokens),
                ("places", (item.word, item.positions)),
            ):
                hashes[name].update(f"{part!r}\n".encode())
        batches = batches_of(lengths, self.batch_size, self.model, self.arch)
        digests = {name: digest.hexdigest() for name, digest in hashes.items()}
        return lambda items: self._manifest(batches, digests, items, longest)

    def item(self, number: int) -> Item:
        """Encode one text."""
        encoding = self.encode(self.texts[number])
        positions, word = self.places.of(number, encoding)
        return Item(
            encoding.text, word, positions, encoding.ids, encoding.strings, encoding.special
        )

    def _manifest(
        self, batches: list[list[int]], digests: dict[str, str], items: str, longest: int
    ) -> Manifest:
        settings = {
            "model": self.model.cfg.model_name,
            "weights": adapters.weight_hash(self.model),
            **adapters.run_settings(self.model),
            "number of texts": len(self.texts),
            **digests,
            "sites": list(self.plan.sites),
            "pool": self.pool if self.placed else None,
            "prepend_bos": self.prepend_bos,
            "batch_size": self.batch_size,
        }
        return Manifest(
            settings=settings,
            versions=Provenance.of("", "").versions,
            sites={site: self.facts(site) for site in self.plan.sites},
            longest=longest,
            items=items,
            order=torch.tensor([item for batch in batches for item in batch], dtype=torch.int32),
            sizes=torch.tensor([len(batch) for batch in batches], dtype=torch.int32),
        )

    def write(self, folder: Path, manifest: Manifest, batch: int) -> None:
        """Run a batch of the plan and write its shard.

        Raises:
            MemoryLimitError: not even one of its texts fits into memory.
            DiskSpaceError: the disk is full, or the folder cannot be written to.
        """
        items = {number: self.item(number) for number in manifest.batch(batch)}
        self.write_items(folder, manifest, batch, items)
