"""Every public name is on an API page, says what it takes, and has an example that runs."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import wvprobe
from wvprobe import _types
from wvprobe.errors import WvprobeError

API = Path(__file__).parent.parent / "docs" / "api"
DIRECTIVE = re.compile(r"^::: (\S+)$", re.MULTILINE)
# Their names are documented whole, and may change without notice.
INNER_MODULES = ("adapters", "cli", "store")
INNER_PATHS = {f"wvprobe.{name}" for name in INNER_MODULES}
ERROR = "wvprobe.errors.WvprobeError"


def entries(page: Path) -> list[str]:
    return DIRECTIVE.findall(page.read_text(encoding="utf-8"))


INNER = set(entries(API / "internals.md"))
ENTRIES = [path for page in sorted(API.glob("*.md")) for path in entries(page)]


def own_names(module: Any) -> list[str]:
    """Return the functions and classes that a module offers: all it lists, or else all it has."""
    listed = getattr(module, "__all__", None)
    names = [name for name in vars(module) if name[0] != "_"] if listed is None else listed
    own = []
    for name in names:
        value = getattr(module, name)
        home = f"{getattr(value, '__module__', '')}."
        if inspect.isfunction(value) or inspect.isclass(value):
            own += [name] * (listed is not None or home.startswith(f"{module.__name__}."))
    return own


def public() -> dict[str, Any]:
    """Return path -> value of every public name; the root's are those of their modules."""
    modules = [_types]
    for info in pkgutil.iter_modules(wvprobe.__path__):
        if not info.name.startswith("_") and info.name not in INNER_MODULES:
            modules.append(importlib.import_module(f"wvprobe.{info.name}"))
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in modules
        for name in own_names(module)
    }


PUBLIC = public()
SHOWN = [path for path in PUBLIC if path not in INNER]
RAISES_NOTHING = {
    "wvprobe.budget.known_architectures",
    "wvprobe.models.packaged_models",
    "wvprobe.plotting.script",
    "wvprobe.testing.induction_model",
}
FUNCTIONS = [path for path in SHOWN if inspect.isfunction(PUBLIC[path])]


def own_doc(value: Any) -> str:
    return (
        inspect.cleandoc(vars(value).get("__doc__") or "")
        if inspect.isclass(value)
        else (inspect.getdoc(value) or "")
    )


def is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, WvprobeError)


def test_api_pages_have_every_public_name_once():
    assert len(ENTRIES) == len(set(ENTRIES))
    assert set(PUBLIC) <= set(ENTRIES), set(PUBLIC) - set(ENTRIES)
    for name in set(wvprobe.__all__) - {"__version__"}:
        assert f"wvprobe.{wvprobe._HOMES[name]}.{name}" in ENTRIES


def test_every_entry_leads_to_something():
    for path in ENTRIES:
        module, _, name = path.rpartition(".")
        assert path in INNER_PATHS or hasattr(importlib.import_module(module), name), path


def test_every_public_name_has_an_example():
    """Errors need none: they are met where the functions that raise them say so."""
    kinds = {path for path, value in PUBLIC.items() if is_error(value)} - {ERROR}
    without = [path for path in SHOWN if "\nExamples:\n" not in own_doc(PUBLIC[path])]
    assert set(without) == kinds, set(without) ^ kinds


def test_functions_say_what_every_argument_is_and_what_is_raised():
    silent = []
    for path in FUNCTIONS:
        sections = re.split(r"^(\w+):$", own_doc(PUBLIC[path]), flags=re.MULTILINE)
        told = dict(zip(sections[1::2], sections[2::2], strict=True))
        parameters = list(inspect.signature(PUBLIC[path]).parameters)
        if len(parameters) > 1 and path not in RAISES_NOTHING:
            arguments = told.get("Args", "")
            missing = [n for n in parameters if not re.search(rf"^ +\**{n}: ", arguments, re.M)]
            silent += [f"{path} does not say what `{name}` is" for name in missing]
        if ("Raises" in told) == (path in RAISES_NOTHING):
            silent.append(f"{path} does not say what it raises, or belongs into RAISES_NOTHING")
    assert not silent, "\n".join(silent)


@pytest.fixture(scope="module")
def given(tiny: Any) -> dict[str, Any]:
    """Return what every example takes for granted: docs/api/index.md names it."""
    model = tiny("llama")
    heads = wvprobe.HeadWeights.from_model(model)
    return {"torch": torch, "wvprobe": wvprobe, "model": model, "heads": heads}


@pytest.mark.ci
@pytest.mark.parametrize("path", [path for path in SHOWN if ">>>" in own_doc(PUBLIC[path])])
def test_example_runs(path, given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    parsed = doctest.DocTestParser().get_doctest(own_doc(PUBLIC[path]), dict(given), path, None, 0)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not runner.run(parsed, out=said.append).failed, "".join(said)
