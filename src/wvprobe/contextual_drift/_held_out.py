"""Senses told by the centroids of a training part, judged on a test part."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._statistics import resampled_totals
from wvprobe._told_apart import TIED
from wvprobe._types import Result
from wvprobe._validate import instance, message, one_of
from wvprobe._validate import seed as checked_seed
from wvprobe.contextual_drift._vectors import Reader, read_items
from wvprobe.datasets import SenseDataset, SenseItem
from wvprobe.errors import InputError

_TOGETHER = 384


@dataclass(frozen=True)
class HeldOutSenses(Result):
    """Balanced accuracy of a training part's centroids on a test part, stream by stream.

    Attributes:
        balanced: [word, layer] mean over senses of the share of test sentences told right.
        low: [word, layer] lower end of the 95 % bootstrap interval over test sentences, within
            each sense.
        high: [word, layer] upper end.
        accuracy: [word, layer] share of all test sentences told right.
        recall: [sense, layer] share of a sense's test sentences told right.
        chance: [word] balanced accuracy of a guess: 1 over the number of senses tested.
        majority: [word] accuracy of the training part's most frequent sense.
        words: the words.
        senses: word and sense, in the order of `recall`.
        n_train: training sentences of each sense.
        n_test: test sentences of each sense.
        dropped: word and sentence of each occurrence whose token is a sink.

    Examples:
        >>> from dataclasses import replace
        >>> from wvprobe.contextual_drift import held_out_senses
        >>> senses = wvprobe.load_senses().only("bank")
        >>> parts = ("train", "test")
        >>> items = tuple(replace(item, split=parts[n % 2]) for n, item in enumerate(senses.items))
        >>> found = held_out_senses(model, replace(senses, items=items))
        >>> found.chance.tolist()  # four senses
        [0.25]
    """

    balanced: Float[Tensor, "word layer"]
    low: Float[Tensor, "word layer"]
    high: Float[Tensor, "word layer"]
    accuracy: Float[Tensor, "word layer"]
    recall: Float[Tensor, "sense layer"]
    chance: Float[Tensor, " word"]
    majority: Float[Tensor, " word"]
    words: tuple[str, ...]
    senses: tuple[tuple[str, str], ...]
    n_train: tuple[int, ...]
    n_test: tuple[int, ...]
    dropped: tuple[tuple[str, str], ...]

    AXES: ClassVar = {
        "balanced": ("word", "layer"),
        "low": ("word", "layer"),
        "high": ("word", "layer"),
        "accuracy": ("word", "layer"),
        "recall": ("sense", "layer"),
        "chance": ("word",),
        "majority": ("word",),
    }

    def to_frame(self) -> Any:
        """Return one row a word and stream.

        Columns: word layer balanced_accuracy low high accuracy chance majority n_train n_test.
        """
        import pandas

        rows = []
        for number, word in enumerate(self.words):
            mine = [k for k, (name, _) in enumerate(self.senses) if name == word]
            for layer in range(self.balanced.shape[1]):
                rows.append(
                    {
                        "word": word,
                        "layer": layer,
                        "balanced_accuracy": float(self.balanced[number, layer]),
                        "low": float(self.low[number, layer]),
                        "high": float(self.high[number, layer]),
                        "accuracy": float(self.accuracy[number, layer]),
                        "chance": float(self.chance[number]),
                        "majority": float(self.majority[number]),
                        "n_train": sum(self.n_train[k] for k in mine),
                        "n_test": sum(self.n_test[k] for k in mine),
                    }
                )
        return pandas.DataFrame(rows)


def held_out_senses(
    model: Any,
    dataset: SenseDataset,
    *,
    train: str = "train",
    test: str = "test",
    position: str = "target",
    pool: str | None = None,
    prepend_bos: bool | None = None,
    seed: int = 0,
) -> HeldOutSenses:
    """Judge by other sentences how well streams tell a word's senses.

    A sense's centroid is the mean of its training vectors as they are; a test vector is given the
    sense of the nearest centroid by cosine (Reif et al. 2019; Loureiro et al. 2021, whose
    CoarseWSD-20 has such parts). Balanced accuracy, since senses differ in frequency.

    Args:
        model: a TransformerBridge.
        dataset: items with a `split`.
        train: the split that gives centroids.
        test: the split that is judged.
        position: as in :func:`~wvprobe.contextual_drift.drift`.
        pool: likewise.
        prepend_bos: likewise.
        seed: seed of the bootstrap.

    Raises:
        InputError: a split is empty, or a sense of the test part has no training sentence.
        WordError: a marked word has no tokens of its own.

    Examples:
        >>> from dataclasses import replace
        >>> from wvprobe.contextual_drift import held_out_senses
        >>> senses = wvprobe.load_senses().only("bank")
        >>> parts = ("train", "test")
        >>> items = tuple(replace(item, split=parts[n % 2]) for n, item in enumerate(senses.items))
        >>> held_out_senses(model, replace(senses, items=items)).words
        ('bank',)
    """
    seed = checked_seed(seed)
    reader = Reader.of(model, position, pool, prepend_bos)
    instance("dataset", dataset, SenseDataset, "load_senses returns one.")
    for argument, name in (("train", train), ("test", test)):
        one_of(argument, name, tuple(sorted({item.split for item in dataset})))
    parts = {name: [item for item in dataset if item.split == name] for name in (train, test)}
    untrained = {(i.word, i.sense) for i in parts[test]} - {(i.word, i.sense) for i in parts[train]}
    if untrained:
        raise InputError(
            message("train", "a split with all senses", f"none of {sorted(untrained)}")
        )
    run = _Run(reader, train, test, parts)
    settings = {
        "dataset": dataset.name,
        **{"train": train, "test": test, "position": position, "pool": reader.pool},
        "prepend_bos": prepend_bos,
    }
    return run.result(adapters.provenance(model, seed=seed, **settings), seed)


class _Run:
    """Centroids, and then what they make of the test part; no vector is kept."""

    def __init__(
        self, reader: Reader, train: str, test: str, parts: dict[str, list[SenseItem]]
    ) -> None:
        self.reader = reader
        self.dropped: list[tuple[str, str]] = []
        self.senses = list(dict.fromkeys((item.word, item.sense) for item in parts[train]))
        size = (len(self.senses), reader.streams, int(reader.model.cfg.d_model))
        sums, self.n_train = torch.zeros(size, dtype=torch.float64), [0] * len(self.senses)
        for item, vector in self._vectors(parts[train]):
            number = self.senses.index((item.word, item.sense))
            sums[number] += vector.double()
            self.n_train[number] += 1
        self.centroids = sums / sums.norm(dim=-1, keepdim=True).clamp(min=1e-300)
        self.right: list[list[Tensor]] = [[] for _ in self.senses]
        for item, vector in self._vectors(parts[test]):
            number = self.senses.index((item.word, item.sense))
            self.right[number].append(self._judged(item.word, number, vector.double()))

    def _vectors(self, items: Sequence[SenseItem]) -> Iterator[tuple[SenseItem, Tensor]]:
        for start in range(0, len(items), _TOGETHER):
            part = items[start : start + _TOGETHER]
            read = read_items(self.reader, part)
            for place, item in enumerate(part):
                if bool(read.kept[place]):
                    yield item, read.x[place]
                else:
                    self.dropped.append((item.word, item.sentence))

    def _judged(self, word: str, number: int, vector: Tensor) -> Tensor:
        """Return [layer]: 1 right, 0 wrong, a fraction where centroids tie."""
        mine = [k for k, (name, _) in enumerate(self.senses) if name == word and self.n_train[k]]
        unit = vector / vector.norm(dim=-1, keepdim=True).clamp(min=1e-300)
        cosines = (self.centroids[mine] * unit).sum(dim=-1)
        tied = cosines >= cosines.amax(dim=0) - TIED
        if number not in mine:
            return torch.zeros(len(unit), dtype=torch.float64)
        return tied[mine.index(number)].double() / tied.sum(dim=0)

    def result(self, provenance: Any, seed: int) -> HeldOutSenses:
        """Put the words together."""
        words = tuple(dict.fromkeys(word for word, _ in self.senses))
        rows = [self._word(word, seed) for word in words]
        nothing = torch.full((self.reader.streams,), torch.nan, dtype=torch.float64)
        recall = [torch.stack(r).mean(dim=0) if r else nothing for r in self.right]
        columns = [torch.stack(column) for column in zip(*rows, strict=True)]
        return HeldOutSenses(
            provenance,
            *columns[:4],
            recall=torch.stack(recall),
            chance=columns[4],
            majority=columns[5],
            words=words,
            senses=tuple(self.senses),
            n_train=tuple(self.n_train),
            n_test=tuple(map(len, self.right)),
            dropped=tuple(self.dropped),
        )

    def _word(self, word: str, seed: int) -> tuple[Tensor, ...]:
        """Return balanced accuracy with its interval, accuracy, chance and majority."""
        mine = [k for k, (name, _) in enumerate(self.senses) if name == word]
        tested = [k for k in mine if self.right[k]]
        if not tested:
            nothing = torch.full((self.reader.streams,), torch.nan, dtype=torch.float64)
            return (*[nothing] * 4, torch.tensor(torch.nan), torch.tensor(torch.nan))
        right = [torch.stack(self.right[k]) for k in tested]
        # Each sense is resampled apart, with a seed of its own.
        draws = [resampled_totals(r, seed=seed + number) / len(r) for number, r in enumerate(right)]
        ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
        low, high = torch.stack(draws).mean(dim=0).quantile(ends, dim=0)
        most = max(mine, key=lambda k: self.n_train[k])
        return (
            torch.stack([r.mean(dim=0) for r in right]).mean(dim=0),
            low,
            high,
            torch.cat(right).mean(dim=0),
            torch.tensor(1 / len(mine), dtype=torch.float64),
            torch.tensor(len(self.right[most]) / sum(map(len, right)), dtype=torch.float64),
        )
