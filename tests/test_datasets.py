"""Readers of labelled text, on real files where they are there, and on broken ones."""

import pytest

from wvprobe.datasets import load_senses
from wvprobe.errors import DataError, InputError

HEADER = "word,sense,gloss,pos,sentence,start,end,context\n"
ROW = "bank,river,land by water,noun,The bank is wet.,4,8,after\n"


@pytest.fixture
def written(tmp_path):
    """Write files by name; return the folder."""

    def write(**files):
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(text, encoding="utf-8")
        return tmp_path

    return write


def test_a_file_of_ones_own(written):
    folder = written(mine__csv=HEADER + ROW + ROW.replace("river", "money"))
    found = load_senses(folder / "mine.csv")
    assert (len(found), found.words, found.senses("bank")) == (2, ("bank",), ("river", "money"))
    item = found.items[0]
    assert (item.target, item.pos, item.context) == ("bank", "noun", "after")
    frame = found.to_frame()
    assert frame["sense"].tolist() == ["river", "money"] and frame["start"].tolist() == [4, 4]
    with pytest.raises(InputError, match="Did you mean 'bank'"):
        found.only("banks")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEADER + ROW + ROW.replace(",4,8,", ",4,99,"), r"line 3: 4\.\.99 lies outside"),
        (HEADER + ROW.replace(",4,8,", ",four,8,"), "line 2: start and end must be ints"),
        (HEADER + ROW.replace(",4,8,", ",0,3,"), r"line 2: 0\.\.3 reads 'The', not 'bank'"),
        (HEADER + ROW.replace(",after", ",behind"), "line 2: context must be one of"),
        (HEADER + ROW.replace("bank,river", "bank,"), "line 2: sense is empty"),
        (HEADER + ROW + "bank,river\n", "line 3: not as many fields"),
        (HEADER + 'bank,river,"an open quotation\n', "line 2: unexpected end of data"),
        (HEADER, "holds no sentences"),
    ],
)
def test_bad_lines_are_named(text, told, written):
    with pytest.raises(DataError, match=told):
        load_senses(written(bad__csv=text) / "bad.csv")


def test_missing_columns_files_and_formats(written):
    folder = written(short__csv="word,sense\nbank,river\n", odd__txt="nothing known\n")
    with pytest.raises(
        DataError, match=r"line 1: the column\(s\) end, gloss, pos, sentence, start"
    ):
        load_senses(folder / "short.csv", format="senses")
    with pytest.raises(InputError, match="no known format"):
        load_senses(folder / "odd.txt")
    with pytest.raises(InputError, match="`format` must be one of"):
        load_senses(folder / "odd.txt", format="csv")
    with pytest.raises(DataError, match="there is no file or folder"):
        load_senses(folder / "nowhere.csv")
    with pytest.raises(InputError, match="a folder of no known format"):
        load_senses(folder)
    (folder / "latin.csv").write_bytes(
        HEADER.encode() + "bänk,a,b,noun,Bänk.,0,4,".encode("latin1")
    )
    with pytest.raises(DataError, match="not UTF-8"):
        load_senses(folder / "latin.csv", format="senses")


def test_homonyms(written):
    header = "Word,POS1,Meaning1,Sentence1,POS2,Meaning2,Sentence2\n"
    rows = (
        "fan,Noun,cools,She waved her fan.,Noun,admires,Fans cheered; a fan sang.\n"
        "tend,Verb,leans,They tend to win.,Verb,cares,He tends to the car.\n"
        "fan,Noun,admires,Every fan came.,Noun,cools,The fan is on.\n"
    )
    found = load_senses(written(h__csv=header + rows) / "h.csv")
    assert [item.target for item in found] == ["fan", "fan", "tend", "tends", "fan", "fan"]
    assert [item.sense for item in found.only("fan")] == ["fan.1", "fan.2", "fan.2", "fan.1"]
    assert [item.pair for item in found] == [0, 0, 1, 1, 2, 2]
    with pytest.raises(DataError, match="line 2: 'fan' is not in Sentence2"):
        bad = header + "fan,n,a,A fan.,n,b,A fancy hat.\n"
        load_senses(written(bad__csv=bad) / "bad.csv")


def test_coarsewsd(written):
    files = {
        "classes_map__txt": '{"0": "bank_money", "1": "bank_river"}',
        "train__data__txt": "1\ta bank closed .\n3\tmud on the bank .\n",
        "train__gold__txt": "0\n1\n",
        "test__data__txt": "0\tbank holidays\n",
        "test__gold__txt": "0\n",
    }
    folder = written(**files)
    found = load_senses(folder)
    assert [(i.target, i.sense, i.split) for i in found] == [
        ("bank", "bank_money", "train"),
        ("bank", "bank_river", "train"),
        ("bank", "bank_money", "test"),
    ]
    written(train__gold__txt="0\n")
    with pytest.raises(DataError, match="line 2: 2 sentences, but 1 labels"):
        load_senses(folder)
    written(train__gold__txt="0\n7\n")
    with pytest.raises(DataError, match="line 2: the class '7'"):
        load_senses(folder)
    written(train__gold__txt="0\n1\n", train__data__txt="1\ta bank .\n9\ttoo short\n")
    with pytest.raises(DataError, match="line 2: '9' is not the index of one of the 2 tokens"):
        load_senses(folder)
    written(train__data__txt="1\ta bank .\n0\tbank\n")
    (folder / "test.gold.txt").unlink()
    with pytest.raises(DataError, match="is missing"):
        load_senses(folder)


def test_wic(written):
    data = "bank\tN\t1-2\tThe bank .\tOn the bank .\nplay\tV\t0-1\tplay on\tThey play .\n"
    folder = written(train__data__txt=data, train__gold__txt="F\nT\n")
    found = load_senses(folder / "train.data.txt")
    assert [(i.word, i.target, i.sense, i.pos, i.pair) for i in found] == [
        ("bank", "bank", "1.0", "noun", 0),
        ("bank", "bank", "1.1", "noun", 0),
        ("play", "play", "2", "verb", 1),
        ("play", "play", "2", "verb", 1),
    ]
    written(train__gold__txt="F\nX\n")
    with pytest.raises(DataError, match="line 2: the label must be T or F"):
        load_senses(folder / "train.data.txt")
    written(train__gold__txt="F\n")
    with pytest.raises(DataError, match="line 2: 2 pairs, but 1 labels"):
        load_senses(folder / "train.data.txt")
    (folder / "train.gold.txt").unlink()
    with pytest.raises(DataError, match="needs its labels"):
        load_senses(folder / "train.data.txt")


def test_the_real_homonyms(shared_data):
    found = load_senses(shared_data / "homonyms_en.csv")
    assert (len(found), len(found.words)) == (2000, 100)
    assert all(len(found.senses(word)) == 2 for word in found.words)
    inflected = [i.target for i in found if i.target.casefold() != i.word.casefold()]
    assert inflected == ["tends", "tends", "tends", "stranded", "Pulses", "pinked"]


@pytest.mark.parametrize("word", ["bank", "java", "mole", "seal", "spring", "square"])
def test_the_real_coarsewsd(word, shared_data):
    found = load_senses(shared_data / "coarsewsd20" / word)
    lines = 0
    for split in ("train", "test"):
        with (shared_data / "coarsewsd20" / word / f"{split}.gold.txt").open() as file:
            lines += sum(1 for _ in file)
    assert len(found) == lines and {i.target for i in found} == {word}
    assert {i.split for i in found} == {"train", "test"}


def test_the_format_is_told_from_the_header_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "bom.csv"
    path.write_text(HEADER + ROW, encoding="utf-8-sig")
    assert load_senses(path).items[0].word == "bank"
