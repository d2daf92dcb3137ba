"""Public functions with arguments that work, and what each argument must not be.

A table that tests of hostile arguments go through. Each of ``CALLS`` is a function with arguments
that work, and says of which kind the others are; `hostile_values` holds the values of a kind.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hostile_values import OTHER, TEXT, TEXTS

import wvprobe
from wvprobe.datasets import SenseDataset


class Call(NamedTuple):
    """A function with arguments that work, and the kinds of those that do not."""

    function: Callable[..., Any]
    arguments: Callable[["Things"], dict[str, Any]]
    wrong: Mapping[str, str]


class Things:
    """What functions are given, made when it is asked for, on the plainest of the families."""

    def __init__(self, tiny: Callable[..., Any], folder: Path) -> None:
        self.tiny, self.folder = tiny, folder

    @cached_property
    def model(self) -> Any:
        return self.tiny("llama")

    @cached_property
    def heads(self) -> Any:
        return wvprobe.HeadWeights.from_model(self.model)

    @cached_property
    def senses(self) -> Any:
        whole = wvprobe.load_senses()
        kept = {}
        for item in whole.items:
            if item.word in ("bank", "bat"):
                kept.setdefault((item.word, item.sense), []).append(item)
        items = [item for same in kept.values() for item in same[:6]]
        return SenseDataset("few", tuple(items))

    @cached_property
    def ledger(self) -> Any:
        return wvprobe.score_ledger(self.model, TEXT, query="bank", key="river", layer=1, head=0)

    @cached_property
    def behaviour(self) -> Any:
        return wvprobe.head_behaviour(self.model, texts=TEXTS, **_FEW)

    @cached_property
    def encoding(self) -> Any:
        from wvprobe.words import encode

        return encode(self.model, TEXT)

    @cached_property
    def whole(self) -> Any:
        return wvprobe.capture(self.model, TEXT, "v")["v"]

    @cached_property
    def x(self) -> Any:
        return torch.randn(24, 2, 5, generator=torch.Generator().manual_seed(0))

    @cached_property
    def payload(self) -> Any:
        return wvprobe.payload(self.model, self.senses, **_SENSES, draws=3, control_draws=2)


_FEW = {"samples": 2, "length": 4, "max_offset": 3, "progress": False}
_SENSES: dict[str, Any] = {"min_count": 2, "folds": 2, "sites": ("v",)}
_QUIET = {"progress": False}
_WORDS = {"query": "bank", "key": "river"}


def _of(module: str, name: str) -> Callable[..., Any]:
    """Return a function that looks the name up when it is called, so that collecting is quick."""

    def call(*given: Any, **settings: Any) -> Any:
        from importlib import import_module

        found: Any = import_module(f"wvprobe.{module}")
        for part in name.split("."):
            found = getattr(found, part)
        return found(*given, **settings)

    return call


def _method(thing: str, name: str) -> Callable[..., Any]:
    """Return a function that calls a method of what is passed under `thing`."""

    def call(**settings: Any) -> Any:
        return getattr(settings.pop(thing), name)(**settings)

    return call


def _model(**settings: Any) -> Callable[[Things], dict[str, Any]]:
    return lambda things: {"model": things.model, **settings}


def _heads(**settings: Any) -> Callable[[Things], dict[str, Any]]:
    return lambda things: {"heads": things.heads, **settings}


def _senses(**settings: Any) -> Callable[[Things], dict[str, Any]]:
    return lambda things: {"model": things.model, "dataset": things.senses, **settings}


def _probes(**settings: Any) -> Callable[[Things], dict[str, Any]]:
    return lambda things: {"X": things.x, "y": [0, 1] * 12, "folds": 2, "penalty": 1.0,
                           "description_length": False, **settings}  # fmt: skip


CALLS: dict[str, Call] = {
    "find_word": Call(
        wvprobe.find_word,
        _model(text=TEXT, word="bank", occurrence=0),
        {"model": "model", "word": "only a word", "occurrence": "index"},
    ),
    "encode": Call(_of("words", "encode"), _model(text=TEXT), {"model": "model"}),
    "locate": Call(
        _of("words", "locate"),
        lambda things: {"encoding": things.encoding, "word": "bank", "occurrence": 0},
        {"encoding": "object", "word": "only a word", "occurrence": "index"},
    ),
    "word_at": Call(
        _of("words", "word_at"),
        lambda things: {"encoding": things.encoding, "start": 4, "end": 9},
        {"encoding": "object", "start": "index", "end": "index"},
    ),
    "characters_at": Call(
        _of("words", "characters_at"),
        lambda things: {"encoding": things.encoding, "start": 4, "end": 9},
        {"encoding": "object", "start": "index", "end": "index"},
    ),
    "capture": Call(
        wvprobe.capture,
        _model(texts=TEXTS, sites=("v",), layers=[0], positions=1, pool="last", batch_size=2),
        {"model": "model", "sites": "choices", "layers": "layers",
         "positions": "optional index in all", "pool": "optional choice", "batch_size": "count"},
    ),
    "capture, words": Call(
        wvprobe.capture, _model(texts=TEXTS, sites="v", words="bank"), {"words": "words"}
    ),
    "capture, in a folder": Call(
        wvprobe.capture,
        lambda things: {"model": things.model, "texts": TEXTS, "sites": "v", "words": "bank",
                        "out": things.folder / "captured"},
        {"out": "folder"},
    ),
    "read_sites": Call(
        _of("activations", "read_sites"),
        _model(texts=TEXTS, sites=("v",), layers=0, positions=1),
        {"model": "model", "sites": "choices", "layers": "layers"},
    ),
    "open_store": Call(
        _of("activations", "open_store"),
        lambda things: {"folder": _stored(things)},
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
        _of("inputs", "mean_input"), _model(texts=TEXTS, **_QUIET), {"model": "model"}
    ),
    "input_covariance": Call(
        _of("inputs", "input_covariance"), _model(texts=TEXTS, **_QUIET), {"model": "model"}
    ),
    "stream_components": Call(
        _of("components", "stream_components"),
        _model(text=TEXT, layer=1),
        {"model": "model", "layer": "index"},
    ),
    "stream_sources": Call(
        _of("components", "stream_sources"),
        _model(text=TEXT, layer=1),
        {"model": "model", "layer": "index"},
    ),
    "components_at": Call(
        _of("components", "components_at"),
        _model(texts=TEXTS, positions=[1, 2, 1], layer=1),
        {"model": "model", "positions": "layers", "layer": "index"},
    ),
    "head_behaviour": Call(
        wvprobe.head_behaviour,
        _model(texts=TEXTS, batch_size=2, seed=0, **_FEW),
        {"model": "model", "samples": "from 2", "length": "count", "max_offset": "count",
         "batch_size": "count", "seed": "seed"},
    ),
    "behaviour_agreement": Call(
        _of("behaviour", "behaviour_agreement"),
        lambda things: {"behaviour": things.behaviour, "weights": {"w": torch.ones(3, 6).cumsum(1)},
                        "pairs": None, "resample": "layer", "seed": 0},
        {"behaviour": "object", "weights": "object", "pairs": "choices", "resample": "choice",
         "seed": "seed"},
    ),
    "BehaviourResult.excess": Call(
        _method("result", "excess"),
        lambda things: {"result": things.behaviour, "score": "previous_token"},
        {"score": "choice"},
    ),
    "BehaviourResult.named": Call(
        _method("result", "named"),
        lambda things: {"result": things.behaviour, "k": 2, "kinds": ("sink",)},
        {"k": "count", "kinds": "choices"},
    ),
    "composed_with": Call(
        _of("behaviour", "composed_with"),
        lambda things: {"scores": torch.zeros(3, 6, 3, 6), "layer": 1, "head": 2},
        {"scores": "tensor", "layer": "index", "head": "index"},
    ),
    "dependency_heads": Call(
        _of("behaviour", "dependency_heads"),
        lambda things: {"model": things.model, "dataset": _treebank(things), "limit": 20,
                        "min_pairs": 2, "exclude": ("root",), "seed": 0, "batch_size": 4, **_QUIET},
        {"model": "model", "dataset": "object", "limit": "count", "min_pairs": "count",
         "seed": "seed", "batch_size": "count"},
    ),
    "value_flow": Call(
        wvprobe.value_flow,
        _model(text=TEXT, layer=1, token=7, position=2, against=9),
        {"model": "model", "layer": "layers", "token": "token", "position": "optional word",
         "against": "token"},
    ),
    "exchange": Call(
        wvprobe.exchange,
        _model(text_a=TEXT, text_b=OTHER, part="pattern", method="exchange",
               layers=[1], heads=[0], level="query", destination="bank", draws=2, seed=0),
        {"model": "model", "part": "choice", "method": "choice", "layers": "layers",
         "heads": "layers", "level": "choice", "destination": "optional word", "seed": "seed"},
    ),
    "exchange, of draws": Call(
        wvprobe.exchange,
        _model(text_a=TEXT, part="pattern", method="resample", layers=[1], token=7, draws=2),
        {"draws": "count", "token": "token", "seed": "seed"},
    ),
    "exchange, of a path": Call(
        wvprobe.exchange,
        _model(text_a=TEXT, text_b=OTHER, part="value", layers=[0], reader=(2, 1), query=4, key=2,
               path="q"),
        {"reader": "reader", "query": "word", "key": "word", "path": "optional choice"},
    ),
    "double_dissociation": Call(
        _of("dissociation", "double_dissociation"),
        _model(pairs=[(TEXT, OTHER), (OTHER, TEXT)], destination="bank", layers=[1], n_pairs=1,
               control=False, seed=0, **_QUIET),
        {"model": "model", "pairs": "pairs", "destination": "optional word", "layers": "layers",
         "seed": "seed"},
    ),
    "double_dissociation, of its own pairs": Call(
        _of("dissociation", "double_dissociation"),
        _model(layers=[1], n_pairs=2, control=False, **_QUIET),
        {"n_pairs": "count"},
    ),
    "moves": Call(
        _of("dissociation", "moves"),
        lambda things: {"pattern_a": torch.rand(2, 3), "pattern_b": torch.rand(2, 3),
                        "written_a": torch.rand(2, 3, 4), "written_b": torch.rand(2, 3, 4)},
        {"pattern_a": "tensor", "pattern_b": "tensor", "written_a": "tensor",
         "written_b": "tensor"},
    ),
    "context_influence": Call(
        _of("influence", "context_influence"),
        _model(text=TEXT, word="bank", draws=2, seed=0),
        {"model": "model", "word": "only a word", "draws": "count", "seed": "seed"},
    ),
    "HeadBudget": Call(
        wvprobe.HeadBudget,
        lambda things: {"d_model": 64, "n_heads": 4, "d_head": 16, "n_kv_heads": 2, "d_head_v": 16,
                        "n_layers": 2, "rest": 100, "biases": ("Q",)},
        {"d_model": "count", "n_heads": "count", "d_head": "count", "n_kv_heads": "count",
         "d_head_v": "count", "n_layers": "count", "rest": "from 0", "biases": "names"},
    ),
    "HeadBudget, latent": Call(
        wvprobe.HeadBudget,
        lambda things: {"d_model": 64, "n_heads": 4, "d_head": 16, "kv_rank": 8, "q_rank": 8,
                        "d_shared_key": 4},
        {"kv_rank": "count", "q_rank": "count", "d_shared_key": "from 0"},
    ),
    "HeadBudget.kv_cache_bytes": Call(
        _method("budget", "kv_cache_bytes"),
        lambda things: {"budget": wvprobe.HeadBudget(d_model=64, n_heads=4), "dtype": "bfloat16"},
        {"dtype": "choice"},
    ),
    "HeadBudget.flops": Call(
        _method("budget", "flops"),
        lambda things: {"budget": wvprobe.HeadBudget(d_model=64, n_heads=4), "context": 8},
        {"context": "count"},
    ),
    "HeadBudget.from_model": Call(wvprobe.HeadBudget.from_model, _model(), {"model": "model"}),
    "HeadBudget.from_config": Call(
        wvprobe.HeadBudget.from_config,
        lambda things: {"config": things.model.original_model.config},
        {"config": "object"},
    ),
    "alternatives": Call(
        wvprobe.alternatives,
        lambda things: {"budget": wvprobe.HeadBudget(d_model=64, n_heads=4), "context": 8,
                        "dtype": "bfloat16"},
        {"budget": "object", "context": "count", "dtype": "choice"},
    ),
    "head_scaling": Call(
        _of("budget", "head_scaling"),
        lambda things: {"known": wvprobe.known_architectures(), "widths": (64, 128), "seed": 0},
        {"known": "object", "widths": "counts", "seed": "seed"},
    ),
    "HeadScaling.slope": Call(
        lambda **settings: _of("budget", "head_scaling")().slope(**settings),
        lambda things: {"quantity": "n_heads", "scope": "all models"},
        {"quantity": "choice", "scope": "choice"},
    ),
    "known_architectures()[…]": Call(
        lambda name: wvprobe.known_architectures()[name],
        lambda things: {"name": "BERT-base"},
        {"name": "choice"},
    ),
    "time_attention": Call(
        wvprobe.time_attention,
        lambda things: {"d_model": 32, "n_tokens": 8, "d_heads": (8, 16), "uneven": (),
                        "kernels": ["eager"], "directions": ["forward"], "device": "cpu",
                        "dtype": "float32", "seconds": 0.0, "seed": 0},
        {"d_model": "count", "n_tokens": "count", "d_heads": "widths", "uneven": "uneven",
         "kernels": "choices", "directions": "choices", "device": "device",
         "dtype": "optional choice", "seconds": "seconds", "seed": "seed"},
    ),
    "AttentionTimes.spread": Call(
        lambda **settings: _times().spread(**settings),
        lambda things: {"kernel": "eager", "direction": "forward", "widths": (8, 16), "seed": 0},
        {"kernel": "optional choice", "direction": "choice", "widths": "widths", "seed": "seed"},
    ),
    "AttentionTimes.fastest_kernel": Call(
        lambda **settings: _times().fastest_kernel(**settings),
        lambda things: {"direction": "forward"},
        {"direction": "choice", "device": "optional choice"},
    ),
    "sequential_heads": Call(
        wvprobe.sequential_heads,
        _model(texts=TEXTS[:1], layers=[1], orders=1, seed=0),
        {"model": "model", "layers": "layers", "orders": "orders", "seed": "seed"},
    ),
    "repeated_head": Call(
        wvprobe.repeated_head,
        _model(texts=TEXTS[:1], layers=[1], seed=0),
        {"model": "model", "layers": "layers", "seed": "seed"},
    ),
    "head_interactions": Call(
        wvprobe.head_interactions,
        _model(texts=TEXTS[:1], layers=[1], seed=0),
        {"model": "model", "layers": "layers", "seed": "seed"},
    ),
    "head_ranks": Call(
        _of("counterfactual", "head_ranks"),
        _model(texts=[*TEXTS] * 4, share=0.9, seed=0),
        {"model": "model", "share": "share", "seed": "seed"},
    ),
    "resize_heads": Call(
        wvprobe.resize_heads,
        _model(texts=TEXTS[:1], budget=0.5, allocation="uniform", part="OV", multiple_of=1,
               scope="model", calibration=TEXTS, seed=0),
        {"model": "model", "budget": "share", "allocation": "choice", "part": "choice",
         "multiple_of": "count", "scope": "choice", "seed": "seed"},
    ),
    "share_kv_heads": Call(
        wvprobe.share_kv_heads,
        _model(texts=TEXTS[:1], n_kv_heads=1, method="mean", grouping="order", calibration=TEXTS,
               seed=0),
        {"model": "model", "n_kv_heads": "count", "method": "choice", "grouping": "choice",
         "after": "object", "seed": "seed"},
    ),
    "compare_biases": Call(
        wvprobe.compare_biases,
        lambda things: {"seeds": 2, "n_heads": 2, "d_head": 2, "symbols": 3, "steps": 1,
                        "learning_rate": 0.01, "seed": 0, **_QUIET},
        {"seeds": "count", "n_heads": "count", "d_head": "count", "symbols": "count",
         "steps": "count", "learning_rate": "positive", "seed": "seed"},
    ),
    "load_senses": Call(
        wvprobe.load_senses, lambda things: {"format": "auto"},
        {"path": "file", "format": "choice"},
    ),
    "load_conllu": Call(
        wvprobe.load_conllu,
        lambda things: {"path": _treebank_file(things), "column": "upos"},
        {"path": "file", "column": "choice"},
    ),
    "load_iob2": Call(
        wvprobe.load_iob2, lambda things: {"path": _entities(things)}, {"path": "file"}
    ),
    "load_labels": Call(
        _of("datasets", "load_labels"),
        lambda things: {"table": _table(things)},
        {"table": "file"},
    ),
    "load_texts": Call(
        _of("datasets", "load_texts"), lambda things: {"path": _lines(things)}, {"path": "file"}
    ),
    "load_prose": Call(
        _of("datasets", "load_prose"),
        lambda things: {"split": "calibration", "genre": None},
        {"split": "choice", "genre": "optional choice"},
    ),
    "labelled_senses": Call(
        _of("datasets", "labelled_senses"),
        lambda things: {"dataset": things.senses},
        {"dataset": "object"},
    ),
    "SenseDataset.only": Call(
        _method("dataset", "only"),
        lambda things: {"dataset": things.senses, "word": "bank"},
        {"word": "choice"},
    ),
    "LabelledDataset.with_column": Call(
        _method("dataset", "with_column"),
        lambda things: {"dataset": _treebank(things), "column": "upos"},
        {"column": "choice"},
    ),
    "labelled_words": Call(
        _of("labelled", "labelled_words"),
        lambda things: {"model": things.model, "dataset": _treebank(things), "column": "upos",
                        "per_sentence": 2, "labels": None, "min_count": 0, "limit": 10, "seed": 0},
        {"model": "model", "dataset": "object", "column": "optional choice",
         "per_sentence": "count", "labels": "choices", "min_count": "from 0", "limit": "count",
         "seed": "seed"},
    ),
    "drift": Call(
        wvprobe.drift,
        _senses(position="target", pool="last", correction=None, max_occurrences=20, seed=0),
        {"model": "model", "dataset": "object", "position": "choice", "pool": "optional choice",
         "correction": "optional choice", "max_occurrences": "from 2", "seed": "seed",
         "store": "object"},
    ),
    "drift_baseline": Call(
        _of("contextual_drift", "drift_baseline"),
        _senses(sentences=20, seed=0),
        {"model": "model", "dataset": "object", "sentences": "count", "seed": "seed"},
    ),
    "drift_drivers": Call(
        wvprobe.drift_drivers,
        _senses(layer=2, n_pairs=2, n_heads=2, n_checked=1, seed=0),
        {"model": "model", "dataset": "object", "layer": "optional index", "n_pairs": "count",
         "n_heads": "count", "n_checked": "from 0", "pool": "optional choice", "seed": "seed"},
    ),
    "drift_pair": Call(
        wvprobe.drift_pair,
        _model(text_a=TEXT, text_b="A power bank.", word="bank", layer=1, seed=0),
        {"model": "model", "word": "only a word", "layer": "optional index", "seed": "seed",
         "baseline": "object"},
    ),
    "fit_correction": Call(
        _of("contextual_drift", "fit_correction"),
        lambda things: {"tokens": torch.randn(40, 2, 5), "kind": "mean"},
        {"tokens": "vectors", "kind": "choice"},
    ),
    "growth_law": Call(
        _of("contextual_drift", "growth_law"),
        lambda things: {"curves": {"a": torch.rand(4, 6).cumsum(1)}, "words": None,
                        "n_layers": None, "errors": "absolute", "seed": 0},
        {"curves": "object", "words": "choices", "n_layers": "n_layers", "errors": "choice",
         "seed": "seed"},
    ),
    "layer_similarity": Call(
        _of("contextual_drift", "layer_similarity"),
        lambda things: {"x": torch.randn(12, 3, 5), "words": ["a", "b"] * 6, "seed": 0},
        {"x": "vectors", "words": "words of items", "seed": "seed"},
    ),
    "normalised_distance": Call(
        _of("contextual_drift", "normalised_distance"),
        lambda things: {"a": torch.randn(3, 5), "b": torch.randn(3, 5)},
        {"a": "tensor", "b": "tensor"},
    ),
    "held_out_senses": Call(
        _of("contextual_drift", "held_out_senses"),
        lambda things: {"model": things.model, "dataset": _split(things), "seed": 0},
        {"model": "model", "dataset": "object", "train": "choice", "test": "choice",
         "position": "choice", "pool": "optional choice", "seed": "seed"},
    ),
    "score_drift": Call(
        _of("contextual_drift", "score_drift"),
        _senses(max_occurrences=10, seed=0),
        {"model": "model", "dataset": "object", "max_occurrences": "count", "seed": "seed"},
    ),
    "sense_map": Call(
        _of("sense_maps", "sense_map"),
        lambda things: {"model": things.model, "word": "bank", "layer": 1, "seed": 0,
                        "dataset": things.senses},
        {"model": "model", "word": "only a word", "layer": "optional index", "dataset": "object",
         "seed": "seed"},
    ),
    "sense_map_by_layer": Call(
        _of("sense_maps", "sense_map_by_layer"),
        lambda things: {"model": things.model, "word": "bank", "seed": 0, "dataset": things.senses},
        {"model": "model", "word": "only a word", "dataset": "object", "seed": "seed"},
    ),
    "audit": Call(wvprobe.audit, _model(texts=TEXTS[:1]), {"model": "model"}),
    "quick_audit": Call(_of("auditing", "quick_audit"), _model(), {"model": "model"}),
    "load": Call(
        wvprobe.load,
        lambda things: {"source": "tiny:llama", "device": "cpu", "dtype": "float32",
                        "audit": False},
        {"source": "source", "device": "device", "dtype": "choice", "n_devices": "count",
         "device_map": "device map", "tokenizer": "source"},
    ),
    "tiny_model": Call(
        _of("testing", "tiny_model"),
        lambda things: {"family": "gpt2", "seed": 0, "dtype": "float32"},
        {"family": "choice", "seed": "seed", "dtype": "choice"},
    ),
    "induction_model": Call(
        _of("testing", "induction_model"), lambda things: {"seed": 0}, {"seed": "seed"}
    ),
    "fit_probes": Call(
        wvprobe.fit_probes,
        _probes(method="logistic", score="accuracy", n_permutations=0, inner_folds=2,
                tolerance=1e-3, most_iterations=100, seed=0),
        {"X": "features", "y": "labels", "groups": "optional labels", "folds": "from 2",
         "penalty": "penalty", "method": "choice", "score": "choice", "references": "references",
         "n_permutations": "from 0", "permute": "choice", "strata": "optional labels",
         "inner_folds": "from 2", "tolerance": "positive", "most_iterations": "count",
         "penalties": "penalties", "site_axes": "axes", "block": "count", "seed": "seed"},
    ),
    "fit_probes, permuted": Call(
        wvprobe.fit_probes,
        _probes(method="mean_difference", penalty="cv", n_permutations=3),
        {"permute": "choice", "seed": "seed"},
    ),
    "ProbeResult.best": Call(
        lambda k, by: wvprobe.fit_probes(torch.randn(24, 2, 5), [0, 1] * 12, folds=2, penalty=1.0,
                                         description_length=False).best(k, by=by),
        lambda things: {"k": 2, "by": None},
        {"k": "count", "by": "optional choice"},
    ),
    "complement": Call(
        _of("probes", "complement"),
        lambda things: {"x": torch.randn(8, 2, 5), "weight": torch.randn(2, 5, 2)},
        {"x": "features", "weight": "weight"},
    ),
    "control_task": Call(
        _of("probes", "control_task"),
        lambda things: {"types": list("abcabc"), "y": [0, 1, 0, 1, 0, 1], "draws": 2, "seed": 0},
        {"types": "types", "y": "types", "draws": "count", "seed": "seed"},
    ),
    "within_strata": Call(
        _of("probes", "within_strata"),
        lambda things: {"y": [0, 1, 0, 1], "strata": list("aabb"), "draws": 2, "seed": 0},
        {"y": "labels", "strata": "types", "draws": "count", "seed": "seed"},
    ),
    "haar_projections": Call(
        _of("probes", "haar_projections"),
        lambda things: {"x": torch.randn(8, 2, 5), "width": 2, "draws": 2, "seed": 0},
        {"x": "features", "width": "index", "draws": "count", "seed": "seed"},
    ),
    "haar_complements": Call(
        _of("probes", "haar_complements"),
        lambda things: {"x": torch.randn(8, 2, 5), "rank": 2, "draws": 2, "seed": 0},
        {"x": "features", "rank": "index", "draws": "count", "seed": "seed"},
    ),
    "top_components": Call(
        _of("probes", "top_components"),
        lambda things: {"x": torch.randn(8, 2, 5), "width": 2},
        {"x": "features", "width": "index"},
    ),
    "payload": Call(
        wvprobe.payload,
        _senses(label=None, method=None, penalty=None, score="accuracy", draws=3, control_draws=2,
                null_draws=0, limit=100, per_sentence=2, per_label=None, groups="auto", pool="last",
                seed=0, **_SENSES),
        {"model": "model", "dataset": "object", "label": "optional choice", "sites": "choices",
         "method": "optional choice", "penalty": "optional penalty", "score": "choice",
         "draws": "count", "control_draws": "from 0", "null_draws": "from 0", "limit": "count",
         "per_sentence": "count", "per_label": "count", "min_count": "count", "groups": "choice",
         "folds": "from 2", "pool": "optional choice", "seed": "seed", "store": "object"},
    ),
    "PayloadResult.best": Call(
        _method("result", "best"),
        lambda things: {"result": things.payload, "k": 2, "site": "v", "by": "random"},
        {"k": "count", "site": "choice", "by": "choice"},
    ),
    "confirm_heads": Call(
        _of("value_payload", "confirm_heads"),
        _senses(heads=[(1, 0)], label="pos", groups="sentence", draws=2, min_count=2, folds=2,
                penalty=1.0, seed=0),
        {"model": "model", "dataset": "object", "heads": "pairs of ints", "label":
         "optional choice", "draws": "count", "score": "choice", "penalty": "penalty",
         "folds": "from 2", "groups": "choice", "pool": "optional choice", "seed": "seed"},
    ),
    "erase": Call(
        wvprobe.erase,
        _senses(label="pos", groups="sentence", site="v", destination="target", heads=[(1, 0)],
                draws=2, method="lda", min_count=2, folds=2, kl_words=4, seed=0),
        {"model": "model", "dataset": "object", "label": "optional choice", "site": "choice",
         "destination": "choice", "heads": "pairs of ints", "kl_heads": "pairs of ints",
         "kl_words": "from 0", "draws": "count", "method": "choice",
         "penalty": "optional penalty", "score": "choice", "limit": "count",
         "per_sentence": "count", "per_label": "count", "min_count": "count", "groups": "choice",
         "folds": "from 2", "seed": "seed"},
    ),
    "payload_map": Call(
        _of("value_payload", "payload_map"),
        lambda things: {"results": {"sense": things.payload}},
        {"results": "object"},
    ),
    "figure": Call(
        wvprobe.figure, lambda things: {"result": things.behaviour}, {"result": "object"}
    ),
    "sweep": Call(
        wvprobe.sweep,
        lambda things: {"function": wvprobe.audit, "models": ["tiny:gpt2"], "arguments": None,
                        "n_jobs": 1, "threads": 1},
        {"function": "object", "models": "object", "arguments": "arguments", "n_jobs": "n_jobs",
         "threads": "count"},
    ),
    "context_dependence": Call(
        wvprobe.context_dependence,
        _model(text_a=TEXT, text_b=TEXTS[1], **_WORDS),
        {"model": "model", "query": "word", "key": "word"},
    ),
    "score_ledger": Call(
        wvprobe.score_ledger,
        _model(text=TEXT, **_WORDS, layer=1, head=0, group="component"),
        {"model": "model", "query": "word", "key": "word", "layer": "index", "head": "index",
         "group": "choice"},
    ),
    "LedgerResult.top": Call(
        _method("ledger", "top"),
        lambda things: {"ledger": things.ledger, "k": 3, "by": "term"},
        {"k": "count", "by": "choice"},
    ),
    "LedgerResult.marginal": Call(
        _method("ledger", "marginal"),
        lambda things: {"ledger": things.ledger, "side": "query"},
        {"side": "choice"},
    ),
    "check_terms": Call(
        _of("ledger", "check_terms"),
        lambda things: {"model": things.model, "ledger": things.ledger, "n": 3, "seed": 0,
                        "terms": None},
        {"model": "model", "ledger": "object", "n": "count", "terms": "pairs", "seed": "seed"},
    ),
    "score_variance": Call(
        wvprobe.score_variance,
        _model(texts=[f"{text} {other}" for text in TEXTS for other in TEXTS], folds=2, seed=0,
               max_pairs=500, **_QUIET),
        {"model": "model", "query": "word of texts", "key": "word of texts", "folds": "from 2",
         "seed": "seed", "max_pairs": "count"},
    ),
    "pair_scores": Call(
        _of("word_pairs", "pair_scores"),
        _model(texts=[TEXT], first="bank", second="river"),
        {"model": "model", "first": "only a word", "second": "only a word"},
    ),
    "composition": Call(
        wvprobe.composition,
        _heads(mode="Q", offset=0),
        {"heads": "heads", "mode": "choice", "offset": "number", "metric": "metric",
         "part": "optional choice"},
    ),
    "CompositionResult.top": Call(
        lambda heads, **settings: wvprobe.composition(heads, "K").top(**settings),
        _heads(k=3, level=None),
        {"k": "count", "level": "share"},
    ),
    "copying_scores": Call(
        wvprobe.copying_scores,
        _heads(rows=10, seed=0, layers=[0], embedding="W_E", **_QUIET),
        {"heads": "heads", "rows": "count", "seed": "seed", "layers": "layers",
         "embedding": "choice"},
    ),
    "HeadWeights.from_model": Call(wvprobe.HeadWeights.from_model, _model(), {"model": "model"}),
    "HeadWeights.from_tensors": Call(
        wvprobe.HeadWeights.from_tensors,
        lambda things: _tensors(things),
        {"W_Q": "tensor", "W_K": "tensor", "W_V": "tensor", "W_O": "tensor", "b_Q": "tensor",
         "b_K": "tensor", "b_V": "tensor", "b_O": "tensor", "scale": "scale", "rotary": "object",
         "soft_cap": "positive", "W_E": "tensor", "W_pos": "tensor", "W_U": "vectors"},
    ),
    "HeadWeights.from_safetensors": Call(
        wvprobe.HeadWeights.from_safetensors,
        lambda things: {"folder": _checkpoint(things)},
        {"folder": "file"},
    ),
    "HeadWeights.ov": Call(
        _method("heads", "ov"), _heads(layer=1, head=2), {"layer": "index", "head": "index"}
    ),
    "HeadWeights.qk": Call(
        _method("heads", "qk"),
        _heads(layer=1, head=2, offset=1, part=None),
        {"layer": "index", "head": "index", "offset": "number", "part": "optional choice"},
    ),
    "HeadWeights.qk_between": Call(
        _method("heads", "qk_between"),
        lambda things: {"heads": wvprobe.HeadWeights.from_model(things.tiny("gpt2")), "layer": 0,
                        "head": 0, "query": "token", "key": "position"},
        {"layer": "index", "head": "index", "query": "choice", "key": "choice"},
    ),
    "HeadWeights.kv_head": Call(_method("heads", "kv_head"), _heads(head=2), {"head": "index"}),
    "HeadWeights.ov_factors": Call(
        _method("heads", "ov_factors"), _heads(layer=1), {"layer": "index"}
    ),
    "HeadWeights.qk_factors": Call(
        _method("heads", "qk_factors"),
        _heads(layer=1, offset=0, part=None),
        {"layer": "index", "offset": "number", "part": "optional choice"},
    ),
    "offset_profile": Call(
        wvprobe.offset_profile,
        _heads(offsets=[0, 1, 2], wavelength=100.0, mean_input=torch.ones(3, 42)),
        {"heads": "heads", "offsets": "offsets", "mean_input": "tensor", "wavelength": "positive"},
    ),
    "singular_vectors": Call(
        _of("singular", "singular_vectors"),
        _heads(which="QK", layer=1, head=2, offset=0, tolerance=None),
        {"heads": "heads", "which": "choice", "layer": "index", "head": "index",
         "metric": "metric", "tolerance": "tolerance", "part": "optional choice"},
    ),
    "SingularVectorsResult.group": Call(
        lambda heads, number: _of("singular", "singular_vectors")(heads, "OV", 0, 0).group(number),
        _heads(number=0),
        {"number": "index"},
    ),
    "spectra": Call(
        wvprobe.spectra,
        _heads(which="QK", offset=0, k=3, vocabulary=False, **_QUIET),
        {"heads": "heads", "which": "choice", "offset": "number", "metric": "metric", "k": "count",
         "part": "optional choice"},
    ),
    "subspace_overlap": Call(
        wvprobe.subspace_overlap,
        _heads(kind="OQ", energy=1.0, n_cosines=2, part=None),
        {"heads": "heads", "kind": "choice", "energy": "share", "n_cosines": "from 0",
         "part": "optional choice"},
    ),
    "top_tokens": Call(
        wvprobe.top_tokens,
        _heads(kind="OV", layer=1, head=2, token=7, k=3, embedding="W_E", **_QUIET),
        {"heads": "heads", "kind": "choice", "layer": "index", "head": "index",
         "token": "optional token", "k": "count", "embedding": "choice",
         "role": "optional choice"},
    ),
    "top_tokens, of a direction": Call(
        wvprobe.top_tokens,
        _heads(kind="QK", layer=1, head=2, direction=torch.ones(42), role="query", k=3, offset=0,
               **_QUIET),
        {"direction": "tensor", "role": "optional choice", "offset": "number", "words": "tokens"},
    ),
    "Result.load": Call(
        wvprobe.Result.load,
        lambda things: {"path": things.behaviour.save(things.folder / "behaviour")},
        {"path": "file"},
    ),
}  # fmt: skip


def _times() -> Any:
    given = {"uneven": (), "kernels": ["eager"], "directions": ["forward"]}
    return wvprobe.time_attention(32, 8, d_heads=(8, 16), seconds=0.0, **given)


def _stored(things: Things) -> Path:
    folder = things.folder / "stored"
    if not folder.exists():
        wvprobe.capture(things.model, TEXTS, "v", words="bank", out=folder, progress=False)
    return folder


def _treebank_file(things: Things) -> Path:
    path = things.folder / "few.conllu"
    if not path.exists():
        rows = (("DET", 2, "det"), ("NOUN", 3, "nsubj"), ("VERB", 0, "root"), ("ADV", 3, "advmod"))
        lines = []
        for noun, verb in product(("boat", "bank", "clerk", "river"), ("sank", "stood", "slept")):
            words = ("The", noun, verb, "there")
            lines += [f"# sent_id = {noun} {verb}", f"# text = {' '.join(words)}"]
            lines += [
                f"{i}\t{word}\t{word}\t{pos}\t_\t_\t{head}\t{relation}\t_\t_"
                for i, (word, (pos, head, relation)) in enumerate(zip(words, rows, strict=True), 1)
            ]
            lines.append("")
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def _treebank(things: Things) -> Any:
    return wvprobe.load_conllu(_treebank_file(things))


def _entities(things: Things) -> Path:
    path = things.folder / "few.iob2"
    path.write_text("1\tThe\tO\n2\tBank\tB-ORG\n\n" * 3, encoding="utf-8")
    return path


def _table(things: Things) -> Path:
    path = things.folder / "few.csv"
    path.write_text("sentence,word,label\nThe river bank.,bank,river\nA power bank.,bank,power\n")
    return path


def _lines(things: Things) -> Path:
    path = things.folder / "few.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    return path


def _split(things: Things) -> Any:
    from dataclasses import replace

    items = [replace(item, split=("train", "test")[place % 2])
             for place, item in enumerate(things.senses.items)]  # fmt: skip
    return SenseDataset("split", tuple(items))


def _checkpoint(things: Things) -> Path:
    import transformers

    folder = things.folder / "checkpoint"
    if not folder.exists():
        config = transformers.LlamaConfig(
            vocab_size=31, hidden_size=12, intermediate_size=7, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=6,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _tensors(things: Things) -> dict[str, Any]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0))

    return {
        "W_Q": draw(2, 4, 12, 3), "W_K": draw(2, 2, 12, 3), "W_V": draw(2, 2, 12, 5),
        "W_O": draw(2, 4, 5, 12), "b_Q": draw(2, 4, 3), "b_K": draw(2, 2, 3),
        "b_V": draw(2, 2, 5), "b_O": draw(2, 12), "W_E": draw(17, 12), "W_pos": draw(9, 12),
        "W_U": draw(12, 17),
    }  # fmt: skip
