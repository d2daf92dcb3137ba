"""How much of a word's vector its neighbours account for: what comes before it, and after.

Resampling ablation (Chan et al. 2022, Causal Scrubbing): the words on one side are exchanged for
other running text of the same number of tokens, so that positions and lengths stay as they are.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._statistics import mean_interval
from wvprobe._types import Result
from wvprobe._validate import at_least
from wvprobe._validate import seed as checked_seed
from wvprobe.activations import read_sites
from wvprobe.datasets import load_prose
from wvprobe.errors import InputError
from wvprobe.words import WordSpan, encode, find_word, word_at

SIDES = ("earlier", "later")
# Windows of prose tried for one draw before a side counts as one that cannot be exchanged.
_TRIES = 200


@dataclass(frozen=True)
class InfluenceResult(Result):
    """Relative change of a word's vector when the text on one side of it is another.

    Attributes:
        values: [side, layer] mean of ‖x − x′‖ / ‖x‖ over the draws; side 0 what stands before
            the word, 1 what stands after it; NaN where nothing stands there. Layers are streams.
        low: [side, layer] lower end of the 95 % bootstrap interval of the mean.
        high: [side, layer] upper end.
        n: how many draws a side.
        text: the text.
        word: the word.
        examples: a text of each side as it was read, or "".

    Examples:
        >>> from wvprobe.influence import context_influence
        >>> found = context_influence(model, "The river bank is closed.", word="bank", draws=4)
        >>> bool((found.low <= found.values).all() and (found.values <= found.high).all())
        True
    """

    values: Float[Tensor, "side layer"]
    low: Float[Tensor, "side layer"]
    high: Float[Tensor, "side layer"]
    n: int
    text: str
    word: str
    examples: tuple[str, str]

    AXES: ClassVar = {name: ("side", "layer") for name in ("values", "low", "high")}

    def to_frame(self) -> Any:
        """Return one row a side and stream: side layer influence low high."""
        import pandas

        rows = [
            [side, layer, *(float(t[number, layer]) for t in (self.values, self.low, self.high))]
            for number, side in enumerate(SIDES)
            for layer in range(self.values.shape[1])
        ]
        return pandas.DataFrame(rows, columns=["side", "layer", "influence", "low", "high"])


def context_influence(
    model: Any, text: str, *, word: str, draws: int = 24, seed: int = 0
) -> InfluenceResult:
    """Exchange what stands before a word, then what stands after it, and see what its vector does.

    The word's vector is that of its last token in a decoder, and the mean of its tokens in an
    encoder. Replacements are windows of the bundled held-out prose, drawn at random, in which as
    many tokens stand and the word keeps its place. In a decoder what comes later has none.

    Args:
        model: a TransformerBridge.
        text: the text.
        word: the word, as the text writes it.
        draws: how many replacements a side.
        seed: seed of the windows and of the bootstrap.

    Raises:
        WordError: the word is not in the text.
        InputError: no window of prose has as many tokens as a side of the text.

    Examples:
        >>> from wvprobe.influence import context_influence
        >>> found = context_influence(model, "The river bank is closed.", word="bank", draws=4)
        >>> float(found.values[1].max())  # what comes later does nothing in a decoder
        0.0
    """
    seed = checked_seed(seed)
    draws = at_least("draws", draws, 2)
    span = find_word(model, text, word)
    generator = torch.Generator().manual_seed(seed)
    prose = " ".join(load_prose("held-out")).split()
    sides = [
        [_exchanged(model, span, side, prose, generator) for _ in range(draws)] for side in SIDES
    ]
    exchanged = [variant for side in sides for variant in side if variant is not None]
    spans = [span, *exchanged]
    seen = read_sites(model, [s.text for s in spans], "stream", words=spans)["stream"].double()
    change = (seen[1:] - seen[0]).norm(dim=-1) / seen[0].norm(dim=-1)
    nothing = torch.full((3, seen.shape[1]), torch.nan, dtype=torch.float64)
    found, start = [], 0
    for side in sides:
        if side[0] is None:
            found.append(nothing)
            continue
        values = change[start : start + draws]
        found.append(torch.stack([values.mean(dim=0), *mean_interval(values, seed=seed)]))
        start += draws
    values, low, high = torch.stack(found, dim=1)
    return InfluenceResult(
        provenance=adapters.provenance(model, seed=seed, text=text, word=word, draws=draws),
        values=values,
        low=low,
        high=high,
        n=draws,
        text=text,
        word=word,
        examples=(_example(sides[0][0]), _example(sides[1][0])),
    )


def _example(span: WordSpan | None) -> str:
    return "" if span is None else span.text


def _exchanged(
    model: Any, span: WordSpan, side: str, prose: list[str], generator: torch.Generator
) -> WordSpan | None:
    """Return the word in a text whose one side is other prose; None where nothing stands there."""
    start, end = span.chars
    before, after = span.text[:start], span.text[end:]
    if not any(character.isalnum() for character in (before if side == "earlier" else after)):
        return None
    size = len(encode(model, span.text).ids)
    for _ in range(_TRIES):
        at = int(torch.randint(len(prose) - size, (1,), generator=generator))
        # Word by word until as many tokens stand there, or more, and another place is tried.
        for count in range(1, size):
            new = " ".join(prose[at : at + count])
            if side == "earlier":
                text, first = f"{new} {span.word}{after}", len(new) + 1
            else:
                text, first = f"{before}{span.word} {new}", start
            encoding = encode(model, text)
            if len(encoding.ids) < size:
                continue
            found = word_at(encoding, first, first + len(span.word))
            if len(encoding.ids) == size and found.tokens == span.tokens:
                return found
            break
    raise InputError(
        f"no window of prose has as many tokens as what stands {side} than {span.word!r} in "
        f"{span.text!r}. Use another text."
    )
