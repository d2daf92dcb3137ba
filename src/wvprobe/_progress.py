"""A progress bar on stderr for long work."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import Progress

_silent = ContextVar("silent", default=False)


@contextmanager
def silent() -> Iterator[None]:
    """Draw no bars inside: whoever asks for this draws one of its own."""
    before = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(before)


@contextmanager
def progress(total: int, what: str, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with how much was done since.

    It draws only where `shown`, and on a terminal: a log has no use for a bar.
    """
    if not shown or _silent.get() or not sys.stderr.isatty():
        yield lambda _done: None
        return
    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
