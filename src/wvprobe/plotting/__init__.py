"""One figure a result type; the only module that draws."""

from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

from wvprobe._types import Result
from wvprobe.activations import Activations, StoredActivations
from wvprobe.attention_clock import AttentionTimes
from wvprobe.auditing import AuditResult
from wvprobe.behaviour import AgreementResult, BehaviourResult, DependencyResult
from wvprobe.budget import Alternatives, HeadScaling, KnownArchitectures
from wvprobe.compose import CompositionResult
from wvprobe.context_shares import ContextResult
from wvprobe.contextual_drift import (
    DriftBaseline,
    DriftResult,
    DriversResult,
    GrowthResult,
    HeldOutSenses,
    LayerSimilarity,
    PairContributions,
    PairDriftResult,
    ScoreDrift,
)
from wvprobe.copying import CopyingResult
from wvprobe.counterfactual import (
    BiasResult,
    HeadRanks,
    InteractionResult,
    RepeatedResult,
    ResizeResult,
    SequentialResult,
    ShareResult,
)
from wvprobe.dissociation import DissociationResult
from wvprobe.errors import InputError
from wvprobe.exchanges import ExchangeResult
from wvprobe.flow import FlowResult
from wvprobe.influence import InfluenceResult
from wvprobe.inputs import InputResult
from wvprobe.ledger import CausalCheckResult, LedgerResult
from wvprobe.offsets import OffsetResult
from wvprobe.pair_variance import VarianceResult
from wvprobe.plotting import (
    _behaviour,
    _biases,
    _budget,
    _composition,
    _contexts,
    _drift,
    _drivers,
    _exchange,
    _flow,
    _ledgers,
    _models,
    _payload,
    _probes,
    _resizing,
    _sequences,
    _spectra,
    _variance,
    _vocabulary,
    _words,
)
from wvprobe.plotting._style import dressed
from wvprobe.plotting._style import themes as themes
from wvprobe.probes import ProbeResult
from wvprobe.sense_maps import SenseLayers, SenseMap
from wvprobe.singular import SingularVectorsResult, SpectraResult
from wvprobe.subspaces import OverlapResult
from wvprobe.value_payload import EraseResult, LabourResult, PayloadMap, PayloadResult
from wvprobe.vocabulary import TopTokensResult
from wvprobe.word_pairs import PairScores

_DRAWERS: dict[type, Callable[[Any], go.Figure]] = {
    Activations: _models.activations,
    StoredActivations: _models.activations,
    AgreementResult: _behaviour.agreement,
    Alternatives: _budget.alternatives,
    AttentionTimes: _budget.attention_times,
    AuditResult: _models.audit,
    BehaviourResult: _behaviour.behaviour,
    BiasResult: _biases.biases,
    CausalCheckResult: _ledgers.causal_check,
    CompositionResult: _composition.composition,
    ContextResult: _ledgers.context_shares,
    CopyingResult: _vocabulary.copying,
    DependencyResult: _behaviour.dependency,
    DissociationResult: _exchange.dissociation,
    DriftBaseline: _words.baseline,
    DriftResult: _drift.drift,
    DriversResult: _drivers.drivers,
    EraseResult: _payload.erasure,
    ExchangeResult: _exchange.exchange,
    FlowResult: _flow.flow,
    GrowthResult: _drift.growth,
    HeadRanks: _resizing.head_ranks,
    HeadScaling: _budget.scaling,
    HeldOutSenses: _drift.held_out,
    InfluenceResult: _contexts.influence,
    InputResult: _spectra.inputs,
    InteractionResult: _sequences.interactions,
    KnownArchitectures: _budget.architectures,
    LabourResult: _payload.labour,
    LayerSimilarity: _drift.layers,
    LedgerResult: _ledgers.ledger,
    OffsetResult: _spectra.offsets,
    OverlapResult: _composition.overlap,
    PairContributions: _words.contributions,
    PairDriftResult: _words.pair_drift,
    PairScores: _words.pair_scores,
    PayloadMap: _payload.payload_map,
    PayloadResult: _payload.payload,
    ProbeResult: _probes.probes,
    RepeatedResult: _sequences.repeated,
    ResizeResult: _resizing.resized,
    ScoreDrift: _drift.score_drift,
    SenseLayers: _contexts.sense_layers,
    SenseMap: _contexts.sense_map,
    SequentialResult: _sequences.sequential,
    ShareResult: _resizing.shared,
    SingularVectorsResult: _spectra.singular_vectors,
    SpectraResult: _spectra.spectra,
    TopTokensResult: _vocabulary.top_tokens,
    VarianceResult: _variance.score_variance,
}


def figure(result: Result) -> go.Figure:
    """Return a result's figure.

    Raises:
        InputError: there is none for this type.

    Examples:
        >>> found = wvprobe.spectra(heads, "OV", progress=False)
        >>> len(wvprobe.figure(found).data) > 0  # what found.figure() gives
        True
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
    """Return plotly's own JavaScript, for a page that opens without a network.

    Examples:
        >>> from wvprobe.plotting import script
        >>> "Plotly" in script()
        True
    """
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()
