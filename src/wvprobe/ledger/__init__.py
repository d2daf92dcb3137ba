"""One attention score as an exact double sum, and what happens when a term is taken out."""

from wvprobe.ledger._checks import CausalCheckResult, check_terms
from wvprobe.ledger._terms import LedgerResult, Part, score_ledger

__all__ = ["CausalCheckResult", "LedgerResult", "Part", "check_terms", "score_ledger"]
