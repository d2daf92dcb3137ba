"""The embedding after layer 0's MLP, computed by the model's own block."""

from typing import Any

import torch
from torch import Tensor

from wvprobe._linalg import at_least_float32
from wvprobe._progress import progress
from wvprobe.adapters.hooks import changing, reading, run_backbone, shaped
from wvprobe.adapters.structure import Architecture
from wvprobe.errors import UnsupportedError

_TILE = 1_024  # tokens at once: some megabytes of a wide MLP


def effective_embedding(model: Any, arch: Architecture, table: Tensor) -> Tensor:
    """Return W_E + MLP_0(norm(W_E)), the token embedding after layer 0 without its attention.

    The first MLP works on single tokens much as an embedding does, and later heads read what it
    made of them (the effective embedding of McDougall et al. 2023, Copy Suppression,
    https://arxiv.org/abs/2310.04625). Learned positions are left out as well.

    The block itself runs on one token at a time, what its attention adds set to zero, so that
    wiring, norms and MLP are the model's own.

    Args:
        model: the bridge.
        arch: its architecture.
        table: [d_vocab, d_model] W_E as it enters the stream.

    Returns:
        [d_vocab, d_model], in `table`'s dtype.

    Raises:
        UnsupportedError: a norm acts on the sum of token and position, or after the sum of a
            block (BERT): there a token by itself has no such vector.
    """
    if arch.wiring == "post_norm":
        raise UnsupportedError(
            f"{model.cfg.model_name} norms sums (of token and position, of a block's input and "
            "output), so a token's embedding has no MLP output of its own. Use "
            "effective_embedding=False, and W_E."
        )
    effective = torch.empty_like(table)
    n_tiles = -(-len(table) // _TILE)
    with progress(n_tiles, "tiles of the vocabulary", n_tiles > 32) as advance:
        for start in range(0, len(table), _TILE):
            tile = table[start : start + _TILE]
            effective[start : start + _TILE] = _after_mlp(model, arch, tile)
            advance(1)
    return effective


def _after_mlp(model: Any, arch: Architecture, rows: Tensor) -> Tensor:
    """Run block 0 on vectors, each a text of its own, its attention silenced: [row, d_model]."""
    kept: list[Tensor] = []
    changes = {
        ("resid_pre", 0): lambda value: rows.to(value.dtype).reshape(value.shape),
        ("attn_added", 0): torch.zeros_like,
    }
    tokens = torch.zeros(len(rows), 1, dtype=torch.long, device=rows.device)
    wanted = [("resid_post", 0)]
    with (
        changing(model, arch, changes),
        reading(model, arch, wanted, lambda _site, _layer, value: kept.append(value)),
    ):
        run_backbone(model, tokens, torch.ones_like(tokens))
    after = shaped(arch, "resid_post", kept[0], len(rows), 1)[:, 0]
    return at_least_float32(after).to(rows.dtype)
