"""The page: in words and verdicts first, then a section a question, then the audit."""

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from wvprobe import plotting
from wvprobe.report.catalogue import Question
from wvprobe.report.claims import Claim, Finding
from wvprobe.report.embedding import Embedded, embedded, script_json
from wvprobe.report.given import Given, quoted
from wvprobe.report.running import Outcome
from wvprobe.report.subjects import Subject, names_of
from wvprobe.report.telling import Told

# Beside the words of a verdict, for those who do not see its colour.
_SIGNS = {
    "supported": "✓",
    "refuted": "✗",
    "mixed": "≈",
    "underpowered": "∼",
    "not testable here": "–",
    "not yet measured": "·",
    "failed": "!",
}


class Shown(NamedTuple):
    """A claim's outcome, or the outcome that all models share.

    Attributes:
        name: the model's; "" where it is the same for all of them, or where there is one alone.
        finding: how the claim came out.
        exhibits: what to draw beside it.
    """

    name: str
    finding: Finding
    exhibits: Sequence[Embedded]


class Judged(NamedTuple):
    """A claim, its finding for every model, and what its section shows."""

    claim: Claim
    findings: Sequence[Finding]
    shown: Sequence[Shown]


class Section(NamedTuple):
    """A question and its claims, judged."""

    question: Question
    judged: Sequence[Judged]


class Report(NamedTuple):
    """All that a page shows.

    Attributes:
        subjects: the models.
        questions: with the claims as they read for this pair of sentences.
        audit: the claim that the weights reproduce the model.
        outcomes: model by model, how every claim came out, by its id.
        told: model by model, what was found, in words.
        document: what results.json holds.
        given: what the reader brought along.
        sizes: how large the report is.
    """

    subjects: Sequence[Subject]
    questions: Sequence[Question]
    audit: Claim
    outcomes: Sequence[Mapping[str, Outcome]]
    told: Sequence[Told]
    document: Mapping[str, Any]
    given: Given
    sizes: str


def render(report: Report, folder: Path) -> str:
    """Return the page as HTML that opens without a network.

    Tables that the page has no room for are written to `folder` as CSV.
    """
    held = embedded(
        {
            f"{number}-{claim}": outcome.exhibits
            for number, outcomes in enumerate(report.outcomes)
            for claim, outcome in outcomes.items()
        },
        folder,
    )
    sections = [
        Section(question, [_judged(report, claim, held.exhibits) for claim in question.claims])
        for question in report.questions
    ]
    data = {
        "themes": plotting.themes(),
        "figures": held.figures,
        "tables": held.tables,
        "results": report.document,
    }
    return (
        _environment()
        .get_template("report.html")
        .render(
            title=names_of(report.subjects),
            subjects=report.subjects,
            sizes=report.sizes,
            told=report.told,
            sections=sections,
            audit=_judged(report, report.audit, held.exhibits),
            sentences=_sentences(report.subjects),
            preamble=_preamble(report),
            provenance=report.document["provenance"],
            signs=_SIGNS,
            data=script_json(data),
            plotly=plotting.script(),
        )
    )


def _environment() -> Any:
    import jinja2

    def source(name: str) -> str:
        return resources.files("wvprobe").joinpath("templates", name).read_text("utf-8")

    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(source),
    )
    environment.filters["number"] = number
    environment.filters["begun"] = lambda text: text[:1].upper() + text[1:]
    return environment


def _judged(report: Report, claim: Claim, exhibits: Mapping[str, Sequence[Embedded]]) -> Judged:
    findings = [outcomes[claim.id].finding for outcomes in report.outcomes]
    several = len(findings) > 1
    names = [subject.name if several else "" for subject in report.subjects]
    shown = [
        Shown(name, finding, exhibits[f"{at}-{claim.id}"])
        for at, (name, finding) in enumerate(zip(names, findings, strict=True))
    ]
    first = report.outcomes[0][claim.id]
    same = all(outcomes[claim.id] == first for outcomes in report.outcomes)
    return Judged(claim, findings, [shown[0]._replace(name="")] if same else shown)


def _sentences(subjects: Sequence[Subject]) -> list[dict[str, Any]]:
    """Return the sentences as models read them; models that read them alike share an entry."""
    found: list[dict[str, Any]] = []
    for subject in subjects:
        alike = next((one for one in found if one["sentences"] == subject.sentences), None)
        if alike is None:
            found.append({"names": [subject.name], "sentences": subject.sentences})
        else:
            alike["names"].append(subject.name)
    return found


def _preamble(report: Report) -> str:
    """Return the lines of Python that stand before those of every claim."""
    pair, file = report.given.pair, report.given.files.get("conllu")
    treebank = report.given.treebank
    if file is None and treebank is not None:
        file = treebank.name
    others = [subject.name for subject in report.subjects[1:]]
    also = f"  # or {' or '.join(map(quoted, others))}" if others else ""
    return "\n".join(
        [
            "import wvprobe",
            "",
            f"model = wvprobe.load({quoted(report.subjects[0].name)}){also}",
            f"text_a = {quoted(pair.text_a)}",
            f"text_b = {quoted(pair.text_b)}",
            f"conllu = {'None' if file is None else quoted(file)}",
        ]
    )


def number(value: float | int | None) -> str:
    """Write a number as people do: whole ones in full, small and large ones by their power."""
    if value is None or value != value:
        return "none"
    if abs(value) == float("inf"):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"
