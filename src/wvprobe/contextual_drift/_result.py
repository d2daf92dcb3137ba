"""What drift() returns: measures by word and stream, their means with intervals, their parts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._statistics import mean_interval
from wvprobe._types import Result
from wvprobe._validate import one_of
from wvprobe.contextual_drift._layers import LayerSimilarity

# The measures of a frame, in its order; those of _CORRECTABLE come again with "_corrected".
MEASURES = (
    *("self_similarity", "self_similarity_adjusted", "self_similarity_matched"),
    *("intra_sentence", "intra_sentence_adjusted"),
    *("max_explainable_variance", "max_explainable_variance_adjusted"),
    *("max_explainable_variance_centred", "max_explainable_variance_centred_adjusted"),
    *("same_sense", "different_sense", "gap"),
    *("centroid_accuracy", "centroid_chance", "balanced_accuracy", "knn_accuracy", "knn_chance"),
    *("euclidean", "normalised_distance", "cosine_distance"),
)
CORRECTABLE = (
    *("self_similarity", "intra_sentence"),
    *("max_explainable_variance", "max_explainable_variance_centred"),
    *("same_sense", "different_sense", "gap"),
    *("centroid_accuracy", "balanced_accuracy", "knn_accuracy"),
)
# What growth laws are fitted to, and where drift() measures it.
CURVES = {
    "euclidean": "euclidean",
    "normalised": "normalised_distance",
    "cosine": "cosine_distance",
}
_CONTEXTS = ("before", "after", "both")


@dataclass(frozen=True)
class DriftResult(Result):
    """How the vectors of words part ways, stream by stream.

    ``result["gap"]`` is a measure, [word, layer]. Layer 0 is the embedding, k what block k − 1
    leaves, the last stands before the final norm. Cosines and accuracies have no unit.

    Attributes:
        values: measure -> [word, layer]; NaN where a word has not what a measure takes (two
            occurrences; two senses of two sentences each).
        baseline: [layer] mean cosine of random tokens, one of each sentence.
        baseline_corrected: [layer] the same of corrected vectors, or None.
        control: [quantity, layer] of the mean over words of the nearest-centroid accuracy, senses
            shuffled within each word 200 times: mean, 95th percentile.
        rogue_dimensions: [layer, rank] the dimensions with the largest shares of the baseline.
        rogue_shares: [layer, rank] their shares; those of all dimensions sum to 1.
        layers: likeness of the streams.
        words: the words.
        n: occurrences measured, word by word.
        n_found: occurrences in the set, word by word.
        n_senses: senses of each word.
        same_pos: whether all senses of a word are of one part of speech.
        item_words: [item] number of each occurrence's word.
        contexts: each occurrence's `SenseItem.context`.
        item_centroid: [item, layer] 1 where the nearest centroid tells the sense, else 0; a
            fraction where centroids tie, NaN where senses are not compared.
        item_neighbour: [item, layer] the same of the nearest neighbour.
        item_gap: [item, layer] mean cosine with its own sense minus with the others.
        dropped: word and sentence of each occurrence whose token is a sink.
        n_baseline: how many random tokens.
        position: ``target`` or ``last_token``.
        correction: which correction stands beside the raw numbers, or None.

    Examples:
        >>> few = wvprobe.load_senses().only("bank")
        >>> found = wvprobe.drift(model, few)
        >>> found.values["self_similarity"].shape  # word, stream
        torch.Size([1, 4])
    """

    values: Mapping[str, Tensor]
    baseline: Float[Tensor, " layer"]
    baseline_corrected: Float[Tensor, " layer"] | None
    control: Float[Tensor, "quantity layer"]
    rogue_dimensions: Int[Tensor, "layer rank"]
    rogue_shares: Float[Tensor, "layer rank"]
    layers: LayerSimilarity
    words: tuple[str, ...]
    n: tuple[int, ...]
    n_found: tuple[int, ...]
    n_senses: tuple[int, ...]
    same_pos: tuple[bool, ...]
    item_words: Int[Tensor, " item"]
    contexts: tuple[str, ...]
    item_centroid: Float[Tensor, "item layer"]
    item_neighbour: Float[Tensor, "item layer"]
    item_gap: Float[Tensor, "item layer"]
    dropped: tuple[tuple[str, str], ...]
    n_baseline: int
    position: str
    correction: str | None

    AXES: ClassVar = {
        "baseline": ("layer",),
        "baseline_corrected": ("layer",),
        "control": ("quantity", "layer"),
        "rogue_dimensions": ("layer", "rank"),
        "rogue_shares": ("layer", "rank"),
        "item_words": ("item",),
        "item_centroid": ("item", "layer"),
        "item_neighbour": ("item", "layer"),
        "item_gap": ("item", "layer"),
    }

    def __getitem__(self, measure: str) -> Tensor:
        """Return a measure, [word, layer].

        Raises:
            InputError: there is no such measure; near ones are offered.
        """
        one_of("measure", measure, tuple(self.values))
        return self.values[measure]

    def to_frame(self) -> Any:
        """Return one row a word and stream.

        Columns: word layer n n_senses same_pos, all measures, baseline; with a correction also
        the measures it changes, ending in ``_corrected``, and baseline_corrected.
        """
        import pandas

        layers = len(self.baseline)
        columns: dict[str, Any] = {
            "word": [word for word in self.words for _ in range(layers)],
            "layer": list(range(layers)) * len(self.words),
        }
        for name, facts in (
            ("n", self.n),
            ("n_senses", self.n_senses),
            ("same_pos", self.same_pos),
        ):
            columns[name] = [fact for fact in facts for _ in range(layers)]
        columns |= {name: values.flatten().tolist() for name, values in self.values.items()}
        columns["baseline"] = self.baseline.tolist() * len(self.words)
        if self.baseline_corrected is not None:
            columns["baseline_corrected"] = self.baseline_corrected.tolist() * len(self.words)
        return pandas.DataFrame(columns)

    def summary(self, *, same_pos: bool | None = None) -> Any:
        """Return means over words, with their 95 % bootstrap interval over words.

        One row a measure and stream: measure layer mean low high n_words. NaN for the interval
        of a single word.

        Args:
            same_pos: only words whose senses are of one part of speech, or only the others.
        """
        import pandas

        chosen = [same_pos is None or kind == same_pos for kind in self.same_pos]
        rows = [
            {"measure": name, "layer": layer, **row}
            for name, values in self.values.items()
            for layer, row in enumerate(_means(values[torch.tensor(chosen)], self._seed))
        ]
        return pandas.DataFrame(
            rows, columns=["measure", "layer", "mean", "low", "high", "n_words"]
        )

    def context_frame(self) -> Any:
        """Return the measures of senses, apart by where the words stand that tell the sense.

        A decoder's target sees what stands before it alone. One row a context, measure and
        stream: context measure layer mean low high n_words n_items; rows of the context
        ``before - after`` hold the difference, word by word. Centroids and neighbours are of all
        contexts. The interval is a bootstrap over words. Empty where the set does not say.
        """
        import pandas

        measures = {
            "centroid_accuracy": self.item_centroid,
            "knn_accuracy": self.item_neighbour,
            "gap": self.item_gap,
        }
        rows = [row for name, item in measures.items() for row in self._by_context(name, item)]
        columns = ["context", "measure", "layer", "mean", "low", "high", "n_words", "n_items"]
        return pandas.DataFrame(rows, columns=columns)

    def _by_context(self, name: str, item: Tensor) -> Iterator[dict[str, Any]]:
        means: dict[str, Tensor] = {}
        counts: dict[str, int] = {}
        for context in _CONTEXTS:
            mine = torch.tensor([c == context for c in self.contexts]) & ~item[:, 0].isnan()
            if not bool(mine.any()):
                continue
            member = torch.nn.functional.one_hot(self.item_words[mine], len(self.words)).double()
            # A word without such a sentence has no mean.
            means[context] = (member.T @ item[mine]) / member.sum(dim=0)[:, None]
            counts[context] = int(mine.sum())
        if "before" in means and "after" in means:
            means["before - after"] = means["before"] - means["after"]
            counts["before - after"] = counts["before"] + counts["after"]
        for context, values in means.items():
            for layer, row in enumerate(_means(values, self._seed)):
                facts = {"context": context, "measure": name, "layer": layer}
                yield {**facts, **row, "n_items": counts[context]}

    def rogue_frame(self) -> Any:
        """Return one row a stream and rank: layer rank dimension share baseline."""
        import pandas

        rows = [
            [layer, rank, int(dimension), float(share), float(self.baseline[layer])]
            for layer in range(len(self.baseline))
            for rank, (dimension, share) in enumerate(
                zip(self.rogue_dimensions[layer], self.rogue_shares[layer], strict=True)
            )
        ]
        return pandas.DataFrame(rows, columns=["layer", "rank", "dimension", "share", "baseline"])

    def curves(self) -> dict[str, Float[Tensor, "word layer"]]:
        """Return the three distances between senses that :func:`growth_law` takes, [word, layer].

        ``euclidean`` ‖a − b‖, in the stream's own unit; ``normalised`` ‖a − b‖ / ½(‖a‖ + ‖b‖);
        ``cosine`` 1 − cos: means over pairs of sentences of different senses.
        """
        return {curve: self.values[measure] for curve, measure in CURVES.items()}

    @property
    def _seed(self) -> int:
        return self.provenance.seed or 0


def _means(values: Float[Tensor, "word layer"], seed: int) -> Iterator[dict[str, Any]]:
    """Yield mean and interval over the words that have a value, stream by stream."""
    for column in values.T:
        known = column[~column.isnan()]
        row: dict[str, Any] = {"mean": torch.nan, "low": torch.nan, "high": torch.nan}
        if len(known):
            row["mean"] = float(known.mean())
        if len(known) > 1:
            row["low"], row["high"] = (float(end) for end in mean_interval(known, seed=seed))
        yield {**row, "n_words": len(known)}
