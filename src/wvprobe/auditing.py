"""Does what was read out of a model reproduce what the model does?

Each identity recomputes, from extracted weights and independent formulas, something that hooks
saw. An architecture read wrongly (a rotary base, a swapped head, a missed bias or fold) shows up
here as a number above its tolerance, before it shows up in anyone's results.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from wvprobe import adapters
from wvprobe._identities import Audit, Identity, invariances
from wvprobe._types import Provenance, Result
from wvprobe.errors import AuditError

# Of different lengths, so that padding is at work.
_TEXTS = (
    "A power bank dropped into the river.",
    "The river bank is close to here, and the old boat by the bank is ours.",
    "She left it to the left of the light.",
)


@dataclass(frozen=True)
class AuditResult(Result):
    """The identities of :func:`audit`, in the order of the computation they follow.

    Examples:
        >>> audit = wvprobe.audit(model, "The river bank.")
        >>> list(audit.to_frame())
        ['identity', 'status', 'error', 'tolerance', 'reason']
    """

    identities: tuple[Identity, ...]

    COLUMNS: ClassVar[tuple[str, ...]] = ("identity", "status", "error", "tolerance", "reason")

    @property
    def ok(self) -> bool:
        """Whether no identity failed."""
        return all(row.status != "failed" for row in self.identities)

    def to_frame(self) -> Any:
        """Return one row an identity: identity status error tolerance reason."""
        import pandas

        rows = [[getattr(row, column) for column in self.COLUMNS] for row in self.identities]
        return pandas.DataFrame(rows, columns=list(self.COLUMNS))


def audit(model: Any, texts: str | Sequence[str] | None = None) -> AuditResult:
    """Recompute from extracted weights what hooks see, through all layers.

    Args:
        model: a TransformerBridge.
        texts: texts to run; None for three short ones.

    Returns:
        One row an identity; ``.ok`` is False where one failed. Nothing is raised for that.

    Raises:
        InputError: a text has nothing in it.

    Examples:
        >>> audit = wvprobe.audit(model, "The river bank is closed.")
        >>> audit.ok, sorted(set(audit.to_frame().status))
        (True, ['not applicable', 'ok'])
    """
    arch = adapters.architecture(model)
    given: list[str] = [texts] if isinstance(texts, str) else list(texts or _TEXTS)
    with adapters.broken_too():
        audited = Audit(model, arch, given, range(arch.n_layers))
        found = [*audited.identities(), *invariances(model, arch, given)]
    return AuditResult(adapters.provenance(model, texts=given), tuple(found))


def quick_audit(model: Any) -> AuditResult:
    """Audit one sentence through the first, a middle and the last layer.

    Raises:
        AuditError: an identity failed; the message names it.

    Examples:
        >>> from wvprobe.auditing import quick_audit
        >>> quick_audit(model).ok
        True
    """
    arch = adapters.architecture(model)
    layers = sorted({0, arch.n_layers // 2, arch.n_layers - 1})
    with adapters.broken_too():
        found = tuple(Audit(model, arch, [_TEXTS[0]], layers).identities())
    result = AuditResult(Provenance.of(model.cfg.model_name, ""), found)
    failed = [row for row in found if row.status == "failed"]
    if failed:
        told = "; ".join(
            f"{row.identity} (error {row.error:.1e} against {row.tolerance:.0e}, {row.reason})"
            for row in failed
        )
        raise AuditError(
            f"weights read from {model.cfg.model_name} do not reproduce it: {told}. Results would "
            "be wrong; load(..., audit=False) opens the model all the same, for a look."
        )
    return result
