"""What people claim about attention, the rule each claim is held to, and how it came out.

A claim without a measure is listed as not yet measured. Verdict functions live with the claims of
their question; they are pure: numbers in, verdict out.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from string import Template
from typing import Any, Literal, NamedTuple, get_args

from wvprobe._types import Result
from wvprobe.errors import UnsupportedError

Verdict = Literal[
    "supported",
    "refuted",
    "mixed",
    "underpowered",
    "not testable here",
    "not yet measured",
    "failed",
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Finding:
    """How a claim came out.

    Attributes:
        verdict: one of the seven; ``underpowered`` where a run was too small to tell, ``failed``
            where measuring broke off.
        numbers: name -> number, what the verdict was derived from.
        interval: the interval that the rule looks at, or None where arithmetic decides.
        n: how many observations stand behind it, or None.
        reason: one sentence for the reader.
    """

    verdict: Verdict
    numbers: Mapping[str, float] = field(default_factory=dict)
    interval: tuple[float, float] | None = None
    n: int | None = None
    reason: str = ""


NOT_YET = Finding("not yet measured", reason="No measure of this version tests it.")


class Exhibit(NamedTuple):
    """A result to be drawn beside a claim, and what its reader should know."""

    result: Result
    text: str


def no_exhibits(_measured: Any) -> Sequence[Exhibit]:
    """Return nothing to draw."""
    return ()


@dataclass(frozen=True)
class Claim:
    """A claim, its rule with the margin fixed beforehand, and the measure that tests it.

    Attributes:
        id: question and number.
        claim: the claim. Here and in `rule` and `flips` stand ``$word``, ``$other`` (the two
            words) and ``$later`` (what follows the first), see :meth:`about`.
        rule: when it counts as supported.
        measure: tests it on what was measured of a model; None where nothing does yet.
        flips: what would turn the verdict, for the reader.
        code: lines of Python that leave the finding's numbers in ``numbers``; ``model``,
            ``text_a``, ``text_b`` and ``conllu`` are given, and for what
            :func:`~wvprobe.report.given.lines_of` lists stand placeholders such as ``$draws``.
        exhibits: what to draw beside it.
        any_model: whether it asks nothing of the model, so that one measurement serves them all.
        measured_on: what it was measured on, where that is not the loaded model.
    """

    id: str
    claim: str
    rule: str
    measure: Callable[[Any], Finding] | None = None
    flips: str = ""
    code: str = ""
    exhibits: Callable[[Any], Sequence[Exhibit]] = no_exhibits
    any_model: bool = False
    measured_on: str = ""

    def about(self, words: Mapping[str, str], lines: Mapping[str, str]) -> "Claim":
        """Return the claim with what stands for its placeholders, in prose and in Python."""
        told = {
            name: Template(getattr(self, name)).safe_substitute(words)
            for name in ("claim", "rule", "flips")
        }
        return replace(self, **told, code=Template(self.code).safe_substitute(lines))

    def judge(self, measured: Any) -> Finding:
        """Measure the claim, or say that nothing does, or why the model does not allow it."""
        if self.measure is None:
            return NOT_YET
        try:
            return self.measure(measured)
        except UnsupportedError as refused:
            return Finding("not testable here", reason=str(refused))

    def shown(self, measured: Any) -> Sequence[Exhibit]:
        """Return what to draw; nothing where the model does not allow it."""
        try:
            return self.exhibits(measured)
        except UnsupportedError:
            return ()

    def record(self, finding: Finding, model: str) -> dict[str, Any]:
        """Return the claim's entry in results.json."""
        return {
            "id": self.id,
            "claim": self.claim,
            "verdict": finding.verdict,
            "rule": self.rule,
            "numbers": {name: finite(value) for name, value in finding.numbers.items()},
            "interval": None if finding.interval is None else [*map(finite, finding.interval)],
            "n": finding.n,
            "model": self.measured_on or model,
            "reason": finding.reason,
            "flips": self.flips,
            "code": self.code,
        }


def finite(value: float | int) -> float | int | None:
    """Return a number, or None for one that JSON does not know."""
    return value if math.isfinite(value) else None
