"""Labels and groups as numbers, and which items train and test: the user of scikit-learn."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from wvprobe._shapes import check_there
from wvprobe._validate import listed, message
from wvprobe.errors import InputError, ShapeError


class Labels(NamedTuple):
    """Classes in ascending order, and each item's place among them."""

    classes: tuple[Any, ...]
    y: Int[Tensor, " item"]


class Plan(NamedTuple):
    """Who tests whom.

    Attributes:
        fold: [item] the fold that holds the item out.
        inner: [fold, item] the inner fold that holds it out within the training set of a fold;
            −1 for what the fold itself holds out. No rows where nothing is chosen inside.
        groups: [item] numbers of groups, 0 to n_groups − 1; each item its own where none are given.
        n_groups: how many.
        grouped: whether some group has several items.
    """

    fold: Int[Tensor, " item"]
    inner: Int[Tensor, "fold item"]
    groups: Int[Tensor, " item"]
    n_groups: int
    grouped: bool

    @property
    def n_folds(self) -> int:
        """How many folds there are."""
        return int(self.fold.max()) + 1

    def on(self, device: torch.device) -> "Plan":
        """Return the plan with its tensors on a device."""
        moved = (self.fold.to(device), self.inner.to(device), self.groups.to(device))
        return Plan(*moved, self.n_groups, self.grouped)


def values_of(name: str, given: Any, n: int) -> list[Any]:
    """Return one value an item as plain ints or strings.

    Raises:
        ShapeError: their number differs from X's items.
        InputError: some are neither ints nor strings, or both occur.
    """
    if isinstance(given, Tensor):
        check_there(name, given)
    each = f"one int or string an item ({n})"
    values = listed(name, given.tolist() if hasattr(given, "tolist") else given, each)
    if len(values) != n:
        hint = f"`X` has {n} items in its first axis: one {name} each."
        raise ShapeError(message(name, f"of length {n}", f"shape [{len(values)}]", hint))
    odd = [v for v in values if not isinstance(v, (int, str))]
    if odd:
        hint = "Missing values and numbers with a fraction are no classes: drop or bin such items."
        raise InputError(message(name, "ints or strings", odd[0], hint))
    if len({isinstance(v, str) for v in values}) > 1:
        raise InputError(message(name, "all ints or all strings", "both"))
    return values


def labels_of(name: str, given: Any, n: int) -> Labels:
    """Return labels as numbers.

    Raises:
        InputError: there is but one class, or values of the wrong kind or number.
    """
    values = values_of(name, given, n)
    classes = tuple(sorted(set(values)))
    if len(classes) < 2:
        hint = "With one class there is nothing to tell apart."
        raise InputError(message(name, "of at least two classes", list(classes), hint))
    number = {value: place for place, value in enumerate(classes)}
    return Labels(classes, torch.tensor([number[v] for v in values]))


def numbers_of(name: str, given: Any, n: int) -> Int[Tensor, " item"]:
    """Return groups or strata as numbers from 0, in sorted order (None: each item its own)."""
    if given is None:
        return torch.arange(n)
    values = values_of(name, given, n)
    number = {value: place for place, value in enumerate(sorted(set(values)))}
    return torch.tensor([number[v] for v in values])


def plan_folds(
    labels: Labels, groups: Int[Tensor, " item"], folds: int, inner: int, seed: int
) -> Plan:
    """Split items into folds: stratified by class, whole groups (StratifiedGroupKFold).

    Args:
        labels: of the items.
        groups: their groups' numbers.
        folds: how many folds, at least 2.
        inner: how many inside each training set, for the choice of a penalty; 0 for none.
        seed: of the shuffles.

    Raises:
        InputError: a class or the groups are too few for the folds, or a class is one group.
    """
    n_groups = int(groups.max()) + 1
    grouped = n_groups < len(groups)
    _check(labels, groups, n_groups, folds)
    fold = _split(labels.y, groups, grouped, folds, seed)
    within = torch.full((folds if inner else 0, len(fold)), -1)
    for number in range(folds):
        train = fold != number
        hint = "Ask for fewer folds, or leave out classes of so few groups."
        _check_present(labels, train, f"fold {number}", hint)
        if not inner:
            continue
        items = train.nonzero()[:, 0]
        _check_inner(labels, items, inner)
        part = _split(labels.y[items], groups[items], grouped, inner, (seed + 1 + number) % 2**32)
        within[number, items] = part
        for held in range(inner):
            _check_present(
                labels,
                train & (within[number] != held),
                f"inner fold {held} of fold {number}",
                "Give a number as `penalty`, so that nothing is chosen inside; or fewer folds.",
            )
    return Plan(fold, within, groups, n_groups, grouped)


def _split(y: Tensor, groups: Tensor, grouped: bool, folds: int, seed: int) -> Int[Tensor, " item"]:
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    # Groups of one item each are no groups; the plain splitter is many times faster.
    kind = StratifiedGroupKFold if grouped else StratifiedKFold
    splitter = kind(n_splits=folds, shuffle=True, random_state=seed)
    fold = torch.empty_like(y)
    parts = splitter.split(y[:, None].numpy(), y.numpy(), groups.numpy() if grouped else None)
    for number, (_, held) in enumerate(parts):
        fold[torch.from_numpy(held)] = number
    return fold


def _check(labels: Labels, groups: Tensor, n_groups: int, folds: int) -> None:
    if n_groups < folds:
        hint = f"{folds} folds need as many groups: ask for fewer folds."
        raise InputError(message("groups", f"at least {folds} groups", n_groups, hint))
    counts = torch.bincount(labels.y, minlength=len(labels.classes)).tolist()
    few = _named(labels, [count < folds for count in counts], counts)
    if few:
        hint = "Ask for fewer folds, or leave such classes out."
        raise InputError(message("y", f"at least {folds} items (folds) a class", few, hint))
    pairs = torch.unique(torch.stack([labels.y, groups]), dim=1)
    spread = torch.bincount(pairs[0], minlength=len(labels.classes)).tolist()
    whole = _named(labels, [count == 1 for count in spread], counts)
    if whole:
        hint = "Such a class is never trained on when it is tested: use smaller groups, or drop it."
        raise InputError(message("groups", "such that no class is one group", whole, hint))


def _check_inner(labels: Labels, items: Tensor, inner: int) -> None:
    counts = torch.bincount(labels.y[items], minlength=len(labels.classes)).tolist()
    few = _named(labels, [count < inner for count in counts], counts)
    if few:
        hint = "Too few to choose by: give a number as `penalty`, or fewer `inner_folds`."
        raise InputError(message("y", f"at least {inner} training items a class", few, hint))


def _check_present(
    labels: Labels, train: Tensor, where: str, hint: str, name: str = "groups"
) -> None:
    counts = torch.bincount(labels.y[train], minlength=len(labels.classes))
    missing = [str(labels.classes[k]) for k in (counts == 0).nonzero()[:, 0].tolist()]
    if missing:
        got = f"no item of {', '.join(missing)} in the training set of {where}"
        raise InputError(message(name, "such that every training set has every class", got, hint))


def _named(labels: Labels, chosen: Sequence[bool], counts: Sequence[int]) -> dict[str, int]:
    pairs = zip(labels.classes, chosen, counts, strict=True)
    return {str(name): count for name, picked, count in pairs if picked}


def check_training(name: str, labels: Labels, plan: Plan) -> None:
    """Refuse other labels for folds already made, unless every training set has every class."""
    for fold in range(plan.n_folds):
        train = plan.fold != fold
        hint = "Ask for fewer folds, or other labels."
        _check_present(labels, train, f"fold {fold}", hint, name)
        for held in range(int(plan.inner.max()) + 1 if plan.inner.numel() else 0):
            where = f"inner fold {held} of fold {fold}"
            _check_present(labels, train & (plan.inner[fold] != held), where, hint, name)
