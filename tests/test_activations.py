"""Capture: every site, by word and position, in any batch, with nothing computed unasked."""

import gc

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from wvprobe import adapters
from wvprobe.activations import capture, read_sites
from wvprobe.adapters import SITES, architecture
from wvprobe.errors import InputError, MemoryLimitError, UnsupportedError, WordError
from wvprobe.testing import FAMILIES, tiny_model
from wvprobe.words import find_word

TEXTS = [
    "The river bank is close to here.",
    "A power bank dropped into the river while the boat was closed.",
    "The old bank is open.",
]


def sites_of(model):
    """Every site that the architecture has."""
    found = []
    for site in SITES:
        try:
            adapters.recipe(model, architecture(model), site, 0)
        except UnsupportedError:
            continue
        found.append(site)
    return found


@pytest.fixture(params=FAMILIES)
def model(request, tiny):
    return tiny(request.param)


def test_shapes_and_axes(model):
    facts = architecture(model)
    seen = capture(model, TEXTS, sites_of(model), words="bank")
    sizes = {
        "item": 3,
        "layer": 3,
        "head": facts.n_heads,
        "kv_head": facts.n_kv_heads,
        "d_model": facts.d_model,
        "d_head": facts.d_head,
        "d_head_v": facts.d_head_v,
        "query": 1,
        "key": max(len(t) for t in seen.tokens),
    }
    for site in seen.values:
        expected = [
            sizes[axis] + (site == "stream" and axis == "layer") for axis in seen.axes(site)
        ]
        assert list(seen[site].shape) == expected, site


def test_words_positions_and_whole_texts_agree(model):
    sites = sites_of(model)
    whole = capture(model, TEXTS, sites)
    spans = [find_word(model, text, "bank") for text in TEXTS]
    last = [span.tokens[-1] for span in spans]
    by_word = capture(model, TEXTS, sites, words=spans, pool="last")
    by_place = capture(model, TEXTS, sites, positions=last)
    for site in sites:
        for item, position in enumerate(last):
            if site in ("pattern", "scores"):
                expected = whole[site][item, :, :, position]
                found = by_word[site][item, :, :, 0]
            else:
                expected, found = whole[site][item, position], by_word[site][item]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(by_place[site], by_word[site], equal_nan=True, rtol=0, atol=0)


def test_batch_size_and_order_change_nothing(model):
    """Field line 11: outputs that vary with the batch size."""
    sites = sites_of(model)
    alone = capture(model, TEXTS, sites, words="bank", batch_size=1)
    for other, back in (
        (capture(model, TEXTS, sites, words="bank", batch_size=3), [0, 1, 2]),
        (capture(model, TEXTS[::-1], sites, words="bank"), [2, 1, 0]),
    ):
        for site in sites:
            expected, found = alone[site], other[site][back]
            scale = expected.nan_to_num().abs().max()
            error = (found - expected).nan_to_num().abs().max()
            assert error <= 1e-5 * scale, site
            assert torch.equal(found.isnan(), expected.isnan())


def test_sites_equal_the_bridges_own_hooks(model):
    """Hooks of TransformerLens that mean the same, on a text alone."""
    text, facts = TEXTS[1], architecture(model)
    _, cache = model.run_with_cache(text)
    seen = capture(model, text, [s for s in sites_of(model) if s in ("v", "z", "pattern")])
    for layer in range(3):
        block = f"blocks.{layer}.attn."
        v = cache[block + ("hook_v" if facts.mla else "v.hook_out")][0]
        v = v.transpose(0, 1) if facts.mla else v
        torch.testing.assert_close(seen["v"][0, :, layer], v.reshape(seen["v"][0, :, layer].shape))
        z = cache[block + "hook_z"][0]
        torch.testing.assert_close(seen["z"][0, :, layer], z.reshape(seen["z"][0, :, layer].shape))
        torch.testing.assert_close(seen["pattern"][0, layer], cache[block + "hook_pattern"][0])


def test_streams_are_the_backbones_hidden_states(model):
    """0 is the embedding, k what follows block k − 1; the last is before the final norm."""
    seen = capture(model, TEXTS[0], ["stream", "resid_pre", "resid_post"])
    torch.testing.assert_close(seen["stream"][:, :, :3], seen["resid_pre"])
    torch.testing.assert_close(seen["stream"][:, :, 1:], seen["resid_post"])
    tokens = model.to_tokens(TEXTS[0])
    with torch.no_grad():
        states = model.original_model.base_model(
            tokens, attention_mask=torch.ones_like(tokens), output_hidden_states=True
        ).hidden_states
    # A hooked block inside a hooked block is listed twice by transformers' own recorder.
    states = [s for i, s in enumerate(states) if i == 0 or not torch.equal(s, states[i - 1])]
    for layer in range(3):  # theirs ends after the final norm
        torch.testing.assert_close(seen["stream"][:, :, layer], states[layer])


def test_heads_add_up_to_what_is_added(model):
    """Field line 14, and claim 3.3: Σ_h head_out = attn_added, b_O's share apart."""
    seen = capture(model, TEXTS, ["head_out", "attn_added", "attn_out"], words="bank")
    facts = architecture(model)
    for layer in range(3):
        total = seen["head_out"][:, layer].sum(dim=1)
        bias = adapters.output_bias(model, layer)
        if bias is not None:
            norm = adapters.post_attention_norm(model, facts, layer)
            out = seen["attn_out"][:, layer]
            total = total + (bias if norm is None else norm.linear(bias, norm.scale(out)))
        torch.testing.assert_close(total, seen["attn_added"][:, layer], rtol=1e-4, atol=1e-5)


def test_padding_is_marked(tiny):
    seen = capture(tiny("llama"), TEXTS, ["v", "pattern", "scores"])
    lengths = [len(t) for t in seen.tokens]
    assert seen.mask.sum(dim=1).tolist() == lengths
    assert not seen["v"][~seen.mask].any()
    for item, size in enumerate(lengths):
        for site in ("pattern", "scores"):
            inside = seen[site][item, :, :, :size, :size]
            assert not inside.isnan().any()
            assert int(seen[site][item, 0, 0].isnan().sum()) == max(lengths) ** 2 - size**2


def test_masked_pairs_have_scores_and_no_attention(tiny):
    """Field lines 8 and 12: no mask value stands in for a score, and a pattern is never empty."""
    model = tiny("llama")
    seen = capture(model, TEXTS[0], ["scores", "pattern"])
    future = torch.ones(seen["scores"].shape[-2:]).triu(1).bool()
    assert seen["scores"][0][..., future].abs().max() < 1e3
    assert not seen["pattern"][0][..., future].any()
    torch.testing.assert_close(seen["pattern"].sum(-1), torch.ones(seen["pattern"].shape[:-1]))
    past = seen["scores"][0].masked_fill(future, -torch.inf).softmax(-1)
    torch.testing.assert_close(past, seen["pattern"][0], rtol=1e-4, atol=1e-6)


def test_what_attention_reads_is_on_the_right_side_of_the_norm(tiny):
    """Field line 16."""
    model = tiny("gpt2")
    seen = capture(model, TEXTS[0], ["resid_pre", "attn_in"])
    norm = model.blocks[1].ln1.original_component
    torch.testing.assert_close(norm(seen["resid_pre"][0, :, 1]), seen["attn_in"][0, :, 1])
    bert = capture(tiny("bert"), TEXTS[0], ["resid_pre", "attn_in"])
    assert torch.equal(bert["resid_pre"], bert["attn_in"])


def test_pooling(tiny):
    model, text, word = tiny("llama"), "They sat on the embankment.", "embankment"
    span = find_word(model, text, word)
    assert len(span.tokens) > 1, "the test needs a word of several tokens"
    whole = capture(model, text, "v")["v"][0, list(span.tokens)]
    for pool, expected in (("last", whole[-1]), ("first", whole[0]), ("mean", whole.mean(0))):
        found = capture(model, text, "v", words=word, pool=pool)["v"][0]
        torch.testing.assert_close(found, expected)
    assert capture(model, text, "v", words=word).pool == "last"
    assert capture(tiny("bert"), text, "v", words=word).pool == "mean"


def test_words_of_different_lengths_are_pooled_each_by_itself(tiny):
    texts, words = ["They sat on the embankment.", "The bank is open."], ["embankment", "bank"]
    together = capture(tiny("bert"), texts, "v", words=words)["v"]
    for item in (0, 1):
        alone = capture(tiny("bert"), texts[item], "v", words=words[item])["v"]
        torch.testing.assert_close(together[item], alone[0], rtol=1e-4, atol=1e-5)


def test_layers_are_the_ones_asked_for(tiny):
    model = tiny("mistral")
    whole = capture(model, TEXTS, ["v", "stream"], words="bank")
    some = capture(model, TEXTS, ["v", "stream"], words="bank", layers=[2, 0])
    torch.testing.assert_close(some["v"], whole["v"][:, [2, 0]])
    torch.testing.assert_close(some["stream"], whole["stream"][:, [2, 0]])
    assert some.layers["v"] == (2, 0)
    with pytest.raises(InputError, match=r"`layers` must be in 0\.\.2. Got -1"):
        capture(model, TEXTS, "v", layers=-1)
    with pytest.raises(InputError, match=r"`layers` must be in 0\.\.2. Got 3"):
        capture(model, TEXTS, "v", layers=[3])


def test_the_forward_stops_where_nothing_more_is_needed():
    """No later block and no head runs, and no hook is left behind."""
    model, ran = tiny_model("llama"), []
    for layer, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, layer=layer: ran.append(layer))
    model.unembed.register_forward_pre_hook(lambda *_: ran.append("head"))
    capture(model, TEXTS, "v", layers=1, batch_size=3)
    assert ran == [0, 1]
    ran.clear()
    capture(model, TEXTS, "resid_post", batch_size=3)
    assert ran == [0, 1, 2]
    hooks = [len(m._forward_hooks) for m in model.modules() if type(m).__name__ == "HookPoint"]
    assert sum(hooks) == 0


@pytest.mark.parametrize("family", ["llama", "bloom", "bert"])
def test_texts_end_behind_the_last_word_that_is_read(family):
    """Nothing that follows reaches a word of a decoder; an encoder's words hear all of the text."""
    model, read = tiny_model(family), []
    for block in model.blocks[:1]:
        block.register_forward_pre_hook(lambda _m, args: read.append(args[0].shape[1]))
    whole = [len(tokens) for tokens in capture(model, TEXTS, "v", batch_size=1).tokens]
    spans = [find_word(model, text, "bank") for text in TEXTS]
    ends = [span.tokens[-1] + 1 for span in spans]
    causal = architecture(model).causal
    for site, ahead, expected in [
        ("v", True, ends if causal else whole),
        ("scores", True, whole),
        ("scores", False, ends if causal else whole),
    ]:
        read.clear()
        seen = read_sites(model, TEXTS, site, words=spans, batch_size=1, ahead=ahead)
        assert sorted(read) == sorted(expected)
        assert [len(tokens) for tokens in seen.tokens] == whole
    # Two words of one text that run together: up to the later one.
    read.clear()
    read_sites(model, [TEXTS[0]] * 2, "v", positions=[4, 2], share=True)
    assert read == [5 if causal else whole[0]]


class Widest(TorchDispatchMode):
    """Remembers the longest last axis, and the most numbers, of all tensors that are computed."""

    axis = numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dim() > 1:
            self.axis = max(self.axis, found.shape[-1])
            self.numbers = max(self.numbers, found.numel())
        return found


def test_long_texts_and_large_vocabularies_take_no_memory_unasked():
    """Field line 22: logits of 256k tokens, no memory left at 2,300 tokens."""
    model = tiny_model("llama", vocab_size=256_000, max_position_embeddings=2_500)
    text = "The bank is close to the river. " * 300
    with Widest() as widest:
        seen = capture(model, text, ["v", "resid_post"], positions="last", layers=[0, 2])
    n = len(seen.tokens[0])
    assert n > 2_300 and widest.axis <= n, "no logits are computed"
    assert widest.numbers <= 6 * n * n, "nothing is larger than the pattern of one block"
    assert seen["v"].shape[:2] == (1, 2) and seen["resid_post"].shape == (1, 2, 42)


def test_what_blocks_below_computed_is_not_kept():
    """Field line 22: everything kept until the end. Here what is alive does not grow with depth."""
    held = []
    for layers in (3, 9):
        model = tiny_model("llama", num_hidden_layers=layers)

        def count(*_):
            tensors = [x for x in gc.get_objects() if type(x) is torch.Tensor]
            held.append(sum(x.numel() for x in tensors))

        model.blocks[layers - 1].hook_in.register_forward_hook(count)
        capture(model, TEXTS[1], ["v", "resid_post"], positions="last", layers=[0, layers - 1])
    (three, nine), stream = held, 42 * 19
    assert nine - three < stream, "not even one stream more"


def test_hooks_of_the_callers_own_act_first():
    model = tiny_model("gpt2")
    plain = capture(model, TEXTS[0], "resid_post")["resid_post"]
    with model.hooks(fwd_hooks=[("blocks.1.attn.o.hook_out", lambda x, hook: x * 0)]):
        ablated = capture(model, TEXTS[0], ["attn_out", "resid_post"])
    assert not ablated["attn_out"][:, :, 1].any()
    assert torch.equal(ablated["resid_post"][:, :, 0], plain[:, :, 0])
    assert not torch.allclose(ablated["resid_post"][:, :, 1], plain[:, :, 1])


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "llama", "bert"])
def test_a_tokenizer_that_pads_on_the_left_changes_nothing(family):
    """Field line 20."""
    right, left = tiny_model(family), tiny_model(family)
    left.tokenizer.padding_side = "left"
    one, other = (capture(m, TEXTS, "resid_post", words="bank") for m in (right, left))
    assert torch.equal(one["resid_post"], other["resid_post"])


@pytest.mark.parametrize("dtype", ["float64", "float16"])
@pytest.mark.parametrize("family", ["gemma2", "mistral", "bert"])
def test_padding_never_makes_nan(family, dtype):
    """Rows that see padding only overflow the softmax in these precisions."""
    model = tiny_model(family, dtype=dtype)
    alone = capture(model, TEXTS, "resid_post", batch_size=1)["resid_post"]
    together = capture(model, TEXTS, "resid_post", batch_size=3)["resid_post"]
    assert together.isfinite().all()
    torch.testing.assert_close(together, alone)


@pytest.fixture
def small_memory(monkeypatch):
    """Let only batches of up to `fits` texts run, as a small device would."""

    def limit(fits, error):
        real, sizes = adapters.run_backbone, []

        def run(model, tokens, mask):
            sizes.append(len(tokens))
            if len(tokens) > fits:
                raise error
            return real(model, tokens, mask)

        monkeypatch.setattr(adapters, "run_backbone", run)
        return sizes

    return limit


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 10 bytes"),
        MemoryError(),
    ],
)
def test_out_of_memory_halves_the_batch(error, small_memory, tiny):
    texts = TEXTS * 3
    expected = capture(tiny("llama"), texts, "v", words="bank")["v"]
    sizes = small_memory(2, error)
    found = capture(tiny("llama"), texts, "v", words="bank", batch_size=9)["v"]
    assert sizes[0] == 9 and max(s for s in sizes if s <= 2) == 2
    torch.testing.assert_close(found, expected)


def test_a_text_that_never_fits_is_named(small_memory, tiny):
    small_memory(0, MemoryError("no room"))
    with pytest.raises(MemoryLimitError, match=r"text 1 \(\d+ tokens\) alone does not fit"):
        capture(tiny("llama"), TEXTS, "v")


def test_another_error_is_not_taken_for_a_lack_of_memory(small_memory, tiny):
    small_memory(0, RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        capture(tiny("llama"), TEXTS, "v")


class TestRefusals:
    """One clear error for each wrong input."""

    @pytest.mark.parametrize(
        ("arguments", "error", "told"),
        [
            ({"sites": "vv"}, InputError, "`sites` must be one of .* Got 'vv'"),
            ({"sites": ()}, InputError, "at least one site"),
            ({"texts": []}, InputError, "at least one text"),
            ({"texts": ["The bank.", " "]}, InputError, r"texts\[1\]"),
            ({"words": "bank", "positions": 1}, InputError, "not both"),
            ({"words": ["bank"]}, InputError, r"one a text \(3\)"),
            ({"words": "banc"}, WordError, "banc"),
            ({"positions": 99}, InputError, "tokens in"),
            ({"positions": -1}, InputError, "Got -1"),
            ({"positions": "first"}, InputError, "'last'"),
            ({"pool": "max", "words": "bank"}, InputError, "`pool` must be one of"),
            ({"batch_size": 0}, InputError, "`batch_size`"),
        ],
    )
    def test_wrong_arguments(self, arguments, error, told, tiny):
        given = {"texts": TEXTS, "sites": "v", **arguments}
        with pytest.raises(error, match=told):
            capture(tiny("llama"), **given)

    def test_sites_that_an_architecture_lacks(self, tiny):
        with pytest.raises(UnsupportedError, match="tiny:phi runs attention and MLP side by side"):
            capture(tiny("phi"), TEXTS, "resid_mid")

    def test_a_span_of_another_text(self, tiny):
        span = find_word(tiny("llama"), TEXTS[0], "bank")
        with pytest.raises(InputError, match="in the order of the texts"):
            capture(tiny("llama"), TEXTS[1], "v", words=[span])

    def test_a_model_that_is_none(self):
        with pytest.raises(InputError, match="must be a TransformerBridge.*Linear"):
            capture(torch.nn.Linear(2, 3), TEXTS, "v")

    def test_a_site_that_was_not_captured(self, tiny):
        with pytest.raises(InputError, match="`site` must be one of 'v'"):
            capture(tiny("llama"), TEXTS, "v")["z"]


def test_saved_and_read_back(tmp_path, tiny):
    from wvprobe.activations import Activations

    seen = capture(tiny("llama"), TEXTS, ["v", "scores"], words="bank")
    back = Activations.load(seen.save(tmp_path / "acts"))
    assert back.texts == seen.texts and back.positions == seen.positions
    assert back.provenance == seen.provenance and back.layers == seen.layers
    for site in seen.values:
        torch.testing.assert_close(back[site], seen[site], equal_nan=True, rtol=0, atol=0)
    assert len(seen.provenance.weight_hash) == 64


def test_frame_tells_what_was_read(tiny):
    frame = capture(tiny("llama"), TEXTS, "v", words="bank").to_frame()
    assert frame["word"].tolist() == ["bank"] * 3
    assert [s[0].strip() for s in frame["strings"]] == ["bank"] * 3


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_scores_do_not_overflow(dtype):
    """Field line 9: keys of norm 300 and q·k beyond what fp16 holds."""
    model = tiny_model("qwen2", dtype=dtype)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.k.original_component.bias.fill_(300.0)
            block.attn.q.original_component.bias.fill_(300.0)
    scores = capture(model, TEXTS[0], "scores", layers=0)["scores"]
    assert scores.dtype == torch.float32
    assert scores.isfinite().all() and scores.abs().max() > 65_504


@pytest.mark.real_model
def test_real_models(smollm2, minilm):
    text, other = "a power bank dropped into the river.", "The river bank is close to here."
    for model, streams, width in ((smollm2, 31, 576), (minilm, 7, 384)):
        seen = capture(model, [text, other], "stream", words="bank")["stream"]
        assert seen.shape == (2, streams, width)
        cosine = torch.cosine_similarity(seen[0], seen[1], dim=-1)
        # Alike at the embedding (with rotary positions the same), apart further up.
        assert cosine[0] > (0.9999 if model is smollm2 else 0.8)
        assert cosine[1:].min() < (0.8 if model is smollm2 else 0.95)
