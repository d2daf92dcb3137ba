"""How published models divide their width among heads."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from wvprobe._types import Provenance, Result
from wvprobe._validate import message
from wvprobe.budget._arithmetic import HeadBudget
from wvprobe.errors import InputError

_TABLE = "data/architectures.csv"
_WORDS = ("name", "family", "note", "source")
_COLUMNS = (
    "name family year n_layers d_model n_heads n_kv_heads d_head d_head_v kind fills_d_model "
    "divides_d_model published_parameters note source"
).split()


@dataclass(frozen=True)
class KnownArchitectures(Result):
    """Published models, in order of their year. Iterating gives each one's HeadBudget.

    The sizes are those of attention; `rest` is not told. DeepSeek's d_head is that of queries and
    keys, rotated dimensions included.

    Examples:
        >>> known = wvprobe.known_architectures()
        >>> len(known.budgets) == len(known.to_frame())
        True
    """

    budgets: tuple[HeadBudget, ...]

    def __iter__(self) -> Iterator[HeadBudget]:
        """Iterate over the models."""
        return iter(self.budgets)

    def __len__(self) -> int:
        """Return the number of models."""
        return len(self.budgets)

    def __getitem__(self, name: str) -> HeadBudget:
        """Return a model by name.

        Raises:
            InputError: none has this name; the message lists those there are.
        """
        for budget in self.budgets:
            if budget.name == name:
                return budget
        known = ", ".join(budget.name for budget in self.budgets)
        raise InputError(message("name", f"one of {known}", name))

    def __contains__(self, name: object) -> bool:
        """Whether a model has this name."""
        return any(budget.name == name for budget in self.budgets)

    def to_frame(self) -> Any:
        """Return one row a model.

        Columns: name family year n_layers d_model n_heads n_kv_heads d_head d_head_v kind
        fills_d_model divides_d_model parameters note source. `kind` is MHA, GQA, MQA or MLA;
        `parameters` counts the whole model, as published.
        """
        import pandas

        rows = [[getattr(budget, column) for column in _COLUMNS] for budget in self.budgets]
        frame = pandas.DataFrame(rows, columns=_COLUMNS)
        return frame.rename(columns={"published_parameters": "parameters"})

    def divisibility(self) -> Any:
        """Return one row a way of splitting, with the number of models that split so.

        Columns: split models share names. The splits: n_heads · d_head is d_model; it is not, but
        n_heads divides d_model; n_heads does not divide d_model.
        """
        import pandas

        groups = {
            "n_heads · d_head = d_model": [b for b in self if b.fills_d_model],
            "another width, n_heads divides d_model": [
                b for b in self if not b.fills_d_model and b.divides_d_model
            ],
            "n_heads does not divide d_model": [b for b in self if not b.divides_d_model],
        }
        rows = [
            (split, len(found), len(found) / len(self), ", ".join(b.name for b in found))
            for split, found in groups.items()
        ]
        return pandas.DataFrame(rows, columns=["split", "models", "share", "names"])


def known_architectures() -> KnownArchitectures:
    """Return the sizes of published models, each with its source.

    Examples:
        >>> known = wvprobe.known_architectures()
        >>> bert = known["BERT-base"]
        >>> bert.n_heads, bert.d_head
        (12, 64)
    """
    text = resources.files("wvprobe").joinpath(_TABLE).read_text(encoding="utf-8")
    budgets = [_budget(row) for row in csv.DictReader(text.splitlines())]
    provenance = Provenance.of("published configurations", "")
    return KnownArchitectures(provenance, tuple(sorted(budgets, key=lambda b: b.year or 0)))


def _budget(row: Mapping[str, str]) -> HeadBudget:
    """Return one line of the table: words, whole numbers, and blanks for what there is not."""
    values: dict[str, Any] = {
        name: value if name in _WORDS else int(value)
        for name, value in row.items()
        if name in _WORDS or value
    }
    values["causal"] = bool(values["causal"])
    return HeadBudget(**values)
