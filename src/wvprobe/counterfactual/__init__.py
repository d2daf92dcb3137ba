"""Rewrites of a real model, and small ones from scratch: what heads, their number and split do."""

from wvprobe.counterfactual._biases import BiasResult, Difference, compare_biases
from wvprobe.counterfactual._head_ranks import HeadRanks, head_ranks
from wvprobe.counterfactual._interactions import InteractionResult, head_interactions
from wvprobe.counterfactual._plans import ResizePlan
from wvprobe.counterfactual._repeated import RepeatedResult, repeated_head
from wvprobe.counterfactual._resizing import ResizeResult, resize_heads
from wvprobe.counterfactual._sequential import SequentialResult, sequential_heads
from wvprobe.counterfactual._sharing import ShareResult, share_kv_heads

__all__ = [
    "BiasResult",
    "Difference",
    "HeadRanks",
    "InteractionResult",
    "RepeatedResult",
    "ResizePlan",
    "ResizeResult",
    "SequentialResult",
    "ShareResult",
    "compare_biases",
    "head_interactions",
    "head_ranks",
    "repeated_head",
    "resize_heads",
    "sequential_heads",
    "share_kv_heads",
]
