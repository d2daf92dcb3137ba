"""Scores, weights and circuits."""

import torch

import wvprobe
from hostile.things import (
    QUIET,
    WORDS,
    Call,
    checkpoint,
    method,
    of,
    tensors,
    with_heads,
    with_model,
)
from hostile.values import TEXT, TEXTS

CALLS: dict[str, Call] = {
    "context_dependence": Call(
        wvprobe.context_dependence,
        with_model(text_a=TEXT, text_b=TEXTS[1], **WORDS),
        {"model": "model", "query": "word", "key": "word"},
    ),
    "score_ledger": Call(
        wvprobe.score_ledger,
        with_model(text=TEXT, **WORDS, layer=1, head=0, group="component"),
        {"model": "model", "query": "word", "key": "word", "layer": "index", "head": "index",
         "group": "choice"},
    ),
    "LedgerResult.top": Call(
        method("ledger", "top"),
        lambda things: {"ledger": things.ledger, "k": 3, "by": "term"},
        {"k": "count", "by": "choice"},
    ),
    "LedgerResult.marginal": Call(
        method("ledger", "marginal"),
        lambda things: {"ledger": things.ledger, "side": "query"},
        {"side": "choice"},
    ),
    "check_terms": Call(
        of("ledger", "check_terms"),
        lambda things: {"model": things.model, "ledger": things.ledger, "n": 3, "seed": 0,
                        "terms": None},
        {"model": "model", "ledger": "object", "n": "count", "terms": "pairs", "seed": "seed"},
    ),
    "score_variance": Call(
        wvprobe.score_variance,
        with_model(texts=[f"{text} {other}" for text in TEXTS for other in TEXTS], folds=2, seed=0,
               max_pairs=500, **QUIET),
        {"model": "model", "query": "word of texts", "key": "word of texts", "folds": "from 2",
         "seed": "seed", "max_pairs": "count"},
    ),
    "pair_scores": Call(
        of("word_pairs", "pair_scores"),
        with_model(texts=[TEXT], first="bank", second="river"),
        {"model": "model", "first": "only a word", "second": "only a word"},
    ),
    "composition": Call(
        wvprobe.composition,
        with_heads(mode="Q", offset=0),
        {"heads": "heads", "mode": "choice", "offset": "number", "metric": "metric",
         "part": "optional choice"},
    ),
    "CompositionResult.top": Call(
        lambda heads, **settings: wvprobe.composition(heads, "K").top(**settings),
        with_heads(k=3, level=None),
        {"k": "count", "level": "share"},
    ),
    "copying_scores": Call(
        wvprobe.copying_scores,
        with_heads(rows=10, seed=0, layers=[0], embedding="W_E", **QUIET),
        {"heads": "heads", "rows": "count", "seed": "seed", "layers": "layers",
         "embedding": "choice"},
    ),
    "HeadWeights.from_model": Call(
        wvprobe.HeadWeights.from_model, with_model(), {"model": "model"}
    ),
    "HeadWeights.from_tensors": Call(
        wvprobe.HeadWeights.from_tensors,
        lambda things: tensors(things),
        {"W_Q": "tensor", "W_K": "tensor", "W_V": "tensor", "W_O": "tensor", "b_Q": "tensor",
         "b_K": "tensor", "b_V": "tensor", "b_O": "tensor", "scale": "scale", "rotary": "object",
         "soft_cap": "positive", "W_E": "tensor", "W_pos": "tensor", "W_U": "vectors"},
    ),
    "HeadWeights.from_safetensors": Call(
        wvprobe.HeadWeights.from_safetensors,
        lambda things: {"folder": checkpoint(things)},
        {"folder": "file"},
    ),
    "HeadWeights.ov": Call(
        method("heads", "ov"), with_heads(layer=1, head=2), {"layer": "index", "head": "index"}
    ),
    "HeadWeights.qk": Call(
        method("heads", "qk"),
        with_heads(layer=1, head=2, offset=1, part=None),
        {"layer": "index", "head": "index", "offset": "number", "part": "optional choice"},
    ),
    "HeadWeights.qk_between": Call(
        method("heads", "qk_between"),
        lambda things: {"heads": wvprobe.HeadWeights.from_model(things.tiny("gpt2")), "layer": 0,
                        "head": 0, "query": "token", "key": "position"},
        {"layer": "index", "head": "index", "query": "choice", "key": "choice"},
    ),
    "HeadWeights.kv_head": Call(method("heads", "kv_head"), with_heads(head=2), {"head": "index"}),
    "HeadWeights.ov_factors": Call(
        method("heads", "ov_factors"), with_heads(layer=1), {"layer": "index"}
    ),
    "HeadWeights.qk_factors": Call(
        method("heads", "qk_factors"),
        with_heads(layer=1, offset=0, part=None),
        {"layer": "index", "offset": "number", "part": "optional choice"},
    ),
    "offset_profile": Call(
        wvprobe.offset_profile,
        with_heads(offsets=[0, 1, 2], wavelength=100.0, mean_input=torch.ones(3, 42)),
        {"heads": "heads", "offsets": "offsets", "mean_input": "tensor", "wavelength": "positive"},
    ),
    "singular_vectors": Call(
        of("singular", "singular_vectors"),
        with_heads(which="QK", layer=1, head=2, offset=0, tolerance=None),
        {"heads": "heads", "which": "choice", "layer": "index", "head": "index",
         "metric": "metric", "tolerance": "tolerance", "part": "optional choice"},
    ),
    "SingularVectorsResult.group": Call(
        lambda heads, number: of("singular", "singular_vectors")(heads, "OV", 0, 0).group(number),
        with_heads(number=0),
        {"number": "index"},
    ),
    "spectra": Call(
        wvprobe.spectra,
        with_heads(which="QK", offset=0, k=3, vocabulary=False, **QUIET),
        {"heads": "heads", "which": "choice", "offset": "number", "metric": "metric", "k": "count",
         "part": "optional choice"},
    ),
    "subspace_overlap": Call(
        wvprobe.subspace_overlap,
        with_heads(kind="OQ", energy=1.0, n_cosines=2, part=None),
        {"heads": "heads", "kind": "choice", "energy": "share", "n_cosines": "from 0",
         "part": "optional choice"},
    ),
    "top_tokens": Call(
        wvprobe.top_tokens,
        with_heads(kind="OV", layer=1, head=2, token=7, k=3, embedding="W_E", **QUIET),
        {"heads": "heads", "kind": "choice", "layer": "index", "head": "index",
         "token": "optional token", "k": "count", "embedding": "choice",
         "role": "optional choice"},
    ),
    "top_tokens, of a direction": Call(
        wvprobe.top_tokens,
        with_heads(kind="QK", layer=1, head=2, direction=torch.ones(42), role="query", k=3,
                   offset=0,
               **QUIET),
        {"direction": "tensor", "role": "optional choice", "offset": "number", "words": "tokens"},
    ),
    "Result.load": Call(
        wvprobe.Result.load,
        lambda things: {"path": things.behaviour.save(things.folder / "behaviour")},
        {"path": "file"},
    ),
}  # fmt: skip
