"""The doctor on simulated machines, on this machine, and on models.

Then what it makes of models.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny_families
from lockstep import COMPILER, Lockstep
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import QuantizedKVCache
from small_models import BASE, build

from penstock.attention import devices
from penstock.attention.mlx_backend import GPUBackend
from penstock.blas import Blas, has_back_end
from penstock.cli import doctor, main
from penstock.cli.doctor import MachineReport, _add_fit, find_misfits, find_problems
from penstock.cli.fitness import AttentionTiming, ChoiceTiming, Layers, try_model
from penstock.memory import MachineMemory
from penstock.models.loading import load_all
from penstock.models.mlx_lm import Loaded
from penstock.plugins.kernels import selftest
from penstock.plugins.kernels.selftest import Timing, WayChoice
from penstock.plugins.kernels.ways import AttentionForm, AttentionWay, Situation, Ways
from penstock.recall import MODEL_PATH

MEMORY = MachineMemory(64_000_000_000, 32_000_000_000, 64_000_000_000, 51_200_000_000, 0.9)
HEALTHY = MachineReport(
    back_end="metal",
    device="made up",
    nvidia=False,
    blas=Blas(True, "Accelerate", "MLX brings its own on this system"),
    gflops={"float32": 9000.0, "float16": 9000.0},
    memory=MEMORY,
    versions={"python": "3.12.1", "penstock": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"},
)


def whats(machine: MachineReport) -> list[str]:
    return [problem.what for problem in find_problems(machine)]


def test_healthy_machine_has_no_problems() -> None:
    assert whats(HEALTHY) == []


@pytest.mark.parametrize("version", ["0.31.3", "0.33.0", "0.320.1"])
def test_untested_mlx_lm_version_is_reported(version: str) -> None:
    machine = replace(HEALTHY, versions={**HEALTHY.versions, "mlx-lm": version})
    assert whats(machine) == [f"mlx-lm is {version}; penstock is tested with 0.32"]


def test_two_mlx_backends_are_reported() -> None:
    both = {"mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4"}
    (what,) = whats(replace(HEALTHY, versions=HEALTHY.versions | both))
    assert "mlx-cpu and mlx-cuda-13 are both installed" in what


def test_missing_mlx_backend_is_reported() -> None:
    machine = replace(HEALTHY, back_end="none", device="MLX cannot be imported: x", gflops={})
    (problem,) = find_problems(machine)
    assert "pip install '.[cpu]', or '.[cuda]' with an NVIDIA GPU" in problem.remedy


@pytest.mark.skipif(sys.platform != "linux", reason="MLX's wheel has its back end")
def test_command_without_mlx_backend_names_extras(tmp_path: Path) -> None:
    """As after an install without an extra: one line, and none about BLAS."""
    spec = find_spec("mlx.core")
    assert spec is not None and spec.origin is not None and has_back_end()
    shutil.copytree(
        Path(spec.origin).parent, tmp_path / "mlx", ignore=shutil.ignore_patterns("lib", "include")
    )
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "generate", "hello"],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PENSTOCK_BLAS": "no-such-library.so"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(
        "penstock: MLX has no back end; install a back end: in a checkout"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("available", "problems"), [(999_999_999, 1), (1_000_000_000, 0)])
def test_low_memory_is_reported(available: int, problems: int) -> None:
    machine = replace(HEALTHY, memory=replace(MEMORY, available_bytes=available))
    assert len(find_problems(machine)) == problems


def test_slow_blas_is_reported_with_remedy() -> None:
    cpu = replace(HEALTHY, back_end="cpu", gflops={"float32": 6.0, "float16": 5.0})
    missing = Blas(False, "reference BLAS", "no fast BLAS is installed", "install it")
    (problem,) = find_problems(replace(cpu, blas=missing))
    assert problem.remedy == "install it"
    (problem,) = find_problems(replace(cpu, blas=Blas(False, "reference BLAS", "asked for")))
    assert problem.what == "float32 runs at 6 GFLOPS with reference BLAS (asked for)"
    assert problem.remedy.startswith("install a fast BLAS: pip install ")
    (problem,) = find_problems(replace(cpu, blas=Blas(True, "libopenblas.so.0", "found")))
    assert problem.remedy.startswith("stop other busy programs")


def test_idle_nvidia_device_is_reported() -> None:
    (what,) = whats(replace(HEALTHY, back_end="cpu", nvidia=True))
    assert "NVIDIA device" in what
    assert whats(replace(HEALTHY, back_end="cuda", nvidia=True)) == []


def test_doctor_examines_this_machine() -> None:
    machine = doctor.examine()
    assert machine.back_end in ("metal", "cuda", "cpu")
    assert set(machine.gflops) == {"float32", "float16"}
    assert all(speed > 0 for speed in machine.gflops.values())
    memory = machine.memory
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert memory.default_limit_bytes < memory.recommended_bytes


# ------------------------------------------------------------------------------------- models

FLOAT32 = {**BASE, "torch_dtype": "float32"}
GPT_OSS = FLOAT32 | {
    "model_type": "gpt_oss",
    "head_dim": 16,
    "sliding_window": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
COMPRESSED = {
    **tiny_families.arguments_of("deepseek_v41"),
    "model_type": "deepseek_v41",
    "torch_dtype": "float32",
}
LLAMA = FLOAT32 | {"model_type": "llama"}
MAMBA = FLOAT32 | {
    "model_type": "mamba",
    "state_size": 8,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": "auto",
}


def loaded(config: dict[str, Any]) -> Loaded:
    mx.random.seed(0)
    return Loaded(build(config), None, config)


def test_embedded_model_attends_shared_kv() -> None:
    fit = try_model("recall", load_all(MODEL_PATH))
    assert (fit.way, fit.modules) == ("shared", ("mlx_lm.models.llama",))
    assert fit.layers == (Layers(2, "full"),)
    assert fit.kv_bytes_per_token == 2_048  # as its card says
    assert find_misfits(fit) == []


def test_break_even_length_of_selective_attention_is_reported() -> None:
    model = load_all(MODEL_PATH)
    fit = try_model("recall", model)
    inner: Any = model.model
    arrays: Any = tree_flatten(inner.parameters())
    weights, tokens = sum(array.nbytes for _, array in arrays), fit.attend_halves_from
    assert tokens is not None
    keys_and_values, index = 2_048, 2 * 2 * 18  # 2 layers of 2 key heads of 64 numbers

    def ratio(n: int) -> float:
        chosen = weights + 1_024 * keys_and_values + n * index
        return float((weights + n * keys_and_values) / chosen)

    assert ratio(tokens) >= 2 > ratio(tokens - 1)
    config = FLOAT32 | {"model_type": "gemma2", "head_dim": 32}
    assert try_model("x", loaded(config)).attend_halves_from is None


def test_selective_attention_is_timed_if_supported() -> None:
    model = load_all(MODEL_PATH)
    fit = try_model("recall", model)
    assert [steps.tokens for steps in fit.choice] == [8_192, 32_768]
    assert all(steps.all_ms > 0 < steps.choice_ms for steps in fit.choice)
    rows: list[tuple[str, str]] = []
    _add_fit(rows, replace(fit, choice=(ChoiceTiming(8_192, 2.0, 1.0),)))
    said = "pays after 8,192 tokens: a step takes 2.0 ms, with a choice 1.0"
    assert ("  choice", said) in rows
    _add_fit(rows, replace(fit, choice=(ChoiceTiming(8_192, 1.0, 2.0),)))
    assert rows[-1][1].startswith("does not pay after 8,192 tokens")
    for unable in (FLOAT32 | {"model_type": "gemma2", "head_dim": 32}, MAMBA):
        assert try_model("x", loaded(unable)).choice == ()


def test_sliding_windows_are_reported_with_size() -> None:
    fit = try_model("x", loaded(GPT_OSS))
    assert fit.way == "shared"
    assert sorted(map(str, fit.layers)) == ["2 full", "2 window of 8 tokens"]
    assert fit.kv_bytes_per_token == 4 * 2 * (16 + 16) * 4


def test_custom_attention_uses_joined_kv_with_reason() -> None:
    config = FLOAT32 | {"model_type": "gemma2", "head_dim": 32}
    fit = try_model("x", loaded(config))
    assert fit.way == "joined"
    assert "common function" in fit.why
    assert find_misfits(fit) == []


def test_reason_for_joined_kv_is_one_line() -> None:
    config = FLOAT32 | {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": 50,
        "hidden_size_per_layer_input": 16,
    }
    fit = try_model("x", loaded(config))
    assert fit.way == "joined"
    assert fit.why == fit.why.strip().splitlines()[0]


def test_model_without_kv_has_no_problems() -> None:
    fit = try_model("x", loaded(MAMBA))
    assert (fit.way, fit.modules, fit.kv_bytes_per_token) == ("shared", (), 0)
    assert fit.layers == (Layers(4, "recurrent"),)
    assert find_misfits(fit) == []


def test_compressed_layers_are_reported() -> None:
    fit = try_model("x", loaded(COMPRESSED))
    assert (fit.way, fit.modules) == ("joined", ())
    assert fit.layers == (Layers(4, "compressed"), Layers(4, "recurrent"))
    assert fit.kv_bytes_per_token == 2 * (16 + 16) // 4 * 4  # two rows of each of two layers
    assert find_misfits(fit) == []


@pytest.fixture
def strange(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the config of a model whose layers have a cache class of their own."""

    def make_cache(self: Any) -> list[Any]:
        return [QuantizedKVCache() for _ in self.layers]

    monkeypatch.setattr(llama.Model, "make_cache", make_cache)
    return {**LLAMA, "head_dim": 64}  # groups of 64 are its own default


def test_unsupported_layer_cache_is_reported(strange: dict[str, Any]) -> None:
    fit = try_model("x", loaded(strange))
    assert (fit.way, fit.modules) == (None, ())
    (problem,) = find_misfits(fit)
    assert problem.what.startswith("x: what layer 0 keeps ")
    assert "penstock.make_kv_cache" in problem.remedy


def folder(path: Path, config: dict[str, Any]) -> str:
    """Write a random model of this config, with the embedded model's tokenizer."""
    shutil.copytree(MODEL_PATH, path)
    (path / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(build(config).parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    return str(path)


def test_doctor_loads_model_and_reports_attention(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", str(MODEL_PATH), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["way"] == "shared"
    assert report["model"]["layers"] == [
        {"count": 2, "kind": "full", "window_tokens": None, "keep": 0}
    ]
    assert code == (1 if report["problems"] else 0)
    main(["doctor", str(MODEL_PATH)])
    shown = capsys.readouterr().out
    for part in ("2,048 bytes a token", "shared: ", "mlx_lm.models.llama", "--attend-tokens 1024"):
        assert part in shown


def test_unsupported_model_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strange: dict[str, Any]
) -> None:
    model = folder(tmp_path / "model", strange)
    assert main(["doctor", model, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["way"] is None
    assert report["problems"][-1]["what"].startswith(f"{model}: what layer 0 keeps ")
    assert main(["doctor", model]) == 1
    shown = capsys.readouterr().out
    assert "cannot run it" in shown
    assert "remedy: use mlx-lm for this model" in shown


def test_doctor_prints_attention_timings() -> None:
    fit = try_model(str(MODEL_PATH), load_all(str(MODEL_PATH)))
    assert fit.attention == () and fit.kernels_off is None, "a CPU has one way"
    times = {AttentionWay.PLAIN: 2.0, AttentionWay.KERNEL: 1.25}
    form = AttentionForm(32, 8, 128, 128, mx.float16)
    timing = Timing(form, Situation.SHARED, times, AttentionWay.KERNEL)
    attention = AttentionTiming.all_of(WayChoice(Ways(), [timing]))
    rows: list[tuple[str, str]] = []
    _add_fit(rows, replace(fit, attention=attention, kernels_off="a result is off by 1"))
    shown = " ".join(" ".join(row) for row in rows)
    assert "kernels off: a result is off by 1" in shown
    assert (
        "attention 32 heads on 8 of 128, float16, shared prefix: kernel "
        "(plain 2.000 ms, kernel 1.250 ms)" in shown
    )


@pytest.mark.skipif(COMPILER is None, reason="there is neither g++ nor clang++")
def test_doctor_self_tests_kernels(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: all ways in all situations, and a message where time runs out."""
    with devices.using(GPUBackend(call_kernel=Lockstep(folder=tmp_path))):
        for seconds in (1e9, 0.0):
            monkeypatch.setattr(selftest, "SECONDS", seconds)
            main(["doctor", str(MODEL_PATH), "--json"])
            model = json.loads(capsys.readouterr().out)["model"]
            assert model["ways_cut_short"] == (not seconds)
            assert model["kernels_off"] is None and model["kernels_do_not_read"] == []
            shown = {one["situation"]: set(one["milliseconds"]) for one in model["attention"]}
            situations = {one.value for one in Situation} if seconds else set()
            assert shown == {key: {"plain", "fused", "kernel"} for key in situations}
        main(["doctor", str(MODEL_PATH)])
    assert "use plain operations" in capsys.readouterr().out


def test_doctor_agent_report_shows_template_findings(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", str(MODEL_PATH), "--agent", "--json"])
    agent = json.loads(capsys.readouterr().out)["agent"]
    assert (agent["tool_parser"], agent["later_system"]) == ("none", "system")
    assert agent["template"]["a turn is added"] == "nothing changes"
    main(["doctor", str(MODEL_PATH), "--agent"])
    assert "a turn is added to a loop" in capsys.readouterr().out


def test_doctor_agent_requires_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--agent"]) != 0
    assert "--agent examines a model" in capsys.readouterr().err
