"""What values carry: probes in closed form, their references, planted and shuffled labels."""

from collections import Counter
from itertools import cycle

import pytest
import torch

from wvprobe import adapters
from wvprobe.activations import read_sites
from wvprobe.datasets import (
    LabelledDataset,
    LabelledSentence,
    SenseDataset,
    SenseItem,
    load_prose,
    load_senses,
)
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.labelled import labelled_words
from wvprobe.plotting import figure
from wvprobe.probes import fit_probes, top_components
from wvprobe.testing import FAMILIES, tiny_model
from wvprobe.value_payload import (
    PayloadResult,
    _closed,
    _strata,
    confirm_heads,
    payload,
    payload_map,
)
from wvprobe.value_payload._averages import Averages
from wvprobe.value_payload._items import Items, Selection, items_of
from wvprobe.value_payload._scorers import ClassScorer, frames_of
from wvprobe.value_payload._strata import StratumScorer, left_out_means

NOUNS = "river bank power bridge garden window letter doctor engine market winter forest".split()
VERBS = "dropped closed opened carried painted followed watched visited answered crossed".split()


def sentences(count: int = 60) -> LabelledDataset:
    """Sentences "The NOUN VERBED the NOUN soon.", their parts of speech and their lemmas."""
    nouns, verbs = cycle(NOUNS), cycle(VERBS)
    made = []
    for number in range(count):
        words = ("The", next(nouns), next(verbs), "the", NOUNS[(5 * number + 3) % 12], "soon", ".")
        text = " ".join(words[:-1]) + "."
        starts, at = [], 0
        for word in words:
            at = text.index(word, at)
            starts.append(at)
            at += len(word)
        ends = tuple(start + len(word) for start, word in zip(starts, words, strict=True))
        tags = ("DET", "NOUN", "VERB", "DET", "NOUN", "ADV", "PUNCT")
        labels = {"upos": tags, "lemma": tuple(word.lower() for word in words)}
        made.append(LabelledSentence(text, words, tuple(starts), ends, labels, None, str(number)))
    return LabelledDataset("by hand", tuple(made), "upos")


def made_up(n: int, classes: int, *, groups: int, seed: int = 0) -> Items:
    """Items without texts: labels and groups drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=generator).tolist()
    own = torch.randint(groups, (n,), generator=generator).tolist()
    return Items((), tuple(map(str, labels)), tuple(own), None, frozenset(), "", "", None, {})


class Described(Items):
    """Items whose types are their labels' numbers, since they have no words."""

    def __len__(self):
        return len(self.labels)

    @property
    def types(self):
        return [str(number % 17) for number in range(len(self.labels))]


def scorer(items: Items, method="lda", penalty=None, *, balanced=False, control=0, folds=5):
    given = Described(**{name: getattr(items, name) for name in Items.__dataclass_fields__})
    probe = _closed.Probe(method, penalty, balanced)
    return ClassScorer(given, probe, folds=folds, balanced=balanced, control_draws=control, seed=0)


def features(items: Items, width: int, *, sites: int = 1, signal: float = 0.8, seed: int = 1):
    """Features with class means of their own, uneven scales and a large common offset."""
    generator = torch.Generator().manual_seed(seed)
    n = len(items.labels)
    y = torch.tensor([int(label) for label in items.labels])
    means = signal * torch.randn(sites, int(y.max()) + 1, width, generator=generator)
    x = torch.randn(n, sites, width, generator=generator) + means[:, y].transpose(0, 1)
    return x * torch.logspace(-1, 1, width) + 30.0


@pytest.mark.parametrize("method", ["lda", "least_squares"])
@pytest.mark.parametrize("penalty", [0.03, 0.5])
def test_closed_forms_say_what_fit_probes_says(method, penalty):
    items = made_up(211, 3, groups=41)
    x = features(items, 7, sites=2, signal=0.4)
    right, control = scorer(items, method, penalty).right(x)
    found = fit_probes(
        x,
        items.labels,
        groups=[str(group) for group in items.groups],
        method=method,
        penalty=penalty,
        description_length=False,
        predictions=True,
    )
    y = torch.tensor([int(label) for label in items.labels])
    assert control is None
    assert torch.equal(right.T.bool(), found.predictions == y[:, None])
    assert 0.4 < float(right.mean()) < 0.95


def test_projections_and_components_take_the_inputs_moments():
    items = made_up(230, 3, groups=60)
    x = features(items, 23)[:, 0]
    one = scorer(items, penalty=0.1)
    mean, scores = one.random(x, 5, 11, seed=3)
    frames = frames_of(x, 5, 11, 3)
    assert torch.allclose(frames.mT @ frames, torch.eye(5).expand(11, 5, 5), atol=1e-5)
    itemwise, _ = one.right(torch.einsum("id,rdw->irw", x, frames))
    # A prediction on the very edge may fall either way.
    assert (mean - itemwise.mean(dim=0)).abs().sum() <= 1.0
    assert torch.allclose(scores[:, 0].float(), itemwise.mean(dim=1), atol=2 / 230)
    found = fit_probes(
        x,
        items.labels,
        groups=[str(group) for group in items.groups],
        method="lda",
        penalty=0.1,
        references={"pca": top_components(x, 5)},
        description_length=False,
    )
    mine = float(one.components(x, 5).mean())
    assert mine == pytest.approx(float(found.reference_scores["pca"]), abs=2 / 230)


def test_shrinkage_is_the_oracle_approximation_and_vanishes_with_many_items():
    for n, width in ((40, 13), (4_000, 13)):
        generator = torch.Generator().manual_seed(0)
        y = torch.arange(n) % 3
        x = torch.randn(n, width, generator=generator, dtype=torch.float64)
        x = x @ torch.randn(width, width, generator=generator, dtype=torch.float64)
        given = _closed.shifted(x[:, None])
        train = _closed.training_of(given, y, 3, torch.ones(n).bool())
        moments = _closed.closed_forms.Moments(train.means, train.second, train.counts)
        found = float(_closed.oracle_shrinkage(moments))
        residual = x - torch.stack([x[y == k].mean(dim=0) for k in range(3)])[y]
        s = residual.T @ residual / n
        square, trace = float((s @ s).trace()), float(s.trace())
        above = (1 - 2 / width) * square + trace**2
        below = (n - 3 + 1 - 2 / width) * (square - trace**2 / width)
        assert found == pytest.approx(above / below, rel=1e-9)
        assert (0.02 < found < 1) if n == 40 else found < 0.01


def test_balanced_accuracy_is_the_mean_over_classes():
    items = made_up(300, 3, groups=300)
    labels = tuple("0" if label == "1" and i % 4 else label for i, label in enumerate(items.labels))
    items = Items(**{**vars(items), "labels": labels})
    x = features(items, 5, signal=0.3)
    one = scorer(items, balanced=True)
    right = one.right(x)[0]
    y = torch.tensor([int(label) for label in labels])
    by_hand = torch.stack([right[0, y == k].mean() for k in range(3)]).mean()
    both = Averages(one.weights, one.groups, 0)(right)
    assert float(both.value[0]) == pytest.approx(float(by_hand), abs=1e-6)
    # Equal priors: the rare class is not given up, as it is with its own share as prior.
    plain = scorer(items).right(x)[0]
    assert right[0, y == 1].mean() > plain[0, y == 1].mean()
    assert float(Averages(one.weights, one.groups, 0)(one.majority[None]).value[0]) == (
        pytest.approx(1 / 3)
    )


def test_control_tasks_of_word_types_are_learnt_from_types_alone():
    items = made_up(340, 4, groups=340)
    types = torch.arange(340) % 17
    codes = torch.nn.functional.one_hot(types, 17).float()
    noise = 0.05 * torch.randn(340, 17, generator=torch.Generator().manual_seed(2))
    one = scorer(items, control=3)
    own, control = one.right((codes + noise)[:, None])
    assert control.mean() > 0.99 and own.mean() < 0.5
    unrelated = features(made_up(340, 4, groups=340, seed=5), 7, signal=0.0)
    assert one.right(unrelated)[1].mean() < 0.5


def stratum_items(seed: int = 0) -> Items:
    """Three lemmas of different sizes, one of them with three senses."""
    lemmas = ("a",) * 11 + ("b",) * 8 + ("c",) * 11
    senses = ("x",) * 5 + ("y",) * 6 + ("x", "y") * 4 + ("x", "y", "z") * 3 + ("x", "y")
    return Items(
        (), senses, lemmas, lemmas, frozenset({"a", "c"}), "", "sense", None, {"seed": seed}
    )


def centroid_by_hand(x, labels, item) -> float:
    likeness = {}
    for sense in set(labels):
        others = [i for i, label in enumerate(labels) if label == sense and i != item]
        mean = x[others].double().mean(dim=0)
        likeness[sense] = float(torch.cosine_similarity(mean, x[item].double(), dim=0))
    return float(max(likeness, key=likeness.get) == labels[item])


def stratum_scorer(items: Items, control: int = 0, method: str = "centroid") -> StratumScorer:
    given = Described(**{name: getattr(items, name) for name in Items.__dataclass_fields__})
    return StratumScorer(given, method=method, folds=3, control_draws=control, seed=0)


def test_senses_are_given_by_the_nearest_centroid_of_their_own_lemma():
    items = stratum_items()
    x = torch.randn(30, 2, 7, generator=torch.Generator().manual_seed(0)) + 0.3
    one = stratum_scorer(items)
    right, control = one.right(x)
    lemmas = list(items.strata)
    for lemma in "abc":
        own = [i for i, name in enumerate(lemmas) if name == lemma]
        for site in range(2):
            labels = [items.labels[i] for i in own]
            expected = [centroid_by_hand(x[own, site], labels, i) for i in range(len(own))]
            assert right[site, own].tolist() == expected
    assert control is None
    score = Averages(one.weights, one.groups, 0)(right).value[1]
    means = [right[1, [i for i, n in enumerate(lemmas) if n == k]].mean() for k in "abc"]
    assert float(score) == pytest.approx(float(sum(means) / 3), abs=1e-6)
    mean, scores = one.random(x[:, 0], 4, 6, seed=1)
    projected = torch.einsum("id,rdw->irw", x[:, 0], frames_of(x[:, 0], 4, 6, 1))
    assert torch.allclose(mean, one.right(projected)[0].mean(dim=0), atol=1e-6)
    whole = Averages(one.weights, one.groups, 0)
    draws = whole(one.right(projected)[0]).value
    assert torch.allclose(whole.of_units(scores), draws, atol=1e-6)
    few = Averages(one.weights, one.groups, 0, one.groups != 1)
    some = few(one.right(projected)[0]).value
    assert torch.allclose(few.of_units(scores), some, atol=1e-6)
    assert one.majority[0] == pytest.approx(6 / 11)


def test_distances_between_senses_do_not_depend_on_the_features_units(monkeypatch):
    items = stratum_items()
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(30, 1, 3, generator=generator, dtype=torch.float64)
    x[:, 0, 0] += torch.tensor([{"x": 1.5, "y": -1.5, "z": 0.0}[s] for s in items.labels])
    one = stratum_scorer(items, method="lda")
    white = one._whitened(x)[:, 0]
    right = one.right(x)[0][0]
    lemmas, scores = list(items.strata), torch.zeros(30)
    for item in range(30):
        own = [i for i, name in enumerate(lemmas) if name == lemmas[item]]
        distances = {}
        for sense in {items.labels[i] for i in own}:
            rest = [i for i in own if items.labels[i] == sense and i != item]
            gap = white[item] - white[rest].mean(dim=0)
            # The mean of the squared distance to the true mean, whatever the covariance.
            spread = white[rest].var(dim=0).sum() / len(rest) if len(rest) > 1 else 0.0
            distances[sense] = float(gap @ gap) - float(spread)
        scores[item] = float(min(distances, key=distances.get) == items.labels[item])
    assert torch.equal(right, scores) and right.mean() > 0.6
    assert torch.equal(one.right(x * torch.tensor([1e-3, 1.0, 1e3]) + 10.0)[0][0], right)
    # A lemma's own items take no part in what its distances are measured by.
    far = x.clone()
    here = torch.tensor([name == "a" for name in lemmas])
    far[here] *= 50
    assert torch.allclose(one._whitened(far)[here, 0], 50 * white[here])
    # But for the shrinkage, nothing depends on which combinations of features are looked at.
    monkeypatch.setattr(_strata, "shrinkage_of", lambda within, freedom: within[:, 0, 0] * 0.0)
    mixing = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    assert torch.equal(one.right(x)[0], one.right(x @ mixing)[0])


def test_leaving_out_gives_no_label_away():
    x = torch.tensor([[0.0, 1.0], [0.1, 1.0], [5.0, 0.0]]).double()
    member = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).double()
    assert left_out_means(x @ x.T, member).tolist() == [1.0, 1.0, 0.0]  # alone: wrong
    # Vectors that are all the same, and vectors that know nothing, are told apart by chance.
    senses = torch.nn.functional.one_hot(torch.arange(20) % 2).double()
    same = torch.full((20, 5), 0.3).double()
    assert left_out_means(same @ same.T, senses).tolist() == [0.5] * 20
    for width, scale in ((3, 0.01), (3, 30.0), (60, 1.0)):
        generator = torch.Generator().manual_seed(width)
        noise = scale * torch.randn(400, 20, width, generator=generator).double() + 1.0
        told = left_out_means(noise @ noise.mT, senses)
        assert float(told.mean()) == pytest.approx(0.5, abs=0.02)
    data = stratum_items()
    one = stratum_scorer(data, method="lda")
    nothing = one.right(torch.full((30, 1, 4), 0.7))[0]
    counts = {"a": 2, "b": 2, "c": 3}
    alike = torch.tensor([1 / counts[lemma] for lemma in data.strata])
    assert torch.allclose(nothing[0], alike)


def test_permuted_senses_stay_in_their_lemma_and_carry_nothing():
    items = stratum_items()
    one = stratum_scorer(items, control=40)
    x = torch.zeros(30, 1, 3)
    x[:, 0, 0] = torch.tensor([{"x": 1.0, "y": -1.0, "z": 0.0}[s] for s in items.labels])
    x[:, 0, 1] = torch.tensor([float(s == "z") for s in items.labels]) + 0.01
    right, control = one.right(x)
    assert bool((right == 1).all()) and control.mean() < 0.55
    for batch, (where, labels, _) in zip(one._permuted[0], one._batches, strict=True):
        assert torch.equal(batch.sort(dim=1).values, labels.sort(dim=1).values), where


def planted():
    """A llama in whose embedding a label lies along one direction that one head alone reads."""
    model = tiny_model("llama")
    arch = adapters.architecture(model)
    words = {}  # one for each last token
    for word in " ".join(load_prose("calibration")).lower().split():
        if word.isalpha():
            words.setdefault(int(model.to_tokens(f"The {word}")[0, -1]), word)
    ids = list(words)[:90]
    bits = (torch.randperm(len(ids), generator=torch.Generator().manual_seed(7)) % 2).tolist()
    direction = torch.zeros(arch.d_model)
    direction[3], direction[8] = 0.6, -0.8
    gain = adapters.attention_norm(model, arch, 0).gain.detach()
    seen = gain * direction / (gain * direction).norm()
    table = adapters.embedding_table(model)
    with torch.no_grad():
        for number, bit in zip(ids, bits, strict=True):
            table[number] += 2.0 * (2 * bit - 1) * direction
        weight = model.blocks[0].attn.v.original_component.weight  # [kv_head · d_head, d_model]
        weight -= (weight @ seen)[:, None] * seen
        weight[arch.d_head] += 3.0 * seen  # the first direction of key-value head 1
    made = []
    for number in range(3 * len(ids)):
        at = number % len(ids)
        text = f"{('The', 'One', 'Some')[number // len(ids)]} {words[ids[at]]}"
        start = text.index(" ") + 1
        labels = {"mark": ("AB"[bits[at]],)}
        place = ((words[ids[at]],), (start,), (len(text),))
        made.append(LabelledSentence(text, *place, labels, None, str(number)))
    return model, LabelledDataset("planted", tuple(made), "mark")


def test_a_planted_direction_is_found_in_the_head_that_carries_it():
    model, data = planted()
    found = payload(
        model, data, draws=20, min_count=5, per_sentence=None, groups="word", control_draws=3
    )
    # Layers above read it off the stream, too.
    first = found.to_frame().query("site == 'v' and layer == 0")
    best = first.loc[first["excess_random"].idxmax()]
    assert best["head"] == 1
    assert best["score"] > 0.9 and best["excess_random"] > 0.08
    assert best["p"] == pytest.approx(1 / 21)
    others = first[first["head"] != 1]
    assert (others["score"] < best["score"] - 0.2).all()
    assert (others["p_family"] > 0.05).all()
    assert found.grid("v", found.score)[0, 1] == best["score"]
    again = confirm_heads(
        model, data, [(0, 1), (0, 0)], min_count=5, per_sentence=None, groups="word", draws=2
    )
    assert again.scores["accuracy"][0] > 0.9 > again.scores["accuracy"][1] + 0.2


@pytest.mark.slow
def test_no_head_beats_its_references_on_shuffled_labels(tiny):
    """At a level of .05 a family of heads may do so in one of twenty; five families, none."""
    data = load_senses()
    items = [item for item in data if item.pos in ("noun", "verb")][:1200:3]
    generator = torch.Generator().manual_seed(0)
    families = []
    for seed in range(5):
        poses = torch.randint(2, (len(items),), generator=generator).tolist()
        mixed = [
            SenseItem(i.word, i.sense, "", ("noun", "verb")[p], i.sentence, i.start, i.end)
            for i, p in zip(items, poses, strict=True)
        ]
        found = payload(
            tiny("llama"), SenseDataset("mixed", tuple(mixed)), label="pos", draws=20,
            control_draws=0, groups="sentence", sites=("v",), seed=seed,
        )  # fmt: skip
        families.append(float(found.p_family.min()))
        assert abs(float(found.score.mean()) - 0.5) < 0.06
    assert min(families) > 0.05, families


SENSES = SenseDataset(
    "by hand",
    tuple(
        SenseItem(word, sense, "", pos, text, text.index(word), text.index(word) + len(word))
        for word, sense, pos, text in (
            *(
                ("bank", "river", "noun", f"The bank of the {x} river was muddy.")
                for x in "wide old slow deep".split()
            ),
            *(
                ("bank", "money", "noun", f"The bank lent the {x} man money.")
                for x in "poor old rich tall".split()
            ),
            *(
                ("watch", "clock", "noun", f"A {x} watch shows the time.")
                for x in "gold new small good".split()
            ),
            *(
                ("watch", "look", "verb", f"They watch the {x} birds.")
                for x in "grey young many small".split()
            ),
            *(
                ("seal", "animal", "noun", f"The {x} seal swam under the ice.")
                for x in "old grey small young".split()
            ),
            *(
                ("seal", "stamp", "noun", f"The {x} seal on the letter broke.")
                for x in "red wax royal heavy".split()
            ),
        )
    ),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_measured_head_by_head(tiny, family):
    model = tiny(family)
    arch = adapters.architecture(model)
    found = payload(
        model, sentences(30), sites=("v", "q", "k", "z", "attn_in"), draws=4, min_count=5,
        control_draws=1, per_sentence=3, seed=2,
    )  # fmt: skip
    frame = found.to_frame()
    # A key-value head is counted once, whatever number of query heads reads it.
    heads = {"v": arch.n_kv_heads, "k": arch.n_kv_heads, "q": arch.n_heads, "z": arch.n_heads}
    for site, count in {**heads, "attn_in": 1}.items():
        own = frame[frame["site"] == site]
        assert len(own) == arch.n_layers * count
        assert own["head"].nunique() == count and own["score"].between(0, 1).all()
        known = ["excess_random", "excess_pca", "excess_embedding", "excess_control", "low"]
        assert not own[known].isna().any().any()
    assert list(frame.columns[:6]) == ["layer", "head", "site", "score", "low", "high"]
    assert not frame.query("site == 'v'")[["excess_q", "excess_k"]].isna().any().any()
    assert frame.query("site == 'q'")["excess_q"].isna().all()
    # The same, from what capture reads, for one head.
    chosen = Selection(per_sentence=3, min_count=5, seed=2)
    items = items_of(model, sentences(30), None, chosen)
    read = read_sites(model, items.texts, "v", words=items.spans, layers=1)["v"][:, 0]
    one = ClassScorer(
        items, _closed.Probe("lda", None, False), folds=5, balanced=False, control_draws=0, seed=2
    )
    alone = one.right(read.float())[0].double().mean(dim=1)
    assert torch.allclose(alone, found.grid("v", found.score)[1], atol=1e-9)
    senses = payload(model, SENSES, draws=3, control_draws=1)
    assert senses.method == "centroid" and senses.n_groups == 3 and senses.n_items == 24
    assert senses.same_pos.n_groups == 2 and senses.same_pos.n_items == 16
    rows = [i for i, s in enumerate(SENSES) if s.word != "watch"]
    x = read_sites(model, [i.sentence for i in SENSES], "v", words=[i.target for i in SENSES])["v"]
    told = [0.0] * 24
    for word in ("bank", "watch", "seal"):
        own = [i for i, s in enumerate(SENSES) if s.word == word]
        labels = [SENSES.items[i].sense for i in own]
        for place, i in enumerate(own):
            told[i] = centroid_by_hand(x[own, 2, 0], labels, place)
    first = senses.to_frame().query("site == 'v' and layer == 2 and head == 0").iloc[0]
    if not any(a == b for a, b in zip(x[:-1, 2, 0, 0], x[1:, 2, 0, 0], strict=True)):
        assert first["score"] == pytest.approx(sum(told) / 24, abs=1e-6)
        same = senses.same_pos.grid("v", senses.same_pos.score)[2, 0]
        assert float(same) == pytest.approx(sum(told[i] for i in rows) / 16, abs=1e-6)


def test_labels_are_drawn_alike_where_asked_for(tiny):
    model, data = tiny("llama"), sentences(40)
    plain = Selection(None, None, min_count=1)
    assert Counter(items_of(model, data, None, plain).labels)["PUNCT"] == 40
    chosen = Selection(None, None, per_label=9, min_count=5, seed=3)
    items = items_of(model, data, None, chosen)
    assert set(Counter(items.labels).values()) == {9} and len(set(items.labels)) == 5
    words = labelled_words(model, data)
    known = {(s.text, s.chars): x for s, x in zip(words.spans, words.labels, strict=True)}
    assert all(known[s.text, s.chars] == x for s, x in zip(items.spans, items.labels, strict=True))
    few = items_of(model, data, None, Selection(None, 1, per_label=9, min_count=1))
    assert max(Counter(few.groups).values()) == 1
    assert items.settings["per_label"] == 9


def test_token_and_position_need_no_column(tiny):
    model = tiny("llama")
    given = {"draws": 3, "control_draws": 0, "per_sentence": 4, "sites": ("v",)}
    place = payload(model, sentences(40), label="position", **given)
    assert place.label == "position" and 2 <= len(place.classes) <= 5
    assert sorted(place.classes) == list(place.classes)
    token = payload(model, sentences(40), label="token", min_count=6, **given)
    # At layer 0 a value is a function of the token, and the embedding knows the token.
    assert float(token.grid("v", token.score)[0].min()) > 0.95
    assert float(token.reference_scores["embedding"][0]) > 0.99
    with pytest.raises(InputError, match="'token', 'position'"):
        payload(model, labelled_words(model, sentences(20)), label="lemma")


def test_what_values_drop_is_held_against_what_random_projections_drop(tiny):
    given = {"draws": 3, "control_draws": 0, "min_count": 5, "sites": ("v",)}
    found = payload(tiny("llama"), sentences(40), null_draws=3, **given)
    frame = found.to_frame()
    assert frame["excess_null"].abs().max() < 0.2 and not frame["excess_null"].isna().any()
    with pytest.raises(UnsupportedError, match="latent"):
        payload(tiny("deepseek_v3"), sentences(40), null_draws=3, **given)


@pytest.mark.slow
def test_a_reinitialised_model_is_another_of_the_same_kind(tiny):
    for family in ("llama", "bert", "gpt2"):
        model = tiny(family)
        torch.manual_seed(5)
        expected = torch.rand(1)
        torch.manual_seed(5)
        before = adapters.weight_hash(model)
        fresh = adapters.reinitialised(model, 3)
        assert torch.equal(torch.rand(1), expected), "the caller's random state moved"
        assert adapters.weight_hash(model) == before != adapters.weight_hash(fresh)
        assert adapters.weight_hash(fresh) == adapters.weight_hash(adapters.reinitialised(model, 3))
        assert adapters.architecture(fresh) == adapters.architecture(model)
        for text in ("the river bank", "x"):
            assert torch.equal(fresh.to_tokens(text), model.to_tokens(text))
        given = {"draws": 3, "control_draws": 0, "min_count": 5, "sites": ("v",), "seed": 3}
        found = payload(model, sentences(20), reinitialised=True, **given)
        other = payload(fresh, sentences(20), **given)
        assert torch.equal(found.reference_scores["reinitialised"], other.score)
        assert torch.allclose(found.excess["reinitialised"], found.score - other.score)


def test_results_are_drawn_saved_and_put_side_by_side(tiny, tmp_path):
    model = tiny("llama")
    given = {"draws": 4, "control_draws": 1, "min_count": 5}
    found = payload(model, sentences(30), **given)
    senses = payload(model, SENSES, draws=3, control_draws=1)
    again = PayloadResult.load(senses.save(tmp_path / "senses"))
    assert again.to_frame().equals(senses.to_frame())
    assert again.same_pos.labour.contrasts_frame().equals(senses.same_pos.labour.contrasts_frame())
    drawn = figure(found)
    best = found.best(1).iloc[0]
    assert f"L{best['layer']}H{best['head']}" in drawn.layout.title.text
    score, random, over_q = drawn.data
    assert score.z[best["head"]][best["layer"]] == best["score"]
    assert random.z[best["head"]][best["layer"]] == best["excess_random"]
    assert random.zmin == -random.zmax == over_q.zmin
    bands = figure(found.labour)
    lines = {trace.name: list(trace.y) for trace in bands.data if trace.name}
    assert lines["q"] == found.labour.score[1].tolist()
    assert lines["v − k"] == found.labour.contrast[1].tolist()
    both = payload_map({"part of speech": found, "sense": senses})
    assert len(figure(both).data) == 2 and both.to_frame()["property"].nunique() == 2
    with pytest.raises(InputError, match="of one model"):
        payload_map({"a": found, "b": payload(tiny("qwen2"), sentences(30), **given)})


def test_the_division_of_labour_sums_up_the_frame(tiny):
    found = payload(tiny("llama"), sentences(30), draws=4, control_draws=1, min_count=5)
    frame, labour = found.to_frame(), found.labour
    means = frame.groupby(["site", "layer"])[["score", "excess_random"]].mean()
    for place, site in enumerate(("v", "q", "k")):
        assert labour.score[place].tolist() == pytest.approx(means.loc[site]["score"].tolist())
        assert labour.excess[place].tolist() == pytest.approx(
            means.loc[site]["excess_random"].tolist()
        )
    difference = means.loc["v"]["score"] - means.loc["q"]["score"]
    assert labour.contrast[0].tolist() == pytest.approx(difference.tolist())
    row = labour.contrasts_frame().query("reference == 'control' and against == 'k'").iloc[0]
    by_hand = frame.groupby("site")["excess_control"].mean()
    assert row["value"] == pytest.approx(by_hand["v"] - by_hand["k"])
    assert row["low"] <= row["value"] <= row["high"]
    v = labour.score[0]
    assert float(labour.range[0]) == pytest.approx(float(v.max() - v.min()))
    assert labour.range[1] <= labour.range[0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"label": "uposs"}, "Did you mean 'upos'"),
        ({"sites": ("w",)}, "one of 'v', 'q', 'k', 'z', 'attn_in'"),
        ({"draws": 1}, "at least 2"),
        ({"folds": 1}, "at least 2"),
        ({"penalty": 1.5}, "from 0 to 1"),
        ({"method": "logistic"}, "'lda', 'least_squares'"),
        ({"method": "least_squares", "score": "balanced_accuracy"}, "Use method='lda'"),
        ({"groups": "lemmas"}, "Did you mean 'lemma'"),
        ({"min_count": 10_000}, "labelled words left"),
    ],
)
def test_what_cannot_be_used_is_refused(tiny, arguments, says):
    with pytest.raises(InputError, match=says):
        payload(tiny("llama"), sentences(20), **{"draws": 2, "min_count": 5, **arguments})


def test_other_data_is_refused(tiny):
    with pytest.raises(InputError, match="'auto' or 'lemma'"):
        payload(tiny("llama"), SENSES, groups="sentence")
    with pytest.raises(InputError, match="left out for senses"):
        payload(tiny("llama"), SENSES, score="balanced_accuracy")


@pytest.mark.real_model
@pytest.mark.slow
def test_values_of_smollm2_know_nouns_from_verbs(smollm2):
    found = payload(smollm2, load_senses(), label="pos", draws=20, control_draws=1, limit=400)
    assert found.best(1)["score"].iloc[0] > 0.85
    assert float(found.grid("v", found.score)[0].max()) < 0.9
