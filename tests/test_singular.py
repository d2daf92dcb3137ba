"""Spectra against dense matrices, numbers worked by hand, and TransformerLens."""

from dataclasses import replace

import pytest
import torch

from wvprobe._types import Result
from wvprobe.activations import capture
from wvprobe.errors import InputError, ShapeError, UnsupportedError
from wvprobe.heads import HeadWeights
from wvprobe.inputs import input_covariance
from wvprobe.singular import singular_vectors, spectra
from wvprobe.testing import induction_model, tiny_model

D = 13


def orthonormal(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator).double()).Q


def with_values(*values, seed=0):
    """W_V and W_O of a head whose OV has these singular values, in float64."""
    r = len(values)
    left, right = orthonormal(D, r, seed), orthonormal(D, r, seed + 100).T
    mixing = orthonormal(r, r, seed + 200) * 1.7
    scaled = left * torch.tensor(values, dtype=torch.float64)
    return scaled @ mixing, torch.linalg.inv(mixing) @ right


def heads_of(pairs, **given):
    """One layer whose heads have these (W_V, W_O); queries and keys are noise."""
    generator = torch.Generator().manual_seed(1)
    shape = (1, len(pairs), D, 5)
    return HeadWeights.from_tensors(
        W_Q=torch.randn(shape, generator=generator).double(),
        W_K=torch.randn(shape, generator=generator).double(),
        W_V=torch.stack([v for v, _ in pairs])[None],
        W_O=torch.stack([o for _, o in pairs])[None],
        **given,
    )


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "llama", "qwen3", "gemma2", "bert"])
@pytest.mark.parametrize(("which", "offset"), [("OV", 0), ("QK", 3), ("QK", None)])
def test_every_head_equals_the_dense_matrix(family, which, offset):
    heads = HeadWeights.from_model(tiny_model(family, dtype="float64"))
    found = spectra(heads, which, offset=offset, vocabulary=False)
    assert found.singular_values.dtype == torch.float64
    for layer in range(heads.n_layers):
        for head in range(heads.n_heads):
            circuit = heads.ov(layer, head) if which == "OV" else None
            dense = (circuit or heads.qk(layer, head, offset=offset)).matrix()
            values = torch.linalg.svdvals(dense)
            mine = found.singular_values[layer, head]
            torch.testing.assert_close(mine, values[: len(mine)], rtol=1e-9, atol=1e-12)
            eigenvalues = found.eigenvalues[layer, head]
            for power in (1, 2, 3):
                trace = torch.linalg.matrix_power(dense, power).trace()
                total = (eigenvalues**power).sum()
                assert abs(total - trace) < 1e-9 * values[0] ** power * len(mine)


def test_measures_are_those_worked_by_hand():
    """σ = 2, 1, 1: Σσ² = 6; shares 1/2, 1/4, 1/4 have the entropy 1.5 ln 2."""
    found = spectra(heads_of([with_values(2.0, 1.0, 1.0)]), "OV", k=1)
    (row,) = found.to_frame().to_dict("records")
    assert row["stable_rank"] == pytest.approx(6 / 4)
    assert row["effective_rank"] == pytest.approx(2**1.5)
    assert row["participation_ratio"] == pytest.approx(36 / 18)
    assert row["energy"] == pytest.approx(4 / 6)
    assert row["norm"] == pytest.approx(6**0.5)
    assert row["largest"] == pytest.approx(2.0)
    assert row["rank"] == 3 and row["degenerate"] == 2
    values = found.values_frame()
    assert values["relative"].tolist() == pytest.approx([1, 0.5, 0.5])
    assert values["energy"].tolist() == pytest.approx([4 / 6, 5 / 6, 1])


def test_positivity_tells_copying_from_its_opposite():
    v, _ = with_values(3.0, 2.0, 1.0)
    found = spectra(heads_of([(v, v.T), (v, -v.T)]), "OV").to_frame()
    assert found["positivity"].tolist() == pytest.approx([1.0, -1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_and_deficient_heads_give_ranks_without_nan(dtype):
    v, o = with_values(5.0, 4.0, 3.0, 2.0, 1.0)
    deficient = with_values(2.0, 1.0, 0.0, 0.0, 0.0, seed=3)
    first, rest = orthonormal(5, 5, 9).split([2, 3], dim=1)
    cancelling = (7 * v @ first @ first.T, rest @ rest.T @ o)  # neither is 0, their product is
    pairs = [(0 * v, o), (v, o), deficient, cancelling]
    heads = heads_of([(a.to(dtype), b.to(dtype)) for a, b in pairs])
    found = spectra(heads, "OV")
    frame = found.to_frame()
    assert not frame.isna().any(axis=None)
    assert frame["rank"].tolist() == [0, 5, 2, 0]
    for column in ("stable_rank", "effective_rank", "participation_ratio", "energy", "largest"):
        assert frame[column].tolist()[0] == frame[column].tolist()[3] == 0.0
    assert frame["stable_rank"][2] == pytest.approx(5 / 4)
    assert frame["degenerate"].tolist() == [0, 0, 0, 0]
    assert not found.values_frame().isna().any(axis=None)
    assert singular_vectors(heads, "OV", 0, 0).left.shape == (D, 0)
    assert singular_vectors(heads, "OV", 0, 2).right.shape == (2, D)


def test_leading_dimensions_of_one_and_heads_wider_than_the_stream():
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(4, 1, 1, 3, 7, generator=generator).double()
    heads = HeadWeights.from_tensors(W_Q=wide[0], W_K=wide[1], W_V=wide[2], W_O=wide[3].mT)
    for which, circuit in (("OV", heads.ov(0, 0)), ("QK", heads.qk(0, 0))):
        found = spectra(heads, which)
        assert found.singular_values.shape == (1, 1, 3)
        torch.testing.assert_close(
            found.singular_values[0, 0], torch.linalg.svdvals(circuit.matrix())
        )
        assert found.eigenvalues.shape == (1, 1, 7)
        assert found.to_frame()["rank"].tolist() == [3]


def test_a_key_value_head_is_counted_once(tiny):
    heads = HeadWeights.from_model(tiny("llama"))
    found = spectra(heads, "OV")
    frame, groups = found.to_frame(), found.by_kv_head()
    assert frame["kv_head"].tolist()[:6] == [0, 0, 0, 1, 1, 1]
    assert len(frame) == 18 and len(groups) == 6
    assert list(frame.columns[:4]) == ["layer", "head", "kv_head", "stable_rank"]
    mean = frame["effective_rank"][3:6].mean()
    assert groups["effective_rank"][1] == pytest.approx(mean)
    title = found.figure().layout.title.text
    assert "median of 6 key-value heads" in title
    assert f"{groups['effective_rank'].median():.1f} of 14" in title


@pytest.mark.parametrize("family", ["gpt2", "bloom", "phi", "llama", "gemma2"])
def test_vocabulary_eigenvalues_equal_those_of_the_dense_matrix(family):
    """W_E OV W_U written out, 409 × 409, the gain of Gemma's second norm included."""
    heads = HeadWeights.from_model(tiny_model(family, dtype="float64"))
    found = spectra(heads, "OV", vocabulary=True)
    for layer, head in ((0, 0), (2, heads.n_heads - 1)):
        written = heads.ov(layer, head).matrix()
        post = heads.post_norms[layer]
        written = written if post is None else written * post.gain
        dense = torch.linalg.eigvals(heads.W_E @ written @ heads.W_U)
        mine = found.vocabulary_eigenvalues[layer, head]
        apart = (mine[:, None] - dense).abs().min(dim=1).values
        assert apart.max() < 1e-8 * mine.abs().max()
        share = dense.real.sum() / dense.abs().sum()
        row = found.to_frame().query("layer == @layer and head == @head")
        assert float(row["vocabulary_positivity"].iloc[0]) == pytest.approx(float(share), abs=1e-6)


def test_a_scale_on_the_logits_and_small_tiles_are_taken_in(tiny, monkeypatch):
    heads = HeadWeights.from_model(tiny("llama"))
    plain = spectra(heads, "OV").vocabulary_eigenvalues
    monkeypatch.setattr("wvprobe._factors._TILE", 97)  # the last tile is a short one
    scaled = replace(heads, unembedding=replace(heads.unembedding, scale=-0.25))
    found = spectra(scaled, "OV").vocabulary_eigenvalues
    torch.testing.assert_close(found.sum(-1).real, -0.25 * plain.sum(-1).real, rtol=1e-4, atol=1e-3)


def test_values_keep_to_their_heads(tiny):
    found = spectra(HeadWeights.from_model(tiny("llama")), "QK")
    frame = found.values_frame()
    assert len(frame) == 3 * 6 * 14
    for row in frame.sample(20, random_state=0).to_dict("records"):
        at = row["layer"], row["head"], row["index"]
        assert row["value"] == pytest.approx(float(found.singular_values[at]))


def test_what_has_no_vocabulary_is_refused_by_name(tiny):
    bert = HeadWeights.from_model(tiny("bert"))
    with pytest.raises(UnsupportedError, match="W_E OV W_U.*tiny:bert has no linear W_U"):
        spectra(bert, "OV", vocabulary=True)
    found = spectra(bert, "OV")
    assert "vocabulary_positivity" not in found.to_frame()
    with pytest.raises(UnsupportedError, match="no linear W_U.*Use .eigenvalues"):
        _ = found.vocabulary_eigenvalues
    llama = HeadWeights.from_model(tiny("llama"))
    with pytest.raises(UnsupportedError, match="vocabulary=False was asked for"):
        _ = spectra(llama, "OV", vocabulary=False).vocabulary_eigenvalues
    with pytest.raises(UnsupportedError, match="QK maps no token to logits"):
        spectra(llama, "QK", vocabulary=True)
    with pytest.raises(UnsupportedError, match="carries no W_E"):
        spectra(replace(llama, W_E=None), "OV", vocabulary=True)
    with pytest.raises(UnsupportedError, match="embeds 400 tokens and predicts 409"):
        spectra(replace(llama, W_E=llama.W_E[:400]), "OV", vocabulary=True)


def test_the_induction_head_copies():
    heads = HeadWeights.from_model(induction_model())
    found = spectra(heads, "OV")
    frame = found.to_frame().set_index(["layer", "head"])
    assert frame.loc[(1, 1), "vocabulary_positivity"] > 0.999
    # L0H0 moves codes to where the vocabulary does not read them: nilpotent.
    assert frame.loc[(0, 0), "positivity"] == frame.loc[(0, 0), "vocabulary_positivity"] == 0.0
    # Both are a multiple of the identity on 42 coordinates: no vector of theirs is its own.
    for at, size in (((0, 0), 0.1), ((1, 1), 3.0)):
        row = frame.loc[at]
        assert row["rank"] == row["degenerate"] == 42
        assert row["largest"] == pytest.approx(size, rel=1e-5)
        for column in ("stable_rank", "effective_rank", "participation_ratio"):
            assert row[column] == pytest.approx(42, rel=1e-4)
        assert singular_vectors(heads, "OV", *at).groups == ((0, 42),)


def test_unfolded_spectra_equal_transformer_lens(tiny):
    model = tiny("llama")
    heads = HeadWeights.from_model(model, fold_norm=False)
    _, theirs, _ = model.OV.svd()
    found = spectra(heads, "OV", vocabulary=False).singular_values
    torch.testing.assert_close(found, theirs, rtol=1e-5, atol=1e-5)
    mine = spectra(heads, "QK", offset=None).singular_values / heads.scale[0]
    torch.testing.assert_close(mine, model.QK.svd()[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_models_are_computed_in_float32(dtype):
    """Field line 3: eigenvalues of bf16 factors."""
    heads = HeadWeights.from_model(tiny_model("llama", dtype=dtype))
    found = spectra(heads, "OV")
    assert found.singular_values.dtype == torch.float32
    assert found.vocabulary_eigenvalues.dtype == torch.complex64
    double = spectra(replace(heads, W_V=heads.W_V.double(), W_O=heads.W_O.double()), "OV")
    error = (found.singular_values - double.singular_values).abs()
    assert bool((error <= found.round_off[..., None]).all())


def test_wrong_arguments_and_weights_are_told(tiny):
    heads = HeadWeights.from_model(tiny("llama"))
    with pytest.raises(InputError, match="`which` must be one of 'OV', 'QK'. Got 'VO'"):
        spectra(heads, "VO")
    with pytest.raises(InputError, match="`k` must be an int of at least 1"):
        spectra(heads, "OV", k=0)
    broken = heads.W_O.clone()
    broken[2, 1, 0, 0] = float("nan")
    with pytest.raises(InputError, match=r"`heads \(OV of layer 2\)` must be finite.*in head 1"):
        spectra(replace(heads, W_O=broken), "OV")
    with pytest.raises(InputError, match=r"`heads \(OV of layer 2\)` must be finite.*head 1"):
        singular_vectors(replace(heads, W_O=broken), "OV", 2, 0)
    broken = heads.W_V.clone()
    broken[1, 0, 0, 0] = float("nan")
    with pytest.raises(InputError, match=r"OV of layer 1\)` must be finite.*in key-value head 0"):
        spectra(replace(heads, W_V=broken), "OV")
    with pytest.raises(InputError, match=r"`head` must be in 0\.\.5"):
        singular_vectors(heads, "OV", 0, -1)
    with pytest.raises(InputError, match="`tolerance` must be a finite number of at least 0"):
        singular_vectors(heads, "OV", 0, 0, tolerance=-0.1)


def test_a_result_survives_saving(tiny, tmp_path):
    found = spectra(HeadWeights.from_model(tiny("llama")), "OV")
    again = Result.load(found.save(tmp_path / "spectra"))
    assert again.to_frame().equals(found.to_frame())
    assert torch.equal(again.vocabulary_eigenvalues, found.vocabulary_eigenvalues)
    assert again.provenance.settings["which"] == "OV"


@pytest.fixture(scope="module")
def heads():
    return HeadWeights.from_model(tiny_model("llama", dtype="float64"))


@pytest.fixture(scope="module")
def sigma():
    """A covariance for each of the three layers."""
    data = torch.randn(3, 97, 42, generator=torch.Generator().manual_seed(2)).double()
    data = data * torch.linspace(0.1, 3, 42)
    return data.mT @ data / 97


class TestMetric:
    """Singular values of what the data meets."""

    @staticmethod
    def root(matrix):
        values, vectors = torch.linalg.eigh(matrix)
        return vectors @ values.clamp(min=0).sqrt().diag() @ vectors.T

    def test_equals_the_dense_product(self, heads, sigma):
        ov, qk = heads.ov(1, 4).matrix(), heads.qk(1, 4, offset=2).matrix()
        one, other = self.root(sigma[0]), self.root(sigma[1])
        cases = [
            ("OV", sigma[0], one @ ov),
            ("OV", sigma, other @ ov),  # a layer's own
            ("OV", (sigma[0], sigma[1]), one @ ov @ other),
            ("OV", (None, sigma[1]), ov @ other),
            ("QK", sigma[0], one @ qk @ one),
            ("QK", sigma, other @ qk @ other),
            ("QK", (sigma[0], None), one @ qk),
        ]
        for which, metric, dense in cases:
            found = spectra(heads, which, offset=2, metric=metric, vocabulary=False)
            assert found.weighted
            torch.testing.assert_close(
                found.singular_values[1, 4], torch.linalg.svdvals(dense)[:14], rtol=1e-9, atol=1e-9
            )

    def test_energy_is_the_mean_square_of_what_is_written(self):
        model = tiny_model("llama", dtype="float64")
        heads = HeadWeights.from_model(model)
        texts = ["The river bank is close to here.", "a power bank dropped into the river."]
        measured = input_covariance(model, texts)
        found = spectra(heads, "OV", metric=measured.second_moment(), vocabulary=False)
        seen = capture(model, texts, "resid_pre")
        own = seen.mask.clone()
        own[:, 0] = False  # the BOS, which the measurement leaves out
        x_hat = heads.normalize(seen["resid_pre"][:, :, 2][own], 2)
        written = x_hat @ heads.ov(2, 5).matrix()
        energy = written.square().sum(dim=-1).mean()
        mine = found.singular_values[2, 5].square().sum()
        torch.testing.assert_close(mine, energy, rtol=1e-6, atol=0)

    def test_identity_changes_nothing_and_vectors_rebuild(self, heads, sigma):
        plain = spectra(heads, "QK", offset=2).singular_values
        eye = spectra(heads, "QK", offset=2, metric=torch.eye(42)).singular_values
        torch.testing.assert_close(plain, eye, rtol=1e-12, atol=1e-12)
        found = singular_vectors(heads, "OV", 1, 4, metric=sigma)
        dense = self.root(sigma[1]) @ heads.ov(1, 4).matrix()
        rebuilt = found.left * found.values @ found.right
        torch.testing.assert_close(rebuilt, dense, rtol=1e-9, atol=1e-9)

    def test_fewer_tokens_than_dimensions_leave_a_smaller_rank(self, heads):
        data = torch.randn(5, 42, generator=torch.Generator().manual_seed(0)).double()
        found = spectra(heads, "OV", metric=data.T @ data / 5, vocabulary=False).to_frame()
        assert set(found["rank"]) == {5}

    @pytest.mark.parametrize(
        ("change", "error", "told"),
        [
            (lambda s: s[0, :5], ShapeError, r"`metric` must be \[42, 42\] or \[3, 42, 42\]"),
            (lambda s: s[:2], ShapeError, r"Got shape \[2, 42, 42\]"),
            (lambda s: s[0] + s[0].triu(1), InputError, "`metric` must be symmetric"),
            (lambda s: -s, InputError, r"`metric \(layer 0\)` must be positive semi-definite"),
            (lambda s: s[0] * float("nan"), InputError, "`metric` must be finite"),
            (lambda s: s[0].bfloat16(), InputError, "`metric` must be float32 or float64"),
            (lambda s: (s[0], s[0], s[0]), InputError, "pair of them. Got '3 of them'"),
            (lambda s: (s[0], 2.0), InputError, r"`metric\[1\]` must be a tensor.*input_covarian"),
        ],
    )
    def test_what_is_no_covariance_is_refused(self, heads, sigma, change, error, told):
        with pytest.raises(error, match=told):
            spectra(heads, "OV", metric=change(sigma), vocabulary=False)

    def test_round_off_below_zero_is_clipped(self, heads):
        row = torch.randn(1, 42, generator=torch.Generator().manual_seed(0))
        found = spectra(heads, "OV", metric=row.T @ row, vocabulary=False)
        assert not found.singular_values.isnan().any()


class TestSingularVectors:
    """Which vectors are determined, and which are a basis among many."""

    @staticmethod
    def mixed(seed):
        """Return one circuit, σ = 5, 3, 3, 1, 1, 1, from factors that differ by `seed`."""
        v, o = with_values(5.0, 3.0, 3.0, 1.0, 1.0, 1.0)
        turn = orthonormal(6, 6, seed) * 2.0
        return heads_of([(v @ turn, torch.linalg.inv(turn) @ o)])

    def test_groups_are_those_of_equal_values(self):
        found = singular_vectors(self.mixed(50), "OV", 0, 0)
        assert found.groups == ((1, 3), (3, 6))
        assert found.group(0) == (0, 1) and found.group(2) == (1, 3)
        assert found.to_frame()["determined"].tolist() == [True] + [False] * 5
        assert found.to_frame()["group"].tolist() == [0, 1, 1, 3, 3, 3]
        assert found.to_frame()["gap"].tolist() == pytest.approx([2, 0, 0, 0, 0, 0], abs=1e-12)
        assert "1 of 6 singular vectors" in found.figure().layout.title.text
        with pytest.raises(InputError, match=r"`number` must be in 0\.\.5"):
            found.group(6)

    def test_subspaces_agree_where_vectors_need_not(self):
        """The same matrix from other factors: an honest tool gives the same subspaces."""
        one, other = (singular_vectors(self.mixed(seed), "OV", 0, 0) for seed in (50, 51))
        for number in range(6):
            assert max(one.distance(other, number)) < 1e-12
        torch.testing.assert_close(one.left[:, 0], other.left[:, 0])
        assert (one.left[:, 1:] - other.left[:, 1:]).abs().max() > 0.1
        # Taken one by one, as if they were determined, the vectors are far apart.
        alone = replace(one, groups=())
        assert max(max(alone.distance(other, number)) for number in (1, 3, 4)) > 0.1

    def test_distance_is_the_sine_of_the_angle(self):
        v, o = with_values(5.0, 2.0, 1.0)
        one = singular_vectors(heads_of([(v, o)]), "OV", 0, 0)
        angle = torch.tensor(0.3, dtype=torch.float64)
        left = one.left.clone()
        spare = torch.linalg.qr(torch.cat((one.left, v.new_ones(D, 1)), 1)).Q[:, 3]
        left[:, 1] = angle.cos() * one.left[:, 1] + angle.sin() * spare
        left_apart, right_apart = one.distance(replace(one, left=left), 1)
        assert left_apart == pytest.approx(float(angle.sin()), rel=1e-9)
        assert right_apart < 1e-12
        left, right = one.subspace(1)
        assert left.shape == right.shape == (D, 1)
        fewer = singular_vectors(heads_of([with_values(5.0, 2.0)]), "OV", 0, 0)
        with pytest.raises(InputError, match="`other` must be a result of 3 singular values"):
            one.distance(fewer, 2)

    def test_vectors_rebuild_the_circuit_and_their_signs_are_fixed(self):
        heads = HeadWeights.from_model(tiny_model("qwen3", dtype="float64"))
        found = singular_vectors(heads, "QK", 1, 4, offset=7)
        dense = heads.qk(1, 4, offset=7).matrix()
        torch.testing.assert_close(found.left * found.values @ found.right, dense)
        flipped = replace(heads, W_Q=-heads.W_Q, W_K=-heads.W_K)
        again = singular_vectors(flipped, "QK", 1, 4, offset=7)
        torch.testing.assert_close(again.left, found.left, rtol=1e-9, atol=1e-9)
        assert bool((found.left.gather(0, found.left.abs().argmax(0, keepdim=True)) > 0).all())
        assert str(found.head) == "L1H4" and found.offset == 7

    def test_a_tolerance_of_ones_own(self):
        heads = heads_of([with_values(5.0, 4.8, 2.0, 1.99, 1.0)])
        assert singular_vectors(heads, "OV", 0, 0).groups == ()
        assert singular_vectors(heads, "OV", 0, 0, tolerance=0.003).groups == ((2, 4),)
        assert singular_vectors(heads, "OV", 0, 0, tolerance=0.05).groups == ((0, 2), (2, 4))

    def test_vectors_outside_the_groups_are_as_exact_as_promised(self):
        """float32 against float64: within 1/25 rad where the tolerance says they stand alone."""
        for seed in range(5):
            v, o = with_values(5.0, 4.99, 3.0, 3.0 - 2e-6, 1.0, seed=seed)
            exact = singular_vectors(heads_of([(v, o)]), "OV", 0, 0, tolerance=0.0)
            found = singular_vectors(heads_of([(v.float(), o.float())]), "OV", 0, 0)
            assert found.groups == ((2, 4),)
            double = replace(found, left=found.left.double(), right=found.right.double())
            for number in (0, 1, 2, 4):
                assert max(double.distance(exact, number)) < 1 / 25


@pytest.mark.slow
@pytest.mark.real_model
def test_spectra_of_smollm2(smollm2):
    heads = HeadWeights.from_model(smollm2, fold_norm=False)
    found = spectra(heads, "OV")
    _, theirs, _ = smollm2.OV.svd()
    relative = (found.singular_values - theirs).abs() / theirs[..., :1]
    assert relative.max() < 1e-5
    frame = found.to_frame()
    assert (frame["rank"] == 64).all() and len(found.by_kv_head()) == 90
    # Both ends exist: heads that copy what they read, and heads that suppress it.
    assert frame["vocabulary_positivity"].max() > 0.99 and frame["positivity"].min() < -0.5


def test_the_metric_is_part_of_where_a_number_comes_from(tiny):
    heads = HeadWeights.from_model(tiny("llama"))
    one, other, none = (
        spectra(heads, "OV", metric=metric, vocabulary=False).provenance.settings["metric"]
        for metric in (torch.eye(42), 2 * torch.eye(42), None)
    )
    assert one.startswith("sha256") and one != other and none is None
    pair = spectra(heads, "QK", metric=(torch.eye(42), 2 * torch.eye(42)))
    assert pair.provenance.settings["metric"] == f"{one}, {other}"
