"""Labelled words and their tokens: by hand on tiny tokenizers, whole on a treebank."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from sklearn.model_selection import StratifiedGroupKFold

import wvprobe
from wvprobe import adapters
from wvprobe.activations import read_sites
from wvprobe.datasets import LabelledDataset, LabelledSentence, load_conllu
from wvprobe.errors import InputError, TokenizerError
from wvprobe.labelled import (
    NO_TOKEN,
    SHARED_CHARACTERS,
    SHARED_TOKEN,
    TOO_LONG,
    UNREADABLE,
    Loss,
    align,
    labelled_words,
)
from wvprobe.testing import FAMILIES, tiny_model
from wvprobe.words import characters_at, encode, find_word

# Tokenizers of three kinds: byte-level pairs, metaspace pairs, WordPiece.
KINDS = ("gpt2", "llama", "bert")


def sentence(text, *words, heads=None, name="s", **labels):
    """A sentence of words, each (form, start, end) or a form that stands where it is next."""
    at, places = 0, []
    for word in words:
        if isinstance(word, str):
            at = text.index(word, at)
            places.append((word, at, at + len(word)))
            at += len(word)
        else:
            places.append(word)
    forms, starts, ends = zip(*places, strict=True)
    labels = labels or {"tag": tuple("ABCDEFGHIJKLMNOP"[: len(forms)])}
    return LabelledSentence(text, forms, starts, ends, labels, heads, name)


def dataset(*sentences, column="tag"):
    return LabelledDataset("by hand", tuple(sentences), column)


HEADED = sentence(
    "The old bank closed.",
    *("The", "old", "bank", "closed", "."),
    heads=(2, 2, 3, -1, 3),
    tag=("DET", "ADJ", "NOUN", "VERB", ""),
    lemma=("the", "old", "bank", "close", "."),
)


@pytest.mark.parametrize("family", KINDS)
def test_words_get_their_tokens(family, tiny):
    model = tiny(family)
    # Words that begin without a space, that are several tokens, and that occur twice.
    made = sentence("Zoë's bank, the bank!", *("Zoë", "'s", "bank", ",", "the", "bank", "!"))
    spans = align(encode(model, made.text), made)
    assert [span.word for span in spans] == list(made.words)
    assert [span.chars for span in spans] == list(zip(made.starts, made.ends, strict=True))
    tokens = [position for span in spans for position in span.tokens]
    assert tokens == sorted(set(tokens)) and len(spans[0].tokens) > 1
    assert spans[2] == find_word(model, made.text, "bank")
    assert spans[5].tokens == find_word(model, made.text, "bank", occurrence=1).tokens
    assert spans[5].occurrence == 1


@pytest.mark.parametrize("family", KINDS)
def test_every_loss_has_its_reason(family, tiny):
    # "bank" is one token, so its halves share it; "du" is written as one for two words; the
    # joiner alone is a character that WordPiece leaves out.
    text = "du bank \u200d light"
    shared = (("de", 0, 2), ("le", 0, 2))
    halves = (("ba", 3, 5), ("nk", 5, 7))
    made = sentence(text, *shared, *halves, ("\u200d", 8, 9), ("light", 10, 15))
    found = align(encode(tiny(family), text), made)
    reasons = [own.reason if isinstance(own, Loss) else own.word for own in found]
    joiner = NO_TOKEN if family == "bert" else "\u200d"
    assert reasons == [*[SHARED_CHARACTERS] * 2, *[SHARED_TOKEN] * 2, joiner, "light"]
    assert found[0] == Loss("s", 0, "de", SHARED_CHARACTERS, "2 words share 'du' at 0..2")
    assert "also stands for 'nk'" in found[2].detail


@pytest.mark.parametrize("family", KINDS)
def test_losses_of_whole_texts(family, tiny):
    model = tiny(family)
    long = "bank " * 300
    bos = model.tokenizer.cls_token or model.tokenizer.bos_token
    data = dataset(
        HEADED, sentence(long, "bank", name="long"), sentence(f"{bos} bank", "bank", name="bos")
    )
    found = labelled_words(model, data)
    assert found.words == ("The", "old", "bank", "closed")
    assert [(x.sentence, x.index, x.word, x.reason) for x in found.losses] == [
        ("long", 0, "bank", TOO_LONG),
        ("bos", 0, "bank", UNREADABLE),
    ]
    assert found.loss_counts == {TOO_LONG: 1, UNREADABLE: 1}
    assert "at most 257 tokens" in found.losses[0].detail
    frame = found.losses_frame()
    assert (frame["word"].tolist(), frame["label"].tolist()) == (["bank", "bank"], ["A", "A"])
    # Where no text can be read, it is not a matter of single texts.
    with pytest.raises(InputError, match="at most 257 tokens"):
        labelled_words(model, dataset(sentence(long, "bank")))


def test_no_tokenizer_is_an_error_and_no_loss():
    class Bare:
        tokenizer = None

    with pytest.raises(TokenizerError, match="must have a tokenizer"):
        labelled_words(Bare(), dataset(HEADED))


def test_what_the_words_carry(tiny):
    twice = replace(HEADED, text=HEADED.text.replace("The", "THE"), id="twice")
    found = labelled_words(tiny("llama"), dataset(HEADED, twice))
    assert (found.dataset, found.column, found.within) == ("by hand", "tag", None)
    assert found.labels == ("DET", "ADJ", "NOUN", "VERB") * 2
    assert found.lemmas[:4] == ("the", "old", "bank", "close")
    assert found.sentences == (0,) * 8  # one text but for its case: one group
    assert found.places == tuple((s, w) for s in range(2) for w in range(4))
    assert found.heads == (2, 2, 3, None, 6, 6, 7, None)
    assert found.texts == (HEADED.text,) * 4 + (twice.text,) * 4
    assert found.left_out == {"no label": 2} and not found.losses
    frame = found.to_frame()
    assert frame["head"].isna().tolist() == [False, False, False, True] * 2
    assert frame["tokens"].tolist() == [span.tokens for span in found.spans]
    assert found.settings["words"] == 8 and found.settings["seed"] == 0


def test_a_governor_that_is_left_out_is_none(tiny):
    found = labelled_words(tiny("llama"), dataset(HEADED), labels=("DET", "ADJ", "VERB"))
    assert found.heads == (None, None, None)
    assert found.left_out == {"no label": 1, "another label": 1}
    with pytest.raises(InputError, match="Did you mean 'NOUN'"):
        labelled_words(tiny("llama"), dataset(HEADED), labels=("NOUNS",))
    with pytest.raises(InputError, match="`column` must be one of"):
        labelled_words(tiny("llama"), dataset(HEADED), column="upos")


WORDS = ("bank", "river", "light", "house", "boat", "road")


def many():
    """Thirty sentences of six words, the last ten of them texts that stood there before."""
    texts = [" ".join(WORDS[(i + j) % 6] for j in range(6)) + "!" * i for i in range(20)]
    return dataset(
        *(
            sentence(text, *text.rstrip("!").split(), name=str(i), tag=tuple("AAABBC"))
            for i, text in enumerate([*texts, *texts[:10]])
        )
    )


def test_one_word_a_sentence_even_where_a_text_stands_twice(tiny):
    found = labelled_words(tiny("gpt2"), many(), per_sentence=1)
    assert Counter(found.sentences) == dict.fromkeys(range(20), 1)
    assert found.left_out == {"not drawn, by per_sentence": 160}
    assert found.places == tuple(sorted(found.places))
    # Any word can be drawn, and which is a matter of the seed alone.
    assert len({index for _, index in found.places}) > 3
    assert labelled_words(tiny("gpt2"), many(), per_sentence=1) == found
    assert labelled_words(tiny("gpt2"), many(), per_sentence=1, seed=1).places != found.places
    two = labelled_words(tiny("gpt2"), many(), per_sentence=2)
    assert set(Counter(two.sentences).values()) == {2}


def test_limits_and_rare_labels(tiny):
    model = tiny("gpt2")
    found = labelled_words(model, many(), limit=50)
    assert len(found) == 50 and found.left_out == {"not drawn, by limit": 130}
    assert found.places == tuple(sorted(found.places))
    common = labelled_words(model, many(), min_count=31)
    assert Counter(common.labels) == {"A": 90, "B": 60}
    assert common.left_out == {"a label rarer than min_count": 30}
    # A label that the draw makes rare goes, too: what is left has min_count words each.
    drawn = labelled_words(model, many(), limit=12, min_count=4)
    assert min(Counter(drawn.labels).values()) >= 4 and len(drawn) < 12
    with pytest.raises(InputError, match="a set with labelled words left to read"):
        labelled_words(model, many(), min_count=500)


@pytest.mark.parametrize(
    "bad", [{"per_sentence": 0}, {"limit": 0}, {"limit": True}, {"min_count": -1}]
)
def test_bad_numbers_are_refused(bad, tiny):
    with pytest.raises(InputError, match=f"`{next(iter(bad))}` must be"):
        labelled_words(tiny("gpt2"), dataset(HEADED), **bad)


def test_no_text_is_on_both_sides_of_a_split(tiny):
    found = labelled_words(tiny("gpt2"), many())
    folds = StratifiedGroupKFold(5).split(found.labels, found.labels, found.sentences)
    for train, test in folds:
        assert not {found.texts[i] for i in train} & {found.texts[i] for i in test}
    # Labels vary within a group, so that permuting within groups says something.
    inside = [n for n, group in enumerate(found.sentences) if group == 0]
    assert len({found.labels[n] for n in inside}) > 1


def test_senses(tiny):
    senses = wvprobe.load_senses().only("bank")
    found = labelled_words(tiny("llama"), senses)
    assert (found.column, found.within, set(found.lemmas)) == ("sense", "lemma", {"bank"})
    assert found.labels == tuple(item.sense for item in senses)
    assert found.words == tuple(item.target for item in senses)
    texts = {item.sentence: None for item in senses}
    assert len(set(found.sentences)) == len(texts)
    assert labelled_words(tiny("llama"), senses, column="pos").labels[0] == senses.items[0].pos


def test_tokens_of_a_piece_of_a_text(tiny):
    encoding = encode(tiny("gpt2"), "Don't! An embankment.")
    assert characters_at(encoding, 3, 5).strings == ("'", "t")
    assert characters_at(encoding, 3, 5).occurrence == 0
    for start, end in [(5, 5), (5, 99), (-1, 2), (6, 9)]:
        with pytest.raises(InputError, match="a place in the 21 characters"):
            characters_at(encoding, start, end)
    with pytest.raises(InputError, match="`encoding` must be of"):
        align(encoding, HEADED)


class Lying:
    """A tokenizer whose offsets begin anew with every token, as some do behind an odd byte."""

    def __init__(self, tokenizer):
        self.inner = tokenizer

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, text, **kwargs):
        encoded = self.inner(text, **kwargs)
        if "offset_mapping" in encoded:
            encoded["offset_mapping"] = [
                (0, end - start) for start, end in encoded["offset_mapping"]
            ]
        return encoded


@pytest.mark.parametrize("family", KINDS)
def test_wrong_offsets_move_no_word(family, tiny):
    expected = labelled_words(tiny(family), dataset(HEADED))
    model = tiny_model(family)
    model._tokenizer = Lying(model.tokenizer)
    found = labelled_words(model, dataset(HEADED))
    assert {span.source for span in found.spans} == {"decoding"}
    assert [span.tokens for span in found.spans] == [span.tokens for span in expected.spans]


# --- one forward for the words of a text ---

SITES = ("stream", "q", "k", "v", "z", "head_out", "attn_added", "pattern", "scores")


@pytest.mark.parametrize(
    ("family", "pool"),
    [*((family, None) for family in FAMILIES), *(("llama", p) for p in ("first", "mean"))],
)
def test_words_of_one_text_share_a_forward(family, pool, tiny, monkeypatch):
    model = tiny(family)
    texts = ("The river bank is close to here.", "She keeps money in the embankment.")
    asked = [(0, "bank"), (1, "embankment"), (0, "here"), (1, "money"), (1, "She")]
    spans = [find_word(model, texts[text], word) for text, word in asked]
    items = [span.text for span in spans]
    rows, run = [], adapters.run_backbone
    monkeypatch.setattr(
        adapters, "run_backbone", lambda m, t, *rest: (rows.append(len(t)), run(m, t, *rest))
    )
    alone = read_sites(model, items, SITES, words=spans, pool=pool)
    assert sum(rows) == 5
    rows.clear()
    shared = read_sites(model, items, SITES, words=spans, pool=pool, share=True)
    assert sum(rows) == 2
    assert shared.positions == alone.positions and shared.words == alone.words
    for site in SITES:
        size = float(alone[site].nan_to_num().abs().max())
        torch.testing.assert_close(
            shared[site], alone[site], rtol=1e-5, atol=1e-5 * size, equal_nan=True
        )


def test_sharing_needs_words_or_positions(tiny):
    texts = ["The bank.", "The bank.", "A boat."]
    with pytest.raises(InputError, match="`share` reads words or positions"):
        read_sites(tiny("gpt2"), texts, "v", share=True)
    shared = read_sites(tiny("gpt2"), texts, "v", positions=[1, (0, 2), 1], pool="mean", share=True)
    alone = read_sites(tiny("gpt2"), texts, "v", positions=[1, (0, 2), 1], pool="mean")
    torch.testing.assert_close(shared["v"], alone["v"])


def test_spans_of_other_tokens_are_refused(tiny):
    """Positions of another tokenizer, or found without the BOS, would be read in silence."""
    text = "The river bank is closed."
    there = find_word(tiny("gpt2"), text, "bank", prepend_bos=False)
    with pytest.raises(InputError, match="same prepend_bos"):
        read_sites(tiny("gpt2"), [text], "v", words=[there])
    assert read_sites(tiny("gpt2"), [text], "v", words=[there], prepend_bos=False)
    other = find_word(tiny("bert"), text, "closed")
    with pytest.raises(InputError, match="which are others here"):
        read_sites(tiny("gpt2"), [text], "v", words=[other])
    found = labelled_words(tiny("gpt2"), dataset(HEADED), prepend_bos=False)
    assert found.spans[0].tokens[0] == 0 and found.settings["prepend_bos"] is False


# --- a whole treebank ---


def lost_by_offsets(model, made):
    """Return the indices of the words that share a token, from the tokenizer's own offsets."""
    offsets = model.tokenizer(made.text, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    owner = {}
    for index, (start, end) in enumerate(zip(made.starts, made.ends, strict=True)):
        owner.update(dict.fromkeys(range(start, end), index))
    lost = set()
    for start, end in offsets:
        owners = {owner[at] for at in range(start, end) if at in owner}
        lost |= owners if len(owners) > 1 else set()
    return lost


def check_treebank(model, data, limit):
    data = replace(data, sentences=data.sentences[:limit])
    found = labelled_words(model, data)
    assert len(data) == limit and len(found) + len(found.losses) == len(data.words)
    lost = {(x.sentence, x.index) for x in found.losses}
    expected = {(s.id, index) for s in data for index in lost_by_offsets(model, s)}
    assert lost == expected
    assert set(found.loss_counts) <= {SHARED_TOKEN}
    tokenizer, lower = model.tokenizer, model.tokenizer.cls_token is not None
    for span in found.spans[::11]:
        ids = encode(model, span.text).ids
        wanted = span.word
        if lower:  # what WordPiece makes of the word alone
            wanted = tokenizer.decode(tokenizer(wanted, add_special_tokens=False)["input_ids"])
        spelled = tokenizer.decode([ids[position] for position in span.tokens])
        assert spelled.replace(" ", "").removeprefix("##") == wanted.replace(" ", "")
    return found


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(f, marks=pytest.mark.ci) for f in ("gpt2", "bert"))]
)
def test_a_treebank_on_tiny_tokenizers(family, tiny, shared_data):
    data = load_conllu(shared_data / "ud_english_ewt" / "en_ewt-ud-dev.conllu")
    # Tiny tokenizers write most words letter by letter, beyond the tiny models' context.
    short = replace(data, sentences=tuple(s for s in data if len(s.text) < 90))
    check_treebank(tiny(family), short, 100)


@pytest.mark.real_model
@pytest.mark.slow
def test_a_treebank_on_real_models(smollm2, minilm, shared_data):
    data = load_conllu(shared_data / "ud_english_ewt")
    by_model = {}
    for model in (smollm2, minilm):
        found = check_treebank(model, data, 2000)
        by_model[model.cfg.model_name] = len(found.losses)
    assert all(0 < lost < 0.03 * 25_000 for lost in by_model.values()), by_model


@pytest.mark.slow
@pytest.mark.real_model
def test_many_words_of_a_treebank_are_read_in_few_forwards(smollm2, shared_data):
    data = load_conllu(shared_data / "ud_english_ewt" / "en_ewt-ud-dev.conllu")
    found = labelled_words(smollm2, replace(data, sentences=data.sentences[:40]))
    shared = read_sites(smollm2, found.texts, "v", words=found.spans, layers=[3], share=True)["v"]
    some = list(range(0, len(found), 97))
    alone = read_sites(
        smollm2,
        [found.texts[i] for i in some],
        "v",
        words=[found.spans[i] for i in some],
        layers=[3],
    )["v"]
    assert shared.shape[:3] == (len(found), 1, 3)
    torch.testing.assert_close(shared[some], alone, rtol=1e-4, atol=1e-4)
