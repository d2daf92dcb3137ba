"""Where in a text something is measured, and the logits that are read there."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe._linalg import at_least_float32
from wvprobe._validate import index, message
from wvprobe.adapters import Unembedding
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.words import Encoding, locate

# Rows of the unembedding that are multiplied at a time.
_TILE = 16_384


def position_in(encoding: Encoding, given: object, name: str) -> int:
    """Return a token position of a text.

    Args:
        encoding: the text.
        given: a position, a word (of several tokens the last), or None for the text's last token
            of its own; what a tokenizer adds behind it (SEP) does not count.
        name: the argument's name, for messages.

    Raises:
        WordError: the word is not in the text.
        InputError: no such position, or a text without tokens of its own.
    """
    if given is None:
        own = [at for at, added in enumerate(encoding.special) if not added]
        if not own:
            expected = "given for a text of which the tokenizer makes no token"
            raise InputError(message(name, expected, None))
        return own[-1]
    if isinstance(given, str):
        return locate(encoding, given).tokens[-1]
    return index(name, given, len(encoding.ids), "tokens in the text")


def require_linear_head(model: Any, head: Unembedding | str, what: str) -> Unembedding:
    """Return the head, or raise UnsupportedError naming `what` where there is no linear one."""
    if isinstance(head, str):
        raise UnsupportedError(
            f"{what} needs a head that is linear in the final stream; {model.cfg.model_name} has "
            f"none: {head}. Use the norms (value_flow without a token), or exchange."
        )
    return head


def check_finite(name: str, values: Tensor) -> Tensor:
    """Return `values`, or raise InputError where they hold NaN or infinity."""
    if not bool(torch.isfinite(values).all()):
        raise InputError(message(name, "finite", "NaN or infinity", "Look at the checkpoint."))
    return values


def token_logits(head: Unembedding, x: Float[Tensor, "*b d_model"]) -> Float[Tensor, "*b d_vocab"]:
    """Return all logits of final streams, through the final norm, before a soft cap.

    Each stream is normed by its own scale. The unembedding is read in tiles, never copied.
    """
    weight = head.weight
    x = at_least_float32(x).to(weight.device)
    x = x if head.norm is None else head.norm(x)
    tiles = [x @ at_least_float32(tile).to(x.dtype).T for tile in weight.split(_TILE)]
    logits = torch.cat(tiles, dim=-1)
    if head.bias is not None:
        logits = logits + head.bias.to(logits.dtype)
    return head.scale * check_finite("logits", logits)


def log_probs(
    head: Unembedding, logits: Float[Tensor, "*b d_vocab"]
) -> Float[Tensor, "*b d_vocab"]:
    """Return log p, natural logarithm, of :func:`token_logits`, behind a soft cap if there is one.

    In float64: differences of two forwards are measured in it.
    """
    logits, cap = logits.double(), head.soft_cap
    return (logits if cap is None else cap * (logits / cap).tanh()).log_softmax(dim=-1)
