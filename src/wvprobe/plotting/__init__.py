"""One figure a result type; the only module that draws."""

from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go

from wvprobe._types import Result
from wvprobe.activations import Activations
from wvprobe.auditing import AuditResult
from wvprobe.compose import CompositionResult
from wvprobe.contextual_drift import DriftBaseline, PairDriftResult
from wvprobe.errors import InputError
from wvprobe.plotting import _composition, _models, _words
from wvprobe.plotting._style import dressed
from wvprobe.subspaces import OverlapResult
from wvprobe.word_pairs import PairScores

_DRAWERS: dict[type, Callable[[Any], go.Figure]] = {
    Activations: _models.activations,
    AuditResult: _models.audit,
    CompositionResult: _composition.composition,
    DriftBaseline: _words.baseline,
    OverlapResult: _composition.overlap,
    PairDriftResult: _words.pair_drift,
    PairScores: _words.pair_scores,
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
