"""Every question and every claim, in their order."""

from typing import NamedTuple

from wvprobe.report import question1, question2, question3, question4, question5
from wvprobe.report.claims import Claim


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
