"""What people claim about attention, the rule each claim is held to, and how it came out.

A claim without a measure is listed as not yet measured. Verdict functions live with the claims of
their question; they are pure: numbers in, verdict out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from wvprobe._types import Result
from wvprobe.errors import UnsupportedError

Verdict = Literal[
    "supported", "refuted", "mixed", "underpowered", "not testable here", "not yet measured"
]


@dataclass(frozen=True)
class Finding:
    """How a claim came out.

    Attributes:
        verdict: one of the six; underpowered is a measure cut short, from which nothing follows.
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
        claim: the claim.
        rule: when it counts as supported.
        measure: tests it on what was measured of a model; None where nothing does yet.
        flips: what would turn the verdict, for the reader.
        code: lines of Python that leave the finding's numbers in ``numbers``; ``model``,
            ``text_a``, ``text_b`` and ``quick`` are given.
        exhibits: what to draw beside it.
        measured_on: what it was measured on, where that is not the loaded model.
    """

    id: str
    claim: str
    rule: str
    measure: Callable[[Any], Finding] | None = None
    flips: str = ""
    code: str = ""
    exhibits: Callable[[Any], Sequence[Exhibit]] = no_exhibits
    measured_on: str = ""

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
            "numbers": dict(finding.numbers),
            "interval": None if finding.interval is None else list(finding.interval),
            "n": finding.n,
            "model": self.measured_on or model,
            "reason": finding.reason,
            "flips": self.flips,
            "code": self.code,
        }
