"""Log-probabilities of prompt tokens: computed per chunk, cached per block.

    logits of a chunk ──score──> values, ranks, top tokens ──> PromptLogprobs of the request
                                                             └──> ScoredBlocks, by block hash

For requests with a common prefix, they are computed once: the tree caches the KV of its blocks, and
this module their log-probabilities.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from penstock.ledger import Kind, Ledger

__all__ = ["LastOutput", "PromptLogprobs", "PromptToken", "ScoredBlocks", "Scores", "score"]

PIECE_LOGITS = 2**18
"""Number of logits converted at a time, unless the vocabulary is larger."""
PIECE_BYTES = 24
"""Working memory per logit of a piece, in bytes."""
TOP_BYTES = 40
"""Working memory per top token of a piece, in addition to its logit, in bytes."""
ENTRY_BYTES = 700
"""Python overhead of one cached block, in bytes."""
SCORE_BYTES = 8
"""Bytes of one log-probability and its token id."""
SHARE = 128
"""Divisor of the memory limit for cached log-probabilities."""
MOST_BYTES = 32_000_000
"""Maximum bytes of cached log-probabilities."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Log-probabilities of tokens; row i belongs to the token after position i of a chunk."""

    values: npt.NDArray[np.float32]
    """Log-probabilities (n, 1 + top): of the token, then of the top tokens in order."""
    numbers: npt.NDArray[np.int32]
    """Rank of the token, from 1, then the ids of the top tokens, (n, 1 + top)."""

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.numbers.nbytes

    def part(self, start: int, end: int, top: int) -> Scores:
        """Return a copy of rows `start..end - 1`, with `top` top tokens."""
        rows, columns = slice(start, end), slice(1 + top)
        return Scores(self.values[rows, columns].copy(), self.numbers[rows, columns].copy())


@dataclass(frozen=True, slots=True)
class PromptToken:
    token: int
    logprob: float | None
    """Natural log-probability given the tokens before it; None for the first token."""
    rank: int
    """Number of more probable tokens, plus 1; 0 for the first token."""
    top: tuple[tuple[int, float], ...]


class PromptLogprobs:
    """Log-probabilities of one prompt's tokens, filled in during the prefill.

    Complete when the first answer (`choice` 0) emits its first event; other answers of the request
    may emit theirs earlier. Iterate to get `PromptToken`s.

    Args:
        top: number of likeliest tokens reported with each prompt token.
        start: first position whose logits are read; tokens up to it have no log-probability.
        candidates: tokens reported with each prompt token instead of the likeliest.
    """

    def __init__(
        self, tokens: Sequence[int], top: int, *, start: int = 0, candidates: Sequence[int] = ()
    ) -> None:
        self.tokens = tokens
        self.candidates = candidates
        self.top = len(candidates) or top
        self.start = start
        self.read_positions = start
        """Number of leading positions whose logits have been read or are not needed."""
        self._rows: Scores | None = None
        """Log-probabilities of all tokens; None until the first chunk, when bytes are reserved."""

    @property
    def done(self) -> bool:
        return self.read_positions >= len(self.tokens) - 1

    @property
    def cached(self) -> bool:
        """Whether the log-probabilities may be cached by block for other requests."""
        return not self.candidates

    @property
    def nbytes(self) -> int:
        return SCORE_BYTES * (len(self.tokens) - self.start) * (1 + self.top)

    def chunk_bytes(self, tokens: int, vocabulary_size: int) -> int:
        """Return the bytes of a chunk's log-probabilities, a cached copy of them, and buffers."""
        rows = max(1, PIECE_LOGITS // vocabulary_size)
        return 2 * SCORE_BYTES * tokens * (1 + self.top) + TOP_BYTES * rows * self.top

    def targets(self, start: int, end: int) -> Sequence[int]:
        """Return the tokens after the positions `start..end - 1`, up to the end of the prompt."""
        return self.tokens[start + 1 : end + 1]

    def score(self, logits: mx.array, start: int) -> Scores:
        """Return the log-probabilities of the tokens after the positions from `start` on."""
        targets = self.targets(start, start + len(logits))
        return score(logits, targets, self.top, self.candidates)

    @property
    def candidate_values(self) -> npt.NDArray[np.float32]:
        """Log-probabilities of the candidates, one row per token after `start`."""
        assert self._rows is not None and self.done
        return self._rows.values[1:, 1:]

    def add(self, start: int, scores: Scores) -> None:
        """Add the log-probabilities of the tokens after the positions from `start` on."""
        end = start + len(scores.values)
        if start > self.read_positions:
            raise AssertionError(f"no logits of positions {self.read_positions} to {start}")
        if self._rows is None:
            shape = (len(self.tokens) - self.start, 1 + self.top)
            self._rows = Scores(np.full(shape, np.nan, np.float32), np.zeros(shape, np.int32))
        rows = slice(start + 1 - self.start, end + 1 - self.start)
        self._rows.values[rows], self._rows.numbers[rows] = scores.values, scores.numbers
        self.read_positions = max(self.read_positions, end)

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[PromptToken]:
        for position, token in enumerate(self.tokens):
            row = position - self.start
            if row <= 0 or self._rows is None or np.isnan(self._rows.values[row, 0]):
                yield PromptToken(token, None, 0, ())
                continue
            values, numbers = self._rows.values[row].tolist(), self._rows.numbers[row].tolist()
            top = tuple(zip(numbers[1:], values[1:], strict=True))
            yield PromptToken(token, values[0], numbers[0], top)


class LastOutput(PromptLogprobs):
    """Output of a model without a head after the last token but one, as float32."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens, 0, start=len(tokens) - 2)
        self.values: npt.NDArray[np.float32] | None = None
        """Output (width,); None until it is computed."""

    @property
    def cached(self) -> bool:
        return False

    def score(self, logits: mx.array, start: int) -> Scores:
        """Return the last row as it is."""
        values = np.array(logits[-1:].astype(mx.float32))
        return Scores(values, np.zeros((1, 0), np.int32))

    def add(self, start: int, scores: Scores) -> None:
        self.values = scores.values[0]
        self.read_positions = start + 1


class BlockTree(Protocol):
    ledger: Ledger
    block_size: int

    def make_room(self, nbytes: int) -> bool:
        """Evict nodes until `nbytes` are free; return False and evict none if impossible."""


class ScoredBlocks:
    """LRU cache of log-probabilities by block hash and next token.

    The key includes the next token, because the last row of a block is its log-probability. Not
    thread-safe: owned by the engine's thread.

    Args:
        prefixes: prefix tree, which makes room for the cache, and shrinks it if memory is short.
    """

    def __init__(self, prefixes: BlockTree, limit_bytes: int) -> None:
        self.version = 0
        """Number of blocks added since the start."""
        self._prefixes = prefixes
        self._most_bytes = min(limit_bytes // SHARE, MOST_BYTES)
        self._blocks: OrderedDict[tuple[bytes, int], Scores] = OrderedDict()
        self._reserved = prefixes.ledger.reserve(Kind.PROMPTS, 0)

    @property
    def nbytes(self) -> int:
        return self._reserved.nbytes

    def fill(self, logprobs: PromptLogprobs, block_hashes: Sequence[bytes]) -> None:
        """Fill in the cached log-probabilities of the next blocks of a prompt."""
        size, tokens = self._prefixes.block_size, logprobs.tokens
        while logprobs.cached and not logprobs.done:
            start = logprobs.read_positions
            block = start // size
            if start % size or block >= len(block_hashes) or start + size >= len(tokens):
                return
            name = (block_hashes[block], tokens[start + size])
            scores = self._blocks.get(name)
            if scores is None or scores.values.shape[1] <= logprobs.top:
                return
            self._blocks.move_to_end(name)
            logprobs.add(start, scores.part(0, size, logprobs.top))

    def remember(
        self, logprobs: PromptLogprobs, start: int, scores: Scores, block_hashes: Sequence[bytes]
    ) -> None:
        """Cache the log-probabilities of a chunk's whole blocks, if memory allows."""
        size, tokens, top = self._prefixes.block_size, logprobs.tokens, logprobs.top
        if not logprobs.cached:
            return
        end = start + len(scores.values)
        for block in range(-(-start // size), min(end // size, len(block_hashes))):
            first = block * size
            if first + size >= len(tokens):
                return
            part = scores.part(first - start, first - start + size, top)
            self._put((block_hashes[block], tokens[first + size]), part)

    def shrink(self, nbytes: int) -> int:
        """Evict the oldest entries until `nbytes` are free; return the bytes freed."""
        before = self.nbytes
        while self._blocks and before - self.nbytes < nbytes:
            self._forget(next(iter(self._blocks)))
        return before - self.nbytes

    def recount(self) -> int:
        return sum(scores.nbytes + ENTRY_BYTES for scores in self._blocks.values())

    def _put(self, name: tuple[bytes, int], scores: Scores) -> None:
        known = self._blocks.get(name)
        if known is not None:
            if known.values.shape[1] >= scores.values.shape[1]:
                return
            self._forget(name)
        nbytes = scores.nbytes + ENTRY_BYTES
        if nbytes > self._most_bytes:
            return
        self.shrink(self.nbytes + nbytes - self._most_bytes)
        if self._prefixes.make_room(nbytes):
            self._reserved.resize(self.nbytes + nbytes)
            self._blocks[name] = scores
            self.version += 1

    def _forget(self, name: tuple[bytes, int]) -> None:
        scores = self._blocks.pop(name)
        self._reserved.resize(self.nbytes - scores.nbytes - ENTRY_BYTES)


def score(
    logits: mx.array, targets: Sequence[int], top: int, candidates: Sequence[int] = ()
) -> Scores:
    """Return the log-probabilities of tokens under the model's unmodified distribution.

    Each row also has those of `candidates` or, if empty, of the `top` likeliest tokens.
    """
    count, size = len(targets), logits.shape[-1]
    top = len(candidates) or min(top, size)
    values = np.empty((count, 1 + top), np.float32)
    numbers = np.empty((count, 1 + top), np.int32)
    rows = max(1, PIECE_LOGITS // size)
    for start in range(0, count, rows):
        end = min(count, start + rows)
        values[start:end], numbers[start:end] = _score_piece(
            logits[start:end], targets[start:end], top, candidates
        )
    return Scores(values, numbers)


def _score_piece(
    logits: mx.array, targets: Sequence[int], top: int, candidates: Sequence[int]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
    logits32 = logits.astype(mx.float32)
    logprobs = logits32 - mx.logsumexp(logits32, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(logprobs, mx.array(list(targets), mx.uint32)[:, None], axis=-1)
    ranks = (logprobs > chosen).astype(mx.int32).sum(axis=-1, keepdims=True) + 1
    mx.eval(chosen, ranks)
    if candidates:
        asked = logprobs[:, mx.array(list(candidates), mx.uint32)]
        numbers = np.broadcast_to(np.array(candidates, np.int32), asked.shape)
        return (
            np.hstack((np.array(chosen), np.array(asked))),
            np.hstack((np.array(ranks, np.int32), numbers)),
        )
    if not top:
        return np.array(chosen), np.array(ranks, np.int32)
    likeliest = mx.argpartition(-logprobs, kth=top - 1, axis=-1)[:, :top]
    best = mx.take_along_axis(logprobs, likeliest, axis=-1)
    mx.eval(likeliest, best)
    tokens, values = np.array(likeliest).astype(np.int32), np.array(best)
    order = np.lexsort((tokens, -values), axis=-1)
    return (
        np.hstack((np.array(chosen), np.take_along_axis(values, order, axis=-1))),
        np.hstack((np.array(ranks, np.int32), np.take_along_axis(tokens, order, axis=-1))),
    )
