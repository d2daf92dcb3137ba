"""Where a word stands whole in a text: the rules, from the characters alone."""

import re
import unicodedata
from collections.abc import Iterator

from wvprobe._spelling import Span

# Thai, Lao, Burmese, Khmer, Hiragana, Han.
_UNSPACED = re.compile(
    "[\u0e01-\u0e5b\u0e80-\u0eff\u1000-\u109f\u1780-\u17ff\u3005\u3041-\u309f"
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)


def occurrences(text: str, word: str) -> Iterator[Span]:
    """Yield where the word stands whole, without overlap."""
    start = text.find(word)
    while start >= 0:
        end = start + len(word)
        inside = begins_earlier(text, start) or goes_on(text, end)
        # "bank'" is no word of "bank's", but an apostrophe alone may be asked for.
        inside = inside or (len(word) > 1 and apostrophe_within(text, end - 1))
        if inside or ends_possessive(text, end):
            start = text.find(word, start + 1)
        else:
            yield start, end
            start = text.find(word, end)


def begins_earlier(text: str, start: int) -> bool:
    """Whether the word that holds the character at `start` begins before it."""
    return _within_word(text, start) or apostrophe_within(text, start - 1)


def goes_on(text: str, end: int) -> bool:
    """Whether the word that holds the character before `end` goes on behind it."""
    return _within_word(text, end) or apostrophe_within(text, end)


def _within_word(text: str, index: int) -> bool:
    """Whether the characters before and at `index` belong to one word."""
    if not 0 < index < len(text):
        return False
    if _extends(text[index]) or text[index - 1] == "\u200d":
        return True
    base = index - 1
    while base and _extends(text[base]):
        base -= 1
    pair = text[base] + text[index]
    return all(map(_is_letter, pair)) and not _UNSPACED.search(pair)


def _is_letter(character: str) -> bool:
    return character.isalnum() or character == "_" or unicodedata.category(character)[0] == "M"


def _extends(character: str) -> bool:
    """Whether it is part of the character before: a mark, a joiner, an emoji's skin tone."""
    return (
        unicodedata.category(character)[0] == "M"
        or character in "\u200c\u200d"
        or "\U0001f3fb" <= character <= "\U0001f3ff"
    )


def apostrophe_within(text: str, index: int) -> bool:
    """Whether an apostrophe between two letters stands at `index`."""
    between = 0 < index < len(text) - 1 and text[index] in "'’"
    return between and _is_letter(text[index - 1]) and _is_letter(text[index + 1])


def ends_possessive(text: str, end: int) -> bool:
    """Whether an apostrophe at `end` makes a plural's possessive, as in "the banks' doors".

    It does not where it may close a quotation that is still open.
    """
    if not (text[end : end + 1] in ("'", "’") and text[end - 1] in "sS"):
        return False
    opened = re.findall(r"(?<!\w)['‘](?=\w)", text[:end])
    closed = re.findall(r"(?<=\S)['’](?!\w)", text[:end])
    return len(opened) <= len(closed)
