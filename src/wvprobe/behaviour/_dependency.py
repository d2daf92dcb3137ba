"""Which heads find the word that another depends on, beside the best fixed offset."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._statistics import ratio_interval
from wvprobe._types import HeadId, Result
from wvprobe._validate import instance, message
from wvprobe._validate import length as checked_length
from wvprobe._validate import seed as checked_seed
from wvprobe.behaviour._relations import DIRECTIONS, Found, Pair, Parsed, found_words, parsed
from wvprobe.datasets import LabelledDataset
from wvprobe.errors import InputError

_HEADS, _LAYERS = ("relation", "layer", "head"), ("relation", "layer")


@dataclass(frozen=True)
class DependencyResult(Result):
    r"""How often each head's strongest key is the related word, on sentences nothing was chosen on.

    The axis `relation` counts pairs of a relation and a direction.

    Attributes:
        accuracy: [relation, layer, head] share of pairs whose word is found; NaN where fewer than
            `min_pairs` of a layer could be.
        low: same axes; lower end of its 95 % bootstrap interval over sentences.
        high: same axes; upper end.
        baseline: [relation, layer] the same of the best fixed offset in words, on the same pairs.
        offset: [relation, layer] that offset, from the query to the key, chosen on the other half
            of the sentences.
        excess: [relation, layer, head] accuracy − baseline.
        excess_low: same axes; lower end of its 95 % bootstrap interval over sentences.
        excess_high: same axes; upper end.
        chosen_by: same axes; the excess on the other half, by which heads are chosen.
        n: [relation, layer] pairs counted.
        n_sentences: [relation] sentences that they stand in.
        masked: [relation] of all pairs, the share whose key lies ahead of its query, where a
            decoder does not look; they are not among `n`.
        relations: the relation of each place of the axis.
        directions: its direction, which of the two words asks.
        left_out: relation and direction -> why it is not measured.
        sentences: how many sentences were read; half of them to choose on.

    Examples:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from wvprobe.behaviour import dependency_heads
        >>> row = "{}\t{}\t{}\t{}\t_\t_\t{}\t{}\t_\t_".format
        >>> texts = [
        ...     "\n".join([row(1, a, a, "NOUN", 2, "nsubj"), row(2, b, b, "VERB", 0, "root"), ""])
        ...     for a in ("Birds", "Dogs", "Cats", "Men") for b in ("sing", "bark", "sleep", "walk")
        ... ]
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "small.conllu")
        ...     _ = path.write_text("\n".join([*texts, ""]))
        ...     treebank = wvprobe.load_conllu(path)
        >>> found = dependency_heads(model, treebank, min_pairs=4, progress=False)
        >>> found.accuracy.shape[-2:]  # layer, head
        torch.Size([3, 6])
    """

    accuracy: Float[Tensor, "relation layer head"]
    low: Float[Tensor, "relation layer head"]
    high: Float[Tensor, "relation layer head"]
    baseline: Float[Tensor, "relation layer"]
    offset: Int[Tensor, "relation layer"]
    excess: Float[Tensor, "relation layer head"]
    excess_low: Float[Tensor, "relation layer head"]
    excess_high: Float[Tensor, "relation layer head"]
    chosen_by: Float[Tensor, "relation layer head"]
    n: Int[Tensor, "relation layer"]
    n_sentences: Int[Tensor, " relation"]
    masked: Float[Tensor, " relation"]
    relations: tuple[str, ...]
    directions: tuple[str, ...]
    left_out: Mapping[tuple[str, str], str]
    sentences: int

    AXES: ClassVar = {
        **{name: _HEADS for name in ("accuracy", "low", "high", "excess", "excess_low")},
        **{name: _HEADS for name in ("excess_high", "chosen_by")},
        **{name: _LAYERS for name in ("baseline", "offset", "n")},
        "n_sentences": ("relation",),
        "masked": ("relation",),
    }

    def to_frame(self) -> Any:
        """Return one row a relation, direction, layer and head.

        Columns: relation direction layer head accuracy low high baseline offset excess excess_low
        excess_high chosen_by n masked.
        """
        places = torch.cartesian_prod(*(torch.arange(size) for size in self.accuracy.shape))
        return self._rows(places.reshape(-1, 3))

    def best(self) -> Any:
        """Return each layer's best head for every relation, as :meth:`to_frame` has it.

        Head and direction are chosen by `chosen_by`, on the half that is not judged on.
        """
        places = []
        for relation in dict.fromkeys(self.relations):
            own = [at for at, name in enumerate(self.relations) if name == relation]
            for layer in range(self.accuracy.shape[1]):
                score = torch.where(
                    self.excess[own, layer].isnan(), -torch.inf, self.chosen_by[own, layer]
                )
                if bool(score.isinf().all()):
                    continue
                side, head = divmod(int(score.argmax()), score.shape[1])
                places.append([own[side], layer, head])
        return self._rows(torch.tensor(places, dtype=torch.long).reshape(-1, 3))

    def specialists(self, margin: float = 0.05) -> Any:
        """Return how many heads of each layer are the best of it at a relation, by over `margin`.

        Columns: layer; heads, that are the layer's best at some relation and exceed the fixed
        offset by over `margin`; certain, those of them whose interval lies above it; named, each
        with the relation it exceeds it at most. A relation has one best head a layer, so
        different heads are best at different relations.
        """
        import pandas

        best = self.best()
        rows = []
        for layer in range(self.accuracy.shape[1]):
            own = best[(best["layer"] == layer) & (best["excess"] > margin)]
            own = own.sort_values("excess", ascending=False, kind="stable")
            top = own.drop_duplicates("head")
            certain = own[own["excess_low"] > margin]["head"].nunique()
            cells = zip(top["head"], top["relation"], top["direction"], top["excess"], strict=True)
            named = [f"{HeadId(layer, h)} {rel}, {way} ({e:+.2f})" for h, rel, way, e in cells]
            rows.append([layer, len(top), certain, "; ".join(named)])
        return pandas.DataFrame(rows, columns=["layer", "heads", "certain", "named"])

    def _rows(self, places: Int[Tensor, "row place=3"]) -> Any:
        import pandas

        relation, layer, head = places.unbind(1)
        columns: dict[str, Any] = {
            "relation": [self.relations[at] for at in relation.tolist()],
            "direction": [self.directions[at] for at in relation.tolist()],
            "layer": layer.tolist(),
            "head": head.tolist(),
        }
        names = "accuracy low high baseline offset excess excess_low excess_high chosen_by n masked"
        at = {3: (relation, layer, head), 2: (relation, layer), 1: (relation,)}
        for name in names.split():
            values: Tensor = getattr(self, name)
            columns[name] = values[at[values.dim()]].tolist()
        return pandas.DataFrame(columns)


def dependency_heads(
    model: Any,
    dataset: LabelledDataset,
    *,
    limit: int | None = None,
    min_pairs: int = 50,
    exclude: Sequence[str] = ("root", "punct"),
    seed: int = 0,
    batch_size: int | Literal["auto"] = "auto",
    progress: bool = True,
) -> DependencyResult:
    r"""Measure how often a head's strongest key is the word that a dependency relates to its query.

    After Clark et al. 2019 (What Does BERT Look At?) and Voita et al. 2019 (Analyzing Multi-Head
    Self-Attention): for each relation, in both directions, the share of pairs in which the key of
    most attention is any token of the related word. The query is a word's last token in a
    decoder, and the mean over its tokens in an encoder. Sinks (BOS, CLS, SEP and what acts like
    them) and the query's own word are no candidates, and the fixed offset never names the query
    itself either. Pairs whose key a query does not see, or whose related word is a sink in that
    layer, do not count for it.

    The baseline is the best fixed offset in words (punctuation counts as words), as in both
    papers. The offset, and in :meth:`DependencyResult.best` the head and the direction, are chosen
    on a random half of the sentences; all numbers but `chosen_by` are of the other half.

    Args:
        model: a TransformerBridge.
        dataset: of ``load_conllu``: sentences with heads and a column ``deprel``.
        limit: at most so many sentences, drawn at random; None for all.
        min_pairs: pairs that a relation in one direction needs in each half.
        exclude: relations that do not count; subtypes (``nsubj:pass``) are relations of their own.
        seed: seed of the draw, the halves and the bootstrap.
        batch_size: sentences a batch, or ``"auto"`` by tokens.
        progress: show progress on long work.

    Raises:
        InputError: the sentences have no dependencies, or no relation has enough pairs.

    Examples:
        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from wvprobe.behaviour import dependency_heads
        >>> row = "{}\t{}\t{}\t{}\t_\t_\t{}\t{}\t_\t_".format
        >>> texts = [
        ...     "\n".join([row(1, a, a, "NOUN", 2, "nsubj"), row(2, b, b, "VERB", 0, "root"), ""])
        ...     for a in ("Birds", "Dogs", "Cats", "Men") for b in ("sing", "bark", "sleep", "walk")
        ... ]
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder, "small.conllu")
        ...     _ = path.write_text("\n".join([*texts, ""]))
        ...     treebank = wvprobe.load_conllu(path)
        >>> found = dependency_heads(model, treebank, min_pairs=4, progress=False)
        >>> set(found.to_frame().relation)
        {'nsubj'}
    """
    seed = checked_seed(seed)
    arch = adapters.architecture(model)
    checked_length("min_pairs", min_pairs)
    halves, sentences = _sentences(model, dataset, limit, exclude, seed)
    if not sentences:
        expected = "sentences with relations that are not excluded, within the model's context"
        raise InputError(message("dataset", expected, f"{len(dataset)} without any"))
    found = found_words(model, arch, sentences, batch_size, progress)
    measured = _Pairs(sentences, halves, found, arch.causal)
    groups, left_out = measured.groups(min_pairs)
    if not groups:
        most = max(map(len, measured.members.values()), default=0)
        hint = f"The most frequent relation has {most} pairs in all. Lower min_pairs."
        expected = f"sentences with a relation of {min_pairs} visible pairs in each half"
        raise InputError(message("dataset", expected, f"{len(sentences)} sentences", hint))
    parts = [measured.scored(group, min_pairs, seed) for group in groups]
    settings = {
        "dataset": dataset.name,
        "sentences": len(sentences),
        "limit": limit,
        "min_pairs": min_pairs,
        "exclude": list(exclude),
    }
    return DependencyResult(
        provenance=adapters.provenance(model, seed=seed, **settings),
        **{name: torch.stack([part[name] for part in parts]) for name in parts[0]},
        relations=tuple(relation for relation, _ in groups),
        directions=tuple(direction for _, direction in groups),
        left_out=left_out,
        sentences=len(sentences),
    )


def _sentences(
    model: Any,
    dataset: LabelledDataset,
    limit: int | None,
    exclude: Sequence[str],
    seed: int,
) -> tuple[list[bool], list[Parsed]]:
    """Return sentences with relations, and for each whether it is one to choose on.

    A text that stands in the treebank several times is taken once.
    """
    instance("dataset", dataset, LabelledDataset, "Use wvprobe.datasets.load_conllu(path).")
    if "deprel" not in dataset.columns or all(s.heads is None for s in dataset):
        hint = "Use wvprobe.datasets.load_conllu(path)."
        raise InputError(message("dataset", "sentences with dependencies", dataset.name, hint))
    if limit is not None:
        checked_length("limit", limit)
    once = dict(zip(dataset.groups, dataset, strict=True))
    distinct = list(once.values())
    order = torch.randperm(len(distinct), generator=torch.Generator().manual_seed(seed)).tolist()
    found: list[Parsed] = []
    for number in order:
        sentence = parsed(model, distinct[number], exclude)
        if sentence is not None and sentence.pairs:
            found.append(sentence)
        if limit is not None and len(found) == limit:
            break
    return [number % 2 == 0 for number in range(len(found))], found


class _Pairs:
    """All pairs of all sentences by relation and direction, with what was found of them."""

    def __init__(
        self, sentences: Sequence[Parsed], halves: Sequence[bool], found: Found, causal: bool
    ) -> None:
        self.found = found
        pairs: list[tuple[int, Pair]] = [
            (number, pair) for number, s in enumerate(sentences) for pair in s.pairs
        ]
        self.sentence = torch.tensor([number for number, _ in pairs])
        self.offset = torch.tensor([pair.offset for _, pair in pairs])
        self.to_choose = torch.tensor(halves, dtype=torch.bool)[self.sentence]
        self.ahead = (self.offset > 0) & causal
        self.members: dict[tuple[str, str], list[int]] = {}
        for place, (_, pair) in enumerate(pairs):
            self.members.setdefault((pair.relation, pair.direction), []).append(place)

    def groups(self, min_pairs: int) -> tuple[list[tuple[str, str]], dict[tuple[str, str], str]]:
        """Return relations with enough pairs in sight, the frequent ones first, and the others."""
        enough, left_out = [], {}
        order = sorted(
            self.members, key=lambda g: (-len(self.members[g]), g[0], DIRECTIONS.index(g[1]))
        )
        for group in order:
            places = torch.tensor(self.members[group])
            ahead = int(self.ahead[places].sum())
            seen = places[~self.ahead[places]]
            halves = [int((self.to_choose[seen] == half).sum()) for half in (True, False)]
            if min(halves) >= min_pairs:
                enough.append(group)
            elif ahead:
                left_out[group] = (
                    f"masked: the key lies ahead in {ahead} of {len(places)} pairs, which leaves "
                    f"{min(halves)} in a half"
                )
            else:
                left_out[group] = f"{min(halves)} pairs in a half"
        return enough, left_out

    def scored(self, group: tuple[str, str], min_pairs: int, seed: int) -> dict[str, Tensor]:
        """Return one group's numbers under the names of :class:`DependencyResult`."""
        places = torch.tensor(self.members[group])
        choose, judge = (self._half(places, half) for half in (True, False))
        offset = self._best_offset(choose)
        chosen_by = choose.shares(choose.hits) - choose.shares(choose.at(offset))[:, None]
        excess = judge.hits.double() - judge.at(offset)[..., None].double()
        rows, clusters = judge.sentence.unique(return_inverse=True)
        sizes = _summed(judge.possible.double(), clusters, len(rows))[..., None]
        few = (sizes.sum(dim=0) < min_pairs) | (choose.possible.sum(dim=0)[:, None] < min_pairs)
        ends = []
        for values in (judge.hits.double(), excess):
            parts = _summed(values, clusters, len(rows))
            ends += ratio_interval(parts, sizes.expand_as(parts), seed=seed)
        low, high, excess_low, excess_high = (end.masked_fill(few, torch.nan) for end in ends)
        baseline, accuracy = judge.shares(judge.at(offset)), judge.shares(judge.hits)
        return {
            "accuracy": accuracy.masked_fill(few, torch.nan),
            "low": low,
            "high": high,
            "baseline": baseline.masked_fill(few[:, 0], torch.nan),
            "offset": offset,
            "excess": (accuracy - baseline[:, None]).masked_fill(few, torch.nan),
            "excess_low": excess_low,
            "excess_high": excess_high,
            "chosen_by": chosen_by.masked_fill(few, torch.nan),
            "n": judge.possible.sum(dim=0),
            "n_sentences": torch.tensor(len(rows)),
            "masked": self.ahead[places].double().mean(),
        }

    def _half(self, places: Tensor, half: bool) -> "_Half":
        own = places[self.to_choose[places] == half]
        return _Half(
            self.found.hits[own], self.found.possible[own], self.offset[own], self.sentence[own]
        )

    @staticmethod
    def _best_offset(choose: "_Half") -> Int[Tensor, " layer"]:
        """Return the most frequent offset among the pairs that each layer sees."""
        known, which = choose.offset.unique(return_inverse=True)
        counts = _summed(choose.possible.double(), which, len(known))
        return known[counts.argmax(dim=0)]


class _Half(NamedTuple):
    """The pairs of one group in one half of the sentences."""

    hits: Tensor
    possible: Tensor
    offset: Tensor
    sentence: Tensor

    def at(self, offset: Int[Tensor, " layer"]) -> Tensor:
        """Return [pair, layer], True where an offset names the right word."""
        return (self.offset[:, None] == offset) & self.possible

    def shares(self, right: Tensor) -> Tensor:
        """Return the share of pairs that are right among those possible, by layer."""
        number = self.possible.sum(dim=0).double()
        return right.double().sum(dim=0) / (number if right.dim() == 2 else number[:, None])


def _summed(values: Float[Tensor, "row ..."], which: Int[Tensor, " row"], n: int) -> Tensor:
    """Return sums of rows by their number, [n, ...]."""
    return values.new_zeros(n, *values.shape[1:]).index_add_(0, which, values)
