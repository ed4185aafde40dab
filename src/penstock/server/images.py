"""Images of a request: read from content parts, inserted into the prompt, located in its tokens.

content part ──> bytes ──> header checked ──> placed by the model's reader
text of the prompt: placeholder ──> the model's text for the image
tokens ──> spans
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from penstock.models.image_reader import ImageError, ImageFile, ImageReader, PlacedImage
from penstock.models.input_spans import InputSpan
from penstock.server.problems import BadRequest
from penstock.server.prompt_memory import HOLD

IMAGE_TYPES = ("image_url", "input_image", "image")
"""Types of image parts, in OpenAI's two formats and Anthropic's."""
MOST_IMAGES = 128
"""Maximum images of a request, including its history."""
BITMAP_COPIES = 2
BITMAP_BYTES = 4
"""Maximum number of bytes of a decoded pixel."""
_NONCE = secrets.token_hex(8)
"""Random part of placeholders, so that no client's text contains one."""

FETCHED: ContextVar[dict[str, bytes | ImageError] | None] = ContextVar("fetched", default=None)
"""Files fetched for the current request, by URL; None if nothing may be fetched."""


class ImagesToFetch(Exception):
    """Raised by the reader of a prompt if images must be fetched before it is read again."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(f"{len(urls)} images")
        self.urls = urls


class PromptTokens(tuple[int, ...]):
    """Tokens of a prompt, and the spans of image tokens among them."""

    spans: tuple[InputSpan, ...] = ()

    @classmethod
    def of(cls, tokens: Sequence[int], spans: Sequence[InputSpan]) -> PromptTokens:
        prompt = cls(tokens)
        prompt.spans = tuple(spans)
        return prompt


def spans_of(prompt: Sequence[int]) -> tuple[InputSpan, ...]:
    return getattr(prompt, "spans", ())


def is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in IMAGE_TYPES


def has_images(content: Any) -> bool:
    return isinstance(content, list) and any(map(is_image, content))


def image_part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a content part with its place in the request, for error messages."""
    return {**part, "where": where}


@dataclass(slots=True)
class Images:
    """Images of one prompt, in the order in which they are read.

    Args:
        reader: image reader of the model.
    """

    reader: ImageReader
    placed: list[PlacedImage] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """URLs that must be fetched first."""

    def sign(self, part: Mapping[str, Any], where: str) -> str:
        """Read a part's image and return its placeholder; BadRequest if it cannot be read.

        Empty if the image must be fetched first.
        """
        where = str(part.get("where", where))
        if len(self.placed) + len(self.missing) >= MOST_IMAGES:
            raise BadRequest(
                f"{where}: a request has {MOST_IMAGES} images at most", param=where,
                code="too_many_images",
            )  # fmt: skip
        try:
            data = self._data(part)
            if data is None:
                return ""
            self.placed.append(self._placed(data))
        except ImageError as error:
            raise BadRequest(
                f"{where}: the image cannot be read: {error}", param=where, code="invalid_image"
            ) from None
        return sign_of(len(self.placed) - 1)

    def _data(self, part: Mapping[str, Any]) -> bytes | None:
        source = part.get("source")
        if isinstance(source, Mapping) and source.get("type") == "base64":
            return decoded(str(source.get("data")))
        url = source.get("url") if isinstance(source, Mapping) else part.get("image_url")
        if isinstance(url, Mapping):
            url = url.get("url")
        if not isinstance(url, str):
            raise ImageError("it has neither data nor a URL")
        if url.startswith("data:"):
            return data_of(url)
        if not url.startswith(("http://", "https://")):
            raise ImageError("send it as a data URL: files and file ids are not supported")
        fetched = FETCHED.get()
        if fetched is None:
            raise ImageError(
                "this server fetches no images: send it as a data URL, or start the server with "
                "--allow-remote-images"
            )
        file = fetched.get(url)
        if file is None:
            self.missing.append(url)
            return None
        if isinstance(file, ImageError):
            raise file
        return file

    def _placed(self, data: bytes) -> PlacedImage:
        file, hold = file_of(data), HOLD.get()
        if hold is None:
            return self.reader.place(file)
        hold.keep(len(data))
        before = hold.nbytes
        hold.resize(before + BITMAP_COPIES * BITMAP_BYTES * file.width * file.height)
        try:
            return self.reader.place(file)
        finally:
            hold.resize(before)

    def check_fetched(self) -> None:
        if self.missing:
            raise ImagesToFetch(self.missing)

    # ---- text

    def in_text(self, text: str) -> str:
        """Replace the placeholders by the model's text for each image."""
        for number, image in enumerate(self.placed):
            text = text.replace(sign_of(number), image.text)
        return text

    def in_markers(self, text: str) -> str | None:
        """Replace the template's markers by the images' text; None if their number differs."""
        pieces = text.split(self.reader.marker)
        if len(pieces) != len(self.placed) + 1:
            return None
        whole = [pieces[0]]
        for image, piece in zip(self.placed, pieces[1:], strict=True):
            whole += (image.text, piece)
        return "".join(whole)

    def in_parts(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
        """Replace placeholders by image parts; None if a text contains the reader's marker."""
        if any(self.reader.marker in text for m in messages for text in _texts(m)):
            return None
        return [self._in_parts(message) for message in messages]

    def _in_parts(self, message: Mapping[str, Any]) -> dict[str, Any]:
        whole = "".join(_texts(message))
        if _sign_begin() not in whole:
            return dict(message)
        parts: list[dict[str, Any]] = []
        for number in range(len(self.placed)):
            before, sign, behind = whole.partition(sign_of(number))
            if sign:
                parts += [*_text_part(before), {"type": "image"}]
                whole = behind
        return {**message, "content": [*parts, *_text_part(whole)]}

    # ---- tokens

    def spans(self, tokens: Sequence[int]) -> list[InputSpan]:
        """Locate the images in a prompt's tokens; BadRequest if one is missing."""
        known, spans, at = list(tokens), [], 0
        for image in self.placed:
            count = len(image.tokens)
            while True:
                try:
                    at = known.index(image.tokens[0], at)
                except ValueError:
                    raise BadRequest(
                        "the model's chat template drops an image: send images in user messages "
                        "or tool results",
                        param="messages",
                        code="unsupported_content",
                    ) from None
                if tuple(known[at : at + count]) == image.tokens:
                    break
                at += 1
            spans.append(InputSpan(at, count, image.key, image.source))
            at += count
        return spans


def sign_of(number: int) -> str:
    return f"{_sign_begin()}{number}\ue001"


def _sign_begin() -> str:
    return f"\ue000{_NONCE}:"


def _text_part(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [str(part.get("text", "")) for part in content or ()]


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
    r"""Read an image's format and size from its header, without decoding it.

    >>> file_of(b"GIF89a" + bytes((3, 0, 2, 0)))
    ImageFile(data=b'GIF89a\x03\x00\x02\x00', format='GIF', width=3, height=2)

    Raises:
        ImageError: the format is unsupported, or the size is above `MOST_PIXELS`.
    """
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
