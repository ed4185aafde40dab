"""Detokenization of byte-level tokens, with a fix for byte 0, which mlx-lm leaves as U+0100.

A byte-level vocabulary maps each byte to one character: printable bytes to themselves, the others,
starting with byte 0, to characters from U+0100 on.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Pattern of the token of a single byte in vocabularies that are not byte-level."""
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def detokenizer_of(tokenizer: Any) -> Any:
    """Return a tokenizer's streaming detokenizer (mlx-lm's), fixed for byte 0."""
    detokenizer = tokenizer.detokenizer
    if type(detokenizer).__name__ == "BPEStreamingDetokenizer":
        detokenizer._decode_bytes = _text  # of this instance only
    return detokenizer


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """Return the bytes of a token, which may be part of a character; None if unknown."""
    piece = tokenizer.convert_ids_to_tokens(token)
    if not isinstance(piece, str):
        return None
    if fallback := _FALLBACK.fullmatch(piece):
        return bytes([int(fallback[1], 16)])
    if "\ufffd" in piece:  # the character U+FFFD itself
        return piece.encode()
    known = [_bytes().get(sign) for sign in piece]
    return b"".join(byte for byte in known if byte is not None) if all(known) else None


@cache
def _bytes() -> dict[str, bytes]:
    signs = {chr(byte): bytes([byte]) for byte in _PRINTABLE}
    others = [byte for byte in range(0x100) if byte not in _PRINTABLE]
    return signs | {chr(0x100 + index): bytes([byte]) for index, byte in enumerate(others)}


def _text(signs: str) -> str:
    known = _bytes()
    return b"".join(known.get(sign) or sign.encode() for sign in signs).decode(errors="replace")
