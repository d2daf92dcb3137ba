"""Which texts run together, and how they are padded."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._validate import length, message
from wvprobe.adapters import Architecture
from wvprobe.errors import InputError

_LOAD = "Load its weights."
# Tokens of one automatic batch: enough to make each call worth its overhead, few enough for memory.
_BATCH_TOKENS = {"cpu": 1_536, "cuda": 16_384, "mps": 4_096}
# In float64 transformers' mask value, and in float16 mask value plus score, overflows the softmax
# of a row that sees padding only: it becomes NaN and taints the batch. There nothing is padded.
PADDED_DTYPES = (torch.float32, torch.bfloat16)


def padded(
    tokens: Sequence[Sequence[int]], device: Any
) -> tuple[Int[Tensor, "row pos"], Int[Tensor, "row pos"]]:
    """Return token ids padded on the right with 0, and their mask: 1 for tokens, 0 for padding.

    Raises:
        InputError: the device is ``meta``, which holds no numbers.
    """
    if torch.device(device).type == "meta":
        raise InputError(message("model", "one with numbers", "one on device 'meta'", _LOAD))
    lengths = torch.tensor([len(own) for own in tokens])
    ids = torch.zeros(len(tokens), int(lengths.max()), dtype=torch.long)
    for row, own in enumerate(tokens):
        ids[row, : len(own)] = torch.tensor(own)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return ids.to(device), mask.to(device)


def batches_of(
    lengths: Sequence[int], batch_size: Any, model: Any, arch: Architecture
) -> list[list[int]]:
    """Return batches of items of like length in tokens, long ones first: what fails, fails early.

    No two items whose padding would change their numbers come together.
    """
    automatic = isinstance(batch_size, str) and batch_size == "auto"
    if not automatic:
        batch_size = length("batch_size", batch_size)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # Where frequencies depend on the length, a longer text in the batch would change a shorter's.
    regime = adapters.length_regime(model, arch)
    regimes = [regime(length) for length in lengths]
    budget = _BATCH_TOKENS.get(str(model.cfg.device).split(":")[0], _BATCH_TOKENS["cpu"])
    batches: list[list[int]] = []
    start = 0
    while start < len(order):
        longest, first = lengths[order[start]], regimes[order[start]]
        size = max(1, budget // longest) if automatic else int(batch_size)
        together = order[start : start + size]
        if model.cfg.dtype not in PADDED_DTYPES:
            together = [i for i in together if lengths[i] == longest]
        batches.append([i for i in together if regimes[i] == first])
        start += len(batches[-1])
    return batches
