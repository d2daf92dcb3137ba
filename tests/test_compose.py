"""Composition against dense products, TransformerLens, known circuits and known nulls."""

from dataclasses import replace

import pytest
import scipy.stats
import torch

from wvprobe import compose
from wvprobe._statistics import benjamini_hochberg
from wvprobe._types import Result
from wvprobe.compose import composition
from wvprobe.errors import InputError, ShapeError
from wvprobe.heads import HeadWeights
from wvprobe.testing import FAMILIES, induction_model, tiny_model

HELD = [family for family in FAMILIES if family != "deepseek_v3"]
MODES = ("Q", "K", "V")


def random_heads(layers, n, kv, d, r, r_v, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return HeadWeights.from_tensors(
        W_Q=normal(layers, n, d, r),
        W_K=normal(layers, kv, d, r),
        W_V=normal(layers, kv, d, r_v),
        W_O=normal(layers, n, r_v, d),
    )


def read_by(heads, mode, layer, head, offset=None):
    if mode == "V":
        return written_by(heads, layer, head)
    matrix = heads.qk(layer, head, offset=offset).matrix()
    return matrix if mode == "Q" else matrix.T


def written_by(heads, layer, head):
    matrix = heads.ov(layer, head).matrix()
    norm = heads.post_norms[layer]
    return matrix * norm.gain if norm is not None and heads.folded else matrix


def dense(heads, mode, offset=None, root=None):
    """All pairs, possible or not, one at a time."""
    at = [(layer, head) for layer in range(heads.n_layers) for head in range(heads.n_heads)]
    scores = []
    for writer in at:
        ov = written_by(heads, *writer)
        ov = ov if root is None else root[writer[0]].T @ ov
        row = []
        for reader in at:
            m = read_by(heads, mode, *reader, offset)
            row.append((ov @ m).norm() / ov.norm() / m.norm())
        scores.append(torch.stack(row))
    return torch.stack(scores).view(*(heads.n_layers, heads.n_heads) * 2)


def all_scores(result):
    return torch.where(result.impossible.isnan(), result.scores, result.impossible)


@pytest.fixture(params=["cores", "grams"])
def way(request, monkeypatch):
    monkeypatch.setattr(compose, "prefer_grams", lambda *_: request.param == "grams")


@pytest.mark.parametrize("family", HELD)
def test_equal_to_dense_on_every_family(family):
    heads = HeadWeights.from_model(tiny_model(family, dtype="float64"))
    for mode, offset in (("Q", 3), ("K", None), ("K", -2), ("V", 0)):
        found = composition(heads, mode, offset=offset)
        expected = dense(heads, mode, offset)
        torch.testing.assert_close(all_scores(found), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_both_ways_and_small_blocks(mode, way, monkeypatch):
    heads = random_heads(3, 6, 2, 23, 5, 7)
    expected = dense(heads, mode)
    whole = composition(heads, mode)
    torch.testing.assert_close(all_scores(whole), expected, rtol=1e-9, atol=1e-9)
    monkeypatch.setattr(compose, "_READER_NUMBERS", 1)
    monkeypatch.setattr(compose, "_WRITER_NUMBERS", 1)
    torch.testing.assert_close(composition(heads, mode).scores, whole.scores)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "bert"])
def test_equal_to_transformer_lens(family, mode, tiny, way):
    model = tiny(family)
    heads = HeadWeights.from_model(model, fold_norm=False)
    found = composition(heads, mode, offset=None).scores
    expected = model.all_composition_scores(mode).scores
    assert expected.max() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_unless_told_otherwise_a_token_meets_itself(tiny):
    heads = HeadWeights.from_model(tiny("llama"))
    found = composition(heads, "K").scores
    torch.testing.assert_close(found, composition(heads, "K", offset=None).scores)
    assert (found - composition(heads, "K", offset=1).scores).abs().max() > 1e-3


def test_a_head_wider_than_the_stream_and_single_ones():
    heads = random_heads(2, 1, 1, 5, 7, 11)
    for mode in MODES:
        torch.testing.assert_close(all_scores(composition(heads, mode)), dense(heads, mode))
    alone = composition(random_heads(1, 1, 1, 5, 3, 2), "K")
    assert alone.scores.shape == (1, 1, 1, 1) and alone.n_references == (0,)
    assert len(alone.to_frame()) == len(alone.top(3)) == 0
    assert "One layer" in alone.figure().layout.title.text


@pytest.mark.parametrize("mode", MODES)
def test_scale_of_a_heads_weights_is_of_no_account(mode):
    """Field line 4. Squares of these scales over- and underflow in single precision."""
    heads = random_heads(3, 4, 2, 17, 3, 5, dtype=torch.float32)
    scaled = {}
    for place, name in enumerate(("W_Q", "W_K", "W_V", "W_O")):
        weight = getattr(heads, name)
        powers = torch.randint(
            -20, 21, weight.shape[:2], generator=torch.Generator().manual_seed(place)
        )
        scaled[name] = weight * (10.0**powers)[:, :, None, None]
    found, expected = composition(replace(heads, **scaled), mode), composition(heads, mode)
    for name in ("scores", "z", "p_values", "impossible"):
        torch.testing.assert_close(
            getattr(found, name), getattr(expected, name), rtol=2e-3, atol=1e-6, equal_nan=True
        )


@pytest.mark.parametrize("mode", MODES)
def test_half_precision_weights_are_upcast(mode):
    heads = random_heads(2, 4, 2, 17, 3, 5, dtype=torch.float32)
    heads = replace(heads, scale=(0.25, 0.25))  # which rounds nothing
    names = ("W_Q", "W_K", "W_V", "W_O")
    half = replace(heads, **{name: getattr(heads, name).bfloat16() for name in names})
    found = composition(half, mode)
    assert found.scores.dtype == torch.float32
    same = replace(heads, **{name: getattr(half, name).float() for name in names})
    torch.testing.assert_close(found.scores, composition(same, mode).scores)


def test_zero_heads_score_0_and_are_flagged(way):
    heads = random_heads(3, 4, 2, 17, 3, 5, dtype=torch.float32)
    W_O, W_Q = heads.W_O.clone(), heads.W_Q.clone()
    W_O[0, 2] = 0.0
    # OV that is zero though neither factor is: what is written is what the value never holds.
    W_V = heads.W_V.clone()
    W_V[1, 0, :, 1:] = 0.0
    W_O[1, 1, 0] = 0.0
    W_Q[2, 3] = 0.0
    broken = replace(heads, W_O=W_O, W_Q=W_Q, W_V=W_V)
    found = composition(broken, "K")
    assert found.zero_writers.nonzero().tolist() == [[0, 2], [1, 1]]
    assert found.zero_readers.nonzero().tolist() == [[2, 3]]
    for at in ((0, 2), (1, 1)):
        assert (found.scores[at] == 0).all() and found.z[at].isnan().all()
        assert found.p_values[at].isnan().all()
    assert (found.scores[:, :, 2, 3] == 0).all()
    assert not found.scores.isnan().any()
    frame = found.to_frame()
    tested = frame["p"].notna()
    assert tested.sum() == 3 * 4 * 4 - 4 - 4 - 4 - 8 + 2  # zero rows and columns, met twice
    assert frame["q"].notna().equals(tested)
    # The other heads' numbers are what they are without the zero heads' pairs.
    torch.testing.assert_close(found.scores[0, 0, 1], composition(heads, "K").scores[0, 0, 1])


def test_rank_deficient_heads(way):
    heads = random_heads(2, 3, 3, 13, 5, 5)
    W_V = heads.W_V.clone()
    W_V[:, :, :, 1:] = W_V[:, :, :, :1]
    low = replace(heads, W_V=W_V)
    for mode in MODES:
        torch.testing.assert_close(all_scores(composition(low, mode)), dense(low, mode))


def test_weights_that_are_not_finite_are_named():
    heads = random_heads(2, 3, 3, 13, 5, 5)
    W_K = heads.W_K.clone()
    W_K[1, 2, 0, 0] = float("nan")
    with pytest.raises(InputError, match="QK of layer 1.*head 2"):
        composition(replace(heads, W_K=W_K), "K")
    # What readers do not read, writers write with.
    W_O = heads.W_O.clone()
    W_O[1, 2, 0, 0] = float("inf")
    with pytest.raises(InputError, match="NaN or infinity in layer 1, head 2"):
        composition(replace(heads, W_O=W_O), "K")


class TestMetric:
    @pytest.fixture
    def heads(self):
        return random_heads(3, 4, 2, 17, 3, 5)

    @pytest.fixture
    def data(self):
        generator = torch.Generator().manual_seed(2)
        return torch.randn(3, 11, 17, generator=generator, dtype=torch.float64)  # 11 < 17: singular

    def test_it_weighs_what_the_writer_reads(self, heads, data, way):
        for mode in MODES:
            # ‖X OV M‖ of data X is ‖Σ^½ OV M‖ for Σ = XᵀX.
            found = composition(heads, mode, metric=data.mT @ data)
            expected = dense(heads, mode, root=data.mT)
            torch.testing.assert_close(all_scores(found), expected, rtol=1e-6, atol=1e-6)
            one = composition(heads, mode, metric=1e3 * data[1].T @ data[1])
            expected = dense(heads, mode, root=[data[1].T] * 3)
            torch.testing.assert_close(all_scores(one), expected, rtol=1e-6, atol=1e-6)

    def test_the_identity_changes_nothing(self, heads):
        plain, found = (composition(heads, "V", metric=m) for m in (None, torch.eye(17)))
        torch.testing.assert_close(found.scores, plain.scores)
        assert plain.provenance.settings["metric"] is None
        assert found.provenance.settings["metric"].startswith("sha256")

    def test_what_is_no_covariance_is_refused(self, heads, data):
        with pytest.raises(ShapeError, match=r"\[17, 17\] or \[3, 17, 17\]"):
            composition(heads, "K", metric=torch.eye(5))
        with pytest.raises(InputError, match="`metric` must be positive semi-definite"):
            composition(heads, "K", metric=-torch.eye(17))
        with pytest.raises(InputError, match="symmetric"):
            composition(heads, "K", metric=torch.eye(17) + torch.ones(17, 17).triu())
        with pytest.raises(InputError, match="NaN"):
            composition(heads, "K", metric=torch.full((17, 17), float("nan")))


@pytest.mark.parametrize("mode", MODES)
def test_z_is_the_distance_among_random_orientations(mode):
    heads = random_heads(2, 2, 1, 7, 3, 2)
    found = composition(heads, mode)
    generator = torch.Generator().manual_seed(4)
    q, r = torch.linalg.qr(torch.randn(20_000, 7, 7, generator=generator, dtype=torch.float64))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
    ov, m = heads.ov(0, 1).matrix(), read_by(heads, mode, 1, 0)
    turned = (ov @ q @ m).norm(dim=(1, 2)) ** 2
    z = ((ov @ m).norm() ** 2 - turned.mean()) / turned.std()
    assert float(found.z[0, 1, 1, 0]) == pytest.approx(float(z), abs=0.1)
    assert float(found.impossible_z[0, 1, 0, 0]) == found.impossible_z[0, 1, 0, 0]  # not NaN


class TestReferences:
    def test_p_counts_later_writers_over_as_many_layers(self, monkeypatch):
        heads = random_heads(5, 3, 3, 17, 3, 5)
        monkeypatch.setattr(compose, "ENOUGH_REFERENCES", 1)
        found = composition(heads, "K")
        scores = dense(heads, "K")
        for w, r in ((0, 1), (1, 3), (0, 4)):
            mirrored = [scores[i, :, i - (r - w)].flatten() for i in range(r - w, 5)]
            pool = torch.cat(mirrored)
            assert found.n_references[r - w] == len(pool) == 9 * (5 - (r - w))
            p = (1 + (pool[:, None] >= scores[w, :, r].flatten()).sum(0)) / (1 + len(pool))
            torch.testing.assert_close(found.p_values[w, :, r].flatten(), p.double())
        expected = benjamini_hochberg(found.p_values)
        assert torch.equal(found.q_values.nan_to_num(), expected.nan_to_num())
        possible = ~found.p_values.isnan()
        assert int(possible.sum()) == 9 * 10 and not possible[3, :, 3].any()

    def test_a_window_takes_in_neighbours_but_never_one_layer_itself(self, monkeypatch):
        heads = random_heads(5, 3, 3, 17, 3, 5)
        monkeypatch.setattr(compose, "ENOUGH_REFERENCES", 30)
        sizes = [36, 27, 18, 9]  # impossible pairs over 1, 2, 3, 4 layers
        expected = (0, 36, 36 + 27 + 18, 27 + 18 + 9, 9 + 18 + 27)
        assert sum(sizes) == 90 and composition(heads, "V").n_references == expected

    @pytest.mark.parametrize("mode", MODES)
    def test_independent_heads_give_uniform_p_and_no_find(self, mode):
        heads = random_heads(12, 6, 6, 61, 5, 7, seed=11)
        found = composition(heads, mode)
        p = found.p_values[~found.p_values.isnan()]
        assert len(p) == 36 * 66
        # Pairs of one head depend on each other, so the statistic is held to a bound, not to a p.
        assert scipy.stats.kstest(p.numpy(), "uniform").statistic < 0.06
        assert found.to_frame()["q"].min() > 0.05
        assert abs(float(found.z[~found.z.isnan()].mean())) < 0.1

    def test_planted_pairs_are_found(self):
        heads = random_heads(12, 6, 6, 61, 5, 7, seed=11)
        W_K = heads.W_K.clone()
        planted = set()
        for w in range(0, 11):
            for head in range(3):
                # The keys of the next layer read half of what the head writes.
                W_K[w + 1, head] += 1.5 * heads.W_O[w, head, :5].T
                planted.add((w, head, w + 1, head))
        found = composition(replace(heads, W_K=W_K), "K")
        frame = found.to_frame()
        hits = frame[frame["q"] < 0.05]
        pairs = {tuple(row) for row in hits.iloc[:, :4].itertuples(index=False, name=None)}
        assert planted <= pairs and len(pairs - planted) <= 3
        top = found.top(len(planted)).iloc[:, :4]
        assert {tuple(row) for row in top.itertuples(index=False, name=None)} == planted

    def test_one_planted_pair_has_the_smallest_p_there_is(self):
        heads = random_heads(12, 6, 6, 61, 5, 7, seed=11)
        W_K = heads.W_K.clone()
        W_K[7, 4] += 2 * heads.W_O[2, 1, :5].T
        found = composition(replace(heads, W_K=W_K), "K")
        best = found.top(1).iloc[0]
        assert tuple(best.iloc[:4].astype(int)) == (2, 1, 7, 4)
        assert best["p"] == pytest.approx(1 / (1 + found.n_references[5]))


def test_only_the_pair_of_the_induction_circuit_composes():
    heads = HeadWeights.from_model(induction_model())
    found = composition(heads, "K", offset=None)
    top = found.top(4)
    assert top.iloc[0, :4].tolist() == [0, 0, 1, 1]
    assert top["score"][0] == pytest.approx(42**-0.5, rel=0.01)
    assert all(score == pytest.approx(86**-0.5, rel=0.06) for score in top["score"][1:])
    # No other way of composing has such a pair.
    assert all(composition(heads, mode).scores.max() < 0.13 for mode in "QV")


def test_the_gain_of_a_norm_on_attentions_output_belongs_to_what_is_written(tiny):
    raw = HeadWeights.from_model(tiny("gemma2"), fold_norm=False)
    # Unfolded, the score is of the bare factors; folded, what reaches the stream counts.
    torch.testing.assert_close(
        all_scores(composition(raw, "V")), dense(raw, "V"), rtol=1e-5, atol=1e-5
    )
    ov = raw.ov(0, 1).matrix() * raw.post_norms[0].gain
    folded = HeadWeights.from_model(tiny("gemma2"))
    read = raw.norms[2].gain[:, None] * raw.qk(2, 0, offset=1).matrix() * raw.norms[2].gain
    ov_read = raw.norms[0].gain[:, None] * ov
    expected = (ov_read @ read).norm() / ov_read.norm() / read.norm()
    assert float(composition(folded, "Q", offset=1).scores[0, 1, 2, 0]) == pytest.approx(
        float(expected), rel=1e-4
    )


def test_weights_are_read_layer_by_layer(tiny, monkeypatch):
    """A lazily loaded model gives a layer's factors, and nothing across layers."""
    heads = HeadWeights.from_model(tiny("llama"))
    expected = {mode: composition(heads, mode).scores for mode in MODES}

    def per_layer(method):
        def read(self, layer, **settings):
            return method(heads, layer, **settings)

        return read

    bare = replace(heads, **{name: torch.empty(getattr(heads, name).shape, device="meta")
                             for name in ("W_Q", "W_K", "W_V", "W_O")})  # fmt: skip
    for name in ("ov_factors", "qk_factors"):
        monkeypatch.setattr(HeadWeights, name, per_layer(getattr(HeadWeights, name)))
    for mode in MODES:
        torch.testing.assert_close(composition(bare, mode).scores, expected[mode])


def test_frame_top_figure_and_file(tmp_path, tiny):
    found = composition(HeadWeights.from_model(tiny("llama")), "Q", progress=True)
    frame = found.to_frame()
    columns = "writer_layer writer_head reader_layer reader_head score z p q".split()
    assert list(frame.columns) == columns and len(frame) == 3 * 36
    row = frame.iloc[50]
    at = tuple(row[:4].astype(int))
    assert row["score"] == pytest.approx(float(found.scores[at]))
    assert row["p"] == pytest.approx(float(found.p_values[at]))
    best = frame.sort_values("score", ascending=False).head(5)
    assert found.top(5)["score"].tolist() == best["score"].tolist()
    assert len(found.top(10**6)) == len(frame)
    # Below the level is below it.
    second = sorted(set(frame["q"]))[1]
    assert len(found.top(10**6, level=second)) == (frame["q"] < second).sum() > 0
    assert len(found.top(10**6, level=1)) == (frame["q"] < 1).sum()
    for wrong in (0, True):
        with pytest.raises(InputError, match="`k` must be a positive int"):
            found.top(wrong)
    with pytest.raises(InputError, match="`mode` must be one of 'Q', 'K', 'V'"):
        composition(HeadWeights.from_model(tiny("llama")), "O")
    back = Result.load(found.save(tmp_path))
    assert torch.equal(back.scores, found.scores) and back.n_references == found.n_references
    for name, axes in found.AXES.items():
        assert getattr(found, name).dim() == len(axes)
    drawn = found.figure()
    name = "L{}H{} → L{}H{}".format(*best.iloc[0, :4].astype(int))
    assert name in drawn.layout.title.text
    assert drawn.data[-1].z[2][7] == pytest.approx(float(found.scores[0, 2, 1, 1]))


@pytest.mark.slow
@pytest.mark.real_model
def test_on_a_trained_model_z_is_descriptive(smollm2):
    """Methods: pairs that cannot compose lie beyond 3 in 40 to 46 % of cases."""
    heads = HeadWeights.from_model(smollm2)
    for mode in MODES:
        found = composition(heads, mode)
        across = torch.cat(
            [found.impossible_z.diagonal(-d, dim1=0, dim2=2).flatten() for d in range(1, 30)]
        )
        possible = found.z[~found.z.isnan()]
        assert 0.40 < float((across.abs() > 3).float().mean()) < 0.47
        assert 0.60 < float((possible.abs() > 3).float().mean()) < 0.66
