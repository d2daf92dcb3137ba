"""Texts that nobody expects, given to every function of texts: an answer, or one clear error."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

import wvprobe
from wvprobe.components import stream_components, stream_sources
from wvprobe.counterfactual import head_ranks
from wvprobe.dissociation import double_dissociation
from wvprobe.errors import InputError, WvprobeError
from wvprobe.influence import context_influence
from wvprobe.inputs import input_covariance, mean_input
from wvprobe.word_pairs import pair_scores
from wvprobe.words import encode

PLAIN = ("The river bank is close.", "A boat by the sea.", "So the bank.")
WORDS = {"query": "bank", "key": "river"}
FEW: dict[str, Any] = {"samples": 3, "length": 4, "max_offset": 3, "progress": False}

FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "encode": encode,
    "find_word": lambda m, t: wvprobe.find_word(m, t, "bank"),
    "find_word, the word": lambda m, t: wvprobe.find_word(m, PLAIN[0], t),
    "capture": lambda m, t: wvprobe.capture(m, [t], "stream"),
    "capture, among others": lambda m, t: wvprobe.capture(
        m, [PLAIN[0], t, PLAIN[1]], ["v", "scores", "pattern"]
    ),
    "capture, words": lambda m, t: wvprobe.capture(m, [t], "v", words="bank"),
    "capture, one": lambda m, t: wvprobe.capture(m, t, "v", positions="last"),
    "audit": lambda m, t: wvprobe.audit(m, [t]),
    "head_behaviour": lambda m, t: wvprobe.head_behaviour(m, texts=[t] * 3, **FEW),
    "head_interactions": lambda m, t: wvprobe.head_interactions(m, [t]),
    "head_ranks": lambda m, t: head_ranks(m, [t]),
    "repeated_head": lambda m, t: wvprobe.repeated_head(m, [t], layers=1),
    "resize_heads": lambda m, t: wvprobe.resize_heads(m, [t], budget=0.5, calibration=PLAIN),
    "resize_heads, calibrated": lambda m, t: wvprobe.resize_heads(
        m, PLAIN[:1], budget=0.5, calibration=[t]
    ),
    "score_variance": lambda m, t: wvprobe.score_variance(m, [*PLAIN, t], progress=False),
    "sequential_heads": lambda m, t: wvprobe.sequential_heads(m, [t], layers="all"),
    "share_kv_heads": lambda m, t: wvprobe.share_kv_heads(m, [t], n_kv_heads=1, calibration=PLAIN),
    "value_flow": lambda m, t: wvprobe.value_flow(m, t),
    "double_dissociation": lambda m, t: double_dissociation(
        m, [(t, t)], layers=1, control=False, progress=False
    ),
    "input_covariance": lambda m, t: input_covariance(m, [t], progress=False),
    "mean_input": lambda m, t: mean_input(m, [t], progress=False),
    "stream_components": lambda m, t: stream_components(m, t, layer=2),
    "stream_sources": lambda m, t: stream_sources(m, t, layer=2),
    "exchange": lambda m, t: wvprobe.exchange(m, t, layers=1, draws=2),
    "exchange, the other": lambda m, t: wvprobe.exchange(m, PLAIN[0], t, layers=1),
    "score_ledger": lambda m, t: wvprobe.score_ledger(m, t, **WORDS, layer=1, head=0),
    "score_ledger, positions": lambda m, t: wvprobe.score_ledger(
        m, t, query=1, key=0, layer=1, head=0
    ),
    "context_dependence": lambda m, t: wvprobe.context_dependence(m, t, PLAIN[0], **WORDS),
    "pair_scores": lambda m, t: pair_scores(m, [t], "bank", "river"),
    "context_influence": lambda m, t: context_influence(m, t, word="bank", draws=2),
}
ODD = {
    "one letter": "a",
    "no character that shows": "\u200b",
    "NUL": "\0",
    "NUL within": "The river bank\0 river",
    "emoji": "🙂🙃 river bank 👩‍👩‍👧 is",
    "combining marks": "The ri\u0301ver river bank e\u0301a\u0308\u0323",
    "right to left": "שלום river bank עולם",
    "an override": "\u202eriver bank\u202c",
    "a byte order mark": "\ufeffriver bank",
    "special tokens": "<s>river bank</s>",
    "BERT's special tokens": "[CLS] river bank [SEP] [PAD]",
    "a long word": "x" * 200,
    "a regular expression": "river bank (.*)+[a-z]{3}\\",
    "the same again": "bank bank river bank river",
}
NEVER = {
    "nothing": "",
    "white space": "\n\t \u3000",
    "half a character": "\ud800 river bank",
    "longer than the context": "river bank " * 200,
    "a number": 3,
    "None": None,
    "bytes": b"river bank",
    "NaN": float("nan"),
    "a path": Path("river bank"),
}


def numbers_of(result: Any) -> Any:
    return result.to_frame().select_dtypes(["float", "int"])


QUICK = ("encode", "find_word", "capture, among others", "score_ledger", "mean_input")


@pytest.mark.parametrize("family", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FUNCTIONS],
)
def test_an_odd_text_is_read_or_refused(name, family, tiny):
    model = tiny(family)
    for odd, text in ODD.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = FUNCTIONS[name](model, text)
            except WvprobeError as error:
                assert str(error), odd
                continue
        if hasattr(found, "to_frame"):
            assert not np.isinf(numbers_of(found).to_numpy(dtype=float)).any(), odd


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_no_text_is_refused(name, tiny):
    model = tiny("llama")
    for wrong, text in NEVER.items():
        if name == "head_behaviour" and wrong == "longer than the context":
            continue  # it reads pieces of its texts
        # Here annotations are checked at every call, and come before the functions' own checks.
        allowed = WvprobeError if isinstance(text, str) else (WvprobeError, TypeCheckError)
        with pytest.raises(allowed) as told:
            FUNCTIONS[name](model, text)
        assert len(str(told.value)) > 20, wrong


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(min_size=1, max_size=40))
def test_any_text_is_captured_whole_or_refused(text, tiny):
    """Every token has a finite vector, and tokens are as many as the tokenizer's."""
    model = tiny("llama")
    try:
        seen = wvprobe.capture(model, text, "resid_post")
    except InputError:
        assert not text.strip() or any(0xD800 <= ord(letter) < 0xE000 for letter in text)
        return
    assert seen["resid_post"].isfinite().all()
    assert len(seen.tokens[0]) == len(seen.special[0]) == seen["resid_post"].shape[1]
