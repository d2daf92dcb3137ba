"""What heads do on text: whom they attend to, beside chance, positions and their own weights.

found = wvprobe.head_behaviour(model)
found["induction"]          # [layer, head]
found.named(3)              # the strongest heads of every kind, with margins
"""

from wvprobe.behaviour._agreement import AgreementResult, behaviour_agreement, composed_with
from wvprobe.behaviour._dependency import DependencyResult, dependency_heads
from wvprobe.behaviour._heads import KINDS, SCORES, BehaviourResult, head_behaviour

__all__ = [
    "KINDS",
    "SCORES",
    "AgreementResult",
    "BehaviourResult",
    "DependencyResult",
    "behaviour_agreement",
    "composed_with",
    "dependency_heads",
    "head_behaviour",
]
