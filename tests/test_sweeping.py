"""Sweeps: the numbers of single calls, whichever process makes them."""

from functools import partial
from typing import NamedTuple

import joblib
import pandas
import pytest
import torch

import wvprobe
from wvprobe import sweeping
from wvprobe.errors import InputError, WordError
from wvprobe.testing import tiny_model

TEXTS = ("A power bank dropped into the river.", "The river bank is close to here.")
PAIR = {"text_a": TEXTS[0], "text_b": TEXTS[1], "query": "river", "key": "bank"}
MODELS = ("tiny:llama", partial(tiny_model, "gpt2", 3), "tiny:bert")
ARGUMENTS = {"both": PAIR, "same": {**PAIR, "text_b": TEXTS[0]}}


def check(found):
    """Hold a sweep of `context_dependence` against single calls."""
    bridges = [tiny_model("llama"), tiny_model("gpt2", 3), tiny_model("bert")]
    runs = iter(found.runs)
    for bridge in bridges:
        for name, own in ARGUMENTS.items():
            run, alone = next(runs), wvprobe.context_dependence(bridge, **own)
            assert (run.model, run.arguments, run.refused) == (bridge.cfg.model_name, name, "")
            pandas.testing.assert_frame_equal(run.result.to_frame(), alone.to_frame())
            assert run.result.provenance == alone.provenance
    assert next(runs, None) is None


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_it_gives_what_single_calls_give(one_thread):
    found = wvprobe.sweep(wvprobe.context_dependence, MODELS, ARGUMENTS, n_jobs=1)
    check(found)
    frame = found.to_frame()
    assert list(frame.columns[:4]) == ["model", "arguments", "layer", "head"]
    assert list(frame["arguments"].unique()) == ["both", "same"]
    assert len(frame) == sum(len(run.result.to_frame()) for run in found.runs)
    assert found.refusals().empty and sweeping._held.bridge is None


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["loky", "threading", "ray", "dask"])
def test_other_processes_give_the_same(backend, one_thread):
    if backend == "ray":
        pytest.importorskip("ray")
        from ray.util.joblib import register_ray

        from wvprobe.capturing import _ray

        register_ray()
        with _ray.cluster(None, 2), joblib.parallel_config(backend="ray"):
            check(wvprobe.sweep(wvprobe.context_dependence, MODELS, ARGUMENTS, n_jobs=2))
    elif backend == "dask":
        distributed = pytest.importorskip("distributed")
        with (
            distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=None),
            joblib.parallel_config(backend="dask"),
        ):
            check(wvprobe.sweep(wvprobe.context_dependence, MODELS, ARGUMENTS))
    else:
        with joblib.parallel_config(backend=backend, n_jobs=2):
            check(wvprobe.sweep(wvprobe.context_dependence, MODELS, ARGUMENTS))


def test_a_model_is_opened_once():
    opened = []

    def model():
        opened.append(1)
        return tiny_model("llama")

    found = wvprobe.sweep(wvprobe.context_dependence, model, ARGUMENTS)
    assert len(found.runs) == 2 and len(opened) == 1


def test_what_a_model_does_not_allow_is_told_and_the_others_go_on():
    def residual(model):
        return wvprobe.capture(model, TEXTS, "resid_mid", words="bank")

    found = wvprobe.sweep(residual, ["tiny:gpt_neox", "tiny:gpt2"])
    assert [bool(run.refused) for run in found.runs] == [True, False]
    row = found.refusals().iloc[0]
    assert row["model"] == "tiny:gpt_neox" and "side by side" in row["refused"]
    assert set(found.to_frame()["model"]) == {"tiny:gpt2"}


def test_other_errors_are_raised():
    def missing(model):
        return wvprobe.capture(model, TEXTS, "v", words="boat")

    with pytest.raises(WordError):
        wvprobe.sweep(missing, "tiny:gpt2")
    assert sweeping._held.bridge is None


def test_names_of_columns_that_a_result_has_itself():
    class Own(NamedTuple):
        def to_frame(self):
            return pandas.DataFrame({"model": ["its own"], "x": [1]})

    frame = wvprobe.sweep(lambda model: Own(), "tiny:gpt2").to_frame()
    assert frame.to_dict("records") == [
        {"model": "tiny:gpt2", "arguments": "", "own_model": "its own", "x": 1}
    ]


@pytest.mark.parametrize(
    ("models", "arguments", "told"),
    [
        ([], None, "`models` must be at least one"),
        (3, None, "`models` must be at least one"),
        ("bridge", None, "a bridge does not travel"),
        ("tiny:gpt2", {}, "`arguments` must be at least one set"),
        ("tiny:gpt2", None, "`function` must be one whose result has to_frame"),
        ([3], None, "`model` must be a name or path"),
    ],
)
def test_what_cannot_be_used_is_refused(models, arguments, told, tiny):
    models = [tiny("gpt2")] if models == "bridge" else models
    with pytest.raises(InputError, match=told):
        wvprobe.sweep(lambda model: 3, models, arguments)
