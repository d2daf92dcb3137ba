"""Which items are given their own sense, within their lemma.

Answers are those of :class:`._scorers.ClassScorer`, so that one pass serves every score.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._decompositions import eigh
from wvprobe._told_apart import TIED, indicator, left_out_centroids
from wvprobe.probes.folds import numbers_of
from wvprobe.value_payload._closed import shrinkage_of
from wvprobe.value_payload._items import Items
from wvprobe.value_payload._scorers import frames_of

METHODS = ("centroid", "lda")
_NUMBERS = 2**24


class StratumScorer:
    """Labels that mean something within a stratum alone: senses of a lemma.

    Each item is left out of its lemma in turn, and given the sense of the nearest centroid: by
    cosine (``centroid``, Reif et al. 2019), or by the distance that the covariance within senses
    of other lemmas gives (``lda``), which no linear map of the features changes. The score is the
    mean over lemmas; lemmas are the independent units. Attributes are those of
    :class:`._scorers.ClassScorer`; `classes` is empty.
    """

    def __init__(
        self, items: Items, *, method: str, folds: int, control_draws: int, seed: int
    ) -> None:
        """Sort items by lemma, and draw the permutations within lemmas."""
        strata = [str(stratum) for stratum in items.strata or ()]
        self.groups = numbers_of("strata", strata, len(items))
        self.n_groups = int(self.groups.max()) + 1
        self.classes: tuple[str, ...] = ()
        self.method, self.seed = method, seed
        pairs = [f"{s}\0{label}" for s, label in zip(strata, items.labels, strict=True)]
        self._senses = numbers_of("senses", pairs, len(items))
        sizes = torch.bincount(self.groups).double()
        self.weights = 1.0 / sizes[self.groups]
        self._batches = list(_batches(self.groups, items.labels))
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.n_groups, generator=generator)
        self._fold = (order % min(folds, self.n_groups))[self.groups]
        self._permuted = [self._shuffled(generator) for _ in range(control_draws)]

    def right(
        self, x: Float[Tensor, "item site feature"]
    ) -> tuple[Float[Tensor, "site item"], Float[Tensor, "site item"] | None]:
        """Return what is right, and what is right of labels permuted within lemmas (mean)."""
        x = self._whitened(x) if self.method == "lda" else x
        found = torch.zeros(1 + len(self._permuted), x.shape[1], len(x))
        for number, (where, labels, count) in enumerate(self._batches):
            labellings = [labels, *(batches[number] for batches in self._permuted)]
            lemmas, n = where.shape
            at_once = max(1, _NUMBERS // (lemmas * n * max(n, x.shape[2])))
            for start in range(0, x.shape[1], at_once):
                sites = slice(start, start + at_once)
                part = x[where, sites].permute(2, 0, 1, 3).double()
                if self.method == "lda":  # distances have no origin, rounding has
                    part = part - part.mean(dim=2, keepdim=True)
                products = part @ part.mT
                for row, own in enumerate(labellings):
                    member = indicator(own, count)
                    told = (
                        left_out_means(products, member)
                        if self.method == "lda"
                        else left_out_centroids(products, member)
                    )
                    found[row, sites, where.flatten()] = told.flatten(1).float()
        return found[0], found[1:].mean(dim=0) if len(found) > 1 else None

    def random(
        self, x: Float[Tensor, "item d_model"], width: int, draws: int, seed: int
    ) -> tuple[Float[Tensor, " item"], Float[Tensor, "draw unit"]]:
        """Return what random projections get right: the mean over draws, and each draw's score.

        The units of the score are the lemmas.
        """
        frames = frames_of(x, width, draws, seed)
        kept, self._permuted = self._permuted, []
        right = []
        at_once = max(1, _NUMBERS // (len(x) * width))
        for start in range(0, draws, at_once):
            some = frames[start : start + at_once]
            right.append(self.right(torch.einsum("id,rdw->irw", x, some))[0])
        self._permuted = kept
        every = torch.cat(right)
        scores = torch.zeros(draws, self.n_groups).double()
        scores.index_add_(1, self.groups, every.double() * self.weights)
        return every.mean(dim=0), scores

    def components(self, x: Float[Tensor, "item d_model"], width: int) -> Float[Tensor, " item"]:
        """Return what the leading principal components of the other lemmas' items get right."""
        kept, self._permuted = self._permuted, []
        right = torch.zeros(len(x))
        for fold in range(int(self._fold.max()) + 1):
            held = self._fold == fold
            train = x[~held] if bool((~held).any()) else x
            mean = train.mean(dim=0)
            centred = (train - mean).double()
            frame = eigh(centred.mT @ centred)[1][:, -width:].to(x)
            right[held] = self.right(((x - mean) @ frame)[:, None])[0][0, held]
        self._permuted = kept
        return right

    def _whitened(self, x: Float[Tensor, "item site feature"]) -> Tensor:
        """Return features in which the covariance within senses is I, as other lemmas have it."""
        sites = x.permute(1, 0, 2).double()
        sums = sites.new_zeros(len(sites), int(self._senses.max()) + 1, x.shape[2])
        sums.index_add_(1, self._senses, sites)
        sizes = torch.bincount(self._senses).double()
        around = sites - (sums / sizes[:, None])[:, self._senses]
        found = torch.empty_like(sites)
        for fold in range(int(self._fold.max()) + 1):
            held = self._fold == fold
            train = ~held if bool((~held).any()) else held
            freedom = float(train.sum()) - len(self._senses[train].unique())
            part = around[:, train].to(x)
            within = (part.mT @ part).double() / freedom
            # Each feature varies by 1 within senses, or not at all, before anything is shrunk.
            variance = within.diagonal(dim1=-2, dim2=-1)
            scale = torch.where(variance > 0, variance, 1.0).sqrt()
            within = within / (scale[:, :, None] * scale[:, None])
            shrunk = shrinkage_of(within, torch.tensor(freedom).double())
            trace = within.diagonal(dim1=-2, dim2=-1).mean(dim=-1)
            # Where nothing varies within senses, distances are those of the features themselves.
            level = torch.where(trace > 0, shrunk * trace, 1.0)[:, None, None]
            matrix = (1.0 - shrunk)[:, None, None] * within + level * torch.eye(x.shape[2]).double()
            moved = (sites[:, held] / scale[:, None]).mT
            root = torch.linalg.cholesky(matrix)
            found[:, held] = torch.linalg.solve_triangular(root, moved, upper=False).mT
        return found.permute(1, 0, 2)

    @property
    def majority(self) -> Float[Tensor, " item"]:
        """The share of the most frequent sense in the item's lemma."""
        right = torch.zeros(len(self.groups))
        for where, labels, count in self._batches:
            shares = indicator(labels, count).mean(dim=1).amax(dim=-1)
            right[where.flatten()] = shares[:, None].expand(where.shape).flatten().float()
        return right

    def _shuffled(self, generator: torch.Generator) -> list[Tensor]:
        """Return each batch's labels, permuted within lemmas."""
        found = []
        for where, labels, _ in self._batches:
            order = torch.rand(where.shape, generator=generator).argsort(dim=1)
            found.append(labels.gather(1, order))
        return found


def left_out_means(
    products: Float[Tensor, "*b item item2"], member: Float[Tensor, "*c item label"]
) -> Float[Tensor, "*d item"]:
    """Say which items the nearest mean gives their own label, the item itself left out.

    As :func:`wvprobe._told_apart.left_out_centroids`, with ‖x − m‖² in place of the cosine. The
    squared length of a mean of n vectors is too large by their variance over n, and the own mean
    is one of fewer vectors: so ‖m‖² is estimated without bias, by the mean of x_i · x_j over pairs
    of different vectors (of a single vector, by its own length).
    """
    sums = products @ member
    squares = torch.diagonal(products, dim1=-2, dim2=-1)[..., None].expand_as(sums)
    lengths = (member * sums).sum(dim=-2, keepdim=True).expand_as(sums)
    each = (member * squares).sum(dim=-2, keepdim=True).expand_as(sums)
    own = member.expand_as(sums).bool()
    n = member.sum(dim=-2, keepdim=True).expand_as(sums) - own.double()
    along = torch.where(own, sums - squares, sums)
    lengths = torch.where(own, lengths - 2 * sums + squares, lengths)
    pairs = lengths - torch.where(own, each - squares, each)
    length = torch.where(n > 1, pairs / (n * (n - 1)).clamp(min=1.0), lengths)
    nearness = torch.where(n > 0, along / n.clamp(min=1.0) - length / 2, -torch.inf)
    best = nearness.amax(dim=-1, keepdim=True)
    tied = nearness >= best - TIED * (squares + best.abs())
    return (tied & own).any(dim=-1).double() / tied.sum(dim=-1)


def _batches(
    groups: Int[Tensor, " item"], labels: Sequence[str]
) -> Iterator[tuple[Int[Tensor, "lemma item"], Int[Tensor, "lemma item"], int]]:
    """Yield lemmas of equal numbers of items and senses: their items, senses and how many."""
    members: defaultdict[int, list[int]] = defaultdict(list)
    for item, group in enumerate(groups.tolist()):
        members[group].append(item)
    alike: defaultdict[tuple[int, int], list[tuple[list[int], list[int]]]] = defaultdict(list)
    for own in members.values():
        senses = sorted({labels[i] for i in own})
        numbers = [senses.index(labels[i]) for i in own]
        alike[len(own), len(senses)].append((own, numbers))
    for (_, count), rows in alike.items():
        where, senses = zip(*rows, strict=True)
        yield torch.tensor(where), torch.tensor(senses), count
