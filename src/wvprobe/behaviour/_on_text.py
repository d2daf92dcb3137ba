"""Scores of every head on text; a row a text."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from wvprobe._sinks import sinks_among, special_tokens
from wvprobe.adapters import Architecture
from wvprobe.behaviour._positional import OffsetProfile, offset_attention
from wvprobe.behaviour._rows import Masks, Rows
from wvprobe.behaviour._streaming import Tokens, each_layer
from wvprobe.behaviour._targets import TEXT_SCORES, attention_to, sink_targets, text_keys


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
            norms = found["resid_pre"].norm(dim=-1).cpu()
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
