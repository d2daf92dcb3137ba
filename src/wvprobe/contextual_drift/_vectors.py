"""Vectors of marked words, sentence by sentence, with what must not be counted left out.

A forward gives all positions of some sentences at every stream. What is needed of them is taken at
once, so that memory holds one chunk of sentences beside what is kept of each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._sinks import sinks_among, special_tokens
from wvprobe._validate import instance, message, one_of
from wvprobe.activations import StoredActivations, checked_pool, read_sites
from wvprobe.datasets import SenseItem
from wvprobe.errors import InputError
from wvprobe.words import Encoding, encode, word_at

POSITIONS = ("target", "last_token")
# Streams of all positions that are held at once.
_CHUNK_BYTES = 96 << 20


class Chunk(NamedTuple):
    """Some sentences at every stream.

    Attributes:
        rows: which of the sentences asked for.
        x: [sentence, pos, layer, d_model], float32, 0 beyond a sentence's end.
        own: [sentence, pos] tokens of the text itself that are no sinks at any stream.
    """

    rows: list[int]
    x: Float[Tensor, "sentence pos layer d_model"]
    own: Bool[Tensor, "sentence pos"]


class Stored(NamedTuple):
    """Streams of texts on disk, and the place of each text there."""

    activations: StoredActivations
    places: dict[str, int]


@dataclass(frozen=True)
class Reader:
    """How vectors are read: of which model, at which token, from one or several tokens."""

    model: Any
    position: str
    pool: str
    prepend_bos: bool | None
    store: Stored | None = None

    @classmethod
    def of(cls, model: Any, position: str, pool: str | None, prepend_bos: bool | None) -> "Reader":
        """Check the arguments; pool None is the last token of a decoder, the mean of an encoder."""
        one_of("position", position, POSITIONS)
        pool = checked_pool(adapters.architecture(model), pool)
        return cls(model, position, pool, prepend_bos)

    def from_store(self, store: StoredActivations, texts: Sequence[str]) -> "Reader":
        """Return a reader that takes the streams of texts from a store.

        Raises:
            InputError: the store lacks a text, a stream, or was captured with another model.
        """
        instance("store", store, StoredActivations, "wvprobe.activations.open_store opens one.")
        store.require(self.model, ["stream"], self.prepend_bos)
        every = list(dict.fromkeys(texts))
        places = store.places(every, None).tolist()
        return replace(self, store=Stored(store, dict(zip(every, places, strict=True))))

    @property
    def streams(self) -> int:
        """How many streams the model has."""
        return adapters.architecture(self.model).n_layers + 1

    def encode(self, text: str) -> Encoding:
        """Return the text's tokens."""
        return encode(self.model, text, prepend_bos=self.prepend_bos)

    def target(self, encoding: Encoding, item: SenseItem) -> tuple[int, ...]:
        """Return the positions of an item's word that are read."""
        tokens = word_at(encoding, item.start, item.end).tokens
        ends = {"last": tokens[-1:], "first": tokens[:1], "mean": tokens}
        return ends[self.pool]

    def chunks(self, encodings: Sequence[Encoding]) -> Iterator[Chunk]:
        """Yield all sentences, those of like length together."""
        width = self.streams * int(self.model.cfg.d_model) * 4
        budget = max(1, _CHUNK_BYTES // width)
        waiting = sorted(range(len(encodings)), key=lambda row: -len(encodings[row].ids))
        while waiting:
            size = max(1, budget // len(encodings[waiting[0]].ids))
            yield self._read(waiting[:size], encodings)
            waiting = waiting[size:]

    def _read(self, rows: list[int], encodings: Sequence[Encoding]) -> Chunk:
        texts = [encodings[row].text for row in rows]
        x = self._streams(texts, max(len(encodings[row].ids) for row in rows)).float()
        own = torch.zeros(x.shape[:2], dtype=torch.bool)
        norms = x.norm(dim=-1)
        for number, row in enumerate(rows):
            size = len(encodings[row].ids)
            special = special_tokens(self.model, encodings[row].ids, encodings[row].special)
            own[number, :size] = ~sinks_among(special, norms[number, :size].T).any(dim=0)
        if not bool(norms.isfinite().all()):
            raise InputError(message("model", "one whose streams are finite", "NaN or infinity"))
        return Chunk(rows, x, own)

    def _streams(
        self, texts: list[str], longest: int
    ) -> Float[Tensor, "sentence pos layer d_model"]:
        if self.store is None:
            return read_sites(self.model, texts, "stream", prepend_bos=self.prepend_bos)["stream"]
        places = torch.tensor([self.store.places[text] for text in texts])
        return self.store.activations["stream"].read(places, longest=longest)

    def vector(
        self, x: Float[Tensor, "pos layer d_model"], own: Tensor, at: tuple[int, ...]
    ) -> tuple[Float[Tensor, "layer d_model"] | None, int]:
        """Return an item's vector and where it stands; None where the token read is a sink.

        At the sentence's end it is the last of the text's own tokens that is no sink.
        """
        if self.position == "last_token":
            found = own.nonzero()[:, 0].tolist()
            return (x[found[-1]], found[-1]) if found else (None, 0)
        return (x[list(at)].mean(dim=0) if bool(own[list(at)].all()) else None), at[-1]


def intra_sentence(
    x: Float[Tensor, "sentence pos layer d_model"], own: Bool[Tensor, "sentence pos"]
) -> Float[Tensor, "sentence layer"]:
    """Return the mean cosine of a sentence's own tokens with their mean (Ethayarajh 2019, §3.1)."""
    weight = own.to(x.dtype)
    mean = torch.einsum("spld,sp->sld", x, weight) / weight.sum(dim=1).clamp(min=1)[:, None, None]
    along = torch.einsum("spld,sld->spl", x, mean)
    sizes = x.norm(dim=-1) * mean.norm(dim=-1)[:, None]
    cosine = torch.where(sizes > 0, along / torch.where(sizes > 0, sizes, 1.0), 0.0)
    found = torch.einsum("spl,sp->sl", cosine, weight) / weight.sum(dim=1)[:, None]
    return found.double()


class ItemVectors(NamedTuple):
    """What was read of some items.

    Attributes:
        x: [item, layer, d_model], float32; 0 where dropped.
        intra: [item, layer] intra-sentence similarity, as it is.
        intra_corrected: the same of corrected vectors, or None.
        kept: [item] False where the token to be read is a sink.
        at: [item] position of the token read, the last of several.
    """

    x: Float[Tensor, "item layer d_model"]
    intra: Float[Tensor, "item layer"]
    intra_corrected: Float[Tensor, "item layer"] | None
    kept: Bool[Tensor, " item"]
    at: Int[Tensor, " item"]

    def between(self, start: int, stop: int) -> "ItemVectors":
        """Return what was read of some neighbouring items."""
        corrected = self.intra_corrected
        return ItemVectors(
            self.x[start:stop],
            self.intra[start:stop],
            None if corrected is None else corrected[start:stop],
            self.kept[start:stop],
            self.at[start:stop],
        )


def read_items(
    reader: Reader,
    items: Sequence[SenseItem],
    correction: Any = None,
    watch: Callable[[Chunk, Sequence[str]], None] | None = None,
) -> ItemVectors:
    """Read the vectors of items, each sentence once; `watch` sees every chunk and the sentences."""
    texts = list(dict.fromkeys(item.sentence for item in items))
    encodings = [reader.encode(text) for text in texts]
    users: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        users.setdefault(item.sentence, []).append(number)
    x = torch.zeros(len(items), reader.streams, int(reader.model.cfg.d_model))
    intra = torch.zeros(len(items), reader.streams, dtype=torch.float64)
    corrected = None if correction is None else torch.zeros_like(intra)
    kept, where = torch.zeros(len(items), dtype=torch.bool), torch.zeros(len(items)).long()
    for chunk in reader.chunks(encodings):
        within = intra_sentence(chunk.x, chunk.own)
        within_corrected = (
            None if correction is None else intra_sentence(correction(chunk.x), chunk.own)
        )
        for place, row in enumerate(chunk.rows):
            for number in users[texts[row]]:
                at = reader.target(encodings[row], items[number])
                vector, where[number] = reader.vector(chunk.x[place], chunk.own[place], at)
                if vector is not None:
                    x[number], kept[number] = vector, True
                intra[number] = within[place]
                if corrected is not None and within_corrected is not None:
                    corrected[number] = within_corrected[place]
        if watch is not None:
            watch(chunk, texts)
    return ItemVectors(x, intra, corrected, kept, where)
