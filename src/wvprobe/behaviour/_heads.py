"""What every head does on repeated random tokens and on text, held against uniform attention."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._statistics import mean_interval
from wvprobe._types import Result
from wvprobe._validate import length as checked_length
from wvprobe._validate import listed, message, one_of
from wvprobe._validate import seed as checked_seed
from wvprobe._validate import texts as checked_texts
from wvprobe.adapters import Architecture
from wvprobe.behaviour._on_repeats import on_repeats, repeats
from wvprobe.behaviour._on_text import OnText
from wvprobe.behaviour._rows import Masks, Rows, tokenized
from wvprobe.behaviour._targets import REPEAT_SCORES, TEXT_SCORES
from wvprobe.datasets import load_prose
from wvprobe.errors import InputError, TextLengthError
from wvprobe.words import encode

SCORES = (*REPEAT_SCORES, "copying", *TEXT_SCORES, "positional", "positional_r2")
# Shares of attention on different keys of the same sequences, of which the largest names a head.
KINDS = REPEAT_SCORES
# A head whose largest excess over uniform attention is smaller is of no kind.
KIND_EXCESS = 0.1
_AXES = ("score", "layer", "head")


@dataclass(frozen=True)
class BehaviourResult(Result):
    """Scores of every head, with intervals over samples and what uniform attention would give.

    ``result["induction"]`` is a score's [layer, head].

    Attributes:
        values: [score, layer, head], in the order of :attr:`names`; NaN where nothing could be
            measured, see `reasons`.
        low: same axes; lower end of the 95 % bootstrap interval over samples; NaN for fewer than
            two.
        high: same axes; upper end.
        chance: same axes; the same mean under uniform attention over the keys that each query
            sees. `copying` (logits) and `positional_r2`: 0.
        n: [score, layer] samples that the score was measured on.
        positional_offset: [layer, head] the offset (query position − key position, tokens) that
            `positional` is about; NaN where there is none.
        names: the scores.
        reasons: score -> why it is NaN, a layer ("" where it is not).

    Examples:
        >>> given = {"texts": ["The river bank is closed today."] * 2, "samples": 2, "length": 9}
        >>> found = wvprobe.head_behaviour(model, **given, progress=False)
        >>> found.named(1, kinds=["induction"]).columns.tolist()[:5]
        ['kind', 'rank', 'layer', 'head', 'score']
    """

    values: Float[Tensor, "score layer head"]
    low: Float[Tensor, "score layer head"]
    high: Float[Tensor, "score layer head"]
    chance: Float[Tensor, "score layer head"]
    n: Int[Tensor, "score layer"]
    positional_offset: Float[Tensor, "layer head"]
    names: tuple[str, ...]
    reasons: Mapping[str, tuple[str, ...]]

    AXES: ClassVar = {
        **{name: _AXES for name in ("values", "low", "high", "chance")},
        "n": ("score", "layer"),
        "positional_offset": ("layer", "head"),
    }

    def __getitem__(self, score: str) -> Float[Tensor, "layer head"]:
        """Return one score of every head.

        Raises:
            InputError: there is no such score.
        """
        return self.values[self._place(score)]

    def excess(self, score: str) -> Float[Tensor, "layer head"]:
        """Return a score less what uniform attention would give.

        Raises:
            InputError: there is no such score.
        """
        return self[score] - self.chance[self._place(score)]

    def to_frame(self) -> Any:
        """Return one row a head.

        Columns: layer, head, a column for each of :attr:`names`, `positional_offset`; `kind`, the
        one of ``previous_token duplicate induction next_token`` that exceeds uniform attention
        most (``none`` where by less than .1), with the interval `low` to `high` of that
        score, which knows nothing of the choice; then ``<score>_low``, ``<score>_high`` and
        ``<score>_chance`` of every score.
        """
        import pandas

        columns: dict[str, Any] = {}
        columns["layer"], columns["head"] = self._heads().unbind(1)
        columns |= dict(zip(self.names, self.values, strict=True))
        columns["positional_offset"] = self.positional_offset
        kind = torch.stack([self.excess(name) for name in KINDS])
        place = kind.nan_to_num(nan=-torch.inf).argmax(dim=0)
        rows = torch.tensor([self._place(name) for name in KINDS])[place][None]
        columns["kind"] = place
        columns["low"], columns["high"] = self.low.gather(0, rows), self.high.gather(0, rows)
        for name, *bounds in zip(self.names, self.low, self.high, self.chance, strict=True):
            for end, values in zip(("low", "high", "chance"), bounds, strict=True):
                columns[f"{name}_{end}"] = values
        frame = pandas.DataFrame({k: v.flatten().tolist() for k, v in columns.items()})
        named = (kind.nan_to_num(nan=-torch.inf).amax(dim=0) >= KIND_EXCESS).flatten().tolist()
        pairs = zip(frame["kind"], named, strict=True)
        frame["kind"] = [KINDS[number] if is_named else "none" for number, is_named in pairs]
        frame["positional_offset"] = frame["positional_offset"].astype("Int64")
        return frame

    def long_frame(self) -> Any:
        """Return one row a score and head: score layer head value low high chance n reason."""
        import pandas

        cells = self._heads().tolist()
        parts = (self.values, self.low, self.high, self.chance)
        rows = [
            [
                name,
                *cell,
                *(float(part[place, *cell]) for part in parts),
                int(self.n[place, cell[0]]),
                self.reasons[name][cell[0]],
            ]
            for place, name in enumerate(self.names)
            for cell in cells
        ]
        columns = ["score", "layer", "head", "value", "low", "high", "chance", "n", "reason"]
        return pandas.DataFrame(rows, columns=columns)

    def named(self, k: int = 3, *, kinds: Sequence[str] = (*KINDS, "sink", "copying")) -> Any:
        """Return the k heads that exceed uniform attention most, for every kind.

        Columns: kind rank layer head score low high chance margin. `margin` is the score less
        that of the head of the next rank, both less chance. Kinds that were not measured have no
        rows. The heads are the highest of all, which their own intervals do not account for.

        Raises:
            InputError: k is not a positive int, or a kind is no score.
        """
        import pandas

        checked_length("k", k)
        kinds = listed("kinds", kinds, f"some of {', '.join(self.names)}")
        if not kinds:
            raise InputError(message("kinds", "at least one score", kinds))
        rows = [row for kind in kinds for row in self._strongest(kind, k)]
        columns = "kind rank layer head score low high chance margin".split()
        return pandas.DataFrame(rows, columns=columns)

    def _strongest(self, kind: str, k: int) -> Iterator[list[Any]]:
        place, excess = self._place(kind), self.excess(kind).flatten()
        order = excess.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
        order = order[: int((~excess.isnan()).sum())]
        for rank, flat in enumerate(order[:k].tolist()):
            cell = divmod(flat, self.values.shape[-1])
            score, low, high, chance = (
                float(part[place, *cell])
                for part in (self.values, self.low, self.high, self.chance)
            )
            after = order[rank + 1] if rank + 1 < len(order) else None
            margin = float("nan") if after is None else float(excess[flat] - excess[after])
            yield [kind, rank + 1, *cell, score, low, high, chance, margin]

    def _heads(self) -> Tensor:
        _, layers, heads = self.values.shape
        return torch.cartesian_prod(torch.arange(layers), torch.arange(heads))

    def _place(self, score: str) -> int:
        return self.names.index(one_of("score", score, self.names))


def head_behaviour(
    model: Any,
    *,
    texts: str | Sequence[str] | None = None,
    seed: int = 0,
    samples: int = 20,
    length: int = 50,
    max_offset: int = 16,
    batch_size: int | Literal["auto"] = "auto",
    progress: bool = True,
) -> BehaviourResult:
    """Measure what every head attends to, on repeated random tokens and on text.

    A score is attention to the keys of a kind, averaged over the queries that see at least one,
    first within a sample (a random sequence, a text), then over samples. Queries, and keys but
    for `sink`, are tokens that were not added (BOS, CLS, SEP). `chance` is what uniform attention
    over the keys that a query sees would give the same queries.

    On distinct random tokens, given twice (Olsson et al. 2022, In-context Learning and Induction
    Heads): ``previous_token``, offset 1; ``duplicate``, from the second copy to the same token in
    the first; ``induction``, to the token after it; ``next_token``, offset −1, in models that look
    ahead; ``copying``, in logits, how much attending to tokens raises their own logits beyond the
    other tokens': Σ_j a_ij (v_j W_O W_U[:, t_j] − its mean over the sequence's tokens), averaged
    over queries i, on the direct path with the scales of norms frozen. Sinks count for nothing in
    it, so a head that rests on one copies little, whatever its weights say.

    On text: ``previous_token_text``, ``next_token_text``; ``duplicate_text``, to earlier
    occurrences of the token, and ``next_token_of_earlier``, to what followed them, both from
    offset 2 on; ``sink``, to sinks (added tokens, special ids, and vectors over ten times as long
    as the text's median), from tokens that are none; ``positional``, at the one offset up to
    `max_offset` that exceeds uniform attention most on half the texts, measured on the others;
    ``positional_r2``, how much of the deviation from uniform attention a profile by offset alone
    foretells on the others, sinks left out: 1 − Σ(a − foretold)² / Σ(a − uniform)².

    In a bidirectional model ``duplicate``, ``induction`` and their counterparts on text still ask
    for earlier occurrences only; chance counts the keys ahead as well.

    Args:
        model: a TransformerBridge.
        texts: texts; None for the bundled prose (those paragraphs of its held-out part that fit
            into the model's context).
        seed: seed of the random tokens, of the texts' halves and of the bootstrap.
        samples: random sequences.
        length: tokens in one copy.
        max_offset: longest offset tried for `positional`.
        batch_size: sequences a batch, or ``"auto"`` by tokens.
        progress: show progress on long work.

    Raises:
        InputError: an argument cannot be used; two copies do not fit into the model's context, or
            its vocabulary has fewer ordinary tokens than one.

    Examples:
        >>> given = {"texts": ["The river bank is closed today."] * 2, "samples": 2, "length": 9}
        >>> found = wvprobe.head_behaviour(model, **given, progress=False)
        >>> found["induction"].shape, found.excess("induction").shape
        (torch.Size([3, 6]), torch.Size([3, 6]))
    """
    seed = checked_seed(seed)
    arch = adapters.architecture(model)
    given = _bundled(model) if texts is None else checked_texts(texts)
    if checked_length("samples", samples) < 2 or checked_length("length", length) < 3:
        name, value, least = ("samples", samples, 2) if samples < 2 else ("length", length, 3)
        raise InputError(message(name, f"at least {least}", value))
    checked_length("max_offset", max_offset)
    generator = torch.Generator().manual_seed(seed)
    drawn = repeats(model, arch, samples, length, generator)
    on_random = on_repeats(model, arch, drawn, length, batch_size, progress)
    read = [tokenized(model, text) for text in given]
    on_text = OnText(model, arch, read, max_offset, generator, batch_size, progress)
    values, low, high, chance, n = _over_samples((on_random, on_text.rows), seed)
    settings = {
        "texts": "bundled prose, held-out" if texts is None else _digest(given),
        "n_texts": len(given),
        "samples": samples,
        "length": length,
        "max_offset": max_offset,
    }
    names = on_random.names + on_text.rows.names
    offset = on_text.offsets
    return BehaviourResult(
        provenance=adapters.provenance(model, seed=seed, **settings),
        values=values,
        low=low,
        high=high,
        chance=chance,
        n=n,
        positional_offset=offset.masked_fill(values[names.index("positional")].isnan(), torch.nan),
        names=names,
        reasons=_reasons(model, arch, names, n, length, len(given)),
    )


def _bundled(model: Any) -> list[str]:
    """Return the bundled paragraphs that fit into the model's context."""
    return [text for text in load_prose("held-out") if _fits(model, text)]


def _fits(model: Any, text: str) -> bool:
    try:
        encode(model, text)
    except TextLengthError:
        return False
    return True


def _digest(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _over_samples(
    parts: Sequence[Rows], seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return means, both ends of their intervals, chance, and how many samples had a number."""
    found = []
    for rows in parts:
        for values, chance in zip(rows.values, rows.chance, strict=True):
            found.append((values.nanmean(dim=0), *_interval(values, seed), chance.nanmean(dim=0)))
    counts = [(~rows.values.isnan()).any(dim=-1).sum(dim=1) for rows in parts]
    values, low, high, chance = (torch.stack(column) for column in zip(*found, strict=True))
    return values, low, high, chance, torch.cat(counts)


def _interval(values: Float[Tensor, "sample layer head"], seed: int) -> tuple[Tensor, Tensor]:
    """Return the interval of each mean over the samples that have a number."""
    low, high = torch.full((2, *values.shape[1:]), torch.nan, dtype=torch.float64)
    present = ~values.isnan().any(dim=-1)  # of one layer's heads, all have a number or none
    # Layers with the same samples are resampled at once.
    for which in present.T.unique(dim=0):
        if int(which.sum()) < 2:
            continue
        layers = (present.T == which).all(dim=-1)
        low[layers], high[layers] = mean_interval(values[which][:, layers], seed=seed)
    return low, high


def _reasons(
    model: Any,
    arch: Architecture,
    names: Sequence[str],
    n: Int[Tensor, "score layer"],
    length: int,
    n_texts: int,
) -> dict[str, tuple[str, ...]]:
    """Say for every score and layer why there is no number, where there is none."""
    windows = Masks(model, arch).windows
    head = adapters.unembedding(model, arch)

    def reason(name: str, layer: int) -> str:
        window = windows[layer]
        if name.startswith("next_token") and name != "next_token_of_earlier" and arch.causal:
            return "the mask hides what lies ahead"
        if name == "copying":
            return f"no logits: {head}"
        if name.startswith("positional") and n_texts < 2:
            return "offsets are chosen on one half of the texts, which needs two at least"
        if name in REPEAT_SCORES and window is not None:
            return f"a copy of {length} tokens lies outside the layer's window of {window}"
        if name == "sink":
            return "no token of the texts has a sink in sight"
        return "no token of the texts has such a key in sight"

    return {
        name: tuple("" if count else reason(name, layer) for layer, count in enumerate(counts))
        for name, counts in zip(names, n.tolist(), strict=True)
    }
