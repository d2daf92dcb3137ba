"""How a head's score depends on the offset alone, and which planes of a rotation it scores by.

With μ the mean of what a layer reads, b(Δ) is the score of an average query and an average key at
offset Δ = query position − key position. A rotation makes it a sum of one cosine and one sine a
plane, so that any number of offsets costs little more than one.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe._factors import check_heads, digest, paired, provenance_of
from wvprobe._rotary import Rotary
from wvprobe._shapes import floating
from wvprobe._types import Result
from wvprobe._validate import finite, listed, message
from wvprobe.errors import InputError, ShapeError, UnsupportedError
from wvprobe.heads import HeadWeights


@dataclass(frozen=True)
class OffsetResult(Result):
    """Scores by offset and shares of the planes, of every head.

    Attributes:
        offsets: Δ = query position − key position, tokens.
        profile: [layer, head, offset] b(Δ), raw: before a soft cap, masked offsets included.
        masked: [layer, offset] True where no query of the layer sees a key at Δ: ahead of it in a
            decoder, or at or beyond its sliding window.
        constant: [layer, head] what of b does not turn.
        cosine: [layer, head, plane] amplitudes a_f: b(Δ) = constant + Σ_f (a_f cos fΔ + b_f sin fΔ)
            − slope · Δ.
        sine: [layer, head, plane] amplitudes b_f.
        slopes: [head] ALiBi's slopes; zeros where there are none.
        frequencies: [layer, plane] f, radians a token; NaN for planes that a layer has not.
        shares: [layer, head, plane] ⟨QK_f, QK⟩ / ‖QK‖² at Δ = 0: how much of the circuit's weights
            a plane is. With `unrotated` they sum to 1; one can be negative. Zeros for a zero head.
        unrotated: [layer, head] the same share of the dimensions that are not rotated.
        wavelength: tokens; planes that turn a full circle within fewer count as position.
        soft_cap: a layer's bound of tanh(s / cap) · cap, or None.

    Examples:
        >>> from wvprobe.inputs import mean_input
        >>> mean = mean_input(model, "The river bank is closed.", progress=False).mean
        >>> found = wvprobe.offset_profile(heads, range(8), mean_input=mean)
        >>> bool(((found.position_share + found.content_share) - 1).abs().max() < 1e-4)
        True
    """

    offsets: tuple[int, ...]
    profile: Float[Tensor, "layer head offset"]
    masked: Bool[Tensor, "layer offset"]
    constant: Float[Tensor, "layer head"]
    cosine: Float[Tensor, "layer head plane"]
    sine: Float[Tensor, "layer head plane"]
    slopes: Float[Tensor, " head"]
    frequencies: Float[Tensor, "layer plane"]
    shares: Float[Tensor, "layer head plane"]
    unrotated: Float[Tensor, "layer head"]
    wavelength: float
    soft_cap: tuple[float | None, ...]

    AXES: ClassVar = {
        "profile": ("layer", "head", "offset"),
        "masked": ("layer", "offset"),
        "constant": ("layer", "head"),
        "cosine": ("layer", "head", "plane"),
        "sine": ("layer", "head", "plane"),
        "slopes": ("head",),
        "frequencies": ("layer", "plane"),
        "shares": ("layer", "head", "plane"),
        "unrotated": ("layer", "head"),
    }

    @property
    def position_share(self) -> Float[Tensor, "layer head"]:
        """Share of the fast planes, those of a wavelength 2π/f below :attr:`wavelength`."""
        # NaN, a plane that the layer has not, compares as False.
        fast = self.frequencies * self.wavelength > 2 * math.pi
        return (self.shares * fast[:, None]).sum(dim=-1)

    @property
    def content_share(self) -> Float[Tensor, "layer head"]:
        """Share of the slow planes and of the dimensions that are not rotated."""
        slow = ~(self.frequencies * self.wavelength > 2 * math.pi)
        return (self.shares * slow[:, None]).sum(dim=-1) + self.unrotated

    def weights(self) -> Float[Tensor, "layer head offset"]:
        """Return the softmax of b over the visible ones of `offsets`, after a soft cap.

        The attention by offset of a token whose keys are all average, if `offsets` are all it
        sees. NaN in layers where none of them is visible.
        """
        caps = torch.tensor([math.inf if cap is None else cap for cap in self.soft_cap])
        caps = caps.to(self.profile.dtype)[:, None, None]
        capped = torch.where(caps.isinf(), self.profile, caps * torch.tanh(self.profile / caps))
        return capped.masked_fill(self.masked[:, None], -torch.inf).softmax(dim=-1)

    def to_frame(self) -> Any:
        """Return one row a head.

        Columns: layer head preferred_offset preferred_weight score position_share content_share.
        `preferred_offset` is the visible one of `offsets` with the largest b (NA where none is
        visible), `preferred_weight` its softmax weight among them, `score` its b.
        """
        import pandas

        seen = self.profile.masked_fill(self.masked[:, None], -torch.inf)
        at = seen.argmax(dim=-1, keepdim=True)
        n_layers, n_heads = self.constant.shape
        cells = torch.cartesian_prod(torch.arange(n_layers), torch.arange(n_heads))
        none = self.masked.all(dim=-1).tolist()
        preferred = [
            pandas.NA if none[layer] else self.offsets[place]
            for (layer, _), place in zip(cells.tolist(), at.flatten().tolist(), strict=True)
        ]
        score = seen.gather(-1, at)
        columns = {
            "preferred_weight": self.weights().gather(-1, at),
            "score": score.masked_fill(score.isinf(), torch.nan),
            "position_share": self.position_share,
            "content_share": self.content_share,
        }
        return pandas.DataFrame(
            {
                "layer": cells[:, 0].tolist(),
                "head": cells[:, 1].tolist(),
                "preferred_offset": pandas.array(preferred, dtype="Int64"),
                **{name: value.flatten().tolist() for name, value in columns.items()},
            }
        )

    def profile_frame(self) -> Any:
        """Return one row a head and offset: layer head offset score weight masked."""
        import pandas

        shape = self.profile.shape
        layer, head, place = torch.cartesian_prod(*(torch.arange(n) for n in shape)).unbind(1)
        columns = {
            "layer": layer,
            "head": head,
            "offset": torch.tensor(self.offsets)[place],
            "score": self.profile,
            "weight": self.weights(),
            "masked": self.masked[:, None].expand(shape),
        }
        return pandas.DataFrame({k: v.flatten().tolist() for k, v in columns.items()})

    def shares_frame(self) -> Any:
        """Return one row a head and plane: layer head plane frequency wavelength share.

        Plane −1, of frequency 0, stands for the dimensions that are not rotated.
        """
        import pandas

        n_layers, n_heads, n_planes = self.shares.shape
        still = self.frequencies.new_zeros(n_layers, 1)
        frequency = torch.cat((still, self.frequencies), dim=1)
        share = torch.cat((self.unrotated[..., None], self.shares), dim=-1)
        sizes = (n_layers, n_heads, n_planes + 1)
        layer, head, plane = torch.cartesian_prod(*(torch.arange(n) for n in sizes)).unbind(1)
        columns = {
            "layer": layer,
            "head": head,
            "plane": plane - 1,
            "frequency": frequency[:, None].expand(sizes),
            "wavelength": (2 * math.pi / frequency)[:, None].expand(sizes),
            "share": share,
        }
        frame = pandas.DataFrame({k: v.flatten().tolist() for k, v in columns.items()})
        return frame[frame["frequency"].notna()].reset_index(drop=True)


def offset_profile(
    heads: HeadWeights,
    offsets: Iterable[Any],
    *,
    mean_input: Any = None,
    seq_len: int | None = None,
    wavelength: float | int | None = None,
) -> OffsetResult:
    """Compute b(Δ) = c · μ QK(Δ) μᵀ with all bias terms, and the shares of the planes.

    From q = μ W_Q + b_Q and k = μ W_K + b_K, a plane (1, 2) of frequency f adds to b(Δ)
    c · ((q₁k₁ + q₂k₂) cos fΔ + (q₁k₂ − q₂k₁) sin fΔ), by Su et al. 2021 (RoFormer, eq. 34); YaRN's
    factor enters squared. ALiBi adds −slope · Δ instead (Press et al. 2022).
    Under a norm of queries and keys (Qwen3) q and k are those behind the norm, which has μ's own
    scale: b is the score of two tokens that are μ, not the mean score of the tokens.

    ‖QK(Δ)‖, which asks for no μ, hardly depends on Δ and does not tell heads' attention apart.

    Args:
        heads: the weights of a model with rotary positions or ALiBi.
        offsets: Δ = query position − key position, distinct ints; negative ones lie ahead.
        mean_input: μ, [layer, d_model], the mean of each layer's own x̂ over text. It must be
            measured: ``wvprobe.inputs.mean_input(model).mean`` (with `fold_norm` as in `heads`).
            The mean of the embeddings does not do.
        seq_len: length of the input in tokens, where the rotation depends on it.
        wavelength: planes that turn a full circle within fewer tokens count as position, the
            others as content. None: the largest of |offsets|, but at least 2 π.

    Raises:
        UnsupportedError: positions are learned, or there are none; or attention is latent.
        InputError: no `mean_input`, NaN in it, or `offsets` that cannot be used.
        ShapeError: `mean_input` has another shape.

    Examples:
        >>> from wvprobe.inputs import mean_input
        >>> mean = mean_input(model, "The river bank is closed.", progress=False).mean
        >>> found = wvprobe.offset_profile(heads, range(8), mean_input=mean)
        >>> found.profile.shape  # layer, head, offset
        torch.Size([3, 6, 8])
    """
    check_heads(heads)
    _check_positions(heads)
    found = _offsets(offsets)
    means = _means(heads, mean_input)
    window = _wavelength(found, wavelength)
    parts = [_layer(heads, means[layer], layer, seq_len) for layer in range(heads.n_layers)]
    planes = max(part["shares"].shape[-1] for part in parts)
    tensors = {
        name: torch.stack([_padded(p[name], name, planes) for p in parts]) for name in parts[0]
    }
    slopes = heads.slopes
    slopes = means.new_zeros(heads.n_heads) if slopes is None else slopes.to(means)
    return OffsetResult(
        provenance=provenance_of(
            heads, offsets=list(found), wavelength=window, seq_len=seq_len, mean_input=digest(means)
        ),
        offsets=found,
        profile=_evaluate(tensors, slopes, found),
        masked=_masked(heads, found),
        slopes=slopes,
        wavelength=window,
        soft_cap=tuple(heads.soft_cap),
        **tensors,
    )


def _check_positions(heads: HeadWeights) -> None:
    name = heads.provenance.model
    if heads.latent is not None:
        raise UnsupportedError(
            f"{name} has latent attention, whose scores are a sum of two circuits with a norm "
            "each; offset_profile does not model it. Use heads.scores on x̂ of a text."
        )
    if heads.slopes is not None or any(rotary is not None for rotary in heads.rotary):
        return
    kind = "no positions" if heads.W_pos is None else "learned positions"
    instead = (
        "its scores do not depend on the offset; measure attention by offset on text"
        if heads.W_pos is None
        else "its scores depend on both positions and not on their offset alone; multiply out "
        "W_pos QK W_posᵀ, or measure attention by offset on text"
    )
    raise UnsupportedError(
        f"{name} has {kind}: {instead} (wvprobe.capture(model, texts, 'pattern'))."
    )


def _offsets(given: Iterable[Any]) -> tuple[int, ...]:
    what = "whole numbers of tokens"
    values = given.tolist() if isinstance(given, Tensor) else listed("offsets", given, what)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise InputError(message("offsets", what, value))
    if not values or len(set(values)) != len(values):
        raise InputError(message("offsets", "one or more distinct ints", values))
    return tuple(int(value) for value in values)


def _means(heads: HeadWeights, given: Any) -> Tensor:
    how = "Measure it with wvprobe.inputs.mean_input(model) and pass its .mean."
    if given is None:
        raise InputError(
            message("mean_input", "the mean of each layer's x̂, [layer, d_model]", None, how)
        )
    if not isinstance(given, Tensor):
        raise InputError(message("mean_input", "a tensor", type(given).__name__, how))
    expected = (heads.n_layers, heads.d_model)
    if tuple(given.shape) != expected:
        shown = f"shape {list(given.shape)}"
        raise ShapeError(message("mean_input", f"[layer, d_model] = {list(expected)}", shown, how))
    floating("mean_input", given, ("layer", "d_model"), hint=how)
    return given.detach().double().cpu()


def _wavelength(offsets: tuple[int, ...], given: float | int | None) -> float:
    if given is None:
        return max(2 * math.pi, float(max(map(abs, offsets))))
    return finite("wavelength", given, above=0.0)


def _layer(heads: HeadWeights, mean: Tensor, layer: int, seq_len: int | None) -> dict[str, Tensor]:
    """Return one layer's constant, cosine, sine, frequencies, shares and unrotated share."""
    left, right = heads.qk_factors(layer, offset=0, seq_len=seq_len)
    mean = mean.to(left)
    group = heads.n_heads // heads.n_kv_heads
    # queries() and keys() apply biases and norms of queries and keys; all further in float64.
    query = heads.scale[layer] * heads.queries(mean, layer).double().cpu()
    key = heads.keys(mean, layer).double().cpu().repeat_interleave(group, dim=0)
    rotary = heads.rotary[layer]
    first, second, still, factor = _dims(rotary, query.shape[-1])
    q1, q2, k1, k2 = query[:, first], query[:, second], key[:, first], key[:, second]
    frequencies = torch.zeros(0) if rotary is None else rotary.frequencies(seq_len).cpu()
    shares = _dimension_shares(left, right)
    return {
        "constant": (query[:, still] * key[:, still]).sum(dim=-1),
        "cosine": factor * (q1 * k1 + q2 * k2),
        "sine": factor * (q1 * k2 - q2 * k1),
        "frequencies": frequencies.double(),
        "shares": shares[:, first] + shares[:, second],
        "unrotated": shares[:, still].sum(dim=-1),
    }


def _dims(rotary: Rotary | None, d_head: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return the first and second dimensions of all planes, those not rotated, and the factor."""
    if rotary is None:
        none = torch.arange(0)
        return none, none, torch.arange(d_head), 1.0
    dims = torch.arange(rotary.dim)
    first, second = (dims[0::2], dims[1::2]) if rotary.adjacent else dims.chunk(2)
    return first, second, torch.arange(rotary.dim, d_head), rotary.scaling**2


def _dimension_shares(left: Tensor, right: Tensor) -> Tensor:
    """Return ⟨QK_e, QK⟩ / ‖QK‖² of every dimension e of d_head, [head, d_head].

    QK_e is the outer product of column e of the two factors, so ⟨QK_e, QK_f⟩ is the product of two
    entries of the factors' Gram matrices.
    """
    left, right = left.double(), right.double()
    inner = torch.mul(*paired(left.mT @ left, right.mT @ right)).cpu()
    total = inner.sum(dim=(-2, -1))[:, None]
    return inner.sum(dim=-1) / torch.where(total > 0, total, torch.ones_like(total))


def _padded(value: Tensor, name: str, planes: int) -> Tensor:
    """Fill up what has planes for its last axis: NaN frequencies, and amplitudes of 0."""
    if name in ("constant", "unrotated"):
        return value
    fill = torch.nan if name == "frequencies" else 0.0
    return torch.nn.functional.pad(value, (0, planes - value.shape[-1]), value=fill)


def _evaluate(parts: dict[str, Tensor], slopes: Tensor, offsets: tuple[int, ...]) -> Tensor:
    """Return b(Δ), [layer, head, offset]."""
    places = torch.tensor(offsets, dtype=torch.float64)
    rows = []
    for layer, frequencies in enumerate(parts["frequencies"].nan_to_num()):
        angles = frequencies[:, None] * places
        turned = parts["cosine"][layer] @ angles.cos() + parts["sine"][layer] @ angles.sin()
        rows.append(parts["constant"][layer, :, None] + turned - slopes[:, None] * places)
    return torch.stack(rows)


def _masked(heads: HeadWeights, offsets: tuple[int, ...]) -> Tensor:
    places = torch.tensor(offsets)
    ahead = places < 0 if heads.causal else torch.zeros_like(places, dtype=torch.bool)
    return torch.stack(
        [ahead if size is None else ahead | (places.abs() >= size) for size in heads.sliding_window]
    )
