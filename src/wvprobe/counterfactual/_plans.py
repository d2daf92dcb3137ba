"""Ranks that heads are cut to, and the model so cut."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._validate import message
from wvprobe._writes import output_map
from wvprobe.adapters import Architecture, Raw
from wvprobe.counterfactual._cuts import Cut, output_cut, score_cut
from wvprobe.counterfactual._moments import output_moments, score_moments
from wvprobe.errors import ShapeError, UnsupportedError

PARTS = ("OV", "QK")
SITES = {"OV": "z", "QK": "q"}

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ResizePlan:
    """Which rank every head is cut to, and how.

    Attributes:
        name: the setting's name.
        part: ``OV`` or ``QK``.
        ranks: [layer, head].
        maps: [layer, head, d, d] what acts on z (OV) or on queries (QK).
        centre: [layer, head, d] what of z passes unchanged; None for queries.

    Examples:
        >>> texts = ["The river bank is closed.", "A power bank fell into the river."]
        >>> found = wvprobe.resize_heads(model, texts, budget=0.5, calibration=texts)
        >>> plan = found.plan("OV, uniform, 0.50")  # for share_kv_heads(..., after=plan)
        >>> plan.part, int(plan.ranks.sum()) == 3 * 6 * 7
        ('OV', True)
    """

    name: str
    part: str
    ranks: Int[Tensor, "layer head"]
    maps: Float[Tensor, "layer head d d"]
    centre: Float[Tensor, "layer head d"] | None

    @property
    def changes(self) -> Mapping[Raw, Change]:
        """What cuts a model's heads, for :func:`wvprobe.adapters.changing`.

        Layers whose heads all keep their rank are left alone.
        """
        d = self.maps.shape[-1]
        return {
            (SITES[self.part], layer): _linear(
                self.maps[layer], None if self.centre is None else self.centre[layer]
            )
            for layer in range(len(self.ranks))
            if bool((self.ranks[layer] < d).any())
        }


def measured_cut(
    model: Any, arch: Architecture, part: str, texts: Sequence[str], progress: bool = False
) -> Cut:
    """Measure calibration texts, and return the cuts of every head's OV or QK.

    Behind a second norm (Gemma-2) the output that counts is W_O's with that norm's gain and
    centring, its scale, a number a token, left out.

    Raises:
        UnsupportedError: a rotation that is not modelled exactly, or of other planes layer by
            layer.
    """
    layers = range(arch.n_layers)
    if part == "OV":
        moments = output_moments(model, arch, texts, progress)
        return output_cut(moments.mean, moments.covariance, output_maps(model, arch))
    scores = score_moments(model, arch, texts, progress)
    scale = torch.tensor([adapters.score_scale(model, layer) for layer in layers]).double()
    keys = scores.keys.repeat_interleave(arch.n_heads // arch.n_kv_heads, dim=1)
    return score_cut(
        scale.square()[:, None, None, None] * scores.queries, keys, planes_of(model, arch)
    )


def output_maps(model: Any, arch: Architecture) -> Float[Tensor, "layer head d d_model"]:
    """Return W_O of every head, with the gain and centring of a second norm in it."""
    return torch.stack([output_map(model, arch, layer) for layer in range(arch.n_layers)])


def planes_of(model: Any, arch: Architecture) -> Int[Tensor, "plane 2"] | None:
    """Return the dimensions of a head that rotation turns, by plane; None without rotation.

    Raises:
        UnsupportedError: layers differ in them.
    """
    found = [adapters.rotary(model, arch, layer) for layer in range(arch.n_layers)]
    planes = [None if turn is None else turn.planes() for turn in found]
    first = planes[0]
    same = all(
        one is first or (one is not None and first is not None and torch.equal(one, first))
        for one in planes
    )
    if not same:
        raise UnsupportedError(
            f"layers of {model.cfg.model_name} turn different planes of a head, for which there "
            "is no one order of dimensions. Use part='OV'."
        )
    return first


def cut_plan(name: str, part: str, cut: Cut, ranks: Int[Tensor, "layer head"]) -> ResizePlan:
    """Return the plan of cutting every head to its rank."""
    return ResizePlan(name, part, ranks, cut.maps(ranks), cut.centre)


def check_plan(plan: Any, arch: Architecture) -> ResizePlan:
    """Return the plan if it is one for this architecture.

    Raises:
        ShapeError: it is none, or has other layers or heads.
    """
    if not isinstance(plan, ResizePlan):
        hint = "Take one with ResizeResult.plan(setting)."
        raise ShapeError(message("after", "a ResizePlan", type(plan).__name__, hint))
    size = (arch.n_layers, arch.n_heads)
    if tuple(plan.ranks.shape) != size:
        raise ShapeError(message("after", f"of shape {size}", f"shape {tuple(plan.ranks.shape)}"))
    return plan


def _linear(maps: Float[Tensor, "head d d"], centre: Tensor | None) -> Change:
    def change(x: Tensor) -> Tensor:
        a = maps.to(x)
        if centre is None:
            return torch.einsum("bphd,hde->bphe", x, a)
        middle = centre.to(x)
        return middle + torch.einsum("bphd,hde->bphe", x - middle, a)

    return change
