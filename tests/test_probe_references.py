"""References, permutations and the online code: known answers, brute force, and the null."""

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from wvprobe.errors import InputError, ShapeError
from wvprobe.probes import (
    FeatureDraws,
    complement,
    control_task,
    fit_probes,
    fitting,
    haar_complements,
    haar_projections,
    online,
    permutation,
    reference_scores,
    scores,
    top_components,
    within_strata,
)
from wvprobe.probes.references import haar_frames
from wvprobe.probes.sources import as_sites

QUICK = dict(penalty=0.1, description_length=False, method="lda")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def task(n=240, sites=(2, 3), width=5, d_model=17, seed=0):
    """Return an input, heads that read it, and labels that lie along one of its directions."""
    x = normal(n, d_model, seed=seed)
    heads = normal(*sites, d_model, width, seed=seed + 1)
    y = (x[:, 0] + 0.5 * normal(n, seed=seed + 2) > 0).long()
    return x, torch.einsum("nd,...dw->n...w", x, heads), y, heads


def test_excess_is_the_paired_difference():
    x, X, y, _ = task()
    given = dict(**QUICK, site_axes=("layer", "head"))
    found = fit_probes(X, y, references={"input": x, "first": X[:, :, :1], "same": X}, **given)
    alone = fit_probes(x, y, **QUICK)
    torch.testing.assert_close(
        found.excess["input"], found.scores["accuracy"] - alone.scores["accuracy"]
    )
    # A reference with a head axis of length 1 is each layer's own.
    torch.testing.assert_close(
        found.excess["first"],
        found.scores["accuracy"] - found.scores["accuracy"][:, :1],
    )
    for part in (found.excess, found.excess_low, found.excess_high):
        assert not part["same"].any()  # paired: the same predictions leave nothing to doubt
        assert not part["first"][:, 0].any()
    assert bool((found.excess_p["same"] == 1).all())
    # McNemar's variance of a paired difference, and not the sum of two; folds overlap (1.5).
    better = (found.scores["accuracy"] > found.reference_scores["majority"]).double()
    assert torch.equal(found.beaten["majority"], better) and better.any()
    predicted = [fit_probes(f, y, predictions=True, **QUICK).predictions for f in (X[:, 1, 2], x)]
    difference = (predicted[0] == y).double() - (predicted[1] == y).double()
    width = 1.5 * 2 * 1.96 * float(difference.std()) / len(y) ** 0.5
    measured = found.excess_high["input"] - found.excess_low["input"]
    assert float(measured[1, 2]) == pytest.approx(width, rel=0.12)


@pytest.mark.parametrize("score", ["balanced_accuracy", "macro_f1", "cross_entropy"])
def test_other_scores_are_held_against_references_too(score):
    x, X, y, _ = task()
    found = fit_probes(X, y, references={"input": x}, score=score, **QUICK)
    alone = fit_probes(x, y, **QUICK)
    sign = -1 if score == "cross_entropy" else 1
    expected = sign * (found.scores[score] - alone.scores[score])
    torch.testing.assert_close(found.excess["input"], expected)
    assert bool((found.excess["input"] < 0).all())  # less than the input itself: no site adds
    assert bool((found.excess_low["input"] <= found.excess["input"]).all())
    shares = torch.bincount(y) / len(y)
    if score == "cross_entropy":
        entropy = float(-(shares * shares.log2()).sum())
        assert float(found.reference_scores["majority"][0, 0]) == pytest.approx(entropy, abs=0.01)


def test_random_draws_are_averaged():
    x, X, y, _ = task()
    reference = haar_projections(x, 5, draws=4, seed=3)
    found = fit_probes(X, y, references={"haar": reference}, **QUICK)
    one_by_one = [
        fit_probes(reference.make(draw), y, **QUICK).scores["accuracy"] for draw in range(4)
    ]
    mean = torch.stack(one_by_one).mean()
    torch.testing.assert_close(found.reference_scores["haar"], mean.expand(2, 3))
    torch.testing.assert_close(found.excess["haar"], found.scores["accuracy"] - mean)
    beaten = [float(found.scores["accuracy"][1, 1] > one) for one in one_by_one]
    assert float(found.beaten["haar"][1, 1]) == pytest.approx(sum(beaten) / 4)
    again = fit_probes(X, y, references={"haar": haar_projections(x, 5, draws=4, seed=3)}, **QUICK)
    assert torch.equal(again.excess["haar"], found.excess["haar"])

    class Plain:
        draws = 2

        def __call__(self, draw):
            return reference.make(draw)

    plain = fit_probes(X, y, references={"plain": Plain()}, **QUICK)
    torch.testing.assert_close(
        plain.reference_scores["plain"], torch.stack(one_by_one[:2]).mean().expand(2, 3)
    )


def test_an_excess_over_draws_is_as_wide_as_one_more_draw():
    """Student's t of m − 1 degrees of freedom times s √(1 + 1/m), as SciPy has it."""
    m = 5
    of_draws = normal(m, 2, seed=3)
    sure = scores.Sampled(torch.tensor([0.3, -0.1]).double(), torch.zeros(40_000, 2).double())
    found = scores.against_a_draw(sure, of_draws, seed=0).draws
    for site in range(2):
        width = float(of_draws[:, site].std()) * (1 + 1 / m) ** 0.5
        for share in (0.75, 0.95):
            expected = width * scipy.stats.t.ppf(share, m - 1)
            assert float(found[:, site].quantile(share)) == pytest.approx(expected, rel=0.03)


def test_haar_frames_are_orthonormal_and_uniform():
    x = normal(3, 4, 2, 7)
    frames = torch.stack([haar_frames(x, 3, 0, draw) for draw in range(500)])
    assert frames.shape == (500, 4, 2, 7, 3)
    gram = frames.mT @ frames
    torch.testing.assert_close(gram, torch.eye(3).double().expand_as(gram), atol=1e-5, rtol=0)
    projections = (frames @ frames.mT).flatten(0, 2).mean(dim=0)
    torch.testing.assert_close(projections, 3 / 7 * torch.eye(7).double(), atol=0.03, rtol=0)
    assert float(frames.mean().abs()) < 0.01  # QR's own signs would lean to one side
    assert not torch.equal(frames[0, 0, 0], frames[0, 1, 0])


def test_top_components_are_fitted_on_training_items_alone(monkeypatch):
    x, X, y, _ = task()
    x = x * torch.logspace(1, -1, 17)
    given = dict(penalty=1.0, description_length=False, predictions=True, tolerance=1e-8)
    found = fit_probes(X, y, references={"pca": top_components(x, 4)}, **given)
    right, bits = 0, 0.0
    for fold in range(5):
        train, test = found.fold != fold, found.fold == fold
        components = PCA(4, svd_solver="full").fit(x[train])
        scaler = StandardScaler().fit(components.transform(x[train]))
        model = LogisticRegression(tol=1e-8, max_iter=10_000)
        model.fit(scaler.transform(components.transform(x[train])), y[train])
        predicted = model.predict(scaler.transform(components.transform(x[test])))
        right += (predicted == y[test].numpy()).sum()
        said = model.predict_proba(scaler.transform(components.transform(x[test])))
        bits -= np.log2(said[np.arange(len(said)), y[test]]).sum()
    assert float(found.reference_scores["pca"][0, 0]) == pytest.approx(right / len(y))
    by_site = top_components(x[:, None, None].expand(-1, 2, 1, -1), 4)
    again = fit_probes(X, y, references={"pca": by_site}, **given)
    torch.testing.assert_close(again.reference_scores["pca"], found.reference_scores["pca"])
    monkeypatch.setattr(reference_scores, "TOGETHER", 1)  # site by site
    again = fit_probes(X, y, references={"pca": by_site}, score="cross_entropy", **given)
    expected = torch.full((2, 3), bits / len(y), dtype=torch.float64)
    torch.testing.assert_close(again.reference_scores["pca"], expected, rtol=1e-4, atol=1e-4)


def test_what_a_map_drops_against_what_random_maps_drop():
    """Labels along one direction: a head that reads just that one leaves less than a random one."""
    x, _, y, heads = task(n=600)
    weight = heads[:1, :1].clone()
    weight[0, 0, :, 0] = torch.eye(17)[0].double()
    dropped = complement(x[:, None, None], weight)
    assert dropped.shape == (600, 1, 1, 12)
    kept = x @ torch.linalg.pinv(weight[0, 0]).mT @ weight[0, 0].mT  # the projection on W's columns
    square = dropped[:, 0, 0].square().sum(dim=-1)
    torch.testing.assert_close(square, (x - kept).square().sum(dim=-1))
    reference = {"random": haar_complements(x[:, None, None], 5, draws=6)}
    found = fit_probes(dropped, y, references=reference, **QUICK)
    assert float(found.excess_high["random"][0, 0]) < -0.1
    assert float(found.scores["accuracy"][0, 0]) == pytest.approx(0.5, abs=0.08)
    other = complement(x[:, None, None], heads[1:, 1:2])
    usual = fit_probes(other, y, references=reference, **QUICK)
    assert abs(float(usual.excess["random"][0, 0])) < 0.1
    with pytest.raises(InputError, match="full column rank"):
        complement(x, torch.cat([heads[0, 0], heads[0, 0, :, :1]], dim=-1))
    with pytest.raises(InputError, match="`weight` must be at most 16"):
        complement(x, torch.eye(17).double())


def test_the_control_task_takes_off_what_is_learnt_by_heart():
    """Features that name the word type: any labelling of types is as easy as the real one."""
    generator = torch.Generator().manual_seed(0)
    types = torch.randint(12, (480,), generator=generator)
    y = (types % 3 == 0).long()
    embedding = normal(12, 12)
    X = (embedding[types] + 0.1 * normal(480, 12, seed=4))[:, None]
    control = control_task(types.tolist(), y.tolist())
    found = fit_probes(X, y, references={"control": control}, **QUICK)
    assert float(found.scores["accuracy"][0]) > 0.97
    assert abs(float(found.excess["control"][0])) < 0.03
    labels = torch.tensor(control.make(1))
    assert all(len(set(labels[types == k].tolist())) == 1 for k in range(12))
    assert labels.tolist() == control.make(1) != control.make(0)
    # Features that carry the property and nothing else of the type keep their score.
    carried = (y[:, None] + 0.2 * normal(480, 3, seed=5))[:, None]
    selective = fit_probes(carried, y, references={"control": control}, **QUICK)
    assert float(selective.excess_low["control"][0]) > 0.03
    with pytest.raises(InputError, match="some type occurs twice"):
        control_task(list(range(9)), [0, 1] * 4 + [0])


def test_labels_permuted_within_strata_keep_what_strata_carry():
    strata = torch.arange(400) % 4
    y = (torch.rand(400, generator=torch.Generator().manual_seed(1)) < 0.2 + 0.2 * strata).long()
    drawn = within_strata(y.tolist(), strata.tolist(), draws=2)
    labels = torch.tensor(drawn.make(0))
    assert labels.tolist() != y.tolist()
    for stratum in range(4):
        at = strata == stratum
        assert int(labels[at].sum()) == int(y[at].sum())
    X = torch.nn.functional.one_hot(strata, 4).double()[:, None] + 0.1 * normal(400, 1, 4)
    found = fit_probes(X, y, references={"within": drawn}, **QUICK)
    assert abs(float(found.excess["within"][0])) < 0.05 < float(found.excess["majority"][0])
    with pytest.raises(InputError, match="of several classes"):
        within_strata(strata.tolist(), strata.tolist())


@pytest.mark.slow
def test_no_head_beats_its_references_on_shuffled_labels():
    """Family-wise: in no more than 5 % of the worlds does any head get p < .05."""
    worlds, found = 60, {"haar": 0, "majority": 0, "permutation": 0}
    for world in range(worlds):
        x, X, y, _ = task(n=160, sites=(8,), seed=10 * world)
        y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(world))]
        result = fit_probes(
            X,
            y,
            references={"haar": haar_projections(x, 5, draws=4, seed=world)},
            n_permutations=39,
            seed=world,
            **QUICK,
        )
        for name in ("haar", "majority"):
            found[name] += bool((result.excess_p[name] <= 0.05).any())
        found["permutation"] += bool((result.p_family <= 0.05).any())
    most = scipy.stats.binom.ppf(0.999, worlds, 0.05)
    assert all(count <= most for count in found.values()), found
    # And it does find a head that holds what random directions of its input hardly do.
    x, X, y, _ = task(n=400, sites=(8,), d_model=61)
    X[:, 3, 2] = x[:, 0]
    result = fit_probes(X, y, references={"haar": haar_projections(x, 5, draws=4)}, **QUICK)
    assert (result.excess_p["haar"] < 0.01).nonzero().flatten().tolist() == [3]


def test_references_are_checked():
    x, X, y, _ = task()
    for wrong in (x[:-1], X[:, :, :2], X[:, 0], x.sum(dim=-1)):
        with pytest.raises(ShapeError, match=r"references\['r'\]"):
            fit_probes(X, y, references={"r": wrong}, **QUICK)
    for wrong in (lambda draw: x, "x", 3):
        with pytest.raises(InputError, match="features, FeatureDraws, FoldFeatures or OtherLabels"):
            fit_probes(X, y, references={"r": wrong}, **QUICK)
    with pytest.raises(InputError, match="finite"):
        fit_probes(X, y, references={"r": x * torch.nan}, **QUICK)
    with pytest.raises(InputError, match="without the name 'majority'"):
        fit_probes(X, y, references={"majority": x}, **QUICK)
    with pytest.raises(InputError, match=r"draws` must be an int of at least 1"):
        fit_probes(X, y, references={"r": FeatureDraws(lambda draw: x, 0)}, **QUICK)
    with pytest.raises(InputError, match="`width` must be at most 17"):
        haar_projections(x, 18)
    with pytest.raises(InputError, match="`rank` must be at most 16"):
        haar_complements(x, 17)


# Permutations


def pillai(x, y):
    """By the definition: tr H (H + E)⁻¹."""
    x = x - x.mean(axis=0)
    total = x.T @ x
    between = sum(
        (y == k).sum() * np.outer(x[y == k].mean(axis=0), x[y == k].mean(axis=0))
        for k in np.unique(y)
    )
    return np.trace(between @ np.linalg.pinv(total))


def test_pillais_trace_of_every_labelling(monkeypatch):
    _, X, _, _ = task(n=90)
    X[:, 0, 1, 4] = X[:, 0, 1, 0] - X[:, 0, 1, 1]  # rank 4
    X[:, 1, 1] = 0.0
    X[:, 1, 2] += 1e4
    y = torch.arange(90) % 4
    y[:20] = 1
    groups = torch.arange(90)
    shuffles = permutation.shuffled(y, groups, False, None, "auto", 17, seed=2)
    monkeypatch.setattr(permutation, "_NUMBERS", 90 * 4 * 5)  # five labellings at a time
    found = permutation.pillai_test(as_sites(X), shuffles, 4, torch.float64)
    traces = np.array(
        [
            [pillai(X.flatten(1, 2)[:, site].numpy(), row.numpy()) for row in shuffles.y]
            for site in range(6)
        ]
    )
    np.testing.assert_allclose(found.trace, traces[:, 0], atol=1e-9)
    np.testing.assert_allclose(found.p, (traces >= traces[:, :1] - 1e-9).mean(axis=1))
    deviation = np.where(traces.std(axis=1) > 0, traces.std(axis=1), 1.0)
    z = (traces - traces.mean(axis=1, keepdims=True)) / deviation[:, None]
    np.testing.assert_allclose(found.p_family, (z.max(axis=0) >= z[:, :1] - 1e-9).mean(axis=1))
    assert float(found.p[4]) == 1.0  # features that are all 0
    single = permutation.pillai_test(as_sites(X.float()), shuffles, 4, torch.float32)
    torch.testing.assert_close(single.trace, found.trace, atol=1e-4, rtol=0)


def test_p_is_uniform_without_a_connection_and_small_with_one():
    X = normal(80, 400, 3)
    y = torch.arange(80) % 3
    X[:, 0] += 1.5 * (y == 1)[:, None]
    found = fit_probes(X, y, n_permutations=199, **QUICK)
    assert float(found.p[0]) == 1 / 200 and float(found.p_family[0]) <= 2 / 200
    assert scipy.stats.kstest(found.p[1:].numpy(), "uniform").pvalue > 0.001
    assert float(found.p.min()) >= 1 / 200 and bool((found.q >= found.p).all())
    assert bool((found.p_family >= found.p - 1e-12).all())
    # MANOVA's F approximation (Pillai 1955), s = 2, m = 0, t = (80 − 3 − 3 − 1) / 2.
    trace, s, m, t = found.trace.numpy(), 2, 0.0, (80 - 3 - 3 - 1) / 2
    f = trace / (s - trace) * (2 * t + s + 1) / (2 * m + s + 1)
    expected = scipy.stats.f.sf(f, s * (2 * m + s + 1), s * (2 * t + s + 1))
    assert float(np.corrcoef(found.p.numpy()[1:], expected[1:])[0, 1]) > 0.99
    assert abs(found.p.numpy()[1:] - expected[1:]).max() < 0.15
    plain = fit_probes(X, y, **QUICK)
    assert plain.p is None and "p" not in plain.to_frame()


def test_labels_constant_within_groups_move_as_groups():
    groups = torch.arange(60) // 3
    y = (groups % 4 == 0).long()
    shuffles = permutation.shuffled(y, groups, True, None, "auto", 25, seed=0)
    assert shuffles.unit == "groups"
    for row in shuffles.y:
        assert bool((row.view(20, 3) == row.view(20, 3)[:, :1]).all())
        assert int(row.sum()) == int(y.sum())
    assert len({tuple(row.tolist()) for row in shuffles.y}) > 20
    for unit in ("items", "within_groups"):
        with pytest.raises(InputError, match="permutation_test_score"):
            permutation.shuffled(y, groups, True, None, unit, 5, seed=0)


def test_permuting_groups_keeps_to_the_level():
    """Features shared within groups: exchanged items find 'connections' that are none."""
    rejected = {"groups": 0, "items": 0}
    for world in range(60):
        groups = torch.arange(120) // 6
        y = (torch.arange(20) % 2)[torch.randperm(20, generator=_seeded(world))][groups]
        X = (
            normal(20, 1, 2, seed=world)[groups] + 0.3 * normal(120, 1, 2, seed=world + 99)
        ).float()
        for unit in rejected:
            # With one group an item, what the constant labels would have forbidden goes through.
            own = groups if unit == "groups" else torch.arange(120)
            shuffles = permutation.shuffled(y, own, unit == "groups", None, unit, 39, seed=world)
            p = permutation.pillai_test(as_sites(X), shuffles, 2, torch.float32).p
            rejected[unit] += float(p[0]) <= 0.05
    assert rejected["groups"] <= scipy.stats.binom.ppf(0.999, 60, 0.05) < rejected["items"]


def _seeded(seed):
    return torch.Generator().manual_seed(seed)


def test_labels_are_permuted_within_strata_and_groups():
    y = torch.tensor([0, 1, 0, 1, 0, 1, 1, 1, 0, 0, 1, 0])
    strata = torch.tensor([0, 1] * 6)
    own = torch.arange(12)
    shuffles = permutation.shuffled(y, own, False, strata, "auto", 50, seed=1)
    for row in shuffles.y:
        for stratum in (0, 1):
            at = strata == stratum
            assert sorted(row[at].tolist()) == sorted(y[at].tolist())
    assert torch.equal(shuffles.y[0], y) and len(torch.unique(shuffles.y, dim=0)) > 20
    many = torch.arange(129)  # one class more than a byte has
    assert int(permutation.shuffled(many, many, False, None, "auto", 3, seed=1).y.min()) == 0
    once = permutation.shuffled(y, own, False, None, "auto", 1, seed=1)
    assert once.y.shape == (2, 12) and not torch.equal(once.y[0], once.y[1])
    groups = torch.arange(12) // 4
    inside = permutation.shuffled(y, groups, True, None, "within_groups", 50, seed=1)
    for row in inside.y:
        assert bool((row.view(3, 4).sum(dim=1) == y.view(3, 4).sum(dim=1)).all())
    with pytest.raises(InputError, match="a unit with one label"):
        permutation.shuffled(y, groups, True, None, "groups", 5, seed=0)
    with pytest.raises(InputError, match="such that labels can be permuted"):
        permutation.shuffled(y, own, False, y, "auto", 5, seed=0)
    with pytest.raises(InputError, match="constant within each group"):
        permutation.shuffled(y[groups], groups, True, strata, "groups", 5, seed=0)
    with pytest.raises(InputError, match="'within_groups'"):
        permutation.shuffled(y, own, False, None, "within_group", 5, seed=0)


# Online code


def test_code_length_by_hand():
    """Every block sent by scikit-learn's probe of the blocks before, (t p + ½) / (t + K/2)."""
    _, X, y, _ = task(n=400, sites=(2,))
    y = y + (X[:, 0, 1] > 1).long() * 2
    y[y == 3] = 2
    found = fit_probes(X, y, penalty=0.5, tolerance=1e-8, seed=4)
    order = online.order_of(torch.arange(400), 400, 4)
    assert order.ends == (1, 2, 4, 7, 13, 25, 50, 100, 200, 400)
    items = order.items.numpy()
    for site in range(2):
        bits = np.log2(3) * order.ends[0]
        for start, end in zip(order.ends, order.ends[1:], strict=False):
            past, new = items[:start], items[start:end]
            scaler = StandardScaler().fit(X[past, site])
            seen = np.unique(y[past])
            p = np.zeros((len(new), 3))
            if len(seen) == 1:
                p[:, seen[0]] = 1.0
            else:
                model = LogisticRegression(C=0.5, tol=1e-8, max_iter=10_000)
                model.fit(scaler.transform(X[past, site]), y[past])
                p[:, seen] = model.predict_proba(scaler.transform(X[new, site]))
            own = p[np.arange(len(new)), y[new]]
            bits -= np.log2((start * own + 0.5) / (start + 1.5)).sum()
        length = float(found.scores["description_length"][site])
        # With classes unseen so far, two classes here are a softmax of three rows there.
        assert length == pytest.approx(bits, rel=0.03)
        compression = float(found.scores["compression"][site])
        assert compression == pytest.approx(400 * np.log2(3) / length)
    low, high = found.low["compression"], found.high["compression"]
    assert bool(
        (low < found.scores["compression"]).all() & (found.scores["compression"] < high).all()
    )


@pytest.mark.parametrize("method", ["logistic", "lda"])
def test_labels_that_features_know_nothing_of_cost_their_entropy(method):
    generator = torch.Generator().manual_seed(2)
    y = (torch.rand(1500, generator=generator) < 0.1).long()
    X = normal(1500, 2, 3)
    given = dict(penalty=0.9) if method == "lda" else dict(penalty=1e-4)
    found = fit_probes(X, y, method=method, **given)
    share = float(y.double().mean())
    entropy = -1500 * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    lengths = found.scores["description_length"]
    # Sent in blocks of a doubling past: a tenth more than the entropy, not less than it.
    assert bool((lengths > 0.98 * entropy).all() & (lengths < 1.15 * entropy).all())
    if method == "logistic":
        X[:, 0, 0] = y.double() + 0.01 * X[:, 0, 0]
        known = fit_probes(X, y, method=method)
        assert float(known.scores["description_length"][0]) < 0.35 * entropy
        assert float(known.scores["compression"][0]) > 4


def test_the_code_never_splits_a_group():
    groups = torch.randint(40, (300,), generator=_seeded(0)).unique(return_inverse=True)[1]
    count = int(groups.max()) + 1
    order = online.order_of(groups, count, 0)
    assert sorted(order.items.tolist()) == list(range(300)) and order.ends[-1] == 300
    for end in order.ends:
        before = set(groups[order.items[:end]].tolist())
        assert not before & set(groups[order.items[end:]].tolist())
    wanted = [fraction * 300 for fraction in online.FRACTIONS]
    assert all(any(end >= w for end in order.ends) for w in wanted)
    assert online.order_of(groups, count, 1).items.tolist() != order.items.tolist()


def test_the_penalty_of_the_code_is_chosen_by_the_past():
    """A grid costs little more than its best member does, which only hindsight knows."""
    _, X, y, _ = task(n=300, sites=(3,))
    grid = (1e-3, 1.0)
    both = fit_probes(X, y, penalties=grid).scores["description_length"]
    each = torch.stack([fit_probes(X, y, penalty=C).scores["description_length"] for C in grid])
    assert bool((both <= 1.15 * each.amin(dim=0)).all())


@pytest.mark.parametrize(("method", "grid"), [("logistic", (1e-3, 1.0)), ("lda", (0.05, 0.9))])
def test_each_block_is_sent_with_what_had_sent_those_before(method, grid):
    """The first with the strongest: the smallest C, the largest shrinkage."""
    _, X, y, _ = task(n=300, sites=(3,))
    order = online.Order(torch.randperm(300, generator=_seeded(4)), (20, 40, 80, 160, 300))

    def lengths(*penalties):
        settings = fitting.Settings(method, penalties, True, 1e-6, 500, torch.float64)
        return torch.cat(list(online.code_lengths(as_sites(X), y, 2, order, settings)))

    found, each = lengths(*grid), torch.stack([lengths(penalty) for penalty in grid])
    spent = torch.zeros(2, 3, dtype=torch.float64)
    spent[0 if method == "lda" else 1] = 1e-3  # before anything is sent, the strongest leads
    chosen = set()
    for start, end in zip(order.ends, order.ends[1:], strict=False):
        items = order.items[start:end]
        for site, place in enumerate(spent.argmin(dim=0).tolist()):
            both = each[:, site, items]
            torch.testing.assert_close(found[site, items], both[place], atol=1e-5, rtol=1e-4)
            assert (both[0] - both[1]).abs().max() > 0.01
            chosen.add(place)
        spent = spent * (start > order.ends[0]) + each[:, :, items].sum(dim=-1)
    assert chosen == {0, 1}


def test_half_precision_is_raised_and_references_keep_their_own():
    x, X, y, _ = task()
    half = X.to(torch.bfloat16)
    given = dict(references={"input": x, "haar": haar_projections(x.half(), 5, draws=2)}, **QUICK)
    found = fit_probes(half, y, **given)
    assert found.provenance.settings["dtype"] == "torch.float32"
    exact = fit_probes(half.double(), y, **given)
    for name in ("input", "haar", "majority"):
        torch.testing.assert_close(
            found.reference_scores[name], exact.reference_scores[name], atol=0.01, rtol=0
        )
    torch.testing.assert_close(
        found.scores["accuracy"], exact.scores["accuracy"], atol=0.01, rtol=0
    )
