import ast
import re
import unicodedata
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers, processors
from transformers import ByT5Tokenizer

from wvprobe._tokenizers import tiny_tokenizer
from wvprobe.errors import InputError, TokenizerError, WordError, WvprobeError
from wvprobe.testing import FAMILIES, tiny_model
from wvprobe.words import Encoding, encode, find_word, locate, word_at

# What stands before a text when nobody asks for it or against it.
BEGINS_WITH = {
    "gpt2": ["<|endoftext|>"],
    "opt": ["</s>"],
    "bloom": [],
    "gpt_neox": [],
    "phi": [],
    "llama": ["<s>"],
    "mistral": ["<s>"],
    "qwen2": [],
    "qwen3": [],
    "gemma2": ["<s>"],
    "gemma3": ["<s>"],
    "bert": ["[CLS]"],
    "deepseek_v3": ["<|begin|>"],
}
KINDS = ("gpt2", "llama", "bert", "qwen2")  # byte level, metaspace, WordPiece, and no BOS
SENTENCE = "The old river bank is closed, and the embankment too."

every_family = pytest.mark.parametrize("family", FAMILIES)
every_kind = pytest.mark.parametrize("family", KINDS)


@cache
def model_of(family):
    return tiny_model(family)


def parts_of(model):
    """What words are found with."""
    return {part: getattr(model, part) for part in ("tokenizer", "to_tokens", "cfg", "W_E")}


class Wrapped:
    """A tokenizer that is another one but for what a subclass changes."""

    def __init__(self, tokenizer):
        self.inner = tokenizer

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, text, **kwargs):
        return self.inner(text, **kwargs)


class WrongOffsets(Wrapped):
    """Gives offsets that `corrupt` has changed."""

    def __init__(self, tokenizer, corrupt):
        super().__init__(tokenizer)
        self.corrupt = corrupt

    def __call__(self, text, **kwargs):
        encoded = self.inner(text, **kwargs)
        if "offset_mapping" in encoded:
            encoded["offset_mapping"] = self.corrupt(encoded["offset_mapping"])
        return encoded


class NoOffsets(Wrapped):
    """Has none, as tokenizers written in Python."""

    is_fast = False

    def __call__(self, text, **kwargs):
        if kwargs.get("return_offsets_mapping"):
            raise NotImplementedError("no offsets")
        return self.inner(text, **kwargs)


@cache
def spare(family):
    return tiny_model(family)


def with_tokenizer(family, wrap):
    """A model whose tokenizer is wrapped, without the bridge loading it anew."""
    model = spare(family)
    model._tokenizer = wrap(model_of(family).tokenizer)
    return model


def strip_marks(text):
    return "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))


def spelt(model, encoding, positions):
    """The tokens decoded together, as far as the tokenizer keeps what the text says."""
    ids = [encoding.ids[position] for position in positions]
    decoded = model.tokenizer.decode(ids, clean_up_tokenization_spaces=False).strip()
    return strip_marks(decoded.removeprefix("##")).lower()


# --- every tokenizer ---


@every_family
def test_a_word_is_found_where_its_token_is(family):
    model = model_of(family)
    span = find_word(model, SENTENCE, "bank")
    assert span.text == SENTENCE and span.word == "bank" and span.occurrence == 0
    assert span.chars == (14, 18)
    assert span.source == "offsets"
    (position,) = span.tokens
    token = int(model.to_tokens(SENTENCE)[0, position])
    assert model.tokenizer.convert_ids_to_tokens(token).lstrip("Ġ▁") == "bank"
    assert span.strings == ("bank" if family == "bert" else " bank",)


@every_family
def test_ids_are_the_bridges_own(family):
    model = model_of(family)
    choices = (None, True) if family == "bert" else (None, True, False)
    for prepend_bos in choices:
        expected = model.to_tokens(SENTENCE, prepend_bos=prepend_bos, truncate=False)[0].tolist()
        assert list(encode(model, SENTENCE, prepend_bos=prepend_bos).ids) == expected


@every_family
def test_only_what_is_added_is_special(family):
    model = model_of(family)
    encoding = encode(model, SENTENCE)
    added = [s for s, special in zip(encoding.strings, encoding.special, strict=True) if special]
    assert added == BEGINS_WITH[family] + (["[SEP]"] if family == "bert" else [])
    assert [span is None for span in encoding.spans] == list(encoding.special)
    lengths = {len(encoding.ids), len(encoding.spans), len(encoding.strings), len(encoding.special)}
    assert len(lengths) == 1


@every_family
def test_bos_is_there_when_asked_for_and_only_then(family):
    model = model_of(family)
    bos = model.tokenizer.bos_token_id
    with_bos = encode(model, SENTENCE, prepend_bos=True)
    if family == "bert":  # its BOS is a name without a token: [CLS] stands in its place
        assert with_bos.strings[:2] == ("[CLS]", "the") and bos not in with_bos.ids
        return
    without = encode(model, SENTENCE, prepend_bos=False)
    assert with_bos.ids == (bos, *without.ids)
    assert with_bos.special == (True, *without.special) and not any(without.special)
    assert with_bos.spans == (None, *without.spans)
    before = find_word(model, SENTENCE, "bank", prepend_bos=False).tokens
    after = find_word(model, SENTENCE, "bank", prepend_bos=True).tokens
    assert after == tuple(position + 1 for position in before)


@every_family
def test_a_word_of_several_tokens(family):
    model = model_of(family)
    span = find_word(model, SENTENCE, "embankment")
    assert len(span.tokens) > 1
    assert list(span.tokens) == list(range(span.tokens[0], span.tokens[-1] + 1))
    pieces = [string.strip().removeprefix("##") for string in span.strings]
    assert "".join(pieces) == "embankment"


@every_family
def test_characters_of_several_bytes(family):
    text = "In the Café ☕ 河边的银行 by the nai\u0308ve bank."
    model = model_of(family)
    encoding = encode(model, text)
    for word in ("Café", "☕", "nai\u0308ve", "bank"):
        span = locate(encoding, word)
        assert text[slice(*span.chars)] == word
        spoken = {"☕": "[unk]"}.get(word, word) if family == "bert" else word
        assert spelt(model, encoding, span.tokens) == strip_marks(spoken).lower()


@every_family
@pytest.mark.parametrize("text", ["☕ bank", "the ☕ bank", "  ☕ bank"])
def test_a_token_of_white_space_is_no_part_of_a_word(family, text):
    """Metaspace tokenizers put one before a text, whose offsets are those of the first letter."""
    strings = find_word(model_of(family), text, "☕").strings
    assert strings == (("[UNK]",) if family == "bert" else ("<0xE2>", "<0x98>", "<0x95>"))


@every_family
def test_bytes_are_readable(family):
    strings = encode(model_of(family), "the Café").strings[-2:]
    if family == "bert":
        assert strings == ("##e", "[SEP]")
    else:
        assert strings == ("<0xC3>", "<0xA9>")


def test_a_real_replacement_character_is_text():
    encoding = encode(model_of("gpt2"), "a \ufffd bank")
    span = locate(encoding, "\ufffd")
    assert "".join(span.strings).strip() in ("\ufffd", "<0xEF><0xBF><0xBD>")
    assert locate(encoding, "bank").strings == (" bank",)


# --- BOS, CLS, padding, other tokenizers ---


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "bert"])
def test_two_bos_are_impossible(family):
    model = model_of(family)
    bos = model.tokenizer.bos_token
    with pytest.raises(InputError, match="must not begin with .*prepend_bos=False"):
        encode(model, f"{bos}the bank", prepend_bos=True)
    # Without one added, the text may bring its own, which is then part of the text.
    encoding = encode(model, f"{bos}the bank", prepend_bos=False)
    assert encoding.ids.count(model.tokenizer.bos_token_id) == 1
    assert encoding.spans[0] == (0, len(bos)) and not any(encoding.special)


def test_a_cls_in_the_text_is_refused_too():
    with pytest.raises(InputError, match=r"'\[CLS\]'"):
        encode(model_of("bert"), "[CLS] the bank")


def test_cls_is_not_lost():
    model = model_of("bert")
    assert model.to_tokens("the bank", prepend_bos=False)[0, 0] != model.tokenizer.cls_token_id
    with pytest.raises(InputError, match=r"takes away the '\[CLS\]'"):
        encode(model, "the bank", prepend_bos=False)


def test_a_cls_that_the_tokenizer_no_longer_adds_is_missed():
    """As happens where a tokenizer is wrapped a second time."""
    model = tiny_model("bert")
    tokenizer = model.tokenizer.backend_tokenizer
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    model.cfg.tokenizer_prepends_bos = False
    with pytest.raises(TokenizerError, match=r"'\[CLS\]' is not added any more"):
        encode(model, "the bank")


def test_a_special_token_spelt_out_later_is_text():
    encoding = encode(model_of("gpt2"), "the <|endoftext|> bank")
    assert encoding.special == (True, *[False] * (len(encoding.ids) - 1))
    position = encoding.ids.index(encoding.ids[0], 1)
    assert encoding.spans[position] == (4, 17)


def test_a_stale_bos_flag_is_noticed():
    model = tiny_model("gpt2")
    model.cfg.tokenizer_prepends_bos = False  # it does
    with pytest.raises(TokenizerError, match="two '<|endoftext|>'"):
        encode(model, "the bank", prepend_bos=True)
    with pytest.raises(TokenizerError, match="prepend_bos=False asks for none"):
        encode(model, "the bank", prepend_bos=False)
    model = tiny_model("qwen2")
    model.cfg.tokenizer_prepends_bos = True  # it does not
    with pytest.raises(TokenizerError, match="is missing where prepend_bos=True"):
        encode(model, "the bank", prepend_bos=True)
    # The bridge takes the text's first token for a BOS and drops it.
    with pytest.raises(TokenizerError, match="a token is lost"):
        encode(model, "the bank", prepend_bos=False)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_stale_bos_flag_is_noticed_on_either_side(side):
    model = tiny_model("qwen2")
    model.cfg.tokenizer_prepends_bos = True
    model.tokenizer.padding_side = side
    with pytest.raises(TokenizerError, match="a token is lost"):
        encode(model, "the bank", prepend_bos=False)


def test_a_token_that_is_neither_the_texts_nor_special():
    model = model_of("gpt2")
    stranger = torch.tensor([[5]])

    def to_tokens(text, **kwargs):
        return torch.cat([model.to_tokens(text, **kwargs), stranger], dim=1)

    wrapped = SimpleNamespace(**{**parts_of(model), "to_tokens": to_tokens})
    with pytest.raises(TokenizerError, match="comes from another tokenizer"):
        encode(wrapped, "the bank")


def test_a_bos_that_the_bridge_writes_changes_the_first_token():
    """Some tokenizers put their space before a text, but not after a BOS."""
    model = tiny_model("llama")
    backend = model.tokenizer.backend_tokenizer
    backend.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    model.cfg.tokenizer_prepends_bos = False
    with_bos = encode(model, "bank of the river", prepend_bos=True)
    without = encode(model, "bank of the river", prepend_bos=False)
    assert with_bos.ids[1] != without.ids[0]
    assert with_bos.source == without.source == "offsets"
    assert "".join(locate(with_bos, "bank").strings) == "bank"
    assert locate(without, "bank").strings == (" bank",)
    assert with_bos.special == (True, *[False] * (len(with_bos.ids) - 1))
    assert locate(with_bos, "river").chars == locate(without, "river").chars == (12, 17)


@pytest.mark.parametrize("other", ["llama", "qwen2"])
def test_a_new_tokenizer_takes_the_place_of_the_old(other):
    model = tiny_model("gpt2")
    old = find_word(model, SENTENCE, "embankment", prepend_bos=False)
    model.tokenizer = tiny_tokenizer(other)
    new = encode(model, SENTENCE, prepend_bos=False)
    assert new.ids == encode(model_of(other), SENTENCE, prepend_bos=False).ids
    assert locate(new, "bank").strings == (" bank",)
    span = locate(new, "embankment")
    assert "".join(span.strings).strip() == "embankment" == "".join(old.strings)
    ids = model.to_tokens(SENTENCE, prepend_bos=False)[0]
    assert model.tokenizer.decode(ids[list(span.tokens)]).strip() == "embankment"


def test_ids_that_the_model_does_not_embed_are_refused():
    model = tiny_model("gpt2")
    missing = 409 - len(model.tokenizer)
    model.tokenizer.add_tokens([f"new{n}word" for n in range(missing)] + ["riverbank"])
    assert 408 in encode(model, f"the new{missing - 1}word").ids
    with pytest.raises(TokenizerError, match="id 409, and tiny:gpt2 embeds 409 ids"):
        encode(model, "the riverbank")


@every_kind
def test_left_padding_changes_nothing(family):
    left = tiny_model(family)
    left.tokenizer.padding_side = "left"
    for prepend_bos in (None, True) if family == "bert" else (None, True, False):
        assert encode(left, SENTENCE, prepend_bos=prepend_bos) == encode(
            model_of(family), SENTENCE, prepend_bos=prepend_bos
        )


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_bos_with_the_id_of_the_padding_is_no_padding(side):
    model = tiny_model("gpt2")
    model.tokenizer.padding_side = side
    assert model.tokenizer.pad_token_id == model.tokenizer.bos_token_id == 0
    padded = model.to_tokens(["the bank", SENTENCE])
    encoding = encode(model, "the bank")
    length = len(encoding.ids)
    assert encoding.ids[0] == 0 and encoding.special == (True, *[False] * (length - 1))
    own = padded[0, -length:] if side == "left" else padded[0, :length]
    assert tuple(own.tolist()) == encoding.ids
    assert encode(model, "the bank", prepend_bos=False).ids == encoding.ids[1:]


def test_no_tokenizer():
    model = tiny_model("gpt2")
    model._tokenizer = None
    with pytest.raises(TokenizerError, match=r"wvprobe\.load\(model, tokenizer=tokenizer\)"):
        encode(model, "the bank")


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_text_is_refused(text):
    with pytest.raises(InputError, match="`text` must be"):
        encode(model_of("gpt2"), text)


def test_a_long_text_is_refused_and_never_cut():
    model = model_of("llama")
    fits = " ".join(["bank"] * 256)
    assert len(encode(model, fits).ids) == 257 == model.cfg.n_ctx
    with pytest.raises(InputError, match="at most 257 tokens.*Got 258 tokens"):
        encode(model, fits + " bank")


# --- wrong and missing offsets ---

WRONG = {
    # Start equals end, as Llama-3's tokenizer gave.
    "empty": lambda offsets: [(start, start) for start, _ in offsets],
    # Counted from each word's start, as for text that was split before.
    "restarting": lambda offsets: [(0, end - start) for start, end in offsets],
    "shifted": lambda offsets: [(start + 1, end + 1) for start, end in offsets],
    "swapped": lambda offsets: [*offsets[:2], offsets[3], offsets[2], *offsets[4:]],
    "beyond": lambda offsets: [*offsets[:-1], (offsets[-1][0], offsets[-1][1] + 1)],
    "between letters": lambda offsets: [
        (start + 2 * (n > 0), end + 2 * (n < len(offsets) - 1))
        for n, (start, end) in enumerate(offsets)
    ],
    "off by a letter": lambda offsets: [(start, max(start, end - 1)) for start, end in offsets],
}
TEXTS = (
    SENTENCE,
    "  She keeps money in the Bank - it's Café naïve; don't do not!\n\nThe bank's ﬁne…  ",
    "cafe\u0301 bank ½ İstanbul STRASSE straße",
)


def solid(encoding):
    """The spans, leaving out white space, whose place among others means nothing."""
    return [span for span in encoding.spans if span is None or span[0] < span[1]]


@pytest.mark.parametrize("wrong", WRONG)
@every_kind
def test_wrong_offsets_are_noticed_and_decoding_takes_over(family, wrong):
    model = with_tokenizer(family, lambda tokenizer: WrongOffsets(tokenizer, WRONG[wrong]))
    plain = "The old river bank by the water"  # no punctuation, whose offsets count for little
    span, right = find_word(model, plain, "bank"), find_word(model_of(family), plain, "bank")
    assert span.source == "decoding" and right.source == "offsets"
    assert (span.tokens, span.chars) == (right.tokens, right.chars)


def test_offsets_of_llama_3():
    """The very numbers of the report: (0, 0), (6, 6) for two words."""
    model = with_tokenizer(
        "llama", lambda tokenizer: WrongOffsets(tokenizer, lambda offsets: [(0, 0), (5, 5)])
    )
    span = find_word(model, "river bank", "bank")
    assert span.tokens == (2,) and span.chars == (6, 10) and span.source == "decoding"


def test_bytes_whose_offsets_are_another_characters():
    right = encode(model_of("gpt2"), "☕a bank")
    assert right.spans[1:5] == ((0, 1), (0, 1), (0, 1), (1, 2))
    model = with_tokenizer(
        "gpt2", lambda t: WrongOffsets(t, lambda offsets: [(1, 2)] * 3 + offsets[3:])
    )
    found = encode(model, "☕a bank")
    assert found.source == "decoding" and found.spans == right.spans


@pytest.mark.parametrize("text", TEXTS)
@every_family
def test_without_offsets_the_spans_are_the_same(family, text):
    model = with_tokenizer(family, NoOffsets)
    found, expected = encode(model, text), encode(model_of(family), text)
    assert found.source == "decoding"
    assert found.ids == expected.ids and found.strings == expected.strings
    if expected.source == "offsets":
        for mine, theirs in zip(solid(found), solid(expected), strict=True):
            # Offsets of the library count an accent written alone to the letter, or do not.
            assert mine == theirs or text[slice(*theirs)].startswith(text[slice(*mine)])


def test_an_unknown_token_without_offsets():
    model = with_tokenizer("bert", NoOffsets)
    span = find_word(model, "the ☕, bank", "☕")
    assert span.strings == ("[UNK]",) and span.source == "decoding"
    assert find_word(model, "the ☕, bank", "bank").strings == ("bank",)


def test_a_tokenizer_of_bytes_written_in_python():
    model = tiny_model("gpt2")
    model.tokenizer = ByT5Tokenizer()
    text = "the Café ☕ bank"
    assert not model.tokenizer.is_fast
    for prepend_bos in (True, False):
        encoding = encode(model, text, prepend_bos=prepend_bos)
        assert encoding.source == "decoding"
        assert encoding.special == (True,) * prepend_bos + (False,) * len(text.encode())
        assert locate(encoding, "bank").strings == ("b", "a", "n", "k")
        cup = locate(encoding, "☕")
        assert cup.strings == ("<0xE2>", "<0x98>", "<0x95>")
        assert [encoding.ids[i] - 3 for i in cup.tokens] == list("☕".encode())


def test_neither_offsets_nor_decoding():
    class Garbled(NoOffsets):
        def batch_decode(self, ids, **kwargs):
            return ["x"] * len(ids)

    with pytest.raises(TokenizerError, match="wrong offsets or none.*do not spell"):
        encode(with_tokenizer("gpt2", Garbled), SENTENCE)


def test_text_that_decoding_leaves_over_is_an_error():
    class Shorter(NoOffsets):
        def batch_decode(self, ids, **kwargs):
            return [*self.inner.batch_decode(ids[:-1], **kwargs), " "]

    with pytest.raises(TokenizerError, match="do not spell"):
        encode(with_tokenizer("gpt2", Shorter), "the bank")


def test_bytes_that_are_never_completed_are_an_error():
    class Unfinished(NoOffsets):
        def convert_ids_to_tokens(self, ids, **kwargs):
            return [*self.inner.convert_ids_to_tokens(ids[:-1], **kwargs), "Ã"]

        def batch_decode(self, ids, **kwargs):
            return [*self.inner.batch_decode(ids[:-1], **kwargs), "\ufffd"]

    with pytest.raises(TokenizerError, match="do not spell"):
        encode(with_tokenizer("gpt2", Unfinished), "the bank\n")


def test_a_decoder_that_drops_the_first_space():
    class Stripping(NoOffsets):
        def batch_decode(self, ids, **kwargs):
            return [s.removeprefix(" ") for s in self.inner.batch_decode(ids, **kwargs)]

    model = with_tokenizer("llama", Stripping)
    assert encode(model, "the  bank").strings == encode(model_of("llama"), "the  bank").strings
    assert find_word(model, "the  bank", "bank").strings == (" bank",)


# --- which words ---


def found(text, word, occurrence=0):
    return find_word(model_of("gpt2"), text, word, occurrence=occurrence)


@pytest.mark.parametrize(
    ("text", "word", "chars"),
    [
        ("a power-bank here", "bank", (8, 12)),
        ("(bank)", "bank", (1, 5)),
        ("embankment, bank_x, bank", "bank", (20, 24)),
        ("bank's, Bank, banks, bank", "bank", (21, 25)),
        ("the bank's door", "bank's", (4, 10)),
        ("the bank’s door", "bank’s", (4, 10)),
        ("the banks' doors", "banks'", (4, 10)),
        ("the 'banks' doors", "banks", (5, 10)),
        ("the 'old banks' doors", "banks", (9, 14)),
        ("the ‘banks’ doors", "banks", (5, 10)),
        ("the 'bank' doors", "bank", (5, 9)),
        ("the power bank is", "power bank", (4, 14)),
        ("the bank. Closed", ".", (8, 9)),
        ("it is ... so", "...", (6, 9)),
        ("the bank's door", "'", (8, 9)),
        ("it's Bob's", "'s", (2, 4)),
        ("bank. bank", "bank.", (0, 5)),
        ("河边的银行关门了。", "银行", (3, 5)),
        ("ไปธนาคารแล้ว", "ธนาคาร", (2, 8)),
        ("a ☕\ufe0fbank here", "bank", (4, 8)),
        ("the 👩‍💻 here", "👩‍💻", (4, 7)),
        ("the cafe\u0301 here", "cafe\u0301", (4, 9)),
        ("the bank\u00a0here", "bank", (4, 8)),
        ("über bank_2 Übung", "Übung", (12, 17)),
    ],
)
def test_a_whole_word(text, word, chars):
    span = found(text, word)
    assert span.chars == chars and text[slice(*chars)] == word
    ids = encode(model_of("gpt2"), text).ids[span.tokens[0] : span.tokens[-1] + 1]
    assert model_of("gpt2").tokenizer.decode(ids).strip() == word


@pytest.mark.parametrize(
    ("text", "word", "expected"),
    [
        (
            "the bank's door",
            "bank",
            """Found the possessive "bank's" at 4..10; pass word="bank's".""",
        ),
        ("the bank’s door", "bank", "Found the possessive 'bank’s' at 4..10"),
        ("the Bank's door", "bank", """the possessive "Bank's" at 4..10"""),
        ("the banks' door", "banks", """the possessive "banks'" at 4..10"""),
        ("they 'so' the banks' door", "banks", """the possessive "banks'" at 14..20"""),
        ("The Bank is", "bank", "Found the other case 'Bank' at 4..8; pass word='Bank'."),
        ("the bank is", "Bank", "the other case 'bank' at 4..8"),
        ("two banks", "bank", "Found the longer word 'banks' at 4..9; pass word='banks'."),
        ("it banked", "bank", "the longer word 'banked' at 3..9"),
        ("my bank_x", "bank", "the longer word 'bank_x' at 3..9"),
        ("my bank2", "bank", "the longer word 'bank2' at 3..8"),
        ("an embankment", "bank", "Found it inside 'embankment' at 3..13."),
        ("it's O'Brien", "Brien", """inside "O'Brien" at 5..12"""),
        ("I don't", "don", """the longer word "don't" at 2..7"""),
        ("the bank's door", "bank'", """the longer word "bank's" at 4..10"""),
        ("a power  bank", "power bank", "spacing 'power  bank' at 2..13; pass word=text[2:13]."),
        ("Power banks", "power bank", "the longer word 'Power banks' at 0..11"),
        (
            "a cafe\u0301 x",
            "café",
            "Unicode form or spacing 'cafe\u0301' at 2..7; pass word=text[2:7]",
        ),
        ("a café x", "cafe\u0301", "Unicode form or spacing 'café' at 2..6"),
        ("a cafe\u0301 x", "cafe", "the longer word 'cafe\u0301' at 2..7"),
        ("the 👩‍💻 x", "👩", "'👩\\u200d💻' at 4..7"),
        ("the 👋🏽 x", "👋", "'👋🏽' at 4..6"),
        ("the river is", "bank", "The text has 'the', 'river', 'is'."),
        ("the back of", "bank", "The text has 'back'."),
        ("...", "bank", "Got 'bank' instead."),
    ],
)
def test_what_is_no_whole_word_is_offered_and_not_taken(text, word, expected):
    with pytest.raises(WordError) as caught:
        found(text, word)
    assert expected in str(caught.value)
    assert f"a whole word of {text!r}. Got {word!r} instead" in str(caught.value)


def test_everything_near_is_listed():
    with pytest.raises(WordError) as caught:
        found("The Bank's embankment: banks, Bank.", "bank")
    listed = str(caught.value)
    for word in ('"Bank\'s" at 4..10', "'embankment' at 11..21", "'banks' at 23..28"):
        assert word in listed
    assert "'Bank' at 30..34" in listed


@pytest.mark.parametrize("word", ["", " ", "\n", " bank", "bank "])
def test_an_empty_or_padded_word_is_refused(word):
    with pytest.raises(WordError, match="without white space around it"):
        found("the bank", word)


def test_occurrences_are_counted_from_0():
    text = "bank, embankment, Bank, bank and bank's"
    assert [found(text, "bank", n).chars for n in (0, 1)] == [(0, 4), (24, 28)]
    assert found(text, "bank", 1).tokens > found(text, "bank", 0).tokens
    for wrong in (-1, 2):
        with pytest.raises(WordError) as caught:
            found(text, "bank", wrong)
        listed = str(caught.value)
        assert f"`occurrence` must be in 0..1. Got {wrong} instead." in listed
        assert "occurs 2 time(s)" in listed and "0..4, 24..28" in listed
        assert '"bank\'s" at 33..39' in listed
    assert found("bank bank bank bank", "bank bank", 1).chars == (10, 19)


def test_errors_are_value_errors_and_our_own():
    for error in (ValueError, WvprobeError):
        with pytest.raises(error):
            found("the river", "bank")


def encoding_of(text, spans, strings):
    n = len(spans)
    return Encoding(text, tuple(range(n)), tuple(spans), tuple(strings), (False,) * n, "offsets")


def test_a_token_that_reaches_out_of_the_word_is_refused():
    encoding = encoding_of("a bank.", [(0, 1), (2, 7)], ["a", " bank."])
    with pytest.raises(WordError) as caught:
        locate(encoding, "bank")
    for part in ("' bank.'", "position 1", "also stands for '.'", "Pass word='bank.'"):
        assert part in str(caught.value)
    assert locate(encoding, "bank.").tokens == (1,)
    encoding = encoding_of("power bank", [(0, 3), (3, 10)], ["pow", "er bank"])
    with pytest.raises(WordError, match="'er bank'.*also stands for 'er '.*'er bank'"):
        locate(encoding, "bank")
    assert locate(encoding, "power bank").tokens == (0, 1)


def test_a_token_of_white_space_is_no_part_of_a_phrase():
    encoding = encoding_of("power  bank", [(0, 5), (6, 6), (7, 11)], ["power", " ", " bank"])
    assert locate(encoding, "power  bank").tokens == (0, 2)


def test_white_space_within_a_words_token_is_allowed():
    encoding = encoding_of("a bank b", [(0, 1), (2, 7), (7, 8)], ["a", " bank ", "b"])
    assert locate(encoding, "bank").tokens == (1,)


def test_a_word_that_the_tokenizer_leaves_out():
    encoding = encoding_of("a ☕ b", [(0, 1), (4, 5)], ["a", " b"])
    with pytest.raises(WordError, match="'☕' at 2..3 instead, which the tokenizer leaves out"):
        locate(encoding, "☕")


# --- any sentence ---

WORDS = ("bank", "river", "the", "embankment", "Bank", "banks", "Café", "naïve", "light", "a", "I")
SEPARATORS = (" ", "  ", ", ", ". ", "-", " (", ") ", "\n", " — ", "; ", ": “", "” ", "/", "! ")

sentences = st.lists(
    st.tuples(st.sampled_from(WORDS), st.sampled_from(SEPARATORS)), min_size=1, max_size=9
)


def check_every_word(model, parts):
    """Each word is found where it was put, and its tokens spell it."""
    text, places = "", {}
    for word, separator in parts:
        places.setdefault(word, []).append((len(text), len(text) + len(word)))
        text += word + separator
    encoding = encode(model, text)
    taken = []
    for word, chars in places.items():
        for occurrence, expected in enumerate(chars):
            span = locate(encoding, word, occurrence)
            assert span.chars == expected and text[slice(*span.chars)] == word
            assert spelt(model, encoding, span.tokens) == strip_marks(word).lower()
            assert span.strings == tuple(encoding.strings[i] for i in span.tokens)
            taken += span.tokens
        with pytest.raises(WordError, match=f"occurs {len(chars)} time"):
            locate(encoding, word, len(chars))
    assert len(set(taken)) == len(taken)  # no token stands for two words
    for position in set(range(len(encoding.ids))) - set(taken):
        left = encoding.spans[position]
        assert left is None or not any(c.isalnum() for c in text[slice(*left)])


@every_kind
@settings(max_examples=40, deadline=None)
@given(parts=sentences)
def test_every_word_of_any_sentence(family, parts):
    check_every_word(long_model(family), parts)


@every_kind
@settings(max_examples=40, deadline=None)
@given(parts=sentences)
def test_every_word_of_any_sentence_without_offsets(family, parts):
    check_every_word(long_model(family, NoOffsets), parts)


def long_model(family, wrap=None):
    # Tiny models read 257 tokens; words of bytes can make more.
    model = model_of(family) if wrap is None else with_tokenizer(family, wrap)
    limitless = SimpleNamespace(**{**vars(model.cfg), "n_ctx": 0})
    return SimpleNamespace(**{**parts_of(model), "cfg": limitless})


@settings(max_examples=60, deadline=None)
@given(text=st.text(min_size=1, max_size=20).filter(str.strip))
@every_kind
def test_any_text_is_encoded_in_order(family, text):
    # A text that spells out what is added to it is refused, as another test holds.
    assume("[CLS]" not in text)
    encoding = encode(long_model(family), text)
    spans = [span for span in encoding.spans if span is not None]
    assert spans == sorted(spans)
    for start, end in spans:
        assert 0 <= start <= end <= len(text)
        assert start == end or not text[start].isspace()
    if family != "bert":  # which drops control characters
        covered = {i for start, end in spans for i in range(start, end)}
        assert all(i in covered or c.isspace() for i, c in enumerate(text))


# --- pretrained tokenizers ---


@pytest.mark.real_model
def test_smollm2(smollm2):
    text = "The power bank dropped from the embankment while the bank's door closed."
    encoding = encode(smollm2, text)
    assert encoding.strings[0] == "<|im_start|>" and encoding.special.count(True) == 1
    assert encoding.ids == tuple(smollm2.to_tokens(text)[0].tolist())
    span = locate(encoding, "bank")
    assert (span.tokens, span.strings, span.source) == ((3,), (" bank",), "offsets")
    assert locate(encoding, "bank's").strings == (" bank", "'s")
    assert locate(encoding, "power bank").tokens == (2, 3)
    with pytest.raises(WordError, match="occurs 1 time.*embankment.*possessive"):
        locate(encoding, "bank", 1)
    with pytest.raises(InputError, match="im_start"):
        encode(smollm2, "<|im_start|>user")
    assert encode(smollm2, "<|im_start|>user", prepend_bos=False).special == (False, False)


@pytest.mark.real_model
def test_minilm(minilm):
    text = "The power bank dropped from the embankment while the Bank's door closed."
    encoding = encode(minilm, text)
    assert encoding.strings[0] == "[CLS]" and encoding.strings[-1] == "[SEP]"
    assert encoding.special.count(True) == 2
    assert encoding.ids == tuple(minilm.to_tokens(text)[0].tolist())
    span = locate(encoding, "bank")
    assert (span.tokens, span.strings, span.source) == ((3,), ("bank",), "offsets")
    assert locate(encoding, "Bank's").strings == ("bank", "'", "s")
    assert find_word(minilm, "the Café", "Café").strings == ("cafe",)
    with pytest.raises(InputError, match="CLS"):
        encode(minilm, text, prepend_bos=False)


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_every_word_of_any_sentence_of_a_pretrained_tokenizer(name, request):
    model = request.getfixturevalue(name)

    @settings(max_examples=40, deadline=None)
    @given(parts=sentences)
    def every_word(parts):
        check_every_word(model, parts)

    every_word()


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", "minilm"])
@pytest.mark.parametrize("text", TEXTS)
def test_pretrained_tokenizers_without_offsets(name, text, request, monkeypatch):
    model = request.getfixturevalue(name)
    expected = encode(model, text)
    monkeypatch.setattr(model, "_tokenizer", NoOffsets(model.tokenizer))
    found = encode(model, text)
    assert found.source == "decoding" and found.strings == expected.strings
    if expected.source == "offsets":
        for mine, theirs in zip(solid(found), solid(expected), strict=True):
            assert mine == theirs or text[slice(*theirs)].startswith(text[slice(*mine)])


# --- what errors offer ---

OFFERED = re.compile(r"pass word=(?:text\[(\d+):(\d+)\]|(\"[^\"]*\"|'[^']*'))\.")
NEAR = ("bank", "Bank", "banks", "banks'", "bank's", "embankment", "bank_x", "'bank'", "ba\u0301nk")


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(st.tuples(st.sampled_from(NEAR), st.sampled_from((" ", ", ", "-"))), max_size=5)
)
def test_what_an_error_offers_is_found(parts):
    text = "A " + "".join(word + separator for word, separator in parts)
    encoding = encoding_of(text, [(i, i + 1) for i in range(len(text))], text)
    listed = str(error_of(encoding, "bank"))
    for start, end, quoted in OFFERED.findall(listed):
        word = ast.literal_eval(quoted) if quoted else text[int(start) : int(end)]
        assert locate(encoding, word).word == word != "bank"
    # Every written form of the word is found, or offered, or named as lying inside another.
    others = {word for word, _ in parts} - {"bank", "'bank'", "ba\u0301nk"}
    assert all(repr(word) in listed for word in others)


def error_of(encoding, word):
    with pytest.raises(WordError) as caught:
        locate(encoding, word, occurrence=99)
    return caught.value


def test_a_word_is_found_by_its_place(tiny):
    encoding = encode(tiny("llama"), "A bank by the bank of the embankment.")
    first, second = (word_at(encoding, start, start + 4) for start in (2, 14))
    assert (first.occurrence, second.occurrence) == (0, 1)
    assert second == find_word(tiny("llama"), encoding.text, "bank", occurrence=1)
    for start, end in ((28, 32), (3, 6), (5, 5)):
        with pytest.raises(WordError, match="place of a whole word"):
            word_at(encoding, start, end)


@pytest.mark.parametrize(("text", "start"), [("A bank's door", 2), ("Two banks’ doors", 4)])
def test_a_place_may_be_followed_by_a_possessive(tiny, text, start):
    encoding = encode(tiny("llama"), text)
    end = text.index("'" if "'" in text else "’")
    found = word_at(encoding, start, end)
    assert found.word == text[start:end] and found.chars == (start, end)
    covered = [encoding.spans[p] for p in found.tokens]
    assert covered[0][0] == start and covered[-1][1] == end
    with pytest.raises(WordError, match="place of a whole word"):
        word_at(encode(tiny("llama"), "O'bank'er"), 2, 6)
