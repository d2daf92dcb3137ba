"""Least squares of four laws, exact in their scale and searched in the rest.

Every law is a·φ(x): for given shape the best scale a has a closed form (variable projection, Golub
& Pereyra 1973), so that one or two parameters are left, of which a grid covers the whole range and
is narrowed around its best point. All curves are fitted at once, without starting values.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LAWS = ("linear", "power", "exponential", "logistic")
N_PARAMETERS = {"linear": 2, "power": 2, "exponential": 2, "logistic": 3}
_RATES = (0.01, 6.0)  # of a logistic, a layer
_GRID, _ROUNDS, _SHRINK = 9, 60, 0.6
_CURVES = 16  # fitted at once: the logistic's grid is wide


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
    """The search over the shape of a law; a point of it has one or two coordinates."""

    def __init__(self, law: str, x: Tensor, relative: bool) -> None:
        self.law, self.x, self.relative = law, x, relative
        span = float(x[-1] - x[0])
        low, high = (torch.tensor(rate).double().log() for rate in _RATES)
        ranges = {
            # tanh of the slope over the mean: any line that stays above 0.
            "linear": [(-1 + 1e-9, 1 - 1e-9)],
            "power": [(-12.0, 12.0)],
            "exponential": [(-3.0, 3.0)],
            "logistic": [
                (float(low), float(high)),
                (float(x[0]) - 2 * span, float(x[-1]) + 2 * span),
            ],
        }[law]
        self.low, self.high = torch.tensor(ranges, dtype=torch.float64).T
        self.first = (401,) if len(ranges) == 1 else (41, 81)
        self.signs = (1.0, -1.0) if law == "logistic" else (1.0,)

    def log_shape(self, points: Tensor, sign: float) -> Tensor:
        """Return ln φ, [..., x], up to a constant a point."""
        x, b = self.x, points[..., :1]
        if self.law == "linear":
            middle, half = (x[0] + x[-1]) / 2, (x[-1] - x[0]) / 2
            return (1 + b * (x - middle) / half).log()
        if self.law == "power":
            return b * (x / x[-1]).log()
        if self.law == "exponential":
            return b * (x - x[-1])
        return torch.nn.functional.logsigmoid(sign * b.exp() * (x - points[..., 1:]))

    def scaled(self, y: Tensor, log_shape: Tensor) -> tuple[Tensor, Tensor]:
        """Return the residuals' squares, [curve, ...], and ln of the best scale (a > 0)."""
        if self.relative:
            difference = y.log()[:, None] - log_shape
            scale = difference.mean(dim=-1)
            return (difference - scale[..., None]).square().sum(dim=-1), scale
        largest = log_shape.amax(dim=-1, keepdim=True)
        shape = (log_shape - largest).exp()
        scale = (shape * y[:, None]).sum(dim=-1) / shape.square().sum(dim=-1)
        residual = (y[:, None] - scale[..., None] * shape).square().sum(dim=-1)
        return residual, scale.clamp(min=1e-300).log() - largest[..., 0]

    def fit(self, y: Tensor) -> Fit:
        """Fit some curves, with either sign of a logistic's rate."""
        fits = [self._with_sign(y, sign) for sign in self.signs]
        better = torch.stack([fit.residual for fit in fits]).argmin(dim=0)
        rows = torch.arange(len(y))
        return Fit(*(torch.stack(part)[better, rows] for part in zip(*fits, strict=True)))

    def _with_sign(self, y: Tensor, sign: float) -> Fit:
        axes = [
            torch.linspace(float(low), float(high), size, dtype=torch.float64)
            for low, high, size in zip(self.low, self.high, self.first, strict=True)
        ]
        grid = torch.cartesian_prod(*axes).reshape(-1, len(axes))
        residual, _ = self.scaled(y, self.log_shape(grid, sign)[None])
        at = grid[residual.argmin(dim=-1)]
        steps = torch.stack([2 * (axis[1] - axis[0]) for axis in axes])
        unit = torch.linspace(-1, 1, _GRID, dtype=torch.float64)
        around = torch.cartesian_prod(*[unit] * len(axes)).reshape(-1, len(axes))
        for _ in range(_ROUNDS):
            points = (at[:, None] + around * steps).clamp(self.low, self.high)
            residual, _ = self.scaled(y, self.log_shape(points, sign))
            best = residual.argmin(dim=-1)
            at = points[torch.arange(len(y)), best]
            steps = steps * _SHRINK
        log_shape = self.log_shape(at[:, None], sign)
        residual, scale = self.scaled(y, log_shape)
        curve = (log_shape[:, 0] + scale).exp()
        room = 1e-6 * (self.high - self.low)
        inside = ((at > self.low + room) & (at < self.high - room)).all(dim=-1)
        return Fit(self._named(at, scale[:, 0], sign), curve, residual[:, 0], inside)

    def _named(self, at: Tensor, scale: Tensor, sign: float) -> Tensor:
        """Return a, b and c as growth_law() writes the laws."""
        b, nothing = at[:, 0], torch.full_like(scale, torch.nan)
        if self.law == "linear":
            middle, half = (self.x[0] + self.x[-1]) / 2, (self.x[-1] - self.x[0]) / 2
            slope = scale.exp() * b / half
            return torch.stack([scale.exp() - slope * middle, slope, nothing], dim=1)
        if self.law == "power":
            return torch.stack([(scale - b * self.x[-1].log()).exp(), b, nothing], dim=1)
        if self.law == "exponential":
            return torch.stack([(scale - b * self.x[-1]).exp(), b, nothing], dim=1)
        return torch.stack([scale.exp(), sign * b.exp(), at[:, 1]], dim=1)
