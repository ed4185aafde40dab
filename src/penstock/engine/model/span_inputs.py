"""Model inputs of a sequence other than tokens: embeddings of spans, and shifted positions.

    enqueue ──> positions, computed on a thread of their own
        plan    ──> embeddings of the spans in the next chunk: cached, or computed by a worker
            run     ──> arguments of the model for the chunk

The engine's thread never computes embeddings. A sequence waits for them while others continue.
Embeddings stay cached after use, in the ledger; those that were computed fastest per byte are
evicted first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import mlx.core as mx

from penstock.attention import devices
from penstock.engine.request import Request
from penstock.errors import LedgerFull, PenstockError, SettingError, StepFailed
from penstock.ledger import Kind, Ledger, Reservation
from penstock.memory.sizes import format_bytes
from penstock.models.input_spans import (
    InputSpan,
    SpanEmbeddings,
    SpanPositions,
    SpanReader,
    span_reader,
)

SHARE = 16
"""Divisor of the memory limit for cached embeddings that are not in use."""
MOST_FAULTS = 64
"""Maximum number of errors stored until their request fetches them."""
WAIT_SECONDS = 0.01
NO_ARGUMENTS: Mapping[str, Any] = {}


class TokenTree(Protocol):
    ledger: Ledger

    def make_room(self, nbytes: int) -> bool:
        """Evict nodes until `nbytes` are free; return False and evict none if impossible."""


class Inputs(Protocol):
    """Model inputs for the tokens of one sequence."""

    @property
    def shift(self) -> int:
        """Position of the next token in the model minus the number of tokens before it."""

    @property
    def positioned(self) -> bool:
        """Whether `shift` is known; a worker computes it."""

    @property
    def holds(self) -> bool:
        """Whether the sequence holds embeddings, whose memory others could use."""

    def tokens(self, known: Sequence[int], start: int, end: int) -> Sequence[int]:
        """Return the tokens `start..end - 1`, replacing the placeholders in `known`."""

    def ready(self, start: int, end: int) -> bool:
        """Return whether the inputs of the tokens `start..end - 1` are ready; else request them."""

    def arguments(self, tokens: Sequence[int], start: int) -> Mapping[str, Any]: ...
    def release(self) -> None: ...


class TokenInputs:
    """Inputs of a sequence with only tokens."""

    shift = 0
    positioned = True
    holds = False

    def tokens(self, known: Sequence[int], start: int, end: int) -> Sequence[int]:
        return known[start:end]

    def ready(self, start: int, end: int) -> bool:
        return True

    def arguments(self, tokens: Sequence[int], start: int) -> Mapping[str, Any]:
        return NO_ARGUMENTS

    def release(self) -> None:
        return


TOKENS_ONLY = TokenInputs()


@dataclass(slots=True)
class _Entry:
    embeddings: SpanEmbeddings
    seconds_per_byte: float
    worth: float
    users: int = 0


@dataclass(slots=True)
class _Job:
    answer: Future[tuple[SpanEmbeddings, float]]
    reserved: Reservation


class SpanFeatures:
    """Cache of embeddings by span key. Owned by the engine's thread; a worker computes them.

    Args:
        reader: computes embeddings and positions; None if the model accepts only tokens.
        tree: prefix tree, which makes room for embeddings, and evicts them if memory is short.
    """

    def __init__(self, reader: SpanReader | None, tree: TokenTree) -> None:
        self._reader = reader
        self._tree = tree
        self._most_bytes = tree.ledger.limit_bytes // SHARE
        self._entries: dict[bytes, _Entry] = {}
        self._jobs: dict[bytes, _Job] = {}
        self._faults: dict[bytes, PenstockError] = {}
        self._evicted_worth = 0.0
        self._reserved = tree.ledger.reserve(Kind.FEATURES, 0)
        self._workers: dict[str, ThreadPoolExecutor] = {}
        self._waiting: set[Future[Any]] = set()
        self.shortage: LedgerFull | None = None
        """Latest error for lack of memory; None if there was none."""
        self.embedded = 0
        """Number of spans whose embeddings were computed."""

    # ---- of requests

    def inputs_of(self, request: Request) -> list[Inputs]:
        """Return the inputs of each answer; raises SettingError if the model supports no spans."""
        if not request.spans:
            return [TOKENS_ONLY] * request.n
        if self._reader is None:
            raise SettingError("this model accepts only tokens, and the request has other inputs")
        reader = self._reader
        positions = self._submit("positions", reader.positions, request.prompt, request.spans)
        return [SpanInputs(self, request, positions) for _ in range(request.n)]

    def _submit(self, what: str, call: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run a call on one of two threads, so that quick positions do not wait for embeddings."""
        if what not in self._workers:
            self._workers[what] = ThreadPoolExecutor(1, thread_name_prefix=f"penstock-{what}")
        answer = self._workers[what].submit(_on_own_stream, call, *args)
        self._waiting.add(answer)
        return answer

    def wait(self) -> bool:
        """Wait up to `WAIT_SECONDS` for a result; return False if none is pending."""
        if not self._waiting:
            return False
        wait(self._waiting, WAIT_SECONDS, "FIRST_COMPLETED")
        return True

    # ---- embeddings

    def take(self, span: InputSpan) -> SpanEmbeddings | None:
        """Return a span's embeddings, in use until `leave`; None while they are being computed.

        Raises:
            PenstockError: the embeddings cannot be computed.
        """
        if (fault := self._faults.pop(span.key, None)) is not None:
            raise fault
        entry = self._entries.get(span.key)
        if entry is not None:
            entry.users += 1
            entry.worth = self._evicted_worth + entry.seconds_per_byte
            return entry.embeddings
        if span.key not in self._jobs:
            self._begin(span)
        return None

    def leave(self, span: InputSpan) -> None:
        self._entries[span.key].users -= 1
        self.shrink(self.nbytes - self._most_bytes)

    def _begin(self, span: InputSpan) -> None:
        assert self._reader is not None
        kept_bytes, work_bytes = self._reader.embed_bytes(span)
        nbytes, ledger = kept_bytes + work_bytes, self._tree.ledger
        if not self._tree.make_room(nbytes):
            self.shortage = LedgerFull(
                f"an input of {span.tokens} tokens needs {format_bytes(nbytes)} to be computed; "
                f"{format_bytes(ledger.free_bytes)} of the limit of "
                f"{format_bytes(ledger.limit_bytes)} are free",
                nbytes,
                ledger.free_bytes,
                ledger.limit_bytes,
            )
            return
        reserved = ledger.reserve(Kind.FEATURES, nbytes)
        answer = self._submit("embeddings", _timed, self._reader.embed, span)
        self._jobs[span.key] = _Job(answer, reserved)

    def collect(self) -> None:
        """Cache the embeddings that the worker has finished."""
        self._waiting = {answer for answer in self._waiting if not answer.done()}
        for key, job in list(self._jobs.items()):
            if not job.answer.done():
                continue
            del self._jobs[key]
            try:
                embeddings, seconds = job.answer.result()
            # The model's code may raise anything, which must not stop the engine.
            except Exception as error:  # noqa: BLE001
                job.reserved.release()
                if len(self._faults) == MOST_FAULTS:  # the oldest request is probably gone
                    del self._faults[next(iter(self._faults))]
                self._faults[key] = _fault(error)
                continue
            nbytes = embeddings.nbytes
            job.reserved.pass_on(self._reserved, min(nbytes, job.reserved.nbytes))
            job.reserved.release()
            per_byte = seconds / max(1, nbytes)
            self._entries[key] = _Entry(embeddings, per_byte, self._evicted_worth + per_byte)
            self.embedded += 1

    # ---- memory

    @property
    def nbytes(self) -> int:
        """Bytes of the embeddings that can be evicted."""
        return sum(e.embeddings.nbytes for e in self._entries.values() if not e.users)

    def shrink(self, nbytes: int) -> int:
        """Evict the least valuable unused embeddings to free `nbytes`; return the bytes freed."""
        freed = 0
        unused = [(entry.worth, key) for key, entry in self._entries.items() if not entry.users]
        for worth, key in sorted(unused):
            if freed >= nbytes:
                break
            gone = self._entries.pop(key).embeddings.nbytes
            self._evicted_worth = max(self._evicted_worth, worth)
            self._reserved.resize(self._reserved.nbytes - gone)
            freed += gone
        return freed

    def recount(self) -> int:
        """Return the bytes of all embeddings, and those reserved for the worker."""
        kept = sum(entry.embeddings.nbytes for entry in self._entries.values())
        return kept + sum(job.reserved.nbytes for job in self._jobs.values())

    def arguments(
        self,
        tokens: Sequence[int],
        start: int,
        positions: SpanPositions,
        embedded: Sequence[tuple[InputSpan, SpanEmbeddings]],
    ) -> Mapping[str, Any]:
        assert self._reader is not None
        return self._reader.arguments(tokens, start, positions, embedded)

    def close(self) -> None:
        for answer in self._waiting:
            answer.cancel()
        for worker in self._workers.values():
            worker.submit(mx.clear_streams)
            worker.shutdown(wait=True)
        for job in self._jobs.values():
            job.reserved.release()
        self._jobs.clear()
        self._entries.clear()
        self._reserved.release()


def open_features(model: Any, tree: TokenTree, *, alone: bool) -> SpanFeatures:
    """Create the cache of a model's embeddings; with several ranks, spans are not supported."""
    return SpanFeatures(span_reader(model) if alone else None, tree)


class SpanInputs:
    """Inputs of a sequence whose prompt has spans of embeddings, such as images; see `Inputs`."""

    def __init__(
        self, features: SpanFeatures, request: Request, positions: Future[SpanPositions]
    ) -> None:
        self._features = features
        self._prompt = request.prompt
        self._spans = request.spans
        self._positions = positions
        self._held: dict[int, SpanEmbeddings] = {}  # by start of the span

    @property
    def shift(self) -> int:
        return self._positions.result().shift

    @property
    def positioned(self) -> bool:
        return self._positions.done() and self._positions.exception() is None

    @property
    def holds(self) -> bool:
        return bool(self._held)

    def tokens(self, known: Sequence[int], start: int, end: int) -> Sequence[int]:
        prompt = self._prompt[start:end]
        return [*prompt, *known[start + len(prompt) : end]]

    def ready(self, start: int, end: int) -> bool:
        for span in self._spans:
            if span.end <= start:
                self._leave(span)
        if not self._positions.done():
            return False
        if (error := self._positions.exception()) is not None:
            raise _fault(error)
        ready = True
        for span in self._spans:
            if span.overlaps(start, end) and span.start not in self._held:
                embeddings = self._features.take(span)
                if embeddings is None:
                    ready = False
                else:
                    self._held[span.start] = embeddings
        return ready

    def arguments(self, tokens: Sequence[int], start: int) -> Mapping[str, Any]:
        end = start + len(tokens)
        embedded = [(s, self._held[s.start]) for s in self._spans if s.overlaps(start, end)]
        return self._features.arguments(tokens, start, self._positions.result(), embedded)

    def release(self) -> None:
        for span in self._spans:
            self._leave(span)

    def _leave(self, span: InputSpan) -> None:
        if self._held.pop(span.start, None) is not None:
            self._features.leave(span)


def _timed(embed: Callable[[InputSpan], SpanEmbeddings], span: InputSpan) -> Any:
    started = perf_counter()
    return embed(span), perf_counter() - started


def _on_own_stream(call: Callable[..., Any], *args: Any) -> Any:
    with mx.stream(devices.default_stream()):
        return call(*args)


def _fault(error: BaseException) -> PenstockError:
    if isinstance(error, PenstockError):
        return error
    return StepFailed(f"an input cannot be computed: {type(error).__name__}: {error}")
