"""Multi-head latent attention (DeepSeek-V2 and -V3), read as weights of the stream.

DeepSeek-AI 2024 (DeepSeek-V2, https://arxiv.org/abs/2405.04434, eqs. 9-19 and 37-47): queries come
from a normed latent x̂ W_DQ, the content part of keys and all values from another, x̂ W_DKV; the
rotary part of a key is read from x̂ itself and is one for all heads. An RMS norm is a gain and one
number a token, so up to that number every projection is a matrix of the stream:

    q_i^h = r_q(i) · (x̂_i W_Q^h + b_Q^h)              W_Q^h = W_DQ diag(g_q) W_UQ^h
    k_j^h = [r_kv(j) · content part | rotary part]     of x̂_j W_K^h + b_K^h
    v_j^h = r_kv(j) · (x̂_j W_V^h + b_V^h)             W_V^h = W_DKV diag(g_kv) W_UV^h

with r = 1 / rms of the latent. The paper calls W_DQ W^DQ and multiplies column vectors.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wvprobe._linalg import at_least_float32
from wvprobe.adapters.structure import Architecture
from wvprobe.adapters.weights import LayerWeights, Norm, norm, output_bias, output_weight
from wvprobe.errors import UnsupportedError


@dataclass(frozen=True)
class Projection:
    """A map down to a latent, and the ε of the norm behind it.

    Attributes:
        weight: [d_model, rank].
        bias: [rank], or None.
        eps: added to the latent's mean square.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float

    def scale(self, x_hat: Tensor) -> Tensor:
        """Return r = 1 / rms of the latent of every vector, [..., d_model] -> [...]."""
        latent = x_hat @ self.weight.to(x_hat.dtype)
        if self.bias is not None:
            latent = latent + self.bias.to(latent.dtype)
        return (latent.pow(2).mean(dim=-1) + self.eps).rsqrt()

    def folded(self, before: Norm | None) -> "Projection":
        """Return the projection that reads what comes before a norm of the stream, scaled."""
        if before is None:
            return self
        bias = self.bias
        if before.bias is not None:
            shift = before.bias.to(self.weight.dtype) @ self.weight
            bias = shift if bias is None else bias + shift
        return replace(self, weight=before.fold(self.weight), bias=bias)


@dataclass(frozen=True)
class Latent:
    """What the latent scales of one layer are computed from.

    Attributes:
        query: the map down to the query's latent; None where queries are read from the stream.
        key_value: the map down to the latent of keys and values.
        n_content: how many dimensions of a head come first and through the latent; the others
            are rotary.
    """

    query: Projection | None
    key_value: Projection
    n_content: int

    def scaled(self, which: str, projected: Tensor, x_hat: Tensor) -> Tensor:
        """Multiply queries, keys or values, [..., head, d], by their latent's scale."""
        if which == "Q":
            return projected if self.query is None else projected * self._of(self.query, x_hat)
        scale = self._of(self.key_value, x_hat)
        if which == "V":
            return projected * scale
        content, rotary = projected[..., : self.n_content], projected[..., self.n_content :]
        return torch.cat((content * scale, rotary), dim=-1)

    @staticmethod
    def _of(projection: Projection, x_hat: Tensor) -> Tensor:
        return projection.scale(x_hat)[..., None, None]

    def folded(self, before: Norm | None) -> "Latent":
        """Return the same latents read from what comes before a norm of the stream, scaled."""
        query = None if self.query is None else self.query.folded(before)
        return replace(self, query=query, key_value=self.key_value.folded(before))


def latent_weights(model: Any, arch: Architecture, layer: int) -> tuple[LayerWeights, Latent]:
    """Read one layer's latent attention as weights of the stream, scales apart.

    Raises:
        UnsupportedError: a latent's norm is no RMS norm.
    """
    attention = model.blocks[layer].attn
    n_content, rank = int(attention.original_component.qk_nope_head_dim), _rank(attention)
    w_q, b_q, query = _queries(model, arch, attention)
    down, down_bias = _linear(attention.kv_a_proj_with_mqa)
    up = _linear(attention.kv_b_proj)[0].unflatten(1, (arch.n_heads, -1))
    gain, eps = _gain(model, attention.kv_a_layernorm)
    through = (gain[:, None, None] * up).movedim(1, 0)  # [head, rank, content + d_head_v]
    w_kv = down[:, :rank] @ through
    shared = down[:, rank:].expand(arch.n_heads, -1, -1)
    b_k = b_v = None
    if down_bias is not None:
        b_kv = down_bias[:rank] @ through
        b_k = torch.cat((b_kv[..., :n_content], down_bias[rank:].expand(arch.n_heads, -1)), dim=-1)
        b_v = b_kv[..., n_content:]
    weights = LayerWeights(
        W_Q=w_q,
        W_K=torch.cat((w_kv[..., :n_content], shared), dim=-1),
        W_V=w_kv[..., n_content:],
        W_O=at_least_float32(output_weight(model, arch, layer)),
        b_Q=b_q,
        b_K=b_k,
        b_V=b_v,
        b_O=output_bias(model, layer),
    )
    bias = None if down_bias is None else down_bias[:rank]
    return weights, Latent(query, Projection(down[:, :rank].clone(), bias, eps), n_content)


def _queries(
    model: Any, arch: Architecture, attention: Any
) -> tuple[Tensor, Tensor | None, Projection | None]:
    if attention.original_component.q_lora_rank is None:
        weight = _linear(attention.q_proj)[0]
        return weight.unflatten(1, (arch.n_heads, -1)).movedim(1, 0), None, None
    down, bias = _linear(attention.q_a_proj)
    gain, eps = _gain(model, attention.q_a_layernorm)
    up = _linear(attention.q_b_proj)[0].unflatten(1, (arch.n_heads, -1)).movedim(1, 0)
    through = gain[:, None] * up
    b_q = None if bias is None else bias @ through
    return down @ through, b_q, Projection(down, bias, eps)


def _rank(attention: Any) -> int:
    return int(attention.original_component.kv_lora_rank)


def _linear(component: Any) -> tuple[Tensor, Tensor | None]:
    """Return a linear map's weight, [d_in, d_out], and bias, upcast before they are multiplied."""
    module = component.original_component
    bias = module.bias
    weight = at_least_float32(module.weight.detach()).T
    return weight, None if bias is None else at_least_float32(bias.detach())


def _gain(model: Any, component: Any) -> tuple[Tensor, float]:
    found = norm(model, component)
    if found.kind != "rms":
        raise UnsupportedError(
            f"{model.cfg.model_name} has a latent behind a norm that centres, which wvprobe does "
            "not model. Use HeadWeights.from_tensors with W_Q, W_K, W_V of your own."
        )
    return at_least_float32(found.gain), found.eps
