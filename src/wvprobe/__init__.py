"""Measure what attention heads carry, with extracted weights that prove themselves.

The names below are loaded on first use, so that ``import wvprobe`` costs no import of torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wvprobe._types import Result as Result
    from wvprobe.activations import capture as capture
    from wvprobe.attention_clock import time_attention as time_attention
    from wvprobe.auditing import audit as audit
    from wvprobe.behaviour import head_behaviour as head_behaviour
    from wvprobe.budget import HeadBudget as HeadBudget
    from wvprobe.budget import alternatives as alternatives
    from wvprobe.budget import known_architectures as known_architectures
    from wvprobe.capturing import capture_dataset as capture_dataset
    from wvprobe.circuits import Circuit as Circuit
    from wvprobe.compose import composition as composition
    from wvprobe.context_shares import context_dependence as context_dependence
    from wvprobe.contextual_drift import drift as drift
    from wvprobe.contextual_drift import drift_drivers as drift_drivers
    from wvprobe.contextual_drift import drift_pair as drift_pair
    from wvprobe.copying import copying_scores as copying_scores
    from wvprobe.counterfactual import compare_biases as compare_biases
    from wvprobe.counterfactual import head_interactions as head_interactions
    from wvprobe.counterfactual import repeated_head as repeated_head
    from wvprobe.counterfactual import resize_heads as resize_heads
    from wvprobe.counterfactual import sequential_heads as sequential_heads
    from wvprobe.counterfactual import share_kv_heads as share_kv_heads
    from wvprobe.datasets import load_conllu as load_conllu
    from wvprobe.datasets import load_iob2 as load_iob2
    from wvprobe.datasets import load_senses as load_senses
    from wvprobe.errors import WvprobeError as WvprobeError
    from wvprobe.exchanges import exchange as exchange
    from wvprobe.flow import value_flow as value_flow
    from wvprobe.heads import HeadWeights as HeadWeights
    from wvprobe.ledger import score_ledger as score_ledger
    from wvprobe.models import load as load
    from wvprobe.offsets import offset_profile as offset_profile
    from wvprobe.pair_variance import score_variance as score_variance
    from wvprobe.plotting import figure as figure
    from wvprobe.probes import fit_probes as fit_probes
    from wvprobe.singular import spectra as spectra
    from wvprobe.subspaces import subspace_overlap as subspace_overlap
    from wvprobe.sweeping import sweep as sweep
    from wvprobe.value_payload import erase as erase
    from wvprobe.value_payload import payload as payload
    from wvprobe.vocabulary import top_tokens as top_tokens
    from wvprobe.words import find_word as find_word

    __version__: str

# Public name -> the module that holds it. A new name goes here and into the imports above.
_HOMES = {
    "Circuit": "circuits",
    "HeadBudget": "budget",
    "HeadWeights": "heads",
    "Result": "_types",
    "WvprobeError": "errors",
    "alternatives": "budget",
    "audit": "auditing",
    "capture": "activations",
    "capture_dataset": "capturing",
    "copying_scores": "copying",
    "compare_biases": "counterfactual",
    "composition": "compose",
    "context_dependence": "context_shares",
    "drift": "contextual_drift",
    "drift_drivers": "contextual_drift",
    "drift_pair": "contextual_drift",
    "erase": "value_payload",
    "figure": "plotting",
    "fit_probes": "probes",
    "find_word": "words",
    "known_architectures": "budget",
    "head_behaviour": "behaviour",
    "head_interactions": "counterfactual",
    "load": "models",
    "load_conllu": "datasets",
    "load_iob2": "datasets",
    "load_senses": "datasets",
    "offset_profile": "offsets",
    "payload": "value_payload",
    "repeated_head": "counterfactual",
    "resize_heads": "counterfactual",
    "score_ledger": "ledger",
    "score_variance": "pair_variance",
    "sequential_heads": "counterfactual",
    "share_kv_heads": "counterfactual",
    "spectra": "singular",
    "time_attention": "attention_clock",
    "top_tokens": "vocabulary",
    "subspace_overlap": "subspaces",
    "sweep": "sweeping",
    "value_flow": "flow",
    "exchange": "exchanges",
}

__all__ = [*_HOMES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version(__name__)
    elif name in _HOMES:
        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # the next look-up finds it without coming here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
