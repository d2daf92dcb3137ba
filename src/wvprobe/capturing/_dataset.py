"""`capture_dataset`: a whole data set to disk, here or by workers that share the batches."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from wvprobe import adapters
from wvprobe._progress import progress as progress_bar
from wvprobe._threads import threads as with_threads
from wvprobe._validate import file_path, message, one_of
from wvprobe.activations import LONG_WORK, StoredActivations, StoredCapture, capture, open_store
from wvprobe.capturing._ray import cluster, ray_module, write_shards
from wvprobe.capturing._source import Source, read_source
from wvprobe.capturing._workers import ANY, Order
from wvprobe.errors import InputError
from wvprobe.labelled import LabelledWords
from wvprobe.models import opened
from wvprobe.store import ItemsFile, Manifest, Writer

ENGINES = ("local", "ray")


def capture_dataset(
    source: Any,
    model: Any,
    sites: str | Sequence[str],
    out: str | Path,
    *,
    engine: str = "local",
    words: Any = None,
    positions: Any = None,
    layers: Sequence[int] | int | None = None,
    pool: str | None = None,
    batch_size: int | Literal["auto"] = "auto",
    prepend_bos: bool | None = None,
    threads: int | None = None,
    workers: int | None = None,
    gpus: float | int = 0,
    address: str | None = None,
    same_processor: bool = True,
    progress: bool = True,
) -> StoredActivations:
    """Read sites of a whole data set into a folder, in this process or on many machines.

    The folder, its batches and its numbers are those of ``capture(..., out=)``: with either engine
    a run that was killed goes on where it stopped, and both may take turns on one folder. Workers
    that have the packages, the kind of processor and the number of threads that the manifest names
    write the same files byte for byte; any other worker is refused.

    Args:
        source: texts; a path of texts, one a line; or labelled text, whose marked words are read:
            a LabelledDataset, a SenseDataset, or LabelledWords. Of a data set the items are
            ``labelled_words(model, source, prepend_bos=prepend_bos)``, in this order, with its
            labels; words without tokens of their own are left out and counted in the provenance.
        model: a name or path that :func:`~wvprobe.load` takes, or a function without arguments
            that returns a bridge, for any other setting. Every worker opens it once; a bridge
            itself is taken by ``engine="local"`` alone, since it does not travel.
        sites: as in :func:`~wvprobe.capture`.
        out: the folder. All workers must see it under this path.
        engine: ``local``: this process does it. ``ray``: actors of Ray Data do (the extra
            ``wvprobe[ray]``); this process opens the model as well, tokenizes and lets it go. A
            worker that dies is replaced, and its batches are given out again.
        words: as in :func:`~wvprobe.capture`; not where the source marks words.
        positions: likewise.
        layers: likewise.
        pool: likewise.
        batch_size: likewise.
        prepend_bos: likewise.
        threads: threads that torch works with, here or in each worker; None: as many as here now.
            They shape the last digits, and are part of the manifest.
        workers: how many workers; None: as many as the cluster holds.
        gpus: GPUs a worker. More than 0: models opened by name are put on ``cuda``, in the calling
            process too.
        address: of a Ray cluster. None: the one that this process is connected to, that of
            RAY_ADDRESS, or one that is started on this machine and ended afterwards.
        same_processor: False lets in workers with processors of other kinds. Their numbers agree to
            1e-5 of a vector's norm in float32, not bit for bit, and the manifest says so.
        progress: show progress on long work.

    Raises:
        MissingPackageError: Ray is not installed; the message says how it is.
        InputError: an argument cannot be used; a bridge where workers are to open the model.
        WorkerError: a worker is unlike this process, or workers died time after time.
        WvprobeError: as of :func:`~wvprobe.load` and ``capture(..., out=)``.

    Returns:
        The files, opened: tensors are read when asked for.

    Examples:
        >>> senses = wvprobe.load_senses().only("bank")
        >>> stored = wvprobe.capture_dataset(senses, "tiny:llama", ["v", "resid_post"], "run")
        >>> stored["v"].axes, len(stored.words) == len(senses)
        (('item', 'layer', 'kv_head', 'd_head_v'), True)
    """
    one_of("engine", engine, ENGINES)
    out = file_path("out", out)
    local = engine == "local"
    if local:
        others = None if same_processor else False
        _refuse_cluster(workers=workers, gpus=gpus or None, address=address, same_processor=others)
    else:
        ray_module()
    device = "cuda" if gpus else None
    settings = {"layers": layers, "pool": pool, "batch_size": batch_size}
    settings |= {"prepend_bos": prepend_bos}
    with with_threads(threads) as n_threads:
        bridge = model if local and _is_bridge(model) else opened(model, device=device)
        asked = read_source(
            source, bridge, words=words, positions=positions, prepend_bos=prepend_bos
        )
        settings |= {"words": asked.words, "positions": asked.positions}
        if local:
            stored = capture(bridge, asked.texts, sites, **settings, out=out, progress=progress)
            return _with_labels(stored, asked)
        todo = StoredCapture.of(bridge, asked.texts, sites, **settings)
        prepare = todo.prepare if same_processor else _for_any(todo.prepare)
        with Writer.of(out) as writer:
            manifest = writer.start(prepare)
            missing = writer.missing()
            order = Order(
                model=model,
                device=device,
                threads=n_threads,
                folder=str(out.resolve()),
                identity=manifest.identity,
                sites=todo.plan.sites,
                layers=layers,
                pool=todo.pool,
                placed=todo.placed,
            )
            # The workers hold the model from here on; room for one more may be what they lack.
            del bridge, todo, prepare
            gc.collect()
            if missing:
                with cluster(address, n_threads * (workers or 1)):
                    _hand_out(order, manifest, missing, workers, gpus, progress)
                writer.tidy()
    return _with_labels(open_store(out), asked)


def _hand_out(
    order: Order,
    manifest: Manifest,
    missing: Sequence[int],
    workers: int | None,
    gpus: float | int,
    progress: bool,
) -> None:
    """Have the missing batches written, and show how far they are."""
    sizes = manifest.sizes.tolist()
    long = progress and len(missing) >= LONG_WORK
    with progress_bar(sum(sizes), "texts read", long) as advance:
        advance(sum(sizes) - sum(sizes[batch] for batch in missing))
        write_shards(
            order, missing, workers=workers, gpus=gpus, done=lambda batch: advance(sizes[batch])
        )


def _is_bridge(model: Any) -> bool:
    return isinstance(model, adapters.TransformerBridge)


def _refuse_cluster(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise InputError(message(name, "left out with engine='local'", value))


def _for_any(
    prepare: Callable[[ItemsFile], Callable[[str], Manifest]],
) -> Callable[[ItemsFile], Callable[[str], Manifest]]:
    """Return the same, but for a manifest that names no kind of processor."""

    def prepared(table: ItemsFile) -> Callable[[str], Manifest]:
        finish = prepare(table)

        def relaxed(items: str) -> Manifest:
            manifest = finish(items)
            return replace(manifest, settings={**manifest.settings, "processor": ANY})

        return relaxed

    return prepared


def _with_labels(stored: StoredActivations, asked: Source) -> StoredActivations:
    """Return the same, with what is known of the words and of those that were lost."""
    labelled: LabelledWords | None = asked.labelled
    if labelled is None:
        return stored
    known = {**stored.provenance.settings, **labelled.settings}
    return replace(stored, provenance=replace(stored.provenance, settings=known))
