"""How much of the variance of attention scores the token pair fixes, and how much context does.

    result = score_variance(model, texts)
    result.to_frame().query("kind == 'lexical'")

Every pair of a query token and a key token that comes again at its offset in another text is an
observation. Means over pairs, and over pairs at an offset, learnt from some of the texts predict
the scores in the others; what they cannot predict is left to context.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._cell_effects import (
    MODELS,
    SHARES,
    Design,
    constant_columns,
    held_out_sums,
    shares_of,
    shuffled_share,
)
from wvprobe._pair_cells import Pairs, recurring, visible_pairs
from wvprobe._progress import progress as progress_bar
from wvprobe._sinks import sink_keys
from wvprobe._statistics import resampled_totals
from wvprobe._types import HeadId, Result
from wvprobe._validate import length, listed, message
from wvprobe._validate import seed as checked_seed
from wvprobe._validate import texts as checked_texts
from wvprobe.activations import read_sites
from wvprobe.adapters import Architecture
from wvprobe.datasets import load_prose
from wvprobe.errors import InputError
from wvprobe.words import Encoding, encode

# What a head is called after the largest of its shares, if it is so beyond the intervals.
KINDS = {"pair": "lexical", "offset_alone": "positional", "context": "contextual"}
CONTEXT_MARGIN = 0.10  # a head whose context share exceeds it counts in `heads_above`

_FEWEST = 30  # predicted pairs
_MOST_VISIBLE = 20_000_000  # pairs that are looked through for those that recur
_CHUNK_FLOATS = 40_000_000  # floats of scores and streams held at once: 160 MB
_LONG_WORK = 8  # chunks from which on progress is shown


@dataclass(frozen=True)
class VarianceResult(Result):
    """Shares of the variance of attention scores, a head an entry.

    Shares are in the order of ``SHARES``: `pair`, what the pair of tokens explains; `offset`, what
    the pair at its offset explains beyond that; `context`, what is left; `offset_alone`, what the
    offset explains by itself. The first three sum to 1.

    Attributes:
        held_out: [share, layer, head] by R² in texts that the means were not learnt from. It may
            be negative, and its context share above 1: a mean of few scores is itself noise.
        low: [share, layer, head] lower end of the 95 % bootstrap interval over texts.
        high: its upper end.
        corrected: [share, layer, head] the same without the noise of the means: unbiased, and what
            a share of variance should be read from.
        corrected_low: lower end of its interval.
        corrected_high: its upper end.
        shuffled: [layer, head] control: the corrected share that predictions exchanged at random
            between pairs explain. 0 by chance.
        heads_above: share of the heads above layer 0 whose corrected context share exceeds .10,
            and the interval of that over resamples of the texts; NaN for a single layer.
        counts: ``texts given`` and, without equal ones, ``texts read``; ``pairs visible``, ``pairs
            recurring`` in another text, those of them that are ``pairs without sinks``, and ``pairs
            predicted``; ``cells`` and ``texts`` that the last stand in.
        gauge: whether scores were compared within the rows of a query only.

    Examples:
        >>> ends = ("closed", "open")
        >>> texts = [f"The {a} bank is {b}." for a in ("old", "new", "river") for b in ends]
        >>> found = wvprobe.score_variance(model, texts, folds=2, progress=False)
        >>> len(found.to_frame()), found.gauge
        (18, True)
    """

    held_out: Float[Tensor, "share layer head"]
    low: Float[Tensor, "share layer head"]
    high: Float[Tensor, "share layer head"]
    corrected: Float[Tensor, "share layer head"]
    corrected_low: Float[Tensor, "share layer head"]
    corrected_high: Float[Tensor, "share layer head"]
    shuffled: Float[Tensor, "layer head"]
    heads_above: tuple[float, float, float]
    counts: Mapping[str, int]
    gauge: bool

    AXES: ClassVar = {
        **{
            name: ("share", "layer", "head")
            for name in ("held_out", "low", "high", "corrected", "corrected_low", "corrected_high")
        },
        "shuffled": ("layer", "head"),
    }

    @property
    def kind(self) -> tuple[tuple[str, ...], ...]:
        """[layer, head]: lexical, positional, contextual, mixed, or constant.

        A head is named after the largest of its corrected shares `pair`, `offset_alone` and
        `context`, where its interval lies above those of the others; pair and context are held
        against `offset` too. Other heads are mixed. A head whose scores are all alike has no
        shares and is constant.
        """
        names = [*KINDS.values(), "mixed", "constant"]
        low, high = (
            dict(zip(SHARES, end, strict=True)) for end in (self.corrected_low, self.corrected_high)
        )
        found = torch.full(self.shuffled.shape, names.index("mixed"))
        for number, share in enumerate(KINDS):
            others = [*KINDS] if share == "offset_alone" else [*KINDS, "offset"]
            above = [low[share] > high[other] for other in others if other != share]
            found[torch.stack(above).all(dim=0)] = number
        found[self.shuffled.isnan()] = names.index("constant")
        return tuple(tuple(names[number] for number in row) for row in found.tolist())

    def to_frame(self) -> Any:
        """Return one row a head.

        Columns: layer head pair offset context low high (held out; the interval is that of
        `context`), offset_alone, pair_low pair_high and so on, the same with ``_corrected``,
        shuffled kind n n_cells n_texts.
        """
        import pandas

        n_layers, n_heads = self.shuffled.shape
        columns: dict[str, Any] = {
            "layer": [layer for layer in range(n_layers) for _ in range(n_heads)],
            "head": list(range(n_heads)) * n_layers,
        }
        context = SHARES.index("context")
        columns |= _by_share(self.held_out[: context + 1], "{}")  # in the promised order
        columns["low"] = self.low[context].flatten().tolist()
        columns["high"] = self.high[context].flatten().tolist()
        columns |= _by_share(self.held_out, "{}")
        columns |= _by_share(self.low, "{}_low") | _by_share(self.high, "{}_high")
        columns |= _by_share(self.corrected, "{}_corrected")
        columns |= _by_share(self.corrected_low, "{}_corrected_low")
        columns |= _by_share(self.corrected_high, "{}_corrected_high")
        columns["shuffled"] = self.shuffled.flatten().tolist()
        columns["kind"] = [name for row in self.kind for name in row]
        counts = {"n": "pairs predicted", "n_cells": "cells", "n_texts": "texts"}
        columns |= {name: self.counts[count] for name, count in counts.items()}
        return pandas.DataFrame(columns)


def _by_share(values: Tensor, pattern: str) -> dict[str, list[float]]:
    """Return a column for each share that `values` holds."""
    each = zip(SHARES, values.flatten(1).tolist(), strict=False)
    return {pattern.format(share): column for share, column in each}


def score_variance(
    model: Any,
    texts: str | Sequence[str] | None = None,
    *,
    query: str | Sequence[str] | None = None,
    key: str | Sequence[str] | None = None,
    gauge: bool = True,
    folds: int = 5,
    seed: int = 0,
    max_pairs: int = 200_000,
    progress: bool = True,
) -> VarianceResult:
    """Measure how much of each head's scores the token pair fixes, with and without its offset.

    Observations are raw scores (before a soft cap; ALiBi's slope counted from the query) of two
    different tokens of a text, of which one sees the other in every layer and neither is special,
    or a sink at some layer. A pair counts where it recurs: where another text has the same query
    token and key token at the same offset i − j. Of equal texts one is read.

    Texts are shared out over `folds`; means of the others predict a fold's scores. With `gauge` the
    model is score = row + cell (two-way fixed effects, by least squares), since softmax ignores
    what is constant over a query's keys, and only differences within a row are predicted: y and ŷ
    are relative to their row's mean. Held out, R² = 1 − Σ (y − ŷ)² / Σ y². The mean of m scores has
    an error of its own, σ²/m, which R² counts against the cells and so to context. Learnt from
    other texts, that error is independent of y, so that Σ y ŷ / Σ y² is free of it: the share of
    variance itself, `corrected`.

    With rotary positions, ALiBi or none, a layer-0 score is a function of both tokens and the
    offset, so that `context` is 0 there. Learned positions enter the norm and are no function of
    the offset, which leaves a rest.

    Intervals: percentile bootstrap over texts (Efron & Tibshirani 1993, chapter 13) of the ratio
    of sums, the learnt means held fixed.

    Memory: max_pairs · n_layers · n_heads · 4 bytes of scores (SmolLM2: 216 MB), at most twice that
    for effects, and one chunk of texts.

    Args:
        model: a TransformerBridge.
        texts: sentences or other short texts, the more the better; None for the sentences of the
            bundled prose.
        query: a word or words: only their queries count. Whole words as the text writes them; of
            several tokens the last counts.
        key: a word or words: only pairs with these keys are predicted. Their rows' other pairs
            still take part in the rows' means.
        gauge: whether to compare within rows only; False for raw scores, whose variance between
            rows no softmax sees.
        folds: in how many parts the texts are shared out.
        seed: of the folds, the bootstrap, the control, and of which texts are left out.
        max_pairs: texts are left out at random until no more pairs than this are left.
        progress: show progress on long work.

    Raises:
        InputError: fewer than 30 pairs can be predicted; the message counts what there is.
        UnsupportedError: scores cannot be recomputed for the architecture.
        MemoryLimitError: too many cells hang together to be solved for.

    Examples:
        >>> ends = ("closed", "open")
        >>> texts = [f"The {a} bank is {b}." for a in ("old", "new", "river") for b in ends]
        >>> found = wvprobe.score_variance(model, texts, folds=2, progress=False)
        >>> first = found.to_frame().query("layer == 0")
        >>> bool((first.context.abs() < 1e-3).all())
        True
    """
    seed = checked_seed(seed)
    if length("folds", folds) < 2:
        raise InputError(message("folds", "at least 2", folds))
    length("max_pairs", max_pairs)
    arch = adapters.architecture(model)
    words = {"query": _words("query", query), "key": _words("key", key)}
    given = _sentences() if texts is None else checked_texts(texts)
    encodings = _distinct(model, given, seed)
    in_row = 2 if gauge else 1  # what says something about differences within a row
    listed = _visible(model, arch, encodings, words)
    pairs = _limited(listed.only(recurring(listed, in_row)), in_row, max_pairs, seed)
    counts = {"texts given": len(given), "texts read": len(encodings)}
    counts |= {"pairs visible": len(listed), "pairs recurring": len(pairs)}
    _check_enough(pairs, counts, folds)
    scores, sinks = _read_scores(model, arch, encodings, pairs, progress)
    kept = ~sinks
    kept[~sinks] = recurring(pairs.only(~sinks), in_row)
    scores, pairs = scores[kept], pairs.only(kept)
    counts["pairs without sinks"] = len(pairs)
    _check_enough(pairs, counts, folds)
    design = _design(pairs)
    sums, predicted = held_out_sums(scores, design, folds=folds, gauge=gauge, seed=seed)
    shown = design.only(predicted)
    counts |= {
        "pairs predicted": len(shown.text),
        "cells": len(shown.levels["cell"].unique()),
        "texts": len(shown.text.unique()),
    }
    _check_enough(pairs.only(predicted), counts, folds)
    constant = constant_columns(scores, sums, counts["pairs predicted"])
    settings = {
        **{name: None if found is None else list(found) for name, found in words.items()},
        **{"gauge": gauge, "folds": folds, "max_pairs": max_pairs, "counts": counts},
        **{"texts": "bundled prose" if texts is None else "the caller's"},
    }
    return VarianceResult(
        provenance=adapters.provenance(model, seed=seed, **settings),
        **_estimates(sums[shown.text.unique()], constant, arch.n_layers, seed),
        counts=counts,
        gauge=gauge,
    )


def _words(name: str, given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    found = (given,) if isinstance(given, str) else tuple(listed(name, given, "a word, or several"))
    if not found or not all(isinstance(word, str) and word.strip() for word in found):
        raise InputError(message(name, "a word, or several", given))
    return found


def _sentences() -> list[str]:
    """Return the sentences of the bundled prose."""
    paragraphs = load_prose("calibration") + load_prose("held-out")
    return [found for text in paragraphs for found in re.split(r"(?<=[.!?])[\"”’]?\s+", text)]


def _distinct(model: Any, texts: Sequence[str], seed: int) -> list[Encoding]:
    """Encode texts, each once, in a random order, as many as pairs can be listed of.

    An equal text in another fold would give its own scores away.
    """
    encodings = [encode(model, text) for text in dict.fromkeys(texts)]
    found = list({encoding.ids: encoding for encoding in encodings}.values())
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
    listed = torch.tensor([len(found[text].ids) ** 2 for text in order]).cumsum(0)
    fitting = [found[text] for text in order[: int((listed <= _MOST_VISIBLE).sum())]]
    if not fitting:
        longest = f"a text of {len(found[order[0]].ids):,} tokens"
        raise InputError(message("texts", "short, such as sentences", longest))
    return fitting


def _visible(
    model: Any,
    arch: Architecture,
    encodings: list[Encoding],
    words: Mapping[str, tuple[str, ...] | None],
) -> Pairs:
    """List the pairs that are visible in every layer."""
    windows = [adapters.sliding_window(model, layer) for layer in range(arch.n_layers)]
    window = min((window for window in windows if window is not None), default=None)
    special = set(model.tokenizer.all_special_ids)
    return visible_pairs(encodings, special, causal=arch.causal, window=window, **words)


def _limited(pairs: Pairs, in_row: int, most: int, seed: int) -> Pairs:
    """Leave texts out, as few as it takes and at random, until at most so many pairs are left."""
    if len(pairs) <= most:
        return pairs
    sizes = torch.bincount(pairs.text)
    order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(seed))
    fitting = torch.zeros(len(sizes), dtype=torch.bool)
    fitting[order] = sizes[order].cumsum(0) <= most
    pairs = pairs.only(fitting[pairs.text])
    return pairs.only(recurring(pairs, in_row))


def _check_enough(pairs: Pairs, counts: Mapping[str, int], folds: int) -> None:
    n, n_texts = int(pairs.evaluated.sum()), len(pairs.text[pairs.evaluated].unique())
    if n < _FEWEST or n_texts < folds:
        steps = ", ".join(f"{count:,} {step}" for step, count in counts.items())
        raise InputError(
            f"`texts` must hold at least {_FEWEST} pairs to predict, in {folds} texts or more. Got "
            f"{n} in {n_texts} instead ({steps}). Give more texts, or commoner words."
        )


def _design(pairs: Pairs) -> Design:
    def numbered(values: Tensor) -> Tensor:
        return torch.unique(values, return_inverse=True)[1]

    levels = {model: numbered(getattr(pairs, model)) for model in MODELS}
    return Design(numbered(pairs.text), numbered(pairs.row), levels, pairs.evaluated)


def _read_scores(
    model: Any, arch: Architecture, encodings: list[Encoding], pairs: Pairs, progress: bool
) -> tuple[Tensor, Tensor]:
    """Return scores of pairs, float32 [n, layer · head], and which have a sink at some layer."""
    scores = torch.empty(len(pairs), arch.n_layers * arch.n_heads)
    sinks = torch.zeros(len(pairs), dtype=torch.bool)
    slopes = adapters.alibi_slopes(model, arch)
    ends = torch.bincount(pairs.text, minlength=len(encodings)).cumsum(0).tolist()
    places = {text: slice(start, end) for text, (start, end) in enumerate(pairwise([0, *ends]))}
    sizes = [(len(encodings[t].ids), t) for t, at in places.items() if at.start < at.stop]
    chunks = _chunks(sizes, arch)
    with progress_bar(len(encodings), "texts read", progress and len(chunks) >= _LONG_WORK) as done:
        for chunk in chunks:
            seen = read_sites(model, [encodings[t].text for t in chunk], ["scores", "resid_pre"])
            for item, text in enumerate(chunk):
                at = places[text]
                query, key = pairs.query[at], pairs.key[at]
                found = seen["scores"][item][:, :, query, key].float()
                if slopes is not None:
                    found -= slopes.cpu()[:, None] * query
                scores[at] = found.flatten(0, 1).T
                sink = sink_keys(model, seen, item).any(dim=0)
                sinks[at] = sink[query] | sink[key]
            done(len(chunk))
    bad = (~torch.isfinite(scores)).any(dim=0).nonzero()[:, 0].tolist()
    if bad:
        raise InputError(
            f"scores of {HeadId(*divmod(bad[0], arch.n_heads))} in {model.cfg.model_name} are NaN "
            "or infinite. Look at the checkpoint, or load the model in float32."
        )
    return scores, sinks


def _chunks(texts: list[tuple[int, int]], arch: Architecture) -> list[list[int]]:
    """Put (length, text) together by like lengths, as many as may be held at once."""
    chunks: list[list[int]] = []
    room = 0
    for size, text in sorted(texts, reverse=True):
        # The first of a chunk is its longest, to which the others are padded.
        if not chunks or (len(chunks[-1]) + 1) * room > _CHUNK_FLOATS:
            chunks.append([])
            room = arch.n_layers * size * (arch.n_heads * size + arch.d_model)
        chunks[-1].append(text)
    return chunks


def _estimates(sums: Tensor, constant: Tensor, n_layers: int, seed: int) -> dict[str, Any]:
    """Return shares, control and intervals as fields of the result, from sums by text."""
    draws = resampled_totals(sums, seed=seed)
    whole = sums.sum(dim=0)
    shares, drawn = shares_of(whole), shares_of(draws)
    ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
    found = {"shuffled": shuffled_share(whole)}
    for name, prefix, share, draw in zip(
        ("held_out", "corrected"), ("", "corrected_"), shares, drawn, strict=True
    ):
        low, high = torch.quantile(draw, ends, dim=0)
        found |= {name: share, f"{prefix}low": low, f"{prefix}high": high}
    found = {
        name: value.masked_fill(constant, torch.nan).unflatten(-1, (n_layers, -1))
        for name, value in found.items()
    }
    context = SHARES.index("context")
    inner = ~constant & (torch.arange(len(constant)) >= len(constant) // n_layers)
    above = [
        (share[..., context, :][..., inner] > CONTEXT_MARGIN).double().mean(dim=-1)
        for share in (shares[1], drawn[1])
    ]
    heads_above = tuple(map(float, (above[0], *torch.quantile(above[1], ends))))
    return {**found, "heads_above": heads_above}
