"""The command line: what it prints, and one line for every error that a user can cause."""

import subprocess
import sys

import pytest

from wvprobe import _packaged, cli
from wvprobe.errors import IntegrityError


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    code = left.value.code
    said = capsys.readouterr()
    return (code if isinstance(code, int) else 0), said.out, said.err


def test_models_lists_what_is_packaged(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WVPROBE_CACHE", str(tmp_path))
    code, out, err = run(capsys, "models")
    assert (code, err) == (0, "")
    rows = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
    assert ["", "smollm2-135m", "134.5 M", "93 MB", "542 MB", "Apache-2.0", "no", ""] in rows
    assert ["", "minilm-l6", "22.6 M", "84 MB", "92 MB", "Apache-2.0", "no", ""] in rows
    assert "minilm-l6: all-MiniLM-L6-v2: BERT encoder" in out
    assert f"cache: {tmp_path / 'models'}" in out.splitlines()[-1]


def test_models_says_which_are_cached(capsys, monkeypatch):
    monkeypatch.setattr(_packaged, "fault", lambda model, contents: "")
    _, out, _ = run(capsys, "models")
    assert out.count(" yes ") == 2


def fail() -> tuple:
    raise IntegrityError("the wheel has\nanother hash")


def test_an_error_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(_packaged, "packaged_models", fail)
    assert run(capsys, "models") == (1, "", "wvprobe: the wheel has another hash\n")


@pytest.mark.parametrize("arguments", [("--debug", "models"), ("models", "--debug")])
def test_debug_shows_where_an_error_comes_from(monkeypatch, arguments):
    monkeypatch.setattr(_packaged, "packaged_models", fail)
    with pytest.raises(IntegrityError):
        cli.main(arguments)


def test_unknown_subcommand(capsys):
    code, _, err = run(capsys, "modelz")
    assert code == 2
    assert "Did you mean 'models'?" in err


def test_help_names_the_subcommands(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "models" in out
    assert "--debug" in out


def test_models_needs_no_torch():
    script = (
        "import sys; from wvprobe import cli\n"
        "try: cli.main(['models'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr
