"""How many threads torch works with: sums are split among them, which shows in the last digits."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from wvprobe._validate import length


@contextmanager
def threads(number: int | None) -> Iterator[int]:
    """Work with so many threads inside (None: as many as there are), and yield their number.

    Raises:
        InputError: not an int of at least 1.
    """
    before = torch.get_num_threads()
    wanted = before if number is None else length("threads", number)
    torch.set_num_threads(wanted)
    try:
        yield wanted
    finally:
        torch.set_num_threads(before)
