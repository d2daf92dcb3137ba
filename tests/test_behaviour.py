"""Scores of heads against loops over the model's own patterns, and a model with known answers."""

import pytest
import torch

from wvprobe import adapters
from wvprobe._masks import visible
from wvprobe._sinks import sink_keys
from wvprobe._types import Result
from wvprobe.activations import capture
from wvprobe.behaviour import SCORES, head_behaviour
from wvprobe.behaviour._on_repeats import repeats
from wvprobe.behaviour._positional import OffsetProfile, offset_attention
from wvprobe.behaviour._streaming import Tokens, each_layer
from wvprobe.errors import InputError
from wvprobe.plotting import figure
from wvprobe.testing import FAMILIES, induction_model, tiny_model

TEXTS = (
    "the bank by the river and the bank by the sea",
    "a boat and a bank and a boat",
    "one two one two three",
    "the sea is far, the river is near",
)
SMALL = {"samples": 3, "length": 4, "max_offset": 3, "progress": False}


@pytest.fixture(scope="module")
def known():
    return head_behaviour(induction_model(), progress=False)


def sees(model, layer, n):
    arch = adapters.architecture(model)
    window = adapters.sliding_window(model, layer)
    return visible(n, causal=arch.causal, window=window)


def by_hand(pattern, seen, target):
    """Mean attention, and uniform attention, of the queries that see a key of `target`."""
    n, found, chance = len(seen), [], []
    for i in range(n):
        keys = [j for j in range(n) if seen[i, j] and target(i, j)]
        if keys:
            found.append(float(pattern[i, keys].double().sum()))
            chance.append(len(keys) / int(seen[i].sum()))
    return (sum(found) / len(found), sum(chance) / len(chance)) if found else (None, None)


def text_targets(ids, added, sinks):
    """Whether a pair counts, for every score on text."""

    def own(i, j):
        return not added[i] and not added[j]

    return {
        "previous_token_text": lambda i, j: own(i, j) and i - j == 1,
        "duplicate_text": lambda i, j: own(i, j) and i - j >= 2 and ids[i] == ids[j],
        "next_token_of_earlier": lambda i, j: (
            own(i, j) and i - j >= 2 and j > 0 and not added[j - 1] and ids[j - 1] == ids[i]
        ),
        "next_token_text": lambda i, j: own(i, j) and i - j == -1,
        "sink": lambda i, j: not added[i] and not sinks[i] and sinks[j],
    }


def close(actual, expected):
    if expected is None:
        assert torch.isnan(actual)
    else:
        assert float(actual) == pytest.approx(expected, abs=1e-5)


def mean(values):
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def test_the_hand_made_heads_are_found(known):
    assert float(known["previous_token"][0, 0]) > 0.99
    assert float(known["induction"][1, 1]) > 0.99
    assert float(known["next_token_of_earlier"][1, 1]) > 0.95
    assert float(known["positional"][0, 0]) > 0.99 and known.positional_offset[0, 0] == 1
    assert float(known["positional_r2"][0, 0]) > 0.99 > 0.1 > float(known["positional_r2"][1, 1])
    named = known.named(2).set_index(["kind", "rank"])
    assert named.loc[("previous_token", 1), ["layer", "head"]].tolist() == [0, 0]
    assert named.loc[("induction", 1), ["layer", "head"]].tolist() == [1, 1]
    assert named.loc[("copying", 1), ["layer", "head"]].tolist() == [1, 1]
    assert named.loc[("induction", 1), "margin"] > 0.9
    assert "next_token" not in named.index.get_level_values(0)
    # The other two heads attend to all alike: what they do is chance, and of no kind.
    torch.testing.assert_close(
        known.excess("induction")[0, 1].abs(), torch.tensor(0.0).double(), atol=1e-4, rtol=0
    )
    frame = known.to_frame()
    assert frame["kind"].tolist() == ["previous_token", "none", "none", "induction"]


def test_chance_is_uniform_attention(known):
    n = 2 * 50
    place = known.names.index("previous_token")
    # Behind the BOS, token p sees p + 1 keys; the first of its own has no token before it.
    expected = mean([1 / (p + 1) for p in range(2, n + 1)])
    assert float(known.chance[place, 0, 0]) == pytest.approx(expected)
    place = known.names.index("induction")
    expected = mean([1 / (p + 1) for p in range(51, 101)])
    assert float(known.chance[place, 1, 1]) == pytest.approx(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_tokens_by_brute_force(family, tiny):
    """TransformerLens's own cache gives the patterns."""
    model = tiny(family)
    arch = adapters.architecture(model)
    found = head_behaviour(model, texts=TEXTS[0], **SMALL)
    drawn = repeats(model, arch, 3, 4, torch.Generator().manual_seed(0))
    layer, head = arch.n_layers - 1, arch.n_heads - 1
    for name, offset in (
        ("previous_token", 1),
        ("duplicate", 4),
        ("induction", 3),
        ("next_token", -1),
    ):
        rows = []
        for tokens in drawn:
            first, stop = tokens.own.start, tokens.own.stop
            assert tokens.ids[first : first + 4] == tokens.ids[first + 4 : stop]
            assert len(set(tokens.ids[first:stop])) == 4
            _, cache = model.run_with_cache(torch.tensor([tokens.ids]))
            pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0, head]
            start = first + (4 if name in ("duplicate", "induction") else 0)

            def target(i, j, first=first, stop=stop, start=start, offset=offset):
                return start <= i < stop and first <= j < stop and i - j == offset

            rows.append(by_hand(pattern, sees(model, layer, len(tokens.ids)), target))
        close(found[name][layer, head], mean([row[0] for row in rows]))
        close(found.chance[found.names.index(name)][layer, head], mean([row[1] for row in rows]))
    assert ("next_token" in found.named(1)["kind"].tolist()) == (family == "bert")


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "bert", "bloom"])
def test_texts_by_brute_force(family, tiny):
    model = tiny(family)
    found = head_behaviour(model, texts=TEXTS, **SMALL)
    seen = capture(model, TEXTS, ["pattern", "resid_pre"])
    arch = adapters.architecture(model)
    layer, head = 1, arch.n_heads - 2
    rows = {}
    for item in range(len(TEXTS)):
        n, sinks = len(seen.tokens[item]), sink_keys(model, seen, item)[layer].tolist()
        pattern, mask = seen["pattern"][item, layer, head], sees(model, layer, n)
        for name, target in text_targets(seen.tokens[item], seen.special[item], sinks).items():
            rows.setdefault(name, []).append(by_hand(pattern[:n, :n], mask, target))
    for name, parts in rows.items():
        close(found[name][layer, head], mean([part[0] for part in parts]))
        close(found.chance[found.names.index(name)][layer, head], mean([p[1] for p in parts]))
        measured = sum(part[0] is not None for part in parts)
        assert int(found.n[found.names.index(name), layer]) == measured
        assert bool(found.reasons[name][layer]) == (measured == 0)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma2", "gpt_neox", "deepseek_v3"])
def test_copying_is_what_each_source_adds_to_its_own_logit(family, tiny):
    """Vectors moved from each key, carried through frozen norms to logits one by one."""
    model = tiny(family)
    arch = adapters.architecture(model)
    found = head_behaviour(model, texts=TEXTS[0], **SMALL)
    drawn = repeats(model, arch, 3, 4, torch.Generator().manual_seed(0))
    head = adapters.unembedding(model, arch)
    layer, number = 1, arch.n_heads - 1
    kv_head = number // (arch.n_heads // arch.n_kv_heads)
    seen = {}
    sites = ("v", "pattern", "attn_out", "resid_post")
    each_layer(model, arch, drawn, sites, lambda item, at, got: seen.update({(item, at): got}))
    w_o = adapters.output_weight(model, arch, layer)[number].double()
    after = adapters.post_attention_norm(model, arch, layer)
    rises = []
    for item, tokens in enumerate(drawn):
        got, last = seen[item, layer], seen[item, arch.n_layers - 1]["resid_post"].double()
        ids = torch.tensor(tokens.ids)[tokens.own]
        rows = []
        for i in range(tokens.own.start, tokens.own.stop):
            total = 0.0
            for j in range(tokens.own.start, tokens.own.stop):
                moved = got["pattern"][number, i, j].double() * got["v"][j, kv_head].double() @ w_o
                if after is not None:
                    moved = after.linear(moved, after.scale(got["attn_out"][i].double()))
                logits = head.norm.linear(moved, head.norm.scale(last[i])) @ head.weight.double().T
                total += float(logits[tokens.ids[j]] - logits[ids[:4]].mean())
            rows.append(total)
        rises.append(mean(rows))
    assert float(found["copying"][layer, number]) == pytest.approx(mean(rises), rel=1e-4, abs=1e-5)


def test_a_layers_window_hides_the_first_copy(tiny):
    found = head_behaviour(tiny("gemma3"), texts=TEXTS, samples=2, length=9, progress=False)
    induction = found["induction"]
    assert induction[[0, 2]].isnan().all() and not induction[1].isnan().any()
    assert "window of 5" in found.reasons["induction"][0] and not found.reasons["induction"][1]
    assert found.n[found.names.index("induction")].tolist() == [0, 2, 0]
    frame = found.long_frame()
    hidden = frame[(frame["score"] == "induction") & (frame["layer"] == 0)]
    assert hidden["value"].isna().all() and (hidden["n"] == 0).all()
    # Blank, and not zero, in the figure too.
    drawn = figure(found)
    at = [a.text for a in drawn.layout.annotations].index("what followed it (induction)")
    assert drawn.data[at].z[0][0] is None and drawn.data[at].z[0][1] is not None


def test_frames_honour_their_columns(known, tmp_path):
    frame = known.to_frame()
    promised = ["layer", "head", "previous_token", "duplicate", "induction", "sink", "low", "high"]
    assert set(promised) <= set(frame.columns) and known.names == SCORES
    assert {f"{name}_{end}" for name in SCORES for end in ("low", "high", "chance")} <= set(frame)
    row = frame.iloc[3]
    assert (row["low"], row["high"]) == (row["induction_low"], row["induction_high"])
    assert row["low"] <= row["induction"] <= row["high"]
    assert (known.low <= known.values + 1e-9)[~known.low.isnan()].all()
    long = known.long_frame().set_index(["score", "layer", "head"])
    assert long.loc[("induction", 1, 1), "value"] == float(known["induction"][1, 1])
    assert long.loc[("next_token", 0, 0), "reason"] == "the mask hides what lies ahead"
    again = Result.load(known.save(tmp_path / "found"))
    assert torch.equal(again.values.nan_to_num(), known.values.nan_to_num())
    assert again.reasons == known.reasons
    assert known.provenance.seed == 0 and known.provenance.settings["length"] == 50
    title = figure(known).layout.title.text
    assert "L0H0" in title and "L1H1" in title
    drawn = figure(known).data
    assert drawn[0].zmin == -drawn[0].zmax and len(drawn) == 6  # next_token is not measured


def test_batches_and_precision_change_nothing(tiny):
    for family in ("bert", "llama"):
        one, other = (
            head_behaviour(tiny(family), texts=TEXTS, batch_size=size, **SMALL)
            for size in (1, "auto")
        )
        torch.testing.assert_close(one.values, other.values, equal_nan=True, atol=1e-5, rtol=1e-4)
    double = head_behaviour(tiny_model("llama", dtype="float64"), texts=TEXTS, **SMALL)
    torch.testing.assert_close(double.values, one.values, equal_nan=True, atol=1e-4, rtol=1e-3)
    half = head_behaviour(tiny_model("llama", dtype="bfloat16"), texts=TEXTS, **SMALL)
    assert not half["induction"].isnan().any()


def test_seeds_draw_other_tokens(tiny):
    one, again, other = (
        head_behaviour(tiny("llama"), texts=TEXTS, seed=seed, **SMALL) for seed in (0, 0, 1)
    )
    assert torch.equal(one["induction"], again["induction"])
    assert not torch.equal(one["induction"], other["induction"])
    torch.testing.assert_close(one["sink"], other["sink"])


def test_one_text_has_no_interval_and_no_half_to_choose_on(tiny):
    found = head_behaviour(tiny("llama"), texts=TEXTS[0], **SMALL)
    place = found.names.index("sink")
    assert not found["sink"].isnan().any() and found.low[place].isnan().all()
    assert found["positional"].isnan().all() and found.positional_offset.isnan().all()
    assert "two at least" in found.reasons["positional_r2"][0]
    assert found.to_frame()["positional_offset"].isna().all()


def test_offsets_are_chosen_on_other_texts_than_they_are_judged_on():
    """Attention at an offset, and R², of patterns made by hand."""
    n, tokens = 12, Tokens(tuple(range(12)), (True,) + (False,) * 11)
    seen = visible(n, causal=True, window=None)
    positions = torch.arange(n)
    scores = -0.5 * (positions[:, None] - positions).double()
    decaying = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    uniform = seen.double() / seen.sum(-1, keepdim=True)
    noise = torch.rand(n, n, generator=torch.Generator().manual_seed(0)).double() * seen
    noise = noise / noise.sum(-1, keepdim=True)
    pattern = torch.stack((decaying, uniform, noise))
    at, chance = offset_attention(pattern, tokens, seen, (0, 1, -1, 11))
    assert float(at[1, 0]) == pytest.approx(float(decaying.diagonal(-1)[1:].mean()))
    torch.testing.assert_close(at[:2, 1], chance[:2])
    assert at[2:].isnan().all() and chance[2:].isnan().all()  # ahead; from the BOS alone
    profile = OffsetProfile(1, 3)
    sinks = torch.zeros(n, dtype=torch.bool)
    profile.add(0, pattern, tokens, seen, sinks)
    fresh = torch.rand(n, n, generator=torch.Generator().manual_seed(1)).double() * seen
    other = torch.stack((decaying, uniform, fresh / fresh.sum(-1, keepdim=True)))
    decays, alike, random = profile.explained(0, other, tokens, seen, sinks).tolist()
    assert decays > 0.95 and alike != alike and random < 0.2


def test_wrong_inputs(tiny):
    model = tiny("llama")
    with pytest.raises(InputError, match="`length` must be at most 128"):
        head_behaviour(model, length=129)
    with pytest.raises(InputError, match="`samples` must be at least 2"):
        head_behaviour(model, samples=1)
    with pytest.raises(InputError, match="`length` must be at least 3"):
        head_behaviour(model, length=2)
    found = head_behaviour(model, texts=TEXTS, **SMALL)
    with pytest.raises(InputError, match="induction"):
        found["inductive"]
    with pytest.raises(InputError, match="`k`"):
        found.named(0)
    large = tiny_model("llama", max_position_embeddings=4001)
    with pytest.raises(InputError, match="the number of ordinary tokens"):
        head_behaviour(large, length=450)


@pytest.mark.slow
@pytest.mark.real_model
def test_real_models(smollm2, minilm):
    """Heads that stand out on both default models."""
    found = head_behaviour(smollm2, samples=3, length=30, texts=TEXTS, progress=False)
    named = found.named(1).set_index("kind")
    assert named.loc["previous_token", ["layer", "head"]].tolist() == [16, 0]
    assert named.loc["induction", ["layer", "head"]].tolist() == [18, 6]
    assert named.loc["previous_token", "score"] > 0.8 and named.loc["induction", "score"] > 0.7
    encoder = head_behaviour(minilm, samples=3, length=30, texts=TEXTS, progress=False)
    assert encoder["copying"].isnan().all() and "no logits" in encoder.reasons["copying"][0]
    assert float(encoder["previous_token"][0, 2]) > 0.95
    assert float(encoder["next_token"].max()) > 0.4
