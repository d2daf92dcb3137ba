"""From which items are right to scores, excesses and the division of labour."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from wvprobe._statistics import benjamini_hochberg
from wvprobe._types import Provenance
from wvprobe.probes.scores import against_a_draw, against_overlap, family_wise
from wvprobe.value_payload._averages import Averages, Sampled, interval, mean_of
from wvprobe.value_payload.results import LabourResult, PayloadResult

if TYPE_CHECKING:
    from wvprobe.value_payload.measuring import Measured

LABOUR = ("v", "q", "k")


class Settings(NamedTuple):
    """What a result says of itself, and how its differences are resampled.

    `folds` is None where nothing is trained across independent units (senses in their lemma).
    """

    dataset: str
    label: str
    method: str
    score: str
    classes: tuple[str, ...]
    provenance: Provenance
    folds: int | None
    seed: int

    def widened(self, one: Sampled) -> Sampled:
        """Return a difference with draws that allow for folds that share training items."""
        return one if self.folds is None else against_overlap(one, self.folds)


def assembled(measured: "Measured", averages: Averages, settings: Settings) -> PayloadResult:
    """Return the result for the items that `averages` takes in."""
    own = {site: averages(right) for site, right in measured.right.items()}
    shapes = {site: tuple(right.shape[:2]) for site, right in measured.right.items()}
    excess: dict[str, dict[str, Sampled]] = {site: {} for site in own}
    levels: dict[str, dict[str, Tensor]] = {site: {} for site in own}
    for number, site in enumerate(own):
        for name, reference in _references(measured, averages, site):
            one = own[site].above(reference, "accuracy")
            if name == "random":
                drawn = averages.of_units(measured.draws[measured.widths[site]])
                chance = drawn.T.repeat_interleave(shapes[site][1], dim=1).double()
                # Sites of one shape must not be given the same noise: their difference is taken.
                one = against_a_draw(one, chance, settings.seed + number)
            else:
                one = settings.widened(one)
            excess[site][name] = one
            levels[site][name] = reference.value
    if measured.null is not None:
        shape = tuple(measured.null.shape[:2])
        drops = averages(measured.null)
        chance = _spread(averages(measured.null_random), shape)
        excess["v"]["null"] = settings.widened(drops.above(chance, "accuracy"))
        levels["v"]["null"] = chance.value
    names = list(dict.fromkeys(name for site in own for name in excess[site]))
    tests = {
        site: _tests(measured, averages, own[site], excess[site]["random"], site) for site in own
    }
    intervals = {site: interval(one) for site, one in own.items()}
    held: dict[str, tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]] = {}
    for name in names:
        parts: tuple[list[Tensor], ...] = ([], [], [], [])
        for site in own:
            one = excess[site].get(name)
            nothing = torch.full_like(own[site].value, torch.nan)
            low, high = (nothing, nothing) if one is None else interval(one)
            value = nothing if one is None else one.value
            for part, values in zip(
                parts, (levels[site].get(name, nothing), value, low, high), strict=True
            ):
                part.append(values)
        held[name] = parts  # pyright: ignore[reportArgumentType]
    places = {site: _places(shape) for site, shape in shapes.items()}
    return PayloadResult(
        provenance=settings.provenance,
        site=tuple(site for site, one in own.items() for _ in range(len(one.value))),
        layer=torch.cat([places[site][0] for site in own]),
        head=torch.cat([places[site][1] for site in own]),
        score=torch.cat([one.value for one in own.values()]),
        low=torch.cat([intervals[site][0] for site in own]),
        high=torch.cat([intervals[site][1] for site in own]),
        reference_scores={name: torch.cat(held[name][0]) for name in names},
        excess={name: torch.cat(held[name][1]) for name in names},
        excess_low={name: torch.cat(held[name][2]) for name in names},
        excess_high={name: torch.cat(held[name][3]) for name in names},
        p=torch.cat([tests[site][0] for site in own]),
        q=torch.cat([benjamini_hochberg(tests[site][0]) for site in own]),
        p_family=torch.cat([tests[site][1] for site in own]),
        labour=_labour(own, excess, shapes, settings) if set(LABOUR) <= set(own) else None,
        same_pos=None,
        dataset=settings.dataset,
        label=settings.label,
        method=settings.method,
        score_name=settings.score,
        classes=settings.classes,
        n_items=averages.n_items,
        n_groups=averages.n_groups,
    )


def _references(
    measured: "Measured", averages: Averages, site: str
) -> Iterator[tuple[str, Sampled]]:
    """Yield each reference of a site, as long as the site's layers × heads."""
    right, width = measured.right[site], measured.widths[site]
    shape = tuple(right.shape[:2])
    yield "random", _spread(averages(measured.random[width]), shape)
    yield "pca", _spread(averages(measured.components[width]), shape)
    if site != "attn_in":
        yield "full", _spread(averages(measured.full), shape)
    for name in ("embedding", "majority"):
        one = averages(getattr(measured, name)[None])
        everywhere = torch.zeros(shape[0] * shape[1], dtype=torch.long)
        yield name, one.at(everywhere)
    if site == "v":
        for other in ("q", "k"):
            if other in measured.right:
                yield other, _spread(averages(measured.right[other].mean(dim=1)), shape)
    if site in measured.control:
        yield "control", averages(measured.control[site])
    if site in measured.reinitialised:
        yield "reinitialised", averages(measured.reinitialised[site])


def _spread(by_layer: Sampled, shape: tuple[int, int]) -> Sampled:
    """Return a layer's value for each of its heads."""
    return by_layer.at(torch.arange(shape[0]).repeat_interleave(shape[1]))


def _places(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    layers, heads = torch.meshgrid(*(torch.arange(size) for size in shape), indexing="ij")
    return layers.flatten(), heads.flatten()


def _tests(
    measured: "Measured", averages: Averages, own: Sampled, over: Sampled, site: str
) -> tuple[Tensor, Tensor]:
    """Return the rank of each head among random projections as p, and the family-wise p."""
    draws = averages.of_units(measured.draws[measured.widths[site]])
    heads = measured.right[site].shape[1]
    scores = own.value.reshape(-1, heads)
    reached = (draws[:, None] >= scores[..., None] - 1e-9).sum(dim=-1)
    return ((reached + 1.0) / (draws.shape[1] + 1.0)).flatten(), family_wise(over)


def _labour(
    own: dict[str, Sampled],
    excess: dict[str, dict[str, Sampled]],
    shapes: dict[str, tuple[int, int]],
    settings: Settings,
) -> LabourResult:
    """Hold v against q and k: by layer, and over all layers reference by reference."""
    layered = {site: mean_of(own[site], shapes[site], 1) for site in LABOUR}
    over = {site: mean_of(excess[site]["random"], shapes[site], 1) for site in LABOUR}
    common = [name for name in excess["v"] if all(name in excess[site] for site in LABOUR)]
    whole = {
        (name, site): mean_of(excess[site][name], shapes[site], 2)
        for name in common
        for site in LABOUR
    }
    contrasts = {
        other: settings.widened(layered["v"].above(layered[other], "accuracy"))
        for other in ("q", "k")
    }
    return LabourResult(
        provenance=settings.provenance,
        score=torch.stack([layered[site].value for site in LABOUR]),
        low=torch.stack([interval(layered[site])[0] for site in LABOUR]),
        high=torch.stack([interval(layered[site])[1] for site in LABOUR]),
        excess=torch.stack([over[site].value for site in LABOUR]),
        excess_low=torch.stack([interval(over[site])[0] for site in LABOUR]),
        excess_high=torch.stack([interval(over[site])[1] for site in LABOUR]),
        contrast=torch.stack([contrasts[other].value for other in ("q", "k")]),
        contrast_low=torch.stack([interval(contrasts[other])[0] for other in ("q", "k")]),
        contrast_high=torch.stack([interval(contrasts[other])[1] for other in ("q", "k")]),
        references=tuple(common),
        overall=torch.stack([_three(whole[n, s]) for n in common for s in LABOUR]).view(-1, 3, 3),
        overall_contrast=torch.stack(
            [
                _three(whole[n, "v"].above(whole[n, other], "accuracy"))
                for n in common
                for other in ("q", "k")
            ]
        ).view(-1, 2, 3),
        range=_range(layered["v"]),
        excess_range=_range(over["v"]),
        score_name=settings.score,
        label=settings.label,
    )


def _three(one: Sampled) -> Tensor:
    """Return value and interval of a single site."""
    low, high = interval(one)
    return torch.stack([one.value[0], low[0], high[0]])


def _range(by_layer: Sampled) -> Tensor:
    """Return the range over layers with its basic bootstrap interval.

    A range grows with noise, so that its resamples lie above it: the interval is
    2 r − (97.5th, 2.5th percentile) (Davison & Hinkley 1997, section 5.2), no lower than 0.
    """
    value = by_layer.value.max() - by_layer.value.min()
    draws = by_layer.draws.amax(dim=1) - by_layer.draws.amin(dim=1)
    ends = torch.quantile(draws, torch.tensor([0.975, 0.025], dtype=draws.dtype))
    low, high = (2 * value - ends).clamp(min=0.0)
    return torch.stack([value, low, high])
