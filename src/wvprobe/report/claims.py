"""What people claim about attention, the rule each claim is held to, and how it came out.

A claim without a measure is listed as not yet measured. Verdict functions are pure: numbers in,
verdict out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Verdict = Literal["supported", "refuted", "mixed", "not testable here", "not yet measured"]


@dataclass(frozen=True)
class Finding:
    """How a claim came out.

    Attributes:
        verdict: one of the five.
        numbers: name -> number, what the verdict was derived from.
        interval: the interval that the rule looks at, or None where arithmetic decides.
        n: how many observations stand behind it, or None.
        reason: one sentence for the reader.
    """

    verdict: Verdict
    numbers: Mapping[str, float] = field(default_factory=dict)
    interval: tuple[float, float] | None = None
    n: int | None = None
    reason: str = ""


NOT_YET = Finding("not yet measured", reason="No measure of this version tests it.")


@dataclass(frozen=True)
class Claim:
    """A claim, its rule with the margin fixed beforehand, and the measure that tests it."""

    id: str
    claim: str
    rule: str
    measure: Callable[[Any], Finding] | None = None

    def judge(self, context: Any) -> Finding:
        """Measure the claim, or say that nothing does."""
        return NOT_YET if self.measure is None else self.measure(context)

    def record(self, finding: Finding, model: str) -> dict[str, Any]:
        """Return the claim's entry in results.json."""
        return {
            "id": self.id,
            "claim": self.claim,
            "verdict": finding.verdict,
            "rule": self.rule,
            "numbers": dict(finding.numbers),
            "interval": None if finding.interval is None else list(finding.interval),
            "n": finding.n,
            "model": model,
            "reason": finding.reason,
        }


def judge_identity(errors: Any, n: int, tolerance: float = 1e-4) -> Finding:
    """Judge an identity by the errors of all the vectors it was checked on (claim 3.3)."""
    largest, smallest = float(max(errors)), float(min(errors))
    holds = largest < tolerance
    return Finding(
        "supported" if holds else "refuted",
        {"largest_error": largest, "tolerance": tolerance},
        (smallest, largest),
        n,
        f"The largest relative error of {n} vectors is {largest:.1e}.",
    )


def judge_full_width(claimed: float = 4.34e12, margin: float = 0.02) -> Finding:
    """Judge the cost of full-width heads for GPT-3 by arithmetic (claim 5.1).

    GPT-3 (Brown et al. 2020, table 2.1): 96 layers, 96 heads, d_model 12,288.
    """
    layers, heads, d_model = 96, 96, 12_288
    a_layer = 3 * heads * d_model**2
    total, with_output = layers * a_layer, layers * 4 * heads * d_model**2
    numbers = {
        "per_layer": float(a_layer),
        "total": float(total),
        "total_with_W_O": float(with_output),
        "claimed": claimed,
        "relative_difference": total / claimed - 1,
    }
    near = abs(total / claimed - 1) <= margin
    return Finding(
        "supported" if near else "refuted",
        numbers,
        reason=f"3 · 96 · 12288² is {a_layer / 1e9:.2f} B a layer, {total / 1e12:.2f} T in all "
        f"({with_output / 1e12:.2f} T with W_O), {total / claimed - 1:+.1%} from the claim.",
    )


def judge_equal_cost(d_model: int, own: int, own_unshared: int) -> Finding:
    """Judge whether split heads cost what one full-width head costs (claim 5.4).

    Args:
        d_model: width of the stream.
        own: attention weights of one layer of the model, biases left out.
        own_unshared: the same, had every query head a key and a value head of its own.
    """
    full = 4 * d_model**2
    numbers = {
        "full_width_head": float(full),
        "model": float(own),
        "model_with_unshared_heads": float(own_unshared),
    }
    if own == full:
        verdict, why = "supported", "The model's heads cost exactly what one full-width head costs."
    elif own_unshared == full:
        verdict = "mixed"
        why = (
            f"The arithmetic holds, and the model's heads would cost the same; sharing keys and "
            f"values makes them {1 - own / full:.0%} cheaper."
        )
    else:
        verdict = "refuted"
        why = f"The model's heads times d_head are not d_model: {own_unshared / full:.2f} of it."
    return Finding(verdict, numbers, reason=f"4 · d_model² = {full:,} weights a layer. {why}")


def judge_drift(distances: Sequence[float], limits: Sequence[float], n: int) -> Finding:
    """Judge whether two vectors of a word are different ones after a few layers (claim 2.2).

    Args:
        distances: by stream, the two vectors' cosine distance.
        limits: by stream, the 95th percentile of same-sense pairs.
        n: how many same-sense pairs.
    """
    beyond = [distance > limit for distance, limit in zip(distances, limits, strict=True)]
    start = next((k for k in range(len(beyond)) if all(beyond[k:])), None)
    numbers = {
        "streams_beyond": float(sum(beyond)),
        "streams": float(len(beyond)),
        "distance_at_the_last": distances[-1],
        "limit_at_the_last": limits[-1],
    }
    if start is not None:
        verdict, why = "supported", f"from stream {start} on they are further apart."
        numbers["from_stream"] = float(start)
    elif any(beyond):
        verdict = "mixed"
        why = f"they are further apart at {sum(beyond)} of {len(beyond)} streams, not to the end."
    else:
        verdict, why = "refuted", "at no stream are they further apart."
    reason = (
        f"Held against the 95th percentile of {n} same-sense pairs, {why} It is one pair of "
        "sentences; the pairs it is held against also differ in position and length."
    )
    return Finding(verdict, numbers, n=n, reason=reason)
