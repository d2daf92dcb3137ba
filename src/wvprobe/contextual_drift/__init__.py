"""Contextual drift: how the vectors of one word part ways, in two contexts and in many.

Measures after Ethayarajh 2019 (How Contextual are Contextualized Word Representations?): in an
anisotropic space any two vectors are alike, so each similarity stands beside the one of random
words; and beside pairs of the word in one and the same sense, which differ by context too.
"""

from wvprobe.contextual_drift._corpus import drift
from wvprobe.contextual_drift._corrections import CORRECTIONS, Correction, fit_correction
from wvprobe.contextual_drift._drivers import DriversResult, drift_drivers
from wvprobe.contextual_drift._growth import LAWS, GrowthResult, growth_law
from wvprobe.contextual_drift._held_out import HeldOutSenses, held_out_senses
from wvprobe.contextual_drift._layers import LayerSimilarity, layer_similarity
from wvprobe.contextual_drift._pair import (
    DriftBaseline,
    PairContributions,
    PairDriftResult,
    drift_baseline,
    drift_pair,
    normalised_distance,
)
from wvprobe.contextual_drift._result import DriftResult
from wvprobe.contextual_drift._scores import ScoreDrift, score_drift

__all__ = [
    "CORRECTIONS",
    "LAWS",
    "Correction",
    "DriftBaseline",
    "DriftResult",
    "DriversResult",
    "GrowthResult",
    "HeldOutSenses",
    "LayerSimilarity",
    "PairContributions",
    "PairDriftResult",
    "ScoreDrift",
    "drift",
    "drift_baseline",
    "drift_drivers",
    "drift_pair",
    "fit_correction",
    "growth_law",
    "held_out_senses",
    "layer_similarity",
    "normalised_distance",
    "score_drift",
]
