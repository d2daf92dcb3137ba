"""Corrections of an anisotropic space, fitted on random tokens, never on the words measured."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe._decompositions import eigh
from wvprobe._shapes import floating
from wvprobe._validate import message, one_of
from wvprobe.errors import InputError

CORRECTIONS = ("mean", "zscore", "top_components")


@dataclass(frozen=True)
class Correction:
    """A correction, stream by stream.

    Attributes:
        kind: ``mean``, ``zscore`` or ``top_components``.
        mean: [layer, d_model] what is taken off.
        scale: [layer, d_model] what is divided by, or None.
        directions: [layer, component, d_model] orthonormal directions that are taken out, or None.

    Examples:
        >>> from wvprobe.contextual_drift import fit_correction
        >>> tokens = torch.randn(50, 4, 42) + 3
        >>> fit_correction(tokens, "zscore").scale.shape
        torch.Size([4, 42])
    """

    kind: str
    mean: Float[Tensor, "layer d_model"]
    scale: Float[Tensor, "layer d_model"] | None = None
    directions: Float[Tensor, "layer component d_model"] | None = None

    def __call__(self, x: Float[Tensor, "*b layer d_model"]) -> Float[Tensor, "*b layer d_model"]:
        """Return corrected vectors."""
        y = x - self.mean
        if self.scale is not None:
            y = y / self.scale
        if self.directions is not None:
            along = torch.einsum("...ld,lkd->...lk", y, self.directions)
            y = y - torch.einsum("...lk,lkd->...ld", along, self.directions)
        return y


def fit_correction(tokens: Float[Tensor, "token layer d_model"], kind: str) -> Correction:
    """Fit a correction on the vectors of random tokens.

    Args:
        tokens: random tokens, one of each sentence.
        kind: ``mean``: the mean is taken off. ``zscore``: each dimension is also divided by its
            standard deviation (Timkey & van Schijndel 2021, §5). ``top_components``: the mean and
            the leading round(d_model / 100) principal components, at least one, are taken out
            (all-but-the-top, Mu & Viswanath 2018).

    Raises:
        InputError: unknown kind, or too few tokens to fit it.

    Examples:
        >>> from wvprobe.contextual_drift import fit_correction
        >>> tokens = torch.randn(50, 4, 42) + 3
        >>> mean = fit_correction(tokens, "mean")
        >>> bool(mean(tokens).mean(dim=0).abs().max() < 1e-5)
        True
    """
    one_of("correction", kind, CORRECTIONS)
    n, _, d = floating("tokens", tokens, ("token", "layer", "d_model")).shape
    components = max(1, round(d / 100))
    if n < 2 + components:
        hint = "Use more sentences, or no correction."
        raise InputError(message("tokens", f"at least {2 + components} to fit {kind}", n, hint))
    mean = tokens.double().mean(dim=0)
    if kind == "mean":
        return Correction(kind, mean.float())
    if kind == "zscore":
        spread = tokens.double().std(dim=0)
        # A dimension that never moves has nothing to be scaled.
        spread = torch.where(spread > 1e-12 * spread.amax(-1, keepdim=True), spread, 1.0)
        return Correction(kind, mean.float(), scale=spread.float())
    layers = [
        _leading(tokens[:, layer].double() - mean[layer], components) for layer in range(len(mean))
    ]
    return Correction(kind, mean.float(), directions=torch.stack(layers).float())


def _leading(x: Float[Tensor, "token d"], components: int) -> Float[Tensor, "component d"]:
    """Return the leading principal components of centred rows, from the smaller Gram matrix."""
    if len(x) >= x.shape[1]:
        return eigh(x.T @ x).eigenvectors[:, -components:].flip(-1).T
    values, vectors = eigh(x @ x.T)
    directions = x.T @ vectors[:, -components:].flip(-1)
    # Where the tokens span fewer directions, a direction of nothing takes nothing out.
    sizes = directions.norm(dim=0)
    kept = values[-components:].flip(-1) > 1e-12 * values[-1]
    return torch.where(kept, directions / torch.where(kept, sizes, 1.0), 0.0).T
