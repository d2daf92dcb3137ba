"""Related words found by heads, against loops over words and a model with known answers."""

import random

import pytest
import torch

from wvprobe import adapters
from wvprobe._masks import visible
from wvprobe._sinks import sink_keys
from wvprobe._statistics import mean_interval, ratio_interval
from wvprobe._types import Result
from wvprobe.activations import capture
from wvprobe.behaviour import dependency_heads
from wvprobe.datasets import LabelledDataset, LabelledSentence, load_conllu
from wvprobe.errors import InputError
from wvprobe.plotting import figure
from wvprobe.testing import induction_model, tiny_model
from wvprobe.words import find_word

# Tokens of their own for the hand-made model's tokenizer.
WORDS = (
    "bank light play river left keeps turned bag boat old open road one was water here than that "
    "into close"
).split()


def sentence(words, relations, number):
    """Words between spaces; relations: dependent -> (governor, relation)."""
    text, starts = " ".join(words), []
    for index in range(len(words)):
        starts.append(sum(len(w) + 1 for w in words[:index]))
    ends = tuple(start + len(word) for start, word in zip(starts, words, strict=True))
    heads = tuple(relations.get(i, (-1, "root"))[0] for i in range(len(words)))
    labels = tuple(relations.get(i, (-1, "root"))[1] for i in range(len(words)))
    return LabelledSentence(
        text, tuple(words), tuple(starts), ends, {"deprel": labels}, heads, f"s{number}"
    )


def treebank(count, seed=0):
    """Sentences in which "link" joins a repeated word to what followed it first; "next" is near.

    words: … a b … a …: the second a depends on b ("link"); each word of the beginning depends
    on the one before it ("next").
    """
    draw, sentences = random.Random(seed), []
    for number in range(count):
        words = draw.sample(WORDS, 9)
        first, again = draw.randrange(0, 4), draw.randrange(6, 9)
        words[again] = words[first]
        relations = {again: (first + 1, "link"), 1: (0, "next"), 2: (1, "next")}
        sentences.append(sentence(words, relations, number))
    return LabelledDataset("made up", tuple(sentences), "deprel")


@pytest.fixture(scope="module")
def known():
    return dependency_heads(induction_model(), treebank(60), min_pairs=10, progress=False)


def row(frame, **where):
    for name, value in where.items():
        frame = frame[frame[name] == value]
    assert len(frame) == 1
    return frame.iloc[0]


def test_a_head_that_finds_the_word_is_found(known):
    """The induction head finds what followed the word, which no offset in words does."""
    frame = known.to_frame()
    link = row(frame, relation="link", layer=1, head=1)
    assert link["direction"] == "dependent→governor" and link["accuracy"] > 0.95
    assert link["baseline"] < 0.5 and link["excess_low"] > 0.3
    assert link["low"] <= link["accuracy"] <= link["high"]
    assert link["excess"] == pytest.approx(link["accuracy"] - link["baseline"])
    # What the previous-token head finds, the offset −1 finds as well.
    near = row(frame, relation="next", layer=0, head=0)
    assert near["accuracy"] > 0.95 and near["baseline"] == 1 and near["offset"] == -1
    assert near["excess"] <= 0
    best = row(known.best(), relation="link", layer=1)
    assert best["head"] == 1
    table = known.specialists().set_index("layer")
    assert (
        table.loc[1, ["heads", "certain"]].tolist() == [1, 1]
        and "L1H1 link" in table.loc[1, "named"]
    )
    assert table.loc[0, "certain"] == 0


def test_a_decoder_says_what_it_cannot_see(known):
    assert set(known.directions) == {"dependent→governor"}
    assert known.left_out["link", "governor→dependent"].startswith(
        "masked: the key lies ahead in 60"
    )
    assert known.masked.tolist() == [0, 0] and known.sentences == 60
    place = known.relations.index("link")
    assert int(known.n[place, 0]) == int(known.n_sentences[place]) == 30


def test_results_are_kept_and_drawn(known, tmp_path):
    again = Result.load(known.save(tmp_path / "found"))
    assert torch.equal(again.accuracy, known.accuracy) and again.left_out == known.left_out
    drawn = figure(known)
    (heat,) = drawn.data
    link = list(heat.y).index("link")
    best = row(known.best(), relation="link", layer=1)
    assert heat.z[link][1] == best["excess"] and heat.text[link][1] == "1"
    assert heat.zmin == -heat.zmax and "60 sentences" in drawn.layout.title.text


def accuracy_by_hand(model, data, layer, head, relation, forward, items):
    """Loop over the pairs of some sentences with patterns from capture."""
    texts = [s.text for s in data]
    seen = capture(model, texts, ["pattern", "resid_pre"])
    causal = adapters.architecture(model).causal
    window = adapters.sliding_window(model, layer)
    right = total = 0
    for item in items:
        s, n = data.sentences[item], len(seen.tokens[item])
        pattern = seen["pattern"][item, layer, head, :n, :n]
        sinks, mask = sink_keys(model, seen, item)[layer], visible(n, causal=causal, window=window)
        for dependent, governor in enumerate(s.heads):
            if s.labels["deprel"][dependent] != relation:
                continue
            ask, find = (dependent, governor) if forward else (governor, dependent)
            asking, wanted = (tokens_of(model, s, word) for word in (ask, find))
            asking_at = asking[-1:] if causal else asking
            weights = pattern[list(asking_at)].double().mean(dim=0).tolist()
            keys = [
                j for j in range(n)
                if any(mask[i, j] for i in asking_at) and not sinks[j] and j not in asking
            ]  # fmt: skip
            if not set(wanted) & set(keys):
                continue
            total += 1
            right += max(keys, key=lambda j: weights[j]) in wanted
    return right / max(total, 1), total


def tokens_of(model, s, index):
    before = s.words[:index].count(s.words[index])
    return find_word(model, s.text, s.words[index], occurrence=before).tokens


@pytest.mark.parametrize("family", ["llama", "bert", "mistral", "gpt2"])
def test_accuracy_by_brute_force(family, tiny):
    model, data = tiny(family), treebank(14, seed=3)
    found = dependency_heads(model, data, min_pairs=2, progress=False, batch_size=3)
    order = torch.randperm(14, generator=torch.Generator().manual_seed(0)).tolist()
    judged, chosen = order[1::2], order[0::2]
    layer, head = 1, adapters.architecture(model).n_heads - 1
    for relation, direction in zip(found.relations, found.directions, strict=True):
        forward = direction == "dependent→governor"
        got = row(found.to_frame(), relation=relation, direction=direction, layer=layer, head=head)
        args = (model, data, layer, head, relation, forward)
        expected, n = accuracy_by_hand(*args, judged)
        assert got["n"] == n
        if not got["accuracy"] != got["accuracy"]:  # a window of 5 leaves too few pairs of "link"
            assert got["accuracy"] == pytest.approx(expected)
            other, _ = accuracy_by_hand(*args, chosen)
            offsets = [
                (g - d if forward else d - g)
                for item in chosen
                for d, g in enumerate(data.sentences[item].heads)
                if data.sentences[item].labels["deprel"][d] == relation
            ]
            if family != "mistral":
                share = max(offsets.count(o) for o in offsets) / len(offsets)
                assert got["chosen_by"] == pytest.approx(other - share)
    assert ("governor→dependent" in found.directions) == (family == "bert")


def test_words_of_several_tokens_and_of_none(tiny):
    """Any token of the word counts; a word whose token it shares with another is left out."""
    model = tiny("gpt2")
    long = "extraordinary"
    words = ["the", long, "bank", "river"]
    assert len(find_word(model, " ".join(words), long).tokens) > 1
    data = LabelledDataset(
        "long",
        tuple(
            sentence([w, *words], {2: (1, "det"), 3: (2, "amod")}, i)
            for i, w in enumerate(WORDS[4:12])
        ),
        "deprel",
    )
    found = dependency_heads(model, data, min_pairs=2, progress=False)
    assert found.relations == ("amod", "det")
    place = found.relations.index("amod")
    assert found.n[place].tolist() == [4, 4, 4]


def test_a_text_counts_once_and_some_can_be_drawn(tiny):
    data = treebank(20)
    twice = LabelledDataset("twice", data.sentences + data.sentences, "deprel")
    found = dependency_heads(tiny("llama"), twice, min_pairs=2, progress=False)
    assert found.sentences == 20
    few = dependency_heads(tiny("llama"), twice, limit=12, min_pairs=2, progress=False)
    assert few.sentences == 12 and few.provenance.settings["limit"] == 12
    none = dependency_heads(tiny("llama"), data, exclude=("next",), min_pairs=2, progress=False)
    assert set(none.relations) == {"link"}


def test_wrong_inputs(tiny):
    model, data = tiny("llama"), treebank(6)
    bare = LabelledSentence(
        "a bank", ("a", "bank"), (0, 2), (1, 6), {"upos": ("DET", "NOUN")}, None, "s"
    )
    with pytest.raises(InputError, match="load_conllu"):
        dependency_heads(model, LabelledDataset("bare", (bare,), "upos"))
    with pytest.raises(InputError, match="Lower min_pairs"):
        dependency_heads(model, data, progress=False)
    with pytest.raises(InputError, match="`min_pairs`"):
        dependency_heads(model, data, min_pairs=0)
    with pytest.raises(InputError, match="not excluded"):
        dependency_heads(model, data, exclude=("link", "next", "root"), progress=False)
    short = tiny_model("llama", max_position_embeddings=3)
    with pytest.raises(InputError, match="within the model's context"):
        dependency_heads(short, data, progress=False)


def test_ratios_of_clusters():
    parts = torch.rand(17, 3, generator=torch.Generator().manual_seed(0))
    alike = ratio_interval(parts, torch.ones(17, 3))
    for end, expected in zip(alike, mean_interval(parts), strict=True):
        torch.testing.assert_close(end, expected)
    # A share of clusters that all have it is certain, however large they are.
    sizes = torch.arange(1.0, 18.0)
    low, high = ratio_interval(sizes / 4, sizes)
    assert float(low) == pytest.approx(0.25) == float(high)


@pytest.mark.real_model
@pytest.mark.slow
def test_syntax_in_a_real_model(minilm, shared_data):
    """Objects find their verbs far beyond any offset (Clark et al. 2019 found the like in BERT)."""
    treebank = load_conllu(shared_data / "ud_english_ewt" / "en_ewt-ud-dev.conllu")
    found = dependency_heads(minilm, treebank, limit=300, min_pairs=25, progress=False)
    best = found.best().sort_values("excess", ascending=False).iloc[0]
    assert best["excess_low"] > 0.05
    assert int(found.specialists()["heads"].max()) >= 3
