"""Heads cut to other ranks at a fixed total: does an uneven split bring a gain?"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._effects import Setting, measure_effects, texts_or_prose
from wvprobe._statistics import mean_interval
from wvprobe._validate import length, message, one_of
from wvprobe._validate import seed as checked_seed
from wvprobe.adapters import Architecture
from wvprobe.counterfactual._allocation import (
    common_step,
    even_ranks,
    greedy_ranks,
    rounded_ranks,
    total_rank,
)
from wvprobe.counterfactual._changes import ROUNDING, ChangeResult
from wvprobe.counterfactual._cuts import Cut
from wvprobe.counterfactual._plans import PARTS, ResizePlan, cut_plan, measured_cut
from wvprobe.counterfactual._sensitivity import loss_costs, require_loss
from wvprobe.counterfactual._streams import calibration_texts
from wvprobe.errors import InputError

ALLOCATIONS = ("uniform", "energy", "loss")
SCOPES = ("model", "layer")
BYTES = 2  # of a number in bfloat16, which caches are kept in
# Measures of which less is better.
_COSTS = ("loss_delta", "kl", "relative_change")


class _Choice(NamedTuple):
    """One setting: how much rank, how shared out, in which multiples."""

    budget: float
    allocation: str
    multiple_of: int


@dataclass(frozen=True)
class ResizeResult(ChangeResult):
    """What becomes of a model whose heads are cut to a lower total rank.

    Attributes:
        part: ``OV`` or ``QK``.
        scope: within what the total is fixed: the ``model``, or each ``layer``.
        budgets: of each setting, the fraction of the total rank (1 for the yardstick).
        allocations: of each setting; ``none`` for the yardstick.
        multiples: of each setting, what ranks are multiples of, a rotation's planes apart.
        ranks: [setting, layer, head] the rank of each head.
        energies: [layer, head, d] what each of a head's coordinates adds to the energy of what it
            puts out (OV) or of its scores (QK), in the order in which they are kept.
        costs: [layer, head, d + 1] what cutting a head alone to every rank from 0 costs in loss,
            nats², by its slope on calibration text (see docs/methods.md); None where no allocation
            asked for it.
        basis: [layer, head, d, d] from a head's z (or queries) to its coordinates.
        centre: [layer, head, d] the mean of z, which passes; None for queries.
        kv_bytes: [setting] bytes a token leaves in the cache in bfloat16, values (OV) or keys (QK)
            of the model's own key-value heads kept as they are.
        kv_bytes_own: [setting] the same where each query head caches its own cut coordinates
            instead.
        kv_note: what these two mean for this model.

    Examples:
        >>> texts = ["The river bank is closed.", "A power bank fell into the river."]
        >>> found = wvprobe.resize_heads(model, texts, budget=0.5, calibration=texts)
        >>> found.plan("OV, uniform, 0.50").ranks[0].tolist()
        [7, 7, 7, 7, 7, 7]
    """

    part: str
    scope: str
    budgets: tuple[float, ...]
    allocations: tuple[str, ...]
    multiples: tuple[int, ...]
    ranks: Int[Tensor, "setting layer head"]
    energies: Float[Tensor, "layer head d"]
    costs: Float[Tensor, "layer head rank"] | None
    basis: Float[Tensor, "layer head d d"]
    centre: Float[Tensor, "layer head d"] | None
    kv_bytes: Int[Tensor, " setting"]
    kv_bytes_own: Int[Tensor, " setting"]
    kv_note: str

    AXES: ClassVar = {
        **ChangeResult.AXES,
        "ranks": ("setting", "layer", "head"),
        "energies": ("layer", "head", "coordinate"),
        "costs": ("layer", "head", "rank"),
        "basis": ("layer", "head", "d", "coordinate"),
        "centre": ("layer", "head", "d"),
        "kv_bytes": ("setting",),
        "kv_bytes_own": ("setting",),
    }

    def plan(self, setting: str) -> ResizePlan:
        """Return a setting's ranks and maps, as ``share_kv_heads(..., after=)`` takes them.

        Raises:
            InputError: no such setting.
        """
        one_of("setting", setting, self.settings)
        right = torch.linalg.pinv(self.basis)
        cut = Cut(self.basis, right, self.energies, 1, self.centre)
        return cut_plan(setting, self.part, cut, self.ranks[self.settings.index(setting)])

    @property
    def kept(self) -> Float[Tensor, "setting layer"]:
        """Share of each layer's energy that a setting keeps."""
        at = torch.arange(self.energies.shape[-1])
        kept = torch.where(at < self.ranks[..., None], self.energies, 0.0).sum(dim=(-2, -1))
        whole = self.energies.sum(dim=(-2, -1))
        return torch.where(whole > 0, kept / whole, 1.0)

    def gain_frame(self) -> Any:
        """Return what an uneven split gains over the even one, text by text at the same budget.

        Columns: budget multiple_of setting versus measure gain low high n_texts. A gain is the
        measure under `versus` less that under `setting` (loss in nats a token, KL, or relative
        change), so that more than 0 speaks for the uneven split; the interval is a 95 % bootstrap
        over texts, which are paired. Where ranks were rounded to multiples, further rows hold
        them against those that were not.

        Raises:
            InputError: nothing to compare was measured.
        """
        import pandas

        rows = []
        for at, versus in self._pairs():
            for measure in _COSTS:
                values = getattr(self, measure)
                difference = values[versus] - values[at]
                if bool(difference.isnan().all()):
                    continue
                low, high = torch.nan, torch.nan
                if len(difference) > 1:
                    ends = mean_interval(difference[:, None], seed=self.provenance.seed or 0)
                    low, high = (float(end) for end in ends)
                rows.append(
                    {
                        "budget": self.budgets[at],
                        "multiple_of": self.multiples[at],
                        "setting": self.settings[at],
                        "versus": self.settings[versus],
                        "measure": measure,
                        "gain": float(difference.mean()),
                        "low": low,
                        "high": high,
                        "n_texts": len(difference),
                    }
                )
        if not rows:
            hint = "Call resize_heads with allocation=('uniform', 'energy')."
            got = list(dict.fromkeys(self.allocations))
            raise InputError(message("allocation", "'uniform' and another", got, hint))
        return pandas.DataFrame(rows)

    def _pairs(self) -> list[tuple[int, int]]:
        """Return (setting, what it is held against) by their numbers."""
        choices = list(zip(self.budgets, self.allocations, self.multiples, strict=True))
        pairs = []
        for at, (budget, allocation, multiple) in enumerate(choices):
            others = [(budget, "uniform", multiple)] if allocation in ALLOCATIONS[1:] else []
            if multiple > 1:
                others.append((budget, allocation, 1))
            pairs += [(at, choices.index(other)) for other in others if other in choices]
        return pairs

    def _columns(self) -> dict[str, list[Any]]:
        ranks = self.ranks.flatten(1)
        return {
            "budget": list(self.budgets),
            "allocation": list(self.allocations),
            "part": [self.part] * len(self.settings),
            "multiple_of": list(self.multiples),
            "total_rank": ranks.sum(dim=1).tolist(),
            "smallest_rank": ranks.amin(dim=1).tolist(),
            "largest_rank": ranks.amax(dim=1).tolist(),
            "kept_energy": self.kept.mean(dim=1).tolist(),
            "kv_bytes": self.kv_bytes.tolist(),
            "kv_bytes_own": self.kv_bytes_own.tolist(),
        }


def resize_heads(
    model: Any,
    texts: str | Sequence[str] | None = None,
    *,
    budget: float | int | Sequence[float | int],
    allocation: str | Sequence[str] = "uniform",
    part: str = "OV",
    multiple_of: int = 1,
    scope: str = "model",
    calibration: str | Sequence[str] | None = None,
    seed: int = 0,
    progress: bool = False,
) -> ResizeResult:
    """Cut every head's OV or QK to a rank, at a fixed total of all heads' ranks.

    Post hoc: a trained model is cut, not trained anew, so that it shows what its even heads make
    use of, not what uneven ones could have learnt.

    Values are cut where the head adds them (on z), to the principal components of what it adds on
    calibration text: no other map of that rank changes the head's output there less. The mean
    passes, as it can be part of b_O. Scores are cut on queries: whole planes of a rotation, and
    free directions among the dimensions that do not turn. See docs/methods.md.

    Under grouped keys and values (GQA) query heads of one key-value head are cut apart from each
    other, which breaks their sharing: the result's `kv_bytes_own` counts what it then costs.

    Args:
        model: a TransformerBridge.
        texts: what the cut model is judged on; None for the bundled held-out prose.
        budget: fraction of the total rank Σ_h d_head that is kept, in (0, 1]; one or several.
        allocation: one or several of ``uniform`` (the same rank for each head), ``energy`` (to
            where the most energy lies, each layer's energy counted as 1 for OV) and ``loss`` (to
            where the loss is most sensitive, by gradients on calibration text).
        part: ``OV`` or ``QK``.
        multiple_of: round ranks to multiples of this at the same total, as kernels want; settings
            with and without rounding are then both run.
        scope: the total is fixed over the whole ``model`` or in each ``layer``.
        calibration: what moments and sensitivities are measured on; None for the bundled
            calibration prose, which shares no stories with the held-out one.
        seed: of the intervals over texts.
        progress: whether to show bars.

    Returns:
        Settings named "OV, uniform, 0.50", and the yardstick ``bf16 rounding``.

    Raises:
        InputError: a budget outside (0, 1], or too small for one step; unknown names; a
            `multiple_of` beyond d_head; `calibration` of fewer tokens than d_head.
        UnsupportedError: allocation ``loss`` for a model without a head or one that looks both
            ways; for QK, a rotation that is not modelled exactly.

    Examples:
        >>> texts = ["The river bank is closed.", "A power bank fell into the river."]
        >>> found = wvprobe.resize_heads(model, texts, budget=[0.5, 1], calibration=texts)
        >>> whole = found.kl[found.settings.index("OV, uniform, 1.00")]
        >>> bool(whole.abs().max() < 1e-5)  # at the full budget nothing changes
        True
    """
    seed = checked_seed(seed)
    arch = adapters.architecture(model)
    one_of("part", part, PARTS)
    one_of("scope", scope, SCOPES)
    d = arch.d_head_v if part == "OV" else arch.d_head
    if length("multiple_of", multiple_of) > d:
        raise InputError(message("multiple_of", f"at most {d}, a head's width", multiple_of))
    choices = _choices(budget, allocation, multiple_of)
    _check_budgets(arch, part, d, choices, scope, multiple_of)
    by_loss = any(choice.allocation == "loss" for choice in choices)
    if by_loss:
        require_loss(model, arch)
    judged = texts_or_prose(texts)
    fitted = calibration_texts(model, arch, calibration)
    cut = measured_cut(model, arch, part, fitted, progress)
    costs = loss_costs(model, arch, fitted, cut, part, progress) if by_loss else None
    ranks = [_ranks(cut, costs, choice, part, scope) for choice in choices]
    whole = torch.full((arch.n_layers, arch.n_heads), d)
    names = [_name(part, choice, scope) for choice in choices]
    changes = [cut_plan("", part, cut, own).changes for own in ranks]
    settings: dict[str, Setting] = {
        name: partial(adapters.changing, model, arch, own)
        for name, own in zip(names, changes, strict=True)
    }
    settings[ROUNDING] = partial(adapters.rounded, model, arch, torch.bfloat16)
    found = measure_effects(model, judged, settings, progress=progress)
    every = torch.stack([*ranks, whole])
    shared, own, note = _cache(model, arch, part, every)
    return ResizeResult(
        provenance=adapters.provenance(
            model,
            seed=seed,
            texts=len(judged),
            calibration=len(fitted),
            budgets=[choice.budget for choice in choices],
            allocations=[choice.allocation for choice in choices],
            part=part,
            multiple_of=multiple_of,
            scope=scope,
        ),
        **found._asdict(),
        settings=tuple(settings),
        layers=(*(tuple(layer for _, layer in own) for own in changes), ()),
        part=part,
        scope=scope,
        budgets=(*(choice.budget for choice in choices), 1.0),
        allocations=(*(choice.allocation for choice in choices), "none"),
        multiples=(*(choice.multiple_of for choice in choices), 1),
        ranks=every,
        energies=cut.gains,
        costs=costs,
        basis=cut.left,
        centre=cut.centre,
        kv_bytes=shared,
        kv_bytes_own=own,
        kv_note=note,
    )


def _choices(budget: Any, allocation: Any, multiple_of: int) -> list[_Choice]:
    """Return the settings asked for, each with and without rounding to multiples."""
    budgets = several("budget", budget)
    for value in budgets:
        total_rank(value, 1, 0)  # refuses what is no fraction
    allocations = [one_of("allocation", a, ALLOCATIONS) for a in several("allocation", allocation)]
    return [
        _Choice(float(b), a, m)
        for b in budgets
        for a in allocations
        for m in dict.fromkeys((1, multiple_of))
    ]


def several(name: str, given: Any) -> list[Any]:
    """Return one value or several, without repetition, as a list.

    Raises:
        InputError: none, or one twice.
    """
    values = list(given) if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not values or len(set(values)) != len(values):
        raise InputError(message(name, "one or several, none twice", given))
    return values


def _check_budgets(
    arch: Architecture, part: str, d: int, choices: list[_Choice], scope: str, multiple_of: int
) -> None:
    """Refuse what cannot be shared out before anything is measured."""
    step = common_step(2 if part == "QK" and arch.position == "rotary" else 1, multiple_of)
    heads = arch.n_heads * (arch.n_layers if scope == "model" else 1)
    for choice in choices:
        total_rank(choice.budget, heads * d, min(step, d))


def _ranks(
    cut: Cut, costs: Tensor | None, choice: _Choice, part: str, scope: str
) -> Int[Tensor, "layer head"]:
    """Share the rank out: over all heads at once, or in each layer."""
    gains = cut.gains
    if part == "OV":
        # What a late layer adds is longer, since the stream is, and does no more for that.
        whole = gains.sum(dim=(-2, -1), keepdim=True)
        gains = torch.where(whole > 0, gains / whole, 0.0)
    if choice.allocation == "loss" and costs is not None:
        gains = -costs.diff(dim=-1)
    groups = gains.flatten(0, 1)[None] if scope == "model" else gains
    found = [_group_ranks(group, cut.step, choice) for group in groups]
    return torch.cat(found).reshape(gains.shape[:-1])


def _group_ranks(
    gains: Float[Tensor, "head d"], step: int, choice: _Choice
) -> Int[Tensor, " head"]:
    n_heads, d = gains.shape
    total = total_rank(choice.budget, n_heads * d, step)
    rounded = common_step(step, choice.multiple_of)
    if choice.allocation == "uniform":
        return even_ranks(n_heads, d, total, rounded)
    ranks = greedy_ranks(gains, total, step)
    return ranks if rounded == step else rounded_ranks(ranks.double(), d, total, rounded)


def _name(part: str, choice: _Choice, scope: str) -> str:
    shown = f"{choice.budget:.2f}"
    name = (
        f"{part}, {choice.allocation}, {shown if float(shown) == choice.budget else choice.budget}"
    )
    if scope == "layer":
        name += ", each layer alike"
    return name if choice.multiple_of == 1 else f"{name}, multiples of {choice.multiple_of}"


def _cache(
    model: Any, arch: Architecture, part: str, ranks: Int[Tensor, "setting layer head"]
) -> tuple[Int[Tensor, " setting"], Int[Tensor, " setting"], str]:
    """Return bytes a token as the model shares keys and values, as cut heads would, and a note."""
    facts = adapters.attention_facts(model, arch)
    if facts.kv_rank is not None:
        latent = torch.full((len(ranks),), arch.n_layers * (facts.kv_rank + facts.d_shared_key))
        note = "Keys and values come from one latent, which is cached whatever heads make of it."
        return BYTES * latent, BYTES * latent, note
    kept = arch.n_layers * arch.n_kv_heads * (arch.d_head + arch.d_head_v)
    cut = arch.n_kv_heads * arch.n_layers * (arch.d_head_v if part == "OV" else arch.d_head)
    shared = torch.full((len(ranks),), kept)
    own = shared - cut + ranks.sum(dim=(1, 2))
    what = "values" if part == "OV" else "keys"
    note = f"Each head would cache {what} of its own rank."
    if arch.n_kv_heads < arch.n_heads:
        note = (
            f"{arch.n_heads // arch.n_kv_heads} query heads share each key-value head; cut to "
            f"coordinates of their own they cannot share cached {what}, so they keep whole shared "
            "ones (kv_bytes) or each its own (kv_bytes_own)."
        )
    if not arch.causal:
        note += " A model that looks both ways keeps no cache: the bytes are of one token's alone."
    return BYTES * shared, BYTES * own, note
