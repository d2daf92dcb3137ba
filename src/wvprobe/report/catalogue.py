"""Every question and every claim, in their order."""

from typing import NamedTuple

from wvprobe.report import question1, question2, question3, question4, question5
from wvprobe.report.claims import Claim, Exhibit, Finding
from wvprobe.report.measured import Measured


class Question(NamedTuple):
    """A question that people argue about, and what is claimed in answer."""

    number: str
    title: str
    claims: tuple[Claim, ...]


QUESTIONS = tuple(
    Question(str(number), str(module.__doc__), module.CLAIMS)
    for number, module in enumerate((question1, question2, question3, question4, question5), 1)
)
CLAIMS = tuple(claim for question in QUESTIONS for claim in question.claims)


def reproduced(measured: Measured) -> Finding:
    """Hold what was read out of the model against what it computes itself."""
    audited = measured.audited
    held = [row for row in audited.identities if row.status != "not applicable"]
    worst = max(row.error for row in held)
    wrong = [row.identity for row in held if row.status == "failed"]
    reason = f"{len(held)} identities hold; the largest error is {worst:.1e}."
    if wrong:
        reason = f"Failed: {'; '.join(wrong)}."
    verdict = "supported" if audited.ok else "refuted"
    return Finding(verdict, {"largest_error": worst}, n=len(held), reason=reason)


def audit_exhibits(measured: Measured) -> list[Exhibit]:
    """Show every identity's error."""
    text = (
        "Each row recomputes from the extracted weights something the model computed itself. "
        "Errors are relative to the vector's norm (scores: to c‖q‖‖k‖; patterns: absolute)."
    )
    return [Exhibit(measured.audited, text)]


AUDIT = Claim(
    "audit",
    "The extracted weights reproduce the model",
    "every identity's error within its tolerance",
    reproduced,
    "A model whose architecture is read wrongly; numbers that rest on its weights are then wrong.",
    """\
frame = wvprobe.audit(model).to_frame()
numbers = {"largest_error": frame["error"].max()}""",
    audit_exhibits,
)
