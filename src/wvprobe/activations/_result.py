"""What was captured, in memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wvprobe._types import Result
from wvprobe._validate import one_of
from wvprobe.adapters import PAIR_SITES, SITES


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

    Examples:
        >>> seen = wvprobe.capture(model, "The river bank.", "q", layers=[0, 2])
        >>> seen.layers["q"], tuple(seen["q"].shape)
        ((0, 2), (1, 5, 2, 6, 14))
    """

    values: Mapping[str, Tensor]
    layers: Mapping[str, tuple[int, ...]]
    texts: Sequence[str]
    tokens: Sequence[tuple[int, ...]]
    strings: Sequence[tuple[str, ...]]
    special: Sequence[tuple[bool, ...]]
    positions: Sequence[tuple[int, ...]] | None
    words: Sequence[str] | None
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
