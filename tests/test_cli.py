"""The command line: what it prints, and one line for every error that a user can cause."""

import io
import json
import subprocess
import sys

import pandas
import pytest

from wvprobe import _packaged, cli
from wvprobe.errors import IntegrityError


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    code = left.value.code
    said = capsys.readouterr()
    return (code if isinstance(code, int) else 0), said.out, said.err


def test_models_lists_what_is_packaged(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WVPROBE_CACHE", str(tmp_path))
    code, out, err = run(capsys, "models")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    assert ["smollm2-135m", "134.5", "M", "93", "MB", "542", "MB", "Apache-2.0", "no"] in rows
    assert ["minilm-l6", "22.6", "M", "84", "MB", "92", "MB", "Apache-2.0", "no"] in rows
    assert "minilm-l6: all-MiniLM-L6-v2: BERT encoder" in out
    assert f"cache: {tmp_path / 'models'}" in out


def test_models_says_which_are_cached(capsys, monkeypatch):
    monkeypatch.setattr(_packaged, "fault", lambda model, contents: "")
    _, out, _ = run(capsys, "models")
    assert sum(line.endswith(" yes") for line in out.splitlines()) == 2


def fail() -> tuple:
    raise IntegrityError("the wheel has\nanother hash")


def test_an_error_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(_packaged, "packaged_models", fail)
    assert run(capsys, "models") == (1, "", "wvprobe: the wheel has another hash\n")


@pytest.mark.parametrize("arguments", [("--debug", "models"), ("models", "--debug")])
def test_debug_shows_where_an_error_comes_from(monkeypatch, arguments):
    monkeypatch.setattr(_packaged, "packaged_models", fail)
    with pytest.raises(IntegrityError):
        cli.main(arguments)


def test_unknown_subcommand(capsys):
    code, _, err = run(capsys, "modelz")
    assert code == 2
    assert "Did you mean 'models'?" in err


def test_help_names_the_subcommands(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert "models" in out
    assert "--debug" in out


COMMANDS = "models report audit circuits scores budget payload drift capture".split()


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_that_parse(command):
    import shlex

    import typer

    group = typer.main.get_command(cli.app)
    found = group.commands[command]
    assert found.help and found.epilog
    lines = [line for line in found.epilog.splitlines() if line.startswith("wvprobe ")]
    assert lines
    for line in lines:
        _, named, *arguments = shlex.split(line)
        assert named == command
        found.make_context(named, arguments)  # refuses what it does not know


def test_every_command_is_tried_here():
    import typer

    assert set(typer.main.get_command(cli.app).commands) == set(COMMANDS)


def test_completion_offers_models(capsys, monkeypatch):
    monkeypatch.setenv("_WVPROBE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "wvprobe audit mini")
    monkeypatch.setenv("COMP_CWORD", "2")
    code, out, _ = run(capsys)
    assert (code, out.split()) == (0, ["minilm-l6"])


def test_json_and_csv_are_one_or_the_other(capsys):
    code, _, err = run(capsys, "models", "--json", "--csv")
    assert code == 2 and "not both" in err


def test_models_and_audits_as_json_and_csv(capsys):
    code, out, err = run(capsys, "models", "--json")
    assert (code, err) == (0, "") and json.loads(out)[0]["alias"] == "smollm2-135m"
    code, out, _ = run(capsys, "audit", "tiny:llama", "--json")
    rows = json.loads(out)
    assert code == 0 and {row["status"] for row in rows} <= {"ok", "not applicable"}
    assert all(row["error"] is None for row in rows if row["status"] == "not applicable")
    code, out, _ = run(capsys, "audit", "tiny:llama", "--csv")
    read = pandas.read_csv(io.StringIO(out))
    assert read["identity"].tolist() == [row["identity"] for row in rows]


def test_a_failed_audit_exits_with_1(capsys, monkeypatch):
    from wvprobe import adapters

    monkeypatch.setattr(adapters, "sliding_window", lambda *_: None)
    monkeypatch.setattr("wvprobe.adapters.weights.sliding_window", lambda *_: None)
    code, out, _ = run(capsys, "audit", "tiny:mistral")
    assert code == 1 and "the audit failed" in out


def test_on_a_terminal_tables_are_ruled(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, out, _ = run(capsys, "audit", "tiny:llama")
    assert code == 0 and "───" in out and "tiny:llama: the audit holds" in out


def test_models_needs_no_torch():
    script = (
        "import sys; from wvprobe import cli\n"
        "try: cli.main(['models'])\n"
        "except SystemExit: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["False"], done.stderr


class TestCircuits:
    """Tables on stdout are those of the Python calls."""

    def test_all_heads(self, capsys):
        from wvprobe.heads import HeadWeights
        from wvprobe.singular import spectra
        from wvprobe.testing import tiny_model

        code, out, err = run(capsys, "circuits", "tiny:qwen2", "-k", "2")
        assert code == 0 and "spectra of QK" in err
        frame = spectra(HeadWeights.from_model(tiny_model("qwen2")), "OV").to_frame()
        least = frame.sort_values("effective_rank").iloc[0]
        table = out.split("\n\n")[0].splitlines()
        assert "lowest effective rank" in table[0] or "lowest effective rank" in table[1]
        named = [str(int(least["layer"])), str(int(least["head"]))]
        row = next(line.split() for line in table if line.split()[:2] == named)
        assert float(row[3]) == pytest.approx(least["effective_rank"], rel=1e-3)

    def test_one_head_and_its_tokens(self, capsys):
        code, out, _ = run(
            capsys, "circuits", "tiny:llama", "--layer", "1", "--head", "2", "--token", " river",
            "-k", "3",
        )  # fmt: skip
        assert code == 0
        assert "OV of layer 1, head 2, in logit" in out and "QK of layer 1, head 2" in out
        assert out.count("highest") == out.count("lowest") == 6

    def test_composition(self, capsys):
        code, out, _ = run(capsys, "circuits", "tiny:gpt2", "--compose", "K", "-k", "4")
        assert code == 0 and len(out.strip().splitlines()) == 6
        assert "writer_layer" in out and " q" in out

    def test_latent_attention_has_two_circuits(self, capsys):
        code, out, err = run(capsys, "circuits", "tiny:deepseek_v3", "--layer", "0", "-k", "1")
        assert code == 0 and "QK (content)" in out and "QK (rotary)" in out
        code, out, err = run(capsys, "circuits", "tiny:deepseek_v3", "-k", "1")
        assert code == 0 and "two circuits" in err and "OV, lowest" in out

    def test_shards_are_read_without_a_model(self, capsys, tmp_path):
        from wvprobe.testing import _hf_model

        _hf_model("llama", 0, {}).save_pretrained(tmp_path)
        streamed = run(capsys, "circuits", str(tmp_path), "--streamed", "-k", "2")
        whole = run(capsys, "circuits", "tiny:llama", "-k", "2")
        assert streamed[0] == 0 and streamed[1] == whole[1]

    def test_csv_has_every_head(self, capsys):
        from wvprobe.heads import HeadWeights
        from wvprobe.singular import spectra
        from wvprobe.testing import tiny_model

        code, out, _ = run(capsys, "circuits", "tiny:llama", "--csv", "-k", "1")
        read = pandas.read_csv(io.StringIO(out))
        expected = spectra(HeadWeights.from_model(tiny_model("llama")), "OV").to_frame()
        ranks = read[read["circuit"] == "OV"]["effective_rank"]
        assert code == 0 and len(read) == 2 * len(expected)
        assert ranks.tolist() == pytest.approx(expected["effective_rank"].tolist())

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("--layer", "9"), "`layer` must be in 0..2. Got 9"),
            (("--head", "-1"), "`head` must be in 0..5"),
            (("--compose", "X"), "`mode` must be one of 'Q', 'K', 'V'"),
            (("--token", "riverbank"), "`token` must be one token"),
        ],
    )
    def test_wrong_inputs_are_one_line(self, capsys, arguments, told):
        code, _, err = run(capsys, "circuits", "tiny:llama", *arguments)
        assert code == 2 and told in err.splitlines()[-1]


class TestScores:
    """Scores between two words: the numbers of the Python calls."""

    texts = ("a power bank dropped into the river.", "The river bank is close to here.")

    def test_two_texts_give_shares(self, capsys):
        from wvprobe.context_shares import context_dependence
        from wvprobe.testing import tiny_model

        code, out, _ = run(capsys, "scores", "tiny:llama", "--csv")
        read = pandas.read_csv(io.StringIO(out))
        model = tiny_model("llama")
        expected = context_dependence(model, *self.texts, query="bank", key="river").to_frame()
        for column in ("score_a", "score_b", "query_content", "key_content", "offset"):
            assert read[column].tolist() == pytest.approx(expected[column].tolist(), abs=1e-6)
        code, out, _ = run(capsys, "scores", "tiny:llama", "-k", "2")
        assert code == 0 and "bank→river" in out and "masked in the first text" in out
        assert len(out.strip().splitlines()) == 4

    def test_one_text_gives_both_directions(self, capsys):
        code, out, _ = run(capsys, "scores", "tiny:llama", "--text", self.texts[1], "-k", "1")
        assert code == 0 and "bank→river in" in out and "river→bank in" in out
        assert out.count("masked") == 1
        code, out, _ = run(capsys, "scores", "tiny:bert", "--text", self.texts[1], "--json")
        rows = json.loads(out)
        assert not any(row["masked"] for row in rows) and len(rows) == 2 * 3 * 5

    def test_terms_of_one_head_sum_to_its_score(self, capsys):
        arguments = ("scores", "tiny:llama", "--layer", "2", "--head", "1")
        code, out, _ = run(capsys, *arguments, "--json")
        rows = json.loads(out)
        _, two, _ = run(capsys, "scores", "tiny:llama", "--json")
        score = next(r for r in json.loads(two) if (r["layer"], r["head"]) == (2, 1))
        for text, name in zip(self.texts, ("score_a", "score_b"), strict=True):
            total = sum(row["term"] for row in rows if row["text"] == text)
            assert code == 0 and total == pytest.approx(score[name], abs=1e-4)
        _, out, _ = run(capsys, *arguments, "-k", "3")
        assert out.count("layer 2, head 1") == 2

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("--query", "bnk"), "bank"),
            (("--layer", "1"), "--layer and --head must be given together"),
            (("--text", "a", "--text", "b", "--text", "c"), "once or twice"),
            (("--layer", "9", "--head", "0"), "`layer` must be in 0..2"),
        ],
    )
    def test_wrong_inputs_are_one_line(self, capsys, arguments, told):
        code, _, err = run(capsys, "scores", "tiny:llama", *arguments)
        assert code == 2 and told in err.splitlines()[-1]


class TestBudget:
    """Numbers on stdout, from sizes, published models, configs and loaded models."""

    def test_sizes_and_alternatives(self, capsys):
        code, out, err = run(
            capsys, "budget", "--d-model", "12288", "--heads", "96", "--layers", "96",
            "--alternatives",
        )  # fmt: skip
        assert (code, err) == (0, "")
        assert "attention 57,982,058,496" in out and "cached bytes (bfloat16)" in out
        full = next(line for line in out.splitlines() if "full width" in line)
        assert "43,486,543,872" in full and "W_O is not square" in full
        assert sum(line.split()[:2] == ["even", "split"] for line in out.splitlines()) == 26

    def test_json(self, capsys):
        code, out, _ = run(capsys, "budget", "DeepSeek-V3", "--json", "--alternatives")
        found = json.loads(out)
        assert code == 0 and found["kind"] == "MLA" and found["sizes"]["kv_rank"] == 512
        assert found["kv_cache_bytes_per_token"] == 70_272
        assert found["layer_parameters"]["W_UK"] == 512 * 128 * 128
        assert found["parameters"] is None and found["published_parameters"] == 671e9
        assert found["alternatives"][0]["kind"] == "as given"
        assert found["source"].startswith("DeepSeek-AI 2024")

    def test_csv(self, capsys):
        from wvprobe.budget import known_architectures

        code, out, _ = run(capsys, "budget", "GPT-3", "--csv")
        read = pandas.read_csv(io.StringIO(out))
        expected = known_architectures()["GPT-3"].to_frame()
        assert code == 0 and read.columns.tolist() == expected.columns.tolist()
        assert len(read) == len(expected)
        _, out, _ = run(capsys, "budget", "GPT-3", "--csv", "--alternatives")
        assert "full width" in out and "kv_ratio" in out.splitlines()[0]

    def test_a_model_and_its_config_alone(self, capsys, tmp_path):
        from wvprobe.testing import _hf_model

        model = _hf_model("qwen3", 0, {})
        model.config.save_pretrained(tmp_path)  # no weights
        _, loaded, _ = run(capsys, "budget", "tiny:qwen3", "--json", "--context", "7")
        code, out, _ = run(capsys, "budget", str(tmp_path), "--json", "--context", "7")
        read, own = json.loads(out), json.loads(loaded)
        assert code == 0 and read["parameters"] == own["parameters"] == model.num_parameters()
        assert {**read, "name": ""} == {**own, "name": ""}
        _, file, _ = run(
            capsys, "budget", str(tmp_path / "config.json"), "--json", "--context", "7"
        )
        assert file == out

    def test_an_encoder_caches_nothing(self, capsys):
        _, out, _ = run(capsys, "budget", "tiny:bert")
        assert "nothing: it looks both ways" in out and "in all 52,123" in out

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            ((), "`MODEL` must be given, or --d-model and --heads"),
            (("--d-model", "12"), "`MODEL` must be given, or --d-model and --heads"),
            (("GPT-3", "--layers", "2"), "`MODEL` must be left out where sizes are given"),
            (("--d-model", "12", "--heads", "5"), "`d_head` must be given"),
            (("GPT-3", "--dtype", "int3"), "`dtype` must be one of"),
            (("nowhere.json",), "cannot read nowhere.json as a config"),
        ],
    )
    def test_wrong_inputs_are_one_line(self, capsys, arguments, told):
        code, _, err = run(capsys, "budget", *arguments)
        assert code == 2 and told in err.splitlines()[-1]


class TestDrift:
    """A row a stream on stdout: the numbers of the Python call."""

    @pytest.fixture(scope="class")
    @staticmethod
    def senses(tmp_path_factory):
        """Two words of the bundled set in a file of their own."""
        from wvprobe.datasets import load_senses

        bundled = load_senses().to_frame()
        few = bundled[bundled["word"].isin(["bank", "bat"])].iloc[::3]
        columns = ["word", "sense", "gloss", "pos", "sentence", "start", "end", "context"]
        path = tmp_path_factory.mktemp("senses") / "few.csv"
        few[columns].to_csv(path, index=False)
        return str(path)

    @pytest.mark.slow
    def test_words_of_a_file(self, capsys, senses, tmp_path):
        from wvprobe._types import Result
        from wvprobe.contextual_drift import DriftResult, drift
        from wvprobe.datasets import load_senses
        from wvprobe.testing import tiny_model

        code, out, err = run(
            capsys, "drift", "tiny:llama", "--senses", senses, "--out", str(tmp_path / "d")
        )
        assert code == 0 and "reading 32 sentences" in err and "figure.html" in err
        expected = drift(tiny_model("llama"), load_senses(senses))
        title, header, *rows = out.strip().splitlines()
        assert "2 words, 32 sentences" in title and "over words (bootstrap)" in title
        names = header.split()
        assert names[:3] == ["layer", "self_similarity", "baseline"] and len(rows) == 4
        frame = expected.summary().set_index(["measure", "layer"])
        for layer, row in enumerate(rows):
            told = dict(zip(names, map(float, row.split()), strict=True))
            for measure, column, end in (
                ("self_similarity", "self_similarity", "mean"),
                ("different_sense", "different_sense", "mean"),
                ("gap", "gap_low", "low"),
                ("centroid_accuracy", "centroid_accuracy", "mean"),
                ("centroid_accuracy", "accuracy_high", "high"),
            ):
                value = frame.loc[(measure, layer), end]
                assert told[column] == pytest.approx(value, rel=1e-3, abs=1e-6), column
            assert told["shuffled"] == pytest.approx(float(expected.control[0, layer]), rel=1e-3)
        saved = Result.load(tmp_path / "d")
        assert isinstance(saved, DriftResult) and saved.to_frame().equals(expected.to_frame())
        assert "plotly" in (tmp_path / "d" / "figure.html").read_text(encoding="utf-8")[:200_000]

    def test_one_word_as_json(self, capsys, senses):
        code, out, _ = run(
            capsys, "drift", "tiny:bert", "--senses", senses, "--word", "bank", "--json"
        )
        found = json.loads(out)
        assert code == 0 and found["words"] == ["bank"] and found["interval_over"] == "sentences"
        assert found["settings"]["pool"] == "mean" and len(found["layers"]) == 4
        row = found["layers"][2]
        assert row["gap_low"] is None
        assert 0 <= row["accuracy_low"] < row["centroid_accuracy"] < row["accuracy_high"] <= 1

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("--word", "bnk"), "Did you mean 'bank'"),
            (("--senses", "nowhere.csv"), "nowhere.csv"),
        ],
    )
    def test_wrong_inputs_are_one_line(self, capsys, arguments, told):
        code, _, err = run(capsys, "drift", "tiny:llama", *arguments)
        assert code == 2 and told in err.splitlines()[-1]


class TestReport:
    """Arguments to one call; the exit code says whether all went well."""

    @pytest.fixture
    @staticmethod
    def asked(monkeypatch, tmp_path):
        """What the command asked for; nothing is measured."""
        from wvprobe.report import Step, Written

        calls = []

        def write(models, out, *, progress, **settings):
            calls.append((models, out, settings))
            progress(Step("tiny:llama: 1.1 something", 0.25, 200.0))
            failed = ("tiny:llama: 1.1",) if "broken" in models else ()
            if "stopped" in models:
                raise KeyboardInterrupt
            told = ("tiny:llama: Of 23 claims: 23 supported.",)
            return Written(tmp_path / "index.html", tmp_path / "results.json", True, failed, told)

        monkeypatch.setattr("wvprobe.report.write_report", write)
        return calls

    def test_models_and_sizes(self, capsys, asked):
        from wvprobe.report import BANK, FULL, QUICK

        assert run(capsys, "report")[0] == 0
        code, out, err = run(capsys, "report", "--quick", "--resume", "--out", "there")
        assert code == 0 and out.startswith("tiny:llama: Of 23 claims: 23 supported.\n")
        assert "1.1 something (25% done, about 3 min left)" in err
        (full, where, settings), (quick, there, quickly) = asked
        assert (full, where) == (["smollm2-135m", "minilm-l6"], "report")
        assert (quick, there) == (["smollm2-135m"], "there")
        assert (settings["sizes"], quickly["sizes"]) == (FULL, QUICK)
        assert (settings["resume"], quickly["resume"]) == (False, True)
        assert settings["pair"] is BANK and settings["texts"] is None

    def test_what_the_reader_brings(self, capsys, asked, tmp_path, small_treebank):
        texts = tmp_path / "texts.txt"
        texts.write_text("One bat.\n\n  Two bats.\n", encoding="utf-8")
        code, _, _ = run(
            capsys,
            *("report", "tiny:llama", "tiny:bert", "--texts", str(texts)),
            *("--conllu", str(small_treebank), "--pair", "A bat flew.", "The bat flew.", "bat"),
        )
        ((models, _, settings),) = asked
        assert code == 0 and models == ["tiny:llama", "tiny:bert"]
        assert settings["texts"] == ("One bat.", "Two bats.")
        assert len(settings["treebank"]) == 144
        assert settings["files"] == {"texts": str(texts), "conllu": str(small_treebank)}
        assert (settings["pair"].word, settings["pair"].other) == ("bat", "flew")
        run(capsys, "report", "--other", "is")
        assert asked[1][2]["pair"].other == "is"

    def test_what_failed_and_what_was_stopped(self, capsys, asked):
        code, _, err = run(capsys, "report", "broken")
        assert code == 1 and "failed: tiny:llama: 1.1. See errors.log" in err
        code, _, err = run(capsys, "report", "stopped")
        assert code == 130 and "--resume goes on" in err

    @pytest.mark.parametrize(
        ("arguments", "told"),
        [
            (("tiny:llma",), "Did you mean 'tiny:llama'"),
            (("--texts", "nowhere.txt"), "no file or folder nowhere.txt"),
            (("tiny:llama", "--pair", "A bat.", "A cat.", "bat"), "bat"),
            (("tiny:llama", "tiny:llama"), "all different"),
            (("tiny:llama", "--pair", "A bat.", " ", "bat"), "something in it"),
            (("tiny:llama", "--other", "bank"), "another word than 'bank'"),
        ],
    )
    def test_wrong_inputs_are_one_line(self, capsys, arguments, told, tmp_path):
        code, _, err = run(capsys, "report", *arguments, "--out", str(tmp_path))
        assert code == 2 and told in err.splitlines()[-1]

    def test_a_pair_is_three_values(self, capsys):
        code, _, err = run(capsys, "report", "--pair", "one", "two")
        assert code == 2 and "Traceback" not in err


@pytest.mark.slow
def test_payload_lists_heads_and_the_division_of_labour(capsys, tmp_path):
    code, out, err = run(
        capsys,
        *("payload", "tiny:llama", "--label", "pos", "--words", "200", "--draws", "3", "-k", "2"),
        *("--by", "pca", "--erase", "1", "--out", str(tmp_path / "found")),
    )
    assert code == 0, err
    assert "v, largest excess over pca (pos, accuracy of 200 words" in out
    assert "v against q and k" in out and "attn_added" in out
    assert (tmp_path / "found" / "result.json").exists()


@pytest.mark.slow
def test_payload_as_json_has_every_head(capsys):
    code, out, _ = run(
        capsys,
        "payload",
        "tiny:llama",
        "--label",
        "pos",
        "--words",
        "120",
        "--draws",
        "2",
        "--json",
    )
    found = json.loads(out)
    assert code == 0 and found["label"] == "pos" and {"contrasts", "heads"} <= set(found)
    assert {row["site"] for row in found["heads"]} == {"v", "q", "k", "attn_in"}


def test_payload_takes_one_data_set(capsys):
    code, _, err = run(capsys, "payload", "tiny:llama", "--conllu", "a", "--senses", "b")
    assert code == 2 and "not several" in err


def test_capture_writes_a_store(capsys, tmp_path):
    from wvprobe.activations import open_store

    (tmp_path / "texts.txt").write_text("The river bank.\nA bank by the sea.\n", encoding="utf-8")
    given = ["tiny:llama", "--texts", str(tmp_path / "texts.txt"), "--sites", "v, resid_post"]
    given += ["--words", "bank", "--layers", "0,2", "--out", str(tmp_path / "run")]
    code, out, err = run(capsys, "capture", *given)
    assert code == 0 and "reading " in err
    assert f"2 items in {tmp_path / 'run'}" in out and "2×2×2×14" in out
    stored = open_store(tmp_path / "run")
    assert stored.layers["v"] == (0, 2) and tuple(stored.words) == ("bank", "bank")
    code, out, _ = run(capsys, "capture", *given, "--json")
    found = json.loads(out)
    assert code == 0 and (found["items"], found["lost"], found["shards"]) == (2, 0, 1)
    assert [site["shape"] for site in found["sites"]] == ["2×2×2×14", "2×2×42"]
    assert found["folder"] == str(tmp_path / "run")


def test_capture_of_marked_words_counts_the_lost(capsys, tmp_path):
    lines = ["# text = The bank's red.", "1\tThe\t_\tDET\t_\t_\t_\t_\t_\t_"]
    lines += ["2-3\tbank's\t_\t_\t_\t_\t_\t_\t_\t_"]
    lines += [f"{n}\tbank{'s' * (n == 3)}\t_\tNOUN\t_\t_\t_\t_\t_\t_" for n in (2, 3)]
    lines += ["4\tred\t_\tADJ\t_\t_\t_\t_\t_\tSpaceAfter=No", "5\t.\t_\tPUNCT\t_\t_\t_\t_\t_\t_"]
    (tmp_path / "bank.conllu").write_text("\n".join([*lines, "", ""]), encoding="utf-8")
    given = ["tiny:bert", "--conllu", str(tmp_path / "bank.conllu"), "--sites", "v"]
    code, out, err = run(capsys, "capture", *given, "--out", str(tmp_path / "run"), "--json")
    assert code == 0, err
    assert json.loads(out)["lost"] == 2 and json.loads(out)["items"] == 3


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ([], 2, "give --texts, or one of --conllu, --senses, --iob2"),
        (["--texts", "a", "--iob2", "b"], 2, "give --texts, or one of"),
        (["--conllu", "a", "--iob2", "b"], 2, "not several"),
        (["--texts", "a", "--layers", "x"], 2, "--layers` must be numbers with commas"),
        (["--texts", "a", "--engine", "dask"], 2, "`engine` must be one of 'local', 'ray'"),
        (["--texts", "a", "--engine", "ray"], 1, "pip install 'wvprobe[ray]'"),
    ],
)
def test_capture_says_what_is_wrong(arguments, code, told, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "ray", None)
    given = ["tiny:llama", "--sites", "v", "--out", str(tmp_path / "run"), *arguments]
    found, _, err = run(capsys, "capture", *given)
    assert found == code and told in err
