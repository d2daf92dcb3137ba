"""One figure a result type; the only module that draws."""

from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

from wvprobe._types import Result
from wvprobe.activations import Activations
from wvprobe.auditing import AuditResult
from wvprobe.budget import KnownArchitectures
from wvprobe.compose import CompositionResult
from wvprobe.context_shares import ContextResult
from wvprobe.contextual_drift import DriftBaseline, PairContributions, PairDriftResult
from wvprobe.copying import CopyingResult
from wvprobe.errors import InputError
from wvprobe.influence import InfluenceResult
from wvprobe.inputs import InputResult
from wvprobe.ledger import CausalCheckResult, LedgerResult
from wvprobe.offsets import OffsetResult
from wvprobe.plotting import (
    _composition,
    _contexts,
    _ledgers,
    _models,
    _payload,
    _probes,
    _spectra,
    _vocabulary,
    _words,
)
from wvprobe.plotting._style import dressed
from wvprobe.probes import ProbeResult
from wvprobe.sense_maps import SenseMap
from wvprobe.singular import SingularVectorsResult, SpectraResult
from wvprobe.subspaces import OverlapResult
from wvprobe.value_payload import EraseResult, LabourResult, PayloadMap, PayloadResult
from wvprobe.vocabulary import TopTokensResult
from wvprobe.word_pairs import PairScores

_DRAWERS: dict[type, Callable[[Any], go.Figure]] = {
    Activations: _models.activations,
    AuditResult: _models.audit,
    CopyingResult: _vocabulary.copying,
    EraseResult: _payload.erasure,
    LabourResult: _payload.labour,
    PayloadMap: _payload.payload_map,
    PayloadResult: _payload.payload,
    DriftBaseline: _words.baseline,
    CausalCheckResult: _ledgers.causal_check,
    ContextResult: _ledgers.context_shares,
    LedgerResult: _ledgers.ledger,
    InfluenceResult: _contexts.influence,
    KnownArchitectures: _models.architectures,
    PairContributions: _words.contributions,
    CompositionResult: _composition.composition,
    OverlapResult: _composition.overlap,
    PairDriftResult: _words.pair_drift,
    PairScores: _words.pair_scores,
    SenseMap: _contexts.sense_map,
    InputResult: _spectra.inputs,
    OffsetResult: _spectra.offsets,
    ProbeResult: _probes.probes,
    SingularVectorsResult: _spectra.singular_vectors,
    SpectraResult: _spectra.spectra,
    TopTokensResult: _vocabulary.top_tokens,
}


def figure(result: Result) -> go.Figure:
    """Return a result's figure.

    Raises:
        InputError: there is none for this type.
    """
    drawer = _DRAWERS.get(type(result))
    if drawer is None:
        known = ", ".join(kind.__name__ for kind in _DRAWERS)
        raise InputError(
            f"`result` must be one of {known}. Got {type(result).__name__} instead. "
            "Use .to_frame() and draw it yourself."
        )
    return dressed(drawer(result))


def script() -> str:
    """Return plotly's own JavaScript, for a page that opens without a network."""
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
