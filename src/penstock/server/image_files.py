r"""Image files: format and size, read from the header without decoding.

>>> file_of(b"GIF89a" + bytes((3, 0, 2, 0)))
ImageFile(data=b'GIF89a\x03\x00\x02\x00', format='GIF', width=3, height=2)
"""

from __future__ import annotations

import base64
import binascii

from penstock.models.image_reader import ImageError, ImageFile

MOST_PIXELS = 40_000_000
"""Maximum number of pixels of an image; a screenshot of 7,680 by 4,320 has 33 million."""
FORMATS = "PNG, JPEG, GIF and WebP"
_FRAMES = frozenset({*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC})
"""JPEG markers of frame headers, which contain the size."""


def data_of(url: str) -> bytes:
    """Decode a base64 `data:` URL; ImageError if it is malformed.

    >>> data_of("data:image/png;base64,aGk=")
    b'hi'
    """
    head, comma, body = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        raise ImageError("a data URL begins with data:image/png;base64, or another format")
    return decoded(body)


def decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"it is not base64: {error}") from None


def file_of(data: bytes) -> ImageFile:
    """Read an image's format and size; ImageError if unsupported or above `MOST_PIXELS`."""
    header = _size(data)
    if header is None:
        raise ImageError(f"it is not in a supported format; these are {FORMATS}")
    form, width, height = header
    if width < 1 or height < 1:
        raise ImageError(f"it has {width} by {height} pixels")
    if width * height > MOST_PIXELS:
        raise ImageError(
            f"it has {width:,} by {height:,} pixels; the maximum is {MOST_PIXELS:,}: scale it down"
        )
    return ImageFile(data, form, width, height)


def _size(data: bytes) -> tuple[str, int, int] | None:
    if data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR" and len(data) >= 24:
        return "PNG", _big(data[16:20]), _big(data[20:24])
    if data[:6] in (b"GIF87a", b"GIF89a") and len(data) >= 10:
        return "GIF", _little(data[6:8]), _little(data[8:10])
    if data[:3] == b"\xff\xd8\xff":
        return _jpeg_size(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP" and len(data) >= 30:
        return _webp_size(data)
    return None


def _jpeg_size(data: bytes) -> tuple[str, int, int] | None:
    place = 2
    while place + 9 <= len(data) and data[place] == 0xFF:
        marker = data[place + 1]
        if marker == 0xFF:  # filler
            place += 1
            continue
        if marker in _FRAMES:
            return "JPEG", _big(data[place + 7 : place + 9]), _big(data[place + 5 : place + 7])
        length = _big(data[place + 2 : place + 4])
        if length < 2 or marker == 0xDA:
            return None
        place += 2 + length
    return None


def _webp_size(data: bytes) -> tuple[str, int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X":
        return "WEBP", 1 + _little(data[24:27]), 1 + _little(data[27:30])
    if kind == b"VP8 " and data[23:26] == b"\x9d\x01\x2a":
        return "WEBP", _little(data[26:28]) & 0x3FFF, _little(data[28:30]) & 0x3FFF
    if kind == b"VP8L" and data[20] == 0x2F:
        bits = _little(data[21:25])
        return "WEBP", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return None


def _big(raw: bytes) -> int:
    return int.from_bytes(raw, "big")


def _little(raw: bytes) -> int:
    return int.from_bytes(raw, "little")
