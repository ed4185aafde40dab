"""Replacement of lone surrogates, sent by clients that cut a text inside an emoji.

JSON allows lone surrogates but tokenizers do not: each becomes U+FFFD.
"""

from __future__ import annotations

import re

_ESCAPE = r"\\(?:u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|u([dD][89a-fA-F]\w\w)|.)"
_TEXT = re.compile(_ESCAPE, re.DOTALL)
_BODY = re.compile(_ESCAPE.encode() + rb"|\xed[\xa0-\xbf][\x80-\xbf]", re.DOTALL)


def whole_pairs(text: str) -> str:
    r"""Replace lone surrogates in JSON text.

    >>> print(whole_pairs(r'"cut \ud83d, whole \ud83e\udd8a, none \\ud83d"'))
    "cut \ufffd, whole \ud83e\udd8a, none \\ud83d"
    """
    if "\\u" not in text:
        return text
    return _TEXT.sub(lambda match: r"\ufffd" if match[1] else match[0], text)


def whole_pairs_in(body: bytes) -> bytes:
    """Replace lone surrogates in a JSON body, whether escaped or encoded."""
    if b"\\ud" not in body and b"\\uD" not in body and b"\xed" not in body:
        return body

    def replaced(match: re.Match[bytes]) -> bytes:
        if match[0].startswith(b"\xed"):
            return "\ufffd".encode()
        return rb"\ufffd" if match[1] else match[0]

    return _BODY.sub(replaced, body)
