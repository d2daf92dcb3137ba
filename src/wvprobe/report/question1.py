"""What does W_V carry?"""

from collections.abc import Mapping
from typing import NamedTuple

from wvprobe.report.claims import Claim, Exhibit, Finding
from wvprobe.report.measured import Measured

_NEAR = 0.05  # overlap of W_V spaces this near to random ones counts as theirs
_RANGE = 0.05  # of the payload between layers


class Estimate(NamedTuple):
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


def judge_division(contrasts: Mapping[str, Estimate], content: Estimate, n: int) -> Finding:
    """Judge whether values carry content, and queries and keys do not (claim 1.1).

    Args:
        contrasts: for each label and other site, how much more of its excess over random
            projections v has than q, or than k.
        content: how much further exchanged values move heads' output than exchanged patterns.
        n: pairs of texts behind `content`.
    """
    reads = all(found.low > 0 for found in contrasts.values())
    reads_not = any(found.high <= 0 for found in contrasts.values())
    if reads and content.low > 0:
        verdict = "supported"
    else:
        verdict = "refuted" if reads_not and content.high <= 0 else "mixed"
    beyond = [name for name, found in contrasts.items() if found.low > 0]
    below = [name for name, found in contrasts.items() if found.high <= 0]
    reason = (
        f"Decodability speaks for it in {', '.join(beyond) or 'no contrast'} and against it in "
        f"{', '.join(below) or 'none'}. Exchanged values move a head's output by "
        f"{content.value:+.2f} of its length more than exchanged patterns do "
        f"({content.low:+.2f} to {content.high:+.2f})."
    )
    numbers = {name: found.value for name, found in contrasts.items()}
    numbers["values_minus_patterns"] = content.value
    return Finding(verdict, numbers, (content.low, content.high), n, reason)


def division(measured: Measured) -> Finding:
    """Hold v's decodability against q's and k's, and exchanged values against patterns."""
    contrasts = {}
    for label, found in measured.labours.items():
        frame = found.contrasts_frame().query("reference == 'random'")
        for row in frame.itertuples():
            contrasts[f"{label}: v − {row.against}"] = Estimate(row.value, row.low, row.high)
    summary = measured.dissociation.summary()
    row = summary.query("pairs == 'matched' and contrast == 'content'").iloc[0]
    content = Estimate(float(row["mean"]), float(row["low"]), float(row["high"]))
    return judge_division(contrasts, content, int(row["n_pairs"]))


def judge_anew(excess: float, profile: Estimate, n: int) -> Finding:
    """Judge whether each layer's W_V decides anew what flows on (claim 1.2).

    Args:
        excess: mean overlap of layers' W_V row spaces, less that of random spaces.
        profile: largest less smallest layer mean of what values carry.
        n: how many layers.
    """
    anew = abs(excess) <= _NEAR
    if anew and profile.low > _RANGE:
        verdict = "supported"
    else:
        verdict = "mixed" if anew and profile.high > _RANGE else "refuted"
    reason = (
        f"What layers' values read overlaps by {excess:+.3f} more than random spaces would; what "
        f"they carry differs by {profile.value:.2f} between layers ({profile.low:.2f} to "
        f"{profile.high:.2f})."
    )
    numbers = {"excess_overlap": excess, "range": profile.value}
    return Finding(verdict, numbers, (profile.low, profile.high), n, reason)


def anew(measured: Measured) -> Finding:
    """Hold the overlap of W_V spaces, and the profile of what they carry, against the margins."""
    overlap = measured.overlap
    if overlap.trivial:
        return Finding(
            "not testable here",
            reason="Every layer's W_V reads the whole stream, so that the spaces overlap wholly.",
        )
    profile = Estimate(*measured.labours["pos"].range.tolist())
    return judge_anew(overlap.excess, profile, len(overlap.overlap))


def division_exhibits(measured: Measured) -> list[Exhibit]:
    """Show what every head's values carry, the division of labour, and the exchange."""
    shown = []
    for label, found in measured.payloads.items():
        text = (
            f"Label: {label}. Each head's score stands beside what the same probe makes of random "
            "projections of the same input, of its principal components, of the word's embedding "
            "alone and of shuffled labels: a score says little without them."
        )
        shown += [
            Exhibit(found, text),
            Exhibit(measured.labours[label], "The same as a mean over heads."),
        ]
    control = measured.dissociation.summary().query("pairs == 'control' and contrast == 'content'")
    text = (
        "Between two sentences of equal length a head's pattern alone, or its values alone, are "
        "exchanged. The control exchanges with unrelated prose: values move the output by "
        f"{float(control['mean'].iloc[0]):+.2f} more than patterns there."
    )
    return [*shown, Exhibit(measured.dissociation, text)]


def anew_exhibits(measured: Measured) -> list[Exhibit]:
    """Show the overlap of all pairs of layers."""
    if measured.overlap.trivial:
        return []
    return [Exhibit(measured.overlap, "Spaces that two layers' values are read from.")]


CLAIMS = (
    Claim(
        "1.1",
        "W_Q and W_K carry routing, W_V carries content",
        "supported if v's decodability over random projections exceeds q's and k's for sense and "
        "part of speech, and exchanged values move heads' output more than exchanged patterns do, "
        "intervals above 0; refuted if neither",
        division,
        "Another label, another reference or other texts can turn it: q and k carry whatever they "
        "route by, and a pattern that changes brings other content along. Senses told apart by "
        "cosine favour values more, since cosines hang on a site's biases and scales.",
        """\
from dataclasses import replace

from wvprobe.datasets import labelled_senses
from wvprobe.dissociation import double_dissociation

senses, bundled = $senses, wvprobe.load_senses()
senses = replace(senses, items=senses.items[::$every])
words = labelled_senses(replace(bundled, items=bundled.items[::$every_bundled]))
words, label = (wvprobe.load_conllu(conllu), None) if conllu else (words, "pos")
draws = {"draws": $draws, "control_draws": $controls}
payloads = {
    "sense": wvprobe.payload(model, senses, method="lda", **draws),
    "pos": wvprobe.payload(model, words, label=label, **draws),
}
numbers = {}
for name, found in payloads.items():
    frame = found.labour.contrasts_frame().query("reference == 'random'")
    for row in frame.itertuples():
        numbers[f"{name}: v − {row.against}"] = row.value
summary = double_dissociation(model, n_pairs=$exchanged).summary()
chosen = summary.query("pairs == 'matched' and contrast == 'content'")
numbers["values_minus_patterns"] = chosen["mean"].iloc[0]""",
        division_exhibits,
    ),
    Claim(
        "1.2",
        "Each layer's W_V decides anew what flows on",
        "overlap of layers' W_V row spaces within .05 of random, and range of what values carry of "
        "parts of speech over layers > .05, interval",
        anew,
        "Layers that read one common space, or carry the same at every depth, would refute it; a "
        "label that every layer carries alike would as well.",
        """\
from dataclasses import replace

from wvprobe.datasets import labelled_senses

bundled = wvprobe.load_senses()
words = labelled_senses(replace(bundled, items=bundled.items[::$every_bundled]))
words, label = (wvprobe.load_conllu(conllu), None) if conllu else (words, "pos")
found = wvprobe.payload(model, words, label=label, draws=$draws, control_draws=$controls)
overlap = wvprobe.subspace_overlap(wvprobe.HeadWeights.from_model(model), "V")
numbers = {"excess_overlap": overlap.excess, "range": float(found.labour.range[0])}""",
        anew_exhibits,
    ),
)
