"""Data sets, drift, senses, and models that are loaded."""

import torch

import wvprobe
from hostile.things import (
    Call,
    entities_file,
    lines_file,
    method,
    of,
    split_senses,
    table_file,
    treebank_data,
    treebank_file,
    with_model,
    with_senses,
)
from hostile.values import TEXT, TEXTS

CALLS: dict[str, Call] = {
    "load_senses": Call(
        wvprobe.load_senses, lambda things: {"format": "auto"},
        {"path": "file", "format": "choice"},
    ),
    "load_conllu": Call(
        wvprobe.load_conllu,
        lambda things: {"path": treebank_file(things), "column": "upos"},
        {"path": "file", "column": "choice"},
    ),
    "load_iob2": Call(
        wvprobe.load_iob2, lambda things: {"path": entities_file(things)}, {"path": "file"}
    ),
    "load_labels": Call(
        of("datasets", "load_labels"),
        lambda things: {"table": table_file(things)},
        {"table": "file"},
    ),
    "load_texts": Call(
        of("datasets", "load_texts"), lambda things: {"path": lines_file(things)}, {"path": "file"}
    ),
    "load_prose": Call(
        of("datasets", "load_prose"),
        lambda things: {"split": "calibration", "genre": None},
        {"split": "choice", "genre": "optional choice"},
    ),
    "labelled_senses": Call(
        of("datasets", "labelled_senses"),
        lambda things: {"dataset": things.senses},
        {"dataset": "object"},
    ),
    "SenseDataset.only": Call(
        method("dataset", "only"),
        lambda things: {"dataset": things.senses, "word": "bank"},
        {"word": "choice"},
    ),
    "LabelledDataset.with_column": Call(
        method("dataset", "with_column"),
        lambda things: {"dataset": treebank_data(things), "column": "upos"},
        {"column": "choice"},
    ),
    "labelled_words": Call(
        of("labelled", "labelled_words"),
        lambda things: {"model": things.model, "dataset": treebank_data(things), "column": "upos",
                        "per_sentence": 2, "labels": None, "min_count": 0, "limit": 10, "seed": 0},
        {"model": "model", "dataset": "object", "column": "optional choice",
         "per_sentence": "count", "labels": "choices", "min_count": "from 0", "limit": "count",
         "seed": "seed"},
    ),
    "drift": Call(
        wvprobe.drift,
        with_senses(position="target", pool="last", correction=None, max_occurrences=20, seed=0),
        {"model": "model", "dataset": "object", "position": "choice", "pool": "optional choice",
         "correction": "optional choice", "max_occurrences": "from 2", "seed": "seed",
         "store": "object"},
    ),
    "drift_baseline": Call(
        of("contextual_drift", "drift_baseline"),
        with_senses(sentences=20, seed=0),
        {"model": "model", "dataset": "object", "sentences": "count", "seed": "seed"},
    ),
    "drift_drivers": Call(
        wvprobe.drift_drivers,
        with_senses(layer=2, n_pairs=2, n_heads=2, n_checked=1, seed=0),
        {"model": "model", "dataset": "object", "layer": "optional index", "n_pairs": "count",
         "n_heads": "count", "n_checked": "from 0", "pool": "optional choice", "seed": "seed"},
    ),
    "drift_pair": Call(
        wvprobe.drift_pair,
        with_model(text_a=TEXT, text_b="A power bank.", word="bank", layer=1, seed=0),
        {"model": "model", "word": "only a word", "layer": "optional index", "seed": "seed",
         "baseline": "object"},
    ),
    "fit_correction": Call(
        of("contextual_drift", "fit_correction"),
        lambda things: {"tokens": torch.randn(40, 2, 5), "kind": "mean"},
        {"tokens": "vectors", "kind": "choice"},
    ),
    "growth_law": Call(
        of("contextual_drift", "growth_law"),
        lambda things: {"curves": {"a": torch.rand(4, 6).cumsum(1)}, "words": None,
                        "n_layers": None, "errors": "absolute", "seed": 0},
        {"curves": "object", "words": "choices", "n_layers": "n_layers", "errors": "choice",
         "seed": "seed"},
    ),
    "layer_similarity": Call(
        of("contextual_drift", "layer_similarity"),
        lambda things: {"x": torch.randn(12, 3, 5), "words": ["a", "b"] * 6, "seed": 0},
        {"x": "vectors", "words": "words of items", "seed": "seed"},
    ),
    "normalised_distance": Call(
        of("contextual_drift", "normalised_distance"),
        lambda things: {"a": torch.randn(3, 5), "b": torch.randn(3, 5)},
        {"a": "tensor", "b": "tensor"},
    ),
    "held_out_senses": Call(
        of("contextual_drift", "held_out_senses"),
        lambda things: {"model": things.model, "dataset": split_senses(things), "seed": 0},
        {"model": "model", "dataset": "object", "train": "choice", "test": "choice",
         "position": "choice", "pool": "optional choice", "seed": "seed"},
    ),
    "score_drift": Call(
        of("contextual_drift", "score_drift"),
        with_senses(max_occurrences=10, seed=0),
        {"model": "model", "dataset": "object", "max_occurrences": "count", "seed": "seed"},
    ),
    "sense_map": Call(
        of("sense_maps", "sense_map"),
        lambda things: {"model": things.model, "word": "bank", "layer": 1, "seed": 0,
                        "dataset": things.senses},
        {"model": "model", "word": "only a word", "layer": "optional index", "dataset": "object",
         "seed": "seed"},
    ),
    "sense_map_by_layer": Call(
        of("sense_maps", "sense_map_by_layer"),
        lambda things: {"model": things.model, "word": "bank", "seed": 0, "dataset": things.senses},
        {"model": "model", "word": "only a word", "dataset": "object", "seed": "seed"},
    ),
    "audit": Call(wvprobe.audit, with_model(texts=TEXTS[:1]), {"model": "model"}),
    "quick_audit": Call(of("auditing", "quick_audit"), with_model(), {"model": "model"}),
    "load": Call(
        wvprobe.load,
        lambda things: {"source": "tiny:llama", "device": "cpu", "dtype": "float32",
                        "audit": False},
        {"source": "source", "device": "device", "dtype": "choice", "n_devices": "count",
         "device_map": "device map", "tokenizer": "source"},
    ),
    "tiny_model": Call(
        of("testing", "tiny_model"),
        lambda things: {"family": "gpt2", "seed": 0, "dtype": "float32"},
        {"family": "choice", "seed": "seed", "dtype": "choice"},
    ),
    "induction_model": Call(
        of("testing", "induction_model"), lambda things: {"seed": 0}, {"seed": "seed"}
    ),
}  # fmt: skip
