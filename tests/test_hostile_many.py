"""A hundred thousand short texts, most of them several times: time that grows as they do."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wvprobe
from wvprobe.datasets import SenseDataset, SenseItem, load_labels
from wvprobe.labelled import labelled_words

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("as_it_is_used")]
MANY = 100_000
NOUNS = "river boat power bridge garden window letter doctor engine market winter forest".split()


def texts(count: int) -> list[str]:
    return [f"A {NOUNS[n % 12]} shore bank {n % 97}." for n in range(count)]


def senses(count: int) -> SenseDataset:
    made = (
        SenseItem("bank", "ab"[n % 2], "", "noun", text, text.index("bank"), text.index("bank") + 4)
        for n, text in enumerate(texts(count))
    )
    return SenseDataset("many", tuple(made))


def table(folder: Path, count: int) -> Path:
    path = folder / f"{count}.csv"
    rows = (f"A shore bank {n}.,bank,{n % 2}" for n in range(count))
    path.write_text("\n".join(["sentence,word,label", *rows]), encoding="utf-8")
    return path


def features(count: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    y = [n % 3 for n in range(count)]
    return {"X": torch.randn(count, 2, 16, generator=generator), "y": y}


SETTINGS: dict[str, Any] = {"folds": 2, "penalty": 1.0, "description_length": False}
CALLS: dict[str, Callable[[Any, Path, int], Any]] = {
    "labelled_words": lambda model, folder, n: labelled_words(model, senses(n)),
    "load_labels": lambda model, folder, n: load_labels(table(folder, n)),
    "drift": lambda model, folder, n: wvprobe.drift(model, senses(n)),
    "fit_probes": lambda model, folder, n: wvprobe.fit_probes(**features(n), **SETTINGS),
}


@pytest.mark.parametrize("name", CALLS)
def test_time_grows_no_faster_than_what_is_read(name, tiny, tmp_path):
    """Of a quarter it takes a sixteenth where every item is held against every other."""
    model, seconds = tiny("llama"), []
    for count in (100, MANY // 4, MANY):  # the first warms up
        start = time.process_time()
        CALLS[name](model, tmp_path, count)
        seconds.append(time.process_time() - start)
    assert seconds[2] < 8 * seconds[1] + 1


def test_texts_that_are_given_a_thousand_times_have_one_vector(tiny, tmp_path):
    given = texts(MANY)
    stored = wvprobe.capture(
        tiny("llama"), given, "v", words="bank", layers=1, out=tmp_path / "many", progress=False
    )
    assert len(stored["v"]) == MANY
    period = 12 * 97  # after which texts come again
    assert given[period] == given[0]
    torch.testing.assert_close(stored["v"][period : 4 * period], stored["v"][: 3 * period])
