"""One self-contained page and results.json: what the loaded model says about each claim."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from wvprobe import adapters
from wvprobe.auditing import AuditResult, audit
from wvprobe.datasets import LabelledDataset
from wvprobe.errors import DiskSpaceError
from wvprobe.report.catalogue import QUESTIONS
from wvprobe.report.measured import TEXT_A, TEXT_B, Measured
from wvprobe.report.page import Judged, Section, render


class Written(NamedTuple):
    """Where a report lies, and whether the model's audit holds."""

    page: Path
    results: Path
    audit: AuditResult


def write_report(
    model: Any,
    out: str | Path,
    *,
    treebank: LabelledDataset | None = None,
    quick: bool = False,
    progress: Callable[[str], None] = lambda _step: None,
) -> Written:
    """Measure `model` and write ``index.html`` and ``results.json`` into the folder `out`.

    Args:
        model: a TransformerBridge.
        out: the folder; made where it is missing, files of an earlier report replaced.
        treebank: of ``load_conllu``; without it claims about dependencies are not testable.
        quick: whether to cut short the training of small models, whose claim is then underpowered.
        progress: called with the name of each step as it begins.

    Raises:
        DiskSpaceError: the folder cannot be written to.
    """
    folder = _folder(out)
    progress("audit: weights against the model")
    audited = audit(model)
    measured, sections = Measured(model, treebank=treebank, quick=quick), []
    for question in QUESTIONS:
        progress(f"{question.number}. {question.title}")
        judged = [
            Judged(claim, claim.judge(measured), claim.shown(measured)) for claim in question.claims
        ]
        sections.append(Section(question, judged))
    provenance = dataclasses.asdict(
        adapters.provenance(
            model,
            texts=[TEXT_A, TEXT_B],
            treebank=None if treebank is None else f"{treebank.name}, {len(treebank)} sentences",
            quick=quick,
        )
    )
    name = model.cfg.model_name
    document = {
        "claims": [
            found.claim.record(found.finding, name)
            for section in sections
            for found in section.judged
        ],
        "provenance": provenance,
    }
    page = render(model, sections, audited, provenance, quick)
    try:
        (folder / "index.html").write_text(page, encoding="utf-8")
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False)
        (folder / "results.json").write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise DiskSpaceError(f"cannot write to {folder}: {error}. Name another folder.") from error
    return Written(folder / "index.html", folder / "results.json", audited)


def _folder(out: str | Path) -> Path:
    """Make the folder before the measuring, whose minutes would be lost to a wrong name."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DiskSpaceError(f"cannot make the folder {folder}: {error}. Name another.") from error
    return folder
