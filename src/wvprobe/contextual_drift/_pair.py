"""Contextual drift: how the vectors of one word part ways in two contexts, and what drives them.

Measures after Ethayarajh 2019 (How Contextual are Contextualized Word Representations?): in an
anisotropic space any two vectors are alike, so each similarity stands beside the one of random
words; and beside pairs of the word in one and the same sense, which differ by context too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._shapes import floating
from wvprobe._types import Result
from wvprobe._validate import index, instance, length, message
from wvprobe._validate import seed as checked_seed
from wvprobe.activations import capture, read_sites
from wvprobe.components import Component, stream_components
from wvprobe.contextual_drift._baseline import RandomTokenDraw
from wvprobe.contextual_drift._vectors import Reader
from wvprobe.datasets import SenseDataset, SenseItem, load_senses, senses_or_bundled
from wvprobe.errors import ShapeError
from wvprobe.words import WordSpan, encode, find_word, word_at

# Sentences a sense where the word is not in the bundled set and all its words stand in.
_STAND_INS = 4
# Same-sense pairs that percentiles are taken of.
_LEAST_PAIRS = 20


@dataclass(frozen=True)
class DriftBaseline(Result):
    """How alike random words are in a model: its anisotropy, stream by stream.

    Attributes:
        cosine: [layer] mean cosine of two random tokens of different sentences.
        distance: [layer] mean normalised distance of such, see :func:`normalised_distance`.
        n: how many tokens, one of each sentence.

    Examples:
        >>> from wvprobe.contextual_drift import drift_baseline
        >>> list(drift_baseline(model, sentences=20).to_frame())
        ['layer', 'cosine', 'distance']
    """

    cosine: Float[Tensor, " layer"]
    distance: Float[Tensor, " layer"]
    n: int

    AXES: ClassVar = {"cosine": ("layer",), "distance": ("layer",)}

    def to_frame(self) -> Any:
        """Return one row a stream: layer cosine distance."""
        import pandas

        columns = {"cosine": self.cosine.tolist(), "distance": self.distance.tolist()}
        return pandas.DataFrame({"layer": range(len(self.cosine)), **columns})


@dataclass(frozen=True)
class PairContributions(Result):
    """Which components of the model part two vectors of a word at a stream.

    Attributes:
        names: the components.
        shares: [component] (Δc · Δ) / ‖Δ‖²: how much of the difference Δ of the two vectors each
            component's own difference Δc makes up, along it. They sum to 1; a negative one brings
            the vectors together.
        reconstruction_error: ‖Σ Δc − Δ‖ / ‖Δ‖.
        layer: the stream.
        word: the word.

    Examples:
        >>> from wvprobe.contextual_drift import drift_baseline
        >>> texts = "a power bank dropped into the river.", "The river bank is close to here."
        >>> baseline = drift_baseline(model, sentences=20)
        >>> pair = wvprobe.drift_pair(model, *texts, word="bank", baseline=baseline)
        >>> bool((pair.contributions.shares.sum() - 1).abs() < 1e-5)
        True
    """

    names: tuple[Component, ...]
    shares: Float[Tensor, " component"]
    reconstruction_error: float
    layer: int
    word: str

    AXES: ClassVar = {"shares": ("component",)}

    def to_frame(self) -> Any:
        """Return one row a component, largest share first: kind layer head share."""
        import pandas

        frame = pandas.DataFrame(list(self.names), columns=["kind", "layer", "head"])
        frame["share"] = self.shares.tolist()
        order = self.shares.abs().argsort(descending=True, stable=True)
        return frame.iloc[order.tolist()].reset_index(drop=True)


@dataclass(frozen=True)
class PairDriftResult(Result):
    """Two vectors of one word by stream: how far apart, against what, and driven by what.

    Attributes:
        cosine: [layer] cosine of the two vectors; layer 0 is the embedding.
        distance: [layer] ‖a − b‖ / ½(‖a‖ + ‖b‖).
        baseline: the same of random words, see :class:`DriftBaseline`.
        same_cosine: [percentile, layer] 5th, 50th and 95th percentile over same-sense pairs.
        same_distance: [percentile, layer] likewise, of the distance.
        n_same: how many same-sense pairs.
        same_shift: how far apart the word's positions are in these at most: as in the two texts,
            or None where fewer than 20 pairs of the set are so close, and all of them count.
        same_words: whose pairs: the word itself, or all words of the set where it has none.
        word: the word.
        texts: the two texts.
        positions: the word's token positions in each.
        lengths: number of tokens of each.
        contributions: what drives the two apart at one stream.

    Examples:
        >>> from wvprobe.contextual_drift import drift_baseline
        >>> texts = "a power bank dropped into the river.", "The river bank is close to here."
        >>> baseline = drift_baseline(model, sentences=20)
        >>> pair = wvprobe.drift_pair(model, *texts, word="bank", baseline=baseline)
        >>> pair.to_frame().layer.tolist()
        [0, 1, 2, 3]
    """

    cosine: Float[Tensor, " layer"]
    distance: Float[Tensor, " layer"]
    baseline: DriftBaseline
    same_cosine: Float[Tensor, "percentile layer"]
    same_distance: Float[Tensor, "percentile layer"]
    n_same: int
    same_shift: int | None
    same_words: str
    word: str
    texts: tuple[str, str]
    positions: tuple[tuple[int, ...], tuple[int, ...]]
    lengths: tuple[int, int]
    contributions: PairContributions

    AXES: ClassVar = {
        "cosine": ("layer",),
        "distance": ("layer",),
        "same_cosine": ("percentile", "layer"),
        "same_distance": ("percentile", "layer"),
    }

    def to_frame(self) -> Any:
        """Return one row a stream.

        Columns: layer cosine distance cosine_adjusted distance_adjusted baseline
        baseline_distance same_low same_median same_high same_distance_low same_distance_median
        same_distance_high. Adjusted is minus the baseline of random words.
        """
        import pandas

        columns = {
            "cosine": self.cosine,
            "distance": self.distance,
            "cosine_adjusted": self.cosine - self.baseline.cosine,
            "distance_adjusted": self.distance - self.baseline.distance,
            "baseline": self.baseline.cosine,
            "baseline_distance": self.baseline.distance,
        }
        for number, name in enumerate(("low", "median", "high")):
            columns[f"same_{name}"] = self.same_cosine[number]
            columns[f"same_distance_{name}"] = self.same_distance[number]
        rows = {name: value.tolist() for name, value in columns.items()}
        return pandas.DataFrame({"layer": range(len(self.cosine)), **rows})


def normalised_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return ‖a − b‖ / ½(‖a‖ + ‖b‖) along the last axis: 0 for equal, at most 2.

    Args:
        a: vectors, [..., d].
        b: others, in the same shape.

    Raises:
        InputError: one is no tensor of finite numbers.
        ShapeError: their shapes differ.

    Examples:
        >>> from wvprobe.contextual_drift import normalised_distance
        >>> normalised_distance(torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0]))
        tensor(2.)
    """
    for name, vectors in (("a", a), ("b", b)):
        floating(name, vectors, ("d",), batch=True)
    if a.shape != b.shape:
        raise ShapeError(message("b", f"[…, d] = {list(a.shape)} as `a`", f"shape {list(b.shape)}"))
    # Two zero vectors are equal: 0 / 0 is not what is meant.
    total = a.norm(dim=-1) + b.norm(dim=-1)
    return 2 * (a - b).norm(dim=-1) / torch.where(total > 0, total, 1.0)


def drift_baseline(
    model: Any,
    dataset: SenseDataset | None = None,
    *,
    sentences: int | None = None,
    seed: int = 0,
) -> DriftBaseline:
    """Measure how alike random words are: one random token of each of many sentences.

    Tokens are those that :func:`drift` draws: of the text itself, neither a marked word nor an
    attention sink.

    Args:
        model: a TransformerBridge.
        dataset: where the sentences come from; None for the bundled set.
        sentences: how many are used at most; None for 1,000.
        seed: seed of the choice of sentences and tokens.

    Raises:
        InputError: fewer than two sentences have such a token.

    Examples:
        >>> from wvprobe.contextual_drift import drift_baseline
        >>> drift_baseline(model, sentences=20).cosine.shape  # by stream
        torch.Size([4])
    """
    seed = checked_seed(seed)
    data = senses_or_bundled(dataset)
    generator = torch.Generator().manual_seed(seed)
    reader = Reader.of(model, "target", None, None)
    most = None if sentences is None else length("sentences", sentences)
    tokens = RandomTokenDraw(reader, data.items, generator, most).tokens()
    settings = {"dataset": data.name, "sentences": most}
    return DriftBaseline(
        provenance=adapters.provenance(model, seed=seed, **settings),
        cosine=tokens.cosine(),
        distance=torch.stack([_mean_distance(x.double()) for x in tokens.x.unbind(1)]),
        n=len(tokens.x),
    )


def _mean_distance(x: Float[Tensor, "token d_model"]) -> Float[Tensor, ""]:
    """Return the mean normalised distance over all pairs of rows."""
    norms = x.norm(dim=-1)
    distance = 2 * torch.cdist(x, x) / (norms[:, None] + norms)
    return distance.fill_diagonal_(0.0).sum() / (len(x) * (len(x) - 1))


def drift_pair(
    model: Any,
    text_a: str,
    text_b: str,
    *,
    word: str,
    baseline: DriftBaseline | None = None,
    layer: int | None = None,
    seed: int = 0,
) -> PairDriftResult:
    """Compare a word's vectors in two texts, stream by stream, and say what drives them apart.

    A word's vector is that of its last token in a decoder, and the mean of its tokens in an
    encoder. The control beside it is pairs of the bundled set in which the word has the same
    sense, and stands no further apart than in the two texts, since position parts vectors too; a
    word that the set lacks is held against the same-sense pairs of all its words.

    Args:
        model: a TransformerBridge.
        text_a: a text with the word.
        text_b: another.
        word: the word, as both texts write it.
        baseline: of :func:`drift_baseline`, to measure it once for many pairs; None to do so now.
        layer: the stream whose difference is taken apart; None for that of least cosine.
        seed: seed of the baseline and of the stand-in pairs.

    Raises:
        WordError: the word is not in a text.
        InputError: no such stream.

    Examples:
        >>> from wvprobe.contextual_drift import drift_baseline
        >>> texts = "a power bank dropped into the river.", "The river bank is close to here."
        >>> baseline = drift_baseline(model, sentences=20)
        >>> pair = wvprobe.drift_pair(model, *texts, word="bank", baseline=baseline)
        >>> pair.cosine.shape, bool((pair.cosine[0] - 1).abs() < 1e-5)  # one token, one embedding
        (torch.Size([4]), True)
    """
    seed = checked_seed(seed)
    arch = adapters.architecture(model)
    if baseline is not None:
        instance("baseline", baseline, DriftBaseline, "drift_baseline(model) returns one.")
    texts = (text_a, text_b)
    spans = tuple(find_word(model, text, word) for text in texts)
    seen = capture(model, texts, "stream", words=spans)
    a, b = seen["stream"].double()
    cosine, distance = torch.cosine_similarity(a, b, dim=-1), normalised_distance(a, b)
    at = int(cosine.argmin()) if layer is None else index("layer", layer, len(cosine), "streams")
    baseline = drift_baseline(model, seed=seed) if baseline is None else baseline
    same_words, items = _same_sense_items(word, seed)
    shift = abs(spans[0].tokens[-1] - spans[1].tokens[-1])
    same_cosine, same_distance, n_same, matched = _same_sense(model, items, shift)
    provenance = adapters.provenance(model, seed=seed, texts=list(texts), word=word, layer=at)
    names, shares, error = _contributions(model, texts, spans, at, pool_last=arch.causal)
    return PairDriftResult(
        provenance=provenance,
        cosine=cosine,
        distance=distance,
        baseline=baseline,
        same_cosine=same_cosine,
        same_distance=same_distance,
        n_same=n_same,
        same_shift=shift if matched else None,
        same_words=same_words,
        word=word,
        texts=texts,
        positions=(spans[0].tokens, spans[1].tokens),
        lengths=(len(seen.tokens[0]), len(seen.tokens[1])),
        contributions=PairContributions(provenance, names, shares, error, at, word),
    )


def _same_sense_items(word: str, seed: int) -> tuple[str, list[SenseItem]]:
    """Return the bundled items of the word, or of all words a few each."""
    bundled = load_senses()
    if word in bundled.words:
        return word, list(bundled.only(word))
    generator = torch.Generator().manual_seed(seed)
    groups: dict[tuple[str, str], list[SenseItem]] = {}
    for item in bundled:
        groups.setdefault((item.word, item.sense), []).append(item)
    chosen = []
    for items in groups.values():
        order = torch.randperm(len(items), generator=generator).tolist()
        chosen += [items[i] for i in order[:_STAND_INS]]
    return "all words of the bundled set", chosen


def _same_sense(
    model: Any, items: Sequence[SenseItem], shift: int
) -> tuple[Tensor, Tensor, int, bool]:
    """Return the percentiles of cosine and distance over same-sense pairs, by stream.

    And how many pairs there are, and whether they are those whose positions are `shift` apart at
    most: else all, for want of them.
    """
    spans = [word_at(encode(model, item.sentence), item.start, item.end) for item in items]
    texts = [item.sentence for item in items]
    vectors = read_sites(model, texts, "stream", words=spans, progress=True)["stream"].double()
    pairs = [
        (i, j)
        for i, j in combinations(range(len(items)), 2)
        if (items[i].word, items[i].sense) == (items[j].word, items[j].sense)
    ]
    at = [span.tokens[-1] for span in spans]
    close = [(i, j) for i, j in pairs if abs(at[i] - at[j]) <= shift]
    matched = len(close) >= _LEAST_PAIRS
    pairs = close if matched else pairs
    first, second = (vectors[list(side)] for side in zip(*pairs, strict=True))
    percentiles = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    measures = (torch.cosine_similarity(first, second, dim=-1), normalised_distance(first, second))
    cosine, distance = (torch.quantile(measure, percentiles, dim=0) for measure in measures)
    return cosine, distance, len(pairs), matched


def _contributions(
    model: Any,
    texts: tuple[str, str],
    spans: tuple[WordSpan, ...],
    layer: int,
    *,
    pool_last: bool,
) -> tuple[tuple[Component, ...], Tensor, float]:
    """Return each component's share of the difference of the two vectors at a stream."""
    vectors, streams, names = [], [], ()
    for text, span in zip(texts, spans, strict=True):
        found = stream_components(model, text, layer=layer)
        at = list(span.tokens[-1:] if pool_last else span.tokens)
        vectors.append(found.vectors[:, at].mean(dim=1))
        streams.append(found.stream[at].mean(dim=0))
        names = found.names
    difference = streams[0] - streams[1]
    size = difference.norm()
    parts = vectors[0] - vectors[1]
    if size <= 1e-9 * streams[0].norm():
        # The same vector twice (a rotary model's embedding): nothing to share out.
        return names, torch.zeros(len(names), dtype=torch.float64), 0.0
    error = float((parts.sum(dim=0) - difference).norm() / size)
    return names, parts @ difference / size**2, error
