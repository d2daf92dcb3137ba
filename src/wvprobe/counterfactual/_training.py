"""Many small models trained side by side, each as if alone; stopped and taken up again."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from wvprobe.counterfactual._small_models import Architecture, first_weights, forward, shapes
from wvprobe.counterfactual._tasks import Questions, Task
from wvprobe.errors import IntegrityError

_BETAS, _EPSILON, _WEIGHT_DECAY = (0.9, 0.98), 1e-8, 0.01
_LARGEST_GRADIENT = 1.0
# Shares of the steps in which the learning rate rises, and falls to nothing.
_RISE, _FALL = 0.05, 0.2
_TOGETHER = 64  # sequences of a row that are measured at a time
_STATE = ("weights", "first", "second", "accuracy", "loss")


@dataclass(frozen=True)
class Recipe:
    """How models are trained and measured.

    Attributes:
        steps: of the optimiser.
        points: at how many steps, evenly spaced, models are measured, the untrained one apart.
        learning_rate: its highest value, for AdamW (Loshchilov & Hutter 2019): decay of .01, β .9
            and .98; it rises over the first 5 % of the steps and falls over the last 20 %.
        d_model: width of the stream.
        batch: sequences a step.
        held_out: sequences that are measured.
        dtype: ``float32`` or ``float64``.
    """

    steps: int
    points: int
    learning_rate: float
    d_model: int
    batch: int
    held_out: int
    dtype: torch.dtype = torch.float32

    @property
    def marks(self) -> tuple[int, ...]:
        """The steps at which models are measured, from 0 to the last."""
        return tuple(self.steps * point // self.points for point in range(self.points + 1))

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        rise, fall = max(_RISE * self.steps, 1.0), max(_FALL * self.steps, 1.0)
        return self.learning_rate * min(1.0, (step + 1) / rise, (self.steps - step) / fall)


@dataclass
class Training:
    """Models of one architecture in training on one task, a row each.

    Attributes:
        task: the task.
        architecture: the architecture.
        recipe: how they are trained.
        streams: what names each row's random numbers; rows of one name see the same sequences
            whatever the architecture.
        weights: all parameters, one after another.
        first: AdamW's running mean of the gradients.
        second: and of their squares.
        accuracy: share of held-out answers that are right, by the answer's place in a question, at
            each point; NaN where not yet there.
        loss: held-out loss, nats, likewise.
        point: how many points are done.
    """

    task: Task
    architecture: Architecture
    recipe: Recipe
    streams: Sequence[str]
    weights: Float[Tensor, "row parameter"] = field(init=False)
    first: Float[Tensor, "row parameter"] = field(init=False)
    second: Float[Tensor, "row parameter"] = field(init=False)
    accuracy: Float[Tensor, "row point answer"] = field(init=False)
    loss: Float[Tensor, "row point answer"] = field(init=False)
    point: int = 0

    def __post_init__(self) -> None:
        """Draw first weights."""
        drawn = [
            first_weights(
                self.architecture, self.task, self.recipe.d_model, _generator(stream, "weights")
            )
            for stream in self.streams
        ]
        names = self._shapes()
        flat = [torch.cat([row[name].flatten() for name in names]) for row in drawn]
        self.weights = torch.stack(flat).to(self.recipe.dtype)
        self.first, self.second = (torch.zeros_like(self.weights) for _ in range(2))
        shape = (len(self.streams), self.recipe.points + 1, self.task.n_answers)
        nothing = torch.full(shape, torch.nan, dtype=torch.float64)
        self.accuracy, self.loss = nothing, nothing.clone()

    @property
    def done(self) -> bool:
        """Whether all points are measured."""
        return self.point > self.recipe.points

    def advance(self) -> int:
        """Train to the next point and measure there; return how many steps that took."""
        marks = self.recipe.marks
        start = marks[self.point - 1] if self.point else 0
        steps = marks[self.point] - start
        if steps:
            batches = self._draw(f"training {start}", steps * self.recipe.batch)
            for number in range(steps):
                at = slice(number * self.recipe.batch, (number + 1) * self.recipe.batch)
                self._step(start + number, Questions(*(each[:, at] for each in batches)))
        self._measure()
        self.point += 1
        return steps

    def predictions(self, marks: Tensor) -> Float[Tensor, "row sequence question answer symbol"]:
        """Return log-probabilities of answers as the models are now."""
        named = self._named(self.weights)
        with torch.no_grad():
            parts = [
                forward(named, self.architecture, self.task, some.to(self.recipe.dtype))
                for some in marks.split(_TOGETHER, dim=1)
            ]
        return torch.cat(parts, dim=1).log_softmax(dim=-1)

    def save(self, path: Path) -> None:
        """Write all of it to a file, which is there as a whole or not at all."""
        from safetensors.torch import save_file

        tensors = {name: getattr(self, name).contiguous() for name in _STATE}
        unfinished = path.with_name(path.name + ".unfinished")
        save_file(tensors | {"point": torch.tensor(self.point)}, unfinished)
        unfinished.replace(path)

    def restore(self, path: Path) -> None:
        """Take up where :meth:`save` left off.

        Raises:
            IntegrityError: the file is damaged, or of other models.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        hint = "Delete it, and these models are trained anew."
        try:
            found = load_file(path)
        except (OSError, SafetensorError) as error:
            raise IntegrityError(f"{path} is not what was written: {error}. {hint}") from error
        own = {name: getattr(self, name) for name in _STATE} | {"point": torch.tensor(0)}
        if {k: (v.shape, v.dtype) for k, v in found.items()} != {
            k: (v.shape, v.dtype) for k, v in own.items()
        }:
            raise IntegrityError(f"{path} holds other models than those asked for. {hint}")
        self.point = int(found.pop("point"))
        for name, value in found.items():
            setattr(self, name, value)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return shapes(self.architecture, self.task, self.recipe.d_model)

    def _named(self, weights: Tensor) -> dict[str, Tensor]:
        """Return parameters by name, as views: their gradient is one concatenation."""
        names = self._shapes()
        parts = weights.split([math.prod(shape) for shape in names.values()], dim=1)
        found = zip(names.items(), parts, strict=True)
        return {name: part.unflatten(1, shape) for (name, shape), part in found}

    def _draw(self, purpose: str, n: int) -> Questions:
        """Return `n` sequences a row, each row's from its own stream."""
        rows = [
            self.task.draw(n, _generator(stream, f"{self.task.name} {purpose}"))
            for stream in self.streams
        ]
        return Questions(*(torch.stack(each) for each in zip(*rows, strict=True)))

    def _step(self, step: int, batch: Questions) -> None:
        """Do one step of AdamW; each row's gradient is cut to a length of 1 on its own."""
        weights = self.weights.detach().requires_grad_()
        marks = batch.marks.to(self.recipe.dtype)
        logits = forward(self._named(weights), self.architecture, self.task, marks)
        loss = _nats(logits.log_softmax(dim=-1), batch.answers).mean(dim=(1, 2, 3)).sum()
        (gradient,) = torch.autograd.grad(loss, weights)
        length = gradient.norm(dim=1, keepdim=True)
        gradient = gradient * (_LARGEST_GRADIENT / length.clamp(min=_LARGEST_GRADIENT))
        self.first = _BETAS[0] * self.first + (1 - _BETAS[0]) * gradient
        self.second = _BETAS[1] * self.second + (1 - _BETAS[1]) * gradient.square()
        mean, square = (
            moment / (1 - beta ** (step + 1))
            for moment, beta in zip((self.first, self.second), _BETAS, strict=True)
        )
        change = mean / (square.sqrt() + _EPSILON) + _WEIGHT_DECAY * self.weights
        self.weights = self.weights - self.recipe.rate(step) * change

    def _measure(self) -> None:
        """Measure on fresh sequences."""
        step = self.recipe.marks[self.point]
        asked = self._draw(f"held out {step}", self.recipe.held_out)
        log_p = self.predictions(asked.marks)
        right = log_p.argmax(dim=-1) == asked.answers
        self.accuracy[:, self.point] = right.double().mean(dim=(1, 2))
        self.loss[:, self.point] = _nats(log_p, asked.answers).double().mean(dim=(1, 2))


def _nats(log_p: Tensor, answers: Tensor) -> Float[Tensor, "row sequence question answer"]:
    return -log_p.gather(-1, answers[..., None])[..., 0]


def _generator(stream: str, purpose: str) -> Generator:
    """Return random numbers of their own for every name, the same on every machine."""
    digest = hashlib.sha256(f"{stream}: {purpose}".encode()).digest()
    return Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
