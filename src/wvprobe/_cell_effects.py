"""How well the means of cells, learnt from some texts, predict scores in others.

A score is taken as row + cell + rest, where a row is a query of a text and a cell a pair of tokens
(or a pair at an offset, or an offset). What is constant over a row is the softmax's gauge and says
nothing, so that only differences within rows are predicted and compared. Tensors only: scores
[n, column] and integers that say what each score belongs to.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from wvprobe.errors import MemoryLimitError

# What cells may be made of; each is one model of the scores.
MODELS: tuple[str, ...] = ("pair", "cell", "offset")
# What is summed for a text: squares of the scores, of each model's errors, products of scores and
# predictions, and the same products with the predictions shuffled.
SUMS: tuple[str, ...] = ("total", *MODELS, *(f"{model} product" for model in MODELS), "shuffled")
SHARES: tuple[str, ...] = ("pair", "offset", "context", "offset_alone")

_BLOCK_BYTES = 64_000_000  # of float64 copies of the scores held at once
_LARGEST = 16_384  # cells that are solved for together: 2 GB
_PAIRS_AT_ONCE = 4_000_000
# Scores whose spread is below this share of their size are constant but for float32's rounding.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Design:
    """What each of n scores belongs to.

    Attributes:
        text: its text, numbered from 0.
        row: its query.
        levels: for each of ``MODELS`` its cell, numbered from 0; `cell` is the finest.
        evaluated: whether it is to be predicted; the others only take part in their row.
    """

    text: Int[Tensor, " n"]
    row: Int[Tensor, " n"]
    levels: Mapping[str, Int[Tensor, " n"]]
    evaluated: Bool[Tensor, " n"]

    def only(self, kept: Tensor) -> "Design":
        """Return the part of a mask, or of indices."""
        levels = {name: level[kept] for name, level in self.levels.items()}
        return Design(self.text[kept], self.row[kept], levels, self.evaluated[kept])


def held_out_sums(
    scores: Float[Tensor, "n column"], design: Design, *, folds: int, gauge: bool, seed: int
) -> tuple[Float[Tensor, "text sum column"], Bool[Tensor, " n"]]:
    """Predict the scores of each fold of texts from the other folds; sum up by text.

    Args:
        scores: a column a head.
        design: what each score belongs to.
        folds: in how many parts the texts are shared out, at random.
        gauge: whether scores are compared within rows only. Cell effects are then least-squares
            estimates beside row effects, and in a row of the held-out fold both the scores and the
            predictions are taken relative to their mean; cells that no chain of training rows
            links are never compared, since nothing is known of their difference.
        seed: of the shares and of the shuffled predictions.

    Returns:
        ``SUMS`` of every text in float64, around the training mean, and which scores were
        predicted: those whose cell is known from the training folds and, with the gauge, that
        another one in their row can be compared with.
    """
    generator = torch.Generator().manual_seed(seed)
    n_texts = int(design.text.max()) + 1
    fold_of = (torch.randperm(n_texts, generator=generator) % folds)[design.text]
    sums = scores.new_zeros((n_texts, len(SUMS), scores.shape[1]), dtype=torch.float64)
    used = torch.zeros_like(design.evaluated)
    for fold in range(folds):
        trained = _train(scores, design, (fold_of != fold).nonzero()[:, 0], gauge)
        test = (fold_of == fold).nonzero()[:, 0]
        test, group = trained.comparable(test, design)
        shown = design.evaluated[test]
        used[test[shown]] = True
        order = torch.randperm(int(shown.sum()), generator=generator)
        text = design.text[test[shown]]
        for columns in _blocks(len(test), scores.shape[1]):
            y = _relative(scores[test, columns].double(), group)[shown] - trained.centre[columns]
            parts = [y.square()]
            guesses = [
                _relative(trained.effects[model][design.levels[model][test], columns], group)[shown]
                - trained.centre[columns]
                for model in MODELS
            ]
            parts += [(y - guess).square() for guess in guesses]
            parts += [y * guess for guess in guesses]
            parts.append(y * guesses[MODELS.index("cell")][order])
            for place, part in enumerate(parts):
                sums[:, place, columns] = sums[:, place, columns].index_add(0, text, part)
    return sums, used


def shares_of(
    sums: Float[Tensor, "... sum column"],
) -> tuple[Float[Tensor, "... share column"], Float[Tensor, "... share column"]]:
    """Turn sums into ``SHARES``: held-out R², and the same without the noise of cell means.

    R² = 1 − Σ (y − ŷ)² / Σ y². A mean of m scores carries the m-th part of the variance that is
    left to context, which counts against the cells. Being learnt from other texts, that noise is
    independent of y, so Σ y ŷ / Σ y² is free of it: its expectation is the explained share itself.
    """
    total, *rest = sums.unbind(dim=-2)
    errors, products = rest[: len(MODELS)], rest[len(MODELS) : 2 * len(MODELS)]
    held_out = [1 - error / total for error in errors]
    corrected = [product / total for product in products]
    return _named_shares(*held_out), _named_shares(*corrected)


def _named_shares(pair: Tensor, cell: Tensor, offset: Tensor) -> Tensor:
    return torch.stack([pair, cell - pair, 1 - cell, offset], dim=-2)


def shuffled_share(sums: Float[Tensor, "... sum column"]) -> Float[Tensor, "... column"]:
    """Return the share that predictions exchanged at random between scores explain: 0 by chance."""
    return sums[..., SUMS.index("shuffled"), :] / sums[..., 0, :]


def constant_columns(
    scores: Float[Tensor, "n column"], sums: Float[Tensor, "text sum column"], n: int
) -> Bool[Tensor, " column"]:
    """Return the columns of n predicted scores that are constant but for rounding."""
    largest = scores.abs().amax(dim=0).double()
    return sums[:, 0].sum(dim=0) <= n * (_ROUNDING * largest).square()


@dataclass(frozen=True)
class _Trained:
    """What the training folds say.

    Attributes:
        effects: model -> [level, column]; 0 where a level is unknown.
        linked: [cell] number of the part of the training rows that a cell belongs to; −1 where it
            is in none.
        centre: [column] mean of the evaluated scores.
        gauge: whether effects are known up to a constant in each linked part.
    """

    effects: Mapping[str, Tensor]
    linked: Tensor
    centre: Tensor
    gauge: bool

    def comparable(self, at: Tensor, design: Design) -> tuple[Tensor, Tensor | None]:
        """Return which of some scores can be predicted, and the groups to compare within."""
        part = self.linked[design.levels["cell"][at]]
        if not self.gauge:
            return at[part >= 0], None
        at, part = at[part >= 0], part[part >= 0]
        group = _numbered(design.row[at] * len(self.linked) + part)
        enough = torch.bincount(group)[group] > 1
        return at[enough], _numbered(group[enough])


def _train(scores: Tensor, design: Design, train: Tensor, gauge: bool) -> _Trained:
    known, n_columns = design.only(train), scores.shape[1]
    sizes = {model: int(design.levels[model].max()) + 1 for model in MODELS}
    row = _numbered(known.row) if gauge else None
    effects = {m: torch.zeros(sizes[m], n_columns, dtype=torch.float64) for m in MODELS}
    centre = torch.zeros(n_columns, dtype=torch.float64)
    for columns in _blocks(len(train), n_columns):
        y = _relative(scores[train, columns].double(), row)
        centre[columns] = y[known.evaluated].mean(dim=0)
        for model in MODELS:
            effects[model][:, columns] = torch.zeros(
                sizes[model], y.shape[1], dtype=torch.float64
            ).index_add(0, known.levels[model], y)
    for model in MODELS:
        level = known.levels[model]
        if row is None:
            effects[model] /= torch.bincount(level, minlength=sizes[model]).clamp(min=1)[:, None]
        else:
            solve_cells(effects[model], row, level)
    cell = known.levels["cell"]
    if row is None:
        linked = torch.full((sizes["cell"],), -1).index_fill(0, cell, 0)
    else:
        linked = linked_cells(row, cell, sizes["cell"])
    return _Trained(effects, linked, centre, gauge)


def _blocks(n: int, n_columns: int) -> Iterator[slice]:
    """Yield slices of columns whose n scores fit into a block."""
    width = max(1, _BLOCK_BYTES // (8 * max(1, n)))
    for start in range(0, n_columns, width):
        yield slice(start, min(start + width, n_columns))


def _relative(values: Tensor, group: Tensor | None) -> Tensor:
    """Take the mean of its group off each value, [n, column]; groups are numbered from 0."""
    if group is None or not len(group):
        return values
    counts = torch.bincount(group)
    sums = values.new_zeros(len(counts), values.shape[1]).index_add(0, group, values)
    return values - (sums / counts[:, None])[group]


def _numbered(values: Tensor) -> Tensor:
    return torch.unique(values, return_inverse=True)[1]


def linked_cells(
    row: Int[Tensor, " n"], cell: Int[Tensor, " n"], n_cells: int
) -> Int[Tensor, " cell"]:
    """Number the parts of a design whose cells rows link to each other; −1 for unseen cells."""
    label = torch.arange(n_cells)
    highest = torch.full((int(row.max()) + 1 if len(row) else 0,), n_cells)
    while True:
        lowest = highest.scatter_reduce(0, row, label[cell], "amin")
        new = label.scatter_reduce(0, cell, lowest[row], "amin")
        new = new[new]  # the label of a label: long chains shorten by half
        if torch.equal(new, label):
            seen = torch.zeros(n_cells, dtype=torch.bool).index_fill(0, cell, True)
            return torch.where(seen, label, -1)
        label = new


def solve_cells(
    sums: Float[Tensor, "cell column"], row: Int[Tensor, " n"], cell: Int[Tensor, " n"]
) -> None:
    """Turn, in place, sums over cells of scores relative to their row's mean into cell effects.

    Least squares of y = row + cell (two-way fixed effects): with the rows eliminated the normal
    equations are (D − Σ_r n_r n_rᵀ / m_r) effects = sums, where D counts scores a cell, n_r counts
    row r's scores a cell, and m_r is their number. The matrix is the Laplacian of the graph that
    rows draw between cells. Each linked part is solved for by itself, by Cholesky's factor of the
    matrix plus a constant; the effects of a part then sum to 0.

    Args:
        sums: [cell, column], float64; 0 for unseen cells.
        row: the row of each score.
        cell: its cell.

    Raises:
        MemoryLimitError: too many cells are linked to be solved for together.
    """
    part = linked_cells(row, cell, len(sums))
    members = (part >= 0).nonzero()[:, 0]
    members = members[part[members].argsort(stable=True)]
    sizes = torch.unique_consecutive(part[members], return_counts=True)[1]
    _check_sizes(sizes)
    place = torch.zeros_like(part)
    place[members] = torch.arange(len(members)) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    order = (part[cell] * (int(row.max()) + 1) + row).argsort()
    scores = torch.unique_consecutive(part[cell[order]], return_counts=True)[1].tolist()
    for of_part, at in zip(members.split(sizes.tolist()), order.split(scores), strict=True):
        if len(of_part) == 1:
            sums[of_part] = 0.0
            continue
        laplacian = _laplacian(row[at], place[cell[at]], len(of_part))
        # Constant vectors are the null space; what is added there keeps the matrix's scale.
        laplacian += laplacian.diagonal().mean() / len(of_part)
        sums[of_part] = torch.cholesky_solve(sums[of_part], torch.linalg.cholesky(laplacian))


def _check_sizes(sizes: Tensor) -> None:
    largest = int(sizes.max()) if len(sizes) else 0
    if largest > _LARGEST:
        raise MemoryLimitError(
            f"{largest:,} cells hang together through their rows, more than the {_LARGEST:,} that "
            "are solved for at once. Give fewer texts, or a smaller max_pairs."
        )


def _laplacian(row: Tensor, cell: Tensor, n_cells: int) -> Tensor:
    """Return D − Σ_r n_r n_rᵀ / m_r, [cell, cell], for scores in the order of their rows."""
    counts = torch.unique_consecutive(row, return_counts=True)[1]
    in_row = counts.repeat_interleave(counts)
    start = (counts.cumsum(0) - counts).repeat_interleave(counts)
    found = torch.zeros(n_cells * n_cells, dtype=torch.float64)
    found[:: n_cells + 1] = torch.bincount(cell, minlength=n_cells).double()
    pieces = torch.unique_consecutive(in_row.cumsum(0) // _PAIRS_AT_ONCE, return_counts=True)[1]
    for at in torch.arange(len(row)).split(pieces.tolist()):
        # Every score of the piece, beside every score of its own row.
        m = in_row[at]
        first = at.repeat_interleave(m)
        within = torch.arange(len(first)) - (m.cumsum(0) - m).repeat_interleave(m)
        second = start[first] + within
        found.index_add_(0, cell[first] * n_cells + cell[second], -1.0 / in_row[first].double())
    return found.reshape(n_cells, n_cells)
