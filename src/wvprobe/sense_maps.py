"""A word's occurrences on a plane, each with its sense: what one layer knows of a polysemous word.

The plane shows two directions of many, so beside it stands how well the senses are told apart in
the whole space: nearest centroid by cosine, each sentence left out in turn (Reif et al. 2019).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._linalg import SVD, fix_signs
from wvprobe._statistics import wilson_interval
from wvprobe._types import Result
from wvprobe._validate import index, message
from wvprobe.activations import read_sites
from wvprobe.datasets import SenseDataset, load_senses
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
    """
    arch = adapters.architecture(model)
    at = (arch.n_layers + 1) // 2 if layer is None else layer
    at = index("layer", at, arch.n_layers + 1, "streams")
    items = (load_senses() if dataset is None else dataset).only(word).items
    senses = tuple(item.sense for item in items)
    counts = {sense: senses.count(sense) for sense in senses}
    if len(counts) < 2 or min(counts.values()) < 2:
        raise InputError(message("word", "one with two senses and two sentences of each", counts))
    spans = [word_at(encode(model, item.sentence), item.start, item.end) for item in items]
    texts = [item.sentence for item in items]
    vectors = read_sites(model, texts, "stream", words=spans, layers=at)["stream"][:, 0].double()
    points, explained = _plane(vectors)
    kinds = list(counts)
    labels = torch.tensor([kinds.index(sense) for sense in senses])
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


def _plane(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first two principal components and the share of the variance of each."""
    u, s, vh = torch.linalg.svd(x - x.mean(dim=0), full_matrices=False)
    # The sign of a component is a convention; of its coordinates the largest is positive.
    found = fix_signs(SVD(u, s, vh))
    total = found.S.pow(2).sum()
    explained = found.S[:2].pow(2) / total if total > 0 else torch.zeros(2, dtype=x.dtype)
    return found.U[:, :2] * found.S[:2], explained


def _told_apart(x: Tensor, labels: Tensor) -> int:
    """Count the items whose nearest centroid, themselves left out, is that of their sense."""
    unit = x / x.norm(dim=-1, keepdim=True)
    member = torch.nn.functional.one_hot(labels).to(x.dtype)
    sizes = member.sum(dim=0)
    sums = (unit @ unit.T) @ member  # [item, sense]: an item's products with a sense's sum
    # ‖Σ‖² of each sense with and without the item: a centroid's direction is all that counts.
    lengths = torch.einsum("is,ij,js->s", member, unit @ unit.T, member)
    own = member.bool()
    products = torch.where(own, sums - 1, sums)
    lengths = torch.where(own, lengths - 2 * sums + 1, lengths.expand_as(sums))
    likeness = products / lengths.clamp(min=1e-12).sqrt()
    likeness = torch.where(own & (sizes < 2), -torch.inf, likeness)
    return int((likeness.argmax(dim=-1) == labels).sum())


def _shuffled(x: Tensor, labels: Tensor, seed: int) -> tuple[float, float]:
    generator = torch.Generator().manual_seed(seed)
    orders = (torch.randperm(len(labels), generator=generator) for _ in range(_SHUFFLES))
    shares = torch.tensor([_told_apart(x, labels[order]) / len(labels) for order in orders])
    return float(shares.mean()), float(shares.quantile(0.95))
