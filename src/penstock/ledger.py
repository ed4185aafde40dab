"""Account of all reserved bytes, by kind, within a limit that is never exceeded.

`reserve` counts bytes before they are allocated, or raises. The ledger does not
measure memory; `check` compares the account with a recount by the caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from penstock.errors import LedgerFull, NeverFits
from penstock.memory.sizes import format_bytes


class Kind(Enum):
    """Purpose of bytes in the ledger."""

    WEIGHTS = "weights"
    NODES = "nodes"
    KEY_INDEX = "key_index"
    """Compact index of the nodes' keys, used to select the tokens to attend to."""
    TAILS = "tails"
    CHECKPOINTS = "checkpoints"
    BUFFERS = "buffers"
    PROMPTS = "prompts"
    GRAMMARS = "grammars"
    """Compiled grammars, including their future states."""
    FEATURES = "features"
    """Embeddings of inputs other than tokens, and the memory in which they are computed."""
    INDEX = "index"
    """Bookkeeping of the prefix tree: tokens, hashes, nodes."""
    DRAFT = "draft"
    """All of a draft model: its weights, buffers, keys and values."""


class Reservation:
    """Bytes counted in a ledger until released; a context manager that releases them on exit."""

    __slots__ = ("_ledger", "kind", "nbytes")

    def __init__(self, ledger: Ledger, kind: Kind, nbytes: int) -> None:
        self._ledger = ledger
        self.kind = kind
        self.nbytes = nbytes

    def resize(self, nbytes: int) -> None:
        """Change the number of reserved bytes; LedgerFull or NeverFits leaves it unchanged."""
        self._ledger._resize(self, nbytes)

    def pass_on(self, to: Reservation, nbytes: int) -> None:
        """Move `nbytes` to another reservation, which never fails for lack of memory."""
        self._ledger._pass_on(self, to, nbytes)

    def release(self) -> None:
        self._ledger._release(self)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Reservation({self.kind.value}, {format_bytes(self.nbytes)})"


class Ledger:
    """Bytes by kind, and their limit. Not thread-safe: used by the thread that owns the arrays.

    `used_bytes <= limit_bytes` holds at every instant, except after `set_limit` lowered it: then
    nothing more fits until enough has been released.

    >>> ledger = Ledger(1_000)
    >>> nodes = ledger.reserve(Kind.NODES, 600)
    >>> ledger.free_bytes
    400
    >>> ledger.reserve(Kind.TAILS, 401)
    Traceback (most recent call last):
    penstock.errors.LedgerFull: tails need 401 B; 400 B of the limit of 1.00 kB are free
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = _count("limit_bytes", limit_bytes)
        self._by_kind = dict.fromkeys(Kind, 0)
        self._used_bytes = 0
        self._held: set[Reservation] = set()

    @property
    def whole(self) -> Ledger:
        """Ledger with the limit of the whole process; `self` unless several models share one."""
        return self

    @property
    def limit_bytes(self) -> int:
        return self._limit_bytes

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    @property
    def crowded(self) -> bool:
        """Whether other models hold bytes that they may release."""
        return False

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be reserved; never negative."""
        return max(0, self.limit_bytes - self._used_bytes)

    @property
    def room_bytes(self) -> int:
        """Limit minus used bytes; negative if `set_limit` lowered the limit below them."""
        return self.limit_bytes - self._used_bytes

    def by_class(self) -> dict[Kind, int]:
        return dict(self._by_kind)

    def reserve(self, kind: Kind, nbytes: int) -> Reservation:
        """Reserve `nbytes`, all or none, before they are allocated.

        Raises:
            NeverFits: the bytes would not fit even if all but the weights were evicted.
            LedgerFull: the bytes do not fit now.
        """
        reservation = Reservation(self, kind, 0)
        self._held.add(reservation)
        try:
            self._resize(reservation, nbytes)
        except BaseException:
            self._held.remove(reservation)
            raise
        return reservation

    def set_limit(self, limit_bytes: int) -> int:
        """Change the limit; return the bytes by which it is exceeded now."""
        self._limit_bytes = _count("limit_bytes", limit_bytes)
        return max(0, -self.room_bytes)

    def check(self, recount: Mapping[Kind, int]) -> None:
        """Raise AssertionError unless the account equals `recount`, with 0 for missing kinds."""
        reserved = dict.fromkeys(Kind, 0)
        for reservation in self._held:
            reserved[reservation.kind] += reservation.nbytes
        wrong = [
            f"{kind.value}: {counted} counted, {reserved[kind]} reserved, "
            f"{recount.get(kind, 0)} found"
            for kind, counted in self._by_kind.items()
            if not counted == reserved[kind] == recount.get(kind, 0)
        ]
        if sum(reserved.values()) != self._used_bytes:
            wrong.append(f"{self._used_bytes} used, {sum(reserved.values())} reserved")
        if wrong:
            raise AssertionError("; ".join(wrong))

    def _resize(self, reservation: Reservation, nbytes: int) -> None:
        if reservation not in self._held:
            raise ValueError(f"{reservation} was released")
        added = _count("nbytes", nbytes) - reservation.nbytes
        if added > 0:
            self._check_room(reservation, nbytes, added)
        self._add(reservation, added)

    def _pass_on(self, giver: Reservation, taker: Reservation, nbytes: int) -> None:
        if not {giver, taker} <= self._held:
            raise ValueError(f"{giver} or {taker} was released")
        if _count("nbytes", nbytes) > giver.nbytes:
            raise ValueError(f"{giver} cannot pass on {format_bytes(nbytes)}")
        self._add(giver, -nbytes)
        self._add(taker, nbytes)

    def _release(self, reservation: Reservation) -> None:
        if reservation in self._held:
            self._add(reservation, -reservation.nbytes)
            self._held.remove(reservation)

    def _add(self, reservation: Reservation, nbytes: int) -> None:
        reservation.nbytes += nbytes
        self._by_kind[reservation.kind] += nbytes
        self._used_bytes += nbytes

    def _check_room(self, reservation: Reservation, nbytes: int, added: int) -> None:
        what = reservation.kind.value
        own_bytes = reservation.nbytes if reservation.kind is Kind.WEIGHTS else 0
        weights = self._by_kind[Kind.WEIGHTS] - own_bytes
        room = max(0, self.limit_bytes - weights)
        if nbytes > room:
            beside = f" beside weights of {format_bytes(weights)}" if weights else ""
            message = (
                f"{what} of {format_bytes(nbytes)} can never fit in the limit of "
                f"{format_bytes(self.limit_bytes)}{beside}"
            )
            raise NeverFits(message, nbytes, room, self.limit_bytes)
        if added > self.free_bytes:
            message = (
                f"{what} need {format_bytes(added)}; "
                f"{format_bytes(self.free_bytes)} of the limit of "
                f"{format_bytes(self.limit_bytes)} are free"
            )
            raise LedgerFull(message, added, self.free_bytes, self.limit_bytes)


class PartLedger(Ledger):
    """Ledger whose bytes also count, all as one kind, in another ledger, which has the limit.

    >>> whole = Ledger(1_000)
    >>> part = PartLedger(whole, Kind.DRAFT)
    >>> nodes = part.reserve(Kind.NODES, 600)
    >>> whole.by_class()[Kind.DRAFT], part.room_bytes
    (600, 400)
    """

    def __init__(self, whole: Ledger, kind: Kind) -> None:
        super().__init__(whole.limit_bytes)
        self._whole = whole
        self._line = whole.reserve(kind, 0)

    @property
    def free_bytes(self) -> int:
        return self._whole.free_bytes

    @property
    def room_bytes(self) -> int:
        return self._whole.room_bytes

    def _add(self, reservation: Reservation, nbytes: int) -> None:
        super()._add(reservation, nbytes)
        self._whole._add(self._line, nbytes)

    def _check_room(self, reservation: Reservation, nbytes: int, added: int) -> None:
        self._whole._check_room(self._line, self._line.nbytes + added, added)


class ModelLedger(Ledger):
    """Ledger of one of several models; its bytes also count, by kind, in the shared ledger `whole`.

    `limit_bytes` assumes that other models release all bytes that they can. Threads that share
    `whole` take turns (`engine.turns`).

    >>> whole = Ledger(1_000)
    >>> small, large = ModelLedger(whole, 300), ModelLedger(whole, 0)
    >>> small.reserve(Kind.WEIGHTS, 200).nbytes, whole.used_bytes  # out of the advance
    (200, 300)
    >>> nodes = large.reserve(Kind.NODES, 600)
    >>> whole.by_class()[Kind.NODES], small.free_bytes, small.limit_bytes, small.crowded
    (600, 200, 1000, True)

    Args:
        whole: the ledger that models share.
        advance_bytes: bytes reserved immediately, from which this ledger's first reservations are
            taken.
    """

    def __init__(self, whole: Ledger, advance_bytes: int) -> None:
        super().__init__(whole.limit_bytes)
        self._whole = whole
        self._advance = whole.reserve(Kind.WEIGHTS, advance_bytes)
        self._lines = {kind: whole.reserve(kind, 0) for kind in Kind}
        self.beside_bytes = 0
        """Bytes of `whole` that are never released: pinned models and prompts."""

    @property
    def whole(self) -> Ledger:
        return self._whole

    @property
    def limit_bytes(self) -> int:
        return max(0, min(self._limit_bytes, self._whole.limit_bytes - self.beside_bytes))

    @property
    def free_bytes(self) -> int:
        return max(0, self.room_bytes)

    @property
    def room_bytes(self) -> int:
        of_whole = self._whole.room_bytes + self._advance.nbytes
        return min(of_whole, self.limit_bytes - self._used_bytes)

    @property
    def crowded(self) -> bool:
        mine = self._used_bytes + self._advance.nbytes
        return self._whole.used_bytes - mine > self.beside_bytes

    def end_advance(self) -> None:
        """Release what is left of the advance."""
        self._advance.resize(0)

    def close(self) -> None:
        """Release all bytes; the ledger cannot be used afterwards."""
        for reservation in list(self._held):
            reservation.release()
        for line in (self._advance, *self._lines.values()):
            line.release()

    def _add(self, reservation: Reservation, nbytes: int) -> None:
        super()._add(reservation, nbytes)
        advanced = min(self._advance.nbytes, max(0, nbytes))
        self._whole._pass_on(self._advance, self._lines[reservation.kind], advanced)
        self._whole._add(self._lines[reservation.kind], nbytes - advanced)


def _count(name: str, value: int) -> int:
    if value < 0:
        raise ValueError(f"{name} must not be negative: {value}")
    return value
