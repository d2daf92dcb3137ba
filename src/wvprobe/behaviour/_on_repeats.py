"""Scores of every head on random tokens given twice; a row a sequence."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._linalg import at_least_float32
from wvprobe._single_tokens import set_apart
from wvprobe._validate import message
from wvprobe.adapters import Architecture
from wvprobe.behaviour._rows import Masks, Rows, tokenized
from wvprobe.behaviour._streaming import Tokens, each_layer
from wvprobe.behaviour._targets import REPEAT_SCORES, attention_to, repeat_keys
from wvprobe.errors import InputError


def repeats(
    model: Any, arch: Architecture, samples: int, length: int, generator: torch.Generator
) -> list[Tokens]:
    """Draw sequences of `length` distinct ordinary tokens, each given twice.

    Raises:
        InputError: the vocabulary has fewer ordinary tokens, or the context is too short.
    """
    around = tokenized(model, "a")
    before, after = around.ids[: around.own.start], around.ids[around.own.stop :]
    size = len(before) + 2 * length + len(after)
    if arch.n_ctx is not None and size > arch.n_ctx:
        longest = (arch.n_ctx - len(before) - len(after)) // 2
        hint = f"Two copies must fit into the context of {arch.n_ctx} tokens."
        raise InputError(message("length", f"at most {longest}", length, hint))
    ordinary = torch.tensor(
        sorted(set(range(arch.d_vocab)) - set_apart(model.tokenizer, arch.d_vocab))
    )
    if length > len(ordinary):
        expected = f"at most {len(ordinary)}, the number of ordinary tokens"
        raise InputError(message("length", expected, length))
    added = (True,) * len(before) + (False,) * (2 * length) + (True,) * len(after)
    drawn = []
    for _ in range(samples):
        chosen = ordinary[torch.randperm(len(ordinary), generator=generator)[:length]].tolist()
        drawn.append(Tokens((*before, *chosen, *chosen, *after), added))
    return drawn


def on_repeats(
    model: Any,
    arch: Architecture,
    sequences: Sequence[Tokens],
    length: int,
    batch_size: int | Literal["auto"],
    progress: bool,
) -> Rows:
    """Measure :data:`REPEAT_SCORES`, and copying where the model has a linear head."""
    rows, masks = Rows((*REPEAT_SCORES, "copying"), len(sequences), arch), Masks(model, arch)
    keys = repeat_keys(sequences[0], length)
    unembedding = adapters.unembedding(model, arch)
    copying = None
    if not isinstance(unembedding, str):
        copying = _Copying(model, arch, unembedding, sequences, length)

    def use(item: int, layer: int, seen: Mapping[str, Tensor]) -> None:
        mask = masks(layer, len(sequences[item].ids))
        rows.put(0, item, layer, attention_to(seen["pattern"], keys, mask))
        if copying is not None:
            copying.take(item, layer, seen)

    sites = ("pattern",) if copying is None else ("pattern", *copying.sites)
    each_layer(model, arch, sequences, sites, use, batch_size=batch_size, progress=progress)
    if copying is not None:
        rows.values[-1] = copying.rises
        rows.chance[-1] = 0.0
    return rows


class _Copying:
    """How much attending to a token raises that token's own logit, on the direct path.

    Attributes:
        sites: raw sites that are read beside the pattern.
        rises: [sequence, layer, head] mean over queries of Σ_j a_ij (v_j W_O W_U[:, t_j] − its
            mean over the sequence's tokens), with the scales of norms behind it frozen.
    """

    def __init__(
        self,
        model: Any,
        arch: Architecture,
        unembedding: adapters.Unembedding,
        sequences: Sequence[Tokens],
        length: int,
    ) -> None:
        self.arch, self.unembedding = arch, unembedding
        self.sequences, self.length = sequences, length
        self.sites = ("v", "resid_post", *(("attn_out",) if arch.sandwich else ()))
        self.norms = [
            adapters.post_attention_norm(model, arch, layer) for layer in range(arch.n_layers)
        ]
        self.outputs = [
            at_least_float32(adapters.output_weight(model, arch, layer))
            for layer in range(arch.n_layers)
        ]
        shape = (len(sequences), arch.n_layers, arch.n_heads)
        self.rises = torch.zeros(shape, dtype=torch.float64)
        # Of sequences on their way: [layer][head, query], before the final norm's scale is known.
        self._waiting: dict[int, list[Tensor]] = {}

    def take(self, item: int, layer: int, seen: Mapping[str, Tensor]) -> None:
        """Take in one layer of a sequence; the last one completes it."""
        own = self.sequences[item].own
        group = self.arch.n_heads // self.arch.n_kv_heads
        values = seen["v"][own].repeat_interleave(group, dim=1)
        raised = self._raised(values, layer, self._unembedded(item))
        rise = torch.einsum("hqk,hk->hq", seen["pattern"][:, own, own], raised)
        norm = self.norms[layer]
        if norm is not None:
            rise = rise / norm.scale(seen["attn_out"][own])[:, 0]
        self._waiting.setdefault(item, []).append(rise)
        if layer < self.arch.n_layers - 1:
            return
        rises = torch.stack(self._waiting.pop(item))
        if self.unembedding.norm is not None:
            rises = rises / self.unembedding.norm.scale(seen["resid_post"][own])[:, 0]
        self.rises[item] = self.unembedding.scale * rises.mean(dim=-1).cpu().double()

    def _unembedded(self, item: int) -> Float[Tensor, "d_model token"]:
        """Return W_U of a sequence's distinct tokens less its mean, the final norm's gain in it."""
        start = self.sequences[item].own.start
        ids = list(self.sequences[item].ids[start : start + self.length])
        columns = at_least_float32(self.unembedding.weight[ids]).T
        columns = columns - columns.mean(dim=-1, keepdim=True)
        return columns if self.unembedding.norm is None else self.unembedding.norm.fold(columns)

    def _raised(
        self,
        values: Float[Tensor, "key head d_head_v"],
        layer: int,
        unembedded: Float[Tensor, "d_model token"],
    ) -> Float[Tensor, "head key"]:
        """Return by how much each key's value, through W_O, raises the key's own token."""
        norm, outputs = self.norms[layer], self.outputs[layer]
        if norm is not None:
            outputs = norm.linear(outputs, outputs.new_ones(()))
        read = outputs @ unembedded.to(outputs)  # [head, d_head_v, token]
        own = torch.arange(len(values), device=values.device) % self.length
        return torch.einsum("khe,hek->hk", values.to(read), read[:, :, own])
