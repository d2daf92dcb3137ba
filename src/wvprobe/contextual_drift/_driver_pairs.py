"""Pairs of one word's sentences in two senses, and what each component puts between them."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._validate import message
from wvprobe.components import Component, components_at
from wvprobe.contextual_drift._vectors import Reader, read_items
from wvprobe.datasets import SenseDataset, SenseItem
from wvprobe.errors import InputError
from wvprobe.words import word_at

# Sentences whose streams are read together, and bytes of components that are held at once.
_TOGETHER, _COMPONENT_BYTES = 384, 160 << 20
# Of each sense: the pair's own, its stand-in, and one to make a centroid of.
_FEWEST = 3


@dataclass(frozen=True)
class Occurrences:
    """Sentences of the words that have two senses, and the targets' vectors at one stream.

    Attributes:
        items: one an occurrence; a word has each sentence once.
        at: positions that are read, the same number in all occurrences of a word that are paired.
        x: [item, d_model], float64.
        groups: word -> sense -> numbers of its items.
        paired: numbers of the items that pairs are made of.
        dropped: word and sentence of each occurrence whose token is a sink, or which sees nothing
            of its sentence but itself.
    """

    items: list[SenseItem]
    at: list[tuple[int, ...]]
    x: Float[Tensor, "item d_model"]
    groups: dict[str, dict[str, list[int]]]
    paired: frozenset[int]
    dropped: tuple[tuple[str, str], ...]


class Pair(NamedTuple):
    """Sentences of one word, by their numbers: two senses, and one more sentence of each.

    Attributes:
        word: number of the word.
        a: of one sense.
        b: of another.
        same_a: another sentence of a's sense.
        same_b: another of b's.
        control: two sentences of one sense, in random order.
    """

    word: int
    a: int
    b: int
    same_a: int
    same_b: int
    control: tuple[int, int]


def occurrences(reader: Reader, data: SenseDataset, layer: int) -> Occurrences:
    """Read the targets' vectors at one stream and group them by word and sense.

    Raises:
        InputError: no word has two senses of three sentences each.
    """
    distinct = list({(item.word, item.sentence): item for item in data}.values())
    items, vectors, dropped = [], [], []
    for start in range(0, len(distinct), _TOGETHER):
        part = distinct[start : start + _TOGETHER]
        read = read_items(reader, part)
        kept = read.kept & torch.tensor([_has_context(reader, item) for item in part])
        vectors.append(read.x[kept, layer].double())
        for item, stays in zip(part, kept.tolist(), strict=True):
            if stays:
                items.append(item)
            else:
                dropped.append((item.word, item.sentence))
    at = [reader.target(reader.encode(item.sentence), item) for item in items]
    groups: dict[str, dict[str, list[int]]] = {}
    for number, item in enumerate(items):
        groups.setdefault(item.word, {}).setdefault(item.sense, []).append(number)
    paired: set[int] = set()
    for word, senses in list(groups.items()):
        # An exchange puts token in the place of token, so that pairs have as many.
        sizes = Counter(len(at[n]) for numbers in senses.values() for n in numbers)
        usual = sizes.most_common(1)[0][0]
        fit = {s: [n for n in numbers if len(at[n]) == usual] for s, numbers in senses.items()}
        groups[word] = {s: senses[s] for s, numbers in fit.items() if len(numbers) >= _FEWEST}
        if len(groups[word]) < 2:
            del groups[word]
        else:
            paired.update(n for s in groups[word] for n in fit[s])
    if not groups:
        expected = "a word with two senses, each in three sentences or more"
        hint = f"{len(dropped)} were dropped: targets that are sinks, or see no other word."
        raise InputError(message("dataset", expected, f"{len(items)} sentences", hint))
    return Occurrences(items, at, torch.cat(vectors), groups, frozenset(paired), tuple(dropped))


def _has_context(reader: Reader, item: SenseItem) -> bool:
    """Return whether the target sees any of the text but itself; in an encoder it always does.

    A decoder's first word has no sense from what it sees. Its token is close to being a sink, too:
    with one head's output changed it may become one (SmolLM2).
    """
    encoding = reader.encode(item.sentence)
    first = word_at(encoding, item.start, item.end).tokens[0]
    causal = adapters.architecture(reader.model).causal
    return not causal or not all(encoding.special[:first])


def drawn_pairs(found: Occurrences, n_pairs: int, generator: torch.Generator) -> list[Pair]:
    """Draw pairs of every word, its pairs of senses by turns, sentences as evenly as can be."""
    pairs = []
    for word, senses in enumerate(found.groups.values()):
        shuffled = []
        for numbers in senses.values():
            fit = [n for n in numbers if n in found.paired]
            order = torch.randperm(len(fit), generator=generator).tolist()
            shuffled.append([fit[place] for place in order])
        couples = list(combinations(range(len(shuffled)), 2))
        for number in range(n_pairs):
            round_, couple = divmod(number, len(couples))
            (a, same_a), (b, same_b) = (_two(shuffled[s], round_) for s in couples[couple])
            one, other = (a, same_a) if number % 2 == 0 else (b, same_b)
            # In a fixed order, differences of few sentences would cancel round by round.
            turned = bool(torch.rand((), generator=generator) < 0.5)
            control = (other, one) if turned else (one, other)
            pairs.append(Pair(word, a, b, same_a, same_b, control))
    return pairs


def _two(numbers: Sequence[int], turn: int) -> tuple[int, int]:
    """Return a sentence and another of the same sense, those of other turns first."""
    n = len(numbers)
    return numbers[turn % n], numbers[(turn + max(1, n // 2)) % n]


def directions(found: Occurrences, pairs: Sequence[Pair]) -> Float[Tensor, "pair d_model"]:
    """Return the unit vector from the one sense's centroid to the other's, pair by pair.

    None of the pair's sentences, nor their stand-ins, have a part in it. 0 where there is no
    difference.
    """
    numbers = {n: own for s in found.groups.values() for own in s.values() for n in own}
    rows = []
    for pair in pairs:
        ends = ((pair.a, pair.same_a), (pair.b, pair.same_b))
        centroids = [
            found.x[[n for n in numbers[end[0]] if n not in end]].mean(dim=0) for end in ends
        ]
        rows.append(centroids[1] - centroids[0])
    stacked = torch.stack(rows)
    sizes = stacked.norm(dim=-1, keepdim=True)
    # Centroids of equal vectors differ by rounding.
    nothing = sizes <= 1e-9 * found.x.norm(dim=-1).mean()
    return torch.where(nothing, 0.0, stacked / torch.where(nothing, 1.0, sizes))


class Contributions(NamedTuple):
    """What components put between the sentences of pairs, along the pairs' directions.

    Attributes:
        names: the components.
        different: [pair, component] of a and b.
        same: [pair, component] of the control.
        separation: [pair] (x_b − x_a) · u of the streams themselves.
        distance: [pair] ‖x_b − x_a‖.
        error: largest |Σ components − separation| / ½(‖x_a‖ + ‖x_b‖).
    """

    names: tuple[Component, ...]
    different: Float[Tensor, "pair component"]
    same: Float[Tensor, "pair component"]
    separation: Float[Tensor, " pair"]
    distance: Float[Tensor, " pair"]
    error: float


def contributions(
    reader: Reader, found: Occurrences, pairs: Sequence[Pair], u: Tensor, layer: int
) -> Contributions:
    """Take the targets' streams apart, and project the differences of every pair."""
    different, same, separation, distance, errors = [], [], [], [], []
    names: tuple[Component, ...] = ()
    for start, stop in _chunks(reader, found, pairs, layer):
        some, along = pairs[start:stop], u[start:stop]
        numbers = sorted({n for p in some for n in (p.a, p.b, *p.control)})
        names, parts, x = _components(reader, found, numbers, layer)
        place = {n: k for k, n in enumerate(numbers)}

        def projected(
            ends: list[tuple[int, int]], place: Any = place, parts: Any = parts, along: Any = along
        ) -> Tensor:
            one, other = (torch.tensor([place[e[side]] for e in ends]) for side in (0, 1))
            return torch.einsum("cpd,pd->pc", parts[:, other] - parts[:, one], along)

        ends = [(p.a, p.b) for p in some]
        one, other = (x[[place[e[side]] for e in ends]] for side in (0, 1))
        different.append(projected(ends))
        same.append(projected([p.control for p in some]))
        separation.append(((other - one) * along).sum(dim=-1))
        distance.append((other - one).norm(dim=-1))
        scale = (one.norm(dim=-1) + other.norm(dim=-1)) / 2
        errors.append(((different[-1].sum(dim=-1) - separation[-1]).abs() / scale).max())
    return Contributions(
        names,
        torch.cat(different),
        torch.cat(same),
        torch.cat(separation),
        torch.cat(distance),
        float(torch.stack(errors).max()),
    )


def _chunks(
    reader: Reader, found: Occurrences, pairs: Sequence[Pair], layer: int
) -> Iterator[tuple[int, int]]:
    """Yield ranges of pairs whose components fit into memory, those of a word together if so."""
    model = reader.model
    row = 8 * int(model.cfg.d_model) * (layer * (int(model.cfg.n_heads) + 5) + 3)
    most = max(1, _COMPONENT_BYTES // row)
    start, rows = 0, 0
    for number, pair in enumerate(pairs):
        more = 4 * len(found.at[pair.a])
        if rows and rows + more > most:
            yield start, number
            start, rows = number, 0
        rows += more
    yield start, len(pairs)


def _components(
    reader: Reader, found: Occurrences, numbers: Sequence[int], layer: int
) -> tuple[tuple[Component, ...], Tensor, Tensor]:
    """Return names, components [component, item, d_model] and streams of some items.

    A target of several tokens has the mean of theirs: each is taken apart through its own norms.
    """
    rows = [(k, n, p) for k, n in enumerate(numbers) for p in found.at[n]]
    texts = [found.items[n].sentence for _, n, _ in rows]
    at = [p for _, _, p in rows]
    read = components_at(reader.model, texts, at, layer=layer, prepend_bos=reader.prepend_bos)
    # A bias of a block and those of its norms (BERT) are one component.
    names = tuple(dict.fromkeys(read.names))
    of_name = torch.tensor([names.index(name) for name in read.names])
    merged = torch.zeros(len(names), *read.vectors.shape[1:], dtype=torch.float64)
    merged.index_add_(0, of_name, read.vectors)
    share = torch.zeros(len(numbers), len(rows), dtype=torch.float64)
    for row, (k, n, _) in enumerate(rows):
        share[k, row] = 1 / len(found.at[n])
    return names, torch.einsum("ir,crd->cid", share, merged), share @ read.stream
