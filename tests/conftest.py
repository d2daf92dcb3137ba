"""Fixtures that many tests share: small random models, the packaged models, labelled text."""

import os
from collections.abc import Callable
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

# Small matrices gain nothing from more threads, and runs take alike on small and large machines.
# Workers side by side have a core each.
torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads()))


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
