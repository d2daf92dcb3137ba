"""A word's occurrences on a plane, each with its sense: what one layer knows of a polysemous word.

The plane shows two directions of many, so beside it stands how well the senses are told apart in
the whole space: nearest centroid by cosine, each sentence left out in turn (Reif et al. 2019).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._decompositions import svd
from wvprobe._linalg import SVD, fix_signs
from wvprobe._statistics import wilson_interval
from wvprobe._told_apart import indicator, left_out_centroids, shuffled
from wvprobe._types import Result
from wvprobe._validate import index, message
from wvprobe._validate import seed as checked_seed
from wvprobe.activations import read_sites
from wvprobe.datasets import SenseDataset, SenseItem, senses_or_bundled
from wvprobe.errors import InputError
from wvprobe.words import encode, word_at

_SHUFFLES = 200


@dataclass(frozen=True)
class SenseMap(Result):
    """Vectors of one word at one stream, projected on their first two principal components.

    Attributes:
        points: [item, component] coordinates; the mean is at 0.
        explained: [component] share of the variance each component explains.
        accuracy: share of the items whose sense the nearest centroid of the others tells.
        interval: 95 % interval of the accuracy (Wilson).
        control: what the same procedure makes of senses shuffled among the sentences: mean and
            95th percentile of the accuracy over 200 shuffles.
        senses: each item's sense.
        sentences: each item's sentence.
        word: the word.
        layer: the stream, 0 the embedding, k after block k − 1.

    Examples:
        >>> from wvprobe.sense_maps import sense_map
        >>> found = sense_map(model, "bank")
        >>> list(found.to_frame())
        ['sense', 'sentence', 'first', 'second']
    """

    points: Float[Tensor, "item component"]
    explained: Float[Tensor, " component"]
    accuracy: float
    interval: tuple[float, float]
    control: tuple[float, float]
    senses: tuple[str, ...]
    sentences: tuple[str, ...]
    word: str
    layer: int

    AXES: ClassVar = {"points": ("item", "component"), "explained": ("component",)}

    def to_frame(self) -> Any:
        """Return one row an item: sense sentence first second."""
        import pandas

        first, second = self.points.T.tolist()
        columns = {"sense": self.senses, "sentence": self.sentences}
        return pandas.DataFrame({**columns, "first": first, "second": second})


@dataclass(frozen=True)
class SenseLayers(Result):
    """A word's occurrences on a plane at every stream, turned so that they can be followed.

    Attributes:
        points: [layer, item, coordinate] on the plane of the first two principal components,
            over their root mean square, since streams grow; each plane is turned (or mirrored)
            to lie as near as it can to the one before. Distances on a plane are those of
            `sense_map` but for that scale.
        explained: [layer] share of the variance that the plane holds.
        accuracy: [layer] share of the items whose sense the nearest centroid of the others tells.
        control: [layer] 95th percentile of the accuracy over 200 shuffles of the senses.
        senses: each item's sense.
        sentences: each item's sentence.
        word: the word.

    Examples:
        >>> from wvprobe.sense_maps import sense_map_by_layer
        >>> found = sense_map_by_layer(model, "bank")
        >>> found.points.shape[0], found.points.shape[2]  # streams, coordinates
        (4, 2)
    """

    points: Float[Tensor, "layer item coordinate"]
    explained: Float[Tensor, " layer"]
    accuracy: Float[Tensor, " layer"]
    control: Float[Tensor, " layer"]
    senses: tuple[str, ...]
    sentences: tuple[str, ...]
    word: str

    AXES: ClassVar = {
        "points": ("layer", "item", "coordinate"),
        "explained": ("layer",),
        "accuracy": ("layer",),
        "control": ("layer",),
    }

    def to_frame(self) -> Any:
        """Return one row a stream and item: layer sense sentence first second accuracy."""
        import pandas

        frames = []
        for layer, points in enumerate(self.points):
            first, second = points.T.tolist()
            columns = {"sense": self.senses, "sentence": self.sentences}
            frame = pandas.DataFrame({"layer": layer, **columns, "first": first, "second": second})
            frame["accuracy"] = float(self.accuracy[layer])
            frames.append(frame)
        return pandas.concat(frames, ignore_index=True)


def sense_map(
    model: Any,
    word: str,
    *,
    layer: int | None = None,
    dataset: SenseDataset | None = None,
    seed: int = 0,
) -> SenseMap:
    """Project a word's vectors at a stream on a plane, and say how well senses are told apart.

    A word's vector is that of its last token in a decoder, and the mean of its tokens in an
    encoder; in a decoder it knows of what stands before it alone.

    Args:
        model: a TransformerBridge.
        word: a word of the set.
        layer: the stream; None for the middle one, which no result has picked.
        dataset: labelled sentences; None for the bundled set.
        seed: seed of the shuffles.

    Raises:
        InputError: the set lacks the word, or has fewer than two sentences of a sense, or no such
            stream.
        WordError: the tokenizer's tokens do not show the word.

    Examples:
        >>> from wvprobe.sense_maps import sense_map
        >>> found = sense_map(model, "bank")
        >>> found.points.shape[1], found.interval[0] <= found.accuracy <= found.interval[1]
        (2, True)
    """
    seed = checked_seed(seed)
    arch = adapters.architecture(model)
    at = (arch.n_layers + 1) // 2 if layer is None else layer
    at = index("layer", at, arch.n_layers + 1, "streams")
    items, labels = _items(word, dataset)
    senses = tuple(item.sense for item in items)
    texts = [item.sentence for item in items]
    vectors = _vectors(model, items, at)[:, 0].double()
    points, explained = _plane(vectors)
    right = _told_apart(vectors, labels)
    return SenseMap(
        provenance=adapters.provenance(model, seed=seed, word=word, layer=at),
        points=points,
        explained=explained,
        accuracy=right / len(items),
        interval=wilson_interval(right, len(items)),
        control=_shuffled(vectors, labels, seed),
        senses=senses,
        sentences=tuple(texts),
        word=word,
        layer=at,
    )


def sense_map_by_layer(
    model: Any, word: str, *, dataset: SenseDataset | None = None, seed: int = 0
) -> SenseLayers:
    """Project a word's vectors on a plane at every stream, to watch its senses part.

    Args:
        model: a TransformerBridge.
        word: a word of the set.
        dataset: labelled sentences; None for the bundled set.
        seed: seed of the shuffles.

    Raises:
        InputError: the set lacks the word, or has fewer than two sentences of a sense.
        WordError: the tokenizer's tokens do not show the word.

    Examples:
        >>> from wvprobe.sense_maps import sense_map_by_layer
        >>> sense_map_by_layer(model, "bank").accuracy.shape
        torch.Size([4])
    """
    seed = checked_seed(seed)
    items, labels = _items(word, dataset)
    vectors = _vectors(model, items, None)
    planes: list[Tensor] = []
    found: list[tuple[float, float, float]] = []
    for x in vectors.double().unbind(dim=1):
        points, explained = _plane(x)
        size = points.square().mean().sqrt()
        points = points / torch.where(size > 0, size, 1.0)
        planes.append(_turned(points, planes[-1]) if planes else points)
        accuracy = _told_apart(x, labels) / len(items)
        found.append((float(explained.sum()), accuracy, _shuffled(x, labels, seed)[1]))
    explained, accuracy, control = torch.tensor(found, dtype=torch.float64).T.contiguous()
    return SenseLayers(
        provenance=adapters.provenance(model, seed=seed, word=word),
        points=torch.stack(planes),
        explained=explained,
        accuracy=accuracy,
        control=control,
        senses=tuple(item.sense for item in items),
        sentences=tuple(item.sentence for item in items),
        word=word,
    )


def _items(word: str, dataset: SenseDataset | None) -> tuple[tuple[SenseItem, ...], Tensor]:
    """Return a word's items and the number of each one's sense."""
    items = senses_or_bundled(dataset).only(word).items
    counts = Counter(item.sense for item in items)
    if len(counts) < 2 or min(counts.values()) < 2:
        expected = "one with two senses and two sentences of each"
        raise InputError(message("word", expected, dict(counts)))
    kinds = list(counts)
    return items, torch.tensor([kinds.index(item.sense) for item in items])


def _vectors(model: Any, items: Sequence[SenseItem], layers: int | None) -> Tensor:
    """Return the word's vectors, [item, layer, d_model]."""
    spans = [word_at(encode(model, item.sentence), item.start, item.end) for item in items]
    texts = [item.sentence for item in items]
    return read_sites(model, texts, "stream", words=spans, layers=layers)["stream"]


def _turned(points: Tensor, before: Tensor) -> Tensor:
    """Turn or mirror a plane to lie nearest to another (orthogonal Procrustes, Schönemann 1966)."""
    u, _, vh = svd(points.T @ before)
    return points @ u @ vh


def _plane(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first two principal components and the share of the variance of each."""
    u, s, vh = svd(x - x.mean(dim=0), full_matrices=False)
    # The sign of a component is a convention; of its coordinates the largest is positive.
    found = fix_signs(SVD(u, s, vh))
    total = found.S.pow(2).sum()
    explained = found.S[:2].pow(2) / total if total > 0 else torch.zeros(2, dtype=x.dtype)
    return found.U[:, :2] * found.S[:2], explained


def _told_apart(x: Tensor, labels: Tensor) -> float:
    """Count the items whose nearest centroid, themselves left out, is that of their sense."""
    return float(left_out_centroids(x @ x.T, indicator(labels, int(labels.max()) + 1)).sum())


def _shuffled(x: Tensor, labels: Tensor, seed: int) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(seed)
    orders = shuffled(labels, _SHUFFLES, generator)
    member = indicator(orders, int(labels.max()) + 1)
    shares = left_out_centroids((x @ x.T)[None], member).mean(dim=-1)
    return float(shares.mean()), float(shares.quantile(0.95))
