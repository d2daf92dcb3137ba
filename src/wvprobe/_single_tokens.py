"""Texts that are single tokens, and tokens as texts, from the tokenizer alone."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from wvprobe._spelling import read_tokens
from wvprobe._validate import index, message
from wvprobe.errors import InputError, TokenizerError, WordError

# Entries that vocabularies keep free: [unused12], <unused7>, <|reserved_special_token_5|>.
_SPARE = re.compile(r"[\[<]\|?(?:unused|reserved)\w*\|?[\]>]", re.IGNORECASE)
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def spell(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return each token as a readable string: its leading space kept, bytes as ``<0xE2>``.

    Without a tokenizer, and beyond its vocabulary, a token reads as ``#`` and its id.
    """
    known = [i for i in ids if tokenizer is not None and i < len(tokenizer)]
    strings = {
        i: token.string
        for i, token in zip(known, read_tokens(tokenizer, known) if known else (), strict=True)
    }
    return [strings.get(i, f"#{i}") for i in ids]


def set_apart(tokenizer: Any, size: int) -> set[int]:
    """Return which of `size` ids are no token of text.

    These are the tokenizer's special tokens, entries it keeps free ("[unused3]"), and ids beyond
    its vocabulary, which some models embed to round a size up. Without a tokenizer: none.
    """
    if tokenizer is None:
        return set()
    apart = set(tokenizer.all_special_ids)
    apart |= {i for i, added in tokenizer.added_tokens_decoder.items() if added.special}
    pieces = tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer)))))
    # Some tokenizers mark the bytes that they fall back on as special, but text is made of them.
    apart -= {i for i, piece in enumerate(pieces) if piece is not None and _BYTE.fullmatch(piece)}
    apart |= {i for i, piece in enumerate(pieces) if piece is None or _SPARE.fullmatch(piece)}
    return {i for i in apart if i < size} | set(range(len(tokenizer), size))


def token_id(tokenizer: Any, token: object, size: int, name: str = "token") -> int:
    """Return the id of a text that is exactly one token, or check an id.

    Args:
        tokenizer: the tokenizer.
        token: the token as :func:`spell` writes it, leading space included, or its id.
        size: number of tokens that the model has.
        name: the argument's name, for messages.

    Raises:
        WordError: no single token reads so; the message gives the tokens of the text and the
            single tokens near it.
        TokenizerError: a text without a tokenizer.
        InputError: an id out of range.
    """
    if not isinstance(token, str):
        return index(name, token, size, "tokens")
    if tokenizer is None:
        raise TokenizerError(
            f"`{name}` must be a token's id where there is no tokenizer. Got {token!r} instead. "
            "Pass the id, or HeadWeights with a tokenizer."
        )
    parts = _parts(tokenizer, token)
    if len(parts) == 1 and parts[0] < size and spell(tokenizer, parts) == [token]:
        return parts[0]
    table = _table(tokenizer, size)
    found = _reading(tokenizer, table.get(token, []))
    if len(found) == 1:
        return found[0]
    if found:
        hint = f"Several tokens read so: pass one of the ids {', '.join(map(str, found))}."
    else:
        hint = f"It is the tokens {_listed(spell(tokenizer, parts))}. {_near(token, table)}"
    raise WordError(message(name, "one token, or an id", token, hint))


def word_ids(
    tokenizer: Any, words: Iterable[str | int], size: int
) -> tuple[list[int], tuple[str, ...]]:
    """Return the ids of the words that are single tokens, ascending, and the other words.

    A word without a leading space stands for itself and for itself behind a space, whichever of
    the two are tokens; one with a leading space for that alone. Ids are taken as they are.

    Raises:
        WordError: none of the words is a single token.
    """
    if isinstance(words, str) or not isinstance(words, Iterable):
        raise InputError(message("words", "a list of words or token ids", words))
    given = list(words)
    if any(isinstance(word, str) for word in given) and tokenizer is None:
        raise TokenizerError(
            "`words` must be token ids where there is no tokenizer. Got strings instead. "
            "Pass ids, or HeadWeights with a tokenizer."
        )
    table = _table(tokenizer, size) if tokenizer is not None else {}
    ids: set[int] = set()
    skipped = []
    for number, word in enumerate(given):
        if not isinstance(word, str):
            ids.add(index(f"words[{number}]", word, size, "tokens"))
            continue
        forms = (word,) if word[:1].isspace() else (word, f" {word}")
        found = [i for form in forms for i in _reading(tokenizer, table.get(form, []))]
        ids.update(found)
        if not found:
            skipped.append(word)
    if not ids:
        near = _near(skipped[0], table) if skipped else ""
        raise WordError(message("words", "words of which some are single tokens", given, near))
    return sorted(ids), tuple(skipped)


def _parts(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _table(tokenizer: Any, size: int) -> dict[str, list[int]]:
    """Return which ids read as each string."""
    table: dict[str, list[int]] = {}
    for i, string in enumerate(spell(tokenizer, range(min(size, len(tokenizer))))):
        table.setdefault(string, []).append(i)
    return table


def _reading(tokenizer: Any, ids: list[int]) -> list[int]:
    """Leave out the byte pieces where another token reads the same, as "A" beside <0x41>."""
    if len(ids) < 2:
        return ids
    pieces = tokenizer.convert_ids_to_tokens(ids)
    return [i for i, piece in zip(ids, pieces, strict=True) if not _BYTE.fullmatch(piece)] or ids


def _listed(strings: Sequence[str]) -> str:
    return ", ".join(map(repr, strings))


def _near(text: str, table: dict[str, list[int]]) -> str:
    """Name single tokens near a text: first those that differ by a space or by case alone."""
    bare = text.strip().casefold()
    same = [string for string in table if string.strip().casefold() == bare and bare]
    near = same or get_close_matches(text, list(table), n=4, cutoff=0.7)
    return f"Single tokens near it: {_listed(near[:6])}." if near else ""
