"""Drift over 2,000 sentences of homonyms, both packaged models: ``python -m benchmarks.drift``.

Everything that is measured of contextual drift: similarities, senses, streams beside each other, a
correction, the same at the sentence's end, scores, growth laws, drivers and their causal check.
It has eight minutes on two cores. Beside it, on ten of the words, what a user would write instead:
TransformerLens's ``run_with_cache`` sentence by sentence, and scikit-learn's cosines and nearest
centroids, each sentence left out in turn. With ``--large`` memory over ten times the sentences.

Sentences are those of homonyms_en.csv in the folder of labelled text (../shared/data, or the one
that WVPROBE_SHARED_DATA names).
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.model_selection import LeaveOneOut, cross_val_predict
from sklearn.neighbors import NearestCentroid

import wvprobe
from benchmarks import finish, grown, seconds
from wvprobe.contextual_drift import growth_law, score_drift
from wvprobe.datasets import SenseDataset

SECONDS, WORDS, LARGE = 480.0, 10, 20_000
MODELS = ("smollm2-135m", "minilm-l6")


def everything(model: Any, senses: SenseDataset) -> None:
    """Measure all there is, and print what it says."""
    many = wvprobe.drift(model, senses, correction="mean")
    at_the_end = wvprobe.drift(model, senses, position="last_token")
    scores = score_drift(model, senses)
    curves = {**many.curves(), "score": scores.difference}
    laws = [growth_law(curves, words=many.words, errors=e) for e in ("absolute", "relative")]
    drivers = wvprobe.drift_drivers(model, senses)
    means = many.summary().pivot(index="layer", columns="measure", values="mean")
    print("nearest centroid:", " ".join(f"{x:.3f}" for x in means["centroid_accuracy"]))
    for name, result in (("word", many), ("end", at_the_end)):
        frame = result.context_frame()
        last = frame[(frame["layer"] == frame["layer"].max())]
        print(f"read at the {name}:\n{last.round(3).to_string(index=False)}")
    for law in laws:
        print(law.untestable or law.summary().round(2).to_string(index=False))
    checked = drivers.to_frame().query("measured == measured")
    columns = ["component", "contribution", "low", "high", "predicted", "measured"]
    print(checked[[*columns, "measured_low", "measured_high"]].round(2).to_string(index=False))
    print(drivers.agreement().round(2).to_string(index=False))


def by_hand(model: Any, senses: SenseDataset) -> None:
    """Do what a user would: one sentence at a time, then scikit-learn stream by stream."""
    for word in senses.words:
        items, vectors = list(senses.only(word)), []
        for item in items:
            span = wvprobe.find_word(model, item.sentence, item.target)
            with torch.no_grad():
                _, cache = model.run_with_cache(item.sentence)
            at = span.tokens[-1]
            # Embeddings of one token are all alike: scikit-learn's centroids refuse them.
            streams = [cache[f"blocks.{k}.hook_resid_post"] for k in range(model.cfg.n_layers)]
            vectors.append(torch.stack([x[0, at] for x in streams]).numpy())
        for x in np.stack(vectors, axis=1):
            unit = x / np.linalg.norm(x, axis=1, keepdims=True)
            cosine_similarity(x)
            labels = [item.sense for item in items]
            cross_val_predict(NearestCentroid(), unit, labels, cv=LeaveOneOut())


def repeated(senses: SenseDataset, times: int) -> SenseDataset:
    """Return the set several times over, each time with another number before its sentences."""
    items = []
    for number in range(times):
        mark = f"({number}) "
        for item in senses:
            moved = {"start": item.start + len(mark), "end": item.end + len(mark)}
            items.append(replace(item, sentence=mark + item.sentence, **moved))
    return SenseDataset("repeated", tuple(items))


def main() -> None:
    """Measure, and print time and memory against their limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="also 20,000 sentences of SmolLM2")
    options = parser.parse_args()
    path = Path(os.environ.get("WVPROBE_SHARED_DATA", "../shared/data")) / "homonyms_en.csv"
    if not path.is_file():
        sys.exit(f"{path} is not there.")
    senses = wvprobe.load_senses(path)
    few = SenseDataset("few", tuple(i for i in senses if i.word in senses.words[:WORDS]))
    total, ratio, extra = 0.0, {}, {}
    for name in MODELS:
        model = wvprobe.load(name)
        hand = seconds(lambda model=model: by_hand(model, few))
        ours = seconds(lambda model=model: wvprobe.drift(model, few))
        ratio[f"by hand / drift, {name}"] = hand / ours
        _, took, extra[name] = grown(lambda model=model: everything(model, senses))
        print(f"{name}: {took:.0f} s in all; {WORDS} words: {ours:.1f} s, by hand {hand:.1f} s")
        total += took
        if options.large and name == MODELS[0]:
            large = repeated(senses, LARGE // len(senses))
            _, took, extra["20,000 sentences"] = grown(
                lambda model=model, large=large: wvprobe.drift(model, large)
            )
            print(f"{len(large)} sentences: {took:.0f} s")
    finish(
        "drift",
        ratios={**ratio, "eight minutes / time": SECONDS / total},
        extra_mb=extra,
        thresholds={"eight minutes / time": ">= 1", **dict.fromkeys(ratio, ">= 1")},
        ok=total <= SECONDS and min(ratio.values()) >= 1,
    )


if __name__ == "__main__":
    main()
