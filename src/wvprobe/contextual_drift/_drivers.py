"""Which heads and MLPs pull a word's senses apart: exact shares, where they look, and exchanges."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._statistics import mean_interval, resampled_totals
from wvprobe._types import HeadId, Result
from wvprobe._validate import index, length, message
from wvprobe._validate import seed as checked_seed
from wvprobe.components import Component
from wvprobe.contextual_drift._driver_looks import KINDS, Source, where_heads_look
from wvprobe.contextual_drift._driver_pairs import (
    Pair,
    contributions,
    directions,
    drawn_pairs,
    occurrences,
)
from wvprobe.contextual_drift._driver_swaps import exchange_heads
from wvprobe.contextual_drift._vectors import Reader
from wvprobe.datasets import SenseDataset, senses_or_bundled
from wvprobe.errors import InputError


@dataclass(frozen=True)
class DriversResult(Result):
    """What each component puts between a word's senses, along the direction from one to the other.

    Numbers are lengths in units of the stream. A word is the mean of its pairs; intervals are
    95 % bootstrap intervals over words (NaN for a single word).

    Attributes:
        contribution: [word, component] (c_b − c_a) · u; over components they sum to `separation`.
        control: [word, component] the same of two sentences of one sense, along the same u.
        separation: [word] (x_b − x_a) · u.
        distance: [word] ‖x_b − x_a‖, of which the separation is what lies along u.
        predicted: [word, head] contributions of the strongest heads in the pairs that are checked.
        measured: [word, head] how far targets move towards the other sense when the head's output
            there is the other sentence's: half of the separation lost by exchanging both.
        measured_same: [word, head] the same with an output from another sentence of its own sense.
        attention: [word, head, kind] where the strongest heads look from the target.
        attention_uniform: [word, head, kind] the same of attention spread over all visible keys.
        kinds: names of the last axis: ``sink`` (added tokens and sinks), ``self`` the word,
            ``copy`` its tokens elsewhere, then content words and others before and after it.
        sources: head by head the content words looked at most.
        components: the components.
        heads: the heads that pull senses apart most, strongest first.
        words: the words.
        n_pairs: pairs of each word.
        layer: the stream.
        error: largest |Σ contributions − separation| / ½(‖x_a‖ + ‖x_b‖) of all pairs.
        dropped: word and sentence of each occurrence whose token is a sink, or which sees nothing
            of its sentence but itself (a decoder's first word).

    Examples:
        >>> few = wvprobe.load_senses().only("bank")
        >>> found = wvprobe.drift_drivers(model, few, n_pairs=2, n_heads=1)
        >>> len(found.components) == found.contribution.shape[-1]
        True
    """

    contribution: Float[Tensor, "word component"]
    control: Float[Tensor, "word component"]
    separation: Float[Tensor, " word"]
    distance: Float[Tensor, " word"]
    predicted: Float[Tensor, "word head"]
    measured: Float[Tensor, "word head"]
    measured_same: Float[Tensor, "word head"]
    attention: Float[Tensor, "word head kind"]
    attention_uniform: Float[Tensor, "word head kind"]
    kinds: tuple[str, ...]
    sources: tuple[tuple[Source, ...], ...]
    components: tuple[Component, ...]
    heads: tuple[HeadId, ...]
    words: tuple[str, ...]
    n_pairs: tuple[int, ...]
    layer: int
    error: float
    dropped: tuple[tuple[str, str], ...]

    AXES: ClassVar = {
        **{name: ("word", "component") for name in ("contribution", "control")},
        **{name: ("word",) for name in ("separation", "distance")},
        **{name: ("word", "head") for name in ("predicted", "measured", "measured_same")},
        **{name: ("word", "head", "kind") for name in ("attention", "attention_uniform")},
    }

    def to_frame(self) -> Any:
        """Return one row a component, the strongest first.

        Columns: component kind layer head contribution low high control control_low control_high
        share (of the separation) driver (it pulls senses apart: its interval lies above the
        control's); for the heads that were checked, else NaN: predicted predicted_low
        predicted_high measured measured_low measured_high measured_same measured_same_low
        measured_same_high.
        """
        import pandas

        columns: dict[str, Any] = {
            "component": [str(name) for name in self.components],
            "kind": [name.kind for name in self.components],
            "layer": pandas.array([name.layer for name in self.components], dtype="Int64"),
            "head": pandas.array([name.head for name in self.components], dtype="Int64"),
        }
        mean, low, high = self._interval(self.contribution)
        control, control_low, control_high = self._interval(self.control)
        named = {
            **{"contribution": mean, "low": low, "high": high, "control": control},
            **{"control_low": control_low, "control_high": control_high},
            "share": mean / self.separation.mean(),
        }
        columns |= {name: values.tolist() for name, values in named.items()}
        columns["driver"] = (low > control_high).tolist()
        checked = [self.components.index(Component("head", *head)) for head in self.heads]
        for name in ("predicted", "measured", "measured_same"):
            ends = self._interval(getattr(self, name))
            for ending, values in zip(("", "_low", "_high"), ends, strict=True):
                column = torch.full((len(self.components),), torch.nan, dtype=torch.float64)
                column[checked] = values
                columns[name + ending] = column.tolist()
        frame = pandas.DataFrame(columns)
        order = mean.abs().argsort(descending=True, stable=True).tolist()
        return frame.iloc[order].reset_index(drop=True)

    def looks_frame(self) -> Any:
        """Return one row a checked head and kind of key.

        Columns: layer head kind attention low high uniform (attention spread over all visible
        keys).
        """
        import pandas

        mean, low, high = self._interval(self.attention)
        uniform = self.attention_uniform.mean(dim=0)
        rows = [
            (*head, kind, *(float(values[h, k]) for values in (mean, low, high, uniform)))
            for h, head in enumerate(self.heads)
            for k, kind in enumerate(self.kinds)
        ]
        columns = ["layer", "head", "kind", "attention", "low", "high", "uniform"]
        return pandas.DataFrame(rows, columns=columns)

    def agreement(self) -> Any:
        """Return how well direct contributions foretell what exchanges do.

        One row a unit: the heads' means, and heads in each word. Columns: unit n correlation
        (Pearson) correlation_low correlation_high slope (of measured on predicted, through 0)
        slope_low slope_high rank_correlation (Spearman, which a few large effects do not rule),
        with 95 % bootstrap intervals over words.
        """
        import pandas

        seed, n = self.provenance.seed or 0, len(self.words)
        both = torch.stack([self.predicted, self.measured], dim=1)
        means = resampled_totals(both, seed=seed) / n
        cells = torch.stack(
            [
                *(t.sum(dim=1) for t in (self.predicted, self.measured)),
                *(t.square().sum(dim=1) for t in (self.predicted, self.measured)),
                (self.predicted * self.measured).sum(dim=1),
            ],
            dim=1,
        )
        sums = resampled_totals(cells, seed=seed)
        size = self.predicted.numel()
        units = (
            ("heads", len(self.heads), _of_sums(*_sums(both.mean(dim=0))), _of_sums(*_sums(means))),
            ("heads and words", size, _of_sums(cells.sum(dim=0), size), _of_sums(sums, size)),
        )
        ends = torch.tensor([0.025, 0.975], dtype=torch.float64)
        rows = []
        for unit, count, found, drawn in units:
            row: list[Any] = [unit, count]
            values = both.mean(dim=0) if unit == "heads" else both.transpose(0, 1).flatten(1)
            for value, draws in zip(found, drawn, strict=True):
                low, high = torch.nanquantile(draws, ends).tolist() if n > 1 else [torch.nan] * 2
                row += [float(value), low, high]
            rows.append([*row, _rank_correlation(*values)])
        names = [
            f"{name}{end}" for name in ("correlation", "slope") for end in ("", "_low", "_high")
        ]
        return pandas.DataFrame(rows, columns=["unit", "n", *names, "rank_correlation"])

    def _interval(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean over words, and the ends of its interval."""
        mean = values.mean(dim=0)
        if len(values) < 2:
            nothing = torch.full_like(mean, torch.nan)
            return mean, nothing, nothing
        return mean, *mean_interval(values, seed=self.provenance.seed or 0)


def _sums(both: Float[Tensor, "*draw quantity head"]) -> tuple[Tensor, int]:
    """Return Σp, Σm, Σp², Σm², Σpm over heads, and how many."""
    p, m = both.unbind(-2)
    parts = (p, m, p.square(), m.square(), p * m)
    return torch.stack([part.sum(dim=-1) for part in parts], dim=-1), p.shape[-1]


def _of_sums(sums: Float[Tensor, "*draw sum"], n: int) -> tuple[Tensor, Tensor]:
    """Return Pearson's correlation, and the slope through 0."""
    p, m, pp, mm, pm = sums.unbind(-1)
    spread = ((pp - p * p / n) * (mm - m * m / n)).clamp(min=0).sqrt()
    return (pm - p * m / n) / spread, pm / pp


def _rank_correlation(one: Float[Tensor, " n"], other: Float[Tensor, " n"]) -> float:
    """Return Spearman's correlation, ties in the order they come; NaN for fewer than two."""
    if len(one) < 2:
        return math.nan
    ranks = torch.stack([values.argsort().argsort().double() for values in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])


def drift_drivers(
    model: Any,
    dataset: SenseDataset | None = None,
    *,
    layer: int | None = None,
    pool: str | None = None,
    n_pairs: int = 5,
    n_heads: int = 10,
    n_checked: int = 1,
    prepend_bos: bool | None = None,
    seed: int = 0,
) -> DriversResult:
    """Find the heads and MLPs that pull the senses of words apart, and check the strongest heads.

    For sentences a and b of one word in two senses, the target's vector x at a stream is an exact
    sum of components c (token, position, every head, every MLP, biases; scales of norms frozen).
    With u the unit vector from the one sense's centroid to the other's, from sentences other than
    these, a component's contribution is (c_b − c_a) · u; contributions sum to (x_b − x_a) · u.
    Elhage et al. 2021 (A Mathematical Framework for Transformer Circuits) for the sum; the control
    is pairs of one sense, whose contributions have expectation 0.

    The strongest heads are checked: z of the head at the target is exchanged between the two
    sentences and the model run on (activation patching; Vig et al. 2020, Wang et al. 2022). What
    is measured holds what later heads and MLPs make of it; the contribution is the direct path.

    Args:
        model: a TransformerBridge.
        dataset: marked words with their senses; None for the bundled set.
        layer: the stream, k after block k − 1; None for the middle one.
        pool: as in :func:`~wvprobe.contextual_drift.drift`.
        n_pairs: pairs of a word; its pairs of senses come by turns.
        n_heads: how many heads are checked: those that pull apart most, on the mean over words.
        n_checked: of a word's pairs, how many are exchanged.
        prepend_bos: as in the bridge's ``to_tokens``; None for its default.
        seed: seed of pairs and bootstraps.

    Raises:
        InputError: an argument cannot be used, or no word has two senses of three sentences each.
        WordError: a marked word has no tokens of its own.

    Examples:
        >>> few = wvprobe.load_senses().only("bank")
        >>> found = wvprobe.drift_drivers(model, few, n_pairs=2, n_heads=1)
        >>> found.error < 1e-5  # contributions sum to the separation
        True
    """
    seed = checked_seed(seed)
    arch = adapters.architecture(model)
    middle = (arch.n_layers + 1) // 2
    layer = middle if layer is None else index("layer", layer, arch.n_layers + 1, "streams")
    if layer == 0:
        hint = "At the embedding no head has written yet."
        raise InputError(message("layer", f"in 1..{arch.n_layers}", layer, hint))
    n_pairs, n_heads = length("n_pairs", n_pairs), length("n_heads", n_heads)
    n_checked = min(length("n_checked", n_checked), n_pairs)
    reader = Reader.of(model, "target", pool, prepend_bos)
    data = senses_or_bundled(dataset)
    found = occurrences(reader, data, layer)
    pairs = drawn_pairs(found, n_pairs, torch.Generator().manual_seed(seed))
    u = directions(found, pairs)
    read = contributions(reader, found, pairs, u, layer)
    words = tuple(found.groups)
    contribution = _by_word(read.different, pairs, len(words))
    heads = _strongest(read.names, contribution.mean(dim=0), n_heads)
    some = [n for n in range(len(pairs)) if n % n_pairs < n_checked]
    checked = [pairs[n] for n in some]
    moved = exchange_heads(reader, found, checked, u[some], heads, layer)
    columns = [read.names.index(Component("head", *head)) for head in heads]
    targets = sorted({n for pair in pairs for n in (pair.a, pair.b)})
    looks = where_heads_look(reader, found, targets, heads)
    settings = {
        "dataset": data.name,
        "sentences": len(data),
        "layer": layer,
        "pool": reader.pool,
        "prepend_bos": prepend_bos,
        "n_pairs": n_pairs,
        "n_heads": n_heads,
        "n_checked": n_checked,
    }
    return DriversResult(
        provenance=adapters.provenance(model, seed=seed, **settings),
        contribution=contribution,
        control=_by_word(read.same, pairs, len(words)),
        separation=_by_word(read.separation, pairs, len(words)),
        distance=_by_word(read.distance, pairs, len(words)),
        predicted=_by_word(read.different[some][:, columns], checked, len(words)),
        measured=_by_word(moved.different, checked, len(words)),
        measured_same=_by_word(moved.same, checked, len(words)),
        attention=looks.attention,
        attention_uniform=looks.uniform,
        kinds=KINDS,
        sources=looks.sources,
        components=read.names,
        heads=heads,
        words=words,
        n_pairs=(n_pairs,) * len(words),
        layer=layer,
        error=read.error,
        dropped=found.dropped,
    )


def _by_word(values: Float[Tensor, "pair ..."], pairs: Sequence[Pair], n_words: int) -> Tensor:
    """Return the mean over each word's pairs, [word, ...]."""
    of = torch.tensor([pair.word for pair in pairs])
    return torch.stack([values[of == word].mean(dim=0) for word in range(n_words)])


def _strongest(
    names: Sequence[Component], means: Float[Tensor, " component"], n: int
) -> tuple[HeadId, ...]:
    """Return the heads whose contribution is largest, that is, which pull apart most."""
    heads = [
        (-float(means[k]), HeadId(name.layer, name.head))
        for k, name in enumerate(names)
        if name.layer is not None and name.head is not None
    ]
    return tuple(head for _, head in sorted(heads)[:n])
