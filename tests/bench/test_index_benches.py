"""Lookup and trace benches on small sizes."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import SettingError
from penstock.prefix import HalfLife
from penstock_bench import lookup, trace
from penstock_bench.report import publish

SMALL = lookup.LookupLoad(
    prompt_tokens=2_048, block_size=16, branches=8, branch_tokens=64, path_nodes=32, rounds=3
)


@pytest.fixture(scope="module")
def looked_up() -> Any:
    return lookup.measure(SMALL)


def test_lookup_bench_times_every_shape_on_both_sides(looked_up: Any) -> None:
    names = [shape.name for shape in lookup.shapes(SMALL)]
    assert list(looked_up.penstock["median_ms"]) == list(looked_up.rival_figures["median_ms"])
    assert list(looked_up.penstock["median_ms"]) == names
    assert set(looked_up.ratio) == {"worst_ms", *names}
    assert looked_up.penstock["worst_ms"] >= max(looked_up.penstock["median_ms"].values())
    assert len(looked_up.raw["times"][names[0]]["penstock"]["round_ms"]) == 3


def test_both_lookups_match_within_one_block() -> None:
    for shape in lookup.shapes(SMALL):
        ours = lookup.our_lookup(shape, SMALL.block_size)()
        theirs = lookup.their_lookup(shape)()
        assert ours == shape.known_tokens
        assert 0 <= theirs - ours < SMALL.block_size, shape.name


def test_lookup_bench_applies_goal_to_slowest_round() -> None:
    slow = lookup.Times(16, [1.0, 10.0, 1.0])
    fast = lookup.Times(16, [1.0, 9.99, 1.0])
    rival = lookup.Times(16, [50.0])
    for ours, met in ((slow, False), (fast, True)):
        found = lookup.report(SMALL, {"shape": {"penstock": ours, lookup.RIVAL: rival}})
        assert found.met is met
        assert found.ratio["shape"] == 50


def test_lookup_bench_refuses_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "our_lookup", lambda shape, size: lambda: 1)
    with pytest.raises(AssertionError, match="1 of"):
        lookup.measure(SMALL)


# ---- trace

LENGTHS = (1_024, 1_300, 1_536, 700, 1_024, 1_300)
BLOCKS = ([0, 1], [0, 2, 3], [0, 1, 4], [0, 5], [0, 1], [0, 2, 3])


def write(folder: Path, text: str | None = None) -> Path:
    file = folder / "trace.jsonl"
    lines = (
        json.dumps({"timestamp": 1_000 * i, "input_length": n, "output_length": 1, "hash_ids": b})
        for i, (n, b) in enumerate(zip(LENGTHS, BLOCKS, strict=True))
    )
    file.write_text("\n".join(lines) if text is None else text)
    return file


def test_trace_is_parsed(tmp_path: Path) -> None:
    read = trace.read_trace(write(tmp_path))
    assert (read.block_tokens, read.unique_blocks) == (512, 6)
    assert read.input_tokens == sum(LENGTHS)
    assert read.tokens_of(read.visits[1], 2) == 1_024
    assert read.tokens_of(read.visits[1], 3) == 1_300


def test_simultaneous_trace_requests_keep_order(tmp_path: Path) -> None:
    line = '{"timestamp": 5, "input_length": 8, "hash_ids": [1]}\n'
    first, second = trace.read_trace(write(tmp_path, line * 2)).visits
    assert first.seconds < second.seconds < first.seconds + 1e-3


@pytest.mark.parametrize("text", ["", "{}", "[]", "no json", '{"timestamp": 1, "input_length": 2}'])
def test_invalid_trace_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingError, match=r"line 1 is not a request|holds no request"):
        trace.read_trace(write(tmp_path, text))
    with pytest.raises(SettingError, match="cannot read"):
        trace.read_trace(tmp_path / "absent")


def test_unlimited_cache_hits_every_repeated_block(tmp_path: Path) -> None:
    read = trace.read_trace(write(tmp_path))
    hits = 512 + 1_024 + 512 + 1_024 + 1_300
    for node_blocks in (1, 2, 8):
        for policy in (HalfLife(), trace.LeastRecent()):
            found = trace.replay(read, 6, policy, node_blocks)
            assert (found.hit_tokens, found.evictions) == (hits, 0)
    assert trace.optimum(read, 6) == pytest.approx(hits / sum(LENGTHS))


def test_lru_policy_evicts_least_recently_used(tmp_path: Path) -> None:
    """Four blocks: 0 1, then 2 3, then 4 replaces 3, then 5 replaces 2."""
    read = trace.read_trace(write(tmp_path))
    found = trace.replay(read, 4, trace.LeastRecent(), 1)
    assert found.hit_tokens == 512 + 1_024 + 512 + 1_024 + 512
    assert found.evictions > 0


def best_by_trying(visits: list[list[int]], capacity: int) -> int:
    """Return the best way to keep whole paths of at most `capacity` blocks."""
    states = {frozenset(): 0}
    for blocks in visits:
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            matched = next((i for i, b in enumerate(blocks) if b not in kept), len(blocks))
            there = kept | set(blocks)
            for count in range(min(capacity, len(there)) + 1):
                for chosen in combinations(sorted(there), count):
                    key = frozenset(chosen)
                    after[key] = max(after.get(key, 0), hits + matched)
        states = after
    return max(states.values())


@pytest.mark.parametrize("capacity", [1, 2, 3, 4])
def test_optimum_matches_brute_force(tmp_path: Path, capacity: int) -> None:
    visits = [[0, 1], [0, 2, 3], [0, 1, 4], [0, 5], [0, 1], [0, 2, 3], [6], [0, 5], [6]]
    text = "\n".join(
        json.dumps({"timestamp": i, "input_length": 4 * len(b), "hash_ids": b})
        for i, b in enumerate(visits)
    )
    read = trace.read_trace(write(tmp_path, text))
    tokens = trace.optimum(read, capacity) * read.input_tokens
    assert tokens == pytest.approx(4 * best_by_trying(visits, capacity))


def test_hit_rate_below_lru_misses_goal(tmp_path: Path) -> None:
    read = trace.read_trace(write(tmp_path))
    load = trace.TraceLoad(shares=(0.5,))
    good, bad = (trace.Replay(hits, hits / 7_000, 1, 1, 1.0) for hits in (200, 199))
    for ours, met in ((good, True), (bad, False)):
        found = trace.report(read, load, {0.5: {"penstock": ours, "lru": good}}, {0.5: 0.6})
        assert found.met is met


def test_only_known_trace_has_goals(tmp_path: Path) -> None:
    load = trace.TraceLoad(shares=(0.02,))
    found = trace.Replay(1, 0.1, 1, 1, 1.0)
    same = {0.02: {"penstock": found, "lru": found}}
    read = trace.read_trace(write(tmp_path))
    assert trace.report(read, load, same, {0.02: 0.6}).met
    known = trace.Trace([read.visits[0]] * 12_031, 512, 182_790, 1_000)
    assert not trace.report(known, load, same, {0.02: 0.6}).met


def test_trace_bench_prints_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = trace.measure(write(tmp_path), trace.TraceLoad(shares=(0.5, 1.0)))
    publish(report, as_json=True, save=None)
    printed = json.loads(capsys.readouterr().out)
    assert set(printed["penstock"]["hit_rate"]) == {"50%", "100%"}
    assert printed["goal"]["optimum_hit_rate"]["100%"] == printed["penstock"]["hit_rate"]["100%"]
    assert printed["penstock"]["requests_per_second"] > 0
