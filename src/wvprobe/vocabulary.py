"""Tokens that a head's circuits join: what it promotes, which keys it seeks, over all tokens.

    top_tokens(heads, "OV", 5, 1, " river").to_frame()     # what seeing " river" does to logits
    top_tokens(heads, "QK", 5, 1, " river", offset=3)      # the keys that it seeks 3 tokens back
    top_tokens(heads, "OV", 5, 1)                          # the strongest pairs of all

After Elhage et al. 2021 (https://transformer-circuits.pub/2021/framework), who read W_E W_OV W_U
and W_E W_QK W_Eᵀ as maps from tokens to tokens. Exact over the whole vocabulary, in tiles.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._extremes import extreme_products
from wvprobe._factors import check_heads, digest, provenance_of
from wvprobe._progress import progress as progress_bar
from wvprobe._shapes import floating
from wvprobe._single_tokens import spell, token_id, word_ids
from wvprobe._token_rows import Side, ov_sides, qk_sides, unembedding, usable_ids
from wvprobe._types import HeadId, Result
from wvprobe._validate import index, length, message, one_of
from wvprobe.errors import InputError, ShapeError
from wvprobe.heads import HeadWeights

ROLES = {"OV": ("source", "logit"), "QK": ("query", "key")}
SIDES = ("highest", "lowest")


@dataclass(frozen=True)
class TopTokensResult(Result):
    """The tokens, or pairs of tokens, at both ends of a circuit's products.

    Attributes:
        scores: [side, rank] the products, in `unit`; side 0 holds the highest in descending
            order, side 1 the lowest in ascending order.
        ids: [side, rank] the tokens found; for pairs the key, or the logit's token.
        token_ids: [side, rank] the token given; for pairs the query, or the token looked at;
            −1 for a direction.
        strings: [side, rank] `ids` as readable strings, leading spaces kept.
        token_strings: [side, rank] likewise for `token_ids`; "direction" for one.
        circuit: ``OV`` or ``QK``.
        head: layer and head.
        roles: what `token_ids` and `ids` are: ``("query", "key")``, ``("source", "logit")`` or
            the other way round.
        offset: query position − key position, None where nothing turns by it.
        embedding: ``W_E`` or ``mlp0``.
        unit: what a score is.
        biases: bias terms that the scores include, such as ``("b_Q", "b_K")``.
        left_out: what stands between these scores and a model run, one phrase each.
        n_targets: number of tokens that `ids` were chosen from.
        skipped: the words of a word list that are no single tokens.
        pairs: whether the strongest pairs of all tokens were sought.

    Examples:
        >>> found = wvprobe.top_tokens(heads, "QK", 0, 2, " river", offset=1, k=3)
        >>> found.scores.shape, found.left_out  # highest and lowest
        (torch.Size([2, 3]), ())
    """

    scores: Float[Tensor, "side rank"]
    ids: Int[Tensor, "side rank"]
    token_ids: Int[Tensor, "side rank"]
    strings: tuple[tuple[str, ...], ...]
    token_strings: tuple[tuple[str, ...], ...]
    circuit: str
    head: HeadId
    roles: tuple[str, str]
    offset: float | int | None
    embedding: str
    unit: str
    biases: tuple[str, ...]
    left_out: tuple[str, ...]
    n_targets: int
    skipped: tuple[str, ...]
    pairs: bool

    AXES: ClassVar = {
        "scores": ("side", "rank"),
        "ids": ("side", "rank"),
        "token_ids": ("side", "rank"),
    }

    def to_frame(self) -> Any:
        """Return one row an entry: rank side token token_id id string score.

        `rank` counts from 0 on each side, ``highest`` or ``lowest``.
        """
        import pandas

        rows = [
            {
                "rank": rank,
                "side": name,
                "token": self.token_strings[side][rank],
                "token_id": int(self.token_ids[side, rank]),
                "id": int(self.ids[side, rank]),
                "string": self.strings[side][rank],
                "score": float(self.scores[side, rank]),
            }
            for side, name in enumerate(SIDES)
            for rank in range(self.ids.shape[1])
        ]
        columns = ["rank", "side", "token", "token_id", "id", "string", "score"]
        return pandas.DataFrame(rows, columns=columns)


def top_tokens(
    heads: HeadWeights,
    kind: str,
    layer: int,
    head: int,
    token: str | int | None = None,
    *,
    direction: Float[Tensor, " d_model"] | None = None,
    role: str | None = None,
    k: int = 10,
    offset: float | int = 0,
    embedding: str = "W_E",
    normalize: bool = True,
    words: Sequence[str | int] | None = None,
    special: bool = False,
    seq_len: int | None = None,
    part: str | None = None,
    progress: bool = True,
) -> TopTokensResult:
    """Find the tokens that a head's circuit joins most to a token, or the strongest pairs of all.

    OV: x̂ W_V W_O W_U, what attending to a token does to every logit (Elhage et al. 2021, "OV and
    QK circuits"). QK: the raw score c · q R(Δ) kᵀ of a query token with every key token. No token
    is sampled and no product left out; at most a tile of the whole table is in memory.

    A token is read as the layer would read its embedding alone, x̂ = norm(W_E[token]). At layer 0
    a QK score is then the model's own raw score of the two tokens at that offset, and an OV
    product the logits of what the head writes where it attends to the token alone. At later
    layers it is the direct path from the embedding: what other layers add is left out, and
    `left_out` of the result says so, as it does of learned positions, slopes and soft caps.
    Elhage et al. take rows of W_E without the norm: ``normalize=False``.

    W_U has the gain and the centring of the final norm folded in, so an OV product is a logit
    times the final norm's σ: the order of tokens is that of the logits.

    Args:
        heads: the weights; a tokenizer of theirs names the tokens.
        kind: ``OV`` or ``QK``.
        layer: layer, from 0.
        head: query head, from 0.
        token: a text that is exactly one token, its leading space included, or a token's id.
            None, without a direction: the strongest pairs of all tokens with all tokens.
        direction: any vector [d_model] in the place of the token, such as a probe's or an SAE's,
            in units of x̂ (what the weights read: of the normed stream). It is taken as it is, its
            length included, and linearly: without the bias of its side, and without qk-norm.
        role: what the token or direction is: ``query`` (default) or ``key`` of QK; ``source``
            (default) of OV, or ``logit``, which asks what promotes the token.
        k: how many at each end.
        offset: Δ = query position − key position, of rotary models.
        embedding: ``W_E``, or ``mlp0`` for the embeddings after layer 0's MLP, where the weights
            were made with ``effective_embedding=True``.
        normalize: whether rows of the embedding are normed as the layer norms its input.
        words: search these words or ids only (for pairs on both sides). A word without a leading
            space stands for itself with and without one; words of several tokens are skipped and
            listed in `skipped`.
        special: search special tokens, free entries ("[unused3]"), ids beyond the tokenizer's
            and rows of zeros too. Those in `words` or `token` are always taken.
        seq_len: for :meth:`HeadWeights.qk`, where the rotation depends on the length.
        part: for :meth:`HeadWeights.qk`, where QK has parts (latent attention).
        progress: show a bar for pairs.

    Raises:
        InputError: unknown kind, role or embedding; indices or ids out of range; a token and a
            direction at once; weights or a direction with NaN.
        ShapeError: the direction is not [d_model].
        WordError: the text is not one token; the message says which it is made of.
        TokenizerError: a text, and no tokenizer.
        UnsupportedError: the model has no linear head (OV), no W_E, or no stored embedding of
            the kind asked for.

    Examples:
        >>> found = wvprobe.top_tokens(heads, "OV", 1, 2, " river", k=3)
        >>> found.to_frame()[["side", "rank"]].values.tolist()[:2]
        [['highest', 0], ['highest', 1]]
    """
    check_heads(heads)
    roles = ROLES[one_of("kind", kind, tuple(ROLES))]
    layer = index("layer", layer, heads.n_layers, "layers")
    head = index("head", head, heads.n_heads, "heads")
    role = one_of("role", roles[0] if role is None else role, roles)
    _check(heads, token, direction, role, k)
    settings: dict[str, Any] = {"embedding": embedding, "normalize": normalize}
    if kind == "QK":
        passed = {"offset": offset, "seq_len": seq_len, "part": part}
        settings |= {name: value for name, value in passed.items() if value is not None}
        sides = qk_sides(heads, layer, head, **settings)
    else:
        sides = ov_sides(heads, layer, head, **settings)
    given, sought = sides if role == roles[0] else sides[::-1]

    size = min(len(side.table) for side in sides)
    chosen = None if words is None else word_ids(heads.tokenizer, words, size)
    targets = _candidates(heads, sought, chosen, special)
    if direction is not None:
        asked, left = torch.tensor([-1]), given.of(direction)
    else:
        asked = (
            _candidates(heads, given, chosen, special)
            if token is None
            else torch.tensor([token_id(heads.tokenizer, token, len(given.table))])
        )
        left = given.rows(asked)
    with progress_bar(len(left), "token pairs", progress and len(left) > 1) as done:
        ends = extreme_products(left, sought.rows(targets), k, done=done)

    token_ids = torch.stack([asked[end.rows] for end in ends])
    ids = torch.stack([targets[end.columns] for end in ends])
    turned = kind == "QK" and heads.rotary[layer] is not None
    settings |= {"kind": kind, "layer": layer, "head": head, "role": role, "special": special}
    return TopTokensResult(
        provenance=provenance_of(heads, **settings, direction=digest(direction)),
        scores=torch.stack([end.values for end in ends]),
        ids=ids,
        token_ids=token_ids,
        strings=_spelled(heads.tokenizer, ids),
        token_strings=_spelled(heads.tokenizer, token_ids),
        circuit=kind,
        head=HeadId(layer, head),
        roles=(given.name, sought.name),
        offset=offset if turned else None,
        embedding=embedding,
        unit=_unit(heads, kind, layer, given if direction is not None else None),
        biases=(given.biases if direction is None else ()) + sought.biases,
        left_out=_left_out(heads, kind, layer, head, offset, embedding, normalize, part),
        n_targets=len(targets),
        skipped=() if chosen is None else chosen[1],
        pairs=token is None and direction is None,
    )


def _check(heads: HeadWeights, token: object, direction: object, role: str, k: object) -> None:
    """Refuse what cannot be meant."""
    length("k", k)
    if direction is None:
        return
    if token is not None:
        raise InputError(message("direction", "None beside a token", "both", "Give one of them."))
    if role == "logit":
        raise InputError(
            message(
                "role", "'source' with a direction", role, "W_V reads a direction; W_U does not."
            )
        )
    if not isinstance(direction, Tensor) or direction.shape != (heads.d_model,):
        shape = f"shape {list(getattr(direction, 'shape', ()))}"
        raise ShapeError(message("direction", f"a tensor [d_model] = [{heads.d_model}]", shape))
    floating("direction", direction, ("d_model",))


def _candidates(
    heads: HeadWeights, side: Side, chosen: tuple[list[int], Any] | None, special: bool
) -> Tensor:
    return usable_ids(heads, side.table, special) if chosen is None else torch.tensor(chosen[0])


def _spelled(tokenizer: Any, ids: Tensor) -> tuple[tuple[str, ...], ...]:
    """Return a readable string for every id; −1 stands for a direction."""
    known = spell(tokenizer, ids.clamp(min=0).flatten().tolist())
    strings = [
        "direction" if i < 0 else string
        for i, string in zip(ids.flatten().tolist(), known, strict=True)
    ]
    width = ids.shape[1]
    return tuple(tuple(strings[row * width : (row + 1) * width]) for row in range(ids.shape[0]))


def _unit(heads: HeadWeights, kind: str, layer: int, direction_at: Side | None) -> str:
    """Say what a score is; `direction_at` is the side that a direction stands on."""
    if kind == "QK":
        unit = "raw score"
        if direction_at is not None and direction_at.divisor is not None:
            unit += f" × rms of the {direction_at.name} it is part of"
    else:
        unit = "logit" if unembedding(heads).norm is None else "logit × final σ"
        if heads.post_norms[layer] is not None:
            unit += " × rms of what attention puts out"
    return unit if direction_at is None else f"{unit}, per unit of the direction"


def _left_out(
    heads: HeadWeights,
    kind: str,
    layer: int,
    head: int,
    offset: float | int,
    embedding: str,
    normalize: bool,
    part: str | None,
) -> tuple[str, ...]:
    """Name what stands between a token pair's product and what a model run shows."""
    before = 1 if embedding == "mlp0" else 0
    cap = heads.soft_cap[layer] if kind == "QK" else unembedding(heads).soft_cap
    window = heads.sliding_window[layer]
    ahead = offset < 0 and heads.causal
    hidden = kind == "QK" and (ahead or (window is not None and abs(offset) >= window))
    slope = None if heads.slopes is None or kind == "OV" else float(heads.slopes[head])
    normed = heads.norms[layer] is not None or heads.embedding_norm is not None
    phrases = {
        "the norm before attention": not normalize and normed,
        f"what layers up to {layer - 1} add to the token": layer > before,
        "learned positions": heads.W_pos is not None,
        f"ALiBi: {slope} × the key's position": slope is not None,
        f"the soft cap of {cap}": cap is not None,
        "the mask, by which the query does not see this offset": hidden,
        f"the other part of the score than {part!r}": part is not None,
        "what later layers and MLPs make of it": kind == "OV",
    }
    return tuple(phrase for phrase, applies in phrases.items() if applies)
