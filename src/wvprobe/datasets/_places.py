"""Where the words of a sentence stand in its text, and the text where a source gives none."""

import re
from collections.abc import Sequence


class Unplaced(Exception):
    """The words do not spell the text; says from where on."""


def places(text: str, forms: Sequence[str]) -> list[tuple[int, int]]:
    """Return where each form stands: in order, with nothing but white space between them.

    Raises:
        Unplaced: a form is not the next thing in the text, or text is left over.
    """
    found, at = [], 0
    for number, form in enumerate(forms, start=1):
        at += len(text[at:]) - len(text[at:].lstrip())
        # White space within a word may be of another kind than its text's.
        match = re.compile(r"\s+".join(map(re.escape, form.split()))).match(text, at)
        if match is None or match.end() == at:
            raise Unplaced(
                f"word {number}, {form!r}, is not what the text has next: {_next(text, at)}"
            )
        found.append(match.span())
        at = match.end()
    if text[at:].strip():
        raise Unplaced(f"the text goes on behind its last word: {_next(text, at)}")
    return found


def _next(text: str, at: int) -> str:
    rest = text[at:].strip()
    return repr(rest if len(rest) <= 30 else f"{rest[:27]}...")


def split_places(place: tuple[int, int], text: str, forms: Sequence[str]) -> list[tuple[int, int]]:
    """Return where the words of a multiword token stand, which is written at `place`.

    Words whose forms, one behind the other, spell it have their own characters ("don't": "do"
    and "n't"). Others ("au": "à" and "le") have no place of their own and share all of it.
    """
    start, end = place
    if "".join(forms) != text[start:end]:
        return [place] * len(forms)
    ends = [start + len("".join(forms[: n + 1])) for n in range(len(forms))]
    return list(zip([start, *ends[:-1]], ends, strict=True))


def joined(forms: Sequence[str], spaced: Sequence[bool]) -> str:
    """Return the text that forms make, with a space behind those that are `spaced`."""
    return "".join(f + " " * s for f, s in zip(forms, spaced, strict=True)).strip()
