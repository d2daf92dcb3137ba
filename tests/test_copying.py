"""copying_scores against dense eigenvalues and full ranks, and a head known to copy."""

import dataclasses

import pytest
import torch
from test_vocabulary import LargestTensor, custom, dense_ov

import wvprobe.copying
from wvprobe._types import Result
from wvprobe.copying import CopyingResult, copying_scores
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.heads import HeadWeights
from wvprobe.testing import induction_model, tiny_model

FAMILIES = ["llama", "qwen2", "gpt2", "gemma2", "phi", "bloom"]


def dense_eigenvalue_score(heads, layer, head, x_hat, ids):
    """Eigenvalues of the whole d_vocab × d_vocab matrix, without biases."""
    matrix = x_hat @ heads.W_V[layer, heads.kv_head(head)] @ heads.W_O[layer, head]
    if heads.post_norms[layer] is not None:
        matrix = matrix * heads.post_norms[layer].gain
    values = torch.linalg.eigvals((matrix @ heads.W_U)[ids][:, ids])
    return float(values.real.sum() / values.abs().sum())


def usable(heads):
    return sorted(set(range(len(heads.tokenizer))) - set(heads.tokenizer.all_special_ids))


@pytest.mark.parametrize("family", FAMILIES)
def test_eigenvalues_and_ranks_equal_brute_force(family):
    heads = HeadWeights.from_model(tiny_model(family, dtype="float64"))
    found = copying_scores(heads, rows=60, layers=[2, 0], progress=False)
    ids = usable(heads)
    assert found.layers == (2, 0) and found.n_tokens == len(ids)
    assert set(found.token_ids.tolist()) < set(ids)
    for place, layer in enumerate(found.layers):
        x_hat = heads.normalize(heads.W_E, layer)
        for head in (0, heads.n_heads - 1):
            expected = dense_eigenvalue_score(heads, layer, head, x_hat, ids)
            assert float(found.eigenvalue_score[place, head]) == pytest.approx(expected, abs=1e-8)
            logits = dense_ov(heads, layer, head, x_hat)
            for row in (0, 1, 41):
                token, other = int(found.token_ids[row]), int(found.token_ids[row - 1])
                others = logits[token, [i for i in ids if i != token]]
                expected = float((others < logits[token, token]).double().mean())
                assert float(found.ranks[place, head, row]) == pytest.approx(expected)
                others = logits[token, [i for i in ids if i != other]]
                expected = float((others < logits[token, other]).double().mean())
                assert float(found.control_ranks[place, head, row]) == pytest.approx(expected)


def test_the_published_practice_is_a_keyword_away():
    heads = HeadWeights.from_model(tiny_model("gpt2", dtype="float64"))
    found = copying_scores(heads, rows=20, layers=1, normalize=False, special=True, progress=False)
    expected = dense_eigenvalue_score(heads, 1, 3, heads.W_E, list(range(409)))
    assert float(found.eigenvalue_score[0, 3]) == pytest.approx(expected, abs=1e-8)
    normed = copying_scores(heads, rows=20, layers=1, special=True, progress=False)
    assert abs(float(normed.eigenvalue_score[0, 3]) - expected) > 1e-4


def test_unfolded_weights_give_what_folded_ones_give():
    model = tiny_model("gpt2", dtype="float64")
    folded, not_yet = (
        copying_scores(
            HeadWeights.from_model(model, fold_norm=fold), rows=30, layers=2, progress=False
        )
        for fold in (True, False)
    )
    torch.testing.assert_close(folded.eigenvalue_score, not_yet.eigenvalue_score)
    assert torch.equal(folded.ranks, not_yet.ranks)


def test_the_induction_head_copies_and_the_others_do_not():
    found = copying_scores(HeadWeights.from_model(induction_model()), progress=False)
    assert float(found.eigenvalue_score[1, 1]) > 0.99
    assert float(found.rank[1, 1]) > 0.99 and float(found.promoted[1, 1]) == 1
    frame = found.to_frame()
    others = frame[(frame["layer"] != 1) | (frame["head"] != 1)]
    assert not (others["eigenvalue_score"].abs() > 0.5).any()
    assert others["rank"].between(0.4, 0.6).all()
    assert (frame["q"] < 1e-6).sum() == 1
    assert frame["control_rank"].between(0.4, 0.6).all()
    # The previous-token head writes where the unembedding does not read: no eigenvalues at all.
    assert frame["eigenvalue_score"].isna().tolist() == [True, False, False, False]


def test_suppression_is_the_mirror_of_copying():
    heads = custom()
    turned = dataclasses.replace(heads, W_O=-heads.W_O)
    one, other = (copying_scores(h, rows=50, progress=False) for h in (heads, turned))
    torch.testing.assert_close(one.eigenvalue_score, -other.eigenvalue_score)
    torch.testing.assert_close(one.ranks, 1 - other.ranks)
    assert torch.equal(one.promoted, other.suppressed)
    torch.testing.assert_close(one.p_values, other.p_values)


def test_a_head_of_zeros_ranks_by_chance_and_has_no_score():
    heads = custom()
    output = heads.W_O.clone()
    output[0, 2] = 0
    found = copying_scores(dataclasses.replace(heads, W_O=output), rows=40, progress=False)
    assert bool(found.eigenvalue_score[0, 2].isnan())
    assert bool((found.ranks[0, 2] == 0.5).all())
    assert float(found.p_values[0, 2]) == 1
    assert not found.eigenvalue_score[0, :2].isnan().any()


def test_a_null_head_is_found_by_no_test():
    """Random heads: p-values spread over 0..1, and the interval holds chance at its rate."""
    generator = torch.Generator().manual_seed(11)
    shapes = {"W_Q": (40, 4, 23, 3), "W_K": (40, 4, 23, 3), "W_V": (40, 4, 23, 5)}
    shapes |= {"W_O": (40, 4, 5, 23), "W_E": (499, 23), "W_U": (23, 499)}
    given = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found = copying_scores(HeadWeights.from_tensors(**given), rows=300, progress=False)
    covered = (found.low <= 0.5) & (found.high >= 0.5)
    # Untied random embeddings: W_U says nothing of W_E, up to what 499 tokens have by accident.
    assert 0.85 < float(covered.double().mean()) < 1
    assert float((found.p_values < 0.05).double().mean()) < 0.15
    assert float((found.q_values < 0.05).double().mean()) < 0.03


def test_tiles_hold_less_than_the_whole(monkeypatch):
    heads = HeadWeights.from_model(tiny_model("llama"))
    whole = copying_scores(heads, rows=150, layers=1, progress=False)
    monkeypatch.setattr(wvprobe.copying, "TILE", 32)
    with LargestTensor() as seen:
        tiled = copying_scores(heads, rows=150, layers=1, progress=False)
    # The bootstrap's weights are 2000 draws × 150 rows; no table of rows × vocabulary is made.
    assert seen.largest <= 2000 * 150
    torch.testing.assert_close(tiled.ranks, whole.ranks, rtol=0, atol=2e-3)
    torch.testing.assert_close(tiled.eigenvalue_score, whole.eigenvalue_score)


def test_seeds_repeat_and_differ():
    heads = custom()
    first, again, other = (
        copying_scores(heads, rows=30, seed=seed, progress=False) for seed in (0, 0, 1)
    )
    assert torch.equal(first.token_ids, again.token_ids) and torch.equal(first.low, again.low)
    assert not torch.equal(first.token_ids, other.token_ids)
    assert first.provenance.seed == 0 and other.provenance.seed == 1
    assert len(copying_scores(heads, rows=10_000, progress=False).token_ids) == 97


def test_frame_saving_and_figure(tmp_path):
    heads = HeadWeights.from_model(tiny_model("llama"))
    found = copying_scores(heads, rows=50, layers=[0, 2], progress=False)
    frame = found.to_frame()
    assert (
        list(frame)
        == (
            "layer head kv_head eigenvalue_score rank low high promoted suppressed control_rank "
            "control_promoted control_suppressed p q"
        ).split()
    )
    assert frame["layer"].tolist() == [0] * 6 + [2] * 6
    assert frame["kv_head"].tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert (frame["low"] <= frame["rank"]).all() and (frame["rank"] <= frame["high"]).all()
    assert (frame["q"] >= frame["p"] - 1e-12).all()
    loaded = Result.load(found.save(tmp_path))
    assert isinstance(loaded, CopyingResult) and loaded.to_frame().equals(frame)

    drawn = found.figure()
    assert [(trace.zmin, trace.zmax) for trace in drawn.data] == [(-1, 1), (-0.5, 0.5)]
    assert drawn.data[1].z[4][1] == pytest.approx(float(found.rank[1, 4]) - 0.5)
    assert list(drawn.data[0].x) == ["0", "2"]  # layer 1, which was not asked for, takes no room
    best = frame.sort_values("rank").iloc[-1:]
    named = f"L{best['layer'].item()}H{best['head'].item()} ranks a token's own logit highest"
    assert named in drawn.layout.title.text
    undefined = dataclasses.replace(found, eigenvalue_score=found.eigenvalue_score * torch.nan)
    assert undefined.figure().data[0].z[0][0] is None


def test_refusals():
    bert = HeadWeights.from_model(tiny_model("bert"))
    with pytest.raises(UnsupportedError, match="linear head"):
        copying_scores(bert)
    heads = custom()
    with pytest.raises(InputError, match="`rows` must be an int of at least 2"):
        copying_scores(heads, rows=1)
    with pytest.raises(InputError, match=r"`layers` must be in 0\.\.0"):
        copying_scores(heads, layers=[1])
    with pytest.raises(UnsupportedError, match="effective_embedding=True"):
        copying_scores(heads, embedding="mlp0")
    broken = dataclasses.replace(heads, W_E=heads.W_E * torch.nan)
    with pytest.raises(InputError, match="`W_E and W_U` must be finite"):
        copying_scores(broken)
    for name in ("W_V", "b_V", "W_O"):
        weight = getattr(heads, name).clone()
        weight[0, 1] = torch.nan
        with pytest.raises(InputError, match="W_V, b_V and W_O of layer 0` must be finite"):
            copying_scores(dataclasses.replace(heads, **{name: weight}))


def test_the_embedding_after_the_first_mlp():
    heads = HeadWeights.from_model(tiny_model("llama", dtype="float64"))
    effective = torch.randn(409, heads.d_model, dtype=torch.float64)
    object.__setattr__(heads, "effective_W_E", effective)
    found = copying_scores(heads, rows=20, embedding="mlp0", progress=False)
    assert found.layers == (1, 2) and found.embedding == "mlp0"
    x_hat, ids = heads.normalize(effective, 2), usable(heads)
    expected = dense_eigenvalue_score(heads, 2, 4, x_hat, ids)
    assert float(found.eigenvalue_score[1, 4]) == pytest.approx(expected, abs=1e-8)
    with pytest.raises(InputError, match="'W_E' at layer 0"):
        copying_scores(heads, layers=0, embedding="mlp0")


@pytest.mark.slow
@pytest.mark.real_model
def test_smollm2_has_heads_that_copy_and_heads_that_suppress(smollm2):
    heads = HeadWeights.from_model(smollm2)
    found = copying_scores(heads, rows=300, layers=[12, 28], progress=False)
    assert float(found.rank[1, 5]) > 0.99 and float(found.eigenvalue_score[1, 5]) > 0.99
    assert float(found.rank[0, 5]) < 0.01 and float(found.eigenvalue_score[0, 5]) < -0.99
    assert float(found.suppressed[0, 5]) > 0.9
    assert bool(((found.control_ranks.mean(-1) - 0.5).abs() < 0.09).all())
