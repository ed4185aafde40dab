"""Stores of keys and values that outlive a sequence, and the questions to several of them."""

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
    """The cold tiers of an engine, as the writer of a sequence's KV sees them."""

    def note(
        self, block_hashes: Items[bytes], root: bytes, first: int, *, seen: bool = False
    ) -> None:
        """Take note of new blocks in the tree; see `TierGroup.note`."""

    def note_end(self, block_hashes: Items[bytes], root: bytes) -> None:
        """Take note of the end of a conversation."""

    def note_checkpoint(
        self, block_hashes: Items[bytes], root: bytes, *, answered: bool = False
    ) -> None:
        """Take note of a checkpoint behind the last block of a chain."""

    def close(self) -> None:
        """Write pending records as long as there is time, and close."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStores:
    """All parts of an engine that hold KV."""

    prefixes: Prefixes[Segment]
    retentions: tuple[Retention, ...]
    """Kinds of state that layers resume from, beside plain keys and values."""
    tiers: Tiers
    scored: ScoredBlocks
    """Scores of the tokens of prompts, by block."""
    tails: Tails
    figures: ModelFigures
    counters: Counters = field(default_factory=Counters)
    shared_tokens: int
    """Position up to which KV depends on the tokens alone, not on the window; a multiple of the
    block size."""
    span_tokens: Callable[[int], int] = lambda block_size: block_size
    """Tokens of the blocks that make one part to read together, by the size of a block."""

    def of(self, kind: type[_R]) -> _R | None:
        """Return the retention of a kind; None if the engine does without."""
        return next(iter(self.all_of(kind)), None)

    def all_of(self, kind: type[_R]) -> list[_R]:
        """Return the retentions of a kind."""
        return [part for part in self.retentions if isinstance(part, kind)]

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.prefixes.block_size

    @property
    def by_block(self) -> bool:
        """Whether prompts are read block by block.

        Later blocks then read a block as codes; its own tokens read it as it was computed.
        """
        return self.shared_tokens > 0 and any(part.reads_blocks for part in self.retentions)

    @property
    def whole_blocks(self) -> bool:
        """Whether a chunk of a prompt may not end inside a block."""
        return self.by_block or self.figures.whole or not self.resumes_inside

    @property
    def commit_tokens(self) -> int:
        """Tokens that are committed together while decoding.

        Several blocks make one part to read where no block's end needs work of its own.
        """
        single = any(part.ends_blocks for part in self.retentions)
        return self.block_size if single else self.span_tokens(self.block_size)

    @property
    def resumes_inside(self) -> bool:
        """Whether a sequence can resume inside a block."""
        return all(part.resumes_inside for part in self.retentions)

    @property
    def spills(self) -> bool:
        """Whether keys and values of running sequences leave memory."""
        return any(part.spills for part in self.retentions)

    def own_bytes(self, spans: Iterable[KVSpan]) -> int:
        """Return the bytes of sequences' own spans, but those that are a leaf of the tree, too.

        What several sequences resumed from counts once, also when its leaf has been evicted.
        """
        nbytes_by_id = {id(span.segment.layers): span.segment.nbytes for span in spans}
        for node in self.prefixes.tree:
            if node.partial:
                nbytes_by_id.pop(id(node.segment.layers), None)
        return sum(nbytes_by_id.values())

    def resume(self, path: Path, max_kv_tokens: int) -> tuple[int, RecurrentState | None]:
        """Return the last position of a path at which a sequence can resume, and its states.

        All windows in front of it are complete, and all recurrent layers have states there.

        Args:
            path: nodes from the root on.
            max_kv_tokens: the position is no later than this.
        """
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
        """Return how many of a sequence's first `tokens` can be read from the cache at most.

        The last token is always computed, for its logits; read block by block, so is its block.
        """
        last = max(0, tokens - 1)
        return last // self.block_size * self.block_size if self.by_block else last

    def matched(self, block_hashes: Items[bytes]) -> int:
        """Return how many first tokens of a chain are cached."""
        return self.prefixes.match(block_hashes).tokens

    def explain(
        self, tokens: Items[int], block_hashes: Items[bytes], salt: str = ""
    ) -> tuple[int | None, str]:
        """Return the position at which a prompt could resume, and why no later one.

        None if that is the end of the cached tokens, but for the last token of the prompt.

        Args:
            tokens: the prompt.
            block_hashes: those of its whole blocks.
            salt: the tenant's.
        """
        match = self.prefixes.match(block_hashes)
        cached = min(match.tokens, max(0, len(tokens) - 1))
        most = min(cached, self.readable_tokens(len(tokens)))
        blocks = match.tokens // self.block_size
        root = block_hashes[blocks - 1] if blocks else self.prefixes.root(salt)
        leaf = self.prefixes.find_partial(match, root, tokens[match.tokens : len(tokens) - 1])
        if leaf is not None and self.resume((*match.path, leaf), leaf.end)[0] == leaf.end:
            return leaf.end if self.figures.is_recurrent else None, ""
        resumes, _ = self.resume(match.path, most)
        whole = self.complete(match.path, most)
        if whole == cached and not self.figures.is_recurrent:
            return None, ""
        return resumes, _resume_reason(match.tokens, cached, most, whole, resumes)

    def coded(self, segment: Segment, start: int) -> Segment:
        """Return whole blocks in the form in which later blocks read them.

        The form does not depend on the tree's room. They stay raw if MLX found no room for codes.
        """
        coded = segment
        try:
            for part in self.retentions:
                coded = part.committed(coded, start)
        except (MemoryError, RuntimeError):
            self.counters.out_of_memory += 1
            return segment
        return coded

    def cut_tail(self, slot: int, stop: int, start: int, behind: Segment | None = None) -> Segment:
        """Copy the first columns of a slot of the pool, behind a segment if there is one.

        Args:
            slot: of the sequence.
            stop: columns to copy.
            start: position of the first of them, or of the segment.
            behind: what they come behind.
        """
        if not self.figures.index_token_bytes:
            return self.tails.cut(slot, stop, behind)
        own = start + (0 if behind is None else behind.tokens)
        tail = self.computed(self.tails.cut(slot, stop), own)
        return tail if behind is None else self.computed(behind, start).join(tail)

    def computed(self, segment: Segment, start: int) -> Segment:
        """Return computed KV with what is kept beside it."""
        for part in self.retentions:
            segment = part.computed(segment, start)
        return segment

    def attached(self, path: Path) -> None:
        """Prepare a path that a sequence reads from now on."""
        for part in self.retentions:
            part.attached(path)

    def fill(
        self, pin: Pin[Segment], block_hashes: Items[bytes], segment: Segment, start: int
    ) -> bool:
        """Copy KV from whole blocks to the nodes that lack it; False without room."""
        return all(part.fill(pin, block_hashes, segment, start) for part in self.retentions)

    def completed(self, segment: Segment, state: RecurrentState) -> tuple[Segment, RecurrentState]:
        """Move what states hold for a block that is full into its segment; return both."""
        for part in self.retentions:
            segment, state = part.completed(segment, state)
        return segment, state

    def ended(self, segment: Segment, state: RecurrentState | None) -> Segment | None:
        """Return the end of a sequence as it can be resumed from; None if it cannot be."""
        end: Segment | None = segment
        for part in self.retentions:
            end = None if end is None else part.ended(end, state)
        return end

    def capture(self, path: Path, position: int, state: RecurrentState, *, turn_end: bool) -> None:
        """Keep a sequence's recurrent states at a boundary of its path, if there is room."""
        for part in self.retentions:
            part.capture(path, position, state, turn_end=turn_end)

    def spill(self, readers: Iterable[RunningPath], *, wait: bool = False) -> None:
        """Let KV leave memory that lies far behind the end of all its readers."""
        paths = list(readers)
        for part in self.retentions:
            part.spill(paths, wait=wait)

    def changed(self) -> None:
        """Note that nodes have come, or are no longer read."""
        for part in self.retentions:
            part.changed()

    def tidy(self, node: Node[Segment] | None) -> None:
        """Merge small nodes of a path that a sequence has left; a failure loses nothing."""
        try:
            self.prefixes.tidy(node)
        except (MemoryError, RuntimeError):  # MLX found no room for the copy
            self.counters.out_of_memory += 1

    def close(self) -> None:
        """Free all KV that is not read; tiers write their pending blocks if there is time."""
        self.tiers.close()
        for part in self.retentions:
            part.release()
        self.prefixes.clear()
        self.tails.drop()

    def shrink_after(self, error: Exception) -> bool:
        """Evict half of the cold nodes if MLX ran out of memory; tell whether it did."""
        if not out_of_memory(error):
            return False
        self.counters.out_of_memory += 1
        self.prefixes.shrink(max(1, self.prefixes.evictable_bytes // 2), "pressure")
        return True


def out_of_memory(error: Exception) -> bool:
    """Tell whether MLX could not allocate; each back end says so in its own words."""
    text = str(error).lower()
    words = ("malloc", "unable to allocate", "out of memory", "bad_alloc", "attempting to allocate")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(word in text for word in words)
    )


def _resume_reason(held: int, cached: int, readable: int, complete: int, resumes: int) -> str:
    """Return why a prompt can resume no later than at some position.

    Args:
        held: cached tokens of the prompt.
        cached: of these, all but the prompt's last token.
        readable: of these, those that are read as they lie.
        complete: of these, those behind which all windows are complete.
        resumes: the position.
    """
    why = ""
    if readable < cached:
        why = (
            f". The tokens from {readable:,} on are computed again: with kv_cache_quantize_when "
            f"active the block of a prompt's last token is read as it was computed"
        )
    if complete < readable:
        why += (
            f". Sliding-window layers can resume only at token {complete:,} of the {held:,} "
            f"cached: under memory pressure their KV was evicted except at conversation ends and "
            f"branch points. Computing it again caches it again"
        )
    if resumes < complete:
        why += (
            f". Recurrent layers can resume only at token {resumes:,} of the {held:,} cached, "
            f"their deepest checkpoint: checkpoints lie at the ends of turns and chunks, and fewer "
            f"further back"
        )
    return why
