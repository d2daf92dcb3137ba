"""Step by step through a report: what is done is kept, what fails is told and not fatal."""

import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from wvprobe._progress import silent
from wvprobe.report.claims import Claim, Finding
from wvprobe.report.exhibits import Kept, kept
from wvprobe.report.given import Given, Sizes
from wvprobe.report.measured import Measured
from wvprobe.report.storing import Store
from wvprobe.report.subjects import Subject

# What steps cost relative to each other, for the time left: seconds of a quick report on
# SmolLM2-135M.
_COSTS: Mapping[str, float] = {
    "audit": 6.0,
    "1.1": 60.0,
    "1.2": 4.0,
    "2.2": 14.0,
    "2.3": 37.0,
    "2.4": 20.0,
    "2.6": 2.0,
    "3.1": 47.0,
    "3.2": 25.0,
    "4.4": 4.0,
    "5.2": 16.0,
    "5.3": 26.0,
    "5.6": 7.0,
}
_COST = 1.0  # of any other step


def _cost(claim: Claim) -> float:
    return 0.0 if claim.measure is None else _COSTS.get(claim.id, _COST)


class Step(NamedTuple):
    """A step that begins.

    Attributes:
        what: what it is, for a person.
        done: share of the whole that is behind, 0 to 1.
        left: about how many seconds are left; None while nothing is known.

    Examples:
        >>> from wvprobe.report import Step
        >>> Step("2.1 measured", 0.25, None).done
        0.25
    """

    what: str
    done: float
    left: float | None


class Outcome(NamedTuple):
    """How a claim came out, and what to draw beside it, as plain data."""

    finding: Finding
    exhibits: tuple[Kept, ...]

    def document(self) -> dict[str, Any]:
        """Return it as JSON knows it."""
        shown = [exhibit._asdict() for exhibit in self.exhibits]
        return {"finding": asdict(self.finding), "exhibits": shown}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "Outcome":
        """Return what :meth:`document` gave."""
        found = dict(document["finding"])
        found["interval"] = None if found["interval"] is None else tuple(found["interval"])
        return cls(Finding(**found), tuple(Kept(**one) for one in document["exhibits"]))


class Clock:
    """Tells steps as they begin, and about how long all that follow will take."""

    def __init__(self, claims: Iterable[Claim], tell: Callable[[Step], None]) -> None:
        """Begin a run over `claims`, one of them as often as it is measured."""
        self._tell = tell
        self._left = self._total = sum(_cost(claim) for claim in claims)
        self._cost, self._seconds = 0.0, 0.0

    def skip(self, claim: Claim) -> None:
        """Count a step as done that an earlier run carried out."""
        self._left -= _cost(claim)

    def timed(self, claim: Claim, what: str, work: Callable[[], Outcome]) -> Outcome:
        """Tell a step, carry it out, and count it."""
        left = self._left * self._seconds / self._cost if self._cost else None
        if claim.measure is not None:
            self._tell(Step(what, 1 - self._left / self._total, left))
        start = time.monotonic()
        outcome = work()
        self._seconds += time.monotonic() - start
        self._cost += _cost(claim)
        self.skip(claim)
        return outcome


class Runner:
    """Carries out the steps of a report, one model after the other."""

    def __init__(
        self, claims: Sequence[Claim], given: Given, sizes: Sizes, store: Store, log: Path
    ) -> None:
        """Measure nothing yet; tracebacks of what fails go to the file `log`."""
        self._claims, self._given, self._sizes = claims, given, sizes
        self._store, self._log = store, log

    def run(
        self, subjects: Sequence[Subject], tell: Callable[[Step], None]
    ) -> list[dict[str, Outcome]]:
        """Return how every claim came out, by its id, model by model."""
        self._log.unlink(missing_ok=True)
        shared = [claim for claim in self._claims if claim.any_model]
        own = [claim for claim in self._claims if not claim.any_model]
        clock = Clock([*shared, *(own * len(subjects))], tell)
        found: list[dict[str, Outcome]] = []
        for number, subject in enumerate(subjects):
            outcomes = self._of_model(own if number else self._claims, number, subject, clock)
            # What asks nothing of the model is measured beside the first.
            first = found[0] if found else outcomes
            found.append(
                {claim.id: outcomes.get(claim.id, first[claim.id]) for claim in self._claims}
            )
        return found

    def _of_model(
        self, claims: Sequence[Claim], number: int, subject: Subject, clock: Clock
    ) -> dict[str, Outcome]:
        measured: Measured | None = None
        found: dict[str, Outcome] = {}
        for claim in claims:
            step = f"{number}-{claim.id}"
            stored = self._store.read(step)
            if stored is not None:
                clock.skip(claim)
                found[claim.id] = Outcome.of(stored)
                continue
            if measured is None:
                measured = Measured(subject.open(), self._given, self._sizes)
            work = self._work(claim, measured, subject.name)
            found[claim.id] = clock.timed(claim, f"{subject.name}: {claim.id} {claim.claim}", work)
            # What failed is tried again by a run that goes on with this one.
            if found[claim.id].finding.verdict != "failed":
                self._store.write(step, found[claim.id].document())
        return found

    def _work(self, claim: Claim, measured: Measured, name: str) -> Callable[[], Outcome]:
        return lambda: carried_out(claim, measured, name, self._log)


def carried_out(claim: Claim, measured: Measured, name: str, log: Path) -> Outcome:
    """Judge a claim and draw what stands beside it; whatever goes wrong is its finding.

    What was judged before its figures failed keeps its numbers.
    """
    finding = Finding("failed")
    try:
        with silent():
            finding = claim.judge(measured)
            return Outcome(finding, tuple(kept(exhibit) for exhibit in claim.shown(measured)))
    except Exception as error:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"== {name}: {claim.id} {claim.claim}\n{traceback.format_exc()}\n")
        reason = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
        if finding.verdict != "failed":
            reason = f"its figures: {reason}"
        return Outcome(replace(finding, verdict="failed", reason=reason), ())
