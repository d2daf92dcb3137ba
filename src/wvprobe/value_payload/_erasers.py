"""What takes a label out of vectors, and random directions that take out as much."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe._decompositions import eigh

# Canonical correlations below this are rounding: a one-hot label has one direction too many.
_TOLERANCE = 1e-6
_STEPS = 50
_STEEPEST = 12.0


class Eraser(NamedTuple):
    """The change Δ = −(x − mean) A B that an eraser makes.

    Attributes:
        mean: [feature].
        right: [*draw, feature, rank], A.
        left: [*draw, rank, feature], B.
    """

    mean: Float[Tensor, " feature"]
    right: Float[Tensor, "*draw feature rank"]
    left: Float[Tensor, "*draw rank feature"]

    def change(self, x: Float[Tensor, "item feature"]) -> Float[Tensor, "*draw item feature"]:
        """Return Δ for each vector."""
        return -((x.double() - self.mean) @ self.right) @ self.left


def leace(x: Float[Tensor, "item feature"], onehot: Float[Tensor, "item label"]) -> Eraser:
    """Fit least-squares concept erasure (Belrose et al. 2023, theorem 4.2).

    Of all affine maps that leave no covariance with the label, and so nothing to any linear probe,
    that of least E‖Δ‖². Neither the covariance is shrunk nor the trace bound, which would leave
    some of the label in.
    """
    from concept_erasure import LeaceFitter

    found = LeaceFitter.fit(
        x.double(),
        onehot.double(),
        shrinkage=False,
        constrain_cov_trace=False,
        svd_tol=_TOLERANCE,
    ).eraser
    used = found.proj_right.norm(dim=1) > 0
    return Eraser(x.double().mean(dim=0), found.proj_right[used].mT, found.proj_left[:, used].mT)


class Controls(NamedTuple):
    """Random erasers, and by how much each Δ had to be stretched to have the energy asked for."""

    eraser: Eraser
    stretch: Float[Tensor, " draw"]


def random_erasers(
    x: Float[Tensor, "item feature"], rank: int, energy: float, draws: int, seed: int
) -> Controls:
    """Draw projections off `rank` random directions with E‖Δ‖² = `energy` on these vectors.

    Frames are orthonormal bases of Σ^{t/2} G with G Gaussian and Σ the covariance: t = 0 is the
    Haar measure, t > 0 prefers directions that vary much and t < 0 those that vary little. Each
    draw's t is set so that tr(Rᵀ Σ R) is the energy. Directions are then gone, as they are after
    an erasure; scaling Δ instead would leave every linear probe all it had. Where no choice of
    directions has the energy (an oblique projection can move vectors by more than they vary), the
    nearest is stretched.
    """
    centred = x.double() - x.double().mean(dim=0)
    covariance = centred.mT @ centred / len(x)
    values, vectors = eigh(covariance)
    values = values.clamp(min=0.0)
    generator = torch.Generator().manual_seed(seed)
    gaussian = torch.randn(draws, len(values), rank, generator=generator, dtype=torch.float64)
    logs = (values / values.max().clamp(min=1e-300)).clamp(min=1e-12).log()
    low = torch.full((draws,), -_STEEPEST, dtype=torch.float64)
    high = -low
    if rank < len(values):
        for _ in range(_STEPS):
            middle = (low + high) / 2
            above = _energy(_tilted(gaussian, logs, middle), values) > energy
            low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    frames = _tilted(gaussian, logs, (low + high) / 2)
    reached = _energy(frames, values)
    stretch = torch.where(reached > 0, energy / reached.clamp(min=1e-300), 1.0).sqrt()
    right = vectors @ frames
    left = right.mT * stretch[:, None, None]
    return Controls(Eraser(x.double().mean(dim=0), right, left), stretch)


def _tilted(gaussian: Tensor, logs: Tensor, t: Tensor) -> Tensor:
    """Return orthonormal frames in the covariance's own basis."""
    exponent = t[:, None] * logs / 2
    # Only ratios matter to a span.
    scale = (exponent - exponent.amax(dim=1, keepdim=True)).clamp(min=-34.0).exp()
    return torch.linalg.qr(gaussian * scale[..., None])[0]


def _energy(frames: Tensor, values: Tensor) -> Tensor:
    return (frames.square() * values[:, None]).sum(dim=(-1, -2))
