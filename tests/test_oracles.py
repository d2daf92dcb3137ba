"""docs/oracles.md: every measure has an oracle, and those that no other file holds are here."""

import csv
import re
from pathlib import Path

import numpy
import pytest
import torch

from wvprobe import influence
from wvprobe.influence import context_influence
from wvprobe.value_payload._erasers import leace

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
PAGE = (DOCS / "oracles.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (?!measure|-)(.+?) \| (.+?) \| (.+?) \|$", PAGE, flags=re.MULTILINE)
# API pages of measures, and what stands on them that gives no number.
MEASURED = ("activations", "behaviour", "budget", "counterfactual", "drift", "probes", "scores")


def test_every_measure_has_an_oracle_and_its_tests_are_there():
    named = {name for measure, _, _ in ROWS for name in re.findall(r"`(\w+)`", measure)}
    for page in (*MEASURED, "weights"):
        text = (DOCS / "api" / f"{page}.md").read_text(encoding="utf-8")
        functions = set(re.findall(r"^::: wvprobe\.\w+\.([a-z_]+)$", text, flags=re.MULTILINE))
        assert functions and functions <= named, functions - named
    for measure, oracle, tests in ROWS:
        found = re.findall(r"`(test_\w+)::(test_\w+)`", tests)
        assert found and oracle, measure
        for file, name in found:
            source = (TESTS / f"{file}.py").read_text(encoding="utf-8")
            assert re.search(rf"^ *def {name}\(", source, flags=re.MULTILINE), f"{file}::{name}"


def test_figures_of_mutation_tests_are_those_of_their_list():
    text = (DOCS / "mutation.md").read_text(encoding="utf-8")
    with (TESTS / "tools" / "mutants.csv").open(encoding="utf-8", newline="") as file:
        mutants = list(csv.DictReader(file))
    modules = list(dict.fromkeys(mutant["module"] for mutant in mutants))
    assert len(modules) == 5
    for module in [*modules, "all"]:
        own = [one for one in mutants if module in (one["module"], "all")]
        first, now, alive = (
            sum(one[when] == became for one in own)
            for when, became in (("first", "killed"), ("now", "killed"), ("now", "survived"))
        )
        told = [
            cell.strip() for cell in re.findall(rf"^\| {module}\b.*$", text, re.M)[0].split("|")
        ]
        figures = [int(re.findall(r"\d+", told[place])[0]) for place in (2, 3, 5, 7)]
        assert figures == [len(own), first, now, alive], module
        assert len(own) >= 150 and now >= 0.8 * len(own)


def test_leace_is_the_formula_of_its_theorem():
    """x − W⁺ P W (x − μ), W = Σ^−½, P the projection on W Σ_xz (Belrose et al. 2023, 4.2)."""
    draw = numpy.random.default_rng(0)
    y = draw.integers(4, size=211)
    x = draw.normal(size=(211, 13)) @ draw.normal(size=(13, 13)) + 2 * draw.normal(size=(4, 13))[y]
    z = numpy.eye(4)[y]
    centred = x - x.mean(0)
    values, vectors = numpy.linalg.eigh(centred.T @ centred / 211)
    white, back = (vectors * values**power @ vectors.T for power in (-0.5, 0.5))
    cross = white @ (centred.T @ (z - z.mean(0)) / 211)
    left = numpy.linalg.svd(cross)[0][:, :3]  # four labels that sum to 1 have three directions
    expected = -centred @ (back @ left @ left.T @ white).T
    found = leace(torch.from_numpy(x), torch.from_numpy(z)).change(torch.from_numpy(x))
    numpy.testing.assert_allclose(found.numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_influence_is_the_mean_change_over_single_forwards(family, tiny, monkeypatch):
    model, drawn = tiny(family), []
    once = influence._exchanged

    def seen(*given):
        drawn.append((given[2], once(*given)))
        return drawn[-1][1]

    monkeypatch.setattr(influence, "_exchanged", seen)
    text = "a power bank dropped into the river."
    found = context_influence(model, text, word="bank", draws=5)

    def vector(text, tokens):
        _, cache = model.run_with_cache(model.to_tokens(text))
        streams = torch.stack([cache[f"blocks.{i}.hook_resid_pre"][0] for i in range(3)]).double()
        # The word's last token in a decoder, the mean of its tokens in an encoder.
        return streams[:, list(tokens)].mean(dim=1) if family == "bert" else streams[:, tokens[-1]]

    for row, side in enumerate(("earlier", "later")):
        changes = []
        for _, span in [one for one in drawn if one[0] == side]:
            here, there = vector(text, span.tokens), vector(span.text, span.tokens)
            changes.append((there - here).norm(dim=-1) / here.norm(dim=-1))
        assert len(changes) == 5
        expected = torch.stack(changes).mean(dim=0)
        torch.testing.assert_close(found.values[row, :3], expected, rtol=1e-4, atol=1e-6)
