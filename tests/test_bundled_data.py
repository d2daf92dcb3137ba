"""The sentences and the prose that come with the library hold what is said of them."""

import re
from collections import Counter
from itertools import combinations

import pytest

from wvprobe.datasets import load_prose, load_senses

# Words of a gloss that say nothing about the sense.
FUNCTION_WORDS = frozenset(
    "a an the of to in on or and for with by from at that is as it its one's something someone "
    "be used into which you".split()
)


def words_of(text):
    """Return the lower-case words of a text."""
    return re.findall(r"[a-z']+", text.lower())


@pytest.fixture(scope="module")
def senses():
    return load_senses()


@pytest.fixture(scope="module")
def by_sense(senses):
    found = {}
    for item in senses:
        found.setdefault((item.word, item.sense), []).append(item)
    return found


def test_there_is_enough_of_it(senses, by_sense):
    assert len(senses.words) >= 40 and len(senses) >= 1200
    assert all(len(senses.senses(word)) >= 2 for word in senses.words)
    assert min(len(items) for items in by_sense.values()) >= 15
    assert len(senses.senses("bank")) >= 3


def test_ten_words_have_a_noun_and_a_verb_sense(senses):
    kinds = {}
    for item in senses:
        kinds.setdefault(item.word, set()).add(item.pos)
    assert sum({"noun", "verb"} <= found for found in kinds.values()) >= 10
    assert set().union(*kinds.values()) <= {"noun", "verb", "adjective"}


def test_one_occurrence_a_sentence_and_exact_spans(senses):
    for item in senses:
        assert item.target == item.word, item
        # Not even inside another word: a reader that matches parts of words finds no second one.
        assert item.sentence.lower().count(item.word) == 1, item


def test_one_gloss_and_part_of_speech_a_sense(by_sense):
    for items in by_sense.values():
        assert len({(item.gloss, item.pos) for item in items}) == 1


def test_no_near_duplicates(senses):
    sets = [(item.sentence, set(words_of(item.sentence))) for item in senses]
    for (one, a), (other, b) in combinations(sets, 2):
        assert len(a & b) < 0.5 * len(a | b), (one, other)


def test_senses_of_a_word_stand_at_like_positions(by_sense):
    means = {}
    for (word, sense), items in by_sense.items():
        at = [len(words_of(item.sentence[: item.start])) for item in items]
        means.setdefault(word, {})[sense] = sum(at) / len(at)
    for word, found in means.items():
        assert max(found.values()) - min(found.values()) <= 1.0, (word, found)


def test_glosses_do_not_give_the_sense_away(by_sense):
    for (word, sense), items in by_sense.items():
        for telling in set(words_of(items[0].gloss)) - FUNCTION_WORDS - {word}:
            count = sum(telling in words_of(item.sentence) for item in items)
            assert 3 * count <= len(items), (word, sense, telling, count)


def test_context_stands_on_both_sides(by_sense):
    for key, items in by_sense.items():
        count = Counter(item.context for item in items)
        assert count["before"] >= 5 and count["after"] >= 5, (key, count)


def test_prose():
    texts = {
        (genre, split): load_prose(split, genre)
        for split in ("calibration", "held-out")
        for genre in ("narrative", "explanation", "dialogue")
    }
    sizes = {key: sum(len(p.split()) for p in found) for key, found in texts.items()}
    assert sum(sizes.values()) >= 8000 and min(sizes.values()) >= 1000, sizes
    paragraphs = [p for found in texts.values() for p in found]
    assert len(set(paragraphs)) == len(paragraphs)
    assert load_prose("calibration") == sum(
        (texts[genre, "calibration"] for genre in ("narrative", "explanation", "dialogue")), ()
    )


def test_calibration_and_held_out_share_no_run_of_words():
    def runs(split):
        found = set()
        for paragraph in load_prose(split):
            words = words_of(paragraph)
            found |= {tuple(words[i : i + 7]) for i in range(len(words) - 6)}
        return found

    assert not runs("calibration") & runs("held-out")
