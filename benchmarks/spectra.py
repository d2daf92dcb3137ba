"""Spectra of every OV circuit of SmolLM2 against TransformerLens: ``python -m benchmarks.spectra``.

Both sides start from weights in hand: wvprobe's HeadWeights, TransformerLens's FactoredMatrix of
all heads. TransformerLens: ``svd()``, which always computes vectors too, and ``eigenvalues``.
wvprobe: :func:`wvprobe.spectra`, singular values and eigenvalues. They run in the same process and
by turns, with norms left unfolded, as TransformerLens has them. Ratios are of the shortest of
several rounds.
"""

from collections.abc import Callable
from typing import Any

import torch

import wvprobe
from benchmarks import finish, seconds

ROUNDS = 5
TOLERANCE = 1e-5  # of a head's largest singular value
LIMITS = {"svd / spectra": 2.0, "svd and eigenvalues / spectra": 2.5}


def main() -> None:
    """Run both by turns, compare their numbers, and print ratios."""
    model = wvprobe.load("smollm2-135m")
    heads = wvprobe.HeadWeights.from_model(model, fold_norm=False)
    kind = type(model.OV)
    left, right = model.OV.A.detach(), model.OV.B.detach()

    def theirs(eigenvalues: bool = False) -> torch.Tensor:
        # A new object each time: it keeps its first decomposition.
        circuit = kind(left, right)
        values = circuit.svd()[1]
        if eigenvalues:
            _ = circuit.eigenvalues
        return values

    def ours() -> Any:
        return wvprobe.spectra(heads, "OV", vocabulary=False, progress=False)

    sides: dict[str, Callable[[], Any]] = {
        "wvprobe": ours,
        "svd": theirs,
        "svd and eigenvalues": lambda: theirs(eigenvalues=True),
        "wvprobe with the vocabulary": lambda: wvprobe.spectra(heads, "OV", progress=False),
    }
    # All of it for the same numbers, or the race is no race.
    found, expected = ours().singular_values, theirs()
    error = float(((found - expected).abs() / expected[..., :1]).max())
    print(f"largest difference, relative to each head's largest value: {error:.1e}")
    best = {name: float("inf") for name in sides}
    for _ in range(ROUNDS):
        for name, work in sides.items():
            best[name] = min(best[name], seconds(work))
    for name, took in best.items():
        print(f"{name}: {took:.3f} s")
    ratios = {name: best[name.removesuffix(" / spectra")] / best["wvprobe"] for name in LIMITS}
    finish(
        "spectra",
        ratios={**ratios, "difference / tolerance": error / TOLERANCE},
        extra_mb={},
        thresholds={
            **{name: f">= {limit}" for name, limit in LIMITS.items()},
            "difference / tolerance": "<= 1",
        },
        ok=error <= TOLERANCE and all(ratios[name] >= limit for name, limit in LIMITS.items()),
    )


if __name__ == "__main__":
    main()
