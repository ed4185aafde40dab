"""`Draft`: the draft model's KV of the running sequences, and the tokens that it proposes.

    follow ──> bytes reserved, tokens prefilled, a chunk per step ──> up to date or not yet
    draft  ──> all rows in one pass, token by token
    end    ──> released with the sequence, or earlier if the main model needs the bytes

The draft's cold nodes are evicted before any node of the main model, and its KV of running
sequences after all other memory. It never keeps a sequence from being admitted.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

import mlx.core as mx

from penstock.attention.attention_plan import DecodeRow, in_order
from penstock.engine.model.runner import Runner
from penstock.engine.model.sampling import SampledToken, likeliest
from penstock.engine.model.step_costs import WIDTHS
from penstock.engine.schedule.budget import GROWTH_TOKENS
from penstock.engine.schedule.costs import MemoryEstimator
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.sequence import Sequence
from penstock.engine.schedule.sequence_kv import SequenceKV
from penstock.kv.segment import Segment
from penstock.ledger import Kind, PartLedger, Reservation
from penstock.prefix.beside import Beside
from penstock.prefix.prefixes import Prefixes


class DraftKV(SequenceKV):
    """KV of a sequence in the draft model. Engine thread only.

    `of` is the sequence's KV in the main model; both share the list of tokens.
    """

    def __init__(self, stores: KVStores, of: SequenceKV, salt: str) -> None:
        super().__init__(
            stores, of.tokens, list(of.block_hashes), salt=salt, transient=of.transient
        )
        ledger = stores.prefixes.ledger
        self.hash_blocks()
        self.attach()
        self.take_slot()
        self.reservation = ledger.reserve(Kind.TAILS, 0)
        self.scores = ledger.reserve(Kind.BUFFERS, 0)
        """Reservation of the buffers that the sequence adds to a pass."""
        self.reserved_tokens = 0
        self.drafted: list[int] = []
        """Proposed tokens not verified yet; their KV is past the committed end."""

    @property
    def is_open(self) -> bool:
        return self.slot is not None

    @property
    def reserved_bytes(self) -> int:
        return self.scores.nbytes + (0 if self.reservation is None else self.reservation.nbytes)

    @property
    def unread_tokens(self) -> int:
        """Tokens that the draft model has not processed; at least one after `settle`."""
        return len(self.tokens) - self.position

    @property
    def room(self) -> int:
        """Columns that can be written after the drafted tokens, up to the end of the block."""
        size, columns = self._stores.block_size, self._stores.tails.columns
        return min(columns - self.tail, size - self.position % size) - len(self.drafted)

    def settle(self) -> None:
        came, right = self.tokens[self.position : -1], 0
        while right < min(len(came), len(self.drafted)) and came[right] == self.drafted[right]:
            right += 1
        self.append_tokens(len(self.drafted), right)
        self.drafted = []
        self.hash_blocks()

    def release(self, *, keep: bool = True) -> None:
        """Free all memory of the sequence; with `keep`, its KV is cached in the tree if it fits."""
        if not self.is_open:
            return
        if keep:
            self.settle()
            self.keep_end()
        node = None if self.transient else self.node
        self.detach()
        if self.transient:
            self.forget()
        self.drafted = []
        if self.reservation is not None:
            self.reservation.release()
        self.reservation = None
        self.scores.release()
        if keep:
            self._stores.tidy(node)


class Draft:
    """Draft model, its prefix tree, and its KV of the running sequences. Engine thread only."""

    proposes = True
    drafts_at_once = False
    most_tokens = WIDTHS[-1]

    def __init__(
        self,
        runner: Runner,
        stores: KVStores,
        estimator: MemoryEstimator,
        ledger: PartLedger,
        fixed: Items[Reservation],
        main: Prefixes[Segment],
        beside: Beside[Segment],
        *,
        chunk_tokens: int,
        vocabulary_size: int,
    ) -> None:
        self.stores = stores
        self._runner = runner
        self._estimator = estimator
        self._ledger = ledger
        self._fixed = fixed
        self._main = main
        self._chunk_tokens = chunk_tokens
        self._vocabulary_size = vocabulary_size
        self._live: list[DraftKV] = []
        self._asking = False
        """Whether the draft is making room for itself; its own sequences are then not released."""
        beside.first.append(_ColdNodes(stores))
        beside.last.append(self)

    @property
    def live(self) -> list[DraftKV]:
        self._live = [kv for kv in self._live if kv.is_open]
        return self._live

    @property
    def fixed_bytes(self) -> int:
        """Bytes of weights, pool, buffers and the empty index."""
        fixed = sum(reservation.nbytes for reservation in self._fixed)
        return fixed + self.stores.prefixes.fixed_bytes

    @property
    def used_bytes(self) -> int:
        return self._ledger.used_bytes

    @property
    def held_bytes(self) -> int:
        stores, weights = self.stores, self._fixed[0].nbytes
        running = stores.own_bytes(span for kv in self.live for span in kv.own_spans)
        return weights + stores.tails.nbytes + stores.prefixes.tree.nbytes + running

    def check(self) -> None:
        stores, live = self.stores, self.live
        stores.prefixes.check()
        stores.tails.check(kv.slot for kv in live if kv.slot is not None)
        if stores.prefixes.tree.pins != len(live):
            raise AssertionError(f"{stores.prefixes.tree.pins} pins, {len(live)} drafted sequences")
        for kv in live:
            kv.check()
        _, pool, step = (reservation.nbytes for reservation in self._fixed)
        scores = sum(kv.scores.nbytes for kv in live)
        self._ledger.check(
            {
                **stores.prefixes.recount(),
                Kind.WEIGHTS: self._runner.weight_bytes(),
                Kind.TAILS: pool + sum(kv.reserved_bytes for kv in live) - scores,
                Kind.BUFFERS: step + scores,
            }
        )

    # ---- `Yielding`

    @property
    def nbytes(self) -> int:
        """Bytes of running sequences; 0 while the draft is making room for itself."""
        if self._asking:
            return 0
        return self.stores.prefixes.tree.pinned_bytes + sum(kv.reserved_bytes for kv in self.live)

    def shrink(self, nbytes: int) -> int:
        before = self._ledger.used_bytes
        live = [] if self._asking else sorted(self.live, key=lambda kv: kv.position)
        while live and before - self._ledger.used_bytes < nbytes:
            live.pop().release(keep=False)
            self.stores.prefixes.shrink(nbytes - before + self._ledger.used_bytes)
        return before - self._ledger.used_bytes

    def drop(self) -> None:
        """Release all running sequences and the pool, which may contain NaN."""
        for kv in self.live:
            kv.release(keep=False)
        self.stores.tails.drop()

    def close(self) -> None:
        self.drop()
        self.stores.prefixes.clear()
        for reservation in self._fixed[1:]:
            reservation.resize(0)

    # ---- reading

    def follow(self, sequences: Items[Sequence], worth_seconds: Items[float]) -> list[bool]:
        """Prefill sequences, about one chunk in total; return which are ready for drafting.

        A sequence is skipped if its prefill would take longer than `worth_seconds`, the time that
        drafts are expected to save.
        """
        unspent, ready = self._chunk_tokens, []
        for sequence, worth in zip(sequences, worth_seconds, strict=True):
            kv = self._opened(sequence)
            kv.settle()
            takes = self._pays(kv, worth) and self._takes(kv) and self._reserved(kv)
            while takes and kv.unread_tokens > self._most and unspent > 0:
                count = self._read_tail(kv) if kv.tail else self._read_chunk(kv)
                unspent -= count or unspent
            if not takes:
                kv.release()
            ready.append(takes and kv.unread_tokens <= self._most)
        return ready

    def draft(self, sequences: Items[Sequence], limits: Items[int]) -> list[list[int]]:
        """Propose up to `limits` tokens for each sequence; call `follow` first."""
        kvs = [self._opened(sequence) for sequence in sequences]
        drafts: list[list[int]] = [[] for _ in kvs]
        while rows := [i for i, kv in enumerate(kvs) if self._goes_on(kv, drafts[i], limits[i])]:
            feeds = [self._feed(kvs[i], drafts[i]) for i in rows]
            chosen = self._pass([kvs[i] for i in rows], feeds)
            for i, feed, token in zip(rows, feeds, chosen, strict=True):
                kvs[i].drafted += feed if drafts[i] else []
                if not drafts[i]:
                    kvs[i].append_tokens(len(feed), len(feed))
                if not kvs[i].unread_tokens:
                    drafts[i].append(token)
        return [self._known(draft) for draft in drafts]

    @property
    def _most(self) -> int:
        return self.stores.tails.spare + 1

    def _opened(self, sequence: Sequence) -> DraftKV:
        kv = sequence.draft_kv
        if not isinstance(kv, DraftKV) or not kv.is_open:
            kv = sequence.draft_kv = DraftKV(self.stores, sequence.kv, sequence.request.salt)
            self._live.append(kv)
        return kv

    def _pays(self, kv: DraftKV, worth_seconds: float) -> bool:
        """Return whether drafts are expected to save more time than the prefill takes."""
        seconds = kv.unread_tokens * self._estimator.prefill_token_seconds
        return kv.unread_tokens <= self._most or seconds <= worth_seconds

    def _takes(self, kv: DraftKV) -> bool:
        """Return whether the unread tokens are in the draft's vocabulary and fit its context."""
        runner = self._runner
        limit = min(self.stores.shared_tokens, runner.context_tokens or self.stores.shared_tokens)
        known = max(kv.tokens[kv.position :]) < runner.vocabulary_size
        return known and len(kv.tokens) + self._most <= limit

    def _goes_on(self, kv: DraftKV, draft: Items[int], limit: int) -> bool:
        return len(draft) < limit and kv.room > 0

    def _feed(self, kv: DraftKV, draft: Items[int]) -> list[int]:
        """Return the next input tokens of a row: tokens of the sequence, then the last proposal."""
        if draft:
            return [draft[-1]]
        return kv.tokens[kv.position :][: min(kv.room, self._most)]

    def _pass(self, kvs: Items[DraftKV], feeds: Items[Items[int]]) -> list[int]:
        """Run one pass over the next tokens of all rows; return each row's likeliest token."""
        runner, tails = self._runner, self.stores.tails
        width = max(map(len, feeds))
        rows = [
            DecodeRow(kv.spans(), kv.position + len(kv.drafted), kv.slot, kv.tail + len(kv.drafted))
            for kv in kvs
            if kv.slot is not None
        ]
        order = in_order(rows)
        # The padding after a row's tokens is written past all columns that are read.
        new = [[*feeds[i], *[0] * (width - len(feeds[i]))] for i in order]
        decoded = runner.decode(new, [rows[i] for i in order], tails)
        ends = mx.array([len(feeds[i]) - 1 for i in order])
        best = likeliest(decoded.logits[mx.arange(len(order)), ends])
        mx.eval(best.tokens, best.values, tails.buffers())
        chosen = dict(zip(order, best.read(), strict=True))
        return [chosen_token(chosen[row]) for row in range(len(rows))]

    def _read_tail(self, kv: DraftKV) -> int:
        feed = self._feed(kv, [])
        self._pass([kv], [feed])
        kv.append_tokens(len(feed), len(feed))
        return len(feed)

    def _read_chunk(self, kv: DraftKV) -> int:
        """Prefill the next chunk; return the number of tokens computed, 0 if memory is full."""
        size, start = self.stores.block_size, kv.position
        end = min(len(kv.tokens) - 1, start // size * size + self._chunk_tokens)
        nbytes = self._estimator.prefill_bytes(end)
        if not self._make_room(nbytes):
            return 0
        with self._ledger.reserve(Kind.BUFFERS, nbytes):
            chunk = self._runner.prefill(kv.tokens[start:end], kv.spans(), start)
            if not chunk.segment.is_finite():
                raise ArithmeticError("the draft model computed NaN or infinity")
            kv.append_chunk(chunk.segment)
        return end - start

    def _known(self, draft: list[int]) -> list[int]:
        size = self._vocabulary_size
        return draft[: next((i for i, token in enumerate(draft) if token >= size), len(draft))]

    def _reserved(self, kv: DraftKV) -> bool:
        tokens = len(kv.tokens) + self._most
        if tokens <= kv.reserved_tokens:
            return True
        tokens += GROWTH_TOKENS
        estimator, cached = self._estimator, kv.num_cached_tokens
        kv_bytes = estimator.sequence_bytes(tokens, cached)
        kv_bytes -= (
            estimator.sequence_bytes(kv.reserved_tokens, cached) if kv.reserved_tokens else 0
        )
        scores = estimator.decode_bytes(tokens) - kv.scores.nbytes
        index = self.stores.prefixes.index_bytes(tokens // self.stores.block_size)
        if not self._make_room(kv_bytes + scores + index):
            return False
        assert kv.reservation is not None
        kv.reservation.resize(kv.reservation.nbytes + kv_bytes)
        kv.scores.resize(kv.scores.nbytes + scores)
        kv.reserved_tokens = tokens
        return True

    def _make_room(self, nbytes: int) -> bool:
        """Evict cold nodes of both models; return False and evict none if that is not enough."""
        self._asking = True
        try:
            return self._main.make_room(nbytes)
        finally:
            self._asking = False


class NoDraft:
    """Proposes nothing; base of what proposes without a model of its own."""

    fixed_bytes = used_bytes = held_bytes = 0
    proposes = False
    drafts_at_once = False
    """Whether all tokens of a proposal are drafted in one pass, instead of one each."""
    most_tokens = WIDTHS[-1]
    """Maximum number of tokens of a proposal."""

    def check(self) -> None: ...
    def close(self) -> None: ...
    def drop(self) -> None: ...

    def follow(self, sequences: Items[Sequence], worth_seconds: Items[float]) -> list[bool]:
        return [False] * len(sequences)

    def draft(self, sequences: Items[Sequence], limits: Items[int]) -> list[list[int]]:
        return [[] for _ in sequences]


class _ColdNodes:
    """Evictable nodes of the draft's tree; implements `Yielding`."""

    def __init__(self, stores: KVStores) -> None:
        self._prefixes = stores.prefixes

    @property
    def nbytes(self) -> int:
        return self._prefixes.evictable_bytes

    def shrink(self, nbytes: int) -> int:
        return self._prefixes.shrink(nbytes)


def chosen_token(choice: SampledToken | Exception) -> int:
    """Return the sampled token, or raise the error of its row."""
    if isinstance(choice, Exception):
        raise choice
    return choice.token
