"""What a block's attention is rewritten to: heads one after another, or one head of full width."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wvprobe import adapters
from wvprobe._linalg import at_least_float32
from wvprobe._masks import visible
from wvprobe._picking import whole
from wvprobe.adapters import Architecture, AttentionCall, Rewrite, Rewritten
from wvprobe.errors import UnsupportedError


def in_sequence(order: Sequence[int]) -> Rewrite:
    """Return the rewrite x ← x + head_h(norm(x)), head after head in `order`, all of them.

    The first head's input is the block's own, so that it keeps its z; each further one costs a call
    of the block's attention. A norm on attention's output has the scale of the run side by side.
    """

    def rewrite(call: AttentionCall) -> Rewritten:
        z, stream, scale = call.z.clone(), at_least_float32(call.x), call.scale(call.z)
        for before, head in zip(order, order[1:], strict=False):
            stream = stream + call.share(z, [before], scale)
            z[:, :, head] = call.z_of(stream)[:, :, head]
        if scale is None:
            return Rewritten(z)
        return Rewritten(z, call.share(z, order, scale) + call.bias_share(scale))

    return rewrite


def full_width(model: Any, arch: Architecture, layer: int, times: int, step: float) -> Rewrite:
    """Return the rewrite x ← x + step · head(norm(x)), `times` times, with one head of full width.

    Its scores are s = Σ_h s_h/√h, through the model's soft cap, mask and window; its output is
    Σ_h pattern · v_h W_O^h. A norm on attention's output acts on each run's, with b_O in its scale.

    Raises:
        UnsupportedError: scores, or values, of this architecture are not read exactly.
    """
    pattern_and_values = _one_pattern(model, arch, layer)
    heads = range(arch.n_heads)

    def rewrite(call: AttentionCall) -> Rewritten:
        stream = at_least_float32(call.x)
        total, added = torch.zeros_like(at_least_float32(call.z)), torch.zeros_like(stream)
        for _ in range(times):
            pattern, values = pattern_and_values(call, stream)
            z = torch.einsum("bqk,bkhr->bqhr", pattern, values)
            scale = call.scale(z)
            share = step * call.share(z, heads, scale)
            stream, total = stream + share, total + step * z
            if scale is not None:
                # As everywhere, b_O counts once.
                added = added + share + call.bias_share(scale) / times
        return Rewritten(total, None if call.norm is None else added)

    return rewrite


def _one_pattern(
    model: Any, arch: Architecture, layer: int
) -> Callable[[AttentionCall, Tensor], tuple[Tensor, Tensor]]:
    """Return what maps a call and a stream to the one pattern and the values of all heads.

    [batch, query, key] and [batch, key, head, d_head_v].
    """
    recipe, values_at = adapters.recipe(model, arch, "scores", layer), ("v", layer)
    wanted = list(dict.fromkeys([*recipe.inputs, values_at]))
    cap, window = adapters.soft_cap(model, layer), adapters.sliding_window(model, layer)

    def compute(call: AttentionCall, stream: Tensor) -> tuple[Tensor, Tensor]:
        raw = call.read(stream, wanted)
        scores = recipe.compute(raw, whole).sum(dim=1) / arch.n_heads**0.5
        if cap is not None:
            scores = cap * (scores / cap).tanh()
        seen = visible(scores.shape[-1], causal=arch.causal, window=window).to(scores.device)
        seen = seen & _tokens(model, call)[:, None]
        # Not −inf: a row that sees padding alone would be NaN, which others take up through v.
        pattern = scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(dim=-1)
        group = arch.n_heads // arch.n_kv_heads
        return pattern, raw[values_at].to(pattern).repeat_interleave(group, dim=2)

    return compute


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
