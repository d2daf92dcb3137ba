"""One head's queries and keys as linear maps of the stream, and where words stand."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._types import Provenance
from wvprobe._validate import index, message
from wvprobe.adapters import Architecture
from wvprobe.errors import InputError
from wvprobe.heads import HeadWeights
from wvprobe.words import Encoding, WordSpan, locate

Word = str | WordSpan | int


def word_at(encoding: Encoding, word: Word, name: str) -> tuple[int, str]:
    """Return a word's last token position and what to call it.

    Args:
        encoding: the text.
        word: a word of it, a WordSpan, or a token position.
        name: the argument's name, for messages.

    Raises:
        WordError: the word is not in the text.
        InputError: no such position; the span belongs to another text.
    """
    if isinstance(word, str):
        return locate(encoding, word).tokens[-1], word
    if isinstance(word, WordSpan):
        if word.text != encoding.text:
            hint = f"This one belongs to {word.text!r}."
            raise InputError(message(name, f"a span of {encoding.text!r}", word.word, hint))
        return word.tokens[-1], word.word
    at = index(name, word, len(encoding.ids), f"tokens in {encoding.text!r}")
    return at, encoding.strings[at].strip() or repr(encoding.strings[at])


def one_layer(model: Any, arch: Architecture, layer: int) -> HeadWeights:
    """Return one layer's folded weights in float64, as layer 0 of a HeadWeights."""
    parts = adapters.head_parts(model, arch, [layer], tables=False)
    heads = HeadWeights(**parts, provenance=Provenance.of(model.cfg.model_name, "")).fold()
    wide = {f"{kind}_{x}": getattr(heads, f"{kind}_{x}").double() for kind in "Wb" for x in "QKVO"}
    return replace(heads, **wide)


class FrozenHead:
    """A head's queries and keys of some vectors of the stream, as linear maps of their parts.

    Queries are (x / σ) W_Q + b_Q, divided by the rms of a norm of theirs (times its gain), or
    multiplied by a latent's scale; keys likewise, a latent's scale on their content part alone.
    With all these numbers kept as they are for `x`, the map is linear in x, and a part of x has a
    part of the query and one of the key.

    Args:
        heads: of :func:`one_layer`.
        head: the head.
        x: [n, d_model], float64, what comes before the norm of the layer.
    """

    def __init__(self, heads: HeadWeights, head: int, x: Float[Tensor, "n d_model"]) -> None:
        """Compute the scales."""
        self.heads, self.head = heads, head
        x = x.to(heads.device)
        norm = heads.norms[0]
        self.sigma = torch.ones_like(x[:, :1]) if norm is None else norm.scale(x)
        x_hat = x / self.sigma
        raw = {side: x_hat @ self._weight(side) + self._bias(side) for side in "QK"}
        self._factors = self._scales(x_hat, raw)
        self._whole = {side: raw[side] * self._factors[side] for side in "QK"}

    def _weight(self, side: str) -> Tensor:
        return self.heads.W_Q[0, self.head] if side == "Q" else self.heads.W_K[0, self._kv]

    def _bias(self, side: str) -> Tensor:
        return self.heads.b_Q[0, self.head] if side == "Q" else self.heads.b_K[0, self._kv]

    @cached_property
    def _kv(self) -> int:
        return self.heads.kv_head(self.head)

    def _scales(self, x_hat: Tensor, raw: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return [n, d_head] by side: what projections are multiplied by."""
        ones = {side: torch.ones_like(value) for side, value in raw.items()}
        if self.heads.latent is not None:
            r_q, r_kv = self.heads.latent_scales(x_hat, 0)
            ones["K"][:, : self.heads.latent[0].n_content] *= r_kv[:, None]
            return {"Q": ones["Q"] * r_q[:, None], "K": ones["K"]}
        norms = self.heads.qk_norms[0]
        if norms is None:
            return ones
        pairs = zip("QK", norms, strict=True)
        return {s: norm.gain.double() / norm.scale(raw[s]) * ones[s] for s, norm in pairs}

    @property
    def query(self) -> Float[Tensor, "n d_head"]:
        """The queries themselves, biases included, before rotation."""
        return self._whole["Q"]

    @property
    def key(self) -> Float[Tensor, "n d_head"]:
        """The keys themselves."""
        return self._whole["K"]

    def parts(
        self, side: str, parts: Float[Tensor, "part n d_model"]
    ) -> Float[Tensor, "part n d_head"]:
        """Return what parts of the vectors make of the queries (side ``Q``) or keys (``K``)."""
        x_hat = parts.to(self.sigma.device) / self.sigma
        return (x_hat @ self._weight(side)) * self._factors[side]

    def bias(self, side: str) -> Float[Tensor, "n d_head"] | None:
        """Return what the bias makes of them, that of the norm before included; None if 0."""
        own = self._bias(side)
        return own * self._factors[side] if bool(own.any()) else None

    def frozen(self, side: str) -> Float[Tensor, " n"]:
        """Return what is kept when scales are frozen: σ times the rms, or over a latent's scale.

        Only the ratio of two vectors' numbers has a meaning (a gain is not in it).
        """
        factor = self._factors[side][:, 0]
        norms = self.heads.qk_norms[0]
        if norms is not None:
            factor = factor / norms["QK".index(side)].gain[0].double()
        return self.sigma[:, 0] / factor

    def turned(
        self, vectors: Float[Tensor, "*b d_head"], at: Tensor, n_tokens: int
    ) -> Float[Tensor, "*b d_head"]:
        """Return queries or keys turned to their positions, in a text of `n_tokens`."""
        rotary = self.heads.rotary[0]
        return vectors if rotary is None else rotary.rotate(vectors, at, n_tokens)
