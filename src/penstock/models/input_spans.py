"""Spans of a prompt whose embeddings the model computes from something else than token ids.

A model with such spans has a `SpanReader`. The engine knows a span by its place and its key: the
key becomes part of the block hashes, and the embeddings are asked for when the span is computed.
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
"""Number of tokens in front of a span that carry its key, too: no block hash covers fewer than five
words of the key, which have 150 bits, wherever a block ends."""
FIRST_WORD = 1 << 30
"""Smallest word of a key: larger than any token, and its double fits into 32 bits."""
_MIX = 2_654_435_761
"""Odd number by which tokens are multiplied, so that words keep the differences between them."""


@dataclass(frozen=True, slots=True)
class InputSpan:
    """Consecutive tokens of a prompt that stand for one source, such as an image."""

    start: int
    tokens: int
    key: bytes
    """Hash of everything that the embeddings depend on, besides the model."""
    source: Any
    """Source of the embeddings; opaque to all but the model's reader."""

    @property
    def end(self) -> int:
        return self.start + self.tokens

    def overlaps(self, start: int, end: int) -> bool:
        return self.start < end and start < self.end


@dataclass(frozen=True, slots=True)
class SpanEmbeddings:
    """Evaluated embeddings of a span's tokens, and what further layers add to them."""

    rows: mx.array
    """(tokens, width)."""
    deep: tuple[mx.array, ...] = ()
    """Summands of the first layers, (marked tokens, width) each."""
    marked: npt.NDArray[np.bool_] | None = None
    """Tokens that have summands, (tokens,); None if none has."""

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in (self.rows, *self.deep))


@dataclass(frozen=True, slots=True)
class SpanPositions:
    """Positions of a prompt's tokens as the model rotates them."""

    prompt: npt.NDArray[np.int32] | None
    """(axes, tokens); None if they are the numbers of the tokens before."""
    shift: int = 0
    """Position of the first token behind the prompt, less the number of tokens before it."""


class SpanReader(Protocol):
    """A model's side of spans. `embed` and `positions` may run in a thread of their own."""

    def embed_bytes(self, span: InputSpan) -> tuple[int, int]:
        """Return upper bounds in bytes of a span's embeddings, and of what computing them takes."""

    def embed(self, span: InputSpan) -> SpanEmbeddings: ...
    def positions(self, prompt: Sequence[int], spans: Sequence[InputSpan]) -> SpanPositions: ...

    def arguments(
        self,
        tokens: Sequence[int],
        start: int,
        positions: SpanPositions,
        embedded: Sequence[tuple[InputSpan, SpanEmbeddings]],
    ) -> Mapping[str, Any]:
        """Return further arguments of the model for a chunk that begins at `start`."""

    def step_arguments(self, positions: Sequence[int], width: int) -> Mapping[str, Any]:
        """Return further arguments for a decode step of rows that begin at these positions."""


def span_reader(model: Any) -> SpanReader | None:
    """Return the reader of a model's spans; None if all of its inputs are tokens."""
    reader: SpanReader | None = getattr(model, "span_reader", None)
    return reader


def with_keys(prompt: tuple[int, ...], spans: Sequence[InputSpan]) -> tuple[int, ...]:
    """Return a prompt with words of the spans' keys in the places of their tokens.

    KV is found by these words as by tokens, in memory, on disk and in sessions. The words depend on
    the key, the place within the span and the token.

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
