"""`penstock bench kernels` compares attention kernels and names unsupported ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
from lockstep import COMPILER, Lockstep

from penstock.attention import devices
from penstock.attention.mlx_backend import GPUBackend
from penstock.cli import main
from penstock.plugins.kernels.selftest import Timing, WayChoice
from penstock.plugins.kernels.ways import AttentionForm, AttentionWay, Situation, Ways
from penstock_bench.kernels import KernelsLoad, layer_form, measure, report
from penstock_bench.step_operations import LayerOperations, ReadBytes, read_bytes

SIZES = ["--heads", "4", "--kv-heads", "2", "--head-size", "64", "--tokens", "128", "--rows", "2"]
FEW = LayerOperations(own=17, whole=21, choice=40, further=11, rest=100)
MOVED = ReadBytes(own=512.0, whole=1_536.0, choice=68.0, rest=400.0)
LAYER = layer_form(4, 2, 64, "float32")


def test_kernel_bench_on_cpu_measures_plain_operations(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["bench", "kernels", *SIZES, "--json", "--save", str(tmp_path)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert len(shown["penstock"]) == len(Situation)
    (record,) = tmp_path.glob("kernels-*.json")
    raw = json.loads(record.read_text())["raw"]
    assert raw["kernels_off"] == "this device has none"
    more = raw["operations"]["own"] - 17
    assert more in (0, 2), "MLX compiles no activation where it finds no compiler"
    counts = {"own": 17, "whole": 19, "choice": 40, "rest": 100}
    expected = {name: count + more for name, count in counts.items()}
    assert raw["operations"] == {**expected, "further": 11}
    assert all(set(one["milliseconds"]) == {"plain", "fused"} for one in raw["ways"].values())


@pytest.mark.skipif(COMPILER is None, reason="there is neither g++ nor clang++")
def test_plain_fused_and_kernel_are_measured(tmp_path: Path) -> None:
    with devices.using(GPUBackend(call_kernel=Lockstep(folder=tmp_path))):
        found = measure(KernelsLoad((LAYER,), (2,), (128,)))
    assert found.raw["kernels_off"] is None
    ways = found.raw["ways"].values()
    assert all(set(one["milliseconds"]) == {"plain", "fused", "kernel"} for one in ways)
    assert found.met


def timed(chosen: AttentionWay) -> WayChoice:
    times = {AttentionWay.PLAIN: 2.0, AttentionWay.KERNEL: 1.0, AttentionWay.FUSED: 4.0}
    form = AttentionForm(4, 2, 64, 64, mx.float32)
    return WayChoice(Ways(), [Timing(form, Situation.RAGGED, times, chosen)])


def test_kernel_slower_than_plain_misses_goal() -> None:
    load = KernelsLoad((LAYER,))
    good, bad = (
        report(load, {(2, 128): timed(way)}, FEW, MOVED)
        for way in (AttentionWay.KERNEL, AttentionWay.FUSED)
    )
    assert good.met and good.ratio["least"] == 2.0
    assert not bad.met and bad.ratio["least"] == 0.5


@pytest.mark.parametrize("many", [{"whole": 22}, {"choice": 41}])
def test_too_many_operations_miss_goal(many: dict[str, int]) -> None:
    choices = {(2, 128): timed(AttentionWay.KERNEL)}
    assert report(KernelsLoad((LAYER,)), choices, FEW, MOVED).met
    shown = report(KernelsLoad((LAYER,)), choices, replace(FEW, **many), MOVED)
    assert not shown.met and [line.met for line in shown.lines].count(False) == 1


def test_codec_without_kernel_is_named_in_report() -> None:
    choice = timed(AttentionWay.KERNEL)
    choice.unread.append("kivi4/raw of 2 heads on 1 of 256, float32")
    shown = report(KernelsLoad((LAYER,)), {(2, 128): choice}, FEW, MOVED)
    assert [line.ours for line in shown.lines if line.figure == "kernels"] == [
        "do not read kivi4/raw of 2 heads on 1 of 256, float32"
    ]


def test_incompatible_head_counts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--heads", "5", "--kv-heads", "2"]) != 0
    assert "--heads 5 is no multiple of --kv-heads 2" in capsys.readouterr().err


def test_bytes_read_per_token_match_formula() -> None:
    """Heads of 64 numbers in float32, two queries of a key head."""
    moved, kv, queries = read_bytes(), 2 * 64 * 4, 2
    assert moved.own == kv
    assert moved.whole == 3 * kv, "it is joined: read, written and read"
    index, scales, scores = 18, 2 * 4 + 3 * 4, 2 * 4 * queries
    # Blocks are a sixteenth of the tokens, with some twelve numbers of each query.
    assert 0 < moved.choice - (index + scales + scores) < 12 * 4 * queries / 16 + 5
    assert moved.choice < moved.rest < kv
