"""Values that arguments must not have, by the kind of argument: every one is to be refused."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

NAN = float("nan")
TEXT = "The river bank is close."
OTHER = "The old bank is close."  # as many tokens
TEXTS = (TEXT, "A boat by the river bank.", "So the bank by the sea.")

# No number at all, whatever it counts.
_NO_NUMBER = {"a string": "3", "a list": [1, "x"], "complex": 1j, "an object": object()}
_NO_INT = {**_NO_NUMBER, "NaN": NAN, "infinity": math.inf, "a fraction": 1.5, "True": True}
_NO_LIST = {"a string": "0", "NaN": [NAN], "None within": [None], "a fraction": [0.5]}

KINDS: dict[str, dict[str, Any]] = {
    "count": {**_NO_INT, "0": 0, "-1": -1},
    "from 0": {**_NO_INT, "-1": -1},
    "from 2": {**_NO_INT, "1": 1, "-1": -1},
    "seed": {**_NO_INT, "-1": -1, "beyond 64 bits": 2**70, "None": None},
    "index": {**_NO_INT, "-1": -1, "10**9": 10**9, "None": None},
    "optional index": {**_NO_INT, "-1": -1, "10**9": 10**9},
    "integer": {**_NO_INT},
    "layers": {
        **_NO_LIST,
        "none": [],
        "one twice": [0, 0],
        "-1": [-1],
        "10**9": [0, 10**9],
        "True": True,
        "True within": [True],
        "NaN alone": NAN,
        "an object": object(),
    },
    "share": {**_NO_NUMBER, "NaN": NAN, "infinity": math.inf, "0": 0.0, "-1": -1.0, "2": 2.0,
              "True": True},
    "number": {**_NO_NUMBER, "NaN": NAN, "infinity": math.inf, "True": True},
    "choice": {"another": "no such", "a number": 3, "None": None, "bytes": b"v", "a list": ["x"],
               "NaN": NAN, "nothing": ""},
    "optional choice": {"another": "no such", "a number": 3, "bytes": b"v", "a list": ["x"],
                        "nothing": ""},
    "choices": {"another": ["no such"], "a number": 3, "none": [], "None within": [None],
                "an object": object()},
    "word": {"a number": 3.5, "bytes": b"bank", "None": None, "nothing": "",
             "a list": ["bank", 3, 4],
             "not there": "aardvark", "NaN": NAN, "-1": -1, "10**9": 10**9, "True": True},
    "only a word": {"a number": 3, "bytes": b"bank", "None": None, "nothing": "", "NaN": NAN,
                    "not there": "aardvark", "a list": ["bank"]},
    "model": {"a name": "tiny:llama", "None": None, "a module": torch.nn.Linear(3, 2),
              "a number": 3, "an object": object(), "a class": dict},
    "heads": {"a name": "tiny:llama", "None": None, "a module": torch.nn.Linear(3, 2),
              "a tensor": torch.zeros(3, 3), "a mapping": {}},
    "object": {"a string": "x", "a number": 3, "a mapping": {}, "a tensor": torch.zeros(2),
               "an object": object()},
    "file": {"nowhere": "/no/such/place", "nothing": "", "a number": 3, "NUL": "a\0b",
             "an object": object()},
}  # fmt: skip


class Of:
    """A wrong value that is made of the right one."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self.make = make


def _with(value: float) -> Of:
    def make(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x.view(-1)[-1] = value
        return x

    return Of(make)


_NO_TENSOR = {"a string": "x", "a number": 3, "an object": object(), "a mapping": {}}
_NO_PLACE = {"-1": -1, "10**9": 10**9, "a fraction": 1.5, "NaN": NAN, "True": True,
             "None": None, "an object": object()}  # fmt: skip

KINDS |= {
    "tensor": {
        **_NO_TENSOR,
        "NaN within": _with(NAN),
        "infinity within": _with(math.inf),
        "an axis less": Of(lambda x: x[0]),
        "one number": Of(lambda x: x.sum()),
        "nothing": Of(lambda x: x[:0]),
        "another length": Of(lambda x: torch.cat([x, x], dim=-1)),
        "on meta": Of(lambda x: x.to("meta")),
        "objects": Of(lambda x: np.full(x.shape, None)),
    },
    "features": {
        **_NO_TENSOR,
        "NaN within": _with(NAN),
        "infinity within": _with(-math.inf),
        "one axis": Of(lambda x: x[:, 0, 0]),
        "no items": Of(lambda x: x[:0]),
        "no features": Of(lambda x: x[..., :0]),
        "whole numbers": Of(lambda x: x.long()),
        "complex": Of(lambda x: x.to(torch.complex64)),
        "true or false": Of(lambda x: x > 0),
        "objects": Of(lambda x: np.full(x.shape, None)),
        "a list": Of(lambda x: x.tolist()),
        "on meta": Of(lambda x: x.to("meta")),
    },
    "metric": {**_NO_TENSOR, "another shape": torch.eye(3), "on meta": torch.eye(42, device="meta"),
               "NaN": torch.full((42, 42), NAN), "whole numbers, one axis": torch.arange(5)},
    "labels": {"None": None, "a number": 3, "one class": Of(lambda y: [y[0]] * len(y)),
               "nothing": [], "too few": Of(lambda y: y[:-1]), "a string": "ab",
               "NaN within": Of(lambda y: [NAN, *y[1:]]),
               "None within": Of(lambda y: [None, *y[1:]]),
               "fractions": Of(lambda y: [0.5, *[1.5] * (len(y) - 1)]),
               "mixed": Of(lambda y: ["a", 1] * (len(y) // 2)),
               "lists": Of(lambda y: [[1]] * len(y)),
               "two axes": Of(lambda y: torch.zeros(len(y), 2, dtype=torch.long)),
               "on meta": Of(lambda y: torch.zeros(len(y), dtype=torch.long, device="meta"))},
    "types": {"None": None, "a number": 3, "nothing": [], "too few": Of(lambda y: y[:-1]),
              "lists": Of(lambda y: [[1]] * len(y)), "NaN within": Of(lambda y: [NAN, *y[1:]])},
    "index in all": {**_NO_PLACE, "a string": "first", "too few": [1], "none": [],
                     "a list in it": [[1], [], [2]], "too far": [1, 1, 99]},
    "words of items": {"a number": 3, "nothing": [], "too few": Of(lambda y: y[:-1]),
                       "a string": "ab", "lists": Of(lambda y: [[1]] * len(y)),
                       "NaN within": Of(lambda y: [NAN, *y[1:]])},
    "words": {"a number": 3, "bytes": b"bank", "nothing": "", "too few": ["bank"],
              "None within": ["bank", None, "bank"], "numbers": [1, 2, 3], "not there": "aardvark",
              "an object": object()},
    "word of texts": {"a number": 3, "bytes": b"bank", "nothing": "", "none": [], "NaN": NAN,
                      "not there": "aardvark", "None within": [None]},
    "folder": {"a number": 3, "a file": Path(__file__), "below a file": Path(__file__) / "x",
               "NUL": "a\0b", "an object": object()},
    "model but a name": {"None": None, "a module": torch.nn.Linear(3, 2), "a number": 3,
                         "another name": "no-such-model", "what gives none": lambda: None},
    "source": {"nowhere": "/no/such/place", "a number": 3, "nothing": "", "an object": object(),
               "a module": torch.nn.Linear(3, 2), "NUL": "a\0b", "tiny:": "tiny:nothing"},
    "device": {"another": "abacus", "a number": 1.5, "not there": "cuda:17", "meta": "meta",
               "nothing": "", "an object": object()},
    "device map": {"another": "no such", "a number": 1.5, "not there": {"": "cuda:17"},
                   "an object": object()},
    "token": {"-1": -1, "10**9": 10**9, "a fraction": 1.5, "NaN": NAN, "True": True,
              "bytes": b"river", "nothing": "", "an object": object(), "a list": [7]},
    "tokens": {"-1": [-1], "10**9": [10**9], "a fraction": [1.5], "None within": [None],
               "a number": 3, "an object": object()},
    "reader": {"a number": 3, "one": (2,), "three": (2, 1, 0), "-1": (-1, 0), "10**9": (2, 10**9),
               "a string": "x", "NaN": (NAN, 0), "True": (2, True), "the first": (0, 0)},
    "pairs": {"a number": 3, "none": [], "a text": TEXT, "one within": [(TEXT,)],
              "numbers": [(1, 2)], "an object": object(), "unlike": [(TEXT, "Short.")]},
    "pairs of ints": {"a number": 3, "one within": [(1,)], "-1": [(-1, 0)], "10**9": [(0, 10**9)],
                      "strings": [("a", "b")], "NaN": [(NAN, 0)], "None within": [None],
                      "one twice": [(1, 0), (1, 0)], "an object": object(), "True": [(True, 0)]},
    "widths": {"a number": 3, "none": [], "0": [0], "-1": [-1], "a fraction": [1.5],
               "None within": [None], "strings": ["8", "16"], "another": [7, 9], "NaN": [NAN],
               "an object": object()},
    "uneven": {"a number": 3, "0": [0, 32], "-1": [-1, 33], "a fraction": [31.5, 0.5],
               "another sum": [7, 9], "NaN": [NAN], "an object": object(), "a string": "88"},
    "seconds": {**_NO_NUMBER, "NaN": NAN, "infinity": math.inf, "-1": -1.0, "None": None},
    "positive": {**_NO_NUMBER, "NaN": NAN, "infinity": math.inf, "0": 0.0, "-1": -1.0,
                 "True": True},
    "tolerance": {**_NO_NUMBER, "NaN": NAN, "-1": -1.0, "infinity": math.inf},
    "orders": {**_NO_INT, "0": 0, "-1": -1, "another": ["no such"], "none": []},
    "n_layers": {**_NO_INT, "0": 0, "-1": -1},
    "penalty": {"a string": "x", "NaN": NAN, "-1": -1.0, "infinity": math.inf, "True": True,
                "a list": [1.0], "None": None, "an object": object()},
    "optional penalty": {"a string": "x", "NaN": NAN, "-1": -1.0, "infinity": math.inf,
                         "True": True, "a list": [1.0], "an object": object()},
    "penalties": {"a number": 3.0, "none": [], "NaN": [NAN], "0": [0.0, 1.0], "strings": ["x"],
                  "one twice": [1.0, 1.0], "an object": object()},
    "references": {"a list": ["x"], "a number": 3, "nothing in it": {"a": None},
                   "another shape": {"a": torch.zeros(3, 3)}, "a string in it": {"a": "x"},
                   "NaN": {"a": torch.full((24, 2, 5), NAN)}, "majority": {"majority": 3}},
    "axes": {"a number": 3, "too many": ["a", "b"], "a string": "x", "lengths": {"a": [1]},
             "lists": [["a"]], "an object": object()},
    "arguments": {"a list": [1], "a number": 3, "none": {}, "no mappings": {"a": 3},
                  "unknown names": {"a": {"no_such_argument": 3}}},
    "n_jobs": {"a string": "x", "0": 0, "a fraction": 1.5, "an object": object()},
    "scale": {"a string": "x", "NaN": NAN, "infinity": math.inf, "too few": [1.0], "0": 0.0,
              "NaN within": [NAN, 1.0], "strings": ["x", "y"], "an object": object()},
    "offsets": {"a number": 3, "none": [], "NaN": [NAN], "infinity": [math.inf],
                "strings": ["a"], "None within": [None], "an object": object()},
    "optional labels": {}, "optional token": {},
}  # fmt: skip
KINDS["optional labels"] = {
    k: v for k, v in KINDS["labels"].items() if k not in ("None", "one class")
}
KINDS["optional token"] = KINDS["token"]
for name in ("index in all", "word"):
    KINDS[f"optional {name}"] = {k: v for k, v in KINDS[name].items() if k != "None"}
KINDS["counts"] = {k: v for k, v in KINDS["widths"].items() if k != "another"}
KINDS["vectors"] = {k: v for k, v in KINDS["tensor"].items() if k != "another length"}
KINDS["weight"] = {k: v for k, v in KINDS["tensor"].items() if k != "an axis less"}
KINDS["names"] = {k: v for k, v in KINDS["choices"].items() if k != "none"}
