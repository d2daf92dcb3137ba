"""What attention costs by head width on this machine, kernel by kernel, beside what it must cost.

The same d_model and the same tokens are split into heads of different widths: the multiplications
stay the same, what differs is how they suit the machine.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import _kernels
from wvprobe._kernels import DIRECTIONS, KERNELS
from wvprobe._types import Provenance, Result
from wvprobe._validate import finite, length, listed, message, one_of
from wvprobe._validate import seed as checked_seed
from wvprobe.errors import DeviceError, InputError

LAYOUTS = ("even", "padded", "looped", "grouped")
_SECONDS, _LEAST_ROUNDS, _MOST_ROUNDS = 8.0, 11, 101
_DRAWS = 2000


@dataclass(frozen=True)
class Timed:
    """What was timed.

    Attributes:
        device: where it ran.
        kernel: ``flash``, ``efficient``, ``cudnn``, ``math`` or ``eager``.
        ran: torch's own names of the operations that did the work.
        layout: ``even``; or, of uneven widths, ``padded`` to the widest, ``looped`` over heads, or
            ``grouped``: one call for the heads of each width.
        widths: by head, its dimensions.
        direction: ``forward`` or ``backward`` (alone, without the forward before it).
        floor: seconds below which no kernel can be, from FLOPs and bytes.
        bound: whether FLOPs or bytes set the floor.

    Examples:
        >>> given = {"uneven": (), "kernels": ["eager"], "directions": ["forward"]}
        >>> found = wvprobe.time_attention(32, 8, d_heads=(8, 16), seconds=0.0, **given)
        >>> found.timed[0].kernel, found.timed[0].direction
        ('eager', 'forward')
    """

    device: str
    kernel: str
    ran: str
    layout: str
    widths: tuple[int, ...]
    direction: str
    floor: float
    bound: str


@dataclass(frozen=True)
class Spread:
    """How much the head width matters for one kernel and direction.

    Attributes:
        ratio: time at the slowest d_head over that at the fastest, on rounds that did not pick
            them.
        low: lower end of its 95 % interval.
        high: upper end.
        slowest: the slowest d_head.
        fastest: the fastest d_head.
        noise: the largest change of a configuration's own median between the two halves of the
            rounds, as a share.

    Examples:
        >>> given = {"uneven": (), "kernels": ["eager"], "directions": ["forward"]}
        >>> found = wvprobe.time_attention(32, 8, d_heads=(8, 16), seconds=0.0, **given)
        >>> spread = found.spread()
        >>> {spread.slowest, spread.fastest} <= {8, 16}
        True
    """

    ratio: float
    low: float
    high: float
    slowest: int
    fastest: int
    noise: float


@dataclass(frozen=True)
class AttentionTimes(Result):
    """Seconds of attention by kernel, head width and direction, round by round.

    Attributes:
        timed: what was timed.
        seconds: one time a configuration and round.
        refused: kernel and d_head that torch has no implementation for here, with its words.
        d_model: width that is split into heads.
        n_tokens: length of the sequence.
        peak: by device, FLOP/s of a large matrix product, and bytes/s of a large copy.

    Examples:
        >>> given = {"uneven": (), "kernels": ["eager"], "directions": ["forward"]}
        >>> found = wvprobe.time_attention(32, 8, d_heads=(8, 16), seconds=0.0, **given)
        >>> found.fastest_kernel()
        'eager'
    """

    AXES: ClassVar[Mapping[str, tuple[str, ...]]] = {"seconds": ("configuration", "round")}
    timed: tuple[Timed, ...]
    seconds: Float[Tensor, "configuration round"]
    refused: tuple[tuple[str, int, str], ...]
    d_model: int
    n_tokens: int
    peak: Mapping[str, tuple[float, float]]

    def to_frame(self) -> Any:
        """Return one row a configuration.

        Columns: device kernel ran layout direction n_heads d_head d_head_max seconds low high floor
        bound over_floor n. `seconds` is the median over rounds, low and high its quartiles;
        `d_head` is the narrowest width; `over_floor` is seconds / floor; `n` counts rounds.
        """
        import pandas

        ends = torch.quantile(self.seconds, torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64), 1)
        rows = []
        for what, (median, low, high) in zip(self.timed, ends.T.tolist(), strict=True):
            rows.append(
                {
                    "device": what.device,
                    "kernel": what.kernel,
                    "ran": what.ran,
                    "layout": what.layout,
                    "direction": what.direction,
                    "n_heads": len(what.widths),
                    "d_head": min(what.widths),
                    "d_head_max": max(what.widths),
                    "seconds": median,
                    "low": low,
                    "high": high,
                    "floor": what.floor,
                    "bound": what.bound,
                    "over_floor": median / what.floor,
                    "n": self.seconds.shape[1],
                }
            )
        return pandas.DataFrame(rows)

    def fastest_kernel(self, direction: str = "forward", device: str | None = None) -> str:
        """Return the kernel whose even splits take the least time, summed over d_head."""
        one_of("direction", direction, DIRECTIONS)
        sums: dict[str, float] = {}
        medians = self.seconds.median(dim=1).values.tolist()
        for what, median in zip(self.timed, medians, strict=True):
            if self._is(what, direction, device):
                sums[what.kernel] = sums.get(what.kernel, 0.0) + median
        if not sums:
            timed = sorted({(what.device, what.direction) for what in self.timed})
            got = f"{direction} on {device or 'any device'}"
            raise InputError(message("direction", f"one that was timed: {timed}", got))
        return min(sums, key=lambda kernel: sums[kernel])

    def spread(
        self,
        kernel: str | None = None,
        direction: str = "forward",
        *,
        device: str | None = None,
        widths: Sequence[int] | None = None,
        seed: int = 0,
    ) -> Spread:
        """Return how much slower the slowest even split is than the fastest.

        Which d_head is slowest and which fastest is read off the even rounds; their ratio is that
        of medians over the odd rounds, so that no luck of the choice is in it. Interval: percentile
        bootstrap over rounds (2,000 resamples). A round times every configuration once.

        Args:
            kernel: the kernel; None for the fastest.
            direction: forward or backward.
            device: None for the first one timed.
            widths: the d_head to compare; None for all.
            seed: seed of the resampling.

        Raises:
            InputError: fewer than two widths were timed so.
        """
        seed = checked_seed(seed)
        if widths is not None:
            widths = listed("widths", widths, "widths of heads")
        kernel = self.fastest_kernel(direction, device) if kernel is None else kernel
        at = [
            place
            for place, what in enumerate(self.timed)
            if self._is(what, direction, device)
            and what.kernel == kernel
            and (widths is None or what.widths[0] in widths)
        ]
        if len(at) < 2:
            raise InputError(message("widths", f"two that were timed with {kernel}", widths))
        chosen, held = self.seconds[at][:, 0::2], self.seconds[at][:, 1::2]
        picked, again = chosen.median(dim=1).values, held.median(dim=1).values
        slow, fast = int(picked.argmax()), int(picked.argmin())
        generator = torch.Generator().manual_seed(seed)
        rounds = torch.randint(held.shape[1], (_DRAWS, held.shape[1]), generator=generator)
        ratios = held[slow][rounds].median(dim=1).values / held[fast][rounds].median(dim=1).values
        low, high = torch.quantile(ratios, torch.tensor([0.025, 0.975], dtype=ratios.dtype))
        return Spread(
            ratio=float(again[slow] / again[fast]),
            low=float(low),
            high=float(high),
            slowest=self.timed[at[slow]].widths[0],
            fastest=self.timed[at[fast]].widths[0],
            noise=float((again / picked - 1).abs().max()),
        )

    def _is(self, what: Timed, direction: str, device: str | None) -> bool:
        wanted = self.timed[0].device if device is None else device
        return (what.layout, what.direction, what.device) == ("even", direction, wanted)


def time_attention(
    d_model: int = 512,
    n_tokens: int = 256,
    *,
    d_heads: Sequence[int] = (8, 16, 32, 64, 128, 256),
    uneven: Sequence[int] | None = None,
    kernels: Sequence[str] | None = None,
    directions: Sequence[str] = DIRECTIONS,
    causal: bool = True,
    device: str | None = None,
    dtype: str | None = None,
    seconds: float | int = _SECONDS,
    seed: int = 0,
) -> AttentionTimes:
    """Time attention at one d_model and number of tokens over head widths, with every kernel.

    Each kernel of torch's scaled_dot_product_attention is forced with
    ``torch.nn.attention.sdpa_kernel``; what it then runs is read off torch's dispatcher and named.
    ``eager`` is softmax(QKᵀ) V written out. After a warm-up of every configuration, rounds time
    each of them once, in an order shuffled anew, until the time is up: a drift of the machine then
    falls on all alike.

    The floor is the larger of FLOPs / peak and bytes / bandwidth, both measured on the machine at
    the start with the same threads. FLOPs: 4 per dimension, head, query and visible key (8 for the
    backward, which needs four such products); bytes: queries, keys, values and output once (and
    their gradients). Exponentials are not in it, and narrow heads have more of them.

    Args:
        d_model: width that is split into heads.
        n_tokens: length of the one sequence.
        d_heads: widths of even splits, each a divisor of d_model.
        uneven: widths of an uneven split; None for heads of which a quarter are four times and a
            quarter twice as wide as the rest, 64 wide on average where d_model is a multiple of
            512 (left out where 16 does not divide it); () for none.
        kernels: some of flash, efficient, cudnn, math, eager; None for all.
        directions: forward, backward, or both.
        causal: whether a query sees only keys up to itself.
        device: such as "cpu" or "cuda"; None for the CPU and, where there is one, a GPU.
        dtype: float32, bfloat16 or float16; None for float32 on a CPU, bfloat16 on a GPU.
        seconds: how long to go on, beside the warm-up. At least 11 rounds are run, at most 101.
        seed: seed of the inputs and of the order.

    Returns:
        Times, with what ran. Threads are torch's own: ``torch.set_num_threads``.

    Raises:
        InputError: widths that do not add up to d_model, or unknown kernels or directions.
        DeviceError: the device is not there, or no kernel runs on it.

    Examples:
        >>> given = {"uneven": (), "kernels": ["eager"], "directions": ["forward"]}
        >>> found = wvprobe.time_attention(32, 8, d_heads=(8, 16), seconds=0.0, **given)
        >>> sorted(set(found.to_frame().kernel))
        ['eager']
    """
    seed = checked_seed(seed)
    d_model, n_tokens = length("d_model", d_model), length("n_tokens", n_tokens)
    seconds = finite("seconds", seconds, least=0.0)
    widths = _splits(d_model, d_heads, uneven)
    chosen = _names("kernels", KERNELS if kernels is None else kernels, KERNELS)
    directions = _names("directions", directions, DIRECTIONS)
    devices = _devices(device)
    clocks, refused, peaks = [], [], {}
    for name in devices:
        kind = _dtype(dtype, name)
        peaks[name] = _kernels.peak(torch.device(name), kind)
        inputs = _kernels.Inputs(n_tokens, causal, torch.device(name), kind, seed)
        made, without = _clocks(widths, chosen, directions, inputs, peaks[name])
        if not made:
            raise DeviceError(f"no kernel of {', '.join(chosen)} runs on {name} in {kind}.")
        clocks += made
        refused += without
    times = _rounds([clock.once for clock in clocks], seconds, seed)
    return AttentionTimes(
        provenance=Provenance.of(
            ", ".join(_kernels.named(name) for name in devices),
            "",
            seed=seed,
            d_model=d_model,
            n_tokens=n_tokens,
            causal=causal,
            dtypes={name: str(_dtype(dtype, name)) for name in devices},
            threads=torch.get_num_threads(),
            seconds=seconds,
        ),
        timed=tuple(clock.timed for clock in clocks),
        seconds=times,
        refused=tuple(refused),
        d_model=d_model,
        n_tokens=n_tokens,
        peak=peaks,
    )


@dataclass(frozen=True)
class _Clock:
    """A configuration, and what times it once."""

    timed: Timed
    once: Callable[[], float]


def _names(name: str, given: Sequence[str], known: tuple[str, ...]) -> list[str]:
    """Return at least one of the names that are known."""
    what = f"some of {', '.join(known)}"
    found = [one_of(name, one, known) for one in listed(name, given, what)]
    if not found:
        raise InputError(message(name, what, found))
    return found


def _splits(
    d_model: int, d_heads: Sequence[int], uneven: Sequence[int] | None
) -> list[tuple[str, tuple[int, ...]]]:
    """Return layouts and widths of all splits."""
    found = []
    for width in listed("d_heads", d_heads, "a list of widths"):
        if length("d_heads", width) > d_model or d_model % width:
            raise InputError(message("d_heads", f"divisors of d_model = {d_model}", width))
        found.append(("even", (width,) * (d_model // width)))
    if not found:
        raise InputError(message("d_heads", "at least one width", list(d_heads)))
    odd = _uneven(d_model)
    if uneven is not None:
        odd = tuple(listed("uneven", uneven, "a list of widths"))
    if odd and sum(length("uneven", width) for width in odd) != d_model:
        raise InputError(message("uneven", f"widths that sum to d_model = {d_model}", list(odd)))
    return found + [(layout, odd) for layout in LAYOUTS[1:] if odd]


def _uneven(d_model: int) -> tuple[int, ...]:
    """Return widths shaped 4 4 2 2 1 1 1 1, eight of them for every 512 dimensions."""
    shape = (4, 4, 2, 2, 1, 1, 1, 1)
    if d_model % sum(shape):
        return ()
    groups = d_model // 512 if d_model % 512 == 0 else 1
    unit = d_model // (groups * sum(shape))
    return tuple(unit * part for part in shape for _ in range(groups))


def _devices(device: str | None) -> list[str]:
    there = ["cpu"] + ["cuda"] * torch.cuda.is_available()
    if device is None:
        return there
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError) as error:
        raise InputError(message("device", "such as 'cpu' or 'cuda'", device)) from error
    if kind not in there:
        raise DeviceError(f"there is no device {device!r} here; there is {', '.join(there)}.")
    return [str(device)]


def _dtype(dtype: str | None, device: str) -> torch.dtype:
    if dtype is None:
        return torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    return getattr(torch, one_of("dtype", dtype, ("float32", "bfloat16", "float16")))


def _clocks(
    splits: Sequence[tuple[str, tuple[int, ...]]],
    kernels: Sequence[str],
    directions: Sequence[str],
    inputs: _kernels.Inputs,
    peak: tuple[float, float],
) -> tuple[list[_Clock], list[tuple[str, int, str]]]:
    """Return what times each configuration, warmed up, and what torch has no kernel for."""
    clocks: list[_Clock] = []
    refused: dict[tuple[str, int], str] = {}
    for kernel in kernels:
        for layout, widths in splits:
            groups = _kernels.groups(layout, widths)
            for direction in directions:
                run = _kernels.Run(kernel, groups, direction, inputs)
                reason = run.refusal()
                if reason:
                    refused[kernel, max(widths)] = reason
                    break
                floor, bound = _floor(widths, direction, inputs, peak)
                where = str(inputs.device)
                timed = Timed(where, kernel, run.ran, layout, widths, direction, floor, bound)
                clocks.append(_Clock(timed, run.once))
    return clocks, [(kernel, width, reason) for (kernel, width), reason in refused.items()]


def _floor(
    widths: Sequence[int], direction: str, inputs: _kernels.Inputs, peak: tuple[float, float]
) -> tuple[float, str]:
    """Return the seconds below which attention of these heads cannot be, and why."""
    n = inputs.n_tokens
    pairs = n * (n + 1) // 2 if inputs.causal else n * n
    back = direction == "backward"
    flops = (8 if back else 4) * sum(widths) * pairs
    # Forward: q, k, v in, the output out. Backward: those four and the output's gradient in,
    # three gradients out.
    moved = (8 if back else 4) * n * sum(widths) * inputs.dtype.itemsize
    by = {"FLOPs": flops / peak[0], "bytes": moved / peak[1]}
    bound = max(by, key=lambda name: by[name])
    return by[bound], bound


def _rounds(
    once: Sequence[Callable[[], float]], seconds: float, seed: int
) -> Float[Tensor, "configuration round"]:
    """Time everything once a round, in a new order each, until the time is up."""
    generator = torch.Generator().manual_seed(seed)
    begun, rounds = time.perf_counter(), []
    while len(rounds) < _MOST_ROUNDS:
        took = torch.zeros(len(once), dtype=torch.float64)
        for place in torch.randperm(len(once), generator=generator).tolist():
            took[place] = once[place]()
        rounds.append(took)
        spent = time.perf_counter() - begun
        if len(rounds) >= _LEAST_ROUNDS and spent * (1 + 1 / len(rounds)) > seconds:
            break
    return torch.stack(rounds, dim=1)
