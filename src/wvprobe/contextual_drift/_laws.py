"""Least squares of four laws, exact in their scale and searched in the rest.

Every law is a·φ(x): for given shape the best scale a has a closed form (variable projection, Golub
& Pereyra 1973), so that one or two parameters are left, of which a grid covers the whole range and
is narrowed around its best point. All curves are fitted at once, without starting values.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LAWS = ("linear", "power", "exponential", "logistic")
N_PARAMETERS = {"linear": 2, "power": 2, "exponential": 2, "logistic": 3}
_RATES = (0.01, 6.0)  # of a logistic, a layer
_TURNS = (-3.5, 6.5)  # from e^−16 of its height at the last layer to a turn long before the first
_GRID, _NARROW, _SHRINK = 33, 5, 0.5
_ROUNDS, _COARSE = 40, 20  # of narrowing; a search within a search may be coarser
_CURVES = 32  # fitted at once


class Fit(NamedTuple):
    """One law fitted to several curves.

    Attributes:
        parameters: [curve, 3] a, b, and c of the logistic; NaN where there is none.
        curve: [curve, x] the fitted values.
        residual: [curve] sum of squared residuals, of y or of ln y.
        converged: [curve] False where a searched parameter stands at the end of its range.
    """

    parameters: Float[Tensor, "curve parameter"]
    curve: Float[Tensor, "curve x"]
    residual: Float[Tensor, " curve"]
    converged: Bool[Tensor, " curve"]


def fit_law(
    law: str, x: Float[Tensor, " x"], y: Float[Tensor, "curve x"], *, relative: bool = False
) -> Fit:
    """Fit a law to curves by least squares.

    Args:
        law: one of LAWS.
        x: places, ascending and above 0.
        y: values; above 0 where `relative`.
        relative: make the squares of ln y − ln(a φ) least instead of those of y − a φ.
    """
    if law == "linear" and not relative:
        return _straight(x, y)
    search = _Search(law, x, relative)
    parts = [search.fit(part) for part in y.split(_CURVES)]
    return Fit(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _straight(x: Tensor, y: Tensor) -> Fit:
    """Return the ordinary least-squares line."""
    design = torch.stack([torch.ones_like(x), x], dim=1)
    found = torch.linalg.lstsq(design, y.T).solution
    curve = (design @ found).T
    nothing = torch.full((len(y), 1), torch.nan, dtype=y.dtype)
    residual = (y - curve).square().sum(dim=1)
    return Fit(torch.cat([found.T, nothing], dim=1), curve, residual, torch.ones(len(y)).bool())


class _Search:
    """The search over the shape of a law: its rate, and of a logistic also where it turns."""

    def __init__(self, law: str, x: Tensor, relative: bool) -> None:
        self.law, self.x, self.relative = law, x, relative
        rates = [float(torch.tensor(rate).log()) for rate in _RATES]
        self.rates = {
            # The slope over the mean, at the ends: any line that stays above 0.
            "linear": (-1 + 1e-9, 1 - 1e-9),
            "power": (-12.0, 12.0),
            "exponential": (-3.0, 3.0),
            "logistic": (rates[0], rates[1]),  # ln |b|
        }[law]
        self.turning = law == "logistic"
        self.signs = (1.0, -1.0) if self.turning else (1.0,)

    def log_shape(self, rate: Tensor, turn: Tensor, sign: float) -> Tensor:
        """Return ln φ, [..., x], up to a constant; `turn` is asinh of |b| (x_end − c).

        Far below 0 a logistic is an exponential of rate b, wherever it turns.
        """
        x, b = self.x, rate[..., None]
        if self.law == "linear":
            middle, half = (x[0] + x[-1]) / 2, (x[-1] - x[0]) / 2
            return (1 + b * (x - middle) / half).log()
        if self.law == "power":
            return b * (x / x[-1]).log()
        if self.law == "exponential":
            return b * (x - x[-1])
        argument = b.exp() * (x - x[-1]) + turn[..., None].sinh()
        return torch.nn.functional.logsigmoid(sign * argument)

    def scaled(self, y: Tensor, log_shape: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residuals' squares, [curve, ...], and ln of the best scale (a > 0)."""
        y = y.reshape(len(y), *[1] * (log_shape.dim() - 2), -1)
        if self.relative:
            difference = y.log() - log_shape
            scale = difference.mean(dim=-1)
            return (difference - scale[..., None]).square().sum(dim=-1), scale
        largest = log_shape.amax(dim=-1, keepdim=True)
        shape = (log_shape - largest).exp()
        scale = (shape * y).sum(dim=-1) / shape.square().sum(dim=-1)
        residual = (y - scale[..., None] * shape).square().sum(dim=-1)
        return residual, scale.clamp(min=1e-300).log() - largest[..., 0]

    def fit(self, y: Tensor) -> Fit:
        """Fit some curves, with either sign of a logistic's rate."""
        fits = [self._with_sign(y, sign) for sign in self.signs]
        better = torch.stack([fit.residual for fit in fits]).argmin(dim=0)
        rows = torch.arange(len(y))
        return Fit(*(torch.stack(part)[better, rows] for part in zip(*fits, strict=True)))

    def _with_sign(self, y: Tensor, sign: float) -> Fit:
        turn = torch.zeros(len(y), 1, dtype=torch.float64)
        inside = torch.ones(len(y), dtype=torch.bool)
        if self.turning:
            # For every turn the best rate is found first: the two lie along a curved valley.
            found, _ = _least(
                lambda t: self._best_rate(y, t, sign, _COARSE)[1], turn[:, 0], _TURNS, _COARSE
            )
            turn, inside = found[:, None], _within(found, _TURNS)
        rate, _ = self._best_rate(y, turn, sign, _ROUNDS)
        log_shape = self.log_shape(rate, turn, sign)
        residual, scale = self.scaled(y, log_shape)
        curve = (log_shape[:, 0] + scale).exp()
        inside = inside & _within(rate[:, 0], self.rates)
        return Fit(
            self._named(rate[:, 0], turn[:, 0], scale[:, 0], sign), curve, residual[:, 0], inside
        )

    def _best_rate(
        self, y: Tensor, turn: Tensor, sign: float, rounds: int
    ) -> tuple[Tensor, Tensor]:
        """Return for each turn, [curve, turn], the best rate and its residual."""

        def residual(rate: Tensor) -> Tensor:
            log_shape = self.log_shape(rate, turn[..., None], sign)
            return self.scaled(y, log_shape)[0]

        return _least(residual, turn, self.rates, rounds)

    def _named(self, b: Tensor, turn: Tensor, scale: Tensor, sign: float) -> Tensor:
        """Return a, b and c as growth_law() writes the laws."""
        nothing = torch.full_like(scale, torch.nan)
        if self.law == "linear":
            middle, half = (self.x[0] + self.x[-1]) / 2, (self.x[-1] - self.x[0]) / 2
            slope = scale.exp() * b / half
            return torch.stack([scale.exp() - slope * middle, slope, nothing], dim=1)
        if self.law == "power":
            return torch.stack([(scale - b * self.x[-1].log()).exp(), b, nothing], dim=1)
        if self.law == "exponential":
            return torch.stack([(scale - b * self.x[-1]).exp(), b, nothing], dim=1)
        turns_at = self.x[-1] - turn.sinh() / b.exp()
        return torch.stack([scale.exp(), sign * b.exp(), turns_at], dim=1)


def _least(
    value: Callable[[Tensor], Tensor], like: Tensor, ends: tuple[float, float], rounds: int
) -> tuple[Tensor, Tensor]:
    """Return where in a range a function is least, and its value there, for each of `like`.

    Args:
        value: takes places [*like, n] and returns its values there.
        like: gives the shape.
        ends: the range; a grid covers it, and is narrowed around its best place.
        rounds: how often it is narrowed, to half each time.
    """
    grid = torch.linspace(*ends, _GRID, dtype=torch.float64).expand(*like.shape, _GRID)
    at = grid.gather(-1, value(grid).argmin(dim=-1, keepdim=True))
    step = 1.5 * (ends[1] - ends[0]) / (_GRID - 1)
    unit = torch.linspace(-1, 1, _NARROW, dtype=torch.float64)
    for _ in range(rounds):
        places = (at + unit * step).clamp(*ends)
        at = places.gather(-1, value(places).argmin(dim=-1, keepdim=True))
        step *= _SHRINK
    return at[..., 0], value(at)[..., 0]


def _within(at: Tensor, ends: tuple[float, float]) -> Tensor:
    room = 1e-6 * (ends[1] - ends[0])
    return (at > ends[0] + room) & (at < ends[1] - room)
