"""Checkpoints on a path: captured once, resumed at the last one, sparser with distance."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from penstock.kv.segment import Segment
from penstock.kv.states import RecurrentState, States
from penstock.ledger import Kind, Ledger
from penstock.prefix import checkpoints as module
from penstock.prefix.checkpoints import LEAST, NEAR, Checkpoints, resume, retained
from penstock.prefix.pin import Pin
from penstock.prefix.prefixes import Prefixes

SIZE = 32
SPAN = 256
STATE_BYTES = 4 * 8
TOKEN_BYTES = 2 * 4 * 2


def states(number: float) -> States:
    return ((mx.full((1, 8), number),),)


def made(limit_bytes: int = 1_000_000) -> tuple[Prefixes[Segment], Checkpoints]:
    prefixes: Prefixes[Segment] = Prefixes(Ledger(limit_bytes), block_size=SIZE, remembered=0)
    return prefixes, Checkpoints(prefixes, STATE_BYTES)


def grown(
    prefixes: Prefixes[Segment], pin: Pin[Segment], tokens: Sequence[int], *nodes: int
) -> None:
    """Insert nodes of this number of blocks after the pinned path."""
    for blocks in nodes:
        start = pin.path[-1].end if pin.path else 0
        end = start + blocks * SIZE
        layer = (mx.zeros((1, 1, end - start, 2)), mx.zeros((1, 1, end - start, 2)))
        hashes = prefixes.block_hashes(tokens[:end])
        with prefixes.reserve(Kind.TAILS, TOKEN_BYTES * (end - start)) as paid:
            prefixes.insert(pin, start // SIZE, hashes, tokens[start:end], Segment((layer,)), paid)


def empty_pin(prefixes: Prefixes[Segment]) -> Pin[Segment]:
    return prefixes.pin(prefixes.match([]))


def places(pin: Pin[Segment]) -> list[int]:
    return [node.start + each.offset for node in pin.path for each in node.segment.checkpoints]


def captured(points: Checkpoints, pin: Pin[Segment], *positions: int, **more: bool) -> list[bool]:
    given = {"turn_end": False, **more}
    return [
        points.capture(pin.path, at, RecurrentState(states(at), exclusive=True), **given)
        for at in positions
    ]


def test_state_is_resumed_only_at_its_own_boundary() -> None:
    prefixes, points = made()
    pin = empty_pin(prefixes)
    grown(prefixes, pin, range(200), 2, 3)
    assert resume(pin.path, 160) == (0, None)
    assert captured(points, pin, 64, 96, 0, 192, turn_end=True) == [True, True, False, False]
    assert captured(points, pin, 160) == [True]
    for most, at in ((160, 160), (159, 96), (96, 96), (95, 64), (64, 64), (63, 0)):
        position, live = resume(pin.path, most)
        assert position == at
        assert (live is None) == (at == 0)
        if live is not None:
            assert live.exclusive and live.states[0][0][0, 0].item() == at  # type: ignore[index]
    assert prefixes.ledger.by_class()[Kind.CHECKPOINTS] == 3 * STATE_BYTES
    prefixes.check()


def test_capturing_again_keeps_state_and_marks_turn_end() -> None:
    prefixes, points = made()
    pin = empty_pin(prefixes)
    grown(prefixes, pin, range(64), 2)
    assert captured(points, pin, 64) == [True]
    held = pin.path[0].segment.checkpoints[0]
    assert captured(points, pin, 64) == [True]
    assert pin.path[0].segment.checkpoints == (held,)
    assert captured(points, pin, 64, turn_end=True) == [True]
    (ended,) = pin.path[0].segment.checkpoints
    assert ended.turn_end and ended.states is held.states
    captured(points, pin, 64)
    assert pin.path[0].segment.checkpoints[0].turn_end


def test_state_is_not_captured_without_memory_or_with_nan() -> None:
    prefixes, points = made()
    pin = empty_pin(prefixes)
    grown(prefixes, pin, range(64), 2)
    prefixes.ledger.set_limit(prefixes.ledger.used_bytes + STATE_BYTES - 1)
    assert captured(points, pin, 64) == [False]
    prefixes.ledger.set_limit(prefixes.ledger.used_bytes + STATE_BYTES)
    broken = RecurrentState(states(float("nan")), exclusive=True)
    assert not points.capture(pin.path, 64, broken, turn_end=False)
    assert places(pin) == []
    assert captured(points, pin, 64) == [True]
    prefixes.check()


def test_turn_end_marks_last_state_before_it() -> None:
    prefixes, points = made()
    pin = empty_pin(prefixes)
    grown(prefixes, pin, range(256), 4, 4)
    assert points.end_turn(pin.path, 256) == 0
    captured(points, pin, 96)
    assert points.end_turn(pin.path, 159) == 96
    captured(points, pin, 160)
    assert points.end_turn(pin.path, 200) == 160
    ends = [each.turn_end for node in pin.path for each in node.segment.checkpoints]
    assert ends == [True, True]


def test_path_keeps_one_state_per_span() -> None:
    """While decoding block by block, the last boundary and one per span stay."""
    prefixes, points = made()
    pin, tokens = empty_pin(prefixes), range(8 * SPAN)
    for at in range(SIZE, 8 * SPAN + 1, SIZE):
        grown(prefixes, pin, tokens, 1)
        captured(points, pin, at)
        spans = [place for place in places(pin) if place != at]
        assert all(place % SPAN == 0 for place in spans)
        assert len(spans) == len(retained(range(SPAN, at, SPAN), at, SPAN) - {at})
    assert places(pin) == list(range(SPAN, 8 * SPAN + 1, SPAN))
    prefixes.check()


def test_states_at_branches_and_turn_ends_are_kept() -> None:
    prefixes, points = made()
    pin, tokens = empty_pin(prefixes), list(range(8 * SPAN))
    grown(prefixes, pin, tokens, 3)
    captured(points, pin, 96)
    other = empty_pin(prefixes)
    grown(prefixes, other, [*tokens[:96], *range(5_000, 5_032)], 3, 1)
    ends = []
    for at in range(128, 8 * SPAN + 1, SIZE):
        grown(prefixes, pin, tokens, 1)
        turn_end = at in (160, 320, 480)
        ends += [at] * turn_end
        captured(points, pin, at, turn_end=turn_end)
        assert {96, *ends[-module.TURN_ENDS :]} <= set(places(pin))
    assert 160 not in places(pin)


def test_number_of_states_is_bounded_by_kv_bytes() -> None:
    prefixes, _ = made()
    large = SPAN * TOKEN_BYTES  # a share of 1/4 of 32 spans is 8 states
    points = Checkpoints(prefixes, large)
    pin, tokens = empty_pin(prefixes), range(32 * SPAN)
    for at in range(SPAN, 32 * SPAN + 1, SPAN):
        grown(prefixes, pin, tokens, SPAN // SIZE)
        captured(points, pin, at)
        most = max(LEAST, at // SPAN // 4)
        assert len(places(pin)) <= most
    assert len(places(pin)) > LEAST


def test_path_with_little_kv_keeps_four_states() -> None:
    prefixes, _ = made()
    points = Checkpoints(prefixes, 100 * SPAN * TOKEN_BYTES)
    pin, tokens = empty_pin(prefixes), range(8 * SPAN)
    counts = []
    for at in range(SPAN, 8 * SPAN + 1, SPAN):
        grown(prefixes, pin, tokens, SPAN // SIZE)
        captured(points, pin, at)
        counts.append(len(places(pin)))
    assert max(counts) == 4


@pytest.mark.parametrize(
    ("spans_away", "spacing"),
    [(0, 1), (NEAR - 1, 1), (NEAR, 1), (2 * NEAR, 2), (4 * NEAR - 1, 2), (4 * NEAR, 4)],
)
def test_checkpoint_spacing_grows_with_distance(spans_away: int, spacing: int) -> None:
    assert module._spacing(spans_away * SPAN, SPAN) == spacing * SPAN
    tip = 64 * SPAN
    kept = retained(range(SIZE, tip + 1, SIZE), tip, SPAN)
    near = [place for place in kept if tip - place >= spans_away * SPAN]
    assert max(near) - max(place for place in near if place < max(near)) in {
        spacing * SPAN,
        2 * spacing * SPAN,
    }


def test_checkpoints_past_current_position_are_retained() -> None:
    assert retained([32, 64, 96, 128], 70, SPAN) == {64, 96, 128}
    assert retained([], 70, SPAN) == set()
    assert retained([96], 70, SPAN) == {96}


def test_small_limit_widens_checkpoint_spacing() -> None:
    places, tip = range(64, 64 * 65, 64), 64 * 64

    def apart(distance: int) -> int:
        step = 64
        while 2 * step * NEAR <= distance:
            step *= 2
        return step

    def spaced(times: int) -> set[int]:
        return {place for place in places if place % apart(times * (tip - place)) == 0} | {tip}

    assert retained(places, tip, 64) == spaced(1)
    seen = set()
    for most in range(len(spaced(1)), 1, -1):
        times = next(2**k for k in range(20) if len(spaced(2**k)) <= most)
        assert retained(places, tip, 64, limit=most) == spaced(times)
        seen.add(times)
    assert {1, 2, 4, 8} <= seen
