"""A pass over texts: hooks fill the sites' tensors, batch by batch."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from wvprobe import adapters
from wvprobe._picking import POOLS, Pick, picker, whole
from wvprobe._progress import progress as progress_bar
from wvprobe._validate import indices, listed, message, one_of
from wvprobe.activations._batches import padded
from wvprobe.adapters import PAIR_SITES, SITES, Architecture, Raw, Recipe
from wvprobe.errors import InputError, MemoryLimitError

LONG_WORK = 16  # batches from which on progress is shown


def checked_pool(arch: Architecture, pool: str | None) -> str:
    """Return how several tokens become one vector: as asked, or as suits the architecture."""
    if pool is None:
        return "last" if arch.causal else "mean"
    return one_of("pool", pool, POOLS)


class SitePlan:
    """Which hook points are needed, and what is computed from them once they have come."""

    def __init__(
        self, model: Any, arch: Architecture, sites: str | Sequence[str], layers: Any
    ) -> None:
        given = (sites,) if isinstance(sites, str) else listed("sites", sites, "sites' names")
        if not given:
            raise InputError(message("sites", "at least one site", given))
        self.sites = tuple(dict.fromkeys(one_of("sites", s, tuple(SITES)) for s in given))
        self.layers = {
            site: indices("layers", layers, adapters.layers_of(arch, site), "layers")
            for site in self.sites
        }
        self.recipes: dict[tuple[str, int], Recipe] = {
            (site, row): adapters.recipe(model, arch, site, layer)
            for site in self.sites
            for row, layer in enumerate(self.layers[site])
        }
        self.users: dict[Raw, list[tuple[str, int]]] = {}
        for key, recipe in self.recipes.items():
            for raw in recipe.inputs:
                self.users.setdefault(raw, []).append(key)
        self.pairs = not set(self.sites).isdisjoint(PAIR_SITES)
        self._causal, self._regime = arch.causal, adapters.length_regime(model, arch)

    def n_read(self, n_tokens: int, picked: Iterable[int] | None, ahead: bool = True) -> int:
        """Return how many tokens of a text must run for what is read at some of its positions.

        Nothing that follows reaches a position of a causal model, so the text ends behind the last
        one. Not so where a query's row of pairs is to hold later keys too (`ahead`), or where a
        shorter text would be turned by other frequencies.
        """
        if picked is None or not self._causal or (self.pairs and ahead):
            return n_tokens
        needed = max(picked) + 1
        return needed if self._regime(needed) == self._regime(n_tokens) else n_tokens


class Run:
    """One pass over the texts: fills `results` batch by batch, in the caller's order.

    A row is a text that runs, an item one of those that are asked for; rows may have several.
    """

    def __init__(
        self,
        model: Any,
        arch: Architecture,
        plan: SitePlan,
        rows: Sequence[Sequence[int]],
        picked: Sequence[tuple[int, ...]] | None,
        pool: str,
        items: list[list[int]] | None = None,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Say what runs.

        Args:
            model: the bridge.
            arch: its architecture.
            plan: the sites.
            rows: token ids of each text that runs.
            picked: positions of each item; None for all.
            pool: how several positions become one vector.
            items: the items of each row; None where rows are items.
            numbers: what items are called in messages, where these are some of more.
        """
        self.model, self.arch, self.plan = model, arch, plan
        self.rows, self.picked, self.pool = rows, picked, pool
        self.items = [[row] for row in range(len(rows))] if items is None else items
        self.n_items = sum(map(len, self.items))
        self.numbers = range(self.n_items) if numbers is None else numbers
        self.longest = max(map(len, rows))
        self.results: dict[str, Tensor] = {}

    def all(self, batches: list[list[int]], progress: bool) -> None:
        """Run every batch; on a lack of memory, halve it and go on."""
        todo = list(reversed(batches))
        long = progress and len(batches) >= LONG_WORK
        with progress_bar(len(self.rows), "texts read", long) as advance:
            while todo:
                rows = todo.pop()
                try:
                    self.batch(rows)
                except (RuntimeError, MemoryError) as error:
                    if not _is_out_of_memory(error):
                        raise
                    todo.extend(self._halves(rows, error))
                    continue
                advance(len(rows))

    def _halves(self, rows: list[int], error: BaseException) -> list[list[int]]:
        if len(rows) == 1:
            length = len(self.rows[rows[0]])
            raise MemoryLimitError(
                f"text {self.numbers[self.items[rows[0]][0]]} ({length} tokens) alone does not fit "
                f"into memory: {error}. Shorten it, or ask for fewer layers or sites."
            ) from error
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        middle = len(rows) // 2
        return [rows[middle:], rows[:middle]]

    def batch(self, rows: list[int]) -> None:
        """Run one batch and write its values into the results."""
        device = self.model.cfg.device
        tokens, mask = padded([self.rows[row] for row in rows], device)
        (size, pos), kept = tokens.shape, mask.cpu()
        items = [self.items[row] for row in rows]
        pick: Pick = whole
        if self.picked is not None:
            pick = picker([[self.picked[i] for i in own] for own in items], self.pool, device)
        waiting: dict[tuple[str, int], dict[Raw, Tensor]] = {k: {} for k in self.plan.recipes}

        def receive(raw: str, layer: int, value: Tensor) -> None:
            value = adapters.shaped(self.arch, raw, value, size, pos)
            for key in self.plan.users[raw, layer]:
                got = waiting[key]
                got[raw, layer] = value
                recipe = self.plan.recipes[key]
                if len(got) == len(recipe.inputs):
                    self._write(*key, items, recipe.compute(got, pick), kept)
                    del waiting[key]

        with adapters.reading(self.model, self.arch, list(self.plan.users), receive):
            adapters.run_backbone(self.model, tokens, mask)

    def _write(
        self, site: str, layer: int, items: list[list[int]], value: Tensor, mask: Tensor
    ) -> None:
        """Put one layer's values of a batch in place: [row, slot or pos, ...] or pairs."""
        value = value.detach().cpu()
        every = [(row, slot, i) for row, own in enumerate(items) for slot, i in enumerate(own)]
        rows, slots, flat = map(list, zip(*every, strict=True))
        if site in PAIR_SITES:
            value = self._padded_pairs(value, mask)
            if self.picked is not None:
                value = value[rows, :, slots][:, :, None]
            target = self._target(site, value, (self._queries(), self.longest))
            target[flat, layer, :, : value.shape[2], : value.shape[3]] = value
        elif self.picked is not None:
            value = value[rows, slots]
            self._target(site, value, ())[flat, layer] = value
        else:
            value = value * mask.to(value.dtype).reshape(*mask.shape, *(1,) * (value.dim() - 2))
            target = self._target(site, value, ())
            target[flat, : value.shape[1], layer] = value

    def _queries(self) -> int:
        return self.longest if self.picked is None else 1

    def _padded_pairs(self, value: Tensor, mask: Tensor) -> Tensor:
        absent = mask[:, None, None, :] == 0
        if self.picked is None:
            absent = absent | (mask[:, None, :, None] == 0)
        return value.masked_fill(absent, float("nan"))

    def _target(self, site: str, value: Tensor, pairs: tuple[int, ...]) -> Tensor:
        """Return the site's result, made on first use: shapes and dtype are known only then."""
        if site not in self.results:
            n_items, n_layers = self.n_items, len(self.plan.layers[site])
            if pairs:
                shape, fill = (n_items, n_layers, value.shape[1], *pairs), float("nan")
            elif self.picked is not None:
                shape, fill = (n_items, n_layers, *value.shape[1:]), 0.0
            else:
                shape, fill = (n_items, self.longest, n_layers, *value.shape[2:]), 0.0
            self.results[site] = torch.full(shape, fill, dtype=value.dtype)
        return self.results[site]


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return not isinstance(error, MemoryLimitError)
    return any(words in str(error) for words in ("out of memory", "can't allocate memory"))
