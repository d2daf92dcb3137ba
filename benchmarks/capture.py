"""Capture two sites at one word of 256 sentences, against what a user would use instead.

``python -m benchmarks.capture``: SmolLM2, ``resid_post`` and ``v`` of all layers at one word.
Beside it, in the same process and by turns: TransformerLens's ``run_with_cache`` with a names
filter, in batches as the sentences come, and the bare transformers backbone in sorted batches with
its hidden states kept. Ratios are of the shortest of several rounds.
"""

from collections.abc import Callable
from typing import Any

import torch

import wvprobe
from benchmarks import finish, grown, seconds

ROUNDS = 3
BATCH = 32
_OPENINGS = (
    "The bank",
    "Near the old bank",
    "She said that the bank",
    "A power bank",
    "After the long winter the bank",
    "From the other side of the river the bank",
    "In a letter to the editor of the paper the bank",
    "He keeps his boat by the bank",
    "Nobody in the village knew why the bank",
    "Every morning on her way to work the bank",
    "Under the trees the bank",
    "As far as anyone could tell the bank",
    "Without a word the man at the bank",
    "On the map the bank",
    "When the rain had stopped at last the bank",
    "They walked until the bank",
)
_ENDINGS = (
    " was closed.",
    " looked green.",
    " was all that was left of it.",
    " lay before them in the light.",
    " had been sold, and nobody knew to whom.",
    " was too far away to be seen from the house.",
    " seemed smaller than it had in summer.",
    " could not be reached before dark.",
    " was where the two roads met.",
    " stood open.",
    " was full of people who had nothing to do.",
    " came up again in the conversation.",
    " had changed so much that he asked for the way.",
    " was covered with snow.",
    " would not do.",
    " was the first thing the children asked about when they came home.",
)
SENTENCES = [opening + ending for opening in _OPENINGS for ending in _ENDINGS]


def ours(model: Any) -> Any:
    """Capture with wvprobe."""
    return wvprobe.capture(model, SENTENCES, ["resid_post", "v"], words="bank", progress=False)


def run_with_cache(model: Any, positions: list[int]) -> torch.Tensor:
    """Capture with TransformerLens, as its documentation shows."""
    kept = []
    for start in range(0, len(SENTENCES), BATCH):
        part = SENTENCES[start : start + BATCH]
        with torch.no_grad():
            _, cache = model.run_with_cache(
                part, names_filter=lambda name: name.endswith(("hook_resid_post", "attn.hook_v"))
            )
        rows = torch.arange(len(part))
        at = torch.tensor(positions[start : start + BATCH])
        layers = range(model.cfg.n_layers)
        kept.append(
            torch.stack([cache[f"blocks.{layer}.hook_resid_post"][rows, at] for layer in layers], 1)
        )
        _ = [cache[f"blocks.{layer}.attn.hook_v"][rows, at] for layer in layers]
    return torch.cat(kept)


def bare(backbone: Any, tokens: list[list[int]], positions: list[int]) -> torch.Tensor:
    """Run the transformers backbone in sorted batches; keep hidden states at the word."""
    order = sorted(range(len(tokens)), key=lambda i: len(tokens[i]))
    kept: list[Any] = [None] * len(tokens)
    for start in range(0, len(order), BATCH):
        items = order[start : start + BATCH]
        longest = max(len(tokens[i]) for i in items)
        padded = torch.tensor([tokens[i] + [0] * (longest - len(tokens[i])) for i in items])
        mask = torch.tensor(
            [[1] * len(tokens[i]) + [0] * (longest - len(tokens[i])) for i in items]
        )
        with torch.no_grad():
            states = backbone(
                padded, attention_mask=mask, output_hidden_states=True, use_cache=False
            ).hidden_states
        for row, item in enumerate(items):
            kept[item] = torch.stack([state[row, positions[item]] for state in states])
    return torch.stack(kept)


def extra_megabytes(work: Callable[[], Any]) -> float:
    """Return how far the process grew beyond what it had, and beyond the result, while working."""
    result, _, megabytes = grown(work)
    held = sum(value.numel() * value.element_size() for value in result.values.values())
    return megabytes - held / 2**20


def main() -> None:
    """Run all three by turns and print ratios."""
    from transformers import AutoModelForCausalLM

    from wvprobe._packaged import ensure, packaged_models

    model = wvprobe.load("smollm2-135m")
    backbone = AutoModelForCausalLM.from_pretrained(
        ensure(packaged_models()[0]), dtype=torch.float32, local_files_only=True
    ).base_model.eval()
    memory = extra_megabytes(lambda: ours(model))  # first, before anything else grew the process
    seen = ours(model)
    positions = [at[-1] for at in seen.positions]
    tokens = [list(ids) for ids in seen.tokens]
    sides = {
        "wvprobe": lambda: ours(model),
        "run_with_cache": lambda: run_with_cache(model, positions),
        "bare backbone": lambda: bare(backbone, tokens, positions),
    }
    # All three read the same numbers, or the race is no race.
    torch.testing.assert_close(
        run_with_cache(model, positions), seen["resid_post"], rtol=1e-3, atol=0.05
    )
    # transformers' last state is behind the final norm, so the last stream is left out.
    torch.testing.assert_close(
        bare(backbone, tokens, positions)[:, 1:-1],
        seen["resid_post"][:, :-1],
        rtol=1e-3,
        atol=0.05,
    )
    best = {name: float("inf") for name in sides}
    for _ in range(ROUNDS):
        for name, work in sides.items():
            best[name] = min(best[name], seconds(work))
    for name, took in best.items():
        print(f"{name}: {took:.2f} s")
    finish(
        "capture",
        ratios={
            "run_with_cache / wvprobe": best["run_with_cache"] / best["wvprobe"],
            "wvprobe / bare backbone": best["wvprobe"] / best["bare backbone"],
        },
        extra_mb={"wvprobe": memory},
        thresholds={
            "run_with_cache / wvprobe": ">= 1.4",
            "wvprobe / bare backbone": "<= 1.2",
            "extra_mb wvprobe": "< 300",
        },
        ok=best["run_with_cache"] >= 1.4 * best["wvprobe"]
        and best["wvprobe"] <= 1.2 * best["bare backbone"]
        and memory < 300,
    )


if __name__ == "__main__":
    main()
