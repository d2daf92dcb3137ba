"""Are h parallel heads the same as h sequential ones?"""

from collections.abc import Sequence

from wvprobe import adapters
from wvprobe.activations import capture
from wvprobe.counterfactual import Difference
from wvprobe.report.claims import Claim, Exhibit, Finding
from wvprobe.report.measured import TEXT_A, TEXT_B, Measured

_HEADS = 3  # heads of one layer that must each be best on another relation
_BETTER = 0.05
_WINS = 0.05  # share of answers by which each side must lead on its own task
_SEEDS = 5


def judge_identity(errors: Sequence[float], n: int, tolerance: float = 1e-4) -> Finding:
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


def judge_relations(
    clear: Sequence[int], nominal: Sequence[int], relations: int, n: int
) -> Finding:
    """Judge whether heads of one layer catch different relations at once (claim 3.4).

    Args:
        clear: in each layer, how many heads are each best on another relation, the interval of
            what they gain over the best fixed offset beyond the margin.
        nominal: likewise, by the gain itself.
        relations: how many relations were tried.
        n: how many sentences stand behind it.
    """
    most, at_best = max(clear), max(nominal)
    verdict = "mixed" if at_best >= _HEADS > most else "refuted"
    if most >= _HEADS:
        verdict = "supported"
    numbers = {
        "heads": float(most),
        "heads_nominal": float(at_best),
        "layer": float(list(clear).index(most)),
        "relations": float(relations),
    }
    reason = (
        f"Layer {list(clear).index(most)} has {most} heads that each tell another of {relations} "
        f"relations better than the best fixed offset by more than {_BETTER}, held out; no layer "
        f"has more. Without regard to the intervals it would be {at_best}."
    )
    return Finding(verdict, numbers, n=n, reason=reason)


def relations(measured: Measured) -> Finding:
    """Count the heads of one layer that are each best on another dependency relation."""
    found = measured.dependencies
    layers = found.specialists(_BETTER)
    n_relations = len(dict.fromkeys(found.relations))
    clear, nominal = layers["certain"].tolist(), layers["heads"].tolist()
    return judge_relations(clear, nominal, n_relations, found.sentences)


def relation_exhibits(measured: Measured) -> list[Exhibit]:
    """Show every layer's best head for each relation."""
    found = measured.dependencies
    text = (
        f"Of {found.sentences} sentences half are for choosing (the offset, and each relation's "
        "head and direction), the other half for what is shown. A head finds a word where the key "
        "of most attention is one of its tokens; sinks and the query's own word are no candidates."
    )
    return [Exhibit(found, text)]


def concatenation(measured: Measured) -> Finding:
    """Hold Σ_h z_h W_O^h + b_O against what the model itself computes from Concat(z)."""
    model = measured.model
    arch = adapters.architecture(model)
    seen = capture(model, [TEXT_A, TEXT_B], ["z", "attn_out"])
    mask, errors = seen.mask, []
    for layer in range(arch.n_layers):
        w_o = adapters.output_weight(model, arch, layer).cpu().double()
        heads = seen["z"][:, :, layer].double()[mask]
        found = sum(heads[:, head] @ w_o[head] for head in range(arch.n_heads))
        bias = adapters.output_bias(model, layer)
        found = found if bias is None else found + bias.cpu().double()
        expected = seen["attn_out"][:, :, layer].double()[mask]
        errors += ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).tolist()
    return judge_identity(errors, len(errors))


def judge_biases(breadth: Difference, depth: Difference, n: int, quick: bool) -> Finding:
    """Judge whether width and depth are different inductive biases (claim 3.2).

    Args:
        breadth: share of answers, parallel minus sequential heads, where look-ups stand side by
            side.
        depth: sequential minus parallel heads, where look-ups stand in a row.
        n: how many models of each kind.
        quick: whether training was cut short.
    """
    sides = {"breadth_parallel_minus_sequential": breadth, "depth_sequential_minus_parallel": depth}
    numbers = {name: side.value for name, side in sides.items()}
    numbers |= {f"{name}_low": side.low for name, side in sides.items()}
    numbers |= {f"{name}_high": side.high for name, side in sides.items()}
    wins = [side.low > _WINS for side in (breadth, depth)]
    fails = [side.high <= _WINS for side in (breadth, depth)]
    verdict = "supported" if all(wins) else "refuted" if all(fails) else "mixed"
    told = [
        f"{name} by {side.value:+.2f} ({side.low:+.2f} to {side.high:+.2f})"
        for name, side in (("parallel heads lead on breadth", breadth), ("sequential", depth))
    ]
    reason = f"Over {n} seeds {told[0]}, {told[1]} on depth."
    short = quick or n < _SEEDS
    if short:
        reason = f"Too few steps or seeds for anything to follow from them. {reason}"
    return Finding(
        "underpowered" if short else verdict,
        {name: value for name, value in numbers.items() if value == value},
        None if n < 2 else min((breadth, depth), key=lambda side: side.low)[1:],
        n,
        reason,
    )


def inductive_biases(measured: Measured) -> Finding:
    """Hold heads side by side against heads in a row, each on the task that suits them."""
    found = measured.biases
    breadth = found.difference("parallel", "sequential")["breadth"]
    depth = found.difference("sequential", "parallel")["depth"]
    return judge_biases(breadth, depth, found.n_seeds, found.quick)


def bias_exhibits(measured: Measured) -> list[Exhibit]:
    """Show how accuracy grows in training, task by task."""
    found = measured.biases
    final = found.final_frame()
    count = final["n_parameters"]
    least, most = (final["multiply_adds"] / final["multiply_adds"].max()).agg(["min", "max"])
    text = (
        f"Attention-only models of {count.min():,} to {count.max():,} parameters by task, equal in "
        f"number for all architectures of one; multiplications differ by {most / least - 1:.0%} at "
        "most. Each question takes as many look-ups as there are heads: side by side, in a "
        "row, or half and half. Bands are 95 % intervals of the mean over seeds (Student's t). "
        f"In the last fifth of the steps no mean moved by more than "
        f"{final['still_rising'].abs().max():.2f}. The loaded model has no part in it."
    )
    return [Exhibit(found, text)]


CLAIMS = (
    Claim(
        "3.1",
        "h parallel heads are not h sequential heads",
        "KL (or relative change) of the rewrite beyond that of rounding to bf16",
    ),
    Claim(
        "3.2",
        "Width and depth are different inductive biases",
        "attention-only models trained from scratch at equal parameters, at least 5 seeds: each "
        "side wins its own task by > .05 of the answers, intervals beyond it; refuted if neither "
        "does; a quick run is underpowered",
        inductive_biases,
        "Other tasks, sizes or longer training: on breadth heads in a row may come to the same end "
        "later, or fail to.",
        """\
found = wvprobe.compare_biases(quick=quick)
breadth = found.difference("parallel", "sequential")["breadth"]
depth = found.difference("sequential", "parallel")["depth"]
numbers = {
    "breadth_parallel_minus_sequential": breadth.value,
    "depth_sequential_minus_parallel": depth.value,
}""",
        bias_exhibits,
        measured_on="small models trained from scratch, no pretrained one",
    ),
    Claim(
        "3.3",
        "Concat(heads) W_O = Σ head W_O^h",
        "relative error < 1e-4 of every vector",
        concatenation,
        "Nothing but a fault: it is an identity of block matrices, checked on the model's own "
        "numbers.",
        """\
heads = wvprobe.HeadWeights.from_model(model)
seen = wvprobe.capture(model, [text_a, text_b], ["z", "attn_out"])
errors = []
for layer in range(heads.n_layers):
    z, out = (seen[site][:, :, layer].double()[seen.mask] for site in ("z", "attn_out"))
    found = sum(z[:, head] @ heads.W_O[layer, head].double() for head in range(heads.n_heads))
    errors += ((found + heads.b_O[layer] - out).norm(dim=-1) / out.norm(dim=-1)).tolist()
numbers = {"largest_error": max(errors)}""",
    ),
    Claim(
        "3.4",
        "Parallel heads catch syntax, meaning and coreference at the same moment",
        "at least 3 heads of one layer each best on another dependency relation by > .05 over the "
        "best fixed offset, held out, intervals above it",
        relations,
        "Another treebank or more sentences can turn it; relations of syntax say nothing of "
        "meaning and coreference, so that it can only be refuted for those.",
        """\
from wvprobe.behaviour import dependency_heads

found = dependency_heads(model, wvprobe.load_conllu(conllu), limit=1000)
layers = found.specialists(0.05)
numbers = {"heads": layers["certain"].max(), "heads_nominal": layers["heads"].max()}""",
        relation_exhibits,
    ),
)
