"""What a site's score is held against: other features, or other labels, under the same probe."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._decompositions import svd
from wvprobe._linalg import at_least_float32
from wvprobe._shapes import floating
from wvprobe._validate import length, listed, message
from wvprobe._validate import seed as checked_seed
from wvprobe.errors import InputError, ShapeError
from wvprobe.probes.folds import values_of
from wvprobe.probes.sources import Sites, as_sites, components, projected
from wvprobe.store import StoredSite


@dataclass(frozen=True)
class FeatureDraws:
    """Random features: a probe's score is held against the mean over draws.

    Attributes:
        make: from a draw's number to features, [item, site…, feature] or [item, feature], or
            what makes them site by site.
        draws: how many draws.

    Examples:
        >>> from wvprobe.probes import haar_projections
        >>> references = haar_projections(torch.randn(30, 42), 14, draws=3)
        >>> references.draws
        3
    """

    make: Callable[[int], Tensor | Sites]
    draws: int


@dataclass(frozen=True)
class FoldFeatures:
    """Features that are themselves fitted, on the training items of each fold.

    Attributes:
        make: from the numbers of the training items to the features of all items.

    Examples:
        >>> from wvprobe.probes import FoldFeatures, top_components
        >>> isinstance(top_components(torch.randn(30, 42), 14), FoldFeatures)
        True
    """

    make: Callable[[Int[Tensor, " train"]], Tensor | Sites]


@dataclass(frozen=True)
class OtherLabels:
    """The same features with labels that carry nothing of the property: a control task.

    Attributes:
        make: from a draw's number to one label an item.
        draws: how many draws.

    Examples:
        >>> from wvprobe.probes import OtherLabels
        >>> shuffled = OtherLabels(make=lambda n: ["a", "b"] if n % 2 else ["b", "a"], draws=2)
        >>> shuffled.make(1)
        ['a', 'b']
    """

    make: Callable[[int], Sequence[Any]]
    draws: int


def haar_projections(
    x: Float[Tensor, "item *site d_model"] | StoredSite,
    width: int,
    *,
    draws: int = 200,
    seed: int = 0,
) -> FeatureDraws:
    """Return projections of the input onto random directions, as many as a head has.

    x Q with Q the orthonormal factor, signs fixed, of a Gaussian matrix: Haar-distributed frames
    (Mezzadri 2007, How to Generate Random Matrices from the Classical Compact Groups). Every site
    of `x` has a Q of its own in every draw. What a head's W_V keeps better than these it keeps
    because of what it is, and not because d_head directions of the input are enough.

    Args:
        x: the input of the maps to compare with; site axes of length 1 are shared, as with all
            references.
        width: number of directions, the head's d_head.
        draws: how many.
        seed: of the draws.

    Raises:
        InputError: the width is not between 1 and d_model.

    Examples:
        >>> from wvprobe.probes import haar_projections
        >>> references = haar_projections(torch.randn(30, 42), 14, draws=3)
        >>> references.make(0).shape
        torch.Size([30, 14])
    """
    seed = checked_seed(seed)
    x = _checked(x)
    _check_width("width", width, x.shape[-1])
    length("draws", draws)

    def make(draw: int) -> Tensor | Sites:
        return _project(x, haar_frames(x, width, seed, draw))

    return FeatureDraws(make, draws)


def haar_complements(
    x: Float[Tensor, "item *site d_model"] | StoredSite,
    rank: int,
    *,
    draws: int = 20,
    seed: int = 0,
) -> FeatureDraws:
    """Return what projections off `rank` random directions leave of the input.

    The reference for :func:`complement`: both keep nearly everything, and only their difference
    says whether what a map drops is special.

    Args:
        x: the input.
        rank: number of directions taken out.
        draws: how many.
        seed: of the draws.

    Raises:
        InputError: the rank is not between 1 and d_model − 1.

    Examples:
        >>> from wvprobe.probes import haar_complements
        >>> references = haar_complements(torch.randn(30, 42), 14, draws=3)
        >>> references.make(0).shape
        torch.Size([30, 28])
    """
    seed = checked_seed(seed)
    x = _checked(x)
    _check_width("rank", rank, x.shape[-1] - 1)
    length("draws", draws)

    def make(draw: int) -> Tensor | Sites:
        return _project(x, haar_frames(x, x.shape[-1] - rank, seed, draw))

    return FeatureDraws(make, draws)


def complement(
    x: Float[Tensor, "item *site d_model"] | StoredSite,
    weight: Float[Tensor, "*site d_model width"],
) -> Float[Tensor, "item *site rest"] | Sites:
    """Return the part of the input that a map drops: coordinates in the null space of xᵀ ↦ x W.

    Args:
        x: the input.
        weight: the map, its site axes equal to those of `x` or of length 1 there; of full rank.

    Returns:
        Coordinates in an orthonormal basis of the orthogonal complement of W's columns; of a
        stored input, what makes them site by site, which :func:`fit_probes` takes.

    Raises:
        InputError: some W has linearly dependent columns, or leaves nothing.

    Examples:
        >>> from wvprobe.probes import complement
        >>> x, weight = torch.randn(30, 42), torch.randn(42, 14)
        >>> rest = complement(x, weight)
        >>> rest.shape, bool((rest.norm(dim=1) <= x.norm(dim=1) + 1e-4).all())
        (torch.Size([30, 28]), True)
    """
    x = _checked(x)
    floating("weight", weight, ("d_model", "width"), batch=True)
    _check_width("weight", weight.shape[-1], x.shape[-1] - 1)
    sites = tuple(weight.shape[:-2])
    fits = all(one in (1, own) for one, own in zip(sites, x.shape[1:-1], strict=False))
    if weight.shape[-2] != x.shape[-1] or len(sites) not in (0, x.dim() - 2) or not fits:
        expected = f"[site…, d_model, width] with the sites and d_model of {list(x.shape)}"
        raise ShapeError(message("weight", expected, f"shape {list(weight.shape)}"))
    u, s, _ = svd(weight.double(), full_matrices=True)
    if bool((s[..., -1] <= 1e-7 * s[..., 0]).any()):
        hint = "Give a basis of its column space instead."
        raise InputError(message("weight", "of full column rank", "dependent columns", hint))
    return _project(x, u[..., weight.shape[-1] :].to(_precision(x)))


def top_components(x: Float[Tensor, "item *site d_model"] | StoredSite, width: int) -> FoldFeatures:
    """Return the input's leading principal components, found anew on each fold's training items.

    Where penalties are chosen in folds inside, components are those of the whole training set:
    no label and no held-out item takes part.

    Args:
        x: the input.
        width: how many components.

    Raises:
        InputError: the width is not between 1 and d_model.

    Examples:
        >>> from wvprobe.probes import top_components
        >>> x, labels = torch.randn(40, 42), torch.arange(40) % 2
        >>> given = {"folds": 2, "penalty": 1.0, "description_length": False}
        >>> references = {"pca": top_components(x, 14)}
        >>> sorted(wvprobe.fit_probes(x[:, :14], labels, references=references, **given).excess)
        ['majority', 'pca']
    """
    x = _checked(x)
    _check_width("width", width, x.shape[-1])

    def make(train: Tensor) -> Tensor | Sites:
        found = components(as_sites(x), width, train)
        if isinstance(x, StoredSite):
            return found
        return found.block(slice(0, found.count)).view(*x.shape[:-1], width)

    return FoldFeatures(make)


def control_task(
    types: Sequence[Any], y: Sequence[Any], *, draws: int = 10, seed: int = 0
) -> OtherLabels:
    """Return Hewitt & Liang's control task: each word type has one random label.

    Hewitt & Liang 2019, Designing and Interpreting Probes with Control Tasks. Labels are drawn
    with the frequencies of `y`, and the excess over this reference is their selectivity: what is
    left once the probe's power to memorise types is taken off. Types must occur on both sides of a
    split, so it says nothing with groups of one type each; within one word it is undefined
    (:func:`within_strata` then).

    Args:
        types: each item's word type.
        y: the labels.
        draws: how many control tasks.
        seed: of the draws.

    Raises:
        InputError: no type occurs twice.
        ShapeError: `types` and `y` differ in length.

    Examples:
        >>> from wvprobe.probes import control_task
        >>> other = control_task(["cat", "oak", "cat", "oak"], ["a", "b", "a", "b"], draws=1)
        >>> drawn = list(other.make(0))
        >>> drawn[0] == drawn[2], drawn[1] == drawn[3]  # a word has one label
        (True, True)
    """
    seed = checked_seed(seed)
    labels = values_of("y", y, len(listed("types", types, "one type an item")))
    kinds = values_of("types", types, len(labels))
    length("draws", draws)
    place = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    if len(place) == len(kinds):
        hint = "Where every type occurs once there is nothing to memorise."
        raise InputError(message("types", "such that some type occurs twice", "none", hint))
    of_type = torch.tensor([place[kind] for kind in kinds])

    def make(draw: int) -> list[Any]:
        chosen = torch.randint(len(labels), (len(place),), generator=_generator(seed, draw))
        return [labels[i] for i in chosen[of_type].tolist()]

    return OtherLabels(make, draws)


def within_strata(
    y: Sequence[Any], strata: Sequence[Any], *, draws: int = 10, seed: int = 0
) -> OtherLabels:
    """Return labels permuted within strata (a lemma, say), which keeps each one's class shares.

    Args:
        y: the labels.
        strata: each item's stratum.
        draws: how many permutations.
        seed: of the draws.

    Raises:
        InputError: no stratum has two classes.
        ShapeError: `y` and `strata` differ in length.

    Examples:
        >>> from wvprobe.probes import within_strata
        >>> other = within_strata(["a", "b", "a", "b"], ["bank", "bank", "bat", "bat"], draws=1)
        >>> sorted(list(other.make(0))[:2])  # each stratum keeps its labels
        ['a', 'b']
    """
    seed = checked_seed(seed)
    labels = values_of("y", y, len(listed("strata", strata, "one stratum an item")))
    members: defaultdict[Any, list[int]] = defaultdict(list)
    for item, stratum in enumerate(values_of("strata", strata, len(labels))):
        members[stratum].append(item)
    length("draws", draws)
    if all(len({labels[i] for i in items}) == 1 for items in members.values()):
        hint = "Permuting within strata of one class changes nothing."
        raise InputError(message("strata", "of several classes", "one class in each", hint))

    def make(draw: int) -> list[Any]:
        generator = _generator(seed, draw)
        moved = list(labels)
        for items in members.values():
            for to, of in zip(items, torch.randperm(len(items), generator=generator), strict=True):
                moved[to] = labels[items[int(of)]]
        return moved

    return OtherLabels(make, draws)


def _checked(x: Any) -> Any:
    """Return the input of a map: features that are looked at later, or a tensor with numbers."""
    if isinstance(x, StoredSite):
        return x
    return floating("x", x, ("item", "d_model"), batch=True)


def haar_frames(
    x: Tensor | StoredSite, width: int, seed: int, draw: int
) -> Float[Tensor, "*site d width"]:
    """Return a random orthonormal frame for each site of `x`, of the Haar measure."""
    shape = (*x.shape[1:-1], x.shape[-1], width)
    gaussian = torch.randn(shape, generator=_generator(seed, draw), dtype=torch.float32)
    q, r = torch.linalg.qr(gaussian)
    signs = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
    return (q * signs[..., None, :]).to(_precision(x))


def _precision(x: Tensor | StoredSite) -> Tensor:
    """Return an empty tensor of the kind that projections have."""
    like = torch.empty(0, dtype=x.dtype) if isinstance(x, StoredSite) else x[:0]
    return at_least_float32(like)


def _project(x: Tensor | StoredSite, frames: Tensor) -> Tensor | Sites:
    """Return [item, site…, d] times [site…, d, width]; of a stored x, what makes it by site."""
    if isinstance(x, StoredSite):
        return projected(as_sites(x), frames)
    return (at_least_float32(x).movedim(0, -2) @ frames).movedim(-2, 0)


def _generator(seed: int, draw: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + draw) % 2**63)


def _check_width(name: str, width: int, most: int) -> None:
    if length(name, width) > most:
        raise InputError(message(name, f"at most {most}", width))
