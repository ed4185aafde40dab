"""Detokenization of byte-level tokens, with a fix for byte 0, which mlx-lm leaves as U+0100.

A byte-level vocabulary maps each byte to one character: printable bytes to themselves, the others,
starting with byte 0, to characters from U+0100 on.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, AnyStr, overload

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


class TokenTexts(Sequence[AnyStr]):
    """Immutable list of `str` or `bytes`, stored as one `bytes` and the end of each text.

    mlx-lm's detokenizers keep an object for every token: 16 MiB for 262,144 tokens, not 3 MiB.
    """

    def __init__(self, texts: Sequence[AnyStr]) -> None:
        """Take texts that are all `str` or all `bytes`."""
        whole, ends = bytearray(), array("I", [0])
        self._decodes = all(isinstance(text, str) for text in texts)
        for text in texts:
            whole += text if isinstance(text, bytes) else text.encode(errors="surrogatepass")
            ends.append(len(whole))
        self._all, self._ends = bytes(whole), ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, index: int) -> AnyStr: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[AnyStr]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        text = self._all[self._ends[place] : self._ends[place + 1]]
        return text.decode(errors="surrogatepass") if self._decodes else text


def compact(detokenizer: Any) -> None:
    """Replace the texts that a streaming detokenizer of mlx-lm holds, if it holds any, in place."""
    texts = getattr(detokenizer, "tokenmap", None)
    if isinstance(texts, list) and {type(text) for text in texts} in ({str}, {bytes}):
        detokenizer.tokenmap = TokenTexts(texts)
