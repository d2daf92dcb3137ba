"""A head's circuit over the vocabulary, as two thin tables with a row for every token.

W_E OV W_U and W_E QK W_Eᵀ have a row and a column for every token, and rank ≤ d_head: each is
``left @ right.T`` with left and right [d_vocab, r]. What a token is on each side stands here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._linalg import at_least_float32
from wvprobe._single_tokens import set_apart
from wvprobe._validate import message, one_of
from wvprobe.adapters import Unembedding
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.heads import HeadWeights

EMBEDDINGS = ("W_E", "mlp0")
# Tokens whose d_model numbers are held at a time: 4096 of them are 64 MB at d_model 4096.
_CHUNK = 4096


@dataclass(frozen=True)
class Side:
    """One side of a circuit: what a token contributes to its products.

    Attributes:
        name: ``query`` or ``key`` of QK; ``source`` or ``logit`` of OV.
        table: [d_vocab, d_model] what a token is in the stream.
        read: what the weights read of such rows; for the logit side the rows themselves.
        weight: [d_model, r].
        bias: [r], or None.
        biases: what `bias` is made of, such as ``b_Q``; () where it is 0.
        divisor: the rms that a norm of queries or keys, or of the latent they come through,
            divides by, [token, 1], from what is read; or None.
    """

    name: str
    table: Float[Tensor, "d_vocab d_model"]
    read: Callable[[Tensor], Tensor]
    weight: Float[Tensor, "d_model r"]
    bias: Float[Tensor, " r"] | None = None
    biases: tuple[str, ...] = ()
    divisor: Callable[[Tensor], Tensor] | None = None

    def rows(self, ids: Int[Tensor, " token"]) -> Float[Tensor, "token r"]:
        """Return the rows of some tokens, a chunk of them at a time in d_model dimensions.

        Raises:
            InputError: one holds NaN or infinity.
        """
        out = self.weight.new_empty(len(ids), self.weight.shape[1])
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK].to(self.table.device)
            x_hat = self.read(at_least_float32(self.table[chunk])).to(self.weight.dtype)
            part = x_hat @ self.weight
            if self.bias is not None:
                part = part + self.bias
            if self.divisor is not None:
                part = part / self.divisor(x_hat)
            out[start : start + _CHUNK] = part
        if not bool(torch.isfinite(out).all()):
            raise InputError(
                message(
                    f"the weights of the {self.name} side",
                    "finite",
                    "NaN or infinity",
                    "Look at the checkpoint.",
                )
            )
        return out

    def of(self, direction: Float[Tensor, " d_model"]) -> Float[Tensor, "1 r"]:
        """Return what a direction in x̂ contributes: linear, without a bias or a norm."""
        return (direction.to(self.weight) @ self.weight)[None]


def embedding_table(heads: HeadWeights, embedding: str) -> Float[Tensor, "d_vocab d_model"]:
    """Return what stands for a token in the stream: its embedding, or that after layer 0's MLP.

    Raises:
        UnsupportedError: the weights came without it.
    """
    if one_of("embedding", embedding, EMBEDDINGS) == "W_E":
        if heads.W_E is None:
            raise UnsupportedError(
                f"a token needs W_E, the token embedding; {heads.provenance.model} came without "
                "one. Pass W_E to HeadWeights.from_tensors."
            )
        return heads.W_E
    table = heads.effective_W_E
    if table is None:
        raise UnsupportedError(
            "embedding='mlp0' needs the embeddings after the MLP of layer 0, which these weights "
            "came without. Use HeadWeights.from_model(model, effective_embedding=True)."
        )
    return table


def reader(
    heads: HeadWeights, layer: int, embedding: str, normalize: bool
) -> Callable[[Tensor], Tensor]:
    """Return the map from rows of an embedding table to x̂, what a layer's weights read.

    Raises:
        InputError: layer 0 is to read what its own MLP writes.
    """
    if embedding == "mlp0" and layer == 0:
        raise InputError(
            message(
                "embedding",
                "'W_E' at layer 0",
                embedding,
                "Attention in layer 0 reads before its MLP has written.",
            )
        )
    if not normalize:
        return lambda x: x
    first = heads.embedding_norm if embedding == "W_E" else None
    return lambda x: heads.normalize(x if first is None else first(x), layer)


def qk_sides(
    heads: HeadWeights,
    layer: int,
    head: int,
    *,
    embedding: str = "W_E",
    normalize: bool = True,
    **settings: Any,
) -> tuple[Side, Side]:
    """Return the query's side and the key's; their products are raw scores.

    Args:
        heads: the weights.
        layer: layer.
        head: query head.
        embedding: what stands for a token.
        normalize: whether tokens are normed as the layer norms its input.
        **settings: for :meth:`HeadWeights.qk`, such as ``offset``.
    """
    circuit = heads.qk(layer, head, **settings)
    read = reader(heads, layer, embedding, normalize)
    table = embedding_table(heads, embedding)
    kv = heads.kv_head(head)
    norms = heads.qk_norms[layer]
    sides = []
    for name, letter, at, weight, bias in (
        ("query", "Q", head, circuit.left, circuit.left_bias),
        ("key", "K", kv, circuit.right.mT, circuit.right_bias),
    ):
        divisor = _latent_rms(heads, layer, name, settings.get("part"))
        if norms is not None:
            raw = getattr(heads, f"W_{letter}")[layer][at], getattr(heads, f"b_{letter}")[layer][at]
            divisor = _rms(norms[letter == "K"].scale, *raw)
        present = bias is not None and bool(bias.any())
        names = (f"b_{letter}",) if present else ()
        sides.append(Side(name, table, read, weight, bias, names, divisor))
    return sides[0], sides[1]


def _latent_rms(
    heads: HeadWeights, layer: int, name: str, part: str | None = None
) -> Callable[[Tensor], Tensor] | None:
    """Return what divides a token's side under latent attention, or None: see `HeadWeights`."""
    if heads.latent is None or (name == "key" and part == "rotary"):
        return None  # the rotary key comes through no latent
    which = "query" if name == "query" else "key_value"
    return lambda x_hat: 1 / getattr(heads.latent_scales(x_hat, layer), which)[..., None]


def _rms(
    scale: Callable[[Tensor], Tensor], weight: Tensor, bias: Tensor
) -> Callable[[Tensor], Tensor]:
    return lambda x_hat: scale(x_hat @ weight + bias)


def ov_sides(
    heads: HeadWeights, layer: int, head: int, *, embedding: str = "W_E", normalize: bool = True
) -> tuple[Side, Side]:
    """Return the side of the token looked at and that of the logits; see :func:`written`."""
    circuit = heads.ov(layer, head)
    bias = circuit.left_bias
    source = Side(
        "source",
        embedding_table(heads, embedding),
        reader(heads, layer, embedding, normalize),
        circuit.left,
        bias,
        ("b_V",) if bias is not None and bool(bias.any()) else (),
        _latent_rms(heads, layer, "value"),
    )
    outputs = written(heads, layer, circuit.right[None])[0]
    return source, Side("logit", unembedding(heads).weight, lambda x: x, outputs.T)


def unembedding(heads: HeadWeights) -> Unembedding:
    """Return the map to logits.

    Raises:
        UnsupportedError: the model has no linear head; the message says why.
    """
    found = heads.unembedding
    if isinstance(found, str):
        raise UnsupportedError(
            f"what a head promotes needs a linear head; {heads.provenance.model} has none: "
            f"{found}. Use 'QK', or the direction that heads.ov(layer, head).apply(x) gives."
        )
    return found


def written(
    heads: HeadWeights, layer: int, outputs: Float[Tensor, "head r d_model"]
) -> Float[Tensor, "head r d_model"]:
    """Return W_O as the rows of the unembedding read it, so that W_U is not copied.

    ``z @ written @ weight.T`` are logits times the final σ (and times the rms of what attention
    puts out, where a norm follows it): gains and centring of both norms are moved over to W_O.
    """
    head, after = unembedding(heads), heads.post_norms[layer]
    one = outputs.new_ones(())
    if after is not None:
        outputs = after.linear(outputs, one)
    if head.norm is not None:
        outputs = head.norm.linear(outputs, one)
    return head.scale * outputs


def usable_ids(
    heads: HeadWeights, table: Tensor, special: bool, size: int | None = None
) -> Int[Tensor, " token"]:
    """Return the ids to search, ascending.

    Left out, unless `special`: special tokens, entries that the vocabulary keeps free, ids beyond
    the tokenizer's, and rows that are 0.
    """
    size = table.shape[0] if size is None else size
    kept = torch.ones(size, dtype=torch.bool)
    if not special:
        apart = sorted(set_apart(heads.tokenizer, size))
        kept[apart] = False
        kept &= torch.linalg.vector_norm(table[:size], torch.inf, dim=1).cpu() != 0
    return kept.nonzero()[:, 0]
