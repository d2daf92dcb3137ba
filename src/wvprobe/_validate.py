"""The few checks that many modules share, with one message format.

Every message says what was expected, what came, and what to do about it.
"""

import math
import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeGuard

from wvprobe.errors import InputError, WvprobeError

_SEEDS = 2**32  # what scikit-learn takes; torch would take more
_LONGEST = 200  # characters of a value in a message


def message(name: str, expected: str, got: object, hint: str = "") -> str:
    """Return ``"`name` must be <expected>. Got <got> instead. <hint>"``."""
    shown = got if isinstance(got, str) and got.startswith("shape ") else _shown(got)
    return f"`{name}` must be {expected}. Got {shown} instead.{' ' + hint if hint else ''}"


def _shown(got: object) -> str:
    """Return a value as a message shows it: in one line, a long one (a tensor, a model) cut."""
    shown = " ".join(repr(got).split()) if not isinstance(got, str) else repr(got)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]} … ({type(got).__name__})"


def index(name: str, value: object, size: int, what: str) -> int:
    """Return `value` as an int in ``0..size-1``, or raise :class:`InputError`.

    Negative numbers are refused: with layers and heads counted from both ends, a typing
    error becomes another head's number.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(message(name, f"an int in 0..{size - 1}", value))
    if not 0 <= int(value) < size:
        hint = f"The model has {size} {what}, counted from 0."
        raise InputError(message(name, f"in 0..{size - 1}", int(value), hint))
    return int(value)


def indices(name: str, values: object, size: int, what: str) -> tuple[int, ...]:
    """Return `values` (None: all of them) as distinct ints in ``0..size-1``, in the order given."""
    if values is None:
        return tuple(range(size))
    if isinstance(values, Integral):
        values = (values,)
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise InputError(message(name, f"ints in 0..{size - 1}", values))
    checked = tuple(index(name, value, size, what) for value in values)
    if not checked:
        raise InputError(message(name, f"at least one of 0..{size - 1}", checked))
    if len(set(checked)) != len(checked):
        raise InputError(message(name, "without repetition", list(checked)))
    return checked


def length(name: str, value: object) -> int:
    """Return `value` as an int of at least 1, or raise :class:`InputError`."""
    return at_least(name, value, 1)


def whole(value: object) -> TypeGuard[int]:
    """Whether a value is an int of Python's or NumPy's, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def at_least(name: str, value: object, least: int = 0) -> int:
    """Return `value` as an int of at least `least`, or raise :class:`InputError`."""
    if not whole(value) or int(value) < least:
        raise InputError(message(name, f"an int of at least {least}", value))
    return int(value)


def seed(value: object, name: str = "seed") -> int:
    """Return a seed as an int in 0..2³² − 1, or raise :class:`InputError`."""
    if not whole(value) or not 0 <= int(value) < _SEEDS:
        raise InputError(message(name, "an int from 0 to 2**32 - 1", value))
    return int(value)


def finite(
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    most: float = math.inf,
) -> float:
    """Return a finite number above `above`, of at least `least` and at most `most`.

    Raises:
        InputError: it is none, or out of these bounds; NaN is out of all.
    """
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not (real and math.isfinite(value) and above < value and least <= value <= most):  # pyright: ignore[reportArgumentType, reportOperatorIssue]
        bounds = [f"above {above:g}"] * (above > -math.inf)
        bounds += [f"of at least {least:g}"] * (least > -math.inf)
        bounds += [f"at most {most:g}"] * (most < math.inf)
        expected = "a finite number" + " and".join(f" {bound}" for bound in bounds)
        raise InputError(message(name, expected, value))
    return float(value)  # pyright: ignore[reportArgumentType]


def instance(name: str, value: Any, kind: type | tuple[type, ...], hint: str = "") -> None:
    """Raise :class:`InputError` unless `value` is of a class, or one of several, of wvprobe."""
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(f"a {each.__name__}" for each in kinds)
        raise InputError(message(name, expected, type(value).__name__, hint))


def file_path(name: str, value: Any) -> Path:
    """Return the path of a file or folder, there or not, or raise :class:`InputError`."""
    if not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value):
        raise InputError(message(name, "the path of a file or folder", value))
    return Path(value)


def listed(name: str, value: Any, what: str) -> list[Any]:
    """Return a list of what is iterable and no string, or raise :class:`InputError`."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InputError(message(name, what, value))
    return list(value)


def pairs(name: str, value: Any, what: str) -> list[tuple[Any, Any]]:
    """Return a list of pairs, or raise :class:`InputError`."""
    found = listed(name, value, what)
    for one in found:
        if isinstance(one, str | bytes) or not isinstance(one, Sequence) or len(one) != 2:
            raise InputError(message(name, what, one))
    return [(one[0], one[1]) for one in found]


def one_of(
    name: str, value: str, known: Sequence[str], error: type[WvprobeError] = InputError
) -> str:
    """Return `value` if it is among `known`; else raise `error` with the nearest names."""
    if isinstance(value, str) and value in known:
        return value
    near = get_close_matches(str(value), known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else ""
    raise error(message(name, f"one of {', '.join(map(repr, known))}", value, hint))


def text(name: str, value: object) -> str:
    """Return a text that a tokenizer can be given."""
    if not isinstance(value, str):
        raise InputError(message(name, "a string", value))
    if not value.strip():
        raise InputError(message(name, "a text with something in it", value))
    try:
        value.encode()
    except UnicodeEncodeError as error:
        hint = "Read the file in its own encoding, with errors='replace' if need be."
        lone = f"half of a surrogate pair at character {error.start}"
        raise InputError(message(name, "a text that UTF-8 can write", lone, hint)) from error
    return value


def texts(value: str | Sequence[str]) -> list[str]:
    """Return one text or several as a non-empty list of non-empty strings."""
    if not isinstance(value, Iterable):
        raise InputError(message("texts", "a text or several", value))
    found = [value] if isinstance(value, str) else list(value)
    if not found:
        raise InputError(message("texts", "at least one text", found))
    return [text(f"texts[{number}]", one) for number, one in enumerate(found)]
