"""The circuits of a model's heads: OV, QK at an offset, QK between tokens and positions."""

from jaxtyping import Float
from torch import Tensor

from wvprobe._types import HeadId
from wvprobe._validate import finite, message, one_of
from wvprobe.circuits import Circuit
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.heads._fields import HeadFields

PARTS = ("content", "rotary")


def check_offset(offset: object) -> None:
    """Raise InputError unless it is a finite number, or None."""
    if offset is not None:
        finite("offset", offset)


class HeadCircuits(HeadFields):
    """Heads as pairs of thin factors."""

    def ov(self, layer: int, head: int) -> Circuit:
        """Return the OV circuit of a head: ``x̂ OV`` is what it writes for a token it looks at.

        Under latent attention it writes r_kv(j) times that, see :meth:`latent_scales`.

        Raises:
            InputError: there is no such layer or head.
        """
        layer = self._layer(layer)
        kv = self.kv_head(head)
        return Circuit(
            "OV",
            left=self.W_V[layer, kv],
            right=self.W_O[layer, head],
            left_bias=self.b_V[layer, kv],
            head=HeadId(layer, head),
        )

    def qk(
        self,
        layer: int,
        head: int,
        *,
        offset: float | int | None = 0,
        seq_len: int | None = None,
        part: str | None = None,
    ) -> Circuit:
        """Return the QK circuit of a head at an offset Δ = query position − key position.

        ``circuit.bilinear(x̂_i, x̂_j)`` is the raw score, before a soft cap and before ALiBi's
        slope; under a norm of queries and keys it is the score times rms q · rms k. Under latent
        attention there are two circuits, and the score is ``r_q(i) · (r_kv(j) · content +
        rotary)``, since the rotary key comes through no latent.

        Args:
            layer: layer, from 0.
            head: query head, from 0.
            offset: Δ for a rotary model (ignored by others); None leaves the rotation out.
            seq_len: length of the input in tokens, where the rotation depends on it ('dynamic',
                'longrope'; ignored by others).
            part: ``content`` or ``rotary``, under latent attention; None elsewhere.

        Raises:
            UnsupportedError: latent attention, and no `part`.
            InputError: there is no such layer, head or part; the rotation needs `seq_len`.
        """
        layer = self._layer(layer)
        kv = self.kv_head(head)
        part = self._checked_part(part)
        check_offset(offset)
        turn = (layer, offset, seq_len, part)
        rotated = self.rotary[layer] is not None and offset is not None and part != "content"
        return Circuit(
            "QK",
            left=self._query_side(self.W_Q[layer, head], *turn),
            right=self._key_side(self.W_K[layer, kv], layer, part).mT,
            left_bias=self._query_side(self.b_Q[layer, head], *turn),
            right_bias=self._key_side(self.b_K[layer, kv], layer, part),
            head=HeadId(layer, head),
            offset=offset if rotated else None,
            seq_len=seq_len if rotated else None,
            part=part,
            slope=None if self.slopes is None else float(self.slopes[head]),
            window=self.sliding_window[layer],
            visible=self._sees(layer, offset),
        )

    def qk_between(self, layer: int, head: int, *, query: str, key: str) -> Circuit:
        """Return a QK circuit between rows of W_E and of W_pos, for a model of learned positions.

        With x_i = W_E[t_i] + W_pos[i], the score of layer 0 is, under the norm before attention,

            s_ij = (tt + pt + tp + pp) / (σ_i σ_j) + a_i·b / σ_i + β·d_j / σ_j + β·b

        where tt, pt, tp, pp are entries of the four circuits that this gives (such as
        ``matrix()[t_i, j]`` of query="token", key="position"), σ the scale of the norm on x_i,
        and with ``qk = heads.qk(0, head)``: a_i = x_i qk.left, d_j = x_j qk.rightᵀ,
        β = qk.left_bias, b = qk.right_bias. The circuits themselves read rows as they are stored,
        without 1/σ and without biases: their entries are not scores but these four addends. In
        higher layers they are the direct path from the embedding. Without a norm σ = 1.

        Args:
            layer: layer, from 0.
            head: query head, from 0.
            query: ``token`` or ``position``: what stands on the left.
            key: ``token`` or ``position``: what stands on the right.

        Returns:
            A circuit with left [d_vocab or pos, d_head] and right [d_head, d_vocab or pos].

        Raises:
            UnsupportedError: positions are not learned, or normed together with tokens (BERT).
            InputError: the norm is not folded; there is no such layer or head.
        """
        for name, value in (("query", query), ("key", key)):
            one_of(name, value, ("token", "position"))
        layer = self._layer(layer)
        tables = self._tables(layer)
        circuit = self.qk(layer, head)
        left, right = circuit.left, circuit.right
        return Circuit(
            "QK",
            left=tables[query].to(left.dtype) @ left,
            right=right @ tables[key].to(right.dtype).mT,
            head=circuit.head,
            window=circuit.window,
        )

    def ov_factors(
        self, layer: int
    ) -> tuple[Float[Tensor, "kv_head d_model d_head_v"], Float[Tensor, "head d_head_v d_model"]]:
        """Return the factors of every OV circuit of a layer, a key-value head counted once."""
        layer = self._layer(layer)
        return self.W_V[layer], self.W_O[layer]

    def qk_factors(
        self,
        layer: int,
        *,
        offset: float | int | None = 0,
        seq_len: int | None = None,
        part: str | None = None,
    ) -> tuple[Float[Tensor, "head d_model r"], Float[Tensor, "kv_head d_model r"]]:
        """Return the factors of every QK circuit of a layer: ``left[h] @ right[kv_head(h)].mT``.

        Scale, rotation to `offset` and the gains of a norm of queries and keys are included.
        Arguments and errors are those of :meth:`qk`; r is d_head, or the width of the part.
        """
        layer = self._layer(layer)
        part = self._checked_part(part)
        check_offset(offset)
        left = self._query_side(self.W_Q[layer], layer, offset, seq_len, part)
        return left, self._key_side(self.W_K[layer], layer, part)

    def _query_side(
        self,
        t: Tensor,
        layer: int,
        offset: float | int | None,
        seq_len: int | None,
        part: str | None,
    ) -> Tensor:
        """Return weights or biases of queries with gain, rotation and scale in them."""
        norms, rotary = self.qk_norms[layer], self.rotary[layer]
        if norms is not None:  # it follows the bias, so that both are multiplied by its gain
            t = t * norms[0].gain.to(t.dtype)
        if rotary is not None and offset is not None and part != "content":
            t = rotary.relative(t, offset, seq_len)
        return self.scale[layer] * self._part_of(t, layer, part)

    def _key_side(self, t: Tensor, layer: int, part: str | None) -> Tensor:
        norms = self.qk_norms[layer]
        if norms is not None:
            t = t * norms[1].gain.to(t.dtype)
        return self._part_of(t, layer, part)

    def _part_of(self, t: Tensor, layer: int, part: str | None) -> Tensor:
        if self.latent is None or part is None:
            return t
        at = self.latent[layer].n_content
        return t[..., :at] if part == "content" else t[..., at:]

    def _checked_part(self, part: str | None) -> str | None:
        if self.latent is None:
            if part is not None:
                raise InputError(
                    f"`part` must be None for {self.provenance.model}, whose score is one "
                    f"circuit. Got {part!r} instead. Only latent attention has parts."
                )
            return None
        if part is None:
            raise UnsupportedError(
                f"{self.provenance.model} has latent attention, whose score is no single circuit "
                "but r_q(i) · (r_kv(j) · content + rotary). Pass part='content' or "
                "part='rotary'; latent_scales(x̂, layer) gives r_q and r_kv."
            )
        return one_of("part", part, PARTS)

    def _sees(self, layer: int, offset: float | int | None) -> bool:
        """Whether a query of the layer may look at a key `offset` tokens before it."""
        window = self.sliding_window[layer]
        if offset is None:
            return True
        return (offset >= 0 or not self.causal) and (window is None or abs(offset) < window)

    def _tables(self, layer: int) -> dict[str, Tensor]:
        name = self.provenance.model
        if self.W_pos is None or self.W_E is None or self.rotary[layer] is not None:
            raise UnsupportedError(
                f"{name} does not add learned positions to its token embedding, so there are no "
                "circuits between the two. Use qk(layer, head, offset=...), whose rotation or "
                "slope carries the positions."
            )
        if self.embedding_norm is not None:
            raise UnsupportedError(
                f"{name} norms the sum of token and position before its blocks, so their parts "
                "of a score share one more norm. Use qk(layer, head) on x̂ instead."
            )
        if self.norms[layer] is not None and not self.folded:
            hint = "Use from_model(model), or fold()."
            raise InputError(message("HeadWeights", "folded", "unfolded ones", hint))
        return {"token": self.W_E, "position": self.W_pos}
