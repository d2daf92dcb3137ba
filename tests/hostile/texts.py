"""Functions of texts: words, activations, behaviour, exchanges."""

import torch

import wvprobe
from hostile.things import FEW, QUIET, Call, method, of, stored, treebank_data, with_model
from hostile.values import OTHER, TEXT, TEXTS

CALLS: dict[str, Call] = {
    "find_word": Call(
        wvprobe.find_word,
        with_model(text=TEXT, word="bank", occurrence=0),
        {"model": "model", "word": "only a word", "occurrence": "index"},
    ),
    "encode": Call(of("words", "encode"), with_model(text=TEXT), {"model": "model"}),
    "locate": Call(
        of("words", "locate"),
        lambda things: {"encoding": things.encoding, "word": "bank", "occurrence": 0},
        {"encoding": "object", "word": "only a word", "occurrence": "index"},
    ),
    "word_at": Call(
        of("words", "word_at"),
        lambda things: {"encoding": things.encoding, "start": 4, "end": 9},
        {"encoding": "object", "start": "index", "end": "index"},
    ),
    "characters_at": Call(
        of("words", "characters_at"),
        lambda things: {"encoding": things.encoding, "start": 4, "end": 9},
        {"encoding": "object", "start": "index", "end": "index"},
    ),
    "capture": Call(
        wvprobe.capture,
        with_model(texts=TEXTS, sites=("v",), layers=[0], positions=1, pool="last", batch_size=2),
        {"model": "model", "sites": "choices", "layers": "layers",
         "positions": "optional index in all", "pool": "optional choice", "batch_size": "count"},
    ),
    "capture, words": Call(
        wvprobe.capture, with_model(texts=TEXTS, sites="v", words="bank"), {"words": "words"}
    ),
    "capture, in a folder": Call(
        wvprobe.capture,
        lambda things: {"model": things.model, "texts": TEXTS, "sites": "v", "words": "bank",
                        "out": things.folder / "captured"},
        {"out": "folder"},
    ),
    "read_sites": Call(
        of("activations", "read_sites"),
        with_model(texts=TEXTS, sites=("v",), layers=0, positions=1),
        {"model": "model", "sites": "choices", "layers": "layers"},
    ),
    "open_store": Call(
        of("activations", "open_store"),
        lambda things: {"folder": stored(things)},
        {"folder": "file"},
    ),
    "capture_dataset": Call(
        wvprobe.capture_dataset,
        lambda things: {"source": list(TEXTS), "model": lambda: things.model, "sites": ("v",),
                        "out": things.folder / "dataset", "words": "bank", "engine": "local",
                        "layers": [0], "threads": 1},
        {"source": "object", "model": "model but a name", "sites": "choices", "out": "folder",
         "words": "words", "engine": "choice", "layers": "layers", "threads": "count",
         "pool": "optional choice", "batch_size": "count"},
    ),
    "mean_input": Call(
        of("inputs", "mean_input"), with_model(texts=TEXTS, **QUIET), {"model": "model"}
    ),
    "input_covariance": Call(
        of("inputs", "input_covariance"), with_model(texts=TEXTS, **QUIET), {"model": "model"}
    ),
    "stream_components": Call(
        of("components", "stream_components"),
        with_model(text=TEXT, layer=1),
        {"model": "model", "layer": "index"},
    ),
    "stream_sources": Call(
        of("components", "stream_sources"),
        with_model(text=TEXT, layer=1),
        {"model": "model", "layer": "index"},
    ),
    "components_at": Call(
        of("components", "components_at"),
        with_model(texts=TEXTS, positions=[1, 2, 1], layer=1),
        {"model": "model", "positions": "layers", "layer": "index"},
    ),
    "head_behaviour": Call(
        wvprobe.head_behaviour,
        with_model(texts=TEXTS, batch_size=2, seed=0, **FEW),
        {"model": "model", "samples": "from 2", "length": "count", "max_offset": "count",
         "batch_size": "count", "seed": "seed"},
    ),
    "behaviour_agreement": Call(
        of("behaviour", "behaviour_agreement"),
        lambda things: {"behaviour": things.behaviour, "weights": {"w": torch.ones(3, 6).cumsum(1)},
                        "pairs": None, "resample": "layer", "seed": 0},
        {"behaviour": "object", "weights": "object", "pairs": "choices", "resample": "choice",
         "seed": "seed"},
    ),
    "BehaviourResult.excess": Call(
        method("result", "excess"),
        lambda things: {"result": things.behaviour, "score": "previous_token"},
        {"score": "choice"},
    ),
    "BehaviourResult.named": Call(
        method("result", "named"),
        lambda things: {"result": things.behaviour, "k": 2, "kinds": ("sink",)},
        {"k": "count", "kinds": "choices"},
    ),
    "composed_with": Call(
        of("behaviour", "composed_with"),
        lambda things: {"scores": torch.zeros(3, 6, 3, 6), "layer": 1, "head": 2},
        {"scores": "tensor", "layer": "index", "head": "index"},
    ),
    "dependency_heads": Call(
        of("behaviour", "dependency_heads"),
        lambda things: {"model": things.model, "dataset": treebank_data(things), "limit": 20,
                        "min_pairs": 2, "exclude": ("root",), "seed": 0, "batch_size": 4, **QUIET},
        {"model": "model", "dataset": "object", "limit": "count", "min_pairs": "count",
         "seed": "seed", "batch_size": "count"},
    ),
    "value_flow": Call(
        wvprobe.value_flow,
        with_model(text=TEXT, layer=1, token=7, position=2, against=9),
        {"model": "model", "layer": "layers", "token": "token", "position": "optional word",
         "against": "token"},
    ),
    "exchange": Call(
        wvprobe.exchange,
        with_model(text_a=TEXT, text_b=OTHER, part="pattern", method="exchange",
               layers=[1], heads=[0], level="query", destination="bank", draws=2, seed=0),
        {"model": "model", "part": "choice", "method": "choice", "layers": "layers",
         "heads": "layers", "level": "choice", "destination": "optional word", "seed": "seed"},
    ),
    "exchange, of draws": Call(
        wvprobe.exchange,
        with_model(text_a=TEXT, part="pattern", method="resample", layers=[1], token=7, draws=2),
        {"draws": "count", "token": "token", "seed": "seed"},
    ),
    "exchange, of a path": Call(
        wvprobe.exchange,
        with_model(text_a=TEXT, text_b=OTHER, part="value", layers=[0], reader=(2, 1), query=4,
                   key=2,
               path="q"),
        {"reader": "reader", "query": "word", "key": "word", "path": "optional choice"},
    ),
    "double_dissociation": Call(
        of("dissociation", "double_dissociation"),
        with_model(pairs=[(TEXT, OTHER), (OTHER, TEXT)], destination="bank", layers=[1], n_pairs=1,
               control=False, seed=0, **QUIET),
        {"model": "model", "pairs": "pairs", "destination": "optional word", "layers": "layers",
         "seed": "seed"},
    ),
    "double_dissociation, of its own pairs": Call(
        of("dissociation", "double_dissociation"),
        with_model(layers=[1], n_pairs=2, control=False, **QUIET),
        {"n_pairs": "count"},
    ),
    "moves": Call(
        of("dissociation", "moves"),
        lambda things: {"pattern_a": torch.rand(2, 3), "pattern_b": torch.rand(2, 3),
                        "written_a": torch.rand(2, 3, 4), "written_b": torch.rand(2, 3, 4)},
        {"pattern_a": "tensor", "pattern_b": "tensor", "written_a": "tensor",
         "written_b": "tensor"},
    ),
    "context_influence": Call(
        of("influence", "context_influence"),
        with_model(text=TEXT, word="bank", draws=2, seed=0),
        {"model": "model", "word": "only a word", "draws": "count", "seed": "seed"},
    ),
}  # fmt: skip
