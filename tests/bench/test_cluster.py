"""Simulated replicas: small cases computed by hand, and invariants."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import routing
from penstock.cli import main
from penstock.errors import SettingError
from penstock.routing import POLICIES
from penstock_bench import cluster, trace
from penstock_bench.bench_settings import Machine
from penstock_bench.cluster_simulation import (
    Arrival,
    Cluster,
    TraceCopies,
    one_large,
    quantile,
    simulate,
)
from penstock_bench.report import publish

SIZE = 512
QUICK = Machine(memory_tokens=100 * SIZE, prefill_rate=512.0, decode_rate=10.0, max_batch_size=2)
FASTER = Machine(
    memory_tokens=200 * SIZE, prefill_rate=4.0 * SIZE, decode_rate=10.0, max_batch_size=4
)


def made(*requests: tuple[float, list[int], int]) -> tuple[trace.Trace, list[Arrival]]:
    """Return a trace of (seconds, blocks, answer tokens), and its requests."""
    visits = [trace.Visit(at, SIZE * len(b), tuple(b), out) for at, b, out in requests]
    unique = len({block for visit in visits for block in visit.blocks})
    of = trace.Trace(visits, SIZE, unique, sum(visit.input_tokens for visit in visits))
    return of, [Arrival(visit.seconds, visit, visit.blocks) for visit in visits]


def conversations(number: int, turns: int) -> trace.Trace:
    """Return conversations with one system prompt; each turn adds two blocks."""
    rng, requests, new = random.Random(1), [], 1
    for _ in range(number):
        at, blocks = rng.uniform(0, 50), [0]
        for _ in range(turns):
            blocks = [*blocks, new, new + 1]
            new += 2
            requests.append((at, blocks, 20))
            at += rng.uniform(10, 20)
    return made(*sorted(requests))[0]


@pytest.fixture(scope="module")
def crowd() -> TraceCopies:
    return TraceCopies(conversations(60, 4), 4)


# ---- one replica, by hand


def test_replica_times_follow_cost_model() -> None:
    """A block takes one second; the second prompt finds one block, the third waits for a slot."""
    of, arrivals = made((0.0, [1, 2], 40), (0.5, [1, 3], 40), (0.6, [9], 40))
    found = simulate(of, arrivals, Cluster(1, "round-robin"), QUICK)
    first, second, third = 2.0, 3.0, 6.0 + 1.0
    waits = [first, second - 0.5, third - 0.6]
    assert found.wait_p50_seconds == pytest.approx(sorted(waits)[1])
    assert found.wait_p95_seconds == pytest.approx(max(waits))
    assert found.queue_p95_seconds == pytest.approx(6.0 - 0.6)
    assert found.hit_rate == pytest.approx(1 / 5)
    assert found.busy == pytest.approx(4 / (7.0 + 4.0))
    assert found.imbalance == 1.0


def test_cached_prompt_computes_one_token() -> None:
    of, arrivals = made((0.0, [1, 2], 0), (10.0, [1, 2], 0))
    found = simulate(of, arrivals, Cluster(1, "hash"), QUICK)
    assert found.hit_rate == pytest.approx((2 * SIZE - 1) / (4 * SIZE))
    assert found.wait_p50_seconds == pytest.approx(1 / 512)


# ---- several


def test_prefix_routing_has_more_hits_than_round_robin(crowd: TraceCopies) -> None:
    of = conversations(60, 4)
    arrivals = crowd.arrivals(4)
    large = one_large(of, arrivals, FASTER, 4)
    found = {policy: simulate(of, arrivals, Cluster(4, policy), FASTER) for policy in POLICIES}
    for policy in ("hash", "prefix+load"):
        assert found[policy].hit_rate > 0.9 * large
    assert found["round-robin"].hit_rate < 0.7 * large
    # All begin with one block, which is soon known in one place: everybody goes there.
    assert found["prefix"].imbalance == pytest.approx(4.0)
    assert found["prefix+load"].imbalance < 1.5
    assert found["prefix+load"].wait_p95_seconds < found["prefix"].wait_p95_seconds / 10
    assert found["round-robin"].gossip_bytes_per_second == 0
    assert found["prefix+load"].whole_bytes_per_second > 0
    # The same work, whoever does it: what is not found is computed.
    for policy in POLICIES:
        assert found[policy].requests == 240


def test_hot_system_prompt_is_replicated(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 common blocks, 6 own: without the common-block rule all queue at one replica."""
    rng, now, requests = random.Random(1), 0.0, []
    for number in range(1_000):
        now += rng.expovariate(6.0)
        own = [1_000 + 10 * number + block for block in range(6)]
        requests.append((now, [*range(80), *own], 10))
    of, arrivals = made(*requests)
    machine = Machine(memory_tokens=10**6, prefill_rate=20.0 * SIZE)
    waits = []
    for common in (routing.COMMON, 10**9):
        monkeypatch.setattr(routing, "COMMON", common)
        waits.append(simulate(of, arrivals, Cluster(4, "prefix+load"), machine).wait_p95_seconds)
    print(f"p95 of the first token: {waits[0]:.1f} s, without the rule {waits[1]:.1f} s")
    assert waits[0] < 5.0 < 20.0 < waits[1]


def test_simulation_is_reproducible(crowd: TraceCopies) -> None:
    of, arrivals = conversations(60, 4), crowd.arrivals(8)
    twice = [simulate(of, arrivals, Cluster(8, "prefix+load"), FASTER) for _ in range(2)]
    assert twice[0] == twice[1]


def test_gossip_counts_four_bytes_per_change_and_router() -> None:
    """Two blocks are added before the second report; the third reports no change."""
    of, arrivals = made((0.0, [1, 2], 0), (12.0, [1, 2], 0))
    of_one = simulate(of, arrivals, Cluster(1, "prefix", gossip_seconds=5.0), FASTER)
    assert of_one.gossip_bytes_per_second == pytest.approx(2 * 4 / 12)
    assert of_one.whole_bytes_per_second == pytest.approx(2 * (2 * 4) / 12)
    of_three = simulate(of, arrivals, Cluster(1, "prefix", 3, 5.0), FASTER)
    assert of_three.gossip_bytes_per_second == pytest.approx(3 * 2 * 4 / 12)


def test_routers_without_gossip_split_conversations() -> None:
    of = conversations(60, 4)
    arrivals = TraceCopies(of, 4).arrivals(4)
    rates = [
        simulate(of, arrivals, Cluster(4, "prefix+load", 2, seconds), FASTER).hit_rate
        for seconds in (1.0, 1e6)
    ]
    assert rates[0] > 1.1 * rates[1]


# ---- the crowd


def test_trace_is_partitioned_by_conversation(crowd: TraceCopies) -> None:
    of = conversations(60, 4)
    together = crowd.arrivals(4)
    assert Counter(a.blocks for a in together) == Counter(v.blocks for v in of.visits)
    assert [a.seconds for a in together] == sorted(a.seconds for a in together)
    parts = [{a.blocks[1] for a in crowd._copy(part)} for part in range(4)]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 60
    assert all(parts)


def test_trace_copies_share_only_service_prompts(crowd: TraceCopies) -> None:
    first, copy = list(crowd._copy(1)), list(crowd._copy(5))
    assert len(first) == len(copy)
    one, other = ({block for a in of for block in a.blocks} for of in (first, copy))
    assert one & other == {0}
    assert [len(a.blocks) for a in first] == [len(a.blocks) for a in copy]
    assert copy[0].seconds > first[0].seconds
    assert len(crowd.arrivals(8, 100)) == 100


def test_quantiles_are_observed_values() -> None:
    values = [float(i) for i in range(1, 101)]
    assert (quantile(values, 0.95), quantile(values, 0.5), quantile([7.0], 0.95)) == (95, 50, 7)


# ---- the command


def write(folder: Path) -> Path:
    file = folder / "trace.jsonl"
    lines = (
        json.dumps(
            {
                "timestamp": 1_000 * visit.seconds,
                "input_length": visit.input_tokens,
                "output_length": visit.output_tokens,
                "hash_ids": visit.blocks,
            }
        )
        for visit in conversations(60, 4).visits
    )
    file.write_text("\n".join(lines))
    return file


LOAD = cluster.ClusterLoad(replicas=(1, 4), split=4, machine=FASTER)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Any:
    told: list[tuple[str, int, int]] = []
    file = write(tmp_path_factory.mktemp("cluster"))
    found = cluster.measure(file, LOAD, lambda *how_far: told.append(how_far))
    assert {what for what, _, _ in told} == {f"{n} x {p}" for n in (1, 4) for p in POLICIES}
    assert all(done <= of for _, done, of in told)
    return found


def test_report_compares_policy_with_one_large_engine(measured: Any) -> None:
    assert measured.met
    assert measured.penstock["policy"] == "prefix+load"
    assert measured.rival == "round-robin"
    assert measured.ratio["4 replicas"] > 1.3
    runs = measured.raw["runs"]
    assert [run["replicas"] for run in runs] == [1, 4]
    worse = [replace_hits(run) for run in (1, 4)]
    assert not cluster.report(conversations(60, 4), LOAD, worse).met


def replace_hits(replicas: int) -> cluster.Runs:
    """Return runs in which our policy just misses the goal."""
    of, arrivals = conversations(60, 4), TraceCopies(conversations(60, 4), 4).arrivals(replicas)
    found = simulate(of, arrivals, Cluster(replicas, "prefix+load"), FASTER)
    outcomes = {
        "prefix+load": replace(found, hit_rate=0.899),
        "round-robin": replace(found, hit_rate=0.5),
    }
    return cluster.Runs(replicas, 1.0, 1.0, outcomes)  # type: ignore[arg-type]


def test_cluster_command_prints_saves_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "cluster", "--trace", str(write(tmp_path)), "--split", "4"]
    sizes = ["--memory", "102400", "--prefill", "2048", "--decode", "10", "--batch", "4"]
    more = ["--replicas", "4", "--save", str(tmp_path), "--plot", str(tmp_path / "c.png")]
    assert main([*arguments, *sizes, *more, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["met"] and printed["penstock"]["hit_rate"]["4 replicas"] > 0
    (record,) = tmp_path.glob("cluster-*.json")
    assert json.loads(record.read_text())["raw"]["load"]["machine"]["memory_tokens"] == 102_400
    assert (tmp_path / "c.png").stat().st_size > 10_000
    assert main([*arguments, *sizes, "--replicas", "2", "--policy", "hash"]) == 0
    shown = capsys.readouterr().out
    assert "hash" in shown and "round-robin" not in shown.split("Replicas whose")[0]


def test_unknown_policy_is_named_in_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "cluster", "--trace", "none", "--policy", "best"]) == 2
    assert "--policy best is none of round-robin" in capsys.readouterr().err
    with pytest.raises(SettingError):
        cluster.policy_of("best")


def test_table_has_row_per_run(measured: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cluster.table(measured).row_count == 8
    publish(measured, as_json=False, save=None)
    assert "4 replicas" in capsys.readouterr().out
