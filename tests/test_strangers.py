"""Checkpoints from strangers: nothing in them is run; what lies is refused before it is built."""

import json
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from wvprobe.errors import ModelFileError, UnsupportedError
from wvprobe.heads import HeadWeights
from wvprobe.models import load
from wvprobe.testing import tiny_tokenizer

HUGE = 2**50


@pytest.fixture(scope="module")
def honest(small_config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("honest") / "checkpoint"
    transformers.LlamaForCausalLM(small_config).save_pretrained(folder)
    tiny_tokenizer("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def folder(honest, tmp_path) -> Path:
    return Path(shutil.copytree(honest, tmp_path / "stranger"))


def streamed(folder: Path) -> Any:
    return HeadWeights.from_safetensors(folder).W_V[0]


READERS = pytest.mark.parametrize("read", [load, streamed])


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class Evil:
    """What a pickle can do: call anything."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


@pytest.mark.parametrize("archive", [True, False])
def test_no_pickle_is_run(archive, folder, tmp_path):
    (folder / "model.safetensors").unlink()
    evil, trace = folder / "pytorch_model.bin", tmp_path / "trace"
    if archive:
        torch.save({"weight": Evil(trace)}, evil)
    else:
        evil.write_bytes(pickle.dumps(Evil(trace)))
    with pytest.raises(ModelFileError, match="Weights only load failed"):
        load(folder)
    assert not trace.exists()
    pickle.loads(pickle.dumps(Evil(trace)))  # it would have, had anybody read it
    assert trace.exists()


@pytest.mark.parametrize("model_type", ["evil", "llama"])
def test_no_code_of_a_checkpoint_is_run(model_type, folder, tmp_path, capsys):
    trace = tmp_path / "trace"
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(trace)!r})\n")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit(folder / "config.json", auto_map=auto_map, model_type=model_type)
    if model_type == "evil":
        with pytest.raises(UnsupportedError, match="code of its own, which wvprobe does not run"):
            load(folder)
    else:  # transformers knows the type: its own code serves
        assert type(load(folder).original_model).__module__.startswith("transformers.models.llama")
    assert not trace.exists()
    assert not capsys.readouterr().out  # nobody is asked whether it should be


HEADERS = {
    "size of the header": ({}, 2**60, "header too large"),
    "offsets": ({"data_offsets": [0, HUGE]}, None, "invalid offset"),
    "shape": ({"shape": [2**20, 2**20]}, None, "invalid shape"),
    "shape beyond numbers": ({"shape": [2**33, 2**33]}, None, "overflow"),
    "dtype": ({"dtype": "F7"}, None, "unknown variant"),
}


@READERS
@pytest.mark.parametrize("lie", HEADERS)
def test_headers_of_safetensors_that_lie(lie, read, folder):
    changes, claimed, expected = HEADERS[lie]
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    header["model.layers.0.self_attn.q_proj.weight"] |= changes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", claimed or len(text)) + text + raw[8 + size :])
    with pytest.raises(ModelFileError, match=expected):
        read(folder)


@READERS
@pytest.mark.parametrize(
    "weight_map, expected",
    [
        ({"model.norm.weight": "../outside.safetensors"}, "no file of its folder"),
        ({"model.norm.weight": "/etc/passwd"}, "no file of its folder"),
        ({"model.norm.weight": 3}, "is broken"),
        ([], "is broken"),
    ],
)
def test_an_index_that_points_elsewhere(weight_map, expected, read, folder):
    shutil.move(folder / "model.safetensors", folder.parent / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(ModelFileError, match=expected):
        read(folder)


@READERS
@pytest.mark.parametrize(
    "size, asked", [("num_hidden_layers", 10**9), ("vocab_size", HUGE), ("hidden_size", 6 * HUGE)]
)
def test_sizes_that_no_file_of_that_length_holds(size, asked, read, folder):
    """A model of a billion layers would take the memory of them before it misses any weight."""
    edit(folder / "config.json", **{size: asked})
    with pytest.raises(ModelFileError, match=rf"{size} is {asked:,} in its config"):
        read(folder)


@READERS
@pytest.mark.parametrize("size, asked", [("num_attention_heads", 0), ("num_hidden_layers", -1)])
def test_sizes_that_are_none(size, asked, read, folder):
    edit(folder / "config.json", **{size: asked})
    with pytest.raises((ModelFileError, UnsupportedError)):
        read(folder)


def test_a_small_file_beside_the_weights_is_no_lie(folder):
    """Its one tensor is fewer than the layers, whose weights are in another format."""
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()
    save_file({"adapter": torch.zeros(1)}, folder / "adapter.safetensors")
    assert load(folder).cfg.n_layers == 2


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


STRING, ARRAY, UINT32 = 8, 9, 4
GGUF = {
    "counts": struct.pack("<QQ", 2**60, 2**60),
    "keys": struct.pack("<QQ", 0, 2**40),
    "a string": struct.pack("<QQ", 0, 1) + struct.pack("<Q", HUGE) + b"x",
    "an array": struct.pack("<QQ", 0, 1) + text(b"a") + struct.pack("<IIQ", ARRAY, UINT32, HUGE),
    "arrays of arrays": struct.pack("<QQ", 0, 1)
    + text(b"a")
    + struct.pack("<IIQ", ARRAY, ARRAY, 2**20) * 5_000,
    "nothing": b"",
}


@pytest.mark.parametrize("lie", GGUF)
def test_headers_of_gguf_that_lie(lie, tmp_path):
    path = tmp_path / "stranger.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<I", 3) + GGUF[lie])
    with pytest.raises(ModelFileError, match="stranger is broken"):
        load(path)
