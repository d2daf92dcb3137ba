"""What a number of heads costs: parameters, cached bytes, FLOPs; what published models chose."""

from wvprobe.budget._alternatives import Alternative, Alternatives, alternatives
from wvprobe.budget._architectures import KnownArchitectures, known_architectures
from wvprobe.budget._arithmetic import HeadBudget, Rest
from wvprobe.budget._scaling import HeadScaling, head_scaling

__all__ = [
    "Alternative",
    "Alternatives",
    "HeadBudget",
    "HeadScaling",
    "KnownArchitectures",
    "Rest",
    "alternatives",
    "head_scaling",
    "known_architectures",
]
