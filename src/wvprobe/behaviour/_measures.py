"""Scores of every head on random tokens given twice, and on text; a row a sample."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._linalg import at_least_float32
from wvprobe._masks import visible
from wvprobe._single_tokens import set_apart
from wvprobe._sinks import sinks_among, special_tokens
from wvprobe._validate import message
from wvprobe.adapters import Architecture
from wvprobe.behaviour._positional import OffsetProfile, offset_attention
from wvprobe.behaviour._streaming import Tokens, each_layer
from wvprobe.behaviour._targets import (
    REPEAT_SCORES,
    TEXT_SCORES,
    attention_to,
    repeat_keys,
    sink_targets,
    text_keys,
)
from wvprobe.errors import InputError
from wvprobe.words import encode


class Rows:
    """Scores by sample, filled layer by layer.

    Attributes:
        names: the scores.
        values: [score, sample, layer, head], NaN where no query of a sample counts.
        chance: same axes; what uniform attention gives the same queries.
    """

    def __init__(self, names: Sequence[str], samples: int, arch: Architecture) -> None:
        """Begin with NaN everywhere."""
        shape = (len(names), samples, arch.n_layers, arch.n_heads)
        self.names = tuple(names)
        self.values = torch.full(shape, torch.nan, dtype=torch.float64)
        self.chance = self.values.clone()

    def put(self, first: int, sample: int, layer: int, found: tuple[Tensor, Tensor]) -> None:
        """Write scores of one sample and layer, from the `first` on: [score, head], [score]."""
        values, chance = found
        span = slice(first, first + len(values))
        self.values[span, sample, layer] = values
        self.chance[span, sample, layer] = chance.double()[:, None]


class Masks:
    """Which keys a query sees, by layer and length; made once each."""

    def __init__(self, model: Any, arch: Architecture) -> None:
        """Read the layers' windows."""
        self.causal = arch.causal
        self.windows = [adapters.sliding_window(model, layer) for layer in range(arch.n_layers)]
        self._made: dict[tuple[int, int | None], Tensor] = {}

    def __call__(self, layer: int, size: int) -> Tensor:
        """Return [query, key], True where the query looks."""
        key = (size, self.windows[layer])
        if key not in self._made:
            self._made[key] = visible(size, causal=self.causal, window=key[1])
        return self._made[key]


def tokenized(model: Any, text: str) -> Tokens:
    """Return a text's tokens, BOS and the like as the bridge adds them."""
    encoding = encode(model, text)
    return Tokens(encoding.ids, encoding.special)


# --- random tokens, given twice ---


def repeats(
    model: Any, arch: Architecture, samples: int, length: int, generator: torch.Generator
) -> list[Tokens]:
    """Draw sequences of `length` distinct ordinary tokens, each given twice.

    Raises:
        InputError: the vocabulary has fewer ordinary tokens, or the context is too short.
    """
    around = tokenized(model, "a")
    before, after = around.ids[: around.own.start], around.ids[around.own.stop :]
    size = len(before) + 2 * length + len(after)
    if arch.n_ctx is not None and size > arch.n_ctx:
        longest = (arch.n_ctx - len(before) - len(after)) // 2
        hint = f"Two copies must fit into the context of {arch.n_ctx} tokens."
        raise InputError(message("length", f"at most {longest}", length, hint))
    ordinary = torch.tensor(
        sorted(set(range(arch.d_vocab)) - set_apart(model.tokenizer, arch.d_vocab))
    )
    if length > len(ordinary):
        expected = f"at most {len(ordinary)}, the number of ordinary tokens"
        raise InputError(message("length", expected, length))
    added = (True,) * len(before) + (False,) * (2 * length) + (True,) * len(after)
    drawn = []
    for _ in range(samples):
        chosen = ordinary[torch.randperm(len(ordinary), generator=generator)[:length]].tolist()
        drawn.append(Tokens((*before, *chosen, *chosen, *after), added))
    return drawn


def on_repeats(
    model: Any,
    arch: Architecture,
    sequences: Sequence[Tokens],
    length: int,
    batch_size: int | Literal["auto"],
    progress: bool,
) -> Rows:
    """Measure :data:`REPEAT_SCORES`, and copying where the model has a linear head."""
    rows, masks = Rows((*REPEAT_SCORES, "copying"), len(sequences), arch), Masks(model, arch)
    keys = repeat_keys(sequences[0], length)
    unembedding = adapters.unembedding(model, arch)
    headless = isinstance(unembedding, str)
    outputs = [] if headless else [_outputs(model, arch, layer) for layer in range(arch.n_layers)]
    read = [] if headless else [_read_by_head(unembedding, s, length) for s in sequences]

    def use(item: int, layer: int, seen: Mapping[str, Tensor]) -> None:
        tokens, pattern = sequences[item], seen["pattern"]
        rows.put(0, item, layer, attention_to(pattern, keys, masks(layer, len(tokens.ids))))
        if not headless:
            logits = _direct_logits(seen["z"][tokens.own], outputs[layer], read[item])
            values = _copied_rank(logits, pattern[:, tokens.own, tokens.own], length)
            rows.put(len(REPEAT_SCORES), item, layer, (values[None], torch.tensor([0.5])))

    sites = ("pattern",) if headless else ("pattern", "z")
    each_layer(model, arch, sequences, sites, use, batch_size=batch_size, progress=progress)
    return rows


def _outputs(model: Any, arch: Architecture, layer: int) -> Float[Tensor, "head d_head d_model"]:
    """Return W_O, with the gain of a norm behind it; its scale, positive, moves no rank."""
    weight = at_least_float32(adapters.output_weight(model, arch, layer))
    norm = adapters.post_attention_norm(model, arch, layer)
    return weight if norm is None else norm.linear(weight, weight.new_ones(()))


def _read_by_head(
    unembedding: adapters.Unembedding, tokens: Tokens, length: int
) -> Float[Tensor, "d_model token"]:
    """Return the columns of W_U of a sequence's distinct tokens, the final norm's gain in them."""
    start = tokens.own.start
    rows = at_least_float32(unembedding.weight[list(tokens.ids[start : start + length])])
    return rows.T if unembedding.norm is None else unembedding.norm.fold(rows.T)


def _direct_logits(
    z: Float[Tensor, "query head d_head"],
    outputs: Float[Tensor, "head d_head d_model"],
    unembedded: Float[Tensor, "d_model token"],
) -> Float[Tensor, "head query token"]:
    """Return what each head writes into the logits of a few tokens, up to the final norm's σ."""
    return torch.einsum("qhe,het->hqt", z, outputs @ unembedded.to(outputs))


def _copied_rank(
    logits: Float[Tensor, "head query token"], pattern: Float[Tensor, "head query key"], length: int
) -> Float[Tensor, " head"]:
    """Return the mean rank, 0..1, of the most attended token's logit among the sequence's."""
    attended = pattern.argmax(dim=-1, keepdim=True) % length
    own = logits.gather(-1, attended)
    balance = (own > logits).sum(dim=-1) - (own < logits).sum(dim=-1)
    return (0.5 + balance.double() / (2 * (length - 1))).mean(dim=-1).cpu()


# --- text ---


class OnText:
    """Scores on text; what offset a head prefers is chosen on half of it, and judged on the rest.

    Attributes:
        rows: :data:`TEXT_SCORES`, then `positional` and `positional_r2`.
        offsets: [layer, head] the offset that `positional` is about.
    """

    def __init__(
        self,
        model: Any,
        arch: Architecture,
        texts: Sequence[Tokens],
        max_offset: int,
        generator: torch.Generator,
        batch_size: int | Literal["auto"],
        progress: bool,
    ) -> None:
        """Read all texts, the half that offsets are chosen on first."""
        self.model, self.arch, self.texts = model, arch, texts
        self.masks = Masks(model, arch)
        self.keys = [text_keys(tokens) for tokens in texts]
        self.special = [special_tokens(model, *tokens) for tokens in texts]
        self.rows = Rows((*TEXT_SCORES, "positional", "positional_r2"), len(texts), arch)
        self.tried = tuple(range(0 if arch.causal else -max_offset, max_offset + 1))
        self.by_offset = Rows([str(offset) for offset in self.tried], len(texts), arch)
        self.profile = OffsetProfile(arch.n_layers, arch.n_heads)
        order = torch.randperm(len(texts), generator=generator).tolist()
        half = len(texts) // 2
        for chosen_on, items in ((True, order[:half]), (False, order[half:])):
            if items:
                self._read(items, chosen_on, batch_size, progress)
        self.offsets = self._positional(order[:half], order[half:])

    def _read(self, items: list[int], chosen_on: bool, batch_size: Any, progress: bool) -> None:
        first_r2 = len(self.rows.names) - 1

        def use(place: int, layer: int, found: Mapping[str, Tensor]) -> None:
            item = items[place]
            tokens, pattern = self.texts[item], found["pattern"]
            seen = self.masks(layer, len(tokens.ids))
            norms = found["resid_pre"].double().norm(dim=-1).cpu()
            sinks = sinks_among(self.special[item], norms)
            keys = torch.cat((self.keys[item], sink_targets(tokens, sinks)))
            self.rows.put(0, item, layer, attention_to(pattern, keys, seen))
            at = offset_attention(pattern, tokens, seen, self.tried)
            self.by_offset.put(0, item, layer, at)
            if chosen_on:
                self.profile.add(layer, pattern, tokens, seen, sinks)
            elif len(items) < len(self.texts):
                r2 = self.profile.explained(layer, pattern, tokens, seen, sinks)
                self.rows.put(first_r2, item, layer, (r2[None], torch.zeros(1)))

        sequences = [self.texts[item] for item in items]
        sites = ("pattern", "resid_pre")
        each_layer(
            self.model, self.arch, sequences, sites, use, batch_size=batch_size, progress=progress
        )

    def _positional(self, chosen_on: list[int], judged_on: list[int]) -> Tensor:
        """Fill in `positional`, and return the offset that it is about, [layer, head]."""
        values, chance = self.by_offset.values, self.by_offset.chance
        if not chosen_on:
            return torch.full(values.shape[2:], torch.nan, dtype=torch.float64)
        excess = (values - chance)[:, chosen_on].nanmean(dim=1).nan_to_num(nan=-torch.inf)
        place = excess.argmax(dim=0)
        at = self.rows.names.index("positional")
        wide = place.expand(1, len(judged_on), *place.shape)
        self.rows.values[at, judged_on] = values[:, judged_on].gather(0, wide)[0]
        self.rows.chance[at, judged_on] = chance[:, judged_on].gather(0, wide)[0]
        return torch.tensor(self.tried, dtype=torch.float64)[place]
