"""Executed notebooks from the analyses; `make notebooks` calls it.

    python analyses/tools/running.py polysemy_drift q1_value_payload --model minilm-l6

An analysis is a script of percent cells. Here it becomes a notebook (jupytext), runs in a kernel of
this Python (nbclient), and is written with all that it shows to ``notebooks/MODEL/``.

A figure is kept twice: as data, which JupyterLab, Notebook 7 and VS Code draw with a Plotly of
their own, and as a PNG, for every other reader. No notebook carries Plotly's JavaScript (4.5 MB).
"""

import argparse
import json
import os
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ANALYSES = Path(__file__).parents[1]
LIMIT = 2_000_000  # bytes of a notebook
PLOTLY, PNG = "application/vnd.plotly.v1+json", "image/png"
_WIDTH, _HEIGHT = 820, 450  # of a picture, where the figure has no height of its own


def notebook_of(script: Path, arguments: Sequence[str]) -> Any:
    """Return an analysis as a notebook that has not run yet.

    The docstring goes, since the first cell of text says the same. Behind the cell tagged
    ``parameters`` comes one that holds `arguments`, as papermill would put it there.
    """
    made = jupytext.read(script, fmt="py:percent")
    cells = made.cells
    if cells[0].cell_type == "code" and cells[0].source.startswith('"""'):
        del cells[0]
    (at,) = [n for n, cell in enumerate(cells) if "parameters" in tags(cell)]
    given = nbformat.v4.new_code_cell(f"arguments = {json.dumps(list(arguments))}")
    given.metadata["tags"] = ["injected-parameters"]
    cells.insert(at + 1, given)
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"  # else at random, and no two runs would write the same
        if "finding" in tags(cell):  # a reader wants the sentences, and can unfold their code
            cell.metadata["jupyter"] = {"source_hidden": True}
    made.metadata["kernelspec"] = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    made.metadata["wvprobe"] = {"analysis": script.stem, "arguments": list(arguments)}
    return made


def tags(cell: Any) -> list[str]:
    """Return a cell's tags."""
    return cell.metadata.get("tags", [])


def run(made: Any, folder: Path, timeout: int = 7200) -> None:
    """Run a notebook where it stands, in `folder`.

    Raises:
        CellExecutionError: a cell failed; the notebook holds what it printed.
    """
    environment = {
        **os.environ,
        # Figures as data alone: by default each notebook would carry the script that draws them.
        "PLOTLY_RENDERER": "plotly_mimetype",
        # tqdm misses its widgets, which no file could show.
        "PYTHONWARNINGS": "ignore:IProgress not found",
    }
    for last in (False, False, True):
        client = NotebookClient(
            made,
            timeout=timeout,
            kernel_name="python3",
            # It warns of ports, which are this machine's own.
            extra_arguments=["--log-level=ERROR"],
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
        )
        try:
            client.execute(env=environment)
            return
        except RuntimeError as error:
            # Two kernels that start at once may choose one port: the one that loses starts again.
            if last or "before replying" not in str(error):
                raise


def outputs(made: Any) -> Iterator[Any]:
    """Yield every output of a notebook that has data."""
    for cell in made.cells:
        for output in cell.get("outputs", []):
            if "data" in output:
                yield output


@contextmanager
def pictures() -> Iterator[Any]:
    """Yield a function from a figure's data to PNG, or None where there is no Chromium for it."""
    import kaleido

    try:
        kaleido.start_sync_server(silence_warnings=True)
    except Exception as error:  # Chromium missing, or one that does not start: kaleido's are many
        print(f"no pictures, figures as data alone: {error}", file=sys.stderr)
        yield None
        return
    try:
        yield picture
    finally:
        kaleido.stop_sync_server(silence_warnings=True)


def picture(data: Any, *, width: int = _WIDTH, scale: float = 1) -> bytes:
    """Return a figure's data as PNG; a kaleido server must run."""
    import plotly.io

    figure: Any = plotly.io.from_json(json.dumps(data), skip_invalid=True)
    height = figure.layout.height or _HEIGHT
    with warnings.catch_warnings():
        # Plotly warns of a setting of its own that a running server does not take.
        warnings.filterwarnings("ignore", message="The kopts argument")
        return figure.to_image(format="png", width=width, height=height, scale=scale)


def lighten(made: Any, drawn: Any, limit: int = LIMIT) -> list[str]:
    """Put pictures beside figures; where that is more than `limit`, large figures keep no data.

    Args:
        made: a notebook that has run.
        drawn: from a figure's data to PNG, or None.
        limit: bytes.

    Returns:
        what a reader should know.
    """
    from base64 import b64encode

    figures = [output["data"] for output in outputs(made) if PLOTLY in output["data"]]
    for data in figures:
        data.pop("text/html", None)
        if drawn is not None:
            data[PNG] = b64encode(drawn(data[PLOTLY])).decode()
    told = []
    figures.sort(key=lambda data: len(json.dumps(data[PLOTLY])), reverse=True)
    for data in figures:
        if size(made) > limit and PNG in data:
            del data[PLOTLY]
            told.append("a large figure is a picture alone")
    if size(made) > limit:
        told.append(f"larger than {limit / 1e6:.0f} MB")
    return told


def size(made: Any) -> int:
    """Return a notebook's bytes as a file."""
    return len(nbformat.writes(made).encode())


def written(script: Path, arguments: Sequence[str], folder: Path) -> bool:
    """Run one analysis, write its notebook into `folder`, and say whether all of it ran."""
    made = notebook_of(script, arguments)
    ran = True
    try:
        run(made, ANALYSES.parent)
    except CellExecutionError as error:
        ran = False
        print(f"{script.stem} failed:\n{error}", file=sys.stderr)
    drawing = pictures() if any(PLOTLY in one["data"] for one in outputs(made)) else nullcontext()
    with drawing as drawn:
        told = lighten(made, drawn)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{script.stem}.ipynb"
    nbformat.validate(made)
    nbformat.write(made, path)
    print(f"{path}: {size(made) / 1e6:.2f} MB{''.join(f', {one}' for one in told)}", flush=True)
    return ran


def main() -> int:
    """Read the command line; return 1 where an analysis failed."""
    known = {script.stem: script for script in sorted(ANALYSES.glob("*.py"))}
    parser = argparse.ArgumentParser(description="Run the analyses as notebooks.")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(known)}; all unless given")
    parser.add_argument("--model", default="smollm2-135m", help="anything wvprobe.load takes")
    parser.add_argument("--smoke", action="store_true", help="a small random model, for tests")
    parser.add_argument("--out", default="notebooks", help="where to; a folder a model in it")
    parser.add_argument("--options", default="", help='their own: --options="--seconds 300"')
    given = parser.parse_args()
    unknown = set(given.names) - set(known)
    if unknown:
        parser.error(f"no analysis {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    arguments = ["--smoke"] if given.smoke else ["--model", given.model]
    arguments += shlex.split(given.options)
    folder = Path(given.out) / ("smoke" if given.smoke else Path(given.model).name)
    ran = [written(known[name], arguments, folder) for name in given.names or known]
    return 0 if all(ran) else 1


if __name__ == "__main__":
    sys.exit(main())
