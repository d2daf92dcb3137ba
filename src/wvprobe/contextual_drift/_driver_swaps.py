"""One head's output at a word taken from another sentence of it, and the model run on."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._progress import progress
from wvprobe._types import HeadId
from wvprobe.activations import batches_of, read_sites
from wvprobe.contextual_drift._driver_pairs import Occurrences, Pair
from wvprobe.contextual_drift._vectors import Reader
from wvprobe.words import Encoding

_SHOWN = 2000  # sentences from which on progress is shown


class Moved(NamedTuple):
    """How far exchanges move the targets along the pairs' directions.

    Attributes:
        different: [pair, head] mean over both directions of how far a target moves towards the
            other sense when the head's output is the other sentence's.
        same: [pair, head] the same when it is another sentence's of the target's own sense.
    """

    different: Float[Tensor, "pair head"]
    same: Float[Tensor, "pair head"]


class _Row(NamedTuple):
    """A sentence that runs, whose head output it gets, and where the outcome belongs."""

    item: int
    donor: int
    pair: int
    kind: int
    sign: float


def exchange_heads(
    reader: Reader,
    found: Occurrences,
    pairs: Sequence[Pair],
    u: Float[Tensor, "pair d_model"],
    heads: Sequence[HeadId],
    layer: int,
) -> Moved:
    """Exchange z of one head at a time at the targets alone, and read the stream there."""
    rows = []
    for number, p in enumerate(pairs):
        for kind, (for_a, for_b) in enumerate(((p.b, p.a), (p.same_a, p.same_b))):
            rows.append(_Row(p.a, for_a, number, kind, 0.5))
            rows.append(_Row(p.b, for_b, number, kind, -0.5))
    run = _Runs(reader, found, rows, sorted({head.layer for head in heads}), layer)
    moved = torch.zeros(2, len(pairs), len(heads), dtype=torch.float64)
    sizes = [len(run.encodings[row.item].ids) for row in rows]
    batches = batches_of(sizes, "auto", reader.model, run.arch)
    total = len(rows) * len(heads)
    with progress(total, "sentences with an exchanged head", total >= _SHOWN) as advance:
        for batch in batches:
            some = [rows[number] for number in batch]
            for place, head in enumerate(heads):
                change = run.stream(some, head) - found.x[[row.item for row in some]]
                along = (change * u[[row.pair for row in some]]).sum(dim=-1)
                for row, value in zip(some, along.tolist(), strict=True):
                    moved[row.kind, row.pair, place] += row.sign * value
                advance(len(some))
    return Moved(moved[0], moved[1])


class _Runs:
    """Forwards of sentences, each with one head changed at its target."""

    def __init__(
        self,
        reader: Reader,
        found: Occurrences,
        rows: Sequence[_Row],
        layers: Sequence[int],
        layer: int,
    ) -> None:
        self.model, self.arch = reader.model, adapters.architecture(reader.model)
        self.found, self.layers = found, list(layers)
        numbers = sorted({number for row in rows for number in (row.item, row.donor)})
        self.encodings: dict[int, Encoding] = {
            n: reader.encode(found.items[n].sentence) for n in numbers
        }
        (self.site,) = adapters.recipe(self.model, self.arch, "stream", layer).inputs
        flat = [(n, p) for n in numbers for p in found.at[n]]
        texts = [found.items[n].sentence for n, _ in flat]
        seen = read_sites(
            self.model,
            texts,
            "z",
            layers=self.layers,
            positions=[p for _, p in flat],
            prepend_bos=reader.prepend_bos,
            share=True,
        )
        owners = [n for n, _ in flat]
        self.z = {n: seen["z"][[k for k, o in enumerate(owners) if o == n]] for n in numbers}

    def stream(self, rows: Sequence[_Row], head: HeadId) -> Float[Tensor, "row d_model"]:
        """Return the targets' streams, the head's output there being the donors'."""
        texts = [self.encodings[row.item].ids for row in rows]
        tokens = torch.zeros(len(rows), max(map(len, texts)), dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for number, ids in enumerate(texts):
            tokens[number, : len(ids)] = torch.tensor(ids)
            mask[number, : len(ids)] = 1
        at = [list(self.found.at[row.item]) for row in rows]
        place = self.layers.index(head.layer)

        def change(z: Tensor) -> Tensor:
            z = z.clone()
            for number, row in enumerate(rows):
                z[number, at[number], head.head] = self.z[row.donor][:, place, head.head].to(z)
            return z

        got: list[Tensor] = []

        def receive(site: str, _layer: int, value: Tensor) -> None:
            got.append(adapters.shaped(self.arch, site, value, *tokens.shape))

        changes: dict[Any, Any] = {("z", head.layer): change}
        device = self.model.cfg.device
        with (
            adapters.changing(self.model, self.arch, changes),
            adapters.reading(self.model, self.arch, [self.site], receive),
        ):
            adapters.run_backbone(self.model, tokens.to(device), mask.to(device))
        x = got[0].cpu().double()
        return torch.stack([x[number, where].mean(dim=0) for number, where in enumerate(at)])
