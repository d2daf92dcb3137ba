"""What decides the number of heads?"""

from collections.abc import Mapping, Sequence

from wvprobe.budget import known_architectures
from wvprobe.report.claims import Claim, Exhibit, Finding
from wvprobe.report.measured import Measured

# What claim 4.2 says d_k is.
_CLAIMED = {"BERT-base": 64, "GPT-3": 128, "Llama-2-70B": 128, "DeepSeek-V3": 56}


def judge_divisibility(fills: Sequence[bool], divides: Sequence[bool]) -> Finding:
    """Judge whether the number of heads must divide d_model (claim 4.1).

    Args:
        fills: by model, whether n_heads · d_head is d_model.
        divides: by model, whether n_heads divides d_model at all.
    """
    numbers = {
        "models": float(len(fills)),
        "heads_do_not_fill_d_model": float(len(fills) - sum(fills)),
        "heads_do_not_divide_d_model": float(len(divides) - sum(divides)),
    }
    reason = (
        f"Of {len(fills)} published models {len(fills) - sum(fills)} have n_heads · d_head ≠ "
        f"d_model, and in {len(divides) - sum(divides)} n_heads does not even divide d_model."
    )
    return Finding("supported" if all(fills) else "refuted", numbers, n=len(fills), reason=reason)


def must_divide(_measured: Measured) -> Finding:
    """Count the published models whose heads do not split d_model evenly."""
    frame = known_architectures().to_frame()
    return judge_divisibility(frame["fills_d_model"].tolist(), frame["divides_d_model"].tolist())


def judge_published(claimed: Mapping[str, int], published: Mapping[str, int]) -> Finding:
    """Judge what is said of models' head widths by what was published (claim 4.2)."""
    wrong = [name for name in claimed if claimed[name] != published[name]]
    told = "; ".join(f"{name} has {published[name]}, not {claimed[name]}" for name in wrong)
    reason = f"{told}." if wrong else "All are as published."
    numbers = {name: float(width) for name, width in published.items()}
    return Finding("refuted" if wrong else "supported", numbers, n=len(claimed), reason=reason)


def head_widths(_measured: Measured) -> Finding:
    """Hold the claimed widths of queries and keys against the published ones."""
    known = known_architectures()
    found = judge_published(_CLAIMED, {name: known[name].d_head for name in _CLAIMED})
    width = known["DeepSeek-V3"]
    also = (
        f" DeepSeek-V3's queries and keys have {width.d_head} dimensions (128 and 64 rotated), its "
        f"values {width.d_head_v}; {width.d_model}/{width.n_heads} = 56 is no width of its heads."
    )
    return Finding(found.verdict, found.numbers, n=found.n, reason=found.reason + also)


def architecture_exhibits(_measured: Measured) -> list[Exhibit]:
    """Show the published models against the even split."""
    text = "Published sizes; hover for heads and source. DeepSeek-V3 with its queries' width."
    return [Exhibit(known_architectures(), text)]


CLAIMS = (
    Claim(
        "4.1",
        "h must divide d_model",
        "refuted if any known architecture has n_heads · d_head ≠ d_model",
        must_divide,
        "Nothing can any more: one working model is enough to refute it.",
        """\
from wvprobe.budget import known_architectures

frame = known_architectures().to_frame()
numbers = {
    "models": len(frame),
    "heads_do_not_fill_d_model": (~frame["fills_d_model"]).sum(),
    "heads_do_not_divide_d_model": (~frame["divides_d_model"]).sum(),
}""",
        architecture_exhibits,
    ),
    Claim(
        "4.2",
        "BERT-base, GPT-3, Llama-2-70B and DeepSeek-V3 have d_k 64, 128, 128 and 56",
        "all equal to the published configurations",
        head_widths,
        "A correction of the published configurations.",
        """\
from wvprobe.budget import known_architectures

known = known_architectures()
names = ("BERT-base", "GPT-3", "Llama-2-70B", "DeepSeek-V3")
numbers = {name: known[name].d_head for name in names}""",
    ),
    Claim("4.3", "Practice settles on d_k of 64 or 128", "at least .8 of known architectures"),
    Claim(
        "4.4",
        "Hardware shapes the choice",
        "attention timed at equal FLOPs over d_head spreads by > 10 % beyond noise",
    ),
    Claim(
        "4.5",
        "h follows d_model at constant d_k",
        "the log-log slope of h on d_model includes 1",
    ),
)
