"""Small models from scratch: their arithmetic, their tasks, their training, and what is told."""

import dataclasses
import itertools
import json
import math

import pytest
import torch

from wvprobe._types import Result
from wvprobe.counterfactual import BiasResult, compare_biases
from wvprobe.counterfactual._small_models import (
    Architecture,
    architectures,
    first_weights,
    forward,
    multiply_adds,
    n_parameters,
    shapes,
)
from wvprobe.counterfactual._tasks import Task, tasks
from wvprobe.counterfactual._training import Recipe, Training
from wvprobe.errors import DiskSpaceError, InputError, IntegrityError

KINDS = {kind.name: kind for kind in architectures(4, 3)}
TINY = {"seeds": 2, "n_heads": 2, "d_head": 3, "symbols": 5, "steps": 3, "progress": False}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def stacked(kind, task, d_model, rows):
    drawn = [first_weights(kind, task, d_model, generator(row)) for row in range(rows)]
    return {name: torch.stack([row[name] for row in drawn]) for name in drawn[0]}


def by_hand(weights, layers, task, marks):
    """Run one model on one sequence, head by head and position by position."""

    def normed(v):
        return v / (v.square().mean() + 1e-6).sqrt()

    x = [
        weights["positions"][at] + sum(weights["embed"][mark] for mark in row.nonzero()[:, 0])
        for at, row in enumerate(marks)
    ]
    for number, widths in enumerate(layers):
        w_q, w_k, w_v = weights[f"qkv.{number}"].unbind(1)
        read, after = [normed(v) for v in x], list(x)
        for query in range(len(x)):
            for head in range(len(widths)):
                dims = slice(sum(widths[:head]), sum(widths[: head + 1]))
                q = read[query] @ w_q[:, dims]
                scores = torch.stack(
                    [
                        q @ (read[key] @ w_k[:, dims]) / widths[head] ** 0.5
                        for key in range(query + 1)
                    ]
                )
                pattern = scores.exp() / scores.exp().sum()
                z = sum(p * (read[key] @ w_v[:, dims]) for key, p in enumerate(pattern))
                after[query] = after[query] + z @ weights[f"out.{number}"][dims]
        x = after
    asked = torch.stack([normed(v) @ weights["unembed"] for v in x[task.symbols :]])
    return asked.view(task.questions, task.n_answers, task.symbols)


class TestModels:
    @pytest.mark.parametrize("name", KINDS)
    def test_logits_and_gradients_are_those_of_plain_loops(self, name):
        task, kind = Task("mixed", 2, 2, symbols=5, questions=2), KINDS[name]
        weights = stacked(kind, task, 7, rows=2)
        for value in weights.values():
            value.requires_grad_()
        asked = [task.draw(2, generator(row)) for row in (7, 8)]
        marks = torch.stack([each.marks for each in asked])
        found = forward(weights, kind, task, marks.double())
        expected = torch.stack(
            [
                torch.stack(
                    [
                        by_hand(
                            {n: w[row] for n, w in weights.items()}, kind.layers, task, sequence
                        )
                        for sequence in marks[row]
                    ]
                )
                for row in range(2)
            ]
        )
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
        slope = torch.randn(found.shape, generator=generator(), dtype=torch.float64)
        gradients = [
            torch.autograd.grad((y * slope).sum(), list(weights.values()))
            for y in (found, expected)
        ]
        for got, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-11, rtol=1e-9)

    def test_parameters_are_equal_and_so_are_products(self):
        for task in tasks(4, 8, 8):
            kinds = architectures(4, 8)
            counts = {n_parameters(kind, task, 32) for kind in kinds}
            own = (2 + task.starts) * 8 * 32 + 16 * 32 + 4 * 32 * 32 + 32 * 4 * 8
            assert counts == {own}
            for kind in kinds:
                drawn = first_weights(kind, task, 32, generator())
                assert sum(value.numel() for value in drawn.values()) == own
                assert {n: tuple(v.shape) for n, v in drawn.items()} == shapes(kind, task, 32)
            taken = {kind.name: multiply_adds(kind, task, 32) for kind in kinds}
            pairs = 16 * 17 // 2
            assert taken["parallel"] == (
                16 * 4 * 32 * 32
                + 2 * pairs * 32  # projections; scores and means of values
                + 8 * 32 * 4 * 8
                + 2 * 8 * 32  # the read-outs, and the norm before them
                + 2 * 16 * 32
                + 3 * pairs * 4  # the layer's norm, and softmax
            )
            assert taken["sequential"] - taken["parallel"] == 3 * 2 * 16 * 32
            assert taken["parallel"] - taken["wide"] == 3 * 3 * pairs
            assert taken["uneven"] == taken["parallel"]
            assert max(taken.values()) < 1.06 * min(taken.values())

    def test_only_where_heads_stand_differs_before_training(self):
        task, kinds = tasks(4, 8, 8)[0], {kind.name: kind for kind in architectures(4, 8)}
        drawn = {name: first_weights(kind, task, 32, generator()) for name, kind in kinds.items()}
        for number in range(4):
            dims = slice(8 * number, 8 * number + 8)
            one, other = (
                drawn["parallel"]["qkv.0"][:, :, dims],
                drawn["sequential"][f"qkv.{number}"],
            )
            assert torch.equal(one, other)
        assert kinds["uneven"].layers == ((3, 6, 10, 13),)
        for name in ("embed", "positions", "unembed"):
            assert len({drawn[kind][name].sum().item() for kind in kinds}) == 1


def solution(task, kind):
    """Return weights, set by hand, that answer every question, and their d_model.

    A dimension a mark, and one an answer and symbol. The l-th head looks up what its start, or the
    answer before, names, and writes the successor where the l-th answer is read.
    """
    m, sharp, loud = task.symbols, 200.0, 100.0
    d_model = task.n_marks + task.n_answers * m
    symbol = torch.arange(m)
    weights = {
        name: torch.zeros(shape).double() for name, shape in shapes(kind, task, d_model).items()
    }
    weights["embed"][:, : task.n_marks] = torch.eye(task.n_marks).double()
    weights["unembed"][task.n_marks :] = torch.eye(task.n_answers * m).double()
    heads = [(number, at) for number, widths in enumerate(kind.layers) for at in range(len(widths))]
    for answer, (number, at) in enumerate(heads):
        start, hop = divmod(answer, task.hops)
        asked = (2 + start) * m if hop == 0 else task.n_marks + (answer - 1) * m
        dims = symbol + at * m
        weights[f"qkv.{number}"][asked + symbol, 0, dims] = sharp
        weights[f"qkv.{number}"][symbol, 1, dims] = sharp
        weights[f"qkv.{number}"][m + symbol, 2, dims] = loud
        weights[f"out.{number}"][dims, task.n_marks + answer * m + symbol] = 1.0
    return {name: value[None] for name, value in weights.items()}


class TestTasks:
    @pytest.mark.parametrize("task", tasks(4, 7, 3), ids=lambda task: task.name)
    def test_answers_are_those_of_following_the_links(self, task):
        asked = task.draw(40, generator())
        assert asked.marks.shape == (40, task.n_positions, task.n_marks)
        for marks, answers in zip(asked.marks, asked.answers, strict=True):
            rows = [row.nonzero()[:, 0].tolist() for row in marks]
            successor = {key: value - 7 for key, value in rows[:7]}
            assert sorted(successor) == sorted(successor.values()) == list(range(7))
            for row, given in zip(rows[7:], answers.tolist(), strict=True):
                starts = [mark - 7 * (2 + slot) for slot, mark in enumerate(row)]
                assert len(set(starts)) == task.starts and set(starts) <= set(range(7))
                expected = []
                for at in starts:
                    for _ in range(task.hops):
                        at = successor[at]
                        expected.append(at)
                assert given == expected

    def test_cycles_are_single_and_all_equally_likely(self):
        task = Task("depth", 1, 3, symbols=4, questions=1)
        asked = task.draw(6000, generator())
        keys, values = asked.marks[:, :4, :4], asked.marks[:, :4, 4:8]
        successor = torch.einsum("spk,spv->skv", keys.long(), values.long()).argmax(dim=-1)
        _, counts = torch.unique(successor, dim=0, return_counts=True)
        assert len(counts) == 6 and (counts - 1000).abs().max() < 5 * 29  # √(6000 · 5/36) = 29

    def test_no_link_and_no_question_alone_tells_an_answer(self):
        """All cycles of 5 and all starts, counted: what a weighted bag of tokens could use."""
        for hops in (1, 2, 3, 4):
            table = torch.zeros(5, 5, 5, 5, dtype=torch.long)  # start, key, value, answer
            for order in itertools.permutations(range(1, 5)):
                cycle = (0, *order)
                successor = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
                for start in range(5):
                    at = start
                    for _ in range(hops):
                        at = successor[at]
                    for key, value in successor.items():
                        table[start, key, value, at] += 1
            by_link, by_start = table.sum(dim=0), table.sum(dim=(1, 2))
            assert len(by_link.sum(dim=2).unique()) == 2  # a link is there or not, never to itself
            assert all(len(by_link[k, v].unique()) == 1 for k in range(5) for v in range(5))
            for start in range(5):
                others = [answer for answer in range(5) if answer != start]
                assert by_start[start, start] == 0 and len(by_start[start, others].unique()) == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("task", tasks(2, 6, 1)[:2], ids=lambda task: task.name)
    def test_a_bag_of_tokens_tells_nothing(self, task):
        """Held-out loss is no less than without a look; single tokens are at chance in all."""
        from sklearn.linear_model import LogisticRegression

        asked = task.draw(8000, generator())
        tokens = asked.marks.any(dim=1).float()
        keys, values = (asked.marks[:, :6, at : at + 6].float() for at in (0, 6))
        links = torch.einsum("spk,spv->skv", keys, values).flatten(1)
        train, test = slice(0, 5000), slice(5000, None)
        deviation = (task.chance * (1 - task.chance) / 3000) ** 0.5
        for features, slack in ((tokens, 4 * deviation), (torch.cat((tokens, links), 1), 0.08)):
            for place in range(task.n_answers):
                labels = asked.answers[:, 0, place]
                fitted = LogisticRegression().fit(features[train], labels[train])
                loss = -fitted.predict_log_proba(features[test])[range(3000), labels[test]].mean()
                assert loss > -math.log(task.chance)
                assert fitted.score(features[test], labels[test]) < task.chance + slack

    def test_weights_set_by_hand_reach_the_best(self):
        """Heads in a row can do all three; heads side by side what stands side by side."""
        together, one_by_one = ((5, 5, 5, 5),), ((5,), (5,), (5,), (5,))
        breadth, depth, mixed = tasks(4, 5, 3)
        for task, layers, right in (
            (breadth, together, 1.0),
            (breadth, one_by_one, 1.0),
            (depth, one_by_one, 1.0),
            (mixed, one_by_one, 1.0),
            (depth, together, 0.25),
        ):
            kind = Architecture("by hand", layers)
            asked = task.draw(200, generator())
            logits = forward(solution(task, kind), kind, task, asked.marks[None].double())[0]
            found = (logits.argmax(dim=-1) == asked.answers).double().mean(dim=(0, 1))
            if right == 1.0:
                assert bool((found == task.best).all())
            else:  # the first link alone is found; a head that knows no answer looks everywhere
                assert found[0] == 1.0 and float(found[1:].max()) < 0.5


class TestTraining:
    def recipe(self, **changes):
        return Recipe(
            **{
                "steps": 20,
                "points": 4,
                "learning_rate": 0.01,
                "batch": 8,
                "held_out": 40,
                "d_model": 12,
                "dtype": torch.float64,
            }
            | changes
        )

    @pytest.mark.parametrize("name", ["parallel", "sequential", "uneven"])
    def test_a_model_among_others_is_trained_as_if_alone(self, name):
        task = Task("mixed", 2, 2, symbols=5, questions=3)
        both = Training(task, KINDS[name], self.recipe(), ["a", "b", "c"])
        alone = Training(task, KINDS[name], self.recipe(), ["b"])
        for training in (both, alone):
            while not training.done:
                training.advance()
        torch.testing.assert_close(both.weights[1], alone.weights[0], atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(both.loss[1], alone.loss[0], atol=1e-9, rtol=1e-9)
        assert torch.equal(both.accuracy[1], alone.accuracy[0])
        assert not torch.allclose(both.loss[0], both.loss[1], atol=1e-3)
        again = Training(task, KINDS[name], self.recipe(), ["a", "b", "c"])
        while not again.done:
            again.advance()
        assert torch.equal(again.weights, both.weights) and torch.equal(again.loss, both.loss)

    def test_steps_are_those_of_torchs_adamw(self):
        task, kind = Task("breadth", 4, 1, symbols=5, questions=3), KINDS["parallel"]
        training = Training(task, kind, self.recipe(steps=10, points=1), ["a"])
        flat = torch.nn.Parameter(training.weights[0].clone())
        optimiser = torch.optim.AdamW([flat], betas=(0.9, 0.98), eps=1e-8, weight_decay=0.01)
        training.advance()
        batches = training._draw("training 0", 80)
        training.advance()
        clipped = 0
        for step in range(10):
            sizes = [math.prod(shape) for shape in shapes(kind, task, 12).values()]
            parts = zip(shapes(kind, task, 12).items(), flat.split(sizes), strict=True)
            weights = {name: part.view(1, *shape) for (name, shape), part in parts}
            at = slice(8 * step, 8 * step + 8)
            logits = forward(weights, kind, task, batches.marks[:, at].double())
            answers = batches.answers[:, at].flatten()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 3), answers)
            optimiser.zero_grad()
            loss.backward()
            length = flat.grad.norm()
            if length > 1:
                clipped += 1
                flat.grad.div_(length)
            # up to .01 in the first step (5 % of 10 steps is less than one), down in the last two
            rate = 0.01 * min(1.0, (10 - step) / 2)
            optimiser.param_groups[0]["lr"] = rate
            optimiser.step()
        torch.testing.assert_close(training.weights[0], flat.detach(), atol=1e-9, rtol=1e-9)
        assert clipped < 10

    def test_long_gradients_are_cut_row_by_row(self):
        task, kind = Task("breadth", 4, 1, symbols=5, questions=3), KINDS["parallel"]
        training = Training(task, kind, self.recipe(), ["a", "b"])
        training.weights[0] *= 30
        batch = training._draw("training 0", 8)
        training._step(0, batch)
        length = training.first.norm(dim=1) / 0.1
        assert length[0] == pytest.approx(1.0) and length[1] < 0.999

    def test_architectures_see_the_same_sequences_and_seeds_others(self):
        task = Task("breadth", 4, 1, symbols=5, questions=3)
        one, other = (
            Training(task, KINDS[n], self.recipe(), ["a", "b"]) for n in ("wide", "sequential")
        )
        asked = one._draw("training 0", 30)
        assert torch.equal(asked.marks, other._draw("training 0", 30).marks)
        assert not torch.equal(asked.marks[0], asked.marks[1])
        assert not torch.equal(asked.marks, one._draw("held out 0", 30).marks)

    @pytest.mark.slow
    def test_look_ups_are_learnt(self):
        """Untrained models are at chance; some hundred steps teach two look-ups."""
        breadth, depth = Task("breadth", 2, 1, 5, 8), Task("depth", 1, 2, 5, 8)
        parallel, sequential = architectures(2, 8)[:2]
        for task, kind, right in ((breadth, parallel, 0.97), (depth, sequential, 0.8)):
            recipe = self.recipe(
                steps=250, points=1, batch=32, held_out=300, d_model=16, dtype=torch.float32
            )
            training = Training(task, kind, recipe, ["a"])
            while not training.done:
                training.advance()
            assert abs(float(training.accuracy[0, 0].mean()) - 0.22) < 0.08
            assert min(training.accuracy[0, 1].tolist()) > right


@pytest.fixture(scope="module")
def small():
    """Measure on fewer sequences than a run does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wvprobe.counterfactual._biases._HELD_OUT", 20)
        yield


@pytest.fixture(scope="module")
def whole(small):
    return compare_biases(**TINY)


def changed(result, **fields):
    own = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    return BiasResult(**own | fields)


@pytest.fixture(scope="module")
def found(small):
    """A run of three seeds, with known ends on the depth task."""
    made = compare_biases(**TINY | {"seeds": 3, "steps": 6})
    accuracy = made.accuracy.clone()
    accuracy[1, 0, :, -1] = torch.tensor([0.2, 0.4, 0.3]).double()
    accuracy[1, 1, :, -1] = torch.tensor([0.7, 0.8, 0.9]).double()
    return changed(made, accuracy=accuracy)


@pytest.mark.usefixtures("small")
class TestResumption:
    def same(self, one, other):
        names = ("accuracy", "loss", "by_answer")
        assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in names)

    @pytest.mark.parametrize("calls", [1, 7, 59])
    def test_a_run_cut_off_goes_on_to_the_same_numbers(self, calls, whole, tmp_path, monkeypatch):
        real, left = Training.advance, [calls]

        def cut_off(training):
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real(training)

        monkeypatch.setattr(Training, "advance", cut_off)
        with pytest.raises(KeyboardInterrupt):
            compare_biases(**TINY, resume=tmp_path / "run")
        monkeypatch.setattr(Training, "advance", real)
        # What a kill in the middle of writing leaves behind is not read.
        (tmp_path / "run" / "breadth-parallel.safetensors.unfinished").write_bytes(b"half")
        self.same(compare_biases(**TINY, resume=tmp_path / "run"), whole)

    def test_a_finished_run_is_read_not_repeated(self, whole, tmp_path, monkeypatch):
        first = compare_biases(**TINY, resume=tmp_path)
        monkeypatch.setattr(Training, "advance", None)
        for found in (first, compare_biases(**TINY, resume=str(tmp_path))):
            self.same(found, whole)

    def test_other_settings_are_refused_by_name(self, tmp_path):
        compare_biases(**TINY, resume=tmp_path)
        with pytest.raises(
            InputError, match=r"points=3, steps=3, symbols=5.*asks for points=7, steps=7, symbols=6"
        ):
            compare_biases(**TINY | {"steps": 7, "symbols": 6}, resume=tmp_path)
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"torch": "1.0"}))
        with pytest.raises(InputError, match=r"torch='1\.0'"):
            compare_biases(**TINY, resume=tmp_path)

    def test_damage_is_told(self, tmp_path):
        compare_biases(**TINY, resume=tmp_path)
        file = tmp_path / "depth-wide.safetensors"
        kept = file.read_bytes()
        file.write_bytes(kept[:-9])
        with pytest.raises(IntegrityError, match="depth-wide.*Delete it"):
            compare_biases(**TINY, resume=tmp_path)
        file.write_bytes((tmp_path / "depth-wide.safetensors").read_bytes()[:0])
        with pytest.raises(IntegrityError, match="depth-wide"):
            compare_biases(**TINY, resume=tmp_path)
        (tmp_path / "breadth-parallel.safetensors").replace(file)
        with pytest.raises(IntegrityError, match="other models"):
            compare_biases(**TINY, resume=tmp_path)
        (tmp_path / "manifest.json").write_text("{")
        with pytest.raises(IntegrityError, match="manifest.json is not what was written"):
            compare_biases(**TINY, resume=tmp_path)
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(DiskSpaceError, match="Name another folder"):
            compare_biases(**TINY, resume=tmp_path / "file")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"n_heads": 3}, "`n_heads` must be an even number of heads. Got 3"),
        ({"d_head": 1}, "`d_head` must be at least 1.5"),
        ({"symbols": 2}, r"`symbols` must be more than n_heads \(2\). Got 2"),
        ({"steps": 0}, "`steps` must be an int of at least 1"),
        ({"seeds": 0}, "`seeds` must be an int of at least 1"),
        ({"learning_rate": 0.0}, "`learning_rate` must be a finite number above 0"),
        ({"learning_rate": float("nan")}, "`learning_rate` must be a finite number above 0"),
    ],
)
def test_refusals(changes, told):
    with pytest.raises(InputError, match=told):
        compare_biases(**TINY | changes)


class TestResult:
    def test_shapes_and_sizes(self, found):
        assert found.accuracy.shape == found.loss.shape == (3, 5, 3, 7)
        assert found.by_answer.shape == (3, 5, 3, 2)
        assert found.tasks == ("breadth", "depth", "mixed")
        assert found.architectures == ("parallel", "sequential", "wide", "uneven", "halves")
        assert found.steps.tolist() == list(range(7))
        assert torch.equal(found.n_parameters, found.n_parameters[:, :1].expand(-1, 5))
        assert found.chance.tolist() == [0.25] * 3 and found.best.tolist() == [1.0] * 3
        assert bool((found.loss[..., 0] - math.log(4)).abs().max() < 1)

    def test_differences_are_paired(self, found):
        """.5, .4, .6: mean .5, sd .1, Student's t of 2 degrees of freedom 4.3027."""
        value, low, high = found.difference("sequential", "parallel")["depth"]
        half = 4.302653 * 0.1 / 3**0.5
        assert (value, low, high) == pytest.approx((0.5, 0.5 - half, 0.5 + half), abs=1e-6)
        back = found.difference("parallel", "sequential")["depth"]
        assert back.value == pytest.approx(-0.5) and back.low == pytest.approx(-high)
        nats = found.difference("uneven", "parallel", measure="loss")["mixed"]
        own = (found.loss[2, 3, :, -1] - found.loss[2, 0, :, -1]).mean()
        assert nats.value == pytest.approx(float(own))
        with pytest.raises(InputError, match="`one` must be one of 'parallel'"):
            found.difference("paralel", "wide")
        with pytest.raises(InputError, match="`measure` must be"):
            found.difference("uneven", "wide", measure="kl")

    def test_frames(self, found):
        frame = found.to_frame()
        assert len(frame) == 3 * 5 * 7
        row = frame[(frame["task"] == "depth") & (frame["architecture"] == "parallel")].iloc[-1]
        half = 4.302653 * 0.1 / 3**0.5
        assert (row["accuracy"], row["low"]) == pytest.approx((0.3, 0.3 - half), abs=1e-6)
        final = found.final_frame()
        assert final["task"].tolist() == [t for t in found.tasks for _ in range(5)]
        row = final[(final["task"] == "depth") & (final["architecture"] == "sequential")].iloc[0]
        assert (row["layers"], row["over_parallel"]) == ("3 | 3", pytest.approx(0.5))
        assert row["over_parallel_low"] == pytest.approx(0.5 - half, abs=1e-6)
        late = found.accuracy[1, 1, :, 5].mean()  # step 5 of 6: the first in the last fifth
        assert row["still_rising"] == pytest.approx(0.8 - float(late))
        assert final["over_parallel"][0] == 0.0

    def test_one_seed_has_no_interval(self):
        single = compare_biases(**TINY | {"seeds": 1, "steps": 1})
        assert single.final_frame()["low"].isna().all() and single.steps.tolist() == [0, 1]
        assert math.isnan(single.difference("wide", "parallel")["depth"].low)

    def test_it_is_saved_and_drawn(self, found, tmp_path):
        again = Result.load(found.save(tmp_path))
        assert torch.equal(again.accuracy, found.accuracy) and again.layers == found.layers
        drawn = again.figure()
        panels = [annotation.text for annotation in drawn.layout.annotations]
        assert panels[1] == "depth: sequential − parallel +0.50 (+0.25 to +0.75)"
        title = drawn.layout.title.text
        assert "ahead on depth" in title and "n = 3 seeds" in title and "quick" not in title
        shown = [trace.name for trace in drawn.data if trace.showlegend]
        assert shown[0] == "parallel (3 3)" and len(shown) == 5 + 2
        assert len([trace for trace in drawn.data if trace.fill == "toself"]) == 15
        assert "quick run" in changed(found, quick=True).figure().layout.title.text
