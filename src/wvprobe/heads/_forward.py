"""What attention computes from its weights: queries, keys, values, scores, patterns."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe._masks import visible
from wvprobe.errors import UnsupportedError
from wvprobe.heads._circuits import HeadCircuits


class LatentScales(NamedTuple):
    """What latents multiply a token's projections by, 1 / rms of each, [...] as its tokens.

    Attributes:
        query: r_q, of queries; 1 where they come through no latent.
        key_value: r_kv, of values and of the content part of keys.

    Examples:
        >>> from wvprobe.testing import tiny_model
        >>> latent = wvprobe.HeadWeights.from_model(tiny_model("deepseek_v3"))
        >>> latent.latent_scales(torch.randn(5, 44), 1).key_value.shape  # one number a token
        torch.Size([5])
    """

    query: Tensor
    key_value: Tensor


class HeadForward(HeadCircuits):
    """Heads at work on vectors of the stream."""

    def normalize(self, x: Float[Tensor, "*b d_model"], layer: int) -> Float[Tensor, "*b d_model"]:
        """Return x̂, what these weights read, from the stream before attention.

        Folded weights read x / σ; unfolded ones the norm's output; post-norm models x itself.
        """
        found = self.norms[self._layer(layer)]
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

    def latent_scales(self, x_hat: Float[Tensor, "*b d_model"], layer: int) -> LatentScales:
        """Return r_q and r_kv of every token, each [...]: see :meth:`qk` and :meth:`ov`.

        Raises:
            UnsupportedError: the model has no latents.
        """
        layer = self._layer(layer)
        if self.latent is None:
            raise UnsupportedError(
                f"{self.provenance.model} has no latent attention, so its circuits need no scale "
                "of a latent. Use them as they are."
            )
        here = self.latent[layer]
        key_value = here.key_value.scale(x_hat)
        query = torch.ones_like(key_value) if here.query is None else here.query.scale(x_hat)
        return LatentScales(query, key_value)

    def _project(self, which: str, x_hat: Tensor, layer: int, norm: int | None) -> Tensor:
        layer = self._layer(layer)
        weight, bias = (getattr(self, f"{kind}_{which}")[layer] for kind in "Wb")
        out = torch.einsum("...d,hde->...he", x_hat, weight) + bias
        if self.latent is not None:
            return self.latent[layer].scaled(which, out, x_hat)
        norms = self.qk_norms[layer]
        return out if norm is None or norms is None else norms[norm](out)

    def scores(
        self, x_hat: Float[Tensor, "*b pos d_model"], layer: int, *, seq_len: int | None = None
    ) -> Float[Tensor, "*b head pos pos"]:
        """Return raw scores of all pairs, masked ones included, of tokens at positions from 0.

        Before a soft cap; ALiBi's slope times the key's position included.

        Args:
            x_hat: what attention reads, of a whole input.
            layer: layer, from 0.
            seq_len: the input's length, which a rotation may depend on; None for that of
                `x_hat`. A padded batch is turned by the length of its longest text.
        """
        queries, keys = self.queries(x_hat, layer), self.keys(x_hat, layer)
        n_pos = x_hat.shape[-2]
        positions = torch.arange(n_pos, device=x_hat.device)
        rotary = self.rotary[layer]
        if rotary is not None:
            turn = (positions[:, None], n_pos if seq_len is None else seq_len)
            queries, keys = (rotary.rotate(t, *turn) for t in (queries, keys))
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
        cap = self.soft_cap[self._layer(layer)]
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        return scores.masked_fill(~self.visible(scores.shape[-1], layer), -torch.inf).softmax(-1)

    def visible(self, n_pos: int, layer: int) -> Bool[Tensor, "pos pos"]:
        """Return which keys each query of a layer may look at: [query, key], True where it may."""
        window = self.sliding_window[self._layer(layer)]
        return visible(n_pos, causal=self.causal, window=window).to(self.device)
