"""Attention of whole forwards, a layer and a text at a time, of which only sums are kept."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from wvprobe import adapters
from wvprobe._linalg import at_least_float32
from wvprobe._progress import progress as progress_bar
from wvprobe._validate import message
from wvprobe.activations import batches_of, padded
from wvprobe.adapters import Architecture, Raw
from wvprobe.errors import InputError

_LONG_WORK = 16  # batches from which on progress is shown


class Tokens(NamedTuple):
    """A sequence as the model reads it.

    Attributes:
        ids: token ids, added ones (BOS, CLS, SEP) included.
        added: for each token whether the tokenizer or the bridge added it.
    """

    ids: tuple[int, ...]
    added: tuple[bool, ...]

    @property
    def own(self) -> slice:
        """Where the tokens stand that were not added: one stretch, since others go around it.

        Raises:
            InputError: there is none.
        """
        if all(self.added):
            expected = "texts of which the tokenizer makes a token"
            raise InputError(message("texts", expected, "one of added tokens alone"))
        first = self.added.index(False)
        return slice(first, len(self.added) - self.added[::-1].index(False))


Use = Callable[[int, int, Mapping[str, Tensor]], None]


def each_layer(
    model: Any,
    arch: Architecture,
    sequences: Sequence[Tokens],
    sites: Sequence[str],
    use: Use,
    *,
    batch_size: int | Literal["auto"] = "auto",
    progress: bool = False,
) -> None:
    """Call ``use(item, layer, tensors)`` for every sequence and layer, and keep nothing.

    Args:
        model: the bridge.
        arch: its architecture.
        sequences: what it reads.
        sites: raw sites that are not pairs, or ``pattern``.
        use: is given each site's tensor without padding, float32 or better, on the model's device:
            ``pattern`` [head, query, key], others [pos, ...]. Layers come in ascending order.
        batch_size: sequences a batch, or ``"auto"`` by tokens.
        progress: show progress on long work.
    """
    wanted = [(site, layer) for layer in range(arch.n_layers) for site in sites]
    batches = batches_of([len(s.ids) for s in sequences], batch_size, model, arch)
    long = progress and len(batches) >= _LONG_WORK
    with progress_bar(len(sequences), "texts read", long) as advance:
        for items in batches:
            _run(model, arch, [(item, sequences[item]) for item in items], wanted, use)
            advance(len(items))


def _run(
    model: Any,
    arch: Architecture,
    batch: list[tuple[int, Tokens]],
    wanted: list[Raw],
    use: Use,
) -> None:
    ids, mask = padded([tokens.ids for _, tokens in batch], model.cfg.device)
    size, pos = ids.shape
    n_sites = len(wanted) // arch.n_layers
    waiting: dict[int, dict[str, Tensor]] = {}

    def receive(site: str, layer: int, value: Tensor) -> None:
        got = waiting.setdefault(layer, {})
        got[site] = at_least_float32(adapters.shaped(arch, site, value, size, pos))
        if len(got) < n_sites:
            return
        for row, (item, tokens) in enumerate(batch):
            use(item, layer, {name: _cut(name, v[row], len(tokens.ids)) for name, v in got.items()})
        del waiting[layer]

    with adapters.reading(model, arch, wanted, receive):
        adapters.run_backbone(model, ids, mask)


def _cut(site: str, value: Tensor, size: int) -> Tensor:
    return value[:, :size, :size] if site == "pattern" else value[:size]
