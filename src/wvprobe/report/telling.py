"""What a report found, in words."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from wvprobe.report.claims import VERDICTS, Claim
from wvprobe.report.running import Outcome
from wvprobe.report.subjects import Subject

# What a verdict other than supported and refuted means to the reader.
MEANINGS = {
    "mixed": "Mixed, since the numbers speak both ways or their interval does not decide",
    "underpowered": "Underpowered, since this run was too small to tell",
    "not testable here": "Not testable here",
    "not yet measured": "Not yet measured by this version",
    "failed": "Failed while measuring",
}


class Told(NamedTuple):
    """A model's report in words.

    Attributes:
        name: the model's.
        counts: one sentence that counts the verdicts.
        points: what a reader must not miss, a sentence or two each.
    """

    name: str
    counts: str
    points: list[str]


def told(subject: Subject, claims: Sequence[Claim], outcomes: Mapping[str, Outcome]) -> Told:
    """Return what a model's report found: verdicts counted, and what cannot be concluded."""
    by_verdict = {
        verdict: [c for c in claims if outcomes[c.id].finding.verdict == verdict]
        for verdict in VERDICTS
    }
    counted = [f"{len(some)} {verdict}" for verdict, some in by_verdict.items() if some]
    points = []
    if subject.masked:
        points.append(
            f"Masked: a decoder's query does not see keys after it, which hides "
            f"{_listed(subject.masked)}. The raw score of such a pair exists and is shown; its "
            "attention is 0."
        )
    for verdict, meaning in MEANINGS.items():
        if not (some := by_verdict[verdict]):
            continue
        if verdict in ("mixed", "not yet measured"):
            points.append(f"{meaning}: {', '.join(claim.id for claim in some)}.")
        else:
            why = [f"{claim.id} ({_clause(outcomes[claim.id].finding.reason)})" for claim in some]
            points.append(f"{meaning}: {'; '.join(why)}.")
    counts = f"Of {len(claims)} claims: {_listed(counted)}."
    return Told(subject.name, counts, points)


def _listed(phrases: Sequence[str]) -> str:
    return " and ".join([", ".join(phrases[:-1]), phrases[-1]] if len(phrases) > 1 else phrases)


def _clause(reason: str) -> str:
    """Return a reason's first sentence, without its full stop."""
    return reason.partition(". ")[0].rstrip(".")
