"""Which tokens are attention sinks, by what they are and not by where they stand.

Softmax has to put its weight somewhere, and models learn a token for it: the BOS where there is
one, else a token whose vector grows far beyond the others (Xiao et al. 2024, Efficient Streaming
Language Models with Attention Sinks; Sun et al. 2024, Massive Activations in Large Language
Models). Statistics over keys leave them out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe.activations import Activations

# A token is a sink at a layer where its vector is this many times longer than the text's median.
SINK_NORM = 10.0


def sink_keys(model: Any, seen: Activations, item: int) -> Bool[Tensor, "layer pos"]:
    """Return which tokens of a text are sinks, layer by layer.

    Added tokens (BOS, CLS, SEP) and special ids in the text are sinks everywhere; others where
    what they bring into the layer is over 10 times as long as the median of the text's own tokens.

    Args:
        model: the TransformerBridge.
        seen: of :func:`~wvprobe.capture` with the site ``resid_pre`` at all positions.
        item: which of its texts.
    """
    ids, size = seen.tokens[item], len(seen.tokens[item])
    norms = seen["resid_pre"][item, :size].double().norm(dim=-1).T
    return sinks_among(special_tokens(model, ids, seen.special[item]), norms)


def special_tokens(model: Any, ids: Sequence[int], added: Sequence[bool]) -> Bool[Tensor, " pos"]:
    """Return which tokens were added to a text, or are special ids that stand in it."""
    known = set(model.tokenizer.all_special_ids)
    return torch.tensor([new or number in known for new, number in zip(added, ids, strict=True)])


def sinks_among(
    special: Bool[Tensor, " pos"], norms: Float[Tensor, "*layer pos"]
) -> Bool[Tensor, "*layer pos"]:
    """Return which tokens are sinks: special ones, and those far longer than the others' median.

    Args:
        special: of :func:`special_tokens`.
        norms: length of what each token brings into a layer.
    """
    if bool(special.all()):
        return special.expand_as(norms)
    median = norms[..., ~special].median(dim=-1, keepdim=True).values
    return special | (norms > SINK_NORM * median)
