"""The analysis of question 4 runs from end to end."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_smoke(tmp_path):
    script = ROOT / "analyses" / "q4_head_count.py"
    done = subprocess.run(
        [sys.executable, str(script), "--smoke", "--figures", str(tmp_path / "figures")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "W_Q, W_K, W_V of a layer: 43.49 B" in done.stdout
    assert "over 96 layers: 4.17 T" in done.stdout and "with W_O: 5.57 T" in done.stdout
    assert "queries and keys 192, values 128   (MLA)" in done.stdout
    assert "tiny:qwen3: 74,904 parameters" in done.stdout
    assert "flash forward ran aten::_scaled_dot_product_flash_attention_for_cpu" in done.stdout
    assert {path.stem for path in (tmp_path / "figures").iterdir()} == {
        "known", "scaling", "alternatives", "clock",
    }  # fmt: skip
