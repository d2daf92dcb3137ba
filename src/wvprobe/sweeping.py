"""`sweep`: one measure of many models with many arguments, side by side, its frames in one.

    found = sweep(payload, ["smollm2-135m", "minilm-l6"],
                  {"sense": {"dataset": senses}, "pos": {"dataset": senses, "label": "pos"}},
                  n_jobs=2)
    found.to_frame()        # model arguments layer head site score …

joblib runs it, in processes of its own or wherever ``joblib.parallel_config(backend=…)`` says:
Dask and Ray have back ends for it.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from wvprobe._threads import threads as with_threads
from wvprobe._validate import instance, message
from wvprobe.adapters import TransformerBridge
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.models import opened


class _Held(threading.local):
    """The model that this thread opened last, and the sweep and the number it came with.

    Threads share none: the hooks of one would see the forwards of another.
    """

    def __init__(self) -> None:
        self.key: tuple[str, int] | None = None
        self.bridge: TransformerBridge | None = None

    def model(self, key: tuple[str, int], source: Any) -> TransformerBridge:
        """Return the model, opened if it is not the one that is held."""
        if self.bridge is None or self.key != key:
            self.let_go()  # before the next one takes its memory
            self.key, self.bridge = key, opened(source)
        return self.bridge

    def let_go(self) -> None:
        """Hold none."""
        self.key = self.bridge = None


_ARGUMENTS = "Name the sets: {'first': {'texts': texts}}."
_held = _Held()


class Ran(NamedTuple):
    """One model with one set of arguments.

    Attributes:
        model: the model's name.
        arguments: what the arguments were called.
        result: what was measured, with its provenance; None where it was refused.
        refused: why the model does not allow the measure, or "".

    Examples:
        >>> run = wvprobe.sweep(wvprobe.audit, "tiny:gpt2").runs[0]
        >>> run.model, run.result.ok
        ('tiny:gpt2', True)
    """

    model: str
    arguments: str
    result: Any
    refused: str


class Sweep(NamedTuple):
    """What a sweep measured.

    Attributes:
        runs: every model with every set of arguments, in the order given.

    Examples:
        >>> found = wvprobe.sweep(wvprobe.audit, ["tiny:gpt2", "tiny:llama"])
        >>> list(found.to_frame()["model"].unique()), len(found.refusals())
        (['tiny:gpt2', 'tiny:llama'], 0)
    """

    runs: tuple[Ran, ...]

    def to_frame(self) -> Any:
        """Return the rows of all results below each other, behind columns model and arguments.

        A column of that name in a result's own frame is called ``own_model``, ``own_arguments``.
        """
        import pandas

        frames = []
        for run in self.runs:
            if run.result is None:
                continue
            frame = run.result.to_frame()
            frame = frame.rename(columns={name: f"own_{name}" for name in ("model", "arguments")})
            frame.insert(0, "model", run.model)
            frame.insert(1, "arguments", run.arguments)
            frames.append(frame)
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame()

    def refusals(self) -> Any:
        """Return a row a run that a model does not allow: model arguments refused."""
        import pandas

        rows = [(run.model, run.arguments, run.refused) for run in self.runs if run.refused]
        return pandas.DataFrame(rows, columns=["model", "arguments", "refused"])


def sweep(
    function: Callable[..., Any],
    models: Any,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    n_jobs: int | None = None,
    threads: int | None = None,
) -> Sweep:
    """Call a measure with every model and every set of arguments.

    Args:
        function: a measure whose first argument is a bridge, such as :func:`~wvprobe.payload`,
            :func:`~wvprobe.audit` or a function of your own, and whose result has ``to_frame``.
        models: one or several, each a name or path that :func:`~wvprobe.load` takes or a function
            without arguments that returns a bridge. A process opens a model once, and holds one.
        arguments: name -> keyword arguments of the function; None for a single call without any.
        n_jobs: as in joblib: how many at a time, −1 for as many as there are cores; None for one,
            or what ``joblib.parallel_config`` says. Every process holds a model of its own.
        threads: threads that torch works with in every process; None: as many as here now. The
            numbers are those of a call in this process with so many, bit for bit on one kind of
            processor.

    Raises:
        InputError: nothing to do, a model that cannot be opened elsewhere, or a function whose
            result has no frame.
        WvprobeError: what the function raises, but for UnsupportedError: a model that does not
            allow a measure is told in ``refused``, and the others go on.

    Returns:
        The results, each with its own provenance, and one frame of them all.

    Examples:
        >>> words = {"text_a": "The bank.", "text_b": "A bank.", "query": "bank"}
        >>> arguments = {"itself": {**words, "key": "bank"}, "first": {**words, "key": 0}}
        >>> found = wvprobe.sweep(wvprobe.context_dependence, ["tiny:llama"], arguments)
        >>> len(found.to_frame().groupby(["model", "arguments"]))
        2
    """
    import joblib

    given = [models] if callable(models) or isinstance(models, str | Path) else models
    if not isinstance(given, Iterable) or not (listed := list(given)):
        raise InputError(message("models", "at least one model's name, path or function", models))
    for model in listed:
        if not isinstance(model, str | Path) and isinstance(model, torch.nn.Module):
            hint = "Give its name, or a function that opens it: a bridge does not travel."
            raise InputError(message("models", "names, paths or functions", "a bridge", hint))
    if not callable(function):
        raise InputError(message("function", "a measure, such as wvprobe.audit", function))
    if arguments is not None:
        instance("arguments", arguments, Mapping, _ARGUMENTS)
    named = {"": {}} if arguments is None else dict(arguments)
    if not named:
        raise InputError(message("arguments", "at least one set, or None", arguments))
    for name, own in named.items():
        instance(f"arguments[{name!r}]", own, Mapping, _ARGUMENTS)
        _check_arguments(name, function, own)
    whole = isinstance(n_jobs, int) and not isinstance(n_jobs, bool)
    if n_jobs is not None and not (whole and n_jobs):
        raise InputError(message("n_jobs", "an int other than 0, or None", n_jobs))
    key = uuid4().hex
    with with_threads(threads) as n_threads:
        calls = [
            joblib.delayed(_run)((key, number), model, function, name, dict(own), n_threads)
            for number, model in enumerate(listed)
            for name, own in named.items()
        ]
        try:
            runs: Any = joblib.Parallel(n_jobs=n_jobs)(calls)
            return Sweep(tuple(runs))
        finally:
            _held.let_go()


def _check_arguments(name: str, function: Callable[..., Any], own: Mapping[str, Any]) -> None:
    """Refuse arguments that the function does not have, where it tells which it has."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, **own)
    except TypeError as error:
        expected = "arguments that the function takes beside the model"
        raise InputError(message(f"arguments[{name!r}]", expected, str(error))) from error


def _run(
    key: tuple[str, int],
    model: Any,
    function: Callable[..., Any],
    name: str,
    arguments: dict[str, Any],
    n_threads: int,
) -> Ran:
    with with_threads(n_threads):
        bridge = _held.model(key, model)
        called = bridge.cfg.model_name
        try:
            result = function(bridge, **arguments)
        except UnsupportedError as error:
            return Ran(called, name, None, str(error))
    if not hasattr(result, "to_frame"):
        expected = "one whose result has to_frame(), as every measure's of wvprobe"
        raise InputError(message("function", expected, type(result).__name__))
    return Ran(called, name, result, "")
