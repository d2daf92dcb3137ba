"""Labels taken out of values: nothing is left to a linear probe, and the rest follows exactly."""

import pytest
import torch
from test_value_payload import SENSES, sentences

from wvprobe import adapters
from wvprobe._types import HeadId
from wvprobe.activations import read_sites
from wvprobe.errors import InputError, UnsupportedError
from wvprobe.plotting import figure
from wvprobe.testing import FAMILIES
from wvprobe.value_payload import EraseResult, erase
from wvprobe.value_payload._arrivals import Erasures
from wvprobe.value_payload._closed import Probe
from wvprobe.value_payload._divergence import divergences
from wvprobe.value_payload._erasers import leace, random_erasers
from wvprobe.value_payload._items import Selection, items_of
from wvprobe.value_payload._scorers import ClassScorer

GIVEN = {"min_count": 5, "per_sentence": 3, "draws": 2}


def labelled_vectors(n=400, width=13, classes=4):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(classes, (n,), generator=generator)
    mixing = torch.randn(width, width, generator=generator, dtype=torch.float64)
    means = 2 * torch.randn(classes, width, generator=generator, dtype=torch.float64)
    x = torch.randn(n, width, generator=generator, dtype=torch.float64) @ mixing + means[y]
    return x, torch.nn.functional.one_hot(y, classes).double(), y


def test_leace_leaves_no_covariance_and_moves_least():
    x, onehot, _ = labelled_vectors()
    eraser = leace(x, onehot)
    assert eraser.right.shape == (13, 3)
    change = eraser.change(x)
    left = x + change
    cross = (left - left.mean(dim=0)).T @ (onehot - onehot.mean(dim=0))
    assert float(cross.abs().max()) < 1e-8 * len(x)
    assert torch.allclose(left.mean(dim=0), x.mean(dim=0))
    # Erasing by an orthogonal projection off the class means leaves nothing either, at more cost.
    means = torch.stack([x[onehot[:, k] > 0].mean(dim=0) for k in range(4)]) - x.mean(dim=0)
    basis = torch.linalg.svd(means)[2][:3]
    orthogonal = (x - x.mean(dim=0)) @ basis.T @ basis
    assert change.square().sum() < orthogonal.square().sum()


def test_random_directions_have_the_same_rank_and_energy():
    x, onehot, _ = labelled_vectors()
    mine = leace(x, onehot).change(x)
    energy = float(mine.square().sum(dim=1).mean())
    controls = random_erasers(x, 3, energy, 7, seed=1)
    changes = controls.eraser.change(x)
    energies = changes.square().sum(dim=-1).mean(dim=-1)
    assert energies.tolist() == pytest.approx([energy] * 7, rel=1e-6)
    assert torch.allclose(controls.stretch, torch.ones(7).double(), atol=1e-6)
    frames = controls.eraser.right
    assert torch.allclose(frames.mT @ frames, torch.eye(3).double().expand(7, 3, 3), atol=1e-9)
    # The directions are gone, not merely shrunk.
    left = (x - x.mean(dim=0) + changes) @ frames
    assert float(left.abs().max()) < 1e-4
    assert float((frames[0].T @ frames[1]).norm()) < 1.7
    # No 3 directions hold more than all: the largest there are, then stretched.
    total = float((x - x.mean(dim=0)).square().sum(dim=1).mean())
    more = random_erasers(x, 3, 1.5 * total, 2, seed=1)
    assert float(more.stretch.min()) > 1.2
    stretched = more.eraser.change(x).square().sum(dim=-1).mean(dim=-1)
    assert stretched.tolist() == pytest.approx([1.5 * total] * 2)


def test_probes_find_nothing_after_leace_and_most_after_the_control(tiny):
    found = erase(tiny("llama"), sentences(60), **GIVEN)
    frame = found.to_frame().query("place == 'v'")
    # Each layer's two key-value heads once, whatever number of query heads reads them.
    assert len(frame) == 6 and frame["head"].nunique() == 2
    assert (frame["before"] > 0.75).all()
    assert (frame["erased"] < found.majority + 0.1).all()
    # Two draws say little of how draws differ, so intervals of the excess are wide.
    assert (frame["excess_loss"] > 0.3).all()
    assert (frame["loss_low"] > frame["control_loss_high"]).all()
    assert (frame["control"] > frame["erased"] + 0.15).all()
    assert frame["control_energy"].tolist() == pytest.approx(frame["energy"].tolist(), rel=1e-4)
    gone = frame["before"] - frame["erased"]
    assert frame["loss"].tolist() == pytest.approx(gone.tolist())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("destination", ["target", "last"])
def test_what_arrives_is_what_a_forward_with_other_values_gives(tiny, family, destination):
    model = tiny(family)
    arch = adapters.architecture(model)
    items = items_of(model, sentences(12), None, Selection(None, 1, min_count=2))
    scorer = ClassScorer(
        items, Probe("lda", None, False), folds=2, balanced=False, control_draws=0, seed=0
    )
    run = Erasures(model, arch, items, scorer, destination, 2, 0)
    ((_, layer),) = run.read([1])
    head = arch.n_kv_heads - 1
    change = torch.randn(layer.v[:, head].shape, generator=torch.Generator().manual_seed(0))
    arriving = layer.arriving(head, change)
    there = run.source if destination == "target" else "last"
    for item in range(3):  # text by text: none is padded, and each row is known
        source = run.source[item]

        def other(value, item=item, source=source):
            value = value.clone()
            value[0, source, head] += change[item].to(value.dtype)
            return value

        with adapters.changing(model, arch, {("v", 1): other}):
            seen = read_sites(
                model, items.texts[item], ("z", "attn_added", "v"), layers=1,
                positions="last" if there == "last" else [there[item]],
            )  # fmt: skip
        group = layer.group(head)
        z = layer.z[item].clone()
        z[group] += arriving[item]
        assert torch.allclose(seen["z"][0, 0], z, atol=1e-5, rtol=1e-4)
        added = layer.added(head, arriving)[item]
        assert torch.allclose(seen["attn_added"][0, 0], added, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_erased_from(tiny, family):
    model = tiny(family)
    arch = adapters.architecture(model)
    given = {**GIVEN, "heads": [(1, arch.n_kv_heads - 1), (0, 0)]}
    found = erase(model, sentences(30), kl_heads=[(0, 0)], kl_words=6, **given)
    frame = found.to_frame()
    assert frame[["layer", "head"]].drop_duplicates().to_numpy().tolist() == sorted(
        map(list, given["heads"])
    )
    assert (
        frame["erased"].between(0, 1).all() and not frame.drop(columns="place").isna().any().any()
    )
    row = found.kl_frame().iloc[0]
    assert row["kl"] > 0 and row["kl_excess"] == pytest.approx(row["kl"] - row["kl_control"])


def test_divergence_is_that_of_texts_read_alone(tiny):
    model = tiny("gemma2")
    arch = adapters.architecture(model)
    tokens = [
        tuple(model.to_tokens(t)[0].tolist()) for t in ("the river bank", "a long old bridge")
    ]
    change = {HeadId(1, 0): torch.randn(1, 2, arch.d_head_v)}
    both = divergences(model, arch, tokens, [1, 2], [2, 3], change)[HeadId(1, 0)]
    for item in range(2):
        one = {HeadId(1, 0): change[HeadId(1, 0)][:, item, None]}
        alone = divergences(model, arch, [tokens[item]], [1 + item], [2 + item], one)
        assert float(alone[HeadId(1, 0)]) == pytest.approx(float(both[0, item]), rel=1e-4)
    none = {HeadId(1, 0): torch.zeros(1, 2, arch.d_head_v)}
    assert float(divergences(model, arch, tokens, [1, 2], [2, 3], none)[HeadId(1, 0)].max()) == 0


def test_erasures_are_drawn_and_saved(tiny, tmp_path):
    found = erase(tiny("llama"), sentences(30), heads=[(0, 0), (2, 1)], **GIVEN)
    again = EraseResult.load(found.save(tmp_path / "erased"))
    assert again.to_frame().equals(found.to_frame()) and again.kl is None
    assert again.kl_frame().empty
    drawn = figure(found)
    frame = found.to_frame().query("place == 'z'").sort_values("excess_loss", ascending=False)
    first = frame.iloc[0]
    assert f"L{first['layer']}H{first['head']}" in drawn.layout.title.text
    assert len(drawn.data) == 6 and drawn.data[2].y[0] == first["loss"]


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"site": "k"}, UnsupportedError, "Use site='v'"),
        ({"destination": "here"}, InputError, "'target', 'last'"),
        ({"heads": [(0, 3)]}, InputError, "KV heads, counted from 0"),
        ({"heads": [(0, 0), (0, 0)]}, InputError, "different"),
        ({"heads": [(0, 0)], "kl_heads": [(1, 0)]}, InputError, "among `heads`"),
        ({"draws": 1}, InputError, "at least 2"),
    ],
)
def test_what_cannot_be_erased_is_refused(tiny, arguments, error, says):
    with pytest.raises(error, match=says):
        erase(tiny("llama"), sentences(20), **{**GIVEN, **arguments})


def test_senses_and_headless_models_are_refused(tiny, monkeypatch):
    with pytest.raises(UnsupportedError, match="label='pos'"):
        erase(tiny("llama"), SENSES)
    model = tiny("bert")
    monkeypatch.setattr(model, "_wvprobe_missing_head", "its checkpoint has no cls")
    with pytest.raises(UnsupportedError, match="kl_heads"):
        erase(model, sentences(20), kl_heads=[(0, 0)], **GIVEN)
