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
from wvprobe._validate import instance, length, message, one_of, whole
from wvprobe._validate import seed as checked_seed
from wvprobe.errors import InputError
from wvprobe.probes import fitting, online, permutation, scores
from wvprobe.probes.arguments import (
    at_least_two,
    check_finite,
    checked_axes,
    checked_grid,
    checked_sites,
    dtype_for,
    share,
)
from wvprobe.probes.fitting import METHODS, PROBABILISTIC, Settings
from wvprobe.probes.folds import Labels, Plan, labels_of, numbers_of, plan_folds
from wvprobe.probes.reference_scores import Against, Held, check_reference, hold_against, majority
from wvprobe.probes.results import ProbeResult
from wvprobe.probes.sources import Sites, fingerprint
from wvprobe.store import StoredSite

_MAJORITY = "majority"


def fit_probes(
    X: Float[Tensor, "item *site feature"] | StoredSite | Sites,
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
    site_axes: Sequence[str] | Mapping[str, Sequence[int | str]] | None = None,
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
        X: features, any number of site axes (layer, head, …): a tensor, or a site of stored
            activations (``open_store(folder)["v"]``), of which some sites are read at a time.
            Memory then does not grow with layers and heads; the results are the same.
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
        site_axes: names of X's site axes, or names with the label of each place, such as
            ``{"layer": [3, 8, 14], "kv_head": [0, 1, 2]}``, where places are not counted from 0;
            None for ``site``, or ``site_0``, ``site_1``, ….
        block: sites in memory at a time; None for as many as fit 64 MB or so.
        seed: of folds, resamples, permutations and the order of the online code.
        progress: whether to draw a bar.

    Raises:
        InputError: an argument is out of bounds; X holds NaN or infinity (the site is named);
            one class only; a class or the groups too few for the folds; a class that is a single
            group; labels and groups that do not allow the permutations asked for.
        ShapeError: X, y, groups or a reference differ in length or axes.

    Returns:
        Scores with 95 % intervals: bootstrap over groups, 1,000 draws, the probes not fitted anew.

    Examples:
        >>> labels = torch.arange(40) % 2
        >>> X = torch.randn(40, 3, 5, generator=torch.Generator().manual_seed(0))
        >>> X[:, 1, 0] += 6 * labels  # planted at site 1
        >>> found = wvprobe.fit_probes(X, labels, folds=2, penalty=1.0, description_length=False)
        >>> found.best(1).site.item(), bool(found.scores["accuracy"][1] > 0.9)
        (1, True)
    """
    seed = checked_seed(seed)
    x = checked_sites(X)
    axes, places = checked_axes(x, _named(X) if site_axes is None else site_axes)
    method = one_of("method", method, METHODS)
    one_of("score", score, scores.SCORES)
    if score == "cross_entropy" and method not in PROBABILISTIC:
        raise InputError(message("score", "one that needs no probabilities", score))
    grid = checked_grid(method, penalty, penalties)
    check_finite(x, axes, places)
    labels = labels_of("y", y, x.n)
    inner = length("inner_folds", inner_folds) if len(grid) > 1 else 0
    at_least_two(folds=folds, inner_folds=inner_folds)
    plan = plan_folds(labels, numbers_of("groups", groups, x.n), folds, inner, seed).on(x.device)
    labels = Labels(labels.classes, labels.y.to(x.device))
    settings = Settings(
        method,
        grid,
        standardise,
        share("tolerance", tolerance),
        length("most_iterations", most_iterations),
        dtype_for(x, share("tolerance", tolerance)),
        None if block is None else length("block", block),
        progress,
    )
    if references is not None:
        instance("references", references, Mapping, "Name each: {'pca': top_components(x, 8)}.")
    others = dict(references or {})
    if _MAJORITY in others:
        raise InputError(message("references", f"without the name {_MAJORITY!r}", _MAJORITY))
    shape, n_classes = x.shape, len(labels.classes)
    for name, reference in others.items():
        check_reference(name, reference, x.n, shape)
    tests = _permutations(x, labels, plan, settings, n_permutations, permute, strata, seed)
    bootstrap = scores.Bootstrap(plan.groups, plan.n_groups, seed)
    fitted = _fitted(x, labels, plan, settings, bootstrap, coefficients, predictions)
    _warn_unconverged(fitted.gradient, settings)
    found = dict(fitted.scores)
    if description_length and method in PROBABILISTIC:
        found |= _online(x, labels, plan, settings, bootstrap, seed)
    against = Held(x, labels, plan, settings, bootstrap, score, found[score], seed)
    held = {name: hold_against(name, reference, against) for name, reference in others.items()}
    held[_MAJORITY] = majority(against)
    return ProbeResult(
        provenance=Provenance.of(
            "tensors",
            "",
            seed=seed,
            features=x.fingerprint(),
            labels=fingerprint(labels.y),
            shape=[x.n, *shape, x.width],
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
        **_of_scores(found, shape),
        score=score,
        **_of_references(held, shape),
        trace=_shaped(tests.trace, shape),
        p=_shaped(tests.p, shape),
        q=None if tests.p is None else benjamini_hochberg(tests.p).reshape(shape),
        p_family=_shaped(tests.p_family, shape),
        gradient=fitted.gradient.reshape(shape),
        converged=(fitted.gradient <= settings.tolerance).reshape(shape),
        penalties=fitted.penalty.reshape(*shape, folds),
        confusion=fitted.confusion.reshape(*shape, n_classes, n_classes),
        classes=labels.classes,
        class_counts=tuple(torch.bincount(labels.y).tolist()),
        fold=plan.fold,
        n_groups=plan.n_groups,
        site_axes=axes,
        site_labels=places,
        method=method,
        predictions=None if fitted.said is None else fitted.said.T.reshape(x.n, *shape),
        coefficients=_shaped(fitted.weights, shape, keep=3),
        intercepts=_shaped(fitted.intercepts, shape, keep=2),
    )


def _named(X: Any) -> dict[str, tuple[int, ...]] | None:
    """Return the names of a stored site's axes, and the labels of their places."""
    if not isinstance(X, StoredSite):
        return None
    heads = {axis: tuple(range(n)) for axis, n in zip(X.axes, X.shape, strict=True)}
    return {axis: X.layers if axis == "layer" else heads[axis] for axis in X.axes[1:-1]}


class _Fitted(NamedTuple):
    """What is kept of all sites' probes."""

    scores: Mapping[str, scores.Sampled]
    gradient: Tensor
    penalty: Tensor
    confusion: Tensor
    said: Tensor | None
    weights: Tensor | None
    intercepts: Tensor | None


def _fitted(
    x: Sites,
    labels: Labels,
    plan: Plan,
    settings: Settings,
    bootstrap: scores.Bootstrap,
    coefficients: bool,
    predictions: bool,
) -> _Fitted:
    """Fit and score all sites, some at a time, so that predictions need not be held."""
    n_classes = len(labels.classes)
    parts: list[_Fitted] = []
    for _, one in fitting.out_of_fold(
        x, labels.y, n_classes, plan, settings, coefficients=coefficients
    ):
        parts.append(
            _Fitted(
                scores.scored(scores.SCORES, one, labels.y, n_classes, bootstrap),
                one.gradient.amax(dim=1),
                one.penalty,
                scores.confusion(one.predicted, labels.y, n_classes),
                one.predicted if predictions else None,
                one.weights,
                one.intercepts,
            )
        )
    sampled = {
        name: scores.Sampled.joined([part.scores[name] for part in parts]) for name in scores.SCORES
    }
    columns = list(zip(*parts, strict=True))[1:]
    return _Fitted(sampled, *(None if c[0] is None else torch.cat(c) for c in columns))  # pyright: ignore[reportArgumentType]


def _of_scores(
    found: Mapping[str, scores.Sampled], shape: tuple[int, ...]
) -> dict[str, dict[str, Tensor]]:
    """Return a result's fields of scores."""
    ends = {name: one.interval() for name, one in found.items()}
    return {
        "scores": {name: one.value.reshape(shape) for name, one in found.items()},
        "low": {name: low.reshape(shape) for name, (low, _) in ends.items()},
        "high": {name: high.reshape(shape) for name, (_, high) in ends.items()},
    }


def _of_references(
    held: Mapping[str, Against], shape: tuple[int, ...]
) -> dict[str, dict[str, Tensor]]:
    """Return a result's fields of references."""
    ends = {name: one.excess.interval() for name, one in held.items()}
    p = {name: scores.family_wise(one.excess) for name, one in held.items()}
    return {
        "reference_scores": {name: one.score.reshape(shape) for name, one in held.items()},
        "excess": {name: one.excess.value.reshape(shape) for name, one in held.items()},
        "excess_low": {name: low.reshape(shape) for name, (low, _) in ends.items()},
        "excess_high": {name: high.reshape(shape) for name, (_, high) in ends.items()},
        "excess_p": {name: value.reshape(shape) for name, value in p.items()},
        "beaten": {name: one.beaten.reshape(shape) for name, one in held.items()},
    }


class _Tests(NamedTuple):
    trace: Tensor | None = None
    p: Tensor | None = None
    p_family: Tensor | None = None
    unit: str | None = None


def _permutations(
    x: Sites,
    labels: Labels,
    plan: Plan,
    settings: Settings,
    n: int,
    permute: str,
    strata: Any,
    seed: int,
) -> _Tests:
    one_of("permute", permute, permutation.PERMUTE)
    if not whole(n) or n < 0:
        raise InputError(message("n_permutations", "an int of 0 or more", n))
    within = None if strata is None else numbers_of("strata", strata, x.n).to(x.device)
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
    x: Sites,
    labels: Labels,
    plan: Plan,
    settings: Settings,
    bootstrap: scores.Bootstrap,
    seed: int,
) -> dict[str, scores.Sampled]:
    """Return L in bits and n log₂ K / L."""
    n, n_classes = x.n, len(labels.classes)
    order = online.order_of(plan.groups, plan.n_groups, seed)
    parts = online.code_lengths(x, labels.y, n_classes, order, settings)
    items = bootstrap.sums(torch.ones(n, 1, device=x.device))
    lengths = torch.cat([bootstrap.sums(bits.T) / items * n for bits in parts], dim=1)
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


def _warn_unconverged(gradient: Tensor, settings: Settings) -> None:
    left = int((gradient > settings.tolerance).sum())
    if left:
        warnings.warn(
            f"{left} of {len(gradient)} sites have a fold whose gradient stayed above "
            f"{settings.tolerance:g} (column `converged`): allow more `most_iterations`, or a "
            "stronger penalty.",
            stacklevel=3,
        )
