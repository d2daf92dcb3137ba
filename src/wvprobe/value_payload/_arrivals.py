"""One head's values without the label, and what of the label arrives: item by item."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._progress import progress as progress_bar
from wvprobe._types import HeadId
from wvprobe.activations import read_sites
from wvprobe.value_payload import _closed
from wvprobe.value_payload._erasers import leace, random_erasers
from wvprobe.value_payload._items import Items
from wvprobe.value_payload._scorers import ClassScorer

PLACES = ("v", "z", "attn_added")
_BYTES = 1_200_000_000


class Found(NamedTuple):
    """What one head's erasure leaves right, item by item."""

    head: HeadId
    before: Float[Tensor, "place item"]
    erased: Float[Tensor, "place item"]
    control: Float[Tensor, "place item"]
    draws: Float[Tensor, "draw place"]
    rank: int
    energy: float
    control_energy: float
    stretch: float
    attention: float
    changes: Float[Tensor, "kind item d_head_v"] | None


class Layer(NamedTuple):
    """One layer as it is: v at the target, the rest at the destination.

    Attributes:
        v: values at the target.
        z: what each query head puts together at the destination.
        attn_out: what W_O makes of all of it, b_O included.
        pattern: attention from the destination to the target.
        w_o: W_O.
        norm: a norm behind it, or None.
    """

    v: Float[Tensor, "item kv_head d_head_v"]
    z: Float[Tensor, "item head d_head_v"]
    attn_out: Float[Tensor, "item d_model"]
    pattern: Float[Tensor, "item head"]
    w_o: Float[Tensor, "head d_head_v d_model"]
    norm: adapters.Norm | None

    def group(self, head: int) -> slice:
        """Return the query heads that read a key-value head."""
        size = self.z.shape[1] // self.v.shape[1]
        return slice(head * size, (head + 1) * size)

    def arriving(
        self, head: int, change: Float[Tensor, "item d_head_v"]
    ) -> Float[Tensor, "item group d_head_v"]:
        """Return by how much z of the group changes: pattern · Δv, which is exact."""
        return self.pattern[:, self.group(head), None] * change[:, None]

    def added(
        self, head: int, arriving: Float[Tensor, "item group d_head_v"]
    ) -> Float[Tensor, "item d_model"]:
        """Return attn_added once z of the group has changed; a norm behind W_O acts anew."""
        weights = self.w_o[self.group(head)].to(arriving)
        moved = self.attn_out + torch.einsum("ihd,hde->ie", arriving, weights)
        return moved if self.norm is None else self.norm(moved)


class Erasures:
    """All heads of one model, a block of layers at a time."""

    def __init__(
        self,
        model: Any,
        arch: Any,
        items: Items,
        scorer: ClassScorer,
        destination: str,
        draws: int,
        seed: int,
    ) -> None:
        self.model, self.arch, self.items, self.scorer = model, arch, items, scorer
        self.draws, self.seed = draws, seed
        self.source = [span.tokens[-1] for span in items.spans]
        self.destination: Any = self.source if destination == "target" else "last"
        self.onehot = torch.nn.functional.one_hot(scorer.y, len(scorer.classes)).double()
        self.tokens: Sequence[tuple[int, ...]] = ()
        self.places: list[int] = self.source

    def all(self, heads: Sequence[HeadId], kept: set[HeadId], progress: bool) -> Iterator[Found]:
        """Yield what each head's erasure does, layer by layer."""
        layers = sorted({head.layer for head in heads})
        with progress_bar(len(heads), "heads erased", progress) as advance:
            for block in self._blocks(layers):
                for layer, values in self.read(block):
                    for head in heads:
                        if head.layer == layer:
                            yield self._head(head, values, head in kept)
                            advance(1)

    def read(self, layers: list[int]) -> Iterator[tuple[int, Layer]]:
        """Yield the layers as they are."""
        given = {"layers": layers, "prepend_bos": self.items.prepend_bos, "share": True}
        texts = self.items.texts
        sites = ("z", "attn_out", "pattern")
        if self.destination == "last":
            source = read_sites(self.model, texts, "v", positions=self.source, **given)
            there = read_sites(self.model, texts, sites, positions="last", **given)
        else:
            there = read_sites(self.model, texts, ("v", *sites), positions=self.source, **given)
            source = there
        self.tokens = tuple(there.tokens)
        self.places = [places[0] for places in there.positions or ()]
        at = torch.tensor(self.source)[:, None, None].expand(-1, self.arch.n_heads, 1)
        for row, layer in enumerate(layers):
            pattern = there["pattern"][:, row, :, 0].gather(2, at)[..., 0]
            read = (source["v"][:, row], there["z"][:, row], there["attn_out"][:, row], pattern)
            w_o = adapters.output_weight(self.model, self.arch, layer).detach().cpu()
            norm = _on_cpu(adapters.post_attention_norm(self.model, self.arch, layer))
            yield layer, Layer(*map(_wide, read), w_o=w_o, norm=norm)

    def _head(self, head: HeadId, layer: Layer, keep: bool) -> Found:
        number = head.head
        v, z = layer.v[:, number], layer.z[:, layer.group(number)]
        nothing = torch.zeros_like(z)
        plain = (v[:, None], z, layer.added(number, nothing)[:, None])
        before = [self.scorer.right(x)[0].mean(dim=0) for x in plain]
        right = torch.zeros(1 + self.draws, len(PLACES), len(v))
        changes = v.new_zeros(1 + self.draws, *v.shape)
        ranks, energies, stretches = [], [], []
        plan = self.scorer.plan
        for fold in range(plan.n_folds):
            train, held = plan.fold != fold, plan.fold == fold
            eraser = leace(v[train], self.onehot[train])
            mine = eraser.change(v)
            energy = float(mine[train].square().sum(dim=1).mean())
            rank = eraser.right.shape[-1]
            seed = self.seed * 1_000_003 + 7_919 * (head.layer * 1_009 + head.head) + fold
            controls = random_erasers(v[train], max(rank, 1), energy, self.draws, seed)
            every = torch.cat([mine[None], controls.eraser.change(v)]).to(v)
            changes[:, held] = every[:, held]
            total = float((v[train].double() - eraser.mean).square().sum(dim=1).mean())
            other = float(every[1:, train].double().square().sum(dim=-1).mean())
            energies.append((energy / max(total, 1e-300), other / max(total, 1e-300)))
            ranks.append(rank)
            stretches.append(float(controls.stretch.mean()))
            for kind, change in enumerate(every):
                arriving = layer.arriving(number, change)
                added = layer.added(number, arriving)
                places = ((v + change)[:, None], z + arriving, added[:, None])
                for place, x in enumerate(places):
                    right[kind, place, held] = self._held(x, train, held).mean(dim=0)
        shares = torch.tensor(energies).mean(dim=0)
        return Found(
            head,
            torch.stack(before),
            right[0],
            right[1:].mean(dim=0),
            (right[1:].double() @ self.scorer.weights) / self.scorer.weights.sum(),
            max(ranks),
            float(shares[0]),
            float(shares[1]),
            sum(stretches) / len(stretches),
            float(layer.pattern[:, layer.group(number)].mean()),
            changes if keep else None,
        )

    def _held(self, x: Tensor, train: Tensor, held: Tensor) -> Float[Tensor, "site held"]:
        """Return which held-out items a probe of this fold gets right."""
        given = _closed.shifted(x)
        found = _closed.training_of(given, self.scorer.y, len(self.scorer.classes), train)
        said = _closed.predictions(given.x[:, held], _closed.fit(found, self.scorer.probe))
        return (said == self.scorer.y[held]).float()

    def _blocks(self, layers: list[int]) -> Iterator[list[int]]:
        a = self.arch
        longest = 2 * max(len(span.text) for span in self.items.spans) // 3 + 2
        numbers = (
            a.n_kv_heads * a.d_head_v + a.n_heads * (a.d_head_v + longest) + a.d_model
        ) * len(self.items)
        size = max(1, _BYTES // (4 * numbers))
        for start in range(0, len(layers), size):
            yield layers[start : start + size]


def _on_cpu(norm: adapters.Norm | None) -> adapters.Norm | None:
    if norm is None:
        return None
    bias = None if norm.bias is None else norm.bias.detach().cpu()
    return replace(norm, gain=norm.gain.detach().cpu(), bias=bias)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
