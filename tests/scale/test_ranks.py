"""One engine over several processes: equal text, shared bytes, common shutdown."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from rank_group import WORKER, Ended, ended, ports, results, run, started
from servers import wait_until

FAMILIES = ("qwen3", "gpt_oss", "qwen3_5", "deepseek_v3")
"""Plain attention, windows and sinks, recurrent layers, one latent head."""
LAYERED = ("qwen2", "qwen3_next", "deepseek_v3", "glm4_moe")
"""Families that mlx-lm also divides by layers; the second by layers alone."""
SOON = 10.0
"""A group must have ended by then, when one of it is gone."""


@functools.cache
def alone(family: str = "llama") -> dict[str, Any]:
    (found,) = results(1, "texts", family=family)
    return found


@functools.cache
def together(size: int, family: str = "llama") -> list[dict[str, Any]]:
    return results(size, "texts", family=family)


@pytest.mark.parametrize("size", [2, 4])
def test_all_group_sizes_match_single_process(size: int) -> None:
    assert together(size)[0]["said"] == alone()["said"]
    assert alone()["hit_tokens"] > 0


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_holds_its_share_of_weights_and_kv(size: int) -> None:
    for found in together(size):
        assert found["tokens"] == alone()["tokens"]
        assert found["node_bytes"] * size == pytest.approx(alone()["node_bytes"], rel=0.05)
        assert found["weight_bytes"] < alone()["weight_bytes"]
        assert found["hit_tokens"] == alone()["hit_tokens"]


@pytest.mark.parametrize("family", FAMILIES)
def test_tensor_parallel_families_match_single(family: str) -> None:
    assert together(2, family)[0]["said"] == alone(family)["said"]


@pytest.mark.parametrize("family", LAYERED)
def test_pipeline_families_match_single(family: str) -> None:
    found = results(2, "texts", family=family, pipeline=True)
    assert found[0]["said"] == alone(family)["said"]
    for each in found:
        assert each["node_bytes"] * 2 == pytest.approx(alone(family)["node_bytes"], rel=0.05)
        assert each["hit_tokens"] == alone(family)["hit_tokens"] > 0


def test_four_pipeline_stages_restore_their_layers(tmp_path: Path) -> None:
    told = {"family": "qwen2", "pipeline": True, "folder": str(tmp_path)}
    first, again = (results(4, "texts", **told) for _ in range(2))
    assert first[0]["said"] == again[0]["said"] == alone("qwen2")["said"]
    assert again[0]["restored_tokens"] == again[3]["restored_tokens"] > 150


@pytest.mark.parametrize("codec", ["turbo4", "turbo3"])
def test_pipeline_stages_support_quantized_kv(codec: str) -> None:
    coded = {
        "kv_cache_quantization": codec,
        "kv_cache_min_quantize_tokens": 0,
        "kv_cache_quantize_when": "active",
    }
    one = results(1, "texts", family="qwen2", settings=coded)
    two = results(2, "texts", family="qwen2", settings=coded, pipeline=True)
    assert two[0]["said"] == one[0]["said"]


def test_mismatched_stage_settings_are_refused() -> None:
    found = run(2, "texts", family="qwen3_next", pipeline=True, uneven=True)
    assert all("must be the same on every rank" in each.errors for each in found), found


def test_tensor_parallel_ranks_support_quantized_kv() -> None:
    coded = {"kv_cache_quantization": "8", "kv_cache_min_quantize_tokens": 0}
    one, two = (results(size, "texts", settings=coded) for size in (1, 2))
    assert two[0]["said"] == one[0]["said"]
    assert {each["node_bytes"] * 2 for each in two} == {one[0]["node_bytes"]}
    assert one[0]["node_bytes"] < alone()["node_bytes"]


def test_rank_with_least_memory_sets_limit() -> None:
    found = results(2, "texts", limits={"1": "5MB"})
    assert found[0]["said"] == alone()["said"]
    assert found[0]["limit_bytes"] == found[1]["limit_bytes"] <= 5_000_000
    assert found[0]["evicted_nodes"] == found[1]["evicted_nodes"]


def test_thousand_requests_leave_no_bytes_reserved() -> None:
    """Every rank recounts its ledger after each step."""
    found = results(2, "soak", settings={"memory_limit": "5MB"})
    (ends,) = found[0]["said"]
    assert {"length", "cancelled", "timeout"} <= set(ends)
    assert found[0]["evicted_nodes"] > 0
    assert [each["tokens"] for each in found] == [0, 0]
    assert found[0]["node_bytes"] == found[1]["node_bytes"] == 0


# ---- one rank has trouble


@pytest.mark.parametrize("rank", [0, 1])
def test_nan_on_one_rank_fails_request_on_all(rank: int) -> None:
    found = run(2, "some", on_rank=rank, harm="nan_chunk_on_one_rank")
    assert [each.code for each in found] == [0, 0], found


def test_low_memory_on_one_rank_evicts_on_all() -> None:
    found = results(2, "texts", on_rank=1, harm="low_memory_on_one_rank")
    assert found[0]["said"] == alone()["said"]
    assert found[0]["evicted_nodes"] == found[1]["evicted_nodes"] > 0


def test_sampler_error_fails_request_on_all_ranks() -> None:
    found = run(2, "some", on_rank=0, harm="sampler_error_on_one_rank")
    assert [each.code for each in found] == [0, 0], found


def test_prefixes_are_restored_on_every_rank(tmp_path: Path) -> None:
    first, again = (results(2, "texts", folder=str(tmp_path)) for _ in range(2))
    assert first[0]["said"] == again[0]["said"] == alone()["said"]
    assert first[0]["restored_tokens"] == 0
    assert again[0]["restored_tokens"] == again[1]["restored_tokens"] > 150


def test_blocks_lost_on_one_rank_are_recomputed_by_all(tmp_path: Path) -> None:
    results(2, "texts", folder=str(tmp_path))
    found = results(2, "texts", folder=str(tmp_path), on_rank=1, harm="no_disk")
    assert found[0]["said"] == alone()["said"]
    assert [each["restored_tokens"] for each in found] == [0, 0]


def test_blocks_damaged_on_one_rank_are_recomputed_by_all(tmp_path: Path) -> None:
    results(2, "texts", folder=str(tmp_path))
    for file in (tmp_path / "1").rglob("*.safetensors"):
        raw = bytearray(file.read_bytes())
        raw[-3] ^= 4
        file.write_bytes(raw)
    found = results(2, "texts", folder=str(tmp_path))
    assert found[0]["said"] == alone()["said"]
    assert [each["restored_tokens"] for each in found] == [0, 0]


# ---- one rank is gone


def names(ends: list[Ended], rank: int) -> bool:
    return any(f"rank {rank} (" in each.errors for each in ends)


@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_on_one_rank_ends_group(rank: int) -> None:
    began = time.monotonic()
    with started(
        2, [str(WORKER), "wait", json.dumps({"on_rank": rank, "harm": "out_of_memory_on_one_rank"})]
    ) as processes:
        ends = [ended(process, 60.0) for process in processes]
    assert all(each.code != 0 for each in ends), ends
    assert f"rank {rank} (" in ends[rank].errors and "no memory is left" in ends[rank].errors
    assert f"rank {rank} (" in ends[1 - rank].errors
    assert time.monotonic() - began < 60.0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 2])
def test_dead_or_hung_rank_ends_group(rank: int, how: signal.Signals) -> None:
    with started(4, [str(WORKER), "wait", "{}"]) as processes:
        out = processes[0].stdout
        assert out is not None and out.readline() == "ready\n"
        time.sleep(1.0)
        processes[rank].send_signal(how)
        began = time.monotonic()
        others = [process for number, process in enumerate(processes) if number != rank]
        ends = [ended(process, SOON) for process in others]
        assert time.monotonic() - began < SOON
    assert all(each.code not in (0, None) for each in ends), ends
    assert names(ends, rank), ends


def test_diverging_ranks_are_detected() -> None:
    """Negative control: one rank does something by itself."""
    found = run(2, "some", on_rank=1, harm="extra_request_on_one_rank")
    assert all(each.code != 0 for each in found), found
    assert any("is not in the state of" in each.errors for each in found), found


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_group_stops_cleanly_before_it_listens(sig: signal.Signals) -> None:
    serve = ["-m", "penstock", "serve", "--port", "0", "--memory-limit", "200MB"]
    with started(2, serve) as processes:
        out = processes[0].stdout
        assert out is not None and any("http://" in line for line in out)
        processes[0].send_signal(sig)
        ends = [ended(process, 60.0) for process in processes]
    assert [end.code for end in ends] == [0, 0], ends
    assert not any("the group has ended" in end.errors for end in ends), ends


def test_limit_below_weights_is_refused_on_every_rank() -> None:
    serve = ["-m", "penstock", "serve", "--port", "0", "--memory-limit", "1MB"]
    with started(2, serve) as processes:
        ends = [ended(process, 60.0) for process in processes]
    assert [end.code for end in ends] == [2, 2], ends
    assert all("alone exceed the memory limit of 1.00 MB" in end.errors for end in ends), ends


# ---- mlx.launch

LAUNCH = "from mlx._distributed_utils.launch import main; main()"


@contextmanager
def launched() -> Iterator[
    tuple[subprocess.Popen[str], list[psutil.Process], list[psutil.Process]]
]:
    """Start a server on two ranks with `mlx.launch`.

    Yields the launcher, the ranks, and the ranks with the processes that they have started.
    """
    (port,) = ports(1)
    flags = ["-n", "2", "--backend", "ring", "--starting-port", str(port), "--"]
    serve = [sys.executable, "-m", "penstock", "serve", "--port", "0", "--memory-limit", "200MB"]
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *flags, *serve],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    processes: list[psutil.Process] = []
    try:
        assert launcher.stdout is not None
        found = None
        while found is None and (line := launcher.stdout.readline()):
            found = re.search(r"http://\S+", line)
        assert found
        wait_until(lambda: httpx.get(f"{found[0]}/ready").status_code == 200, 60)
        processes = psutil.Process(launcher.pid).children(recursive=True)
        ranks = psutil.Process(launcher.pid).children()
        assert len(ranks) == 2
        yield launcher, ranks, processes
    finally:
        launcher.kill()
        launcher.communicate()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_end_with_launcher(sig: signal.Signals) -> None:
    with launched() as (launcher, _, processes):
        launcher.send_signal(sig)
        assert launcher.wait(60) == -sig
        assert not psutil.wait_procs(processes, timeout=60)[1]


@pytest.mark.slow
def test_killed_rank_fails_launcher() -> None:
    with launched() as (launcher, ranks, processes):
        ranks[1].kill()
        assert launcher.wait(60) != 0
        assert not psutil.wait_procs(processes, timeout=60)[1]
