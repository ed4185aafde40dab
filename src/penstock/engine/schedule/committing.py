"""How a sequence's tokens become part of its path: from tail to run, from run to node.

    decode   ──> advance ──> a full tail is copied behind the run; full blocks become a node
    prefill  ──> keep_chunk ──> a chunk's whole blocks become nodes, the rest is a run
    restore  ──> insert

What ends a block is committed at once, so that others can share it, and the states at its end are
filed under it. What cannot be committed, for want of room or behind the window, stays the
sequence's own.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from penstock.engine.model.runner import Runner
from penstock.engine.schedule.paths import KVStores, Paths
from penstock.engine.schedule.sequence import Sequence
from penstock.kv.compressed import completed
from penstock.kv.reads import KVSpan
from penstock.kv.segment import Segment
from penstock.kv.states import RecurrentState, States
from penstock.kv.tails import Tails
from penstock.ledger import Kind
from penstock.prefix.block_hashes import span_tokens


class Sealing:
    """Moves what sequences compute into the tree. Not thread-safe: the engine's thread.

    Args:
        held: by the engine.
        paths: of its sequences.
        runner: knows what the model's layers see and keep.
        tails: the pool.
    """

    def __init__(self, held: KVStores, paths: Paths, runner: Runner, tails: Tails) -> None:
        self._prefixes = held.prefixes
        self._checkpoints = held.checkpoints
        self._windows = held.windows
        self._requantizer = held.requantizer
        self._tiers = held.tiers
        self._paths = paths
        self._runner = runner
        self._tails = tails
        self._size = held.prefixes.block_size
        # Whoever runs has one part of many small blocks, where nothing has to be done at each.
        by_block = runner.layout.rows or held.checkpoints is not None
        self._unit = self._size if by_block else span_tokens(self._size)

    # ---- what was computed

    def advance(self, sequence: Sequence) -> None:
        """Make the column that was written visible, and move full tails on."""
        if not sequence.own_spans and sequence.tail == 0 and self._paths.holds_next(sequence):
            # The last token of a prompt that the path holds to its end: it was computed for
            # its logits alone, and its KV is there already.
            sequence.num_cached_tokens += 1
            return
        sequence.tail += 1
        if sequence.tail == self._tails.columns or sequence.position % self._size == 0:
            self._fold(sequence)

    def keep_chunk(self, sequence: Sequence, segment: Segment, start: int) -> None:
        """Commit a chunk's whole blocks; what is left of it, or cannot be committed, is a run."""
        size = self._size
        end = start + segment.tokens
        if sequence.own_spans and start % size:  # cut by mlx-lm within a block
            run = sequence.own_spans.pop()
            segment, start = run.segment.join(segment), run.start
        whole = min(end // size * size, self._paths.shared_tokens) - start
        if whole == segment.tokens:
            segment = self._coded(segment, start)
        if whole > 0 and not sequence.own_spans and sequence.num_cached_tokens == start:
            head, rest = segment, None
            if whole < segment.tokens:
                head, rest = segment.split(whole)
            if self._insert_new(sequence, head):
                if rest is not None:
                    sequence.own_spans.append(KVSpan(rest, start + whole, rest.tokens))
                if self._paths.by_block and sequence.pin is not None:
                    self._paths.tidy(sequence.pin.node)
                return
        # Runs end at blocks, but for the last one, which goes on growing.
        last = max(0, end // size * size - start)
        if 0 < last < segment.tokens:
            head, rest = segment.split(last)
            sequence.own_spans.append(KVSpan(head, start, last))
            sequence.own_spans.append(KVSpan(rest, start + last, rest.tokens))
        else:
            sequence.own_spans.append(KVSpan(segment, start, segment.tokens))
        self._forget_unseen(sequence)

    def insert(self, sequence: Sequence, segment: Segment) -> bool:
        """Hang whole blocks behind a sequence's cut into the tree; False if there is no room."""
        size = self._size
        assert sequence.pin is not None and sequence.kv_reservation is not None
        done, start = sequence.num_cached_tokens // size, sequence.num_cached_tokens
        before = sequence.kv_reservation.nbytes
        if self._windows is not None and not self._windows.fill(
            sequence.pin, sequence.block_hashes, segment, start
        ):
            return False
        committed = self._prefixes.insert(
            sequence.pin,
            done,
            sequence.block_hashes,
            sequence.tokens[start : start + segment.tokens],
            segment,
            sequence.kv_reservation,
        )
        if committed.refused is not None:
            return False
        if self._requantizer is not None:
            self._requantizer.changed()
        end = committed.blocks_readable * size
        if self._windows is not None and self._windows.resume(sequence.pin.path, end) < end:
            return False  # what was filled had to give way for the rest
        if start < sequence.hold_tokens:
            self._paths.hold(sequence)  # before it is merged with what is not to be held
        gained = end - start
        sequence.num_cached_tokens = end
        # What the tree has taken over is off already; what others had committed is not needed.
        moved = before - sequence.kv_reservation.nbytes
        sequence.spare(gained * self._runner.token_bytes - moved)
        return True

    # ---- states, and ends

    def capture(self, sequence: Sequence, *, turn_end: bool = False) -> None:
        """File a sequence's states under the boundary that its path ends with, if it is at one."""
        if self._checkpoints is None or sequence.recurrent_state is None or sequence.pin is None:
            return
        at_end = sequence.position == sequence.num_cached_tokens
        if at_end and sequence.num_cached_tokens % self._size == 0:
            self._checkpoints.capture(
                sequence.pin.path,
                sequence.num_cached_tokens,
                sequence.recurrent_state,
                turn_end=turn_end,
            )
            if turn_end:
                self._note_checkpoint(sequence, sequence.num_cached_tokens)

    def file(self, sequence: Sequence, at: int, states: States) -> None:
        """File states that were read again under a boundary of a sequence's path."""
        if self._checkpoints is not None and sequence.pin is not None:
            recurrent_state = RecurrentState(states, own=True)
            self._checkpoints.capture(sequence.pin.path, at, recurrent_state, turn_end=True)

    def end_prompt(self, sequence: Sequence, last: int) -> None:
        """Retain the windows in front of a prompt's last block, if it was read up to there."""
        if self._windows is None or self._checkpoints is not None or sequence.pin is None:
            return
        if sequence.left == 0 and 0 < last <= sequence.num_cached_tokens:
            self._windows.end_prompt(sequence.pin.path, last)

    def end_answer(self, sequence: Sequence) -> None:
        """Commit the whole blocks of the run in which an answer ends, if there is room for a
        copy."""
        if sequence.pin is None or len(sequence.own_spans) != 1 or self._unit == self._size:
            return
        self._paths.hash_blocks(sequence)
        (run,) = sequence.own_spans
        end = min(run.end, self._paths.shared_tokens) // self._size * self._size
        nbytes = run.segment.nbytes
        if (
            run.start != sequence.num_cached_tokens
            or end <= run.start
            or not self._prefixes.make_room(nbytes)
        ):
            return
        # Without room in MLX for the copy, the blocks will be computed again.
        with (
            suppress(MemoryError, RuntimeError),
            self._prefixes.ledger.reserve(Kind.BUFFERS, nbytes),
        ):
            whole = run.segment.part(0, end - run.start).owned(coded=True)
            if self._insert_new(sequence, whole):
                sequence.own_spans, sequence.tail = [], 0

    def end_turn(self, sequence: Sequence) -> None:
        """Retain the states with which a conversation goes on behind an answer."""
        if self._checkpoints is not None and sequence.pin is not None:
            ended = self._checkpoints.end_turn(sequence.pin.path, sequence.num_cached_tokens)
            self._note_checkpoint(sequence, ended)
        elif (
            self._tiers is not None
            and sequence.num_cached_tokens - sequence.cached_tokens >= self._size
        ):
            block_hashes = sequence.block_hashes[: sequence.num_cached_tokens // self._size]
            self._tiers.note_end(block_hashes, self._prefixes.root(sequence.request.salt))

    # ---- parts

    def _fold(self, sequence: Sequence) -> None:
        """Turn the tail into a run, and a run that ends a block into a node."""
        assert sequence.slot is not None
        start, last = sequence.committed_end, None
        if sequence.own_spans and not self._ends_run(start):  # an unfinished one goes on growing
            last = sequence.own_spans.pop()
            start = last.start
        grown = self._tails.cut(sequence.slot, sequence.tail, last.segment if last else None)
        sequence.own_spans.append(KVSpan(grown, start, grown.tokens))
        sequence.tail = 0
        if self._ends_run(sequence.position):
            self._complete(sequence)
            run = sequence.own_spans[-1]
            if run.end <= self._paths.shared_tokens:
                coded = self._coded(run.segment, run.start)
                sequence.own_spans[-1] = replace(run, segment=coded)
            self._seal(sequence)
            self.capture(sequence)
        self._forget_unseen(sequence)

    def _ends_run(self, position: int) -> bool:
        """Tell whether what is decoded in front of a position is committed, or let go of, as a
        run."""
        shared = position < self._paths.shared_tokens
        return position % (self._unit if shared else self._size) == 0

    def _complete(self, sequence: Sequence) -> None:
        """Put into a full block the rows of layers that compress, which were kept beside it."""
        rows = self._runner.layout.rows
        if rows and sequence.recurrent_state is not None:
            run = sequence.own_spans[-1]
            segment, sequence.recurrent_state = completed(
                run.segment, sequence.recurrent_state, rows
            )
            sequence.own_spans[-1] = replace(run, segment=segment)

    def _coded(self, segment: Segment, start: int) -> Segment:
        """Return a whole block as those behind it read it, whether the tree has room for it or
        not; as it is if MLX found no room for its codes."""
        if self._requantizer is None:
            return segment
        try:
            return self._requantizer.committed(segment, start)
        except (MemoryError, RuntimeError):
            self._paths.counters.out_of_memory += 1
            return segment

    def _seal(self, sequence: Sequence) -> None:
        """Hang the runs of whole blocks that continue the path into the tree."""
        self._paths.hash_blocks(sequence)
        while sequence.own_spans and sequence.own_spans[0].start == sequence.num_cached_tokens:
            run = sequence.own_spans[0]
            if run.end % self._size or run.end > self._paths.shared_tokens:
                break
            if not self._insert_new(sequence, run.segment):
                break
            del sequence.own_spans[0]
        if sequence.pin is not None:
            self._paths.tidy(sequence.pin.node)

    def _insert_new(self, sequence: Sequence, segment: Segment) -> bool:
        """Hang blocks that were computed into the tree, and have them written."""
        first = sequence.num_cached_tokens // self._size
        if not self.insert(sequence, segment):
            return False
        if self._tiers is not None:
            block_hashes = sequence.block_hashes[: sequence.num_cached_tokens // self._size]
            self._tiers.note(block_hashes, self._prefixes.root(sequence.request.salt), first)
        return True

    def _note_checkpoint(self, sequence: Sequence, at: int) -> None:
        """Have the states written that were filed under a boundary."""
        if self._tiers is not None:
            root = self._prefixes.root(sequence.request.salt)
            self._tiers.note_checkpoint(sequence.block_hashes[: at // self._size], root)

    def _forget_unseen(self, sequence: Sequence) -> None:
        """Let go of runs, and of the path, that no layer will see again."""
        nearest = self._runner.nearest(sequence.position)
        keep = max(
            (attention_window.keep for attention_window in self._runner.distinct_windows), default=0
        )
        if nearest <= keep or not sequence.own_spans:
            return
        *own_spans, last = sequence.own_spans
        own_spans = [run for run in own_spans if run.end > nearest or run.start < keep]
        sequence.own_spans = [
            run if run.end > nearest else _first(run, keep - run.start) for run in own_spans
        ] + [last]
        assert sequence.pin is not None
        if sequence.num_cached_tokens > keep and nearest >= sequence.num_cached_tokens:
            self._paths.hold(sequence)
            path = [node for node in sequence.pin.path if node.start < keep]
            sequence.pin.withdraw(path[-1] if path else None)
            sequence.num_cached_tokens = min(
                sequence.num_cached_tokens, path[-1].end if path else 0
            )


def _first(run: KVSpan, tokens: int) -> KVSpan:
    """Return a copy of a run's first tokens; the run itself if it has no more."""
    if run.columns <= tokens:
        return run
    return KVSpan(Segment.cut(run.segment.layers, 0, tokens), run.start, tokens)
