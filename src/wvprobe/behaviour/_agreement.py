"""How well what heads do agrees with what their weights say, as rank correlation over heads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from wvprobe._shapes import floating
from wvprobe._statistics import mean_interval, spearman
from wvprobe._types import Result
from wvprobe._validate import index, instance, message, one_of
from wvprobe._validate import pairs as checked_pairs
from wvprobe._validate import seed as checked_seed
from wvprobe.behaviour._heads import BehaviourResult
from wvprobe.errors import InputError, ShapeError

_DRAWS, _NORMAL = 2000, 1.959963984540054
_FEWEST = 3  # heads that a rank correlation is taken of


@dataclass(frozen=True)
class AgreementResult(Result):
    """Spearman's rank correlation over heads between scores of behaviour and of weights.

    Attributes:
        rho: [pair] over all heads that have both numbers.
        low: [pair] lower end of its 95 % interval (Fisher's z, deviation from the bootstrap).
        high: [pair] upper end.
        within: [pair] mean over layers of the correlation among one layer's heads: what is left
            of `rho` when both scores merely change with depth. NaN where no layer has three heads.
        within_low: [pair] lower end of its 95 % bootstrap interval over layers.
        within_high: [pair] upper end.
        n_heads: [pair] heads that take part.
        n_layers: [pair] layers that they stand in.
        behaviour: [pair, layer, head] the scores that were correlated; NaN where a head takes no
            part.
        weights: [pair, layer, head] likewise.
        names: of each pair, behaviour and weights.
        resample: what the interval of `rho` resamples, ``layer`` or ``head``.

    Examples:
        >>> from wvprobe.behaviour import behaviour_agreement
        >>> given = {"texts": ["The river bank is closed today."] * 2, "samples": 2, "length": 9}
        >>> found = wvprobe.head_behaviour(model, **given, progress=False)
        >>> rank = wvprobe.copying_scores(heads, rows=50, progress=False).rank
        >>> agreement = behaviour_agreement(found, {"rank": rank}, pairs=[("copying", "rank")])
        >>> bool(agreement.low <= agreement.rho), bool(agreement.rho <= agreement.high)
        (True, True)
    """

    rho: Float[Tensor, " pair"]
    low: Float[Tensor, " pair"]
    high: Float[Tensor, " pair"]
    within: Float[Tensor, " pair"]
    within_low: Float[Tensor, " pair"]
    within_high: Float[Tensor, " pair"]
    n_heads: Int[Tensor, " pair"]
    n_layers: Int[Tensor, " pair"]
    behaviour: Float[Tensor, "pair layer head"]
    weights: Float[Tensor, "pair layer head"]
    names: tuple[tuple[str, str], ...]
    resample: str

    AXES: ClassVar = {
        **{name: ("pair",) for name in ("rho", "low", "high", "n_heads", "n_layers")},
        **{name: ("pair",) for name in ("within", "within_low", "within_high")},
        "behaviour": ("pair", "layer", "head"),
        "weights": ("pair", "layer", "head"),
    }

    def to_frame(self) -> Any:
        """Return one row a pair of scores.

        Columns: behaviour weights rho low high within within_low within_high n_heads n_layers.
        """
        import pandas

        names = "rho low high within within_low within_high n_heads n_layers".split()
        columns = {name: getattr(self, name).tolist() for name in names}
        behaviour, weights = zip(*self.names, strict=True)
        return pandas.DataFrame({"behaviour": behaviour, "weights": weights, **columns})

    def heads_frame(self) -> Any:
        """Return one row a pair of scores and head: behaviour weights layer head and both values.

        Columns: behaviour weights layer head behaviour_value weights_value.
        """
        import pandas

        rows = [
            [*names, layer, head, float(done[layer, head]), float(said[layer, head])]
            for names, done, said in zip(self.names, self.behaviour, self.weights, strict=True)
            for layer, head in (~done.isnan()).nonzero().tolist()
        ]
        columns = "behaviour weights layer head behaviour_value weights_value".split()
        return pandas.DataFrame(rows, columns=columns)


def behaviour_agreement(
    behaviour: BehaviourResult,
    weights: Mapping[str, Float[Tensor, "layer head"]],
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    resample: str = "layer",
    seed: int = 0,
) -> AgreementResult:
    """Correlate scores of behaviour with numbers read off the weights, rank by rank over heads.

        offsets = wvprobe.offset_profile(heads, range(64), mean_input=mean_input(model).mean)
        copying = wvprobe.copying_scores(heads)
        through_keys = wvprobe.composition(heads, "K")
        first = found.named(1, kinds=["previous_token"]).iloc[0]
        behaviour_agreement(
            found,
            {
                "b(1)": offsets.weights()[..., offsets.offsets.index(1)],
                "copying rank": copying.rank,
                "K-composition": composed_with(through_keys.scores, first["layer"], first["head"]),
            },
            pairs=[("previous_token", "b(1)"), ("copying", "copying rank"),
                   ("induction", "K-composition")],
        )

    Heads of one model are no independent draws: those of a layer read the same stream, and query
    heads of one key-value head share weights. The interval therefore resamples layers, each with
    all its heads; ``resample="head"`` treats heads as independent, and is too narrow as a rule.
    Whole models would be the unit for a statement about models at large.

    Args:
        behaviour: of :func:`wvprobe.head_behaviour`.
        weights: name -> a number a head, [layer, head]; NaN where a head has none.
        pairs: which score of behaviour to hold against which of `weights`; None for all.
        resample: ``layer`` or ``head``.
        seed: seed of the bootstrap.

    Raises:
        InputError: unknown names, or fewer than three heads with both numbers.
        ShapeError: a tensor that is not [layer, head] of the model.

    Examples:
        >>> from wvprobe.behaviour import behaviour_agreement
        >>> given = {"texts": ["The river bank is closed today."] * 2, "samples": 2, "length": 9}
        >>> found = wvprobe.head_behaviour(model, **given, progress=False)
        >>> rank = wvprobe.copying_scores(heads, rows=50, progress=False).rank
        >>> agreement = behaviour_agreement(found, {"rank": rank}, pairs=[("copying", "rank")])
        >>> len(agreement.to_frame())
        1
    """
    seed = checked_seed(seed)
    one_of("resample", resample, ("layer", "head"))
    instance("behaviour", behaviour, BehaviourResult, "Use head_behaviour(model).")
    instance("weights", weights, Mapping, "Name the scores: {'copying': found.rank}.")
    shape = behaviour.values.shape[1:]
    for name, values in weights.items():
        if not isinstance(values, Tensor) or values.is_meta:
            raise InputError(message(f"weights[{name!r}]", "a tensor", type(values).__name__))
        if values.shape != shape:
            shown = f"shape {list(values.shape)}"
            raise ShapeError(message(f"weights[{name!r}]", f"[layer, head] = {list(shape)}", shown))
    if pairs is None:
        pairs = [(one, other) for one in behaviour.names for other in weights]
        # Scores that a model has not are no pairs that anyone asked for.
        pairs = [pair for pair in pairs if bool((~behaviour[pair[0]].isnan()).any())]
    pairs = checked_pairs("pairs", pairs, "(behaviour's score, weights' score) pairs")
    if not pairs:
        raise InputError(message("weights", "at least one score", dict(weights)))
    parts = []
    for score, name in pairs:
        one_of("pairs", name, tuple(weights))
        done, said = behaviour[score].double(), weights[name].detach().cpu().double()
        parts.append(_agreement((score, name), done, said, resample, seed))
    settings = {"behaviour_seed": behaviour.provenance.seed, "resample": resample}
    return AgreementResult(
        provenance=replace(
            behaviour.provenance,
            seed=seed,
            settings={**behaviour.provenance.settings, **settings, "weights": list(weights)},
        ),
        **{name: torch.stack([part[name] for part in parts]) for name in parts[0]},
        names=tuple((score, name) for score, name in pairs),
        resample=resample,
    )


def composed_with(
    scores: Float[Tensor, "layer head layer head"], layer: int, head: int
) -> Float[Tensor, "layer head"]:
    """Return every head's composition with one writer; NaN for heads that do not come after it.

    Args:
        scores: of :func:`wvprobe.composition`, [writer layer, writer head, reader layer, reader
            head].
        layer: the writer's layer.
        head: the writer.

    Raises:
        InputError: no such layer or head, or scores that are not finite.
        ShapeError: scores of other axes.

    Examples:
        >>> from wvprobe.behaviour import composed_with
        >>> found = composed_with(wvprobe.composition(heads, "K").scores, 0, 3)
        >>> bool(found[0].isnan().all()), bool(found[1:].isnan().any())
        (True, False)
    """
    axes = ("writer layer", "writer head", "reader layer", "reader head")
    scores = floating("scores", scores, axes, hint="Use wvprobe.composition(heads, mode).scores.")
    if scores.shape[:2] != scores.shape[2:]:
        shown = f"shape {list(scores.shape)}"
        raise ShapeError(message("scores", "of as many writers as readers", shown))
    layer = index("layer", layer, scores.shape[0], "layers")
    found = scores[layer, index("head", head, scores.shape[1], "heads")].clone()
    found[: layer + 1] = torch.nan
    return found


def _agreement(
    pair: tuple[str, str], done: Tensor, said: Tensor, resample: str, seed: int
) -> dict[str, Tensor]:
    both = ~(done.isnan() | said.isnan())
    if int(both.sum()) < _FEWEST:
        expected = f"with {_FEWEST} heads that have both numbers"
        raise InputError(message("pairs", expected, f"{pair}: {int(both.sum())} heads"))
    layers = both.nonzero()[:, 0]
    x, y = done[both], said[both]
    rho = spearman(x, y, torch.ones(1, len(x), dtype=torch.float64))[0]
    drawn = spearman(x, y, _counts(layers if resample == "layer" else torch.arange(len(x)), seed))
    low, high = _interval(rho, drawn)
    within = torch.stack([_within(*layer) for layer in zip(done, said, both, strict=True)])
    within = within[~within.isnan()]
    nothing = torch.full((2,), torch.nan, dtype=torch.float64)
    within_low, within_high = mean_interval(within, seed=seed) if len(within) > 1 else nothing
    return {
        "rho": rho,
        "low": low,
        "high": high,
        "within": within.mean(),
        "within_low": within_low,
        "within_high": within_high,
        "n_heads": both.sum(),
        "n_layers": torch.tensor(len(layers.unique())),
        "behaviour": done.masked_fill(~both, torch.nan),
        "weights": said.masked_fill(~both, torch.nan),
    }


def _interval(rho: Float[Tensor, ""], drawn: Float[Tensor, " draw"]) -> tuple[Tensor, Tensor]:
    """Return the 95 % interval: Fisher's z of ρ ± 1.96 times its bootstrap standard deviation.

    Layers that a resample holds twice are alike, which takes ranks from its spread: percentiles
    of drawn ρ lie too low, and can leave out ρ itself.
    """
    drawn = drawn[~drawn.isnan()]
    centre, spread = _fisher(rho), _fisher(drawn).std() if len(drawn) > 1 else torch.nan
    return torch.tanh(centre - _NORMAL * spread), torch.tanh(centre + _NORMAL * spread)


def _fisher(rho: Tensor) -> Tensor:
    # Perfect agreement has no finite z.
    return torch.atanh(rho.clamp(-1 + 1e-12, 1 - 1e-12))


def _within(done: Tensor, said: Tensor, both: Bool[Tensor, " head"]) -> Float[Tensor, ""]:
    """Return the correlation among one layer's heads; NaN where it has too few."""
    if int(both.sum()) < _FEWEST:
        return done.new_full((), torch.nan)
    return spearman(done[both], said[both], done.new_ones(1, int(both.sum())))[0]


def _counts(cluster: Int[Tensor, " head"], seed: int) -> Float[Tensor, "draw head"]:
    """Return how often each head is in each resample of the clusters."""
    known, which = cluster.unique(return_inverse=True)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(known), (_DRAWS, len(known)), generator=generator)
    counts = torch.zeros(_DRAWS, len(known), dtype=torch.float64)
    counts.scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float64))
    return counts[:, which]
