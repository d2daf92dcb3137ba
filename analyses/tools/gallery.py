"""The gallery, `analyses/README.md`, from executed notebooks; `make gallery` calls it.

For each analysis it takes the question from the notebook's first cell, the result from what the
cell tagged ``finding`` printed, model by model, and as a picture the figure of the cell tagged
``gallery``. So no number in it is typed by hand.
"""

import argparse
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from running import ANALYSES, PLOTLY, outputs, picture, pictures, tags

MODELS = ("smollm2-135m", "minilm-l6")  # in this order; others after them, by name
_WIDTH, _SCALE = 900, 1.5  # of pictures
_HEAD = """\
# Analyses

Six essays with numbers. Each puts a question to a model, measures, and derives its verdict from
what it measured, by a rule that it names; caveats, and what would change the verdict, stand at its
end.

```sh
python analyses/q1_value_payload.py --model minilm-l6  # as a script; --smoke takes seconds
make notebooks MODEL=minilm-l6                         # all of them, executed, in notebooks/
make gallery                                           # this page, from notebooks/
```

They use the public names of wvprobe alone, so that any of them can be copied and changed. Editors
that know percent cells run them cell by cell, and jupytext opens them as notebooks as they are.

Below: what each of them printed last, unchanged, on one model or several, with the command that
does it again. Intervals are 95 %. Times were taken on a shared machine of two cores, and say little
of others.
"""


def question_of(made: Any) -> tuple[str, str]:
    """Return the title of a notebook and the question in its first cell."""
    first = made.cells[0].source
    title = re.match(r"# (.+)", first)
    question = re.search(r"\*\*Question\.\*\* (.+?)\n\n", first, re.DOTALL)
    if title is None or question is None:
        raise SystemExit("an analysis begins with a title and a **Question.**")
    return title[1], question[1]


def tagged(made: Any, tag: str) -> Any:
    """Return the one cell of a notebook with a tag, as a notebook of its own."""
    cells = [cell for cell in made.cells if tag in tags(cell)]
    if len(cells) != 1:
        raise SystemExit(f"an analysis has one cell tagged {tag}, not {len(cells)}")
    return nbformat.v4.new_notebook(cells=cells)


def finding_of(made: Any) -> list[str]:
    """Return the lines of a notebook's result."""
    (cell,) = tagged(made, "finding").cells
    printed = "".join(output.get("text", "") for output in cell.outputs)
    return [line for line in printed.splitlines() if line.strip()]


def found_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Return notebooks by analysis and model, those of smoke runs left out."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/*.ipynb")):
        if path.parent.name != "smoke":
            found.setdefault(path.stem, {})[path.parent.name] = nbformat.read(path, as_version=4)
    return found


def section(name: str, by_model: Mapping[str, Any], image: str) -> str:
    """Return one analysis's part of the page."""
    known = [model for model in MODELS if model in by_model]
    ordered = [*known, *sorted(set(by_model) - set(known))]
    title, question = question_of(by_model[ordered[0]])
    parts = [f"## {title}", question, f"![{title}]({image})"]
    for model in ordered:
        made = by_model[model]
        command = ["python", f"analyses/{name}.py", *made.metadata["wvprobe"]["arguments"]]
        lines = "\n".join(f"* {escaped(line)}" for line in finding_of(made))
        parts.append(f"**{model}** (`{shlex.join(command)}`):\n\n{lines}")
    return "\n\n".join(parts) + "\n"


def escaped(line: str) -> str:
    """Return a line that Markdown shows as it is, but for code in backticks."""
    return re.sub(r"([*<|]|\b_|_\b)", r"\\\1", line)


def main() -> int:
    """Read the command line and write the page and its pictures."""
    parser = argparse.ArgumentParser(description="Write analyses/README.md from notebooks.")
    parser.add_argument("--notebooks", default="notebooks", help="what make notebooks wrote")
    parser.add_argument("--out", default=str(ANALYSES), help="where README.md and images/ go")
    given = parser.parse_args()
    found, out = found_in(Path(given.notebooks)), Path(given.out)
    missing = sorted({path.stem for path in ANALYSES.glob("*.py")} - set(found))
    if missing:
        raise SystemExit(f"no notebook of {', '.join(missing)} yet: run make notebooks first")
    (out / "images").mkdir(parents=True, exist_ok=True)
    order = sorted(found, key=lambda name: (not name.startswith("q"), name))
    sections = []
    with pictures() as drawn:
        if drawn is None:
            raise SystemExit("the gallery needs a Chromium for its pictures")
        for name in order:
            first = next((model for model in MODELS if model in found[name]), None)
            made = found[name][first or min(found[name])]
            (shown,) = (o["data"] for o in outputs(tagged(made, "gallery")) if PLOTLY in o["data"])
            image = f"images/{name}.png"
            (out / image).write_bytes(picture(shown[PLOTLY], width=_WIDTH, scale=_SCALE))
            sections.append(section(name, found[name], image))
    (out / "README.md").write_text("\n".join([_HEAD, *sections]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
