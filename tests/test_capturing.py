"""Whole data sets to disk: the files of one process, whoever writes them."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from test_store import SITES, TEXTS, files, same

from wvprobe import capture, capture_dataset, load_senses
from wvprobe.activations import StoredCapture, open_store
from wvprobe.capturing import _ray, _workers
from wvprobe.capturing._workers import Order, Worker
from wvprobe.datasets import LabelledDataset, LabelledSentence
from wvprobe.errors import (
    DataError,
    InputError,
    MissingPackageError,
    StoreError,
    WorkerError,
)
from wvprobe.labelled import labelled_words
from wvprobe.store import Writer
from wvprobe.testing import tiny_model

GIVEN = {"words": "bank", "batch_size": 2, "threads": 1}
llama = partial(tiny_model, "llama")


def sentence(text, words, label, number):
    starts = tuple(text.index(word) for word in words)
    ends = tuple(start + len(word) for start, word in zip(starts, words, strict=True))
    return LabelledSentence(text, words, starts, ends, {"upos": label}, None, str(number))


MARKED = LabelledDataset(
    "by hand",
    (
        sentence(TEXTS[0], ("river", "bank", "close"), ("NOUN", "NOUN", "ADJ"), 0),
        sentence(TEXTS[2], ("old", "bank", "open"), ("ADJ", "NOUN", "ADJ"), 1),
        # Half a token has no vector of its own.
        sentence(TEXTS[4], ("ban",), ("NOUN",), 2),
    ),
    "upos",
)


# --- this process ---


def test_it_is_a_capture_to_disk(tiny, tmp_path):
    before = torch.get_num_threads()
    whole = capture_dataset(TEXTS, llama, SITES, tmp_path / "one", **GIVEN)
    assert torch.get_num_threads() == before
    torch.set_num_threads(1)
    try:
        capture(tiny("llama"), TEXTS, SITES, words="bank", batch_size=2, out=tmp_path / "other")
    finally:
        torch.set_num_threads(before)
    assert files(tmp_path / "one") == files(tmp_path / "other")
    assert whole.store.manifest.settings["threads"] == 1


def test_models_by_name_by_function_and_as_they_are(tiny, tmp_path):
    for name, model in (("name", "tiny:llama"), ("function", llama), ("bridge", tiny("llama"))):
        capture_dataset(TEXTS, model, ["v"], tmp_path / name, **GIVEN)
    assert files(tmp_path / "name") == files(tmp_path / "function") == files(tmp_path / "bridge")


def test_a_file_of_texts(tiny, tmp_path):
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS) + "\n", encoding="utf-8")
    stored = capture_dataset(tmp_path / "texts.txt", tiny("gpt2"), ["v"], tmp_path / "out")
    assert tuple(stored.texts) == tuple(TEXTS) and stored.positions is None
    with pytest.raises(DataError, match="texts.md"):
        capture_dataset(str(tmp_path / "texts.md"), tiny("gpt2"), ["v"], tmp_path / "other")


@pytest.mark.parametrize("source", [MARKED, load_senses().only("bank")], ids=["labels", "senses"])
def test_marked_words_and_those_that_are_lost(source, tiny, tmp_path):
    model = tiny("llama")
    found = labelled_words(model, source)
    stored = capture_dataset(source, model, ["v", "z"], tmp_path / "set")
    again = capture_dataset(found, model, ["v", "z"], tmp_path / "words")
    assert files(stored.folder) == files(again.folder)
    assert tuple(stored.words) == found.words and len(found.labels) == len(stored["v"])
    assert tuple(stored.positions) == tuple(span.tokens for span in found.spans)
    plain = capture(model, found.texts, ["v", "z"], words=found.spans)
    assert same(stored["z"].tensor(), plain["z"])
    settings = stored.provenance.settings
    assert settings["lost"] == len(found.losses) and settings["dataset"] == found.dataset
    assert (settings["lost"] > 0) == (source is MARKED)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"engine": "dask"}, "`engine` must be one of 'local', 'ray'"),
        ({"workers": 2}, "`workers` must be left out with engine='local'. Got 2"),
        ({"gpus": 1}, "`gpus` must be left out"),
        ({"address": "auto"}, "`address` must be left out"),
        ({"same_processor": False}, "`same_processor` must be left out"),
        ({"threads": 0}, "`threads` must be an int of at least 1"),
        ({"model": 3}, "`model` must be a name or path .* Got 'int' instead"),
        ({"model": dict}, "`model` must be a TransformerBridge"),
        ({"source": 3}, "`source` must be texts, a path of texts, .* Got 'int'"),
        ({"source": MARKED}, "`words` must be None where the source marks words itself"),
    ],
)
def test_what_cannot_be_used_is_refused(given, told, tmp_path):
    given = {"source": TEXTS, "model": llama, "sites": ["v"], "words": "bank", **given}
    with pytest.raises(InputError, match=told):
        capture_dataset(out=tmp_path / "store", **given)
    assert not (tmp_path / "store").exists()


def test_ray_is_an_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'wvprobe\[ray\]', or use engine="):
        capture_dataset(TEXTS, llama, ["v"], tmp_path / "store", engine="ray")
    assert issubclass(MissingPackageError, ImportError)


# --- workers, without a cluster ---


@pytest.fixture
def begun(tiny, tmp_path, monkeypatch):
    """Return what begins a store of three batches as the calling process does."""
    # Workers set it for their own process, which is this one here.
    monkeypatch.setattr(_workers.torch, "set_num_threads", lambda number: None)

    def begin(model=llama, settings=None, **given):
        bridge, folder = model(), tmp_path / "store"
        todo = StoredCapture.of(bridge, TEXTS, SITES, words="bank", batch_size=2)
        with Writer.of(folder) as writer:
            manifest = writer.start(todo.prepare)
            assert writer.missing() == [0, 1, 2]
        order = Order(
            model,
            None,
            torch.get_num_threads(),
            str(folder),
            manifest.identity,
            todo.plan.sites,
            None,
            todo.pool,
            todo.placed,
        )
        return Order(**{**vars(order), **given})

    return begin


def test_workers_write_what_one_process_writes(begun, tiny, tmp_path):
    order = begun()
    whole = capture(tiny("llama"), TEXTS, SITES, words="bank", batch_size=2, out=tmp_path / "whole")
    one, other = Worker(order), Worker(order)
    for worker, batch in ((other, 2), (one, 0), (one, 1)):
        worker.write(batch)
    kept = {path: path.stat().st_ino for path in (tmp_path / "store/shards").iterdir()}
    other.write(0)
    assert all(path.stat().st_ino == inode for path, inode in kept.items()), "it is there already"
    with Writer.of(tmp_path / "store") as writer:
        writer.tidy()
    assert files(tmp_path / "store") == files(whole.folder)


def test_a_worker_that_is_unlike_the_manifest_is_refused(begun, monkeypatch):
    order = begun()
    worker = Worker(Order(**{**vars(order), "model": partial(tiny_model, "llama", 1)}))
    with pytest.raises(WorkerError, match="other numbers .* weights: sha256 .* there, sha256"):
        worker.write(0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 13)
    with pytest.raises(WorkerError, match="threads: . there, 13 here.*same_processor=False"):
        Worker(order).write(0)


def test_a_worker_that_sees_another_folder_is_refused(begun, tmp_path):
    order = begun()
    with pytest.raises(StoreError, match="is another store. Name a folder that all workers share"):
        Worker(Order(**{**vars(order), "identity": "0" * 64})).write(0)
    with pytest.raises(StoreError, match="holds no stored activations"):
        Worker(Order(**{**vars(order), "folder": str(tmp_path / "elsewhere")})).write(0)
    (tmp_path / "store/items.arrow").unlink()
    with pytest.raises(StoreError, match="items.arrow is missing"):
        Worker(order).write(0)


@pytest.mark.slow
def test_a_batch_that_kills_worker_after_worker(begun, monkeypatch, tmp_path):
    order = begun()

    class Killed(BaseException):
        pass

    def killed(*given):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(_workers.ShardMaker, "write_items", killed)
        for _ in range(_workers.DEATHS + 1):
            with pytest.raises(Killed):
                Worker(order).write(1)
        with pytest.raises(WorkerError, match="4 workers died at batch 1, perhaps for lack of mem"):
            Worker(order).write(1)
    Worker(order).write(0)
    with Writer.of(tmp_path / "store"):
        pass
    Worker(order).write(1)  # a new run tries again


OTHER_PROCESSOR = """
import sys
from wvprobe.capturing import capture_dataset
from wvprobe.testing import tiny_model
capture_dataset(eval(sys.argv[1]), lambda: tiny_model("llama"), ["v", "resid_post", "scores"],
                sys.argv[2], words="bank", batch_size=2, threads=int(sys.argv[3]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "capability"), [("2", None), ("1", "default")])
def test_other_threads_and_processors_agree_to_a_tolerance(threads, capability, tiny, tmp_path):
    """What is refused as not the same bit for bit is the same to 1e-5 of a vector's norm."""
    whole = capture_dataset(TEXTS, llama, SITES, tmp_path / "one", **GIVEN)
    environment = {**os.environ}
    if capability is not None:
        environment["ATEN_CPU_CAPABILITY"] = capability
    folder = str(tmp_path / "other")
    subprocess.run(
        [sys.executable, "-c", OTHER_PROCESSOR, repr(TEXTS), folder, threads],
        env=environment,
        check=True,
    )
    other = open_store(folder)
    if capability is not None and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no more than the least of instructions")
    assert other.store.manifest.identity != whole.store.manifest.identity
    for site in SITES:
        a, b = whole[site].tensor().double(), other[site].tensor().double()
        assert torch.equal(a.isnan(), b.isnan())
        a, b = a.nan_to_num().flatten(2), b.nan_to_num().flatten(2)
        assert ((a - b).norm(dim=-1) <= 1e-5 * a.norm(dim=-1)).all(), site
    told = "processor: 'DEFAULT' there" if capability else "threads: 2 there, 1 here"
    with pytest.raises(StoreError, match=told):
        capture_dataset(TEXTS, llama, SITES, folder, **GIVEN)


# --- a cluster ---


@pytest.fixture(scope="module")
def ray_cluster():
    pytest.importorskip("ray.data")
    with _ray.cluster(None, 2):
        yield


def by_hand():
    """Return a function that travels to a worker whole: its module is not there."""

    def model():
        from wvprobe.testing import tiny_model

        return tiny_model("llama")

    return model


@pytest.mark.slow
def test_on_ray_the_same_files(ray_cluster, tmp_path, capfd):
    given = {"threads": 1, "batch_size": 2}
    whole = capture_dataset(MARKED, by_hand(), SITES, tmp_path / "local", **given)
    stored = capture_dataset(
        MARKED, "tiny:llama", SITES, tmp_path / "ray", engine="ray", workers=2, **given
    )
    assert files(stored.folder) == files(whole.folder)
    assert stored.provenance == whole.provenance
    assert "ray.data" not in capfd.readouterr().err
    # What is missing, and nothing else, is written anew.
    kept = {path.name: path.stat().st_ino for path in (tmp_path / "ray/shards").iterdir()}
    (tmp_path / "ray/index/000001.parquet").unlink()
    capture_dataset(MARKED, by_hand(), SITES, tmp_path / "ray", engine="ray", **given)
    assert files(stored.folder) == files(whole.folder)
    now = {path.name: path.stat().st_ino for path in (tmp_path / "ray/shards").iterdir()}
    assert {name for name in now if now[name] != kept[name]} == {"000001.safetensors"}


@pytest.mark.slow
def test_a_worker_killed_in_the_middle(ray_cluster, tmp_path):
    """SIGKILL between a shard and its index; the run goes on, and the files are the same."""
    texts = [f"The river bank is {'very ' * (n % 7)}close to here." for n in range(24)]
    note, place = str(tmp_path / "killed"), str(tmp_path / "ray")

    def model():
        import os
        import signal
        from pathlib import Path

        from wvprobe.store import _shards
        from wvprobe.testing import tiny_model

        real = _shards.written

        def written(path):
            if path.parent.name == "index" and len(list(path.parent.glob("0*"))) >= 3:
                if not Path(note).exists():
                    Path(note).write_text(path.name)
                    (path.parent / ".half.tmp").write_bytes(b"half")
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(path)

        _shards.written = written
        return tiny_model("llama")

    given = {"words": "bank", "batch_size": 2, "threads": 1}
    whole = capture_dataset(texts, llama, SITES, tmp_path / "local", **given)
    given |= {"workers": 2}
    stored = capture_dataset(texts, model_of(model), SITES, place, engine="ray", **given)
    assert Path(note).exists(), "no worker was killed"
    assert files(stored.folder) == files(whole.folder)
    assert not list(Path(place).rglob("*.tmp"))
    stored.store.verify()


def model_of(killed):
    """Return a function that kills no process but a worker: this one opens the model as well."""
    own = os.getpid()

    def model():
        import os

        from wvprobe.testing import tiny_model

        return tiny_model("llama") if os.getpid() == own else killed()

    return model


@pytest.mark.slow
def test_what_workers_meet_is_raised_here(ray_cluster, tmp_path):
    def refusing():
        from wvprobe.errors import DiskSpaceError

        raise DiskSpaceError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        capture_dataset(TEXTS, model_of(refusing), ["v"], tmp_path / "a", engine="ray", **GIVEN)
    with pytest.raises(InputError, match="no machine of the cluster has 64 threads"):
        capture_dataset(
            TEXTS, by_hand(), ["v"], tmp_path / "b", engine="ray", words="bank", threads=64
        )
    with pytest.raises(InputError, match="`address` must be None where this process is connected"):
        capture_dataset(TEXTS, by_hand(), ["v"], tmp_path / "c", engine="ray", address="auto")


@pytest.mark.slow
def test_workers_of_any_processor(ray_cluster, tmp_path):
    given = {**GIVEN, "engine": "ray", "workers": 1}
    out = tmp_path / "ray"
    stored = capture_dataset(TEXTS, by_hand(), SITES, out, same_processor=False, **given)
    assert stored.store.manifest.settings["processor"] == "any"
    whole = capture_dataset(TEXTS, llama, SITES, tmp_path / "local", **GIVEN)
    assert all(same(stored[site].tensor(), whole[site].tensor()) for site in SITES)
    with pytest.raises(StoreError, match="processor: 'any' there"):
        capture_dataset(TEXTS, by_hand(), SITES, out, **given)


@pytest.mark.slow
@pytest.mark.real_model
def test_a_pretrained_model_on_ray(ray_cluster, tmp_path):
    given = {"words": "bank", "threads": 1, "batch_size": 2}
    model, sites = "smollm2-135m", ["v", "resid_post"]
    whole = capture_dataset(TEXTS, model, sites, tmp_path / "local", **given)
    stored = capture_dataset(TEXTS, model, sites, tmp_path / "ray", engine="ray", **given)
    assert files(stored.folder) == files(whole.folder)
