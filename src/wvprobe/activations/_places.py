"""Which tokens of each text are read: those of its word, or positions."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from wvprobe._validate import index, listed, message
from wvprobe.errors import InputError
from wvprobe.words import Encoding, WordSpan, locate

_POSITION = "ints or 'last'"

Words = str | Sequence[str | WordSpan]
Positions = int | str | Sequence[int | Sequence[int]]


class Places:
    """What `words` or `positions` say of each text."""

    def __init__(self, words: Words | None, positions: Positions | None, n: int) -> None:
        """Check their number against that of the texts.

        Raises:
            InputError: both are given, or not one a text.
        """
        if words is not None and positions is not None:
            raise InputError("give `words` or `positions`, not both: they choose the same axis.")
        self._words = _each("words", words, isinstance(words, str), n)
        self._positions = _each("positions", positions, isinstance(positions, Integral | str), n)

    @property
    def given(self) -> bool:
        """Whether there are words or positions; else all positions are read."""
        return self._words is not None or self._positions is not None

    @property
    def of_words(self) -> bool:
        """Whether there are words."""
        return self._words is not None

    def of(self, item: int, encoding: Encoding) -> tuple[tuple[int, ...] | None, str | None]:
        """Return a text's positions, None for all, and the word they stand for.

        Raises:
            InputError: a position or a WordSpan is not one of this text.
            WordError: the word is not in the text.
        """
        if self._words is not None:
            span = _span(encoding, self._words[item])
            return span.tokens, span.word
        if self._positions is not None:
            return _position(encoding, self._positions[item]), None
        return None, None


def _each(name: str, given: Any, one: bool, n: int) -> list[Any] | None:
    """Return one word or position a text, or None."""
    if given is None:
        return None
    each = [given] * n if one else listed(name, given, f"one a text ({n})")
    if len(each) != n:
        raise InputError(message(name, f"one a text ({n})", f"{len(each)} of them"))
    return each


def _span(encoding: Encoding, word: str | WordSpan) -> WordSpan:
    if isinstance(word, WordSpan):
        if word.text != encoding.text:
            raise InputError(
                f"the WordSpan of {word.word!r} belongs to {word.text!r}, not to "
                f"{encoding.text!r}. Give spans in the order of the texts."
            )
        if tuple(encoding.strings[p] for p in word.tokens if p < len(encoding.ids)) != word.strings:
            raise InputError(
                f"the WordSpan of {word.word!r} has the tokens {word.strings} at {word.tokens}, "
                "which are others here. Find it with this model, and with the same prepend_bos."
            )
        return word
    return locate(encoding, word)


def _position(encoding: Encoding, given: Any) -> tuple[int, ...]:
    size = len(encoding.ids)
    if isinstance(given, str) and given == "last":
        return (size - 1,)
    each = [given] if isinstance(given, Integral) else listed("positions", given, _POSITION)
    if not each:
        raise InputError(message("positions", "at least one position a text", each))
    return tuple(index("positions", p, size, f"tokens in {encoding.text!r}") for p in each)
