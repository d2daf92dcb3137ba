"""What was captured, on disk."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._types import Provenance
from wvprobe._validate import message, one_of
from wvprobe.activations._result import Activations
from wvprobe.errors import InputError
from wvprobe.store import Store, StoredSite


@dataclass(frozen=True)
class StoredActivations(Activations):
    """Activations that lie in a folder; texts, tokens and vectors are read when they are asked for.

    ``stored["v"][items, layer]`` is a tensor, of which no more than that is read;
    ``stored["v"].tensor()`` is all of it. Files are mapped into memory, and a shard is held
    against its checksum when it is first read.

    Attributes:
        values: site -> :class:`~wvprobe.store.StoredSite`.
        store: the files.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> texts = ["A bank.", "The bank."]
        >>> with TemporaryDirectory() as folder:
        ...     stored = wvprobe.capture(model, texts, "v", words="bank", out=folder)
        ...     stored["v"][[1], 2].shape  # one item, one layer: no more is read
        torch.Size([1, 2, 14])
    """

    values: Mapping[str, StoredSite]  # pyright: ignore[reportIncompatibleVariableOverride]
    store: Store

    def __getitem__(self, site: str) -> StoredSite:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return a site, not yet read.

        Raises:
            InputError: the site was not captured; the message lists those that were.
        """
        one_of("site", site, tuple(self.values))
        return self.values[site]

    @property
    def folder(self) -> Path:
        """Where the files lie."""
        return self.store.folder

    @property
    def items(self) -> Int[Tensor, " item"]:
        """The numbers that the items had in the capture; all, but for a partial store."""
        return self.store.items

    def require(self, model: Any, sites: Sequence[str], prepend_bos: bool | None) -> None:
        """Check that these are sites of all layers, as a model would give them now.

        Raises:
            InputError: a site or a layer is missing, or model, tokenizer or hooks are others.
        """
        settings = self.store.manifest.settings
        default = bool(model.cfg.default_prepend_bos)
        now = {
            "weights": adapters.weight_hash(model),
            **adapters.run_settings(model),
            "prepend_bos": default if prepend_bos is None else prepend_bos,
        }
        for name in ("weights", "config", "tokenizer", "hooks", "prepend_bos"):
            if settings[name] != now[name]:
                hint = "Capture with it, or leave `store` out."
                expected = f"captured with {model.cfg.model_name} as it is now"
                raise InputError(message("store", expected, f"another {name}", hint))
        arch = adapters.architecture(model)
        for site in sites:
            every = tuple(range(adapters.layers_of(arch, site)))
            found = self.layers.get(site)
            if found != every:
                got = "none" if found is None else list(found)
                expected = f"with {site!r} of all layers, 0 to {every[-1]}"
                raise InputError(message("store", expected, got))

    def places(
        self, texts: Sequence[str], positions: Sequence[tuple[int, ...]] | None
    ) -> Int[Tensor, " some"]:
        """Return the places of texts, with the positions read of each (None: all positions).

        Raises:
            InputError: some are not there; their number is told, and the first one.
        """
        whole = self.positions is None
        if whole != (positions is None):
            expected = "of whole texts" if positions is None else "of words"
            got = "whole texts" if whole else "words or positions"
            raise InputError(message("store", expected, got))
        read: Iterable[Any] = [None] * len(self.texts) if self.positions is None else self.positions
        known: dict[Any, int] = {}
        for place, key in enumerate(zip(self.texts, read, strict=True)):
            known.setdefault(key, place)
        every: Sequence[Any] = [None] * len(texts) if positions is None else positions
        wanted = list(zip(texts, every, strict=True))
        missing = [key for key in wanted if key not in known]
        if missing:
            text, at = missing[0]
            where = "" if at is None else f"tokens {list(at)} of "
            got = f"{len(missing)} missing, first {where}{shorten(text, 60)!r}"
            expected = f"with all {len(wanted)} texts and words that are measured"
            raise InputError(message("store", expected, got))
        return torch.tensor([known[key] for key in wanted])

    def in_memory(self) -> Activations:
        """Read everything: what :func:`~wvprobe.capture` gives without `out`."""
        return Activations(
            provenance=self.provenance,
            values={site: value.tensor() for site, value in self.values.items()},
            layers=self.layers,
            texts=tuple(self.texts),
            tokens=tuple(self.tokens),
            strings=tuple(self.strings),
            special=tuple(self.special),
            positions=None if self.positions is None else tuple(self.positions),
            words=None if self.words is None else tuple(self.words),
            pool=self.pool,
            mask=self.mask,
        )

    def save(self, path: str | Path) -> Path:
        """Refuse: the files are there already.

        Raises:
            InputError: always.
        """
        raise InputError(
            f"these activations lie in {self.folder} already. Copy that folder, or save what "
            ".in_memory() returns."
        )


def open_store(folder: str | Path, *, partial: bool = False) -> StoredActivations:
    """Open what :func:`~wvprobe.capture` wrote to a folder; no model is needed.

    Args:
        folder: `out` of the capture.
        partial: whether to open a capture that is not complete. Items of missing batches are then
            left out, and `items` says which are there.

    Raises:
        StoreError: there is no store, it cannot be read, or it is not complete (the message says
            how many of how many shards are there).
        IntegrityError: its table of items is not what was written. Shards are checked when they
            are first read.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> from wvprobe.activations import open_store
        >>> with TemporaryDirectory() as folder:
        ...     stored = wvprobe.capture(model, "A bank.", "v", out=folder)
        ...     open_store(folder)["v"].tensor().equal(stored["v"].tensor())
        True
    """
    store = Store(folder, partial=partial)
    settings = store.manifest.settings
    every = store.is_null("positions")
    sites = store.manifest.sites
    return StoredActivations(
        provenance=Provenance(
            model=settings["model"],
            weight_hash=settings["weights"],
            versions=dict(store.manifest.versions),
            seed=None,
            settings={
                "sites": list(sites),
                "pool": settings["pool"],
                "prepend_bos": settings["prepend_bos"],
                "store": store.manifest.identity,
            },
        ),
        values={site: StoredSite(store, site) for site in sites},
        layers={site: facts.layers for site, facts in sites.items()},
        texts=store.column("text"),
        tokens=store.column("tokens"),
        strings=store.column("strings"),
        special=store.column("special"),
        positions=None if every else store.column("positions"),
        words=None if store.is_null("word") else store.column("word"),
        pool=settings["pool"],
        mask=torch.arange(store.manifest.longest) < store.lengths()[:, None] if every else None,
        store=store,
    )
