"""Held-out senses and scores of a word with itself, against brute force."""

from dataclasses import replace

import pytest
import torch

from wvprobe import adapters
from wvprobe._types import Result
from wvprobe.activations import capture
from wvprobe.contextual_drift import held_out_senses, score_drift
from wvprobe.contextual_drift._vectors import Reader, read_items
from wvprobe.datasets import SenseDataset, load_senses
from wvprobe.errors import InputError
from wvprobe.testing import FAMILIES
from wvprobe.words import encode, word_at

BANK = [
    replace(item, split="train" if number % 2 else "test")
    for number, item in enumerate(load_senses().only("bank").items[::2])
]
# Unequal senses in the test part, so that balanced accuracy differs from accuracy.
SPLIT = SenseDataset("split", tuple(BANK[:-3]))
# One form of one word, so that all targets are the same tokens.
FORM = SenseDataset(
    "form", tuple(i for i in load_senses().only("bank") if i.target == "bank" and i.start)[::5]
)


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_held_out_by_brute_force(family, tiny, tmp_path):
    model = tiny(family)
    got = held_out_senses(model, SPLIT)
    parts = {name: [i for i in SPLIT if i.split == name] for name in ("train", "test")}
    reader = Reader.of(model, "target", None, None)
    x = {name: read_items(reader, items).x.double() for name, items in parts.items()}
    senses = list(dict.fromkeys(i.sense for i in parts["train"]))
    assert got.senses == tuple(("bank", s) for s in senses)
    for layer in range(4):
        centroids = torch.stack(
            [
                torch.stack(
                    [
                        v[layer]
                        for v, i in zip(x["train"], parts["train"], strict=True)
                        if i.sense == s
                    ]
                ).mean(dim=0)
                for s in senses
            ]
        )
        right: dict[str, list[float]] = {s: [] for s in senses}
        for v, item in zip(x["test"], parts["test"], strict=True):
            likeness = torch.cosine_similarity(v[layer], centroids, dim=-1)
            tied = likeness >= likeness.max() - 1e-6
            right[item.sense].append(float(tied[senses.index(item.sense)]) / int(tied.sum()))
        recall = [sum(r) / len(r) for r in right.values()]
        assert got.recall[:, layer].tolist() == pytest.approx(recall)
        assert float(got.balanced[0, layer]) == pytest.approx(sum(recall) / len(recall))
        flat = [value for r in right.values() for value in r]
        assert float(got.accuracy[0, layer]) == pytest.approx(sum(flat) / len(flat))
    assert (got.low <= got.balanced).all() and (got.balanced <= got.high).all()
    assert float(got.chance) == pytest.approx(1 / len(senses))
    assert sum(got.n_test) == len(parts["test"])
    frame = got.to_frame()
    assert list(frame["n_train"].unique()) == [len(parts["train"])]
    assert frame["word"].tolist() == ["bank"] * 4 and frame["layer"].tolist() == [0, 1, 2, 3]
    given = {"train": "train", "test": "test", "position": "target", "dataset": "split"}
    assert given.items() <= got.provenance.settings.items()
    assert Result.load(got.save(tmp_path)).to_frame().equals(frame)


def test_a_word_that_is_not_tested_has_no_accuracy(tiny):
    other = [replace(item, split="train") for item in load_senses().only("bat").items[:6]]
    got = held_out_senses(tiny("llama"), SenseDataset("more", (*SPLIT, *other)))
    assert got.words == ("bank", "bat")
    assert got.balanced[0].isfinite().all()
    for values in (got.balanced, got.low, got.high, got.accuracy, got.chance, got.majority):
        assert values[1].isnan().all()


def test_held_out_refuses_what_it_cannot_judge(tiny):
    with pytest.raises(InputError, match=r"one of 'test', 'train'"):
        held_out_senses(tiny("llama"), SPLIT, test="dev")
    one = [i for i in SPLIT if i.split == "test" or i.sense == BANK[0].sense]
    with pytest.raises(InputError, match="all senses"):
        held_out_senses(tiny("llama"), SenseDataset("one", tuple(one)))


@pytest.mark.parametrize("family", FAMILIES)
def test_own_scores_at_layer_0_are_one_number_unless_positions_are_learned(family, tiny):
    model = tiny(family)
    got = score_drift(model, FORM)
    size = float(got.difference[:, 1:].max())
    assert got.difference.shape == (1, 3) and size > 0.1
    learned = adapters.position_table(model, adapters.architecture(model)) is not None
    assert (float(got.difference[0, 0]) > 1e-3 * size) == learned
    assert (float(got.same[0, 0]) > 1e-3 * size) == learned


@pytest.mark.parametrize("family", ["llama", "bert"])
def test_score_differences_by_brute_force(family, tiny, tmp_path):
    model = tiny(family)
    got = score_drift(model, FORM)
    own = []
    for item in FORM:
        at = word_at(encode(model, item.sentence), item.start, item.end).tokens[-1]
        seen = capture(model, item.sentence, "scores")["scores"]
        own.append(seen[0, :, :, at, at].double())
    groups = {s: [n for n, i in enumerate(FORM) if i.sense == s] for s in FORM.senses("bank")}
    groups = {s: g for s, g in groups.items() if len(g) > 1}

    def apart(pairs):
        return torch.stack([(own[i] - own[j]).abs().mean(dim=-1) for i, j in pairs]).mean(dim=0)

    kinds = list(groups.values())
    different = [
        apart([(i, j) for i in a for j in b]) for n, a in enumerate(kinds) for b in kinds[:n]
    ]
    same = [apart([(i, j) for i in g for j in g if i != j]) for g in kinds]
    torch.testing.assert_close(
        got.difference[0], torch.stack(different).mean(dim=0), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(got.same[0], torch.stack(same).mean(dim=0), atol=1e-4, rtol=1e-4)
    assert Result.load(got.save(tmp_path)).to_frame().equals(got.to_frame())
    few = score_drift(model, FORM, max_occurrences=3)
    assert few.n == (3,)


@pytest.mark.slow
@pytest.mark.real_model
def test_coarsewsd_bank(smollm2, minilm, shared_data):
    """1,061 to 46: balanced accuracy, far above the .5 of a guess."""
    bank = load_senses(shared_data / "coarsewsd20" / "bank")
    for model in (smollm2, minilm):
        got = held_out_senses(model, bank)
        assert float(got.low[0].max()) > 0.8
        assert float(got.chance) == 0.5
