"""Scores at the first layer, where nothing has been mixed yet: what position alone changes.

At layer 0 what attention reads of a token is a function of that token and its position. A pair's
score in one text can therefore be turned into its score in another in three exact steps: the
query's token, the key's token, and where the two stand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import factorial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._types import Result
from wvprobe.activations import Activations, capture
from wvprobe.errors import UnsupportedError
from wvprobe.heads import HeadWeights
from wvprobe.words import find_word

_PLAYERS = ("query_token", "key_token", "position")


@dataclass(frozen=True)
class FirstLayerShares(Result):
    """One pair's layer-0 scores in two texts, and what their difference is made of.

    Attributes:
        scores: [text, head] raw scores, before a soft cap, masked ones included; ALiBi's slope
            counted from the query, as −slope · Δ, which softmax cannot tell from the model's own.
        shares: [part, head] Shapley shares of the query's token, the key's token and the
            positions; they sum to the second score minus the first.
        scale: [head] c ‖q‖ ‖k‖, the larger of the two texts: what a share is small against.
        queries: relative change of the query between the texts, ‖q_b − q_a‖ / ½(‖q_a‖ + ‖q_b‖)
            over all heads, as it is multiplied: (before rotation, after rotation). Both are alike
            in a model without rotation.
        keys: likewise of the key.
        reconstruction_error: largest |s − the model's own raw score| over texts and heads,
            relative to `scale`.
        texts: the two texts.
        query: the query's word.
        key: the key's word.
        positions: [text] token positions of query and key.
        same_tokens: whether query and key are the same token ids in both texts.
    """

    scores: Float[Tensor, "text head"]
    shares: Float[Tensor, "part head"]
    scale: Float[Tensor, " head"]
    queries: tuple[float, float]
    keys: tuple[float, float]
    reconstruction_error: float
    texts: tuple[str, str]
    query: str
    key: str
    positions: tuple[tuple[int, int], tuple[int, int]]
    same_tokens: bool

    AXES: ClassVar = {
        "scores": ("text", "head"),
        "shares": ("part", "head"),
        "scale": ("head",),
    }

    def to_frame(self) -> Any:
        """Return one row a head: head score_a score_b query_token key_token position scale."""
        import pandas

        columns: dict[str, Any] = {"head": range(len(self.scale))}
        columns |= {"score_a": self.scores[0].tolist(), "score_b": self.scores[1].tolist()}
        columns |= {name: share.tolist() for name, share in zip(_PLAYERS, self.shares, strict=True)}
        return pandas.DataFrame({**columns, "scale": self.scale.tolist()})


def first_layer_shares(
    model: Any, text_a: str, text_b: str, *, query: str, key: str
) -> FirstLayerShares:
    """Take the difference of a pair's layer-0 scores in two texts apart, exactly.

    The three shares are Shapley values (Shapley 1953): each part's effect, averaged over all
    orders in which the parts are exchanged. Learned positions enter the norm together with the
    token, so norm(token + position) is evaluated anew for every combination; rotary and ALiBi
    positions act through the offset of query and key alone.

    Args:
        model: a TransformerBridge.
        text_a: a text with both words.
        text_b: another.
        query: the word whose query it is; of several tokens the last counts.
        key: the word whose key it is.

    Raises:
        WordError: a word is not in a text.
        UnsupportedError: the rotation depends on the texts' lengths, and these differ in it.
    """
    texts = (text_a, text_b)
    seen = capture(model, texts, ["resid_pre", "scores"], layers=0)
    layer = _FirstLayer(model, _common_length(model, seen))
    spans = [[find_word(model, text, word) for word in (query, key)] for text in texts]
    at = [(pair[0].tokens[-1], pair[1].tokens[-1]) for pair in spans]
    tokens = [[layer.token(seen, item, position) for position in at[item]] for item in (0, 1)]
    ids = [[seen.tokens[item][position] for position in at[item]] for item in (0, 1)]
    # Which text each part is taken from: the query's token, the key's token, both positions.
    worth: dict[tuple[int, ...], Tensor] = {
        choice: layer.score(tokens[choice[0]][0], tokens[choice[1]][1], *at[choice[2]])
        for choice in product((0, 1), repeat=3)
    }
    scores = torch.stack([worth[0, 0, 0], worth[1, 1, 1]])
    queries = [layer.query(tokens[item][0], at[item][0]) for item in (0, 1)]
    keys = [layer.key(tokens[item][1], at[item][1]) for item in (0, 1)]
    scale = torch.stack([layer.scale(*pair) for pair in zip(queries, keys, strict=True)]).amax(0)
    expected = torch.stack([layer.model_score(seen, item, *at[item]) for item in (0, 1)])
    return FirstLayerShares(
        provenance=adapters.provenance(model, texts=list(texts), query=query, key=key),
        scores=scores,
        shares=torch.stack([_shapley(worth, player) for player in range(3)]),
        scale=scale,
        queries=layer.changes(queries, (at[0][0], at[1][0])),
        keys=layer.changes(keys, (at[0][1], at[1][1])),
        reconstruction_error=float(((scores - expected).abs() / scale).max()),
        texts=texts,
        query=query,
        key=key,
        positions=(at[0], at[1]),
        same_tokens=ids[0] == ids[1],
    )


def _common_length(model: Any, seen: Activations) -> int:
    """Return the length of both texts, where a rotation that depends on it is the same for both."""
    lengths = [len(tokens) for tokens in seen.tokens]
    regime = adapters.length_regime(model, adapters.architecture(model))
    if regime(lengths[0]) != regime(lengths[1]):
        raise UnsupportedError(
            f"the texts of {lengths[0]} and {lengths[1]} tokens are rotated by different "
            f"frequencies in {model.cfg.model_name}, which is neither token nor position. Use "
            "texts of one length."
        )
    return lengths[0]


class _FirstLayer:
    """What attention of layer 0 makes of a token at a position."""

    def __init__(self, model: Any, length: int) -> None:
        arch = adapters.architecture(model)
        # Layer 0 alone: the others' weights would be copied, and take no part.
        parts = adapters.head_parts(model, arch, [0])
        self.heads = HeadWeights(**parts, provenance=adapters.provenance(model)).fold()
        self.length = length  # in tokens; some rotations depend on it
        self.learned = self.heads.W_pos
        self.norm = self.constant = None
        if self.learned is not None:
            self.norm = adapters.embedding_norm(model, arch)
            self.constant = adapters.token_type_embedding(model)

    def token(self, seen: Activations, item: int, position: int) -> Tensor:
        """Return a token's part of the stream: all of it, unless a learned position is added."""
        if self.learned is None or self.heads.W_E is None:
            return seen["resid_pre"][item, position, 0].to(self.heads.W_Q.dtype)
        return self.heads.W_E[seen.tokens[item][position]].cpu()

    def query(self, token: Tensor, position: int) -> Tensor:
        """Return [head, d_head], before rotation."""
        return self.heads.queries(self._read(token, position), 0)

    def key(self, token: Tensor, position: int) -> Tensor:
        """Return [head, d_head], before rotation, a key-value head once for each query head."""
        keys = self.heads.keys(self._read(token, position), 0)
        return keys.repeat_interleave(self.heads.n_heads // self.heads.n_kv_heads, dim=0)

    def _read(self, token: Tensor, position: int) -> Tensor:
        x = token
        if self.learned is not None:
            x = x + self.learned[position].cpu()
        if self.constant is not None:
            x = x + self.constant.cpu()
        x = x if self.norm is None else self.norm(x)
        return self.heads.normalize(x.to(self.heads.W_Q.device), 0)

    def score(self, query_token: Tensor, key_token: Tensor, query_at: int, key_at: int) -> Tensor:
        """Return [head] raw scores of two tokens' parts put at two positions."""
        q, k = self.query(query_token, query_at), self.key(key_token, key_at)
        offset = query_at - key_at
        rotary = self.heads.rotary[0]
        turned = q if rotary is None else rotary.relative(q, offset, self.length)
        score = self.heads.scale[0] * (turned * k).sum(dim=-1)
        # From the query's own position: what ALiBi adds there is constant over keys.
        return score if self.heads.slopes is None else score - self.heads.slopes * offset

    def model_score(self, seen: Activations, item: int, query_at: int, key_at: int) -> Tensor:
        """Return [head], the model's own raw score on the same footing."""
        score = seen["scores"][item, 0, :, query_at, key_at]
        slopes = self.heads.slopes
        return score if slopes is None else score - slopes.cpu() * query_at

    def scale(self, q: Tensor, k: Tensor) -> Tensor:
        """Return [head] c ‖q‖ ‖k‖."""
        return self.heads.scale[0] * q.norm(dim=-1) * k.norm(dim=-1)

    def changes(self, vectors: Sequence[Tensor], at: tuple[int, int]) -> tuple[float, float]:
        """Return the relative change between two texts, before and after rotation."""
        rotary = self.heads.rotary[0]
        plain = _relative_change(*vectors)
        if rotary is None:
            return plain, plain
        turned = [
            rotary.rotate(vector, torch.tensor(position), self.length)
            for vector, position in zip(vectors, at, strict=True)
        ]
        return plain, _relative_change(*turned)


def _relative_change(a: Tensor, b: Tensor) -> float:
    a, b = a.double(), b.double()
    return float(2 * (b - a).norm() / (a.norm() + b.norm()))


def _shapley(worth: Mapping[tuple[int, ...], Tensor], player: int) -> Tensor:
    """Return a player's Shapley value of worth[1, 1, 1] − worth[0, 0, 0]."""
    total = torch.zeros_like(worth[0, 0, 0])
    for without in (choice for choice in worth if not choice[player]):
        joined = (*without[:player], 1, *without[player + 1 :])
        before = sum(without)
        weight = factorial(before) * factorial(2 - before) / factorial(3)
        total = total + weight * (worth[joined] - worth[without])
    return total
