"""The bench of a million tokens, on a few thousand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock_bench import million

LOAD = million.MillionLoad(
    lengths=(2_000, 4_000),
    attend_tokens=128,
    attend_prompt=128,
    active_kv_size=256,
    memory_limit="200MB",
    prefill_chunk=256,
    facts=4,
    steps=4,
)


@pytest.fixture(scope="module")
def measured() -> Any:
    return million.measure(LOAD)


def test_facts_of_beginning_are_known_within_planned_memory(measured: Any) -> None:
    assert measured.met and measured.penstock["known"] == 4
    assert [row["tokens"] for row in measured.raw["rows"]] == [2_000, 4_000]
    assert all(len(row["step_ms"]) == 4 for row in measured.raw["rows"])
    assert max(measured.penstock[name] for name in ("most_bytes", "planned_bytes")) <= 200_000_000


def test_report_misses_goals_beyond_limit_or_bound(measured: Any) -> None:
    rows = [{**row, "tokens": 64 * row["tokens"]} for row in measured.raw["rows"]]
    slower = [rows[0], {**rows[1], "step_ms": [10 * ms for ms in rows[0]["step_ms"]]}]
    given = [True] * 4, 10**8, 10**8, 0
    flat = [rows[0], {**rows[1], "step_ms": rows[0]["step_ms"]}]
    assert million.report(LOAD, flat, *given).met
    assert not million.report(LOAD, slower, *given).met
    assert not million.report(LOAD, flat, [True, False], 10**8, 10**8, 0).met
    small = replace(LOAD, memory_limit="50MB")
    assert not million.report(small, flat, *given).met
