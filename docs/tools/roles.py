"""Turns the roles of docstrings, such as :func:`~wvprobe.capture`, into links of the API pages."""

import re
from pathlib import Path
from typing import Any

import griffe

import wvprobe

ROLE = re.compile(r":(func|meth|class|mod|attr|data):`(~?)([\w.]+)`")
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
API = Path(__file__).parent.parent / "api"


def documented() -> set[str]:
    """Return the paths that the API pages have an entry for."""
    pages = (page.read_text(encoding="utf-8") for page in sorted(API.glob("*.md")))
    return {path for page in pages for path in DIRECTIVE.findall(page)}


def home_of(path: str) -> str:
    """Return where a name lives that the root passes on: wvprobe.capture is in activations."""
    root, _, rest = path.partition(".")
    name, dot, member = rest.partition(".")
    home = wvprobe._HOMES.get(name) if root == "wvprobe" else None
    return f"wvprobe.{home}.{name}{dot}{member}" if home else path


def target_of(path: str, owner: str, known: set[str]) -> str | None:
    """Return the entry that a role means: by its whole path, or within the room or the class."""
    room = ".".join(owner.split(".")[:2])
    for candidate in (
        home_of(path),
        f"{room}.{path}",
        home_of(f"wvprobe.{path}"),
        f"{owner}.{path}",
    ):
        of = candidate.rpartition(".")[0]
        # A method has no entry of its own, but an anchor within that of its class.
        if candidate in known or (of in known and of.rpartition(".")[2][:1].isupper()):
            return candidate
    return None


class Roles(griffe.Extension):
    """Rewrites docstrings as they are read; what has no entry stays as code."""

    def __init__(self) -> None:
        """Read which entries there are."""
        self.known = documented()

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is None:
            return
        # The class's own path, for what its docstring and its methods say of each other.
        owner = obj.path if obj.is_class else obj.path.rpartition(".")[0]

        def link(role: re.Match[str]) -> str:
            kind, short, path = role.groups()
            shown = path.rpartition(".")[2] if short else path
            # Fields of a dataclass have no anchor of their own.
            target = None if kind == "attr" else target_of(path, owner, self.known)
            return f"[`{shown}`][{target}]" if target else f"`{shown}`"

        obj.docstring.value = ROLE.sub(link, obj.docstring.value)
