"""From words to token positions, from the tokenizer alone.

    span = find_word(model, "The river bank is closed.", "bank")
    span.tokens     # (3,): positions in the sequence that the model reads, its BOS counted

Two steps, each usable alone: `encode` finds which characters of the text every token stands
for, and `locate` finds a word among the characters. Nothing is guessed: a word of other case, a
possessive, or a part of a longer word is offered in the error, never taken.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from wvprobe._spelling import Span, fold, matched_spans, read_tokens, verified_spans
from wvprobe._validate import at_least, instance, message, whole
from wvprobe._validate import text as checked_text
from wvprobe._word_places import (
    apostrophe_within,
    begins_earlier,
    ends_possessive,
    goes_on,
    occurrences,
)
from wvprobe.errors import (
    InputError,
    NoTokenError,
    SharedTokenError,
    SpellingError,
    TextLengthError,
    TokenizerError,
    WordError,
)

Source = Literal["offsets", "decoding"]


@dataclass(frozen=True)
class Encoding:
    """A text as the tokens that the model reads.

    Attributes:
        text: the text.
        ids: token ids, added ones (BOS, CLS, SEP, EOS) included.
        spans: the characters ``text[start:end]`` that a token stands for, without white space
            before them; None for an added token. Tokens that hold the bytes of one character
            share its span; a token of white space has an empty one.
        strings: readable tokens; bytes that are no whole character are written ``<0xE2>``.
        special: whether the tokenizer or the bridge added the token. A special token that the
            text itself spells out was not added.
        source: ``offsets`` where the tokenizer's own offsets hold; ``decoding`` where they are
            wrong or missing and the tokens, decoded one by one, were matched to the text.

    Examples:
        >>> from wvprobe.words import encode
        >>> encoding = encode(model, "The bank.")
        >>> encoding.special, encoding.spans
        ((True, False, False, False), (None, (0, 3), (4, 8), (8, 9)))
    """

    text: str
    ids: tuple[int, ...]
    spans: tuple[Span | None, ...]
    strings: tuple[str, ...]
    special: tuple[bool, ...]
    source: Source


@dataclass(frozen=True)
class WordSpan:
    """One occurrence of a word in a text.

    Attributes:
        text: the text.
        word: the word, ``text[chars[0]:chars[1]]``.
        occurrence: which of the word's occurrences, counted from 0.
        tokens: positions of the word's tokens in the sequence, added tokens counted.
        chars: start and end of the word in the text.
        strings: the word's tokens as readable strings.
        source: how the tokens' characters were found, see :class:`Encoding`.

    Examples:
        >>> wvprobe.find_word(model, "The river bank.", "bank").chars
        (10, 14)
    """

    text: str
    word: str
    occurrence: int
    tokens: tuple[int, ...]
    chars: Span
    strings: tuple[str, ...]
    source: Source


def find_word(
    model: Any, text: str, word: str, *, occurrence: int = 0, prepend_bos: bool | None = None
) -> WordSpan:
    """Find the tokens of a word in a text.

    Args:
        model: a bridge with a tokenizer.
        text: the text; never truncated.
        word: a word or a phrase as the text writes it: same case, spaces and Unicode form.
            Punctuation alone is matched as it stands. Scripts without spaces (Chinese,
            Japanese, Thai, Lao, Khmer, Burmese) do not show where words end: there, every
            place where the word stands counts.
        occurrence: which of the word's occurrences, counted from 0.
        prepend_bos: whether a BOS stands first; None for what the bridge does by default.

    Raises:
        WordError: no such whole word, or not so many of them; the message lists what is there.
        InputError: the text is empty, too long for the model, or brings its own BOS.
        TokenizerError: there is no tokenizer, or its tokens cannot be matched to the text.

    Examples:
        >>> span = wvprobe.find_word(model, "The riverbank is closed.", "riverbank")
        >>> span.tokens, span.strings
        ((2, 3, 4), (' river', 'b', 'ank'))
    """
    return locate(encode(model, text, prepend_bos=prepend_bos), word, occurrence)


def encode(model: Any, text: str, *, prepend_bos: bool | None = None) -> Encoding:
    """Tokenize a text as the bridge does, and find every token's characters.

    Args:
        model: a bridge with a tokenizer.
        text: the text; never truncated.
        prepend_bos: whether a BOS stands first; None for what the bridge does by default.

    Raises:
        InputError: the text is empty, too long for the model, or brings its own BOS.
        TokenizerError: there is no tokenizer, or its tokens cannot be matched to the text.

    Examples:
        >>> from wvprobe.words import encode
        >>> encode(model, "The river bank.").strings
        ('<s>', ' The', ' river', ' bank', '.')
    """
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise TokenizerError(
            "`model` must have a tokenizer to find words with. Got none. "
            "Use wvprobe.load(model, tokenizer=tokenizer)."
        )
    checked_text("text", text)
    prepend = bool(model.cfg.default_prepend_bos) if prepend_bos is None else prepend_bos
    # One text has no padding; "right" keeps a tokenizer that pads on the left from looking for
    # its BOS behind some.
    tokens = model.to_tokens(
        text, prepend_bos=prepend, padding_side="right", move_to_device=False, truncate=False
    )
    ids = tuple(tokens[0].tolist())
    _check_size(model, ids)
    own = _own_tokens(model, tokenizer, text, ids, prepend)
    _check_added(tokenizer, text, ids, own.start, prepend)

    read = read_tokens(tokenizer, ids)
    inner = read[own.start : own.stop]
    source: Source = "offsets"
    spans = verified_spans(text, own.offsets, inner) if own.offsets is not None else None
    if spans is None:
        source = "decoding"
        spans = matched_spans(text, inner)
    if spans is None:
        raise SpellingError(
            f"{type(tokenizer).__name__} gives wrong offsets or none, and its tokens, decoded one "
            f"by one, do not spell the text {_short(text)}. Give positions in place of words."
        )
    before, after = own.start, len(ids) - own.stop
    return Encoding(
        text,
        ids,
        (*[None] * before, *spans, *[None] * after),
        tuple(token.string for token in read),
        (True,) * before + (False,) * len(spans) + (True,) * after,
        source,
    )


def locate(encoding: Encoding, word: str, occurrence: int = 0) -> WordSpan:
    """Find the tokens of a word in an encoded text: :func:`find_word` without the tokenizer.

    Args:
        encoding: of :func:`encode`.
        word: as in :func:`find_word`.
        occurrence: likewise.

    Raises:
        WordError: no such whole word, or not so many of them; the message lists what is there.

    Examples:
        >>> from wvprobe.words import encode, locate
        >>> locate(encode(model, "A bank by a bank."), "bank", 1).tokens
        (5,)
    """
    if not isinstance(word, str) or not word or word != word.strip():
        raise WordError(message("word", "a word without white space around it", word))
    _check_encoding(encoding)
    text = encoding.text
    places = list(occurrences(text, word))
    if not places:
        expected = f"a whole word of {_short(text)}"
        raise WordError(message("word", expected, word, _near(text, word, places)))
    if not whole(occurrence) or not 0 <= occurrence < len(places):
        there = ", ".join(f"{start}..{end}" for start, end in places)
        hint = f"{word!r} occurs {len(places)} time(s) in {_short(text)}: at {there}. "
        hint += _near(text, word, places)
        expected = f"in 0..{len(places) - 1}"
        raise WordError(message("occurrence", expected, occurrence, hint.strip()))
    return _span(encoding, int(occurrence), *places[occurrence])


def word_at(encoding: Encoding, start: int, end: int) -> WordSpan:
    """Find the tokens of the whole word at ``text[start:end]``, as a labelled set marks it.

    A possessive's ending may follow the word: the mark says that it does not belong to it. Such a
    place is none of those that :func:`find_word` counts; its occurrence is 0.

    Args:
        encoding: of :func:`encode`.
        start: the word's first character in the text.
        end: the one behind its last.

    Raises:
        WordError: no whole word stands there, or its tokens stand for more than it.

    Examples:
        >>> from wvprobe.words import encode, word_at
        >>> word_at(encode(model, "The river bank."), 10, 14).tokens
        (3,)
    """
    _check_encoding(encoding)
    start, end = at_least("start", start), at_least("end", end)
    word = encoding.text[start:end]
    for occurrence, place in enumerate(occurrences(encoding.text, word) if word else ()):
        if place == (start, end):
            return _span(encoding, occurrence, start, end)
    if word and not begins_earlier(encoding.text, start) and _POSSESSIVE.match(encoding.text, end):
        return characters_at(encoding, start, end)
    where = f"the place of a whole word of {_short(encoding.text)}"
    raise WordError(message("start..end", where, f"{start}..{end} ({word!r})"))


# What a possessive puts behind a word: "seal's", "seals'".
_POSSESSIVE = re.compile(r"['’](?:[sS](?!\w)|(?!\w))")


def characters_at(encoding: Encoding, start: int, end: int) -> WordSpan:
    """Find the tokens of ``text[start:end]``, whole word or not, as a treebank cuts its text.

    For words that somebody has marked by hand, such as "n't" in "don't"; `occurrence` of the
    result counts every place where these characters stand, within other words too.

    Args:
        encoding: of :func:`encode`.
        start: the first character.
        end: the one behind the last.

    Raises:
        InputError: the characters lie outside the text, or are none but white space.
        SharedTokenError: a token stands for characters around them, too.
        NoTokenError: they have no token.

    Examples:
        >>> from wvprobe.words import characters_at, encode
        >>> characters_at(encode(model, "The riverbank."), 4, 9).strings
        (' river',)
    """
    _check_encoding(encoding)
    text = encoding.text
    inside = whole(start) and whole(end) and 0 <= start < end <= len(text)
    if not inside or text[start:end] != text[start:end].strip():
        expected = f"a place in the {len(text)} characters of {_short(text)}, no space at its ends"
        raise InputError(message("start..end", expected, f"{start}..{end}"))
    return _span(encoding, text.count(text[start:end], 0, start), start, end)


def _check_encoding(encoding: object) -> None:
    instance("encoding", encoding, Encoding, "Make one with wvprobe.words.encode(model, text).")


def _span(encoding: Encoding, occurrence: int, start: int, end: int) -> WordSpan:
    text, positions = encoding.text, _covering(encoding, start, end)
    strings = tuple(encoding.strings[position] for position in positions)
    return WordSpan(
        text, text[start:end], occurrence, positions, (start, end), strings, encoding.source
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


# --- from the bridge's ids to the text's own ---


class _Own(NamedTuple):
    """Which of the bridge's ids are the text's, and the offsets that the tokenizer claims."""

    start: int
    stop: int
    offsets: list[Span] | None


def _check_size(model: Any, ids: tuple[int, ...]) -> None:
    limit = model.cfg.n_ctx or 0
    if 0 < limit < len(ids):
        raise TextLengthError(
            f"`text` must be at most {limit} tokens long, the context of {model.cfg.model_name}. "
            f"Got {len(ids)} tokens instead. Shorten it."
        )
    # A tokenizer that is set on a bridge changes cfg.d_vocab, but not what the model embeds.
    rows = int(model.W_E.shape[0])
    if max(ids, default=0) >= rows:
        raise TokenizerError(
            f"the tokenizer gives id {max(ids)}, and {model.cfg.model_name} embeds {rows} ids. "
            "Use the tokenizer that the model was trained with."
        )


def _own_tokens(model: Any, tokenizer: Any, text: str, ids: tuple[int, ...], prepend: bool) -> _Own:
    """Find the text's own tokens among the ids; special ones may stand before and after."""
    bos, special = tokenizer.bos_token, set(tokenizer.all_special_ids)
    # The bridge writes a BOS that the tokenizer does not add before the text, which can change
    # the text's first token; it leaves out one that the vocabulary lacks.
    by_hand = prepend and bos and not model.cfg.tokenizer_prepends_bos
    for prefix in (bos, "") if by_hand else ("",):
        encoded = tokenizer(
            prefix + text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast
        )
        own = tuple(encoded["input_ids"])
        offsets = encoded["offset_mapping"] if tokenizer.is_fast else None
        if prefix:  # its token counts as added
            own = own[1:]
            offsets = offsets and [(a - len(bos), b - len(bos)) for a, b in offsets[1:]]
        for start in range(len(ids) - len(own), -1, -1):
            stop = start + len(own)
            if ids[start:stop] == own and special.issuperset(ids[:start] + ids[stop:]):
                return _Own(start, stop, offsets)
    raise SpellingError(
        f"the bridge reads {_short(text)} as ids {list(ids[:5])}..., which are not the "
        "tokenizer's own with special ones around them: a token is lost, or comes from another "
        "tokenizer. Load model and tokenizer together; end no text with a special token."
    )


def _check_added(
    tokenizer: Any, text: str, ids: tuple[int, ...], start: int, prepend: bool
) -> None:
    """Refuse two BOS, a BOS too many, a BOS too few, and a lost CLS."""
    added, bos, bos_id = ids[:start], tokenizer.bos_token, tokenizer.bos_token_id
    stale = "cfg.tokenizer_prepends_bos does not fit the tokenizer. Load both again, together."
    if len(set(added)) < len(added):
        raise TokenizerError(f"the sequence begins with two {bos!r}: {stale}")
    if ids[start : start + 1] and ids[start] in added:
        raise InputError(
            f"`text` must not begin with {tokenizer.convert_ids_to_tokens(ids[start])!r}, which "
            f"is added to it. Got {_short(text)} instead. Remove it, or pass prepend_bos=False."
        )
    if not prepend and bos_id in added:
        raise TokenizerError(f"{bos!r} is added where prepend_bos=False asks for none: {stale}")
    if added:
        return
    # A BOS that is not in the vocabulary has the unknown token's id, and cannot be prepended.
    absent = bos_id is None or (bos_id == tokenizer.unk_token_id and bos != tokenizer.unk_token)
    if prepend and not absent:
        raise TokenizerError(f"{bos!r} is missing where prepend_bos=True asks for it: {stale}")
    cls, cls_id = tokenizer.cls_token, tokenizer.cls_token_id
    if prepend and cls_id is not None:
        raise TokenizerError(
            f"{cls!r} is not added any more. A tokenizer that was wrapped once may have lost it: "
            "load the tokenizer anew."
        )
    if not prepend and cls_id is not None and tokenizer(text)["input_ids"][0] == cls_id:
        raise InputError(
            f"`prepend_bos` must be True for a tokenizer with {cls!r}. Got False instead, by which "
            f"the bridge takes away the {cls!r} that the model expects."
        )


# --- from characters to words ---


def _near(text: str, word: str, places: Sequence[Span]) -> str:
    """Say what stands in the text instead of the word, or besides it, and how to ask for it."""
    folded, origins = fold(text)
    pattern = r"\s+".join(map(re.escape, _key(word).split()))
    offers: dict[Span, str] = {}
    for match in re.finditer(f"(?=({pattern}))", folded):
        start, end = origins[match.start(1)], origins[match.end(1) - 1] + 1
        while begins_earlier(text, start) or apostrophe_within(text, start):
            start -= 1
        while goes_on(text, end) or apostrophe_within(text, end - 1):
            end += 1
        end += ends_possessive(text, end)
        if (start, end) not in places:
            offers[start, end] = _offer(text, start, end, word)
    if offers or places:
        return " ".join(offers.values())
    words = list(dict.fromkeys(re.findall(r"\w+(?:['’]\w+)*", text)))
    nearest = get_close_matches(word, words, cutoff=0.7) or words[:12]
    return f"The text has {', '.join(map(repr, nearest))}."


def _offer(text: str, start: int, end: int, word: str) -> str:
    """Name what stands at ``start..end`` by its relation to the word."""
    found, argument = text[start:end], repr(text[start:end])
    if found.casefold() == word.casefold():
        kind = "other case"
    elif _key(found) == _key(word):
        # Two Unicode forms of a word look alike when printed.
        kind, argument = "other Unicode form or spacing", f"text[{start}:{end}]"
    elif _key(re.sub("['’][sS]?$", "", found)) == _key(word):
        kind = "possessive"
    elif _key(found).startswith(_key(word)):
        kind = "longer word"
    else:
        return f"Found it inside {found!r} at {start}..{end}."
    return f"Found the {kind} {found!r} at {start}..{end}; pass word={argument}."


def _key(text: str) -> str:
    return " ".join(fold(text)[0].split())


# --- from characters to tokens ---


def _covering(encoding: Encoding, start: int, end: int) -> tuple[int, ...]:
    """Return the positions whose tokens stand for ``text[start:end]`` and nothing around it."""
    text, covering = encoding.text, []
    got = f"Got {text[start:end]!r} at {start}..{end} instead"
    for position, span in enumerate(encoding.spans):
        if span is None or span[0] == span[1] or span[1] <= start or span[0] >= end:
            continue
        around = text[span[0] : start] + text[end : span[1]]
        if around.strip():
            raise SharedTokenError(
                f"`word` must have tokens of its own. {got}, where token "
                f"{encoding.strings[position]!r} (position {position}) also stands for {around!r}. "
                f"Pass word={text[min(start, span[0]) : max(end, span[1])]!r}."
            )
        covering.append(position)
    if not covering:
        raise NoTokenError(f"`word` must have tokens. {got}, which the tokenizer leaves out.")
    return tuple(covering)
