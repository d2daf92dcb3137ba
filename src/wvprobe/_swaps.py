"""Mixtures of texts: one head's pattern or values from another text, and forwards with it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._single_tokens import token_id
from wvprobe._targets import check_finite, log_probs, token_logits
from wvprobe._types import HeadId
from wvprobe._writes import head_values
from wvprobe.activations import read_sites
from wvprobe.adapters import Architecture, Raw
from wvprobe.words import Encoding

# Tokens, and logits, of one batch of changed texts.
_BATCH_TOKENS, _BATCH_LOGITS = 1_536, 16_777_216
PARTS = ("pattern", "value", "head")


@dataclass(frozen=True)
class Attention:
    """What the heads of some layers do in one text.

    Attributes:
        pattern: [layer, head, query, key], as the model has it.
        values: [layer, head, key, r], float64, a key-value head once for each of its query heads.
        z: [layer, head, query, r], float64, pattern times values.
    """

    pattern: Float[Tensor, "layer head query key"]
    values: Float[Tensor, "layer head key r"]
    z: Float[Tensor, "layer head query r"]

    def with_part(self, part: str, donor: "Attention", row: int) -> Float[Tensor, "head query r"]:
        """Return z of a layer with a part of it taken from another text of the same length."""
        if part == "pattern":
            return donor.pattern[row].double() @ self.values[row]
        if part == "value":
            return self.pattern[row].double() @ donor.values[row]
        return donor.z[row]

    @classmethod
    def mean(cls, several: Sequence["Attention"]) -> "Attention":
        """Return the mean pattern, the mean values and the mean z, each at each position."""
        names = ("pattern", "values", "z")
        return cls(*(torch.stack([getattr(a, n) for a in several]).mean(dim=0) for n in names))

    def zero(self) -> "Attention":
        """Return attention that moves nothing."""
        return Attention(*(torch.zeros_like(t) for t in (self.pattern, self.values, self.z)))


def read_attention(
    model: Any, arch: Architecture, texts: Sequence[str], layers: Sequence[int]
) -> list[Attention]:
    """Read patterns and values of texts of one length.

    Raises:
        InputError: they hold NaN or infinity.
    """
    seen = read_sites(model, list(texts), ["pattern", "v"], layers=layers)
    check_finite("values", seen["v"])
    found = []
    for item in range(len(texts)):
        size = len(seen.tokens[item])
        pattern = check_finite("patterns", seen["pattern"][item, :, :, :size, :size])
        values = [head_values(arch, seen["v"][item, :size, row]) for row in range(len(layers))]
        z = [rows.double() @ v for rows, v in zip(pattern, values, strict=True)]
        found.append(Attention(pattern, torch.stack(values), torch.stack(z)))
    return found


class Watched(NamedTuple):
    """A reader whose score is watched.

    Attributes:
        head: the head.
        at: [into] its query and key in each text that runs.
        counted: [into, key] the keys that the query sees and that are no sinks.
    """

    head: HeadId
    at: tuple[tuple[int, int], ...]
    counted: Bool[Tensor, "into key"]


@dataclass(frozen=True)
class Swap:
    """What is changed: [into] own attention, [into][draw] donors, and the heads of each unit."""

    part: str
    layers: tuple[int, ...]
    units: list[range]
    own: list[Attention]
    donors: list[list[Attention]]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Texts that run, draws, layers, units."""
        return len(self.own), len(self.donors[0]), len(self.layers), len(self.units)

    def z(self, into: int, draw: int, row: int) -> Float[Tensor, "head query r"]:
        """Return the changed z of all heads of a layer."""
        return self.own[into].with_part(self.part, self.donors[into][draw], row)

    def change(self, into: int, draw: int, row: int) -> Float[Tensor, "head query r"]:
        """Return by how much z changes."""
        return self.z(into, draw, row) - self.own[into].z[row]

    def written(
        self, weight: Float[Tensor, "head r d_model"], change: Float[Tensor, "head n r"]
    ) -> Float[Tensor, "unit n d_model"]:
        """Return what the change of every unit does to W_O's output."""
        return torch.stack(
            [
                torch.einsum(
                    "hnr,hrd->nd", change[unit.start : unit.stop], weight[unit.start : unit.stop]
                )
                for unit in self.units
            ]
        )


class _Row(NamedTuple):
    """One text with one unit of one layer changed."""

    into: int
    draw: int
    layer: int
    unit: int


class _Outcome(NamedTuple):
    """What a batch of texts gives: at their destinations, and at the reader's query."""

    stream: Float[Tensor, "row d_model"]
    logits: Float[Tensor, "row d_vocab"] | None
    log_probs: Float[Tensor, "row d_vocab"] | None
    scores: Float[Tensor, "row key"] | None
    attention: Float[Tensor, "row key"] | None

    def row(self, at: int) -> "_Outcome":
        return _Outcome(self.stream[at], *(None if t is None else t[at] for t in self[1:]))


class Runs:
    """Forwards of the texts, as they are and with one head changed in every row."""

    def __init__(
        self,
        model: Any,
        arch: Architecture,
        encodings: Sequence[Encoding],
        at: tuple[int, ...],
        token: str | int | None,
        watched: Watched | None,
    ) -> None:
        self.model, self.arch, self.at, self.watched = model, arch, at, watched
        self.ids = torch.tensor([e.ids for e in encodings])
        self.head = adapters.unembedding(model, arch)
        self.clean = self.run(list(range(len(encodings))), {})
        self.token_ids: list[int] = []
        if self.clean.logits is not None:
            own = self.clean.logits.argmax(dim=-1).tolist()
            size = self.clean.logits.shape[-1]
            given = None if token is None else token_id(model.tokenizer, token, size)
            self.token_ids = own if given is None else [given] * len(own)

    def measure(self, swap: Swap) -> dict[str, Tensor]:
        """Run every row and compare it with its text as it is."""
        names = ["stream"]
        if self.clean.logits is not None:
            names += ["kl", "logit", "log_prob"]
        if self.watched is not None:
            names += ["reader_score", "reader_gauge_fixed", "reader_attention"]
        found = {name: torch.zeros(swap.shape, dtype=torch.float64) for name in names}
        places = torch.cartesian_prod(*map(torch.arange, swap.shape)).reshape(-1, 4).tolist()
        rows = sorted((_Row(*place) for place in places), key=lambda row: (row.layer, row.into))
        per_batch = max(1, _BATCH_TOKENS // self.ids.shape[1])
        per_batch = max(1, min(per_batch, _BATCH_LOGITS // self.arch.d_vocab))
        for start in range(0, len(rows), per_batch):
            batch = rows[start : start + per_batch]
            changes = {
                ("z", swap.layers[layer]): _changer(swap, batch, layer)
                for layer in {row.layer for row in batch}
            }
            outcome = self.run([row.into for row in batch], changes)
            for number, row in enumerate(batch):
                late = (
                    self.watched is not None and swap.layers[row.layer] >= self.watched.head.layer
                )
                for name, value in self._compared(outcome.row(number), row.into, late).items():
                    found[name][row] = value
        return found

    def run(self, into: list[int], changes: dict[Raw, Any]) -> _Outcome:
        """Run a batch of texts, given by their numbers, with some z changed."""
        model, arch, device = self.model, self.arch, self.model.cfg.device
        tokens = self.ids[into].to(device)
        mask = torch.ones_like(tokens)
        rows, at = torch.arange(len(into)), torch.tensor(self.at)[into]
        last: Raw = ("resid_post", arch.n_layers - 1)
        recipe, pattern, queries = None, None, at
        wanted = [last]
        if self.watched is not None:
            pattern = ("pattern", self.watched.head.layer)
            queries = torch.tensor([query for query, _ in self.watched.at])[into]
            recipe = adapters.recipe(model, arch, "scores", self.watched.head.layer)
            wanted = [*dict.fromkeys([*recipe.inputs, pattern, last])]
        got: dict[Raw, Tensor] = {}

        def receive(site: str, layer: int, value: Tensor) -> None:
            got[site, layer] = adapters.shaped(arch, site, value, *tokens.shape)

        def pick(value: Tensor) -> Tensor:
            return value[rows, queries][:, None]

        logits = scores = attention = None
        with adapters.changing(model, arch, changes):
            with adapters.reading(model, arch, wanted, receive):
                adapters.run_backbone(model, tokens, mask)
            if isinstance(self.head, str) and not adapters.why_no_head(model):
                # A masked model's head is no linear map, so it runs as it is.
                logits = adapters.logits(model, tokens, mask)[rows, at].cpu().double()
        stream = got[last][rows, at]
        normed = None
        if not isinstance(self.head, str):
            logits = token_logits(self.head, stream).cpu().double()
            normed = log_probs(self.head, logits)
        elif logits is not None:
            normed = logits.log_softmax(dim=-1)
        if recipe is not None and pattern is not None and self.watched is not None:
            head = self.watched.head.head
            scores = recipe.compute(got, pick)[:, head, 0].cpu().double()
            attention = got[pattern][rows, head, queries].cpu().double()
        return _Outcome(stream.cpu().double(), logits, normed, scores, attention)

    def _compared(self, new: _Outcome, into: int, late: bool) -> dict[str, Tensor | float]:
        """Return the measures of one row; a reader that comes too late does not change."""
        old = self.clean.row(into)
        found: dict[str, Tensor | float] = {
            "stream": (new.stream - old.stream).norm() / old.stream.norm()
        }
        before, after = old.log_probs, new.log_probs
        if before is not None and after is not None:
            token = self.token_ids[into]
            found["kl"] = (before.exp() * (before - after)).sum().clamp(min=0)
            found["log_prob"] = after[token] - before[token]
        if old.logits is not None and new.logits is not None:
            token = self.token_ids[into]
            found["logit"] = new.logits[token] - old.logits[token]
        if self.watched is not None:
            key, counted = self.watched.at[into][1], self.watched.counted[into]
            for name, old_row, new_row in (
                ("reader_score", old.scores, new.scores),
                ("reader_attention", old.attention, new.attention),
            ):
                if old_row is None or new_row is None:
                    continue
                change = torch.zeros_like(old_row) if late else new_row - old_row
                found[name] = change[key]
                if name == "reader_score":
                    found["reader_gauge_fixed"] = change[key] - change[counted].mean()
        return found


def _changer(swap: Swap, batch: Sequence[_Row], layer: int) -> Any:
    """Return what puts each row's changed z in the place of its unit's."""

    def change(z: Tensor) -> Tensor:
        z = z.clone()
        made: dict[tuple[int, int], Tensor] = {}
        for number, row in enumerate(batch):
            if row.layer != layer:
                continue
            source = row.into, row.draw
            if source not in made:
                made[source] = swap.z(*source, layer).transpose(0, 1).to(z)
            unit = swap.units[row.unit]
            z[number, :, unit.start : unit.stop] = made[source][:, unit.start : unit.stop]
        return z

    return change
