"""Models that nobody expects: very small, broken, half precise, in training, on no device."""

import math
from typing import Any

import pytest
import torch
from hostile_calls import CALLS, Things

pytestmark = pytest.mark.usefixtures("as_it_is_used")
# Calls of functions that read a model or its weights.
OF_MODELS = [
    name
    for name, call in CALLS.items()
    if {"model", "heads"} & set(call.wrong) and name not in ("capture_dataset",)
]
# Places that small models have, too.
FIRST: dict[str, Any] = {"layer": 0, "layers": [0], "head": 0, "heads": [0]}
QUICK = (
    *("capture", "value_flow", "stream_components", "score_ledger", "spectra", "mean_input"),
    *("composition", "top_tokens", "context_dependence", "HeadWeights.from_model", "pair_scores"),
)


def quick(names: Any) -> Any:
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


class OfOne(Things):
    """Things of one model, whatever it is."""

    def __init__(self, model: Any, folder: Any) -> None:
        super().__init__(lambda family: model, folder)


def called(name: str, things: Things, first: bool = True) -> Any:
    """Call a function on the first layer and head."""
    call = CALLS[name]
    arguments = call.arguments(things)
    if first:
        arguments |= {k: FIRST[k] for k in FIRST if k in arguments and k != "heads"}
        if isinstance(arguments.get("heads"), list) and isinstance(arguments["heads"][0], int):
            arguments["heads"] = [0]
        elif isinstance(arguments.get("heads"), list):
            arguments["heads"] = [(0, 0)]
    return call.function(**arguments)


def missing(result: Any) -> set[str]:
    """Return the names of columns or tensors that hold NaN or infinity."""
    found = set()
    if hasattr(result, "to_frame"):
        frame = result.to_frame().select_dtypes(["float"])
        found |= {str(c) for c in frame if not frame[c].map(math.isfinite).all()}
    values = result if isinstance(result, torch.Tensor) else getattr(result, "values", None)
    if isinstance(values, dict):
        found |= {k for k, v in values.items() if isinstance(v, torch.Tensor) and _holes(v)}
    if isinstance(result, torch.Tensor) and _holes(result):
        found.add("the tensor")
    return found


def _holes(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.isfinite().all())
