"""What decides the number of heads?"""

from collections.abc import Mapping, Sequence

from wvprobe.attention_clock import Spread
from wvprobe.budget import head_scaling, known_architectures
from wvprobe.report.claims import Claim, Exhibit, Finding
from wvprobe.report.measured import Measured

# What claim 4.2 says d_k is.
_CLAIMED = {"BERT-base": 64, "GPT-3": 128, "Llama-2-70B": 128, "DeepSeek-V3": 56}
_MOST = 0.8  # share of models that counts as practice having settled
_SLOWER = 1.1  # times as long
_TELLING = 0.5  # an interval of a slope wider than this says little


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
    found = judge_published(_CLAIMED, {name: known[name].width for name in _CLAIMED})
    width = known["DeepSeek-V3"]
    also = (
        f" DeepSeek-V3's queries and keys have {width.d_head} dimensions (128 and 64 rotated), its "
        f"values {width.d_head_v}; {width.d_model}/{width.n_heads} = 56 is no width of its heads."
    )
    return Finding(found.verdict, found.numbers, n=found.n, reason=found.reason + also)


def judge_common_width(share: float, interval: tuple[float, float], n: int) -> Finding:
    """Judge whether practice settles on two head widths (claim 4.3).

    Args:
        share: of published models, those with one of the two.
        interval: its 95 % interval, from resampling families of models.
        n: how many models.
    """
    low, high = interval
    if low >= _MOST:
        verdict = "supported"
    else:
        verdict = "refuted" if high < _MOST else "mixed"
    reason = (
        f"{share:.0%} of {n} published models have queries and keys of 64 or 128 dimensions "
        f"({low:.0%} to {high:.0%} with families of models resampled)."
    )
    return Finding(verdict, {"share": share, "margin": _MOST}, interval, n, reason)


def common_width(_measured: Measured) -> Finding:
    """Hold the share of models with heads of 64 or 128 dimensions against the margin."""
    found = head_scaling()
    share, low, high = found.common_share.tolist()
    return judge_common_width(share, (low, high), len(found.names))


def judge_hardware(kernel: str, found: Spread, usual: float, n: int) -> Finding:
    """Judge whether the head width matters to the machine (claim 4.4).

    Args:
        kernel: the kernel that was timed.
        found: how much slower its slowest head width is than its fastest.
        usual: the same ratio between 64 and 128 dimensions alone.
        n: rounds of timing.
    """
    numbers = {
        "ratio": found.ratio,
        "slowest_d_head": float(found.slowest),
        "fastest_d_head": float(found.fastest),
        "noise": found.noise,
        "ratio_within_64_and_128": usual,
    }
    if found.low > _SLOWER:
        verdict = "supported"
    else:
        verdict = "refuted" if found.high <= _SLOWER else "mixed"
    reason = (
        f"At equal multiplications the {kernel} kernel's forward takes {found.ratio:.2f} times as "
        f"long ({found.low:.2f} to {found.high:.2f}) with heads of {found.slowest} dimensions as "
        f"of {found.fastest} on this machine; {usual:.2f} times between 64 and 128."
    )
    return Finding(verdict, numbers, (found.low, found.high), n, reason)


def hardware(measured: Measured) -> Finding:
    """Time attention over head widths with the fastest kernel there is."""
    clock = measured.clock
    kernel = clock.fastest_kernel()
    usual = clock.spread(kernel, widths=(64, 128)).ratio
    return judge_hardware(kernel, clock.spread(kernel), usual, clock.seconds.shape[1])


def judge_scaling(
    heads: tuple[float, float, float], width: tuple[float, float, float], n: int
) -> Finding:
    """Judge whether the number of heads follows d_model (claim 4.5).

    Args:
        heads: log-log slope of n_heads on d_model, and the ends of its 95 % interval.
        width: the same for d_head.
        n: how many models.
    """
    slope, low, high = heads
    numbers = {"slope_of_n_heads": slope, "slope_of_d_head": width[0]}
    if not low <= 1 <= high:
        verdict = "refuted"
    else:
        verdict = "supported" if high - low <= _TELLING else "mixed"
    reason = (
        f"Over {n} published models n_heads grows as d_model to the {slope:.2f} ({low:.2f} to "
        f"{high:.2f}), d_head as d_model to the {width[0]:.2f} ({width[1]:.2f} to {width[2]:.2f}): "
        f"d_head is {'' if width[1] <= 0 <= width[2] else 'not '}constant."
    )
    return Finding(verdict, numbers, (low, high), n, reason)


def heads_follow(_measured: Measured) -> Finding:
    """Hold the slope of n_heads on d_model against 1."""
    found = head_scaling()
    return judge_scaling(found.slope("n_heads"), found.slope("d_head"), len(found.names))


def clock_exhibits(measured: Measured) -> list[Exhibit]:
    """Show the times of every kernel over head widths."""
    clock = measured.clock
    ran = {what.kernel: what.ran for what in clock.timed}
    flops, moved = next(iter(clock.peak.values()))
    text = (
        f"{clock.provenance.model}, {clock.provenance.settings['threads']} threads, "
        f"{clock.seconds.shape[1]} rounds in shuffled order. What ran: "
        f"{'; '.join(f'{kernel}: {name}' for kernel, name in ran.items())}. The floor takes "
        f"{flops / 1e9:.0f} GFLOP/s and {moved / 1e9:.0f} GB/s, a large matrix product's and "
        "copy's here. Narrow heads compute more exponentials, which the floor leaves out."
    )
    return [Exhibit(clock, text)]


def scaling_exhibits(_measured: Measured) -> list[Exhibit]:
    """Show heads against d_model over the published models."""
    text = (
        "Published models; sizes of one family are no independent choices, so that intervals come "
        "from resampling families. Colours: d_head of queries and keys."
    )
    return [Exhibit(head_scaling(), text)]


def architecture_exhibits(_measured: Measured) -> list[Exhibit]:
    """Show the published models against the even split."""
    text = (
        "Published sizes; hover for names, heads and source. d_head is that of queries and keys, "
        "rotated dimensions included (DeepSeek: 128 + 64). Larger points on the right stand for "
        "more models."
    )
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
        any_model=True,
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
        any_model=True,
    ),
    Claim(
        "4.3",
        "Practice settles on d_k of 64 or 128",
        "at least .8 of known architectures: supported if the interval of the share lies above .8, "
        "refuted if below it",
        common_width,
        "Other models in the table: it is no sample of all that were trained, and lists few sizes "
        "of each family.",
        """\
from wvprobe.budget import head_scaling

share, low, high = head_scaling(widths=(64, 128)).common_share.tolist()
numbers = {"share": share}""",
        any_model=True,
    ),
    Claim(
        "4.4",
        "Hardware shapes the choice",
        "attention timed at equal FLOPs over d_head: the slowest takes > 1.1 times as long as the "
        "fastest, interval, in rounds that did not pick the two",
        hardware,
        "A machine, or a kernel, whose time does not depend on d_head; the numbers are those of "
        "the machine that wrote this page.",
        """\
clock = wvprobe.time_attention(directions=("forward",), uneven=(), seconds=$clock)
kernel = clock.fastest_kernel()
found = clock.spread(kernel)
numbers = {
    "ratio": found.ratio,
    "slowest_d_head": found.slowest,
    "fastest_d_head": found.fastest,
    "noise": found.noise,
    "ratio_within_64_and_128": clock.spread(kernel, widths=(64, 128)).ratio,
}""",
        clock_exhibits,
        any_model=True,
    ),
    Claim(
        "4.5",
        "h follows d_model at constant d_k",
        "the interval of the log-log slope of h on d_model includes 1; mixed if it is wider than "
        ".5; refuted if it does not include 1",
        heads_follow,
        "Other models in the table: within families the slope is nearer to 1.",
        """\
from wvprobe.budget import head_scaling

found = head_scaling()
numbers = {
    "slope_of_n_heads": found.slope("n_heads")[0],
    "slope_of_d_head": found.slope("d_head")[0],
}""",
        scaling_exhibits,
        any_model=True,
    ),
)
