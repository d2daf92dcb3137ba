"""Timings side by side with what a user would use instead: ``python -m benchmarks.NAME``."""

import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import psutil


def seconds(work: Callable[[], Any]) -> float:
    """Return the time of one run."""
    gc.collect()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def grown(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return what `work` gives, its seconds, and the megabytes that the process grew by."""
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    peak, stop = [before], threading.Event()

    def watch() -> None:
        while not stop.wait(0.002):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    result = work()
    took = time.perf_counter() - start
    stop.set()
    watcher.join()
    return result, took, (peak[0] - before) / 2**20


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
