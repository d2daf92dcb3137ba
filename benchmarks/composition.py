"""Composition of all pairs of heads, against TransformerLens: ``python -m benchmarks.composition``.

A random model of GPT-2 small's shape (12 layers, 12 heads, d_model 768), all three modes, each side
in a process of its own: its time, and how far the process grew beyond what it had with the model
loaded. wvprobe's time includes reading the weights out of the model, z, p and q. Beside it, the
three modes on SmolLM2.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import finish, grown

MODES = ("Q", "K", "V")
ROUNDS = 2
SHAPE: dict[str, Any] = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_inner": 3072}
FASTER, MEMORY, EQUAL, SMOLLM2_SECONDS = 20.0, 0.1, 1e-5, 10.0


def ours(model: Any) -> dict[str, Any]:
    """Score with wvprobe, weights as the model holds them."""
    from wvprobe import HeadWeights, composition

    heads = HeadWeights.from_model(model, fold_norm=False)
    return {mode: composition(heads, mode, offset=None).scores for mode in MODES}


def theirs(model: Any) -> dict[str, Any]:
    """Score with TransformerLens."""
    return {mode: model.all_composition_scores(mode).scores for mode in MODES}


def smollm2(model: Any) -> dict[str, Any]:
    """Score SmolLM2 with wvprobe, norms folded, p-values included."""
    from wvprobe import HeadWeights, composition

    heads = HeadWeights.from_model(model)
    return {mode: composition(heads, mode).p_values for mode in MODES}


SIDES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "wvprobe": ours,
    "transformer_lens": theirs,
    "smollm2": smollm2,
}


def run_side(side: str, out: Path) -> None:
    """Build the model, score it, save the scores, print time and memory."""
    import torch

    import wvprobe
    from wvprobe.testing import tiny_model

    model = wvprobe.load("smollm2-135m") if side == "smollm2" else tiny_model("gpt2", **SHAPE)
    with torch.no_grad():
        scores, seconds, megabytes = grown(lambda: SIDES[side](model))
        for _ in range(ROUNDS - 1):
            seconds = min(seconds, grown(lambda: SIDES[side](model))[1])
    np.savez(out, **{mode: value.numpy() for mode, value in scores.items()})
    print(json.dumps([seconds, megabytes]))


def in_a_process(side: str, out: Path) -> tuple[float, float]:
    """Run a side in a new process; return its seconds and megabytes."""
    command = [sys.executable, "-m", "benchmarks.composition", side, str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    seconds, megabytes = json.loads(done.stdout.splitlines()[-1])
    print(f"{side}: {seconds:.2f} s, {megabytes:.0f} MB more")
    return seconds, megabytes


def main() -> None:
    """Run every side, compare scores, print ratios."""
    with tempfile.TemporaryDirectory() as folder:
        files = {side: Path(folder) / f"{side}.npz" for side in SIDES}
        took = {side: in_a_process(side, file) for side, file in files.items()}
        one, other = (np.load(files[side]) for side in ("wvprobe", "transformer_lens"))
        difference = max(float(np.abs(one[mode] - other[mode]).max()) for mode in MODES)
        highest = max(float(other[mode].max()) for mode in MODES)
    print(f"largest difference of scores {difference:.1e}; highest score {highest:.3f}")
    faster = took["transformer_lens"][0] / took["wvprobe"][0]
    memory = took["wvprobe"][1] / took["transformer_lens"][1]
    seconds = took["smollm2"][0]
    finish(
        "composition",
        ratios={
            "transformer_lens / wvprobe": faster,
            "memory: wvprobe / transformer_lens": memory,
            "difference / 1e-5": difference / EQUAL,
            "smollm2 / 10 s": seconds / SMOLLM2_SECONDS,
        },
        extra_mb={side: megabytes for side, (_, megabytes) in took.items()},
        thresholds={
            "transformer_lens / wvprobe": f">= {FASTER:.0f}",
            "memory: wvprobe / transformer_lens": f"<= {MEMORY}",
            "difference / 1e-5": "<= 1",
            "smollm2 / 10 s": "<= 1",
        },
        ok=faster >= FASTER
        and memory <= MEMORY
        and 0 <= difference <= EQUAL
        and highest > 0
        and seconds <= SMOLLM2_SECONDS,
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run_side(sys.argv[1], Path(sys.argv[2]))
    else:
        main()
