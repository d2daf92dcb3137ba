"""Which items a probe gets right: classes by cross-validation, senses within their lemma.

Both kinds answer alike: for features [item, site, feature], whether each item is given its own
label by a probe that has not seen it. All scores are means of these over items, so that one pass
serves every interval and every difference.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._told_apart import indicator, left_out_centroids
from wvprobe.probes import control_task
from wvprobe.probes.folds import labels_of, numbers_of, plan_folds
from wvprobe.probes.references import haar_frames
from wvprobe.value_payload import _closed
from wvprobe.value_payload._items import Items

_NUMBERS = 2**24


def frames_of(x: Tensor, width: int, draws: int, seed: int) -> Float[Tensor, "draw d_model width"]:
    """Return random orthonormal frames of the Haar measure for the input x, [item, d_model]."""
    return haar_frames(x[:1, None].expand(1, draws, -1), width, seed, 0)


class ClassScorer:
    """Labels that mean the same for every word: one probe for all, out of fold.

    Attributes:
        weights: [item] an item's share in the score: 1, or for balanced accuracy n / (K n_class).
        groups: [item] numbers of independent units.
        n_groups: how many.
        classes: the labels.
        majority: [item] what the training set's most frequent label gets right.
    """

    def __init__(
        self,
        items: Items,
        probe: _closed.Probe,
        *,
        folds: int,
        balanced: bool,
        control_draws: int,
        seed: int,
    ) -> None:
        """Make the folds, and draw the control tasks.

        Raises:
            InputError: the labels or groups do not allow the folds.
        """
        labels = labels_of("labels", list(items.labels), len(items))
        self.classes, self.y = labels
        self.probe, self.seed = probe, seed
        groups = [str(group) for group in items.groups]
        self.plan = plan_folds(labels, numbers_of("groups", groups, len(items)), folds, 0, seed)
        self.groups, self.n_groups = self.plan.groups, self.plan.n_groups
        self.weights = self._weights(self.y) if balanced else torch.ones(len(items)).double()
        self.labellings = self.y[None]
        self._balanced = balanced
        if control_draws and len(set(items.types)) < len(items):
            task = control_task(items.types, list(items.labels), draws=control_draws, seed=seed)
            place = {name: number for number, name in enumerate(self.classes)}
            drawn = [[place[x] for x in task.make(draw)] for draw in range(control_draws)]
            self.labellings = torch.cat([self.labellings, torch.tensor(drawn)])

    def right(
        self, x: Float[Tensor, "item site feature"]
    ) -> tuple[Float[Tensor, "site item"], Float[Tensor, "site item"] | None]:
        """Return what is right, and what is right of the control tasks (their mean)."""
        given = _closed.shifted(x)
        found = torch.zeros(len(self.labellings), *given.x.shape[:2])
        n_classes = len(self.classes)
        for labelling, fold, train in _closed.trainings(
            given, self.labellings, n_classes, self.plan
        ):
            held = self.plan.fold == fold
            said = _closed.predictions(given.x[:, held], _closed.fit(train, self.probe))
            found[labelling][:, held] = (said == self.labellings[labelling, held]).float()
        if len(found) == 1:
            return found[0], None
        if self._balanced:
            # A mean over items under the control's own shares of classes, in the weights here.
            for labelling in range(1, len(found)):
                own = self._weights(self.labellings[labelling])
                found[labelling] *= (own / self.weights).float()
        return found[0], found[1:].mean(dim=0)

    def random(
        self, x: Float[Tensor, "item d_model"], width: int, draws: int, seed: int
    ) -> tuple[Float[Tensor, " item"], Float[Tensor, "draw unit"]]:
        """Return what random projections get right: the mean over draws, and each draw's score.

        The score has one unit: that of all items.
        """
        given = _closed.shifted(x[:, None])
        frames = frames_of(x, width, draws, seed)
        right = torch.zeros(len(x), draws)
        at_once = _closed.draws_at_once(x.shape[1], width)
        for _, fold, train in _closed.trainings(given, self.y[None], len(self.classes), self.plan):
            held = self.plan.fold == fold
            for start in range(0, draws, at_once):
                some = frames[start : start + at_once]
                probe = _closed.fit(_closed.projected(train, some), self.probe)
                wide = _closed.back(probe, some)
                raw = given.x[0, held] @ wide.weights[0].to(x) + wide.bias[0].to(x)
                said = raw.view(-1, len(some), len(self.classes)).argmax(dim=-1)
                right[held, start : start + at_once] = (said == self.y[held, None]).float()
        scores = (right.double() * self.weights[:, None]).sum(dim=0) / self.weights.sum()
        return right.mean(dim=1), scores[:, None]

    def components(self, x: Float[Tensor, "item d_model"], width: int) -> Float[Tensor, " item"]:
        """Return what the leading principal components get right, found in each training set."""
        given = _closed.shifted(x[:, None])
        right = torch.zeros(len(x))
        for _, fold, train in _closed.trainings(given, self.y[None], len(self.classes), self.plan):
            held = self.plan.fold == fold
            frame = torch.linalg.eigh(train.second[0])[1][None, :, -width:]
            probe = _closed.back(_closed.fit(_closed.projected(train, frame), self.probe), frame)
            said = _closed.predictions(given.x[:, held], probe)
            right[held] = (said[0] == self.y[held]).float()
        return right

    @property
    def majority(self) -> Float[Tensor, " item"]:
        """What the most frequent label of each training set gets right."""
        right = torch.zeros(len(self.y))
        for fold in range(self.plan.n_folds):
            held = self.plan.fold == fold
            most = torch.bincount(self.y[~held], minlength=len(self.classes)).argmax()
            right[held] = (self.y[held] == most).float()
        return right

    def _weights(self, y: Int[Tensor, " item"]) -> Float[Tensor, " item"]:
        counts = torch.bincount(y, minlength=len(self.classes)).double()
        return len(y) / (float((counts > 0).sum()) * counts[y])


class StratumScorer:
    """Labels that mean something within a stratum alone: senses of a lemma.

    Each item is left out of its lemma in turn, and given the sense of the nearest centroid by
    cosine (Reif et al. 2019). The score is the mean over lemmas; lemmas are the independent units.
    Attributes are those of :class:`ClassScorer`; `classes` is empty.
    """

    def __init__(self, items: Items, *, folds: int, control_draws: int, seed: int) -> None:
        """Sort items by lemma, and draw the permutations within lemmas."""
        strata = [str(stratum) for stratum in items.strata or ()]
        self.groups = numbers_of("strata", strata, len(items))
        self.n_groups = int(self.groups.max()) + 1
        self.classes: tuple[str, ...] = ()
        self.seed = seed
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
        found = torch.zeros(1 + len(self._permuted), x.shape[1], len(x))
        for number, (where, labels, count) in enumerate(self._batches):
            labellings = [labels, *(batches[number] for batches in self._permuted)]
            lemmas, n = where.shape
            at_once = max(1, _NUMBERS // (lemmas * n * max(n, x.shape[2])))
            for start in range(0, x.shape[1], at_once):
                sites = slice(start, start + at_once)
                part = x[where, sites].permute(2, 0, 1, 3).double()
                products = part @ part.mT
                for row, own in enumerate(labellings):
                    told = left_out_centroids(products, indicator(own, count))
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
            frame = torch.linalg.eigh(centred.mT @ centred)[1][:, -width:].to(x)
            right[held] = self.right(((x - mean) @ frame)[:, None])[0][0, held]
        self._permuted = kept
        return right

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
