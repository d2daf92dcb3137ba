"""Look-ups side by side, in a row, or both: tasks with a known chance and a known best."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Generator, Tensor


class Questions(NamedTuple):
    """Drawn sequences and what they ask.

    Attributes:
        marks: which marks stand at each position; a position's vector is the sum of its marks'.
        answers: to each question, the symbols 1, 2, … links on from its first start, then from the
            others.
    """

    marks: Bool[Tensor, "*row sequence pos mark"]
    answers: Int[Tensor, "*row sequence question answer"]


@dataclass(frozen=True)
class Task:
    """A random cycle of symbols, and questions of where some of them lead.

    A sequence first lists the cycle in random order, one position a link: a symbol as what is
    looked up, and its successor as what is found. Each of the following positions asks a question:
    it names `starts` different symbols, and for each of them the symbols 1 to `hops` links on are
    to be given, at that position, each by a read-out of its own.

    The symbols asked about are drawn without regard to the cycle. So every answer is independent of
    every single link, and, given the question, any of the other symbols with the same probability.
    By that and convexity a weighted bag of tokens, links taken whole, has its least loss where it
    leaves the links out: −log `chance`. (Its accuracy on ties can be a little above chance.)

    Attributes:
        name: what it is called.
        starts: look-ups side by side, each of which needs an attention pattern of its own.
        hops: look-ups in a row, each of which needs the answer to the one before.
        symbols: length of the cycle.
        questions: questions a sequence.
    """

    name: str
    starts: int
    hops: int
    symbols: int = 8
    questions: int = 8

    @property
    def chance(self) -> float:
        """Accuracy of the best answer to a question whose sequence is not looked at."""
        return 1.0 / (self.symbols - 1)

    @property
    def best(self) -> float:
        """Accuracy of following the links: they determine every answer."""
        return 1.0

    @property
    def n_answers(self) -> int:
        """Answers to a question."""
        return self.starts * self.hops

    @property
    def n_positions(self) -> int:
        """Length of a sequence."""
        return self.symbols + self.questions

    @property
    def n_marks(self) -> int:
        """Size of the vocabulary: symbols as keys, as values, and as starts, slot by slot."""
        return (2 + self.starts) * self.symbols

    def draw(self, n: int, generator: Generator) -> Questions:
        """Return `n` sequences."""
        m, asked = self.symbols, self.questions
        cycle, listed = _shuffled((n, m), generator), _shuffled((n, m), generator)
        successor = torch.empty_like(cycle).scatter_(1, cycle, cycle.roll(-1, dims=1))
        starts = _shuffled((n, asked, m), generator)[..., : self.starts]
        reached = [starts]
        for _ in range(self.hops):
            reached.append(successor[:, None].expand(-1, asked, -1).gather(2, reached[-1]))
        marks = torch.zeros(n, self.n_positions, self.n_marks, dtype=torch.bool)
        links = torch.stack((listed, m + successor.gather(1, listed)), dim=2)
        marks[:, :m].scatter_(2, links, True)
        marks[:, m:].scatter_(2, starts + m * torch.arange(2, 2 + self.starts), True)
        return Questions(marks, torch.stack(reached[1:], dim=3).flatten(2))


def tasks(n_heads: int, symbols: int, questions: int) -> tuple[Task, ...]:
    """Return three tasks of `n_heads` look-ups a question: side by side, in a row, and both."""
    return (
        Task("breadth", n_heads, 1, symbols, questions),
        Task("depth", 1, n_heads, symbols, questions),
        Task("mixed", n_heads // 2, 2, symbols, questions),
    )


def _shuffled(shape: tuple[int, ...], generator: Generator) -> Int[Tensor, "..."]:
    """Return random orders of 0, 1, … along the last axis."""
    return torch.rand(shape, generator=generator, dtype=torch.float64).argsort(dim=-1)
