"""Where heads look from a word: sinks, the word itself, its copies, content before and after."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wvprobe import adapters
from wvprobe._masks import visible
from wvprobe._sinks import sink_keys
from wvprobe._types import HeadId
from wvprobe.activations import read_sites
from wvprobe.contextual_drift._driver_pairs import Occurrences
from wvprobe.contextual_drift._vectors import Reader
from wvprobe.words import Encoding, word_at

KINDS = (
    *("sink", "self", "copy"),
    *("content_before", "content_after", "other_before", "other_after"),
)
_SINK, _SELF, _COPY, _CONTENT, _OTHER = 0, 1, 2, 3, 5
# Patterns that are held at once, and examples kept of each head.
_PATTERN_BYTES, _EXAMPLES = 64 << 20, 5
# English words of closed classes; all others, and those of other languages, count as content.
_FUNCTION_WORDS = frozenset(
    """
    a an the this that these those each every either neither some any no none all both half such
    what which who whom whose i me my mine myself you your yours yourself he him his himself she
    her hers herself it its itself we us our ours ourselves they them their theirs themselves one
    and or but nor so yet if then than because since while when where why how whether although
    though unless until as of in on at by for with about against between into through during
    before after above below to from up down out off over under upon onto within without along
    across behind beyond near toward towards among around past despite per via am is are was were
    be been being have has had having do does did doing will would shall should can could may
    might must not n't there here very too also just only even again once more most other another
    own same s t ll ve re d m
    """.split()
)


class Source(NamedTuple):
    """A word that a head looks at from a target.

    Attributes:
        target: the target's word.
        source: the word that it looks at.
        attention: the weight on its tokens.
    """

    target: str
    source: str
    attention: float


class Looks(NamedTuple):
    """Where some heads look from the targets.

    Attributes:
        attention: [word, head, kind] mean over the word's sentences, in the order of `KINDS`.
        uniform: [word, head, kind] the same of attention spread evenly over all visible keys.
        sources: head by head the content words looked at most, one of each target word.
    """

    attention: Float[Tensor, "word head kind"]
    uniform: Float[Tensor, "word head kind"]
    sources: tuple[tuple[Source, ...], ...]


def where_heads_look(
    reader: Reader, found: Occurrences, numbers: Sequence[int], heads: Sequence[HeadId]
) -> Looks:
    """Read the patterns of some heads from the targets of some items."""
    model, arch = reader.model, adapters.architecture(reader.model)
    words = list(found.groups)
    size = (len(words), len(heads), len(KINDS))
    attention, uniform = (torch.zeros(size, dtype=torch.float64) for _ in range(2))
    counts = torch.zeros(len(words), dtype=torch.float64)
    best: list[dict[str, Source]] = [{} for _ in heads]
    layers = sorted({head.layer for head in heads})
    encodings = {n: reader.encode(found.items[n].sentence) for n in numbers}
    longest = max(len(encoding.ids) for encoding in encodings.values())
    per_text = 4 * len(layers) * longest * (arch.n_heads * longest + arch.d_model)
    step = max(1, _PATTERN_BYTES // per_text)
    for start in range(0, len(numbers), step):
        some = numbers[start : start + step]
        texts = [found.items[n].sentence for n in some]
        seen = read_sites(
            model, texts, ["pattern", "resid_pre"], layers=layers, prepend_bos=reader.prepend_bos
        )
        for row, number in enumerate(some):
            item, encoding, at = found.items[number], encodings[number], found.at[number]
            tokens = word_at(encoding, item.start, item.end).tokens
            sinks, owner = sink_keys(model, seen, row), _words_of(encoding)
            word = words.index(item.word)
            counts[word] += 1
            for place, head in enumerate(heads):
                layer = layers.index(head.layer)
                pattern = seen["pattern"][row, layer, head.head, list(at), : len(encoding.ids)]
                weight = pattern.double().mean(dim=0)
                kinds = _kinds(encoding, owner, tokens, sinks[layer])
                window = adapters.sliding_window(model, head.layer)
                sees = visible(len(weight), causal=arch.causal, window=window)[list(at)].double()
                even = (sees / sees.sum(dim=-1, keepdim=True)).mean(dim=0)
                attention[word, place].index_add_(0, kinds, weight)
                uniform[word, place].index_add_(0, kinds, even)
                _note(best[place], item.word, owner, kinds, weight)
    scale = counts[:, None, None]
    top = [sorted(b.values(), key=lambda s: -s.attention)[:_EXAMPLES] for b in best]
    return Looks(attention / scale, uniform / scale, tuple(map(tuple, top)))


def _words_of(encoding: Encoding) -> list[tuple[int, str]]:
    """Return where the word of each token begins, and the word, lower case; "" for none."""
    words = [
        (found.start(), found.end(), found.group().lower())
        for found in re.finditer(r"\w+", encoding.text)
    ]
    owner = []
    for span in encoding.spans:
        start, end = span or (0, 0)
        inside = [w for w in words if w[0] < end and start < w[1]]
        owner.append((inside[0][0], inside[0][2]) if inside else (-1, ""))
    return owner


def _kinds(
    encoding: Encoding, owner: list[tuple[int, str]], tokens: tuple[int, ...], sinks: Tensor
) -> Int[Tensor, " key"]:
    """Return what each key is, a number in `KINDS`; the first that fits."""
    own_ids = {encoding.ids[position] for position in tokens}
    found = []
    for position, (number, sink) in enumerate(zip(encoding.ids, sinks.tolist(), strict=True)):
        word = owner[position][1]
        if position in tokens:
            found.append(_SELF)
        elif sink:
            found.append(_SINK)
        elif number in own_ids:
            found.append(_COPY)
        else:
            kind = _CONTENT if word and word not in _FUNCTION_WORDS else _OTHER
            found.append(kind + (position > tokens[-1]))
    return torch.tensor(found)


def _note(
    best: dict[str, Source], target: str, owner: list[tuple[int, str]], kinds: Tensor, weight: Any
) -> None:
    """Keep the content word that gets most, where it is more than the target word had so far."""
    totals: dict[tuple[int, str], float] = {}
    for word, kind, value in zip(owner, kinds.tolist(), weight.tolist(), strict=True):
        if kind in (_CONTENT, _CONTENT + 1):
            totals[word] = totals.get(word, 0.0) + value
    if totals:
        (_, source), most = max(totals.items(), key=lambda entry: entry[1])
        if target not in best or most > best[target].attention:
            best[target] = Source(target, source, most)
