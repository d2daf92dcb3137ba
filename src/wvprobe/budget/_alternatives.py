"""What else a model's heads could be, at which cost, and what would break."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from wvprobe._types import Provenance, Result
from wvprobe._validate import instance, length, message
from wvprobe.budget._arithmetic import BYTES, HeadBudget
from wvprobe.errors import InputError

# Head widths that FlashAttention-2 is compiled for (Dao 2023, https://arxiv.org/abs/2307.08691;
# static_switch.h of its repository); others are padded to the next, and none is wider.
_COMPILED = (32, 64, 96, 128, 192, 256)
_MOST = 2**20  # heads, whose widths are listed one by one


@dataclass(frozen=True)
class Alternative:
    """One way to have heads.

    Attributes:
        kind: ``as given``, ``even split``, ``full width``, ``uneven split``, ``GQA``, ``MQA``,
            ``MHA`` or ``MLA``.
        widths: by query head, the width of its queries and keys.
        n_kv_heads: key-value heads of a layer.
        d_head_v: by query head, the width of its values.
        layer_qkv: weights of one layer up to queries, keys and values: W_Q, W_K and W_V, or the
            maps into and out of latents.
        layer_parameters: parameters of one layer's attention, W_O, biases and gains included.
        parameters: of all layers' attention.
        kv_bytes: bytes that one token leaves in the cache; None where nothing can be kept.
        flops: FLOPs of one token in all layers' attention.
        breaks: what would have to change elsewhere, a sentence each.

    Examples:
        >>> budget = wvprobe.HeadBudget(d_model=12, n_heads=4, n_layers=2)
        >>> given = wvprobe.alternatives(budget).options[0]
        >>> given.n_heads, given.widths
        (4, (3, 3, 3, 3))
    """

    kind: str
    widths: tuple[int, ...]
    n_kv_heads: int
    d_head_v: tuple[int, ...]
    layer_qkv: int
    layer_parameters: int
    parameters: int
    kv_bytes: int | None
    flops: int
    breaks: tuple[str, ...]

    @property
    def n_heads(self) -> int:
        """Query heads."""
        return len(self.widths)


@dataclass(frozen=True)
class Alternatives(Result):
    """What else a model's heads could be. The first one is the model as it is.

    Attributes:
        budget: the model.
        options: the alternatives.
        context: how many tokens a token looks at, for the FLOPs.
        dtype: of the cache.

    Examples:
        >>> budget = wvprobe.HeadBudget(d_model=12, n_heads=4, n_layers=2)
        >>> others = wvprobe.alternatives(budget)
        >>> others.to_frame().kind.iloc[0], len(others.options) == len(others.to_frame())
        ('as given', True)
    """

    budget: HeadBudget
    options: tuple[Alternative, ...]
    context: int
    dtype: str

    def __iter__(self) -> Iterator[Alternative]:
        """Iterate over the alternatives."""
        return iter(self.options)

    def __len__(self) -> int:
        """Return the number of alternatives."""
        return len(self.options)

    def to_frame(self) -> Any:
        """Return one row an alternative.

        Columns: kind n_heads n_kv_heads d_head (narrowest) d_head_max d_head_v concat_width
        layer_qkv layer_parameters parameters parameters_ratio kv_bytes kv_ratio flops flops_ratio
        breaks. Ratios are to the model as it is. `concat_width` is the rows of W_O.
        """
        import pandas

        own, rows = self.options[0], []
        kept = own.kv_bytes
        for option in self.options:
            rows.append(
                {
                    "kind": option.kind,
                    "n_heads": option.n_heads,
                    "n_kv_heads": option.n_kv_heads,
                    "d_head": min(option.widths),
                    "d_head_max": max(option.widths),
                    "d_head_v": max(option.d_head_v),
                    "concat_width": sum(option.d_head_v),
                    "layer_qkv": option.layer_qkv,
                    "layer_parameters": option.layer_parameters,
                    "parameters": option.parameters,
                    "parameters_ratio": option.parameters / own.parameters,
                    "kv_bytes": option.kv_bytes,
                    "kv_ratio": None if kept is None else (option.kv_bytes or 0) / kept,
                    "flops": option.flops,
                    "flops_ratio": option.flops / own.flops,
                    "breaks": "; ".join(option.breaks),
                }
            )
        return pandas.DataFrame(rows)


def alternatives(
    budget: HeadBudget, *, context: int = 2048, dtype: str = "bfloat16"
) -> Alternatives:
    """Return what else a model's heads could be, each with its cost and what it breaks.

    * ``even split``: d_model / h dimensions each, for every divisor h of d_model.
    * ``full width``: as many heads as now, each as wide as the stream.
    * ``uneven split``: as many heads and dimensions as now, in two widths (half the mean, and one
      and a half times it), and growing from head to head.
    * ``GQA``, ``MQA``, ``MHA``: key-value heads shared by groups, by all, by none; for every
      divisor of n_heads but the model's own.
    * ``MLA``: a latent of 4 · d_head and a shared rotated key of d_head / 2, the proportions of
      DeepSeek-AI 2024 (https://arxiv.org/abs/2405.04434, section 2.1.4).

    An uneven split, and a full-width head, has keys and values of its own for every head.

    Args:
        budget: the model's heads.
        context: how many tokens a token looks at, for the FLOPs.
        dtype: of the cache.

    Raises:
        InputError: a context below 1, an unknown dtype, or more than 2²⁰ heads or dimensions.

    Examples:
        >>> budget = wvprobe.HeadBudget(d_model=12, n_heads=4, n_layers=2)
        >>> "MQA" in set(wvprobe.alternatives(budget).to_frame().kind)
        True
    """
    instance("budget", budget, HeadBudget, "HeadBudget.from_model(model) makes one.")
    length("context", context)
    for name in ("d_model", "n_heads"):
        if getattr(budget, name) > _MOST:
            hint = "The budget itself, HeadBudget.to_frame(), has no bound."
            raise InputError(message(name, f"at most {_MOST}", getattr(budget, name), hint))
    rest = {"kv_rank": None, "q_rank": None, "d_shared_key": 0, "biases": _plain(budget)}
    plain = _resized(budget, **rest)
    options = [_even("as given", budget, context, dtype)]
    for heads in _divisors(budget.d_model):
        split = _resized(plain, n_heads=heads, d_head=budget.d_model // heads)
        options.append(_even("even split", split, context, dtype))
    full = _resized(plain, d_head=budget.d_model)
    options.append(_even("full width", full, context, dtype))
    for widths in _uneven(budget.n_heads, budget.width):
        options.append(_odd(plain, widths, context, dtype))
    for kv_heads in _divisors(budget.n_heads):
        shared = replace(budget, n_kv_heads=kv_heads, **rest)
        if shared != budget:
            options.append(_even(shared.kind, shared, context, dtype))
    if budget.kv_rank is None:
        options.append(_even("MLA", _latent(plain), context, dtype))
    provenance = Provenance.of(budget.name or "numbers", "", context=context, dtype=dtype)
    return Alternatives(provenance, budget, tuple(options), context, dtype)


def _resized(budget: HeadBudget, **changes: Any) -> HeadBudget:
    """Return a budget of other sizes, with keys and values for every head unless told otherwise."""
    return replace(budget, **{"n_kv_heads": None, "d_head_v": None} | changes)


def _plain(budget: HeadBudget) -> tuple[str, ...]:
    """Return the biases that matrices without a latent can have."""
    return () if budget.kv_rank is not None else tuple(budget.biases)


def _divisors(number: int) -> list[int]:
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def _uneven(heads: int, width: int) -> list[tuple[int, ...]]:
    """Return uneven widths of as many heads that sum to heads · width."""
    if heads == 1 or width == 1:
        return []
    found = []
    if heads % 2 == 0:
        narrow = width // 2
        found.append((narrow,) * (heads // 2) + (2 * width - narrow,) * (heads // 2))
    total, steps = heads * (width - 1), heads * (heads + 1)
    cuts = [total * h * (h + 1) // steps for h in range(heads + 1)]
    growing = tuple(1 + end - start for start, end in zip(cuts[:-1], cuts[1:], strict=True))
    return [*found, growing]


def _latent(plain: HeadBudget) -> HeadBudget:
    """Return latent attention in DeepSeek-V2's proportions, queries from the stream."""
    width, shared = plain.width, max(1, plain.width // 2)
    rank = {"kv_rank": 4 * width, "d_shared_key": shared}
    biases = tuple(set(plain.biases) & {"Q", "O"})
    changed = {"d_head": width + shared, "d_head_v": width, "biases": biases, "qk_norm": False}
    return _resized(plain, **rank, **changed)


def _even(kind: str, budget: HeadBudget, context: int, dtype: str) -> Alternative:
    flops = budget.flops(context)
    return Alternative(
        kind=kind,
        widths=(budget.width,) * budget.n_heads,
        n_kv_heads=budget.kv_heads,
        d_head_v=(budget.width_v,) * budget.n_heads,
        layer_qkv=sum(r * c for name, (r, c) in budget.matrices.items() if name != "W_O"),
        layer_parameters=sum(budget.layer_parameters.values()),
        parameters=budget.n_attention,
        kv_bytes=budget.kv_cache_bytes(dtype) if budget.causal else None,
        flops=sum(flops[part] for part in ("projections", "scores", "values")),
        breaks=() if kind == "as given" else _breaks(budget),
    )


def _odd(plain: HeadBudget, widths: tuple[int, ...], context: int, dtype: str) -> Alternative:
    """Cost heads of these widths: one matrix holds them all, so that only their sum matters."""
    total = sum(widths)
    whole = _resized(plain, n_heads=1, d_head=total)
    option = _even("uneven split", whole, context, dtype)
    norms = 2 * total * plain.qk_norm  # a norm of queries now has gains of its own for each head
    spared = 2 * whole.width * plain.qk_norm
    padding = len(widths) * max(widths) / total - 1
    wasted = f"no tensor holds all heads: pad to the widest ({padding:+.0%} of scores and values)"
    breaks = (f"{wasted} or run widths one after another", *_concat(plain, total))
    breaks += ("heads of different widths cannot share keys and values",)
    return replace(
        option,
        widths=widths,
        n_kv_heads=len(widths),
        d_head_v=widths,
        layer_parameters=option.layer_parameters + norms - spared,
        parameters=option.parameters + plain.n_layers * (norms - spared),
        breaks=breaks + _kernels(widths),
    )


def _breaks(budget: HeadBudget) -> tuple[str, ...]:
    found = _concat(budget, budget.concat_width) + _kernels((budget.width,))
    if budget.width != budget.width_v:
        found += (
            f"keys of {budget.width} and values of {budget.width_v} dimensions: kernels for one "
            "size pad the narrower",
        )
    if budget.kv_rank is not None:
        found += ("keys are expanded from the latent, or scores taken against it (its own kernel)",)
    return found


def _concat(budget: HeadBudget, width: int) -> tuple[str, ...]:
    if width == budget.d_model:
        return ()
    return (f"Concat(heads) is {width:,} wide, d_model {budget.d_model:,}: W_O is not square",)


def _kernels(widths: Sequence[int]) -> tuple[str, ...]:
    """Say what fused kernels and rotation make of head widths."""
    found: tuple[str, ...] = ()
    if max(widths) > _COMPILED[-1]:
        found += (f"d_head {max(widths):,} is beyond FlashAttention-2's {_COMPILED[-1]}",)
    odd = sorted({width for width in widths if width <= _COMPILED[-1]} - set(_COMPILED))
    if odd:
        pairs = [f"{w} to {next(size for size in _COMPILED if size >= w)}" for w in odd[:3]]
        more = ", …" * (len(odd) > 3)
        found += (f"FlashAttention-2 pads d_head {', '.join(pairs)}{more}",)
    if any(width % 2 for width in widths):
        found += ("rotary positions turn pairs of dimensions: odd widths leave one over",)
    return found


__all__ = ["BYTES", "Alternative", "Alternatives", "alternatives"]
