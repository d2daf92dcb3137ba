"""`payload` and `drift` of stored activations: the same words, the same model, or a refusal."""

import pytest
import torch

from wvprobe import capture, drift, payload
from wvprobe.activations import open_store
from wvprobe.datasets import LabelledDataset, LabelledSentence, SenseDataset, SenseItem
from wvprobe.errors import InputError
from wvprobe.labelled import labelled_words
from wvprobe.testing import tiny_model

NOUNS = "river bank power bridge garden window letter doctor engine market winter forest".split()
VERBS = "dropped closed opened carried painted followed watched visited answered crossed".split()
SITES = ("v", "q", "k", "attn_in")


def sentence(number):
    words = ("The", NOUNS[number % 12], VERBS[number % 10], "the", NOUNS[(5 * number + 3) % 12])
    text, starts = " ".join(words), []
    for word in words:
        starts.append(text.index(word, starts[-1] + 1 if starts else 0))
    ends = tuple(start + len(word) for start, word in zip(starts, words, strict=True))
    labels = {"upos": ("DET", "NOUN", "VERB", "DET", "NOUN")}
    return LabelledSentence(text, words, tuple(starts), ends, labels, None, str(number))


DATA = LabelledDataset("by hand", tuple(sentence(number) for number in range(30)), "upos")
GIVEN = dict(draws=3, min_count=5, control_draws=1, per_sentence=3, seed=2)
SENSES = SenseDataset(
    "by hand",
    tuple(
        SenseItem(
            "bank", sense, "", "noun", text, text.index("bank"), text.index("bank") + 4, context
        )
        for adjective in "old new small good".split()
        for sense, context, text in (
            ("shore", "after", f"The {adjective} bank of the river was green."),
            ("money", "before", f"She keeps money in the {adjective} bank."),
        )
    ),
)


def frames(one, other):
    import pandas

    pandas.testing.assert_frame_equal(one.to_frame(), other.to_frame(), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("family", ["llama", "bert", "qwen3"])
def test_payload_reads_a_store(family, tiny, tmp_path, monkeypatch):
    model = tiny(family)
    words = labelled_words(model, DATA)
    stored = capture(
        model, words.texts, SITES, words=words.spans, out=tmp_path / "store", batch_size=16
    )
    assert len(stored["v"]) > 100, "more words than are measured"
    expected = payload(model, DATA, limit=60, **GIVEN)
    monkeypatch.setattr("wvprobe.value_payload.measuring.read_sites", None)  # nothing runs
    found = payload(model, DATA, limit=60, store=open_store(stored.folder), **GIVEN)
    assert found.n_items == expected.n_items == 60
    frames(found, expected)
    assert found.provenance.settings["store"] == stored.store.manifest.identity


def test_payload_refuses_what_is_not_its_own(tiny, tmp_path):
    model = tiny("llama")
    words = labelled_words(model, DATA)

    def stored(name, sites=SITES, **given):
        given = {"words": words.spans, **given}
        return capture(model, words.texts, sites, out=tmp_path / name, **given)

    def refuses(store, told, model=model, **given):
        with pytest.raises(InputError, match=told):
            payload(model, DATA, store=store, **GIVEN, **given)

    whole = stored("whole")
    refuses(stored("few", sites=("v", "attn_in")), "with 'q' of all layers, 0 to 2. Got 'none'")
    refuses(stored("two", layers=[0, 1]), r"with 'v' of all layers, 0 to 2. Got \[0, 1\]")
    refuses(stored("pos", words=None, positions=1), r"\d+ missing, first tokens \[\d\] of 'The")
    refuses(stored("texts", words=None), "of words. Got 'whole texts'")
    refuses(stored("mean", pool="mean"), "pooled by 'last'. Got 'mean'")
    refuses(whole, "pooled by 'first'. Got 'last'", pool="first")
    refuses(whole, "captured with tiny:llama as it is now. Got 'another weights'",
            model=tiny("llama", seed=1))  # fmt: skip
    hooks = [("blocks.1.attn.o.hook_out", lambda x, hook: x * 0)]
    with model.hooks(fwd_hooks=hooks):
        refuses(whole, "Got 'another hooks'")
    refuses(whole, "Got 'another prepend_bos'", prepend_bos=False)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("position", ["target", "last_token"])
def test_drift_reads_a_store(family, position, tiny, tmp_path, monkeypatch):
    model = tiny(family)
    texts = ["Another text, longer than all of the others that are measured here.",
             *dict.fromkeys(item.sentence for item in SENSES.items)]  # fmt: skip
    stored = capture(model, texts, "stream", out=tmp_path / "store", batch_size=3)
    expected = drift(model, SENSES, position=position)
    monkeypatch.setattr("wvprobe.contextual_drift._vectors.read_sites", None)
    monkeypatch.setattr("wvprobe.contextual_drift._vectors._CHUNK_BYTES", 20_000)
    found = drift(model, SENSES, position=position, store=stored)
    frames(found, expected)
    torch.testing.assert_close(found.baseline, expected.baseline, rtol=1e-4, atol=1e-5)


def test_drift_refuses_what_is_not_its_own(tiny, tmp_path):
    model = tiny("llama")
    texts = list(dict.fromkeys(item.sentence for item in SENSES.items))

    def stored(name, texts=texts, sites="stream", **given):
        return capture(model, texts, sites, out=tmp_path / name, **given)

    for store, told in (
        (stored("words", words="bank"), "of whole texts. Got 'words or positions'"),
        (stored("few", texts[:-2]), "with all 8 texts and words .*2 missing, first 'The good bank"),
        (stored("site", sites="resid_pre"), "with 'stream' of all layers, 0 to 3. Got 'none'"),
        (stored("layers", layers=[0, 3]), r"of all layers, 0 to 3. Got \[0, 3\]"),
        (stored("bos", prepend_bos=False), "Got 'another prepend_bos'"),
    ):
        with pytest.raises(InputError, match=told):
            drift(model, SENSES, store=store)
    with pytest.raises(InputError, match="Got 'another weights'"):
        drift(tiny_model("llama", seed=1), SENSES, store=stored("whole"))
