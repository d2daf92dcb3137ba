"""What cutting heads would cost in loss, from one backward pass over calibration text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._effects import Batch, batches
from wvprobe._linalg import at_least_float32
from wvprobe._progress import progress as progress_bar
from wvprobe.adapters import Architecture, Raw
from wvprobe.counterfactual._cuts import Cut
from wvprobe.errors import UnsupportedError
from wvprobe.words import encode

# Shares of d_head at which cut scores are run; costs in between are interpolated.
_GRID = (0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875)

Slopes = Mapping[Raw, tuple[Tensor, Tensor]]


def require_loss(model: Any, arch: Architecture) -> None:
    """Refuse allocation ``loss`` where there is none.

    Raises:
        UnsupportedError: the model has no head, or sees what it would have to predict.
    """
    adapters.require_head(model, "allocation='loss'")
    if not arch.causal:
        raise UnsupportedError(
            f"{model.cfg.model_name} sees the tokens that a loss would have it predict, so "
            "allocation='loss' has no loss to go by. Use allocation='energy'."
        )


def loss_costs(
    model: Any,
    arch: Architecture,
    texts: Sequence[str],
    cut: Cut,
    part: str,
    progress: bool = False,
) -> Float[Tensor, "layer head rank"]:
    """Return E (∂L/∂z · Δz)² of every head cut alone to every rank from 0 to d, nats².

    Δz is what the cut does to what the head puts out at a token, and the mean is over tokens: the
    empirical Fisher information in the direction of the cut (Theis et al. 2018,
    https://arxiv.org/abs/1801.05787), half of which is what it costs to second order. L is the
    summed loss of a text's own tokens. For scores Δz is that of a run with cut queries, in which
    every layer still reads what it reads otherwise: a slope on queries would say nothing of heads
    whose softmax is saturated, such as those that rest on a sink.

    Args:
        model: a TransformerBridge.
        arch: its architecture.
        texts: calibration texts.
        cut: what would be cut.
        part: ``OV`` or ``QK``.
        progress: whether to show a bar.
    """
    encodings = [encode(model, text) for text in texts]
    encodings = [e for e in encodings if len(e.ids) > 1 and not all(e.special)]
    wanted = [("z", layer) for layer in range(arch.n_layers)]
    measured = _value_costs if part == "OV" else _score_costs
    d = cut.gains.shape[-1]
    total = torch.zeros(arch.n_layers, arch.n_heads, d + 1, dtype=torch.float64)
    count, runs = 0, list(batches(model, arch, encodings))
    with progress_bar(len(runs), "backward", progress) as advance:
        for batch in runs:
            slopes = adapters.gradients(
                model, arch, batch.ids, batch.mask, wanted, lambda x, b=batch: _loss(x, b)
            )
            total += measured(model, arch, batch, slopes, cut)
            count += int(batch.mask.sum())
            advance(1)
    return total / count


def _loss(logits: Tensor, batch: Batch) -> Tensor:
    row, at = batch.own[:, 1:].nonzero().unbind(1)
    log_p = at_least_float32(logits[row, at]).log_softmax(dim=-1)
    return -log_p.gather(1, batch.ids[row, at + 1][:, None]).sum()


def _value_costs(
    _model: Any, arch: Architecture, batch: Batch, slopes: Slopes, cut: Cut
) -> Float[Tensor, "layer head rank"]:
    """Every rank at once: what is lost is the sum over the coordinates dropped."""
    mask, found = batch.mask.cpu().bool(), []
    for layer in range(arch.n_layers):
        z, slope = (x.cpu()[mask].double().transpose(0, 1) for x in slopes["z", layer])
        z = z if cut.centre is None else z - cut.centre[layer][:, None]
        each = (z @ cut.left[layer]) * (slope @ cut.right[layer].mT)
        lost = each.flip(-1).cumsum(dim=-1).flip(-1).square().sum(dim=1)
        found.append(torch.nn.functional.pad(lost, (0, 1)))
    return torch.stack(found)


def _score_costs(
    model: Any, arch: Architecture, batch: Batch, slopes: Slopes, cut: Cut
) -> Float[Tensor, "layer head rank"]:
    """A forward for each of a few ranks, in which z is put back after it has been seen."""
    d = cut.gains.shape[-1]
    ranks = sorted({int(share * d) // cut.step * cut.step for share in _GRID})
    costs = torch.zeros(arch.n_layers, arch.n_heads, len(ranks) + 1, dtype=torch.float64)
    mask = batch.mask.bool()

    def seen(layer: int, number: int) -> Callable[[Tensor], Tensor]:
        def put_back(z: Tensor) -> Tensor:
            plain, slope = slopes["z", layer]
            lost = ((z - plain) * slope)[mask].sum(dim=-1)
            costs[layer, :, number] = lost.cpu().double().square().sum(dim=0)
            return plain

        return put_back

    for number, rank in enumerate(ranks):
        maps = cut.maps(torch.full((arch.n_layers, arch.n_heads), rank))
        changes: dict[Raw, Callable[[Tensor], Tensor]] = {}
        for layer in range(arch.n_layers):
            changes["q", layer] = lambda q, a=maps[layer]: torch.einsum(
                "bphd,hde->bphe", q, a.to(q)
            )
            changes["z", layer] = seen(layer, number)
        with adapters.changing(model, arch, changes):
            adapters.run_backbone(model, batch.ids, batch.mask)
    return _between(costs, [*ranks, d])


def _between(
    costs: Float[Tensor, "layer head grid"], ranks: Sequence[int]
) -> Float[Tensor, "layer head rank"]:
    """Return costs at every rank, on straight lines between those measured."""
    found = []
    for at, (start, end) in enumerate(zip(ranks[:-1], ranks[1:], strict=True)):
        share = torch.arange(end - start, dtype=costs.dtype) / (end - start)
        found.append(costs[..., at, None] * (1 - share) + costs[..., at + 1, None] * share)
    return torch.cat([*found, costs[..., -1:]], dim=-1)
