"""What heads write: W_O behind a layer's second norm, and what of it norms need."""

from dataclasses import replace
from typing import Any, overload

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._linalg import triangular
from wvprobe.adapters import Architecture, Norm


@overload
def on_cpu(norm: Norm) -> Norm: ...


@overload
def on_cpu(norm: None) -> None: ...


def on_cpu(norm: Norm | None) -> Norm | None:
    """Return a norm whose gain and bias are where results are."""
    if norm is None:
        return None
    bias = None if norm.bias is None else norm.bias.cpu()
    return replace(norm, gain=norm.gain.cpu(), bias=bias)


def output_map(model: Any, arch: Architecture, layer: int) -> Float[Tensor, "head r d_model"]:
    """Return W_O as what is added reads it, float64.

    Behind a second norm (Gemma-2) its gain and centring are part of it; what is left is a number
    a query, 1 / :func:`added_scale`.
    """
    weight = adapters.output_weight(model, arch, layer).cpu().double()
    norm = on_cpu(adapters.post_attention_norm(model, arch, layer))
    return weight if norm is None else norm.linear(weight, torch.ones(()).double())


def output_factor(weight: Float[Tensor, "head r d_model"]) -> Float[Tensor, "head r k"]:
    """Return a factor F of few columns with ‖z F‖ = ‖z W_O‖ for every z, so too inner products.

    W_O = F Q with orthonormal rows Q: by QR, since a Gram would square rounding errors.
    """
    return triangular(weight.mT).mT


def added_scale(
    model: Any, arch: Architecture, layer: int, attn_out: Float[Tensor, "*b d_model"]
) -> Float[Tensor, "*b"]:
    """Return the σ or rms that a second norm divides attention's output by; 1 without one."""
    norm = on_cpu(adapters.post_attention_norm(model, arch, layer))
    wide = attn_out.double()
    return torch.ones_like(wide[..., 0]) if norm is None else norm.scale(wide)[..., 0]


def head_values(
    arch: Architecture, values: Float[Tensor, "pos kv_head r"]
) -> Float[Tensor, "head pos r"]:
    """Return the values that every query head reads, float64."""
    group = arch.n_heads // arch.n_kv_heads
    return values.double().transpose(0, 1).repeat_interleave(group, dim=0)


def value_bias(model: Any, arch: Architecture, layer: int) -> Float[Tensor, "head r"]:
    """Return b_V of every query head, float64, 0 without one.

    NaN where it is no constant: a bias in the map down to a latent is scaled token by token.
    """
    found = adapters.layer_weight_parts(model, arch, [layer])["b_V"][0].cpu().double()
    if arch.mla and bool(found.any()):
        found = torch.full_like(found, torch.nan)
    return found.repeat_interleave(arch.n_heads // arch.n_kv_heads, dim=0)
