"""What README.md and docs/ show runs and prints what they say, and their links lead somewhere."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser

from wvprobe import cli

REPOSITORY = Path(__file__).parent.parent
README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]

# Commands of a shell block that set up or install, and are shown without being run.
SHOWN = ("make", "pip", "python3", "source", ".ci/run", "git", "export")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
TUTORIAL = "docs/tutorial.md"
PACKAGED = "smollm2-135m"


def name_of(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


# Pages whose numbers are a real model's take longer than all others together.
MARKS = {TUTORIAL: [pytest.mark.real_model]}


def languages(page: Path) -> list[str]:
    """Return the language of every fenced block of a page; plain indented ones are formulas."""
    fences = re.findall(r"^ *```(.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return fences[::2]


def run_python(example: Example) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        PythonEvaluator()(example)
    example.namespace["_printed"] = printed.getvalue()


def run_shell(example: Example) -> str | None:
    """Run the lines that call wvprobe, in this process; the others are no more than looked at."""
    printed = ""
    for line in str(example.parsed).replace("\\\n", " ").splitlines():
        command, *arguments = shlex.split(line, comments=True) or [""]
        if command == "make":
            targets = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
            named = [word for word in arguments if "=" not in word]
            if not all(re.search(rf"^{re.escape(word)}:", targets, re.MULTILINE) for word in named):
                return f"the Makefile has not all of {named}"
        if command in ("", *SHOWN):
            continue
        if command != "wvprobe":
            return f"{command} is neither run nor known as a command that is only shown"
        with (
            contextlib.redirect_stdout(io.StringIO()) as out,
            contextlib.redirect_stderr(io.StringIO()) as err,
            pytest.raises(SystemExit) as left,
        ):
            cli.main(arguments)
        if left.value.code:
            return f"{line} left with {left.value.code}: {err.getvalue()}"
        printed += out.getvalue()
    example.namespace["_printed"] = printed
    return None


def check_output(example: Example) -> str | None:
    """Hold a block of text against what the block before it printed."""
    return difference(str(example.parsed), example.namespace["_printed"])


def difference(shown: str, printed: str) -> str | None:
    """Return how two texts differ: words must be the same, numbers to one in the last place."""
    words = [NUMBER.sub("#", text).split() for text in (shown, printed)]
    if words[0] != words[1]:
        return f"the page shows\n{shown}\nbut what runs prints\n{printed}"
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    wrong = [(a, b) for a, b in pairs if abs(float(a) - float(b)) > 1.001 * last_place(a)]
    return f"{wrong} differ in\n{printed}" if wrong else None


def last_place(number: str) -> float:
    """Return what one in the last place of a printed number is worth; 0 for a whole number."""
    digits, _, exponent = number.partition("e")
    decimals = len(digits.partition(".")[2])
    return 0.0 if not decimals and not exponent else 10.0 ** (int(exponent or 0) - decimals)


def parsed(page: Path) -> Document:
    evaluators = {"python": run_python, "sh": run_shell, "text": check_output}
    parsers = [CodeBlockParser(language, evaluator) for language, evaluator in evaluators.items()]
    return Document.parse(str(page), *parsers)


def run(document: Document) -> Iterator[Any]:
    """Evaluate the blocks of a page one after another, as a reader would."""
    for example in document.examples():
        example.evaluate()
        yield example


@pytest.mark.ci
@pytest.mark.parametrize(
    "page", [pytest.param(p, id=name_of(p), marks=MARKS.get(name_of(p), [])) for p in PAGES[1:]]
)
def test_blocks_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # what a page writes, it writes there
    document = parsed(page)
    assert len(list(run(document))) == len(languages(page))


@pytest.mark.ci
@pytest.mark.parametrize("source", ["tiny:qwen2", "tiny:bert"])
def test_tutorial_runs_on_another_model(source, tmp_path, monkeypatch):
    """Its numbers are then others, so that blocks of text are left out."""
    monkeypatch.chdir(tmp_path)
    page = (REPOSITORY / TUTORIAL).read_text(encoding="utf-8")
    assert page.count(f'"{PACKAGED}"') == 1, "the name of the model stands in one place"
    copy = tmp_path / "tutorial.md"
    copy.write_text(page.replace(f'"{PACKAGED}"', f'"{source}"'), encoding="utf-8")
    document = Document.parse(str(copy), CodeBlockParser("python", run_python))
    assert len(list(run(document))) == languages(copy).count("python")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_is_of_a_language_that_is_run_or_compared(page):
    assert set(languages(page)) <= {"python", "sh", "text"}


def test_numbers_are_compared_to_their_last_place():
    assert difference("error 1.20e-03 in 3 heads", "error  1.21e-03 in\n3 heads") is None
    assert difference("0.25", "0.27") is not None
    assert difference("3 heads", "4 heads") is not None
    assert difference("3 heads", "3 layers") is not None


@pytest.mark.real_model
def test_readme_has_one_short_example_that_ends_in_a_number(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    assert len(example.splitlines()) <= 15
    document = parsed(README)
    assert len(list(run(document))) == len(languages(README))
    last = document.namespace["_printed"].split()[-1]
    assert -1.0 <= float(last) < 0.999  # the two vectors have parted by the last layer


def test_names_beside_the_neighbours_are_there():
    """Those of wvprobe and TransformerLens; the others are not installed."""
    from transformer_lens import ActivationCache, head_detector, patching
    from transformer_lens.model_bridge import TransformerBridge

    import wvprobe

    model = wvprobe.load("tiny:llama", audit=False)
    places = (TransformerBridge, ActivationCache, head_detector, patching, model.blocks[0].attn)
    table = (
        README.read_text(encoding="utf-8").split("## Beside its neighbours")[1].split("\n## ")[0]
    )
    rows = [line.split("|") for line in table.splitlines() if line.startswith("| ")]
    ours = [name for row in rows[1:] for name in re.findall(r"`(\w+)`", row[2])]
    theirs = [name for row in rows[1:] for name in re.findall(r"`(\w+)`", row[3])]
    assert len(ours) >= 10 and set(ours) <= set(wvprobe.__all__)
    assert len(theirs) >= 8
    assert not [name for name in theirs if not any(hasattr(place, name) for place in places)]


def rows_of(text: str) -> Iterator[list[str]]:
    """Yield the cells of a page's table rows that have code in their second column."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[1].startswith("`"):
            yield [cell.strip("`") if cell.endswith("`") else cell for cell in cells]


@pytest.mark.ci
def test_rows_of_coming_from_hold():
    """Code for wvprobe runs; TransformerLens's too, and gives the same numbers where it is said."""
    page = DOCS / "coming-from.md"
    document = parsed(page)
    list(run(document))
    compared = 0
    for section in page.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        for there, here, note in rows_of(text):
            ours = eval(here, document.namespace)
            theirs = eval(there, document.namespace) if title == "TransformerLens" else None
            if note.startswith("same numbers"):
                ours, theirs = (torch.as_tensor(x).detach().float() for x in (ours, theirs))
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=there)
                compared += 1
    assert compared == 13


def links() -> list[Any]:
    found = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
        for target in re.findall(r"\]\((?!https?:|#)([^)\s]+)\)", text):
            found.append(pytest.param(page, target, id=f"{name_of(page)}-{target}"))
    return found


@pytest.mark.parametrize("page, target", links())
def test_link_leads_somewhere(page, target):
    assert (page.parent / target.partition("#")[0]).exists()
