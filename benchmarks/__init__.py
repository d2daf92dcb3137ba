"""Timings side by side with what a user would use instead: ``python -m benchmarks.NAME``."""

import json
import sys
from collections.abc import Mapping


def finish(
    name: str,
    *,
    ratios: Mapping[str, float],
    extra_mb: Mapping[str, float],
    thresholds: Mapping[str, str],
    ok: bool,
) -> None:
    """Print the result as one JSON line, the last one, and exit with 1 unless `ok`."""
    document = {
        "benchmark": name,
        "ratios": {key: round(value, 3) for key, value in ratios.items()},
        "extra_mb": {key: round(value, 1) for key, value in extra_mb.items()},
        "thresholds": dict(thresholds),
        "ok": ok,
    }
    print(json.dumps(document), flush=True)
    if not ok:
        sys.exit(1)
