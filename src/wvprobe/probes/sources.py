"""Features of all sites, in memory or on disk, of which some sites are looked at at a time."""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._decompositions import eigh
from wvprobe._linalg import at_least_float32
from wvprobe._validate import message
from wvprobe.errors import InputError, ShapeError
from wvprobe.store import StoredSite


class Sites(ABC):
    """Features [item, site…, feature], whose sites are counted through as those of a flat tensor.

    Attributes:
        n: how many items.
        shape: lengths of the site axes.
        width: features of a site.
        dtype: of the numbers.
        device: where they are computed with.
    """

    n: int
    shape: tuple[int, ...]
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def count(self) -> int:
        """How many sites there are."""
        return math.prod(self.shape)

    @abstractmethod
    def block(self, sites: slice) -> Float[Tensor, "item site feature"]:
        """Return the features of some sites that follow one another."""

    def finite(self, sites: slice) -> Float[Tensor, "item site feature"]:
        """Return the same, checked.

        Raises:
            InputError: there is NaN or infinity. Of what is read or made block by block this is
                known no earlier.
        """
        part = self.block(sites)
        # A sum is NaN or infinite where anything in it is.
        if not math.isfinite(float(part.sum())) and not bool(part.isfinite().all()):
            hint = "Look at what the references are made of."
            got = f"NaN or infinity at sites {sites.start} to {sites.stop - 1}"
            raise InputError(message("features", "finite", got, hint))
        return part

    @abstractmethod
    def fingerprint(self) -> str:
        """Return what tells these features from others, for a provenance."""


class TensorSites(Sites):
    """Features in memory."""

    def __init__(self, x: Float[Tensor, "item *site feature"]) -> None:
        """Take a tensor."""
        self.n, *shape, self.width = x.shape
        self.shape, self.dtype, self.device = tuple(shape), x.dtype, x.device
        self._x = x.detach().reshape(self.n, self.count, self.width)

    def block(self, sites: slice) -> Float[Tensor, "item site feature"]:
        """Return a view."""
        return self._x[:, sites]

    def fingerprint(self) -> str:
        """Return a hash of the numbers; nothing is copied."""
        return fingerprint(self._x)


class StoredSites(Sites):
    """Features on disk."""

    def __init__(self, stored: StoredSite) -> None:
        """Take a site whose features are vectors.

        Raises:
            ShapeError: it holds all positions of texts, or pairs of them.
        """
        if stored.axes[:2] != ("item", "layer") or "key" in stored.axes or stored.dim() < 3:
            hint = "Capture it with words= or positions=; patterns and scores are no features."
            axes = f"[{', '.join(stored.axes)}]"
            raise ShapeError(message("X", "a vector an item, layer and head", axes, hint))
        self.n, *shape, self.width = stored.shape
        self.shape, self.dtype, self.device = tuple(shape), stored.dtype, torch.device("cpu")
        self._stored = stored

    def block(self, sites: slice) -> Float[Tensor, "item site feature"]:
        """Read some sites of all items."""
        heads = math.prod(self.shape[1:])
        everyone, parts = torch.arange(self.n), []
        for layer in range(sites.start // heads, -(-sites.stop // heads)):
            first, last = (end - layer * heads for end in (sites.start, sites.stop))
            inner = slice(max(first, 0), min(last, heads))
            # Where there are no heads, the axis behind the layer is that of features.
            chosen = None if len(self.shape) == 1 else inner
            read = self._stored.read(everyone, [layer], heads=chosen)
            parts.append(read.reshape(self.n, -1, self.width))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def fingerprint(self) -> str:
        """Return a hash of the checksums of what is read."""
        return self._stored.store.fingerprint(self._stored.name)


class MappedSites(Sites):
    """Features made of those of other sites, site by site, when they are looked at."""

    def __init__(
        self, of: Sites, width: int, make: Callable[[Float[Tensor, "item feature"], int], Tensor]
    ) -> None:
        """Say how.

        Args:
            of: the other features.
            width: how many each site gets.
            make: from a site's features and its number to the new features.
        """
        self.n, self.shape, self.width, self.device = of.n, of.shape, width, of.device
        self.dtype = at_least_float32(torch.empty(0, dtype=of.dtype)).dtype
        self._of, self._make = of, make

    def block(self, sites: slice) -> Float[Tensor, "item site feature"]:
        """Make some sites."""
        each = (slice(site, site + 1) for site in range(sites.start, sites.stop))
        return torch.stack(
            [self._make(at_least_float32(self._of.finite(s))[:, 0], s.start) for s in each], dim=1
        )

    def fingerprint(self) -> str:
        """Return a hash of the numbers, made for it site by site."""
        digests = (fingerprint(self.block(slice(s, s + 1))) for s in range(self.count))
        return f"sha256 {hashlib.sha256(' '.join(digests).encode()).hexdigest()[:16]}"


def as_sites(x: "Tensor | StoredSite | Sites") -> Sites:
    """Return features, wherever they are, as sites."""
    if isinstance(x, Sites):
        return x
    return StoredSites(x) if isinstance(x, StoredSite) else TensorSites(x)


def projected(x: Sites, frames: Float[Tensor, "*site d width"]) -> MappedSites:
    """Return the features times a matrix for each site; site axes of length 1 are shared.

    Raises:
        ShapeError: the matrices' site axes are others.
    """
    sites = tuple(frames.shape[:-2])
    fits = len(sites) in (0, len(x.shape)) and all(
        one in (1, own) for one, own in zip(sites, x.shape, strict=False)
    )
    if not fits:
        expected = f"{list(x.shape)}, those of the input, or of length 1"
        raise ShapeError(message("site axes of the map", expected, list(sites)))
    flat = frames.expand(*x.shape, *frames.shape[-2:]).reshape(x.count, *frames.shape[-2:])
    return MappedSites(x, frames.shape[-1], lambda own, site: own @ flat[site])


def components(x: Sites, width: int, train: Int[Tensor, " train"]) -> MappedSites:
    """Return each site's leading principal components, those of the training items."""

    def make(own: Tensor, _site: int) -> Tensor:
        part = own - own[train].mean(dim=0)
        chosen = part[train]
        _, vectors = eigh(chosen.mT @ chosen)
        return part @ vectors[:, -width:]

    return MappedSites(x, width, make)


def fingerprint(x: Tensor) -> str:
    """Return what tells a tensor's numbers from others, for a provenance; nothing is copied."""
    raw = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"sha256 {hashlib.sha256(raw.data).hexdigest()[:16]}"
