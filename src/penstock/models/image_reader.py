"""`ImageReader`: interface of a model's image processor, which makes placeholders in prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file of bounded size whose header was read, but not its pixels."""

    data: bytes
    format: str
    """`PNG`, `JPEG`, `GIF` or `WEBP`."""
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """Placeholder of an image in a prompt, with the source of its embeddings."""

    text: str
    """Text of the placeholder."""
    tokens: tuple[int, ...]
    """Consecutive tokens of `text` whose embeddings are replaced by those of the image."""
    key: bytes
    """Hash of the image and of the grid it is resized to."""
    source: Any
    """Data from which the model's `SpanReader` computes the embeddings; opaque to others."""


class ImageReader(Protocol):
    """Interface of a model's image processor. Thread-safe."""

    marker: str
    """Text with which a chat template marks an image."""

    def place(self, image: ImageFile) -> PlacedImage:
        """Return the placeholder of an image; raise ImageError if it cannot be decoded."""


class ImageError(ValueError):
    """An image cannot be decoded; the message has the reason."""


def image_reader(model: Any) -> ImageReader | None:
    reader: ImageReader | None = getattr(model, "image_reader", None)
    return reader
