"""The bench of a million tokens, on a few thousand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock_bench import million, million_picture

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


TOLD = list[tuple[str, int, int]]()


@pytest.fixture(scope="module")
def measured() -> Any:
    return million.measure(LOAD, lambda *told: TOLD.append(told))


def test_early_facts_are_recalled_within_planned_memory(measured: Any) -> None:
    assert measured.met and measured.penstock["known"] == 4
    assert [row["tokens"] for row in measured.raw["rows"]] == [2_000, 4_000]
    assert all(len(row["step_ms"]) == 4 for row in measured.raw["rows"])
    # The plan is of one request; nodes of earlier questions stay cached, within the limit.
    assert max(measured.penstock[name] for name in ("most_bytes", "planned_bytes")) <= 200_000_000
    assert 0 < measured.penstock["mlx_bytes"] < measured.penstock["resident_bytes"]


def test_picture_shows_time_and_memory(measured: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    million_picture.draw(measured, tmp_path / "million.png")
    assert (tmp_path / "million.png").stat().st_size > 1_000


def test_progress_is_reported_after_every_chunk(measured: Any) -> None:
    read = [done for what, done, of in TOLD if what == "reading 4,000 tokens" and of == 4_000]
    assert len(read) > 7 and sorted(read) == read and read[0] < 2_500 < 3_500 < read[-1]


def test_failed_request_ends_bench_with_its_reason() -> None:
    with pytest.raises(PenstockError, match="can never fit in the limit of 20"):
        million.measure(replace(LOAD, memory_limit="20MB"))


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_bench_stopped_by_signal_reports_it_and_leaves_no_files(
    tmp_path: Path, sent: signal.Signals
) -> None:
    words = [sys.executable, "-m", "penstock", "bench", "million", "--tokens", "32000"]
    where = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        words,
        env=where,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(sent, signal.SIG_DFL),  # these tests may run under nohup
    ) as bench:
        until = time.monotonic() + 60
        while not any(tmp_path.rglob("*.safetensors")) and time.monotonic() < until:
            time.sleep(0.1)
        assert any(tmp_path.rglob("*.safetensors"))
        bench.send_signal(sent)
        assert bench.stderr is not None
        said = bench.stderr.read()
    assert bench.returncode == 128 + sent
    assert f"ended by {sent.name} at reading 32,000 tokens" in said
    assert [file.name for file in tmp_path.iterdir()] in ([], ["mlx"])  # code that MLX compiled


def test_report_misses_goals_above_memory_or_time_bound(measured: Any) -> None:
    # Without the arrays of other tests of this process.
    more = {"mlx_bytes": 10**8}
    rows = [{**row, "tokens": 64 * row["tokens"], **more} for row in measured.raw["rows"]]
    slower = [rows[0], {**rows[1], "step_ms": [10 * ms for ms in rows[0]["step_ms"]]}]
    given = [True] * 4, 10**8, 10**8, 0
    flat = [rows[0], {**rows[1], "step_ms": rows[0]["step_ms"]}]
    assert million.report(LOAD, flat, *given).met
    assert not million.report(LOAD, slower, *given).met
    assert not million.report(LOAD, flat, [True, False], 10**8, 10**8, 0).met
    small = replace(LOAD, memory_limit="50MB")
    assert not million.report(small, flat, *given).met
