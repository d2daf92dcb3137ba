"""Rotary position embedding as a map on single vectors.

Su et al. 2021 (RoFormer, eq. 34): each plane of a query or key is turned by the angle
position × frequency, so that a score depends on positions through their difference only.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Num
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """How one layer turns its queries and keys.

    Attributes:
        inv_freq: [plane] angle per position of every plane, in radians, float64.
        scaling: factor on the rotated dimensions of queries and keys alike (YaRN's attention
            factor; 1 elsewhere), so that it enters a score squared.
        adjacent: whether a plane is made of neighbours (2p, 2p+1), as in GPT-J and DeepSeek,
            rather than of the halves (p, p + n_planes), as in Llama and GPT-NeoX.
        kind: the scaling's name in the config: ``default``, ``linear``, ``llama3``, ``yarn``…
    """

    inv_freq: Float[Tensor, " plane"]
    scaling: float = 1.0
    adjacent: bool = False
    kind: str = "default"

    @property
    def dim(self) -> int:
        """Number of leading dimensions of a head that are rotated; the others pass."""
        return 2 * self.inv_freq.shape[0]

    def rotate(
        self, x: Float[Tensor, "*shape d_head"], positions: Num[Tensor, "..."]
    ) -> Float[Tensor, "*shape d_head"]:
        """Turn every vector of `x` to its position.

        Args:
            x: vectors, [..., d_head].
            positions: positions that broadcast against ``x.shape[:-1]``.
        """
        return self._turn(x, positions, self.scaling)

    def relative(
        self, x: Float[Tensor, "*shape d_head"], offset: float | int
    ) -> Float[Tensor, "*shape d_head"]:
        """Return x R(offset), so that ``relative(q, i - j) @ k`` is the score of q at i, k at j."""
        positions = torch.tensor(float(offset), dtype=torch.float64, device=x.device)
        return self._turn(x, positions, self.scaling**2)

    def _turn(self, x: Tensor, positions: Tensor, factor: float) -> Tensor:
        # Angles in float64: at position 10,000 a float32 angle is off by 1e-3.
        angles = positions.to(torch.float64)[..., None] * self.inv_freq.to(x.device)
        cos, sin = (factor * angles.cos()).to(x.dtype), (factor * angles.sin()).to(x.dtype)
        turned, passed = x[..., : self.dim], x[..., self.dim :]
        if self.adjacent:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        pair = (first * cos - second * sin, second * cos + first * sin)
        out = torch.stack(pair, dim=-1).flatten(-2) if self.adjacent else torch.cat(pair, dim=-1)
        return torch.cat((out, passed), dim=-1)


def rotate_half(
    x: Float[Tensor, "batch pos head d_head"], cos: Tensor, sin: Tensor
) -> Float[Tensor, "batch pos head d_head"]:
    """Turn `x` by a model's own tables, [1 or batch, pos, dim] with both halves written out."""
    dim = cos.shape[-1]
    turned, passed = x[..., :dim], x[..., dim:]
    first, second = turned.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    out = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((out, passed), dim=-1)
