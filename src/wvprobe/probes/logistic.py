"""Logistic probes of many sites and training sets at once, exact to a tolerance.

The objective is scikit-learn's, divided by the number n of training items: mean loss +
‖w‖² / (2 C n), intercepts unpenalised; two classes have one row of weights, more have one each
(softmax). It is minimised by L-BFGS (Nocedal & Wright 2006, section 7.2) with two changes.

* The initial inverse Hessian is a Kronecker product. At w = 0 the Hessian is exactly
  (diag π − π πᵀ) ⊗ cov(x) + I/(Cn), π the class shares (Böhning 1992, Multinomial Logistic
  Regression Algorithm, bounds it by a matrix of this form); later the mean of diag p − p pᵀ
  stands for the first factor, and x weighed by how undecided its item is for the second.
* A step is taken if the value falls below the highest of the last few (Grippo, Lampariello &
  Lucidi 1986), so that one training set in a batch seldom makes the others wait for a shorter step.
"""

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._decompositions import eigh
from wvprobe.probes.features import Block, Frame, class_sums, outputs

_MEMORY = 8
_WINDOW = 4
_RENEWED = 6  # iterations after which the initial Hessian is made anew
_HALVINGS = 12
_SUFFICIENT = 1e-4
# Beyond so many features the covariance's diagonal stands for it.
_WIDEST = 1024
_LARGEST_EXPONENT = {torch.float32: 80.0, torch.float64: 700.0}


class Fit(NamedTuple):
    """Minima.

    Attributes:
        theta: [site, job, row, feature + 1] weights and intercepts in the training set's frame.
        gradient: [site, job] the largest entry of the gradient there.
    """

    theta: Float[Tensor, "site job row feature_and_one"]
    gradient: Float[Tensor, "site job"]


def fit(
    block: Block,
    mask: Float[Tensor, "job item"],
    frame: Frame,
    y: Int[Tensor, " item"],
    n_classes: int,
    C: Float[Tensor, "site job"],
    *,
    tolerance: float,
    most_iterations: int,
    start: Tensor | None = None,
) -> Fit:
    """Minimise the objective for every site and training set.

    Args:
        block: the features.
        mask: 1 for the items of each training set, else 0.
        frame: its coordinates.
        y: classes, 0 to n_classes − 1.
        n_classes: how many there are, whether or not a training set has them.
        C: inverse penalties, scikit-learn's.
        tolerance: bound on the largest entry of the gradient, scikit-learn's `tol`.
        most_iterations: where to give up.
        start: weights and intercepts to start from; None for w = 0 and the class shares.
    """
    problem = problem_of(block, mask, frame, y, n_classes, C)
    n = mask.sum(dim=1)
    if start is None:
        start = problem.without_features(n)
    return _minimise(problem, start, tolerance, most_iterations)


def problem_of(
    block: Block,
    mask: Float[Tensor, "job item"],
    frame: Frame,
    y: Int[Tensor, " item"],
    n_classes: int,
    C: Float[Tensor, "site job"],
) -> "Problem":
    """Return what :func:`fit` minimises; arguments as there."""
    onehot = torch.nn.functional.one_hot(y, n_classes).T.to(block.z.dtype)
    if n_classes == 2:
        onehot = onehot[1:]
    n = mask.sum(dim=1)
    sums = class_sums(block, mask, onehot) / n[:, None, None]
    return Problem(block.z, frame.mean, frame.scale, sums, 1.0 / (C * n), mask / n[:, None])


@dataclass(frozen=True)
class Problem:
    """What the objective is made of: fields with sites first, but for the last one.

    Attributes:
        z: [site, feature + 1, item].
        mean: [site, job, feature], with `scale` the frame of each training set.
        scale: likewise.
        sums: [site, job, row, feature + 1] mean over training items of z where the class is row's.
        weight: [site, job] 1 / (C n).
        share: [job, item] 1 / n for training items, else 0.
    """

    z: Tensor
    mean: Tensor
    scale: Tensor
    sums: Tensor
    weight: Tensor
    share: Tensor

    def at(self, sites: Tensor) -> "Problem":
        """Return some of the sites."""
        chosen = {f.name: getattr(self, f.name)[sites] for f in fields(self) if f.name != "share"}
        return replace(self, **chosen)

    @property
    def frame(self) -> Frame:
        """The coordinates of weights and intercepts."""
        return Frame(self.mean, self.scale)

    @property
    def rows(self) -> int:
        """Rows of weights: one for two classes, else one a class."""
        return self.sums.shape[2]

    def without_features(self, n: Tensor) -> Tensor:
        """Return w = 0 and intercepts of the class shares, half an item added to each."""
        counts = self.sums[..., -1] * n[:, None] + 0.5
        if self.rows == 1:
            intercepts = (counts / (n[:, None] + 1.0 - counts)).log()
        else:
            intercepts = counts.log() - counts.log().mean(dim=-1, keepdim=True)
        return torch.cat([torch.zeros_like(self.sums[..., :-1]), intercepts[..., None]], dim=-1)

    def value(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objective [site, job] and its gradient, shaped as `theta`."""
        linear = self.frame.outward(theta)
        z = self._outputs(linear)
        if self.rows == 1:
            loss = (torch.nn.functional.softplus(z, threshold=40.0)[:, :, 0] * self.share).sum(-1)
            weighted = z.sigmoid_().mul_(self.share[:, None])
        else:
            log_sum = _exponentials_(z)
            loss = (log_sum * self.share).sum(dim=-1)
            # z is e^(z − shift) by now: one factor an item makes it p / n.
            weighted = z.mul_((self.share / z.sum(dim=2))[:, :, None])
        # Two long sums of like size: their difference wants the longer format.
        value = loss.double() - (linear.double() * self.sums.double()).sum(dim=(-1, -2))
        penalty = theta[..., :-1].double().square().sum(dim=(-1, -2)) * self.weight / 2
        gradient = torch.bmm(weighted.flatten(1, 2), self.z.mT).view(theta.shape) - self.sums
        gradient = self.frame.inward(gradient)
        gradient[..., :-1] += self.weight[..., None, None] * theta[..., :-1]
        return value + penalty, gradient

    def _outputs(self, linear: Tensor) -> Tensor:
        return outputs(Block(self.z, self.mean[:, 0], self.mean[:, 0]), linear)

    def probabilities(self, theta: Tensor) -> Tensor:
        """Return [site, job, row, item]."""
        z = self._outputs(self.frame.outward(theta))
        return z.sigmoid() if self.rows == 1 else z.softmax(dim=2)


def _exponentials_(z: Tensor) -> Tensor:
    """Replace z [site, job, row, item] by e^(z − shift); return log Σ e^z over rows.

    There is a shift only where numbers would overflow.
    """
    shift: Tensor | float = 0.0
    if float(z.amax()) > _LARGEST_EXPONENT[z.dtype]:
        largest = z.amax(dim=2, keepdim=True)
        z -= largest
        shift = largest[:, :, 0]
    return z.exp_().sum(dim=2).log_() + shift


class _Curvature(NamedTuple):
    """An approximate Hessian A ⊗ S + I/(Cn), as eigenvectors and what divides along them.

    Attributes:
        q: [site, job, row, row] eigenvectors of A.
        v: [site, feature, feature] eigenvectors of S; None where S is taken for diagonal.
        inverse: [site, job, row, feature].
        of_intercepts: [site, job, row] 1 / eigenvalues of A, 0 for what no loss depends on.
    """

    q: Tensor
    v: Tensor | None
    inverse: Tensor
    of_intercepts: Tensor

    def at(self, sites: Tensor) -> "_Curvature":
        v = None if self.v is None else self.v[sites]
        return _Curvature(self.q[sites], v, self.inverse[sites], self.of_intercepts[sites])

    def solve(self, gradient: Tensor) -> Tensor:
        """Return the inverse times a gradient."""
        inner = gradient[..., :-1]
        inner = self.q @ ((self.q.mT @ self._turned(inner, self.v)) * self.inverse)
        inner = self._turned(inner, None if self.v is None else self.v.mT)
        last = self.q @ (self.of_intercepts[..., None] * (self.q.mT @ gradient[..., -1:]))
        return torch.cat([inner, last], dim=-1)

    @staticmethod
    def _turned(x: Tensor, v: Tensor | None) -> Tensor:
        return x if v is None else torch.bmm(x.flatten(1, 2), v).view(x.shape)


def _curvature(problem: Problem, theta: Tensor | None) -> _Curvature:
    """Return the Hessian at w = 0 (exact), or its approximation at `theta`."""
    features = problem.z[:, :-1]
    share = problem.share[:, None]
    if theta is None:
        shares = problem.sums[..., -1].clamp(min=torch.finfo(features.dtype).eps)
        outer = shares[..., :, None] * shares[..., None, :]
        a = shares[..., None] - outer if problem.rows == 1 else torch.diag_embed(shares) - outer
        undecided = features.new_ones(len(features), features.shape[-1])
    else:
        p = problem.probabilities(theta)
        shared = p * share
        outer = shared @ p.mT
        along = shared.sum(dim=-1)
        a = along[..., None] - outer if problem.rows == 1 else torch.diag_embed(along) - outer
        p = p.mean(dim=1)
        undecided = (p * (1.0 - p)).sum(dim=1) + torch.finfo(p.dtype).eps
    undecided = undecided / undecided.sum(dim=-1, keepdim=True)
    mean = features @ undecided[..., None]
    scale = problem.scale.mean(dim=1)
    if features.shape[1] > _WIDEST:
        v = None
        second = (features.square() @ undecided[..., None] - mean.square())[..., 0]
        along = (second / scale.square()).clamp(min=0.0)
    else:
        second = (features * undecided[:, None]) @ features.mT - mean @ mean.mT
        along, v = eigh(second / (scale[:, :, None] * scale[:, None]))
        along = along.clamp(min=0.0)
    across, q = eigh(a)
    across = across.clamp(min=0.0)
    free = across <= 1e-6 * across.amax(dim=-1, keepdim=True)
    inverse = 1.0 / (across[..., None] * along[:, None, None] + problem.weight[..., None, None])
    return _Curvature(q, v, inverse, torch.where(free, 0.0, 1.0 / across))


class _Pair(NamedTuple):
    """A step, the change of the gradient over it, and 1 / their product (0: no use)."""

    step: Tensor
    change: Tensor
    rho: Tensor


@dataclass(frozen=True)
class _State:
    """Where the sites still at work stand; sites first in everything."""

    theta: Tensor
    value: Tensor
    gradient: Tensor
    stalled: Tensor
    gamma: Tensor
    curvature: _Curvature
    pairs: tuple[_Pair, ...]
    values: tuple[Tensor, ...]

    def at(self, sites: Tensor) -> "_State":
        return _State(
            self.theta[sites],
            self.value[sites],
            self.gradient[sites],
            self.stalled[sites],
            self.gamma[sites],
            self.curvature.at(sites),
            tuple(_Pair(*(part[sites] for part in pair)) for pair in self.pairs),
            tuple(value[sites] for value in self.values),
        )


def _minimise(problem: Problem, start: Tensor, tolerance: float, most_iterations: int) -> Fit:
    """Run L-BFGS; sites that are done leave the batch once they are half of it."""
    value, gradient = problem.value(start)
    state = _State(
        start,
        value,
        gradient,
        torch.zeros_like(value, dtype=torch.bool),
        torch.ones_like(start[..., :1, :1]),
        _curvature(problem, None),
        (),
        (value,),
    )
    found = Fit(start.clone(), gradient.abs().amax(dim=(-1, -2)))
    sites = torch.arange(len(start), device=start.device)
    for iteration in range(most_iterations):
        worst = state.gradient.abs().amax(dim=(-1, -2))
        done = (worst <= tolerance) | state.stalled
        at_work = ~done.all(dim=1)
        if 2 * int(at_work.sum()) <= len(sites):
            found.theta[sites], found.gradient[sites] = state.theta, worst
            if not bool(at_work.any()):
                return found
            keep = at_work.nonzero()[:, 0]
            problem, state, sites, done = problem.at(keep), state.at(keep), sites[keep], done[keep]
        if iteration == _RENEWED:
            state = replace(state, curvature=_curvature(problem, state.theta))
        state = _iterate(problem, state, done)
    found.theta[sites] = state.theta
    found.gradient[sites] = state.gradient.abs().amax(dim=(-1, -2))
    return found


def _iterate(problem: Problem, state: _State, done: Tensor) -> _State:
    """Take one step for every training set that is not done."""
    direction = _direction(state)
    slope = _dot(state.gradient, direction)[..., 0, 0]
    # Rounding can spoil a direction near the minimum: the plain one always leads down.
    plain = state.curvature.solve(state.gradient)
    direction = torch.where((slope > 0)[..., None, None], direction, plain)
    slope = _dot(state.gradient, direction)[..., 0, 0].double()
    highest = torch.stack(state.values[-_WINDOW:]).amax(dim=0)
    slack = 4 * torch.finfo(state.theta.dtype).eps * (1.0 + state.value.abs())
    length = torch.where(done, 0.0, 1.0).to(state.theta)
    theta = state.theta - length[..., None, None] * direction
    value, gradient = problem.value(theta)
    short = ~(value <= highest - _SUFFICIENT * length * slope + slack)
    for _ in range(_HALVINGS):
        if not bool(short.any()):
            break
        length = torch.where(short, length / 2, length)
        theta = state.theta - length[..., None, None] * direction
        value, gradient = problem.value(theta)
        short = ~(value <= highest - _SUFFICIENT * length * slope + slack)
    if bool(short.any()):
        # No shorter step leads down: rounding is all that is left.
        theta = torch.where(short[..., None, None], state.theta, theta)
        value = torch.where(short, state.value, value)
        gradient = torch.where(short[..., None, None], state.gradient, gradient)
        state = replace(state, stalled=state.stalled | short)
    step, change = theta - state.theta, gradient - state.gradient
    product = _dot(step, change)
    usable = product > torch.finfo(product.dtype).tiny ** 0.5
    rho = torch.where(usable, 1.0 / product, 0.0)
    against = _dot(change, state.curvature.solve(change))
    gamma = torch.where(usable & (against > 0), product / against, state.gamma)
    return replace(
        state,
        theta=theta,
        value=value,
        gradient=gradient,
        gamma=gamma,
        pairs=(*state.pairs, _Pair(step, change, rho))[-_MEMORY:],
        values=(*state.values, value)[-_WINDOW:],
    )


def _direction(state: _State) -> Tensor:
    """Return the inverse Hessian times the gradient, by the two-loop recursion."""
    rest, factors = state.gradient, []
    for pair in reversed(state.pairs):
        factor = pair.rho * _dot(pair.step, rest)
        rest = rest - factor * pair.change
        factors.append(factor)
    found = state.curvature.solve(rest) * state.gamma
    for pair, factor in zip(state.pairs, reversed(factors), strict=True):
        found = found + pair.step * (factor - pair.rho * _dot(pair.change, found))
    return found


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum(dim=(-1, -2), keepdim=True)
