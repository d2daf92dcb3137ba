"""The items of a store, a row each, in a file that is mapped and not read."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, overload

from torch import Tensor

_ROWS = 4096  # rows that are held before they are written


class Item(NamedTuple):
    """What is known of one item besides its vectors.

    Attributes:
        text: its text.
        word: the word read, or None.
        positions: the positions read; None for all.
        tokens: token ids of the whole text.
        strings: the same, readable.
        special: for each token whether the tokenizer added it.
    """

    text: str
    word: str | None
    positions: tuple[int, ...] | None
    tokens: tuple[int, ...]
    strings: tuple[str, ...]
    special: tuple[bool, ...]


def _schema() -> Any:
    import pyarrow

    kinds = {
        "text": pyarrow.string(),
        "word": pyarrow.string(),
        "positions": pyarrow.list_(pyarrow.int32()),
        "tokens": pyarrow.list_(pyarrow.int32()),
        "strings": pyarrow.list_(pyarrow.string()),
        "special": pyarrow.list_(pyarrow.bool_()),
    }
    return pyarrow.schema([(name, kinds[name]) for name in Item._fields])


class ItemsFile:
    """Writes items as they come, a few thousand at a time."""

    def __init__(self, file: BinaryIO) -> None:
        """Begin the table in an open file."""
        import pyarrow

        self._schema = _schema()
        self._sink = pyarrow.ipc.new_file(file, self._schema)
        self._waiting: list[Item] = []

    def add(self, item: Item) -> None:
        """Append an item."""
        self._waiting.append(item)
        if len(self._waiting) == _ROWS:
            self._flush()

    def close(self) -> None:
        """Write what waits, and the table's end."""
        if self._waiting:
            self._flush()
        self._sink.close()

    def _flush(self) -> None:
        import pyarrow

        columns = zip(*self._waiting, strict=True)
        pairs = zip(columns, self._schema, strict=True)
        arrays = [pyarrow.array(column, type=field.type) for column, field in pairs]
        self._sink.write_batch(pyarrow.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._waiting.clear()


def mapped(path: Path) -> Any:
    """Return the table of items; the system reads what is looked at, when it is looked at."""
    import pyarrow

    return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()


class StoredItems:
    """The items of a store, each read when it is asked for by its number."""

    def __init__(self, path: Path) -> None:
        """Map the table of items."""
        table = mapped(path)
        self._columns = [Column(table.column(name)) for name in Item._fields]

    def __getitem__(self, number: int) -> Item:
        """Return an item."""
        return Item(*(column[number] for column in self._columns))


class Column(Sequence[Any]):
    """One column of the items as a sequence that holds nothing itself."""

    def __init__(self, values: Any, items: Tensor | None = None) -> None:
        """Take an Arrow column, and which of its rows count (None: all)."""
        self._values, self._items = values, items

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self._values) if self._items is None else len(self._items)

    @overload
    def __getitem__(self, at: int) -> Any: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Any, ...]: ...
    def __getitem__(self, at: int | slice) -> Any:
        """Return an item's value, lists as tuples; a tuple of these for a slice."""
        if isinstance(at, slice):
            return tuple(self[i] for i in range(len(self))[at])
        place = range(len(self))[at]
        value = self._values[place if self._items is None else int(self._items[place])].as_py()
        return tuple(value) if isinstance(value, list) else value

    def __iter__(self) -> Iterator[Any]:
        """Yield the values in order."""
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        """Return how many there are; they may be too many to show."""
        return f"<{len(self)} values, on disk>"
