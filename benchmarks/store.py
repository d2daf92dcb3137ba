"""Probes of stored activations, as the store grows: ``python -m benchmarks.store``.

Synthetic stores of three sizes (`--mb`, `--items`; a third, two thirds and all of the layers, every
one with a planted label) are written shard by shard, opened, and probed with a permutation test;
each in a process of its own, whose peak memory is read from the system. Peak memory must not grow
with the store: what is held is a block of sites, and what every item needs whatever the layers.
``--mb 8192 --items 20000`` is the 8 GB store that is to be probed under 2 GB. With ``--model``,
2,000 and 20,000 sentences are captured to a store instead, with SmolLM2 or the model named.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import finish

HEADS, WIDTH, CLASSES, ROWS = 3, 64, 4, 64
# How much more the largest store may take than the smallest, and what 8 GB must stay under.
GROWTH, LIMIT_MB = 1.15, 2048.0
SENTENCES = (2_000, 20_000)


def labels(n: int) -> torch.Tensor:
    """Return the items' classes."""
    return torch.randint(CLASSES, (n,), generator=torch.Generator().manual_seed(0))


def write(folder: Path, items: int, layers: int) -> None:
    """Write a store whose first head of every layer holds the label, as capture(out=) would."""
    from wvprobe.store import Item, ItemsFile, Manifest, SiteFacts, Writer, write_shard

    y = labels(items)
    facts = SiteFacts(tuple(range(layers)), ("item", "layer", "kv_head", "d_head_v"), (), "zero")

    def item(number: int) -> Item:
        return Item(f"Sentence {number}.", "Sentence", (0,), (number,), (str(number),), (False,))

    def prepare(table: ItemsFile) -> Any:
        for number in range(items):
            table.add(item(number))
        sizes = [min(ROWS, items - start) for start in range(0, items, ROWS)]
        settings = {"model": "synthetic", "weights": "", "pool": "last", "prepend_bos": False}
        return lambda digest: Manifest(
            settings,
            {},
            {"v": facts},
            longest=1,
            items=digest,
            order=torch.randperm(items, generator=torch.Generator().manual_seed(1)).int(),
            sizes=torch.tensor(sizes).int(),
        )

    with Writer.of(folder) as writer:
        manifest = writer.start(prepare)
        for number in writer.missing():
            rows = manifest.batch(number)
            generator = torch.Generator().manual_seed(number)
            values = torch.randn(layers, len(rows), HEADS, WIDTH, generator=generator)
            values[:, torch.arange(len(rows)), 0, y[rows]] += 1.0
            every = {row: item(row) for row in rows}
            write_shard(
                folder, manifest.identity, number, {"v": values}, {"v": facts.layers}, every
            )


def probe(folder: Path) -> None:
    """Open a store and probe it; print what was found and the peak of the process's memory."""
    from wvprobe import fit_probes
    from wvprobe.activations import open_store

    before = peak_mb()
    stored = open_store(folder)
    start = time.perf_counter()
    found = fit_probes(
        stored["v"],
        labels(len(stored["v"])),
        method="lda",
        penalty=0.1,
        folds=3,
        n_permutations=100,
        description_length=False,
    )
    accuracy = found.scores["accuracy"]
    document = {
        "peak_mb": peak_mb(),
        "before_mb": before,
        "seconds": time.perf_counter() - start,
        "mb": stored["v"].nbytes / 2**20,
        "planted": float(accuracy[:, 0].min()),
        "others": float(accuracy[:, 1:].max()),
        "p_family": float(found.p_family[:, 0].max()) if found.p_family is not None else 1.0,
    }
    print(json.dumps(document))


def capture(folder: Path, sentences: int, name: str) -> None:
    """Capture sentences with a real model; print the peak beyond what the model took."""
    import wvprobe
    from benchmarks.capture import SENTENCES as GIVEN

    model = wvprobe.load(name)
    wvprobe.capture(model, GIVEN[:64], "v", words="bank", progress=False)
    before = peak_mb()
    texts = [GIVEN[number % len(GIVEN)] for number in range(sentences)]
    start = time.perf_counter()
    stored = wvprobe.capture(model, texts, ["v", "resid_post"], words="bank", out=folder)
    mb = sum(site.nbytes for site in stored.values.values()) / 2**20
    document = {
        "peak_mb": peak_mb(),
        "before_mb": before,
        "seconds": time.perf_counter() - start,
        "mb": mb,
    }
    print(json.dumps(document))


def peak_mb() -> float:
    """Return the most memory that this process ever had in use, mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if _MAC else 2**10)


_MAC = sys.platform == "darwin"


def in_a_process(*given: str) -> dict[str, float]:
    """Run a part of this benchmark by itself; return what it printed last."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.store", *given], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Write and probe three stores, or capture two, and compare peaks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=300, help="size of the largest store")
    parser.add_argument("--items", type=int, default=5_000)
    parser.add_argument("--model", nargs="?", const="smollm2-135m", help="capture with it instead")
    parser.add_argument("--folder", help="where stores are written; a temporary one if left out")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        part, folder, size = given.part
        if part == "write":
            write(Path(folder), given.items, int(size))
            print(json.dumps({"peak_mb": peak_mb()}))
        elif part == "probe":
            probe(Path(folder))
        else:
            capture(Path(folder), int(size), given.model)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = (
            captured(folder, given.model) if given.model else probed(folder, given.mb, given.items)
        )
    for one in found:
        print(
            f"{one['mb']:.0f} MB stored: peak {one['peak_mb']:.0f} MB, {one['before_mb']:.0f} MB "
            f"of it before; {one['seconds']:.0f} s"
        )
    first, last = found[0], found[-1]
    growth = last["peak_mb"] / first["peak_mb"]
    exact = given.model is not None or all(
        one["planted"] > 0.3 > one["others"] and one["p_family"] < 0.02 for one in found
    )
    finish(
        "store",
        ratios={"peak of the largest / smallest": growth, "stored": last["mb"] / first["mb"]},
        extra_mb={"largest": last["peak_mb"] - last["before_mb"], "peak": last["peak_mb"]},
        thresholds={
            "peak of the largest / smallest": f"<= {GROWTH}",
            "peak": f"< {LIMIT_MB:.0f}",
        },
        ok=bool(exact and growth <= GROWTH and last["peak_mb"] < LIMIT_MB),
    )


def probed(folder: str, mb: int, items: int) -> list[dict[str, float]]:
    """Probe stores of a third, two thirds and all of the layers."""
    layers = max(3, round(mb * 2**20 / (items * HEADS * WIDTH * 4)))
    found = []
    for number in (1, 2, 3):
        place, size = f"{folder}/{number}", str(max(1, layers * number // 3))
        wrote = in_a_process("--items", str(items), "--part", "write", place, size)
        print(f"written with a peak of {wrote['peak_mb']:.0f} MB", flush=True)
        found.append(in_a_process("--part", "probe", place, size))
        shutil.rmtree(place)
    return found


def captured(folder: str, name: str) -> list[dict[str, float]]:
    """Capture two amounts of sentences."""
    model = ("--model", name)
    return [in_a_process(*model, "--part", "capture", f"{folder}/{n}", str(n)) for n in SENTENCES]


if __name__ == "__main__":
    main()
