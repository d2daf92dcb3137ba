"""Row and cell effects against dense least squares, and shares against planted variances."""

import numpy
import pytest
import torch

from wvprobe import _cell_effects
from wvprobe._cell_effects import (
    MODELS,
    SHARES,
    SUMS,
    Design,
    constant_columns,
    held_out_sums,
    linked_cells,
    shares_of,
    shuffled_share,
    solve_cells,
)
from wvprobe._statistics import resampled_totals
from wvprobe.errors import MemoryLimitError

GAUGES = pytest.mark.parametrize("gauge", [True, False], ids=["gauge", "raw"])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn_design(n_texts: int, rows: int = 6, tokens: int = 3, seed: int = 0) -> Design:
    """Draw texts whose rows hold some of seven keys of their query token, each at two offsets."""
    g = generator(seed)
    text = torch.arange(n_texts).repeat_interleave(rows * 7)
    row = torch.arange(n_texts * rows).repeat_interleave(7)
    token = torch.randint(0, tokens, (n_texts * rows,), generator=g).repeat_interleave(7)
    key = torch.arange(7).repeat(n_texts * rows)
    offset = torch.randint(0, 2, (len(row),), generator=g)
    pair = token * 7 + key
    levels = {"pair": pair, "cell": pair * 2 + offset, "offset": offset}
    kept = torch.rand(len(row), generator=g) < 0.6
    whole = Design(text, row, levels, torch.ones_like(kept))
    return whole.only(kept)


def dummies(*factors: torch.Tensor) -> numpy.ndarray:
    each = [torch.nn.functional.one_hot(torch.unique(f, return_inverse=True)[1]) for f in factors]
    return torch.cat(each, dim=1).double().numpy()


def row_means_off(values: numpy.ndarray, group: numpy.ndarray) -> numpy.ndarray:
    out = values.copy()
    for number in numpy.unique(group):
        out[group == number] -= values[group == number].mean(axis=0)
    return out


def test_effects_are_least_squares_with_dummies():
    """Within rows the fit is that of lstsq on row and cell dummies, whatever the design lacks."""
    g = generator()
    # Two parts that no row links, a cell that nothing has, a cell twice in its row.
    row = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 3, 3, 4, 5, 5, 5])
    cell = torch.tensor([0, 1, 1, 1, 2, 2, 0, 5, 6, 7, 7, 7, 6, 6])
    y = torch.randn(len(row), 3, generator=g, dtype=torch.float64)
    relative = torch.from_numpy(row_means_off(y.numpy(), row.numpy()))
    effects = torch.zeros(8, 3, dtype=torch.float64).index_add(0, cell, relative)
    solve_cells(effects, row, cell)
    design = dummies(row, cell)
    fitted = design @ numpy.linalg.lstsq(design, y.numpy(), rcond=None)[0]
    mine = row_means_off(effects[cell].numpy(), row.numpy())
    numpy.testing.assert_allclose(mine, row_means_off(fitted, row.numpy()), atol=1e-12)
    assert linked_cells(row, cell, 8).tolist() == [0, 0, 0, -1, -1, 0, 6, 6]


def brute_sums(scores: torch.Tensor, design: Design, fold_of: numpy.ndarray) -> numpy.ndarray:
    """Sum up held-out predictions of lstsq with dummies, the gauge fixed; no shuffled ones."""
    y = scores.double().numpy()
    text, row = design.text.numpy(), design.row.numpy()
    level = {model: design.levels[model].numpy() for model in MODELS}
    asked = design.evaluated.numpy()
    sums = numpy.zeros((text.max() + 1, len(SUMS) - 1, y.shape[1]))
    for fold in numpy.unique(fold_of):
        train, test = fold_of[text] != fold, fold_of[text] == fold
        part = parts_by_search(row[train], level["cell"][train])
        known = test & numpy.isin(level["cell"], list(part))
        group = numpy.array([row[at] * 1000 + part[level["cell"][at]] for at in known.nonzero()[0]])
        paired = numpy.array([(group == number).sum() > 1 for number in group])
        at, group = known.nonzero()[0][paired], group[paired]
        centre = row_means_off(y[train], row[train])[asked[train]].mean(axis=0)
        shown, true = asked[at], row_means_off(y[at], group) - centre
        found = [true**2]
        guesses = []
        for model in MODELS:
            n_rows = len(numpy.unique(row[train]))
            seen, number = numpy.unique(level[model][train], return_inverse=True)
            design_matrix = dummies(torch.tensor(row[train]), torch.tensor(number))
            effects = numpy.linalg.lstsq(design_matrix, y[train], rcond=None)[0][n_rows:]
            guess = effects[numpy.searchsorted(seen, level[model][at])]
            guesses.append(row_means_off(guess, group) - centre)
        found += [(true - guess) ** 2 for guess in guesses]
        found += [true * guess for guess in guesses]
        for place, values in enumerate(found):
            numpy.add.at(sums[:, place], text[at][shown], values[shown])
    return sums


def parts_by_search(row: numpy.ndarray, cell: numpy.ndarray) -> dict[int, int]:
    """Number linked cells by walking from cell to cell through shared rows."""
    part: dict[int, int] = {}
    for start in numpy.unique(cell):
        todo = [start]
        while todo:
            at = todo.pop()
            if at not in part:
                part[int(at)] = int(start)
                todo += cell[numpy.isin(row, row[cell == at])].tolist()
    return part


@pytest.mark.parametrize("keys", ["all", "some"])
def test_held_out_sums_are_those_of_dense_least_squares(keys, monkeypatch):
    monkeypatch.setattr(_cell_effects, "_BLOCK_BYTES", 8 * 500)  # less than two columns
    monkeypatch.setattr(_cell_effects, "_PAIRS_AT_ONCE", 20)
    design = drawn_design(9, rows=3)
    if keys == "some":
        design = Design(design.text, design.row, design.levels, design.levels["pair"] % 7 == 2)
    scores = torch.randn(len(design.text), 3, generator=generator(1)) + 5.0
    sums, predicted = held_out_sums(scores, design, folds=4, gauge=True, seed=3)
    fold_of = (torch.randperm(9, generator=generator(3)) % 4).numpy()
    expected = brute_sums(scores, design, fold_of)
    numpy.testing.assert_allclose(sums[:, :-1].numpy(), expected, rtol=1e-8, atol=1e-8)
    assert bool(design.evaluated[predicted].all()) and 0 < int(predicted.sum())
    assert int(predicted.sum()) < int(design.evaluated.sum())  # some cells are known to no training


def test_raw_predictions_are_means_of_the_training_folds():
    design = drawn_design(5, rows=2)
    scores = torch.randn(len(design.text), 2, generator=generator(1)).double()
    sums, predicted = held_out_sums(scores.float(), design, folds=5, gauge=False, seed=0)
    assert 0 < int(predicted.sum()) < len(predicted)
    for text in range(5):
        test = predicted & (design.text == text)
        train = design.text != text
        centre = scores[train].mean(dim=0)
        cell = design.levels["cell"]
        guess = torch.stack([scores[train & (cell == c)].mean(dim=0) for c in cell[test]])
        torch.testing.assert_close(sums[text, 0], (scores[test] - centre).square().sum(0))
        torch.testing.assert_close(sums[text, 2], (scores[test] - guess).square().sum(0))
        product = ((scores[test] - centre) * (guess - centre)).sum(dim=0)
        torch.testing.assert_close(sums[text, 5], product)


def planted(design: Design, weights: dict[str, float], noise: float, columns: int, seed: int):
    g = generator(seed)
    scores = noise * torch.randn(len(design.text), columns, generator=g, dtype=torch.float64)
    for model, weight in weights.items():
        level = design.levels[model]
        scores += weight * torch.randn(int(level.max()) + 1, columns, generator=g).double()[level]
    return scores


@GAUGES
@pytest.mark.parametrize("only", [*MODELS, "noise"])
def test_planted_shares_come_out(only, gauge):
    design = drawn_design(60)
    weights = {} if only == "noise" else {only: 1.0}
    scores = planted(design, weights, float(only == "noise"), 6, 1).float()
    sums, _ = held_out_sums(scores, design, folds=5, gauge=gauge, seed=0)
    held_out, corrected = shares_of(sums.sum(dim=0))
    assert len(SHARES) == len(held_out)
    torch.testing.assert_close(held_out[:3].sum(dim=0), torch.ones(6).double())
    torch.testing.assert_close(corrected[:3].sum(dim=0), torch.ones(6).double())
    context = {name: float(held_out[i].mean()) for i, name in enumerate(SHARES)}
    if only == "noise":  # means of noise predict worse than nothing, and explain nothing
        assert context["context"] > 1.0
        assert float((corrected[2] - 1).abs().max()) < 0.1
        return
    assert float(held_out[2].abs().max()) < 1e-6 and float(corrected[2].abs().max()) < 1e-6
    if only in ("pair", "offset"):
        exact = held_out[SHARES.index("pair" if only == "pair" else "offset_alone")]
        torch.testing.assert_close(exact, torch.ones(6).double(), atol=1e-6, rtol=0)
    if only == "offset":
        assert float(held_out[0].max()) < 0.2


@GAUGES
def test_half_of_the_variance_is_context_and_intervals_say_so(gauge):
    """Cells and noise of known size, many columns: the corrected share is right, R² too dark."""
    design, columns = drawn_design(80, tokens=40), 120
    parts = [planted(design, {"cell": 1.0}, 0.0, columns, 1), planted(design, {}, 1.0, columns, 2)]
    sums, used = held_out_sums(sum(parts).float(), design, folds=5, gauge=gauge, seed=0)
    row = design.row[used].numpy()
    cells, noise = (part[used].numpy() for part in parts)
    if gauge:
        cells, noise = row_means_off(cells, row), row_means_off(noise, row)
    else:
        cells = cells - cells.mean(axis=0)
    noise_square = (noise**2).sum(axis=0).mean()
    truth = torch.tensor(noise_square / ((cells**2).sum(axis=0) + noise_square))
    held_out, corrected = shares_of(sums.sum(dim=0))
    context = SHARES.index("context")
    assert abs(float((corrected[context] - truth).mean())) < 0.005
    assert float((held_out[context] - truth).mean()) > 0.1
    draws = shares_of(resampled_totals(sums))[1][:, context]
    low, high = torch.quantile(draws, torch.tensor([0.025, 0.975]).double(), dim=0)
    covered = float(((low <= truth) & (truth <= high)).double().mean())
    assert 0.86 < covered < 0.995
    assert float((high - low).mean()) < 0.1


def test_what_is_constant_over_a_row_does_not_matter():
    design = drawn_design(30)
    scores = planted(design, {"cell": 1.0}, 0.5, 4, 1)
    rows = torch.randn(int(design.row.max()) + 1, 4, generator=generator(2)).double()
    gauged, _ = held_out_sums(scores, design, folds=4, gauge=True, seed=0)
    moved, _ = held_out_sums(scores + 30 * rows[design.row], design, folds=4, gauge=True, seed=0)
    torch.testing.assert_close(gauged, moved, rtol=1e-9, atol=1e-9)
    raw = [
        shares_of(held_out_sums(s, design, folds=4, gauge=False, seed=0)[0].sum(dim=0))[1][2]
        for s in (scores, scores + 30 * rows[design.row])
    ]
    assert float((raw[0] - raw[1]).abs().min()) > 0.1


@GAUGES
def test_labels_exchanged_between_scores_explain_nothing(gauge):
    design = drawn_design(120)
    scores = planted(design, {"cell": 1.0}, 0.1, 5, 1).float()
    ordered, _ = held_out_sums(scores, design, folds=5, gauge=gauge, seed=0)
    assert float(shares_of(ordered.sum(dim=0))[0][2].max()) < 0.1
    assert float(shuffled_share(ordered.sum(dim=0)).abs().max()) < 0.1
    order = torch.randperm(len(scores), generator=generator(5))
    sums, _ = held_out_sums(scores[order], design, folds=5, gauge=gauge, seed=0)
    held_out, corrected = shares_of(sums.sum(dim=0))
    assert float((1 - held_out[2]).max()) < 0.0
    assert float((1 - corrected[2]).abs().max()) < 0.05


def test_cells_that_no_row_links_are_never_compared():
    """A held-out row holds cells of two parts whose difference no training row tells."""
    text = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4])
    row = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 4, 4])
    cell = torch.tensor([0, 1, 0, 1, 2, 3, 2, 3, 0, 1, 2, 3])
    design = Design(text, row, dict.fromkeys(MODELS, cell), torch.ones(12, dtype=torch.bool))
    values = torch.tensor([1.0, 2.0, 7.0, 3.0])
    scores = (values[cell] + torch.arange(5.0)[row] ** 2)[:, None]
    fold_of = torch.randperm(5, generator=generator()) % 5
    sums, predicted = held_out_sums(scores, design, folds=5, gauge=True, seed=0)
    assert len(fold_of.unique()) == 5 and bool(predicted.all())
    # Without a link the row of text 4 falls into (0, 1) and (2, 3), each predicted exactly.
    torch.testing.assert_close(sums[4, 0], torch.tensor([0.5 + 8.0]).double())
    assert float(sums[4, 1:4].max()) < 1e-12


def test_constant_columns_are_told_from_small_ones():
    scores = torch.tensor([[100.0, 100.0], [100.0 + 1e-5, 100.1]])
    sums = (scores.double() - scores.double().mean(dim=0)).square().sum(0).expand(1, 8, 2)
    assert constant_columns(scores, sums, 2).tolist() == [True, False]


def test_too_many_cells_at_once_are_refused(monkeypatch):
    monkeypatch.setattr(_cell_effects, "_LARGEST", 2)
    with pytest.raises(MemoryLimitError, match="max_pairs"):
        solve_cells(torch.zeros(3, 1).double(), torch.zeros(3).long(), torch.arange(3))
