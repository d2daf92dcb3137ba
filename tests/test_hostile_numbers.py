"""Numbers, indices, labels and tensors that nobody expects: an answer, or one clear error.

Annotations are not checked at run time here, as they are not for those who use the library: what a
function does not refuse itself comes out of torch.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hostile import CALLS, Things
from hostile.values import KINDS, TEXT, Of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wvprobe
from wvprobe.errors import InputError, WordError, WvprobeError
from wvprobe.words import encode, locate

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
    with pytest.raises(InputError, match="must be a finite number of at least 0"):
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


INTS = st.integers(-5, 9) | st.sampled_from([2**31, 2**63, -(2**70)])
FLOATS = st.floats() | st.integers(-(10**6), 10**6)


@FUZZ
@given(layers=st.lists(INTS, max_size=4), at=INTS)
def test_any_layers_and_position_are_those_of_the_whole_or_refused(layers, at, things):
    whole = things.whole
    there = [layer for layer in layers if 0 <= layer < 3]
    possible = 0 < len(layers) == len(set(there)) and 0 <= at < whole.shape[1]
    try:
        found = wvprobe.capture(things.model, TEXT, "v", layers=layers, positions=at)
    except InputError:
        assert not possible
        return
    assert possible
    torch.testing.assert_close(found["v"][0], whole[0, at, layers], atol=1e-5, rtol=1e-4)


LABEL = st.integers(-3, 3) | st.sampled_from(["a", "b", ""]) | st.none() | st.floats()


@FUZZ
@given(y=st.lists(LABEL, min_size=20, max_size=28) | st.lists(st.integers(0, 2), min_size=24))
def test_any_labels_are_probed_or_refused(y, things):
    settings = {"folds": 2, "method": "mean_difference", "description_length": False}
    try:
        found = wvprobe.fit_probes(things.x, y, **settings)
    except InputError:
        return
    assert len(y) == 24 and len(set(y)) > 1
    assert len({type(one) for one in y}) == 1
    assert bool(found.scores["accuracy"].isfinite().all())


@FUZZ
@given(offset=FLOATS | st.none())
def test_any_offset_turns_a_circuit_or_is_refused(offset, things):
    try:
        circuit = things.heads.qk(1, 2, offset=offset)
    except InputError:
        assert offset is not None and not np.isfinite(offset)
        return
    assert bool(circuit.matrix().isfinite().all())
    plain = things.heads.qk(1, 2, offset=None)
    assert float(circuit.frobenius_norm) < 100 * float(plain.frobenius_norm)


SIZES = st.integers(-1, 12) | st.sampled_from([None, 10**9])


@FUZZ
@given(sizes=st.fixed_dictionaries({
    name: SIZES for name in ("d_model", "n_heads", "d_head", "n_kv_heads", "d_head_v", "n_layers")
}))  # fmt: skip
def test_any_sizes_are_a_budget_or_refused(sizes):
    given = {name: size for name, size in sizes.items() if size is not None}
    try:
        budget = wvprobe.HeadBudget(**({"d_model": 8, "n_heads": 2} | given))
    except InputError:
        return
    assert budget.n_attention == budget.n_layers * sum(r * c for r, c in budget.matrices.values())
    assert min(budget.width, budget.width_v, budget.kv_heads, budget.n_layers) >= 1
    assert budget.n_heads % budget.kv_heads == 0


@FUZZ
@given(word=st.text(max_size=6) | st.sampled_from(["bank", "river", "bank.", "(bank", "ban", "."]))
def test_any_word_is_found_whole_or_refused(word, things):
    encoding = encode(things.model, TEXT)
    try:
        span = locate(encoding, word)
    except WordError:
        return
    start, end = span.chars
    assert TEXT[start:end] == word
    assert word in "".join(span.strings)


@FUZZ
@given(shape=st.lists(st.integers(0, 5), min_size=3, max_size=5), name=st.sampled_from("QKVO"))
def test_any_shape_of_a_weight_fits_or_is_refused(shape, name, things):
    tensors = CALLS["HeadWeights.from_tensors"].arguments(things)
    tensors[f"W_{name}"] = torch.ones(shape)
    try:
        heads = wvprobe.HeadWeights.from_tensors(**tensors)
    except InputError:
        return
    assert heads.ov(0, 0).matrix().shape == (12, 12)
    assert heads.qk(1, 3).matrix().shape == (12, 12)


@FUZZ
@given(seed=st.integers(-(2**70), 2**70))
def test_any_seed_draws_the_same_again_or_is_refused(seed):
    x = torch.arange(24.0).reshape(12, 2)
    from wvprobe.probes import haar_projections

    try:
        one, other = (haar_projections(x, 1, draws=1, seed=seed).make(0) for _ in range(2))
    except InputError:
        assert not 0 <= seed < 2**32
        return
    assert 0 <= seed < 2**32 and torch.equal(one, other)


def test_vectors_of_nothing_are_no_distance_apart():
    from wvprobe.contextual_drift import normalised_distance

    apart = normalised_distance(torch.zeros(2, 3), torch.tensor([[0.0, 0, 0], [0, 2, 0]]))
    assert apart.tolist() == [0.0, 2.0]
