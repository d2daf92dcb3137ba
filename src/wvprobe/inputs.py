"""What attention reads, over real text: the mean and the covariance of x̂ in every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._progress import progress as progress_bar
from wvprobe._types import Result
from wvprobe._validate import message
from wvprobe._validate import texts as checked_texts
from wvprobe.activations import read_sites
from wvprobe.datasets import load_prose
from wvprobe.errors import InputError

_CHUNK_FLOATS = 40_000_000  # floats of resid_pre held at once
_LONG_WORK = 8  # chunks from which on progress is shown


@dataclass(frozen=True)
class InputResult(Result):
    """Moments of x̂, the vectors that attention reads, over the tokens of some texts.

    Attributes:
        mean: [layer, d_model] μ = E x̂, float64.
        mean_square: [layer] E‖x̂‖².
        covariance: [layer, d_model, d_model] E (x̂ − μ)ᵀ(x̂ − μ), divided by n, float64; None where
            it was not asked for.
        n: tokens counted; those that the tokenizer added (BOS, CLS, SEP) are not among them.

    Examples:
        >>> from wvprobe.inputs import mean_input
        >>> list(mean_input(model, "The river bank.", progress=False).to_frame())[0]
        'layer'
    """

    mean: Float[Tensor, "layer d_model"]
    mean_square: Float[Tensor, " layer"]
    covariance: Float[Tensor, "layer d_model d_model"] | None
    n: int

    AXES: ClassVar = {
        "mean": ("layer", "d_model"),
        "mean_square": ("layer",),
        "covariance": ("layer", "d_model", "d_model"),
    }

    def second_moment(self) -> Float[Tensor, "layer d_model d_model"]:
        """Return E x̂ᵀx̂, uncentred: the covariance plus μᵀμ.

        Raises:
            InputError: the covariance was not measured.
        """
        if self.covariance is None:
            raise InputError(
                "the covariance was not measured. Use input_covariance(model, texts) instead of "
                "mean_input(model, texts)."
            )
        return self.covariance + self.mean[:, :, None] * self.mean[:, None, :]

    def to_frame(self) -> Any:
        """Return one row a layer: layer mean_norm mean_square mean_share n.

        `mean_share` is ‖μ‖² / E‖x̂‖²: how much of what is read all tokens have in common.
        """
        import pandas

        norm = self.mean.norm(dim=-1)
        columns = {
            "layer": range(len(self.mean)),
            "mean_norm": norm.tolist(),
            "mean_square": self.mean_square.tolist(),
            "mean_share": (norm.square() / self.mean_square).tolist(),
        }
        return pandas.DataFrame({**columns, "n": self.n})


def mean_input(
    model: Any,
    texts: str | Sequence[str] | None = None,
    *,
    fold_norm: bool = True,
    progress: bool = True,
) -> InputResult:
    """Measure the mean x̂ of every layer, as :func:`wvprobe.offset_profile` needs it.

    Args:
        model: a TransformerBridge.
        texts: texts to average over; None for the bundled prose (its calibration part).
        fold_norm: as in ``HeadWeights.from_model``: x̂ is x / σ where the norm is folded into the
            weights, and the norm's output where it is not. A post-norm model (BERT) reads x itself.
        progress: show progress on long work.

    Raises:
        InputError: no text, or no token but those that the tokenizer adds.

    Examples:
        >>> from wvprobe.inputs import mean_input
        >>> mean_input(model, "The river bank is closed.", progress=False).mean.shape
        torch.Size([3, 42])
    """
    return _measure(model, texts, fold_norm, progress, covariance=False)


def input_covariance(
    model: Any,
    texts: str | Sequence[str] | None = None,
    *,
    fold_norm: bool = True,
    progress: bool = True,
) -> InputResult:
    """Measure mean and covariance of x̂ in every layer, for ``metric=`` of spectra.

    Sums are kept in float64, n_layers · d_model² numbers of them (SmolLM2: 80 MB); of the texts one
    chunk is held at a time. With fewer tokens than d_model the covariance is rank-deficient.

    Args:
        model: a TransformerBridge.
        texts: texts to average over; None for the bundled prose (its calibration part).
        fold_norm: see :func:`mean_input`.
        progress: show progress on long work.

    Raises:
        InputError: no text, or no token but those that the tokenizer adds.

    Examples:
        >>> from wvprobe.inputs import input_covariance
        >>> texts = ["The river bank is closed.", "A power bank fell."]
        >>> input_covariance(model, texts, progress=False).covariance.shape
        torch.Size([3, 42, 42])
    """
    return _measure(model, texts, fold_norm, progress, covariance=True)


def _measure(
    model: Any,
    texts: str | Sequence[str] | None,
    fold_norm: bool,
    progress: bool,
    *,
    covariance: bool,
) -> InputResult:
    found = checked_texts(load_prose("calibration") if texts is None else texts)
    arch = adapters.architecture(model)
    norms = [adapters.attention_norm(model, arch, layer) for layer in range(arch.n_layers)]
    size = (arch.n_layers, arch.d_model)
    total = torch.zeros(size, dtype=torch.float64)
    squares = torch.zeros(size[0], dtype=torch.float64)
    outer = torch.zeros(*size, size[1], dtype=torch.float64) if covariance else None
    count = 0
    chunks = _chunks(found, arch.n_layers * arch.d_model)
    with progress_bar(len(found), "texts read", progress and len(chunks) >= _LONG_WORK) as advance:
        for chunk in chunks:
            seen = read_sites(model, chunk, "resid_pre")
            own = _own_tokens(seen)
            count += int(own.sum())
            for layer, norm in enumerate(norms):
                x_hat = _read(seen["resid_pre"][:, :, layer][own].double(), norm, fold_norm)
                total[layer] += x_hat.sum(dim=0)
                squares[layer] += x_hat.square().sum()
                if outer is not None:
                    outer[layer] += x_hat.mT @ x_hat
            advance(len(chunk))
    if not count:
        raise InputError(message("texts", "texts with tokens of their own", found))
    mean = total / count
    if outer is not None:
        for layer in range(arch.n_layers):  # in place: d_model² a layer, not n_layers times that
            outer[layer] /= count
            outer[layer] -= mean[layer, :, None] * mean[layer]
    settings = {"texts": len(found), "tokens": count, "fold_norm": fold_norm}
    return InputResult(
        provenance=adapters.provenance(model, **settings),
        mean=mean,
        mean_square=squares / count,
        covariance=outer,
        n=count,
    )


def _chunks(texts: list[str], floats_a_token: int) -> list[list[str]]:
    """Split texts so that a chunk's residual streams stay small, at four characters a token."""
    room = max(1, _CHUNK_FLOATS // floats_a_token)
    chunks: list[list[str]] = [[]]
    longest = 0
    for text in sorted(texts, key=len):  # like lengths together, so that little is padding
        longest = max(longest, len(text))
        if chunks[-1] and (len(chunks[-1]) + 1) * longest > 4 * room:
            chunks.append([])
            longest = len(text)
        chunks[-1].append(text)
    return chunks


def _own_tokens(seen: Any) -> Tensor:
    """Return [item, pos], True for tokens of the text itself: no padding, BOS, CLS or SEP."""
    own = seen.mask.clone()
    for row, added in enumerate(seen.special):
        own[row, : len(added)] &= ~torch.tensor(added)
    return own


def _read(x: Tensor, norm: adapters.Norm | None, folded: bool) -> Tensor:
    if norm is None:
        return x
    return x / norm.scale(x) if folded else norm(x.to(norm.gain.device)).cpu()
