"""Decompositions of small matrices on one thread, which is where they are fast.

LAPACK takes many short steps. Where threads sleep between them (``OMP_WAIT_POLICY=passive``, the
setting for shared cores) each step waits for a thread to wake: eigenvectors of a 576 × 576 matrix
take 30 ms on one thread and 80 on two, of a 128 × 128 one 1 and 10.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from wvprobe._threads import threads

_P = ParamSpec("_P")
_R = TypeVar("_R")

LARGE = 1_024  # the smaller side of a matrix from which on threads make up for their waits


def _on_one_thread(decompose: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return the same decomposition, on one thread where its matrices are small."""

    @wraps(decompose)
    def decomposed(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with threads(1 if _small(args[0]) else None):
            return decompose(*args, **kwargs)

    return decomposed


def _small(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_cuda and min(x.shape[-2:]) < LARGE


eigh = _on_one_thread(torch.linalg.eigh)
eigvalsh = _on_one_thread(torch.linalg.eigvalsh)
svd = _on_one_thread(torch.linalg.svd)
svdvals = _on_one_thread(torch.linalg.svdvals)
