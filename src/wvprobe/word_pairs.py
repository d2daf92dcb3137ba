"""Two words in some texts: the scores between them, in both directions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._masks import visible
from wvprobe._sinks import sink_keys
from wvprobe._types import Result
from wvprobe.activations import Activations, capture
from wvprobe.adapters import Architecture
from wvprobe.words import find_word


@dataclass(frozen=True)
class PairScores(Result):
    """Scores between two words, in both directions, in each of some texts.

    Attributes:
        scores: [text, direction, layer, head], raw: before a soft cap, masked ones included.
        gauge_fixed: [text, direction, layer, head], the raw score minus the mean raw score of its
            query over the keys that it sees and that are no sinks. Softmax ignores what is
            constant over a query's keys, so this, unlike a raw score, can be compared between
            queries. NaN where a query sees sinks alone.
        attention: [text, direction, layer, head], the pattern's weight; 0 where masked.
        masked: [text, direction], True where the query lies before the key in a decoder.
        texts: the texts.
        words: the first word and the second; direction 0 has the first as query.
        positions: [text, word], token positions (the last token of each word).

    Examples:
        >>> from wvprobe.word_pairs import pair_scores
        >>> found = pair_scores(model, ["The river bank."], "bank", "river")
        >>> found.scores.shape  # text, direction, layer, head
        torch.Size([1, 2, 3, 6])
    """

    scores: Float[Tensor, "text direction layer head"]
    gauge_fixed: Float[Tensor, "text direction layer head"]
    attention: Float[Tensor, "text direction layer head"]
    masked: Bool[Tensor, "text direction"]
    texts: tuple[str, ...]
    words: tuple[str, str]
    positions: tuple[tuple[int, int], ...]

    AXES: ClassVar = {
        "scores": ("text", "direction", "layer", "head"),
        "gauge_fixed": ("text", "direction", "layer", "head"),
        "attention": ("text", "direction", "layer", "head"),
        "masked": ("text", "direction"),
    }

    def directions(self) -> tuple[str, str]:
        """Return the names of the two directions, query→key."""
        first, second = self.words
        return f"{first}→{second}", f"{second}→{first}"

    def to_frame(self) -> Any:
        """Return one row a text, direction, layer and head.

        Columns: text direction layer head score gauge_fixed attention masked.
        """
        import pandas

        names = self.directions()
        rows = [
            {
                "text": self.texts[text],
                "direction": names[direction],
                "layer": layer,
                "head": head,
                "score": float(self.scores[text, direction, layer, head]),
                "gauge_fixed": float(self.gauge_fixed[text, direction, layer, head]),
                "attention": float(self.attention[text, direction, layer, head]),
                "masked": bool(self.masked[text, direction]),
            }
            for text, direction, layer, head in _cells(self.scores.shape)
        ]
        return pandas.DataFrame(rows)


def _cells(shape: Sequence[int]) -> Any:
    return torch.cartesian_prod(*(torch.arange(size) for size in shape)).tolist()


def pair_scores(model: Any, texts: Sequence[str], first: str, second: str) -> PairScores:
    """Measure the scores from `first` to `second` and back, at every head of every layer.

    A word of several tokens is read at its last one. A decoder's mask keeps a query from later
    keys; the raw score of such a pair exists all the same, is computed, and is marked.

    Args:
        model: a TransformerBridge.
        texts: texts that hold both words.
        first: a word, as the texts write it; of several occurrences the first.
        second: another.

    Raises:
        UnsupportedError: scores cannot be recomputed for the architecture.
        WordError: a word is not in a text.

    Examples:
        >>> from wvprobe.word_pairs import pair_scores
        >>> found = pair_scores(model, ["The river bank is closed."], "bank", "river")
        >>> found.directions(), found.masked.tolist()  # text, direction
        (('bank→river', 'river→bank'), [[False, True]])
    """
    arch = adapters.architecture(model)
    seen = capture(model, texts, ["scores", "pattern", "resid_pre"])
    at = [[find_word(model, text, word).tokens[-1] for word in (first, second)] for text in texts]
    masked = [[arch.causal and q < k for q, k in (pair, pair[::-1])] for pair in at]
    parts = [_Text(model, arch, seen, item) for item in range(len(at))]

    def each(read: Callable[["_Text", int, int], Tensor]) -> Tensor:
        pairs = ([read(p, *pair), read(p, *pair[::-1])] for p, pair in zip(parts, at, strict=True))
        return torch.stack([torch.stack(both) for both in pairs])

    return PairScores(
        provenance=adapters.provenance(model, texts=list(texts), words=[first, second]),
        scores=each(_Text.score),
        gauge_fixed=each(_Text.gauge_fixed),
        attention=each(_Text.attention),
        masked=torch.tensor(masked),
        texts=tuple(texts),
        words=(first, second),
        positions=tuple((one, other) for one, other in at),
    )


class _Text:
    """One text's scores: each method reads a query and a key and returns [layer, head]."""

    def __init__(self, model: Any, arch: Architecture, seen: Activations, item: int) -> None:
        size, layers = len(seen.tokens[item]), range(arch.n_layers)
        windows = [adapters.sliding_window(model, layer) for layer in layers]
        sees = [visible(size, causal=arch.causal, window=window) for window in windows]
        sinks = sink_keys(model, seen, item)
        self.scores = seen["scores"][item, :, :, :size, :size]
        self.pattern = seen["pattern"][item, :, :, :size, :size]
        self.counted = torch.stack(sees) & ~sinks[:, None]  # [layer, query, key]

    def score(self, query: int, key: int) -> Tensor:
        return self.scores[:, :, query, key]

    def attention(self, query: int, key: int) -> Tensor:
        return self.pattern[:, :, query, key]

    def gauge_fixed(self, query: int, key: int) -> Tensor:
        row, counted = self.scores[:, :, query].double(), self.counted[:, query].double()
        mean = torch.einsum("lhk,lk->lh", row, counted) / counted.sum(dim=-1, keepdim=True)
        return self.score(query, key) - mean.to(self.scores.dtype)
