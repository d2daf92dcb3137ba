"""Thin factors of a layer's circuits, as functions of whole models read them, and W_U W_E."""

import hashlib
from typing import Any

from jaxtyping import Float, Inexact
from torch import Tensor

from wvprobe._linalg import at_least_float32, factored_eigenvalues
from wvprobe._shapes import check_finite
from wvprobe._types import Provenance
from wvprobe._validate import message
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.heads import HeadWeights

_TILE = 8192  # vocabulary rows multiplied at a time


def check_heads(heads: Any) -> None:
    """Refuse a model where its weights are meant.

    Raises:
        InputError: `heads` is no HeadWeights.
    """
    if not hasattr(heads, "ov_factors"):
        hint = "Use HeadWeights.from_model(model)."
        raise InputError(message("heads", "a HeadWeights", type(heads).__name__, hint))


def provenance_of(heads: HeadWeights, *, seed: int | None = None, **settings: Any) -> Provenance:
    """Return the provenance of a number computed from weights alone, their own settings kept."""
    source = heads.provenance
    settings = {**source.settings, "folded": heads.folded, **settings}
    return Provenance.of(source.model, source.weight_hash, seed=seed, **settings)


def digest(given: Any) -> str | None:
    """Return what tells a tensor that shaped a number (or a pair of them) from another, or None."""
    if given is None:
        return None
    if not isinstance(given, Tensor):
        return ", ".join(str(digest(one)) for one in given)
    raw = given.detach().cpu().contiguous().double().numpy().tobytes()
    return f"sha256 {hashlib.sha256(raw).hexdigest()[:16]}"


def layer_factors(
    heads: HeadWeights,
    which: str,
    layer: int,
    *,
    offset: float | int | None = 0,
    seq_len: int | None = None,
    part: str | None = None,
) -> tuple[Float[Tensor, "left d_model r"], Float[Tensor, "right d_model r"]]:
    """Return both factors of a layer's circuits ``left @ right.mT``, [head or kv_head, d_model, r].

    Raises:
        InputError: weights hold NaN or infinity.
    """
    if which == "OV":
        left, right = heads.ov_factors(layer)
        right = right.mT
    else:
        left, right = heads.qk_factors(layer, offset=offset, seq_len=seq_len, part=part)
    left, right = at_least_float32(left), at_least_float32(right)
    for factor in (left, right):
        axis = "head" if len(factor) == heads.n_heads else "kv_head"
        check_finite(f"heads ({which} of layer {layer})", factor, (axis, "d_model", "r"))
    return left, right


def paired(
    left: Float[Tensor, "left m n"], right: Float[Tensor, "right p q"]
) -> tuple[Float[Tensor, "head m n"], Float[Tensor, "head p q"]]:
    """Return both factors a query head: those of a key-value head stand for its whole group."""
    heads = max(left.shape[0], right.shape[0])
    return (
        left.repeat_interleave(heads // left.shape[0], dim=0),
        right.repeat_interleave(heads // right.shape[0], dim=0),
    )


def of_head(factor: Float[Tensor, "some m n"], head: int, n_heads: int) -> Float[Tensor, "m n"]:
    """Return what one query head has of a factor of :func:`layer_factors`."""
    return factor[head // (n_heads // factor.shape[0])]


def why_no_vocabulary(heads: HeadWeights) -> str:
    """Return why there is no W_E OV W_U; empty where there is one."""
    name, head = heads.provenance.model, heads.unembedding
    if heads.W_E is None:
        return f"{name} carries no W_E"
    if isinstance(head, str):
        return f"{name} has no linear W_U: {head}"
    if len(heads.W_E) != len(head.weight):
        return f"{name} embeds {len(heads.W_E)} tokens and predicts {len(head.weight)}"
    return ""


def vocabulary_product(heads: HeadWeights) -> Float[Tensor, "d_model d_model"]:
    """Return W_U W_E, the final norm folded, from tiles of the vocabulary.

    Eigenvalues of ``W_E A W_U`` (d_vocab × d_vocab) that differ from 0 are those of ``A W_U W_E``,
    so all that the vocabulary says about any head's is in this one matrix.

    Raises:
        UnsupportedError: there is no W_E or no linear W_U.
    """
    embedding, head = heads.W_E, heads.unembedding
    if embedding is None or isinstance(head, str) or why_no_vocabulary(heads):
        raise UnsupportedError(f"W_U W_E cannot be computed: {why_no_vocabulary(heads)}.")
    total = at_least_float32(embedding.new_zeros(heads.d_model, heads.d_model))
    for start in range(0, len(embedding), _TILE):
        rows = slice(start, start + _TILE)
        tile = at_least_float32(embedding[rows])
        total += at_least_float32(head.weight[rows]).to(tile.dtype).mT @ tile
    total = head.scale * total
    if head.norm is None:
        return total
    # Folding acts on d_model alone, so it may come after the sum over the vocabulary.
    total = head.norm.gain.to(total.dtype)[:, None] * total
    return total - total.mean(dim=0) if head.norm.kind == "layer" else total


def product_or_why(heads: HeadWeights, which: str, wanted: bool | None) -> Tensor | str:
    """Return W_U W_E, [d_model, d_model], or why the vocabulary is left out.

    Raises:
        UnsupportedError: it is wanted (True), and cannot be had.
    """
    why = "QK maps no token to logits, OV does" if which == "QK" else why_no_vocabulary(heads)
    if why and wanted:
        raise UnsupportedError(
            f"eigenvalues of W_E OV W_U cannot be computed: {why}. Leave `vocabulary` out and use "
            ".eigenvalues, those of the circuit itself."
        )
    if wanted is False:
        return "vocabulary=False was asked for"
    return why or vocabulary_product(heads)


def vocabulary_eigenvalues(
    heads: HeadWeights,
    layer: int,
    left: Float[Tensor, "kv_head d_model d_head_v"],
    right: Float[Tensor, "head d_model d_head_v"],
    inner: Float[Tensor, "d_model d_model"],
) -> Inexact[Tensor, "head d_head_v"]:
    """Return eigenvalues of W_O (W_U W_E W_V) of a layer, the product with W_V a KV head once.

    Args:
        heads: the weights.
        layer: the layer.
        left: W_V, as :func:`layer_factors` gives it.
        right: W_O transposed, likewise.
        inner: of :func:`vocabulary_product`.
    """
    post = heads.post_norms[layer]
    if post is not None:
        right = post.linear(right.mT, right.new_ones(())).mT
    return factored_eigenvalues(*paired(inner.to(left.dtype) @ left, right.mT))
