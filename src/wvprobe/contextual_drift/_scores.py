"""How far one token pair's score differs between sentences: a word's score with itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._statistics import mean_interval
from wvprobe._types import Result
from wvprobe._validate import length
from wvprobe._validate import seed as checked_seed
from wvprobe.activations import read_sites
from wvprobe.contextual_drift._vectors import Reader
from wvprobe.datasets import SenseDataset, SenseItem, senses_or_bundled

_TOGETHER = 128


@dataclass(frozen=True)
class ScoreDrift(Result):
    """How far a word's score with itself differs between sentences, block by block.

    Attributes:
        difference: [word, layer] |s_a − s_b|, the mean over heads and over pairs of sentences in
            which the word has different senses; NaN for a word without.
        same: [word, layer] the same over pairs in which it has one sense: the control.
        words: the words.
        n: occurrences of each.

    Examples:
        >>> from wvprobe.contextual_drift import score_drift
        >>> found = score_drift(model, wvprobe.load_senses().only("bank"), max_occurrences=8)
        >>> found.difference.shape  # word, layer
        torch.Size([1, 3])
    """

    difference: Float[Tensor, "word layer"]
    same: Float[Tensor, "word layer"]
    words: tuple[str, ...]
    n: tuple[int, ...]

    AXES: ClassVar = {"difference": ("word", "layer"), "same": ("word", "layer")}

    def to_frame(self) -> Any:
        """Return one row a word and block: word layer n difference same."""
        import pandas

        layers = self.difference.shape[1]
        columns = {
            "word": [word for word in self.words for _ in range(layers)],
            "layer": list(range(layers)) * len(self.words),
            "n": [n for n in self.n for _ in range(layers)],
            "difference": self.difference.flatten().tolist(),
            "same": self.same.flatten().tolist(),
        }
        return pandas.DataFrame(columns)

    def summary(self) -> Any:
        """Return means over words with 95 % bootstrap intervals over words.

        One row a kind of pairs and block: kind layer mean low high n_words.
        """
        import pandas

        rows = []
        for kind, values in (("different", self.difference), ("same", self.same)):
            known = values[~values[:, 0].isnan()]
            if not len(known):
                continue
            nothing = torch.full_like(known[0], torch.nan)
            ends = mean_interval(known, seed=self.provenance.seed or 0)
            low, high = ends if len(known) > 1 else (nothing, nothing)
            for layer, mean in enumerate(known.mean(dim=0).tolist()):
                rows.append([kind, layer, mean, float(low[layer]), float(high[layer]), len(known)])
        columns = ["kind", "layer", "mean", "low", "high", "n_words"]
        return pandas.DataFrame(rows, columns=columns)


def score_drift(
    model: Any,
    dataset: SenseDataset | None = None,
    *,
    prepend_bos: bool | None = None,
    max_occurrences: int = 200,
    seed: int = 0,
) -> ScoreDrift:
    """Measure how far a word's raw score with itself differs between its sentences.

    Of all token pairs, query = key = the word's last token is the one that every sentence holds,
    that no mask hides, and that stands at one offset, 0, in all: what differs is what the layer
    reads at the word. At layer 0 of a model whose positions act on the offset alone (rotary,
    ALiBi) it is one number. The score is raw, in units of the softmax's exponent: taking off the
    mean over a query's other keys would let in what these other words are. ALiBi's slope times
    the key's position, which softmax ignores, is taken off.

    Args:
        model: a TransformerBridge.
        dataset: marked words with their senses; None for the bundled set.
        prepend_bos: as in the bridge's ``to_tokens``; None for its default.
        max_occurrences: of a word with more, a random choice of so many is measured.
        seed: seed of that choice and of the bootstrap.

    Returns:
        [word, layer] means over heads and pairs; each sense, and pair of senses, counts alike.

    Raises:
        UnsupportedError: raw scores cannot be computed for the architecture.
        WordError: a marked word has no tokens of its own.

    Examples:
        >>> from wvprobe.contextual_drift import score_drift
        >>> found = score_drift(model, wvprobe.load_senses().only("bank"), max_occurrences=8)
        >>> bool((found.difference[:, 0].abs() < 1e-3).all())  # no context at layer 0
        True
    """
    seed = checked_seed(seed)
    reader = Reader.of(model, "target", "last", prepend_bos)
    data = senses_or_bundled(dataset)
    most = length("max_occurrences", max_occurrences)
    generator = torch.Generator().manual_seed(seed)
    chosen: list[list[SenseItem]] = []
    for word in data.words:
        items = [item for item in data.items if item.word == word]
        if len(items) > most:
            order = torch.randperm(len(items), generator=generator)[:most].tolist()
            items = [items[place] for place in sorted(order)]
        chosen.append(items)
    # Words are read together: the few sentences of one would make small batches.
    every = [item for items in chosen for item in items]
    parts = (every[at : at + _TOGETHER] for at in range(0, len(every), _TOGETHER))
    scores = torch.cat([_own_scores(reader, part) for part in parts])
    counts = [len(items) for items in chosen]
    rows = [
        _differences(own, [item.sense for item in items])
        for own, items in zip(scores.split(counts), chosen, strict=True)
    ]
    settings = {"dataset": data.name, "prepend_bos": prepend_bos, "max_occurrences": most}
    return ScoreDrift(
        provenance=adapters.provenance(model, seed=seed, **settings),
        difference=torch.stack([row[0] for row in rows]),
        same=torch.stack([row[1] for row in rows]),
        words=data.words,
        n=tuple(counts),
    )


def _own_scores(reader: Reader, items: Sequence[SenseItem]) -> Float[Tensor, "item layer head"]:
    """Return each word's raw scores with itself."""
    texts = [item.sentence for item in items]
    at = [reader.target(reader.encode(item.sentence), item)[-1] for item in items]
    seen = read_sites(
        reader.model, texts, "scores", positions=at, prepend_bos=reader.prepend_bos, ahead=False
    )
    rows = torch.arange(len(items))
    scores = seen["scores"][rows, :, :, 0, torch.tensor(at)].double()
    arch = adapters.architecture(reader.model)
    slopes = adapters.alibi_slopes(reader.model, arch)
    if slopes is None:
        return scores
    return scores - torch.tensor(at).double()[:, None, None] * slopes.double().cpu()


def _differences(
    scores: Float[Tensor, "item layer head"], senses: Sequence[str]
) -> tuple[Float[Tensor, " layer"], Float[Tensor, " layer"]]:
    """Return mean |s_a − s_b| between senses and within them; NaN where there are no pairs."""
    groups = [
        scores[[place for place, sense in enumerate(senses) if sense == kind]]
        for kind in dict.fromkeys(senses)
    ]
    groups = [group for group in groups if len(group) > 1]
    nothing = torch.full((scores.shape[1],), torch.nan, dtype=torch.float64)
    same = [_mean_difference(group, group) * len(group) / (len(group) - 1) for group in groups]
    different = [
        _mean_difference(one, other)
        for number, one in enumerate(groups)
        for other in groups[:number]
    ]
    return (
        torch.stack(different).mean(dim=0) if different else nothing,
        torch.stack(same).mean(dim=0) if same else nothing,
    )


def _mean_difference(one: Tensor, other: Tensor) -> Float[Tensor, " layer"]:
    """Return mean |s_a − s_b| over heads and all pairs of rows, those of a row with itself too."""
    total = sum((row - other).abs().mean(dim=(0, 2)) for row in one)
    return torch.as_tensor(total) / len(one)
