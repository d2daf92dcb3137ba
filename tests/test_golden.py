"""The same numbers again: by run, by number of threads, by size of batch, and as once written down.

Every kind of result is boiled down to the mean size of some of its columns. Runs alike give the
same bits. With other threads, batches or processors float32 sums are taken in another order: what
comes of it here is held to `TOLERANCE` of a column's mean size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pandas
import pytest
import torch
from test_leaks import CHOSEN, LABELLED, PAIRS, PLACES, SENSES, VARIED, A, B

import wvprobe
from wvprobe import HeadWeights
from wvprobe.activations import Activations
from wvprobe.contextual_drift import drift_baseline
from wvprobe.datasets import load_prose
from wvprobe.inputs import mean_input
from wvprobe.testing import tiny_model

TOLERANCE = 1e-4


def heads(model):
    return HeadWeights.from_model(model)


PROSE = [text[:200] for text in load_prose("calibration")[:30]]

# One result of every kind, at a layer and a head.
MEASURES: dict[str, Callable[[Any, int, int], Any]] = {
    "capture": lambda m, layer, _: wvprobe.capture(
        m, [A, B, "The bank."], ["v", "scores", "stream"], words="bank", layers=[layer]
    ),
    "composition": lambda m, *_: wvprobe.composition(heads(m), "K"),
    "context_dependence": lambda m, *_: wvprobe.context_dependence(m, A, B, **PLACES),
    "copying_scores": lambda m, layer, _: wvprobe.copying_scores(
        heads(m), rows=20, layers=layer, progress=False
    ),
    "drift": lambda m, *_: wvprobe.drift(m, SENSES, correction="zscore"),
    "drift_drivers": lambda m, *_: wvprobe.drift_drivers(m, SENSES, n_pairs=2, n_heads=2),
    "drift_pair": lambda m, *_: wvprobe.drift_pair(
        m, A, B, word="bank", baseline=drift_baseline(m, SENSES)
    ),
    "erase": lambda m, layer, _: wvprobe.erase(
        m, wvprobe.load_senses(), label="pos", heads=[(layer, 0)], limit=120, draws=2, folds=3
    ),
    "exchange": lambda m, layer, _: wvprobe.exchange(m, *PAIRS[0], layers=layer, draws=2),
    "head_behaviour": lambda m, *_: wvprobe.head_behaviour(
        m, texts=VARIED[:4], samples=3, length=4, max_offset=3, progress=False
    ),
    "head_interactions": lambda m, layer, _: wvprobe.head_interactions(m, [A, B], layers=layer),
    "offset_profile": lambda m, *_: wvprobe.offset_profile(
        heads(m), range(5), mean_input=mean_input(m, [A, B], progress=False).mean
    ),
    "payload": lambda m, *_: wvprobe.payload(m, LABELLED, control_draws=1, **CHOSEN),
    "repeated_head": lambda m, layer, _: wvprobe.repeated_head(m, [A, B], layers=[layer]),
    "resize_heads": lambda m, *_: wvprobe.resize_heads(m, [A, B], budget=0.5, calibration=PROSE),
    "score_ledger": lambda m, layer, head: wvprobe.score_ledger(
        m, A, **PLACES, layer=layer, head=head
    ),
    "score_variance": lambda m, *_: wvprobe.score_variance(m, VARIED, progress=False),
    "sequential_heads": lambda m, layer, _: wvprobe.sequential_heads(m, [A, B], layers=[layer]),
    "share_kv_heads": lambda m, *_: wvprobe.share_kv_heads(
        m, [A, B], n_kv_heads=1, calibration=PROSE
    ),
    "spectra": lambda m, *_: wvprobe.spectra(heads(m), "OV", vocabulary=False, progress=False),
    "subspace_overlap": lambda m, *_: wvprobe.subspace_overlap(heads(m), "V"),
    "top_tokens": lambda m, layer, head: wvprobe.top_tokens(
        heads(m), "OV", layer, head, " river", k=5
    ),
    "value_flow": lambda m, *_: wvprobe.value_flow(m, A),
}


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def numbers(found: Any) -> pandas.DataFrame | dict[str, torch.Tensor]:
    if isinstance(found, Activations):
        return {site: value.nan_to_num() for site, value in found.values.items()}
    return found.to_frame()


def sizes(found: Any) -> dict[str, float]:
    """Return the mean size of every column of numbers."""
    given = numbers(found)
    if isinstance(given, dict):
        return {site: float(value.double().abs().mean()) for site, value in given.items()}
    numeric = given.select_dtypes("number").astype(float)
    return {str(name): float(numeric[name].abs().mean()) for name in numeric}


@cache
def first(name: str) -> Any:
    """Return what a measure gives on a tiny model with one thread."""
    with threads(1):
        return MEASURES[name](tiny_model("llama"), 1, 1)


LONG = {"erase"}  # a few seconds
SHORT = [pytest.param(n, marks=pytest.mark.slow if n in LONG else pytest.mark.ci) for n in MEASURES]


@pytest.mark.parametrize("name", SHORT)
def test_the_same_again(name):
    """Another model object of the same weights, and the same bits."""
    with threads(1):
        again = numbers(MEASURES[name](tiny_model("llama"), 1, 1))
    before = numbers(first(name))
    if isinstance(again, dict):
        assert all(torch.equal(again[site], before[site]) for site in before)
    else:
        pandas.testing.assert_frame_equal(again, before, check_exact=True)


@pytest.mark.parametrize("batch_size", [1, 2])
def test_other_batches(batch_size, tiny):
    """What takes a size of batches gives the same numbers for any."""
    model = tiny("llama")
    given = {"texts": [A, B, "The bank."], "sites": ["v", "scores", "stream"]}
    found = sizes(wvprobe.capture(model, **given, batch_size=batch_size))
    assert found == pytest.approx(sizes(wvprobe.capture(model, **given)), rel=TOLERANCE)
    given = {"samples": 3, "length": 4, "max_offset": 3, "progress": False}
    found = sizes(wvprobe.head_behaviour(model, texts=VARIED[:4], batch_size=batch_size, **given))
    whole = sizes(wvprobe.head_behaviour(model, texts=VARIED[:4], **given))
    assert found == pytest.approx(whole, rel=TOLERANCE, abs=1e-6, nan_ok=True)


# SmolLM2-135M, layer 12, head 4, one thread.
GOLDEN: dict[str, dict[str, float]] = {
    "capture": {"v": 0.43346959, "scores": 1.8484385, "stream": 3.3185331},
    "composition": {"score": 0.044759930, "z": 7.4417992, "p": 0.42296037, "q": 0.62884372},
    "context_dependence": {
        "score_a": 2.0040396,
        "query_content": 0.77154753,
        "key_content": 0.90219315,
        "offset": 0.91717080,
        "attention_b": 0.037967453,
    },
    "copying_scores": {"eigenvalue_score": 0.72819971, "rank": 0.65913454, "p": 0.010955270},
    "drift": {
        "self_similarity": 0.95476622,
        "self_similarity_adjusted": 0.29587905,
        "intra_sentence": 0.79929134,
        "gap": 0.037545623,
        "gap_corrected": 0.12893077,
        "normalised_distance": 0.34057261,
    },
    "drift_drivers": {"contribution": 0.52065825, "control": 0.14816143, "predicted": 2.3149920},
    "drift_pair": {"cosine": 0.85139560, "distance": 0.52558917, "baseline": 0.65888717},
    "erase": {"energy": 0.054027855, "attention": 0.053302951},
    "exchange": {"local": 0.028502644, "stream": 0.0041413010},
    "head_behaviour": {
        "previous_token": 0.12332365,
        "duplicate": 0.078783884,
        "induction": 0.067120977,
        "copying": 0.019661433,
        "sink": 0.67339739,
        "positional": 0.17974044,
    },
    "head_interactions": {"interaction": 0.16514536, "q_composition": 0.053179014},
    "offset_profile": {"score": 2.2409406, "preferred_weight": 0.29349956},
    "payload": {"score": 0.99885417, "excess_majority": 0.59885417},
    "repeated_head": {"kl": 2.2859334, "loss_delta": 2.1482855, "relative_change": 0.37772874},
    "resize_heads": {"kl": 0.10137473, "kept_energy": 0.96583030, "relative_change": 0.11093505},
    "score_ledger": {"term": 0.0078524603, "gauge_fixed": 0.0058591453},
    "score_variance": {"pair": 0.82739900, "offset": 0.079861214, "context": 0.093494920},
    "sequential_heads": {"kl": 0.0041522756, "relative_change": 0.026383290},
    "share_kv_heads": {"key_error": 0.010386546, "kl": 0.34882322, "loss_delta": 0.024276124},
    "spectra": {
        "stable_rank": 18.013615,
        "effective_rank": 58.925194,
        "largest": 13.782806,
        "positivity": 0.60797246,
    },
    "subspace_overlap": {"overlap": 0.35202071, "expected": 0.33333334, "z": 25.743015},
    "top_tokens": {"id": 19499.5, "score": 25.973656},
    "value_flow": {"norm": 1.5534014, "effect": 0.0084504171},
}


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("name", MEASURES)
def test_golden_numbers(name, n_threads, smollm2):
    with threads(n_threads):
        found = sizes(MEASURES[name](smollm2, 12, 4))
    known = GOLDEN[name]
    assert {column: found[column] for column in known} == pytest.approx(known, rel=TOLERANCE)


def test_the_measures_are_all_that_there_are():
    """One result of every kind that the root's functions of a model or of its heads give."""
    without = {"audit", "capture_dataset", "sweep", "find_word"}  # identities, and what is made
    from test_leaks import CALLED, NO_MODEL  # of the others

    known = {name for name in CALLED if name in wvprobe.__all__} | {
        *("spectra", "offset_profile", "copying_scores", "top_tokens", "composition"),
        "subspace_overlap",
    }
    assert known - without == set(MEASURES) and set(MEASURES) <= CALLED | NO_MODEL
