"""What probes found: scores with intervals, excess over references, tests, penalties."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from wvprobe._types import Result
from wvprobe._validate import length, one_of


@dataclass(frozen=True)
class ProbeResult(Result):
    """Scores of one probe a site, everything out of fold. Site axes are those of X.

    Attributes:
        scores: score name -> [site…]: accuracy, balanced_accuracy, macro_f1, cross_entropy (bits
            an item; NaN for methods without probabilities) and, where asked for,
            description_length (bits, all items) and compression (n log₂ K / that).
        low: likewise, lower end of the 95 % interval (cluster bootstrap over groups).
        high: likewise, upper end.
        score: which of them is held against references.
        reference_scores: reference -> [site…] its score (mean over its draws).
        excess: reference -> [site…] score − reference, in favour of the site: for cross-entropy
            reference − score.
        excess_low: likewise, lower end of the paired interval.
        excess_high: likewise, upper end.
        excess_p: likewise, one-sided p of excess > 0, family-wise over sites.
        beaten: reference -> [site…] share of the reference's draws that the site is better than.
        trace: [site…] Pillai's trace of features on labels; None without permutations.
        p: [site…] its permutation p-value.
        q: [site…] Benjamini-Hochberg over sites.
        p_family: [site…] p corrected by the maximum over sites.
        gradient: [site…] largest entry of any fold's gradient (0 for a closed form).
        converged: [site…] whether that is within the tolerance.
        penalties: [site…, fold] chosen: C (logistic), ridge (least squares), shrinkage (LDA).
        confusion: [site…, true, predicted] items.
        classes: labels in the order of the confusion's axes.
        class_counts: items of each.
        fold: [item] the fold that held the item out.
        n_groups: independent units that intervals rest on.
        site_axes: names of the site axes.
        site_labels: for each axis the labels of its places, as frames show them.
        method: logistic, least_squares, lda or mean_difference.
        predictions: [item, site…] classes' places, where asked for.
        coefficients: [site…, fold, row, feature] in the features' own units, where asked for; two
            classes have one row (the second against the first) in a logistic probe, else as many
            rows as classes.
        intercepts: [site…, fold, row] likewise.

    Examples:
        >>> labels = torch.arange(40) % 2
        >>> X = torch.randn(40, 3, 5, generator=torch.Generator().manual_seed(0))
        >>> found = wvprobe.fit_probes(X, labels, folds=2, penalty=1.0, description_length=False)
        >>> found.scores["accuracy"].shape, list(found.excess)
        (torch.Size([3]), ['majority'])
    """

    scores: Mapping[str, Float[Tensor, "*site"]]
    low: Mapping[str, Float[Tensor, "*site"]]
    high: Mapping[str, Float[Tensor, "*site"]]
    score: str
    reference_scores: Mapping[str, Float[Tensor, "*site"]]
    excess: Mapping[str, Float[Tensor, "*site"]]
    excess_low: Mapping[str, Float[Tensor, "*site"]]
    excess_high: Mapping[str, Float[Tensor, "*site"]]
    excess_p: Mapping[str, Float[Tensor, "*site"]]
    beaten: Mapping[str, Float[Tensor, "*site"]]
    trace: Float[Tensor, "*site"] | None
    p: Float[Tensor, "*site"] | None
    q: Float[Tensor, "*site"] | None
    p_family: Float[Tensor, "*site"] | None
    gradient: Float[Tensor, "*site"]
    converged: Bool[Tensor, "*site"]
    penalties: Float[Tensor, "*site fold"]
    confusion: Int[Tensor, "*site true predicted"]
    classes: tuple[Any, ...]
    class_counts: tuple[int, ...]
    fold: Int[Tensor, " item"]
    n_groups: int
    site_axes: tuple[str, ...]
    site_labels: tuple[tuple[Any, ...], ...]
    method: str
    predictions: Int[Tensor, " item *site"] | None = None
    coefficients: Float[Tensor, "*site fold row feature"] | None = None
    intercepts: Float[Tensor, "*site fold row"] | None = None

    AXES: ClassVar = {
        "trace": ("site…",),
        "p": ("site…",),
        "q": ("site…",),
        "p_family": ("site…",),
        "gradient": ("site…",),
        "converged": ("site…",),
        "penalties": ("site…", "fold"),
        "confusion": ("site…", "true", "predicted"),
        "fold": ("item",),
        "predictions": ("item", "site…"),
        "coefficients": ("site…", "fold", "row", "feature"),
        "intercepts": ("site…", "fold", "row"),
    }

    @property
    def n_items(self) -> int:
        """Items that were scored."""
        return len(self.fold)

    def axes(self) -> tuple[str, ...]:
        """Return the names of the site axes."""
        return self.site_axes

    def to_frame(self) -> Any:
        """Return one row a site.

        Columns: site axes; score low high (of the score named in `score`); for every reference
        excess_NAME excess_NAME_low excess_NAME_high excess_NAME_p; trace p q p_family where
        labels were permuted; converged; penalty (median over folds).
        """
        columns = self._sites()
        columns["score"] = _listed(self.scores[self.score])
        columns["low"] = _listed(self.low[self.score])
        columns["high"] = _listed(self.high[self.score])
        for name in self.excess:
            columns[f"excess_{name}"] = _listed(self.excess[name])
            columns[f"excess_{name}_low"] = _listed(self.excess_low[name])
            columns[f"excess_{name}_high"] = _listed(self.excess_high[name])
            columns[f"excess_{name}_p"] = _listed(self.excess_p[name])
        for name in ("trace", "p", "q", "p_family"):
            value = getattr(self, name)
            if value is not None:
                columns[name] = _listed(value)
        columns["converged"] = _listed(self.converged)
        columns["penalty"] = _listed(self.penalties.median(dim=-1).values)
        return _frame(columns)

    def scores_frame(self) -> Any:
        """Return one row a site and score: site axes, measure, value, low, high."""
        parts = []
        for name, value in self.scores.items():
            columns = self._sites()
            columns["measure"] = [name] * value.numel()
            for column, held in (("value", self.scores), ("low", self.low), ("high", self.high)):
                columns[column] = _listed(held[name])
            parts.append(_frame(columns))
        import pandas

        return pandas.concat(parts, ignore_index=True)

    def references_frame(self) -> Any:
        """Return one row a site and reference: its score, the excess, its interval, p, beaten."""
        import pandas

        parts = []
        for name in self.excess:
            columns = self._sites()
            columns["reference"] = [name] * self.excess[name].numel()
            columns["reference_score"] = _listed(self.reference_scores[name])
            for column in ("excess", "excess_low", "excess_high", "excess_p", "beaten"):
                columns[column] = _listed(getattr(self, column)[name])
            parts.append(_frame(columns))
        return pandas.concat(parts, ignore_index=True)

    def confusion_frame(self) -> Any:
        """Return one row a site and pair of classes: site axes, true, predicted, items."""
        rows = list(product(*self.site_labels, self.classes, self.classes))
        names = (*self.site_axes, "true", "predicted")
        columns: dict[str, Any] = {
            name: [row[axis] for row in rows] for axis, name in enumerate(names)
        }
        columns["items"] = _listed(self.confusion)
        return _frame(columns)

    def best(self, k: int = 10, *, by: str | None = None) -> Any:
        """Return the k rows of the frame that stand highest.

        Args:
            k: how many rows.
            by: a reference, for its excess; None for the score.

        Raises:
            InputError: k is no int of at least 1, or there is no such reference.
        """
        k = length("k", k)
        frame = self.to_frame()
        if by is not None:
            one_of("by", by, tuple(self.excess))
            return frame.sort_values(f"excess_{by}", ascending=False, kind="stable").head(k)
        smallest = self.score == "cross_entropy"
        return frame.sort_values("score", ascending=smallest, kind="stable").head(k)

    def _sites(self) -> dict[str, Any]:
        # itertools' order is that of a flattened tensor; one empty tuple where there is no axis.
        rows = list(product(*self.site_labels))
        return {name: [row[axis] for row in rows] for axis, name in enumerate(self.site_axes)}


def _listed(values: Tensor) -> list[Any]:
    return values.flatten().tolist()


def _frame(columns: dict[str, Any]) -> Any:
    import pandas

    return pandas.DataFrame(columns)
