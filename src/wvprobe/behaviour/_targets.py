"""Which keys count as the previous token, a duplicate, and the like; attention to them."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe.behaviour._streaming import Tokens

REPEAT_SCORES = ("previous_token", "duplicate", "induction", "next_token")
TEXT_SCORES = (
    "previous_token_text",
    "duplicate_text",
    "next_token_of_earlier",
    "next_token_text",
    "sink",
)


def repeat_keys(tokens: Tokens, length: int) -> Bool[Tensor, "score query key"]:
    """Return the keys of :data:`REPEAT_SCORES` in a sequence of `length` tokens, given twice.

    A query of `duplicate` and `induction` is any token of the second copy: the same token lies
    `length` before it, and what followed that one `length` − 1 before it.
    """
    offset, both = _offsets(tokens)
    second = torch.zeros(len(tokens.ids), dtype=torch.bool)
    second[tokens.own.start + length : tokens.own.stop] = True
    later = second[:, None] & both
    keys = (
        both & (offset == 1),
        later & (offset == length),
        later & (offset == length - 1),
        both & (offset == -1),
    )
    return torch.stack(keys)


def text_keys(tokens: Tokens) -> Bool[Tensor, "score query key"]:
    """Return the keys of :data:`TEXT_SCORES` but the last, `sink`, which depends on the layer.

    An earlier occurrence, or what followed it, counts from offset 2 on: at offset 1 it is the
    token before, which has a score of its own.
    """
    offset, both = _offsets(tokens)
    ids = torch.tensor(tokens.ids)
    same = (ids[:, None] == ids) & both
    followed = same.roll(1, dims=1)
    followed[:, 0] = False
    apart = both & (offset >= 2)
    return torch.stack(
        (both & (offset == 1), same & apart, followed & apart, both & (offset == -1))
    )


def sink_targets(tokens: Tokens, sinks: Bool[Tensor, " pos"]) -> Bool[Tensor, "score=1 query key"]:
    """Return the keys that are sinks, for queries that were not added and are none themselves."""
    query = torch.zeros_like(sinks)
    query[tokens.own] = True
    return ((query & ~sinks)[:, None] & sinks)[None]


def attention_to(
    pattern: Float[Tensor, "head query key"],
    keys: Bool[Tensor, "score query key"],
    seen: Bool[Tensor, "query key"],
) -> tuple[Float[Tensor, "score head"], Float[Tensor, " score"]]:
    """Return the mean attention to some keys, and what uniform attention would give them.

    The mean is over the queries that see at least one of the keys; NaN where none does.
    """
    keys = keys & seen
    queries = keys.any(dim=-1)
    counts = queries.sum(dim=-1)
    uniform = keys.sum(dim=-1) / seen.sum(dim=-1)
    # A query that sees none of its keys has nothing to add to either sum.
    weights = keys.to(pattern.device, pattern.dtype)
    mass = torch.einsum("hqk,sqk->sh", pattern, weights).cpu().double()
    return mass / counts[:, None], uniform.double().sum(dim=-1) / counts


def _offsets(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Return [query, key] offsets, and whether query and key are both no added tokens."""
    own = torch.zeros(len(tokens.ids), dtype=torch.bool)
    own[tokens.own] = True
    positions = torch.arange(len(tokens.ids))
    return positions[:, None] - positions, own[:, None] & own
