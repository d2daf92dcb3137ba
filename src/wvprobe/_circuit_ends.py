"""What heads write to the stream and read from it, layer by layer, as thin factors.

Weights are read one layer at a time, so that a lazily loaded model never stands in memory whole.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe._factors import layer_factors
from wvprobe._linalg import at_least_float32, triangular_factor
from wvprobe._metric import Metric
from wvprobe._products import Readers, frobenius
from wvprobe._validate import message
from wvprobe.errors import InputError
from wvprobe.heads import HeadWeights


class Writers(NamedTuple):
    """A layer's writers as matrices A of unit Frobenius norm with ‖A M‖ ∝ ‖OV M‖ for every M.

    Attributes:
        matrices: [head, s, d_model]; 0 where `zero`.
        zero: [head], True where OV is the zero matrix to rounding.
        spread: [head] ‖A Aᵀ‖, from 1/√s for equal singular values to 1 for rank 1.
    """

    matrices: Tensor
    zero: Tensor
    spread: Tensor


class ReaderEnds(NamedTuple):
    """A layer's readers, likewise, see :class:`wvprobe._products.Readers`.

    Attributes:
        left: [n_left, d_model, r].
        right: [head, t, r], or None.
        zero: [head], True where the circuit is the zero matrix to rounding.
        spread: [head] ‖Bᵀ B‖.
    """

    left: Tensor
    right: Tensor | None
    zero: Tensor
    spread: Tensor


def writing(
    heads: HeadWeights, layer: int
) -> tuple[Float[Tensor, "kv_head d_model d_head_v"], Float[Tensor, "head d_head_v d_model"]]:
    """Return the factors of a layer's OV circuits as they reach the stream.

    With folded weights the gain (and centring) of a norm on attention's output belongs to what is
    written, as the norm before attention belongs to what is read; its scale is left out.
    """
    left, right = (at_least_float32(factor) for factor in heads.ov_factors(layer))
    norm = heads.post_norms[layer]
    if heads.folded and norm is not None:
        right = norm.linear(right, right.new_ones(()))
    return left, right


def reading(
    heads: HeadWeights, layer: int, which: str, *, part: str | None = None
) -> Float[Tensor, "n d_model r"]:
    """Return what a layer's queries, keys or values read the stream by, unrotated.

    Args:
        heads: the weights.
        layer: layer, from 0.
        which: ``Q`` (a matrix a query head), ``K`` or ``V`` (one a key-value head).
        part: which of two QK circuits, for models that have two (MLA).
    """
    if which == "V":
        return at_least_float32(heads.ov_factors(layer)[0])
    return layer_factors(heads, "QK", layer, offset=None, part=part)["QK".index(which)]


def writers(heads: HeadWeights, layer: int, weights: Metric) -> Writers:
    """Return a layer's OV circuits as writers.

    Rᵀ R = Vᵀ V leaves ‖V O M‖ = ‖R O M‖, so that a writer needs no more rows than d_head_v; with
    Σ = C Cᵀ, R is of Cᵀ V.

    Args:
        heads: the weights.
        layer: layer, from 0.
        weights: Σ, the covariance of what heads read, if any.

    Raises:
        InputError: the weights are not finite.
    """
    left, right = (_moderate(factor) for factor in writing(heads, layer))
    left = _moderate(weights.left(left, layer)).to(right)
    core = triangular_factor(left)
    core = core.repeat_interleave(len(right) // len(core), dim=0)
    matrices = core @ right
    norm, zero = _norms(matrices, core, right, layer)
    _divide(matrices, norm, zero)
    return Writers(matrices, zero, frobenius(matrices @ matrices.mT))


def readers(heads: HeadWeights, layer: int, mode: str, **turned: Any) -> ReaderEnds:
    """Return a layer's circuits as readers: QK for ``Q``, QKᵀ for ``K``, OV for ``V``.

    M = left otherᵀ and Rᵀ R = otherᵀ other leave ‖A M‖ = ‖A left Rᵀ‖. A left that several heads
    share (W_K or W_V of a key-value head) stays shared.

    Raises:
        InputError: the weights are not finite.
    """
    if mode == "V":
        left, right = writing(heads, layer)
        other = right.mT
    else:
        queries, keys = layer_factors(heads, "QK", layer, **turned)
        left, other = (queries, keys) if mode == "Q" else (keys, queries)
    left, core = _moderate(left), triangular_factor(_moderate(other))
    if len(core) < len(left):
        core = core.repeat_interleave(len(left) // len(core), dim=0)
    whole = Readers(left, core).whole()
    lefts = left if len(left) == len(core) else left.repeat_interleave(len(core) // len(left), 0)
    norm, zero = _norms(whole, lefts, core, layer)
    _divide(whole, norm, zero)
    spread = frobenius(whole.mT @ whole)
    if len(left) == len(core):
        return ReaderEnds(whole, None, zero, spread)
    _divide(core, norm, zero)
    return ReaderEnds(left, core, zero, spread)


def _moderate(factor: Tensor) -> Tensor:
    """Scale matrices to a largest entry of 1 where their squares might over- or underflow."""
    largest = factor.abs().amax(dim=(1, 2), keepdim=True)
    if bool(((largest > 1e-6) & (largest < 1e6)).all()):
        return factor
    return factor / torch.where(largest > 0, largest, 1.0)


def _divide(matrices: Tensor, norm: Tensor, zero: Tensor) -> None:
    """Bring matrices to unit norm in place; what is zero to rounding becomes so."""
    matrices.div_(norm[:, None, None])
    if bool(zero.any()):
        matrices[zero] = 0.0


def _norms(product: Tensor, one: Tensor, other: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Return norms of products, 1 where a product is nothing but rounding, and where that is."""
    norm = frobenius(product)
    if not bool(torch.isfinite(norm).all()):
        bad = (~torch.isfinite(norm)).nonzero()[0].item()
        raise InputError(
            message(
                "heads",
                "finite",
                f"NaN or infinity in layer {layer}, head {bad}",
                "Look at the checkpoint.",
            )
        )
    rounding = one.shape[-1] * torch.finfo(norm.dtype).eps
    zero = norm <= rounding * frobenius(one) * frobenius(other)
    return torch.where(zero, 1.0, norm), zero
