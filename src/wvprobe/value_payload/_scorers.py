"""Which items a probe gets right, where labels mean the same for all words.

As with senses (:mod:`._strata`): for features [item, site, feature], whether each item is given
its own label by a probe that has not seen it. All scores are means of these over items, so that
one pass serves every interval and every difference.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._decompositions import eigh
from wvprobe.probes import control_task
from wvprobe.probes.folds import labels_of, numbers_of, plan_folds
from wvprobe.probes.references import haar_frames
from wvprobe.value_payload import _closed
from wvprobe.value_payload._items import Items


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
            frame = eigh(train.second[0])[1][None, :, -width:]
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
