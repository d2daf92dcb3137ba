"""What the command line prints of drift: one document, or a table of it."""

import math
from typing import Any

import torch

from wvprobe._statistics import wilson_interval
from wvprobe.contextual_drift._result import DriftResult

_MEASURES = ("self_similarity", "same_sense", "different_sense", "gap", "centroid_accuracy")


def described(result: DriftResult) -> tuple[dict[str, Any], str, Any]:
    """Return a JSON document, a table's title and the table, a row a stream.

    Columns: layer self_similarity baseline same_sense different_sense gap gap_low gap_high
    centroid_accuracy accuracy_low accuracy_high shuffled. Intervals are bootstraps over words; of
    one word the accuracy has Wilson's interval over its sentences, and the gap none.
    """
    import pandas

    frame = result.summary()
    columns: dict[str, Any] = {"layer": list(range(len(result.baseline)))}
    for name in _MEASURES:
        rows = frame[frame["measure"] == name]
        columns[name] = rows["mean"].tolist()
        if name == "self_similarity":
            columns["baseline"] = result.baseline.tolist()
        if name == "gap":
            columns |= {"gap_low": rows["low"].tolist(), "gap_high": rows["high"].tolist()}
        if name == "centroid_accuracy":
            low, high = rows["low"].tolist(), rows["high"].tolist()
            if len(result.words) == 1:
                low, high = _over_sentences(result)
            columns |= {"accuracy_low": low, "accuracy_high": high}
    columns["shuffled"] = result.control[0].tolist()
    table = pandas.DataFrame(columns)
    several = len(result.words) > 1
    what = f"{len(result.words)} words" if several else f"“{result.words[0]}”"
    over = "words (bootstrap)" if several else "sentences (Wilson)"
    title = (
        f"{what}, {sum(result.n)} sentences, {sum(result.n_senses)} senses; "
        f"95 % intervals over {over}; baseline: {result.n_baseline} random tokens"
    )
    document = {
        "model": result.provenance.model,
        "words": list(result.words),
        "sentences": sum(result.n),
        "senses": sum(result.n_senses),
        "dropped": len(result.dropped),
        "random_tokens": result.n_baseline,
        "interval_over": "words" if several else "sentences",
        "settings": dict(result.provenance.settings),
        "layers": [_finite(row) for row in table.to_dict(orient="records")],
    }
    return document, title, table


def _over_sentences(result: DriftResult) -> tuple[list[float], list[float]]:
    """Return Wilson's interval of the accuracy, stream by stream; NaN without senses."""
    ends = []
    for right in result.item_centroid.T:
        known = right[~torch.isnan(right)]
        nothing = (math.nan, math.nan)
        ends.append(wilson_interval(float(known.sum()), len(known)) if len(known) else nothing)
    return [low for low, _ in ends], [high for _, high in ends]


def _finite(row: dict[Any, Any]) -> dict[Any, Any]:
    """Return a row with None for NaN, which JSON does not know."""
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()}
