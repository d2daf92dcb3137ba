"""`fit_probes`: scores of linear probes at all sites, beside what they are to be held against."""

import math
import warnings
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe._statistics import benjamini_hochberg
from wvprobe._types import Provenance
from wvprobe._validate import length, message, one_of
from wvprobe.errors import InputError, ShapeError
from wvprobe.probes import fitting, online, permutation, scores
from wvprobe.probes.fitting import GRIDS, METHODS, PROBABILISTIC, Outcome, Settings
from wvprobe.probes.folds import Labels, Plan, labels_of, numbers_of, plan_folds
from wvprobe.probes.reference_scores import Held, hold_against, majority
from wvprobe.probes.results import ProbeResult

# Below this a gradient cannot be resolved in float32.
_FLOAT32_TOLERANCE = 1e-6
_MAJORITY = "majority"


def fit_probes(
    X: Float[Tensor, "item *site feature"],
    y: Sequence[Any] | Tensor | Any,
    *,
    groups: Sequence[Any] | Tensor | Any | None = None,
    folds: int = 5,
    penalty: str | float | int = "cv",
    method: str = "logistic",
    score: str = "accuracy",
    references: Mapping[str, Any] | None = None,
    n_permutations: int = 0,
    permute: str = "auto",
    strata: Sequence[Any] | Tensor | Any | None = None,
    description_length: bool = True,
    standardise: bool = True,
    inner_folds: int = 3,
    penalties: Sequence[float | int] | None = None,
    tolerance: float = 1e-4,
    most_iterations: int = 1000,
    coefficients: bool = False,
    predictions: bool = False,
    site_axes: Sequence[str] | None = None,
    block: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> ProbeResult:
    """Fit a linear probe at every site, all sites together, and score it out of fold.

    Items are split by StratifiedGroupKFold: groups (sentences, lemmas) never lie on both sides.
    Features are standardised, and the penalty is chosen, by the training items of each fold alone.
    That a score beats chance is no finding; what a site adds to a reference may be.

    * ``logistic``: scikit-learn's objective Σ loss + ‖w‖² / (2C), softmax for more than two
      classes, solved until the largest entry of the gradient of its mean over items is at most
      `tolerance` (scikit-learn's criterion). `penalty` is C.
    * ``least_squares``: ridge regression on one-hot labels; `penalty` as scikit-learn's alpha.
    * ``lda``: Gaussian classes with one covariance; `penalty` is its shrinkage, 0 to 1.
    * ``mean_difference``: the nearest class mean; no penalty.

    Float64 is used where X is float64 or `tolerance` is below 1e-6, else float32.

    Args:
        X: features, any number of site axes (layer, head, …).
        y: one int or string an item.
        groups: ints or strings, one an item; None: each item for itself.
        folds: how many folds, at least 2.
        penalty: a number, or ``cv``: for every site and fold, that of least loss (cross-entropy;
            squared error for least squares) in `inner_folds` folds inside the training items.
        method: which probe.
        score: which of accuracy, balanced_accuracy, macro_f1, cross_entropy is held against
            references.
        references: name -> what the score is held against under the same probe, folds and items.
            Features ([item, site…, feature], site axes as X's or of length 1, or [item, feature]),
            or one of :func:`haar_projections`, :func:`haar_complements`, :func:`top_components`,
            :func:`control_task`, :func:`within_strata`, or any callable from a draw's number to
            features with an attribute `draws`. ``majority`` is always there.
        n_permutations: how often labels are permuted for `p`, `q` and `p_family`; 0: not at all.
        permute: what changes places: ``items``, ``groups``, ``within_groups``; ``auto`` takes
            ``groups`` where labels are constant in groups of several items, else ``items``, which
            takes the labels of items for exchangeable, of the same group or not.
        strata: labels are permuted within these (a lemma, say) only.
        description_length: whether to measure the online code (logistic and lda).
        standardise: False leaves features in their own units, which a penalty then depends on.
        inner_folds: how many folds inside a training set.
        penalties: those to choose from; None for a grid of the method's own.
        tolerance: of the logistic solver.
        most_iterations: of the logistic solver; sites that need more are reported unconverged.
        coefficients: whether to keep each fold's coefficients and intercepts, for raw features.
        predictions: whether to keep what was predicted for each item.
        site_axes: names of X's site axes; None for ``site``, or ``site_0``, ``site_1``, ….
        block: sites in memory at a time; None for as many as fit 64 MB or so.
        seed: of folds, resamples, permutations and the order of the online code.
        progress: whether to draw a bar.

    Raises:
        InputError: an argument is out of bounds; X holds NaN or infinity (the site is named);
            one class only; a class or the groups too few for the folds; a class that is a single
            group; labels and groups that do not allow the permutations asked for.
        ShapeError: X, y, groups or a reference differ in length or axes.

    Returns:
        Scores with 95 % intervals: bootstrap over groups, 2,000 draws, the probes not fitted anew.
    """
    axes = _checked_axes(X, site_axes)
    method = one_of("method", method, METHODS)
    one_of("score", score, scores.SCORES)
    if score == "cross_entropy" and method not in PROBABILISTIC:
        raise InputError(message("score", "one that needs no probabilities", score))
    grid = _checked_grid(method, penalty, penalties)
    _check_finite(X, axes)
    x = X.detach().flatten(1, -2) if X.dim() > 2 else X.detach()[:, None]
    labels = labels_of("y", y, len(x))
    inner = length("inner_folds", inner_folds) if len(grid) > 1 else 0
    _at_least_two(folds=folds, inner_folds=inner_folds)
    plan = plan_folds(labels, numbers_of("groups", groups, len(x)), folds, inner, seed).on(x.device)
    labels = Labels(labels.classes, labels.y.to(x.device))
    settings = Settings(
        method,
        grid,
        standardise,
        _positive("tolerance", tolerance),
        length("most_iterations", most_iterations),
        _dtype(x, tolerance),
        None if block is None else length("block", block),
        progress,
    )
    bootstrap = scores.Bootstrap(plan.groups, plan.n_groups, seed)
    outcome = fitting.out_of_fold(
        x, labels.y, len(labels.classes), plan, settings, coefficients=coefficients
    )
    found = {
        name: scores.scored(name, outcome, labels.y, len(labels.classes), bootstrap)
        for name in scores.SCORES
    }
    if description_length and method in PROBABILISTIC:
        found |= _online(x, labels, plan, settings, bootstrap, seed)
    shape = tuple(X.shape[1:-1])
    given = dict(references or {})
    if _MAJORITY in given:
        raise InputError(message("references", f"without the name {_MAJORITY!r}", _MAJORITY))
    against = Held(x, shape, labels, plan, settings, bootstrap, score, found[score], seed)
    held = {name: hold_against(name, ref, against) for name, ref in given.items()}
    held[_MAJORITY] = majority(against)
    tests = _permutations(x, labels, plan, settings, n_permutations, permute, strata, seed)
    _warn_unconverged(outcome, settings)
    intervals = {name: one.interval() for name, one in found.items()}
    excesses = {name: one.excess.interval() for name, one in held.items()}
    kept = outcome.predicted.T.reshape(len(x), *shape) if predictions else None
    worst = outcome.gradient.amax(dim=1)
    return ProbeResult(
        provenance=Provenance.of(
            "tensors",
            "",
            seed=seed,
            shape=list(X.shape),
            dtype=str(settings.dtype),
            folds=folds,
            method=method,
            penalties=list(grid),
            inner_folds=inner,
            score=score,
            references=[*held],
            n_permutations=n_permutations,
            permute=tests.unit,
            strata=strata is not None,
            standardise=standardise,
            tolerance=tolerance,
            bootstrap_draws=scores.DRAWS,
            scikit_learn=metadata.version("scikit-learn"),
        ),
        scores={name: one.value.reshape(shape) for name, one in found.items()},
        low={name: low.reshape(shape) for name, (low, _) in intervals.items()},
        high={name: high.reshape(shape) for name, (_, high) in intervals.items()},
        score=score,
        reference_scores={name: one.score.reshape(shape) for name, one in held.items()},
        excess={name: one.excess.value.reshape(shape) for name, one in held.items()},
        excess_low={name: low.reshape(shape) for name, (low, _) in excesses.items()},
        excess_high={name: high.reshape(shape) for name, (_, high) in excesses.items()},
        excess_p={
            name: scores.family_wise(one.excess).reshape(shape) for name, one in held.items()
        },
        beaten={name: one.beaten.reshape(shape) for name, one in held.items()},
        trace=_shaped(tests.trace, shape),
        p=_shaped(tests.p, shape),
        q=None if tests.p is None else benjamini_hochberg(tests.p).reshape(shape),
        p_family=_shaped(tests.p_family, shape),
        gradient=worst.reshape(shape),
        converged=(worst <= settings.tolerance).reshape(shape),
        penalties=outcome.penalty.reshape(*shape, folds),
        confusion=scores.confusion(outcome.predicted, labels.y, len(labels.classes)).reshape(
            *shape, len(labels.classes), len(labels.classes)
        ),
        classes=labels.classes,
        class_counts=tuple(torch.bincount(labels.y).tolist()),
        fold=plan.fold,
        n_groups=plan.n_groups,
        site_axes=axes,
        method=method,
        predictions=kept,
        coefficients=_shaped(outcome.weights, shape, keep=3),
        intercepts=_shaped(outcome.intercepts, shape, keep=2),
    )


class _Tests(NamedTuple):
    trace: Tensor | None = None
    p: Tensor | None = None
    p_family: Tensor | None = None
    unit: str | None = None


def _permutations(
    x: Tensor,
    labels: Labels,
    plan: Plan,
    settings: Settings,
    n: int,
    permute: str,
    strata: Any,
    seed: int,
) -> _Tests:
    one_of("permute", permute, permutation.PERMUTE)
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise InputError(message("n_permutations", "an int of 0 or more", n))
    within = None if strata is None else numbers_of("strata", strata, len(x)).to(x.device)
    if n == 0:
        return _Tests()
    shuffles = permutation.shuffled(labels.y, plan.groups, plan.grouped, within, permute, n, seed)
    found = permutation.pillai_test(
        x,
        shuffles,
        len(labels.classes),
        settings.dtype,
        block=settings.block,
        show=settings.show,
    )
    return _Tests(*found, shuffles.unit)


def _online(
    x: Tensor,
    labels: Labels,
    plan: Plan,
    settings: Settings,
    bootstrap: scores.Bootstrap,
    seed: int,
) -> dict[str, scores.Sampled]:
    """Return L in bits and n log₂ K / L."""
    n, n_classes = len(x), len(labels.classes)
    order = online.order_of(plan.groups, plan.n_groups, seed)
    bits = online.code_lengths(x, labels.y, n_classes, order, settings)
    ones = torch.ones(n, 1, device=x.device)
    lengths = bootstrap.sums(bits.T) / bootstrap.sums(ones) * n
    compression = n * math.log2(n_classes) / lengths
    return {
        "description_length": scores.Sampled(lengths[0], lengths[1:]),
        "compression": scores.Sampled(compression[0], compression[1:]),
    }


def _shaped(values: Tensor | None, shape: tuple[int, ...], *, keep: int = 0) -> Tensor | None:
    """Return [site, …] with the site axis unfolded; `keep` axes follow it."""
    if values is None:
        return None
    return values.reshape((*shape, *values.shape[values.dim() - keep :]))


def _checked_axes(X: Tensor, names: Sequence[str] | None) -> tuple[str, ...]:
    if not X.is_floating_point() or X.dim() < 2 or 0 in X.shape:
        got = f"shape {list(X.shape)} of {X.dtype}"
        raise ShapeError(message("X", "[item, site…, feature] of floating numbers", got))
    count = X.dim() - 2
    if names is None:
        return ("site",) if count == 1 else tuple(f"site_{axis}" for axis in range(count))
    if isinstance(names, str) or len(names) != count or len(set(names)) != count:
        raise ShapeError(message("site_axes", f"{count} different names", names))
    return tuple(names)


def _check_finite(X: Tensor, axes: tuple[str, ...]) -> None:
    finite = X.isfinite()
    if bool(finite.all()):
        return
    item, *site, feature = (~finite).nonzero()[0].tolist()
    named = ", ".join(f"{name} {at}" for name, at in zip(axes, site, strict=True))
    where = f"{named + ', ' if named else ''}item {item}, feature {feature}"
    value = float(X[(item, *site, feature)])
    raise InputError(message("X", "finite", f"shape of {value} at {where}"[9:]))


def _checked_grid(
    method: str, penalty: str | float | int, penalties: Sequence[float | int] | None
) -> tuple[float, ...]:
    """Return the penalties to choose from, weakest C or ridge or shrinkage first."""
    bounds = {"logistic": (0.0, math.inf), "least_squares": (0.0, math.inf), "lda": (0.0, 1.0)}
    if isinstance(penalty, str):
        one_of("penalty", penalty, ("cv",))
        chosen = GRIDS[method] if penalties is None else tuple(sorted(map(float, penalties)))
    else:
        if penalties is not None:
            hint = "`penalties` are what 'cv' chooses from."
            raise InputError(message("penalty", "'cv' where `penalties` are given", penalty, hint))
        chosen = (float(penalty),)
    if method == "mean_difference":
        if not isinstance(penalty, str) or penalties is not None:
            raise InputError(message("penalty", "left out for mean_difference", penalty))
        return chosen
    low, high = bounds[method]
    if not chosen or len(set(chosen)) != len(chosen):
        raise InputError(message("penalties", "different numbers", list(chosen)))
    for value in chosen:
        above = value > low if method == "logistic" else value >= low
        if isinstance(penalty, bool) or not (above and value <= high and math.isfinite(value)):
            name = "penalty" if penalties is None else "penalties"
            expected = {
                "logistic": "above 0 (C)",
                "least_squares": "of at least 0 (ridge)",
                "lda": "from 0 to 1 (shrinkage)",
            }[method]
            raise InputError(message(name, expected, value))
    return chosen


def _at_least_two(**counts: Any) -> None:
    for name, value in counts.items():
        if length(name, value) < 2:
            raise InputError(message(name, "at least 2", value))


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not 0 < value < 1:
        raise InputError(message(name, "above 0 and below 1", value))
    return float(value)


def _dtype(x: Tensor, tolerance: float) -> torch.dtype:
    precise = x.dtype == torch.float64 or tolerance < _FLOAT32_TOLERANCE
    return torch.float64 if precise else torch.float32


def _warn_unconverged(outcome: Outcome, settings: Settings) -> None:
    left = int((outcome.gradient.amax(dim=1) > settings.tolerance).sum())
    if left:
        warnings.warn(
            f"{left} of {len(outcome.gradient)} sites have a fold whose gradient stayed above "
            f"{settings.tolerance:g} (column `converged`): allow more `most_iterations`, or a "
            "stronger penalty.",
            stacklevel=3,
        )
