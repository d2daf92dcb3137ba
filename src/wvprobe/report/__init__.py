"""One self-contained page and results.json: what models say about each claim."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from wvprobe._types import Provenance
from wvprobe.datasets import LabelledDataset, SenseDataset
from wvprobe.errors import DiskSpaceError
from wvprobe.report.catalogue import AUDIT, QUESTIONS
from wvprobe.report.given import BANK, FULL, QUICK, Given, Pair, Sizes, lines_of
from wvprobe.report.page import Report, render
from wvprobe.report.running import Outcome, Runner, Step
from wvprobe.report.storing import Store, source_digest, write_whole
from wvprobe.report.subjects import Subject, opened
from wvprobe.report.telling import told

__all__ = ["BANK", "FULL", "QUICK", "Pair", "Sizes", "Step", "Written", "write_report"]

ERRORS = "errors.log"


class Written(NamedTuple):
    """Where a report lies, and what must be known before it is believed.

    Attributes:
        page: the page.
        results: all numbers, as JSON.
        audited: whether every model's audit holds.
        failed: steps that broke off, as ``model: claim``; their tracebacks are in ``errors.log``.
        told: model by model, one sentence that counts the verdicts.

    Examples:
        >>> from pathlib import Path
        >>> from wvprobe.report import Written
        >>> Written(Path("index.html"), Path("results.json"), audited=True, failed=(), told=()).ok
        True
    """

    page: Path
    results: Path
    audited: bool
    failed: tuple[str, ...]
    told: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed and every audit holds."""
        return self.audited and not self.failed


def write_report(
    models: Any,
    out: str | Path,
    *,
    texts: Sequence[str] | None = None,
    senses: SenseDataset | None = None,
    treebank: LabelledDataset | None = None,
    pair: Pair = BANK,
    sizes: Sizes = QUICK,
    files: Mapping[str, str] | None = None,
    resume: bool = False,
    progress: Callable[[Step], None] = lambda _step: None,
) -> Written:
    """Measure models and write ``index.html`` and ``results.json`` into the folder `out`.

    What is measured is kept in ``out/.wvprobe-run`` claim by claim, so that `resume` goes on with
    a run that was interrupted, and tries again what failed. A step that fails is told on the page,
    its traceback written to ``out/errors.log``; the others go on.

    Args:
        models: a TransformerBridge or what :func:`wvprobe.load` takes, or a list of these: they
            stand side by side on one page.
        out: the folder; made where it is missing, files of an earlier report replaced.
        texts: texts to judge on, in place of the bundled sentences, where a claim takes texts.
        senses: words in context, in place of the bundled ones, where a claim takes senses.
        treebank: of ``load_conllu``; without it claims about dependencies are not testable.
        pair: two texts and two words of both, for the claims about such a pair.
        sizes: how much of everything is taken: ``QUICK`` or ``FULL``.
        files: ``texts``, ``senses``, ``conllu``: what these were read from, for the lines of
            Python on the page.
        resume: whether to go on with what an earlier run has finished.
        progress: called with each step as it begins.

    Raises:
        DiskSpaceError: the folder cannot be written to.
        InputError: the same model twice; or `resume` finds a run of other models, texts or sizes.
        WordError: a text does not hold a word of the pair as the model's tokens show it.
        WvprobeError: a model cannot be opened.

    Examples:
        >>> from wvprobe.report import QUICK, write_report
        >>> QUICK.name  # write_report("smollm2-135m", "report") writes report/index.html
        'quick'
    """
    own = None if texts is None else tuple(texts)
    given = Given(own, senses, treebank, pair, dict(files or {}))
    folder = _folder(out)
    subjects = opened(models, given, sizes.name)
    store = Store(folder)
    store.begin(_manifest(subjects, given, sizes), resume=resume)
    questions, audit = _about(given, sizes)
    claims = [claim for question in questions for claim in question.claims]
    runner = Runner([audit, *claims], given, sizes, store, folder / ERRORS)
    outcomes = runner.run(subjects, progress)
    progress(Step("writing the page", 1.0, 0.0))
    document = {
        "claims": [
            claim.record(found[claim.id].finding, subject.name)
            for subject, found in zip(subjects, outcomes, strict=True)
            for claim in claims
        ],
        "provenance": _provenance(subjects),
    }
    words = [told(s, claims, found) for s, found in zip(subjects, outcomes, strict=True)]
    report = Report(subjects, questions, audit, outcomes, words, document, given, sizes.name)
    shutil.rmtree(folder / "tables", ignore_errors=True)
    write_whole(folder / "index.html", render(report, folder))
    text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(folder / "results.json", text + "\n")
    return Written(
        folder / "index.html",
        folder / "results.json",
        all(found[audit.id].finding.verdict == "supported" for found in outcomes),
        _failed(subjects, outcomes),
        tuple(f"{one.name}: {one.counts}" for one in words),
    )


def _about(given: Given, sizes: Sizes) -> tuple[list[Any], Any]:
    """Return the questions, and the audit's claim, as they read for what is given."""
    words, lines = given.pair.told, lines_of(given, sizes)
    questions = [
        question._replace(claims=tuple(claim.about(words, lines) for claim in question.claims))
        for question in QUESTIONS
    ]
    return questions, AUDIT.about(words, lines)


def _manifest(subjects: Sequence[Subject], given: Given, sizes: Sizes) -> dict[str, Any]:
    """Return all that shapes the numbers of a report."""
    return {
        "models": {subject.name: subject.provenance["weight_hash"] for subject in subjects},
        "sizes": {name: getattr(sizes, name) for name in Sizes.__dataclass_fields__},
        "given": given.told(),
        "versions": dict(Provenance.of("", "").versions),
        "source": source_digest(),
    }


def _provenance(subjects: Sequence[Subject]) -> dict[str, Any]:
    """Return the model's provenance; of several models each under its name."""
    if len(subjects) == 1:
        return subjects[0].provenance
    return {"models": {subject.name: subject.provenance for subject in subjects}}


def _failed(
    subjects: Sequence[Subject], outcomes: Sequence[Mapping[str, Outcome]]
) -> tuple[str, ...]:
    return tuple(
        f"{subject.name}: {name}"
        for subject, found in zip(subjects, outcomes, strict=True)
        for name, outcome in found.items()
        if outcome.finding.verdict == "failed"
    )


def _folder(out: str | Path) -> Path:
    """Make the folder before the measuring, whose minutes would be lost to a wrong name."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskSpaceError(f"cannot make the folder {folder}: {error}. Name another.") from error
    return folder
