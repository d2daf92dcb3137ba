"""Saved results, stores and command lines that nobody expects: one clear error, no traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wvprobe
from wvprobe import cli
from wvprobe._types import Result
from wvprobe.activations import open_store
from wvprobe.errors import (
    DiskSpaceError,
    InputError,
    IntegrityError,
    ModelFileError,
    StoreError,
    WvprobeError,
)
from wvprobe.flow import FlowResult

pytestmark = pytest.mark.usefixtures("as_it_is_used")
TEXTS = ("The river bank is close.", "A boat by the river bank.", "So the bank by the sea.")


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory) -> Path:
    return wvprobe.value_flow(tiny("llama"), TEXTS[0]).save(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def result(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "result"))


@pytest.fixture(scope="module")
def captured(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("captured") / "store"
    wvprobe.capture(tiny("llama"), TEXTS, "v", words="bank", out=folder, progress=False)
    return folder


@pytest.fixture
def store(captured, tmp_path) -> Path:
    return Path(shutil.copytree(captured, tmp_path / "store"))


def edit(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def put(*keys: str, value: Any) -> Callable[[Any], Any]:
    """Return what puts a value in a document's place."""

    def change(document: Any) -> Any:
        inner = document
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        return document

    return change


def without(*keys: str) -> Callable[[Any], Any]:
    def change(document: Any) -> Any:
        inner = document
        for key in keys[:-1]:
            inner = inner[key]
        del inner[keys[-1]]
        return document

    return change


def deep(_document: Any) -> Any:
    found: Any = 3
    for _ in range(400):
        found = [found]
    return {"format": 1, "class": "wvprobe.flow:FlowResult", "fields": {"provenance": found}}


OTHER_RESULTS = {
    "of a later format": (put("format", value=2), "reads up to 1. Install a newer wvprobe"),
    "of format 0": (put("format", value=0), "names no format"),
    "of no format": (without("format"), "names no format"),
    "whose format is text": (put("format", value="1"), "names no format"),
    "whose format is NaN": (put("format", value=float("nan")), "names no format"),
    "that is a list": (lambda _: [1, 2], "names no format"),
    "that is null": (lambda _: None, "names no format"),
    "of no class": (without("class"), "is broken: KeyError"),
    "whose class is a number": (put("class", value=3), "is broken"),
    "of an unknown class": (put("class", value="wvprobe.flow:Nothing"), "does not exist"),
    "of an unknown module": (put("class", value="wvprobe.nothing:Flow"), "No module named"),
    "of a function": (put("class", value="wvprobe.flow:value_flow"), "does not exist"),
    "of another's class": (put("class", value="shelve_of_another:X"), "none of wvprobe's"),
    "without fields": (without("fields"), "is broken"),
    "whose fields are a list": (put("fields", value=[1]), "is broken"),
    "that lacks a field": (without("fields", "text"), "lacks text. It was saved by wvprobe 0"),
    "that has one more": (put("fields", "spin", value=1), "has spin, which this version does not"),
    "of no provenance": (without("fields", "provenance"), "lacks provenance"),
    "whose provenance is text": (put("fields", "provenance", value="x"), "is broken: provenance"),
    "whose tensor is text": (put("fields", "pattern", value="x"), "is broken: pattern"),
    "whose tensor is not there": (put("fields", "pattern", value={"$tensor": "x"}), "is broken"),
    "of an unknown kind of value": (put("fields", "pattern", value={"$pickle": "x"}), "is broken"),
    "deeper than anything": (deep, "lacks|is broken"),
}


@pytest.mark.parametrize("other", OTHER_RESULTS)
def test_a_result_of_another_version_or_none(other, result):
    change, told = OTHER_RESULTS[other]
    edit(result / "result.json", change)
    with pytest.raises(ModelFileError, match=told):
        Result.load(result)


def test_a_field_that_has_a_default_may_be_missing(result):
    """So results of before it was there go on to be read."""
    from dataclasses import MISSING, fields

    optional = [f for f in fields(FlowResult) if f.default is not MISSING]
    for field in optional:
        edit(result / "result.json", without("fields", field.name))
    assert FlowResult.load(result).text == TEXTS[0]


@pytest.mark.parametrize("named", ["wvprobe._types:import_module", "wvprobe.flow:value_flow"])
def test_no_function_is_called_for_a_result(named, result):
    """Values of a file are data: it must not choose what is run."""
    call = {"$named": named, "items": ["this"]}  # the module `this` prints when it is imported
    edit(result / "result.json", put("fields", "text", value=call))
    with pytest.raises(ModelFileError, match="which does not exist"):
        Result.load(result)


HARMS = ("cut", "emptied", "of zeros", "gone", "a folder")


def do_harm(path: Path, harm: str) -> None:
    raw = path.read_bytes()
    path.unlink()
    if harm == "a folder":
        path.mkdir()
    elif harm != "gone":
        harmed = {"cut": raw[: len(raw) // 2], "emptied": b"", "of zeros": bytes(len(raw))}
        path.write_bytes(harmed[harm])


@pytest.mark.parametrize("file", ["result.json", "tensors.safetensors"])
@pytest.mark.parametrize("harm", HARMS)
def test_a_result_whose_files_are_damaged(file, harm, result):
    path = result / file
    do_harm(path, harm)
    with pytest.raises(ModelFileError, match="holds no saved result"):
        Result.load(result)


@pytest.mark.parametrize("path", ["nowhere", "result.json", ".", 3, None, "", "a\0b", b"x"])
def test_a_path_with_no_result(path, tmp_path):
    (tmp_path / "result.json").write_text("{}")
    where = tmp_path / path if isinstance(path, str) and path and "\0" not in path else path
    with pytest.raises((ModelFileError, InputError)):
        FlowResult.load(where)  # pyright: ignore[reportArgumentType]


def test_a_result_is_not_saved_where_nothing_can_be(saved, tmp_path):
    (tmp_path / "file").write_text("here")
    found = Result.load(saved)
    with pytest.raises(DiskSpaceError, match="cannot write to"):
        found.save(tmp_path / "file" / "below")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["$tensor", "$frame", "$named", "$tuple", "$mapping", "$dataclass"])
            | st.sampled_from(["$complex", "$float", "items", "fields", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=JSON, key=st.sampled_from(["format", "class", "fields", "provenance", "text"]))
def test_any_document_is_a_result_or_refused(value, key, saved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    shutil.copy(saved / "tensors.safetensors", folder)
    document = json.loads((saved / "result.json").read_text())
    place = document["fields"] if key in ("provenance", "text") else document
    place[key] = value
    (folder / "result.json").write_text(json.dumps(document))
    try:
        found = Result.load(folder)
    except WvprobeError as error:
        assert len(str(error)) > 20
        return
    assert key in ("text", "format") and isinstance(found, FlowResult)


OTHER_STORES = {
    "of a later format": (put("format", value=2), "has store format 2; this version reads 1"),
    "of no format": (without("format"), "has store format None"),
    "of format true": (put("format", value=True), "has store format True"),
    "that is a list": (lambda _: [], "has store format None"),
    "without sites": (without("sites"), "is broken"),
    "whose sites are text": (put("sites", value="v"), "is broken"),
    "whose site lacks axes": (without("sites", "v", "axes"), "is broken"),
    "without a plan": (without("plan"), "is broken"),
    "without settings": (without("settings"), "is broken"),
    "whose plan is text": (put("plan", value="x"), "is broken"),
    "whose order is not whole": (put("plan", "order", value=[0, 0, 1]), "every item once"),
    "whose order is text": (put("plan", "order", value=["a"]), "is broken"),
    "whose batches are too few": (put("plan", "sizes", value=[1]), "do not hold its items"),
    "of empty batches": (put("plan", "sizes", value=[0, 3]), "do not hold its items"),
    "of no batches": (put("plan", "sizes", value=[]), "do not hold its items"),
    "whose longest is text": (put("longest", value="x"), "is broken"),
    "of more items than there are": (put("items", value="0" * 64), "items"),
}


@pytest.mark.parametrize("other", OTHER_STORES)
def test_a_store_of_another_version_or_none(other, store):
    change, told = OTHER_STORES[other]
    edit(store / "manifest.json", change)
    with pytest.raises((StoreError, IntegrityError), match=told):
        open_store(store)


@pytest.mark.parametrize("file", ["manifest.json", "items.arrow", "shards", "index"])
@pytest.mark.parametrize("harm", HARMS)
def test_a_store_whose_files_are_damaged(file, harm, store):
    path = store / file
    if path.is_dir():
        path = sorted(path.iterdir())[0]
    do_harm(path, harm)
    with pytest.raises((StoreError, IntegrityError)):
        opened = open_store(store)
        torch.as_tensor(opened["v"][:])
        opened.store.verify()
        opened.store.index()


OK = ["tiny:llama"]
WRONG_USE = {
    "budget, no such model": ["budget", "no-such-model"],
    "budget, no heads": ["budget", "--d-model", "64", "--heads", "0"],
    "budget, a negative width": ["budget", "--d-model", "-64", "--heads", "4"],
    "budget, heads that do not divide": ["budget", "--d-model", "64", "--heads", "7"],
    "budget, a fraction": ["budget", "--d-model", "64.5", "--heads", "4"],
    "budget, no context": ["budget", "GPT-3", "--context", "0"],
    "budget, another dtype": ["budget", "GPT-3", "--dtype", "int3"],
    "budget, both forms": ["budget", "GPT-3", "--json", "--csv"],
    "budget, nothing": ["budget"],
    "audit, a file": ["audit", __file__],
    "audit, no such folder": ["audit", "./no/such/folder"],
    "audit, NUL": ["audit", "a\0b"],
    "audit, nothing in it": ["audit", ""],
    "circuits, a layer beyond": ["circuits", *OK, "--layer", "99", "--head", "0"],
    "circuits, a head below": ["circuits", *OK, "--layer", "0", "--head", "-1"],
    "circuits, no rows": ["circuits", *OK, "-k", "0"],
    "circuits, fewer than no rows": ["circuits", *OK, "-k", "-3"],
    "circuits, another mode": ["circuits", *OK, "--compose", "X"],
    "circuits, a long token": ["circuits", *OK, "--token", "river bank"],
    "circuits, streamed": ["circuits", *OK, "--streamed"],
    "scores, three texts": ["scores", *OK, *["--text", "The bank."] * 3],
    "scores, an empty text": ["scores", *OK, "--text", ""],
    "scores, a word that is not there": ["scores", *OK, "--query", "aardvark"],
    "scores, a word of nothing": ["scores", *OK, "--query", ""],
    "scores, a layer alone": ["scores", *OK, "--layer", "1"],
    "scores, a head beyond": ["scores", *OK, "--layer", "1", "--head", "99"],
    "scores, no rows": ["scores", *OK, "-k", "0"],
    "scores, fewer than no rows": ["scores", *OK, "-k", "-2"],
    "payload, no such treebank": ["payload", *OK, "--conllu", "no-such-file"],
    "payload, a folder of none": ["payload", *OK, "--conllu", str(Path(__file__).parent)],
    "payload, two sets": ["payload", *OK, "--conllu", "a", "--iob2", "b"],
    "payload, a python file": ["payload", *OK, "--iob2", __file__],
    "payload, no words": ["payload", *OK, "--words", "0"],
    "payload, fewer than no words": ["payload", *OK, "--words", "-1"],
    "payload, no draws": ["payload", *OK, "--draws", "0"],
    "payload, no rows": ["payload", *OK, "-k", "0", "--draws", "3"],
    "payload, erases fewer than none": ["payload", *OK, "--erase", "-1", "--draws", "3"],
    "payload, another site": ["payload", *OK, "--site", "w", "--draws", "3"],
    "payload, another reference": ["payload", *OK, "--by", "w", "--draws", "3"],
    "payload, another label": ["payload", *OK, "--label", "no such"],
    "payload, out is a file": ["payload", *OK, "--draws", "3", "--out", __file__],
    "drift, no such file": ["drift", *OK, "--senses", "no-such-file"],
    "drift, no such word": ["drift", *OK, "--word", "aardvark"],
    "drift, out is a file": ["drift", *OK, "--word", "bank", "--out", __file__],
    "capture, no such texts": ["capture", *OK, "--texts", "none", "--sites", "v", "--out", "x"],
    "capture, a folder": ["capture", *OK, "--texts", ".", "--sites", "v", "--out", "x"],
    "capture, no source": ["capture", *OK, "--sites", "v", "--out", "x"],
    "capture, no out": ["capture", *OK, "--texts", __file__, "--sites", "v"],
    "capture, no sites": ["capture", *OK, "--texts", "TEXTS", "--sites", "", "--out", "x"],
    "capture, another site": ["capture", *OK, "--texts", "TEXTS", "--sites", "w", "--out", "x"],
    "capture, layers": [
        *("capture", *OK, "--texts", "TEXTS", "--sites", "v", "--out", "x", "--layers", "0,99")
    ],
    "capture, layers of text": [
        *("capture", *OK, "--texts", "TEXTS", "--sites", "v", "--out", "x", "--layers", "a")
    ],
    "capture, no batch": [
        *("capture", *OK, "--texts", "TEXTS", "--sites", "v", "--out", "x", "--batch-size", "0")
    ],
    "capture, no threads": [
        *("capture", *OK, "--texts", "TEXTS", "--sites", "v", "--out", "x", "--threads", "0")
    ],
    "capture, another engine": [
        *("capture", *OK, "--texts", "TEXTS", "--sites", "v", "--out", "x", "--engine", "steam")
    ],
    "capture, another pool": [
        *("capture", *OK, "--texts", "TEXTS", "--sites", "v", "--out", "x", "--pool", "max"),
        *("--words", "bank"),
    ],
    "capture, a file": ["capture", *OK, "--texts", "TEXTS", "--sites", "v", "--out", __file__],
    "capture, a full folder": ["capture", *OK, "--texts", "TEXTS", "--sites", "v", "--out", "."],
    "report, no such model": ["report", "no-such-model", "--out", "x"],
    "report, out is a file": ["report", *OK, "--quick", "--out", __file__],
    "report, no such treebank": ["report", *OK, "--quick", "--out", "x", "--conllu", "none"],
    "an unknown command": ["capturee"],
    "an unknown option": ["models", "--colour"],
}


@pytest.mark.parametrize(
    "wrong",
    [pytest.param(w, marks=pytest.mark.slow) if OK[0] in WRONG_USE[w] else w for w in WRONG_USE],
)
def test_wrong_use_of_the_command_line_is_one_line(wrong, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    given = [str(texts) if argument == "TEXTS" else argument for argument in WRONG_USE[wrong]]
    with pytest.raises(SystemExit) as left:
        cli.main(given)
    said = capsys.readouterr().err
    assert left.value.code in (1, 2)
    assert "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert len(last) > 20 and (last.startswith("wvprobe: ") or "Error" in said or "Usage" in said)
