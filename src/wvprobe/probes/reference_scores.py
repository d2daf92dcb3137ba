"""Scores of references, and a site's excess over them: same folds, same items, same resamples."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wvprobe._progress import progress
from wvprobe._validate import length, message
from wvprobe.errors import InputError, ShapeError
from wvprobe.probes.fitting import PROBABILISTIC, TOGETHER, Outcome, Settings, out_of_fold
from wvprobe.probes.folds import Labels, Plan, check_training, labels_of
from wvprobe.probes.references import FeatureDraws, FoldFeatures, OtherLabels
from wvprobe.probes.scores import (
    Bootstrap,
    Sampled,
    against_a_draw,
    against_overlap,
    scored,
)
from wvprobe.probes.sources import Sites, as_sites
from wvprobe.store import StoredSite


@dataclass(frozen=True)
class Held:
    """What is held against references.

    Attributes:
        x: the features.
        labels: of the items.
        plan: the folds.
        settings: of the probes.
        bootstrap: the resamples.
        score: the name of the score.
        own: the sites' scores.
        seed: of what is drawn besides.
    """

    x: Sites
    labels: Labels
    plan: Plan
    settings: Settings
    bootstrap: Bootstrap
    score: str
    own: Sampled
    seed: int


class Against(NamedTuple):
    """A reference's scores.

    Attributes:
        score: [site] mean over draws.
        excess: by how much the sites' own are better.
        beaten: [site] share of draws that the site is better than.
    """

    score: Tensor
    excess: Sampled
    beaten: Tensor


def hold_against(name: str, reference: Any, held: Held) -> Against:
    """Score a reference and hold the sites against it.

    Raises:
        InputError: it is none of the kinds known, or holds NaN, or is wrong in a class's number.
        ShapeError: its axes do not go with those of X.
    """
    values, beaten = [], []
    total = torch.zeros_like(held.own.draws)
    for one in _draws(name, reference, held):
        values.append(one.value)
        beaten.append(held.own.above(one, held.score).value > 0)
        total += one.draws
    by_draw = torch.stack(values)
    mean = Sampled(by_draw.mean(dim=0), total / len(values))
    excess = held.own.above(mean, held.score)
    if len(values) > 1:
        # Draws under the same folds differ by what folds share as well: it is not added twice.
        excess = against_a_draw(excess, by_draw, held.seed)
    else:
        excess = against_overlap(excess, held.plan.n_folds)
    return Against(mean.value, excess, torch.stack(beaten).double().mean(dim=0))


def check_reference(name: str, reference: Any, n: int, shape: tuple[int, ...]) -> None:
    """Refuse what is no reference, before anything is fitted.

    Raises:
        InputError: it is none of the kinds known.
        ShapeError: features have other items or axes than X.
    """
    if isinstance(reference, Tensor | StoredSite | Sites):
        _check_shape(name, reference, n, shape)
    elif not isinstance(reference, (FoldFeatures, OtherLabels)):
        if not callable(getattr(reference, "make", reference)) or not hasattr(reference, "draws"):
            hint = "A plain callable needs an attribute `draws`; FeatureDraws gives it one."
            expected = "features, FeatureDraws, FoldFeatures or OtherLabels"
            got = type(reference).__name__
            raise InputError(message(f"references[{name!r}]", expected, got, hint))


def majority(held: Held) -> Against:
    """Hold the sites against the training items' class shares: their largest class."""
    y, n_classes, plan = held.labels.y, len(held.labels.classes), held.plan
    predicted, bits = torch.zeros_like(y), torch.zeros(len(y), device=y.device)
    for fold in range(plan.n_folds):
        shares = torch.bincount(y[plan.fold != fold], minlength=n_classes).float()
        shares = shares / shares.sum()
        here = plan.fold == fold
        predicted[here] = shares.argmax()
        bits[here] = -torch.log2(shares)[y[here]]
    none = torch.zeros(1, plan.n_folds)
    outcome = Outcome(predicted[None], bits[None], none, none)
    one = _scored(outcome, held.labels, held)
    one = one.at(torch.zeros(len(held.own.value), dtype=torch.long, device=y.device))
    excess = against_overlap(held.own.above(one, held.score), plan.n_folds)
    return Against(one.value, excess, (excess.value > 0).double())


def _draws(name: str, reference: Any, held: Held) -> Iterator[Sampled]:
    """Yield the reference's scores, draw by draw, as many sites as X has."""
    y = held.labels.y
    if isinstance(reference, Tensor | StoredSite | Sites):
        yield _score(reference, name, held)
    elif isinstance(reference, FoldFeatures):
        yield _by_fold(reference, name, held)
    elif isinstance(reference, OtherLabels):
        with progress(reference.draws, f"Reference {name}", held.settings.show) as advance:
            for draw in range(reference.draws):
                labels = labels_of(f"references[{name!r}]", reference.make(draw), len(y))
                labels = Labels(labels.classes, labels.y.to(y.device))
                check_training(f"references[{name!r}]", labels, held.plan)
                yield _fitted_and_scored(held.x, labels, held)
                advance(1)
    else:
        make = reference.make if isinstance(reference, FeatureDraws) else reference
        count = length(f"references[{name!r}].draws", reference.draws)
        with progress(count, f"Reference {name}", held.settings.show) as advance:
            for draw in range(count):
                yield _score(make(draw), name, held)
                advance(1)


def _fitted(
    x: Sites, labels: Labels, held: Held, *, folds: list[int] | None = None
) -> Iterator[tuple[slice, Outcome]]:
    quiet = held.settings._replace(show=False)
    return out_of_fold(x, labels.y, len(labels.classes), held.plan, quiet, folds=folds)


def _fitted_and_scored(x: Sites, labels: Labels, held: Held) -> Sampled:
    parts = _fitted(x, labels, held)
    return Sampled.joined([_scored(outcome, labels, held) for _, outcome in parts])


def _scored(outcome: Outcome, labels: Labels, held: Held) -> Sampled:
    names = (held.score,)
    return scored(names, outcome, labels.y, len(labels.classes), held.bootstrap)[held.score]


def _score(features: Any, name: str, held: Held) -> Sampled:
    x, sites = _flattened(features, name, held)
    return _fitted_and_scored(x, held.labels, held).at(sites)


def _by_fold(reference: FoldFeatures, name: str, held: Held) -> Sampled:
    """Score features that differ from fold to fold."""
    plan, said, bits, sites = held.plan, None, None, torch.empty(0)
    probabilistic = held.settings.method in PROBABILISTIC
    for fold in range(plan.n_folds):
        train = (plan.fold != fold).nonzero()[:, 0]
        x, sites = _flattened(reference.make(train), name, held)
        if said is None:
            # Of all sites at once, hence in few bytes.
            said = torch.empty(x.count, x.n, dtype=torch.int16, device=x.device)
            bits = torch.empty(x.count if probabilistic else 0, x.n, device=x.device)
        here = plan.fold == fold
        for some, found in _fitted(x, held.labels, held, folds=[fold]):
            said[some, here] = found.predicted[:, here].to(said)
            if found.bits is not None and bits is not None:
                bits[some, here] = found.bits[:, here].to(bits)
    if said is None or bits is None:
        raise InputError(message("folds", "at least one", 0))
    none = torch.zeros(len(said), plan.n_folds)
    size = max(1, TOGETHER // held.x.n)
    parts = [
        _scored(
            Outcome(
                said[start : start + size].long(),
                bits[start : start + size] if probabilistic else None,
                none[start : start + size],
                none[start : start + size],
            ),
            held.labels,
            held,
        )
        for start in range(0, len(said), size)
    ]
    return Sampled.joined(parts).at(sites)


def _flattened(features: Any, name: str, held: Held) -> tuple[Sites, Tensor]:
    """Return features as sites, and the place there of each of X's sites."""
    _check_shape(name, features, held.x.n, held.x.shape)
    if isinstance(features, Tensor):
        if not features.is_floating_point() or not bool(features.isfinite().all()):
            expected = "finite floating numbers"
            raise InputError(message(f"references[{name!r}]", expected, str(features.dtype)))
        features = features.to(held.x.device)
    x = as_sites(features)
    sites = x.shape or (1,) * len(held.x.shape)
    places = torch.arange(x.count, device=held.x.device).reshape(sites)
    return x, places.expand(held.x.shape).flatten()


def _check_shape(name: str, features: Any, n: int, shape: tuple[int, ...]) -> None:
    every = _every(features)
    sites = every[1:-1]
    fits = not sites or (
        len(sites) == len(shape)
        and all(one in (1, own) for one, own in zip(sites, shape, strict=True))
    )
    if len(every) < 2 or every[0] != n or not fits:
        expected = f"[{n}, feature] or [{n}, site…, feature], sites as X's or of length 1"
        raise ShapeError(message(f"references[{name!r}]", expected, f"shape {list(every)}"))


def _every(features: Any) -> tuple[int, ...]:
    """Return the lengths of all axes."""
    if isinstance(features, Sites):
        return (features.n, *features.shape, features.width)
    return tuple(features.shape)
