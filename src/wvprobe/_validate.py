"""The few checks that many modules share, with one message format.

Every message says what was expected, what came, and what to do about it.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from numbers import Integral

from wvprobe.errors import InputError, WvprobeError


def message(name: str, expected: str, got: object, hint: str = "") -> str:
    """Return ``"`name` must be <expected>. Got <got> instead. <hint>"``."""
    shown = got if isinstance(got, str) and got.startswith("shape ") else repr(got)
    return f"`{name}` must be {expected}. Got {shown} instead.{' ' + hint if hint else ''}"


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
        values = (int(values),)
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
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < 1:
        raise InputError(message(name, "an int of at least 1", value))
    return int(value)


def one_of(
    name: str, value: str, known: Sequence[str], error: type[WvprobeError] = InputError
) -> str:
    """Return `value` if it is among `known`; else raise `error` with the nearest names."""
    if value in known:
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
