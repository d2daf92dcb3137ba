"""How published models divide their width among heads."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from wvprobe._types import Provenance, Result
from wvprobe._validate import message
from wvprobe.errors import InputError

_TABLE = "data/architectures.csv"


@dataclass(frozen=True)
class HeadBudget:
    """The sizes of a model's attention.

    Attributes:
        d_model: width of the stream.
        n_heads: query heads of a layer.
        d_head: width of a query and of a key, rotated dimensions included.
        n_kv_heads: key-value heads of a layer; None for as many as query heads.
        d_head_v: width of a value; None for that of a query.
        n_layers: layers of attention of one stack.
        name: the model's name, or "".
        year: year of publication, or None.
        note: what the numbers do not show.
        source: where they are published.
    """

    d_model: int
    n_heads: int
    d_head: int
    n_kv_heads: int | None = None
    d_head_v: int | None = None
    n_layers: int = 1
    name: str = ""
    year: int | None = None
    note: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        """Fill in what is left out, and check that the sizes can be those of a model."""
        for name, default in (("n_kv_heads", self.n_heads), ("d_head_v", self.d_head)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        for name in ("d_model", "n_heads", "d_head", "n_kv_heads", "d_head_v", "n_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(message(name, "an int from 1 on", value))
        if self.n_kv_heads and self.n_heads % self.n_kv_heads:
            raise InputError(
                message("n_kv_heads", f"a divisor of n_heads = {self.n_heads}", self.n_kv_heads)
            )

    @property
    def fills_d_model(self) -> bool:
        """Whether n_heads · d_head is d_model, as an even split of d_model would have it."""
        return self.n_heads * self.d_head == self.d_model

    @property
    def divides_d_model(self) -> bool:
        """Whether n_heads divides d_model at all."""
        return self.d_model % self.n_heads == 0


@dataclass(frozen=True)
class KnownArchitectures(Result):
    """Published models, in order of their year. Iterating gives each one's HeadBudget."""

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

    def to_frame(self) -> Any:
        """Return one row a model.

        Columns: name year n_layers d_model n_heads n_kv_heads d_head d_head_v fills_d_model
        divides_d_model note source.
        """
        import pandas

        columns = (
            "name year n_layers d_model n_heads n_kv_heads d_head d_head_v fills_d_model "
            "divides_d_model note source"
        ).split()
        rows = [[getattr(budget, column) for column in columns] for budget in self.budgets]
        return pandas.DataFrame(rows, columns=columns)


def known_architectures() -> KnownArchitectures:
    """Return the sizes of published models, each with its source."""
    text = resources.files("wvprobe").joinpath(_TABLE).read_text(encoding="utf-8")
    budgets = [_budget(row) for row in csv.DictReader(text.splitlines())]
    provenance = Provenance.of("published configurations", "")
    return KnownArchitectures(provenance, tuple(sorted(budgets, key=lambda b: b.year or 0)))


def _budget(row: Mapping[str, str]) -> HeadBudget:
    """Return one line of the table: all but three columns are whole numbers."""
    words = ("name", "note", "source")
    values: dict[str, Any] = {k: v if k in words else int(v) for k, v in row.items()}
    return HeadBudget(**values)
