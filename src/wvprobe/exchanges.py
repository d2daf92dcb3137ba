"""What a head's pattern does, and what its values do: one of them exchanged, the other kept.

z = pattern · v. Between two texts of equal length a head can read the one's values by the other's
pattern. Resampling ablation (Chan et al. 2022, Causal Scrubbing), mean and zero ablation take the
part from elsewhere. Every head is changed on its own, in a row of a batch of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wvprobe import adapters
from wvprobe._equal_texts import check_equal_lengths, prose_of_length
from wvprobe._masks import visible
from wvprobe._paths import ROUTES, StraightPath
from wvprobe._single_tokens import spell
from wvprobe._sinks import sink_keys
from wvprobe._statistics import mean_interval
from wvprobe._swaps import PARTS, Attention, Runs, Swap, Watched, read_attention
from wvprobe._targets import position_in
from wvprobe._types import HeadId, Result
from wvprobe._validate import index, indices, message, one_of, pairs
from wvprobe._validate import seed as checked_seed
from wvprobe._writes import on_cpu
from wvprobe.activations import read_sites
from wvprobe.adapters import Architecture
from wvprobe.errors import InputError
from wvprobe.words import Encoding, encode

METHODS = ("exchange", "mean", "zero", "resample")
LEVELS = ("query", "kv")
_MEASURES = (
    "local",
    "stream",
    "kl",
    "logit",
    "log_prob",
    "reader_score",
    "reader_gauge_fixed",
    "reader_attention",
    "path_linear",
    "path_measured",
)


@dataclass(frozen=True)
class ExchangeResult(Result):
    """What changes at a destination when one head's pattern, values or both are others.

    The first axis is the text that runs: 0 `text_a`, which takes the part from `text_b`, 1
    `text_b`, which takes it from `text_a`; without a second text it has one entry.

    Attributes:
        local: [into, draw, layer, head] ‖Δ attn_added‖ / ‖attn_added‖ at the head's own layer.
        stream: [into, draw, layer, head] ‖Δ x‖ / ‖x‖ of the last stream.
        kl: [into, draw, layer, head] KL(p ‖ p′) of the prediction there, in nats: of the next
            token, or of the token itself in a masked model; None without a head.
        logit: [into, draw, layer, head] change of the target token's logit, which is known up to
            what all tokens share; None without a head.
        log_prob: [into, draw, layer, head] change of log p of the token; None without a head.
        reader_score: [into, draw, layer, head] change of the reader's raw score, before a soft
            cap, a masked one included; 0 from the reader's layer on; None without a reader.
        reader_gauge_fixed: the same less the mean change over the keys that the query sees and
            that are no sinks: softmax ignores what is constant over keys.
        reader_attention: the same of the reader's attention weight.
        path_linear: [into, draw, layer, head] effect on the straight path to the reader alone,
            scales of norms frozen; None without a path. Unit: the raw score's for ``q`` and
            ``k``, relative change of the reader's output at the query for ``v``.
        path_measured: the same with the norms on the way evaluated anew.
        layers: the layers of the third axis.
        heads: the heads (key-value heads at level ``kv``) of the last axis.
        part: ``pattern``, ``value`` or ``head``.
        method: ``exchange``, ``mean``, ``zero`` or ``resample``.
        level: ``query``: one query head at a time, also where it shares its values with others;
            ``kv``: all query heads of one key-value head together.
        texts: the text or texts that run.
        donors: [into] the texts that parts come from; () for ``zero``.
        destinations: [into] token position at which changes are measured.
        tokens: [into] the target token, readable; () without a head.
        reader: the head whose score is watched, or None.
        reader_positions: [into] its query and key; () without a reader.
        path: ``q``, ``k`` or ``v``, or None.

    Examples:
        >>> found = wvprobe.exchange(model, "The bank.", method="zero", part="head", layers=0)
        >>> found.to_frame()[["into", "layer", "head"]].values.tolist()[0]
        ['a', 0, 0]
    """

    local: Float[Tensor, "into draw layer head"]
    stream: Float[Tensor, "into draw layer head"]
    kl: Float[Tensor, "into draw layer head"] | None
    logit: Float[Tensor, "into draw layer head"] | None
    log_prob: Float[Tensor, "into draw layer head"] | None
    reader_score: Float[Tensor, "into draw layer head"] | None
    reader_gauge_fixed: Float[Tensor, "into draw layer head"] | None
    reader_attention: Float[Tensor, "into draw layer head"] | None
    path_linear: Float[Tensor, "into draw layer head"] | None
    path_measured: Float[Tensor, "into draw layer head"] | None
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    part: str
    method: str
    level: str
    texts: tuple[str, ...]
    donors: tuple[tuple[str, ...], ...]
    destinations: tuple[int, ...]
    tokens: tuple[str, ...]
    reader: HeadId | None
    reader_positions: tuple[tuple[int, int], ...]
    path: str | None

    AXES: ClassVar = {name: ("into", "draw", "layer", "head") for name in _MEASURES}

    def to_frame(self) -> Any:
        """Return one row a text that runs, layer and head, with the mean over draws.

        Columns: into layer head (kv_head at level ``kv``) local stream, then as far as they were
        measured kl logit log_prob reader_score reader_gauge_fixed reader_attention path_linear
        path_measured; with several draws each also as …_low and …_high, the 95 % bootstrap
        interval of the mean over the draws.
        """
        import pandas

        several = self.local.shape[1] > 1
        columns: dict[str, list[float]] = {}
        for name in _MEASURES:
            values = getattr(self, name)
            if values is None:
                continue
            columns[name] = values.mean(dim=1).flatten().tolist()
            if several:
                ends = mean_interval(values.transpose(0, 1), seed=self.provenance.seed or 0)
                for end, found in zip(("low", "high"), ends, strict=True):
                    columns[f"{name}_{end}"] = found.flatten().tolist()
        head = "head" if self.level == "query" else "kv_head"
        rows = [
            (into, layer, each)
            for into in "ab"[: len(self.texts)]
            for layer in self.layers
            for each in self.heads
        ]
        frame = pandas.DataFrame(rows, columns=["into", "layer", head])
        return frame.assign(**columns)


def exchange(
    model: Any,
    text_a: str,
    text_b: str | None = None,
    *,
    part: str = "pattern",
    method: str = "exchange",
    layers: Sequence[int] | int | None = None,
    heads: Sequence[int] | int | None = None,
    level: str = "query",
    destination: int | str | None = None,
    token: str | int | None = None,
    reader: tuple[int, int] | None = None,
    query: int | str | None = None,
    key: int | str | None = None,
    path: str | None = None,
    draws: int = 8,
    seed: int = 0,
) -> ExchangeResult:
    """Change one head at a time, its pattern alone or its values alone, and measure what follows.

    The part is changed at all positions, in each head on its own, and the model runs on from
    there; both directions are measured, and exact: nothing is linearised but `path_linear`.

    Args:
        model: a TransformerBridge.
        text_a: a text.
        text_b: another of as many tokens. Methods other than ``exchange`` need none; given one,
            they change both.
        part: ``pattern``, ``value``, or ``head`` for both, which is the whole head's z.
        method: where the part comes from: the other text (``exchange``), its mean at each
            position over `draws` other texts (``mean``), nothing (``zero``; the same for every
            part), or each of `draws` other texts (``resample``). Other texts are windows of
            the bundled held-out prose with as many tokens.
        layers: layers to change, None for all, or with a path for all before the reader.
        heads: heads to change, None for all; key-value heads at level ``kv``.
        level: ``query`` changes one query head, whose key-value head goes on serving the others as
            it did; ``kv`` changes all query heads of a key-value head at once, counted once.
        destination: where changes are measured, in each text: a token position or a word (its
            last token); None for the last token of the text.
        token: whose logit is watched; None for each text's own first choice at its destination.
        reader: (layer, head) of a head whose score is watched.
        query: the reader's query, a token position or a word.
        key: its key.
        path: ``q``, ``k`` or ``v``: also measure what reaches the reader straight, through its
            queries, keys or values alone, everything between the two frozen (Wang et al. 2022,
            https://arxiv.org/abs/2211.00593).
        draws: how many other texts, for ``mean`` and ``resample``.
        seed: seed of their choice and of intervals over them.

    Raises:
        InputError: the texts differ in length; no such layer, head or position; a path to a
            layer that is not behind the changed ones; no text_b to exchange with.
        UnsupportedError: `token` for a model without a head.
        WordError: a word is not in a text.

    Examples:
        >>> texts = "The river bank is closed.", "The old bank is closed."
        >>> found = wvprobe.exchange(model, *texts, part="value", layers=1)
        >>> found.kl.shape, bool((found.kl >= -1e-6).all())  # into, draw, layer, head
        (torch.Size([2, 1, 1, 6]), True)
    """
    seed = checked_seed(seed)
    arch = adapters.architecture(model)
    one_of("part", part, PARTS)
    one_of("method", method, METHODS)
    one_of("level", level, LEVELS)
    if method == "exchange" and text_b is None:
        raise InputError(message("text_b", "a text to exchange with", text_b))
    texts = (text_a,) if text_b is None else (text_a, text_b)
    encodings = [encode(model, text) for text in texts]
    size = check_equal_lengths(texts, encodings)
    watched = _watched(model, arch, reader, query, key, path, encodings)
    n_heads = arch.n_heads if level == "query" else arch.n_kv_heads
    chosen_heads = indices("heads", heads, n_heads, "heads" if level == "query" else "KV heads")
    chosen = _layers(arch, layers, watched, path)
    if token is not None:
        adapters.require_head(model, "a token's logit")
    at = tuple(position_in(encoding, destination, "destination") for encoding in encodings)

    donor_texts = _donor_texts(model, texts, method, size, draws, seed)
    distinct = list(dict.fromkeys([*texts, *(text for each in donor_texts for text in each)]))
    read = dict(zip(distinct, read_attention(model, arch, distinct, chosen), strict=True))
    own = [read[text] for text in texts]
    donors = [
        _donors(method, mine, [read[text] for text in each])
        for mine, each in zip(own, donor_texts, strict=True)
    ]
    group = arch.n_heads // n_heads
    units = [range(unit * group, (unit + 1) * group) for unit in chosen_heads]
    swap = Swap(part, chosen, units, own, donors)
    runs = Runs(model, arch, encodings, at, token, watched)
    found = {**runs.measure(swap), "local": _local(model, arch, texts, at, swap)}
    if path is not None and watched is not None:
        found |= _path_effects(model, arch, texts, watched, path, swap)
    settings = {
        "texts": list(texts),
        "part": part,
        "method": method,
        "level": level,
        "draws": draws,
        "layers": list(chosen),
        "heads": list(chosen_heads),
        "destinations": list(at),
        "tokens": runs.token_ids,
        "reader": None if watched is None else list(watched.head),
        "reader_positions": [] if watched is None else [list(pair) for pair in watched.at],
        "path": path,
    }
    return ExchangeResult(
        provenance=adapters.provenance(model, seed=seed, **settings),
        local=found["local"],
        stream=found["stream"],
        **{name: found.get(name) for name in _MEASURES[2:]},
        layers=chosen,
        heads=chosen_heads,
        part=part,
        method=method,
        level=level,
        texts=texts,
        donors=donor_texts,
        destinations=at,
        tokens=tuple(spell(model.tokenizer, runs.token_ids)),
        reader=None if watched is None else watched.head,
        reader_positions=() if watched is None else watched.at,
        path=path,
    )


def _watched(
    model: Any,
    arch: Architecture,
    reader: tuple[int, int] | None,
    query: int | str | None,
    key: int | str | None,
    path: str | None,
    encodings: Sequence[Encoding],
) -> Watched | None:
    if reader is None:
        if path is not None or query is not None or key is not None:
            raise InputError(
                message("reader", "(layer, head) where a path or words are given", None)
            )
        return None
    if query is None or key is None:
        raise InputError("a reader needs `query` and `key`: a token position or a word each.")
    if path is not None:
        one_of("path", path, ROUTES)
    ((at_layer, at_head),) = pairs("reader", [reader], "(layer, head)")
    layer = index("reader[0]", at_layer, arch.n_layers, "layers")
    head = index("reader[1]", at_head, arch.n_heads, "heads")
    at = tuple((position_in(e, query, "query"), position_in(e, key, "key")) for e in encodings)
    counted = _counted(model, arch, [e.text for e in encodings], layer, [q for q, _ in at])
    return Watched(HeadId(layer, head), at, counted)


def _layers(
    arch: Architecture, layers: Any, watched: Watched | None, path: str | None
) -> tuple[int, ...]:
    if path is None or watched is None:
        return indices("layers", layers, arch.n_layers, "layers")
    if watched.head.layer == 0:
        raise InputError(message("reader", "in a layer with others before it", watched.head))
    chosen = range(watched.head.layer) if layers is None else layers
    checked = indices("layers", chosen, arch.n_layers, "layers")
    if max(checked) >= watched.head.layer:
        expected = f"before layer {watched.head.layer}, the reader's"
        hint = "A path leads to later layers only."
        raise InputError(message("layers", expected, max(checked), hint))
    return checked


def _donor_texts(
    model: Any, texts: Sequence[str], method: str, size: int, draws: int, seed: int
) -> tuple[tuple[str, ...], ...]:
    if method == "exchange":
        return tuple((text,) for text in reversed(texts))
    if method == "zero":
        return tuple(() for _ in texts)
    count = index("draws", draws, 10**6, "draws")
    if count < 2:
        raise InputError(message("draws", "at least 2", draws))
    generator = torch.Generator().manual_seed(seed)
    return (prose_of_length(model, size, count, generator),) * len(texts)


def _donors(method: str, own: Attention, others: list[Attention]) -> list[Attention]:
    if method == "zero":
        return [own.zero()]
    return [Attention.mean(others)] if method == "mean" else others


def _local(
    model: Any, arch: Architecture, texts: Sequence[str], at: Sequence[int], swap: Swap
) -> Float[Tensor, "into draw layer unit"]:
    """Return ‖Δ attn_added‖ / ‖attn_added‖ at the destination, a second norm evaluated anew."""
    found = torch.zeros(swap.shape, dtype=torch.float64)
    seen = read_sites(model, list(texts), ["attn_out"], layers=swap.layers, positions=list(at))
    for row, layer in enumerate(swap.layers):
        weight = adapters.output_weight(model, arch, layer).cpu().double()
        norm = on_cpu(adapters.post_attention_norm(model, arch, layer))
        for into, draw in torch.cartesian_prod(*map(torch.arange, swap.shape[:2])).tolist():
            out = seen["attn_out"][into, row].double()
            change = swap.change(into, draw, row)[:, at[into], None]
            moved = swap.written(weight, change)[:, 0]
            added = out
            if norm is not None:
                added = norm(out)
                moved = norm(out + moved) - added
            found[into, draw, row] = moved.norm(dim=-1) / added.norm()
    return found


def _path_effects(
    model: Any,
    arch: Architecture,
    texts: Sequence[str],
    watched: Watched,
    route: str,
    swap: Swap,
) -> dict[str, Tensor]:
    linear, measured = (torch.zeros(swap.shape, dtype=torch.float64) for _ in range(2))
    for into, text in enumerate(texts):
        path = StraightPath(model, arch, text, watched.head, watched.at[into])
        for row, layer in enumerate(swap.layers):
            weight = adapters.output_weight(model, arch, layer).cpu().double()
            for draw in range(swap.shape[1]):
                written = swap.written(weight, swap.change(into, draw, row))
                both = path.effects(route, layer, written)
                linear[into, draw, row], measured[into, draw, row] = both
    return {"path_linear": linear, "path_measured": measured}


def _counted(
    model: Any, arch: Architecture, texts: list[str], layer: int, queries: list[int]
) -> Bool[Tensor, "into key"]:
    """Return which keys each text's query sees that are no sinks."""
    seen = read_sites(model, texts, "resid_pre", layers=layer)
    window, size = adapters.sliding_window(model, layer), len(seen.tokens[0])
    sees = visible(size, causal=arch.causal, window=window)
    rows = [sees[query] & ~sink_keys(model, seen, into)[0] for into, query in enumerate(queries)]
    return torch.stack(rows)
