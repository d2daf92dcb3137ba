"""Models that nobody expects: very small, broken, half precise, in training, on no device."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hostile import CALLS, Things

import wvprobe
from wvprobe.errors import InputError, UnsupportedError, WvprobeError
from wvprobe.testing import tiny_model

pytestmark = pytest.mark.usefixtures("as_it_is_used")

# Calls of functions that read a model or its weights.
OF_MODELS = [name for name, call in CALLS.items() if {"model", "heads"} & set(call.wrong)]
OF_MODELS.remove("capture_dataset")  # every process opens a model of its own
# Places that small models have, too; at stream 0 nothing has drifted.
FIRST: dict[str, Any] = {"layer": 0, "layers": [0], "head": 0, "reader": None}


class OfOne(Things):
    """Things of one model, whatever it is."""

    def __init__(self, model: Any, folder: Any) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(lambda family: model, folder)


def called(name: str, things: Things) -> Any:
    """Call a function, on the first layer and head where it takes any."""
    call = CALLS[name]
    arguments = call.arguments(things)
    if name == "drift_drivers":
        arguments["layer"] = 1
    else:
        arguments |= {k: v for k, v in FIRST.items() if k in arguments}
    if arguments.get("reader", things) is None:
        arguments |= {"query": None, "key": None, "path": None}
    if isinstance(arguments.get("heads"), list):
        paired = isinstance(arguments["heads"][0], tuple)
        arguments["heads"] = [(0, 0)] if paired else [0]
    if "mean_input" in arguments:
        arguments["mean_input"] = torch.ones(things.heads.n_layers, things.heads.d_model)
    return call.function(**arguments)


def holes(result: Any) -> set[str]:
    """Return the columns or tensors of a result that hold NaN or infinity."""
    found: set[str] = set()
    if hasattr(result, "to_frame"):
        frame = result.to_frame().select_dtypes(["float"])
        found |= {str(c) for c in frame if not frame[c].map(math.isfinite).all()}
    values = result if isinstance(result, torch.Tensor) else getattr(result, "values", None)
    named = values if isinstance(values, dict) else {"": values}
    for key, value in named.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found |= {key} if not bool(value.isfinite().all()) else set()
    return found


SMALL: dict[str, Callable[[], Any]] = {
    "one layer": lambda: tiny_model("llama", num_hidden_layers=1),
    "one head": lambda: tiny_model("llama", num_attention_heads=1, num_key_value_heads=1),
    "one key-value head": lambda: tiny_model("llama", num_key_value_heads=1),
    "one of all": lambda: tiny_model("gpt2", n_layer=1, n_head=1),
    "one of all, an encoder": lambda: tiny_model(
        "bert", num_hidden_layers=1, num_attention_heads=1
    ),
    "float16": lambda: tiny_model("llama", dtype="float16"),
    "bfloat16": lambda: tiny_model("llama", dtype="bfloat16"),
    "float64": lambda: tiny_model("llama", dtype="float64"),
}
_BY = {"gpt2": "one of all", "bert": "one of all, an encoder"}


@pytest.mark.slow
@pytest.mark.parametrize("which", SMALL)
def test_small_and_half_precise_models_are_measured_or_refused(which, tmp_path):
    """No number is lost that the plain model of the family has."""
    model = SMALL[which]()
    plain = tiny_model(model.cfg.model_name.removeprefix("tiny:"))
    wrong = {}
    for name in OF_MODELS:
        try:
            lost = holes(called(name, OfOne(model, tmp_path / "own")))
        except WvprobeError:
            continue
        except Exception as error:
            wrong[name] = repr(error)
            continue
        try:
            lost -= holes(called(name, OfOne(plain, tmp_path / "plain")))
        except WvprobeError:
            continue
        if lost:
            wrong[name] = str(lost)
    assert not wrong


@pytest.mark.parametrize("which", ["one layer", "one head", "one of all, an encoder"])
def test_small_models_pass_their_audit(which):
    found = wvprobe.audit(SMALL[which]())
    assert found.ok
    assert (found.to_frame()["status"] == "ok").sum() > 5


SPOILED = {
    "a value's weight": ("layers.1.self_attn.v_proj.weight", float("nan")),
    "a query's weight": ("layers.0.self_attn.q_proj.weight", float("inf")),
    "an embedding": ("embed_tokens.weight", float("nan")),
    "a norm's gain": ("layers.1.input_layernorm.weight", float("nan")),
    "an MLP": ("layers.1.mlp.down_proj.weight", float("-inf")),
    "the last MLP": ("layers.2.mlp.down_proj.weight", float("nan")),
    "the final norm": ("model.norm.weight", float("nan")),
    "the head": ("lm_head.weight", float("nan")),
}


def spoiled(which: str) -> Any:
    """Return a model in whose weights one number is none."""
    path, value = SPOILED[which]
    model = tiny_model("llama")
    named = model.original_model.named_parameters()
    (weight,) = (p for n, p in named if path in n.replace("._original_component", ""))
    with torch.no_grad():
        weight[1 if weight.dim() > 1 else ..., ...].view(-1)[3] = value
    return model


@pytest.mark.slow
@pytest.mark.parametrize("which", SPOILED)
def test_no_nan_comes_out_of_a_broken_model(which, tiny, tmp_path):
    """Each function refuses it, or has a number wherever the whole model has one."""
    model, wrong = spoiled(which), {}
    for name in OF_MODELS:
        try:
            lost = holes(called(name, OfOne(model, tmp_path / "own")))
            lost -= holes(called(name, OfOne(tiny("llama"), tmp_path / "plain"))) if lost else set()
            if lost:
                wrong[name] = str(lost)
        except WvprobeError as error:
            assert len(str(error)) > 20
        except Exception as error:
            wrong[name] = repr(error)
    assert not wrong


@pytest.mark.parametrize("site", ["resid_post", "v", "scores", "head_out", "mlp_out"])
def test_where_nan_first_comes_up_is_named(site):
    with pytest.raises(InputError, match=r"NaN or infinity in \w+ of layer \d of tiny:llama.*Look"):
        wvprobe.capture(spoiled("a value's weight"), "The river bank.", [site, "resid_post"])


def in_training() -> Any:
    model = tiny_model("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    model.train()
    return model


def quantised() -> Any:
    model = tiny_model("llama")
    for block in model.blocks:
        module = block.attn.v.original_component
        whole = (module.weight * 10).to(torch.int8)
        module.weight = torch.nn.Parameter(whole, requires_grad=False)
    return model


STATES: dict[str, tuple[Callable[[], Any], str]] = {
    "in training": (in_training, r"in training mode.*Call model.eval\(\)"),
    "on meta": (lambda: tiny_model("llama").to("meta"), "meta"),
    "quantised": (quantised, "int8"),
    "wrapped": (lambda: torch.nn.DataParallel(tiny_model("llama")), "TransformerBridge|tokenizer"),
}
# What needs no forward and no weight, or (of a model in training) no forward.
UNASKED = ("find_word", "encode", "HeadBudget.from_model", "labelled_words", "quick_audit")


@pytest.mark.parametrize(
    "state",
    [s if s == "in training" else pytest.param(s, marks=pytest.mark.slow) for s in STATES],
)
def test_a_model_in_no_state_to_be_measured_is_refused(state, tmp_path):
    make, told = STATES[state]
    model, wrong = make(), {}
    static = ("HeadWeights", "spectra", "composition", "copying", "subspace", "top_", "singular")
    for name in OF_MODELS:
        unasked = name in UNASKED or (state == "in training" and name.startswith(static))
        try:
            called(name, OfOne(model, tmp_path))
            if not unasked:
                wrong[name] = "is answered"
        except WvprobeError as error:
            assert len(str(error)) > 20
            assert name != "capture" or re.search(told, str(error))
        except Exception as error:
            wrong[name] = repr(error)
    assert not wrong


def test_quantised_weights_are_refused_by_their_kind():
    with pytest.raises(UnsupportedError, match="quantised, which wvprobe does not model"):
        wvprobe.capture(quantised(), "The river bank.", "v")


def test_gradients_asked_for_change_nothing(tiny):
    """Numbers do not hang on what a training left behind, and no graph is kept."""
    model = tiny_model("llama")
    model.original_model.requires_grad_(True)
    with torch.enable_grad():
        own = wvprobe.capture(model, "The river bank.", ["v", "resid_post"])
        heads = wvprobe.HeadWeights.from_model(model)
    plain = wvprobe.capture(tiny("llama"), "The river bank.", ["v", "resid_post"])
    for site in ("v", "resid_post"):
        assert torch.equal(own[site], plain[site]) and not own[site].requires_grad
    assert not heads.W_V.requires_grad
