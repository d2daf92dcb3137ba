"""What a store was captured with: two runs that differ in any of it are never mixed."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from wvprobe.errors import StoreError
from wvprobe.store._files import MANIFEST

FORMAT = 1
_SHOWN = 60  # characters of a value in a message


class SiteFacts(NamedTuple):
    """A site as a whole, put together from its shards.

    Attributes:
        layers: the layers on its axis.
        axes: names of its axes, item first.
        ragged: those that are as long as a shard's longest text, and padded when read.
        fill: what they are padded with: ``zero`` or ``nan``.
    """

    layers: tuple[int, ...]
    axes: tuple[str, ...]
    ragged: tuple[str, ...]
    fill: str

    @property
    def value(self) -> float:
        """What ragged axes are padded with."""
        return float("nan") if self.fill == "nan" else 0.0


@dataclass(frozen=True)
class Manifest:
    """What shaped the numbers of a store.

    Attributes:
        settings: whatever else than versions and plan shaped them, by name; plain data.
        versions: of packages, Python and the machine.
        sites: site -> its axes and layers.
        longest: tokens of the longest text.
        items: sha256 of the table of items.
        order: [item] items in the order they run and lie on disk.
        sizes: [batch] how many of them run together: a batch is a shard.
    """

    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    sites: Mapping[str, SiteFacts]
    longest: int
    items: str
    order: Int[Tensor, " item"]
    sizes: Int[Tensor, " batch"]

    @property
    def n_items(self) -> int:
        """How many items there are."""
        return len(self.order)

    @property
    def n_batches(self) -> int:
        """How many shards there are to be."""
        return len(self.sizes)

    def batch(self, number: int) -> list[int]:
        """Return the items of a batch, in the order of its rows."""
        stop = int(self.sizes[: number + 1].sum())
        return self.order[stop - int(self.sizes[number]) : stop].tolist()

    def encoded(self) -> bytes:
        """Return the file's content."""
        document = {
            "format": FORMAT,
            "settings": dict(self.settings),
            "versions": dict(self.versions),
            "sites": {site: facts._asdict() for site, facts in self.sites.items()},
            "longest": self.longest,
            "items": self.items,
            "plan": {"order": self.order.tolist(), "sizes": self.sizes.tolist()},
        }
        return json.dumps(document, ensure_ascii=False).encode()

    @cached_property
    def identity(self) -> str:
        """The sha256 that every shard carries: the same where, and only where, nothing differs."""
        return hashlib.sha256(self.encoded()).hexdigest()

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read a store's manifest.

        Raises:
            StoreError: there is none, or of a later format, or it cannot be read.
        """
        try:
            document = json.loads((folder / MANIFEST).read_bytes())
        except FileNotFoundError as error:
            hint = "capture(..., out=folder) writes one."
            raise StoreError(f"{folder} holds no stored activations. {hint}") from error
        except (OSError, ValueError) as error:
            raise StoreError(f"the manifest of {folder} cannot be read: {error}") from error
        version = document.get("format") if isinstance(document, dict) else None
        if isinstance(version, bool) or version != FORMAT:
            raise StoreError(
                f"{folder} has store format {version}; this version reads {FORMAT}. "
                "Install the wvprobe that wrote it, or capture anew to another folder."
            )
        try:
            return cls._of(document)
        except Exception as error:  # whatever may stand in a file that `encoded` does not write
            raise StoreError(
                f"the manifest of {folder} is broken: {type(error).__name__}: {error}. Capture "
                "anew to another folder."
            ) from error

    @classmethod
    def _of(cls, document: Mapping[str, Any]) -> "Manifest":
        """Put a manifest together from its file; whatever is wrong with it raises something."""
        sites = {
            site: SiteFacts(*(_tuples(part[name]) for name in SiteFacts._fields))
            for site, part in document["sites"].items()
        }
        order, sizes = (
            torch.tensor(document["plan"][name], dtype=torch.int32) for name in ("order", "sizes")
        )
        if not torch.equal(order.sort().values, torch.arange(len(order), dtype=torch.int32)):
            raise ValueError("its order does not have every item once")
        if not len(sizes) or int(sizes.min()) < 1 or int(sizes.sum()) != len(order):
            raise ValueError("its batches do not hold its items")
        return cls(
            settings=dict(document["settings"]),
            versions=dict(document["versions"]),
            sites=sites,
            longest=int(document["longest"]),
            items=str(document["items"]),
            order=order,
            sizes=sizes,
        )

    def differences(self, other: "Manifest") -> list[str]:
        """Return what differs, by name, with both values: this manifest's first."""
        pairs = [
            *_compared(self.settings, other.settings),
            *_compared(self.versions, other.versions),
            *_compared(_layers(self), _layers(other)),
        ]
        if not pairs and self.identity != other.identity:
            pairs = [("the batch plan", self.n_batches, other.n_batches)]
        return _told(pairs)

    def unlike(self, settings: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
        """Return what differs from it in settings, these and no others, and in versions."""
        own = {name: self.settings.get(name) for name in settings}
        return _told([*_compared(own, settings), *_compared(self.versions, versions)])


def _tuples(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _layers(manifest: Manifest) -> dict[str, Any]:
    return {f"layers of {site}": list(facts.layers) for site, facts in manifest.sites.items()}


def _compared(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys((*one, *other)):
        if one.get(name) != other.get(name):
            yield name, one.get(name), other.get(name)


def _told(pairs: Iterable[tuple[str, Any, Any]]) -> list[str]:
    return [f"{name}: {_short(there)} there, {_short(here)} here" for name, there, here in pairs]


def _short(value: Any) -> str:
    if isinstance(value, str) and len(value) == 64:
        return f"sha256 {value[:12]}…"
    shown = repr(value)
    return shown if len(shown) <= _SHOWN else shown[: _SHOWN - 1] + "…"
