"""Drift of many words: every measure, word by word, in one reading of the sentences."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wvprobe import adapters
from wvprobe._progress import progress
from wvprobe._validate import length, message, one_of
from wvprobe._validate import seed as checked_seed
from wvprobe.activations import StoredActivations
from wvprobe.contextual_drift._baseline import RandomTokenDraw, RandomTokens, mean_cosine
from wvprobe.contextual_drift._corrections import CORRECTIONS, Correction, fit_correction
from wvprobe.contextual_drift._kept import Kept
from wvprobe.contextual_drift._layers import layer_similarity
from wvprobe.contextual_drift._measures import SHUFFLES, measure_word
from wvprobe.contextual_drift._result import CORRECTABLE, MEASURES, DriftResult
from wvprobe.contextual_drift._vectors import ItemVectors, Reader, read_items
from wvprobe.datasets import SenseDataset, SenseItem, senses_or_bundled
from wvprobe.errors import InputError

# Sentences that are read together: enough of like length to fill batches.
_TOGETHER = 384
# Vectors that are kept to compare streams.
_SAMPLE, _SAMPLE_BYTES = 2000, 160 << 20


def drift(
    model: Any,
    dataset: SenseDataset | None = None,
    *,
    position: str = "target",
    pool: str | None = None,
    correction: str | None = None,
    prepend_bos: bool | None = None,
    max_occurrences: int = 2000,
    seed: int = 0,
    store: StoredActivations | None = None,
) -> DriftResult:
    """Measure, by word and stream, how the vectors of a word's occurrences part ways.

    Ethayarajh 2019, §3: self-similarity (mean cosine of pairs of occurrences), intra-sentence
    similarity (mean cosine of a sentence's tokens with their mean), maximum explainable variance
    (σ₁² / Σσ² of the occurrences; not centred as in the paper, and centred), each also minus what
    random tokens have. Senses: mean cosine within and between senses, their gap, nearest centroid
    (the mean of a sense's vectors as they are, by cosine) and nearest neighbour, leave one out.
    BOS, CLS, SEP, padding and attention sinks take no part.

    Memory: beside the model and a batch, at most 96 MB of streams at all positions (several times
    in passing), 384 sentences' or one word's vectors, 1,000 random tokens and 2,000 sampled
    occurrences (160 MB at most), each with all streams in single precision. It does not grow with
    the number of sentences, but for 24 bytes a stream and occurrence.

    Args:
        model: a TransformerBridge.
        dataset: marked words with their senses; None for the bundled set.
        position: ``target`` the word's own vector; ``last_token`` that of the sentence's last own
            token, which in a decoder alone has seen what follows the word.
        pool: ``last``, ``first`` or ``mean`` of the word's tokens; None: the last of a decoder,
            the mean of an encoder.
        correction: ``mean``, ``zscore`` or ``top_components``, see
            :func:`~wvprobe.contextual_drift.fit_correction`, fitted on the random tokens; None
            for none. Raw numbers stay beside the corrected ones.
        prepend_bos: as in the bridge's ``to_tokens``; None for its default.
        max_occurrences: of a word with more, a random choice of so many is measured.
        seed: seed of random tokens, choices, shuffles and bootstraps.
        store: the sentences' streams on disk, in place of forwards: ``capture(model, sentences,
            "stream", out=folder)``, all positions and layers; it may hold more sentences. Numbers
            differ from those without it by rounding, since batches do.

    Returns:
        Measures [word, layer]; 24 to 34 of them, see :class:`DriftResult`.

    Raises:
        InputError: an argument cannot be used, there are fewer than two sentences, or fewer than
            four occurrences; the store lacks a sentence, a position or a stream, or was captured
            with another model or prepend_bos.
        WordError: a marked word has no tokens of its own.

    Examples:
        >>> few = wvprobe.load_senses().only("bank")
        >>> found = wvprobe.drift(model, few)
        >>> found.to_frame().layer.tolist()
        [0, 1, 2, 3]
    """
    seed = checked_seed(seed)
    if correction is not None:
        one_of("correction", correction, CORRECTIONS)
    reader = Reader.of(model, position, pool, prepend_bos)
    data = senses_or_bundled(dataset)
    if store is not None:
        reader = reader.from_store(store, [item.sentence for item in data.items])
    generator = torch.Generator().manual_seed(seed)
    groups = _words(data, length("max_occurrences", max_occurrences), generator)
    draw = RandomTokenDraw(reader, data.items, generator)
    # A correction has to be known before the words are read; else random tokens pass with them.
    fitted = None if correction is None else fit_correction(draw.tokens().x, correction)
    run = _Run(reader, data, groups, draw, fitted, generator)
    run.all()
    settings = {
        "dataset": data.name,
        "sentences": len(data),
        "position": position,
        "pool": reader.pool,
        "correction": correction,
        "prepend_bos": prepend_bos,
        "max_occurrences": max_occurrences,
        "shuffles": SHUFFLES,
        "store": None if store is None else store.store.manifest.identity,
    }
    return run.result(adapters.provenance(model, seed=seed, **settings), correction, seed)


def _words(data: SenseDataset, most: int, generator: torch.Generator) -> dict[str, list[int]]:
    """Return the numbers of each word's items, a random choice where there are too many."""
    groups: dict[str, list[int]] = {}
    for number, item in enumerate(data.items):
        groups.setdefault(item.word, []).append(number)
    for word, numbers in groups.items():
        if len(numbers) > most:
            order = torch.randperm(len(numbers), generator=generator)[:most].tolist()
            groups[word] = sorted(numbers[place] for place in order)
    return groups


class _Run:
    """One reading of a dataset."""

    def __init__(
        self,
        reader: Reader,
        data: SenseDataset,
        groups: dict[str, list[int]],
        draw: RandomTokenDraw,
        correction: Correction | None,
        generator: torch.Generator,
    ) -> None:
        self.reader, self.data, self.groups, self.draw = reader, data, groups, draw
        self.correction = correction
        # Its own, so that the control does not hang on what else is drawn.
        self.shuffles = torch.Generator().manual_seed(generator.initial_seed())
        numbers = [number for group in groups.values() for number in group]
        d = int(reader.model.cfg.d_model)
        most = min(_SAMPLE, max(4, _SAMPLE_BYTES // (4 * reader.streams * d)))
        order = torch.randperm(len(numbers), generator=generator)[:most].tolist()
        self.sampled = {numbers[place] for place in order}
        # What is held against random tokens is put together when all of them are known.
        names = [name for name in MEASURES if not name.endswith(("_adjusted", "_matched"))]
        if correction is not None:
            names += [f"{name}_corrected" for name in CORRECTABLE]
        self.kept = Kept(
            names,
            words=len(groups),
            items=len(numbers),
            sample=len(order),
            streams=reader.streams,
            d=d,
        )
        self.dropped: list[tuple[str, str]] = []
        self.positions: list[list[int]] = []  # of each word's occurrences

    def all(self) -> None:
        """Read and measure every word."""
        total = sum(map(len, self.groups.values()))
        with progress(total, "sentences measured", total > 4 * _TOGETHER) as advance:
            for words in self._together():
                numbers = [number for word in words for number in self.groups[word]]
                items = [self.data.items[number] for number in numbers]
                read = read_items(self.reader, items, self.correction, self.draw.see)
                start = 0
                for word in words:
                    stop = start + len(self.groups[word])
                    self._word(
                        word, numbers[start:stop], items[start:stop], read.between(start, stop)
                    )
                    start = stop
                advance(len(numbers))

    def _together(self) -> Iterator[list[str]]:
        """Yield words whose sentences are read together."""
        words, size = [], 0
        for word, numbers in self.groups.items():
            if words and size + len(numbers) > _TOGETHER:
                yield words
                words, size = [], 0
            words.append(word)
            size += len(numbers)
        yield words

    def _word(
        self, word: str, numbers: list[int], items: list[SenseItem], read: ItemVectors
    ) -> None:
        self.dropped += [
            (word, item.sentence)
            for item, kept in zip(items, read.kept.tolist(), strict=True)
            if not kept
        ]
        at = read.kept.nonzero()[:, 0]
        if not len(at):
            return
        items = [items[place] for place in at.tolist()]
        for place in at.tolist():
            if numbers[place] in self.sampled:
                self.kept.add_vector(word, read.x[place])
        kinds = {sense: k for k, sense in enumerate(dict.fromkeys(i.sense for i in items))}
        senses = torch.tensor([kinds[item.sense] for item in items])
        x = read.x[at]
        raw = measure_word(x, senses, self.shuffles)
        values = {**raw.values, "intra_sentence": read.intra[at].mean(dim=0)}
        if self.correction is not None and read.intra_corrected is not None:
            corrected = dict(measure_word(self.correction(x), senses).values)
            corrected["intra_sentence"] = read.intra_corrected[at].mean(dim=0)
            values |= {f"{name}_corrected": corrected[name] for name in CORRECTABLE}
        self.positions.append(read.at[at].tolist())
        self.kept.add(word, items, values, raw)

    def _adjusted(self, randoms: RandomTokens, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the measures, [word, layer], minus what random tokens have."""
        base = randoms.cosine()
        matched = torch.stack([randoms.matched(some) for some in self.positions])
        found = {
            "self_similarity_adjusted": values["self_similarity"] - base,
            "self_similarity_matched": values["self_similarity"] - matched,
            "intra_sentence_adjusted": values["intra_sentence"] - base,
        }
        for name, centred in (
            ("max_explainable_variance", False),
            ("max_explainable_variance_centred", True),
        ):
            random = [randoms.explained(len(some), centred=centred) for some in self.positions]
            found[f"{name}_adjusted"] = values[name] - torch.stack(random)
        return found

    def result(self, provenance: Any, correction: str | None, seed: int) -> DriftResult:
        """Put the words together."""
        kept, randoms = self.kept, self.draw.tokens()
        n_sampled = len(kept.sample_words)
        if n_sampled < 4:
            hint = f"{len(self.dropped)} were dropped, since their tokens are sinks."
            raise InputError(message("dataset", "four occurrences or more", n_sampled, hint))
        rogue = randoms.rogue()
        corrected = None if self.correction is None else mean_cosine(self.correction(randoms.x))
        values = kept.values()
        values |= self._adjusted(randoms, values)
        counts = Counter(item.word for item in self.data.items)
        centroid, neighbour, gap = kept.outcomes()
        return DriftResult(
            provenance=provenance,
            values={name: values.pop(name) for name in MEASURES} | values,
            baseline=randoms.cosine(),
            baseline_corrected=corrected,
            control=kept.control(),
            rogue_dimensions=rogue.dimensions,
            rogue_shares=rogue.shares,
            layers=layer_similarity(
                kept.sample(), kept.sample_words, seed=seed, provenance=provenance
            ),
            words=tuple(kept.words),
            n=tuple(map(len, kept.items)),
            n_found=tuple(counts[word] for word in kept.words),
            n_senses=tuple(len({item.sense for item in items}) for items in kept.items),
            same_pos=tuple(len({item.pos for item in items}) == 1 for items in kept.items),
            item_words=kept.item_words(),
            contexts=tuple(item.context for items in kept.items for item in items),
            item_centroid=centroid,
            item_neighbour=neighbour,
            item_gap=gap,
            dropped=tuple(self.dropped),
            n_baseline=len(randoms.x),
            position=self.reader.position,
            correction=correction,
        )
