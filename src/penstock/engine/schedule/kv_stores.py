"""KV stores of an engine: prefix tree, tail pool, retentions and cold tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from penstock.engine.counters import Counters
from penstock.engine.model.figures import ModelFigures
from penstock.engine.model.prompt_logprobs import ScoredBlocks
from penstock.engine.retention.retention import Path, Retention, RunningPath
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.states import RecurrentState
from penstock.kv.tails import Tails
from penstock.prefix.node import Node
from penstock.prefix.pin import Pin
from penstock.prefix.prefixes import Prefixes

_R = TypeVar("_R", bound=Retention)


class Tiers(Protocol):
    def note(
        self, block_hashes: Items[bytes], root: bytes, first: int, *, seen: bool = False
    ) -> None: ...

    def note_end(self, block_hashes: Items[bytes], root: bytes) -> None: ...

    def note_checkpoint(
        self, block_hashes: Items[bytes], root: bytes, *, answered: bool = False
    ) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStores:
    """The engine's stores of KV, shared by all sequences."""

    prefixes: Prefixes[Segment]
    retentions: tuple[Retention, ...]
    """Kinds of state that layers resume from, besides plain keys and values."""
    tiers: Tiers
    scored: ScoredBlocks
    tails: Tails
    figures: ModelFigures
    counters: Counters = field(default_factory=Counters)
    shared_tokens: int
    """Number of leading tokens whose KV can be shared: up to `max_kv_size`, in whole blocks."""
    span_tokens: Callable[[int], int] = lambda block_size: block_size
    """Function from block size to the number of tokens merged into one segment."""

    def of(self, kind: type[_R]) -> _R | None:
        """Return the retention of a kind; None if the engine has none."""
        return next(iter(self.all_of(kind)), None)

    def all_of(self, kind: type[_R]) -> list[_R]:
        return [part for part in self.retentions if isinstance(part, kind)]

    @property
    def block_size(self) -> int:
        return self.prefixes.block_size

    @property
    def by_block(self) -> bool:
        """Whether prompts are prefilled block by block."""
        return self.shared_tokens > 0 and any(part.reads_blocks for part in self.retentions)

    @property
    def whole_blocks(self) -> bool:
        """Whether prefill chunks must end at block boundaries."""
        return self.by_block or self.figures.whole or not self.resumes_inside

    @property
    def commit_tokens(self) -> int:
        """Number of tokens committed together during decoding."""
        single = any(part.ends_blocks for part in self.retentions)
        return self.block_size if single else self.span_tokens(self.block_size)

    @property
    def resumes_inside(self) -> bool:
        """Whether a sequence can resume inside a block."""
        return all(part.resumes_inside for part in self.retentions)

    @property
    def spills(self) -> bool:
        """Whether KV of running sequences can be spilled to a cold tier."""
        return any(part.spills for part in self.retentions)

    def own_bytes(self, spans: Iterable[KVSpan]) -> int:
        """Return the bytes of sequences' own spans, except leaves of the tree."""
        nbytes_by_id = {id(span.segment.layers): span.segment.nbytes for span in spans}
        for node in self.prefixes.tree:
            if node.partial:
                nbytes_by_id.pop(id(node.segment.layers), None)
        return sum(nbytes_by_id.values())

    def resume(self, path: Path, max_kv_tokens: int) -> tuple[int, RecurrentState | None]:
        """Return the last position where all layers can resume, and the recurrent states there."""
        position = limit = max_kv_tokens
        while True:
            for part in self.retentions:
                position = part.resume(path, position)
            if position in (0, limit):
                break
            limit = position
        states = (part.state(path, position) for part in self.retentions)
        return position, next((state for state in states if state is not None), None)

    def complete(self, path: Path, limit: int) -> int:
        """Return the last position of a path, up to a limit, before which no KV is missing."""
        for part in self.retentions:
            limit = part.complete(path, limit)
        return limit

    def readable_tokens(self, tokens: int) -> int:
        """Return the maximum number of a sequence's tokens that can be read from the cache."""
        last = max(0, tokens - 1)
        return last // self.block_size * self.block_size if self.by_block else last

    def matched(self, block_hashes: Items[bytes]) -> int:
        """Return the number of cached leading tokens of a chain of block hashes."""
        return self.prefixes.match(block_hashes).tokens

    def explain(
        self, tokens: Items[int], block_hashes: Items[bytes], salt: str = ""
    ) -> tuple[int | None, str]:
        """Return the position at which a prompt could resume, and the reason why it is not later.

        The position is None if all cached tokens except the prompt's last can be reused.

        Args:
            block_hashes: hashes of the prompt's whole blocks.
        """
        match = self.prefixes.match(block_hashes)
        cached = min(match.tokens, max(0, len(tokens) - 1))
        readable = min(cached, self.readable_tokens(len(tokens)))
        blocks = match.tokens // self.block_size
        root = block_hashes[blocks - 1] if blocks else self.prefixes.root(salt)
        leaf = self.prefixes.find_partial(match, root, tokens[match.tokens : len(tokens) - 1])
        if leaf is not None and self.resume((*match.path, leaf), leaf.end)[0] == leaf.end:
            return leaf.end if self.figures.is_recurrent else None, ""
        resumes, _ = self.resume(match.path, readable)
        whole = self.complete(match.path, readable)
        if whole == cached and not self.figures.is_recurrent:
            return None, ""
        return resumes, _resume_reason(match.tokens, cached, readable, whole, resumes)

    def coded(self, segment: Segment, start: int) -> Segment:
        """Return whole blocks in the format that later tokens attend to, such as quantized."""
        coded = segment
        try:
            for part in self.retentions:
                coded = part.committed(coded, start)
        except (MemoryError, RuntimeError):
            self.counters.out_of_memory += 1
            return segment
        return coded

    def cut_tail(self, slot: int, stop: int, start: int, before: Segment | None = None) -> Segment:
        """Copy the first `stop` columns of a slot, and append them to `before` if given.

        Args:
            slot: slot of the pool.
            stop: number of columns.
            start: position of the result's first token.
            before: the tokens before the columns.
        """
        if not self.figures.index_token_bytes:
            return self.tails.cut(slot, stop, before)
        tail_start = start + (0 if before is None else before.tokens)
        tail = self.computed(self.tails.cut(slot, stop), tail_start)
        return tail if before is None else self.computed(before, start).join(tail)

    def computed(self, segment: Segment, start: int) -> Segment:
        for part in self.retentions:
            segment = part.computed(segment, start)
        return segment

    def attached(self, path: Path) -> None:
        for part in self.retentions:
            part.attached(path)

    def fill(
        self, pin: Pin[Segment], block_hashes: Items[bytes], segment: Segment, start: int
    ) -> bool:
        return all(part.fill(pin, block_hashes, segment, start) for part in self.retentions)

    def completed(self, segment: Segment, state: RecurrentState) -> tuple[Segment, RecurrentState]:
        for part in self.retentions:
            segment, state = part.completed(segment, state)
        return segment, state

    def ended(self, segment: Segment, state: RecurrentState | None) -> Segment | None:
        """Return the end of a sequence with the state needed to resume; None if impossible."""
        end: Segment | None = segment
        for part in self.retentions:
            end = None if end is None else part.ended(end, state)
        return end

    def capture(self, path: Path, position: int, state: RecurrentState, *, turn_end: bool) -> None:
        for part in self.retentions:
            part.capture(path, position, state, turn_end=turn_end)

    def spill(self, readers: Iterable[RunningPath], *, wait: bool = False) -> None:
        paths = list(readers)
        for part in self.retentions:
            part.spill(paths, wait=wait)

    def changed(self) -> None:
        for part in self.retentions:
            part.changed()

    def tidy(self, node: Node[Segment] | None) -> None:
        """Merge small nodes of a path that a sequence no longer reads; failures are harmless."""
        try:
            self.prefixes.tidy(node)
        except (MemoryError, RuntimeError):  # MLX is out of memory
            self.counters.out_of_memory += 1

    def close(self) -> None:
        self.tiers.close()
        for part in self.retentions:
            part.release()
        self.prefixes.clear()
        self.tails.drop()

    def shrink_after(self, error: Exception) -> bool:
        """Evict half of the evictable bytes if MLX ran out of memory; return whether it did."""
        if not out_of_memory(error):
            return False
        self.counters.out_of_memory += 1
        self.prefixes.shrink(max(1, self.prefixes.evictable_bytes // 2), "pressure")
        return True


def out_of_memory(error: Exception) -> bool:
    """Return whether an error is a failed allocation of MLX; messages differ by back end."""
    text = str(error).lower()
    words = ("malloc", "unable to allocate", "out of memory", "bad_alloc", "attempting to allocate")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )


def _resume_reason(
    cached: int, before_last: int, readable: int, complete: int, resumes: int
) -> str:
    """Return the reason why a prompt can resume no later than at `resumes`."""
    why = ""
    if readable < before_last:
        why = (
            f". Tokens from {readable:,} on are recomputed: with kv_cache_quantize_when "
            f"active the block of a prompt's last token is attended to unquantized"
        )
    if complete < readable:
        why += (
            f". Sliding-window layers can resume only at token {complete:,} of the {cached:,} "
            f"cached: under memory pressure their KV was evicted except at conversation ends and "
            f"branch points. Recomputing it caches it again"
        )
    if resumes < complete:
        why += (
            f". Recurrent layers can resume only at token {resumes:,} of the {cached:,} cached, "
            f"their deepest checkpoint: checkpoints are kept at the ends of turns and chunks, "
            f"fewer of the earlier ones"
        )
    return why
