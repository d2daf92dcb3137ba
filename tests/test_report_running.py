"""How a report runs: models side by side, steps that fail, runs that are interrupted."""

import json
import math
import re
from dataclasses import replace

import pytest
from conftest import shorten_reports

import wvprobe
from wvprobe._types import Provenance
from wvprobe.datasets import load_senses, load_texts
from wvprobe.errors import DataError, InputError, UnsupportedError, WordError
from wvprobe.report import Pair, embedding, write_report
from wvprobe.report.catalogue import CLAIMS, Question
from wvprobe.report.claims import Claim, Exhibit, Finding
from wvprobe.report.given import BANK, QUICK, Given, lines_of, spaced
from wvprobe.report.measured import Measured
from wvprobe.report.running import Clock, Outcome, Step
from wvprobe.report.storing import differences
from wvprobe.report.telling import told
from wvprobe.testing import tiny_model
from wvprobe.word_pairs import pair_scores

HOSTILE = "<script>alert('bank')</script>"


def model_name(measured: Measured) -> str:
    return measured.model.cfg.model_name


class Counted:
    """Claims without any cost, and how often each was measured."""

    def __init__(self):
        self.calls = []
        self.broken = set()

    def measure(self, name: str, verdict: str = "supported"):
        def measured(given: Measured) -> Finding:
            self.calls.append((model_name(given), name))
            if name in self.broken:
                raise ValueError(f"no {name}\nhere")
            if verdict == "stop":
                raise KeyboardInterrupt
            if verdict == "not testable here":
                raise UnsupportedError("it has none. Use others.")
            return Finding(verdict, {"x": 0.5}, (0.25, math.nan), 3, f"Found {name}.")

        return measured

    def questions(self, **verdicts: str) -> tuple[Question, ...]:
        claims = tuple(
            Claim(name, f"claim {name} of $word", "a rule", self.measure(name, verdict), "a flip")
            for name, verdict in verdicts.items()
        )
        shared = Claim("9.9", "shared", "a rule", self.measure("9.9"), any_model=True)
        return (Question("1", "A question?", (*claims, shared)),)


@pytest.fixture
def counted(monkeypatch):
    found = Counted()
    monkeypatch.setattr("wvprobe.report.QUESTIONS", found.questions(a="supported", b="mixed"))
    monkeypatch.setattr(
        "wvprobe.report.AUDIT", Claim("audit", "holds", "r", found.measure("audit"))
    )
    return found


def records(written) -> dict[tuple[str, str], dict]:
    document = json.loads(written.results.read_text())
    return {(claim["model"], claim["id"]): claim for claim in document["claims"]}


def test_models_stand_side_by_side(counted, tiny, tmp_path):
    written = write_report([tiny("llama"), "tiny:bert"], tmp_path)
    found = records(written)
    assert list(found) == [
        *(("tiny:llama", name) for name in ("a", "b", "9.9")),
        *(("tiny:bert", name) for name in ("a", "b", "9.9")),
    ]
    assert counted.calls.count(("tiny:llama", "9.9")) == 1
    assert ("tiny:bert", "9.9") not in counted.calls  # it asks nothing of the model
    assert found["tiny:bert", "a"]["interval"] == [0.25, None]  # NaN is no JSON
    document = json.loads(written.results.read_text())
    assert set(document["provenance"]["models"]) == {"tiny:llama", "tiny:bert"}
    page = written.page.read_text()
    header = page[page.index("<thead>") : page.index("</thead>")]
    assert header.count("tiny:llama") == header.count("tiny:bert") == 1
    assert not re.findall(r"<h4>tiny:(?:llama|bert)", page)  # alike in both, so told once
    assert written.told[1] == "tiny:bert: Of 3 claims: 2 supported and 1 mixed."
    assert written.ok and not (tmp_path / "errors.log").exists()


def test_a_step_that_fails_is_told_and_the_others_go_on(counted, tiny, tmp_path):
    counted.broken.add("b")
    written = write_report(tiny("llama"), tmp_path)
    found = records(written)
    assert written.failed == ("tiny:llama: b",) and not written.ok and written.audited
    failed = found["tiny:llama", "b"]
    assert (failed["verdict"], failed["reason"]) == ("failed", "ValueError: no b here")
    assert found["tiny:llama", "9.9"]["verdict"] == "supported"
    assert "Failed while measuring: b (ValueError: no b here)." in written.page.read_text()
    log = (tmp_path / "errors.log").read_text()
    assert "claim b of bank" in log and "Traceback" in log
    # What failed is tried again, and nothing else.
    counted.broken.clear()
    counted.calls.clear()
    again = write_report(tiny("llama"), tmp_path, resume=True)
    assert counted.calls == [("tiny:llama", "b")] and again.ok
    assert not (tmp_path / "errors.log").exists()


def test_figures_that_fail_leave_the_numbers(monkeypatch, counted, tiny, tmp_path):
    def broken(_measured):
        raise RuntimeError("no ink")

    claim = Claim("a", "claim", "rule", counted.measure("a"), exhibits=broken)
    monkeypatch.setattr("wvprobe.report.QUESTIONS", (Question("1", "?", (claim,)),))
    found = records(write_report(tiny("llama"), tmp_path))["tiny:llama", "a"]
    assert found["verdict"] == "failed" and found["numbers"] == {"x": 0.5}
    assert found["reason"] == "its figures: RuntimeError: no ink"


def test_an_interrupted_run_goes_on(monkeypatch, counted, tiny, tmp_path):
    whole = write_report(tiny("llama"), tmp_path / "whole").results.read_text()
    counted.calls.clear()
    monkeypatch.setattr("wvprobe.report.QUESTIONS", counted.questions(a="supported", b="stop"))
    with pytest.raises(KeyboardInterrupt):
        write_report(tiny("llama"), tmp_path / "cut")
    assert not (tmp_path / "cut" / "index.html").exists()
    monkeypatch.setattr("wvprobe.report.QUESTIONS", counted.questions(a="supported", b="mixed"))
    steps: list[Step] = []
    resumed = write_report(
        tiny("llama"), tmp_path / "cut", resume=True, progress=steps.append
    ).results.read_text()
    assert resumed == whole
    assert [name for _, name in counted.calls] == ["audit", "a", "b", "b", "9.9"]
    assert steps[0].what == "tiny:llama: b claim b of bank" and steps[0].done > 0
    counted.calls.clear()
    write_report(tiny("llama"), tmp_path / "cut")
    assert len(counted.calls) == 4  # without --resume it starts over


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"sizes": replace(QUICK, draws=3)}, "sizes draws was 20 and is 3"),
        ({"texts": ["Another text."]}, "given judged on was null and is"),
        ({"pair": Pair.of("A bank by a river.", BANK.text_b, "bank", "river")}, "given texts was"),
        ({"models": "qwen2"}, "models tiny:qwen2 was null"),
    ],
)
def test_a_run_of_other_settings_is_refused_by_name(changed, named, counted, tiny, tmp_path):
    write_report(tiny("llama"), tmp_path)
    settings = {"models": tiny(changed.pop("models", "llama")), **changed}
    with pytest.raises(InputError, match=re.escape(named)) as refused:
        write_report(out=tmp_path, resume=True, **settings)
    assert "Without --resume the report starts over" in str(refused.value)


def test_differences_are_named():
    found = differences({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1, "c": 4}, "e": 5})
    assert found == ["a c was 2 and is 4", "d was 3 and is null", "e was null and is 5"]


def test_no_text_becomes_markup(counted, monkeypatch, tmp_path):
    model = tiny_model("llama")
    model.cfg.model_name = f"{HOSTILE}"
    pair = Pair.of(f"{HOSTILE} the river bank", "The <b>river</b> bank </script>", "bank", "river")

    def exhibits(measured: Measured) -> list[Exhibit]:
        return [Exhibit(pair_scores(model, pair.texts, "bank", "river"), HOSTILE)]

    claim = Claim("1.1", f"{HOSTILE} $word", HOSTILE, counted.measure("a"), HOSTILE, "x", exhibits)
    monkeypatch.setattr("wvprobe.report.QUESTIONS", (Question("1", HOSTILE, (claim,)),))
    page = write_report(model, tmp_path, pair=pair).page.read_text()
    assert "<script>alert" not in page and "&lt;script&gt;alert(" in page
    assert page.count("<script") == page.count("</script>") == 3  # plotly, the data, the page's own
    held = json.loads(re.search(r'id="held">(.*?)</script>', page, re.DOTALL).group(1))
    (rows,) = [table["rows"] for table in held["tables"].values()]
    assert {row[0] for row in rows} == set(pair.texts)  # a table's texts stay as they are
    drawn = json.dumps(held["figures"])
    assert "<script" not in drawn and "&lt;script>" in drawn


def test_what_a_report_says_in_words(tiny):
    from wvprobe.report.subjects import opened

    (subject,) = opened(tiny("llama"), Given(), "quick")
    verdicts = {"a": "supported", "b": "underpowered", "c": "not testable here", "d": "failed"}
    claims = [Claim(name, name, "rule") for name in verdicts]
    outcomes = {
        name: Outcome(Finding(verdict, reason=f"Why {name}. And so on."), ())
        for name, verdict in verdicts.items()
    }
    said = told(subject, claims, outcomes)
    assert said.counts == (
        "Of 4 claims: 1 supported, 1 underpowered, 1 not testable here and 1 failed."
    )
    masked, weak, untestable, failed = said.points
    assert "bank→river in the first sentence and river→bank in the second" in masked
    assert weak.endswith("too small to tell: b (Why b).")
    assert untestable == "Not testable here: c (Why c)." and failed.endswith("d (Why d).")
    (encoder,) = opened(tiny("bert"), Given(), "quick")
    assert encoder.masked == []


def test_the_time_left_is_told_by_costs(monkeypatch):
    now = iter([0.0, 30.0, 30.0, 33.0])
    monkeypatch.setattr("wvprobe.report.running.time.monotonic", lambda: next(now))
    monkeypatch.setattr("wvprobe.report.running._COSTS", {"a": 10.0, "b": 1.0, "c": 9.0})
    claims = [Claim(name, name, "rule", lambda _: Finding("mixed")) for name in "abc"]
    steps: list[Step] = []
    clock = Clock(claims, steps.append)
    for claim in claims[:2]:
        clock.timed(claim, claim.id, lambda: Outcome(Finding("mixed"), ()))
    assert steps == [Step("a", 0.0, None), Step("b", 0.5, pytest.approx(30.0))]


class TestTables:
    """What the page has no room for lies beside it, whole."""

    @staticmethod
    def kept(rows):
        from wvprobe.report.exhibits import Kept

        figure = {"data": [], "layout": {"height": 100, "xaxis": {"domain": [0, 1]}}}
        return Kept("title", "text", figure, ["x", "y"], rows)

    def test_the_largest_go_to_files(self, monkeypatch, tmp_path):
        large = [[number, f'a "b", {number}'] for number in range(5_000)]
        small = [[number, None] for number in range(300)]
        monkeypatch.setattr(embedding, "_ROOM", 60_000)
        held = embedding.embedded({"0-a": [self.kept(large), self.kept(small)]}, tmp_path)
        first, second = held.exhibits["0-a"]
        assert (first.file, first.rows) == ("tables/0-a-1.csv", 5_000)
        assert (second.file, second.rows) == ("", 300)
        assert len(held.tables["0-a-1"]["rows"]) == 200
        assert held.tables["0-a-2"]["rows"] == small
        import pandas

        read = pandas.read_csv(tmp_path / first.file)
        assert read.to_numpy().tolist() == large

    def test_nothing_is_written_where_all_fits(self, tmp_path):
        embedding.embedded({"0-a": [self.kept([[1, 2.5]])]}, tmp_path)
        assert not (tmp_path / "tables").exists()


def test_numbers_are_kept_to_nine_digits_in_tables_and_six_in_figures(tiny):
    from wvprobe.report.exhibits import kept

    result = pair_scores(tiny("llama"), BANK.texts, "bank", "river")
    one = kept(Exhibit(result, "text"))
    frame = result.to_frame()
    assert one.columns == frame.columns.tolist() and len(one.rows) == len(frame)
    at = one.columns.index("score")
    assert [row[at] for row in one.rows] == pytest.approx(frame["score"].tolist(), rel=5e-9)
    assert type(one.rows[0][one.columns.index("masked")]) is bool
    numbers = [value for trace in one.figure["data"] for row in trace["z"] for value in row]
    assert all(value is None or value == float(f"{value:.6g}") for value in numbers)
    assert "template" not in one.figure["layout"] and "title" not in one.figure["layout"]
    assert one.title.startswith("Strongest link")
    assert Outcome.of(json.loads(json.dumps(Outcome(Finding("mixed"), (one,)).document()))) == (
        Outcome(Finding("mixed"), (one,))
    )


class TestPair:
    """Two sentences of the reader's, and two words of both."""

    def test_the_second_word_is_the_longest_they_share(self):
        assert Pair.of(BANK.text_a, BANK.text_b, "bank") == BANK
        assert Pair.of("A bat flew by.", "The bat sat.", "bat").other is None
        assert Pair.of("A bat flew by.", "The bat flew.", "bat", "by").other == "by"
        with pytest.raises(WordError, match="another word than 'bat'"):
            Pair.of("A bat.", "The bat.", "bat", "bat")

    def test_what_follows_the_word(self):
        assert BANK.later == "dropped … river"
        assert Pair.of("A bat flew.", "The bat sat.", "bat").later == "flew"
        assert Pair.of("By the bat.", "The bat sat.", "bat").later == ""

    def test_claims_speak_of_it(self, tiny):
        given = Given(pair=Pair.of("By the bat.", "A bat sat.", "bat"))
        claims = {c.id: c.about(given.pair.told, lines_of(given, QUICK)) for c in CLAIMS}
        assert (
            claims["2.2"].claim == "After a few layers the two 'bat' vectors are different vectors"
        )
        assert 'word="bat"' in claims["2.2"].code and "$" not in claims["1.1"].code
        measured = Measured(tiny("llama"), given)
        for name in ("2.1", "2.5"):
            found = claims[name].judge(measured)
            assert (
                found.verdict == "not testable here" and "share no word but “bat”" in found.reason
            )
        found = claims["2.6"].judge(measured)
        assert found.verdict == "not testable here" and "nothing follows “bat”" in found.reason

    def test_a_word_that_is_not_there_is_refused_before_anything_is_measured(self, tiny, tmp_path):
        pair = Pair("A bat flew.", "The cat sat.", "bat", None)
        with pytest.raises(WordError, match="tiny:llama: .*--pair"):
            write_report(tiny("llama"), tmp_path, pair=pair)


def test_spaced_keeps_no_more_than_asked():
    assert list(spaced(range(10), 4)) == [0, 3, 6, 9]
    assert list(spaced(range(10), 10)) == list(range(10))


def test_texts_of_a_file(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_bytes("\ufeffOne.\r\n\n Two.\u2028Three. \n".encode())
    assert load_texts(file) == ("One.", "Two.\u2028Three.")
    for content, named in ((b"\n \n", "holds no texts"), (b"\xff", "line 1: not UTF-8")):
        file.write_bytes(content)
        with pytest.raises(DataError, match=named):
            load_texts(file)
    with pytest.raises(DataError, match="is a folder"):
        load_texts(tmp_path)


def test_provenance_and_manifest_name_what_was_given(counted, tiny, tmp_path):
    written = write_report(tiny("llama"), tmp_path, texts=["One.", "Two."], sizes=QUICK)
    settings = json.loads(written.results.read_text())["provenance"]["settings"]
    assert settings["judged on"].startswith("2 texts, sha256 ")
    assert settings["words"] == ["bank", "river"] and settings["sizes"] == "quick"
    manifest = json.loads((tmp_path / ".wvprobe-run" / "manifest.json").read_text())
    assert manifest["versions"] == dict(Provenance.of("", "").versions)
    assert len(manifest["source"]) == 64


@pytest.mark.slow
def test_a_readers_own_data_gives_the_numbers_of_the_lines_on_the_page(
    monkeypatch, tiny, small_sizes, tmp_path
):
    shorten_reports(monkeypatch)
    bundled = load_senses().to_frame()
    columns = ["word", "sense", "gloss", "pos", "sentence", "start", "end", "context"]
    files = {"senses": str(tmp_path / "own.csv"), "texts": str(tmp_path / "own.txt")}
    bundled[bundled["word"].isin(["bat", "seal", "bank"])][columns].to_csv(
        files["senses"], index=False
    )
    texts = bundled["sentence"][bundled["word"] == "spring"].tolist()
    (tmp_path / "own.txt").write_text("\n".join(texts), encoding="utf-8")
    model = tiny("llama")
    pair = Pair.of("An old bat flew out of the cave.", "He swung the bat in the cave.", "bat")
    written = write_report(
        model,
        tmp_path / "out",
        texts=load_texts(files["texts"]),
        senses=load_senses(files["senses"]),
        pair=pair,
        sizes=small_sizes,
        files=files,
    )
    assert written.ok
    for claim in json.loads(written.results.read_text())["claims"]:
        if claim["id"] in ("1.1", "2.1", "2.2", "2.4", "2.5", "2.6", "3.3"):
            given = {"wvprobe": wvprobe, "model": model, "conllu": None}
            given |= {"text_a": pair.text_a, "text_b": pair.text_b}
            exec(claim["code"], given)
            for name, value in given["numbers"].items():
                assert float(value) == pytest.approx(claim["numbers"][name], rel=1e-6), name
