"""Gradients of a loss on what the forward carries at some sites."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wvprobe.adapters.boot import require_head
from wvprobe.adapters.hooks import Raw, forward_arguments, hook_point, shaped
from wvprobe.adapters.structure import Architecture


def gradients(
    model: Any,
    arch: Architecture,
    tokens: Tensor,
    mask: Tensor,
    wanted: Sequence[Raw],
    loss: Callable[[Tensor], Tensor],
) -> dict[Raw, tuple[Tensor, Tensor]]:
    """Run padded tokens once forward and once backward; parameters get no gradients.

    Args:
        model: the bridge.
        arch: its architecture.
        tokens: [batch, pos] token ids, as in :func:`run_backbone`.
        mask: likewise.
        wanted: (raw site, layer) pairs.
        loss: maps logits, [batch, pos, d_vocab], to a number.

    Returns:
        (raw site, layer) -> its tensor and the loss's gradient on it, shaped as by :func:`shaped`.

    Raises:
        UnsupportedError: the checkpoint carried no head; an architecture lacks a site.
    """
    require_head(model, "the gradient of a loss")
    seen: dict[Raw, Tensor] = {}

    def begin(_module: Any, _inputs: Any, embedded: Tensor) -> Tensor:
        # The graph begins here, so that frozen parameters do not matter.
        return embedded.detach().requires_grad_()

    def keeper(raw: Raw) -> Callable[..., None]:
        def keep(_module: Any, _inputs: Any, value: Tensor) -> None:
            seen[raw] = value

        return keep

    handles = [model.embed.original_component.register_forward_hook(begin)]
    try:
        for raw in wanted:
            handles.append(hook_point(model, arch, *raw).register_forward_hook(keeper(raw)))
        with torch.enable_grad():
            found = loss(model.original_model(**forward_arguments(model, tokens, mask)).logits)
            slopes = torch.autograd.grad(found, [seen[raw] for raw in wanted])
    finally:
        for handle in handles:
            handle.remove()
    size = tokens.shape
    return {
        raw: (
            shaped(arch, raw[0], seen[raw].detach(), *size),
            shaped(arch, raw[0], slope, *size),
        )
        for raw, slope in zip(wanted, slopes, strict=True)
    }
