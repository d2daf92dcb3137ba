"""Numbers, indices, labels and tensors that nobody expects: an answer, or one clear error.

Annotations are not checked at run time here, as they are not for those who use the library: what a
function does not refuse itself comes out of torch.
"""

from typing import Any

import numpy as np
import pytest
from hostile_calls import CALLS, Things
from hostile_values import KINDS, Of
from hypothesis import HealthCheck, settings

import wvprobe
from wvprobe.errors import InputError, WvprobeError

pytestmark = pytest.mark.usefixtures("as_it_is_used")
# Those whose wrong arguments are all refused before anything is run, and a few others.
QUICK = (
    *("find_word", "locate", "word_at", "characters_at", "capture", "capture, words", "value_flow"),
    *("HeadBudget", "alternatives", "moves", "time_attention", "fit_probes", "composition"),
    *("top_tokens", "HeadWeights.from_tensors", "HeadWeights.qk", "exchange", "score_ledger"),
)
COUNTS = ("count", "from 0", "from 2", "seed", "index", "optional index", "integer")
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def things(tiny, tmp_path_factory) -> Things:
    return Things(tiny, tmp_path_factory.mktemp("hostile"))


def quick(names: Any) -> Any:
    return [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in names]


def outcome(name: str, things: Things, argument: str, value: Any) -> str:
    """Return "" where a value is refused as it should be, or what happened instead."""
    call = CALLS[name]
    arguments = call.arguments(things)
    value = (
        value.make(arguments.get(argument, arguments.get("y"))) if isinstance(value, Of) else value
    )
    try:
        call.function(**{**arguments, argument: value})
    except WvprobeError as error:
        told = str(error)
        return "" if 20 < len(told) < 3_000 else f"says {told!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "is answered"


def test_annotations_are_not_what_refuses():
    with pytest.raises(InputError, match="must be a finite number above 0"):
        wvprobe.time_attention(32, 8, d_heads=(8,), seconds="soon")  # pyright: ignore


@pytest.mark.parametrize("name", quick(CALLS))
def test_what_cannot_be_meant_is_refused(name, things):
    found = {
        f"{argument}: {what}": told
        for argument, kind in CALLS[name].wrong.items()
        for what, value in KINDS[kind].items()
        if (told := outcome(name, things, argument, value))
    }
    assert not found


@pytest.mark.parametrize("name", quick(CALLS))
def test_numbers_of_numpy_are_numbers(name, things):
    """What comes out of an array, of a frame or of ``argmax`` is an int like any other."""
    call, arguments = CALLS[name], CALLS[name].arguments(things)
    counts = {
        argument: np.int64(arguments[argument])
        for argument, kind in call.wrong.items()
        if kind in COUNTS and isinstance(arguments.get(argument), int)
    }
    call.function(**{**arguments, **counts})
