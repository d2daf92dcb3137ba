"""Rewrites of a real model: what its heads, their number and their even split are worth."""

from wvprobe.counterfactual._interactions import InteractionResult, head_interactions
from wvprobe.counterfactual._repeated import RepeatedResult, repeated_head
from wvprobe.counterfactual._sequential import SequentialResult, sequential_heads

__all__ = [
    "InteractionResult",
    "RepeatedResult",
    "SequentialResult",
    "head_interactions",
    "repeated_head",
    "sequential_heads",
]
