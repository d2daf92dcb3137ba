"""What heads' coordinates are worth to the loss, from one backward pass over calibration text."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._effects import Batch, loss_batches
from wvprobe._linalg import at_least_float32
from wvprobe._progress import progress as progress_bar
from wvprobe.adapters import Architecture
from wvprobe.counterfactual._cuts import Cut
from wvprobe.errors import UnsupportedError
from wvprobe.words import encode


def loss_sensitivity(
    model: Any,
    arch: Architecture,
    texts: Sequence[str],
    cut: Cut,
    site: str,
    progress: bool = False,
) -> Float[Tensor, "layer head d"]:
    """Return the mean over tokens of (c ∂L/∂c)² of every coordinate c that a cut may drop.

    The diagonal of the empirical Fisher information of gates on the coordinates, a token an
    observation (Theis et al. 2018, https://arxiv.org/abs/1801.05787; for heads, Michel et al.
    2019): to second order half of it is what closing the gate adds to the loss. L is the summed
    loss of a text's own tokens, nats. Coordinates that come or go together share one gate.

    Args:
        model: a TransformerBridge.
        arch: its architecture.
        texts: calibration texts.
        cut: the coordinates.
        site: ``z`` or ``q``: what the cut acts on.
        progress: whether to show a bar.

    Raises:
        UnsupportedError: the model has no head, or sees what it would have to predict.
    """
    adapters.require_head(model, "allocation='loss'")
    if not arch.causal:
        raise UnsupportedError(
            f"{model.cfg.model_name} sees the tokens that a loss would have it predict, so "
            "allocation='loss' has no loss to go by. Use allocation='energy'."
        )
    encodings = [encode(model, text) for text in texts]
    encodings = [e for e in encodings if len(e.ids) > 1 and not all(e.special)]
    wanted = [(site, layer) for layer in range(arch.n_layers)]
    total, count = torch.zeros_like(cut.gains), 0
    batches = list(loss_batches(model, arch, encodings))
    with progress_bar(len(batches), "backward", progress) as advance:
        for batch in batches:
            found = adapters.gradients(
                model, arch, batch.ids, batch.mask, wanted, lambda x, b=batch: _loss(x, b)
            )
            mask = batch.mask.cpu().bool()
            count += int(mask.sum())
            for layer in range(arch.n_layers):
                x, slope = (each.cpu()[mask].double() for each in found[site, layer])
                total[layer] += _gated(x, slope, cut, layer)
            advance(1)
    return total / count


def _loss(logits: Tensor, batch: Batch) -> Tensor:
    row, at = batch.own[:, 1:].nonzero().unbind(1)
    log_p = at_least_float32(logits[row, at]).log_softmax(dim=-1)
    return -log_p.gather(1, batch.ids[row, at + 1][:, None]).sum()


def _gated(
    x: Float[Tensor, "token head d"], slope: Float[Tensor, "token head d"], cut: Cut, layer: int
) -> Float[Tensor, "head d"]:
    """Return Σ over tokens of squared slopes on the gates, shared out evenly within each gate."""
    if cut.centre is not None:
        x = x - cut.centre[layer]
    x, slope = x.transpose(0, 1), slope.transpose(0, 1)
    gates = (x @ cut.left[layer]) * (slope @ cut.right[layer].mT)
    d = gates.shape[-1]
    gates = torch.nn.functional.pad(gates, (0, -d % cut.step)).unflatten(-1, (-1, cut.step))
    each = gates.sum(dim=-1).square().sum(dim=1) / cut.step
    whole = each.repeat_interleave(cut.step, dim=-1)[:, :d]
    if d % cut.step:  # the last gate has fewer coordinates
        whole[:, -(d % cut.step) :] *= cut.step / (d % cut.step)
    return whole
