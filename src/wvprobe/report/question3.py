"""Are h parallel heads the same as h sequential ones?"""

from collections.abc import Mapping, Sequence

from wvprobe import adapters
from wvprobe.activations import capture
from wvprobe.counterfactual import Difference
from wvprobe.report.claims import Claim, Exhibit, Finding
from wvprobe.report.measured import Measured

_HEADS = 3  # heads of one layer that must each be best on another relation
_BETTER = 0.05
_WINS = 0.05  # share of answers by which each side must lead on its own task
_SEEDS = 5


def judge_sequence(
    together: Mapping[str, tuple[float, float, float]],
    alone: Mapping[str, tuple[float, float, float]],
    rounding: float,
    n: int,
) -> Finding:
    """Judge whether heads run one after another are another model (claim 3.1).

    Args:
        together: by order of the heads, what rewriting all blocks changes, with its interval.
        alone: by block, what rewriting that block alone changes, likewise.
        rounding: what rounding to bf16 changes, the margin.
        n: how many texts.
    """
    beyond = [low > rounding for _, low, _ in together.values()]
    within = [high <= rounding for _, _, high in together.values()]
    verdict = "supported" if all(beyond) else ("refuted" if all(within) else "mixed")
    least = min(value for value, _, _ in together.values())
    moved = [name for name, (_, low, _) in alone.items() if low > rounding]
    numbers = {
        "rounding": rounding,
        "least_of_orders": least,
        "orders_beyond": float(sum(beyond)),
        "blocks_beyond": float(len(moved)),
        "blocks_tried": float(len(alone)),
    }
    each = "; ".join(
        f"{name}: {value:.3g} ({low:.3g} to {high:.3g})"
        for name, (value, low, high) in {**together, **alone}.items()
    )
    reason = f"Against {rounding:.2g} for rounding to bf16, {each}."
    ends = [(low, high) for _, low, high in together.values()]
    interval = (min(low for low, _ in ends), max(high for _, high in ends))
    return Finding(verdict, numbers, interval, n, reason)


def in_sequence(measured: Measured) -> Finding:
    """Hold what heads in sequence change against what rounding to bf16 does."""
    found, alone = measured.sequence, measured.single_blocks
    if found.permutations.shape[-1] == 1:
        return Finding("not testable here", reason="its blocks have one head each.")
    rows = [
        {
            name: (float(mean), float(low), float(high))
            for name, mean, low, high in zip(
                result.settings[:-1], *result.interval(result.measure), strict=False
            )
        }
        for result in (found, alone)
    ]
    rounding = float(found.interval(found.measure)[0][-1])
    return judge_sequence(rows[0], rows[1], rounding, len(found.n_tokens))


def sequence_exhibits(measured: Measured) -> list[Exhibit]:
    """Show all blocks in several orders, and three blocks alone."""
    found, alone = measured.sequence, measured.single_blocks
    if found.permutations.shape[-1] == 1:
        return []
    told = (
        f"{len(found.n_tokens)} texts of {int(found.n_tokens.sum())} tokens of the bundled "
        "held-out prose; bars are 95 % intervals over texts. Each head reads the stream that those "
        "before it rewrote, through the block's own norm and attention."
    )
    text = "The first block, the middle one and the last, each rewritten alone."
    return [Exhibit(found, told), Exhibit(alone, text)]


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
    seen = capture(model, measured.pair.texts, ["z", "attn_out"])
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
    # Tasks differ in their length, too: architectures are compared within one.
    work = final.groupby("task")["multiply_adds"]
    apart = (work.max() / work.min()).max() - 1
    text = (
        f"Attention-only models of {count.min():,} to {count.max():,} parameters by task, equal in "
        f"number for all architectures of one; multiplications differ by {apart:.0%} at "
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
        "KL of the next token (without a head: relative change of the last stream) of all blocks "
        "rewritten, in three orders of the heads: every interval beyond what rounding to bf16 "
        "does; refuted if every interval is within it",
        in_sequence,
        "A model whose heads write nothing that others of their block read would refute it; single "
        "late blocks of a model can lie within the rounding where all of them together do not.",
        """\
texts = $prose
found = wvprobe.sequential_heads(model, texts, layers="all", orders=3)
mean, low, high = found.interval(found.measure)
layers = model.cfg.n_layers
blocks = [[layer] for layer in sorted({0, layers // 2, layers - 1})]
alone = wvprobe.sequential_heads(model, texts, layers=blocks)
numbers = {
    "rounding": mean[-1],
    "least_of_orders": mean[:-1].min(),
    "orders_beyond": (low[:-1] > mean[-1]).sum(),
    "blocks_beyond": (alone.interval(alone.measure)[1][:-1] > mean[-1]).sum(),
    "blocks_tried": len(blocks),
}""",
        sequence_exhibits,
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
found = wvprobe.compare_biases(quick=$brief)
breadth = found.difference("parallel", "sequential")["breadth"]
depth = found.difference("sequential", "parallel")["depth"]
numbers = {
    "breadth_parallel_minus_sequential": breadth.value,
    "depth_sequential_minus_parallel": depth.value,
}""",
        bias_exhibits,
        any_model=True,
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

found = dependency_heads(model, wvprobe.load_conllu(conllu), limit=$treebank)
layers = found.specialists(0.05)
numbers = {"heads": layers["certain"].max(), "heads_nominal": layers["heads"].max()}""",
        relation_exhibits,
    ),
)
