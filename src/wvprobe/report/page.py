"""The page: verdicts first, then a section a question, then the audit."""

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from wvprobe import adapters, plotting
from wvprobe._types import Result
from wvprobe.auditing import AuditResult
from wvprobe.report.catalogue import Question
from wvprobe.report.claims import Claim, Exhibit, Finding
from wvprobe.report.measured import OTHER, TEXT_A, TEXT_B, WORD
from wvprobe.words import encode


class Judged(NamedTuple):
    """A claim, how it came out, and what to draw beside it."""

    claim: Claim
    finding: Finding
    exhibits: Sequence[Exhibit]


class Section(NamedTuple):
    """A question and its claims, judged."""

    question: Question
    judged: Sequence[Judged]


def render(
    model: Any,
    sections: Sequence[Section],
    audited: AuditResult,
    provenance: Mapping[str, Any],
    quick: bool,
) -> str:
    """Return the page as HTML that opens without a network."""
    import jinja2

    source = resources.files("wvprobe").joinpath("templates/report.html").read_text("utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = _number
    environment.filters["drawn"] = _html
    return environment.from_string(source).render(
        model=_facts(model),
        sections=sections,
        sentences=[_tokens(model, text) for text in (TEXT_A, TEXT_B)],
        given={"text_a": TEXT_A, "text_b": TEXT_B, "quick": quick},
        audit={"figure": _html(audited), "table": _audit_table(audited), "ok": audited.ok},
        provenance=provenance,
        script=plotting.script(),
    )


def _number(value: float) -> str:
    """Write a number as people do: whole ones in full, small and large ones by their power."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def _html(result: Result) -> str:
    return result.figure().to_html(
        full_html=False, include_plotlyjs=False, config={"displaylogo": False, "responsive": True}
    )


def _audit_table(audited: AuditResult) -> str:
    frame = audited.to_frame().copy()
    frame["error"] = [f"{error:.1e}" if error == error else "" for error in frame["error"]]
    frame["tolerance"] = [f"{tolerance:.0e}" for tolerance in frame["tolerance"]]
    return frame.to_html(index=False, border=0, classes="audit", justify="left")


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
