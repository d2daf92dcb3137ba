"""Fixtures that many tests share: small random models, the packaged models, labelled text."""

import itertools
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# Before anything imports torch or transformers, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"

import hypothesis
import pytest
import torch

# The same examples in every run: a change that breaks one is then the change's own doing.
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")

REPOSITORY = Path(__file__).parent.parent

# Families all of whose parts some other family has, too.
KIN = {
    "opt",  # learned positions and biases, as gpt2
    "phi",  # a parallel block, part of a head rotary, as gpt_neox
    "mistral",  # windows, as gemma2
    "qwen2",  # rotary with biases, as gpt_neox
    "qwen3",  # normed queries and keys, as gemma3
}
FEW = 3  # families of each test that `make test` runs; one test's are not another's

# Small matrices gain nothing from more threads, and runs take alike on small and large machines.
# Workers side by side have a core each.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave most families of each test to the round of `pytest -m ci`."""
    families: dict[str, set[str]] = {}
    quick = [item for item in items if item.get_closest_marker("slow") is None]
    named = [item for item in quick if isinstance(item, pytest.Function) and _family(item)]
    for item in named:
        families.setdefault(_test(item), set()).add(_family(item))
    for item in named:
        if _family(item) not in _few(_test(item), families[_test(item)]):
            item.add_marker(pytest.mark.ci)
    for item in items:
        if item.get_closest_marker("ci"):
            item.add_marker(pytest.mark.slow)


def _few(test: str, families: set[str]) -> list[str]:
    """Return a few of a test's families, the same in every run, kin last."""

    def drawn(family: str) -> tuple[bool, int]:
        return family in KIN, zlib.crc32(f"{test} {family}".encode())

    return sorted(families, key=drawn)[:FEW]


def _family(item: pytest.Function) -> str:
    """Return the family a test runs on, or ""."""
    callspec = getattr(item, "callspec", None)
    params = {} if callspec is None else callspec.params
    return str(params.get("family", params.get("model", "")))


def _test(item: pytest.Function) -> str:
    return item.nodeid.partition("[")[0]


@pytest.fixture
def as_it_is_used() -> Iterator[None]:
    """Leave annotations unchecked, as they are for whoever uses the library, and warnings be.

    What a function does not refuse itself then comes out of torch, and a test can see it.
    """
    import jaxtyping

    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """Return ``tiny_model``, except that a model asked for again is the one already built.

    Tests share these models: one that changes weights or hooks builds its own with
    :func:`wvprobe.testing.tiny_model`.
    """
    from wvprobe.testing import tiny_model

    built: dict[str, Any] = {}

    def cached(family: str, seed: int = 0, **overrides: Any) -> Any:
        key = repr((family, seed, sorted(overrides.items())))
        if key not in built:
            built[key] = tiny_model(family, seed, **overrides)
        return built[key]

    return cached


@pytest.fixture(scope="session")
def small_config() -> Any:
    """Return the config of a small Llama that transformers itself builds, for checkpoints."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=409,
        hidden_size=42,
        intermediate_size=53,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=14,
    )


@pytest.fixture(scope="session")
def smollm2() -> Any:
    """Return SmolLM2-135M, a decoder; whoever uses it is marked ``real_model``."""
    import wvprobe

    return wvprobe.load("smollm2-135m")


@pytest.fixture(scope="session")
def minilm() -> Any:
    """Return all-MiniLM-L6-v2, an encoder; whoever uses it is marked ``real_model``."""
    import wvprobe

    return wvprobe.load("minilm-l6")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of labelled text, which is not part of the repository."""
    named = os.environ.get("WVPROBE_SHARED_DATA")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no labelled text in {folder}; WVPROBE_SHARED_DATA may name its folder")
    return folder


def shorten_reports(patch: pytest.MonkeyPatch) -> None:
    """Take six of the bundled words, time and train small heads for an instant; no other path."""
    import wvprobe
    from wvprobe.attention_clock import time_attention
    from wvprobe.counterfactual import compare_biases

    def quick(**settings: Any) -> Any:
        settings |= {"d_heads": (32, 64, 128), "seconds": 0.0, "kernels": ["flash", "eager"]}
        return time_attention(128, 16, **settings)

    def brief(**settings: Any) -> Any:
        settings |= {"n_heads": 2, "d_head": 2, "symbols": 3, "steps": 2, "progress": False}
        return compare_biases(**settings)

    patch.setattr("wvprobe.contextual_drift._baseline.SENTENCES", 50)
    patch.setattr("wvprobe._kernels.peak", lambda *_: (1e11, 1e10))
    patch.setattr("wvprobe.report.measured.time_attention", quick)
    patch.setattr(wvprobe, "time_attention", quick, raising=False)
    patch.setattr("wvprobe.counterfactual._biases._HELD_OUT", 10)
    patch.setattr("wvprobe.report.measured._trained", brief)
    patch.setattr(wvprobe, "compare_biases", brief, raising=False)
    whole = wvprobe.load_senses()
    # Each a noun and a verb.
    both = [w for w in whole.words if len({i.pos for i in whole.only(w)}) > 1][:6]
    few = replace(whole, items=tuple(i for i in whole.items if i.word in both))

    def senses(path: Any = None, **settings: Any) -> Any:
        return few if path is None else wvprobe.datasets.load_senses(path, **settings)

    patch.setattr(wvprobe, "load_senses", senses)
    for module in ("report.measured", "report.given", "_equal_texts"):
        patch.setattr(f"wvprobe.{module}.load_senses", senses)


@pytest.fixture(scope="session")
def small_sizes() -> Any:
    """Return sizes of a report that a tiny model gets through in seconds."""
    from wvprobe.report import Sizes

    return Sizes("small", 54, 5, 50, 3, 1, 6, 1_000, 0, False)


@pytest.fixture(scope="session")
def small_treebank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A treebank of one grammar: "The old boat near the river sank there ." and others like it."""
    words = {
        1: ("boat", "bank", "clerk", "farmer", "engine", "teacher"),
        3: ("river", "station", "garden", "harbour", "market", "forest"),
        4: ("sank", "waited", "slept", "stood"),
    }
    lines = []
    for number, (noun, place, verb) in enumerate(itertools.product(*words.values())):
        rows = [
            ("The", "DET", 2, "det"),
            (noun, "NOUN", 6, "nsubj"),
            ("near", "ADP", 5, "case"),
            ("the", "DET", 5, "det"),
            (place, "NOUN", 2, "nmod"),
            (verb, "VERB", 0, "root"),
            ("there", "ADV", 6, "advmod"),
        ]
        lines += [f"# sent_id = {number}", f"# text = {' '.join(row[0] for row in rows)}"]
        lines += [
            f"{i}\t{word}\t{word}\t{pos}\t_\t_\t{head}\t{relation}\t_\t_"
            for i, (word, pos, head, relation) in enumerate(rows, 1)
        ]
        lines.append("")
    path = tmp_path_factory.mktemp("treebank") / "small.conllu"
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def small_report(
    tiny: Callable[..., Any],
    small_sizes: Any,
    small_treebank: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., Any]:
    """Return what writes a small report on tiny models; one asked for again is already written."""
    from wvprobe.datasets import load_conllu
    from wvprobe.report import write_report

    written: dict[tuple[str, ...], Any] = {}

    def report(*families: str) -> Any:
        if families not in written:
            with pytest.MonkeyPatch.context() as patch:
                shorten_reports(patch)
                written[families] = write_report(
                    [tiny(family) for family in families],
                    tmp_path_factory.mktemp("report"),
                    treebank=load_conllu(small_treebank),
                    sizes=small_sizes,
                    files={"conllu": str(small_treebank)},
                )
        return written[families]

    return report
