"""Strongest pairs of one head over the whole vocabulary, against what a user would use instead.

``python -m benchmarks.vocabulary``: SmolLM2, 49,152 × 49,152 products of one head's OV circuit and
of one head's QK circuit. Beside it, in the same process: the product in blocks of rows, with
``torch.topk`` and its mirror on each, which is how such a table is searched without holding it
whole (9.7 GB). Peak memory is that of the process beyond what it had before the search.
"""

import ctypes
import ctypes.util
import gc
import time
from typing import Any

import torch

import wvprobe
from benchmarks import finish, grown, seconds

LAYER, HEAD, K = 17, 3, 20
BLOCK = 1024
MOST_SECONDS, MOST_MB = 30.0, 1000.0


def ours(heads: Any, kind: str) -> Any:
    """Search with wvprobe."""
    return wvprobe.top_tokens(heads, kind, LAYER, HEAD, k=K, special=True, progress=False)


def by_blocks(heads: Any, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Search the dense product, a block of rows at a time; return the highest and the lowest."""
    x_hat = heads.normalize(heads.W_E, LAYER)
    if kind == "OV":
        circuit = heads.ov(LAYER, HEAD)
        left, right = x_hat @ circuit.left, circuit.right @ heads.W_U
    else:
        circuit = heads.qk(LAYER, HEAD)
        left, right = x_hat @ circuit.left, (x_hat @ circuit.right.mT).T
    ends: list[Any] = [[], []]
    for rows in left.split(BLOCK):
        block = (rows @ right).flatten()
        ends[0].append(block.topk(K).values)
        ends[1].append(block.topk(K, largest=False).values)
    return torch.cat(ends[0]).topk(K).values, torch.cat(ends[1]).topk(K, largest=False).values


def give_back_freed_memory() -> None:
    """Return freed memory to the system, or loading a model would leave room for the search."""
    gc.collect()
    libc = ctypes.util.find_library("c")
    trim = getattr(ctypes.CDLL(libc), "malloc_trim", None) if libc else None
    if trim is not None:  # glibc has it, others do not
        trim(0)


def main() -> None:
    """Run both and print ratios."""
    heads = wvprobe.HeadWeights.from_model(wvprobe.load("smollm2-135m", audit=False))
    kinds = ("OV", "QK")

    # First, before anything else grew the process.
    memory = {}
    for kind in kinds:
        give_back_freed_memory()
        # What a search leaves is a few numbers.
        _, _, memory[kind] = grown(lambda kind=kind: ours(heads, kind))
    took, naive = {}, {}
    for kind in kinds:
        took[kind] = min(seconds(lambda kind=kind: ours(heads, kind)) for _ in range(3))
        start = time.perf_counter()
        expected = by_blocks(heads, kind)  # once, since it takes minutes
        naive[kind] = time.perf_counter() - start
        # Both find the same numbers, or the race is no race.
        for mine, theirs in zip(ours(heads, kind).scores, expected, strict=True):
            torch.testing.assert_close(mine.float(), theirs, rtol=1e-4, atol=1e-4)
        print(
            f"{kind}: {took[kind]:.1f} s, by blocks with topk {naive[kind]:.1f} s, "
            f"extra memory {memory[kind]:.0f} MB"
        )
    finish(
        "vocabulary",
        ratios={f"by blocks / wvprobe, {kind}": naive[kind] / took[kind] for kind in kinds},
        extra_mb=memory,
        thresholds={
            "seconds": f"<= {MOST_SECONDS:.0f} each",
            "extra_mb": f"<= {MOST_MB:.0f} each",
        },
        ok=max(took.values()) <= MOST_SECONDS and max(memory.values()) <= MOST_MB,
    )


if __name__ == "__main__":
    main()
