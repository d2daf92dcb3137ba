"""What `payload` found: scores and excesses a head, the division of labour, maps of properties."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._types import Provenance, Result
from wvprobe._validate import instance, length, message, one_of
from wvprobe.errors import InputError

LABOUR_SITES = ("v", "q", "k")


@dataclass(frozen=True)
class LabourResult(Result):
    """Values against queries and keys: which of them carry a label.

    Means over a layer's heads (key-value heads for v and k, each once), and 95 % intervals from
    the paired bootstrap. Sites are v, q, k in this order; contrasts v − q and v − k.

    Attributes:
        score: [site, layer].
        low: likewise, lower end.
        high: likewise, upper end.
        excess: [site, layer] over random projections.
        excess_low: likewise.
        excess_high: likewise.
        contrast: [other, layer] v's score − that of q, k.
        contrast_low: likewise.
        contrast_high: likewise.
        references: the references that all three sites have.
        overall: [reference, site, 3] excess over the reference, mean over layers: value, low, high.
        overall_contrast: [reference, other, 3] v's excess − that of q, k. It differs between
            references only where they are not the same for all three sites.
        range: [3] largest − smallest layer mean of v's score: value, low, high (basic bootstrap).
        excess_range: [3] likewise, of the excess over random projections.
        score_name: what the score is.
        label: what the labels say.

    Examples:
        >>> few = wvprobe.load_senses().only("bank")
        >>> given = {"draws": 2, "control_draws": 0, "min_count": 4, "folds": 2}
        >>> found = wvprobe.payload(model, few, label="pos", groups="sentence", **given)
        >>> found.labour.contrast.shape  # v against q and against k, by layer
        torch.Size([2, 3])
    """

    score: Float[Tensor, "site layer"]
    low: Float[Tensor, "site layer"]
    high: Float[Tensor, "site layer"]
    excess: Float[Tensor, "site layer"]
    excess_low: Float[Tensor, "site layer"]
    excess_high: Float[Tensor, "site layer"]
    contrast: Float[Tensor, "other layer"]
    contrast_low: Float[Tensor, "other layer"]
    contrast_high: Float[Tensor, "other layer"]
    references: tuple[str, ...]
    overall: Float[Tensor, "reference site three"]
    overall_contrast: Float[Tensor, "reference other three"]
    range: Float[Tensor, " three"]
    excess_range: Float[Tensor, " three"]
    score_name: str
    label: str

    AXES: ClassVar = {
        **dict.fromkeys(("score", "low", "high"), ("site", "layer")),
        **dict.fromkeys(("excess", "excess_low", "excess_high"), ("site", "layer")),
        **dict.fromkeys(("contrast", "contrast_low", "contrast_high"), ("other", "layer")),
        "overall": ("reference", "site", "value_low_high"),
        "overall_contrast": ("reference", "other", "value_low_high"),
        "range": ("value_low_high",),
        "excess_range": ("value_low_high",),
    }

    def to_frame(self) -> Any:
        """Return one row a layer and site.

        Columns: layer site score low high excess_random excess_random_low excess_random_high.
        """
        import pandas

        names = ("score", "low", "high", "excess", "excess_low", "excess_high")
        columns = (
            "score",
            "low",
            "high",
            *(f"excess_random{end}" for end in ("", "_low", "_high")),
        )
        rows = [
            (layer, site, *(float(getattr(self, name)[place, layer]) for name in names))
            for layer in range(self.score.shape[1])
            for place, site in enumerate(LABOUR_SITES)
        ]
        return pandas.DataFrame(rows, columns=["layer", "site", *columns])

    def contrasts_frame(self) -> Any:
        """Return what v has beyond q and k, reference by reference, mean over layers.

        One row a reference and other site: reference against v other value low high, where v and
        other are the excesses of both over the reference, and value their difference.
        """
        import pandas

        rows = []
        for place, name in enumerate(self.references):
            for number, other in enumerate(("q", "k")):
                both = (self.overall[place, 0, 0], self.overall[place, 1 + number, 0])
                three = self.overall_contrast[place, number]
                rows.append((name, other, *map(float, both), *three.tolist()))
        columns = ["reference", "against", "v", "other", "value", "low", "high"]
        return pandas.DataFrame(rows, columns=columns)


@dataclass(frozen=True)
class PayloadResult(Result):
    """How well a label is read off every head at every site. One row a site, layer and head.

    Attributes:
        site: [row] v, q, k, z or attn_in.
        layer: [row].
        head: [row] query heads for q and z, key-value heads for v and k, 0 for attn_in.
        score: [row] share of words given their own label, out of fold (for senses: left out in
            turn, mean over lemmas).
        low: [row] lower end of the 95 % interval (bootstrap over groups).
        high: [row] upper end.
        reference_scores: reference -> [row] its score; NaN where a site has no such reference.
        excess: reference -> [row] score − reference. For ``null``: what W_V drops, less what
            random projections drop.
        excess_low: likewise, lower end of the paired interval.
        excess_high: likewise, upper end.
        p: [row] share of random projections, the head itself among them, that reach the score.
        q: [row] Benjamini-Hochberg over the rows of the same site.
        p_family: [row] one-sided bootstrap p of excess over random > 0, family-wise over the rows
            of the same site (Romano & Wolf 2005).
        labour: v against q and k; None unless all three were read.
        same_pos: the same for lemmas whose senses share a part of speech; None for other labels,
            and where that is not known or there are fewer than two.
        dataset: the dataset's name.
        label: what the labels say.
        method: lda, least_squares or centroid.
        score_name: accuracy or balanced_accuracy.
        classes: the labels; empty for senses.
        n_items: words.
        n_groups: independent units that intervals rest on.

    Examples:
        >>> few = wvprobe.load_senses().only("bank")
        >>> given = {"sites": ("v",), "draws": 2, "control_draws": 0, "min_count": 4, "folds": 2}
        >>> found = wvprobe.payload(model, few, label="pos", groups="sentence", **given)
        >>> bool((found.low <= found.score).all()), found.method
        (True, 'lda')
    """

    site: tuple[str, ...]
    layer: Int[Tensor, " row"]
    head: Int[Tensor, " row"]
    score: Float[Tensor, " row"]
    low: Float[Tensor, " row"]
    high: Float[Tensor, " row"]
    reference_scores: Mapping[str, Float[Tensor, " row"]]
    excess: Mapping[str, Float[Tensor, " row"]]
    excess_low: Mapping[str, Float[Tensor, " row"]]
    excess_high: Mapping[str, Float[Tensor, " row"]]
    p: Float[Tensor, " row"]
    q: Float[Tensor, " row"]
    p_family: Float[Tensor, " row"]
    labour: LabourResult | None
    same_pos: "PayloadResult | None"
    dataset: str
    label: str
    method: str
    score_name: str
    classes: tuple[str, ...]
    n_items: int
    n_groups: int

    AXES: ClassVar = dict.fromkeys(
        ("layer", "head", "score", "low", "high", "p", "q", "p_family"), ("row",)
    )

    @property
    def references(self) -> tuple[str, ...]:
        """The references, in the order of the frame's columns."""
        return tuple(self.excess)

    def beside(self, same_pos: "PayloadResult") -> "PayloadResult":
        """Return this result with that of same-part-of-speech lemmas beside it."""
        return replace(self, same_pos=same_pos)

    def grid(self, site: str, values: Float[Tensor, " row"]) -> Float[Tensor, "layer head"]:
        """Return rows of one site as a map.

        Raises:
            InputError: the site was not measured.
        """
        one_of("site", site, tuple(dict.fromkeys(self.site)))
        rows = torch.tensor([name == site for name in self.site])
        layers = int(self.layer[rows].max()) + 1
        return values[rows].reshape(layers, -1)

    def to_frame(self) -> Any:
        """Return one row a site, layer and head.

        Columns: layer head site score low high; excess_NAME excess_NAME_low excess_NAME_high for
        every reference, NaN where a site has none; p q p_family.
        """
        import pandas

        columns: dict[str, Any] = {
            "layer": self.layer.tolist(),
            "head": self.head.tolist(),
            "site": list(self.site),
        }
        for name in ("score", "low", "high"):
            columns[name] = getattr(self, name).tolist()
        for name in self.excess:
            columns[f"excess_{name}"] = self.excess[name].tolist()
            columns[f"excess_{name}_low"] = self.excess_low[name].tolist()
            columns[f"excess_{name}_high"] = self.excess_high[name].tolist()
        for name in ("p", "q", "p_family"):
            columns[name] = getattr(self, name).tolist()
        return pandas.DataFrame(columns)

    def references_frame(self) -> Any:
        """Return one row a site, layer, head and reference that the site has.

        Columns: layer head site reference reference_score excess low high.
        """
        import pandas

        parts = []
        for name in self.excess:
            parts.append(
                pandas.DataFrame(
                    {
                        "layer": self.layer.tolist(),
                        "head": self.head.tolist(),
                        "site": list(self.site),
                        "reference": name,
                        "reference_score": self.reference_scores[name].tolist(),
                        "excess": self.excess[name].tolist(),
                        "low": self.excess_low[name].tolist(),
                        "high": self.excess_high[name].tolist(),
                    }
                )
            )
        return pandas.concat(parts, ignore_index=True).dropna(subset="excess")

    def best(self, k: int = 10, *, site: str = "v", by: str = "random") -> Any:
        """Return the k heads of a site with the largest excess over a reference.

        Raises:
            InputError: no such site or reference.
        """
        k = length("k", k)
        one_of("site", site, tuple(dict.fromkeys(self.site)))
        one_of("by", by, self.references)
        frame = self.to_frame()
        frame = frame[frame["site"] == site]
        return frame.sort_values(f"excess_{by}", ascending=False, kind="stable").head(k)


@dataclass(frozen=True)
class PayloadMap(Result):
    """Several properties side by side: heads × layers × properties.

    Attributes:
        results: property -> what `payload` found of it.

    Examples:
        >>> from wvprobe.value_payload import payload_map
        >>> few = wvprobe.load_senses().only("bank")
        >>> given = {"sites": ("v",), "draws": 2, "control_draws": 0, "min_count": 4, "folds": 2}
        >>> found = wvprobe.payload(model, few, label="pos", groups="sentence", **given)
        >>> list(payload_map({"pos": found}).results)
        ['pos']
    """

    results: Mapping[str, PayloadResult]

    def to_frame(self) -> Any:
        """Return the frames of all properties, with the column `property` first."""
        import pandas

        parts = []
        for name, one in self.results.items():
            frame = one.to_frame()
            frame.insert(0, "property", name)
            parts.append(frame)
        return pandas.concat(parts, ignore_index=True)


def payload_map(results: Mapping[str, PayloadResult]) -> PayloadMap:
    """Put what `payload` found of several properties of one model side by side.

    Args:
        results: property -> result.

    Raises:
        InputError: there is none, or they are of several models.

    Examples:
        >>> from wvprobe.value_payload import payload_map
        >>> few = wvprobe.load_senses().only("bank")
        >>> given = {"sites": ("v",), "draws": 2, "control_draws": 0, "min_count": 4, "folds": 2}
        >>> found = wvprobe.payload(model, few, label="pos", groups="sentence", **given)
        >>> set(payload_map({"part of speech": found}).to_frame().property)
        {'part of speech'}
    """
    instance("results", results, Mapping, "Name each: {'pos': payload(model, data)}.")
    for one in results.values():
        instance("results", one, PayloadResult, "payload(model, data) returns one.")
    models = {one.provenance.weight_hash for one in results.values()}
    if len(models) != 1:
        names = sorted({one.provenance.model for one in results.values()})
        raise InputError(message("results", "of one model, at least one", names))
    first = next(iter(results.values())).provenance
    settings = {name: dict(one.provenance.settings) for name, one in results.items()}
    return PayloadMap(
        Provenance.of(first.model, first.weight_hash, seed=first.seed, properties=settings),
        dict(results),
    )
