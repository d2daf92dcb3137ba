"""Drift of many words against brute force, planted senses and known cases."""

import pytest
import torch

import wvprobe
from wvprobe._types import Result
from wvprobe.activations import capture
from wvprobe.contextual_drift import (
    _baseline,
    _corpus,
    _measures,
    _vectors,
    drift,
    fit_correction,
    layer_similarity,
)
from wvprobe.contextual_drift._baseline import RandomTokens, random_tokens
from wvprobe.contextual_drift._measures import measure_word
from wvprobe.contextual_drift._vectors import Reader, read_items
from wvprobe.datasets import SenseDataset, load_senses
from wvprobe.errors import InputError
from wvprobe.testing import FAMILIES, tiny_model
from wvprobe.words import encode, word_at

BUNDLED = load_senses()
# Two words, two senses each, contexts before and after.
FEW = SenseDataset(
    "few",
    tuple(
        item
        for word, senses in (("bank", ("river_side", "money")), ("bat", None))
        for sense in senses or BUNDLED.senses("bat")[:2]
        for item in [i for i in BUNDLED.only(word) if i.sense == sense][1::3]
    ),
)


def cosine(a, b):
    return float(torch.cosine_similarity(a.double(), b.double(), dim=0))


def mean(values):
    values = list(values)
    return sum(values) / len(values)


@pytest.fixture(scope="module")
def found():
    return drift(tiny_model("llama"), FEW, correction="zscore")


def test_measures_of_a_word_by_brute_force(monkeypatch):
    monkeypatch.setattr(_measures, "_BLOCK_BYTES", 8 * 23 * 23)  # a block a stream
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(23, 2, 7, generator=generator) + torch.arange(7.0)
    senses = torch.tensor([0] * 9 + [1] * 6 + [2] + [3] * 7)  # sense 2 has one sentence
    got = measure_word(x, senses, torch.Generator().manual_seed(1))
    for layer in range(2):
        v = x[:, layer].double()
        pairs = [(i, j) for i in range(23) for j in range(23) if i != j]
        want = {"self_similarity": mean(cosine(v[i], v[j]) for i, j in pairs)}
        for name, y in (("", v), ("_centred", v - v.mean(dim=0))):
            s = torch.linalg.svdvals(y).square()
            want[f"max_explainable_variance{name}"] = float(s[0] / s.sum())
        groups = [[i for i in range(23) if senses[i] == k] for k in (0, 1, 3)]
        want["same_sense"] = mean(
            mean(cosine(v[i], v[j]) for i in g for j in g if i != j) for g in groups
        )
        couples = [(a, b) for n, a in enumerate(groups) for b in groups[:n]]

        def between(measure, couples=couples):
            return mean(mean(measure(i, j) for i in a for j in b) for a, b in couples)

        want["different_sense"] = between(lambda i, j, v=v: cosine(v[i], v[j]))
        want["gap"] = want["same_sense"] - want["different_sense"]
        want["euclidean"] = between(lambda i, j, v=v: float((v[i] - v[j]).norm()))
        want["normalised_distance"] = between(
            lambda i, j, v=v: float(2 * (v[i] - v[j]).norm() / (v[i].norm() + v[j].norm()))
        )
        kept = [i for g in groups for i in g]
        right, near = {}, {}
        for i in kept:
            centroids = [v[[j for j in g if j != i]].mean(dim=0) for g in groups]
            best = max(range(3), key=lambda k, i=i, v=v, c=centroids: cosine(v[i], c[k]))
            right[i] = float(i in groups[best])
            nearest = max((j for j in kept if j != i), key=lambda j, i=i, v=v: cosine(v[i], v[j]))
            near[i] = float(senses[nearest] == senses[i])
            own = next(g for g in groups if i in g)
            gap = mean(cosine(v[i], v[j]) for j in own if j != i) - mean(
                mean(cosine(v[i], v[j]) for j in g) for g in groups if g is not own
            )
            assert float(got.item_gap[i, layer]) == pytest.approx(gap)
            assert float(got.centroid[i, layer]) == right[i]
            assert float(got.neighbour[i, layer]) == near[i]
        want["centroid_accuracy"] = mean(right.values())
        want["balanced_accuracy"] = mean(mean(right[i] for i in g) for g in groups)
        want["knn_accuracy"] = mean(near.values())
        want["knn_chance"] = (9 * 8 + 6 * 5 + 7 * 6) / (22 * 21)
        for name, value in want.items():
            assert float(got.values[name][layer]) == pytest.approx(value), name
    assert bool(got.centroid[15].isnan().all() and got.neighbour[15].isnan().all())
    assert got.control is not None and got.control.shape == (200, 2)
    assert 0.2 < float(got.control.mean()) < 0.45


def test_vectors_that_tie_are_told_by_chance():
    x = torch.ones(6, 1, 5)
    got = measure_word(x, torch.tensor([0, 0, 0, 1, 1, 1]))
    assert float(got.values["centroid_accuracy"]) == pytest.approx(1 / 2)
    assert float(got.values["knn_accuracy"]) == pytest.approx(2 / 5)
    assert float(got.values["cosine_distance"]) == pytest.approx(0, abs=1e-12)
    assert float(got.values["euclidean"]) == 0
    assert bool(got.values["max_explainable_variance_centred"].isnan())


def test_words_without_senses_or_company_have_no_such_measures():
    one = measure_word(torch.randn(1, 2, 5), torch.tensor([0])).values
    assert all(bool(one[n].isnan().all()) for n in ("self_similarity", "gap", "knn_accuracy"))
    same = measure_word(torch.randn(4, 2, 5), torch.zeros(4, dtype=torch.long)).values
    assert bool(same["same_sense"].isfinite().all()) and bool(same["gap"].isnan().all())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_against_capture(family, tiny):
    model = tiny(family)
    got = drift(model, FEW)
    items = [item for item in FEW if item.word == "bank"]
    spans = [word_at(encode(model, i.sentence), i.start, i.end) for i in items]
    texts = [item.sentence for item in items]
    x = capture(model, texts, "stream", words=spans)["stream"].double()
    whole = capture(model, texts, "stream")
    assert got.words == ("bank", "bat") and got.n[0] == len(items) and not got.dropped
    within = []
    for n in range(len(items)):
        own = [p for p, added in enumerate(whole.special[n]) if not added]
        tokens = whole["stream"][n, own].double()
        within.append(torch.cosine_similarity(tokens, tokens.mean(dim=0), dim=-1).mean(dim=0))
    torch.testing.assert_close(
        got["intra_sentence"][0], torch.stack(within).mean(dim=0), rtol=0, atol=1e-5
    )
    unit = x / x.norm(dim=-1, keepdim=True)
    products = torch.einsum("ild,jld->lij", unit, unit)
    n = len(items)
    expected = (products.sum(dim=(1, 2)) - n) / (n * (n - 1))
    torch.testing.assert_close(got["self_similarity"][0], expected, rtol=0, atol=1e-5)
    adjusted = got["self_similarity"] - got.baseline
    torch.testing.assert_close(got["self_similarity_adjusted"], adjusted)
    frame = got.to_frame()
    assert len(frame) == 2 * x.shape[1]
    row = frame.query("word == 'bank' and layer == 2").iloc[0]
    assert row["gap"] == pytest.approx(row["same_sense"] - row["different_sense"])


def test_chunks_change_nothing(found, monkeypatch):
    monkeypatch.setattr(_vectors, "_CHUNK_BYTES", 1)  # a sentence at a time
    again = drift(tiny_model("llama"), FEW, correction="zscore")
    for name, values in found.values.items():
        torch.testing.assert_close(again[name], values, rtol=0, atol=1e-4, equal_nan=True)


def test_a_sample_of_vectors_serves_the_likeness_of_streams(monkeypatch, tiny):
    kept = []
    monkeypatch.setattr(_corpus, "_SAMPLE", 7)
    monkeypatch.setattr(
        _corpus,
        "layer_similarity",
        lambda x, *more, **named: kept.append(x) or layer_similarity(x, *more, **named),
    )
    got = drift(tiny("llama"), FEW)
    assert got.layers.n == 7 and kept[0].untyped_storage().nbytes() == 4 * kept[0].numel()
    reader = Reader.of(tiny("llama"), "target", None, None)
    every = read_items(reader, FEW.items).x
    distance = (kept[0][:, None] - every).flatten(2).norm(dim=-1)
    assert float(distance.amin(dim=1).max()) < 1e-3
    assert len(set(distance.argmin(dim=1).tolist())) == 7


def test_frame_columns_and_round_trip(found, tmp_path):
    frame = found.to_frame()
    promised = "word layer self_similarity self_similarity_adjusted same_sense different_sense gap"
    promised += " centroid_accuracy knn_accuracy centroid_accuracy_corrected baseline_corrected"
    assert set(promised.split()) <= set(frame.columns)
    again = Result.load(found.save(tmp_path))
    assert again.to_frame().equals(frame)
    assert again.layers.to_frame().equals(found.layers.to_frame())
    assert found.provenance.settings["correction"] == "zscore" == found.correction
    with pytest.raises(InputError, match="'gap'"):
        found["gaps"]


def test_seeds_draw_tokens_and_shuffles(found):
    same, other = (drift(tiny_model("llama"), FEW, seed=seed) for seed in (0, 1))
    assert torch.equal(same.baseline, found.baseline) and torch.equal(same.control, found.control)
    assert not torch.equal(other.baseline, same.baseline)
    assert not torch.equal(other.control, same.control)
    torch.testing.assert_close(other["gap"], same["gap"])
    assert same.baseline_corrected is None and "gap_corrected" not in same.values


def test_the_control_is_the_mean_over_words_and_the_bundled_set_the_default(found, monkeypatch):
    torch.testing.assert_close(found.control[0], found["centroid_chance"].mean(dim=0))
    assert (found.control[0, 1:] < found.control[1, 1:]).all()
    monkeypatch.setattr("wvprobe.datasets._sense_files.load_senses", lambda: FEW)
    again = drift(tiny_model("llama"), correction="zscore")
    assert torch.equal(again.baseline, found.baseline) and again.words == ("bank", "bat")


def test_more_occurrences_than_asked_for_are_drawn(tiny):
    got = drift(tiny("llama"), FEW, max_occurrences=5)
    assert got.n == (5, 5) and got.n_found == (10, 10)
    assert len(got.contexts) == 10 == len(got.item_centroid)


def test_contexts_by_brute_force(found):
    frame = found.context_frame().set_index(["context", "measure", "layer"])
    contexts = torch.tensor([["before", "after", "both"].index(c) for c in found.contexts])
    means = {}
    for number, context in enumerate(("before", "after")):
        for word in range(2):
            mine = (contexts == number) & (found.item_words == word)
            means[context, word] = float(found.item_centroid[mine, 2].mean())
        row = frame.loc[(context, "centroid_accuracy", 2)]
        assert row["mean"] == pytest.approx((means[context, 0] + means[context, 1]) / 2)
        assert row["n_words"] == 2 and row["n_items"] == int((contexts == number).sum())
    row = frame.loc[("before - after", "centroid_accuracy", 2)]
    apart = [means["before", word] - means["after", word] for word in range(2)]
    assert row["mean"] == pytest.approx(sum(apart) / 2)
    assert min(apart) <= row["low"] <= row["high"] <= max(apart)


def test_the_summary_is_over_words(found):
    row = found.summary().query("measure == 'gap' and layer == 2").iloc[0]
    assert row["mean"] == pytest.approx(float(found["gap"][:, 2].mean()))
    assert row["low"] == pytest.approx(float(found["gap"][:, 2].min()))
    assert row["n_words"] == 2
    kinds = found.summary(same_pos=True), found.summary(same_pos=False)
    assert [k.query("measure == 'gap'")["n_words"].max() for k in kinds] == [
        sum(found.same_pos),
        2 - sum(found.same_pos),
    ]
    alone = drift(tiny_model("llama"), FEW.only("bank")).summary()
    assert alone["low"].isna().all() and alone["mean"].notna().any()


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_the_last_token_is_the_sentences_own(family, tiny):
    model = tiny(family)
    reader = Reader.of(model, "last_token", None, None)
    read = read_items(reader, FEW.items[:3])
    for number, item in enumerate(FEW.items[:3]):
        seen = capture(model, item.sentence, "stream")
        at = max(p for p, added in enumerate(seen.special[0]) if not added)
        assert int(read.at[number]) == at
        torch.testing.assert_close(read.x[number], seen["stream"][0, at], rtol=1e-4, atol=1e-4)


def test_a_word_of_several_tokens_is_pooled(tiny):
    model = tiny("gpt2")
    items = BUNDLED.only("spring").items[:3]
    spans = [word_at(encode(model, i.sentence), i.start, i.end) for i in items]
    assert min(len(span.tokens) for span in spans) > 1
    for pool, picked in (("last", [-1]), ("first", [0]), ("mean", slice(None))):
        read = read_items(Reader.of(model, "target", pool, None), items)
        for number, span in enumerate(spans):
            seen = capture(model, span.text, "stream")["stream"][0]
            expected = seen[torch.tensor(span.tokens)[picked]].mean(dim=0)
            torch.testing.assert_close(read.x[number], expected, rtol=1e-4, atol=1e-4)


def test_random_tokens_are_neither_targets_nor_added(tiny, monkeypatch):
    model = tiny("bert")
    reader = Reader.of(model, "target", None, None)
    got = random_tokens(reader, FEW.items, torch.Generator().manual_seed(0))
    free = []
    for item in FEW:
        seen = capture(model, item.sentence, "stream")
        target = word_at(encode(model, item.sentence), item.start, item.end).tokens
        for p, added in enumerate(seen.special[0]):
            if not added and p not in target:
                free.append(seen["stream"][0, p])
    assert len(got.x) == len(FEW)
    exact = "donot_use_mm_for_euclid_dist"
    distance = torch.cdist(got.x.flatten(1), torch.stack(free).flatten(1), compute_mode=exact)
    assert float(distance.amin(dim=1).max()) < 1e-3
    assert int(got.counts.sum()) == len(free)
    monkeypatch.setattr(_baseline, "SENTENCES", 7)
    few = random_tokens(reader, FEW.items, torch.Generator().manual_seed(0))
    assert len(few.x) == 7


def test_position_matched_baseline_by_brute_force(monkeypatch):
    monkeypatch.setattr(_baseline, "_LEAST", 2)
    generator = torch.Generator().manual_seed(0)
    halves = torch.randn(2, 3, 5, 1, 11, generator=generator)  # half, sentence, pos, layer, d
    unit = halves / halves.norm(dim=-1, keepdim=True)
    counts = torch.full((2, 5), 3.0)
    counts[1, 4] = 1  # too few there: position 3 stands in
    tokens = RandomTokens(halves[0, :, 0], unit.sum(dim=1), counts, generator)
    positions = [1, 1, 2, 4]
    stand_in = [1, 1, 2, 3]

    def pair(p, q):
        a, b = unit[0, :, stand_in[p], 0], unit[1, :, stand_in[q], 0]
        return mean(float(x @ y) for x in a for y in b)

    places = range(4)
    expected = mean(pair(p, q) for p in places for q in places if p != q)
    assert float(tokens.matched(positions)) == pytest.approx(expected, abs=1e-6)
    assert bool(tokens.matched([1]).isnan())


def test_rogue_dimensions_by_brute_force():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, 2, 7, generator=generator)
    x[:, 1, 3] += 20  # one dimension makes all vectors alike
    tokens = RandomTokens(x, torch.zeros(2, 1, 2, 7), torch.zeros(2, 1), generator)
    got = tokens.rogue(rank=7)
    unit = (x / x.norm(dim=-1, keepdim=True)).double()
    pairs = [(i, j) for i in range(13) for j in range(13) if i != j]
    total = mean(float(unit[i, 1] @ unit[j, 1]) for i, j in pairs)
    assert float(tokens.cosine()[1]) == pytest.approx(total, rel=1e-6)
    share = mean(float(unit[i, 1, 3] * unit[j, 1, 3]) for i, j in pairs) / total
    assert int(got.dimensions[1, 0]) == 3
    assert float(got.shares[1, 0]) == pytest.approx(share, rel=1e-6)
    torch.testing.assert_close(got.shares.sum(dim=-1), torch.ones(2, dtype=torch.float64))


def test_a_vector_of_zeros_has_cosine_0_with_all():
    x = torch.randn(7, 2, 5, generator=torch.Generator().manual_seed(0))
    x[3] = 0.0
    found = _baseline.mean_cosine(x)
    for layer in range(2):
        pairs = [cosine(x[i, layer], x[j, layer]) for i in range(7) for j in range(7) if i != j]
        assert float(found[layer]) == pytest.approx(mean(pairs), abs=1e-6)


def test_where_the_last_token_is_read_a_word_may_be_drawn(tiny):
    item = FEW.items[0]
    encoding = encode(tiny("llama"), item.sentence)
    spans = word_at(encoding, item.start, item.end).tokens
    for position, expected in (("target", list(spans)), ("last_token", [])):
        reader = Reader.of(tiny("llama"), position, None, None)
        assert _baseline._targets(reader, encoding, [item]) == expected


def test_as_many_random_tokens_as_occurrences():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 1, 5, generator=generator)
    tokens = RandomTokens(x, torch.zeros(2, 1, 1, 5), torch.zeros(2, 1), generator)
    s = torch.linalg.svdvals(x[:, 0].double()).square()
    assert float(tokens.explained(50, centred=False)) == pytest.approx(float(s[0] / s.sum()))
    assert float(tokens.explained(1, centred=False)) == pytest.approx(1.0)
    # More occurrences than tokens: all tokens there are.
    assert torch.equal(tokens.explained(90, centred=False), tokens.explained(50, centred=False))


@pytest.mark.parametrize(("n", "d"), [(31, 7), (17, 211)])
def test_corrections_of_the_tokens_they_are_fitted_on(n, d):
    from sklearn.decomposition import PCA

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, d, generator=generator) * torch.linspace(0.5, 3, d) + 4
    x[:, 1, 0] = 2.5  # a dimension that never moves
    centred = x - x.mean(dim=0)
    torch.testing.assert_close(fit_correction(x, "mean")(x), centred, rtol=0, atol=1e-5)
    scored = fit_correction(x, "zscore")(x)
    assert float(scored.mean(dim=0).abs().max()) < 1e-5
    expected = torch.ones(2, d)
    expected[1, 0] = 0
    torch.testing.assert_close(scored.std(dim=0), expected, rtol=0, atol=1e-4)
    top = fit_correction(x, "top_components")(x)
    components = max(1, round(d / 100))
    for layer in range(2):
        y = centred[:, layer].double().numpy()
        pca = PCA(components, svd_solver="full").fit(y)
        rest = y - pca.transform(y) @ pca.components_
        torch.testing.assert_close(top[:, layer].double().numpy(), rest, rtol=0, atol=1e-4)
    with pytest.raises(InputError, match="at least"):
        fit_correction(x[:2], "top_components")
    with pytest.raises(InputError, match="zscore"):
        fit_correction(x, "zscores")


def test_corrections_are_fitted_on_the_random_tokens(found, tiny):
    model = tiny("llama")
    generator = torch.Generator().manual_seed(0)
    reader = Reader.of(model, "target", None, None)
    # drift() draws which occurrences it measures first, and there are none too many here.
    correction = fit_correction(random_tokens(reader, FEW.items, generator).x, "zscore")
    items = [item for item in FEW if item.word == "bat"]
    x = correction(read_items(reader, items).x)
    kinds = sorted({item.sense for item in items})
    senses = torch.tensor([kinds.index(item.sense) for item in items])
    expected = measure_word(x, senses).values["gap"]
    torch.testing.assert_close(found["gap_corrected"][1], expected, rtol=0, atol=1e-5)


def test_tokens_that_are_sinks_take_no_part(tiny, monkeypatch):
    model = tiny("llama")
    monkeypatch.setattr("wvprobe._sinks.SINK_NORM", 1.3)
    got = drift(model, FEW)
    dropped = set()
    for item in FEW:
        seen = capture(model, item.sentence, "stream")["stream"][0]
        encoding = encode(model, item.sentence)
        own = [p for p, added in enumerate(encoding.special) if not added]
        norms = seen.double().norm(dim=-1)
        median = norms[own].median(dim=0).values
        at = word_at(encoding, item.start, item.end).tokens[-1]
        if bool((norms[at] > 1.3 * median).any()):
            dropped.add((item.word, item.sentence))
    assert dropped and set(got.dropped) == dropped
    assert sum(got.n) == len(FEW) - len(dropped)
    monkeypatch.setattr("wvprobe._sinks.SINK_NORM", 0.0)
    with pytest.raises(InputError, match="at least two different sentences"):
        drift(model, FEW)


def test_wrong_inputs(tiny):
    model = tiny("llama")
    with pytest.raises(InputError, match="last_token"):
        drift(model, FEW, position="last")
    with pytest.raises(InputError, match="`correction` must be one of.*top_components"):
        drift(model, FEW, correction="top")
    with pytest.raises(InputError, match="`max_occurrences` must be an int of at least 1"):
        drift(model, FEW, max_occurrences=0)
    with pytest.raises(InputError, match="four occurrences or more"):
        drift(model, SenseDataset("three", FEW.items[:3]))
    broken = tiny_model("llama")
    with torch.no_grad():
        for name, weight in broken.named_parameters():
            if "mlp" in name:
                weight.fill_(torch.nan)
    with pytest.raises(InputError, match="streams are finite"):
        drift(broken, FEW)


# Measured apart, with transformers alone: nearest centroid, leave one out, cosine, raw vectors.
SMOLLM2 = (
    *(0.506, 0.683, 0.806, 0.847, 0.859, 0.884, 0.900, 0.908, 0.910, 0.913, 0.918, 0.920, 0.921),
    *(0.921, 0.926, 0.928, 0.927, 0.927, 0.928, 0.921, 0.922, 0.918, 0.918, 0.919, 0.914, 0.913),
    *(0.913, 0.913, 0.918, 0.919, 0.920),
)
MINILM = (0.589, 0.878, 0.939, 0.953, 0.962, 0.958, 0.968)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize(("name", "expected"), [("smollm2-135m", SMOLLM2), ("minilm-l6", MINILM)])
def test_homonyms_by_stream(name, expected, shared_data):
    homonyms = load_senses(shared_data / "homonyms_en.csv")
    got = drift(wvprobe.load(name), homonyms)
    accuracy = got["centroid_accuracy"].mean(dim=0)
    torch.testing.assert_close(
        accuracy, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=0.015
    )
    assert len(homonyms) - sum(got.n) <= 5  # sinks
    # A static embedding knows no context; from block 2 on contexts beat shuffled senses by far.
    assert bool((got.control[1] < 0.56).all()) and float(accuracy[3]) > 0.8


@pytest.mark.slow
@pytest.mark.real_model
def test_a_decoder_sees_what_stands_before(smollm2, minilm):
    rows = {}
    for name, model in (("decoder", smollm2), ("encoder", minilm)):
        frame = drift(model).context_frame().query("measure == 'centroid_accuracy'")
        rows[name] = frame[frame["layer"] == frame["layer"].max()].set_index("context")
    # What stands after the word is as good as nothing to a decoder (shuffled senses give .46).
    assert rows["decoder"].loc["before", "low"] > 0.9
    assert rows["decoder"].loc["after", "high"] < 0.6
    assert rows["decoder"].loc["before - after", "low"] > 0.35
    assert rows["encoder"].loc["after", "low"] > 0.75
    assert rows["encoder"].loc["before - after", "high"] < 0.2
