"""Readers of treebanks, named entities and tables: small ones by hand, and broken ones."""

from collections import Counter
from dataclasses import replace

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wvprobe
from wvprobe.datasets import Skipped, labelled_senses, load_conllu, load_iob2, load_labels
from wvprobe.errors import DataError, InputError

# "can't" is spelled by its words, "du" is not; 4.1 and 8.1 are empty; "naïve" is no ASCII.
TREEBANK = """\
# newdoc id = d
# sent_id = first
# text = I can't see naïve Zoë, "du" 10 000.
1	I	I	PRON	PRP	Case=Nom|Number=Sing	4	nsubj	4:nsubj	_
2-3	can't	_	_	_	_	_	_	_	_
2	ca	can	AUX	MD	VerbForm=Fin	4	aux	4:aux	_
3	n't	not	PART	RB	_	4	advmod	4:advmod	_
4	see	see	VERB	VB	VerbForm=Inf	0	root	0:root	_
4.1	seen	see	VERB	VBN	_	_	_	4:conj	_
5	naïve	naïve	ADJ	JJ	Degree=Pos	6	amod	6:amod	_
6	Zoë	Zoë	PROPN	NNP	Number=Sing	4	obj	4:obj	SpaceAfter=No
7	,	,	PUNCT	,	_	6	punct	6:punct	_
8	"	"	PUNCT	``	_	6	punct	6:punct	SpaceAfter=No
8.1	_	_	_	_	_	_	_	_	_
9-10	du	_	_	_	_	_	_	_	SpaceAfter=No
9	de	de	ADP	_	_	6	case	6:case	_
10	le	le	DET	_	Number=Sing	6	det	6:det	_
11	"	"	PUNCT	''	_	6	punct	6:punct	_
12	10 000	10000	NUM	CD	NumType=Card	6	nummod	6:nummod	SpaceAfter=No
13	.	.	PUNCT	.	_	4	punct	4:punct	_

# sent_id = second
1	Go	go	VERB	VB	_	0	root	_	SpaceAfter=No
2	!	!	PUNCT	.	_	1	punct	_	_
"""
ONE = "1\tGo\tgo\tVERB\tVB\t_\t0\troot\t_\tSpaceAfter=No\n"
TWO = "2\t!\t!\tPUNCT\t.\t_\t1\tpunct\t_\t_\n"
ENTITIES = """\
# sent_id = a
# text = Ann Lee left Rome.
1	Ann	B-PER	-	-
2	Lee	I-PER	-	-
3	left	O	-	-
4	Rome	B-LOC	-	-
5	.	O	-	-

1	#	O
2	Oslo	B-LOC
"""


@pytest.fixture
def written(tmp_path):
    """Write a file; return its path."""

    def write(name, text):
        content = text if isinstance(text, bytes) else text.encode()
        (tmp_path / name).write_bytes(content)
        return tmp_path / name

    return write


def pieces(sentence):
    return [sentence.text[a:b] for a, b in zip(sentence.starts, sentence.ends, strict=True)]


def test_a_treebank(written):
    found = load_conllu(written("bank.conllu", TREEBANK))
    first, second = found
    assert (found.name, found.column, found.within, found.skipped) == (
        "bank.conllu",
        "upos",
        None,
        (),
    )
    assert (first.id, second.id) == ("first", "second")
    assert first.words[1:3] == ("ca", "n't") and first.words[8:10] == ("de", "le")
    # What a multiword token's words spell is theirs; what they do not spell, they share.
    expected = ["I", "ca", "n't", "see", "naïve", "Zoë", ",", '"', "du", "du", '"', "10 000", "."]
    assert pieces(first) == expected
    assert first.starts[8:10] == (first.text.index("du"),) * 2
    assert first.heads == (3, 3, 3, -1, 5, 3, 5, 5, 5, 5, 5, 5, 3)
    assert first.labels["deprel"][:4] == ("nsubj", "aux", "advmod", "root")
    assert first.labels["xpos"][8] == "" and first.labels["lemma"][1] == "can"
    # No text comment: it is made from SpaceAfter.
    assert (second.text, pieces(second), second.heads) == ("Go!", ["Go", "!"], (-1, 0))
    assert found.labels[:4] == ("PRON", "AUX", "PART", "VERB")
    assert (len(found), len(found.words)) == (2, 15)


@pytest.mark.parametrize("column", ["Number", "feats:Number"])
def test_a_feature_is_a_column(column, written):
    found = load_conllu(written("bank.conllu", TREEBANK), column)
    assert found.column == "Number"
    assert found.columns == ("upos", "xpos", "lemma", "deprel", "Number")
    assert [word for word, label in zip(found.words, found.labels, strict=True) if label] == [
        "I",
        "Zoë",
        "le",
    ]
    assert found.with_column("deprel").labels[3] == "root"
    with pytest.raises(InputError, match="`column` must be one of 'upos'"):
        found.with_column("Gender")


def test_a_column_that_nobody_has_is_refused(written):
    with pytest.raises(InputError, match="Did you mean 'Number'"):
        load_conllu(written("bank.conllu", TREEBANK), "Nummber")


def test_a_folder_is_read_in_the_order_of_names(written, tmp_path):
    written("b.conllu", ONE + TWO)
    written("a.conllu", TREEBANK)
    written("notes.txt", "no treebank")
    found = load_conllu(tmp_path)
    assert [sentence.id for sentence in found] == ["first", "second", "b.conllu:2"]
    # The same text has the same group, here and across files.
    assert found.groups == (0, 1, 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no \*.conllu files"):
        load_conllu(tmp_path / "empty")


def test_the_group_does_not_depend_on_case_and_spacing(written):
    table = "sentence,word,label\nThe  bank.,bank,a\nthe bank.,bank,a\nThe banks.,banks,a\n"
    assert load_labels(written("t.csv", table)).groups == (0, 0, 1)


def test_the_frame_of_a_treebank(written):
    frame = load_conllu(written("bank.conllu", TREEBANK)).to_frame()
    assert list(frame.columns) == [
        *("sentence", "id", "group", "index", "word", "start", "end", "head"),
        *("upos", "xpos", "lemma", "deprel"),
    ]
    row = frame.iloc[14]
    assert (row["sentence"], row["index"], row["word"], row["head"]) == (1, 1, "!", 0)


def test_windows_line_ends_a_byte_order_mark_and_odd_separators(written):
    # A line separator within a form ends no line of the file.
    text = "\ufeff" + (ONE + TWO).replace("!", "\u2026\u2028x").replace("\n", "\r\n")
    (sentence,) = load_conllu(written("b.conllu", text))
    assert sentence.text == "Go\u2026\u2028x" and sentence.words[1] == "\u2026\u2028x"
    assert sentence.labels["upos"] == ("VERB", "PUNCT") and sentence.heads == (-1, 0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Go?", "word 2, '!', is not what the text has next: '?'"),
        ("Go! Now", "the text goes on behind its last word: 'Now'"),
        ("Well, go!", "word 1, 'Go', is not what the text has next: 'Well, go!'"),
    ],
)
def test_a_sentence_that_does_not_spell_its_text_is_listed(text, reason, written):
    broken = f"# sent_id = odd\n# text = {text}\n{ONE}{TWO}\n"
    found = load_conllu(written("x.conllu", broken + TREEBANK))
    assert found.skipped == (Skipped("x.conllu", 1, "odd", reason),)
    assert len(found) == 2
    with pytest.raises(DataError, match="no sentence's words spell its text; word|the text"):
        load_conllu(written("y.conllu", broken))


def test_comments_without_words_are_listed(written):
    found = load_conllu(written("x.conllu", TREEBANK + "\n# sent_id = none\n"))
    assert found.skipped == (Skipped("x.conllu", 26, "none", "there are comments, but no words"),)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (ONE + TWO.removesuffix("\t_\n"), "line 2: expected 10 columns between tabs, got 9"),
        (ONE + "Go on\n", "line 2: expected 10 columns between tabs, got 1"),
        (ONE + TWO.replace("2\t", "3\t", 1), "line 2: the ID '3' does not count: expected 2"),
        (ONE + ONE, "line 2: the ID '1' does not count: expected 2"),
        (TWO, "line 1: the ID '2' does not count: expected 1"),
        (ONE + TWO.replace("2\t", "x\t", 1), "line 2: 'x' is not a valid ID"),
        (ONE + TWO.replace("\t1\t", "\t3\t"), "line 2: the head '3' is no other word .* 1 to 2"),
        (ONE + TWO.replace("\t1\t", "\t2\t"), "line 2: the head '2' is no other word"),
        (ONE + TWO.replace("\t1\t", "\t_\t"), "line 2: the head '_' is no other word"),
        (ONE + TWO.replace("\t1\t", "\t-1\t"), "line 2: the head '-1' is no other word"),
        (ONE + TWO.replace("\t1\t", "\tone\t"), "line 2: 'one' is not a valid value"),
        (ONE + TWO.replace("!", "", 1), "line 2: the form is empty"),
        ("2-3\tgo\t" + "_\t" * 7 + "_\n" + ONE, "line 1: the ID '2-3' does not count"),
        ("1-3\tGo!\t" + "_\t" * 7 + "_\n" + ONE + TWO, "line 3: a multiword token goes on behind"),
        ("1.1\tgo\t" + "_\t" * 7 + "_\n" + ONE, r"line 1: the ID '1\.1' does not count"),
        (ONE.encode() + "2\tän".encode("latin1"), "line 2: not UTF-8"),
        ("", "holds no sentences"),
        ("# text = Go!\n\n", "holds no sentences"),
    ],
)
def test_faults_of_conllu_are_named(text, told, written):
    with pytest.raises(DataError, match=f"x.conllu.*{told}"):
        load_conllu(written("x.conllu", text))


def test_a_treebank_without_dependencies(written):
    text = ONE.replace("\t0\troot", "\t_\t_") + TWO.replace("\t1\tpunct", "\t_\t_")
    (sentence,) = load_conllu(written("x.conllu", text))
    assert sentence.heads is None and sentence.labels["deprel"] == ("", "")


def test_a_word_that_is_an_underscore(written):
    (sentence,) = load_conllu(written("x.conllu", "1\t_\t_\tSYM\t_\t_\t0\troot\t_\t_\n"))
    assert (sentence.words, sentence.labels["lemma"], sentence.labels["xpos"]) == (
        ("_",),
        ("_",),
        ("",),
    )


FORMS = st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1, max_size=5)
TAGS = st.sampled_from(["NOUN", "VERB", "X"])


@st.composite
def sentences(draw):
    """A sentence as (units): each a list of forms that are written as one, and a space or none."""
    units = draw(st.lists(st.tuples(st.lists(FORMS, min_size=1, max_size=3), st.booleans())))
    return units or [(["a"], True)]


@given(st.lists(sentences(), min_size=1, max_size=3), st.booleans(), st.data())
def test_what_is_written_is_read(tmp_path_factory, document, with_text, data):
    lines, expected = [], []
    for units in document:
        text, places, words = "", [], []
        rows = []
        for forms, spaced in units:
            misc = "_" if spaced else "SpaceAfter=No"
            first = len(words) + 1
            if len(forms) > 1:
                last = first + len(forms) - 1
                rows.append([f"{first}-{last}", "".join(forms), *"_" * 7, misc])
            for form in forms:
                places.append((len(text), len(text) + len(form)))
                text += form
                words.append(form)
                # A governor anywhere but here.
                head = data.draw(st.integers(0, first - 1)) if first > 1 else 0
                tag = data.draw(TAGS)
                own = misc if len(forms) == 1 else "_"
                rows.append([str(len(words)), form, "l", tag, "_", "_", str(head), "dep", "_", own])
            text += " " * spaced
        text = text.strip()
        lines += [f"# text = {text}"] * with_text
        lines += ["\t".join(row) for row in rows] + [""]
        heads = tuple(int(row[6]) - 1 for row in rows if "-" not in row[0])
        tags = tuple(row[3] for row in rows if "-" not in row[0])
        expected.append((text, tuple(words), tuple(places), heads, tags))
    path = tmp_path_factory.mktemp("written") / "x.conllu"
    path.write_bytes("\n".join(lines).encode())
    found = load_conllu(path)
    assert not found.skipped
    got = [
        (s.text, s.words, tuple(zip(s.starts, s.ends, strict=True)), s.heads, s.labels["upos"])
        for s in found
    ]
    assert got == expected


def test_entities(written):
    found = load_iob2(written("x.iob2", ENTITIES))
    first, second = found
    assert (found.column, found.columns) == ("entity", ("entity", "iob2"))
    assert found.labels == ("PER", "PER", "O", "LOC", "O", "O", "LOC")
    assert first.labels["iob2"] == ("B-PER", "I-PER", "O", "B-LOC", "O")
    assert (first.id, first.heads, pieces(first)[-2:]) == ("a", None, ["Rome", "."])
    # Without a text comment the words stand with spaces between them.
    assert (second.text, second.id) == ("# Oslo", "x.iob2:1")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("B-PER", "I-PER", "line 3: I-PER follows no B-PER or I-PER"),
        ("I-PER", "I-LOC", "line 4: I-LOC follows no B-LOC or I-LOC"),
        ("I-PER", "PER", "line 4: the tag must be O, B-TYPE or I-TYPE, got 'PER'"),
        ("3\tleft", "4\tleft", "line 5: the index '4' does not count: 3 is next"),
        ("3\tleft\tO\t-\t-", "3\tleft", r"line 5: expected index, word and tag .* got 2 column"),
        ("3\tleft", "3\t ", "line 5: the word is empty"),
        (ENTITIES, "", "holds no sentences"),
        (ENTITIES, "# text = a\n", "holds no sentences: there are comments"),
    ],
)
def test_faults_of_iob2_are_named(old, new, told, written):
    with pytest.raises(DataError, match=told):
        load_iob2(written("x.iob2", ENTITIES.replace(old, new, 1)))


def test_an_entity_sentence_that_does_not_spell_its_text_is_listed(written):
    found = load_iob2(written("x.iob2", ENTITIES.replace("text = Ann", "text = An")))
    assert len(found) == 1 and found.skipped[0][:3] == ("x.iob2", 1, "a")


TABLE = (
    "sentence,word,label,lemma\n"
    "The banks flooded.,banks,river,bank\n"
    "The banks flooded.,flooded,verb,flood\n"
    '"Now, a bank’s door.",bank’s,money,bank\n'
)


def test_a_table_of_words(written, tmp_path):
    found = load_labels(written("mine.csv", TABLE))
    assert (found.name, found.column, found.columns) == ("mine.csv", "label", ("label", "lemma"))
    first, second = found
    assert (first.words, first.starts, first.ends) == (("banks", "flooded"), (4, 10), (9, 17))
    assert first.labels["lemma"] == ("bank", "flood") and second.words == ("bank’s",)
    frame = pandas.read_csv(tmp_path / "mine.csv")
    places = frame.drop(columns="word").assign(start=[4, 10, 7], end=[9, 17, 13])
    for own in (frame, places):
        again = load_labels(own, name="mine.csv")
        assert [replace(s, id="") for s in again] == [replace(s, id="") for s in found]
    assert load_labels(frame.assign(label=[1, 2, 3])).labels == ("1", "2", "3")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("The bank.,banks,x,bank", "line 5: 'banks' stands 0 times as a whole word"),
        ("An embankment.,bank,x,bank", "line 5: 'bank' stands 0 times"),
        ("The Bank.,bank,x,bank", "line 5: 'bank' stands 0 times"),
        ("A bank by a bank.,bank,x,bank", "line 5: 'bank' stands 2 times .*: give start and end"),
        ("The bank.,bank,,bank", "line 5: label is empty"),
        (" ,bank,x,bank", "line 5: sentence is empty"),
        ("The bank.,bank,x", "line 5: not as many fields"),
        (
            "The banks flooded.,banks,money,bank",
            "line 5: the word is labelled 'money', and 'river' in line 2",
        ),
        ('"The bank.,bank,x,bank', "line 5: unexpected end of data"),
    ],
)
def test_faults_of_tables_are_named(row, told, written):
    with pytest.raises(DataError, match=f"mine.csv, {told}"):
        load_labels(written("mine.csv", TABLE + row + "\n"))


@pytest.mark.parametrize(
    ("start", "end", "told"),
    [
        (4, 99, r"row 0: 4\.\.99 lies outside"),
        (5, 9, r"row 0: 5\.\.9 reads 'anks', which is no whole word"),
        (4, 10, r"reads 'banks ', which is no whole word"),
        ("four", 9, "start and end must be ints, got 'four'"),
        (-9, 9, "lies outside"),
    ],
)
def test_faults_of_places_are_named(start, end, told):
    row = {"sentence": "The banks flooded.", "start": start, "end": end, "label": "x"}
    with pytest.raises(DataError, match=told):
        load_labels(pandas.DataFrame([row]))


def test_tables_that_are_none(written):
    with pytest.raises(DataError, match=r"line 1: the column\(s\) label are missing"):
        load_labels(written("a.csv", "sentence,word\nThe bank.,bank\n"))
    with pytest.raises(DataError, match="the columns start and end, or word, are missing"):
        load_labels(written("b.csv", "sentence,label\nThe bank.,bank\n"))
    with pytest.raises(DataError, match=r"the column\(s\) label, sentence are missing"):
        load_labels(pandas.DataFrame({"text": ["a"]}))
    with pytest.raises(DataError, match="row 0: label is missing"):
        load_labels(
            pandas.DataFrame({"sentence": ["A b."], "word": ["b"], "label": [float("nan")]})
        )
    with pytest.raises(DataError, match="holds no rows"):
        load_labels(written("c.csv", "sentence,word,label\n"))
    with pytest.raises(DataError, match="not UTF-8"):
        load_labels(written("d.csv", TABLE.encode("cp1252")))
    with pytest.raises(InputError, match="a CSV file or a pandas frame"):
        load_labels(["The bank."])


def test_the_same_word_marked_twice_is_listed(written):
    found = load_labels(written("mine.csv", TABLE + "The banks flooded.,banks,river,bank\n"))
    reason = "the same word and label as in line 2"
    assert found.skipped == (Skipped("mine.csv", 5, "The banks flooded.", reason),)


def test_senses_are_labelled_words_too():
    senses = wvprobe.load_senses()
    found = labelled_senses(senses)
    assert (len(found), found.column, found.within) == (1536, "sense", "lemma")
    assert found.words == tuple(item.target for item in senses)
    assert found.with_column("pos").within is None
    assert pieces(found.sentences[7]) == [senses.items[7].target]


@pytest.mark.slow
def test_english_treebank(shared_data):
    """What the two parts of UD English EWT hold, told by the files' own lines."""
    folder = shared_data / "ud_english_ewt"
    lines = [x for f in sorted(folder.glob("*.conllu")) for x in f.read_text("utf-8").split("\n")]
    found = load_conllu(folder)
    assert not found.skipped and len(found) == sum(x.startswith("# text = ") for x in lines)
    words = [x.split("\t") for x in lines if x.partition("\t")[0].isdecimal()]
    assert Counter(found.labels) == Counter(cells[3] for cells in words)
    assert found.words == tuple(cells[1] for cells in words)
    assert [h + 1 for s in found for h in s.heads] == [int(cells[6]) for cells in words]
    # Here every multiword token is spelled by its words, so each word stands in the text.
    assert [piece for s in found for piece in pieces(s)] == list(found.words)
    texts = [" ".join(s.text.casefold().split()) for s in found]
    assert len(set(found.groups)) == len(set(texts)) < len(found)
    part = folder / "en_ewt-ud-dev.conllu"
    plural = part.read_text("utf-8").count("Number=Plur")
    assert Counter(load_conllu(part, "Number").labels)["Plur"] == plural


def test_english_entities(shared_data):
    found = load_iob2(shared_data / "uner_english_ewt")
    assert not found.skipped and len(found) == 4078
    assert Counter(found.labels) == {"O": 47071, "PER": 1231, "ORG": 1008, "LOC": 936}
