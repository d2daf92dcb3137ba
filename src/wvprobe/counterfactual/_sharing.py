"""Heads that share keys and values: what fewer of them in the cache cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._effects import Setting, measure_effects, texts_or_prose
from wvprobe._validate import length, message, one_of
from wvprobe._validate import seed as checked_seed
from wvprobe.adapters import Architecture, Raw
from wvprobe.counterfactual._changes import ROUNDING, ChangeResult
from wvprobe.counterfactual._key_values import key_value_moments
from wvprobe.counterfactual._plans import ResizePlan, check_plan, planes_of
from wvprobe.counterfactual._resizing import BYTES, several
from wvprobe.counterfactual._shared_maps import (
    LayerMoments,
    balanced_groups,
    free_map,
    key_map,
    latent_map,
    relative_errors,
    similarity,
)
from wvprobe.counterfactual._streams import calibration_texts
from wvprobe.errors import InputError, UnsupportedError

METHODS = ("mean", "lstsq", "svd", "mla")
GROUPINGS = ("order", "similarity")
# What of the weights each method changes.
REFITTED = {
    "mean": "W_K and W_V are means of aligned heads; W_Q and W_O are turned to match",
    "lstsq": "W_K and W_V alone; W_Q and W_O stay as they are",
    "svd": "W_K and W_V are one head's; W_Q and W_O are refitted by linear maps",
    "mla": "keys and values come back from one latent of the layer, keys turned after that",
    "none": "nothing",
}


class _Choice(NamedTuple):
    """One setting: how many key-value heads, shared how, by which heads."""

    n_kv_heads: int
    method: str
    grouping: str


@dataclass(frozen=True)
class ShareResult(ChangeResult):
    """What becomes of a model whose heads share keys and values.

    Attributes:
        n_kv_heads: of each setting, how many key-value heads a layer has (for ``mla``, whose width
            the latent has).
        methods: of each setting; ``none`` for the yardstick.
        groupings: of each setting: ``order`` or ``similarity``; ``none`` where all heads share, or
            none does.
        groups: [setting, layer, kv_head] which group each of the model's key-value heads is in.
        after: name of the resize that is in place before and after, or "".
        refitted: of each setting, what of the weights is another.
        bytes_per_token: [setting] bytes that a token leaves in the cache in bfloat16.
        key_errors: [setting, layer] share of the energy of scores that is lost on calibration
            text, averaged over rotations; 0 for the yardstick.
        value_errors: [setting, layer] share of the energy of what values add that is lost there.
        note: what the numbers do not show for this model.

    Examples:
        >>> texts = ["The river bank is closed.", "A power bank fell into the river."]
        >>> found = wvprobe.share_kv_heads(model, texts, n_kv_heads=[1, 2], calibration=texts)
        >>> bool(found.kl[found.settings.index("2 → 2, svd")].abs().max() < 1e-5)  # as before
        True
    """

    n_kv_heads: tuple[int, ...]
    methods: tuple[str, ...]
    groupings: tuple[str, ...]
    groups: Int[Tensor, "setting layer kv_head"]
    after: str
    refitted: tuple[str, ...]
    bytes_per_token: Int[Tensor, " setting"]
    key_errors: Float[Tensor, "setting layer"]
    value_errors: Float[Tensor, "setting layer"]
    note: str

    AXES: ClassVar = {
        **ChangeResult.AXES,
        "groups": ("setting", "layer", "kv_head"),
        "bytes_per_token": ("setting",),
        "key_errors": ("setting", "layer"),
        "value_errors": ("setting", "layer"),
    }

    def _columns(self) -> dict[str, list[Any]]:
        whole = int(self.bytes_per_token[-1])
        return {
            "n_kv_heads": list(self.n_kv_heads),
            "method": list(self.methods),
            "grouping": list(self.groupings),
            "after": [self.after] * len(self.settings),
            "bytes_per_token": self.bytes_per_token.tolist(),
            "bytes_saved": (whole - self.bytes_per_token).tolist(),
            "key_error": self.key_errors.mean(dim=1).tolist(),
            "value_error": self.value_errors.mean(dim=1).tolist(),
            "refitted": list(self.refitted),
        }


def share_kv_heads(
    model: Any,
    texts: str | Sequence[str] | None = None,
    *,
    n_kv_heads: int | Sequence[int],
    method: str | Sequence[str] = "svd",
    grouping: str | Sequence[str] = "order",
    after: ResizePlan | None = None,
    calibration: str | Sequence[str] | None = None,
    seed: int = 0,
    progress: bool = False,
) -> ShareResult:
    """Let the key-value heads of every layer share keys and values, and measure what it does.

    Nothing is trained: each head's keys (before rotation) and values become linear maps of what
    its group shares, which W_Q and W_O can absorb, so that the numbers are those of a model with
    that many key-value heads (GQA, Ainslie et al. 2023, https://arxiv.org/abs/2305.13245; one:
    MQA, Shazeer 2019). Maps of keys commute with rotation: on each plane they turn and stretch, on
    dimensions that do not turn they are free. The mean of values passes, as it can be part of b_O.
    Under a norm of keys the maps stand behind it.

    * ``mean``: heads turned to each other, then averaged.
    * ``lstsq``: the one key and value that serve all heads of a group best as they are.
    * ``svd``: the best of all maps of one head's width; W_Q and W_O are refitted.
    * ``mla``: all keys and values of a layer through one latent of as many numbers as
      `n_kv_heads` heads cache (DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434, without its
      separate rotary key). In function exact, keys being turned after they come back; a cache of
      latents would have to expand them for that at every step.

    Args:
        model: a TransformerBridge.
        texts: what the changed model is judged on; None for the bundled held-out prose.
        n_kv_heads: how many key-value heads a layer keeps; divisors of the model's; one or several.
        method: one or several of the four.
        grouping: one or several of ``order`` (neighbours) and ``similarity`` (heads that are
            alike, whatever turning their coordinates; see docs/methods.md).
        after: ranks that heads are cut to beforehand, ``ResizeResult.plan(setting)``: the changes
            are then those that sharing makes to the cut model.
        calibration: what moments are measured on; None for the bundled calibration prose.
        seed: of the intervals over texts.
        progress: whether to show bars.

    Returns:
        Settings named "3 → 1, svd", and the yardstick ``bf16 rounding``.

    Raises:
        InputError: a number that does not divide the model's; unknown names; `calibration` of
            fewer tokens than d_head.
        ShapeError: `after` is no plan for this model.
        UnsupportedError: latent attention (MLA), whose cache has no heads that could share; a
            rotation that is not modelled exactly.

    Examples:
        >>> texts = ["The river bank is closed.", "A power bank fell into the river."]
        >>> found = wvprobe.share_kv_heads(model, texts, n_kv_heads=1, calibration=texts)
        >>> found.settings
        ('2 → 1, svd', 'bf16 rounding')
    """
    seed = checked_seed(seed)
    arch = adapters.architecture(model)
    if arch.mla:
        raise UnsupportedError(
            f"{model.cfg.model_name} caches a latent, not keys and values by head, so that there "
            "is nothing left to share. Use resize_heads, or wvprobe.alternatives for its bytes."
        )
    choices = _choices(arch, n_kv_heads, method, grouping)
    plan = None if after is None else check_plan(after, arch)
    judged = texts_or_prose(texts)
    fitted = calibration_texts(model, arch, calibration)
    planes = planes_of(model, arch)
    heads = plan.maps if plan is not None and plan.part == "OV" else None
    with adapters.changing(model, arch, {} if plan is None else plan.changes):
        moments = key_value_moments(model, arch, fitted, planes, heads, progress)
        alike = torch.stack([similarity(one, planes) for one in moments])
        made = [_Sharing(arch, moments, alike, planes, choice) for choice in choices]
        settings: dict[str, Setting] = {
            _name(arch, one.choice): partial(one.applied, model) for one in made
        }
        settings[ROUNDING] = partial(adapters.rounded, model, arch, torch.bfloat16)
        found = measure_effects(model, judged, settings, progress=progress)
    alone = torch.arange(arch.n_kv_heads).expand(arch.n_layers, -1)
    nothing = torch.zeros(arch.n_layers, dtype=torch.float64)
    a_head = BYTES * arch.n_layers * (arch.d_head + arch.d_head_v)
    counts = (*(choice.n_kv_heads for choice in choices), arch.n_kv_heads)
    methods = (*(choice.method for choice in choices), "none")
    return ShareResult(
        provenance=adapters.provenance(
            model,
            seed=seed,
            texts=len(judged),
            calibration=len(fitted),
            n_kv_heads=[choice.n_kv_heads for choice in choices],
            methods=[choice.method for choice in choices],
            groupings=[choice.grouping for choice in choices],
            after=None if plan is None else plan.name,
        ),
        **found._asdict(),
        settings=tuple(settings),
        layers=(*(tuple(range(len(one.maps))) for one in made), ()),
        n_kv_heads=counts,
        methods=methods,
        groupings=(*(choice.grouping for choice in choices), "none"),
        groups=torch.stack([*(one.groups for one in made), alone]),
        after="" if plan is None else plan.name,
        refitted=tuple(REFITTED[name] for name in methods),
        bytes_per_token=a_head * torch.tensor(counts),
        key_errors=torch.stack([*(one.errors[:, 0] for one in made), nothing]),
        value_errors=torch.stack([*(one.errors[:, 1] for one in made), nothing]),
        note=_note(arch),
    )


class _Sharing:
    """One setting's maps of every layer's keys and values."""

    def __init__(
        self,
        arch: Architecture,
        moments: Sequence[LayerMoments],
        alike: Float[Tensor, "layer kv_head kv_head"],
        planes: Int[Tensor, "plane 2"] | None,
        choice: _Choice,
    ) -> None:
        self.arch, self.choice = arch, choice
        size, n_groups = arch.n_kv_heads, choice.n_kv_heads
        found, maps, errors = [], [], []
        for layer, one in enumerate(moments):
            groups = _groups(alike[layer], choice)
            number = torch.zeros(size, dtype=torch.long)
            for index, group in enumerate(groups):
                number[group] = index
            found.append(number)
            if n_groups == size:  # each head has its own: nothing is changed, not even by rounding
                errors.append((0.0, 0.0))
                continue
            if choice.method == "mla":
                both = latent_map(one, n_groups * (arch.d_head + arch.d_head_v))
            else:
                both = torch.block_diag(
                    key_map(one, groups, choice.method, planes),
                    free_map(one.values(), one.outputs, groups, choice.method),
                )
            errors.append(relative_errors(both, one, planes))
            maps.append(_LayerMap(both, one, arch, linear_keys=choice.method != "mla"))
        self.groups, self.maps = torch.stack(found), maps
        self.errors = torch.tensor(errors, dtype=torch.float64)

    def applied(self, model: Any) -> Any:
        """Open a context in which the model shares."""
        changes: dict[Raw, Callable[[Tensor], Tensor]] = {}
        for layer, made in enumerate(self.maps):
            changes |= made.changes(model, layer)
        return adapters.changing(model, self.arch, changes)


class _LayerMap:
    """A layer's map of keys and values, applied as they pass."""

    def __init__(
        self, both: Tensor, moments: LayerMoments, arch: Architecture, *, linear_keys: bool
    ) -> None:
        self.arch, n = arch, moments.n_keys
        self.both, self.n, self.mean = both, n, moments.mean.clone()
        if linear_keys:
            self.mean[:n] = 0.0
        self.crossed = bool(both[n:, :n].any() or both[:n, n:].any())

    def changes(self, model: Any, layer: int) -> dict[Raw, Callable[[Tensor], Tensor]]:
        if not self.crossed:
            return {("k", layer): self._keys_alone, ("v", layer): self._values_alone}
        return _Latent(self, model, layer).changes()

    def _keys_alone(self, k: Tensor) -> Tensor:
        return self.mapped(k.flatten(2), slice(0, self.n), slice(0, self.n)).reshape(k.shape)

    def _values_alone(self, v: Tensor) -> Tensor:
        part = slice(self.n, None)
        return self.mapped(v.flatten(2), part, part).reshape(v.shape)

    def mapped(self, x: Tensor, read: slice, write: slice) -> Tensor:
        """Return m + (x − m) A for some coordinates of keys and values, from some."""
        mean = self.mean.to(x)
        return mean[write] + (x - mean[read]) @ self.both[read, write].to(x)


class _Latent:
    """Keys and values through one latent, both made where attention reads the stream.

    Neither of their own hook points has the other yet; which comes first differs by family.
    """

    def __init__(self, made: _LayerMap, model: Any, layer: int) -> None:
        self.made, self.layer = made, layer
        self.weights = adapters.layer_weights(model, layer)
        norms = adapters.qk_norms(model, made.arch, layer)
        self.key_norm = None if norms is None else norms[1]
        self.seen: dict[str, Tensor] = {}

    def changes(self) -> dict[Raw, Callable[[Tensor], Tensor]]:
        return {
            ("attn_in", self.layer): self._read,
            ("k", self.layer): lambda k: self.seen.pop("k").reshape(k.shape),
            ("v", self.layer): lambda v: self.seen.pop("v").reshape(v.shape),
        }

    def _read(self, x: Tensor) -> Tensor:
        keys = self._projected(x, self.weights.W_K, self.weights.b_K)
        keys = keys if self.key_norm is None else self.key_norm(keys)
        values = self._projected(x, self.weights.W_V, self.weights.b_V)
        both = torch.cat((keys.flatten(2), values.flatten(2)), dim=-1)
        after = self.made.mapped(both, slice(None), slice(None))
        self.seen = {"k": after[..., : self.made.n], "v": after[..., self.made.n :]}
        return x

    @staticmethod
    def _projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = torch.einsum("bpd,hde->bphe", x, weight)
        return out if bias is None else out + bias


def _choices(arch: Architecture, n_kv_heads: Any, method: Any, grouping: Any) -> list[_Choice]:
    counts = [length("n_kv_heads", count) for count in several("n_kv_heads", n_kv_heads)]
    for count in counts:
        if arch.n_kv_heads % count:
            hint = f"The model has {arch.n_kv_heads} in each layer."
            raise InputError(message("n_kv_heads", "a divisor of the model's", count, hint))
    methods = [one_of("method", name, METHODS) for name in several("method", method)]
    groupings = [one_of("grouping", name, GROUPINGS) for name in several("grouping", grouping)]
    found = [
        # Where all heads share, or none does, there is nothing to group.
        _Choice(n, way, "none" if n in (1, arch.n_kv_heads) or way == "mla" else by)
        for n in counts
        for way in methods
        for by in groupings
    ]
    return list(dict.fromkeys(found))


def _groups(alike: Float[Tensor, "kv_head kv_head"], choice: _Choice) -> list[list[int]]:
    size, n = len(alike), choice.n_kv_heads
    if choice.method == "mla":
        return [list(range(size))]
    if choice.grouping == "similarity":
        return balanced_groups(alike, n)
    return [list(range(at, at + size // n)) for at in range(0, size, size // n)]


def _name(arch: Architecture, choice: _Choice) -> str:
    name = f"{arch.n_kv_heads} → {choice.n_kv_heads}, {choice.method}"
    return f"{name}, by similarity" if choice.grouping == "similarity" else name


def _note(arch: Architecture) -> str:
    notes = []
    if not arch.causal:
        notes.append("It looks both ways and keeps no cache: bytes are of one token's numbers.")
    if arch.qk_norm:
        notes.append("Maps of keys stand behind the norm of keys, which W_K cannot absorb.")
    return " ".join(notes)
