"""Activations of chosen sites, layers and words, with nothing else kept.

The forward runs in batches of texts of like length, with their attention mask, without the head,
and only as far as the last layer that is asked for. Each hook keeps the positions asked for and
drops the rest at once, so memory holds the result and one batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._picking import POOLS, Pick, picker, whole
from wvprobe._progress import progress as progress_bar
from wvprobe._types import Provenance, Result
from wvprobe._validate import index, indices, message, one_of
from wvprobe._validate import texts as checked_texts
from wvprobe.adapters import PAIR_SITES, SITES, Architecture, Raw, Recipe
from wvprobe.errors import InputError, MemoryLimitError, UnsupportedError
from wvprobe.words import Encoding, WordSpan, encode, locate

Words = str | Sequence[str | WordSpan]
Positions = int | str | Sequence[int | Sequence[int]]

# Tokens of one automatic batch: enough to make each call worth its overhead, few enough for memory.
_BATCH_TOKENS = {"cpu": 1_536, "cuda": 16_384, "mps": 4_096}
# In float64 transformers' mask value, and in float16 mask value plus score, overflows the softmax
# of a row that sees padding only: it becomes NaN and taints the batch. There nothing is padded.
PADDED_DTYPES = (torch.float32, torch.bfloat16)
_LONG_WORK = 16  # batches from which on progress is shown


@dataclass(frozen=True)
class Activations(Result):
    """What :func:`capture` read. ``activations["v"]`` is a site's tensor.

    Attributes:
        values: site -> tensor. With words or positions [item, layer, ...], otherwise
            [item, pos, layer, ...] padded with zeros; pattern and scores always
            [item, layer, head, query, key], padded with NaN (one query with words or positions).
        layers: site -> the layers on its axis.
        texts: the texts, in the caller's order.
        tokens: token ids of each text, added tokens included.
        strings: the same tokens, readable.
        special: for each token whether it was added by the tokenizer (BOS, CLS, SEP, EOS).
        positions: the token positions read in each text; None where all were.
        words: the words looked for, where there were any.
        pool: how several tokens of a word became one vector, or None.
        mask: [item, pos] True for tokens; None with words or positions.
    """

    values: Mapping[str, Tensor]
    layers: Mapping[str, tuple[int, ...]]
    texts: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]
    strings: tuple[tuple[str, ...], ...]
    special: tuple[tuple[bool, ...], ...]
    positions: tuple[tuple[int, ...], ...] | None
    words: tuple[str, ...] | None
    pool: str | None
    mask: Tensor | None

    def __getitem__(self, site: str) -> Tensor:
        """Return a site's tensor.

        Raises:
            InputError: the site was not captured; the message lists those that were.
        """
        one_of("site", site, tuple(self.values))
        return self.values[site]

    def axes(self, site: str) -> tuple[str, ...]:
        """Return the names of the axes of ``self[site]``."""
        leading = ("item",) if self.positions is not None or site in PAIR_SITES else ("item", "pos")
        return leading + SITES[one_of("site", site, tuple(self.values))]

    def to_frame(self) -> Any:
        """Return one row an item: item, text, n_tokens, word, positions, strings."""
        import pandas

        rows = []
        for item, text in enumerate(self.texts):
            read = range(len(self.tokens[item])) if self.positions is None else self.positions[item]
            rows.append(
                {
                    "item": item,
                    "text": text,
                    "n_tokens": len(self.tokens[item]),
                    "word": None if self.words is None else self.words[item],
                    "positions": tuple(read),
                    "strings": tuple(self.strings[item][p] for p in read),
                }
            )
        return pandas.DataFrame(rows)


def capture(
    model: Any,
    texts: str | Sequence[str],
    sites: str | Sequence[str],
    *,
    words: Words | None = None,
    positions: Positions | None = None,
    layers: Sequence[int] | int | None = None,
    pool: str | None = None,
    batch_size: int | Literal["auto"] = "auto",
    out: None = None,
    progress: bool = True,
    prepend_bos: bool | None = None,
) -> Activations:
    """Read sites of the residual stream of texts.

    Sites (layers are blocks, counted from 0, as in TransformerLens): ``resid_pre resid_mid
    resid_post`` before, within and after a block; ``attn_in`` what attention reads; ``q k``
    after a norm of theirs, before rotation; ``v``; ``z`` = Σ_j pattern v; ``head_out`` = z W_O a
    head, its share of what is added; ``attn_out`` what W_O gives, b_O included; ``attn_added``
    what reaches the stream (behind Gemma-2's second norm); ``mlp_out`` what the MLP adds;
    ``pattern``; ``scores`` raw, before a soft cap, masked pairs included. ``stream`` is the
    stack of n_layers + 1 streams: 0 the embedding, k after block k − 1, the last before the
    final norm.

    Args:
        model: a TransformerBridge.
        texts: one text or several.
        sites: one site or several.
        words: one word for all texts, or one (a string or a WordSpan) a text; whole words, the
            first occurrence of each.
        positions: instead of words: one position for all texts, ``"last"``, or a text's own
            position or positions. Position 0 is the BOS or CLS where there is one.
        layers: layers of every site; None for all.
        pool: ``last``, ``first`` or ``mean`` over a word's tokens. None: the last token for a
            decoder, where it alone has seen the whole word, and the mean for an encoder.
        batch_size: texts a batch; ``"auto"`` by tokens. Halved and tried again when memory
            does not suffice.
        out: reserved for results on disk.
        progress: show progress on long work.
        prepend_bos: as in the bridge's ``to_tokens``; None for its default.

    Raises:
        UnsupportedError: the architecture lacks a site; the message names another.
        InputError: an argument cannot be used.
        WordError: a word is not in its text, or not as a whole word.
        MemoryLimitError: not even one text fits into memory.
    """
    if out is not None:
        raise UnsupportedError(
            "results on disk (out=) are not there yet; capture fewer sites or layers at a time, "
            "or give words= or positions=, and save with Activations.save."
        )
    read = read_sites(
        model,
        texts,
        sites,
        words=words,
        positions=positions,
        layers=layers,
        pool=pool,
        batch_size=batch_size,
        progress=progress,
        prepend_bos=prepend_bos,
    )
    settings = {"sites": list(read.values), "pool": read.pool, "prepend_bos": prepend_bos}
    return replace(read, provenance=adapters.provenance(model, **settings))


def read_sites(
    model: Any,
    texts: str | Sequence[str],
    sites: str | Sequence[str],
    *,
    words: Words | None = None,
    positions: Positions | None = None,
    layers: Sequence[int] | int | None = None,
    pool: str | None = None,
    batch_size: int | Literal["auto"] = "auto",
    progress: bool = False,
    prepend_bos: bool | None = None,
    share: bool = False,
) -> Activations:
    """Do what :func:`capture` does without hashing the model's weights into a provenance.

    With `share`, and words or positions, a text that is given several times runs once: many words
    of one sentence cost one forward. Rows of a batch are then not the texts as given.
    """
    arch = adapters.architecture(model)
    plan = _Plan(model, arch, (sites,) if isinstance(sites, str) else tuple(sites), layers)
    given = checked_texts(texts)
    known = {text: encode(model, text, prepend_bos=prepend_bos) for text in dict.fromkeys(given)}
    encodings = [known[text] for text in given]
    picked, named = _resolve(encodings, words, positions)
    default = "last" if arch.causal else "mean"
    pool = default if pool is None else one_of("pool", pool, POOLS)
    if share and picked is None:
        raise InputError("`share` reads words or positions of a text. Give `words` or `positions`.")
    run = _Run(model, arch, plan, encodings, picked, pool, share)
    run.all(batches_of([len(e.ids) for e in run.rows], batch_size, model, arch), progress)
    return Activations(
        provenance=Provenance.of(model.cfg.model_name, ""),
        values={site: run.results[site] for site in plan.sites},
        layers=plan.layers,
        texts=tuple(e.text for e in encodings),
        tokens=tuple(e.ids for e in encodings),
        strings=tuple(e.strings for e in encodings),
        special=tuple(e.special for e in encodings),
        positions=picked,
        words=named,
        pool=pool if picked is not None else None,
        mask=None if picked is not None else run.mask,
    )


class _Plan:
    """Which hook points are needed, and what is computed from them once they have come."""

    def __init__(self, model: Any, arch: Architecture, sites: tuple[str, ...], layers: Any) -> None:
        if not sites:
            raise InputError(message("sites", "at least one site", sites))
        self.sites = tuple(dict.fromkeys(one_of("sites", s, tuple(SITES)) for s in sites))
        self.layers = {
            site: indices("layers", layers, adapters.layers_of(arch, site), "layers")
            for site in self.sites
        }
        self.recipes: dict[tuple[str, int], Recipe] = {
            (site, row): adapters.recipe(model, arch, site, layer)
            for site in self.sites
            for row, layer in enumerate(self.layers[site])
        }
        self.users: dict[Raw, list[tuple[str, int]]] = {}
        for key, recipe in self.recipes.items():
            for raw in recipe.inputs:
                self.users.setdefault(raw, []).append(key)


class _Run:
    """One pass over the texts: fills `results` batch by batch, in the caller's order.

    A row is a text that runs, an item one of those that are asked for; rows may have several.
    """

    def __init__(
        self,
        model: Any,
        arch: Architecture,
        plan: _Plan,
        encodings: list[Encoding],
        picked: tuple[tuple[int, ...], ...] | None,
        pool: str,
        share: bool,
    ) -> None:
        self.model, self.arch, self.plan = model, arch, plan
        self.encodings, self.picked, self.pool = encodings, picked, pool
        self.results: dict[str, Tensor] = {}
        items: dict[Any, list[int]] = {}
        for item, encoding in enumerate(encodings):
            items.setdefault(encoding.text if share else item, []).append(item)
        self.items = list(items.values())
        self.rows = [encodings[own[0]] for own in self.items]
        lengths = torch.tensor([len(e.ids) for e in encodings])
        self.longest = int(lengths.max())
        self.mask = torch.arange(self.longest) < lengths[:, None]

    def all(self, batches: list[list[int]], progress: bool) -> None:
        """Run every batch; on a lack of memory, halve it and go on."""
        todo = list(reversed(batches))
        long = progress and len(batches) >= _LONG_WORK
        with progress_bar(len(self.rows), "texts read", long) as advance:
            while todo:
                rows = todo.pop()
                try:
                    self.batch(rows)
                except (RuntimeError, MemoryError) as error:
                    if not _is_out_of_memory(error):
                        raise
                    todo.extend(self._halves(rows, error))
                    continue
                advance(len(rows))

    def _halves(self, rows: list[int], error: BaseException) -> list[list[int]]:
        if len(rows) == 1:
            length = len(self.rows[rows[0]].ids)
            raise MemoryLimitError(
                f"text {self.items[rows[0]][0]} ({length} tokens) alone does not fit into memory: "
                f"{error}. Shorten it, or ask for fewer layers or sites."
            ) from error
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        middle = len(rows) // 2
        return [rows[middle:], rows[:middle]]

    def batch(self, rows: list[int]) -> None:
        """Run one batch and write its values into the results."""
        device = self.model.cfg.device
        tokens, mask = padded([self.rows[row].ids for row in rows], device)
        (size, pos), kept = tokens.shape, mask.cpu()
        items = [self.items[row] for row in rows]
        pick: Pick = whole
        if self.picked is not None:
            pick = picker([[self.picked[i] for i in own] for own in items], self.pool, device)
        waiting: dict[tuple[str, int], dict[Raw, Tensor]] = {k: {} for k in self.plan.recipes}

        def receive(raw: str, layer: int, value: Tensor) -> None:
            value = adapters.shaped(self.arch, raw, value, size, pos)
            for key in self.plan.users[raw, layer]:
                got = waiting[key]
                got[raw, layer] = value
                recipe = self.plan.recipes[key]
                if len(got) == len(recipe.inputs):
                    self._write(*key, items, recipe.compute(got, pick), kept)
                    del waiting[key]

        with adapters.reading(self.model, self.arch, list(self.plan.users), receive):
            adapters.run_backbone(self.model, tokens, mask)

    def _write(
        self, site: str, layer: int, items: list[list[int]], value: Tensor, mask: Tensor
    ) -> None:
        """Put one layer's values of a batch in place: [row, slot or pos, ...] or pairs."""
        value = value.detach().cpu()
        every = [(row, slot, i) for row, own in enumerate(items) for slot, i in enumerate(own)]
        rows, slots, flat = map(list, zip(*every, strict=True))
        if site in PAIR_SITES:
            value = self._padded_pairs(value, mask)
            if self.picked is not None:
                value = value[rows, :, slots][:, :, None]
            target = self._target(site, value, (self._queries(), self.longest))
            target[flat, layer, :, : value.shape[2], : value.shape[3]] = value
        elif self.picked is not None:
            value = value[rows, slots]
            self._target(site, value, ())[flat, layer] = value
        else:
            value = value * mask.to(value.dtype).reshape(*mask.shape, *(1,) * (value.dim() - 2))
            target = self._target(site, value, ())
            target[flat, : value.shape[1], layer] = value

    def _queries(self) -> int:
        return self.longest if self.picked is None else 1

    def _padded_pairs(self, value: Tensor, mask: Tensor) -> Tensor:
        absent = mask[:, None, None, :] == 0
        if self.picked is None:
            absent = absent | (mask[:, None, :, None] == 0)
        return value.masked_fill(absent, float("nan"))

    def _target(self, site: str, value: Tensor, pairs: tuple[int, ...]) -> Tensor:
        """Return the site's result, made on first use: shapes and dtype are known only then."""
        if site not in self.results:
            n_items, n_layers = len(self.encodings), len(self.plan.layers[site])
            if pairs:
                shape, fill = (n_items, n_layers, value.shape[1], *pairs), float("nan")
            elif self.picked is not None:
                shape, fill = (n_items, n_layers, *value.shape[1:]), 0.0
            else:
                shape, fill = (n_items, self.longest, n_layers, *value.shape[2:]), 0.0
            self.results[site] = torch.full(shape, fill, dtype=value.dtype)
        return self.results[site]


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return not isinstance(error, MemoryLimitError)
    return any(words in str(error) for words in ("out of memory", "can't allocate memory"))


def _resolve(
    encodings: list[Encoding], words: Words | None, positions: Positions | None
) -> tuple[tuple[tuple[int, ...], ...] | None, tuple[str, ...] | None]:
    """Return each item's positions, and the words they stand for."""
    if words is not None and positions is not None:
        raise InputError("give `words` or `positions`, not both: they choose the same axis.")
    if words is not None:
        given = [words] * len(encodings) if isinstance(words, str) else list(words)
        _check_length("words", given, encodings)
        spans = [_span(e, w) for e, w in zip(encodings, given, strict=True)]
        return tuple(s.tokens for s in spans), tuple(s.word for s in spans)
    if positions is None:
        return None, None
    one = isinstance(positions, int | str)
    each: list[Any] = [positions] * len(encodings) if one else list(positions)
    _check_length("positions", each, encodings)
    return tuple(_position(e, p) for e, p in zip(encodings, each, strict=True)), None


def _check_length(name: str, given: list[Any], encodings: list[Encoding]) -> None:
    if len(given) != len(encodings):
        raise InputError(message(name, f"one a text ({len(encodings)})", f"{len(given)} of them"))


def _span(encoding: Encoding, word: str | WordSpan) -> WordSpan:
    if isinstance(word, WordSpan):
        if word.text != encoding.text:
            raise InputError(
                f"the WordSpan of {word.word!r} belongs to {word.text!r}, not to "
                f"{encoding.text!r}. Give spans in the order of the texts."
            )
        if tuple(encoding.strings[p] for p in word.tokens if p < len(encoding.ids)) != word.strings:
            raise InputError(
                f"the WordSpan of {word.word!r} has the tokens {word.strings} at {word.tokens}, "
                "which are others here. Find it with this model, and with the same prepend_bos."
            )
        return word
    return locate(encoding, word)


def _position(encoding: Encoding, given: Any) -> tuple[int, ...]:
    size = len(encoding.ids)
    if given == "last":
        return (size - 1,)
    if isinstance(given, str):
        raise InputError(message("positions", "ints or 'last'", given))
    each = (given,) if isinstance(given, Integral) else tuple(given)
    if not each:
        raise InputError(message("positions", "at least one position a text", each))
    return tuple(index("positions", p, size, f"tokens in {encoding.text!r}") for p in each)


def padded(
    tokens: Sequence[Sequence[int]], device: Any
) -> tuple[Int[Tensor, "row pos"], Int[Tensor, "row pos"]]:
    """Return token ids padded on the right with 0, and their mask: 1 for tokens, 0 for padding."""
    lengths = torch.tensor([len(own) for own in tokens])
    ids = torch.zeros(len(tokens), int(lengths.max()), dtype=torch.long)
    for row, own in enumerate(tokens):
        ids[row, : len(own)] = torch.tensor(own)
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return ids.to(device), mask.to(device)


def batches_of(
    lengths: Sequence[int], batch_size: Any, model: Any, arch: Architecture
) -> list[list[int]]:
    """Return batches of items of like length in tokens, long ones first: what fails, fails early.

    No two items whose padding would change their numbers come together.
    """
    whole = isinstance(batch_size, int) and not isinstance(batch_size, bool)
    if batch_size != "auto" and not (whole and batch_size >= 1):
        raise InputError(message("batch_size", "'auto' or an int of at least 1", batch_size))
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    # Where frequencies depend on the length, a longer text in the batch would change a shorter's.
    regime = adapters.length_regime(model, arch)
    regimes = [regime(length) for length in lengths]
    budget = _BATCH_TOKENS.get(str(model.cfg.device).split(":")[0], _BATCH_TOKENS["cpu"])
    batches: list[list[int]] = []
    while order:
        longest = lengths[order[0]]
        size = max(1, budget // longest) if batch_size == "auto" else int(batch_size)
        if model.cfg.dtype not in PADDED_DTYPES:
            size = min(size, sum(lengths[i] == longest for i in order))
        size = min(size, sum(regimes[i] == regimes[order[0]] for i in order))
        batches.append(order[:size])
        order = order[size:]
    return batches
