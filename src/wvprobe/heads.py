"""The attention weights of a whole model, head by head, with everything a score depends on.

Where TransformerLens's own ``W_Q … b_V`` leave out rotation, scale, norms of queries and keys,
soft cap and the norm before attention, these weights carry them, so that scores, patterns and
head outputs follow from them exactly; :func:`wvprobe.audit` holds them against the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._linalg import at_least_float32
from wvprobe._rotary import Rotary
from wvprobe._shapes import HEAD_AXES, check_shapes
from wvprobe._types import HeadId, Provenance
from wvprobe._validate import index, message
from wvprobe.adapters import Norm, Unembedding
from wvprobe.circuits import Circuit
from wvprobe.errors import ShapeError, UnsupportedError


@dataclass(frozen=True)
class HeadWeights:
    """Weights of all attention heads in one place. Row vectors: q = x̂ W_Q + b_Q.

    With `folded`, the gain and the centring of the norm before attention are part of the
    weights, its bias of the biases, and x̂ is x / σ alone; otherwise x̂ is the norm's output.
    A query head h reads key-value head ``h // (n_heads / n_kv_heads)``.

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
        unembedding: see :attr:`W_U`.
        tokenizer: the model's, or None.
        provenance: model and weight hash.
        embedding_norm: norm on the sum of token and position embeddings (BERT), which `W_E` is
            without; None where there is none, or where `W_E` has it already (BLOOM).
    """

    W_Q: Float[Tensor, "layer head d_model d_head"]
    W_K: Float[Tensor, "layer kv_head d_model d_head"]
    W_V: Float[Tensor, "layer kv_head d_model d_head_v"]
    W_O: Float[Tensor, "layer head d_head_v d_model"]
    b_Q: Float[Tensor, "layer head d_head"]
    b_K: Float[Tensor, "layer kv_head d_head"]
    b_V: Float[Tensor, "layer kv_head d_head_v"]
    b_O: Float[Tensor, "layer d_model"]
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
    unembedding: Unembedding | str
    tokenizer: Any
    provenance: Provenance
    embedding_norm: Norm | None = None

    @classmethod
    def from_model(cls, model: Any, *, fold_norm: bool = True) -> "HeadWeights":
        """Read the weights of a TransformerBridge.

        Args:
            model: the bridge; its weights are copied, it is left as it is.
            fold_norm: fold the norm before attention into the weights. A post-norm model
                (BERT) has none there, so nothing is folded and `folded` is False.

        Raises:
            UnsupportedError: the architecture has parts that are not modelled exactly.
        """
        arch = adapters.architecture(model)
        parts = adapters.head_parts(model, arch, range(arch.n_layers))
        heads = cls(**parts, provenance=adapters.provenance(model))
        return heads.fold() if fold_norm else heads

    @classmethod
    def from_tensors(
        cls,
        *,
        W_Q: Tensor,
        W_K: Tensor,
        W_V: Tensor,
        W_O: Tensor,
        b_Q: Tensor | None = None,
        b_K: Tensor | None = None,
        b_V: Tensor | None = None,
        b_O: Tensor | None = None,
        scale: float | Sequence[float] | None = None,
        rotary: Rotary | None = None,
        soft_cap: float | None = None,
        causal: bool = True,
        W_E: Tensor | None = None,
        W_pos: Tensor | None = None,
        W_U: Tensor | None = None,
        tokenizer: Any = None,
        name: str = "tensors",
    ) -> "HeadWeights":
        """Build from tensors of any model of one's own, in the shapes of the attributes above.

        The norm before attention is taken as folded already, or absent. `scale` is 1/√d_head
        where it is not given; `W_U` is [d_model, d_vocab], the final norm folded.

        Raises:
            ShapeError: a tensor does not fit; the message says which, and on which axis.
            InputError: a tensor holds NaN or infinity.
        """
        given = dict(
            W_Q=W_Q, W_K=W_K, W_V=W_V, W_O=W_O, b_Q=b_Q, b_K=b_K, b_V=b_V, b_O=b_O,
            W_E=W_E, W_pos=W_pos,
        )  # fmt: skip
        tensors = {k: at_least_float32(t.detach()) for k, t in given.items() if t is not None}
        sizes = check_shapes(tensors)
        if sizes["head"] % sizes["kv_head"]:
            raise ShapeError(
                f"`W_Q` has {sizes['head']} heads and `W_K` {sizes['kv_head']}: the number of "
                "query heads must be a multiple of the number of key-value heads."
            )
        layers = sizes["layer"]
        scales = sizes["d_head"] ** -0.5 if scale is None else scale
        scales = (float(scales),) * layers if isinstance(scales, float | int) else tuple(scales)
        if len(scales) != layers:
            raise ShapeError(message("scale", f"one number, or {layers} (a layer)", scales))
        for axis in ("b_Q", "b_K", "b_V", "b_O"):
            if axis not in tensors:
                tensors[axis] = W_Q.new_zeros([sizes[a] for a in HEAD_AXES[axis]]).to(
                    tensors["W_Q"].dtype
                )
        none = (None,) * layers
        return cls(
            **{k: tensors[k] for k in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")},
            scale=scales,
            rotary=(rotary,) * layers,
            soft_cap=(soft_cap,) * layers,
            sliding_window=none,
            qk_norms=none,
            norms=none,
            post_norms=none,
            slopes=None,
            folded=False,
            causal=causal,
            W_E=tensors.get("W_E"),
            W_pos=tensors.get("W_pos"),
            unembedding="no W_U was given to from_tensors"
            if W_U is None
            else Unembedding(at_least_float32(W_U.detach()).T, None, None),
            tokenizer=tokenizer,
            provenance=Provenance.of(name, ""),
            embedding_norm=None,
        )

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
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """Unembedding with the final norm's gain and centring folded in, computed when asked.

        Logits are ``x / σ @ W_U + b_U`` (before a final soft cap, where there is one).

        Raises:
            UnsupportedError: the model has no linear head; the message says why.
        """
        head = self._head()
        weight = head.scale * at_least_float32(head.weight).T
        return weight if head.norm is None else _fold(head.norm, weight)

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

    def ov(self, layer: int, head: int) -> Circuit:
        """Return the OV circuit of a head: ``x̂ OV`` is what it writes for a token it looks at."""
        layer = index("layer", layer, self.n_layers, "layers")
        kv = self.kv_head(head)
        return Circuit(
            "OV",
            left=self.W_V[layer, kv],
            right=self.W_O[layer, head],
            left_bias=self.b_V[layer, kv],
            head=HeadId(layer, head),
        )

    def qk(self, layer: int, head: int, *, offset: float | int | None = 0) -> Circuit:
        """Return the QK circuit of a head at an offset Δ = query position − key position.

        ``circuit.bilinear(x̂_i, x̂_j)`` is the raw score, before a soft cap and before ALiBi's
        slope; under a norm of queries and keys it is the score times rms q · rms k.

        Args:
            layer: layer, from 0.
            head: query head, from 0.
            offset: Δ for a rotary model (ignored by others); None leaves the rotation out.
        """
        layer = index("layer", layer, self.n_layers, "layers")
        kv = self.kv_head(head)
        left, left_bias = self.W_Q[layer, head], self.b_Q[layer, head]
        right, right_bias = self.W_K[layer, kv], self.b_K[layer, kv]
        norms = self.qk_norms[layer]
        if norms is not None:
            # A norm follows the bias, so both are multiplied by its gain.
            left, left_bias = (t * norms[0].gain.to(t.dtype) for t in (left, left_bias))
            right, right_bias = (t * norms[1].gain.to(t.dtype) for t in (right, right_bias))
        rotary = self.rotary[layer]
        if rotary is not None and offset is not None:
            left, left_bias = (rotary.relative(t, offset) for t in (left, left_bias))
        return Circuit(
            "QK",
            left=self.scale[layer] * left,
            right=right.mT,
            left_bias=self.scale[layer] * left_bias,
            right_bias=right_bias,
            head=HeadId(layer, head),
            offset=offset if rotary is not None else None,
        )

    def ov_factors(
        self, layer: int
    ) -> tuple[Float[Tensor, "kv_head d_model d_head_v"], Float[Tensor, "head d_head_v d_model"]]:
        """Return the factors of every OV circuit of a layer, a key-value head counted once."""
        layer = index("layer", layer, self.n_layers, "layers")
        return self.W_V[layer], self.W_O[layer]

    def qk_factors(
        self, layer: int, *, offset: float | int | None = 0
    ) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "kv_head d_model d_head"]]:
        """Return the factors of every QK circuit of a layer: ``left[h] @ right[kv_head(h)].mT``.

        Scale, rotation to `offset` and the gains of a norm of queries and keys are included.
        """
        layer = index("layer", layer, self.n_layers, "layers")
        left, right = self.W_Q[layer], self.W_K[layer]
        norms, rotary = self.qk_norms[layer], self.rotary[layer]
        if norms is not None:
            left, right = left * norms[0].gain.to(left.dtype), right * norms[1].gain.to(right.dtype)
        if rotary is not None and offset is not None:
            left = rotary.relative(left, offset)
        return self.scale[layer] * left, right

    def normalize(self, x: Float[Tensor, "*b d_model"], layer: int) -> Float[Tensor, "*b d_model"]:
        """Return x̂, what these weights read, from the stream before attention.

        Folded weights read x / σ; unfolded ones the norm's output; post-norm models x itself.
        """
        found = self.norms[index("layer", layer, self.n_layers, "layers")]
        if found is None:
            return x
        return x / found.scale(x) if self.folded else found(x)

    def queries(
        self, x_hat: Float[Tensor, "*b d_model"], layer: int
    ) -> Float[Tensor, "*b head d_head"]:
        """Return queries of every head as they are before rotation, after a norm of theirs."""
        return self._project("Q", x_hat, layer, 0)

    def keys(
        self, x_hat: Float[Tensor, "*b d_model"], layer: int
    ) -> Float[Tensor, "*b kv_head d_head"]:
        """Return keys of every key-value head before rotation, after a norm of theirs."""
        return self._project("K", x_hat, layer, 1)

    def values(
        self, x_hat: Float[Tensor, "*b d_model"], layer: int
    ) -> Float[Tensor, "*b kv_head d_head_v"]:
        """Return values of every key-value head."""
        return self._project("V", x_hat, layer, None)

    def _project(self, which: str, x_hat: Tensor, layer: int, norm: int | None) -> Tensor:
        weight = getattr(self, f"W_{which}")[index("layer", layer, self.n_layers, "layers")]
        out = torch.einsum("...d,hde->...he", x_hat, weight) + getattr(self, f"b_{which}")[layer]
        norms = self.qk_norms[layer]
        return out if norm is None or norms is None else norms[norm](out)

    def scores(
        self, x_hat: Float[Tensor, "*b pos d_model"], layer: int
    ) -> Float[Tensor, "*b head pos pos"]:
        """Return raw scores of all pairs, masked ones included, of tokens at positions from 0.

        Before a soft cap; ALiBi's slope times the key's position included.
        """
        queries, keys = self.queries(x_hat, layer), self.keys(x_hat, layer)
        positions = torch.arange(x_hat.shape[-2], device=x_hat.device)
        rotary = self.rotary[layer]
        if rotary is not None:
            queries, keys = (rotary.rotate(t, positions[:, None]) for t in (queries, keys))
        grouped = queries.unflatten(-2, (self.n_kv_heads, -1))
        scores = torch.einsum("...ikge,...jke->...kgij", grouped, keys).flatten(-4, -3)
        scores = self.scale[layer] * scores
        if self.slopes is not None:
            scores = scores + self.slopes.to(scores.dtype)[:, None, None] * positions
        return scores

    def pattern(
        self, scores: Float[Tensor, "*b head pos pos"], layer: int
    ) -> Float[Tensor, "*b head pos pos"]:
        """Return the attention pattern of raw scores: soft cap, mask, softmax over keys."""
        cap = self.soft_cap[layer]
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        return scores.masked_fill(~self.visible(scores.shape[-1], layer), -torch.inf).softmax(-1)

    def visible(self, n_pos: int, layer: int) -> Bool[Tensor, "pos pos"]:
        """Return which keys each query of a layer may look at: [query, key], True where it may."""
        positions = torch.arange(n_pos, device=self.W_Q.device)
        offset = positions[:, None] - positions
        window = self.sliding_window[index("layer", layer, self.n_layers, "layers")]
        seen = offset >= 0 if self.causal else torch.ones_like(offset, dtype=torch.bool)
        return seen if window is None else seen & (offset.abs() < window)

    def fold(self) -> "HeadWeights":
        """Return the same heads with the norm before attention folded into the weights.

        LayerNorm: W′ = (I − 11ᵀ/d) diag(γ) W, b′ = b + βW; RMSNorm: W′ = diag(g) W.
        """
        if self.folded or all(found is None for found in self.norms):
            return self
        new: dict[str, list[Tensor]] = {f"{kind}_{x}": [] for kind in "Wb" for x in "QKV"}
        for layer, found in enumerate(self.norms):
            for x in "QKV":
                weight = getattr(self, f"W_{x}")[layer]
                bias = getattr(self, f"b_{x}")[layer]
                if found is not None and found.bias is not None:
                    shift = torch.einsum("d,hde->he", found.bias.to(weight.dtype), weight)
                    bias = bias + shift
                new[f"W_{x}"].append(weight if found is None else _fold(found, weight))
                new[f"b_{x}"].append(bias)
        return replace(self, folded=True, **{k: torch.stack(v) for k, v in new.items()})


def _fold(norm: Norm, weight: Tensor) -> Tensor:
    """Fold a norm's gain and centring into weights [..., d_model, d_out]."""
    folded = norm.gain.to(weight.dtype)[:, None] * weight
    return folded - folded.mean(dim=-2, keepdim=True) if norm.kind == "layer" else folded
