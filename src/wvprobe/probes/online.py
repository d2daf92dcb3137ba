"""Online description length: how many bits labels cost someone who learns the probe on the way.

Voita & Titov 2020, Information-Theoretic Probing with Minimum Description Length, section 2.2: the
first t₁ labels are sent at log₂ K bits, then each block by a probe trained on all blocks before it.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe._progress import progress
from wvprobe.probes import closed_forms, logistic
from wvprobe.probes.features import Block, Frame, blocks_of, frame_of, outputs
from wvprobe.probes.fitting import TOGETHER, Settings, all_rows
from wvprobe.probes.sources import Sites

FRACTIONS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
_NUMBERS = 2**24


class Order(NamedTuple):
    """In what order labels are sent.

    Attributes:
        items: [item] their numbers.
        ends: how many items each block ends after, ascending; the last one is all of them.
    """

    items: Int[Tensor, " item"]
    ends: tuple[int, ...]


def order_of(groups: Int[Tensor, " item"], n_groups: int, seed: int) -> Order:
    """Draw an order of groups; blocks end with the first whole group at or after a fraction."""
    generator = torch.Generator().manual_seed(seed)
    place = torch.randperm(n_groups, generator=generator).to(groups.device)
    items = torch.argsort(place[groups], stable=True)
    sizes = torch.bincount(place[groups], minlength=n_groups).cumsum(dim=0).cpu()
    wanted = torch.tensor(FRACTIONS, dtype=torch.float64) * len(groups)
    at = torch.searchsorted(sizes.double(), wanted - 1e-9).clamp(max=n_groups - 1)
    return Order(items, tuple(sorted(set(sizes[at].tolist()))))


def code_lengths(
    x: Sites,
    y: Int[Tensor, " item"],
    n_classes: int,
    order: Order,
    settings: Settings,
) -> Iterator[Float[Tensor, "site item"]]:
    """Yield the bits that each item's label costs at each site, some sites at a time.

    Their sum over items is L.

    A probe trained on t labels predicts with (t p + ½) / (t + K/2): for a probe that knows nothing
    this is Krichevsky & Trofimov's estimator (1981), and a class not yet seen has a finite length.
    Where there are several penalties, a block is sent with that which would have sent the blocks
    before it in fewest bits (Dawid 1984); the first with the strongest.
    """
    n, width = len(y), x.width
    parts: list[Tensor] = []
    numbers = n * (3 * n_classes * len(settings.grid) + 2 * (width + 1)) + 4 * width**2
    size = settings.block or max(1, _NUMBERS // numbers)
    labels = y[order.items]
    with progress(x.count, "Online code", settings.show) as advance:
        for sites, whole in blocks_of(x, size, settings.dtype):
            block = whole.at(order.items)
            lengths = torch.empty(len(block.z), n, device=y.device)
            lengths[:, order.items[: order.ends[0]]] = torch.log2(torch.tensor(float(n_classes)))
            spent = block.z.new_zeros(len(block.z), len(settings.grid), dtype=torch.float64)
            for start, end in zip(order.ends, order.ends[1:], strict=False):
                bits = _block(block, labels, n_classes, start, end, settings)
                best = spent.argmin(dim=1) if start > order.ends[0] else _strongest(spent, settings)
                rows = torch.arange(len(best), device=best.device)
                lengths[:, order.items[start:end]] = bits[rows, best].to(lengths)
                spent += bits.sum(dim=-1)
            parts.append(lengths)
            advance(sites.stop - sites.start)
            if sites.stop == x.count or sum(map(len, parts)) * n >= TOGETHER:
                yield torch.cat(parts)
                parts = []


def _strongest(spent: Tensor, settings: Settings) -> Tensor:
    """Return the place of the strongest penalty: C is an inverse one."""
    last = 0 if settings.method == "logistic" else len(settings.grid) - 1
    return torch.full((len(spent),), last, device=spent.device)


def _block(
    block: Block, y: Tensor, n_classes: int, start: int, end: int, settings: Settings
) -> Float[Tensor, "site penalty item"]:
    """Return the bits of labels start to end, sent by probes trained on those before."""
    past = Block(block.z[..., :start].contiguous(), block.shift, block.unit)
    mask = past.z.new_ones(1, start)
    frame = frame_of(past, mask, settings.standardise)
    count = len(settings.grid)
    if settings.method == "logistic":
        spread = Frame(frame.mean.expand(-1, count, -1), frame.scale.expand(-1, count, -1))
        fit = logistic.fit(
            past,
            mask.expand(count, -1),
            spread,
            y[:start],
            n_classes,
            past.z.new_tensor(settings.grid).expand(len(past.z), -1),
            tolerance=settings.tolerance,
            most_iterations=settings.most_iterations,
        )
        linear = spread.outward(fit.theta)
    else:
        (found,) = closed_forms.moments(past, mask, frame, y[:start], n_classes)
        fits = [
            closed_forms.lda(found, torch.full((len(past.z),), p, device=y.device).double())
            for p in settings.grid
        ]
        linear = frame.outward(torch.stack(fits, dim=1).to(past.z))
    raw = all_rows(outputs(block.at(slice(start, end)), linear))
    return _bits(raw.double(), y[start:end], start)


def _bits(raw: Tensor, y: Tensor, seen: int) -> Tensor:
    """Return −log2 (t p + ½) / (t + K/2) of each item's own class."""
    own = y.expand(*raw.shape[:-2], 1, -1)
    p = raw.softmax(dim=-2).gather(-2, own)[..., 0, :]
    return -torch.log2((seen * p + 0.5) / (seen + raw.shape[-2] / 2.0))
