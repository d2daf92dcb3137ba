"""What every function that runs a model leaves behind: no hook, no tensor, no changed weight."""

import gc
import hashlib
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

import wvprobe
from wvprobe import adapters
from wvprobe.activations import open_store, read_sites
from wvprobe.behaviour import dependency_heads
from wvprobe.components import components_at, stream_components, stream_sources
from wvprobe.contextual_drift import drift_baseline, held_out_senses, score_drift
from wvprobe.counterfactual import head_ranks
from wvprobe.datasets import LabelledDataset, LabelledSentence, SenseDataset, SenseItem
from wvprobe.dissociation import double_dissociation
from wvprobe.influence import context_influence
from wvprobe.inputs import input_covariance, mean_input
from wvprobe.ledger import check_terms
from wvprobe.sense_maps import sense_map, sense_map_by_layer
from wvprobe.testing import tiny_model
from wvprobe.value_payload import confirm_heads
from wvprobe.word_pairs import pair_scores

A, B = (
    "The river bank is close to here.",
    "A power bank dropped into the river while the boat was closed.",
)
PLACES = {"query": "river", "key": "bank"}


def _sense(number: int, sense: str, text: str, split: str) -> SenseItem:
    at = text.index("bank")
    return SenseItem("bank", sense, "", "noun", text, at, at + 4, "after", split)


SENSES = SenseDataset(
    "by hand",
    tuple(
        _sense(number, sense, text, ("train", "test")[number % 2])
        for number, adjective in enumerate("old new small good".split())
        for sense, text in (
            ("shore", f"The {adjective} bank of the river was green."),
            ("money", f"She keeps money in the {adjective} bank."),
        )
    ),
)


def _sentence(number: int) -> LabelledSentence:
    nouns, verbs = ("river", "bank", "boat", "light"), ("dropped", "closed", "left")
    words = ("The", nouns[number % 4], verbs[number % 3], "the", nouns[(3 * number + 1) % 4])
    text, starts = " ".join(words), []
    for word in words:
        starts.append(text.index(word, starts[-1] + 1 if starts else 0))
    ends = tuple(start + len(word) for start, word in zip(starts, words, strict=True))
    labels = {
        "upos": ("DET", "NOUN", "VERB", "DET", "NOUN"),
        "deprel": ("det", "nsubj", "root", "det", "obj"),
    }
    heads = (1, 2, -1, 4, 2)
    return LabelledSentence(text, words, tuple(starts), ends, labels, heads, str(number))


LABELLED = LabelledDataset("by hand", tuple(_sentence(n) for n in range(12)), "upos")

VARIED = [f"{start}the {a} by the {b}" for start in ("", "So ", "Yes, ") for a in ("bank", "sea")
          for b in ("river", "boat", "light") if a != b]  # fmt: skip
PAIRS = (
    ("The bank by the river.", "The boat by the river."),
    ("The river by the bank.", "The river by the boat."),
)
CHOSEN: dict[str, Any] = {"min_count": 5, "per_sentence": None, "draws": 2, "folds": 3}


def _stored(model: Any) -> Any:
    """Capture to a folder and read from it; what is there from the call before is removed."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        given = {"words": "bank", "batch_size": 1, "progress": False}
        wvprobe.capture(model, [A, B], ["v", "scores"], out=f"{folder}/store", **given)
        return open_store(f"{folder}/store")["v"].tensor()


def _ledger(model: Any) -> Any:
    return wvprobe.score_ledger(model, A, **PLACES, layer=2, head=1)


# Function, with what tells two calls of it apart -> call.
CALLS: dict[str, Callable[[Any], Any]] = {
    "audit": lambda m: wvprobe.audit(m, [A, B]),
    "capture": lambda m: wvprobe.capture(
        m, [A, B], list(adapters.SITES), words="bank", progress=False
    ),
    "capture, whole texts": lambda m: wvprobe.capture(m, [A, B], "stream", progress=False),
    "capture, to disk": _stored,
    "context_dependence": lambda m: wvprobe.context_dependence(m, A, B, **PLACES),
    "drift": lambda m: wvprobe.drift(m, SENSES, correction="zscore"),
    "drift_drivers": lambda m: wvprobe.drift_drivers(m, SENSES, n_pairs=2, n_heads=2, n_checked=1),
    "drift_pair": lambda m: wvprobe.drift_pair(m, A, B, word="bank"),
    "erase": lambda m: wvprobe.erase(
        m, LABELLED, heads=[(0, 0)], kl_heads=[(0, 0)], kl_words=4, **CHOSEN
    ),
    "exchange, pattern": lambda m: wvprobe.exchange(m, *PAIRS[0], layers=1, draws=2),
    "exchange, value": lambda m: wvprobe.exchange(m, *PAIRS[0], part="value", layers=1, draws=2),
    "head_behaviour": lambda m: wvprobe.head_behaviour(
        m, texts=VARIED[:4], samples=3, length=4, max_offset=3, progress=False
    ),
    "head_interactions": lambda m: wvprobe.head_interactions(m, [A, B]),
    "head_ranks": lambda m: head_ranks(m, VARIED),
    "payload": lambda m: wvprobe.payload(m, LABELLED, control_draws=1, **CHOSEN),
    "payload, reinitialised": lambda m: wvprobe.payload(
        m, LABELLED, reinitialised=True, control_draws=1, **CHOSEN
    ),
    "repeated_head": lambda m: wvprobe.repeated_head(m, [A, B], layers="all"),
    "resize_heads": lambda m: wvprobe.resize_heads(
        m, [A, B], budget=0.5, allocation=("uniform", "energy", "loss"), calibration=VARIED[:3]
    ),
    "score_ledger": _ledger,
    "score_variance": lambda m: wvprobe.score_variance(m, VARIED, progress=False),
    "sequential_heads": lambda m: wvprobe.sequential_heads(m, [A, B], layers="all"),
    "share_kv_heads": lambda m: wvprobe.share_kv_heads(
        m, [A, B], n_kv_heads=1, calibration=VARIED[:3]
    ),
    "value_flow": lambda m: wvprobe.value_flow(m, A),
    # Not exported by the root.
    "check_terms": lambda m: check_terms(m, _ledger(m), n=2),
    "components_at": lambda m: components_at(m, [A, B], [2, 3], layer=2),
    "confirm_heads": lambda m: confirm_heads(
        m, LABELLED, [(1, 0)], min_count=5, per_sentence=None, draws=2, penalty=1.0, folds=3
    ),
    "context_influence": lambda m: context_influence(m, A, word="bank", draws=2),
    "dependency_heads": lambda m: dependency_heads(m, LABELLED, min_pairs=2, progress=False),
    "double_dissociation": lambda m: double_dissociation(
        m, PAIRS, layers=1, control=False, progress=False
    ),
    "drift_baseline": lambda m: drift_baseline(m, SENSES),
    "held_out_senses": lambda m: held_out_senses(m, SENSES),
    "input_covariance": lambda m: input_covariance(m, [A, B], progress=False),
    "mean_input": lambda m: mean_input(m, [A, B], progress=False),
    "pair_scores": lambda m: pair_scores(m, [A, B], "river", "bank"),
    "read_sites": lambda m: read_sites(m, [A, A, B], "v", words="bank", share=True),
    "score_drift": lambda m: score_drift(m, SENSES),
    "sense_map": lambda m: sense_map(m, "bank", dataset=SENSES),
    "sense_map_by_layer": lambda m: sense_map_by_layer(m, "bank", dataset=SENSES),
    "stream_components": lambda m: stream_components(m, A, layer=2),
    "stream_sources": lambda m: stream_sources(m, A, layer=2),
}
# Calls in the slow test: 200, but of those that take long.
TIMES = dict.fromkeys(CALLS, 200) | {
    **dict.fromkeys(("audit", "drift_pair", "erase", "payload", "score_variance"), 50),
    **dict.fromkeys(("head_interactions", "head_ranks", "repeated_head", "resize_heads"), 20),
    **dict.fromkeys(("sequential_heads", "share_kv_heads"), 20),
    "payload, reinitialised": 20,
}
# Functions of a model that run no forward of it, or none of their own.
NO_FORWARD = {
    *("encode", "find_word", "labelled_words"),
    "quick_audit",  # audit, of fewer layers
    "sense_pairs",
    "write_report",  # made of the others
    "opened",  # which opens it
}
# Root exports that take no model.
NO_MODEL = {
    *("Circuit", "HeadBudget", "Result", "WvprobeError", "__version__"),
    *("load", "load_conllu", "load_iob2", "load_senses", "known_architectures", "alternatives"),
    *("HeadWeights", "spectra", "offset_profile", "copying_scores", "top_tokens", "composition"),
    *("subspace_overlap", "fit_probes", "figure", "time_attention", "compare_biases"),
    *("capture_dataset", "sweep"),  # which open theirs
}
CALLED = {name.partition(",")[0] for name in CALLS}


def functions_of_a_model() -> set[str]:
    """Return the public functions, of public modules, whose first argument is a model."""
    found = set()
    for info in pkgutil.walk_packages(wvprobe.__path__, "wvprobe."):
        parts = info.name.split(".")[1:]
        if any(part.startswith("_") for part in parts) or parts[0] in ("adapters", "testing"):
            continue
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if name.startswith("_") or not inspect.isfunction(value):
                continue
            if name not in getattr(module, "__all__", ()) and value.__module__ != info.name:
                continue  # another module's, or one of torch's that has no signature
            parameters = list(inspect.signature(value).parameters)
            # Helpers within the library are handed the architecture, too.
            if parameters[:1] == ["model"] and "arch" not in parameters[1:2]:
                if inspect.signature(value).parameters["model"].annotation is Any:
                    found.add(name)
    return found


def test_no_function_is_forgotten():
    assert set(wvprobe.__all__) <= CALLED | NO_FORWARD | NO_MODEL
    found = functions_of_a_model()
    assert {"capture", "pair_scores", "check_terms"} <= found, "the search finds something"
    helpers = {"items_of", "embeddings", "refuse_quantised", "render"}
    assert found - helpers == (CALLED | NO_FORWARD) & found
    assert not CALLED & NO_FORWARD and CALLED - set(wvprobe.__all__) <= found


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    made = tiny_model("llama")
    gc.collect()
    gc.freeze()  # what is there already is not looked at each time
    yield made
    gc.unfreeze()


def hooks_of(model: Any) -> int:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def weights_of(model: Any) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(model.original_model.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class State(NamedTuple):
    """What may not grow: hooks, live tensors and their bytes, objects; nor change: weights."""

    hooks: int
    weights: str
    tensors: int
    numbers: int
    objects: int

    @classmethod
    def of(cls, model: Any) -> "State":
        gc.collect()
        every = gc.get_objects()
        tensors = [value for value in every if type(value) in (torch.Tensor, torch.nn.Parameter)]
        numbers = sum(value.numel() for value in tensors)
        state = (hooks_of(model), weights_of(model), len(tensors), numbers, len(every))
        return cls(*state)


def assert_nothing_left(before: State, after: State, calls: int):
    assert after.hooks == before.hooks, "hooks are left behind"
    assert after.weights == before.weights, "weights were changed"
    assert after.tensors <= before.tensors and after.numbers <= before.numbers, "tensors are kept"
    # Caches of others (of compiled code, say) fill up at times; a leak is one object a call.
    assert after.objects - before.objects < max(calls, 20), "objects are kept"


@pytest.fixture
def small(monkeypatch):
    """Baselines of few sentences, so that calls are quick."""
    monkeypatch.setattr("wvprobe.contextual_drift._baseline.SENTENCES", 20)


def check_calls(model: Any, call: Callable[[Any], Any], times: int):
    for _ in range(2):
        call(model)  # what is set up once, by the bridge and by caches of texts
    before = State.of(model)
    for _ in range(times):
        call(model)
    assert_nothing_left(before, State.of(model), times)


def test_what_is_left_behind_is_noticed(model):
    model, kept = tiny_model("llama"), []

    def hook(model):
        model.blocks[0].hook_in.register_forward_hook(lambda *_: None)

    def tensor(_model):
        kept.append(torch.zeros(3))

    def objects(_model):
        kept.extend([] for _ in range(10))

    def weight(model):
        with torch.no_grad():
            model.blocks[2].attn.v.original_component.weight[0, 0] *= 1.0001

    for call, told in (
        (hook, "hooks are left behind"),
        (tensor, "tensors are kept"),
        (objects, "objects are kept"),
        (weight, "weights were changed"),
    ):
        with pytest.raises(AssertionError, match=told):
            check_calls(model, call, 2)


QUICK = [name for name in CALLS if TIMES[name] == 200]


@pytest.mark.parametrize("name", QUICK)
def test_calls_leave_nothing_behind(name, model, small):
    check_calls(model, CALLS[name], 2)


# Beartype keeps what it makes of annotations of functions within these, at every call: they run
# in a process in which annotations are not checked.
UNCHECKED = {"head_interactions", "head_ranks"}
ALONE = """
import gc
from test_leaks import CALLS, TIMES, check_calls, check_ends, tiny_model

model = tiny_model("llama")
gc.freeze()
"""


def alone(check: str) -> None:
    folder = Path(__file__).parent
    subprocess.run([sys.executable, "-c", ALONE + check], cwd=folder, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_200_calls_leave_nothing_behind(name, model, small):
    """200 of most functions; of those that take long as many as `TIMES` says."""
    if name in UNCHECKED:
        return alone(f"check_calls(model, CALLS[{name!r}], TIMES[{name!r}])")
    before = psutil.Process().memory_info().rss
    check_calls(model, CALLS[name], TIMES[name])
    assert psutil.Process().memory_info().rss - before < 200 * 2**20


class Passed:
    """A hook of the caller's own, at the second block, that raises at one of its passes."""

    def __init__(self, model: Any, error: BaseException | None, at: int) -> None:
        self.passes, self.error, self.at = 0, error, at
        self.handle = model.blocks[1].hook_in.register_forward_hook(self)

    def __call__(self, *_: Any) -> None:
        self.passes += 1
        if self.passes == self.at and self.error is not None:
            raise self.error

    def __enter__(self) -> "Passed":
        return self

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()


def check_ends(model: Any, call: Callable[[Any], Any], everywhere: bool):
    """End a call at a pass in the middle, or at the first and last one, too."""
    with Passed(model, None, 0) as counted:
        call(model)
    assert counted.passes, "the function runs the model"
    middle = (counted.passes + 1) // 2
    ended(model, call, RuntimeError("the first"), middle)  # caches are filled by that, too
    before = State.of(model)
    for at in {1, middle, counted.passes} if everywhere else {middle}:
        for error in (RuntimeError("the hook's own"), KeyboardInterrupt()):
            ended(model, call, error, at)
    assert_nothing_left(before, State.of(model), 3)


def ended(model: Any, call: Callable[[Any], Any], error: BaseException, at: int):
    """Make a call that an error ends at a pass, and keep nothing of it."""
    with Passed(model, error, at), pytest.raises(type(error)) as raised:
        call(model)
    assert raised.value is error
    error.__traceback__ = None  # which holds what the frames held


@pytest.mark.parametrize("name", QUICK)
def test_calls_that_end_early_leave_nothing_behind(name, model, small):
    """A hook of the caller's own raises, or the user interrupts."""
    check_ends(model, CALLS[name], everywhere=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_end_anywhere_leave_nothing_behind(name, model, small):
    if name in UNCHECKED:
        return alone(f"check_ends(model, CALLS[{name!r}], everywhere=True)")
    check_ends(model, CALLS[name], everywhere=True)


@pytest.mark.parametrize("error", [RuntimeError("within"), KeyboardInterrupt()], ids=repr)
def test_what_adapters_change_is_put_back(error, model):
    arch = adapters.architecture(model)
    before = State.of(model)
    contexts = (
        lambda: adapters.rounded(model, arch, torch.bfloat16),
        lambda: adapters.changing(model, arch, {("v", 1): lambda value: value * 0}),
        lambda: adapters.reading(model, arch, [("v", 1)], lambda *_: None),
    )
    for context in contexts:
        with pytest.raises(type(error)), context():
            assert hooks_of(model) > before.hooks
            raise error
        error.__traceback__ = None
    assert_nothing_left(before, State.of(model), 3)
