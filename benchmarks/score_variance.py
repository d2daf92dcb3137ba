"""The variance map of SmolLM2 over 2,000 sentences: ``python -m benchmarks.score_variance``.

Sentences are those of the English Web Treebank in the folder of labelled text (../shared/data, or
the one that WVPROBE_SHARED_DATA names). There is no other tool to race against: the ratio is of
five minutes to the time taken. Memory is what the process grows by.
"""

import os
import sys
from pathlib import Path

import wvprobe
from benchmarks import finish, grown

SENTENCES, SECONDS, MEGABYTES = 2_000, 300.0, 2_000.0


def main() -> None:
    """Measure once, and print time and memory against their limits."""
    folder = Path(os.environ.get("WVPROBE_SHARED_DATA", "../shared/data")) / "ud_english_ewt"
    lines = [
        line.removeprefix("# text = ").strip()
        for path in sorted(folder.glob("*.conllu"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith("# text = ")
    ]
    if len(lines) < SENTENCES:
        sys.exit(f"{SENTENCES} sentences are needed; {folder} has {len(lines)}.")
    model = wvprobe.load("smollm2-135m")
    result, took, extra = grown(lambda: wvprobe.score_variance(model, lines[:SENTENCES]))
    for name, count in result.counts.items():
        print(f"{name}: {count:,}")
    print(f"time: {took:.1f} s; memory: {extra:.0f} MB")
    print(f"heads above layer 0 with a context share over .10: {result.heads_above[0]:.3f}")
    finish(
        "score_variance",
        ratios={"five minutes / time": SECONDS / took},
        extra_mb={"score_variance": extra},
        thresholds={"five minutes / time": ">= 1", "score_variance": f"<= {MEGABYTES:.0f} MB"},
        ok=took <= SECONDS and extra <= MEGABYTES,
    )


if __name__ == "__main__":
    main()
