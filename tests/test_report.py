"""The page and its numbers."""

import functools
import json
from dataclasses import replace

import pytest
from conftest import shorten_reports

import wvprobe
from wvprobe.attention_clock import Spread
from wvprobe.budget import HeadBudget
from wvprobe.counterfactual import Difference
from wvprobe.errors import DiskSpaceError
from wvprobe.report import QUICK, write_report
from wvprobe.report.catalogue import CLAIMS, QUESTIONS
from wvprobe.report.given import BANK, Given, lines_of
from wvprobe.report.measured import TEXT_A, TEXT_B, Measured
from wvprobe.report.question1 import Estimate, judge_anew, judge_division
from wvprobe.report.question2 import (
    judge_changes,
    judge_context,
    judge_drift,
    judge_growth,
    judge_influence,
    judge_position,
)
from wvprobe.report.question3 import (
    concatenation,
    judge_biases,
    judge_identity,
    judge_relations,
    judge_sequence,
)
from wvprobe.report.question4 import (
    judge_common_width,
    judge_divisibility,
    judge_hardware,
    judge_published,
    judge_scaling,
)
from wvprobe.report.question5 import (
    construction,
    equal_cost,
    judge_construction,
    judge_equal_cost,
    judge_full_width,
    uneven_widths,
)
from wvprobe.report.splits import judge_sharing, judge_split, judge_width, sharing, uneven_gain
from wvprobe.testing import tiny_model

IDS = (
    "1.1 1.2 2.1 2.2 2.3 2.4 2.5 2.6 3.1 3.2 3.3 3.4 4.1 4.2 4.3 4.4 4.5 5.1 5.2 5.3 5.4 5.5 5.6"
).split()
MEASURED = {
    "1.1",
    "1.2",
    "2.1",
    "2.2",
    "2.3",
    "2.4",
    "2.5",
    "2.6",
    "3.1",
    "3.3",
    "3.4",
    "4.1",
    "4.2",
    "5.1",
    "5.4",
    "5.5",
}
MEASURED |= {"4.3", "4.4", "4.5"}
MEASURED |= {"5.2", "5.3", "5.6"}
MEASURED |= {"3.2"}
# The clock's numbers are of the moment: what the lines of Python give is of the same kind only.
TIMED = {"4.4"}


@pytest.fixture(autouse=True)
def shortened(monkeypatch):
    """The lines of Python on a page are run in the same small world as the page was written in."""
    shorten_reports(monkeypatch)


def test_all_claims_are_there_each_with_a_rule():
    assert [claim.id for claim in CLAIMS] == IDS
    assert all(claim.rule and claim.claim for claim in CLAIMS)


FAMILIES = [
    *(pytest.param(f, marks=pytest.mark.ci) for f in ("llama", "bert")),
    *(pytest.param(f, marks=pytest.mark.slow) for f in ("phi", "bloom", "deepseek_v3")),
]


@pytest.mark.xdist_group("report")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_report_is_written(family, small_report):
    written = small_report(family)
    assert written.ok and not written.failed
    document = json.loads(written.results.read_text())
    assert set(document) == {"claims", "provenance"}
    by_id = {claim["id"]: claim for claim in document["claims"]}
    assert list(by_id) == IDS
    for claim in by_id.values():
        assert {"id", "claim", "verdict", "rule", "numbers", "interval", "n", "model"} <= set(claim)
        own = "small models trained from scratch, no pretrained one"
        assert claim["model"] == (own if claim["id"] == "3.2" else f"tiny:{family}")
        assert (claim["verdict"] == "not yet measured") == (claim["id"] not in MEASURED)
    assert by_id["2.5"]["claim"].startswith("Q of 'bank' and K of 'river' both differ")
    assert by_id["3.3"]["verdict"] == "supported"
    assert by_id["5.1"]["numbers"]["per_layer"] == 3 * 96 * 12288**2
    assert document["provenance"]["weight_hash"]


def test_a_failed_audit_is_told_on_the_page(tmp_path, monkeypatch):
    from wvprobe import adapters

    monkeypatch.setattr(adapters, "sliding_window", lambda *_: None)
    monkeypatch.setattr("wvprobe.adapters.weights.sliding_window", lambda *_: None)
    monkeypatch.setattr("wvprobe.report.QUESTIONS", ())
    written = write_report(tiny_model("mistral"), tmp_path)
    assert not written.audited and not written.ok
    assert "The audit failed" in written.page.read_text()


def test_a_folder_that_cannot_be_written(tiny, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DiskSpaceError, match="cannot make the folder.*Name another"):
        write_report(tiny("llama"), tmp_path / "file")


class TestVerdicts:
    """Pure functions, on made-up numbers on each side of the margin."""

    def test_identity(self):
        good, bad = judge_identity([1e-7, 9.9e-5], 2), judge_identity([1e-7, 1.1e-4], 2)
        assert (good.verdict, bad.verdict) == ("supported", "refuted")
        assert good.interval == (1e-7, 9.9e-5) and good.n == 2

    @pytest.mark.parametrize(
        ("natural", "reversed_", "verdict"),
        [
            ((0.9, 0.11, 1.0), (0.5, 0.11, 0.6), "supported"),
            ((0.9, 0.11, 1.0), (0.5, 0.10, 0.6), "mixed"),
            ((0.9, 0.11, 1.0), (0.05, 0.0, 0.10), "mixed"),
            ((0.1, 0.05, 0.11), (0.05, 0.0, 0.10), "mixed"),
            ((0.1, 0.05, 0.10), (0.05, 0.0, 0.10), "refuted"),
        ],
    )
    def test_sequence(self, natural, reversed_, verdict):
        together = {"all blocks, natural": natural, "all blocks, reversed": reversed_}
        alone = {"block 0": (0.2, 0.11, 0.3), "block 9": (0.2, 0.10, 0.3)}
        found = judge_sequence(together, alone, 0.1, 5)
        assert (found.verdict, found.n) == (verdict, 5)
        assert found.numbers["blocks_beyond"] == 1 and found.numbers["blocks_tried"] == 2
        assert found.numbers["least_of_orders"] == min(natural[0], reversed_[0])
        assert found.interval == (min(natural[1], reversed_[1]), max(natural[2], reversed_[2]))

    def test_one_head_is_no_sequence(self):
        claim = next(claim for claim in CLAIMS if claim.id == "3.1")
        measured = Measured(tiny_model("gpt2", n_head=1))
        assert claim.judge(measured).verdict == "not testable here" and not claim.shown(measured)

    @pytest.mark.parametrize(
        ("distances", "verdict", "start"),
        [
            ((0.1, 0.6, 0.7), "supported", 1),
            ((0.1, 0.2, 0.51), "supported", 2),
            ((0.1, 0.6, 0.4), "mixed", None),
            ((0.1, 0.2, 0.5), "refuted", None),
        ],
    )
    def test_drift(self, distances, verdict, start):
        found = judge_drift(distances, (0.5, 0.5, 0.5), 480)
        assert (found.verdict, found.numbers.get("from_stream")) == (verdict, start)

    @pytest.mark.parametrize(
        ("content", "position", "verdict"),
        [
            ((0.0, 9e-6), (0.0, 2e-5), "supported"),
            ((0.0, 2e-5), (0.0, 2e-5), "mixed"),
            ((0.0, 0.0), (0.0, 9e-6), "refuted"),
        ],
    )
    def test_position(self, content, position, verdict):
        found = judge_position(content, position, 2)
        assert (found.verdict, found.interval) == (verdict, position)

    @pytest.mark.parametrize(
        ("query", "key", "verdict"),
        [
            ((0.0, 2e-5), (0.0, 2e-5), "supported"),
            ((0.0, 9e-6), (0.0, 2e-5), "refuted"),
            ((2e-5, 2e-5), (9e-6, 9e-6), "refuted"),
            ((0.0, 0.0), (0.0, 0.0), "refuted"),
        ],
    )
    def test_changes(self, query, key, verdict):
        assert judge_changes(query, key, (3, 3)).verdict == verdict

    @pytest.mark.parametrize(
        ("interval", "verdict"),
        [((0.011, 0.03), "supported"), ((0.009, 0.03), "mixed"), ((0.0, 0.009), "refuted")],
    )
    def test_influence(self, interval, verdict):
        found = judge_influence(sum(interval) / 2, interval, 0.5, 24)
        assert (found.verdict, found.numbers["earlier"]) == (verdict, 0.5)

    @pytest.mark.parametrize(
        ("above", "verdict"),
        [
            ((0.8, 0.51, 0.9), "supported"),
            ((0.6, 0.50, 0.9), "mixed"),
            ((0.4, 0.30, 0.50), "mixed"),
            ((0.4, 0.30, 0.49), "refuted"),
        ],
    )
    def test_context(self, above, verdict):
        finding = judge_context(above, 0.1, 5)
        assert finding.verdict == verdict and finding.interval == above[1:]

    @pytest.mark.parametrize(
        ("clear", "nominal", "verdict"),
        [
            ((0, 3, 1), (1, 4, 1), "supported"),
            ((0, 2, 1), (1, 3, 1), "mixed"),
            ((0, 2, 1), (0, 2, 2), "refuted"),
        ],
    )
    def test_relations(self, clear, nominal, verdict):
        finding = judge_relations(clear, nominal, 7, 100)
        assert finding.verdict == verdict and finding.numbers["layer"] == 1

    @pytest.mark.parametrize(
        ("breadth", "depth", "verdict"),
        [
            ((0.10, 0.051, 0.15), (0.4, 0.30, 0.50), "supported"),
            ((0.10, 0.050, 0.15), (0.4, 0.30, 0.50), "mixed"),
            ((0.00, -0.01, 0.01), (0.4, 0.30, 0.50), "mixed"),
            ((0.00, -0.01, 0.01), (0.4, 0.05, 0.75), "mixed"),
            ((0.00, -0.01, 0.05), (-0.4, -0.5, -0.3), "refuted"),
            ((0.00, -0.01, 0.051), (0.0, 0.0, 0.0), "mixed"),
        ],
    )
    def test_biases(self, breadth, depth, verdict):
        sides = Difference(*breadth), Difference(*depth)
        found = judge_biases(*sides, 5, quick=False)
        assert (found.verdict, found.n) == (verdict, 5)
        assert found.interval == min(breadth[1:], depth[1:])
        assert found.numbers["depth_sequential_minus_parallel_high"] == depth[2]
        assert judge_biases(*sides, 5, quick=True).verdict == "underpowered"
        assert judge_biases(*sides, 4, quick=False).verdict == "underpowered"
        assert "for anything to follow" in judge_biases(*sides, 4, quick=False).reason

    @pytest.mark.parametrize(
        ("cosine", "score", "verdict"),
        [
            ((0.7, 0.51, 0.9), (0.7, 0.6, 0.9), "supported"),
            ((0.7, 0.50, 0.9), (0.7, 0.6, 0.9), "mixed"),
            ((0.7, 0.60, 0.9), (0.3, 0.1, 0.49), "refuted"),
            ((0.7, 0.60, 0.9), (0.3, 0.1, 0.50), "mixed"),
        ],
    )
    def test_growth(self, cosine, score, verdict):
        finding = judge_growth({"cosine": cosine, "score": score}, 43)
        assert (finding.verdict, finding.n) == (verdict, 43)

    @pytest.mark.parametrize(
        ("query", "content", "verdict"),
        [
            ((0.1, 0.01, 0.2), (0.2, 0.01, 0.3), "supported"),
            ((0.1, 0.00, 0.2), (0.2, 0.01, 0.3), "mixed"),
            ((0.1, 0.01, 0.2), (0.2, 0.00, 0.3), "mixed"),
            ((-0.1, -0.2, 0.0), (-0.2, -0.3, 0.0), "refuted"),
            ((-0.1, -0.2, 0.0), (0.2, 0.1, 0.3), "mixed"),
        ],
    )
    def test_division(self, query, content, verdict):
        contrasts = {"sense: v − q": Estimate(*query), "sense: v − k": Estimate(0.2, 0.1, 0.3)}
        finding = judge_division(contrasts, Estimate(*content), 43)
        assert finding.verdict == verdict and finding.interval == content[1:]

    @pytest.mark.parametrize(
        ("excess", "profile", "verdict"),
        [
            (0.05, (0.2, 0.06, 0.3), "supported"),
            (0.06, (0.2, 0.06, 0.3), "refuted"),
            (-0.06, (0.2, 0.06, 0.3), "refuted"),
            (0.01, (0.2, 0.05, 0.3), "mixed"),
            (0.01, (0.02, 0.01, 0.05), "refuted"),
        ],
    )
    def test_anew(self, excess, profile, verdict):
        assert judge_anew(excess, Estimate(*profile), 30).verdict == verdict

    def test_divisibility(self):
        assert judge_divisibility([True, True], [True, True]).verdict == "supported"
        found = judge_divisibility([True, False, False], [True, True, False])
        assert found.verdict == "refuted"
        assert list(found.numbers.values()) == [3, 2, 1]

    def test_published_widths(self):
        found = judge_published({"A": 64, "B": 56}, {"A": 64, "B": 192})
        assert found.verdict == "refuted" and "B has 192, not 56" in found.reason
        assert judge_published({"A": 64}, {"A": 64}).verdict == "supported"

    def test_construction(self):
        assert judge_construction(1e-6, 1e-15, (1, 9)).verdict == "refuted"
        assert judge_construction(1e-6, 1e-3, (1, 9)).verdict == "supported"
        assert judge_construction(1e-3, 1e-15, (1, 9)).verdict == "not testable here"

    @pytest.mark.parametrize(
        ("interval", "verdict"),
        [((0.8, 0.9), "supported"), ((0.79, 0.9), "mixed"), ((0.6, 0.79), "refuted")],
    )
    def test_common_width(self, interval, verdict):
        found = judge_common_width(0.8, interval, 83)
        assert (found.verdict, found.interval, found.n) == (verdict, interval, 83)

    @pytest.mark.parametrize(
        ("low", "high", "verdict"),
        [(1.11, 2.0, "supported"), (1.09, 2.0, "mixed"), (0.9, 1.1, "refuted")],
    )
    def test_hardware(self, low, high, verdict):
        found = judge_hardware("flash", Spread(1.5, low, high, 8, 128, 0.02), 1.01, 40)
        assert (found.verdict, found.interval, found.n) == (verdict, (low, high), 40)
        assert found.numbers["noise"] == 0.02 and "flash kernel" in found.reason

    @pytest.mark.parametrize(
        ("heads", "verdict"),
        [
            ((0.9, 0.8, 1.0), "supported"),
            ((0.9, 0.8, 0.99), "refuted"),
            ((1.2, 1.01, 1.3), "refuted"),
            ((0.9, 0.6, 1.11), "mixed"),
        ],
    )
    def test_scaling(self, heads, verdict):
        found = judge_scaling(heads, (0.1, -0.1, 0.2), 83)
        assert (found.verdict, found.interval) == (verdict, heads[1:])
        assert "d_head is constant" in found.reason
        assert "d_head is not constant" in judge_scaling(heads, (0.1, 0.01, 0.2), 83).reason

    @pytest.mark.parametrize(
        ("interval", "verdict"),
        [((-0.1, 0.009), "supported"), ((0.0, 0.02), "mixed"), ((0.011, 0.1), "refuted")],
    )
    def test_split(self, interval, verdict):
        found = judge_split(sum(interval) / 2, interval, 16)
        assert (found.verdict, found.interval, found.n) == (verdict, interval, 16)

    def test_a_split_of_a_model_without_loss_is_not_judged(self, tiny):
        found = uneven_gain(Measured(tiny("bert")))
        assert found.verdict == "not testable here"
        assert 0 < found.numbers["change_uneven"] < 1

    @pytest.mark.parametrize(
        ("interval", "verdict"),
        [((1.51, 3.0), "supported"), ((1.2, 1.6), "mixed"), ((0.9, 1.49), "refuted")],
    )
    def test_sharing(self, interval, verdict):
        numbers = {"bytes_saved": 0.667, "change_even": 0.4, "change_uneven": 0.5}
        found = judge_sharing(1.25, interval, numbers, 16)
        assert (found.verdict, found.interval, found.n) == (verdict, interval, 16)
        assert "saves 67% of the cache" in found.reason and found.numbers["ratio"] == 1.25

    def test_sharing_of_one_head_is_not_testable(self, tiny):
        from wvprobe.errors import UnsupportedError

        with pytest.raises(UnsupportedError, match="one key-value head"):
            sharing(Measured(tiny("llama", num_key_value_heads=1)))

    @pytest.mark.parametrize(
        ("ov", "d_head", "verdict"),
        [
            ((0.8, 0.51, 0.9), 64, "supported"),
            ((0.8, 0.49, 0.9), 64, "mixed"),
            ((0.3, 0.20, 0.49), 64, "refuted"),
            ((0.3, 0.20, 0.49), 63, "not testable here"),
            ((0.8, 0.51, 0.9), 63, "supported"),
        ],
    )
    def test_width(self, ov, d_head, verdict):
        within, needed = {"OV": ov, "QK": (1.0, 1.0, 1.0)}, {"OV": 50.0, "QK": 30.0}
        found = judge_width(within, needed, {"OV": d_head, "QK": d_head}, 270)
        assert (found.verdict, found.interval) == (verdict, (ov[1], min(ov[2], 1.0)))
        assert ("narrower than 64" in found.reason) == (d_head < 64)

    def test_full_width_heads(self):
        judge = functools.partial(judge_full_width, HeadBudget(12_288, 96, 12_288, n_layers=96))
        found = judge()
        assert found.verdict == "refuted"
        assert found.numbers["per_layer"] == 43_486_543_872
        assert found.numbers["total"] == pytest.approx(4.1747e12, rel=1e-4)
        assert found.numbers["total_with_W_O"] == pytest.approx(5.5663e12, rel=1e-4)
        assert judge(claimed=4.2e12).verdict == "supported"
        assert judge(claimed=4.0e12).verdict == "refuted"

    def test_equal_cost(self):
        full = 4 * 42**2
        assert judge_equal_cost(42, full, full).verdict == "supported"
        assert judge_equal_cost(42, full - 7, full).verdict == "mixed"
        assert judge_equal_cost(42, full - 7, full + 7).verdict == "refuted"

    def test_a_models_own_count_is_its_parameters(self, tiny):
        for family, verdict in (("gpt2", "supported"), ("llama", "refuted")):
            model = tiny(family)
            attention = model.blocks[0].attn
            own = sum(getattr(attention, f"W_{x}").numel() for x in "QKVO")
            found = equal_cost(Measured(model))
            assert found.numbers["model"] == own
            assert found.verdict == verdict
        assert equal_cost(Measured(tiny("deepseek_v3"))).verdict == "not testable here"

    def test_concatenation_fails_where_heads_are_swapped(self, monkeypatch):
        from wvprobe import adapters

        model = tiny_model("llama")
        assert concatenation(Measured(model)).verdict == "supported"
        real = adapters.output_weight
        monkeypatch.setattr(adapters, "output_weight", lambda *a: real(*a).flip(0))
        assert concatenation(Measured(model)).verdict == "refuted"

    @pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "bert", "deepseek_v3"])
    def test_uneven_heads_share_one_output_matrix(self, family, tiny):
        found = construction(Measured(tiny(family)))
        assert found.verdict == "refuted"
        assert found.numbers["narrowest"] < found.numbers["widest"]

    def test_uneven_widths_sum_to_the_whole(self):
        assert uneven_widths(30, 5) == [2, 4, 6, 8, 10]
        assert sum(uneven_widths(576, 9)) == 576 and len(set(uneven_widths(576, 9))) == 9


@pytest.mark.ci
@pytest.mark.xdist_group("report")
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_the_lines_of_python_on_the_page_give_the_numbers_on_it(
    family, tiny, small_report, small_treebank
):
    model, written = tiny(family), small_report(family)
    page, document = written.page.read_text(), json.loads(written.results.read_text())
    for claim in document["claims"]:
        if claim["id"] not in MEASURED or claim["verdict"] == "not testable here":
            continue
        given = {"wvprobe": wvprobe, "model": model, "text_a": TEXT_A, "text_b": TEXT_B}
        given["conllu"] = str(small_treebank)
        exec(claim["code"], given)
        assert given["numbers"], claim["id"]
        if claim["id"] in TIMED:
            assert set(given["numbers"]) == set(claim["numbers"])
            continue
        for name, value in given["numbers"].items():
            expected = claim["numbers"][name]
            assert float(value) == pytest.approx(expected, rel=1e-6, abs=1e-9), (claim["id"], name)
        assert claim["flips"] and claim["code"].splitlines()[-1].split("#")[0].strip()
    assert "context_dependence(model, text_a, text_b" in page


@pytest.mark.slow
def test_growth_is_judged_of_a_deep_model_as_its_lines_of_python_say(small_sizes):
    model = tiny_model("llama", num_hidden_layers=12)
    claim = next(claim for claim in CLAIMS if claim.id == "2.3")
    claim = claim.about(BANK.told, lines_of(Given(), small_sizes))
    finding = claim.judge(Measured(model, sizes=small_sizes))
    assert finding.verdict != "not testable here" and finding.n == 6
    given = {"wvprobe": wvprobe, "model": model}
    exec(claim.code, given)
    assert given["numbers"] == finding.numbers
    assert claim.judge(Measured(tiny_model("llama"))).verdict == "not testable here"


@pytest.mark.slow
def test_a_quick_report_holds_its_training_underpowered(tiny):
    claim = next(claim for claim in CLAIMS if claim.id == "3.2")
    finding = claim.judge(Measured(tiny("llama")))
    assert finding.verdict == "underpowered" and finding.n == 5
    full = Measured(tiny("llama"), sizes=replace(QUICK, full_training=True))
    assert claim.judge(full).verdict != "underpowered"


def test_every_measured_claim_says_what_would_flip_it_and_how_to_get_its_numbers():
    for claim in CLAIMS:
        assert (claim.measure is not None) == bool(claim.flips) == bool(claim.code)
    assert [question.title for question in QUESTIONS][4] == "Why split d_model evenly?"


def test_what_an_architecture_does_not_allow_is_not_testable(tiny):
    claim = next(claim for claim in CLAIMS if claim.id == "2.1")
    from wvprobe.errors import UnsupportedError

    class Refusing(Measured):
        @property
        def shares(self):
            raise UnsupportedError("no such scores. Use others.")

    found = claim.judge(Refusing(tiny("llama")))
    assert (found.verdict, found.reason) == ("not testable here", "no such scores. Use others.")
    assert not claim.shown(Refusing(tiny("llama")))
