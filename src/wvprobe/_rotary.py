"""Rotary position embedding as a map on single vectors.

Su et al. 2021 (RoFormer, eq. 34): each plane of a query or key is turned by the angle
position × frequency, so that a score depends on positions through their difference only.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from wvprobe._validate import length, message
from wvprobe.errors import InputError


@dataclass(frozen=True)
class Rotary:
    """How one layer turns its queries and keys.

    Attributes:
        inv_freq: [plane] angle per position of every plane, in radians, float64; for inputs of
            at most `original_length` tokens where there is one.
        scaling: factor on the rotated dimensions of queries and keys alike (YaRN's and LongRoPE's
            attention factor; 1 elsewhere), so that it enters a score squared.
        adjacent: whether a plane is made of neighbours (2p, 2p+1), as in GPT-J and DeepSeek,
            rather than of the halves (p, p + n_planes), as in Llama and GPT-NeoX.
        kind: the scaling's name in the config: ``default``, ``linear``, ``llama3``, ``yarn``…
        start: first dimension of a head that is rotated; DeepSeek's stand behind the others.
        original_length: length of an input, in tokens, beyond which the frequencies are others
            (``dynamic``, ``longrope``); None where they hold at any length.
        long_inv_freq: [plane] frequencies for longer inputs: LongRoPE's, or those that dynamic
            scaling starts from; None where there is no `original_length`.
        growth: dynamic scaling's factor, or None.
    """

    inv_freq: Float[Tensor, " plane"]
    scaling: float = 1.0
    adjacent: bool = False
    kind: str = "default"
    start: int = 0
    original_length: int | None = None
    long_inv_freq: Float[Tensor, " plane"] | None = None
    growth: float | None = None

    @property
    def dim(self) -> int:
        """Number of dimensions of a head that are rotated, from `start` on; the others pass."""
        return 2 * self.inv_freq.shape[0]

    def planes(self) -> Int[Tensor, "plane 2"]:
        """Return the two dimensions of a head that each plane is made of."""
        dims = self.start + torch.arange(self.dim)
        return dims.reshape(-1, 2) if self.adjacent else dims.reshape(2, -1).T

    def regime(self, seq_len: int) -> int:
        """Return a number that inputs share whose frequencies are the same."""
        if self.original_length is None or seq_len <= self.original_length:
            return 0
        return 1 if self.growth is None else seq_len

    def frequencies(self, seq_len: int | None = None) -> Float[Tensor, " plane"]:
        """Return the angle per position of every plane in an input of `seq_len` tokens.

        LongRoPE (Ding et al. 2024, https://arxiv.org/abs/2402.13753) has a second set for inputs
        beyond the original length L. Dynamic NTK scaling raises the base b there to
        b · (f · n/L − f + 1)^(d/(d−2)), n the input's length, f its factor, d the rotated width.

        Raises:
            InputError: `seq_len` is needed and was not given, or is no length.
        """
        if self.original_length is None or self.long_inv_freq is None:
            return self.inv_freq
        if seq_len is None:
            needed = f"an input's length in tokens: a {self.kind!r} rotation depends on it"
            raise InputError(message("seq_len", needed, seq_len, "Pass seq_len=."))
        n = length("seq_len", seq_len)
        if self.regime(n) == 0:
            return self.inv_freq
        if self.growth is None:
            return self.long_inv_freq
        grown = self.growth * n / self.original_length - self.growth + 1
        plane = torch.arange(0, self.dim, 2, dtype=torch.float64, device=self.inv_freq.device)
        return self.long_inv_freq * grown ** (-plane / (self.dim - 2))

    def rotate(
        self,
        x: Float[Tensor, "*shape d_head"],
        positions: Num[Tensor, "..."],
        seq_len: int | None = None,
    ) -> Float[Tensor, "*shape d_head"]:
        """Turn every vector of `x` to its position.

        Args:
            x: vectors, [..., d_head].
            positions: positions that broadcast against ``x.shape[:-1]``.
            seq_len: the input's length, where frequencies depend on it.
        """
        return self._turn(x, positions, self.scaling, seq_len)

    def relative(
        self, x: Float[Tensor, "*shape d_head"], offset: float | int, seq_len: int | None = None
    ) -> Float[Tensor, "*shape d_head"]:
        """Return x R(offset), so that ``relative(q, i - j) @ k`` is the score of q at i, k at j."""
        positions = torch.tensor(float(offset), dtype=torch.float64, device=x.device)
        return self._turn(x, positions, self.scaling**2, seq_len)

    def _turn(self, x: Tensor, positions: Tensor, factor: float, seq_len: int | None) -> Tensor:
        # Angles in float64: at position 10,000 a float32 angle is off by 1e-3.
        angles = positions.to(torch.float64)[..., None] * self.frequencies(seq_len).to(x.device)
        cos, sin = (factor * angles.cos()).to(x.dtype), (factor * angles.sin()).to(x.dtype)
        end = self.start + self.dim
        before, turned, after = x[..., : self.start], x[..., self.start : end], x[..., end:]
        if self.adjacent:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        pair = (first * cos - second * sin, second * cos + first * sin)
        out = torch.stack(pair, dim=-1).flatten(-2) if self.adjacent else torch.cat(pair, dim=-1)
        return torch.cat((before, out, after), dim=-1)


def rotate_half(
    x: Float[Tensor, "batch pos head d_head"], cos: Tensor, sin: Tensor, start: int = 0
) -> Float[Tensor, "batch pos head d_head"]:
    """Turn `x` by a model's own tables, [1 or batch, pos, dim] with both halves written out."""
    end = start + cos.shape[-1]
    before, turned, after = x[..., :start], x[..., start:end], x[..., end:]
    first, second = turned.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    out = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((before, out, after), dim=-1)
