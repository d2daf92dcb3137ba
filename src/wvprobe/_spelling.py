"""What tokens spell: their strings, and the characters of a text that each stands for."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Any, NamedTuple

Span = tuple[int, int]

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Byte-level vocabularies write a byte as its character where that is printable, and the others,
# in order, as the characters from 256 on.
_PRINTABLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_OTHERS = (byte for byte in range(256) if byte not in _PRINTABLE)
_BYTES = {chr(256 + rank): byte for rank, byte in enumerate(_OTHERS)}


class Token(NamedTuple):
    """A token as a string; `raw` holds its bytes where they are no whole characters."""

    string: str
    raw: bytes | None
    unknown: bool


def read_tokens(tokenizer: Any, ids: Sequence[int]) -> list[Token]:
    """Return what each token id reads as."""
    pieces = tokenizer.convert_ids_to_tokens(list(ids))
    decoded = tokenizer.batch_decode(
        [[i] for i in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    unknown = tokenizer.unk_token_id
    return [
        Token(*_readable(piece, string), i == unknown)
        for i, piece, string in zip(ids, pieces, decoded, strict=True)
    ]


def _readable(piece: str, decoded: str) -> tuple[str, bytes | None]:
    """Return a token's string, and its bytes where they are no whole characters."""
    if decoded and "\ufffd" not in decoded:
        # Some decoders drop the space before a text, hence that of a token on its own.
        lost = piece.startswith("▁") and not decoded[0].isspace()
        return (" " + decoded if lost else decoded), None
    if not piece.strip("▁"):
        return " " * len(piece), None
    byte = _BYTE_PIECE.fullmatch(piece)
    try:
        raw = bytes([int(byte[1], 16)] if byte else [_BYTES.get(c, ord(c)) for c in piece])
    except ValueError:  # a character that stands for no byte
        return decoded or piece, None
    try:
        return raw.decode(), None
    except UnicodeDecodeError:
        shown = [chr(b) if 32 <= b < 127 else f"<0x{b:02X}>" for b in raw]
        return "".join(shown), raw


def verified_spans(
    text: str, offsets: Sequence[Span], tokens: Sequence[Token]
) -> list[Span] | None:
    """Return the tokenizer's offsets as spans, or None where they cannot be right."""
    spans, last = [], (0, 0)
    for (start, end), token in zip(offsets, tokens, strict=True):
        piece = text[start:end]
        ordered = last[0] <= start <= end and last[1] <= end <= len(text)
        if not (ordered and _agree(token, piece)):
            return None
        last = (start, end)
        if not token.string.strip():
            # The space that metaspace tokenizers put before a text has the offsets of its first
            # letter, which it does not stand for.
            start = end = start if piece.strip() else end
        spans.append((end - len(text[start:end].lstrip()), end))
    return spans


def _agree(token: Token, piece: str) -> bool:
    """Whether a token can stand for a piece of text, up to case, accents and punctuation."""
    if not (token.string.strip() and piece.strip()):
        return not token.string.strip()
    if token.unknown or token.string.strip() == piece.strip():
        return True
    if token.raw is not None:
        return not piece.isascii()
    return _skeleton(token.string) == _skeleton(piece)


def _skeleton(string: str) -> str:
    return "".join(c for c in fold(string)[0] if c.isalnum())


def fold(text: str) -> tuple[str, list[int]]:
    """Return the text without case and compatibility forms, and each character's origin."""
    parts = [unicodedata.normalize("NFKD", c).casefold() for c in text]
    origins = [index for index, part in enumerate(parts) for _ in part]
    return "".join(parts), origins


def matched_spans(text: str, tokens: Sequence[Token]) -> list[Span] | None:
    """Match the tokens' strings to the text, in order and to its end; None where they differ.

    Each token is taken as it decodes alone, and with its neighbours only where they share the
    bytes of a character: what decoders do to sentences (spaces removed, "do not" made "don't")
    stays out.
    """
    folded, origins = fold(text)
    spans: list[Span] = []
    sharing: list[Token] = []
    at = 0
    for token in tokens:
        sharing.append(token)
        string = token.string
        if sharing[0].raw is not None:
            try:
                string = b"".join(t.raw or t.string.encode() for t in sharing).decode()
            except UnicodeDecodeError:
                continue
        if not string.strip():
            edge = origins[at] if at < len(origins) else len(text)
            spans += [(edge, edge)] * len(sharing)
        else:
            while token.unknown and at < len(folded) and _droppable(folded[at]):
                at += 1
            unknown = _UNKNOWN.match(folded, at) if token.unknown else None
            stretch = unknown.span() if unknown else _stretch(folded, at, string)
            if stretch is None and string.startswith("##"):  # WordPiece: a word continued
                stretch = _stretch(folded, at, string[2:])
            if stretch is None:
                return None
            start, at = stretch
            while unknown and at < len(origins) and origins[at] == origins[at - 1]:
                at += 1  # to the end of a character that was folded into several
            spans += [(origins[start], origins[at - 1] + 1)] * len(sharing)
        sharing = []
    return None if sharing or not all(map(_droppable, folded[at:])) else spans


# An unknown token stands for a word or a mark; where not for this one, what follows will differ.
_UNKNOWN = re.compile(r"\w+|\S")


def _stretch(folded: str, at: int, string: str) -> Span | None:
    """Return where in `folded`, from `at` on, a token's string stands next."""
    start = None
    for character in "".join(fold(string)[0].split()):
        while at < len(folded) and folded[at] != character and _droppable(folded[at]):
            at += 1
        if folded[at : at + 1] != character:
            return None
        start = at if start is None else start
        at += 1
    return None if start is None else (start, at)


def _droppable(character: str) -> bool:
    """Whether tokenizers may leave it out: white space, accents, control characters."""
    return character.isspace() or unicodedata.category(character) in ("Mn", "Me", "Cc", "Cf")
