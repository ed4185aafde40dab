"""Which models and prefixes are evicted to make room for another model."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import NeverFits
from penstock.pool.model_policy import (
    HALF_LIFE_SECONDS,
    Resident,
    Standing,
    check_fits,
    room_plan,
    to_drain,
)

GB = 10**9


def loaded(name: str, **facts: Any) -> Resident:
    usual = {"fixed_bytes": 4 * GB, "load_seconds": 4.0, "standing": Standing.LOADED}
    return Resident(name=name, **{**usual, **facts})


def planned(residents: list[Resident], nbytes: int, now: float = 0.0) -> list[tuple[str, bool]]:
    plan = room_plan(residents, nbytes, now)
    assert plan is not None
    return sorted((relief.resident.name, relief.whole) for relief in plan)


def test_model_fastest_to_reload_is_unloaded_first() -> None:
    slow, quick = loaded("slow", load_seconds=40.0), loaded("quick", load_seconds=1.0)
    assert planned([slow, quick], GB) == [("quick", True)]


def test_long_unused_model_is_unloaded_first() -> None:
    old = loaded("old", load_seconds=6.0, used_seconds=0.0)
    new = loaded("new", load_seconds=4.0, used_seconds=HALF_LIFE_SECONDS)
    assert planned([old, new], GB, HALF_LIFE_SECONDS) == [("old", True)]
    assert planned([old, new], GB, HALF_LIFE_SECONDS / 4) == [("new", True)]


@pytest.mark.parametrize(("seconds", "goes"), [(0.1, [("a", False)]), (900.0, [("b", True)])])
def test_cheap_prefixes_are_evicted_before_models(
    seconds: float, goes: list[tuple[str, bool]]
) -> None:
    reading = loaded("a", cold_bytes=2 * GB, cold_seconds=seconds, open_requests=1)
    assert planned([reading, loaded("b")], GB) == goes


def test_no_more_models_are_unloaded_than_needed() -> None:
    cheap = loaded("cheap", cold_bytes=GB, cold_seconds=0.1)
    assert planned([cheap, loaded("dear", load_seconds=9.0)], 5 * GB) == [("cheap", True)]
    small = loaded("small", fixed_bytes=GB, load_seconds=0.1)
    assert planned([small, loaded("large")], 4 * GB) == [("large", True)]


@pytest.mark.parametrize("facts", [{"pinned": True}, {"open_requests": 1}])
def test_pinned_and_busy_models_are_not_unloaded(facts: dict[str, Any]) -> None:
    assert room_plan([loaded("stays", **facts)], GB, 0.0) is None
    assert planned([loaded("stays", **facts, cold_bytes=GB, cold_seconds=1.0)], GB) == [
        ("stays", False)
    ]


def test_unloaded_and_loading_models_are_not_victims() -> None:
    away = loaded("away", standing=Standing.AWAY)
    assert room_plan([away, loaded("b", standing=Standing.LOADING)], 1, 0.0) is None


def test_busy_model_is_drained_unless_pinned() -> None:
    pinned, busy = loaded("a", pinned=True), loaded("b", open_requests=3)
    assert to_drain([pinned, busy]) is busy
    assert to_drain([pinned]) is None


def test_idle_model_expires_after_its_ttl() -> None:
    resident = loaded("a", ttl_seconds=60.0, used_seconds=100.0)
    assert [resident.has_expired(now) for now in (159.0, 160.0)] == [False, True]
    assert not loaded("b", used_seconds=0.0).has_expired(1e9)
    resident.open_requests = 1
    assert not resident.has_expired(1e9)
    resident.open_requests, resident.pinned = 0, True
    assert not resident.has_expired(1e9)


def test_model_that_cannot_fit_beside_pinned_ones_is_refused_with_numbers() -> None:
    pinned, large = loaded("pinned", pinned=True), loaded("large", fixed_bytes=7 * GB)
    residents = [pinned, large, loaded("other")]
    check_fits(large, residents, 12 * GB, GB)
    with pytest.raises(
        NeverFits,
        match=r"large needs 7.00 GB; .* 10.00 GB leaves 5.00 GB beside"
        r" 4.00 GB of pinned pinned",
    ) as refused:
        check_fits(large, residents, 10 * GB, GB)
    assert (refused.value.needed_bytes, refused.value.room_bytes) == (7 * GB, 5 * GB)
