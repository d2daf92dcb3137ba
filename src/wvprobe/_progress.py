"""A progress bar on stderr for long work."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def progress(total: int, what: str, shown: bool) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with how much was done since; it draws only where `shown`."""
    if not shown:
        yield lambda _done: None
        return
    with Progress(console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)
