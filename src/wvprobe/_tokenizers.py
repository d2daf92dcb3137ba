"""Small tokenizers of three kinds, trained on a few lines of our own, for `testing`.

They differ where real ones do: byte-level pairs (GPT-2, Qwen, ...), metaspace pairs with
byte fallback (Llama, Gemma, ...) and WordPiece (BERT); with and without a BOS of their own.
"""

import re
import tempfile
from functools import cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import trainers as tok_trainers

# Words that the tests and the documentation speak of become whole tokens by repetition.
_LINES = (
    "The river bank is close to here, and the old bank by the river is closed.",
    "A power bank dropped into the river while the bank was open.",
    "She keeps money in the bank; he keeps a boat on the bank of the river.",
    "When the light turned green the light bag felt heavier than the first light.",
    "They play the play again, and the play of light on the water is the play.",
    "To the left of the house the road that she left is the one on the left.",
)
_VOCABULARY = 409  # a prime, so that no dimension is mistaken for it

# Beginning, end, padding, unknown: what the family's real tokenizer calls them.
_BYTE_SPECIALS = {
    "gpt2": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "opt": {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>"},
    "bloom": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
    "gpt_neox": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "phi": {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    "qwen2": {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "qwen3": {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    "deepseek_v3": {"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>"},
}
_METASPACE_SPECIALS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
_WORDPIECE_SPECIALS = {
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "mask_token": "[MASK]",
}
_PREPENDS_BOS = ("opt", "llama", "mistral", "gemma2", "gemma3", "deepseek_v3")


def tiny_tokenizer(family: str) -> Any:
    """Return a tokenizer of a tiny family, loaded from a folder as users load theirs.

    A new one each time: a bridge changes the tokenizer that it is given, and gives BERT's another
    beginning on a second boot.
    """
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(_saved(family))


@cache
def _saved(family: str) -> str:
    """Train a family's tokenizer and save it to a folder that stays: the bridge reads it again."""
    from transformers import PreTrainedTokenizerFast

    specials, tokenizer = _trained(family)
    if family in _PREPENDS_BOS:
        bos = specials["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
    folder = f"{_folder().name}/{family}"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials).save_pretrained(folder)
    return folder


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder that lives as long as the process."""
    return tempfile.TemporaryDirectory(prefix="wvprobe-tiny-")


def _trained(family: str) -> tuple[dict[str, str], Tokenizer]:
    if family == "bert":
        return dict(_WORDPIECE_SPECIALS), _wordpiece()
    if family in _BYTE_SPECIALS:
        specials = dict(_BYTE_SPECIALS[family])
        return specials, _byte_level(specials)
    return dict(_METASPACE_SPECIALS), _metaspace()


def _train(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(_LINES * 3, trainer)
    return tokenizer


def _byte_level(specials: dict[str, str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = tok_trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=list(dict.fromkeys(specials.values())),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    return _train(tokenizer, trainer)


def _metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    # Real ones keep punctuation apart, too.
    apart = [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(apart)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = tok_trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[*_METASPACE_SPECIALS.values(), *(f"<0x{b:02X}>" for b in range(256))],
        show_progress=False,
    )
    trained = _train(tokenizer, trainer)
    # The trainer forgets the fallback flags of the model it starts from.
    trained.model.byte_fallback = True
    trained.model.fuse_unk = True
    return trained


def _wordpiece() -> Tokenizer:
    # Written out, since the WordPiece trainer's ids differ from one process to the next.
    words = sorted(set(re.findall("[a-z]+", " ".join(_LINES).lower())))
    alphabet = [chr(c) for c in range(33, 127) if not chr(c).isupper()]
    pieces = [*_WORDPIECE_SPECIALS.values(), *alphabet, *(f"##{c}" for c in alphabet), "##ment"]
    vocabulary = dict.fromkeys([*pieces, *words])
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in ("[CLS]", "[SEP]")],
    )
    return tokenizer
