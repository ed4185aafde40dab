"""KV of one sequence in a draft model; it can be released at any time."""

from __future__ import annotations

from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.sequence_kv import SequenceKV
from penstock.ledger import Kind


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
