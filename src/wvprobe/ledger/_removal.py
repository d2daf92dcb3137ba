"""Components taken out where they are written, and the model run again."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wvprobe import adapters
from wvprobe.activations import read_sites
from wvprobe.adapters import Architecture, Raw
from wvprobe.components import Component
from wvprobe.errors import MemoryLimitError
from wvprobe.words import encode

_TOKENS, _ROWS = 1_536, 64  # at most, of copies of the text that run side by side


class Removal(NamedTuple):
    """One component taken out at one position.

    Attributes:
        name: the component.
        position: where.
        embedded: [d_model] what the embedding wrote, for a component without a block; it is taken
            off the stream that enters block 0.
    """

    name: Component
    position: int
    embedded: Tensor | None = None


class Score(NamedTuple):
    """Which score is read."""

    layer: int
    head: int
    query: int
    key: int


def scores_without(
    model: Any,
    arch: Architecture,
    text: str,
    removals: Sequence[Sequence[Removal]],
    score: Score,
) -> Tensor:
    """Return one raw score after each set of removals, every later site computed from what is left.

    A head is taken out by setting its z to 0, an MLP by setting what it adds to 0, a bias by taking
    it off where it is added, a part of the embedding by taking it off the stream of block 0. There
    is at least one set.

    Returns:
        [set], float64.
    """
    found = []
    size = max(1, min(_ROWS, _TOKENS // len(encode(model, text).ids)))
    for start in range(0, len(removals), size):
        rows = removals[start : start + size]
        with adapters.changing(model, arch, _changes(model, arch, rows)):
            seen = read_sites(
                model,
                [text] * len(rows),
                "scores",
                layers=score.layer,
                positions=score.query,
                batch_size=len(rows),
            )
        found.append(seen["scores"][:, 0, score.head, 0, score.key].double())
    return torch.cat(found)


_Edit = Callable[[Tensor], Tensor]  # changes one row's site, [pos, ...], in place


def _changes(
    model: Any, arch: Architecture, rows: Sequence[Sequence[Removal]]
) -> dict[Raw, Callable[[Tensor], Tensor]]:
    edits: dict[Raw, list[tuple[int, _Edit]]] = {}
    for row, removed in enumerate(rows):
        for removal in removed:
            for raw, edit in _edits(model, arch, removal):
                edits.setdefault(raw, []).append((row, edit))

    def change(of: list[tuple[int, _Edit]]) -> Callable[[Tensor], Tensor]:
        def changed(value: Tensor) -> Tensor:
            if len(value) != len(rows):
                # A batch that was halved for want of memory has other texts in its rows.
                raise MemoryLimitError(
                    f"{len(rows)} copies of the text do not fit into memory. Shorten it, or check "
                    "fewer terms at a time."
                )
            value = value.clone()
            for row, edit in of:
                edit(value[row])
            return value

        return changed

    return {raw: change(of) for raw, of in edits.items()}


def _edits(model: Any, arch: Architecture, removal: Removal) -> list[tuple[Raw, _Edit]]:
    (kind, layer, head), at = removal.name, removal.position

    def less(vector: Tensor) -> _Edit:
        return lambda value: value[at].sub_(vector.to(value))

    if layer is None:
        if removal.embedded is None:
            return []
        return [(("resid_pre", 0), less(removal.embedded))]
    if kind == "head":
        return [(("z", layer), lambda value: value[at, head].zero_())]
    if kind == "mlp":
        return [(("mlp_out", layer), lambda value: value[at].zero_())]
    found: list[tuple[Raw, _Edit]] = []
    bias = adapters.output_bias(model, layer)
    if bias is not None:
        found.append((("attn_out", layer), less(bias)))
    norms = adapters.stream_norms(model, arch, layer)
    for site, norm in zip(("resid_mid", "resid_post"), norms or (), strict=False):
        if norm.bias is not None:
            found.append(((site, layer), less(norm.bias)))
    return found
