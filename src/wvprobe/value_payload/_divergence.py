"""How far the next token's distribution moves when one head's values at one token are others."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._types import HeadId
from wvprobe.activations import PADDED_DTYPES, padded

_NUMBERS = 2**26  # logits in memory at a time


def divergences(
    model: Any,
    arch: Any,
    tokens: Sequence[tuple[int, ...]],
    source: Sequence[int],
    places: Sequence[int],
    changes: Mapping[HeadId, Float[Tensor, "kind item d_head_v"]],
) -> dict[HeadId, Float[Tensor, "kind item"]]:
    """Return KL(as it is ‖ changed) in nats of the next token at `places`.

    Args:
        model: the bridge, with a head.
        arch: its architecture.
        tokens: each text's token ids.
        source: the token whose value changes.
        places: the token whose next one is predicted.
        changes: for each key-value head what is added to its value.
    """
    found = {head: torch.zeros(delta.shape[:2]).double() for head, delta in changes.items()}
    for rows in _batches(tokens, arch.d_vocab, model):
        ids, mask = padded([tokens[i] for i in rows], model.cfg.device)
        at = torch.arange(len(rows), device=ids.device)
        here = torch.tensor([source[i] for i in rows], device=ids.device)
        there = torch.tensor([places[i] for i in rows], device=ids.device)
        plain = _next(model, ids, mask, at, there)
        for head, delta in changes.items():
            for kind in range(len(delta)):
                moved = delta[kind, rows].to(ids.device)

                change = _adding(at, here, head.head, moved)
                with adapters.changing(model, arch, {("v", head.layer): change}):
                    other = _next(model, ids, mask, at, there)
                both = (plain.exp() * (plain - other)).nan_to_num(nan=0.0).sum(dim=-1)
                found[head][kind, rows] = both.clamp(min=0.0).cpu()
    return found


def _adding(rows: Tensor, places: Tensor, head: int, moved: Tensor) -> Callable[[Tensor], Tensor]:
    """Return what adds to one head's values, one token a row: [batch, pos, kv_head, d_head_v]."""

    def change(value: Tensor) -> Tensor:
        value = value.clone()
        value[rows, places, head] += moved.to(value.dtype)
        return value

    return change


def _next(model: Any, ids: Tensor, mask: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    """Return log probabilities of the next token, [row, vocabulary], in double precision."""
    return adapters.logits(model, ids, mask)[rows, places].double().log_softmax(dim=-1)


def _batches(tokens: Sequence[tuple[int, ...]], d_vocab: int, model: Any) -> list[list[int]]:
    order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
    regime = adapters.length_regime(model, adapters.architecture(model))
    batches: list[list[int]] = []
    for i in order:
        size = len(tokens[i])
        first = len(tokens[batches[-1][0]]) if batches else 0
        # As in capture: no padding in precisions that it taints, nor between rotations that differ.
        alike = batches and regime(first) == regime(size)
        alike = alike and (first == size or model.cfg.dtype in PADDED_DTYPES)
        if alike and (len(batches[-1]) + 1) * size * d_vocab <= _NUMBERS:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
