"""Probes against scikit-learn at its optimum, planted directions, and labels that mean nothing."""

import warnings
from itertools import product

import numpy as np
import pytest
import scipy.optimize
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score, log_loss
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.neighbors import NearestCentroid
from sklearn.preprocessing import StandardScaler

from wvprobe._types import Result
from wvprobe.errors import InputError, ShapeError
from wvprobe.probes import ProbeResult, closed_forms, fit_probes, fitting, logistic
from wvprobe.probes.features import block_of, frame_of

FOLDS = 3


def labelled(n=331, width=7, sites=(2, 3), classes=5, strength=0.6, seed=0):
    """Return correlated features far from 0, skewed classes and groups of one to four items."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    shares = torch.arange(1, classes + 1).double()
    y = torch.multinomial(shares, n, replacement=True, generator=generator)
    means = normal(*sites, classes, width) * strength
    x = means[..., y, :] + normal(*sites, n, width)
    x = x @ (normal(*sites, width, width) + torch.eye(width)) + 30 * normal(*sites, 1, width)
    groups = torch.randint(n // 2, (n,), generator=generator)
    return x.movedim(-2, 0).contiguous(), y, groups


def splits(y, groups, folds=FOLDS, seed=0):
    splitter = StratifiedGroupKFold(n_splits=folds, shuffle=True, random_state=seed)
    return list(splitter.split(y[:, None].numpy(), y.numpy(), groups.numpy()))


def theirs(model, x, train, test):
    """Fit on standardised features; return coefficients for raw ones, and what is predicted."""
    scaler = StandardScaler().fit(x[train])
    model.fit(scaler.transform(x[train]), train_labels(model, train))
    weights = model.coef_ / scaler.scale_
    return weights, model.intercept_ - weights @ scaler.mean_, scaler.transform(x[test])


def train_labels(model, train):
    return model.targets[train]


def with_targets(model, targets):
    model.targets = targets
    return model


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("C", [1.0, 0.01])
def test_logistic_probes_are_scikit_learns_at_its_optimum(classes, C):
    X, y, groups = labelled(classes=classes)
    found = fit_probes(
        X,
        y,
        groups=groups,
        folds=FOLDS,
        penalty=C,
        tolerance=1e-10,
        coefficients=True,
        predictions=True,
        description_length=False,
        site_axes=("layer", "kv_head"),
    )
    assert bool(found.converged.all()) and float(found.gradient.max()) <= 1e-10
    assert found.coefficients.shape == (2, 3, FOLDS, 1 if classes == 2 else 5, 7)
    for layer, head in ((0, 0), (1, 2)):
        x = X[:, layer, head].numpy()
        nats = 0.0
        for fold, (train, test) in enumerate(splits(y, groups)):
            assert bool((found.fold[test] == fold).all())
            model = LogisticRegression(C=C, tol=1e-10, max_iter=20_000)
            model = with_targets(model, y.numpy())
            weights, intercepts, held = theirs(model, x, train, test)
            ours = found.coefficients[layer, head, fold].numpy()
            np.testing.assert_allclose(ours, weights, atol=1e-4 * np.abs(weights).max())
            np.testing.assert_allclose(
                found.intercepts[layer, head, fold].numpy(), intercepts, rtol=1e-3, atol=1e-3
            )
            predicted = found.predictions[test, layer, head].numpy()
            assert (predicted == model.predict(held)).all()
            nats += log_loss(y[test], model.predict_proba(held), labels=range(classes)) * len(test)
        bits = float(found.scores["cross_entropy"][layer, head])
        assert bits == pytest.approx(nats / len(y) / np.log(2), rel=1e-4)


def test_float32_comes_close_and_its_scores_are_scikit_learns():
    X, y, groups = labelled()
    given = dict(groups=groups, folds=FOLDS, penalty=1.0, predictions=True)
    exact = fit_probes(X, y, tolerance=1e-10, **given)
    found = fit_probes(X.float(), y, **given)
    assert found.provenance.settings["dtype"] == "torch.float32" and bool(found.converged.all())
    for name, values in exact.scores.items():
        tolerance = 0.01 * float(values.abs().max())
        torch.testing.assert_close(found.scores[name], values, atol=tolerance, rtol=0)
    predicted = found.predictions[:, 1, 2].numpy()
    at = (1, 2)
    assert float(found.scores["accuracy"][at]) == pytest.approx((predicted == y.numpy()).mean())
    expected = balanced_accuracy_score(y, predicted)
    assert float(found.scores["balanced_accuracy"][at]) == pytest.approx(expected, rel=1e-6)
    expected = f1_score(y, predicted, average="macro")
    assert float(found.scores["macro_f1"][at]) == pytest.approx(expected, rel=1e-6)
    assert (found.confusion[at].numpy() == confusion_matrix(y, predicted)).all()


@pytest.mark.parametrize("classes", [2, 5])
def test_least_squares_is_ridge_regression(classes):
    X, y, groups = labelled(classes=classes)
    found = fit_probes(
        X,
        y,
        groups=groups,
        folds=FOLDS,
        penalty=3.0,
        method="least_squares",
        coefficients=True,
        predictions=True,
    )
    onehot = np.eye(classes)[y.numpy()]
    for fold, (train, test) in enumerate(splits(y, groups)):
        model = with_targets(Ridge(alpha=3.0), onehot)
        weights, intercepts, held = theirs(model, X[:, 1, 0].numpy(), train, test)
        np.testing.assert_allclose(found.coefficients[1, 0, fold], weights, rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(found.intercepts[1, 0, fold], intercepts, rtol=1e-6, atol=1e-7)
        predicted = model.predict(held).argmax(axis=1)
        assert (found.predictions[test, 1, 0].numpy() == predicted).all()
    assert bool(found.scores["cross_entropy"].isnan().all())
    assert "description_length" not in found.scores


@pytest.mark.parametrize("shrinkage", [0.0, 0.2])
def test_lda_is_scikit_learns(shrinkage):
    X, y, groups = labelled()
    found = fit_probes(
        X,
        y,
        groups=groups,
        folds=FOLDS,
        penalty=shrinkage,
        method="lda",
        predictions=True,
        description_length=False,
    )
    nats = 0.0
    for train, test in splits(y, groups):
        scaler = StandardScaler().fit(X[train, 0, 1])
        model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage)
        model.fit(scaler.transform(X[train, 0, 1]), y[train])
        held = scaler.transform(X[test, 0, 1])
        assert (found.predictions[test, 0, 1].numpy() == model.predict(held)).all()
        nats += log_loss(y[test], model.predict_proba(held), labels=range(5)) * len(test)
    bits = float(found.scores["cross_entropy"][0, 1])
    assert bits == pytest.approx(nats / len(y) / np.log(2), rel=1e-5)


@pytest.mark.parametrize("standardise", [True, False])
def test_mean_difference_is_the_nearest_centroid(standardise):
    X, y, groups = labelled()
    found = fit_probes(
        X,
        y,
        groups=groups,
        folds=FOLDS,
        method="mean_difference",
        predictions=True,
        standardise=standardise,
    )
    for train, test in splits(y, groups):
        x = X[:, 1, 1].numpy()
        if standardise:
            x = StandardScaler().fit(x[train]).transform(x)
        expected = NearestCentroid().fit(x[train], y[train]).predict(x[test])
        assert (found.predictions[test, 1, 1].numpy() == expected).all()


def test_features_in_their_own_units_are_penalised_there():
    X, y, groups = labelled(sites=(2,), classes=2)
    X = X / 5
    given = dict(groups=groups, folds=FOLDS, penalty=0.05, coefficients=True)
    found = fit_probes(X, y, standardise=False, tolerance=1e-10, **given)
    (train, _), *_ = splits(y, groups)
    model = LogisticRegression(C=0.05, tol=1e-10, max_iter=20_000)
    model.fit(X[train, 1].numpy(), y[train].numpy())
    np.testing.assert_allclose(found.coefficients[1, 0], model.coef_, rtol=1e-3, atol=1e-5)


@pytest.mark.ci
def test_the_penalty_is_chosen_inside_each_fold():
    """By the loss in folds of the training items alone, and not by what is held out."""
    X, y, groups = labelled(sites=(2,), strength=0.3)
    grid = (1e-3, 1e-2, 1e-1, 10.0)
    given = dict(groups=groups, folds=FOLDS, inner_folds=2, tolerance=1e-7)
    found = fit_probes(X, y, penalties=grid, **given)
    (train, test), *_ = splits(y, groups)
    losses = []
    for C in grid:
        total = 0.0
        for fit_on, held in splits(y[train], groups[train], folds=2, seed=1):
            scaler = StandardScaler().fit(X[train][fit_on, 1])
            model = LogisticRegression(C=C, tol=1e-8, max_iter=20_000)
            model.fit(scaler.transform(X[train][fit_on, 1]), y[train][fit_on])
            p = model.predict_proba(scaler.transform(X[train][held, 1]))
            total += log_loss(y[train][held], p, labels=range(5)) * len(held)
        losses.append(total)
    assert float(found.penalties[1, 0]) == grid[int(np.argmin(losses))]
    # Other features and labels of held-out items change nothing of what that fold chose.
    X2, y2 = X.clone(), y.clone()
    X2[test] = X2[test].flip(0) * 3
    again = fit_probes(X2, y2, penalties=grid, coefficients=True, **given)
    first = fit_probes(X, y, penalties=grid, coefficients=True, **given)
    assert torch.equal(again.penalties[:, 0], first.penalties[:, 0])
    torch.testing.assert_close(
        again.coefficients[:, 0], first.coefficients[:, 0], rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("method", ["least_squares", "lda"])
def test_closed_forms_choose_penalties_too(method):
    X, y, groups = labelled(n=120, width=60, sites=(2,), strength=0.2, classes=3)
    found = fit_probes(X, y, groups=groups, folds=FOLDS, method=method)
    assert set(found.penalties.flatten().tolist()) <= set(fitting.GRIDS[method])
    # 60 features and 80 items: the weakest penalty is the worst choice.
    assert bool((found.penalties > fitting.GRIDS[method][0]).all())
    weakest = fit_probes(
        X, y, groups=groups, folds=FOLDS, method=method, penalty=fitting.GRIDS[method][0]
    )
    assert float(found.scores["accuracy"].mean()) > float(weakest.scores["accuracy"].mean())


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_moments_keep_their_digits_where_training_items_hardly_vary(share):
    """Also of most items, where the rest is taken off the whole: single precision has no more."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 1, 5, generator=generator, dtype=torch.float64)
    chosen = torch.arange(200) < 200 * share
    x[chosen, :, 2] = 1e-3 * x[chosen, :, 2]
    x[~chosen, :, 2] += 50.0  # only items of the other fold have it
    y = torch.arange(200) % 3
    block = block_of(x.float(), torch.float32)
    frame = frame_of(block, chosen[None].float(), True)
    (found,) = closed_forms.moments(block, chosen[None].float(), frame, y, 3)
    kept = (x[chosen, 0] - x[chosen, 0].mean(dim=0)) / x[chosen, 0].std(dim=0, correction=0)
    torch.testing.assert_close(found.second[0], kept.T @ kept, rtol=1e-2, atol=0.5)
    means = torch.stack([kept[y[chosen] == k].mean(dim=0) for k in range(3)])
    torch.testing.assert_close(found.means[0], means, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("method", ["least_squares", "lda"])
def test_closed_forms_choose_by_their_own_losses(method):
    """LDA by bits of held-out labels, least squares by squares, with scikit-learn's models."""
    X, y, groups = labelled(n=211, width=31, sites=(3,), strength=0.3, classes=3)
    grid = (0.01, 0.05, 0.1, 0.2, 0.4, 0.8) if method == "lda" else (3.0, 10.0, 30.0, 100.0, 300.0)
    given = dict(groups=groups, folds=FOLDS, inner_folds=2, method=method, penalties=grid)
    found = fit_probes(X, y, **given)
    chosen = []
    for fold, (train, _) in enumerate(splits(y, groups)):
        inner = splits(y[train], groups[train], folds=2, seed=1 + fold)
        for site in range(3):
            losses = np.zeros(len(grid))
            for (fit_on, held), (place, penalty) in product(inner, enumerate(grid)):
                scaler = StandardScaler().fit(X[train][fit_on, site])
                seen, new = (scaler.transform(X[train][at, site]) for at in (fit_on, held))
                if method == "lda":
                    model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=penalty)
                    p = model.fit(seen, y[train][fit_on]).predict_proba(new)
                    losses[place] += log_loss(y[train][held], p, labels=range(3)) * len(held)
                else:
                    onehot = np.eye(3)[y[train]]
                    said = Ridge(alpha=penalty).fit(seen, onehot[fit_on]).predict(new)
                    losses[place] += ((said - onehot[held]) ** 2).sum()
            chosen.append(grid[int(losses.argmin())])
    assert found.penalties.T.flatten().tolist() == pytest.approx(chosen)
    assert len(set(chosen)) > 1


@pytest.mark.parametrize("method", fitting.METHODS)
def test_sites_one_by_one_or_together_are_the_same(method):
    X, y, groups = labelled()
    given = dict(groups=groups, folds=FOLDS, method=method, n_permutations=20, tolerance=1e-8)
    given["penalty"] = {"logistic": 0.1, "lda": 0.1}.get(method, "cv")
    together = fit_probes(X, y, **given)
    apart = fit_probes(X, y, block=1, **given)
    alone = fit_probes(X[:, 1, 2], y, **given)
    assert alone.site_axes == () and alone.gradient.shape == ()
    for name, values in together.scores.items():
        torch.testing.assert_close(apart.scores[name], values, atol=1e-5, rtol=1e-5, equal_nan=True)
        torch.testing.assert_close(
            alone.scores[name], values[1, 2], atol=1e-5, rtol=1e-5, equal_nan=True
        )
    torch.testing.assert_close(apart.penalties, together.penalties)
    assert torch.equal(apart.p, together.p)
    assert float(alone.p) == float(together.p[1, 2])


def test_a_planted_direction_is_found():
    """A binary label moves one direction; the others are noise of the same size."""
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(600) % 2
    directions = torch.nn.functional.normalize(torch.randn(4, 23, generator=generator), dim=-1)
    noise = torch.randn(600, 4, 23, generator=generator)
    X = noise + 3.0 * (y[:, None, None] - 0.5) * directions
    for method in fitting.METHODS:
        found = fit_probes(X, y, method=method, coefficients=True)
        rows = found.coefficients
        planted = rows[..., -1, :] - (0 if rows.shape[-2] == 1 else rows[..., 0, :])
        cosine = torch.cosine_similarity(planted.float(), directions[:, None], dim=-1)
        assert bool((cosine > 0.9).all()), method
        # Two Gaussians 3 apart: Φ(1.5) of the items lie on their own side.
        assert float(found.scores["accuracy"].mean()) == pytest.approx(0.933, abs=0.02)


def test_shuffled_labels_leave_chance():
    X, y, _ = labelled(n=1200, sites=(6,), classes=2)
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(1))]
    for method in fitting.METHODS:
        found = fit_probes(X, y, method=method, n_permutations=99)
        chance = float(found.reference_scores["majority"][0])
        assert abs(float(found.scores["balanced_accuracy"].mean()) - 0.5) < 0.03
        assert float(found.scores["accuracy"].max()) < chance + 0.03
        assert float(found.p_family.min()) > 0.05
        if "compression" in found.scores:
            assert float(found.scores["compression"].max()) < 1.05 * float(
                found.scores["compression"].min()
            )


def test_intervals_cover_what_they_should():
    """A known direction's accuracy on ever new items lies in 95 % of the intervals."""
    generator = torch.Generator().manual_seed(3)
    n, sites = 400, 300
    y = torch.arange(n) % 2
    X = torch.randn(n, sites, 2, generator=generator)
    X[:, :, 0] += 2.0 * (y[:, None] - 0.5)
    found = fit_probes(X, y, penalty=1.0, description_length=False)
    truth = 0.8413  # Φ(1)
    low, high = found.low["accuracy"], found.high["accuracy"]
    covered = float(((low <= truth) & (truth <= high)).double().mean())
    assert 0.90 < covered < 0.99
    width = 2 * 1.96 * (truth * (1 - truth) / n) ** 0.5
    assert float((high - low).mean()) == pytest.approx(width, rel=0.1)


def test_groups_widen_intervals():
    """Every item four times in a group: as many independent units as before."""
    X, y, _ = labelled(n=150, sites=(3,), classes=2)
    once = fit_probes(X, y, penalty=1.0, folds=FOLDS, description_length=False)
    four = [part.repeat_interleave(4, dim=0) for part in (X, y, torch.arange(150))]
    given = dict(penalty=0.25, folds=FOLDS, description_length=False)
    grouped = fit_probes(four[0], four[1], groups=four[2], **given)
    loose = fit_probes(four[0], four[1], **given)

    def width(result):
        return float((result.high["accuracy"] - result.low["accuracy"]).mean())

    assert width(grouped) == pytest.approx(width(once), rel=0.15)
    assert width(loose) < 0.6 * width(grouped)
    assert grouped.n_groups == 150 and loose.n_groups == 600
    # The same item on both sides of a split is learnt by heart.
    for fold in range(FOLDS):
        inside = set(four[2][grouped.fold == fold].tolist())
        assert not inside & set(four[2][grouped.fold != fold].tolist())


def test_strings_sort_and_repeat_with_the_seed():
    X, y, groups = labelled(sites=(2,), classes=3)
    names = [("verb", "noun", "adj")[k] for k in y.tolist()]
    given = dict(folds=FOLDS, penalty=1.0, description_length=False)
    runs = [
        fit_probes(X, names, groups=[f"s{g:03d}" for g in groups.tolist()], seed=seed, **given)
        for seed in (0, 0, 1)
    ]
    assert runs[0].classes == ("adj", "noun", "verb")
    assert runs[0].class_counts == tuple(names.count(name) for name in runs[0].classes)
    assert torch.equal(runs[0].scores["accuracy"], runs[1].scores["accuracy"])
    assert torch.equal(runs[0].low["accuracy"], runs[1].low["accuracy"])
    assert not torch.equal(runs[0].fold, runs[2].fold)
    ints = fit_probes(X, 2 - y, groups=groups, **given)
    torch.testing.assert_close(ints.scores["accuracy"], runs[0].scores["accuracy"])


def test_constant_and_nearly_constant_features():
    """A bias of 25,000 beside a spread of 1, a constant, and one constant in a training fold."""
    X, y, groups = labelled(sites=(2,))
    X[..., 0] += 25_000.0
    X[..., 1] = 7.0
    X[:, 1, 2] = 0.0
    X[splits(y, groups)[0][1], 1, 2] = 1.0  # varies among held-out items of fold 0 only
    given = dict(groups=groups, folds=FOLDS, penalty=1.0, coefficients=True)
    for method in ("logistic", "least_squares"):
        exact = fit_probes(X, y, method=method, tolerance=1e-9, **given)
        found = fit_probes(X.float(), y, method=method, **given)
        for nothing in (exact.coefficients[..., 1], exact.coefficients[1, 0, :, 2]):
            assert float(nothing.abs().max()) < 1e-6  # the tolerance times C n
        assert float(exact.coefficients[1, 1, :, 2].abs().max()) > 1e-3
        accuracy = exact.scores["accuracy"]
        torch.testing.assert_close(found.scores["accuracy"], accuracy, atol=0.01, rtol=0)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("size", [0.3, 300.0])
def test_objective_and_gradient_are_those_of_autograd(classes, size):
    """Also where e to the scores would overflow."""
    X, y, _ = labelled(n=60, sites=(2,), classes=classes)
    generator = torch.Generator().manual_seed(1)
    rows = 1 if classes == 2 else classes
    theta = size * torch.randn(2, 2, rows, 8, generator=generator, dtype=torch.float64)
    mask = (torch.rand(2, 60, generator=generator) < 0.7).double()
    C = torch.tensor([[0.5, 2.0], [1.0, 3.0]], dtype=torch.float64)
    block = block_of(X, torch.float64)
    frame = frame_of(block, mask, True)
    problem = logistic.problem_of(block, mask, frame, y, classes, C)
    value, gradient = problem.value(theta)
    theta.requires_grad_(True)
    for site in range(2):
        for job in range(2):
            chosen = mask[job] > 0
            x = X[chosen, site]
            x = (x - x.mean(dim=0)) / x.std(dim=0, correction=0)
            scores = x @ theta[site, job, :, :-1].T + theta[site, job, :, -1]
            if rows == 1:
                scores = torch.cat([torch.zeros_like(scores), scores], dim=1)
            loss = torch.nn.functional.cross_entropy(scores, y[chosen])
            penalty = theta[site, job, :, :-1].square().sum() / (2 * C[site, job] * chosen.sum())
            expected = loss + penalty
            torch.testing.assert_close(value[site, job], expected.detach())
            (slope,) = torch.autograd.grad(expected, theta)
            torch.testing.assert_close(gradient[site, job], slope[site, job])


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("C", [1.0, 100.0])
def test_the_solver_looks_less_than_half_as_often_as_scipys(classes, C, monkeypatch):
    """At the objective and its gradient, on features of uneven scales that depend on another."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = normal(397, 29) @ (normal(29, 29) * torch.logspace(0, -2, 29).double()).T
    y = (x @ normal(29, classes) + 0.5 * normal(397, classes)).argmax(dim=1)
    block, mask = block_of(x[:, None], torch.float64), torch.ones(1, 397).double()
    given = block, mask, frame_of(block, mask, True), y, classes, torch.tensor([[C]]).double()
    problem = logistic.problem_of(*given)
    start = problem.without_features(mask.sum(dim=1))
    looks, real = [], logistic.Problem.value

    def value(self, theta):
        looks.append(theta)
        return real(self, theta)

    def flat(theta):
        found, gradient = problem.value(torch.from_numpy(theta).view(start.shape))
        return float(found), gradient.flatten().numpy()

    scipys = scipy.optimize.minimize(
        flat, start.flatten().numpy(), jac=True, method="L-BFGS-B",
        options={"gtol": 1e-6, "ftol": 0, "maxiter": 5000},
    )  # fmt: skip
    monkeypatch.setattr(logistic.Problem, "value", value)
    found = logistic.fit(*given, tolerance=1e-6, most_iterations=500)
    assert float(found.gradient.max()) <= 1e-6
    assert len(looks) < 0.4 * scipys.nfev
    assert flat(found.theta.flatten().numpy())[0] == pytest.approx(scipys.fun, rel=1e-6)


def test_wide_features_without_a_full_covariance(monkeypatch):
    X, y, groups = labelled(sites=(2,))
    given = dict(groups=groups, folds=FOLDS, penalty=1.0, tolerance=1e-9, coefficients=True)
    exact = fit_probes(X, y, **given)
    monkeypatch.setattr(logistic, "_WIDEST", 3)
    found = fit_probes(X, y, **given)
    assert bool(found.converged.all())
    torch.testing.assert_close(found.coefficients, exact.coefficients, rtol=1e-5, atol=1e-5)


def test_what_did_not_converge_is_said():
    X, y, _ = labelled(sites=(2,))
    with pytest.warns(UserWarning, match=r"2 of 2 sites .* stayed above 0.0001"):
        found = fit_probes(X, y, most_iterations=2, penalty=1.0)
    assert not found.converged.any() and not found.to_frame()["converged"].any()


def test_arguments_are_checked():
    X, y, groups = labelled(n=60, sites=(2,), classes=2)
    bad = X.clone()
    bad[17, 1, 3] = torch.nan
    with pytest.raises(InputError, match=r"`X` must be finite.*nan at site 1, item 17, feature 3"):
        fit_probes(bad, y)
    with pytest.raises(ShapeError, match=r"`y` must be of length 60.*\[59\]"):
        fit_probes(X, y[:-1])
    with pytest.raises(ShapeError, match=r"`groups` must be of length 60"):
        fit_probes(X, y, groups=groups[:-1])
    with pytest.raises(ShapeError, match=r"`X` must be \[item, site"):
        fit_probes(X[..., :0], y)
    with pytest.raises(ShapeError, match="2 different names"):
        fit_probes(X[:, None], y, site_axes=("layer",))
    with pytest.raises(ShapeError, match=r"`site_axes\['layer'\]` must be 2 different labels"):
        fit_probes(X, y, site_axes={"layer": [3, 3]})
    with pytest.raises(InputError, match=r"`y` must be of at least two classes.*\[1\]"):
        fit_probes(X, torch.ones(60, dtype=torch.long))
    with pytest.raises(InputError, match=r"`y` must be ints or strings. Got 0.5"):
        fit_probes(X, [0.5] * 60)
    with pytest.raises(InputError, match="all ints or all strings"):
        fit_probes(X, ["a"] * 30 + [1] * 30)
    few = ["rare"] * 3 + ["common"] * 57
    with pytest.raises(InputError, match=r"at least 5 items \(folds\) a class. Got {'rare': 3}"):
        fit_probes(X, few)
    with pytest.raises(InputError, match="`penalty`, or fewer `inner_folds`"):
        fit_probes(X, ["rare"] * 5 + ["common"] * 55, inner_folds=5)
    with pytest.raises(InputError, match=r"at least 5 groups. Got 4"):
        fit_probes(X, y, groups=torch.arange(60) % 4)
    one = torch.where(y == 1, 0, torch.arange(60))
    with pytest.raises(InputError, match=r"such that no class is one group. Got {'1': "):
        fit_probes(X, y, groups=one)
    with pytest.raises(InputError, match="`folds` must be at least 2"):
        fit_probes(X, y, folds=1)
    with pytest.raises(InputError, match=r"`penalty` must be above 0 \(C\). Got 0.0"):
        fit_probes(X, y, penalty=0)
    with pytest.raises(InputError, match=r"from 0 to 1 \(shrinkage\). Got 2.0"):
        fit_probes(X, y, penalty=2, method="lda")
    with pytest.raises(InputError, match="left out for mean_difference"):
        fit_probes(X, y, penalty=2, method="mean_difference")
    with pytest.raises(InputError, match="without a penalty nothing is fixed"):
        fit_probes(torch.cat([X, X], dim=-1), y, penalty=0.0, method="lda")
    with pytest.raises(InputError, match="'logistic'"):
        fit_probes(X, y, method="logit")
    with pytest.raises(InputError, match="needs no probabilities"):
        fit_probes(X, y, method="least_squares", score="cross_entropy")
    with pytest.raises(InputError, match="`n_permutations` must be an int of 0 or more"):
        fit_probes(X, y, n_permutations=-1)


def test_a_training_set_without_a_class_is_refused():
    """Two groups hold the class, and both can fall into one fold."""
    X, _, _ = labelled(n=60, sites=(2,), classes=2)
    groups = torch.arange(60) // 6
    y = ((groups == 3) | (groups == 4)).long() * (torch.arange(60) % 2)
    with pytest.raises(InputError, match=r"no item of 1 in the training set of (inner )?fold"):
        for seed in range(20):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fit_probes(X, y, groups=groups, folds=3, seed=seed, description_length=False)


def test_frame_figure_and_file(tmp_path):
    X, y, groups = labelled()
    found = fit_probes(
        X,
        y,
        groups=groups,
        folds=FOLDS,
        n_permutations=30,
        method="lda",
        site_axes={"layer": [3, 14], "kv_head": range(3)},
        references={"shifted": X[:, :, :1].roll(1, dims=0)},
        coefficients=True,
        predictions=True,
    )
    frame = found.to_frame()
    excess = [
        f"excess_{name}{end}"
        for name in ("shifted", "majority")
        for end in ("", "_low", "_high", "_p")
    ]
    tests = ["trace", "p", "q", "p_family", "converged", "penalty"]
    assert list(frame.columns) == ["layer", "kv_head", "score", "low", "high", *excess, *tests]
    assert len(frame) == 6
    assert frame["layer"].tolist() == [3, 3, 3, 14, 14, 14]
    row = frame[(frame["layer"] == 14) & (frame["kv_head"] == 2)].iloc[0]
    assert row["score"] == float(found.scores["accuracy"][1, 2])
    assert row["excess_shifted"] == pytest.approx(
        row["score"] - float(found.reference_scores["shifted"][1, 2])
    )
    assert bool((frame["low"] < frame["score"]).all() & (frame["score"] < frame["high"]).all())
    assert set(found.scores_frame()["measure"]) == set(found.scores)
    confused = found.confusion_frame()
    assert confused["items"].sum() == 6 * len(y) and len(confused) == 6 * 25
    assert set(found.references_frame()["reference"]) == {"shifted", "majority"}
    best = found.best(1, by="shifted").iloc[0]
    title = found.figure().layout.title.text
    assert f"Layer {best['layer']:.0f}, kv head {best['kv_head']:.0f}" in title
    assert f"{best['excess_shifted']:+.3f} over shifted" in title
    heat = found.figure().data[1]
    assert list(heat.x) == ["3", "14"] and list(heat.y) == ["0", "1", "2"]
    assert heat.zmin == -heat.zmax and heat.z[2][1] == pytest.approx(row["excess_shifted"])
    back = Result.load(found.save(tmp_path))
    assert isinstance(back, ProbeResult)
    assert torch.equal(back.excess["shifted"], found.excess["shifted"])
    assert back.classes == found.classes and torch.equal(back.predictions, found.predictions)
    assert back.to_frame().equals(frame)


def test_figures_of_one_axis_and_of_one_site():
    X, y, groups = labelled(sites=(3,))
    given = dict(groups=groups, folds=FOLDS, penalty=1.0, description_length=False)
    found = fit_probes(X, y, references={"first": X[:, 0]}, **given)
    drawn = found.figure()
    assert list(drawn.data[0].y) == found.scores["accuracy"].tolist()
    assert list(drawn.data[1].y) == found.excess["first"].tolist()
    assert "Site" in drawn.layout.title.text
    alone = fit_probes(X[:, 1], y, references={"first": X[:, 0]}, **given)
    assert list(alone.to_frame().columns)[0] == "score" and len(alone.to_frame()) == 1
    assert list(alone.figure().data[0].x) == ["first", "majority"]
    three = fit_probes(X[:, :2, None, None], y, **given)
    assert three.axes() == ("site_0", "site_1", "site_2")
    assert "over majority" in three.figure().layout.title.text


def test_provenance_tells_features_and_labels_from_others():
    x, y = torch.randn(40, 2, 5, generator=torch.Generator().manual_seed(0)), [0, 1] * 20
    given = {"method": "mean_difference", "description_length": False}
    settings = [
        fit_probes(a, b, **given).provenance.settings
        for a, b in ((x, y), (x.clone(), y), (x.flip(0), y), (x, y[::-1]))
    ]
    for name, changed in (("features", 2), ("labels", 3)):
        found = [each[name] for each in settings]
        assert [one == found[0] for one in found] == [number != changed for number in range(4)]
