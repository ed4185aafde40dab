"""Fair shares of a batch: deficit round robin over clients, their salts and their requests. Pure.

    clients            a                    b          each as many places as the others,
    salts          a1      a2               b1         as far as they have sequences,
    requests      r1 r2    r3               r4         and so on down to requests
    sequences     ......   ..               .

Among shares with equally many places, the one with the least work so far is next: a share whose
sequences are short gets more of them in. Work is counted in tokens of prompts. A share that opens
begins with as much work as its busiest sibling: it gets no credit for time without requests.
Counters of a share are forgotten with its last sequence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeAlias, TypeVar

GENERATED_WORK = 8
"""Work of one generated token, in tokens of a prompt, which are read many at a time."""
TURN_WORK = 256
"""Least work of a sequence in a place before it makes way for a request that has no place."""
EARLY_WORK = 64
"""Least work of a sequence in a place before it makes way for a short one that takes nothing of it.

What it computes again afterwards is a part of a block, or what a full memory has no room for.
"""
MOST_IN_TURNS = 8
"""Waiting requests up to which places are taken in turns.

Each has keys and values while it waits again: with many, these would push each other out.
"""

Path: TypeAlias = tuple[str | int, ...]
"""Client, salt and request; a prefix of it names a share."""


class Sharer(Protocol):
    """One sequence, as its shares see it."""

    @property
    def id(self) -> int:
        """Number in the order of arrival."""

    @property
    def owners(self) -> Path:
        """Client, salt and request that the sequence belongs to."""

    @property
    def remaining_tokens(self) -> int:
        """Tokens still to prefill before it decodes."""

    @property
    def served_tokens(self) -> int:
        """Tokens that the model has prefilled for it."""

    @property
    def generated_tokens(self) -> int:
        """Tokens of its answer so far."""


T = TypeVar("T", bound=Sharer)


@dataclass(slots=True)
class _Share:
    """A client, one of its salts, or one request."""

    work: int
    """Work in turns that have ended, and the work of the busiest sibling when it opened."""
    sequences: int = 0
    """Open sequences, with a place or without."""
    begun: bool = False
    """Whether one of its sequences has had a place."""
    children: set[Path] = field(default_factory=set)


@dataclass(slots=True)
class _ShareTurn(Generic[T]):
    """The stay of a sequence in a place."""

    sequence: T
    start: int
    """Work of the sequence before it."""
    repeated: int
    """Tokens that were computed before."""
    credit: int
    """Work of a turn that was broken off, and goes on with this one."""

    @property
    def work(self) -> int:
        return _work(self.sequence) - self.start

    @property
    def whole(self) -> int:
        """Work of the turn with its parts before."""
        return self.work + self.credit

    @property
    def least(self) -> int:
        """Work after which it may end in favor of a request without a place."""
        return self.repeated + max(TURN_WORK, self.repeated)

    @property
    def may_end_early(self) -> bool:
        """Whether it may end where nothing that was computed is lost."""
        if self.sequence.remaining_tokens > TURN_WORK:
            return self.work >= EARLY_WORK
        new = max(EARLY_WORK, min(self.repeated, TURN_WORK))
        return not self.sequence.remaining_tokens and self.whole >= self.repeated + new


class FairShares(Generic[T]):
    """Places and work of clients, salts and requests. Not thread-safe: the scheduler's own."""

    def __init__(self) -> None:
        self._shares: dict[Path, _Share] = {(): _Share(0)}
        self._turns: dict[int, _ShareTurn[T]] = {}
        self._broken_off: dict[int, _ShareTurn[T]] = {}
        """Last turns of sequences that lost their place before they had read their prompt."""

    # ---- questions

    def in_order(self, line: Iterable[T]) -> list[T]:
        """Return the next sequence of each salt of a client, the share that is behind first.

        Of a request that is the first in the line; of equal shares the first as well.
        """
        places, work = self._standing()

        def behind(sequence: T, other: T) -> bool:
            own, theirs = _where_they_part(sequence, other)
            return (places[own], work[own]) < (places[theirs], work[theirs])

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
            ahead = (at for at, other in enumerate(order) if behind(sequence, other))
            order.insert(next(ahead, len(order)), sequence)
        return order

    def to_preempt(self, sequence: T, placed: Iterable[T]) -> list[T]:
        """Return placed sequences that make way for a waiting one, in this order.

        First those of shares that have two places more than its own, as long as that is so. Where
        its own has none, also one whose turn was long enough; a long prompt waits for longer turns.
        """
        places, _ = self._standing()
        rest, victims = list(placed), []
        turns = self._waiting_requests(places) <= MOST_IN_TURNS
        while rest:
            candidates = []
            for other in rest:
                share, own_share = _where_they_part(other, sequence)
                theirs, own = places[share], places[own_share]
                excess = theirs >= own + 2
                if excess or (turns and theirs > own == 0 and self._turn_done(other, sequence)):
                    work = 0 if excess else self._turns[other.id].work
                    held = tuple(places[share] for share in shares_of(other))
                    candidates.append(((*held, work, other.id), other))
            if not candidates:
                break
            _, victim = max(candidates, key=lambda candidate: candidate[0])
            rest.remove(victim)
            victims.append(victim)
            for share in shares_of(victim):
                places[share] -= 1
        return victims

    def to_preempt_early(self, sequence: T, placed: Iterable[T]) -> list[T]:
        """Return placed sequences whose bytes a short waiting one may have before their turn ends.

        Its share has no place. The caller sees to it that all they have computed stays.
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
        """Return the places of a sequence's shares, the client's first."""
        places, _ = self._standing()
        return [places[share] for share in shares_of(sequence)]

    def has_begun(self, request: Path) -> bool:
        """Tell whether a sequence of an open request has had a place."""
        return self._shares[request].begun

    # ---- acts

    def open(self, sequence: T) -> None:
        """Note a new sequence."""
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
        """Forget a sequence that has no place."""
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
        """Note that a sequence has a place; of its turn, at most half is work done again."""
        repeated, credit = sequence.remaining_tokens if again else 0, 0
        if (before := self._broken_off.pop(sequence.id, None)) is not None:
            repeated, credit = max(repeated, before.repeated), before.whole
        self._turns[sequence.id] = _ShareTurn(sequence, _work(sequence), repeated, credit)
        for share in shares_of(sequence):
            self._shares[share].begun = True

    def end_turn(self, sequence: T, *, prefilled: bool) -> None:
        """Note that a sequence has no place any more, and count its work.

        One whose prompt is not read goes on with its turn when it has a place again.
        """
        turn = self._turns.pop(sequence.id)
        if not prefilled and turn.whole < turn.least:
            self._broken_off[sequence.id] = turn
        for share in shares_of(sequence):
            self._shares[share].work += turn.work

    # ---- parts

    def _standing(self) -> tuple[defaultdict[Path, int], defaultdict[Path, int]]:
        """Return the places and the work of all shares, turns that go on included."""
        places: defaultdict[Path, int] = defaultdict(int)
        work = defaultdict(int, {share: entry.work for share, entry in self._shares.items()})
        for turn in self._turns.values():
            for share in shares_of(turn.sequence):
                places[share] += 1
                work[share] += turn.work
        return places, work

    def _waiting_requests(self, places: dict[Path, int]) -> int:
        """Return the number of requests without a place."""
        return sum(
            not entry.children and not places[share]
            for share, entry in self._shares.items()
            if share
        )

    def _turn_done(self, other: T, sequence: T) -> bool:
        """Tell whether a placed sequence has done enough to make way for a waiting one."""
        turn = self._turns[other.id]
        return turn.whole >= max(turn.least, sequence.remaining_tokens)


def shares_of(sequence: Sharer) -> Iterator[Path]:
    """Yield the shares that a sequence belongs to, the client's first."""
    owners = sequence.owners
    return (owners[:level] for level in range(1, len(owners) + 1))


def _where_they_part(one: Sharer, other: Sharer) -> tuple[Path, Path]:
    """Return the first shares that two sequences do not have in common, or their request."""
    pairs = zip(shares_of(one), shares_of(other), strict=True)
    return next(
        ((own, theirs) for own, theirs in pairs if own != theirs), (one.owners, other.owners)
    )


def _work(sequence: Sharer) -> int:
    return sequence.served_tokens + GENERATED_WORK * sequence.generated_tokens
