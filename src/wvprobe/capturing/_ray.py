"""Workers as actors of Ray Data, on a cluster that is there or on one started for the run."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from wvprobe import errors
from wvprobe._validate import length, message
from wvprobe.capturing._workers import Order, Worker
from wvprobe.errors import InputError, MissingPackageError, WorkerError, WvprobeError

# Blocks a worker: few enough to cost nothing, enough for workers to end at about the same time.
_BLOCKS = 32


def ray_module() -> Any:
    """Return the package `ray`.

    Raises:
        MissingPackageError: it is not installed, or not with Ray Data.
    """
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.data  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingPackageError(
            f"engine='ray' needs Ray Data: {error}. Install it with pip install 'wvprobe[ray]', or "
            "use engine='local'."
        ) from error
    return ray


@contextmanager
def cluster(address: str | None, n_cpus: int) -> Iterator[None]:
    """Be connected to a cluster inside; one that is started for it is ended behind it.

    Args:
        address: of a cluster; None for the one this process is connected to already, that of the
            variable RAY_ADDRESS, or a new one on this machine.
        n_cpus: what a new one must have to run everything that is asked for.

    Raises:
        InputError: this process is connected to a cluster already, and `address` names one.
        WorkerError: there is none at `address`.
    """
    ray = ray_module()
    if ray.is_initialized():
        if address is not None:
            hint = "Leave `address` out, or call ray.shutdown() before."
            found = "this process is connected already"
            raise InputError(message("address", f"None where {found}", address, hint))
        yield
        return
    new = address is None and not os.environ.get("RAY_ADDRESS")
    own = {"num_cpus": max(n_cpus, os.cpu_count() or 1), "include_dashboard": False} if new else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
    except ConnectionError as error:
        hint = "Start one with `ray start --head`, or leave `address` out."
        raise WorkerError(f"no Ray cluster answers at {address!r}: {error}. {hint}") from error
    try:
        yield
    finally:
        ray.shutdown()


def fitting(threads: int, gpus: float | int) -> int:
    """Return how many workers of so many threads and GPUs the cluster holds at a time.

    Raises:
        InputError: no machine of it holds one.
    """
    alive = [node["Resources"] for node in ray_module().nodes() if node["Alive"]]
    places = [
        min(node.get("CPU", 0) // threads, node.get("GPU", 0) // gpus if gpus else float("inf"))
        for node in alive
    ]
    if not any(place >= 1 for place in places):
        most = {kind: max(node.get(kind, 0) for node in alive) for kind in ("CPU", "GPU")}
        got = f"{threads} threads and {gpus:g} GPUs a worker"
        raise InputError(
            f"no machine of the cluster has {got}: its largest has {most['CPU']:g} CPUs and "
            f"{most['GPU']:g} GPUs. Give fewer `threads` or `gpus`."
        )
    return int(sum(places))


class _Actor:
    """A worker as Ray Data calls it: rows in, rows out, errors as rows."""

    def __init__(self, order: Order) -> None:
        """Take what is to be done."""
        self.worker = Worker(order)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        """Write the shard of the one batch that `rows` names."""
        found = {"batch": rows["batch"], "error": [""], "told": [""]}
        try:
            self.worker.write(int(rows["batch"][0]))
        except WvprobeError as error:
            # Raised, it would come back wrapped in Ray's own errors, after tries in vain.
            found |= {"error": [type(error).__name__], "told": [str(error)]}
        return found


def write_shards(
    order: Order,
    batches: Sequence[int],
    *,
    workers: int | None,
    gpus: float | int,
    done: Callable[[int], None],
) -> None:
    """Have actors write shards; `done` is called with each batch that is written.

    Ray starts an actor that dies again, and gives out again what it had not finished.

    Raises:
        InputError: the cluster is too small for a worker.
        WvprobeError: what a worker raised.
    """
    ray = ray_module()
    most = fitting(order.threads, gpus)
    size = min(most if workers is None else length("workers", workers), len(batches))
    rows = [{"batch": batch} for batch in batches]
    blocks = min(len(rows), _BLOCKS * size)
    with _quiet():
        plan = ray.data.from_items(rows, override_num_blocks=blocks).map_batches(
            _Actor,
            fn_constructor_args=(order,),
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(size=size),
            num_cpus=order.threads,
            num_gpus=gpus or None,
        )
        plan.context.enable_progress_bars = False
        plan.context.print_on_execution_start = False
        for row in plan.iter_rows():
            if row["error"]:
                raise getattr(errors, row["error"])(row["told"])
            done(int(row["batch"]))


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Ray Data from telling on stderr how it goes on; its log file has it all the same."""
    consoles = [h for h in logging.getLogger("ray.data").handlers if h.get_name() == "console"]
    before = [handler.level for handler in consoles]
    for handler in consoles:
        handler.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for handler, level in zip(consoles, before, strict=True):
            handler.setLevel(level)
