"""What each site of `capture` is made of.

Most sites are a hook point's tensor. `head_out` and `scores` are computed from several, since no
hook gives them: TransformerLens's result hook is off by default, and its score hook is masked,
or holds the pattern (BERT, OPT).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wvprobe._linalg import at_least_float32
from wvprobe._rotary import rotate_half
from wvprobe.adapters.hooks import Raw, hook_point
from wvprobe.adapters.rotation import first_rotated, rotary, turns_neighbours
from wvprobe.adapters.structure import Architecture
from wvprobe.adapters.weights import (
    alibi_slopes,
    output_weight,
    post_attention_norm,
    score_scale,
)

# Site -> axes after [item] or [item, pos]; `stream` has one layer more than the model has blocks.
SITES: dict[str, tuple[str, ...]] = {
    "stream": ("layer", "d_model"),
    "resid_pre": ("layer", "d_model"),
    "resid_mid": ("layer", "d_model"),
    "resid_post": ("layer", "d_model"),
    "attn_in": ("layer", "d_model"),
    "q": ("layer", "head", "d_head"),
    "k": ("layer", "kv_head", "d_head"),
    "v": ("layer", "kv_head", "d_head_v"),
    "z": ("layer", "head", "d_head_v"),
    "head_out": ("layer", "head", "d_model"),
    "attn_out": ("layer", "d_model"),
    "attn_added": ("layer", "d_model"),
    "mlp_out": ("layer", "d_model"),
    "pattern": ("layer", "head", "query", "key"),
    "scores": ("layer", "head", "query", "key"),
}
# Sites whose position axis is the query axis, beside a key axis.
PAIR_SITES = ("pattern", "scores")

Pick = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Recipe:
    """How one site of one layer comes about.

    Attributes:
        inputs: the hook points it is made from, (raw site, layer).
        compute: maps their tensors, [batch, pos, ...], and a function that picks positions to
            the site's tensor, [batch, picked, ...] (pairs: [batch, head, picked, key]).
    """

    inputs: tuple[Raw, ...]
    compute: Callable[[Mapping[Raw, Tensor], Pick], Tensor]


def layers_of(arch: Architecture, site: str) -> int:
    """Return how many layers a site has: streams are counted from the embedding on."""
    return arch.n_layers + (site == "stream")


def recipe(model: Any, arch: Architecture, site: str, layer: int) -> Recipe:
    """Return how `site` of `layer` is made.

    Raises:
        UnsupportedError: the architecture has no such site.
    """
    if site == "stream":
        last = layer == arch.n_layers
        source = ("resid_post", layer - 1) if last else ("resid_pre", layer)
        return _checked(model, arch, Recipe((source,), partial(_pick_one, source)))
    if site == "head_out":
        return _checked(model, arch, _head_out(model, arch, layer))
    if site == "scores":
        return _checked(model, arch, _scores(model, arch, layer))
    if site == "k" and arch.mla:
        inputs, keys = _keys(model, arch, layer)
        return Recipe(inputs, lambda values, pick: pick(keys(values)))
    source = (site, layer)
    compute = _pick_pairs if site in PAIR_SITES else _pick_one
    return _checked(model, arch, Recipe((source,), partial(compute, source)))


def _checked(model: Any, arch: Architecture, made: Recipe) -> Recipe:
    for raw, layer in made.inputs:
        hook_point(model, arch, raw, layer)
    return made


def _pick_one(source: Raw, values: Mapping[Raw, Tensor], pick: Pick) -> Tensor:
    return pick(values[source])


def _pick_pairs(source: Raw, values: Mapping[Raw, Tensor], pick: Pick) -> Tensor:
    return pick(values[source].transpose(1, 2)).transpose(1, 2)


def _head_out(model: Any, arch: Architecture, layer: int) -> Recipe:
    """z_h W_O^h; behind a second norm, its share of what is added, the norm's scale frozen."""
    norm = post_attention_norm(model, arch, layer)
    z_at, out_at = ("z", layer), ("attn_out", layer)

    def compute(values: Mapping[Raw, Tensor], pick: Pick) -> Tensor:
        w_o = output_weight(model, arch, layer)
        heads = torch.einsum("bphe,hed->bphd", pick(values[z_at]), w_o)
        if norm is None:
            return heads
        scale = norm.scale(pick(values[out_at]))[:, :, None]
        return norm.linear(heads, scale)

    return Recipe((z_at,) if norm is None else (z_at, out_at), compute)


def _keys(
    model: Any, arch: Architecture, layer: int
) -> tuple[tuple[Raw, ...], Callable[[Mapping[Raw, Tensor]], Tensor]]:
    """Return what keys before rotation are made of, and how: [batch, pos, kv_head, d_head]."""
    if not arch.mla:
        source = ("k", layer)
        return (source,), lambda values: values[source]
    # The content part comes out of the latent, a head each; the rotary part is one for all.
    up, down, n_content = ("kv_up", layer), ("kv_down", layer), first_rotated(model, arch, layer)

    def keys(values: Mapping[Raw, Tensor]) -> Tensor:
        content = values[up][..., :n_content]
        shared = values[down][..., n_content - arch.d_head :]
        return torch.cat((content, shared[:, :, None].expand(*content.shape[:-1], -1)), dim=-1)

    return (up, down), keys


def _scores(model: Any, arch: Architecture, layer: int) -> Recipe:
    """C · q·k (+ slope · key position), before a soft cap, of every pair, masked ones too."""
    scale, slopes = score_scale(model, layer), alibi_slopes(model, arch)
    # Neighbours are turned by our own tables; elsewhere the model's are read as they run.
    own = rotary(model, arch, layer) if turns_neighbours(model) else None
    tables = arch.position == "rotary" and own is None
    start = first_rotated(model, arch, layer)
    sources, keys_of = _keys(model, arch, layer)
    q, cos, sin = ("q", layer), ("cos", layer), ("sin", layer)

    def compute(values: Mapping[Raw, Tensor], pick: Pick) -> Tensor:
        # In half precision q·k overflows where keys are large, so it is never taken in it.
        queries, keys = (at_least_float32(x) for x in (values[q], keys_of(values)))
        positions = torch.arange(keys.shape[1], device=keys.device)
        if tables:
            turn = (at_least_float32(values[cos]), at_least_float32(values[sin]), start)
            queries, keys = (rotate_half(x, *turn) for x in (queries, keys))
        elif own is not None:
            turn = (positions[:, None], len(positions))
            queries, keys = (own.rotate(x, *turn) for x in (queries, keys))
        queries = pick(queries).unflatten(2, (arch.n_kv_heads, -1))
        scores = scale * torch.einsum("bpkge,bske->bkgps", queries, keys).flatten(1, 2)
        if slopes is not None:
            scores = scores + slopes.to(scores.dtype)[:, None, None] * positions
        return scores

    return Recipe((q, *sources, *((cos, sin) if tables else ())), compute)
