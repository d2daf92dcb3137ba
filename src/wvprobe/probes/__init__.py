"""Linear probes at many sites at once, with the references that make their scores mean something.

The one part of wvprobe that uses scikit-learn, for its splitters.
"""

from wvprobe.probes.probing import fit_probes
from wvprobe.probes.references import (
    FeatureDraws,
    FoldFeatures,
    OtherLabels,
    complement,
    control_task,
    haar_complements,
    haar_projections,
    top_components,
    within_strata,
)
from wvprobe.probes.results import ProbeResult

__all__ = [
    "FeatureDraws",
    "FoldFeatures",
    "OtherLabels",
    "ProbeResult",
    "complement",
    "control_task",
    "fit_probes",
    "haar_complements",
    "haar_projections",
    "top_components",
    "within_strata",
]
