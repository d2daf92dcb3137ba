"""By which law a difference grows with depth: four laws, word by word, told apart by AICc."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from wvprobe._statistics import mean_interval
from wvprobe._types import Provenance, Result
from wvprobe._validate import instance, length, listed, message, one_of
from wvprobe._validate import seed as checked_seed
from wvprobe.contextual_drift._laws import LAWS, N_PARAMETERS, Fit, fit_law
from wvprobe.contextual_drift._result import DriftResult
from wvprobe.errors import InputError, ShapeError

# With fewer layers the laws' curves lie too close together.
LEAST_LAYERS = 12
# A curve whose non-zero part is shorter is not fitted.
_LEAST_POINTS = 8
# Below this share of the largest value lies the rounding of single-precision scores.
_ZERO = 1e-5
ERRORS = ("absolute", "relative")
# What may come of a word: a law that rises, or a best law that falls.
OUTCOMES = (*LAWS, "falling")


@dataclass(frozen=True)
class GrowthResult(Result):
    """Which law the growth of each word's curve follows best.

    Attributes:
        aicc: [metric, word, law] corrected Akaike criterion (Hurvich & Tsai 1989); least is best.
        r2: [metric, word, law] 1 − residual over total sum of squares, of what was fitted.
        parameters: [metric, word, law, parameter] a, b and for the logistic c, see
            :func:`growth_law`; NaN where a law has fewer.
        converged: [metric, word, law] False where a parameter ran to the end of its range.
        first: [metric, word] index of the first layer that is not zero.
        winner: [metric, word] number of the best law in `laws`, −1 where nothing was fitted.
        rising: [metric, word] whether the best law's curve rises from first to last layer.
        shares: [metric, outcome] share of words in which a law is best and rises, and last of
            those whose best law falls. They sum to 1.
        low: [metric, outcome] lower end of the 95 % bootstrap interval over words.
        high: [metric, outcome] upper end.
        n: [metric] how many words were fitted.
        metrics: the curves' names.
        words: the words.
        laws: ``linear power exponential logistic``.
        errors: which errors were made least, ``absolute`` or ``relative``.
        untestable: why nothing was fitted, or "".

    Examples:
        >>> from wvprobe.contextual_drift import growth_law
        >>> curves = torch.exp(0.2 * torch.arange(17.0)) + 0.001 * torch.rand(4, 17)
        >>> found = growth_law({"distance": curves}, n_layers=16)
        >>> found.laws, found.untestable
        (('linear', 'power', 'exponential', 'logistic'), '')
    """

    aicc: Float[Tensor, "metric word law"]
    r2: Float[Tensor, "metric word law"]
    parameters: Float[Tensor, "metric word law parameter"]
    converged: Bool[Tensor, "metric word law"]
    first: Int[Tensor, "metric word"]
    winner: Int[Tensor, "metric word"]
    rising: Bool[Tensor, "metric word"]
    shares: Float[Tensor, "metric outcome"]
    low: Float[Tensor, "metric outcome"]
    high: Float[Tensor, "metric outcome"]
    n: Int[Tensor, " metric"]
    metrics: tuple[str, ...]
    words: tuple[str, ...]
    laws: tuple[str, ...]
    errors: str
    untestable: str

    AXES: ClassVar = {
        "aicc": ("metric", "word", "law"),
        "r2": ("metric", "word", "law"),
        "parameters": ("metric", "word", "law", "parameter"),
        "converged": ("metric", "word", "law"),
        "first": ("metric", "word"),
        "winner": ("metric", "word"),
        "rising": ("metric", "word"),
        "shares": ("metric", "outcome"),
        "low": ("metric", "outcome"),
        "high": ("metric", "outcome"),
        "n": ("metric",),
    }

    def to_frame(self) -> Any:
        """Return one row a metric, word and law.

        Columns: metric word law aicc delta r2 a b c converged first winner rising; delta is AICc
        minus the best law's.
        """
        import pandas

        rows = []
        for m, metric in enumerate(self.metrics):
            for w, word in enumerate(self.words):
                if int(self.winner[m, w]) < 0:
                    continue
                least = float(self.aicc[m, w].min())
                for number, law in enumerate(self.laws):
                    a, b, c = self.parameters[m, w, number].tolist()
                    rows.append(
                        {
                            "metric": metric,
                            "word": word,
                            "law": law,
                            "aicc": float(self.aicc[m, w, number]),
                            "delta": float(self.aicc[m, w, number]) - least,
                            "r2": float(self.r2[m, w, number]),
                            **{"a": a, "b": b, "c": c},
                            "converged": bool(self.converged[m, w, number]),
                            "first": int(self.first[m, w]),
                            "winner": int(self.winner[m, w]) == number,
                            "rising": bool(self.rising[m, w]),
                        }
                    )
        names = "metric word law aicc delta r2 a b c converged first winner rising"
        return pandas.DataFrame(rows, columns=names.split())

    def summary(self) -> Any:
        """Return one row a metric and outcome.

        Columns: metric law share low high n median_r2; law is one of the four, rising, or
        ``falling``; median_r2 is of the best laws of all words. Empty where nothing was fitted.
        """
        import pandas

        rows = []
        for m, metric in enumerate(self.metrics):
            fitted = self.winner[m] >= 0
            if not bool(fitted.any()):
                continue
            best = self.r2[m, fitted].gather(-1, self.winner[m, fitted, None])
            for number, outcome in enumerate(OUTCOMES):
                ends = (self.shares, self.low, self.high)
                share, low, high = (float(end[m, number]) for end in ends)
                rows.append(
                    [metric, outcome, share, low, high, int(self.n[m]), float(best.median())]
                )
        names = ["metric", "law", "share", "low", "high", "n", "median_r2"]
        return pandas.DataFrame(rows, columns=names)


def growth_law(
    curves: DriftResult | Mapping[str, Tensor],
    *,
    words: Sequence[str] | None = None,
    n_layers: int | None = None,
    errors: str = "absolute",
    seed: int = 0,
) -> GrowthResult:
    """Fit four laws to each word's curve over layers, and say which is best how often.

    With x = 1 at the first layer where the curve is not zero (a rotary model's embedding has
    none):

        linear       y = a + b x
        power        y = a x^b
        exponential  y = a e^(b x)
        logistic     y = a / (1 + e^(−b (x − c)))

    AICc = n ln(RSS / n) + 2p + 2p (p + 1) / (n − p − 1), p the parameters and the variance
    (Burnham & Anderson 2002, §2.4). RSS is of y itself, or with ``errors="relative"`` of ln y,
    the same for all four laws; the late layers rule the one, and all layers alike the other.
    Layers of one word are no independent observations, so that AICc orders laws, and its
    differences are no odds. The independent unit is the word, which alone is resampled.

    Args:
        curves: of :func:`~wvprobe.contextual_drift.drift`, or metric -> [word, layer]: distances
            between senses over streams, |Δs| over blocks (see
            :func:`~wvprobe.contextual_drift.score_drift`). Curves with NaN, or with fewer than 8
            layers that are not zero, are not fitted.
        words: the words' names; None for those of a DriftResult, or numbers.
        n_layers: blocks of the model; None: one less than the layers of the longest curve, since
            streams are counted from the embedding.
        errors: which errors are made least: ``absolute`` or ``relative``.
        seed: seed of the bootstrap.

    Returns:
        A result. With fewer than 12 blocks nothing is fitted, and `untestable` says why.

    Raises:
        InputError: no curves, or negative or infinite ones.
        ShapeError: curves of different numbers of words.

    Examples:
        >>> from wvprobe.contextual_drift import growth_law
        >>> curves = torch.exp(0.2 * torch.arange(17.0)) + 0.001 * torch.rand(4, 17)
        >>> found = growth_law({"distance": curves}, n_layers=16)
        >>> set(found.to_frame().query("winner").law)
        {'exponential'}
    """
    seed = checked_seed(seed)
    one_of("errors", errors, ERRORS)
    if isinstance(curves, DriftResult):
        words = curves.words if words is None else words
        found = curves.curves()
    else:
        instance("curves", curves, (DriftResult, Mapping), "Name each metric: {'cosine': curve}.")
        found = dict(curves)
    named = _checked(found, words)
    longest = max(curve.shape[1] for curve in found.values())
    depth = longest - 1 if n_layers is None else length("n_layers", n_layers)
    untestable = ""
    if depth < LEAST_LAYERS:
        untestable = f"{depth} layers do not tell the laws apart; it takes {LEAST_LAYERS}."
    empty = _Table(len(found), len(named))
    for m, curve in enumerate(found.values()):
        if not untestable:
            empty.fill(m, curve.double(), errors)
    shares, ends = empty.shares(seed)
    source = curves.provenance if isinstance(curves, DriftResult) else None
    return GrowthResult(
        provenance=Provenance.of(
            source.model if source else "tensors",
            source.weight_hash if source else "",
            seed=seed,
            errors=errors,
            n_layers=depth,
            curves=dict(source.settings) if source else {},
        ),
        aicc=empty.aicc,
        r2=empty.r2,
        parameters=empty.parameters,
        converged=empty.converged,
        first=empty.first,
        winner=empty.winner,
        rising=empty.rising,
        shares=shares,
        low=ends[0],
        high=ends[1],
        n=(empty.winner >= 0).sum(dim=1),
        metrics=tuple(found),
        words=named,
        laws=LAWS,
        errors=errors,
        untestable=untestable,
    )


def _checked(curves: Mapping[str, Tensor], words: Sequence[str] | None) -> tuple[str, ...]:
    """Return the words' names, once the curves are found usable."""
    if not curves:
        raise InputError(message("curves", "at least one metric", curves))
    for name, curve in curves.items():
        if not isinstance(curve, Tensor) or curve.is_meta:
            raise InputError(message(f"curves[{name!r}]", "a tensor [word, layer]", curve))
    if any(curve.dim() < 1 for curve in curves.values()):
        raise ShapeError(message("curves", "[word, layer]", "single numbers"))
    sizes = {len(curve) for curve in curves.values()}
    if len(sizes) > 1 or any(curve.dim() != 2 for curve in curves.values()):
        shapes = {name: tuple(curve.shape) for name, curve in curves.items()}
        raise ShapeError(message("curves", "[word, layer] with the same words", shapes))
    for name, curve in curves.items():
        if bool((curve < 0).any() or curve.isinf().any()):
            raise InputError(message(f"curves[{name!r}]", "distances", "negative or infinite ones"))
    n = sizes.pop()
    named = tuple(map(str, range(n)))
    if words is not None:
        named = tuple(listed("words", words, "names"))
    if len(named) != n:
        raise InputError(message("words", f"one name a curve ({n})", f"{len(named)} of them"))
    return named


class _Table:
    """What is known of each metric's, word's and law's fit."""

    def __init__(self, metrics: int, words: int) -> None:
        shape, nothing = (metrics, words, len(LAWS)), torch.nan
        self.aicc = torch.full(shape, nothing, dtype=torch.float64)
        self.r2 = torch.full(shape, nothing, dtype=torch.float64)
        self.parameters = torch.full((*shape, 3), nothing, dtype=torch.float64)
        self.converged = torch.zeros(shape, dtype=torch.bool)
        self.first = torch.full(shape[:2], -1)
        self.winner = torch.full(shape[:2], -1)
        self.rising = torch.zeros(shape[:2], dtype=torch.bool)

    def fill(self, metric: int, curve: Float[Tensor, "word layer"], errors: str) -> None:
        """Fit all words of a metric, those that start at the same layer together."""
        whole = (~curve.isnan().any(dim=1)) & (curve.amax(dim=1) > 0)
        above = curve > _ZERO * curve.amax(dim=1, keepdim=True)
        firsts = torch.where(whole, above.double().argmax(dim=1), -1)
        for first in sorted(set(firsts.tolist()) - {-1}):
            rows = (firsts == first).nonzero()[:, 0]
            if errors == "relative":  # ln 0: a curve that touches zero again has no such fit
                rows = rows[above[rows, first:].all(dim=1)]
            y = curve[rows, first:]
            if len(rows) and y.shape[1] >= _LEAST_POINTS:
                self.first[metric, rows] = first
                self._fit(metric, rows, y, errors == "relative")

    def _fit(self, metric: int, rows: Tensor, y: Tensor, relative: bool) -> None:
        x = torch.arange(1, y.shape[1] + 1, dtype=torch.float64)
        fits = [fit_law(law, x, y, relative=relative) for law in LAWS]
        aicc = torch.stack(
            [_aicc(fit, y, law, relative) for fit, law in zip(fits, LAWS, strict=True)]
        )
        best = aicc.argmin(dim=0)
        target = y.log() if relative else y
        total = (target - target.mean(dim=1, keepdim=True)).square().sum(dim=1)
        for number, fit in enumerate(fits):
            self.aicc[metric, rows, number] = aicc[number]
            self.r2[metric, rows, number] = 1 - fit.residual / total.clamp(min=1e-300)
            self.parameters[metric, rows, number] = fit.parameters
            self.converged[metric, rows, number] = fit.converged
        curves = torch.stack([fit.curve for fit in fits])
        won = curves[best, torch.arange(len(rows))]
        self.winner[metric, rows] = best
        self.rising[metric, rows] = won[:, -1] > won[:, 0]

    def shares(self, seed: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the share of each outcome by metric, and the ends of their intervals."""
        shape = (len(self.winner), len(OUTCOMES))
        found = [torch.full(shape, torch.nan, dtype=torch.float64) for _ in range(3)]
        for metric, winner in enumerate(self.winner):
            fitted = winner >= 0
            if not bool(fitted.any()):
                continue
            outcome = torch.where(self.rising[metric], winner, len(LAWS))[fitted]
            won = torch.nn.functional.one_hot(outcome, len(OUTCOMES)).double()
            found[0][metric] = won.mean(dim=0)
            if len(won) > 1:
                found[1][metric], found[2][metric] = mean_interval(won, seed=seed)
        return found[0], (found[1], found[2])


def _aicc(fit: Fit, y: Tensor, law: str, relative: bool) -> Tensor:
    """Return AICc; residuals of rounding count as rounding, so that an exact fit has one too."""
    n, p = y.shape[1], N_PARAMETERS[law] + 1
    size = torch.ones(len(y), dtype=y.dtype) if relative else y.square().mean(dim=1)
    mean = (fit.residual / n).clamp(min=0).maximum(1e-24 * size)
    return n * mean.log() + 2 * p + 2 * p * (p + 1) / (n - p - 1)
