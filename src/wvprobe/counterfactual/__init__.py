"""Rewrites of a real model: what its heads, their number and their even split are worth."""

from wvprobe.counterfactual._head_ranks import HeadRanks, head_ranks
from wvprobe.counterfactual._plans import ResizePlan
from wvprobe.counterfactual._resizing import ResizeResult, resize_heads
from wvprobe.counterfactual._sharing import ShareResult, share_kv_heads

__all__ = [
    "HeadRanks",
    "ResizePlan",
    "ResizeResult",
    "ShareResult",
    "head_ranks",
    "resize_heads",
    "share_kv_heads",
]
