"""How many of its dimensions a head makes use of, on text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._decompositions import svdvals
from wvprobe._linalg import effective_rank
from wvprobe._statistics import ratio_interval
from wvprobe._types import Result
from wvprobe._validate import finite, one_of
from wvprobe._validate import seed as checked_seed
from wvprobe.counterfactual._cuts import output_cut, root
from wvprobe.counterfactual._moments import both_moments
from wvprobe.counterfactual._plans import PARTS, output_maps
from wvprobe.counterfactual._streams import calibration_texts
from wvprobe.words import encode

_TOKENS = 4  # for each dimension of a head, at least


@dataclass(frozen=True)
class HeadRanks(Result):
    """The energy of what heads put out, and of their scores, by direction.

    Attributes:
        ov: [layer, head, d_head_v] energy of the principal components of what a head adds on
            text, largest first.
        qk: [layer, head, d_head] squared singular values of its scores over pairs of tokens,
            queries and keys turned to their positions, the mean key of a text taken out.
        share: of the energy that the rank needed must hold.
        n_tokens: how many tokens they are measured on.
        seed: of intervals.

    Examples:
        >>> from wvprobe.counterfactual import head_ranks
        >>> from wvprobe.datasets import load_prose
        >>> found = head_ranks(model, load_prose("calibration", "dialogue")[:3])
        >>> share, low, high = found.within("OV", 14)  # no head needs more than d_head
        >>> share
        1.0
    """

    ov: Float[Tensor, "layer head d_head_v"]
    qk: Float[Tensor, "layer head d_head"]
    share: float | int
    n_tokens: int
    seed: int

    AXES: ClassVar = {
        "ov": ("layer", "head", "coordinate"),
        "qk": ("layer", "head", "coordinate"),
    }

    def needed(self, part: str) -> Int[Tensor, "layer head"]:
        """Return the fewest dimensions that hold `share` of each head's energy; 0 without any."""
        energies = self.energies(part)
        held = energies.cumsum(dim=-1)
        whole = held[..., -1:]
        # A share of 1 is reached but for rounding.
        short = held < self.share * whole * (1 - 1e-12)
        return (short.sum(dim=-1) + 1) * (whole[..., 0] > 0)

    def energies(self, part: str) -> Float[Tensor, "layer head d"]:
        """Return `ov` or `qk`.

        Raises:
            InputError: another part.
        """
        return self.ov if one_of("part", part, PARTS) == "OV" else self.qk

    def within(self, part: str, limit: float | int) -> tuple[float, float, float]:
        """Return the share of heads that need at most `limit` dimensions, with its interval.

        The interval is a 95 % bootstrap over layers, whose heads are not independent of each
        other.
        """
        inside = (self.needed(part) <= limit).double().sum(dim=1)
        sizes = torch.full_like(inside, self.ov.shape[1])
        low, high = ratio_interval(inside, sizes, seed=self.seed)
        return float(inside.sum() / sizes.sum()), float(low), float(high)

    def to_frame(self) -> Any:
        """Return one row a part, layer and head.

        Columns: part layer head d_head effective_rank needed needed_share n_tokens.
        `effective_rank` is exp of the entropy of σ / Σσ (Roy & Vetterli 2007); `needed_share` is
        needed / d_head.
        """
        import pandas

        frames = []
        for part in PARTS:
            energies = self.energies(part)
            layers, heads, d = energies.shape
            needed = self.needed(part)
            columns = {
                "part": part,
                "layer": torch.arange(layers).repeat_interleave(heads).tolist(),
                "head": torch.arange(heads).repeat(layers).tolist(),
                "d_head": d,
                "effective_rank": effective_rank(energies.sqrt()).flatten().tolist(),
                "needed": needed.flatten().tolist(),
                "needed_share": (needed / d).flatten().tolist(),
                "n_tokens": self.n_tokens,
            }
            frames.append(pandas.DataFrame(columns))
        return pandas.concat(frames, ignore_index=True)


def head_ranks(
    model: Any,
    texts: str | Sequence[str] | None = None,
    *,
    share: float | int = 0.99,
    seed: int = 0,
    progress: bool = False,
) -> HeadRanks:
    """Count the dimensions that hold most of the energy of each head's OV and QK, on text.

    OV: principal components of what the head adds, z W_O, over tokens; of QK: singular values of
    Q^½ K^½, Q = E qᵀq and K the covariance of keys within a text, both turned to their positions,
    whose squares sum to the mean square of scores over pairs, a text's mean key left out, since
    softmax ignores it. A rotation turns each plane through both of its dimensions, so a head that
    is to serve every offset needs them both.

    Args:
        model: a TransformerBridge.
        texts: texts, of many more tokens than d_head; None for the bundled calibration prose.
        share: of the energy, in (0, 1].
        seed: of intervals over layers.
        progress: whether to show bars.

    Raises:
        InputError: a share outside (0, 1]; texts of fewer tokens than four times d_head, which
            would bound the ranks.
        UnsupportedError: a rotation that is not modelled exactly.

    Examples:
        >>> from wvprobe.counterfactual import head_ranks
        >>> from wvprobe.datasets import load_prose
        >>> found = head_ranks(model, load_prose("calibration", "dialogue")[:3])
        >>> found.needed("OV").shape, bool((found.needed("OV") <= 14).all())
        (torch.Size([3, 6]), True)
    """
    seed = checked_seed(seed)
    share = finite("share", share, above=0.0, most=1.0)
    arch = adapters.architecture(model)
    read = calibration_texts(model, arch, texts, least=_TOKENS)
    outputs, scores = both_moments(model, arch, read, progress)
    cut = output_cut(outputs.mean, outputs.covariance, output_maps(model, arch))
    keys = scores.keys.repeat_interleave(arch.n_heads // arch.n_kv_heads, dim=1)
    scale = torch.tensor([adapters.score_scale(model, layer) for layer in range(arch.n_layers)])
    values = svdvals(root(scores.queries) @ root(keys))
    return HeadRanks(
        provenance=adapters.provenance(model, seed=seed, texts=len(read), share=share),
        ov=cut.gains,
        qk=(scale.double()[:, None, None] * values).square(),
        share=share,
        n_tokens=sum(len(encode(model, text).ids) for text in read),
        seed=seed,
    )
