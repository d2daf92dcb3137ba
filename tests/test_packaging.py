"""The wheel carries what the library reads at run time, and works where it is installed."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
SOURCE = REPOSITORY / "src"

# Run beside the installed copy: reads the files it is given the way the library does.
READER = """
import json, sys
from importlib.resources import files
import wvprobe
wanted = json.load(sys.stdin)
found = {name: files("wvprobe").joinpath(name).read_bytes().hex() for name in wanted}
print(json.dumps({"file": wvprobe.__file__, "version": wvprobe.__version__, "found": found}))
"""


def bundled() -> list[Path]:
    """Return the files in the package that are no Python source."""
    package = SOURCE / "wvprobe"
    return sorted(
        path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = ["-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    run = subprocess.run(
        [sys.executable, *command, str(REPOSITORY)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_holds_every_file_of_the_package(wheel):
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    sources = [path for path in (SOURCE / "wvprobe").rglob("*.py")]
    missing = {path.relative_to(SOURCE).as_posix() for path in [*bundled(), *sources]} - held
    assert not missing
    assert "wvprobe/py.typed" in held
    assert not [name for name in held if "__pycache__" in name]
    assert [name for name in held if name.endswith(".dist-info/licenses/LICENSE")]


def test_installed_wheel_reads_its_own_data(wheel, tmp_path):
    target = tmp_path / "site"
    install = ["-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, *install, str(wheel)], capture_output=True, check=True)
    names = {p.relative_to(SOURCE / "wvprobe").as_posix(): p.read_bytes().hex() for p in bundled()}
    run = subprocess.run(
        [sys.executable, "-c", READER],
        input=json.dumps(list(names)),
        env={"PYTHONPATH": str(target)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(run.stdout)
    assert Path(answer["file"]).is_relative_to(target)
    assert answer["version"] == wheel.name.split("-")[1]
    assert answer["found"] == names
