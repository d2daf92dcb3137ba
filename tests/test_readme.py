"""What the README shows runs, and what it points to is there."""

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.real_model
def test_example_runs_and_ends_in_a_number(capsys):
    (example,) = EXAMPLES
    assert len(example.splitlines()) <= 15
    exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    last = capsys.readouterr().out.split()[-1]
    assert -1.0 <= float(last) < 0.999  # the two vectors have parted by the last layer


@pytest.mark.parametrize("target", re.findall(r"\]\((?!https?:|#)([^)]+)\)", README))
def test_link_leads_somewhere(target):
    assert (REPOSITORY / target.partition("#")[0]).exists()
