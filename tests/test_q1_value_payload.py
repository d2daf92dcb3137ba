"""The analysis of question 1 runs from end to end."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_smoke():
    script = ROOT / "analyses" / "q1_value_payload.py"
    done = subprocess.run(
        [sys.executable, str(script), "--smoke"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for said in ("pos: 300 words", "43 lemmas", "one part of speech", "sense, by distance"):
        assert said in done.stdout
    assert "attn_added" in done.stdout and "kl_control" in done.stdout
