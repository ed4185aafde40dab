"""What the doctor makes of a machine; the machines here are made up, the last one is real."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.blas import Blas
from penstock.cli import doctor
from penstock.cli.doctor import Machine, find_problems
from penstock.memory import MachineMemory

MEMORY = MachineMemory(64_000_000_000, 32_000_000_000, 64_000_000_000, 51_200_000_000)
HEALTHY = Machine(
    back_end="metal",
    device="made up",
    nvidia=False,
    blas=Blas(True, "Accelerate", "MLX brings its own on this system"),
    gflops={"float32": 9000.0, "float16": 9000.0},
    memory=MEMORY,
    versions={"python": "3.12.1", "penstock": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"},
)


def whats(machine: Machine) -> list[str]:
    return [problem.what for problem in find_problems(machine)]


def test_a_healthy_machine_has_no_problems() -> None:
    assert whats(HEALTHY) == []


@pytest.mark.parametrize("version", ["0.31.3", "0.33.0", "0.320.1"])
def test_another_minor_version_of_mlx_lm(version: str) -> None:
    machine = replace(HEALTHY, versions={**HEALTHY.versions, "mlx-lm": version})
    assert whats(machine) == [f"mlx-lm is {version}; penstock is tested with 0.32"]


def test_two_back_ends() -> None:
    both = {"mlx-cpu": "0.32.4", "mlx-cuda-13": "0.32.4"}
    (what,) = whats(replace(HEALTHY, versions=HEALTHY.versions | both))
    assert "mlx-cpu and mlx-cuda-13 are both installed" in what


def test_no_back_end() -> None:
    machine = replace(HEALTHY, back_end="none", device="MLX cannot be imported: x", gflops={})
    (problem,) = find_problems(machine)
    assert "penstock[cpu]" in problem.remedy


@pytest.mark.parametrize(("available", "problems"), [(999_999_999, 1), (1_000_000_000, 0)])
def test_little_memory(available: int, problems: int) -> None:
    machine = replace(HEALTHY, memory=replace(MEMORY, available_bytes=available))
    assert len(find_problems(machine)) == problems


def test_a_missing_blas_says_what_to_install() -> None:
    cpu = replace(HEALTHY, back_end="cpu", gflops={"float32": 6.0, "float16": 5.0})
    missing = Blas(False, "reference BLAS", "no fast BLAS is installed", "install it")
    (problem,) = find_problems(replace(cpu, blas=missing))
    assert problem.remedy == "install it"
    (what,) = whats(replace(cpu, blas=Blas(False, "reference BLAS", "PENSTOCK_BLAS=none")))
    assert what == "float32 runs at 6 GFLOPS with reference BLAS (PENSTOCK_BLAS=none)"


def test_an_idle_nvidia_device() -> None:
    (what,) = whats(replace(HEALTHY, back_end="cpu", nvidia=True))
    assert "NVIDIA device" in what
    assert whats(replace(HEALTHY, back_end="cuda", nvidia=True)) == []


def test_this_machine_is_examined() -> None:
    machine = doctor.examine()
    assert machine.back_end in ("metal", "cuda", "cpu")
    assert set(machine.gflops) == {"float32", "float16"}
    assert all(speed > 0 for speed in machine.gflops.values())
    memory = machine.memory
    assert 0 < memory.available_bytes <= memory.total_bytes
    assert memory.default_limit_bytes < memory.recommended_bytes
