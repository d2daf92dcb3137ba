"""Do values carry content and patterns routing? Each exchanged alone, over many pairs of texts.

At a destination a head's output is o(P, V) = P V W_O, P the destination's row of the pattern. For
two texts the difference splits exactly,

    o_bb − o_aa = (o_ba − o_aa) + (o_ab − o_aa) + (o_bb − o_ba − o_ab + o_aa),

first index the pattern's text, second the values': what the other pattern does, what the other
values do, and what only both do. Halving the last term gives each part's Shapley value (Shapley
1953), which is also the average over the two orders, and over the two directions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._equal_texts import MatchedPair, check_equal_lengths, prose_of_length, sense_pairs
from wvprobe._progress import progress as progress_bar
from wvprobe._shapes import floating
from wvprobe._statistics import mean_interval
from wvprobe._targets import check_finite, position_in
from wvprobe._types import Result
from wvprobe._validate import indices, length, message
from wvprobe._validate import pairs as checked_pairs
from wvprobe._validate import seed as checked_seed
from wvprobe._writes import head_values, output_factor, output_map
from wvprobe.activations import Activations, read_sites
from wvprobe.adapters import Architecture
from wvprobe.errors import InputError, ShapeError
from wvprobe.words import encode

# Pairs read together: as many, and entries of a head's pattern in as many.
_PAIRS, _PATTERN_ENTRIES = 32, 16_384
MEASURES = (
    "content_value",
    "content_pattern",
    "interaction",
    "toward_value",
    "toward_pattern",
    "routing_value",
    "routing_pattern",
)
# Contrast -> what is above 0 where values carry content, and patterns routing: first − second.
CONTRASTS = {
    "content": ("content_value", "content_pattern"),
    "toward": ("toward_value", "toward_pattern"),
    "routing": ("routing_pattern", "routing_value"),
}


@dataclass(frozen=True)
class DissociationResult(Result):
    """What exchanged values and exchanged patterns do to each head's output, pair by pair.

    The measures, each the average over the two directions; E is the mean of ‖o_aa‖² and ‖o_bb‖²:

    * ``content_value``, ``content_pattern``: how far the output moves, ‖Δ‖ / √E, when the values
      alone, or the pattern alone, are the other text's. ``interaction``: ‖o_bb − o_ba − o_ab +
      o_aa‖ / √E.
    * ``toward_value``, ``toward_pattern``: how much of the way to the other text's output each
      goes: its Shapley value times o_bb − o_aa, over E. The two sum to ‖o_bb − o_aa‖² / E.
    * ``routing_value``, ``routing_pattern``: how far the places move that the output comes from:
      half the sum of absolute differences of ‖a_j v_j W_O‖ / Σ_j ‖a_j v_j W_O‖, from 0 to 1.

    NaN where a head's output is 0 in both texts.

    Attributes:
        values: [measure, pair, layer, head], in the order of ``MEASURES``.
        control: [measure, pair, layer, head], the same for the first text of each pair and
            unrelated prose of its length, at the same position; None where it was left out.
        layers: the layers of the third axis.
        groups: what each pair belongs to; pairs of a group (a word) are not independent, so that
            intervals resample groups.
        texts: the pairs.
        positions: the destination of each pair.

    Examples:
        >>> from wvprobe.dissociation import double_dissociation
        >>> pairs = [("The river bank.", "The old bank."), ("The old river.", "The bank river.")]
        >>> found = double_dissociation(model, pairs, control=False, progress=False)
        >>> len(found.summary()) > 0
        True
    """

    values: Float[Tensor, "measure pair layer head"]
    control: Float[Tensor, "measure pair layer head"] | None
    layers: tuple[int, ...]
    groups: tuple[str, ...]
    texts: tuple[tuple[str, str], ...]
    positions: tuple[int, ...]

    AXES: ClassVar = {name: ("measure", "pair", "layer", "head") for name in ("values", "control")}

    def measure(self, name: str, *, control: bool = False) -> Float[Tensor, "pair layer head"]:
        """Return a measure, or a contrast (``content``, ``toward``, ``routing``) of two.

        Raises:
            InputError: no such measure, or there is no control.
        """
        values = self.control if control else self.values
        if values is None:
            raise InputError("there is no control: run double_dissociation with control=True.")
        if name in CONTRASTS:
            first, second = CONTRASTS[name]
            return self.measure(first, control=control) - self.measure(second, control=control)
        if name not in MEASURES:
            expected = f"one of {', '.join((*CONTRASTS, *MEASURES))}"
            raise InputError(message("name", expected, name))
        return values[MEASURES.index(name)]

    def interval(
        self, name: str, *, control: bool = False
    ) -> tuple[
        Float[Tensor, "layer head"], Float[Tensor, "layer head"], Float[Tensor, "layer head"]
    ]:
        """Return a measure's mean over groups and its 95 % bootstrap interval over groups."""
        rows = _group_means(self.measure(name, control=control), self.groups)
        low, high = mean_interval(rows, seed=self.provenance.seed or 0)
        return rows.mean(dim=0), low, high

    def summary(self) -> Any:
        """Return one row a contrast, for the pairs and for the control.

        Columns: pairs (``matched`` or ``control``) contrast mean low high (of the mean over all
        heads), heads, positive (heads whose mean is above 0), above and below (heads whose
        interval is), n_pairs, n_groups. NaN heads are left out.
        """
        import pandas

        rows = []
        for control in (False, True)[: 1 + (self.control is not None)]:
            for name in CONTRASTS:
                each = _group_means(self.measure(name, control=control), self.groups)
                overall = each.flatten(1).nanmean(dim=1)
                ends = mean_interval(overall, seed=self.provenance.seed or 0)
                mean, low, high = self.interval(name, control=control)
                rows.append(
                    {
                        "pairs": "control" if control else "matched",
                        "contrast": name,
                        "mean": float(overall.mean()),
                        "low": float(ends[0]),
                        "high": float(ends[1]),
                        "heads": int((~mean.isnan()).sum()),
                        "positive": int((mean > 0).sum()),
                        "above": int((low > 0).sum()),
                        "below": int((high < 0).sum()),
                        "n_pairs": len(self.groups),
                        "n_groups": len(set(self.groups)),
                    }
                )
        return pandas.DataFrame(rows)

    def to_frame(self) -> Any:
        """Return one row a head, means over groups with 95 % bootstrap intervals.

        Columns: layer head, then content toward routing, each with _low and _high, then the seven
        measures, then, with a control, control_content control_toward control_routing, each with
        _low and _high.
        """
        import pandas

        n_heads = self.values.shape[-1]
        columns: dict[str, Any] = {
            "layer": [layer for layer in self.layers for _ in range(n_heads)],
            "head": list(range(n_heads)) * len(self.layers),
        }

        def add(name: str, control: bool) -> None:
            prefix = "control_" * control + name
            for end, values in zip(
                ("", "_low", "_high"), self.interval(name, control=control), strict=True
            ):
                columns[prefix + end] = values.flatten().tolist()

        for name in CONTRASTS:
            add(name, False)
        for name in MEASURES:
            columns[name] = _group_means(self.measure(name), self.groups).mean(0).flatten().tolist()
        for name in CONTRASTS if self.control is not None else ():
            add(name, True)
        return pandas.DataFrame(columns)


def _group_means(
    values: Float[Tensor, "pair layer head"], groups: Sequence[str]
) -> Float[Tensor, "group layer head"]:
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    of = torch.tensor([numbers[group] for group in groups])
    return torch.stack([values[of == number].nanmean(dim=0) for number in range(len(numbers))])


def double_dissociation(
    model: Any,
    pairs: Sequence[tuple[str, str]] | None = None,
    *,
    destination: int | str | None = None,
    layers: Sequence[int] | int | None = None,
    n_pairs: int = 200,
    control: bool = True,
    seed: int = 0,
    progress: bool = True,
) -> DissociationResult:
    """Exchange only a head's pattern, or only its values, between texts, over many pairs.

    Two questions, which can be answered differently: does the destination's output move more when
    the values are exchanged (content), and do the places that it comes from move more when the
    pattern is (routing)? Both measures, and how much of the way to the other text's own output
    each part goes, are computed from the two texts' own patterns and values: exact, without a
    forward of a mixture. See :class:`DissociationResult`.

    Without `pairs` they are made of the bundled sentences: one word in two senses, the same tokens
    at the same position, sentences cut behind the word to one length, none used twice; for a
    decoder only sentences in which the sense is told before the word. The destination is the word.

    Query heads that share a key-value head are each measured with their own pattern and W_O.

    Args:
        model: a TransformerBridge.
        pairs: pairs of texts with the same number of tokens.
        destination: where `pairs` are read: a token position or a word at the same position in
            both; None for the last token.
        layers: layers to measure, None for all.
        n_pairs: how many pairs to make at most, where none are given.
        control: also pair each first text with unrelated prose of its length.
        seed: seed of the choice of pairs, of the control, and of the bootstrap.
        progress: show a bar.

    Raises:
        InputError: texts of a pair differ in length, or their destination in position; fewer than
            two pairs.
        WordError: the word is not in a text.

    Examples:
        >>> from wvprobe.dissociation import double_dissociation
        >>> pairs = [("The river bank.", "The old bank."), ("The old river.", "The bank river.")]
        >>> found = double_dissociation(model, pairs, control=False, progress=False)
        >>> found.values.shape[1:]  # pair, layer, head
        torch.Size([2, 3, 6])
    """
    seed = checked_seed(seed)
    arch = adapters.architecture(model)
    chosen = indices("layers", layers, arch.n_layers, "layers")
    generator = torch.Generator().manual_seed(seed)
    if pairs is None:
        matched = sense_pairs(model, length("n_pairs", n_pairs), generator)
    else:
        matched = _given(model, pairs, destination)
    read = _Reading(model, arch, chosen, [pair.position for pair in matched])
    with progress_bar(len(matched) * (1 + control), "pairs of texts", progress) as done:
        values = read.measured([pair.texts for pair in matched], done)
        others = None
        if control:
            others = read.measured(_control(model, matched, generator), done)
    settings = {
        "pairs": "bundled senses" if pairs is None else [list(pair.texts) for pair in matched],
        "n_pairs": len(matched),
        "destination": destination,
        "layers": list(chosen),
        "control": control,
    }
    return DissociationResult(
        provenance=adapters.provenance(model, seed=seed, **settings),
        values=values,
        control=others,
        layers=chosen,
        groups=tuple(pair.group for pair in matched),
        texts=tuple(pair.texts for pair in matched),
        positions=tuple(pair.position for pair in matched),
    )


def _given(
    model: Any, pairs: Sequence[tuple[str, str]], destination: int | str | None
) -> tuple[MatchedPair, ...]:
    """Check pairs of the caller's own; each is a group of its own."""
    both = checked_pairs("pairs", pairs, "at least two pairs of texts")
    if len(both) < 2:
        raise InputError(message("pairs", "at least two pairs of texts", pairs))
    found = []
    for number, (a, b) in enumerate(both):
        encodings = [encode(model, text) for text in (a, b)]
        check_equal_lengths((a, b), encodings)
        at = [position_in(encoding, destination, "destination") for encoding in encodings]
        if at[0] != at[1]:
            expected = f"at one position in both texts of pair {number}"
            raise InputError(message("destination", expected, f"{at[0]} and {at[1]}"))
        found.append(MatchedPair((a, b), at[0], str(number)))
    return tuple(found)


def _control(
    model: Any, matched: Sequence[MatchedPair], generator: torch.Generator
) -> list[tuple[str, str]]:
    """Return each pair's first text beside unrelated prose of its length."""
    sizes = [len(encode(model, pair.texts[0]).ids) for pair in matched]
    prose = {
        size: iter(prose_of_length(model, size, sizes.count(size), generator))
        for size in sorted(set(sizes))
    }
    return [(p.texts[0], next(prose[size])) for p, size in zip(matched, sizes, strict=True)]


class _Reading:
    """Pairs of texts, read some at a time."""

    def __init__(
        self, model: Any, arch: Architecture, layers: Sequence[int], positions: Sequence[int]
    ) -> None:
        self.model, self.arch, self.layers, self.positions = model, arch, layers, positions
        self.factors = torch.stack(
            [output_factor(output_map(model, arch, layer)) for layer in layers]
        )

    def measured(
        self, texts: Sequence[tuple[str, str]], done: Callable[[int], None]
    ) -> Float[Tensor, "measure pair layer head"]:
        """Return the measures of pairs of texts, each at its destination."""
        longest = max(len(encode(self.model, text).ids) for pair in texts for text in pair)
        step = min(max(_PATTERN_ENTRIES // longest**2, 1), _PAIRS)
        rows = []
        for start in range(0, len(texts), step):
            flat = [text for pair in texts[start : start + step] for text in pair]
            seen = read_sites(self.model, flat, ["pattern", "v"], layers=self.layers)
            for item in range(0, len(flat), 2):
                at = self.positions[start + item // 2]
                both = [self._text(seen, text, at) for text in (item, item + 1)]
                (pattern_a, written_a), (pattern_b, written_b) = both
                rows.append(moves(pattern_a, pattern_b, written_a, written_b))
            done(len(flat) // 2)
        return torch.stack(rows, dim=1)

    def _text(self, seen: Activations, item: int, at: int) -> tuple[Tensor, Tensor]:
        """Return a text's row of the pattern, [layer, head, key], and v W_O of its keys."""
        size = len(seen.tokens[item])
        pattern = check_finite("patterns", seen["pattern"][item, :, :, at, :size].double())
        values = [
            head_values(self.arch, seen["v"][item, :size, row]) for row in range(len(self.layers))
        ]
        return pattern, check_finite("values", torch.stack(values)) @ self.factors


def moves(
    pattern_a: Float[Tensor, "*b key"],
    pattern_b: Float[Tensor, "*b key"],
    written_a: Float[Tensor, "*b key r"],
    written_b: Float[Tensor, "*b key r"],
) -> Float[Tensor, " measure *b"]:
    """Return all measures of heads at one destination in two texts.

    Args:
        pattern_a: the destination's row of the pattern in text a.
        pattern_b: in text b.
        written_a: v_j W_O of every key in text a, in any orthonormal basis of what W_O spans.
        written_b: in text b.

    Raises:
        InputError: one is no tensor of finite numbers.
        ShapeError: they do not go together.

    Examples:
        >>> from wvprobe.dissociation import moves
        >>> pattern, written = torch.tensor([0.5, 0.5]), torch.eye(2)
        >>> bool(moves(pattern, pattern, written, written).abs().nan_to_num().max() < 1e-6)
        True
    """
    patterns = {"pattern_a": pattern_a, "pattern_b": pattern_b}
    written = {"written_a": written_a, "written_b": written_b}
    for name, given in patterns.items():
        floating(name, given, ("key",), batch=True)
    for name, given in written.items():
        floating(name, given, ("key", "r"), batch=True)
    sizes = {given.shape for given in patterns.values()} | {w.shape[:-1] for w in written.values()}
    if len(sizes) > 1 or written_a.shape != written_b.shape:
        shapes = {name: list(given.shape) for name, given in (patterns | written).items()}
        expected = "patterns […, key] and what is written […, key, r]"
        raise ShapeError(message("the arguments", expected, shapes))
    texts = ((pattern_a, written_a), (pattern_b, written_b))
    # output[p][v]: the pattern of text p, the values of text v.
    output = [[torch.einsum("...j,...jr->...r", p, v) for _, v in texts] for p, _ in texts]
    (aa, ab), (ba, bb) = output
    energy = (aa.square().sum(dim=-1) + bb.square().sum(dim=-1)) / 2
    energy = torch.where(energy > 0, energy, torch.full_like(energy, torch.nan))
    size = energy.sqrt()
    by_value, by_pattern = ((ab - aa) + (bb - ba)) / 2, ((ba - aa) + (bb - ab)) / 2

    def far(one: Tensor, other: Tensor) -> Tensor:
        return ((one + other) / 2) / size

    places = [[_places(p, v) for _, v in texts] for p, _ in texts]
    return torch.stack(
        [
            far((ab - aa).norm(dim=-1), (ba - bb).norm(dim=-1)),
            far((ba - aa).norm(dim=-1), (ab - bb).norm(dim=-1)),
            (bb - ba - ab + aa).norm(dim=-1) / size,
            (by_value * (bb - aa)).sum(dim=-1) / energy,
            (by_pattern * (bb - aa)).sum(dim=-1) / energy,
            (_apart(places[0][1], places[0][0]) + _apart(places[1][0], places[1][1])) / 2,
            (_apart(places[1][0], places[0][0]) + _apart(places[0][1], places[1][1])) / 2,
        ]
    )


def _places(
    pattern: Float[Tensor, "*b key"], written: Float[Tensor, "*b key r"]
) -> Float[Tensor, "*b key"]:
    """Return the share of every key in what is moved, by the length of what comes from it."""
    lengths = pattern * written.norm(dim=-1)
    return lengths / lengths.sum(dim=-1, keepdim=True)


def _apart(one: Tensor, other: Tensor) -> Tensor:
    return (one - other).abs().sum(dim=-1) / 2
