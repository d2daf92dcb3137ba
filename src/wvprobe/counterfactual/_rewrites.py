"""What a block's attention is rewritten to: heads one after another, or one head of full width."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wvprobe import adapters
from wvprobe._linalg import at_least_float32
from wvprobe._masks import visible
from wvprobe._picking import whole
from wvprobe.adapters import Architecture, AttentionCall, Rewrite
from wvprobe.errors import UnsupportedError


def in_sequence(order: Sequence[int]) -> Rewrite:
    """Return the rewrite x ← x + head_h(norm(x)), head after head in `order`, all of them.

    The first head's input is the block's own, so that it keeps its z; each further one costs a call
    of the block's attention.
    """

    def rewrite(call: AttentionCall) -> Tensor:
        z, stream = call.z.clone(), at_least_float32(call.x)
        for before, head in zip(order, order[1:], strict=False):
            stream = stream + call.added(z, [before])
            z[:, :, head] = call.z_of(stream)[:, :, head]
        return z

    return rewrite


def full_width(model: Any, arch: Architecture, layer: int, times: int, step: float) -> Rewrite:
    """Return the rewrite x ← x + step · head(norm(x)), `times` times, with one head of full width.

    Its scores are s = Σ_h s_h/√h, through the model's soft cap, mask and window; its output is
    Σ_h pattern · v_h W_O^h.

    Raises:
        UnsupportedError: scores, or values, of this architecture are not read exactly.
    """
    recipe = adapters.recipe(model, arch, "scores", layer)
    values_at = ("v", layer)
    cap, window = adapters.soft_cap(model, layer), adapters.sliding_window(model, layer)
    heads = range(arch.n_heads)

    def z_of(call: AttentionCall, stream: Tensor) -> Tensor:
        raw = call.read(stream, list(dict.fromkeys([*recipe.inputs, values_at])))
        scores = recipe.compute(raw, whole).sum(dim=1) / arch.n_heads**0.5
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        seen = visible(scores.shape[-1], causal=arch.causal, window=window).to(scores.device)
        seen = seen & _tokens(model, call)[:, None]
        # Not −inf: a row that sees padding alone would be NaN, which others take up through v.
        pattern = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(dim=-1)
        values = raw[values_at].to(pattern).repeat_interleave(arch.n_heads // arch.n_kv_heads, 2)
        return torch.einsum("bqk,bkhr->bqhr", pattern, values)

    def rewrite(call: AttentionCall) -> Tensor:
        stream, total = at_least_float32(call.x), torch.zeros_like(at_least_float32(call.z))
        for _ in range(times):
            z = step * z_of(call, stream)
            total = total + z
            stream = stream + call.added(z, heads)
        return total

    return rewrite


def _tokens(model: Any, call: AttentionCall) -> Tensor:
    """Return [batch, key], True for tokens."""
    if call.mask is None:
        return torch.ones(call.x.shape[:2], dtype=torch.bool, device=call.x.device)
    if call.mask.dim() != 2:
        raise UnsupportedError(
            f"{model.cfg.model_name} runs with a mask of {call.mask.dim()} dimensions; one head in "
            "place of several needs one of tokens and padding, [batch, pos]."
        )
    return call.mask.bool()
