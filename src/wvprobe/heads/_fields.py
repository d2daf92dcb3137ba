"""What a model's attention heads are made of, and what follows from it without computing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe._linalg import at_least_float32
from wvprobe._rotary import Rotary
from wvprobe._types import Provenance
from wvprobe._validate import index
from wvprobe.adapters import Latent, Norm, Unembedding
from wvprobe.errors import UnsupportedError
from wvprobe.heads._stacks import LayerStack, PerLayer


@dataclass(frozen=True)
class HeadFields:
    """Weights of all attention heads in one place. Row vectors: q = x̂ W_Q + b_Q.

    With `folded`, the gain and the centring of the norm before attention are part of the
    weights, its bias of the biases, and x̂ is x / σ alone; otherwise x̂ is the norm's output.
    A query head h reads key-value head ``h // (n_heads / n_kv_heads)``.

    Under multi-head latent attention (`latent`, DeepSeek) the weights are products of the maps
    down to a latent, its norm's gain and the maps up to each head. What they give is exact up to
    one number a token, the latent's 1/rms: queries are r_q(i) · (x̂ W_Q + b_Q), values
    r_kv(j) · (x̂ W_V + b_V), and of a key, x̂ W_K + b_K, the first `latent[layer].n_content`
    dimensions are multiplied by r_kv(j) while the rotary ones, the same in every head, are not.
    There n_kv_heads = n_heads.

    Attributes:
        W_Q: [layer, head, d_model, d_head].
        W_K: [layer, kv_head, d_model, d_head].
        W_V: [layer, kv_head, d_model, d_head_v].
        W_O: [layer, head, d_head_v, d_model].
        b_Q: [layer, head, d_head]; zeros where the model has none. Likewise:
        b_K: [layer, kv_head, d_head].
        b_V: [layer, kv_head, d_head_v]. Rows of a pattern sum to 1, so Σ_h b_V W_O^h is a
            constant of the block rather than a head's message.
        b_O: [layer, d_model].
        scale: a layer's factor c of the score c · q·k.
        rotary: a layer's rotation, or None.
        soft_cap: a layer's bound of tanh(s / cap) · cap, or None.
        sliding_window: how many tokens a query of the layer sees, itself included, or None.
        qk_norms: a layer's norms of queries and keys (over d_head), or None.
        norms: a layer's norm before attention; None in a post-norm model.
        post_norms: a layer's norm on what attention puts out (Gemma-2), or None.
        slopes: [head] ALiBi slopes on the key's position, or None.
        folded: whether `norms` are folded into the weights.
        causal: whether a query sees only keys before it.
        W_E: [d_vocab, d_model] token embedding as it enters the stream: Gemma's √d_model and
            BLOOM's norm applied. BERT norms the sum with the position; there it is the raw table.
        W_pos: [pos, d_model] learned positions, or None.
        embedding_norm: the norm on the sum of token and position (BERT), or None.
        effective_W_E: [d_vocab, d_model] W_E + MLP_0(norm(W_E)), what layer 0 makes of a token
            without its attention; None unless :meth:`HeadWeights.from_model` was asked for it.
        latent: a layer's latents, from which their scales follow; None without them.
        unembedding: see :attr:`W_U`.
        tokenizer: the model's, or None.
        provenance: model and weight hash.
    """

    W_Q: Float[Tensor, "layer head d_model d_head"] | LayerStack
    W_K: Float[Tensor, "layer kv_head d_model d_head"] | LayerStack
    W_V: Float[Tensor, "layer kv_head d_model d_head_v"] | LayerStack
    W_O: Float[Tensor, "layer head d_head_v d_model"] | LayerStack
    b_Q: Float[Tensor, "layer head d_head"] | LayerStack
    b_K: Float[Tensor, "layer kv_head d_head"] | LayerStack
    b_V: Float[Tensor, "layer kv_head d_head_v"] | LayerStack
    b_O: Float[Tensor, "layer d_model"] | LayerStack
    scale: tuple[float, ...]
    rotary: tuple[Rotary | None, ...]
    soft_cap: tuple[float | None, ...]
    sliding_window: tuple[int | None, ...]
    qk_norms: tuple[tuple[Norm, Norm] | None, ...]
    norms: tuple[Norm | None, ...]
    post_norms: tuple[Norm | None, ...]
    slopes: Float[Tensor, " head"] | None
    folded: bool
    causal: bool
    W_E: Float[Tensor, "d_vocab d_model"] | None
    W_pos: Float[Tensor, "pos d_model"] | None
    embedding_norm: Norm | None
    effective_W_E: Float[Tensor, "d_vocab d_model"] | None
    latent: Sequence[Latent] | PerLayer[Latent] | None
    unembedding: Unembedding | str
    tokenizer: Any
    provenance: Provenance

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return self.W_Q.shape[0]

    @property
    def n_heads(self) -> int:
        """Number of query heads of a layer."""
        return self.W_Q.shape[1]

    @property
    def n_kv_heads(self) -> int:
        """Number of key-value heads of a layer."""
        return self.W_K.shape[1]

    @property
    def d_model(self) -> int:
        """Width of the stream."""
        return self.W_Q.shape[2]

    @property
    def d_head(self) -> int:
        """Width of a query and of a key."""
        return self.W_Q.shape[3]

    @property
    def d_head_v(self) -> int:
        """Width of a value."""
        return self.W_V.shape[3]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.W_Q.device

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """Unembedding with the final norm's gain and centring folded in, computed when asked.

        Logits are ``x / σ @ W_U + b_U`` (before a final soft cap, where there is one).

        Raises:
            UnsupportedError: the model has no linear head; the message says why.
        """
        head = self._head()
        weight = head.scale * at_least_float32(head.weight).T
        return weight if head.norm is None else head.norm.fold(weight)

    @property
    def b_U(self) -> Float[Tensor, " d_vocab"]:
        """Bias of the unembedding with the final norm's bias folded in."""
        head = self._head()
        weight = at_least_float32(head.weight)
        bias = weight.new_zeros(weight.shape[0])
        if head.bias is not None:
            bias = bias + head.bias
        if head.norm is not None and head.norm.bias is not None:
            bias = bias + weight @ head.norm.bias.to(weight.dtype)
        return head.scale * bias

    def _head(self) -> Unembedding:
        if isinstance(self.unembedding, str):
            raise UnsupportedError(
                f"W_U needs a linear head; {self.provenance.model} has none: {self.unembedding}. "
                "Use directions in the stream instead of tokens."
            )
        return self.unembedding

    def kv_head(self, head: int) -> int:
        """Return the key-value head that a query head reads."""
        return index("head", head, self.n_heads, "heads") // (self.n_heads // self.n_kv_heads)

    def _layer(self, layer: int) -> int:
        return index("layer", layer, self.n_layers, "layers")
