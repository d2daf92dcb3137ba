"""One self-contained page and results.json: what the loaded model says about each claim."""

import dataclasses
import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from wvprobe import adapters, plotting
from wvprobe._types import Result
from wvprobe.auditing import AuditResult, audit
from wvprobe.contextual_drift import PairDriftResult
from wvprobe.errors import DiskSpaceError, UnsupportedError
from wvprobe.report.catalogue import CLAIMS, OTHER, QUESTIONS, TEXT_A, TEXT_B, WORD, Measured
from wvprobe.word_pairs import PairScores, pair_scores
from wvprobe.words import encode


class Written(NamedTuple):
    """Where a report lies, and whether the model's audit holds."""

    page: Path
    results: Path
    audit: AuditResult


class _Section(NamedTuple):
    title: str
    text: str
    figure: str
    table: str


def write_report(
    model: Any, out: str | Path, *, progress: Callable[[str], None] = lambda _step: None
) -> Written:
    """Measure `model` and write ``index.html`` and ``results.json`` into the folder `out`.

    Args:
        model: a TransformerBridge.
        out: the folder; made where it is missing, files of an earlier report replaced.
        progress: called with the name of each step as it begins.

    Raises:
        DiskSpaceError: the folder cannot be written to.
    """
    folder = _folder(out)
    progress("audit: weights against the model")
    audited = audit(model)
    progress(f"the two '{WORD}' sentences, beside the bundled ones")
    measured = Measured(model)
    drift = _drift_section(measured.bank)
    sections = [drift, *_score_sections(model), _audit_section(audited)]
    progress("claims")
    judged = [(claim, claim.judge(measured)) for claim in CLAIMS]
    name = model.cfg.model_name
    provenance = dataclasses.asdict(adapters.provenance(model, texts=[TEXT_A, TEXT_B]))
    document = {
        "claims": [claim.record(finding, name) for claim, finding in judged],
        "provenance": provenance,
    }
    page = _page(
        model=_facts(model),
        questions=QUESTIONS,
        claims=document["claims"],
        sentences=[_tokens(model, text) for text in (TEXT_A, TEXT_B)],
        sections=_with_script(sections),
        provenance=provenance,
        audit_ok=audited.ok,
    )
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


def _drift_section(found: PairDriftResult) -> _Section:
    positions = " and ".join(str(at[-1]) for at in found.positions)
    text = (
        f"Cosine of the vectors of “{WORD}” in the two sentences, by stream (tokens {positions}). "
        f"The band holds {found.n_same} pairs in which the word has the same sense: they differ by "
        "context, and unlike the two sentences in position and length. The dotted line is what two "
        "random words have in common. One pair of sentences is an example, not a law. "
        f"What drives the two apart at stream {found.layer}: "
        "each component's share of the difference, along it; all shares sum to 1."
    )
    table = found.contributions().head(8).copy()
    table["share"] = [f"{share:+.1%}" for share in table["share"]]
    for column in ("layer", "head"):
        table[column] = ["" if value != value else str(int(value)) for value in table[column]]
    html = table.to_html(index=False, border=0, justify="left")
    return _Section(f"How the two vectors of “{WORD}” part ways", text, _html(found), html)


def _score_sections(model: Any) -> list[_Section]:
    try:
        found = pair_scores(model, [TEXT_A, TEXT_B], WORD, OTHER)
    except UnsupportedError as refused:
        return [_Section(f"Scores between “{WORD}” and “{OTHER}”", str(refused), "", "")]
    return [_section(f"Scores between “{WORD}” and “{OTHER}”", _score_text(found), found)]


def _score_text(found: PairScores) -> str:
    text = (
        "Raw scores c · q·k before masking and softmax, of every layer and head, query→key. They "
        "can be compared within a query's row only: softmax ignores what is constant over keys. "
    )
    if bool(found.masked.any()):
        text += (
            "Pale panels are masked: in a decoder a query does not see keys after it. The raw "
            "score of such a pair exists and is shown; its attention is 0."
        )
    return text


def _audit_section(audited: AuditResult) -> _Section:
    frame = audited.to_frame().copy()
    frame["error"] = [f"{error:.1e}" if error == error else "" for error in frame["error"]]
    frame["tolerance"] = [f"{tolerance:.0e}" for tolerance in frame["tolerance"]]
    table = frame.to_html(index=False, border=0, classes="audit", justify="left")
    text = (
        "Each row recomputes from the extracted weights something the model computed itself. "
        "Errors are relative to the vector's norm (scores: to c‖q‖‖k‖; patterns: absolute)."
    )
    return _Section("Do the extracted weights reproduce the model?", text, _html(audited), table)


def _section(title: str, text: str, result: Result) -> _Section:
    return _Section(title, text, _html(result), "")


def _html(result: Result) -> str:
    return result.figure().to_html(
        full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True}
    )


def _with_script(sections: list[_Section]) -> dict[str, Any]:
    """Return the sections and plotly itself, once, so that the page opens without a network."""
    return {"script": plotting.script(), "each": sections}


def _tokens(model: Any, text: str) -> dict[str, Any]:
    encoding = encode(model, text)
    tokens = [
        {
            "string": string,
            "id": number,
            "special": special,
            "word": string.strip() in (WORD, OTHER),
        }
        for string, number, special in zip(
            encoding.strings, encoding.ids, encoding.special, strict=True
        )
    ]
    return {"text": text, "tokens": tokens}


def _facts(model: Any) -> dict[str, Any]:
    arch = adapters.architecture(model)
    return {
        "name": model.cfg.model_name,
        "no_head": adapters.why_no_head(model),
        "parameters": f"{adapters.n_parameters(model) / 1e6:,.1f} M",
        "arch": arch,
    }


def _page(**values: Any) -> str:
    import jinja2

    source = resources.files("wvprobe").joinpath("templates/report.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(source).render(**values)
