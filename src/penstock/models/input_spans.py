"""Spans of a prompt whose embeddings are not computed from token ids, such as images.

A model with such spans has a `SpanReader`. The engine knows only a span's position and key. The key
becomes part of the block hashes; the embeddings are computed when the span is prefilled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

KEY_BYTES = 32
LEAD_TOKENS = 4
"""Number of tokens before a span that its key also replaces, so that a block that contains any
token of the span has at least five words (150 bits) of the key."""
FIRST_WORD = 1 << 30
"""Smallest word of a key: larger than any token id; all words are below 2^31."""
_MIX = 2_654_435_761
"""Odd multiplier of token ids, so that different tokens give different words."""


@dataclass(frozen=True, slots=True)
class InputSpan:
    """Consecutive tokens of a prompt that are placeholders for one source, such as an image."""

    start: int
    tokens: int
    key: bytes
    """Hash of everything but the model that the embeddings depend on."""
    source: Any
    """Data from which the model's `SpanReader` computes the embeddings; opaque to others."""

    @property
    def end(self) -> int:
        return self.start + self.tokens

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end


@dataclass(frozen=True, slots=True)
class SpanEmbeddings:
    """Evaluated embeddings of a span's tokens, and additional inputs of the first layers."""

    rows: mx.array
    """Embeddings, (tokens, dim)."""
    deep: tuple[mx.array, ...] = ()
    """Arrays added to the hidden states of the first layers, (marked tokens, dim) each."""
    marked: npt.NDArray[np.bool_] | None = None
    """Mask of the tokens that `deep` applies to, (tokens,); None without `deep`."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.rows, *self.deep))


@dataclass(frozen=True, slots=True)
class SpanPositions:
    """RoPE positions of a prompt's tokens."""

    prompt: npt.NDArray[np.int32] | None
    """Positions, (axes, tokens); None if they are 0 .. tokens - 1."""
    shift: int = 0
    """Position of the first token after the prompt, minus the length of the prompt."""


class SpanReader(Protocol):
    """Model-specific handling of spans; `embed` and `positions` may run in another thread."""

    def embed_bytes(self, span: InputSpan) -> tuple[int, int]:
        """Return upper bounds in bytes of a span's embeddings, and of computing them."""

    def embed(self, span: InputSpan) -> SpanEmbeddings: ...
    def positions(self, prompt: Sequence[int], spans: Sequence[InputSpan]) -> SpanPositions: ...

    def arguments(
        self,
        tokens: Sequence[int],
        start: int,
        positions: SpanPositions,
        embedded: Sequence[tuple[InputSpan, SpanEmbeddings]],
    ) -> Mapping[str, Any]:
        """Return additional keyword arguments of the model for a chunk that begins at `start`."""

    def step_arguments(self, positions: Sequence[int], width: int) -> Mapping[str, Any]:
        """Return additional keyword arguments for a decode step, given each row's position."""


def span_reader(model: Any) -> SpanReader | None:
    """Return a model's `SpanReader`; None if all of its inputs are tokens."""
    reader: SpanReader | None = getattr(model, "span_reader", None)
    return reader


def with_keys(prompt: tuple[int, ...], spans: Sequence[InputSpan]) -> tuple[int, ...]:
    """Return a prompt with the tokens of spans replaced by words of their keys.

    These words are matched and hashed like tokens, in memory, on disk and in sessions. A word
    depends on the key, the position within the span, and the token.

    >>> span = InputSpan(2, 3, b"key", None)
    >>> with_keys((7, 7, 9, 9, 9, 7), ()), with_keys((7, 7, 9, 9, 9, 7), [span])[5:]
    ((7, 7, 9, 9, 9, 7), (7,))
    """
    if not spans:
        return prompt
    words = np.array(prompt, np.uint64)
    for span in spans:
        first = max(0, span.start - LEAD_TOKENS)
        stream = _words(span.key, LEAD_TOKENS + span.tokens)[LEAD_TOKENS - (span.start - first) :]
        own = words[first : span.end]
        mixed = (own * _MIX & 0xFFFF_FFFF) ^ stream
        words[first : span.end] = FIRST_WORD | (mixed & (FIRST_WORD - 1))
    return tuple(words.tolist())


def _words(key: bytes, count: int) -> npt.NDArray[np.uint64]:
    pieces = range(-(-count // 16))
    raw = b"".join(blake2b(key + piece.to_bytes(4, "little")).digest() for piece in pieces)
    return np.frombuffer(raw, "<u4")[:count].astype(np.uint64)
