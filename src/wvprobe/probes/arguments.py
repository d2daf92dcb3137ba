"""What `fit_probes` is given, checked."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wvprobe._shapes import check_there
from wvprobe._validate import finite, length, listed, message, one_of
from wvprobe.errors import InputError, ShapeError
from wvprobe.probes.fitting import GRIDS
from wvprobe.probes.sources import Sites, as_sites
from wvprobe.store import StoredSite

# Below this a gradient cannot be resolved in float32.
_FLOAT32_TOLERANCE = 1e-6
_NUMBERS = 2**23  # that are looked at at a time


def checked_sites(X: Any) -> Sites:
    """Return what features `X` holds, in memory or on disk."""
    if not isinstance(X, Tensor | StoredSite | Sites):
        hint = "torch.from_numpy makes a tensor of an array."
        expected = "a tensor [item, site…, feature], or a site of stored activations"
        raise InputError(message("X", expected, type(X).__name__, hint))
    if isinstance(X, Tensor):
        check_there("X", X)
    if isinstance(X, Tensor) and (not X.is_floating_point() or X.dim() < 2 or 0 in X.shape):
        got = f"shape {list(X.shape)} of {X.dtype}"
        raise ShapeError(message("X", "[item, site…, feature] of floating numbers", got))
    return as_sites(X)


def checked_axes(
    x: Sites, names: Sequence[str] | Mapping[str, Sequence[int | str]] | None
) -> tuple[tuple[str, ...], tuple[tuple[int | str, ...], ...]]:
    """Return the names of the site axes, and the labels of each one's places."""
    shape = x.shape
    if names is None:
        several = tuple(f"site_{axis}" for axis in range(len(shape)))
        names = ("site",) if len(shape) == 1 else several
    given = names if isinstance(names, Mapping) else listed("site_axes", names, "names")
    named = [name for name in given if isinstance(name, str)]
    if not len(given) == len(shape) == len(set(named)):
        raise ShapeError(message("site_axes", f"{len(shape)} different names", names))
    given = names.values() if isinstance(names, Mapping) else [range(size) for size in shape]
    labels = tuple(tuple(part) for part in given)
    for name, part, size in zip(names, labels, shape, strict=True):
        if len(part) != size or len(set(part)) != size:
            raise ShapeError(message(f"site_axes[{name!r}]", f"{size} different labels", part))
    return tuple(names), labels


def check_finite(
    x: Sites, axes: tuple[str, ...], places: tuple[tuple[int | str, ...], ...]
) -> None:
    """Refuse NaN and infinity, naming a site that has any."""
    size = max(1, _NUMBERS // (x.n * x.width))
    for start in range(0, x.count, size):
        part = x.block(slice(start, min(start + size, x.count)))
        if math.isfinite(float(part.sum())):
            continue  # a sum is NaN or infinite where anything in it is
        wrong = (~part.isfinite()).nonzero()
        if not len(wrong):
            continue
        item, site, feature = wrong[0].tolist()
        at = torch.unravel_index(torch.tensor(start + site), x.shape)
        parts = zip(axes, places, at, strict=True)
        named = ", ".join(f"{name} {labels[int(place)]}" for name, labels, place in parts)
        where = f"{named + ', ' if named else ''}item {item}, feature {feature}"
        value = float(part[item, site, feature])
        raise InputError(message("X", "finite", f"{value} at {where}"))


def checked_grid(
    method: str, penalty: str | float | int, penalties: Sequence[float | int] | None
) -> tuple[float, ...]:
    """Return the penalties to choose from, weakest C or ridge or shrinkage first."""
    bounds = {"logistic": (0.0, math.inf), "least_squares": (0.0, math.inf), "lda": (0.0, 1.0)}
    if isinstance(penalty, str):
        one_of("penalty", penalty, ("cv",))
        chosen = GRIDS[method] if penalties is None else _sorted(penalties)
    else:
        finite("penalty", penalty)
        if penalties is not None:
            hint = "`penalties` are what 'cv' chooses from."
            raise InputError(message("penalty", "'cv' where `penalties` are given", penalty, hint))
        chosen = (float(penalty),)
    if method == "mean_difference":
        if not isinstance(penalty, str) or penalties is not None:
            raise InputError(message("penalty", "left out for mean_difference", penalty))
        return chosen
    low, high = bounds[method]
    if not chosen or len(set(chosen)) != len(chosen):
        raise InputError(message("penalties", "different numbers", list(chosen)))
    for value in chosen:
        above = value > low if method == "logistic" else value >= low
        if isinstance(penalty, bool) or not (above and value <= high and math.isfinite(value)):
            name = "penalty" if penalties is None else "penalties"
            expected = {
                "logistic": "above 0 (C)",
                "least_squares": "of at least 0 (ridge)",
                "lda": "from 0 to 1 (shrinkage)",
            }[method]
            raise InputError(message(name, expected, value))
    return chosen


def _sorted(penalties: Any) -> tuple[float, ...]:
    given = listed("penalties", penalties, "numbers")
    return tuple(sorted(finite("penalties", one) for one in given))


def at_least_two(**counts: Any) -> None:
    """Refuse counts below 2."""
    for name, value in counts.items():
        if length(name, value) < 2:
            raise InputError(message(name, "at least 2", value))


def share(name: str, value: float) -> float:
    """Return a number between 0 and 1."""
    if finite(name, value, above=0.0) >= 1:
        raise InputError(message(name, "above 0 and below 1", value))
    return float(value)


def dtype_for(x: Sites, tolerance: float) -> torch.dtype:
    """Return the precision of the computation."""
    precise = x.dtype == torch.float64 or tolerance < _FLOAT32_TOLERANCE
    return torch.float64 if precise else torch.float32
