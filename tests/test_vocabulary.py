"""top_tokens against the model's own scores and head outputs, and against dense brute force."""

import dataclasses
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import wvprobe._extremes
from wvprobe._types import HeadId, Result
from wvprobe.activations import capture
from wvprobe.errors import (
    InputError,
    ShapeError,
    TokenizerError,
    UnsupportedError,
    WordError,
)
from wvprobe.heads import HeadWeights
from wvprobe.testing import FAMILIES, tiny_model
from wvprobe.vocabulary import TopTokensResult, top_tokens

HELD = [family for family in FAMILIES if family != "deepseek_v3"]
TEXT = "The river bank is close to here."
V = 409


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements that any operation returned."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        found = out if isinstance(out, tuple | list) else (out,)
        sizes = [x.numel() for x in found if isinstance(x, torch.Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return out


@pytest.fixture(scope="module")
def placeless(tiny):
    """Return tiny models whose learned positions are 0, so that a token is all there is."""
    built = {}

    def model(family):
        if family not in ("gpt2", "opt", "bert"):
            return tiny(family)
        if family not in built:
            built[family] = tiny_model(family)
            with torch.no_grad():
                built[family].pos_embed.original_component.weight.zero_()
                if family == "bert":
                    built[family].token_type_embed.original_component.weight.zero_()
        return built[family]

    return model


def nameless(heads):
    """Leave the tokenizer out, whose spelling of every token takes most of a test's time."""
    return dataclasses.replace(heads, tokenizer=None)


def by_id(result):
    """Return the scores of all tokens, by id, of a result that holds them all."""
    out = torch.full((V,), torch.nan, dtype=torch.float64)
    out[result.ids[0]] = result.scores[0]
    assert not out.isnan().any()
    return out


# --- layer 0: the model itself is the ground truth ---


@pytest.mark.parametrize("family", HELD)
def test_layer_0_scores_are_the_models_own(family, placeless):
    model = placeless(family)
    heads = nameless(HeadWeights.from_model(model))
    seen = capture(model, TEXT, "scores", layers=0)
    scores, tokens = seen["scores"][0, 0], seen.tokens[0]
    for head in (0, heads.n_heads - 1):
        for i, j in ((6, 2), (4, 4), (1, 5)):
            found = top_tokens(
                heads, "QK", 0, head, int(tokens[i]), offset=i - j, k=V, special=True
            )
            expected = float(scores[head, i, j])
            if heads.slopes is not None:
                expected -= float(heads.slopes[head]) * j
            got = float(by_id(found)[tokens[j]])
            scale = found.scores.abs().max()
            assert abs(got - expected) < 1e-4 * float(scale), (head, i, j)
            reverse = top_tokens(
                heads, "QK", 0, head, int(tokens[j]), role="key", offset=i - j, k=V, special=True
            )
            assert float(by_id(reverse)[tokens[i]]) == pytest.approx(got, rel=1e-5, abs=1e-6)


def test_layer_0_scores_under_latents_are_the_sum_of_two_parts(tiny):
    model = tiny("deepseek_v3")
    heads = nameless(HeadWeights.from_model(model))
    seen = capture(model, TEXT, "scores", layers=0)
    tokens = seen.tokens[0]
    for i, j in ((6, 2), (1, 5)):
        found = [
            top_tokens(
                heads, "QK", 0, 1, int(tokens[i]), offset=i - j, k=V, special=True, part=part
            )
            for part in ("content", "rotary")
        ]
        total = sum(float(by_id(one)[tokens[j]]) for one in found)
        scale = max(float(one.scores.abs().max()) for one in found)
        assert abs(total - float(seen["scores"][0, 0, 1, i, j])) < 1e-4 * scale
        assert "the other part of the score than 'content'" in found[0].left_out


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "bert"])
def test_layer_0_promotes_what_the_head_writes(family, placeless):
    """The first token of a decoder attends to itself alone."""
    model = placeless(family)
    heads = nameless(HeadWeights.from_model(model))
    seen = capture(model, TEXT, "head_out", layers=0)
    first = int(seen.tokens[0][0])
    for head in (0, heads.n_heads - 1):
        found = by_id(top_tokens(heads, "OV", 0, head, first, k=V, special=True))
        expected = (seen["head_out"][0, 0, 0, head] @ heads.W_U).to(torch.float64)
        if heads.post_norms[0] is not None:  # divided by an rms that the head alone does not fix
            ratio = expected.norm() / found.norm()
            assert ratio < 0.9 or ratio > 1.1
            expected = expected / ratio
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_positions_and_the_norm_change_scores_and_are_named(tiny):
    """What the two tests above zero or hold must matter, or they would show nothing."""
    heads = HeadWeights.from_model(tiny("gpt2"))
    normed = top_tokens(heads, "QK", 0, 1, 100, k=V, special=True)
    raw = top_tokens(heads, "QK", 0, 1, 100, k=V, special=True, normalize=False)
    assert (by_id(normed) - by_id(raw)).abs().max() > 0.1
    assert normed.left_out == ("learned positions",)
    assert raw.left_out == ("the norm before attention", "learned positions")
    bert = HeadWeights.from_model(tiny("bert"))
    without = dataclasses.replace(bert, embedding_norm=None)
    pair = [by_id(top_tokens(h, "QK", 0, 1, 100, k=V, special=True)) for h in (bert, without)]
    assert (pair[0] - pair[1]).abs().max() > 0.1


# --- any layer: dense brute force ---


def dense_qk(heads, layer, head, offset, x_hat):
    queries = heads.queries(x_hat, layer)[:, head]
    keys = heads.keys(x_hat, layer)[:, heads.kv_head(head)]
    rotary = heads.rotary[layer]
    if rotary is not None:
        queries = rotary.relative(queries, offset)
    return heads.scale[layer] * queries @ keys.T


def dense_ov(heads, layer, head, x_hat):
    values = heads.values(x_hat, layer)[:, heads.kv_head(head)]
    out = values @ heads.W_O[layer, head]
    if heads.post_norms[layer] is not None:
        out = out * heads.post_norms[layer].gain
    return out @ heads.W_U


@pytest.fixture(scope="module")
def doubles():
    """Return tiny models in float64, each built once."""
    return functools.cache(lambda family: tiny_model(family, dtype="float64"))


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("family", HELD)
def test_pairs_and_tokens_equal_brute_force(family, fold, doubles):
    heads = nameless(HeadWeights.from_model(doubles(family), fold_norm=fold))
    x = heads.W_E if heads.embedding_norm is None else heads.embedding_norm(heads.W_E)
    x_hat = heads.normalize(x, 1)
    head = heads.n_heads - 1
    tables = [("QK", 3, dense_qk(heads, 1, head, 3, x_hat))]
    if family != "bert":
        tables.append(("OV", 0, dense_ov(heads, 1, head, x_hat)))
    for kind, offset, dense in tables:
        found = top_tokens(heads, kind, 1, head, offset=offset, k=7, special=True, progress=False)
        for side, flat in enumerate((dense.flatten(), -dense.flatten())):
            best = flat.topk(7)
            sign = 1 - 2 * side
            torch.testing.assert_close(found.scores[side], sign * best.values, rtol=1e-9, atol=0)
            assert torch.equal(found.token_ids[side], best.indices // V)
            assert torch.equal(found.ids[side], best.indices % V)
        row = top_tokens(heads, kind, 1, head, 17, offset=offset, k=V, special=True)
        torch.testing.assert_close(by_id(row), dense[17], rtol=1e-9, atol=1e-12)
        column = top_tokens(
            heads, kind, 1, head, 17, role=found.roles[1], offset=offset, k=V, special=True
        )
        torch.testing.assert_close(by_id(column), dense[:, 17], rtol=1e-9, atol=1e-12)
        assert column.roles == found.roles[::-1]


def test_biases_are_included_and_named(tiny):
    """qwen2 biases queries, keys and values; llama nothing, and its RMSNorm adds none."""
    plain, biased = (HeadWeights.from_model(tiny(family)) for family in ("llama", "qwen2"))
    assert top_tokens(plain, "QK", 1, 0, 17).biases == ()
    assert top_tokens(biased, "QK", 1, 0, 17).biases == ("b_Q", "b_K")
    assert top_tokens(biased, "QK", 1, 0, 17, role="key").biases == ("b_K", "b_Q")
    assert top_tokens(biased, "OV", 1, 0, 17).biases == ("b_V",)
    # A LayerNorm's bias, folded, is one of values too.
    assert top_tokens(HeadWeights.from_model(tiny("bloom")), "OV", 1, 0, 17).biases == ("b_V",)


def test_a_direction_is_read_linearly(tiny):
    heads = nameless(HeadWeights.from_model(tiny("qwen2")))
    generator = torch.Generator().manual_seed(3)
    direction = torch.randn(heads.d_model, generator=generator)
    ov = top_tokens(heads, "OV", 1, 4, direction=direction, k=V, special=True)
    expected = (direction @ heads.ov(1, 4).matrix() @ heads.W_U).to(torch.float64)
    torch.testing.assert_close(by_id(ov), expected, rtol=1e-4, atol=1e-5)
    assert ov.biases == () and ov.unit == "logit × final σ, per unit of the direction"
    twice = top_tokens(heads, "OV", 1, 4, direction=2 * direction, k=V, special=True)
    torch.testing.assert_close(twice.scores, 2 * ov.scores, rtol=1e-5, atol=1e-6)
    assert set(ov.token_ids.flatten().tolist()) == {-1}
    assert ov.to_frame()["token"].unique().tolist() == ["direction"]
    # On the query's side, the difference that adding it to x̂ makes to every score.
    circuit, x_hat = heads.qk(1, 4, offset=2), heads.normalize(heads.W_E, 1)
    qk = top_tokens(heads, "QK", 1, 4, direction=direction, offset=2, k=V, special=True)
    base = x_hat[7].expand(V, -1)
    expected = circuit.bilinear(base + direction, x_hat) - circuit.bilinear(base, x_hat)
    torch.testing.assert_close(by_id(qk), expected.to(torch.float64), rtol=1e-3, atol=1e-4)
    assert qk.biases == ("b_K",)
    key = top_tokens(
        heads, "QK", 1, 4, direction=direction, role="key", offset=2, k=V, special=True
    )
    expected = circuit.bilinear(x_hat, base + direction) - circuit.bilinear(x_hat, base)
    torch.testing.assert_close(by_id(key), expected.to(torch.float64), rtol=1e-3, atol=1e-4)


def test_a_direction_under_qk_norm_says_what_is_still_to_divide_by(tiny):
    heads = HeadWeights.from_model(tiny("qwen3"))
    direction = torch.randn(heads.d_model)
    found = top_tokens(heads, "QK", 1, 0, direction=direction)
    assert found.unit == "raw score × rms of the query it is part of, per unit of the direction"
    assert top_tokens(heads, "QK", 1, 0, 17).unit == "raw score"


def test_what_is_left_out_is_named(tiny):
    def left_out(family, kind="QK", layer=0, **settings):
        return top_tokens(HeadWeights.from_model(tiny(family)), kind, layer, 0, 17, **settings)

    assert left_out("llama").left_out == ()
    assert left_out("llama", layer=2).left_out == ("what layers up to 1 add to the token",)
    assert left_out("llama", offset=-1).left_out == (
        "the mask, by which the query does not see this offset",
    )
    assert left_out("bert", offset=-1).left_out == ("learned positions",)
    assert left_out("mistral", offset=4).left_out == ()
    assert "the mask" in left_out("mistral", offset=5).left_out[0]
    slope = float(HeadWeights.from_model(tiny("bloom")).slopes[0])
    assert left_out("bloom").left_out == (f"ALiBi: {slope} × the key's position",)
    assert left_out("gemma2").left_out == ("the soft cap of 3.0",)
    later = "what later layers and MLPs make of it"
    assert left_out("gemma2", "OV").left_out == ("the soft cap of 7.0", later)
    assert left_out("gemma2", "OV").unit == "logit × final σ × rms of what attention puts out"
    assert left_out("llama", offset=4).offset == 4
    assert left_out("gpt2", offset=4).offset is None  # nothing turns there


# --- memory, order, ties ---


def test_no_more_than_tiles_is_in_memory(tiny, monkeypatch):
    heads = HeadWeights.from_model(tiny("llama"))
    monkeypatch.setattr(wvprobe._extremes, "TILE", 64)
    with LargestTensor() as seen:
        tiled = top_tokens(heads, "QK", 1, 3, k=20, special=True, progress=False)
    assert V * heads.d_model <= seen.largest < V * V / 5  # the embedding itself is the largest
    monkeypatch.setattr(wvprobe._extremes, "TILE", 1024)
    with LargestTensor() as seen:
        whole = top_tokens(heads, "QK", 1, 3, k=20, special=True, progress=False)
    assert seen.largest >= V * V  # so the first would have been seen
    assert torch.equal(tiled.ids, whole.ids) and torch.equal(tiled.token_ids, whole.token_ids)
    assert torch.equal(tiled.scores, whole.scores)


def test_equal_pairs_come_in_order_of_their_ids(monkeypatch):
    """Small integers make many products exactly equal, in whatever order they are summed."""
    generator = torch.Generator().manual_seed(5)
    table = torch.randint(-1, 2, (97, 11), generator=generator).float()
    eye = torch.eye(11)[None, None].expand(1, 2, 11, 11)
    heads = custom(W_V=eye, W_O=eye.repeat(1, 2, 1, 1), W_E=table, W_U=table.T)
    products = (table @ table.T).flatten()
    assert len(products.unique()) < 25
    for tile in (1024, 10):
        monkeypatch.setattr(wvprobe._extremes, "TILE", tile)
        found = top_tokens(heads, "OV", 0, 1, k=300, progress=False, special=True)
        for side, signed in enumerate((products, -products)):
            expected = signed.argsort(descending=True, stable=True)[:300]
            assert torch.equal(found.token_ids[side] * 97 + found.ids[side], expected)


def test_a_head_of_zeros_gives_the_first_tokens():
    heads = custom()
    heads = dataclasses.replace(heads, W_V=torch.zeros_like(heads.W_V))
    found = top_tokens(heads, "OV", 0, 0, k=3)
    assert found.scores.abs().max() == 0
    assert found.token_ids.tolist() == [[0, 0, 0]] * 2 and found.ids.tolist() == [[0, 1, 2]] * 2


def custom(**changed):
    """Return heads of one's own: 1 layer, 4 heads, 2 key-value heads, no tokenizer."""
    generator = torch.Generator().manual_seed(1)
    shapes = {
        "W_Q": (1, 4, 11, 3),
        "W_K": (1, 2, 11, 3),
        "W_V": (1, 2, 11, 5),
        "W_O": (1, 4, 5, 11),
        "W_E": (97, 11),
        "W_U": (11, 97),
    }
    given = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return HeadWeights.from_tensors(**{**given, **changed})


def test_tensors_of_ones_own_and_half_precision():
    heads = custom()
    found = top_tokens(heads, "OV", 0, 3, 5, k=97)
    dense = dense_ov(heads, 0, 3, heads.W_E)[5].to(torch.float64)
    expected = dense.sort(descending=True).values
    torch.testing.assert_close(found.scores[0], expected, rtol=1e-4, atol=1e-4)
    assert found.strings[0][0] == f"#{int(dense.argmax())}"
    half = dataclasses.replace(heads, W_E=heads.W_E.to(torch.bfloat16))
    close = top_tokens(half, "OV", 0, 3, 5, k=97)
    torch.testing.assert_close(close.scores, found.scores, rtol=0.1, atol=0.2)


def test_fewer_tokens_than_asked_for():
    found = top_tokens(custom(), "OV", 0, 0, k=10, words=[3, 5])
    assert found.scores.shape == (2, 4)  # 2 × 2 pairs
    assert found.n_targets == 2


# --- tokens, words, special ones ---


def test_texts_must_be_one_token(tiny):
    llama = HeadWeights.from_model(tiny("llama"))
    with pytest.raises(WordError, match=r"`token` must be one token.*'embankment'.*tokens .*'ank'"):
        top_tokens(llama, "QK", 0, 0, "embankment")
    gpt2 = HeadWeights.from_model(tiny("gpt2"))
    with pytest.raises(WordError, match=r"tokens .*Single tokens near it: ' river'"):
        top_tokens(gpt2, "QK", 0, 0, "river")
    found = top_tokens(gpt2, "QK", 0, 0, " river")
    assert found.token_strings[0][0] == " river"
    assert gpt2.tokenizer.decode(found.token_ids[0, 0]) == " river"
    # Metaspace tokenizers have the space in the token, and drop it when they decode one alone.
    assert top_tokens(llama, "QK", 0, 0, " river").token_strings[0][0] == " river"
    bert = HeadWeights.from_model(tiny("bert"))
    assert top_tokens(bert, "QK", 0, 0, "river").token_strings[0][0] == "river"
    with pytest.raises(WordError, match="'river'"):
        top_tokens(bert, "QK", 0, 0, "River")


def test_a_byte_piece_gives_way_to_the_letter(tiny):
    """Where "A" and <0x41> are both tokens, the letter is meant."""
    heads = HeadWeights.from_model(tiny("llama"))
    pieces = heads.tokenizer.convert_ids_to_tokens(list(range(V)))
    assert "a" in pieces and "<0x61>" in pieces
    assert int(top_tokens(heads, "QK", 0, 0, "a").token_ids[0, 0]) == pieces.index("a")


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_word_lists_restrict_and_skipped_words_are_listed(family, tiny):
    heads = HeadWeights.from_model(tiny(family))
    words = ["river", "bank", " light", "embankment", 33]
    found = top_tokens(heads, "QK", 1, 0, 40, words=words, k=50)
    strings = set(found.strings[0])
    expected = {"river", "bank"} if family == "bert" else {" river", " bank", " light"}
    assert expected <= strings <= {*expected, "river", "bank", *found.strings[0]}
    assert 33 in found.ids and found.n_targets == len(strings) == found.ids.shape[1]
    assert found.skipped == (("embankment",) if family != "bert" else (" light", "embankment"))
    pairs = top_tokens(heads, "QK", 1, 0, words=words, k=50, progress=False)
    assert set(pairs.token_strings[0]) == set(pairs.strings[0]) == strings
    everything = by_id(top_tokens(heads, "QK", 1, 0, 40, k=V, special=True))
    for i, score in zip(found.ids[0], found.scores[0], strict=True):
        assert everything[i] == pytest.approx(float(score), rel=1e-6)
    with pytest.raises(WordError, match="some are single tokens"):
        top_tokens(heads, "QK", 1, 0, 40, words=["embankment"])
    with pytest.raises(InputError, match="`words` must be a list"):
        top_tokens(heads, "QK", 1, 0, 40, words="river")


def test_special_and_untrained_tokens_are_left_aside(tiny):
    heads = HeadWeights.from_model(tiny("bert"))
    special = set(heads.tokenizer.all_special_ids)
    found = top_tokens(heads, "QK", 1, 0, 40, k=V)
    assert special and not special & set(found.ids[0].tolist())
    known = len(heads.tokenizer)  # fewer than the model embeds
    assert found.n_targets == known - len(special)
    assert special <= set(top_tokens(heads, "QK", 1, 0, 40, k=V, special=True).ids[0].tolist())
    # Asked for by name, they are there.
    one = min(special)
    assert top_tokens(heads, "QK", 1, 0, one, words=[one]).ids.tolist() == [[one]] * 2

    table = heads.W_E.clone()
    table[50] = 0
    without = top_tokens(dataclasses.replace(heads, W_E=table), "QK", 1, 0, 40, k=V)
    assert set(without.ids[0].tolist()) == set(range(known)) - special - {50}


def test_bytes_are_no_special_tokens(tiny):
    """The small Llama's tokenizer marks its byte pieces as special; a text may need them."""
    heads = HeadWeights.from_model(tiny("llama"))
    pieces = heads.tokenizer.convert_ids_to_tokens(list(range(V)))
    found = set(top_tokens(heads, "QK", 1, 0, 40, k=V).ids[0].tolist())
    assert pieces.index("<0xE2>") in found
    assert not found & set(heads.tokenizer.all_special_ids)


def test_without_a_tokenizer_ids_do():
    heads = custom()
    with pytest.raises(TokenizerError, match="token's id where there is no tokenizer"):
        top_tokens(heads, "QK", 0, 0, "river")
    with pytest.raises(TokenizerError, match="`words`"):
        top_tokens(heads, "QK", 0, 0, 3, words=["river"])
    assert top_tokens(heads, "QK", 0, 0, 3).token_strings[0][0] == "#3"


# --- refusals ---


def test_what_cannot_be_meant_is_refused(tiny):
    heads = HeadWeights.from_model(tiny("llama"))
    direction = torch.ones(heads.d_model)
    with pytest.raises(InputError, match=r"`kind` must be one of 'OV', 'QK'"):
        top_tokens(heads, "VO", 0, 0, 3)
    with pytest.raises(InputError, match=r"`head` must be in 0\.\.5"):
        top_tokens(heads, "OV", 0, 6, 3)
    with pytest.raises(InputError, match=r"`layer` must be in 0\.\.2\. Got -1"):
        top_tokens(heads, "OV", -1, 0, 3)
    with pytest.raises(InputError, match=r"`token` must be in 0\.\.408"):
        top_tokens(heads, "OV", 0, 0, V)
    with pytest.raises(InputError, match="`role` must be one of 'source', 'logit'"):
        top_tokens(heads, "OV", 0, 0, 3, role="key")
    with pytest.raises(InputError, match="`k` must be an int of at least 1"):
        top_tokens(heads, "OV", 0, 0, 3, k=0)
    with pytest.raises(InputError, match="Give one of them"):
        top_tokens(heads, "OV", 0, 0, 3, direction=direction)
    with pytest.raises(InputError, match="W_V reads a direction"):
        top_tokens(heads, "OV", 0, 0, direction=direction, role="logit")
    with pytest.raises(ShapeError, match=r"\[d_model\] = \[42\]. Got shape \[41\]"):
        top_tokens(heads, "OV", 0, 0, direction=direction[1:])
    with pytest.raises(InputError, match="`direction` must be finite"):
        top_tokens(heads, "OV", 0, 0, direction=direction * torch.nan)


def test_nan_weights_are_refused(tiny):
    heads = HeadWeights.from_model(tiny("llama"))
    weight = heads.W_K.clone()
    weight[1, 0, 2, 2] = torch.nan
    with pytest.raises(InputError, match="key side.* must be finite"):
        top_tokens(dataclasses.replace(heads, W_K=weight), "QK", 1, 0, 3)


def test_models_without_a_head_or_an_embedding(tiny):
    bert = HeadWeights.from_model(tiny("bert"))
    with pytest.raises(UnsupportedError, match="linear head; tiny:bert has none.*'QK'"):
        top_tokens(bert, "OV", 0, 0, 3)
    bare = custom(W_E=None)
    with pytest.raises(UnsupportedError, match="W_E, the token embedding.*from_tensors"):
        top_tokens(bare, "QK", 0, 0, 3)
    with pytest.raises(UnsupportedError, match="what a head promotes needs a linear head"):
        top_tokens(custom(W_U=None), "OV", 0, 0, 3)


def test_the_embedding_after_the_first_mlp(tiny):
    heads = HeadWeights.from_model(tiny("llama"))
    with pytest.raises(UnsupportedError, match="effective_embedding=True"):
        top_tokens(heads, "QK", 1, 0, 3, embedding="mlp0")
    with pytest.raises(InputError, match="`embedding` must be one of 'W_E', 'mlp0'"):
        top_tokens(heads, "QK", 1, 0, 3, embedding="mlp1")
    effective = torch.randn(V, heads.d_model)
    object.__setattr__(heads, "effective_W_E", effective)
    found = top_tokens(heads, "QK", 1, 2, 3, offset=1, embedding="mlp0", k=V, special=True)
    dense = dense_qk(heads, 1, 2, 1, heads.normalize(effective, 1))[3]
    torch.testing.assert_close(by_id(found), dense.to(torch.float64), rtol=1e-4, atol=1e-5)
    assert found.embedding == "mlp0" and found.left_out == ()
    with pytest.raises(InputError, match="'W_E' at layer 0"):
        top_tokens(heads, "QK", 0, 0, 3, embedding="mlp0")


# --- the result ---


def test_frame_saving_and_figure(tiny, tmp_path):
    heads = HeadWeights.from_model(tiny("gpt2"))
    found = top_tokens(heads, "OV", 1, 2, " river", k=4)
    frame = found.to_frame()
    assert list(frame) == ["rank", "side", "token", "token_id", "id", "string", "score"]
    assert frame["side"].tolist() == ["highest"] * 4 + ["lowest"] * 4
    assert frame["rank"].tolist() == [0, 1, 2, 3] * 2
    assert frame["score"][:4].is_monotonic_decreasing
    assert frame["score"][4:].is_monotonic_increasing
    assert found.head == HeadId(1, 2) and found.roles == ("source", "logit")
    loaded = Result.load(found.save(tmp_path))
    assert isinstance(loaded, TopTokensResult)
    assert loaded.to_frame().equals(frame) and loaded.head == found.head

    drawn = found.figure()
    assert [*drawn.data[0].x, *drawn.data[1].x] == frame["score"].tolist()
    low, high = drawn.layout.xaxis.range
    assert low == -high
    assert "L1H2 OV" in drawn.layout.title.text and "“ river”" in drawn.layout.title.text
    assert "left out: what layers up to 0 add" in drawn.layout.xaxis.title.text
    pairs = top_tokens(heads, "QK", 1, 2, k=4, progress=False).figure()
    assert " → “" in pairs.layout.yaxis.ticktext[0]
    vector = top_tokens(heads, "QK", 1, 2, direction=torch.ones(35)).figure()
    assert "a direction" in vector.layout.title.text


def test_bytes_and_markup_are_shown_as_they_are(tiny):
    heads = HeadWeights.from_model(tiny("llama"))
    pieces = heads.tokenizer.convert_ids_to_tokens(list(range(V)))
    byte = pieces.index("<0xE2>")
    found = top_tokens(heads, "QK", 1, 2, byte, words=[byte])
    assert found.strings[0] == ("<0xE2>",)
    assert found.figure().layout.yaxis.ticktext[0] == "“&lt;0xE2&gt;”"


@pytest.mark.slow
@pytest.mark.real_model
def test_smollm2s_layer_0_scores_and_pairs(smollm2):
    heads = HeadWeights.from_model(smollm2)
    seen = capture(smollm2, TEXT, "scores", layers=0)
    tokens = seen.tokens[0]
    sought = {"words": [int(tokens[2])], "offset": 3}
    found = top_tokens(heads, "QK", 0, 4, int(tokens[5]), **sought)
    expected = float(seen["scores"][0, 0, 4, 5, 2])
    assert float(found.scores[0, 0]) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    words = [" river", " bank", " water", " money", " loan", " boat", " the", " of"]
    listed = top_tokens(heads, "OV", 28, 5, words=words, k=8, progress=False)
    # A head that copies: every word is the one that it promotes most.
    best = top_tokens(heads, "OV", 28, 5, " river", words=words, k=1)
    assert best.strings[0] == (" river",)
    assert (listed.ids[0] == listed.token_ids[0]).sum() >= 6


@pytest.mark.real_model
def test_minilms_queries_seek_keys_and_its_ov_is_refused(minilm):
    heads = HeadWeights.from_model(minilm)
    found = top_tokens(heads, "QK", 0, 0, "river", k=5)
    assert not any("unused" in string for side in found.strings for string in side)
    assert heads.embedding_norm is not None
    with pytest.raises(UnsupportedError, match="has none"):
        top_tokens(heads, "OV", 0, 0, "river")
