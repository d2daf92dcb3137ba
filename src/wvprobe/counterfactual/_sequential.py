"""What a model becomes when the heads of a block read, one after another, what the others wrote."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._effects import texts_or_prose
from wvprobe._validate import length, message, one_of
from wvprobe._validate import seed as checked_seed
from wvprobe.adapters import Architecture
from wvprobe.counterfactual._blocks import Layers, block_sets, measure_rewrites, told
from wvprobe.counterfactual._changes import ROUNDING, ChangeResult
from wvprobe.counterfactual._rewrites import in_sequence
from wvprobe.errors import InputError

ORDERS = ("natural", "reversed", "random")


@dataclass(frozen=True)
class SequentialResult(ChangeResult):
    """What running heads one after another does, by the blocks rewritten and the heads' order.

    Attributes:
        orders: the order of each setting, "" for the rounding.
        order_names: the orders tried.
        permutations: [order, layer, head] which head comes when.

    Examples:
        >>> texts = ["The river bank is closed.", "A power bank fell into the river."]
        >>> found = wvprobe.sequential_heads(model, texts, layers=[[0], [1]])
        >>> found.measure, found.kl.shape  # setting, text
        ('kl', torch.Size([3, 2]))
    """

    orders: tuple[str, ...]
    order_names: tuple[str, ...]
    permutations: Int[Tensor, "order layer head"]

    AXES: ClassVar = {**ChangeResult.AXES, "permutations": ("order", "layer", "head")}

    def _columns(self) -> dict[str, list[Any]]:
        return {"order": list(self.orders)}


def sequential_heads(
    model: Any,
    texts: str | Sequence[str] | None = None,
    *,
    layers: Layers = "each",
    orders: int | Sequence[str] = 1,
    seed: int = 0,
    prepend_bos: bool | None = None,
    progress: bool = False,
) -> SequentialResult:
    """Run the heads of a block one after another, each on the stream that those before it rewrote.

    x ← x + head_h(norm(x)) for every head h in turn, head_h being its share z_h W_O^h of what is
    added; b_O is added once, last. The MLP of a parallel block still reads the block's input; where
    a second norm acts on attention's output (Gemma-2) a head's share is normed with the scale of
    the run side by side; in a post-norm block (BERT) heads read x itself, and the block's norm acts
    on the sum, as ever. Everything within a head, masks and rotations included, is the model's own
    module at work. Of a rewritten block attention runs once a head.

    The setting ``bf16 rounding`` says what is small: the model as it is with its weights, and the
    tensors that pass, rounded to bf16.

    Args:
        model: a TransformerBridge.
        texts: the texts; None for the bundled held-out prose (some 5,600 tokens).
        layers: ``each`` rewrites every block alone, and all together; ``all`` only all together;
            ints are one set of blocks, sequences of ints a set each.
        orders: how many orders: 1 the natural one, 2 the reversed one too, further ones at
            random; or their names, ``natural``, ``reversed`` and ``random``, the last as often as
            wanted. A random order is another in every block.
        seed: seed of random orders, and of the intervals.
        prepend_bos: as in the bridge's ``to_tokens``.
        progress: whether to show a bar.

    Returns:
        Every measure of :class:`ChangeResult`, a row for each set of blocks and order.

    Raises:
        InputError: no such block or order, or a text without tokens of its own.

    Examples:
        >>> texts = ["The river bank is closed.", "A power bank fell into the river."]
        >>> found = wvprobe.sequential_heads(model, texts, layers=[[1]])
        >>> found.to_frame().setting.tolist()
        ['block 1, natural', 'bf16 rounding']
    """
    seed = checked_seed(seed)
    arch = adapters.architecture(model)
    sets, names = block_sets(arch, layers), _order_names(orders)
    permutations = _permutations(arch, names, seed)
    rows, rewrites = [], {}
    for order, permutation in zip(names, permutations, strict=True):
        for name, blocks in sets.items():
            rows.append((f"{name}, {order}", blocks, order))
            rewrites[f"{name}, {order}"] = {
                layer: in_sequence(permutation[layer].tolist()) for layer in blocks
            }
    given = texts_or_prose(texts)
    found = measure_rewrites(
        model, arch, given, rewrites, prepend_bos=prepend_bos, progress=progress
    )
    settings = {
        "texts": told(texts),
        "layers": [list(blocks) for blocks in sets.values()],
        "orders": list(names),
        "prepend_bos": prepend_bos,
    }
    return SequentialResult(
        provenance=adapters.provenance(model, seed=seed, **settings),
        **found._asdict(),
        settings=(*(name for name, _, _ in rows), ROUNDING),
        layers=(*(blocks for _, blocks, _ in rows), ()),
        orders=(*(order for _, _, order in rows), ""),
        order_names=names,
        permutations=permutations,
    )


def _order_names(orders: int | Sequence[str]) -> tuple[str, ...]:
    """Return the orders' names, random ones counted from 1."""
    if isinstance(orders, str):
        orders = (orders,)
    if not isinstance(orders, Sequence):
        count = length("orders", orders)
        orders = [*ORDERS[:2], *["random"] * (count - 2)][:count]
    checked = [one_of("orders", order, ORDERS) for order in orders]
    fixed = [order for order in checked if order != "random"]
    if not checked or len(set(fixed)) != len(fixed):
        raise InputError(message("orders", "at least one, the fixed ones once each", list(orders)))
    seen = [checked[:place].count("random") + 1 for place in range(len(checked))]
    pairs = zip(checked, seen, strict=True)
    return tuple(f"random {number}" if order == "random" else order for order, number in pairs)


def _permutations(
    arch: Architecture, names: Sequence[str], seed: int
) -> Int[Tensor, "order layer head"]:
    """Return which head comes when, in every block and order."""
    generator = torch.Generator().manual_seed(seed)
    natural = torch.arange(arch.n_heads).expand(arch.n_layers, -1)
    fixed = {"natural": natural, "reversed": natural.flip(1)}
    drawn = [
        fixed[name]
        if name in fixed
        else torch.stack(
            [torch.randperm(arch.n_heads, generator=generator) for _ in range(arch.n_layers)]
        )
        for name in names
    ]
    return torch.stack(drawn)
