"""Attention-only models of equal parameters, many at a time: one more axis, a model a row."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float, Num
from torch import Generator, Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from wvprobe.counterfactual._tasks import Task

_EPSILON = 1e-6
# First weights beside those that would keep a vector's size: heads begin small beside embeddings.
_POSITIONS, _OUT, _UNEMBED = 0.1, 0.3, 0.3


class Architecture(NamedTuple):
    """Where the same heads stand.

    Attributes:
        name: what it is called.
        layers: the widths of each layer's heads.
    """

    name: str
    layers: tuple[tuple[int, ...], ...]


def architectures(n_heads: int, d_head: int) -> tuple[Architecture, ...]:
    """Return every arrangement of `n_heads` · `d_head` dimensions that is compared.

    ``halves`` (two layers of half the heads) is what lies between the two sides.
    """
    total, half = n_heads * d_head, n_heads // 2
    cuts = [total * h * (h + 1) // (n_heads * (n_heads + 1)) for h in range(n_heads + 1)]
    uneven = tuple(end - start for start, end in zip(cuts[:-1], cuts[1:], strict=True))
    return (
        Architecture("parallel", ((d_head,) * n_heads,)),
        Architecture("sequential", ((d_head,),) * n_heads),
        Architecture("wide", ((total,),)),
        Architecture("uneven", (uneven,)),
        Architecture("halves", ((d_head,) * half, (d_head,) * (n_heads - half))),
    )


def shapes(architecture: Architecture, task: Task, d_model: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of one model.

    There are no biases, and norms have no gain (one could be folded into W_Q, W_K and W_V), so that
    every arrangement of the same widths has the same number of parameters.
    """
    found: dict[str, tuple[int, ...]] = {
        "embed": (task.n_marks, d_model),
        "positions": (task.n_positions, d_model),
        "unembed": (d_model, task.n_answers * task.symbols),
    }
    for number, widths in enumerate(architecture.layers):
        found[f"qkv.{number}"] = (d_model, 3, sum(widths))
        found[f"out.{number}"] = (sum(widths), d_model)
    return found


def n_parameters(architecture: Architecture, task: Task, d_model: int) -> int:
    """Count one model's parameters."""
    return sum(map(math.prod, shapes(architecture, task, d_model).values()))


def multiply_adds(architecture: Architecture, task: Task, d_model: int) -> int:
    """Count one forward's multiplications for one sequence, matrix products and all the rest.

    Products are equal in all architectures. What differs is counted too: a norm's two a number
    (its square, and its scale), and three for each pair of positions and head (a score's scale,
    its exponential and the division by their sum). Sums of embeddings take none.
    """
    n, total = task.n_positions, sum(map(sum, architecture.layers))
    pairs, heads = n * (n + 1) // 2, sum(map(len, architecture.layers))
    products = 4 * n * d_model * total + 2 * pairs * total
    readout = task.questions * d_model * (2 + task.n_answers * task.symbols)
    norms = 2 * n * d_model * len(architecture.layers)
    return products + readout + norms + 3 * pairs * heads


def first_weights(
    architecture: Architecture, task: Task, d_model: int, generator: Generator
) -> dict[str, Float[Tensor, "..."]]:
    """Return one model's weights before training, in double precision.

    One draw gives all architectures the same embeddings and the same heads, dimension by dimension:
    what differs is where they stand.
    """

    def normal(*shape: int, scale: float) -> Tensor:
        return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

    widths = [sum(layer) for layer in architecture.layers]
    total, keep = sum(widths), d_model**-0.5
    found = {
        "embed": normal(task.n_marks, d_model, scale=1.0),
        "positions": normal(task.n_positions, d_model, scale=_POSITIONS),
        "unembed": normal(d_model, task.n_answers * task.symbols, scale=_UNEMBED * keep),
    }
    qkv = normal(d_model, 3, total, scale=keep).split(widths, dim=2)
    out = normal(total, d_model, scale=_OUT * total**-0.5).split(widths)
    for number, (inward, outward) in enumerate(zip(qkv, out, strict=True)):
        found[f"qkv.{number}"], found[f"out.{number}"] = inward, outward
    return found


def forward(
    weights: Mapping[str, Float[Tensor, "..."]],
    architecture: Architecture,
    task: Task,
    marks: Num[Tensor, "row sequence pos mark"],
) -> Float[Tensor, "row sequence question answer symbol"]:
    """Run many models at once, each on sequences of its own, and return logits of the answers.

    x = Σ embeddings + position; in each layer x ← x + Σ_h z_h W_O^h with heads that read x / rms(x)
    and look at no later position; logits = x / rms(x) U. A row's numbers do not depend on the
    other rows.

    Args:
        weights: of :func:`shapes`, with a first axis of rows.
        architecture: where the heads stand.
        task: what the sequences are of.
        marks: the sequences; 1 where a mark stands.
    """
    rows, n, pos, _ = marks.shape
    x = marks.flatten(1, 2) @ weights["embed"]
    x = (x.unflatten(1, (n, pos)) + weights["positions"][:, None]).flatten(1, 2)
    for number, widths in enumerate(architecture.layers):
        read = _normed(x) @ weights[f"qkv.{number}"].flatten(2)
        z = _heads(read.view(rows * n, pos, 3, sum(widths)), widths)
        x = x + z.view(rows, n * pos, -1) @ weights[f"out.{number}"]
    asked = x.view(rows, n, pos, -1)[:, :, task.symbols :].flatten(1, 2)
    logits = _normed(asked) @ weights["unembed"]
    return logits.view(rows, n, task.questions, task.n_answers, task.symbols)


def _normed(x: Tensor) -> Tensor:
    return rms_norm(x, x.shape[-1:], None, _EPSILON)


def _heads(
    qkv: Float[Tensor, "batch pos 3 width"], widths: tuple[int, ...]
) -> Float[Tensor, "batch pos width"]:
    """Return Concat(z) of a layer; neighbours of one width are computed together."""
    found, at = [], 0
    while at < len(widths):
        width = widths[at]
        end = at + next(
            (i for i, other in enumerate(widths[at:]) if other != width), len(widths) - at
        )
        first, last = sum(widths[:at]), sum(widths[:end])
        heads = qkv[..., first:last].unflatten(-1, (end - at, width))
        q, k, v = heads.transpose(1, 3).unbind(2)
        z = scaled_dot_product_attention(q, k, v, is_causal=True)
        found.append(z.transpose(1, 2).flatten(2))
        at = end
    return found[0] if len(found) == 1 else torch.cat(found, dim=2)
