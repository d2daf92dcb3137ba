"""Two words in two texts: the scores between them, and how alike one word's vectors are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._types import Result
from wvprobe.activations import capture
from wvprobe.errors import InputError
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


@dataclass(frozen=True)
class PairCosine(Result):
    """How alike the vectors of one word in two texts are, stream by stream.

    Attributes:
        cosine: [layer] of the two vectors; layer 0 is the embedding, layer k follows block k − 1.
        baseline: [layer] mean cosine of two different words, one of each text: what any two
            vectors have in common in this model (its anisotropy).
        low: [layer] 5th percentile of those.
        high: [layer] 95th percentile.
        n_baseline: how many pairs the baseline has.
        texts: the two texts.
        word: the word.
    """

    cosine: Float[Tensor, " layer"]
    baseline: Float[Tensor, " layer"]
    low: Float[Tensor, " layer"]
    high: Float[Tensor, " layer"]
    n_baseline: int
    texts: tuple[str, str]
    word: str

    AXES: ClassVar = {name: ("layer",) for name in ("cosine", "baseline", "low", "high")}

    def to_frame(self) -> Any:
        """Return one row a stream: layer cosine baseline low high."""
        import pandas

        columns = {name: getattr(self, name).tolist() for name in self.AXES}
        return pandas.DataFrame({"layer": range(len(self.cosine)), **columns})


def pair_cosine(model: Any, text_a: str, text_b: str, word: str) -> PairCosine:
    """Compare a word's vectors in two texts, beside pairs of different words as a control.

    Tokens that the tokenizer adds (BOS, CLS, SEP) are left out by what they are, not by where.

    Raises:
        InputError: the texts have no other words to compare.
        WordError: the word is not in a text.
    """
    seen = capture(model, [text_a, text_b], "stream")
    spans = [find_word(model, text, word).tokens for text in (text_a, text_b)]
    pool = "last" if adapters.architecture(model).causal else "mean"
    streams = torch.nn.functional.normalize(seen["stream"].double(), dim=-1)
    pair = [_pooled(seen["stream"][i].double(), spans[i], pool) for i in (0, 1)]
    others = [_others(seen, i, spans[i]) for i in (0, 1)]
    distinct = torch.tensor(
        [[seen.tokens[0][a] != seen.tokens[1][b] for b in others[1]] for a in others[0]],
        dtype=torch.bool,
    )
    if not bool(distinct.any()):
        raise InputError(
            f"{text_a!r} and {text_b!r} share all their other words, so there is nothing to hold "
            f"the two vectors of {word!r} against. Use longer texts."
        )
    cosines = torch.einsum("ald,bld->abl", streams[0, others[0]], streams[1, others[1]])[distinct]
    quantiles = torch.quantile(cosines, torch.tensor([0.05, 0.95], dtype=torch.float64), dim=0)
    return PairCosine(
        provenance=adapters.provenance(model, texts=[text_a, text_b], word=word, pool=pool),
        cosine=torch.cosine_similarity(*pair, dim=-1),
        baseline=cosines.mean(dim=0),
        low=quantiles[0],
        high=quantiles[1],
        n_baseline=int(distinct.sum()),
        texts=(text_a, text_b),
        word=word,
    )


def _pooled(stream: Tensor, tokens: tuple[int, ...], pool: str) -> Tensor:
    return stream[tokens[-1]] if pool == "last" else stream[list(tokens)].mean(dim=0)


def _others(seen: Any, item: int, tokens: tuple[int, ...]) -> list[int]:
    special = seen.special[item]
    return [p for p in range(len(special)) if not special[p] and p not in tokens]
