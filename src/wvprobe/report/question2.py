"""Is the query-key dot product fixed by the token pair?"""

from collections.abc import Mapping, Sequence

from wvprobe._cell_effects import SHARES
from wvprobe._types import HeadId
from wvprobe.pair_variance import CONTEXT_MARGIN
from wvprobe.report.claims import Claim, Exhibit, Finding
from wvprobe.report.measured import Measured

_EXACT = 1e-5  # what a share or a change must exceed to count, relative
_STEEPED = 0.01
_MOST = 0.5


def judge_position(content: Sequence[float], position: Sequence[float], n: int) -> Finding:
    """Judge whether position alone makes a pair's layer-0 score differ (claim 2.1).

    Args:
        content: by head, the tokens' shares of the difference, relative to the scale.
        position: by head, the positions' share, likewise.
        n: how many heads.
    """
    numbers = {
        "largest_content_share": max(content),
        "largest_position_share": max(position),
        "heads_moved_by_position": float(sum(share > _EXACT for share in position)),
    }
    still = max(content) <= _EXACT
    if max(position) <= _EXACT:
        verdict, why = "refuted", "position moves no head's score."
    elif still:
        verdict = "supported"
        moved = int(numbers["heads_moved_by_position"])
        why = f"position alone moves the score of {moved} of {n} heads, the tokens none."
    else:
        verdict, why = "mixed", "position moves scores, and so do the tokens."
    reason = f"By {min(position):.1e} to {max(position):.1e} of c‖q‖‖k‖ over the heads, {why}"
    return Finding(verdict, numbers, (min(position), max(position)), n, reason)


def position_alone(measured: Measured) -> Finding:
    """Hold the tokens' shares of the layer-0 score's difference against the positions'."""
    found = measured.shares
    if not found.same_tokens:
        return Finding(
            "not testable here",
            reason=f"a word of {found.pair()} is another token in the second text.",
        )
    shares = (found.shares.abs() / found.scale)[:, 0]
    return judge_position(shares[:2].amax(dim=0).tolist(), shares[2].tolist(), shares.shape[1])


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
        "sentences; those it is held against differ in length, too."
    )
    return Finding(verdict, numbers, n=n, reason=reason)


def different_vectors(measured: Measured) -> Finding:
    """Hold the two 'bank' vectors' cosine distance against same-sense pairs."""
    found = measured.bank
    limits = (1 - found.same_cosine[0]).tolist()
    return judge_drift((1 - found.cosine).tolist(), limits, found.n_same)


def judge_growth(wins: Mapping[str, tuple[float, float, float]], n: int) -> Finding:
    """Judge whether the difference of two contexts grows exponentially with depth (claim 2.3).

    Args:
        wins: by metric, the share of words for which the exponential law is best, with its
            interval.
        n: how many words.
    """
    beyond = [low > _MOST for _, low, _ in wins.values()]
    below = [high < _MOST for _, _, high in wins.values()]
    verdict = "supported" if all(beyond) else ("refuted" if any(below) else "mixed")
    each = "; ".join(
        f"{name}: {share:.0%} ({low:.0%} to {high:.0%})"
        for name, (share, low, high) in wins.items()
    )
    reason = f"Words whose curve an exponential fits best, by AICc of four laws: {each}."
    lows, highs = ([found[end] for found in wins.values()] for end in (1, 2))
    numbers = {name: share for name, (share, _, _) in wins.items()}
    return Finding(verdict, numbers, (min(lows), max(highs)), n, reason)


def exponential(measured: Measured) -> Finding:
    """Hold the exponential law's share of words against a half, in cosine and in scores."""
    found = measured.growth
    if found.untestable:
        return Finding("not testable here", reason=found.untestable)
    law = found.laws.index("exponential")
    parts = (found.shares, found.low, found.high)
    wins = {
        name: (float(parts[0][m, law]), float(parts[1][m, law]), float(parts[2][m, law]))
        for m, name in enumerate(found.metrics)
    }
    return judge_growth(wins, int(found.n.min()))


def growth_exhibits(measured: Measured) -> list[Exhibit]:
    """Show which laws win."""
    if measured.growth.untestable:
        return []
    text = "Layers of a word are no independent observations: words alone are resampled."
    return [Exhibit(measured.growth, text)]


def judge_context(heads_above: tuple[float, float, float], median: float, n: int) -> Finding:
    """Judge whether a score is more than its token pair (claim 2.4).

    Args:
        heads_above: share of the heads above layer 0 in which context explains more than the
            margin, and the 95 % interval of that share.
        median: the median over these heads of what context explains.
        n: how many heads.
    """
    share, low, high = heads_above
    if low > _MOST:
        verdict = "supported"
    else:
        verdict = "refuted" if high < _MOST else "mixed"
    reason = (
        f"Context explains more than {CONTEXT_MARGIN:.0%} of the variance in {share:.0%} of {n} "
        f"heads above layer 0 ({low:.0%} to {high:.0%}); its median share is {median:.0%}."
    )
    return Finding(verdict, {"heads_above": share, "median": median}, (low, high), n, reason)


def context_share(measured: Measured) -> Finding:
    """Hold the share of heads in which context matters against a half."""
    found = measured.variance
    context = found.corrected[SHARES.index("context"), 1:].double().flatten()
    context = context[~context.isnan()]
    return judge_context(found.heads_above, float(context.quantile(0.5)), len(context))


def variance_exhibits(measured: Measured) -> list[Exhibit]:
    """Show the shares of every head."""
    found = measured.variance
    text = (
        f"Over {found.counts['texts']} sentences and {found.counts['pairs predicted']} pairs of "
        "tokens that come again at their offset in another sentence. Scores are compared within "
        "a query's row, which is all that softmax sees. What pairs and offsets explain was learnt "
        "from other sentences, the noise of the means taken out; predictions exchanged between "
        f"pairs at random explain {float(found.shuffled.nanmean()):+.1%} (mean over heads)."
    )
    ledger = measured.ledger
    parts = (
        "One score as an exact sum over what query and key are made of, at the head where the "
        f"pair's score differs most between the two sentences ({HeadId(ledger.layer, ledger.head)}"
        f", second sentence; reconstruction error {ledger.reconstruction_error:.0e} of c‖q‖‖k‖)."
    )
    return [Exhibit(found, text), Exhibit(ledger, parts)]


def judge_changes(
    query: tuple[float, float], key: tuple[float, float], query_at: tuple[int, int]
) -> Finding:
    """Judge whether a query and a key both differ at layer 0 (claim 2.5).

    Args:
        query: relative change of the query, before and after rotation.
        key: of the key, likewise.
        query_at: the query's positions in the two texts.
    """
    numbers = {
        "query_unrotated": query[0],
        "query": query[1],
        "key_unrotated": key[0],
        "key": key[1],
    }
    moves = {"the query": query[1] > _EXACT, "the key": key[1] > _EXACT}
    still = [name for name, moved in moves.items() if not moved]
    where = f"The query stands at {query_at[0]} in one text and at {query_at[1]} in the other. "
    if not still:
        return Finding("supported", numbers, reason=f"{where}Both change, the key by {key[1]:.1e}.")
    changed = "" if len(still) == 2 else f" (the other changes by {max(query[1], key[1]):.1e})"
    reason = f"{where}{' and '.join(still).capitalize()} does not change{changed}."
    return Finding("refuted", numbers, reason=reason)


def both_differ(measured: Measured) -> Finding:
    """Hold the changes of Q of 'bank' and K of 'river' against the margin."""
    found = measured.shares
    at = (found.positions[0][0], found.positions[1][0])
    query, key = ((float(of[0, 0]), float(of[0, 1])) for of in (found.queries, found.keys))
    return judge_changes(query, key, at)


def judge_influence(mean: float, interval: tuple[float, float], control: float, n: int) -> Finding:
    """Judge whether what comes later is in a word's vector (claim 2.6).

    Args:
        mean: relative change of the vector when what comes later is exchanged.
        interval: 95 % interval of the mean.
        control: the same for what comes before.
        n: how many exchanges.
    """
    low, high = interval
    if low > _STEEPED:
        verdict = "supported"
    else:
        verdict = "refuted" if high <= _STEEPED else "mixed"
    reason = (
        f"Other words after it change its last vector by {mean:.2%} ({low:.2%} to {high:.2%}); "
        f"other words before it by {control:.2%}."
    )
    return Finding(verdict, {"later": mean, "earlier": control}, interval, n, reason)


def steeped(measured: Measured) -> Finding:
    """Hold the influence of later words at the last stream against the margin."""
    found = measured.influence
    interval = (float(found.low[1, -1]), float(found.high[1, -1]))
    earlier, later = found.values[:, -1].tolist()
    return judge_influence(later, interval, earlier, found.n)


def position_exhibits(measured: Measured) -> list[Exhibit]:
    """Show the shares, and the scores, of all layers."""
    scores = measured.scores
    text = (
        "Scores of every layer and head, query→key, before masking and softmax, minus the mean of "
        "the query's row over the keys that it sees and that are no sinks: what is constant over a "
        "row softmax ignores. Beside them the attention that comes of it. "
    )
    if bool(scores.masked.any()):
        text += (
            "Pale panels are masked: in a decoder a query does not see keys after it. The raw "
            "score of such a pair exists and is shown; its attention is 0."
        )
    shares = measured.shares
    where = " and ".join(f"{q}→{k}" for q, k in shares.positions)
    exact = (
        f"Shapley shares of the difference of the two raw scores, by layer (tokens {where}). At "
        "layer 0 query and key are functions of token and position alone; above, they also hold "
        "what earlier layers made of the rest of each text. "
        f"They reproduce the model's own scores to {shares.reconstruction_error:.0e} of c‖q‖‖k‖."
    )
    return [Exhibit(shares, exact), Exhibit(scores, text)]


def drift_exhibits(measured: Measured) -> list[Exhibit]:
    """Show the two vectors parting, what drives them, and the word's senses at large."""
    found, word = measured.bank, measured.pair.word
    positions = " and ".join(str(at[-1]) for at in found.positions)
    lengths = " and ".join(map(str, found.lengths))
    place = "" if found.same_shift is None else " and stands at the same place"
    curve = (
        f"Cosine of the vectors of “{word}” in the two sentences, by stream (tokens {positions}, "
        f"in texts of {lengths} tokens). The band holds {found.n_same} pairs in which the word has "
        f"the same sense{place}: what context does on its own. The dotted line is what two "
        "random words have in common; taking it off corrects for anisotropy, and moves the curve "
        "and the band alike."
    )
    drivers = (
        "Each component's share of the difference, along it; all shares sum to 1 "
        f"(reconstruction error {found.contributions.reconstruction_error:.0e})."
    )
    shown = [Exhibit(found, curve), Exhibit(found.contributions, drivers)]
    senses = measured.senses
    if senses is None:
        return shown
    plane = (
        f"All {len(senses.senses)} sentences of the set with “{word}”, one point each; hover to "
        "read them. Accuracy is of the whole space, each sentence left out of its sense's centroid."
    )
    return [*shown, Exhibit(senses, plane)]


def influence_exhibits(measured: Measured) -> list[Exhibit]:
    """Show the influence of both sides by stream."""
    found = measured.influence
    text = (
        "Resampling ablation: the words on one side are exchanged for running prose of as many "
        f"tokens, so that positions and length stay; for instance “{found.examples[1]}”. Bars are "
        "95 % intervals of the mean."
    )
    return [Exhibit(found, text)]


CLAIMS = (
    Claim(
        "2.1",
        "At layer 0 position alone makes the same pair's score differ",
        "content share 0 to 1e-5 of the scale c‖q‖‖k‖ in every head, position share beyond it in "
        "some",
        position_alone,
        "Sentences in which the two words stand equally far apart (or, with learned positions, at "
        "the same places) would refute it, as would a model without positions.",
        """\
found = wvprobe.context_dependence(model, text_a, text_b, query=$word, key=$other)
share = (found.shares.abs() / found.scale)[:, 0]
numbers = {
    "largest_content_share": share[:2].max().item(),
    "largest_position_share": share[2].max().item(),
    "heads_moved_by_position": (share[2] > 1e-5).sum().item(),
}""",
        position_exhibits,
    ),
    Claim(
        "2.2",
        "After a few layers the two '$word' vectors are different vectors",
        "cosine distance beyond the 95th percentile of same-sense pairs from some layer on; "
        "refuted if beyond it at none",
        different_vectors,
        "Another pair of sentences can turn it either way; beyond the band to the last stream it "
        "would be supported.",
        """\
frame = wvprobe.drift_pair(model, text_a, text_b, word=$word).to_frame()
distance, limit = 1 - frame["cosine"], 1 - frame["same_low"]
numbers = {
    "streams_beyond": (distance > limit).sum(),
    "streams": len(frame),
    "distance_at_the_last": distance.iloc[-1],
    "limit_at_the_last": limit.iloc[-1],
}""",
        drift_exhibits,
    ),
    Claim(
        "2.3",
        "The difference grows exponentially with depth",
        "the exponential law wins for more than half the words, interval, in cosine and in "
        "absolute score difference",
        exponential,
        "The metric decides much: raw Euclidean distance grows with the vectors' length. Relative "
        "errors in place of absolute ones weigh early layers as much as late ones.",
        """\
from dataclasses import replace

from wvprobe.contextual_drift import growth_law, score_drift

senses = $senses
senses = replace(senses, items=senses.items[::$every])
cosine = wvprobe.drift(model, senses).curves()["cosine"]
score = score_drift(model, senses).difference
laws = growth_law({"cosine": cosine, "score": score}, words=senses.words)
wins = laws.shares[:, laws.laws.index("exponential")]
numbers = dict(zip(("cosine", "score"), wins.tolist()))""",
        growth_exhibits,
    ),
    Claim(
        "2.4",
        "A score is not fixed by its token pair",
        "context explains > .10 of the gauge-fixed variance in most heads above layer 0, interval",
        context_share,
        "A corpus whose pairs recur in like contexts only would turn it; so would a model whose "
        "upper layers read tokens and offsets alone.",
        """\
texts = $texts
found = wvprobe.score_variance(model, texts)
share, low, high = found.heads_above
frame = found.to_frame()
numbers = {
    "heads_above": share,
    "median": frame.loc[frame["layer"] > 0, "context_corrected"].median(),
}""",
        variance_exhibits,
    ),
    Claim(
        "2.5",
        "Q of '$word' and K of '$other' both differ at layer 0, since their positions do",
        "both differences > 1e-5 relative, rotation included; refuted if either is not",
        both_differ,
        "Other sentences: where '$word' has the same index in both, its query is the same; where "
        "it has another, a rotation or a learned position makes it differ.",
        """\
found = wvprobe.context_dependence(model, text_a, text_b, query=$word, key=$other)
numbers = {
    "query_unrotated": found.queries[0, 0],
    "query": found.queries[0, 1],
    "key_unrotated": found.keys[0, 0],
    "key": found.keys[0, 1],
}""",
    ),
    Claim(
        "2.6",
        "In the first sentence '$word' is steeped in '$later'",
        "influence of later tokens on '$word' > .01 of the vector at the last stream, interval",
        steeped,
        "A model without a causal mask sees what comes later; no text can turn it in a decoder.",
        """\
from wvprobe.influence import context_influence

found = context_influence(model, text_a, word=$word)
earlier, later = found.values[:, -1].tolist()
numbers = {"later": later, "earlier": earlier}""",
        influence_exhibits,
    ),
)
