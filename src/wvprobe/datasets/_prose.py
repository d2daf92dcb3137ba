"""The bundled prose."""

import re
from importlib import resources

from wvprobe._validate import one_of

PROSE_SPLITS = ("calibration", "held-out")
PROSE_GENRES = ("narrative", "explanation", "dialogue")


def load_prose(split: str, genre: str | None = None) -> tuple[str, ...]:
    """Return paragraphs of the bundled prose, written for this project.

    Args:
        split: ``calibration``, to take means and the like from, or ``held-out``, to judge on; they
            share no stories and no subjects.
        genre: ``narrative``, ``explanation`` or ``dialogue``; None for all, in this order.

    Raises:
        InputError: unknown split or genre.

    Examples:
        >>> from wvprobe.datasets import load_prose
        >>> set(load_prose("calibration")) & set(load_prose("held-out"))
        set()
    """
    one_of("split", split, PROSE_SPLITS)
    if genre is not None:
        one_of("genre", genre, PROSE_GENRES)
    text = resources.files("wvprobe").joinpath("data/prose.txt").read_text(encoding="utf-8")
    sections = re.split(r"^== (\S+) / (\S+)$", text, flags=re.MULTILINE)[1:]
    found: list[str] = []
    for kind, part, content in zip(*[iter(sections)] * 3, strict=True):
        if part == split and genre in (None, kind):
            found += [p.replace("\n", " ").strip() for p in content.split("\n\n") if p.strip()]
    return tuple(found)
