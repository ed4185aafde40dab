"""Fair shares of a batch: deficit round robin over clients, their salts and their requests. Pure.

    clients            a                    b          each as many places as the others,
    salts          a1      a2               b1         as far as they have sequences,
    requests      r1 r2    r3               r4         and so on down to requests
    sequences     ......   ..               .

Among shares with equally many places, the one with the least work so far is next, so a share with
short sequences runs more of them. Work is measured in prompt tokens. A new share starts with as
much work as its busiest sibling: it gets no credit for time without requests. A share is removed
with its last sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeAlias, TypeVar

GENERATED_WORK = 8
"""Cost of one generated token, in prompt tokens: prefill processes many tokens at a time."""
TURN_WORK = 256
"""Minimum work of a turn before a sequence is preempted for a waiting request."""
EARLY_WORK = 64
"""Minimum work of a turn before preemption for a short sequence that needs none of its memory.

Little is recomputed afterwards: part of a block, or blocks evicted under memory pressure.
"""
MOST_IN_TURNS = 8
"""Maximum number of waiting requests that take turns.

Preempted requests keep their KV cached, and with many of them they would evict each other.
"""

Path: TypeAlias = tuple[str | int, ...]
"""Client, salt and request; each prefix of the tuple is a share."""


class Sharer(Protocol):
    @property
    def id(self) -> int: ...
    @property
    def owners(self) -> Path: ...
    @property
    def remaining_tokens(self) -> int: ...
    @property
    def served_tokens(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...


T = TypeVar("T", bound=Sharer)


@dataclass(slots=True)
class _Share:
    work: int
    """Work of finished turns, plus the work of the busiest sibling when this share was opened."""
    sequences: int = 0
    """Number of open sequences, admitted or waiting."""
    begun: bool = False
    """Whether one of its sequences has been admitted."""
    children: set[Path] = field(default_factory=set)


@dataclass(slots=True)
class _ShareTurn(Generic[T]):
    """Time of a sequence in a place, from admission to preemption or its end."""

    sequence: T
    start: int
    """Work of the sequence before this turn."""
    repeated: int
    """Number of tokens recomputed after a preemption."""
    credit: int
    """Work of an interrupted turn that this one continues."""

    @property
    def work(self) -> int:
        return _work(self.sequence) - self.start

    @property
    def whole(self) -> int:
        return self.work + self.credit

    @property
    def least(self) -> int:
        """Work after which the turn may end for a waiting request."""
        return self.repeated + max(TURN_WORK, self.repeated)

    @property
    def may_end_early(self) -> bool:
        if self.sequence.remaining_tokens > TURN_WORK:
            return self.work >= EARLY_WORK
        new = max(EARLY_WORK, min(self.repeated, TURN_WORK))
        return not self.sequence.remaining_tokens and self.whole >= self.repeated + new


class FairShares(Generic[T]):
    """Places and work of clients, salts and requests. Not thread-safe: owned by the scheduler."""

    def __init__(self) -> None:
        self._shares: dict[Path, _Share] = {(): _Share(0)}
        self._turns: dict[int, _ShareTurn[T]] = {}
        self._broken_off: dict[int, _ShareTurn[T]] = {}
        """Turns of sequences that were preempted before the end of their prefill."""

    def in_order(self, line: Iterable[T]) -> list[T]:
        """Return one waiting sequence of each client's salt, in the order to admit them.

        The share with the fewest places is first, then the one with the least work. Within a
        request, and between equal shares, the first in `line` is chosen.

        Args:
            line: waiting sequences of one priority, in the order of `in_line`.
        """
        places, work = self._standing()

        def behind(sequence: T, other: T) -> bool:
            mine, theirs = _where_they_part(sequence, other)
            return (places[mine], work[mine]) < (places[theirs], work[theirs])

        requests: dict[Path, T] = {}
        for sequence in line:
            requests.setdefault(sequence.owners, sequence)
        salts: dict[Path, T] = {}
        for sequence in requests.values():
            salt = sequence.owners[:-1]
            if salt not in salts or behind(sequence, salts[salt]):
                salts[salt] = sequence
        order: list[T] = []
        for sequence in salts.values():
            ahead = (index for index, other in enumerate(order) if behind(sequence, other))
            order.insert(next(ahead, len(order)), sequence)
        return order

    def to_preempt(self, sequence: T, placed: Iterable[T]) -> list[T]:
        """Return placed sequences to preempt for a waiting one, in order.

        First those of shares with at least two more places than the waiting one's, until they are
        balanced. If its share has no place, also those whose turn was long enough; a longer prompt
        waits for longer turns.
        """
        places, _ = self._standing()
        rest, victims = list(placed), []
        turns = self._waiting_requests(places) <= MOST_IN_TURNS
        while rest:
            candidates = []
            for other in rest:
                share, my_share = _where_they_part(other, sequence)
                their_places, my_places = places[share], places[my_share]
                excess = their_places >= my_places + 2
                if excess or (
                    turns and their_places > my_places == 0 and self._turn_done(other, sequence)
                ):
                    work = 0 if excess else self._turns[other.id].work
                    share_places = tuple(places[share] for share in shares_of(other))
                    candidates.append(((*share_places, work, other.id), other))
            if not candidates:
                break
            _, victim = max(candidates, key=lambda candidate: candidate[0])
            rest.remove(victim)
            victims.append(victim)
            for share in shares_of(victim):
                places[share] -= 1
        return victims

    def to_preempt_early(self, sequence: T, placed: Iterable[T]) -> list[T]:
        """Return placed sequences to preempt before their turn ends for a short waiting one.

        Only for a share without a place. The caller must ensure that no computed KV is lost.
        """
        if sequence.remaining_tokens > TURN_WORK:
            return []
        places, _ = self._standing()
        early = []
        for other in placed:
            share, own_share = _where_they_part(other, sequence)
            if places[share] > places[own_share] == 0 and self._turns[other.id].may_end_early:
                early.append(other)
        return sorted(early, key=lambda other: (self._turns[other.id].work, other.id))[::-1]

    def places(self, sequence: T) -> list[int]:
        places, _ = self._standing()
        return [places[share] for share in shares_of(sequence)]

    def has_begun(self, request: Path) -> bool:
        """Return whether a sequence of an open request has been admitted."""
        return self._shares[request].begun

    def open(self, sequence: T) -> None:
        parent: Path = ()
        work: dict[Path, int] | None = None
        for share in shares_of(sequence):
            if share not in self._shares:
                work = self._standing()[1] if work is None else work
                siblings = self._shares[parent].children
                self._shares[share] = _Share(max((work[other] for other in siblings), default=0))
                siblings.add(share)
            self._shares[share].sequences += 1
            parent = share

    def close(self, sequence: T) -> None:
        parent = self._shares[()]
        for share in shares_of(sequence):
            entry = self._shares[share]
            entry.sequences -= 1
            if not entry.sequences:
                parent.children.remove(share)
                del self._shares[share]
            parent = entry
        self._broken_off.pop(sequence.id, None)

    def begin_turn(self, sequence: T, *, again: bool) -> None:
        """Begin the turn of an admitted sequence; at most half of it may be recomputation.

        Args:
            again: whether the sequence was preempted before.
        """
        repeated, credit = sequence.remaining_tokens if again else 0, 0
        if (before := self._broken_off.pop(sequence.id, None)) is not None:
            repeated, credit = max(repeated, before.repeated), before.whole
        self._turns[sequence.id] = _ShareTurn(sequence, _work(sequence), repeated, credit)
        for share in shares_of(sequence):
            self._shares[share].begun = True

    def end_turn(self, sequence: T, *, prefilled: bool) -> None:
        """End the turn of a sequence and count its work.

        A sequence preempted during prefill continues its turn when it is admitted again.
        """
        turn = self._turns.pop(sequence.id)
        if not prefilled and turn.whole < turn.least:
            self._broken_off[sequence.id] = turn
        for share in shares_of(sequence):
            self._shares[share].work += turn.work

    def _standing(self) -> tuple[defaultdict[Path, int], defaultdict[Path, int]]:
        """Return the number of places and the work of each share, including current turns."""
        places: defaultdict[Path, int] = defaultdict(int)
        work = defaultdict(int, {share: entry.work for share, entry in self._shares.items()})
        for turn in self._turns.values():
            for share in shares_of(turn.sequence):
                places[share] += 1
                work[share] += turn.work
        return places, work

    def _waiting_requests(self, places: dict[Path, int]) -> int:
        return sum(
            not entry.children and not places[share]
            for share, entry in self._shares.items()
            if share
        )

    def _turn_done(self, other: T, sequence: T) -> bool:
        """Return whether an admitted sequence has done enough work to be preempted for another."""
        turn = self._turns[other.id]
        return turn.whole >= max(turn.least, sequence.remaining_tokens)


def shares_of(sequence: Sharer) -> Iterator[Path]:
    """Yield the shares of a sequence, the client's first."""
    owners = sequence.owners
    return (owners[:level] for level in range(1, len(owners) + 1))


def _where_they_part(first: Sharer, second: Sharer) -> tuple[Path, Path]:
    """Return the first differing shares of two sequences, or their common request."""
    pairs = zip(shares_of(first), shares_of(second), strict=True)
    return next((pair for pair in pairs if pair[0] != pair[1]), (first.owners, second.owners))


def _work(sequence: Sharer) -> int:
    return sequence.served_tokens + GENERATED_WORK * sequence.generated_tokens
