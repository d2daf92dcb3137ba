"""Activations on disk: the numbers of memory, whatever happens on the way."""

import errno
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import torch
from filelock import FileLock

from wvprobe import adapters, store
from wvprobe.activations import (
    Activations,
    Run,
    StoredActivations,
    StoredCapture,
    capture,
    open_store,
)
from wvprobe.activations._places import Places
from wvprobe.activations._run import SitePlan
from wvprobe.errors import DiskSpaceError, InputError, IntegrityError, StoreError, WordError
from wvprobe.store import _files
from wvprobe.testing import FAMILIES, tiny_model

TEXTS = [
    "The river bank is close to here.",
    "A power bank dropped into the river while the boat was closed.",
    "The old bank is open.",
    "When the light turned green the bank by the river was closed.",
    "The bank.",
]
SITES = ["v", "resid_post", "scores"]


def same(one, other):
    return torch.equal(one.nan_to_num(nan=7.5), other.nan_to_num(nan=7.5))


def files(folder):
    """Return the sha256 of every file of a store but its lock."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        if path.is_file() and path.name != "lock":
            found[str(path.relative_to(folder))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@pytest.fixture
def take(tiny, tmp_path):
    """Capture to a folder: 5 items in 3 batches of a tiny model."""

    def taken(folder="store", texts=TEXTS, sites=SITES, model=None, **given):
        given = {"words": "bank", "batch_size": 2, **given}
        return capture(model or tiny("llama"), texts, sites, out=tmp_path / folder, **given)

    return taken


CASES = [(family, {"words": "bank"}) for family in FAMILIES]
CASES += [(family, {}) for family in ("llama", "bert", "deepseek_v3")]


@pytest.mark.parametrize(("family", "given"), CASES)
def test_numbers_are_those_of_memory_bit_for_bit(family, given, tiny, tmp_path):
    model = tiny(family)
    plain = capture(model, TEXTS, SITES, batch_size=2, **given)
    stored = capture(model, TEXTS, SITES, batch_size=2, out=tmp_path / "store", **given)
    for opened in (stored, open_store(tmp_path / "store")):
        assert isinstance(opened, StoredActivations) and isinstance(opened, Activations)
        assert opened["v"].axes == plain.axes("v") == opened.axes("v")
        for site in SITES:
            found = opened[site].tensor()
            assert found.shape == plain[site].shape == opened[site].shape
            assert found.dtype == plain[site].dtype == opened[site].dtype
            assert same(found, plain[site]), site
        for field in ("texts", "tokens", "strings", "special"):
            assert tuple(getattr(opened, field)) == getattr(plain, field)
        if given:
            assert tuple(opened.positions) == plain.positions and opened.mask is None
            assert tuple(opened.words) == plain.words and opened.pool == plain.pool
        else:
            assert opened.positions is None and torch.equal(opened.mask, plain.mask)
        pandas.testing.assert_frame_equal(opened.to_frame(), plain.to_frame())
        assert opened.provenance.weight_hash == plain.provenance.weight_hash


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_precisions(dtype, tmp_path):
    model = tiny_model("llama", dtype=dtype)
    plain = capture(model, TEXTS, ["v", "scores"], words="bank")
    stored = capture(model, TEXTS, ["v", "scores"], words="bank", out=tmp_path / "store")
    for site in ("v", "scores"):
        assert stored[site].dtype == plain[site].dtype
        assert same(stored[site].tensor(), plain[site])


KEYS = [
    3,
    slice(1, 4),
    [4, 0, 2],
    torch.tensor([1, 1]),
    torch.tensor([True, False, True, True, False]),
    (slice(None), 1),
    ([4, 0], 2),
    (slice(None), [2, 0]),
    (slice(1, 5, 2), slice(0, 2)),
    (..., 0),
    (2, 1, 0),
    (slice(None), 1, slice(None), slice(3, 7)),
    (slice(None), slice(None), [1, 0]),
    (),
]


def test_an_index_gives_what_a_tensor_gives(take):
    v = take(sites=["v"])["v"]
    for key in KEYS:
        assert torch.equal(v[key], v.tensor()[key]), key


def test_an_index_of_whole_texts(take):
    """The layer axis is the third there, behind positions of texts of several lengths."""
    stored = take(words=None)
    for site in ("v", "scores"):
        whole = stored[site].tensor()
        for key in (4, ([4, 1], slice(None), 2), (slice(None), 1, 0), (slice(2), slice(1, 3))):
            assert same(stored[site][key], whole[key])
    short = stored["v"].read(torch.tensor([4, 2]), longest=6)
    assert torch.equal(short, stored["v"].tensor()[[4, 2], :6])


def test_wrong_indices_are_refused(take):
    v = take(sites=["v"])["v"]
    for key, told in (
        (5, r"`item` must be in 0\.\.4. Got 5"),
        (-1, r"`item` must be in 0\.\.4. Got -1"),
        ((0, 3), r"`layer` must be in 0\.\.2. Got 3"),
        ((0, 0, 9), r"`kv_head` must be in 0\.\.1"),
        (([0, 1], [0, 1]), "with one list at most"),
        ((0, 0, 0, 0, 0), "for 4 axes at most"),
        (torch.tensor([True]), "a mask of length 5"),
    ):
        with pytest.raises(InputError, match=told):
            _ = v[key]


def test_blocks_are_all_items_once_in_the_order_of_the_disk(take):
    stored = take(sites=["v"])
    whole, seen = stored["v"].tensor(), []
    for items, values in stored["v"].blocks(size=1):
        assert len(items) <= 2
        assert torch.equal(values, whole[items])
        seen += items.tolist()
    assert sorted(seen) == list(range(5)) and seen == stored.store.manifest.order.tolist()
    (items, values), *rest = stored["v"].blocks(rows=[2])
    assert not rest and torch.equal(values, whole[items][:, [2]])
    assert torch.equal(torch.stack(list(stored["v"])), whole)
    assert len(stored["v"]) == 5 and stored["v"].nbytes == whole.nbytes


def test_only_what_is_asked_for_is_read(take, monkeypatch):
    stored = take()
    again, read = open_store(stored.folder), []
    real = store.Store._slice
    monkeypatch.setattr(
        store.Store, "_slice", lambda self, n, site: read.append(n) or real(self, n, site)
    )
    order = again.store.manifest.order.tolist()
    _ = again["v"][[order[0], order[1]], 1]
    assert set(read) == {0}
    checked = again.store._whole
    assert 2 not in checked  # shards that nobody looked at are not even checked


def test_texts_are_read_one_by_one(take):
    stored = take()
    assert stored.texts[1] == TEXTS[1] and stored.texts[-1] == TEXTS[-1]
    assert stored.texts[1:3] == tuple(TEXTS[1:3]) and len(stored.texts) == 5
    assert isinstance(stored.tokens[0], tuple) and "5 values" in repr(stored.strings)
    with pytest.raises(IndexError):
        _ = stored.texts[5]


def test_the_index_lists_every_vector_once(take):
    stored = take(sites=["v", "stream"])
    index = stored.store.index()
    assert list(index.columns) == [
        *("item", "text", "word", "start", "end", "site", "layer", "shard", "row", "checksum")
    ]
    assert len(index) == 5 * (3 + 4)
    assert not index.duplicated(["item", "site", "layer"]).any()
    for row in index.to_dict("records"):
        at = stored.positions[row["item"]]
        assert (row["start"], row["end"]) == (at[0], at[-1] + 1)
        assert row["text"] == TEXTS[row["item"]] and row["word"] == "bank"


def test_nothing_is_pickled(take):
    folder = take().folder
    names = [path.name for path in folder.rglob("*") if path.is_file()]
    assert {name.rpartition(".")[2] for name in names} == {
        *("json", "arrow", "safetensors", "parquet", "lock")
    }
    for path in folder.rglob("*"):
        if path.is_file():
            head = path.read_bytes()[:2]
            assert head[:1] != b"\x80" and head != b"PK", f"{path} looks like a pickle"


def test_kept_in_memory_saved_and_drawn(take, tmp_path):
    from wvprobe import figure

    stored = take()
    plain = stored.in_memory()
    assert type(plain) is Activations and same(plain["scores"], stored["scores"].tensor())
    back = Activations.load(plain.save(tmp_path / "saved"))
    assert torch.equal(back["v"], plain["v"]) and back.texts == tuple(TEXTS)
    with pytest.raises(InputError, match="lie in .* already"):
        stored.save(tmp_path / "again")
    assert figure(stored).data[0].y == pytest.approx(figure(plain).data[0].y)
    with pytest.raises(InputError, match="`site` must be one of"):
        _ = stored["z"]


# --- what interrupts a capture ---


class Stopped(BaseException):
    """What no `except Exception` catches."""


def test_stopped_at_every_operation_on_the_disk(take, monkeypatch, tmp_path):
    """Before each sync or renaming in turn the run ends; the next call completes it."""
    calls, limit = [0], [10**9]

    def counted(real):
        def call(*given):
            calls[0] += 1
            if calls[0] > limit[0]:
                raise Stopped
            return real(*given)

        return call

    monkeypatch.setattr(_files.os, "fsync", counted(os.fsync))
    monkeypatch.setattr(_files.os, "replace", counted(os.replace))
    given = {"texts": TEXTS[:3], "sites": ["v"]}  # two batches
    whole, total = files(take("whole", **given).folder), calls[0]
    assert total > 2 * 6
    for number in range(total):
        calls[0], limit[0] = 0, number
        folder = tmp_path / "stopped"
        with pytest.raises(Stopped):
            take("stopped", **given)
        if number < total - 1:  # before the last sync everything is in place already
            with pytest.raises(StoreError, match="no stored activations|not complete: . of 2"):
                open_store(folder)
        limit[0] = 10**9
        take("stopped", **given)
        assert files(folder) == whole
        shutil.rmtree(folder)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError("a hook of the caller's")])
def test_interrupted_and_gone_on_with(error, take, monkeypatch, tmp_path):
    whole = files(take("whole").folder)
    real, ran = Run.batch, []

    def batch(self, rows):
        ran.append(len(rows))
        if len(ran) == 2:
            raise error
        return real(self, rows)

    monkeypatch.setattr(Run, "batch", batch)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        take()
    kept = {path: path.stat().st_ino for path in (tmp_path / "store/shards").iterdir()}
    assert len(kept) == 1
    with pytest.raises(StoreError, match="not complete: 1 of 3 shards are there"):
        open_store(tmp_path / "store")
    take()
    assert len(ran) == 2 + 2, "what was there did not run again"
    assert all(path.stat().st_ino == inode for path, inode in kept.items())
    assert files(tmp_path / "store") == whole
    take()
    assert len(ran) == 4, "a complete store runs nothing"


def test_a_part_of_a_store(take, monkeypatch, tmp_path):
    whole = take("whole")
    real, ran = Run.batch, []

    def batch(self, rows):
        ran.append(len(rows))
        if len(ran) == 3:
            raise KeyboardInterrupt
        return real(self, rows)

    monkeypatch.setattr(Run, "batch", batch)
    with pytest.raises(KeyboardInterrupt):
        take()
    part = open_store(tmp_path / "store", partial=True)
    there = part.items.tolist()
    assert there == sorted(whole.store.manifest.order.tolist()[:4]) and len(part["v"]) == 4
    assert torch.equal(part["v"].tensor(), whole["v"].tensor()[there])
    assert tuple(part.texts) == tuple(TEXTS[item] for item in there)
    shutil.rmtree(tmp_path / "store/index")
    with pytest.raises(StoreError, match="0 of 3 shards"):
        open_store(tmp_path / "store", partial=True)


def test_leftovers_of_a_killed_writer_are_removed(take, tmp_path):
    folder = take().folder
    for place in (folder, folder / "shards", folder / "index"):
        (place / ".000001.x.tmp").write_bytes(b"half")
    before = files(folder)
    take()
    assert files(folder) == {n: h for n, h in before.items() if not n.endswith(".tmp")}


KILLED = """
import os, random, signal, sys, time
from pathlib import Path

import torch

from wvprobe.activations import capture
from wvprobe.testing import tiny_model

folder, moments = Path(sys.argv[1]), int(sys.argv[2])
torch.set_num_threads(1)
model = tiny_model("llama")
texts = [f"The river bank is {'very ' * (n % 7)}close to here." for n in range(48)]
rng = random.Random(12)


def run(name, seconds=None):
    '''Capture in a process of its own; kill it after so many seconds. Say if it was killed.'''
    child = os.fork()
    if not child:
        try:
            capture(model, texts, ["v", "scores"], words="bank", batch_size=2, out=folder / name,
                    progress=False)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the capture failed"
    return False


capture(model, texts[:4], "v", words="bank")  # what is done once a process is done
start = time.perf_counter()
run("whole")
whole = time.perf_counter() - start
for moment in range(moments):
    killed, name = [], f"killed-{moment}"
    killed.append(run(name, rng.uniform(0, whole)))
    if rng.random() < 0.5:
        killed.append(run(name, rng.uniform(0, whole)))
    shards, index = (len(list((folder / name / kind).glob("0*"))) if (folder / name).is_dir() else 0
                     for kind in ("shards", "index"))
    run(name)
    print(moment, killed, shards, index, flush=True)
"""


@pytest.mark.parametrize(
    "moments", [pytest.param(3, marks=pytest.mark.ci), pytest.param(20, marks=pytest.mark.slow)]
)
def test_killed_at_random_moments(moments, tmp_path):
    """SIGKILL, once or twice, then once more to the end: the same files, byte for byte."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(moments)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ran.returncode == 0, ran.stderr
    whole = files(tmp_path / "whole")
    assert len(whole) == 2 + 2 * 24
    lines = ran.stdout.splitlines()
    assert len(lines) == moments and sum("True" in line for line in lines) >= moments // 2
    for moment in range(moments):
        assert files(tmp_path / f"killed-{moment}") == whole, lines[moment]
    index = open_store(tmp_path / "killed-0").store.index()
    assert len(index) == 48 * 2 * 3 and not index.duplicated(["item", "site", "layer"]).any()


# --- what must not be mixed ---


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"batch_size": 3}, "batch_size: 2 there, 3 here"),
        ({"sites": ["v"]}, r"sites: \['v', 'resid_post', 'scores'\] there, \['v'\] here"),
        ({"words": None}, "places: sha256 .* there, sha256 .* here"),
        ({"words": "bank", "pool": "mean"}, "pool: 'last' there, 'mean' here"),
        ({"layers": [0, 1]}, r"layers of v: \[0, 1, 2\] there, \[0, 1\] here"),
        ({"texts": TEXTS[:4]}, "number of texts: 5 there, 4 here"),
        ({"texts": [*TEXTS[:4], "The boat bank."]}, "texts: sha256 .*; tokens: sha256"),
        ({"prepend_bos": False}, "prepend_bos: True there, False here"),
    ],
)
def test_captures_that_differ_are_not_mixed(other, told, take, tmp_path):
    before = files(take().folder)
    with pytest.raises(StoreError, match=told):
        take(**other)
    assert files(tmp_path / "store") == before


def test_models_that_differ_are_not_mixed(take, tiny, monkeypatch):
    take()
    with pytest.raises(StoreError, match="weights: sha256 .* there, sha256 .* here"):
        take(model=tiny("llama", seed=1))
    with pytest.raises(StoreError, match="dtype: 'torch.float32' there, 'torch.bfloat16' here"):
        take(model=tiny("llama", dtype="bfloat16"))
    model = tiny("llama")
    with (
        model.hooks(fwd_hooks=[("blocks.1.attn.o.hook_out", lambda x, hook: x * 0)]),
        pytest.raises(StoreError, match="hooks: "),
    ):
        take()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 13)
    with pytest.raises(StoreError, match="threads: .* there, 13 here"):
        take()


def test_a_model_that_was_asked_for_hidden_states_is_the_same(take):
    """For them transformers leaves hooks behind, which change nothing."""
    from wvprobe.testing import tiny_model

    model = tiny_model("llama")
    take(model=model)
    asked = model.original_model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    assert len(asked.hidden_states) == 4
    take(model=model)


def test_versions_that_differ_are_not_mixed(take, monkeypatch):
    folder = take().folder
    document = json.loads((folder / "manifest.json").read_text())
    document["versions"]["torch"] = "1.0"
    (folder / "manifest.json").write_text(json.dumps(document))
    with pytest.raises(StoreError, match="torch: '1.0' there, '"):
        take()
    with pytest.raises(IntegrityError, match="it belongs to another manifest"):
        open_store(folder)["v"].tensor()


def test_a_shard_of_another_store_is_noticed(take, tmp_path):
    one, other = take("one").folder, take("other", words=None).folder
    for kind, end in (("shards", "safetensors"), ("index", "parquet")):
        shutil.copy(other / kind / f"000000.{end}", one / kind / f"000000.{end}")
    with pytest.raises(IntegrityError, match="it belongs to another manifest"):
        open_store(one)["v"].tensor()
    whole = files(take("whole").folder)
    take("one")
    assert files(one) == whole


def test_a_second_writer_is_refused(take, tmp_path):
    folder = take().folder
    before = files(folder)
    with FileLock(folder / "lock"), pytest.raises(StoreError, match="by another process. Wait"):
        take()
    assert files(folder) == before
    take()


def test_workers_share_one_manifest(take, tiny, tmp_path):
    """One writer holds the lock and says what is missing; others write that, in any order."""
    whole = files(take("whole").folder)
    model, folder = tiny("llama"), tmp_path / "shared"
    arch = adapters.architecture(model)

    def worker():
        places = Places("bank", None, len(TEXTS))
        plan = SitePlan(model, arch, SITES, None)
        return StoredCapture(model, plan, TEXTS, places, "last", 2, None)

    with store.Writer.of(folder) as writer:
        manifest = writer.start(worker().prepare)
        assert writer.missing() == [0, 1, 2]
        one, other = worker(), worker()
        for own, number in ((other, 2), (one, 0)):
            own.write(folder, manifest, number)
        assert writer.missing() == [1]
        other.write(folder, manifest, 1)
        assert writer.missing() == []
    assert files(folder) == whole


def test_other_folders_are_left_alone(take, tmp_path):
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("…")
    with pytest.raises(StoreError, match="holds other files .thesis.tex"):
        take()
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["thesis.tex"]
    with pytest.raises(WordError):
        take("nothing", words="boat")
    assert not (tmp_path / "nothing").exists(), "nothing was begun, and nothing is left"


# --- what disks do ---


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_a_damaged_vector_is_named_and_written_anew(take, tmp_path):
    stored = take(sites=["v"])
    whole, item = files(stored.folder), stored.store.manifest.order.tolist()[1]
    shard = stored.folder / "shards" / "000000.safetensors"
    # The last number of the second row at the last layer.
    flip(shard, -1)
    damaged = open_store(stored.folder)
    with pytest.raises(
        IntegrityError, match=rf"000000.safetensors .*1 vectors .* v of item {item}"
    ):
        damaged["v"].tensor()
    with pytest.raises(IntegrityError, match="at layer 2"):
        damaged.store.verify()
    other = stored.store.manifest.order.tolist()[-1]
    assert damaged["v"][other].isfinite().all(), "shards that are whole can be read"
    take(sites=["v"])
    assert files(stored.folder) == whole
    open_store(stored.folder).store.verify()


@pytest.mark.parametrize("kind", ["shards", "index"])
@pytest.mark.parametrize("harm", ["cut", "garbage", "header", "gone"])
def test_harmed_files_are_noticed_and_written_anew(kind, harm, take):
    stored = take()
    whole = files(stored.folder)
    path = next(iter(sorted((stored.folder / kind).iterdir())))
    if harm == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    elif harm == "garbage":
        path.write_bytes(b"x" * 100)
    elif harm == "header":
        flip(path, 9 if kind == "shards" else -9)
    else:
        path.unlink()
    with pytest.raises((IntegrityError, StoreError), match="written|not complete|index"):
        open_store(stored.folder)["v"].tensor()
    take()
    assert files(stored.folder) == whole


def test_harmed_items_are_noticed_and_written_anew(take):
    folder = take().folder
    whole = files(folder)
    flip(folder / "items.arrow", 200)
    with pytest.raises(IntegrityError, match="items.arrow is not what was written"):
        open_store(folder)
    take()
    assert files(folder) == whole
    (folder / "items.arrow").unlink()
    with pytest.raises(StoreError, match="items.arrow is missing"):
        open_store(folder)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses(number, take, monkeypatch, tmp_path):
    """At every file in turn; what was there before stays, and the next call completes it."""
    whole, real, left = files(take("whole").folder), os.fsync, [0]

    def refuse(descriptor):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(number, os.strerror(number))
        return real(descriptor)

    monkeypatch.setattr(_files.os, "fsync", refuse)
    for allowed in (0, 3, 6, 11):
        left[0] = allowed
        told = "the disk is full.*make room" if number == errno.ENOSPC else "cannot write to"
        with pytest.raises(DiskSpaceError, match=told):
            take(f"refused-{allowed}")
        assert not list(tmp_path.glob("**/.*.tmp")), "half a file takes no room"
        left[0] = 10**9
        take(f"refused-{allowed}")
        assert files(tmp_path / f"refused-{allowed}") == whole


def test_a_file_that_may_not_grow(take, tmp_path):
    whole = files(take("whole").folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(path.stat().st_size for path in (tmp_path / "whole/shards").iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest - 1, hard))
    try:
        with pytest.raises(DiskSpaceError, match="no file may grow further"):
            take()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    take()
    assert files(tmp_path / "store") == whole


@pytest.fixture
def small_disk(tmp_path):
    """Return what mounts a disk of some kilobytes; skipped where that is not allowed."""
    place = tmp_path / "disk"
    place.mkdir()

    def mounted(*options):
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", ",".join(options), "tmpfs", str(place)],
            capture_output=True,
        )
        if done.returncode:
            pytest.skip("no disk can be mounted here")
        return place

    yield mounted
    while subprocess.run(["umount", str(place)], capture_output=True).returncode == 0:
        pass


@pytest.mark.skipif(shutil.which("mount") is None, reason="there is no mount")
def test_a_disk_that_fills_up(take, small_disk, tmp_path):
    given = {"texts": TEXTS * 4, "sites": ["head_out", "v"], "batch_size": 4}
    whole = files(take("whole", **given).folder)
    place = small_disk("size=96k")
    with pytest.raises(DiskSpaceError, match="the disk is full"):
        take("disk/store", **given)
    with pytest.raises(StoreError, match="not complete"):
        open_store(place / "store")
    part = open_store(place / "store", partial=True)
    part.store.verify()
    assert 0 < len(part["v"]) < 20
    done = subprocess.run(["mount", "-o", "remount,size=4m", str(place)], capture_output=True)
    assert done.returncode == 0
    del part
    take("disk/store", **given)
    assert files(place / "store") == whole
    done = subprocess.run(["mount", "-o", "remount,ro", str(place)], capture_output=True)
    assert done.returncode == 0
    with pytest.raises(DiskSpaceError, match="cannot write to .*Read-only"):
        take("disk/store", **given)
    with pytest.raises(DiskSpaceError, match="cannot write to .*Read-only"):
        take("disk/other", **given)
    assert open_store(place / "store")["v"].tensor().isfinite().all(), "and it can be read"


def test_a_folder_that_cannot_be(take, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskSpaceError, match="cannot write to"):
        take("file/store")


def test_what_is_no_store(tmp_path):
    with pytest.raises(StoreError, match="holds no stored activations"):
        open_store(tmp_path / "nowhere")
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match="cannot be read"):
        open_store(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": 2}')
    with pytest.raises(StoreError, match="has store format 2; this version reads 1"):
        open_store(tmp_path)
