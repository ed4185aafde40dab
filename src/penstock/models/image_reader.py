"""`ImageReader`: the placeholders of images in a prompt, for one model's image processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ImageFile:
    """A file of bounded size whose header was read and not yet its pixels."""

    data: bytes
    format: str
    """`PNG`, `JPEG`, `GIF` or `WEBP`."""
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """Placeholder of an image in a prompt, and the source of its embeddings."""

    text: str
    """Text of the placeholder."""
    tokens: tuple[int, ...]
    """Consecutive tokens of this text whose embeddings are the image's."""
    key: bytes
    """Hash of the image and of its grid."""
    source: Any
    """Source of its embeddings; opaque to all but the model's reader."""


class ImageReader(Protocol):
    """Thread-safe."""

    marker: str
    """Text that a chat template writes for an image."""

    def place(self, image: ImageFile) -> PlacedImage:
        """Return an image's place in a prompt; ImageError if it cannot be decoded."""


class ImageError(ValueError):
    """Raised if an image cannot be decoded; the message says why."""


def image_reader(model: Any) -> ImageReader | None:
    reader: ImageReader | None = getattr(model, "image_reader", None)
    return reader
