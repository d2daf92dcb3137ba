"""Stacks of layers of which one at a time is read."""

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from wvprobe._validate import index
from wvprobe.adapters import Latent
from wvprobe.errors import InputError

Read = TypeVar("Read", Tensor, Latent)


class PerLayer(Generic[Read]):
    """Something of every layer that is read when a layer is asked for: ``stack[layer]``."""

    def __init__(self, read: Callable[[int], Read], n_layers: int) -> None:
        """Read nothing yet."""
        self._read, self._n_layers = read, n_layers

    def __len__(self) -> int:
        """Return the number of layers."""
        return self._n_layers

    def __getitem__(self, layer: int) -> Any:
        """Read a layer."""
        return self._read(index("layer", layer, self._n_layers, "layers"))

    def __iter__(self) -> Iterator[Any]:
        """Read one layer after the other."""
        return (self[layer] for layer in range(self._n_layers))


class LayerStack(PerLayer[Tensor]):
    """A tensor [layer, ...] of which one layer at a time is in memory.

    Attributes:
        shape: its shape.
        dtype: what a layer has once it is read.
        device: where a layer is read to.
    """

    def __init__(
        self, read: Callable[[int], Tensor], shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        """Read nothing yet."""
        super().__init__(read, shape[0])
        self.shape, self.dtype, self.device = torch.Size(shape), dtype, torch.device("cpu")

    def __getitem__(self, at: Any) -> Tensor:
        """Return ``stack[layer]``, or ``stack[layer, ...]`` of one layer.

        Raises:
            InputError: several layers were asked for at once.
        """
        layer, rest = (at[0], at[1:]) if isinstance(at, tuple) else (at, ())
        if isinstance(layer, slice) or layer is Ellipsis:
            raise InputError(
                f"weights from disk are read a layer at a time. Got [{at}] instead. Use "
                "[layer], or load the model and HeadWeights.from_model."
            )
        found = super().__getitem__(layer)
        return found[rest] if rest else found
