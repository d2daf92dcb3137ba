"""Two words in some texts: the scores between them, in both directions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._types import Result
from wvprobe.activations import capture
from wvprobe.words import find_word


@dataclass(frozen=True)
class PairScores(Result):
    """Raw scores between two words, in both directions, in each of some texts.

    Attributes:
        scores: [text, direction, layer, head], raw: before a soft cap, masked ones included.
        attention: [text, direction, layer, head], the pattern's weight; 0 where masked.
        masked: [text, direction], True where the query lies before the key in a decoder.
        texts: the texts.
        words: the first word and the second; direction 0 has the first as query.
        positions: [text][word], token positions (the last token of each word).
    """

    scores: Float[Tensor, "text direction layer head"]
    attention: Float[Tensor, "text direction layer head"]
    masked: Bool[Tensor, "text direction"]
    texts: tuple[str, ...]
    words: tuple[str, str]
    positions: tuple[tuple[int, int], ...]

    AXES: ClassVar = {
        "scores": ("text", "direction", "layer", "head"),
        "attention": ("text", "direction", "layer", "head"),
        "masked": ("text", "direction"),
    }

    def directions(self) -> tuple[str, str]:
        """Return the names of the two directions, query→key."""
        first, second = self.words
        return f"{first}→{second}", f"{second}→{first}"

    def to_frame(self) -> Any:
        """Return one row a text, direction, layer and head: … score attention masked."""
        import pandas

        names = self.directions()
        rows = [
            {
                "text": self.texts[text],
                "direction": names[direction],
                "layer": layer,
                "head": head,
                "score": float(self.scores[text, direction, layer, head]),
                "attention": float(self.attention[text, direction, layer, head]),
                "masked": bool(self.masked[text, direction]),
            }
            for text, direction, layer, head in _cells(self.scores.shape)
        ]
        return pandas.DataFrame(rows)


def _cells(shape: Sequence[int]) -> Any:
    return torch.cartesian_prod(*(torch.arange(size) for size in shape)).tolist()


def pair_scores(model: Any, texts: Sequence[str], first: str, second: str) -> PairScores:
    """Measure the raw scores from `first` to `second` and back, at every head of every layer.

    A word of several tokens is read at its last one. A decoder's mask keeps a query from later
    keys; the raw score of such a pair exists all the same, is computed, and is marked.

    Raises:
        UnsupportedError: scores cannot be recomputed for the architecture (MLA).
        WordError: a word is not in a text.
    """
    arch = adapters.architecture(model)
    seen = capture(model, texts, ["scores", "pattern"])
    at = [[find_word(model, text, word).tokens[-1] for word in (first, second)] for text in texts]
    scores, attention, masked = [], [], []
    for item, (one, other) in enumerate(at):
        pairs = ((one, other), (other, one))
        scores.append(torch.stack([seen["scores"][item, :, :, q, k] for q, k in pairs]))
        attention.append(torch.stack([seen["pattern"][item, :, :, q, k] for q, k in pairs]))
        masked.append([arch.causal and q < k for q, k in pairs])
    return PairScores(
        provenance=adapters.provenance(model, texts=list(texts), words=[first, second]),
        scores=torch.stack(scores),
        attention=torch.stack(attention),
        masked=torch.tensor(masked),
        texts=tuple(texts),
        words=(first, second),
        positions=tuple((one, other) for one, other in at),
    )
