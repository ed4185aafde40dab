"""The ledger: nothing exceeds the limit, nothing is lost, and `check` detects faults."""

from __future__ import annotations

import random

import pytest

from penstock.errors import LedgerFull, NeverFits, PenstockError
from penstock.ledger import Kind, Ledger, Reservation


def recount(*held: Reservation) -> dict[Kind, int]:
    found: dict[Kind, int] = {}
    for reservation in held:
        found[reservation.kind] = found.get(reservation.kind, 0) + reservation.nbytes
    return found


def test_reserved_bytes_are_counted_by_kind() -> None:
    ledger = Ledger(100)
    nodes, tails = ledger.reserve(Kind.NODES, 30), ledger.reserve(Kind.TAILS, 20)
    assert (ledger.used_bytes, ledger.free_bytes) == (50, 50)
    assert ledger.by_class()[Kind.NODES] == 30
    assert ledger.by_class()[Kind.BUFFERS] == 0
    ledger.check(recount(nodes, tails))
    nodes.release()
    assert ledger.by_class()[Kind.NODES] == 0
    ledger.check(recount(tails))


def test_by_class_returns_a_copy() -> None:
    ledger = Ledger(100)
    ledger.by_class()[Kind.NODES] = 7
    ledger.check({})


def test_limit_may_be_filled_to_the_byte() -> None:
    ledger = Ledger(100)
    ledger.reserve(Kind.NODES, 99)
    ledger.reserve(Kind.TAILS, 1)
    assert ledger.free_bytes == 0
    ledger.reserve(Kind.INDEX, 0)
    with pytest.raises(LedgerFull):
        ledger.reserve(Kind.TAILS, 1)
    assert ledger.used_bytes == 100


def test_refused_reservation_has_numbers_and_takes_no_bytes() -> None:
    ledger = Ledger(1_000)
    held = ledger.reserve(Kind.NODES, 600)
    with pytest.raises(LedgerFull, match=r"tails need 401 B; 400 B of the limit of 1.00 kB") as e:
        ledger.reserve(Kind.TAILS, 401)
    assert (e.value.needed_bytes, e.value.free_bytes, e.value.limit_bytes) == (401, 400, 1_000)
    assert e.value.status == 503
    assert isinstance(e.value, PenstockError)
    ledger.check(recount(held))


def test_reservation_above_limit_raises_never_fits() -> None:
    ledger = Ledger(1_000)
    ledger.reserve(Kind.WEIGHTS, 300)
    cache = ledger.reserve(Kind.NODES, 500)
    with pytest.raises(LedgerFull):
        ledger.reserve(Kind.TAILS, 700)
    with pytest.raises(NeverFits, match=r"701 B can never fit .* weights of 300 B") as e:
        ledger.reserve(Kind.TAILS, 701)
    assert (e.value.needed_bytes, e.value.room_bytes, e.value.limit_bytes) == (701, 700, 1_000)
    assert e.value.status == 413
    assert isinstance(e.value, ValueError)
    with pytest.raises(NeverFits):
        cache.resize(701)
    assert ledger.used_bytes == 800


def test_weights_may_grow_up_to_limit() -> None:
    ledger = Ledger(1_000)
    weights = ledger.reserve(Kind.WEIGHTS, 900)
    weights.resize(1_000)
    with pytest.raises(NeverFits):
        weights.resize(1_001)
    assert ledger.by_class()[Kind.WEIGHTS] == 1_000


def test_leaving_with_block_releases_bytes() -> None:
    ledger = Ledger(100)
    with ledger.reserve(Kind.BUFFERS, 40):
        assert ledger.used_bytes == 40
    assert ledger.used_bytes == 0


def test_exception_in_with_block_releases_bytes() -> None:
    ledger = Ledger(100)
    with pytest.raises(KeyError), ledger.reserve(Kind.NODES, 40):
        raise KeyError
    ledger.check({})


def test_reservation_is_resized_to_allocated_bytes() -> None:
    ledger = Ledger(100)
    held = ledger.reserve(Kind.NODES, 40)
    held.resize(35)
    assert ledger.used_bytes == 35
    held.resize(100)
    with pytest.raises(NeverFits):
        held.resize(101)
    ledger.check({Kind.NODES: 100})


def test_growing_reservation_needs_only_the_difference() -> None:
    ledger = Ledger(100)
    held = ledger.reserve(Kind.NODES, 60)
    other = ledger.reserve(Kind.TAILS, 30)
    held.resize(70)
    with pytest.raises(LedgerFull, match="need 1 B; 0 B"):
        held.resize(71)
    ledger.check(recount(held, other))
    assert held.nbytes == 70


def test_release_is_idempotent() -> None:
    ledger = Ledger(100)
    keep = ledger.reserve(Kind.NODES, 10)
    held = ledger.reserve(Kind.NODES, 40)
    held.release()
    held.release()
    assert ledger.used_bytes == keep.nbytes == 10
    with pytest.raises(ValueError, match="was released"):
        held.resize(1)
    ledger.check(recount(keep))


def test_negative_sizes_are_refused() -> None:
    ledger = Ledger(100)
    with pytest.raises(ValueError, match="nbytes must not be negative"):
        ledger.reserve(Kind.NODES, -1)
    with pytest.raises(ValueError, match="limit_bytes must not be negative"):
        ledger.set_limit(-1)
    with pytest.raises(ValueError, match="limit_bytes must not be negative"):
        Ledger(-1)
    ledger.check({})


def test_lowered_limit_reports_excess_and_admits_nothing() -> None:
    ledger = Ledger(100)
    held = ledger.reserve(Kind.NODES, 80)
    assert ledger.set_limit(80) == 0
    assert ledger.set_limit(50) == 30
    assert ledger.free_bytes == 0
    with pytest.raises(LedgerFull):
        ledger.reserve(Kind.TAILS, 1)
    held.resize(49)
    assert ledger.free_bytes == 1
    ledger.reserve(Kind.TAILS, 1)
    assert ledger.set_limit(200) == 0
    assert ledger.free_bytes == 150


def test_totals_match_for_random_operations() -> None:
    draw, ledger = random.Random(1), Ledger(1_000)
    held: list[Reservation] = []
    for _ in range(3_000):
        fits = ledger.free_bytes
        wanted = draw.randrange(400)
        if held and draw.random() < 0.5:
            draw.choice(held).release() if draw.random() < 0.3 else held.pop().release()
        else:
            try:
                held.append(ledger.reserve(draw.choice(list(Kind)), wanted))
                assert wanted <= fits
            except (LedgerFull, NeverFits):
                assert wanted > fits
        held = [each for each in held if each in ledger._held]
        ledger.check(recount(*held))
        assert 0 <= ledger.used_bytes <= ledger.limit_bytes
        assert ledger.used_bytes + ledger.free_bytes == ledger.limit_bytes


# ---- negative controls: each ledger below is wrong in one way


class ForgetsAKind(Ledger):
    def _add(self, reservation: Reservation, nbytes: int) -> None:
        super()._add(reservation, nbytes)
        self._by_kind[Kind.NODES] = 0


class ForgetsTheSum(Ledger):
    def _add(self, reservation: Reservation, nbytes: int) -> None:
        before = self._used_bytes
        super()._add(reservation, nbytes)
        self._used_bytes = max(before, self._used_bytes)


class DoesNotRelease(Ledger):
    def _release(self, reservation: Reservation) -> None:
        self._held.discard(reservation)


@pytest.mark.parametrize("broken", [ForgetsAKind, ForgetsTheSum, DoesNotRelease])
def test_check_detects_wrong_total(broken: type[Ledger]) -> None:
    ledger = broken(100)
    with pytest.raises(AssertionError):
        kept = ledger.reserve(Kind.NODES, 30)
        gone = ledger.reserve(Kind.TAILS, 20)
        ledger.check(recount(kept, gone))
        gone.release()
        ledger.check(recount(kept))


@pytest.mark.parametrize("found", [{}, {Kind.NODES: 29}, {Kind.NODES: 30, Kind.TAILS: 1}])
def test_check_detects_wrong_recount(found: dict[Kind, int]) -> None:
    ledger = Ledger(100)
    ledger.reserve(Kind.NODES, 30)
    with pytest.raises(AssertionError, match="counted"):
        ledger.check(found)
