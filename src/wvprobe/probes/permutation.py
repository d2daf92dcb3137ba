"""Do a site's features know the labels at all? Pillai's trace against permuted labels."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._decompositions import eigh
from wvprobe._progress import progress
from wvprobe._validate import message, one_of
from wvprobe.errors import InputError
from wvprobe.probes.features import blocks_of
from wvprobe.probes.sources import Sites

PERMUTE = ("auto", "items", "groups", "within_groups")
# Directions with less of the largest variance, features scaled to variance 1, are rounding.
_RANK = 1e-12
_NUMBERS = 2**24


class Shuffles(NamedTuple):
    """Labels in the order given (row 0) and permuted.

    Attributes:
        y: [permutation + 1, item].
        unit: what was permuted: ``items``, ``groups`` or ``within_groups``.
    """

    y: Int[Tensor, "permutation_and_own item"]
    unit: str


class Test(NamedTuple):
    """p-values of a site's features not knowing the labels.

    Attributes:
        trace: [site] Pillai's trace, between 0 and the smaller of features and classes − 1.
        p: [site] share of labellings, the own among them, whose trace reaches it.
        p_family: [site] likewise for the largest over sites of the standardised trace.
    """

    trace: Float[Tensor, " site"]
    p: Float[Tensor, " site"]
    p_family: Float[Tensor, " site"]


def shuffled(
    y: Int[Tensor, " item"],
    groups: Int[Tensor, " item"],
    grouped: bool,
    strata: Int[Tensor, " item"] | None,
    permute: str,
    n: int,
    seed: int,
) -> Shuffles:
    """Permute labels n times, the same way for all sites.

    Args:
        y: classes.
        groups: each item's group.
        grouped: whether some group has several items.
        strata: labels change places within a stratum only; None for one stratum.
        permute: the unit that changes places. ``groups`` moves the label of a whole group (labels
            must be constant in each), ``within_groups`` moves labels between items of a group,
            ``items`` between all items. ``auto`` takes ``groups`` where labels are constant in
            groups of several items, else ``items``.
        n: how many permutations.
        seed: of the draws.

    Raises:
        InputError: labels are constant within groups where items would be exchanged, or vary
            within them where groups would; a group lies in several strata; or nothing can be
            exchanged.
    """
    one_of("permute", permute, PERMUTE)
    first = torch.zeros(int(groups.max()) + 1, dtype=y.dtype, device=y.device)
    first.scatter_(0, groups, y)
    constant = bool((first[groups] == y).all())
    unit = permute if permute != "auto" else ("groups" if grouped and constant else "items")
    _check(unit, grouped, constant)
    strata = torch.zeros_like(y) if strata is None else strata.to(y.device)
    if unit == "within_groups":
        strata = strata * (int(groups.max()) + 1) + groups
    unit_of = groups if unit == "groups" else torch.arange(len(y), device=y.device)
    count = int(unit_of.max()) + 1
    labels = torch.zeros(count, dtype=y.dtype, device=y.device).scatter_(0, unit_of, y)
    stratum = torch.zeros_like(labels).scatter_(0, unit_of, strata)
    if not bool((stratum[unit_of] == strata).all()):
        raise InputError(message("strata", "constant within each group", "several in one group"))
    generator = torch.Generator().manual_seed(seed)
    # Sorting by stratum, then at random, lists each stratum's units in random order.
    ordered = torch.argsort(stratum, stable=True)
    # So many labellings of so many items want no more than a byte for a class.
    kind = torch.int8 if int(y.max()) < 128 else torch.int32
    found = torch.empty(n + 1, len(y), dtype=kind, device=y.device)
    found[0] = labels[unit_of]
    for row in range(n):
        keys = torch.rand(count, generator=generator, dtype=torch.float64).to(y.device)
        by_key = torch.argsort(keys)
        drawn = by_key[torch.argsort(stratum[by_key], stable=True)]
        moved = torch.empty_like(labels)
        moved[ordered] = labels[drawn]
        found[row + 1] = moved[unit_of]
    if n and bool((found[1:] == found[0]).all()):
        hint = "Every stratum (or group) has one class: no label can change places."
        raise InputError(message("strata", "such that labels can be permuted", unit, hint))
    return Shuffles(found, unit)


def _check(unit: str, grouped: bool, constant: bool) -> None:
    if unit == "groups" and not constant:
        hint = "Use permute='items', or 'within_groups' to keep items of a group together."
        raise InputError(message("permute", "a unit with one label", "groups", hint))
    if unit in ("items", "within_groups") and grouped and constant:
        hint = (
            "Labels are constant within each group: exchanging them inside a group changes nothing "
            "(as with scikit-learn's permutation_test_score(groups=...)), and exchanging items "
            "across groups would take items of a group for independent. Use permute='groups'."
        )
        raise InputError(message("permute", "'groups' or 'auto' for these groups", unit, hint))


def pillai_test(
    x: Sites,
    shuffles: Shuffles,
    n_classes: int,
    dtype: torch.dtype,
    *,
    block: int | None = None,
    show: bool = False,
) -> Test:
    """Test every site by Pillai's trace (Pillai 1955), one factorisation a site and no folds.

    With U an orthonormal basis of the centred features and G one of the centred class indicators,
    tr H(H + E)⁻¹ = ‖Uᵀ G‖² = Σ_k ‖Σ_{i in k} u_i‖² / n_k: class sums of rows of U, so that all
    permutations are one matrix product. Over sites the maximum of (trace − mean) / sd is taken,
    both over all labellings, which makes sites of different rank comparable (Westfall & Young
    1993); p = (b + 1) / (m + 1) (Phipson & Smyth 2010).
    """
    labellings, n = shuffles.y.shape
    traces = []
    size = block or max(1, _NUMBERS // (4 * n * x.width))
    with progress(x.count, "Permutations", show) as advance:
        for sites, part in blocks_of(x, size, dtype):
            bases = _bases(part.features)
            traces.append(_traces(bases, shuffles.y, n_classes))
            advance(sites.stop - sites.start)
    trace = torch.cat(traces)
    own = trace[:, 0].clone()
    # Labellings that tie with the own one are as extreme as it, rounding apart.
    reached = trace >= own[:, None] * (1.0 - 1e-5)
    deviation = trace.std(dim=1, keepdim=True)
    z = torch.where(deviation > 0, (trace - trace.mean(dim=1, keepdim=True)) / deviation, 0.0)
    highest = z.amax(dim=0)
    family = (highest >= z[:, :1] - 1e-6).double().mean(dim=1)
    return Test(own, reached.double().mean(dim=1), family)


def _bases(features: Float[Tensor, "site feature item"]) -> Tensor:
    """Return orthonormal bases of the features' span over items, in rows; 0 beyond the rank."""
    centred = features - features.mean(dim=-1, keepdim=True)
    wide = centred.double()
    values, vectors = eigh(wide @ wide.mT)
    kept = values > _RANK * values[:, -1:].clamp(min=torch.finfo(torch.float64).tiny)
    factor = torch.where(kept, values.clamp(min=1e-300).rsqrt(), 0.0)
    return (vectors * factor[:, None]).mT.to(centred) @ centred


def _traces(
    bases: Float[Tensor, "site rank item"], labels: Int[Tensor, "labelling item"], n_classes: int
) -> Float[Tensor, "site labelling"]:
    n, count = labels.shape[1], len(labels)
    at_once = max(1, _NUMBERS // (n * n_classes))
    rows = bases.flatten(0, 1)
    found = []
    for start in range(0, count, at_once):
        some = labels[start : start + at_once].long()
        # Rows of a basis sum to 0, so the last class's sum is known from the others'.
        onehot = bases.new_zeros(len(some), n_classes, n)
        onehot.scatter_(1, some[:, None], 1.0)
        sizes = onehot.sum(dim=-1)
        sums = rows @ onehot[:, :-1].reshape(-1, n).mT
        sums = sums.view(*bases.shape[:2], len(some), n_classes - 1)
        last = sums.sum(dim=-1)
        squares = sums.square().sum(dim=1)
        every = torch.cat([squares, last.square().sum(dim=1)[..., None]], dim=-1)
        found.append((every / sizes.clamp(min=1.0)).sum(dim=-1).double())
    return torch.cat(found, dim=1)
