"""Probes, payload, figures and sweeps."""

import torch

import wvprobe
from hostile.things import SENSES, Call, method, of, with_probes, with_senses

CALLS: dict[str, Call] = {
    "fit_probes": Call(
        wvprobe.fit_probes,
        with_probes(method="logistic", score="accuracy", n_permutations=0, inner_folds=2,
                tolerance=1e-3, most_iterations=100, seed=0),
        {"X": "features", "y": "labels", "groups": "optional labels", "folds": "from 2",
         "penalty": "penalty", "method": "choice", "score": "choice", "references": "references",
         "n_permutations": "from 0", "permute": "choice", "strata": "optional labels",
         "inner_folds": "from 2", "tolerance": "positive", "most_iterations": "count",
         "penalties": "penalties", "site_axes": "axes", "block": "count", "seed": "seed"},
    ),
    "fit_probes, permuted": Call(
        wvprobe.fit_probes,
        with_probes(method="mean_difference", penalty="cv", n_permutations=3),
        {"permute": "choice", "seed": "seed"},
    ),
    "ProbeResult.best": Call(
        lambda k, by: wvprobe.fit_probes(torch.randn(24, 2, 5), [0, 1] * 12, folds=2, penalty=1.0,
                                         description_length=False).best(k, by=by),
        lambda things: {"k": 2, "by": None},
        {"k": "count", "by": "optional choice"},
    ),
    "complement": Call(
        of("probes", "complement"),
        lambda things: {"x": torch.randn(8, 2, 5), "weight": torch.randn(2, 5, 2)},
        {"x": "features", "weight": "weight"},
    ),
    "control_task": Call(
        of("probes", "control_task"),
        lambda things: {"types": list("abcabc"), "y": [0, 1, 0, 1, 0, 1], "draws": 2, "seed": 0},
        {"types": "types", "y": "types", "draws": "count", "seed": "seed"},
    ),
    "within_strata": Call(
        of("probes", "within_strata"),
        lambda things: {"y": [0, 1, 0, 1], "strata": list("aabb"), "draws": 2, "seed": 0},
        {"y": "labels", "strata": "types", "draws": "count", "seed": "seed"},
    ),
    "haar_projections": Call(
        of("probes", "haar_projections"),
        lambda things: {"x": torch.randn(8, 2, 5), "width": 2, "draws": 2, "seed": 0},
        {"x": "features", "width": "index", "draws": "count", "seed": "seed"},
    ),
    "haar_complements": Call(
        of("probes", "haar_complements"),
        lambda things: {"x": torch.randn(8, 2, 5), "rank": 2, "draws": 2, "seed": 0},
        {"x": "features", "rank": "index", "draws": "count", "seed": "seed"},
    ),
    "top_components": Call(
        of("probes", "top_components"),
        lambda things: {"x": torch.randn(8, 2, 5), "width": 2},
        {"x": "features", "width": "index"},
    ),
    "payload": Call(
        wvprobe.payload,
        with_senses(label=None, method=None, penalty=None, score="accuracy", draws=3,
                    control_draws=2,
                null_draws=0, limit=100, per_sentence=2, per_label=None, groups="auto", pool="last",
                seed=0, **SENSES),
        {"model": "model", "dataset": "object", "label": "optional choice", "sites": "choices",
         "method": "optional choice", "penalty": "optional penalty", "score": "choice",
         "draws": "count", "control_draws": "from 0", "null_draws": "from 0", "limit": "count",
         "per_sentence": "count", "per_label": "count", "min_count": "count", "groups": "choice",
         "folds": "from 2", "pool": "optional choice", "seed": "seed", "store": "object"},
    ),
    "PayloadResult.best": Call(
        method("result", "best"),
        lambda things: {"result": things.payload, "k": 2, "site": "v", "by": "random"},
        {"k": "count", "site": "choice", "by": "choice"},
    ),
    "confirm_heads": Call(
        of("value_payload", "confirm_heads"),
        with_senses(heads=[(1, 0)], label="pos", groups="sentence", draws=2, min_count=2, folds=2,
                penalty=1.0, seed=0),
        {"model": "model", "dataset": "object", "heads": "pairs of ints", "label":
         "optional choice", "draws": "count", "score": "choice", "penalty": "penalty",
         "folds": "from 2", "groups": "choice", "pool": "optional choice", "seed": "seed"},
    ),
    "erase": Call(
        wvprobe.erase,
        with_senses(label="pos", groups="sentence", site="v", destination="target", heads=[(1, 0)],
                draws=2, method="lda", min_count=2, folds=2, kl_words=4, seed=0),
        {"model": "model", "dataset": "object", "label": "optional choice", "site": "choice",
         "destination": "choice", "heads": "pairs of ints", "kl_heads": "pairs of ints",
         "kl_words": "from 0", "draws": "count", "method": "choice",
         "penalty": "optional penalty", "score": "choice", "limit": "count",
         "per_sentence": "count", "per_label": "count", "min_count": "count", "groups": "choice",
         "folds": "from 2", "seed": "seed"},
    ),
    "payload_map": Call(
        of("value_payload", "payload_map"),
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
}  # fmt: skip
