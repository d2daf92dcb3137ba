"""Width against depth: small models of the same heads, side by side or one after another."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._progress import progress as progress_bar
from wvprobe._statistics import t_interval
from wvprobe._types import Provenance, Result
from wvprobe._validate import finite, length, message, one_of
from wvprobe._validate import seed as checked_seed
from wvprobe.counterfactual._small_models import (
    Architecture,
    architectures,
    multiply_adds,
    n_parameters,
)
from wvprobe.counterfactual._tasks import Task, tasks
from wvprobe.counterfactual._training import Recipe, Training
from wvprobe.errors import DiskSpaceError, InputError, IntegrityError

_STEPS, _POINTS = 2500, 25
_QUICK_STEPS, _QUICK_POINTS = 100, 4
_QUESTIONS, _BATCH, _HELD_OUT = 8, 32, 512
_SETTLED = 0.2  # share of the steps, at the end, in which a curve should no longer rise
_MANIFEST = "manifest.json"


class Difference(NamedTuple):
    """A mean difference over seeds, paired, and its 95 % interval by Student's t.

    Examples:
        >>> given = {"n_heads": 2, "d_head": 2, "symbols": 3, "steps": 1, "seeds": 2}
        >>> found = wvprobe.compare_biases(**given, progress=False)
        >>> gain = found.difference("sequential", "parallel")["depth"]
        >>> gain.low <= gain.value <= gain.high
        True
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class BiasResult(Result):
    """How small attention-only models of the same heads learn look-ups, by how the heads stand.

    Attributes:
        accuracy: share of held-out answers that are right.
        loss: held-out loss of an answer, nats.
        by_answer: the accuracy at the last step by the answer's place: breadth, its start; depth,
            how many links on; mixed, links within starts.
        steps: the steps at which models were measured.
        chance: accuracy without a look at the sequence; its loss is −log of it.
        best: accuracy of following the links; its loss is 0.
        n_parameters: of one model.
        multiply_adds: of one forward of one sequence, norms and softmax included.
        tasks: their names.
        architectures: their names.
        layers: the widths of each layer's heads, by architecture.
        quick: whether training was cut short, so that nothing follows.

    Examples:
        >>> given = {"n_heads": 2, "d_head": 2, "symbols": 3, "steps": 1, "seeds": 2}
        >>> found = wvprobe.compare_biases(**given, progress=False)
        >>> found.n_seeds, found.architectures[:2]
        (2, ('parallel', 'sequential'))
    """

    accuracy: Float[Tensor, "task architecture seed step"]
    loss: Float[Tensor, "task architecture seed step"]
    by_answer: Float[Tensor, "task architecture seed answer"]
    steps: Int[Tensor, " step"]
    chance: Float[Tensor, " task"]
    best: Float[Tensor, " task"]
    n_parameters: Int[Tensor, "task architecture"]
    multiply_adds: Int[Tensor, "task architecture"]
    tasks: tuple[str, ...]
    architectures: tuple[str, ...]
    layers: tuple[tuple[tuple[int, ...], ...], ...]
    quick: bool

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **dict.fromkeys(("accuracy", "loss"), ("task", "architecture", "seed", "step")),
        "by_answer": ("task", "architecture", "seed", "answer"),
        "steps": ("step",),
        **dict.fromkeys(("chance", "best"), ("task",)),
        **dict.fromkeys(("n_parameters", "multiply_adds"), ("task", "architecture")),
    }

    @property
    def n_seeds(self) -> int:
        """How many models stand behind each mean."""
        return self.accuracy.shape[2]

    def to_frame(self) -> Any:
        """Return the learning curves, one row a task, architecture and step.

        Columns: task architecture step accuracy low high loss loss_low loss_high chance best
        n_seeds; 95 % intervals of means over seeds by Student's t (NaN for one seed).
        """
        import pandas

        accuracy, loss = (self._spread(values) for values in (self.accuracy, self.loss))
        rows = [
            {
                "task": task,
                "architecture": architecture,
                "step": int(step),
                **_named(accuracy[:, t, a, s], "accuracy", "low", "high"),
                **_named(loss[:, t, a, s], "loss", "loss_low", "loss_high"),
                "chance": float(self.chance[t]),
                "best": float(self.best[t]),
                "n_seeds": self.n_seeds,
            }
            for t, task in enumerate(self.tasks)
            for a, architecture in enumerate(self.architectures)
            for s, step in enumerate(self.steps)
        ]
        return pandas.DataFrame(rows)

    def final_frame(self) -> Any:
        """Return where the curves end, one row a task and architecture.

        Columns: task architecture layers accuracy low high loss loss_low loss_high over_parallel
        over_parallel_low over_parallel_high still_rising chance best n_parameters multiply_adds
        n_seeds. `over_parallel` is the accuracy minus that of parallel heads, paired by seed;
        `still_rising` is what the mean accuracy gained in the last fifth of the steps.
        """
        import pandas

        accuracy, loss = (self._spread(values[..., -1]) for values in (self.accuracy, self.loss))
        late = int(torch.searchsorted(self.steps, (1 - _SETTLED) * float(self.steps[-1])))
        gain = (self.accuracy[..., -1] - self.accuracy[..., late]).mean(dim=2)
        over = ("over_parallel", "over_parallel_low", "over_parallel_high")
        rows = []
        for a, architecture in enumerate(self.architectures):
            differences = self.difference(architecture, "parallel")
            for t, task in enumerate(self.tasks):
                rows.append(
                    {
                        "task": task,
                        "architecture": architecture,
                        "layers": _shown(self.layers[a]),
                        **_named(accuracy[:, t, a], "accuracy", "low", "high"),
                        **_named(loss[:, t, a], "loss", "loss_low", "loss_high"),
                        **dict(zip(over, differences[task], strict=True)),
                        "still_rising": float(gain[t, a]),
                        "chance": float(self.chance[t]),
                        "best": float(self.best[t]),
                        "n_parameters": int(self.n_parameters[t, a]),
                        "multiply_adds": int(self.multiply_adds[t, a]),
                        "n_seeds": self.n_seeds,
                    }
                )
        frame = pandas.DataFrame(rows)
        order = {task: number for number, task in enumerate(self.tasks)}
        return frame.sort_values("task", key=lambda c: c.map(order), kind="stable").reset_index(
            drop=True
        )

    def difference(
        self, one: str, other: str, *, measure: str = "accuracy"
    ) -> dict[str, Difference]:
        """Return, by task, how much more of a measure `one` has than `other` at the last step.

        Both saw the same sequences and began with the same weights, seed by seed, so that the
        difference is taken within seeds: its mean, and the interval by Student's t (NaN for one
        seed).

        Args:
            one: an architecture.
            other: another.
            measure: ``accuracy``, or ``loss`` in nats.

        Raises:
            InputError: there is no such architecture or measure.
        """
        one_of("measure", measure, ("accuracy", "loss"))
        values = getattr(self, measure)[..., -1]
        at = [
            self.architectures.index(one_of(name, value, self.architectures))
            for name, value in (("one", one), ("other", other))
        ]
        found = self._spread(values[:, at[:1]] - values[:, at[1:]])[:, :, 0]
        return {task: Difference(*found[:, t].tolist()) for t, task in enumerate(self.tasks)}

    @staticmethod
    def _spread(values: Tensor) -> Tensor:
        """Return mean, low and high over seeds, the third axis, as a new first axis."""
        moved = values.movedim(2, 0)
        return torch.stack((moved.mean(dim=0), *t_interval(moved)))


def compare_biases(
    *,
    seeds: int = 5,
    quick: bool = False,
    n_heads: int = 4,
    d_head: int = 16,
    symbols: int = 8,
    steps: int | None = None,
    learning_rate: float = 0.005,
    resume: str | Path | None = None,
    progress: bool = True,
    seed: int = 0,
) -> BiasResult:
    """Train small attention-only models from scratch: the same heads in parallel or in sequence.

    Architectures, all of n_heads · d_head dimensions in heads and as many in the stream: `parallel`
    (one layer), `sequential` (a layer a head), `wide` (one layer, one head), `uneven` (one layer,
    widths about 1 : 2 : 3 : …) and `halves` (two layers, no part of claim 3.2). Parameters are
    equal exactly, multiplications but for norms and softmax, which are counted. Pre-norm (RMSNorm
    without gain), causal, learned positions, untied read-outs, no MLP, no biases. Positions are
    learned since a rotation would get in the way of matching symbols, in narrow heads more than in
    wide ones.

    Tasks (:class:`~wvprobe.counterfactual._tasks.Task`): each question takes n_heads look-ups in a
    random cycle of symbols: side by side (`breadth`), in a row (`depth`), or half and half
    (`mixed`). One layer can compose look-ups through its softmax alone, the less the longer the
    cycle (Peng, Narayanan & Papadimitriou 2024, function composition); a single head has one
    pattern a question. Heads in a row can do whatever the same heads do side by side, if the stream
    has room: on breadth only training can tell the two apart.

    Every seed has first weights and sequences of its own, the same for all architectures, and fresh
    sequences at every step. The learning rate is one for all; docs/methods.md has the sweep, on
    other seeds.

    Args:
        seeds: models of each kind; they are trained side by side.
        quick: stop after a few steps, from which nothing follows.
        n_heads: heads in all, and look-ups a question; even.
        d_head: width of an even head.
        symbols: length of the cycle; more than `n_heads`.
        steps: of the optimiser, 32 sequences each; None for 2,500 (quick: 100).
        learning_rate: AdamW's.
        resume: a folder; models in training are kept there as safetensors, and a run that was cut
            off goes on from there to the same numbers, bit for bit (same machine and threads).
        progress: whether to show a bar.
        seed: what all random numbers derive from.

    Raises:
        InputError: sizes that make no such models or tasks, or a folder of a run with other
            settings, which are named.
        IntegrityError: a file of that folder is damaged.
        DiskSpaceError: the folder cannot be written to.

    Examples:
        >>> given = {"n_heads": 2, "d_head": 2, "symbols": 3, "steps": 1, "seeds": 2}
        >>> found = wvprobe.compare_biases(**given, progress=False)
        >>> sorted(set(found.to_frame().architecture))
        ['halves', 'parallel', 'sequential', 'uneven', 'wide']
    """
    seed = checked_seed(seed)
    _check_sizes(n_heads, d_head, symbols)
    steps = (_QUICK_STEPS if quick else _STEPS) if steps is None else length("steps", steps)
    learning_rate = finite("learning_rate", learning_rate, above=0.0)
    recipe = Recipe(
        steps,
        min(_QUICK_POINTS if quick else _POINTS, steps),
        learning_rate,
        d_model=n_heads * d_head,
        batch=_BATCH,
        held_out=_HELD_OUT,
    )
    kinds, asked = architectures(n_heads, d_head), tasks(n_heads, symbols, _QUESTIONS)
    settings = {
        "seeds": length("seeds", seeds),
        "n_heads": n_heads,
        "d_head": d_head,
        "symbols": symbols,
        "questions": _QUESTIONS,
        "steps": steps,
        "learning_rate": learning_rate,
        "batch": _BATCH,
        "held_out": _HELD_OUT,
        "points": recipe.points,
        "seed": seed,
    }
    folder = None if resume is None else _folder(Path(resume), settings)
    streams = [f"{seed}/{number}" for number in range(seeds)]
    trained: list[list[Training]] = []
    with progress_bar(steps * len(kinds) * len(asked), "small models", progress) as advance:
        for task in asked:
            trained.append([])
            for kind in kinds:
                training = Training(task, kind, recipe, streams)
                _train(training, folder, advance)
                trained[-1].append(training)
    return BiasResult(
        provenance=Provenance.of(
            "small models trained from scratch",
            "",
            quick=quick,
            threads=torch.get_num_threads(),
            **settings,
        ),
        accuracy=_stacked(trained, "accuracy").mean(dim=-1),
        loss=_stacked(trained, "loss").mean(dim=-1),
        by_answer=_stacked(trained, "accuracy")[:, :, :, -1],
        steps=torch.tensor(recipe.marks),
        chance=torch.tensor([task.chance for task in asked], dtype=torch.float64),
        best=torch.tensor([task.best for task in asked], dtype=torch.float64),
        n_parameters=_counted(n_parameters, asked, kinds, recipe),
        multiply_adds=_counted(multiply_adds, asked, kinds, recipe),
        tasks=tuple(task.name for task in asked),
        architectures=tuple(kind.name for kind in kinds),
        layers=tuple(kind.layers for kind in kinds),
        quick=quick,
    )


def _check_sizes(n_heads: int, d_head: int, symbols: int) -> None:
    """Refuse sizes of which some architecture or task has none."""
    if length("n_heads", n_heads) % 2:
        hint = "Two layers take half of them each."
        raise InputError(message("n_heads", "an even number of heads", n_heads, hint))
    if length("d_head", d_head) < (n_heads + 1) / 2:
        hint = "The narrowest of the uneven heads would have no dimension."
        raise InputError(message("d_head", f"at least {(n_heads + 1) / 2}", d_head, hint))
    if length("symbols", symbols) <= n_heads:
        hint = "A question names as many different symbols, or goes as many links on."
        raise InputError(message("symbols", f"more than n_heads ({n_heads})", symbols, hint))


def _train(training: Training, folder: Path | None, advance: Any) -> None:
    """Train models to the end, from where their file left off if there is one."""
    path = None
    if folder is not None:
        path = folder / f"{training.task.name}-{training.architecture.name}.safetensors"
        if path.exists():
            training.restore(path)
            advance(training.recipe.marks[training.point - 1])
    while not training.done:
        steps = training.advance()
        if path is not None:
            training.save(path)
        advance(steps)


def _folder(folder: Path, settings: Mapping[str, Any]) -> Path:
    """Return the folder, its manifest written or found to be of the same settings."""
    wanted = {"format": 1, "torch": torch.__version__, **settings}
    path = folder / _MANIFEST
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            unfinished = folder / f"{_MANIFEST}.unfinished"
            unfinished.write_text(json.dumps(wanted, indent=1), encoding="utf-8")
            unfinished.replace(path)
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DiskSpaceError(f"cannot write to {folder}: {error}. Name another folder.") from error
    except ValueError as error:
        raise IntegrityError(
            f"{path} is not what was written: {error}. Name another folder, or empty this one."
        ) from error
    others = {name for name in {*wanted, *found} if wanted.get(name) != found.get(name)}
    if others:
        told = ", ".join(f"{n}={found.get(n)!r}" for n in sorted(others))
        asked = ", ".join(f"{n}={wanted.get(n)!r}" for n in sorted(others))
        hint = f"This one asks for {asked}. Name another folder, or empty this one."
        raise InputError(message("resume", "a folder of the same run", f"a run of {told}", hint))
    return folder


def _stacked(trained: list[list[Training]], name: str) -> Tensor:
    return torch.stack([torch.stack([getattr(t, name) for t in row]) for row in trained])


def _counted(
    count: Any, asked: tuple[Task, ...], kinds: tuple[Architecture, ...], recipe: Recipe
) -> Int[Tensor, "task architecture"]:
    return torch.tensor([[count(kind, task, recipe.d_model) for kind in kinds] for task in asked])


def _named(values: Tensor, *names: str) -> dict[str, float]:
    return dict(zip(names, values.tolist(), strict=True))


def _shown(layers: tuple[tuple[int, ...], ...]) -> str:
    """Write layers as a reader does: ``8 8 8 8``, or ``8 | 8 | 8 | 8`` one after another."""
    return " | ".join(" ".join(map(str, widths)) for widths in layers)
