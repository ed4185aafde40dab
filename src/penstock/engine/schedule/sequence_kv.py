"""KV of one sequence: a pinned path of the prefix tree, own spans, and a tail.

    admit    ──> attach: pin the cached path up to where every layer can resume
        wait     ──> extend: reuse blocks that other sequences have committed meanwhile
        prefill  ──> append_chunk: commit whole blocks, keep the rest as a partial block
        decode   ──> append_tokens: move a full tail to a span, commit full blocks
        restore  ──> splice: insert blocks read from a tier
        end      ──> keep_end: commit whole blocks, cache the partial block as a leaf ──> detach

A full block is committed at once, together with the states at its end, so that other sequences can
share it. A block that cannot be committed, because memory is full or the window has passed, stays
in the sequence's own spans. New blocks of the tree are queued to be written to the tiers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from penstock.engine.model.prompt_logprobs import PromptLogprobs
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.partial_blocks import PartialBlock
from penstock.kv.segment import KVSpan, Segment
from penstock.kv.states import RecurrentState, States
from penstock.ledger import Kind, Reservation
from penstock.prefix.node import Match, Node
from penstock.prefix.pin import Pin


class SequenceKV:
    """KV of one sequence, and its only writer. Not thread-safe: owned by the engine's thread.

    The KV of a sequence consists of three consecutive parts: the first `num_cached_tokens` of the
    pinned path, its `own_spans`, and `tail` columns of its slot in the pool. The last two are
    freed when the sequence leaves the batch.

    Args:
        tokens: prompt and generated tokens; the caller appends to it.
        block_hashes: hashes of the whole blocks of `tokens` that may be shared.
        hold_tokens: number of leading tokens to evict last for a while; 0 means none.
        hold_seconds: duration of the hold.
        transient: whether to evict the blocks at the end, and write them to tiers only if spilled.
        prompt_logprobs: log-probabilities of the prompt to fill in; None if not requested.
    """

    def __init__(
        self,
        stores: KVStores,
        tokens: list[int],
        block_hashes: list[bytes],
        *,
        salt: str = "",
        hold_tokens: int = 0,
        hold_seconds: float | None = None,
        transient: bool = False,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        self.tokens = tokens
        self.block_hashes = block_hashes
        self.pin: Pin[Segment] | None = None
        self.num_cached_tokens = 0
        self.matched_tokens = 0
        """Length of the cached prefix at admission: a branch point for other sequences."""
        self.transient = transient
        self.prompt_logprobs = prompt_logprobs
        self._matched_version: tuple[int, int] | None = None
        """`_version` at the last lookup of all blocks; None before."""
        self._stores = stores
        self._size = stores.block_size
        self._salt = salt
        self._hold_tokens = hold_tokens
        self._hold_seconds = hold_seconds
        self.own_spans: list[KVSpan] = []
        self.slot: int | None = None
        self.tail = 0
        self.recurrent_state: RecurrentState | None = None
        """State of the recurrent layers at `position`; None at 0 or without such layers."""
        self.reservation: Reservation | None = None
        """Bytes of own spans and of tokens still to compute; set by the memory budget."""
        self._partial_block = PartialBlock(stores)

    # ---- questions

    @property
    def node(self) -> Node[Segment] | None:
        """Deepest node of the pinned path; None without one."""
        return None if self.pin is None else self.pin.node

    @property
    def free_columns(self) -> int:
        """Number of tokens that fit into the tail and the current block."""
        in_block = self._size - self.position % self._size
        return min(self._stores.tails.columns - self.tail, in_block)

    @property
    def last_boundary(self) -> int:
        """End of the last whole block before the last token."""
        return (len(self.tokens) - 1) // self._size * self._size

    @property
    def readable_tokens(self) -> int:
        """Maximum number of tokens that may be read from the cache."""
        readable = self._stores.readable_tokens(len(self.tokens))
        logprobs = self.prompt_logprobs
        if logprobs is None:
            return readable
        self._stores.scored.fill(logprobs, self.block_hashes)
        if logprobs.done:
            return readable
        return min(readable, self._unread_from // self._size * self._size)

    @property
    def _unread_from(self) -> int:
        """Number of leading tokens whose logits are no longer needed."""
        logprobs = self.prompt_logprobs
        if logprobs is None or logprobs.done:
            return len(self.tokens) - 1
        return logprobs.read_positions

    @property
    def reachable_tokens(self) -> int:
        """Number of cached tokens from which the sequence could resume now."""
        match = self._stores.prefixes.match(self.block_hashes)
        resumed, _ = self._stores.resume(match.path, min(match.tokens, self.readable_tokens))
        return resumed

    @property
    def _version(self) -> tuple[int, int]:
        """Versions of the data on which the readable length of the path depends."""
        scored = 0 if self.prompt_logprobs is None else self._stores.scored.version
        return self._stores.prefixes.tree.version, scored

    def cached_spans(self) -> list[KVSpan]:
        """Return the spans of the path that the sequence reads, in order."""
        path, cached = self.pin.path if self.pin is not None else (), self.num_cached_tokens
        return [
            KVSpan(node.segment, node.start, min(len(node.tokens), cached - node.start))
            for node in path
            if node.start < cached
        ]

    def _root_at(self, position: int) -> bytes:
        """Return the hash of the block that ends at a position, or the root hash."""
        blocks = position // self._size
        return self.block_hashes[blocks - 1] if blocks else self._stores.prefixes.root(self._salt)

    def _holds_next(self) -> bool:
        """Return whether the path contains the next token as well.

        This is the last token of a fully cached prompt, computed only for its logits.
        """
        block, node = self.num_cached_tokens // self._size, self.node
        if node is None or node.end <= self.num_cached_tokens or block >= len(self.block_hashes):
            return False
        next_hash = node.block_hashes[block - node.start // self._size]
        return bool(next_hash == self.block_hashes[block])

    @property
    def committed_end(self) -> int:
        """Number of tokens before the tail."""
        return self.own_spans[-1].end if self.own_spans else self.num_cached_tokens

    @property
    def position(self) -> int:
        return self.committed_end + self.tail

    @property
    def resumed_tokens(self) -> int:
        """Number of tokens in the resumed partial block; 0 after further tokens were computed."""
        spans = self.own_spans
        if self.tail or len(spans) != 1 or spans[0].start != self.num_cached_tokens:
            return 0
        return spans[0].columns if spans[0].columns < self._size else 0

    @property
    def _diverged(self) -> bool:
        """Whether the sequence has computed KV outside the tree."""
        return bool(self.own_spans) and not self.resumed_tokens

    def block_hash_at(self, position: int) -> bytes | None:
        """Return the hash of the block at a position; None if the block cannot be shared."""
        blocks = position // self._size
        if self._diverged or blocks >= len(self.block_hashes):
            return None
        return self.block_hashes[blocks]

    def spans(self) -> tuple[KVSpan, ...]:
        return (*self.cached_spans(), *self.own_spans)

    def check(self) -> None:
        """Raise AssertionError if a window layer lacks visible KV, or if bytes are not reserved."""
        if self.pin is not None:
            for part in self._stores.retentions:
                part.check(self.pin.path, self.num_cached_tokens, self.position)
        span_bytes = sum(span.segment.nbytes for span in self.own_spans)
        if self.reservation is None and (span_bytes or self.slot is not None or self.pin):
            raise AssertionError("a sequence has KV that is not reserved")
        if self.reservation is not None and span_bytes > self.reservation.nbytes:
            raise AssertionError(
                f"a sequence holds {span_bytes} bytes of {self.reservation.nbytes}"
            )

    # ---- attach and detach

    def attach(self, block_hashes: list[bytes] | None = None) -> int:
        """Pin the cached path of the sequence's blocks, and return the number of cached tokens.

        The path is read up to the last position at which every layer can resume. A partial block
        after it becomes an own span.

        Args:
            block_hashes: blocks to look up; None means all.
        """
        stores = self._stores
        match = stores.prefixes.match(self.block_hashes if block_hashes is None else block_hashes)
        readable = self.readable_tokens
        limit = min(match.tokens, readable)
        resumed, self.recurrent_state = stores.resume(match.path, limit)
        self._pin(match, resumed, whole=block_hashes is None)
        if block_hashes is None and self._unread_from > match.tokens:
            self._resume_partial(match)
        return self.position

    def undo_attach(self) -> None:
        self._release()
        self.own_spans.clear()
        self._partial_block.forget()
        self.recurrent_state = None

    def take_slot(self) -> None:
        self.slot = self._stores.tails.take_slot()
        self._partial_block.use()

    def wipe_slot(self) -> None:
        """Zero the tail's slot, whose columns may contain NaN."""
        if self.slot is not None:
            self._stores.tails.wipe(self.slot)

    def detach(self) -> None:
        self.own_spans.clear()
        self.tail = 0
        self.recurrent_state = None
        self._partial_block.forget()
        if self.slot is not None:
            self._stores.tails.give_back(self.slot)
            self.slot = None
        self._stores.changed()
        self._hold()
        self._release()

    # ---- append

    def extend(self) -> int:
        """Reuse blocks that other sequences have committed; return the number of tokens gained.

        Stops at the last position at which every layer can resume.
        """
        prefilled = len(self.tokens) - 1 <= self.position
        if self._diverged or prefilled or self.pin is None:
            return 0
        cached_blocks = self.num_cached_tokens // self._size
        blocks = self._follow_others()
        if blocks <= cached_blocks:
            return 0
        limit = min(blocks * self._size, self.readable_tokens)
        resumed, recurrent_state = self._stores.resume(self.pin.path, limit)
        if resumed <= self.position:
            return 0
        gained = resumed - self.position
        self.drop_partial()
        self._read_to(resumed)
        self.recurrent_state = recurrent_state
        return gained

    def drop_partial(self) -> int:
        """Release the resumed partial block; return its number of tokens.

        The caller must have the states of an earlier position, or no recurrent layers.
        """
        tokens = self.resumed_tokens
        if tokens:
            self.own_spans.clear()
            self._partial_block.forget()
        return tokens

    def append_tokens(
        self, written: int, accepted: int, recurrent_state: RecurrentState | None = None
    ) -> None:
        """Make the first `accepted` of the `written` columns after the tail visible.

        The rejected columns are overwritten by the next step.

        Args:
            written: number of columns that the step wrote.
            accepted: number of accepted tokens, at most `written`.
            recurrent_state: states after the accepted tokens; None if unknown or without recurrent
                layers.
        """
        if not 0 <= accepted <= written:
            raise ValueError(f"{accepted} tokens accepted of {written} written")
        self.recurrent_state = recurrent_state
        for _ in range(accepted):
            if not self.own_spans and self.tail == 0 and self._holds_next():
                # The last token of a fully cached prompt: computed only for its logits.
                self._read_to(self.num_cached_tokens + 1)
                continue
            self.tail += 1
            if self.tail == self._stores.tails.columns or self.position % self._size == 0:
                self._fold()

    def append_chunk(self, segment: Segment, states: States | None = None) -> None:
        """Append a prefilled chunk: commit its whole blocks, and keep the rest as a partial block.

        Args:
            segment: KV of the tokens from `position` on.
            states: states after them; None without recurrent layers.
        """
        if states is not None:
            self.recurrent_state = RecurrentState(states, exclusive=True)
        self._place_chunk(segment)
        prefilled = len(self.tokens) - 1 == self.position
        if (self._stores.by_block or prefilled) and self.pin is not None:
            self._stores.tidy(self.pin.node)  # merges the nodes of small chunks

    def commit_again(self) -> bool:
        """Commit whole blocks that did not fit into the tree before; return whether none remain."""
        if not self._can_commit:
            return True
        self._commit_spans()
        return not self._can_commit

    @property
    def _can_commit(self) -> bool:
        """Whether the first own span consists of whole blocks that could be in the tree."""
        span = self.own_spans[0] if self.own_spans else None
        return (
            span is not None
            and span.start == self.num_cached_tokens
            and span.end % self._size == 0
            and span.end <= self._stores.shared_tokens
        )

    def splice(self, segment: Segment) -> bool:
        """Insert whole blocks after the cached tokens into the tree; False if out of memory."""
        assert self.reservation is not None
        index = self._reserved_index(segment)
        self.spare(index)  # the tree reserves it itself
        before, start = self.reservation.nbytes, self.num_cached_tokens
        if not self._insert(segment, self.reservation):
            self.reservation.resize(before + index)
            return False
        # Release the bytes of blocks that others had committed; the tree took over the rest.
        moved = before - self.reservation.nbytes
        restored = self.num_cached_tokens - start
        self.spare(restored * self._stores.figures.held_token_bytes - moved)
        self._index_path()
        return True

    def _reserved_index(self, segment: Segment) -> int:
        """Return the reserved bytes that are meant for a segment's nodes in the tree."""
        if not self._stores.spills or self.reservation is None:
            return 0
        index = self._stores.prefixes.index_bytes(segment.tokens // self._size)
        return max(0, min(index, self.reservation.nbytes - segment.nbytes))

    def resume(self) -> int:
        """Truncate the cached tokens to where every layer can resume; return their number."""
        assert self.pin is not None
        limit = min(self.num_cached_tokens, self.readable_tokens)
        resumed, self.recurrent_state = self._stores.resume(self.pin.path, limit)
        self._read_to(resumed)
        return resumed

    def spare(self, nbytes: int) -> None:
        assert self.reservation is not None
        self.reservation.resize(max(0, self.reservation.nbytes - nbytes))

    # ---- states, and ends

    def capture(self, *, turn_end: bool = False) -> None:
        """Checkpoint the recurrent states if the path ends at a block boundary."""
        if self.recurrent_state is None:
            return
        at_end = self.position == self.num_cached_tokens
        if at_end and self.num_cached_tokens % self._size == 0:
            self._capture(self.num_cached_tokens, self.recurrent_state, turn_end=turn_end)
            if turn_end and self.pin is not None:
                self._note_checkpoint(self.num_cached_tokens)

    def capture_restored(self, position: int, states: States) -> None:
        self._capture(position, RecurrentState(states, exclusive=True), turn_end=True)

    def _capture(self, position: int, state: RecurrentState, *, turn_end: bool) -> None:
        if self.pin is not None:
            self._stores.capture(self.pin.path, position, state, turn_end=turn_end)

    def end_prompt(self) -> None:
        """Retain the windows at the prompt's last block boundary, if the prompt is prefilled."""
        last, prefilled = self.last_boundary, len(self.tokens) - 1 == self.position
        if self.pin is not None and prefilled and 0 < last <= self.num_cached_tokens:
            for part in self._stores.retentions:
                part.end_prompt(self.pin.path, last)

    def keep_end(self) -> None:
        """Commit whole blocks after the path, and cache the rest as a leaf, if memory allows."""
        stores, start = self._stores, self.num_cached_tokens
        tokens = min(self.position, len(self.tokens), stores.shared_tokens) - start
        if self.pin is None or tokens <= 0 or self.transient or self._diverged_from_path:
            return
        if not self._partial_block.enabled or tokens == self._partial_block.tokens:
            return
        self.hash_blocks()
        nbytes = 2 * tokens * stores.figures.held_token_bytes
        if not stores.prefixes.make_room(nbytes):
            return
        # If MLX has no memory for the copies, the tokens will be recomputed.
        with (
            suppress(MemoryError, RuntimeError),
            stores.prefixes.ledger.reserve(Kind.BUFFERS, nbytes),
        ):
            self._commit_spans()  # those that did not fit when they became full
            self._keep_end(start + tokens - self.num_cached_tokens)

    # ---- parts

    def _resume_partial(self, match: Match[Segment]) -> None:
        """Take over the partial block after a match if it contains the next tokens."""
        start, root = match.tokens, self._root_at(match.tokens)
        resumed = self._partial_block.find(match, root, self.tokens[start : self._unread_from])
        if resumed is not None:
            span, self.recurrent_state = resumed
            self.own_spans = [span]
            self._read_to(start)

    @property
    def _diverged_from_path(self) -> bool:
        """Whether the KV after the path has gaps or more than one span."""
        spans, tails = self.own_spans, self._stores.tails
        gap = bool(spans) and spans[0].start != self.num_cached_tokens
        return gap or len(spans) > 1 or (self.tail > 0 and tails.lost)

    def _keep_end(self, tokens: int) -> None:
        """Move the first `tokens` tokens after the path into the tree."""
        if tokens <= 0 or (self.own_spans and self.own_spans[0].end % self._size == 0):
            return  # whole blocks before these could not be committed
        segment = self.own_spans[0].segment if self.own_spans else None
        if self.tail:
            assert self.slot is not None
            begin = self.own_spans[0].start if self.own_spans else self.num_cached_tokens
            segment = self._stores.cut_tail(self.slot, self.tail, begin, segment)
        assert segment is not None and self.pin is not None and self.reservation is not None
        whole = tokens // self._size * self._size
        if whole:
            head = segment.part(0, whole).owned(coded=True)
            if not self._commit(self._stores.coded(head, self.num_cached_tokens)):
                return
        start, stop = self.num_cached_tokens, self.num_cached_tokens + tokens - whole
        if stop > start:
            self._partial_block.keep(
                self.pin,
                start,
                self._root_at(start),
                self.tokens[start:stop],
                segment.part(whole, tokens).owned(coded=True),
                self.recurrent_state,
                self.reservation,
            )
        self.own_spans, self.tail = [], 0

    def _place_chunk(self, segment: Segment) -> None:
        size, start = self._size, self.position
        end = start + segment.tokens
        if self.own_spans and start % size:  # mlx-lm's chunks may end inside a block
            partial = self.own_spans.pop()
            segment, start = partial.segment.join(segment), partial.start
        whole = min(end // size * size, self._stores.shared_tokens) - start
        if whole == segment.tokens:
            segment = self._stores.coded(segment, start)
        if whole > 0 and not self.own_spans and self.num_cached_tokens == start:
            head, rest = segment, None
            if whole < segment.tokens:
                head, rest = segment.split(whole)
            if self._commit(head):
                if rest is not None:
                    self.own_spans.append(KVSpan(rest, start + whole, rest.tokens))
                return
        # Spans end at block boundaries, except for the last one, which keeps growing.
        last = max(0, end // size * size - start)
        if 0 < last < segment.tokens:
            head, rest = segment.split(last)
            self.own_spans.append(KVSpan(head, start, last))
            self.own_spans.append(KVSpan(rest, start + last, rest.tokens))
        else:
            self.own_spans.append(KVSpan(segment, start, segment.tokens))
        self._forget_unseen()

    def _fold(self) -> None:
        """Copy a full tail to the own spans, and commit the blocks that it completes."""
        assert self.slot is not None
        start, last = self.committed_end, None
        if self.own_spans and not self._is_span_end(start):  # an unfinished span is extended
            last = self.own_spans.pop()
            start = last.start
        before = last.segment if last else None
        grown = self._stores.cut_tail(self.slot, self.tail, start, before)
        self.own_spans.append(KVSpan(grown, start, grown.tokens))
        self.tail = 0
        if self._is_span_end(self.position):
            self._complete()
            span = self.own_spans[-1]
            if span.end <= self._stores.shared_tokens:
                coded = self._stores.coded(span.segment, span.start)
                self.own_spans[-1] = replace(span, segment=coded)
            self._commit_spans()
            self.capture()
        self._forget_unseen()

    def _is_span_end(self, position: int) -> bool:
        """Return whether decoded tokens are committed or freed as a unit at a position."""
        shared = position < self._stores.shared_tokens
        return position % (self._stores.commit_tokens if shared else self._size) == 0

    def _complete(self) -> None:
        """Move the compressed rows of a full block from the states into its segment."""
        if self.recurrent_state is None:
            return
        span, state = self.own_spans[-1], self.recurrent_state
        segment, self.recurrent_state = self._stores.completed(span.segment, state)
        self.own_spans[-1] = replace(span, segment=segment)

    def _commit_spans(self) -> None:
        """Commit own spans of whole blocks that continue the path."""
        self.hash_blocks()
        while self._can_commit and self._commit(self.own_spans[0].segment):
            del self.own_spans[0]
        if self.pin is not None:
            self._stores.tidy(self.pin.node)

    def _commit(self, segment: Segment) -> bool:
        """Insert computed blocks into the tree, and queue them to be written to the tiers."""
        first = self.num_cached_tokens // self._size
        if not self.splice(segment):
            return False
        self._partial_block.covered(self.num_cached_tokens)
        self._note_blocks(first)
        return True

    def _forget_unseen(self) -> None:
        """Free own spans, and the end of the path, that are outside all windows."""
        figures = self._stores.figures
        nearest = figures.window_start(self.position)
        keep = max((window.keep for window in figures.windows), default=0)
        if nearest <= keep or not self.own_spans:
            return
        *spans, last = self.own_spans
        spans = [span for span in spans if span.end > nearest or span.start < keep]
        self.own_spans = [
            span if span.end > nearest else _first(span, keep - span.start) for span in spans
        ] + [last]
        if self.num_cached_tokens > keep and nearest >= self.num_cached_tokens:
            self._withdraw(keep)

    # ---- the chain

    def hash_blocks(self) -> None:
        """Hash the new whole blocks that may be shared."""
        size, prefixes = self._size, self._stores.prefixes
        blocks = min(len(self.tokens), self._stores.shared_tokens) // size
        if blocks > len(self.block_hashes):
            rest = self.tokens[len(self.block_hashes) * size : blocks * size]
            after = self.block_hashes[-1] if self.block_hashes else None
            self.block_hashes += prefixes.block_hashes(rest, self._salt, after=after)

    def unshare(self) -> None:
        """Copy tokens and hashes, which all choices of a request share until they are admitted."""
        self.tokens, self.block_hashes = list(self.tokens), list(self.block_hashes)

    # ---- the path

    def _pin(self, match: Match[Segment], cached_tokens: int, *, whole: bool) -> None:
        """Pin a path, of which the sequence reads the first `cached_tokens`."""
        self.pin = self._stores.prefixes.pin(match)
        self._index_path()
        self.num_cached_tokens = cached_tokens
        self.matched_tokens = match.tokens
        self._matched_version = self._version if whole else None

    def _index_path(self) -> None:
        """Index the keys of nodes that have no index yet."""
        if self.pin is not None:
            self._stores.attached(self.pin.path)

    def _release(self) -> None:
        if self.pin is not None:
            self.pin.release()
        self.pin, self.num_cached_tokens = None, 0

    def _read_to(self, cached_tokens: int) -> None:
        self.num_cached_tokens = cached_tokens

    def _follow_others(self) -> int:
        """Extend the pin to blocks committed by others; return the number of blocks it covers."""
        cached_blocks = self.num_cached_tokens // self._size
        version = self._version
        if self.pin is None or version == self._matched_version:
            return cached_blocks
        if cached_blocks >= len(self.block_hashes):
            return cached_blocks
        self._matched_version = version
        return self._stores.prefixes.follow(self.pin, self.block_hashes, cached_blocks)

    def follow(self, block_hashes: list[bytes]) -> int:
        """Extend the pin to all cached blocks of a chain; return the number of readable blocks."""
        assert self.pin is not None
        stores, size = self._stores, self._size
        blocks = stores.prefixes.follow(self.pin, block_hashes, self.num_cached_tokens // size)
        if stores.complete(self.pin.path, blocks * size) == blocks * size:
            self.num_cached_tokens = blocks * size
        return self.num_cached_tokens // size

    def leave_last(self) -> None:
        """Leave the last token of the prompt to be computed for its logits."""
        self.num_cached_tokens = min(self.num_cached_tokens, self.readable_tokens)

    def shorter_paths(self) -> Iterator[list[bytes]]:
        """Yield ever shorter prefixes of the cached path's block hashes, down to an empty one.

        Leaves out the last node, then two, four, ...: little is recomputed if little memory is
        missing.
        """
        path = self._stores.prefixes.match(self.block_hashes).path
        left_out = 1
        while left_out < len(path):
            end = path[-left_out - 1].end
            yield self.block_hashes[: end // self._size]
            left_out *= 2
        yield []

    def drop_unread(self) -> None:
        """Evict the cached nodes that the sequence would not read completely."""
        prefixes = self._stores.prefixes
        path, readable = prefixes.match(self.block_hashes).path, self.reachable_tokens
        end = -(-readable // self._size) * self._size
        unread = next((node for node in path if node.end > end), None)
        if unread is not None:
            prefixes.drop(unread, "limit")

    def forget(self) -> None:
        """Evict all blocks of the sequence that no other sequence reads."""
        prefixes = self._stores.prefixes
        if path := prefixes.match(self.block_hashes).path:
            prefixes.drop(path[0], "cleared")

    def _insert(self, segment: Segment, paid: Reservation) -> bool:
        """Insert whole blocks, counted by `paid`, after the cached tokens; False if that fails."""
        assert self.pin is not None
        stores, size, start = self._stores, self._size, self.num_cached_tokens
        if not stores.fill(self.pin, self.block_hashes, segment, start):
            return False
        inserted = stores.prefixes.insert(
            self.pin,
            start // size,
            self.block_hashes,
            self.tokens[start : start + segment.tokens],
            segment,
            paid,
        )
        if inserted.refused is not None:
            return False
        stores.changed()
        end = inserted.blocks_readable * size
        if stores.complete(self.pin.path, end) < end:
            return False  # refilled KV was evicted to make room for the insertion
        if start < self._hold_tokens:
            self._hold()  # before it is merged with nodes that are not held
        self.num_cached_tokens = end
        return True

    def _withdraw(self, keep: int) -> None:
        assert self.pin is not None
        self._hold()
        path = [node for node in self.pin.path if node.start < keep]
        self.pin.withdraw(path[-1] if path else None)
        self.num_cached_tokens = min(self.num_cached_tokens, path[-1].end if path else 0)

    def _hold(self) -> None:
        """Hold the leading nodes of the path if requested, so that they are evicted last."""
        if self.pin is not None and self._hold_tokens and self._hold_seconds:
            self._stores.prefixes.hold(self.pin, self._hold_tokens, self._hold_seconds)

    # ---- tiers

    def _note_blocks(self, first: int) -> None:
        """Queue the cached blocks from index `first` on to be written to the tiers."""
        stores = self._stores
        spills = stores.spills  # KV to be spilled is always written
        if spills or not self.transient:
            block_hashes = self.block_hashes[: self.num_cached_tokens // self._size]
            stores.tiers.note(block_hashes, stores.prefixes.root(self._salt), first, seen=spills)

    def note_again(self, first: int) -> None:
        self._note_blocks(first)

    def _note_checkpoint(self, position: int, *, answered: bool = False) -> None:
        stores = self._stores
        if not self.transient:
            root = stores.prefixes.root(self._salt)
            block_hashes = self.block_hashes[: position // self._size]
            stores.tiers.note_checkpoint(block_hashes, root, answered=answered)

    def end_turn(self, known_tokens: int) -> None:
        """Retain the states from which the conversation continues after this answer."""
        if self.transient:
            return
        stores = self._stores
        if stores.figures.is_recurrent and self.pin is not None:
            path, end = self.pin.path, self.num_cached_tokens
            ends = (part.end_turn(path, end) for part in stores.retentions)
            position = max(ends, default=0)
            self._note_checkpoint(position, answered=True)
        elif self.num_cached_tokens - known_tokens >= self._size:
            block_hashes = self.block_hashes[: self.num_cached_tokens // self._size]
            stores.tiers.note_end(block_hashes, stores.prefixes.root(self._salt))


def _first(span: KVSpan, tokens: int) -> KVSpan:
    """Return a span with only its first `tokens` tokens, copied if it is shortened."""
    if span.columns <= tokens:
        return span
    return KVSpan(Segment.cut(span.segment.layers, 0, tokens), span.start, tokens)
