"""What functions are given, and how a function is called with it."""

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

import wvprobe
from hostile.values import TEXT, TEXTS
from wvprobe.datasets import SenseDataset


class Call(NamedTuple):
    """A function with arguments that work, and the kinds of those that do not."""

    function: Callable[..., Any]
    arguments: Callable[["Things"], dict[str, Any]]
    wrong: Mapping[str, str]


class Things:
    """What functions are given, made when it is asked for, on the plainest of the families."""

    def __init__(self, tiny: Callable[..., Any], folder: Path) -> None:
        self.tiny, self.folder = tiny, folder

    @cached_property
    def model(self) -> Any:
        return self.tiny("llama")

    @cached_property
    def heads(self) -> Any:
        return wvprobe.HeadWeights.from_model(self.model)

    @cached_property
    def senses(self) -> Any:
        whole = wvprobe.load_senses()
        kept = {}
        for item in whole.items:
            if item.word in ("bank", "bat"):
                kept.setdefault((item.word, item.sense), []).append(item)
        items = [item for same in kept.values() for item in same[:6]]
        return SenseDataset("few", tuple(items))

    @cached_property
    def ledger(self) -> Any:
        return wvprobe.score_ledger(self.model, TEXT, query="bank", key="river", layer=1, head=0)

    @cached_property
    def behaviour(self) -> Any:
        return wvprobe.head_behaviour(self.model, texts=TEXTS, **FEW)

    @cached_property
    def encoding(self) -> Any:
        from wvprobe.words import encode

        return encode(self.model, TEXT)

    @cached_property
    def whole(self) -> Any:
        return wvprobe.capture(self.model, TEXT, "v")["v"]

    @cached_property
    def x(self) -> Any:
        return torch.randn(24, 2, 5, generator=torch.Generator().manual_seed(0))

    @cached_property
    def payload(self) -> Any:
        return wvprobe.payload(self.model, self.senses, **SENSES, draws=3, control_draws=2)


FEW = {"samples": 2, "length": 4, "max_offset": 3, "progress": False}
SENSES: dict[str, Any] = {"min_count": 2, "folds": 2, "sites": ("v",)}
QUIET = {"progress": False}
WORDS = {"query": "bank", "key": "river"}


def of(module: str, name: str) -> Callable[..., Any]:
    """Return a function that looks the name up when it is called, so that collecting is quick."""

    def call(*given: Any, **settings: Any) -> Any:
        from importlib import import_module

        found: Any = import_module(f"wvprobe.{module}")
        for part in name.split("."):
            found = getattr(found, part)
        return found(*given, **settings)

    return call


def method(thing: str, name: str) -> Callable[..., Any]:
    """Return a function that calls a method of what is passed under `thing`."""

    def call(**settings: Any) -> Any:
        return getattr(settings.pop(thing), name)(**settings)

    return call


def with_model(**settings: Any) -> Callable[[Things], dict[str, Any]]:
    return lambda things: {"model": things.model, **settings}


def with_heads(**settings: Any) -> Callable[[Things], dict[str, Any]]:
    return lambda things: {"heads": things.heads, **settings}


def with_senses(**settings: Any) -> Callable[[Things], dict[str, Any]]:
    return lambda things: {"model": things.model, "dataset": things.senses, **settings}


def with_probes(**settings: Any) -> Callable[[Things], dict[str, Any]]:
    return lambda things: {"X": things.x, "y": [0, 1] * 12, "folds": 2, "penalty": 1.0,
                           "description_length": False, **settings}  # fmt: skip


def timed() -> Any:
    given = {"uneven": (), "kernels": ["eager"], "directions": ["forward"]}
    return wvprobe.time_attention(32, 8, d_heads=(8, 16), seconds=0.0, **given)


def stored(things: Things) -> Path:
    folder = things.folder / "stored"
    if not folder.exists():
        wvprobe.capture(things.model, TEXTS, "v", words="bank", out=folder, progress=False)
    return folder


def treebank_file(things: Things) -> Path:
    path = things.folder / "few.conllu"
    if not path.exists():
        rows = (("DET", 2, "det"), ("NOUN", 3, "nsubj"), ("VERB", 0, "root"), ("ADV", 3, "advmod"))
        lines = []
        for noun, verb in product(("boat", "bank", "clerk", "river"), ("sank", "stood", "slept")):
            words = ("The", noun, verb, "there")
            lines += [f"# sent_id = {noun} {verb}", f"# text = {' '.join(words)}"]
            lines += [
                f"{i}\t{word}\t{word}\t{pos}\t_\t_\t{head}\t{relation}\t_\t_"
                for i, (word, (pos, head, relation)) in enumerate(zip(words, rows, strict=True), 1)
            ]
            lines.append("")
        path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def treebank_data(things: Things) -> Any:
    return wvprobe.load_conllu(treebank_file(things))


def entities_file(things: Things) -> Path:
    path = things.folder / "few.iob2"
    path.write_text("1\tThe\tO\n2\tBank\tB-ORG\n\n" * 3, encoding="utf-8")
    return path


def table_file(things: Things) -> Path:
    path = things.folder / "few.csv"
    path.write_text("sentence,word,label\nThe river bank.,bank,river\nA power bank.,bank,power\n")
    return path


def lines_file(things: Things) -> Path:
    path = things.folder / "few.txt"
    path.write_text("\n".join(TEXTS), encoding="utf-8")
    return path


def split_senses(things: Things) -> Any:
    from dataclasses import replace

    items = [replace(item, split=("train", "test")[place % 2])
             for place, item in enumerate(things.senses.items)]  # fmt: skip
    return SenseDataset("split", tuple(items))


def checkpoint(things: Things) -> Path:
    import transformers

    folder = things.folder / "checkpoint"
    if not folder.exists():
        config = transformers.LlamaConfig(
            vocab_size=31, hidden_size=12, intermediate_size=7, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=6,
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tensors(things: Things) -> dict[str, Any]:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0))

    return {
        "W_Q": draw(2, 4, 12, 3), "W_K": draw(2, 2, 12, 3), "W_V": draw(2, 2, 12, 5),
        "W_O": draw(2, 4, 5, 12), "b_Q": draw(2, 4, 3), "b_K": draw(2, 2, 3),
        "b_V": draw(2, 2, 5), "b_O": draw(2, 12), "W_E": draw(17, 12), "W_pos": draw(9, 12),
        "W_U": draw(12, 17),
    }  # fmt: skip
