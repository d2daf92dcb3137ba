"""The analyses are essays on public names, run as notebooks, and fill the gallery."""

import ast
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from test_layout import SOURCE

REPOSITORY = SOURCE.parents[1]
ANALYSES = REPOSITORY / "analyses"
SCRIPTS = sorted(ANALYSES.glob("*.py"))
README = (ANALYSES / "README.md").read_text(encoding="utf-8")
TOY = '''"""A toy."""

# %% [markdown]
# # Is a toy a toy?
#
# **Question.** Is it one, for
# sure?
#
# **Method.** One asks.

# %%
import sys

# %% tags=["parameters"]
arguments = [] if "ipykernel" in sys.modules else None

# %% tags=["gallery"]
import plotly.graph_objects as go

print(arguments)
go.Figure(go.Scatter(y=[1.0, 2.0]), layout={"title": "It rises", "height": 300})

# %% tags=["finding"]
print("It is one (0.9 to 1.1).")
print("Verdict: a_toy, not *two* or _one_.")
'''


@pytest.fixture(scope="module")
def tools():
    """The two programs beside the analyses, as modules."""
    found = {}
    for name in ("running", "gallery"):
        spec = importlib.util.spec_from_file_location(name, ANALYSES / "tools" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        # The second imports the first by this name, as it does where it is run.
        found[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    yield SimpleNamespace(**found)
    for name in found:
        del sys.modules[name]


@pytest.fixture(scope="module")
def toy(tools, tmp_path_factory):
    """A toy analysis's notebook, run."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.py").write_text(TOY, encoding="utf-8")
    made = tools.running.notebook_of(folder / "toy.py", ["--model", "tiny:llama"])
    tools.running.run(made, folder)
    return made


def cells(script: Path) -> list[tuple[str, str]]:
    """Return head and text of a script's cells."""
    parts = re.split(r"^# %%(.*)\n", script.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def names_in(tree: ast.AST) -> list[str]:
    """Return what a program imports from wvprobe, and every attribute it reads."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("wvprobe"):
            found += [f"{node.module}.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.startswith("wvprobe")]
        elif isinstance(node, ast.Attribute):
            found.append(node.attr)
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_uses_public_names_alone(script):
    found = names_in(ast.parse(script.read_text(encoding="utf-8")))
    assert any(name.startswith("wvprobe.") for name in found) or "load" in found
    assert not [name for name in found if any(p.startswith("_") for p in name.split("."))]


def test_a_private_name_would_be_found():
    found = names_in(ast.parse("from wvprobe import _linalg\nimport wvprobe._types\nx._y"))
    assert found == ["wvprobe._linalg", "wvprobe._types", "_y"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_reads_like_an_essay(script):
    told = [text for head, text in cells(script) if "[markdown]" in head]
    assert re.match(r"# # .+\n#\n# \*\*Question\.\*\* ", told[0])
    assert "# **Method.** " in told[0]
    headings = re.findall(r"^# ## (.+)", "".join(told), flags=re.MULTILINE)
    assert headings[-3:] == ["Result", "Caveats", "What would change the verdict"]
    assert "The rule" in "".join(told)
    for tag in ("parameters", "finding", "gallery"):
        assert sum(f'"{tag}"' in head for head, _ in cells(script)) == 1


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_what_the_result_says_is_computed(script):
    (cell,) = [text for head, text in cells(script) if '"finding"' in head]
    calls = [node for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.Call)]
    printed = [call.args[0] for call in calls if ast.unparse(call.func) == "print"]
    assert len(printed) >= 3
    for argument in printed:
        assert isinstance(argument, ast.JoinedStr)
        assert any(isinstance(value, ast.FormattedValue) for value in argument.values)


def test_notebook_runs_with_its_arguments(tools, toy):
    assert [tools.running.tags(cell) for cell in toy.cells] == [
        [],
        [],
        ["parameters"],
        ["injected-parameters"],
        ["gallery"],
        ["finding"],
    ]
    printed, figure = toy.cells[4].outputs
    assert printed["text"] == "['--model', 'tiny:llama']\n"
    # Neither a page nor a script: what draws it belongs to the reader.
    assert set(figure["data"]) <= {tools.running.PLOTLY, "text/plain"}
    assert figure["data"][tools.running.PLOTLY]["layout"]["title"]["text"] == "It rises"


def test_an_analysis_that_fails_is_written_and_told(tools, tmp_path, capsys):
    script = tmp_path / "toy.py"
    script.write_text(TOY.replace("print(arguments)", "print(undefined)"), encoding="utf-8")
    assert not tools.running.written(script, [], tmp_path / "out")
    assert "undefined" in capsys.readouterr().err
    made = nbformat.read(tmp_path / "out" / "toy.ipynb", as_version=4)
    assert made.cells[4].outputs[0]["ename"] == "NameError"


def figures(toy, tools, sizes):
    """Return a notebook with figures of so many bytes of data."""
    made = nbformat.from_dict(json.loads(json.dumps(toy)))
    (output,) = tools.running.outputs(made)
    made.cells[4].outputs = [
        nbformat.from_dict(
            {**output, "data": {tools.running.PLOTLY: {"data": [], "layout": {"x": "x" * size}}}}
        )
        for size in sizes
    ]
    return made


def test_large_figures_keep_their_picture_alone(toy, tools):
    made = figures(toy, tools, (1_000, 50_000, 20_000))
    told = tools.running.lighten(made, lambda _data: b"a picture", limit=30_000)
    kept = [tools.running.PLOTLY in output["data"] for output in tools.running.outputs(made)]
    assert kept == [True, False, True] and told == ["a large figure is a picture alone"]
    assert all(output["data"]["image/png"] for output in tools.running.outputs(made))
    assert tools.running.size(made) <= 30_000


def test_without_pictures_no_figure_is_lost(toy, tools):
    made = figures(toy, tools, (1_000, 50_000))
    assert tools.running.lighten(made, None, limit=30_000) == ["larger than 0 MB"]
    assert all(tools.running.PLOTLY in out["data"] for out in tools.running.outputs(made))


def test_gallery_shows_what_was_printed(toy, tools, tmp_path):
    for model in ("a-model", "minilm-l6", "smoke"):
        (tmp_path / model).mkdir()
        nbformat.write(toy, tmp_path / model / "toy.ipynb")
    found = tools.gallery.found_in(tmp_path)
    assert list(found["toy"]) == ["a-model", "minilm-l6"]
    page = tools.gallery.section("toy", found["toy"], "images/toy.png")
    lines = "* It is one (0.9 to 1.1).\n* Verdict: a_toy, not \\*two\\* or \\_one\\_.\n"
    command = "`python analyses/toy.py --model tiny:llama`"
    assert page == (
        "## Is a toy a toy?\n\nIs it one, for\nsure?\n\n![Is a toy a toy?](images/toy.png)\n\n"
        f"**minilm-l6** ({command}):\n\n{lines}\n**a-model** ({command}):\n\n{lines}"
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_gallery_has_every_analysis(script, tools):
    made = tools.running.notebook_of(script, [])
    title, question = tools.gallery.question_of(made)
    _, _, section = README.partition(f"## {title}\n")
    section, _, _ = section.partition("\n## ")
    assert question in section and f"python analyses/{script.name} --model " in section
    assert "(images/" in section and "Verdict: " in section
    picture = ANALYSES / "images" / f"{script.stem}.png"
    assert f"(images/{picture.name})" in section
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size < 250_000


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_analysis_runs_as_a_notebook(script, tools, tmp_path):
    made = tools.running.notebook_of(script, ["--smoke"])
    tools.running.run(made, REPOSITORY)
    assert tools.running.lighten(made, None) == []  # light even with its figures as data alone
    assert len(tools.gallery.finding_of(made)) >= 3
    (shown,) = tools.running.outputs(tools.gallery.tagged(made, "gallery"))
    assert tools.running.PLOTLY in shown["data"]
    errors = [out for cell in made.cells for out in cell.get("outputs", []) if "ename" in out]
    assert not errors
