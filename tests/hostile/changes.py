"""Budgets, timing and counterfactuals."""

import wvprobe
from hostile.things import QUIET, Call, method, of, timed, with_model
from hostile.values import TEXTS

CALLS: dict[str, Call] = {
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
        method("budget", "kv_cache_bytes"),
        lambda things: {"budget": wvprobe.HeadBudget(d_model=64, n_heads=4), "dtype": "bfloat16"},
        {"dtype": "choice"},
    ),
    "HeadBudget.flops": Call(
        method("budget", "flops"),
        lambda things: {"budget": wvprobe.HeadBudget(d_model=64, n_heads=4), "context": 8},
        {"context": "count"},
    ),
    "HeadBudget.from_model": Call(wvprobe.HeadBudget.from_model, with_model(), {"model": "model"}),
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
        of("budget", "head_scaling"),
        lambda things: {"known": wvprobe.known_architectures(), "widths": (64, 128), "seed": 0},
        {"known": "object", "widths": "counts", "seed": "seed"},
    ),
    "HeadScaling.slope": Call(
        lambda **settings: of("budget", "head_scaling")().slope(**settings),
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
        lambda **settings: timed().spread(**settings),
        lambda things: {"kernel": "eager", "direction": "forward", "widths": (8, 16), "seed": 0},
        {"kernel": "optional choice", "direction": "choice", "widths": "widths", "seed": "seed"},
    ),
    "AttentionTimes.fastest_kernel": Call(
        lambda **settings: timed().fastest_kernel(**settings),
        lambda things: {"direction": "forward"},
        {"direction": "choice", "device": "optional choice"},
    ),
    "sequential_heads": Call(
        wvprobe.sequential_heads,
        with_model(texts=TEXTS[:1], layers=[1], orders=1, seed=0),
        {"model": "model", "layers": "layers", "orders": "orders", "seed": "seed"},
    ),
    "repeated_head": Call(
        wvprobe.repeated_head,
        with_model(texts=TEXTS[:1], layers=[1], seed=0),
        {"model": "model", "layers": "layers", "seed": "seed"},
    ),
    "head_interactions": Call(
        wvprobe.head_interactions,
        with_model(texts=TEXTS[:1], layers=[1], seed=0),
        {"model": "model", "layers": "layers", "seed": "seed"},
    ),
    "head_ranks": Call(
        of("counterfactual", "head_ranks"),
        with_model(texts=[*TEXTS] * 4, share=0.9, seed=0),
        {"model": "model", "share": "share", "seed": "seed"},
    ),
    "resize_heads": Call(
        wvprobe.resize_heads,
        with_model(texts=TEXTS[:1], budget=0.5, allocation="uniform", part="OV", multiple_of=1,
               scope="model", calibration=TEXTS, seed=0),
        {"model": "model", "budget": "share", "allocation": "choice", "part": "choice",
         "multiple_of": "count", "scope": "choice", "seed": "seed"},
    ),
    "share_kv_heads": Call(
        wvprobe.share_kv_heads,
        with_model(texts=TEXTS[:1], n_kv_heads=1, method="mean", grouping="order",
                   calibration=TEXTS,
               seed=0),
        {"model": "model", "n_kv_heads": "count", "method": "choice", "grouping": "choice",
         "after": "object", "seed": "seed"},
    ),
    "compare_biases": Call(
        wvprobe.compare_biases,
        lambda things: {"seeds": 2, "n_heads": 2, "d_head": 2, "symbols": 3, "steps": 1,
                        "learning_rate": 0.01, "seed": 0, **QUIET},
        {"seeds": "count", "n_heads": "count", "d_head": "count", "symbols": "count",
         "steps": "count", "learning_rate": "positive", "seed": "seed"},
    ),
}  # fmt: skip
