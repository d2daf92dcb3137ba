"""Covariances that weight a circuit, checked, and as the symmetric roots that weight its factors.

A head seldom meets all that its weights could read. With Σ the covariance of the vectors x̂ that a
layer reads, the mean square of ``x̂ A`` over the data is ‖Σ^½ A‖_F², so Σ^½ A is the circuit as the
data sees it.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe._decompositions import eigh
from wvprobe._shapes import check_there
from wvprobe._validate import message
from wvprobe.errors import InputError, ShapeError


class Metric:
    """The two sides' covariances of a circuit ``left @ right``; roots are made a layer at a time.

    For OV `left` is what the head reads and `right` what it writes; for QK query and key.
    """

    def __init__(self, given: Any, which: str, n_layers: int, d_model: int) -> None:
        """Check what a caller gave as ``metric=``.

        Args:
            given: None; a covariance [d_model, d_model] or [layer, d_model, d_model]; or a pair of
                such (or None), for the two sides. One alone weights the read side of OV, and both
                sides of QK, whose queries and keys read the same vectors.
            which: ``OV`` or ``QK``.
            n_layers: layers of the model.
            d_model: width of the stream.

        Raises:
            ShapeError: another shape.
            InputError: half precision, NaN, not symmetric, or (when the layer is reached) an
                eigenvalue below 0.
        """
        pair = isinstance(given, tuple | list)
        if pair and len(given) != 2:
            raise InputError(
                message("metric", "a covariance or a pair of them", f"{len(given)} of them")
            )
        sides = given if pair else (given, given if which == "QK" else None)
        for place, side in enumerate(sides):
            _check(f"metric[{place}]" if pair else "metric", side, n_layers, d_model)
        self._sides: tuple[Tensor | None, Tensor | None] = (sides[0], sides[1])
        self._same = sides[0] is sides[1]
        self._cache: dict[int, tuple[int, Tensor]] = {}

    @property
    def given(self) -> bool:
        """Whether any side is weighted."""
        return any(side is not None for side in self._sides)

    def left(self, factor: Float[Tensor, "*b d r"], layer: int) -> Float[Tensor, "*b d r"]:
        """Return Σ^½ times the left factor (in float64 where any side is weighted)."""
        return self._weighted(0, factor, layer)

    def right(self, factor: Float[Tensor, "*b d r"], layer: int) -> Float[Tensor, "*b d r"]:
        """Return Σ^½ times the right factor, transposed to [..., d_model, r]."""
        return self._weighted(0 if self._same else 1, factor, layer)

    def _weighted(self, side: int, factor: Tensor, layer: int) -> Tensor:
        if not self.given:
            return factor
        # Σ is squared data: weighting in float32 would drown its smaller half.
        root = self._root(side, layer)
        factor = factor.double()
        return factor if root is None else root.to(factor.device) @ factor

    def _root(self, side: int, layer: int) -> Tensor | None:
        matrix = self._sides[side]
        if matrix is None:
            return None
        key = layer if matrix.dim() == 3 else 0
        known = self._cache.get(side)
        if known is None or known[0] != key:
            one = matrix[layer] if matrix.dim() == 3 else matrix
            where = f"metric (layer {layer})" if matrix.dim() == 3 else "metric"
            self._cache[side] = (key, symmetric_root(one, where))
        return self._cache[side][1]


def symmetric_root(
    matrix: Float[Tensor, "d_model d_model"], name: str = "metric"
) -> Float[Tensor, "d_model d_model"]:
    """Return the symmetric Σ^½ in float64; eigenvalues within round-off of 0 count as 0.

    Round-off is d_model · ε of the dtype given, times the largest eigenvalue. The root would make
    much of it: from float32, noise of 1e-5 of the largest variance becomes 3e-3 of its root.

    Raises:
        InputError: an eigenvalue is below 0 by more than round-off.
    """
    values, vectors = eigh(matrix.double())
    allowed = len(matrix) * torch.finfo(matrix.dtype).eps * float(values.abs().max())
    if float(values[0]) < -allowed:
        raise InputError(
            message(
                name,
                "positive semi-definite, as a covariance is",
                f"an eigenvalue of {float(values[0]):.3g} beside {float(values[-1]):.3g}",
            )
        )
    roots = torch.where(values > allowed, values, torch.zeros_like(values)).sqrt()
    return vectors * roots @ vectors.mT


def _check(name: str, matrix: Any, n_layers: int, d_model: int) -> None:
    if matrix is None:
        return
    expected = f"[{d_model}, {d_model}] or [{n_layers}, {d_model}, {d_model}] (a layer)"
    if not isinstance(matrix, Tensor):
        hint = "Measure one with wvprobe.inputs.input_covariance(model).covariance."
        raise InputError(message(name, f"a tensor {expected}", type(matrix).__name__, hint))
    square = (d_model, d_model)
    if tuple(matrix.shape) not in (square, (n_layers, *square)):
        raise ShapeError(message(name, expected, f"shape {list(matrix.shape)}"))
    if matrix.dtype not in (torch.float32, torch.float64):
        hint = "A covariance is squared data, for which half precision is too coarse."
        raise InputError(message(name, "float32 or float64", str(matrix.dtype), hint))
    check_there(name, matrix)
    if not bool(torch.isfinite(matrix).all()):
        raise InputError(message(name, "finite", "NaN or infinity"))
    allowed = d_model * torch.finfo(matrix.dtype).eps * float(matrix.abs().max())
    skew = max(float((one - one.mT).abs().max()) for one in matrix.reshape(-1, *square))
    if skew > allowed:
        hint = "Pass the covariance itself, not a factor of it."
        raise InputError(message(name, "symmetric", f"entries {skew:.3g} apart", hint))
