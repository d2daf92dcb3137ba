"""`erase`: a label taken out of a head's values at the source; what arrives of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._types import HeadId, Result
from wvprobe._validate import at_least, index, length, message, one_of, pairs
from wvprobe._validate import seed as checked_seed
from wvprobe.datasets import LabelledDataset, SenseDataset
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.labelled import LabelledWords
from wvprobe.probes.scores import against_a_draw, against_overlap, family_wise
from wvprobe.value_payload._arrivals import PLACES, Erasures, Found
from wvprobe.value_payload._averages import Averages, interval
from wvprobe.value_payload._divergence import divergences
from wvprobe.value_payload._items import Selection, items_of
from wvprobe.value_payload._scorers import ClassScorer
from wvprobe.value_payload.measuring import SCORES, checked_probe

DESTINATIONS = ("target", "last")
_ENDS = ("", "_low", "_high")
_KL_CONTROLS = 2  # random erasers that the forward is run with


@dataclass(frozen=True)
class EraseResult(Result):
    """What erasing a label from values does: at the source, and where they arrive.

    Places are ``v`` at the target; ``z``, mean over the query heads that read it, and
    ``attn_added`` (what the layer's whole attention adds) at the destination. Scores are those of
    probes fitted anew on the changed vectors, out of fold.

    Attributes:
        layer: [row] of the head.
        head: [row] key-value head.
        before: [row, place] score as it is.
        erased: [row, place] with the label erased.
        control: [row, place] with random directions erased, mean over draws.
        loss: [row, place, 3] before − erased: value, low, high.
        control_loss: [row, place, 3] before − control.
        excess_loss: [row, place, 3] control − erased: by how much erasing the label hurts more.
        p_family: [row, place] one-sided bootstrap p of excess_loss > 0, family-wise over rows.
        rank: [row] directions taken out (largest of the folds).
        energy: [row] E‖Δv‖² of the erasure over that of v around its mean.
        control_energy: [row] likewise of the control.
        stretch: [row] factor on the control's Δv, mean over draws and folds; 1 where directions of
            the energy exist.
        attention: [row] mean attention from the destination to the target, over the group's heads.
        kl: [named head, kind, 3] nats, mean over words, of the next token's distribution at the
            destination: kinds erased, control, erased − control; None where not asked for.
        kl_heads: the heads it was measured for.
        majority: score of the most frequent label.
        destination: ``target`` or ``last``.
        label: what the labels say.
        dataset: the dataset's name.
        score_name: what the score is.
        classes: the labels.
        n_items: words.
        n_groups: independent units.

    Examples:
        >>> few = wvprobe.load_senses().only("bank")
        >>> given = {"groups": "sentence", "min_count": 4, "folds": 2, "draws": 2}
        >>> found = wvprobe.erase(model, few, label="pos", heads=[(1, 0)], **given)
        >>> found.before.shape, found.erased.shape
        (torch.Size([1, 3]), torch.Size([1, 3]))
    """

    layer: Int[Tensor, " row"]
    head: Int[Tensor, " row"]
    before: Float[Tensor, "row place"]
    erased: Float[Tensor, "row place"]
    control: Float[Tensor, "row place"]
    loss: Float[Tensor, "row place three"]
    control_loss: Float[Tensor, "row place three"]
    excess_loss: Float[Tensor, "row place three"]
    p_family: Float[Tensor, "row place"]
    rank: Int[Tensor, " row"]
    energy: Float[Tensor, " row"]
    control_energy: Float[Tensor, " row"]
    stretch: Float[Tensor, " row"]
    attention: Float[Tensor, " row"]
    kl: Float[Tensor, "named kind three"] | None
    kl_heads: tuple[HeadId, ...]
    majority: float
    destination: str
    label: str
    dataset: str
    score_name: str
    classes: tuple[str, ...]
    n_items: int
    n_groups: int

    AXES: ClassVar = {
        **dict.fromkeys(("layer", "head", "rank", "energy", "control_energy"), ("row",)),
        **dict.fromkeys(("stretch", "attention"), ("row",)),
        **dict.fromkeys(("before", "erased", "control", "p_family"), ("row", "place")),
        **dict.fromkeys(
            ("loss", "control_loss", "excess_loss"), ("row", "place", "value_low_high")
        ),
        "kl": ("named_head", "kind", "value_low_high"),
    }

    def to_frame(self) -> Any:
        """Return one row a head and place.

        Columns: layer head place before erased control loss control_loss excess_loss (each of the
        three with _low and _high) p_family rank energy control_energy stretch attention.
        """
        import pandas

        parts = []
        for number, place in enumerate(PLACES):
            columns: dict[str, Any] = {
                "layer": self.layer.tolist(),
                "head": self.head.tolist(),
                "place": place,
            }
            for name in ("before", "erased", "control"):
                columns[name] = getattr(self, name)[:, number].tolist()
            for name in ("loss", "control_loss", "excess_loss"):
                for at, end in enumerate(_ENDS):
                    columns[name + end] = getattr(self, name)[:, number, at].tolist()
            columns["p_family"] = self.p_family[:, number].tolist()
            for name in ("rank", "energy", "control_energy", "stretch", "attention"):
                columns[name] = getattr(self, name).tolist()
            parts.append(pandas.DataFrame(columns))
        return pandas.concat(parts, ignore_index=True).sort_values(
            ["layer", "head"], kind="stable", ignore_index=True
        )

    def kl_frame(self) -> Any:
        """Return one row a named head: layer head kl kl_control kl_excess, with _low and _high."""
        import pandas

        rows = []
        for head, kinds in zip(self.kl_heads, self.kl if self.kl is not None else (), strict=True):
            row: dict[str, Any] = {"layer": head.layer, "head": head.head}
            for name, three in zip(("kl", "kl_control", "kl_excess"), kinds, strict=True):
                row |= {name + end: float(x) for end, x in zip(_ENDS, three, strict=True)}
            rows.append(row)
        return pandas.DataFrame(rows)


def erase(
    model: Any,
    dataset: LabelledDataset | SenseDataset | LabelledWords,
    *,
    label: str | None = None,
    site: str = "v",
    destination: str = "target",
    heads: Sequence[tuple[int, int]] | None = None,
    kl_heads: Sequence[tuple[int, int]] = (),
    kl_words: int = 200,
    draws: int = 5,
    method: str = "lda",
    penalty: float | int | None = None,
    score: str = "accuracy",
    limit: int | None = 4_000,
    per_sentence: int | None = 2,
    per_label: int | None = None,
    min_count: int = 20,
    groups: str = "auto",
    folds: int = 5,
    seed: int = 0,
    progress: bool = False,
    prepend_bos: bool | None = None,
) -> EraseResult:
    """Take a label linearly out of one head's values at the target, and look where they arrive.

    LEACE (Belrose et al. 2023) is fitted on the training words of each fold and applied to the
    values of the words held out. The control takes out as many random directions with the same
    E‖Δv‖², several times. With Δv known, z′_i = z_i + pattern_i,target Δv at the destination i is
    exact, and attn_added′ follows from it through W_O (and a norm behind it, evaluated anew):
    what a probe still finds there needs no further forward. KL does, a forward a named head.

    The target is the word's last token. Its own pattern does not change, since queries and keys
    stay; later layers see the change in the KL alone.

    Args:
        model: a bridge with a tokenizer.
        dataset: as for :func:`payload`.
        label: likewise; not senses, see below.
        site: ``v``.
        destination: where the value is looked for: ``target`` itself, or the ``last`` token.
        heads: (layer, key-value head) one by one; None for all.
        kl_heads: some of them, for which the next token's distribution is compared.
        kl_words: how many words that is averaged over.
        draws: random erasures a head and fold.
        method: as for :func:`payload`, and so are the arguments below.
        penalty: likewise.
        score: likewise.
        limit: likewise.
        per_sentence: likewise.
        per_label: likewise.
        min_count: likewise.
        groups: likewise.
        folds: likewise.
        seed: likewise.
        progress: likewise.
        prepend_bos: likewise.

    Raises:
        InputError: an argument cannot be used.
        UnsupportedError: another site; senses; or KL of a model without a head.

    Examples:
        >>> few = wvprobe.load_senses().only("bank")
        >>> given = {"groups": "sentence", "min_count": 4, "folds": 2, "draws": 2}
        >>> found = wvprobe.erase(model, few, label="pos", heads=[(1, 0)], **given)
        >>> set(zip(found.to_frame().layer, found.to_frame()["head"]))
        {(1, 0)}
    """
    seed = checked_seed(seed)
    if site != "v":
        raise UnsupportedError(
            f"erasing from {site!r} changes the pattern, and what arrives then needs a forward of "
            "its own. Use site='v', or wvprobe.adapters.changing with an eraser."
        )
    if length("draws", draws) < 2:
        raise InputError(message("draws", "at least 2, to know how draws differ", draws))
    one_of("destination", destination, DESTINATIONS)
    one_of("score", score, SCORES)
    kl_words, folds = at_least("kl_words", kl_words), at_least("folds", folds, 2)
    arch = adapters.architecture(model)
    named = _heads("heads", heads, arch)
    kl_heads = pairs("kl_heads", kl_heads, "(layer, key-value head) pairs")
    measured_kl = _heads("kl_heads", kl_heads, arch) if kl_heads else ()
    if measured_kl:
        adapters.require_head(model, "the next token's distribution (kl_heads)")
        if not set(measured_kl) <= set(named):
            raise InputError(message("kl_heads", "among `heads`", list(kl_heads)))
    chosen = Selection(limit, per_sentence, per_label, min_count, groups, seed, prepend_bos)
    items = items_of(model, dataset, label, chosen)
    if items.strata is not None:
        raise UnsupportedError(
            "a sense belongs to its lemma, and a lemma's few sentences do not fix directions to "
            "erase. Use a label that means the same for all words, such as label='pos'."
        )
    scorer = ClassScorer(
        items,
        checked_probe(method, penalty, score),
        folds=folds,
        balanced=score == "balanced_accuracy",
        control_draws=0,
        seed=seed,
    )
    run = Erasures(model, arch, items, scorer, destination, draws, seed)
    averages = Averages(scorer.weights, scorer.groups, seed)
    found = list(run.all(named, set(measured_kl), progress))
    kl = None
    if measured_kl:
        changes = {one.head: one.changes for one in found if one.changes is not None}
        kl = _divergence(model, arch, run, changes, measured_kl, kl_words, seed)
    provenance = adapters.provenance(
        model,
        seed=seed,
        label=items.label,
        site=site,
        destination=destination,
        heads=None if heads is None else [list(head) for head in named],
        draws=draws,
        method=method,
        penalty=penalty,
        score=score,
        folds=folds,
        kl_words=kl_words,
        concept_erasure=_version(),
        selection=dict(items.settings),
    )
    facts = {name: torch.tensor([getattr(one, name) for one in found]) for name in _FACTS}
    return EraseResult(
        provenance=provenance,
        layer=torch.tensor([one.head.layer for one in found]),
        head=torch.tensor([one.head.head for one in found]),
        **_scores(found, averages, folds, seed),
        **facts,
        kl=kl,
        kl_heads=measured_kl,
        majority=float(averages(scorer.majority[None]).value[0]),
        destination=destination,
        label=items.label,
        dataset=items.dataset,
        score_name=score,
        classes=tuple(str(x) for x in scorer.classes),
        n_items=len(items),
        n_groups=averages.n_groups,
    )


_FACTS = ("rank", "energy", "control_energy", "stretch", "attention")


def _scores(found: list[Found], averages: Averages, folds: int, seed: int) -> dict[str, Tensor]:
    shape = (len(found), len(PLACES))
    before, erased, control = (
        averages(torch.stack([getattr(one, name) for one in found]))
        for name in ("before", "erased", "control")
    )
    drawn = torch.stack([one.draws for one in found], dim=1).flatten(1)  # [draw, row and place]
    differences = {
        "loss": against_overlap(before.above(erased, "accuracy"), folds),
        "control_loss": against_overlap(before.above(control, "accuracy"), folds),
        "excess_loss": against_a_draw(control.above(erased, "accuracy"), drawn, seed),
    }
    values = {"before": before.value, "erased": erased.value, "control": control.value}
    excess = differences["excess_loss"]
    p = torch.stack(
        [
            family_wise(excess.at(torch.arange(place, shape[0] * shape[1], shape[1])))
            for place in range(shape[1])
        ],
        dim=1,
    )
    return {
        **{name: value.reshape(shape) for name, value in values.items()},
        **{
            name: torch.stack([one.value, *interval(one)], dim=-1).reshape(*shape, 3)
            for name, one in differences.items()
        },
        "p_family": p,
    }


def _divergence(
    model: Any,
    arch: Any,
    run: Erasures,
    changes: Mapping[HeadId, Tensor],
    heads: Sequence[HeadId],
    words: int,
    seed: int,
) -> Float[Tensor, "named kind three"]:
    """Return KL of the next token's distribution with intervals, over a sample of words."""
    count = min(length("kl_words", words), len(run.items))
    order = torch.randperm(len(run.items), generator=torch.Generator().manual_seed(seed))
    sample = order[:count].sort().values
    measured = divergences(
        model,
        arch,
        [run.tokens[i] for i in sample.tolist()],
        [run.source[i] for i in sample.tolist()],
        [run.places[i] for i in sample.tolist()],
        {head: changes[head][: 1 + _KL_CONTROLS, sample] for head in heads},
    )
    averages = Averages(torch.ones(count).double(), run.scorer.groups[sample], seed)
    found = []
    for head in heads:
        erased, control = measured[head][0], measured[head][1:].mean(dim=0)
        both = averages(torch.stack([erased, control, erased - control]))
        found.append(torch.stack([both.value, *interval(both)], dim=-1))
    return torch.stack(found)


def _heads(name: str, heads: Sequence[tuple[int, int]] | None, arch: Any) -> tuple[HeadId, ...]:
    if heads is None:
        return tuple(HeadId(x, h) for x in range(arch.n_layers) for h in range(arch.n_kv_heads))
    found = [
        HeadId(index(name, x, arch.n_layers, "layers"), index(name, h, arch.n_kv_heads, "KV heads"))
        for x, h in pairs(name, heads, "(layer, key-value head) pairs")
    ]
    if not found or len(set(found)) != len(found):
        raise InputError(message(name, "different (layer, key-value head) pairs", list(heads)))
    return tuple(sorted(found)) if name == "heads" else tuple(found)


def _version() -> str:
    from importlib import metadata

    return metadata.version("concept-erasure")
