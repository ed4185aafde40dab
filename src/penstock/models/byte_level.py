"""Text of byte-level tokens, with byte 0: mlx-lm's detokenizer writes its sign, U+0100.

A byte-level vocabulary writes each byte as one sign: printable ones as themselves, the others, the
first of them byte 0, as the signs from U+0100 on.
"""

from __future__ import annotations

from functools import cache
from typing import Any

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def detokenizer_of(tokenizer: Any) -> Any:
    """Return mlx-lm's streaming detokenizer of a tokenizer, which then knows byte 0 as well."""
    detokenizer = tokenizer.detokenizer
    if type(detokenizer).__name__ == "BPEStreamingDetokenizer":
        detokenizer._decode_bytes = _text  # of this copy alone
    return detokenizer


@cache
def _bytes() -> dict[str, bytes]:
    """Return the bytes by their signs."""
    signs = {chr(byte): bytes([byte]) for byte in _PRINTABLE}
    others = [byte for byte in range(0x100) if byte not in _PRINTABLE]
    return signs | {chr(0x100 + at): bytes([byte]) for at, byte in enumerate(others)}


def _text(signs: str) -> str:
    known = _bytes()
    return b"".join(known.get(sign) or sign.encode() for sign in signs).decode(errors="replace")
