"""`penstock doctor`: reports on the machine, its measured speed, and problems.

With a model, it also reports how the engine would run it.
"""

from __future__ import annotations

import json
import platform
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from penstock import __version__
from penstock.blas import (
    CUDA_PACKAGES,
    INSTALL_BACK_END,
    INSTALL_COMMAND,
    VARIABLE,
    Blas,
    installed,
    load_blas,
    nvidia_device,
)
from penstock.cli import options
from penstock.cli.whole_words import print_line, print_rows
from penstock.config import MLX_LM_MINOR
from penstock.errors import SettingError
from penstock.memory import MachineMemory, format_bytes, read_machine_memory
from penstock.plurals import counted

if TYPE_CHECKING:
    from penstock.cli.agent_report import AgentReport
    from penstock.cli.fitness import FitnessReport
    from penstock.models.weight_packer import PackedParts

PACKAGES = ("mlx", "mlx-cpu", *CUDA_PACKAGES, "mlx-metal", "mlx-lm", "mlx-vlm", "numpy")
DTYPES = ("float32", "float16")
SLOW_GFLOPS = 12.0
"""Speed in float32 below which BLAS counts as slow; reference BLAS has 3 to 8, OpenBLAS 80."""
LITTLE_MEMORY_BYTES = 1_000_000_000
MEASURE_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class DoctorProblem:
    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class MachineReport:
    back_end: str
    device: str
    nvidia: bool
    blas: Blas
    gflops: dict[str, float]
    """Measured speed of a matrix product in GFLOPS, by dtype."""
    memory: MachineMemory
    versions: dict[str, str]


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"{options.MODEL_HELP} It is loaded and tested.", show_default="no model is loaded"
        ),
    ] = None,
    weights_dtype: options.WeightsDtype = "auto",
    model_source: options.ModelSource = "auto",
    agent: Annotated[
        bool,
        typer.Option(
            "--agent",
            help="Also show which parsers read the model's answers, and what its chat template "
            "does with the conversations of coding agents.",
        ),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show back end, BLAS and its speed, memory, versions, and any problems.

    With a model, also show the library that loads it, and how the engine reads keys and values,
    with the reasons. They are read in place (shared, indexed, latent), or concatenated layer by
    layer (joined). For a model that the engine cannot run, show the reason.

    Exits with 0 if there is no problem, 1 if one makes penstock slow or unusable.
    """
    if agent and model is None:
        raise SettingError("--agent examines a model: pass one")
    machine = examine()
    problems = find_problems(machine)
    fit, agents = None, None
    if model is not None and machine.back_end != "none":
        loaded = options.load_model(model, weights_dtype, model_source=model_source)
        # mlx-lm takes a second to import, and is not needed to examine the machine.
        from penstock.cli.agent_report import AgentReport
        from penstock.cli.fitness import try_model

        fit = try_model(model, loaded)
        agents = AgentReport.of(loaded.tokenizer) if agent else None
        problems += find_misfits(fit)
    if as_json:
        report = {**asdict(machine), "model": None if fit is None else asdict(fit)}
        if agents is not None:
            report["agent"] = agents.as_json()
        print(json.dumps({**report, "problems": [asdict(p) for p in problems]}))
    else:
        _show(machine, fit, agents, problems)
    raise typer.Exit(1 if problems else 0)


def examine() -> MachineReport:
    blas, nvidia = load_blas(), nvidia_device()
    versions = {"python": platform.python_version(), "penstock": __version__}
    versions |= {name: version for name in PACKAGES if (version := installed(name)) is not None}
    try:
        import mlx.core as mx
    except ImportError as error:
        reason = f"MLX cannot be imported: {error}"
        return MachineReport("none", reason, nvidia, blas, {}, read_machine_memory({}), versions)
    from penstock.attention.devices import device_name, machine_memory  # imports MLX

    gpus = (("metal", mx.metal), ("cuda", mx.cuda))
    back_end = next((name for name, gpu in gpus if gpu.is_available()), "cpu")
    gflops = {name: _measure(name, 512 if back_end == "cpu" else 4096) for name in DTYPES}
    return MachineReport(back_end, device_name(), nvidia, blas, gflops, machine_memory(), versions)


def find_problems(machine: MachineReport) -> list[DoctorProblem]:
    problems = []
    versions = machine.versions
    cuda = [name for name in CUDA_PACKAGES if name in versions]
    if machine.back_end == "none":
        problems.append(DoctorProblem(machine.device, INSTALL_BACK_END))
    if "mlx-cpu" in versions and cuda:
        both = f"mlx-cpu and {cuda[0]} are both installed and overwrite each other's libmlx.so"
        remedy = f"pip uninstall mlx-cpu {cuda[0]}, then install one of them again"
        problems.append(DoctorProblem(both, remedy))
    supported = ".".join(map(str, MLX_LM_MINOR))
    mlx_lm = versions.get("mlx-lm", "missing")
    if not mlx_lm.startswith(f"{supported}."):
        remedy = f"pip install 'mlx-lm=={supported}.*'"
        problems.append(
            DoctorProblem(f"mlx-lm is {mlx_lm}; penstock is tested with {supported}", remedy)
        )
    if machine.back_end == "cpu":
        problems += _cpu_problems(machine)
    if machine.memory.available_bytes < LITTLE_MEMORY_BYTES:
        left = format_bytes(machine.memory.available_bytes)
        remedy = "close other programs or lower --max-kv-size"
        problems.append(DoctorProblem(f"only {left} of memory are available", remedy))
    return problems


def find_misfits(fit: FitnessReport) -> list[DoctorProblem]:
    if fit.way is not None:
        return []
    remedy = "use mlx-lm for this model, with penstock.make_kv_cache, or use another model"
    return [DoctorProblem(f"{fit.model}: {fit.why}", remedy)]


def _cpu_problems(machine: MachineReport) -> list[DoctorProblem]:
    problems = []
    speed = machine.gflops["float32"]
    if machine.blas.advice is not None:
        problems.append(DoctorProblem(machine.blas.why, machine.blas.advice))
    elif speed < SLOW_GFLOPS:
        slow = f"float32 runs at {speed:.0f} GFLOPS with {machine.blas.name} ({machine.blas.why})"
        busy = f"stop other busy programs, or select another BLAS with {VARIABLE}"
        remedy = busy if machine.blas.is_fast else f"install a fast BLAS: {INSTALL_COMMAND}"
        problems.append(DoctorProblem(slow, remedy))
    if machine.nvidia:
        idle = "an NVIDIA device is present, but MLX's CPU back end is installed"
        remedy = "pip uninstall mlx-cpu, then pip install 'mlx[cuda13]'"
        problems.append(DoctorProblem(idle, remedy))
    return problems


def _measure(dtype: str, size: int) -> float:
    import mlx.core as mx

    matrix = mx.random.normal((size, size)).astype(getattr(mx, dtype))
    mx.eval(matrix @ matrix)
    best_seconds = float("inf")
    end = time.perf_counter() + MEASURE_SECONDS
    while (start := time.perf_counter()) < end:
        mx.eval(matrix @ matrix)
        best_seconds = min(best_seconds, time.perf_counter() - start)
    return round(2 * size**3 / best_seconds / 1e9, 1)


def _show(
    machine: MachineReport,
    fit: FitnessReport | None,
    agents: AgentReport | None,
    problems: list[DoctorProblem],
) -> None:
    console = Console(highlight=False)
    rows: list[tuple[str, str]] = []
    rows.append(("back end", f"{machine.back_end} ({machine.device})"))
    rows.append(("BLAS", f"{machine.blas.name}: {machine.blas.why}"))
    for dtype, speed in machine.gflops.items():
        rows.append((f"  {dtype}", f"{speed:,.0f} GFLOPS measured"))
    memory = machine.memory
    rows.append(("memory", f"{format_bytes(memory.total_bytes)} in all"))
    rows.append(("  available", format_bytes(memory.available_bytes)))
    rows.append(("  device", f"{format_bytes(memory.recommended_bytes)} recommended at most"))
    rows.append(("  limit", f"{format_bytes(memory.default_limit_bytes)} by default"))
    for name, version in machine.versions.items():
        rows.append((name, version))
    if fit is not None:
        _add_fit(rows, fit)
    if agents is not None:
        agents.add_to(rows)
    print_rows(console, rows)
    for problem in problems:
        print_line(console, f"problem: {problem.what}", label="problem")
        print_line(console, f"  remedy: {problem.remedy}", indent=2)
    if not problems:
        console.print("No problems found.")


def _add_fit(rows: list[tuple[str, str]], fit: FitnessReport) -> None:
    rows.append(("model", f"{fit.model} ({fit.model_type})"))
    rows.append(("  source", f"{fit.source}: {fit.source_why}"))
    rows.append(("  layers", ", ".join(map(str, fit.layers))))
    if fit.images is not None:
        rows.append(("  images", fit.images))
    if fit.mtp is not None:
        rows.append(("  MTP head", fit.mtp))
    rows.append(("  KV", f"{counted(fit.kv_bytes_per_token, 'byte')} a token"))
    for form, error in fit.codes_errors.items():
        rows.append((f"  {form}", f"converted to MLX's format: error {error:.2%} of the weights"))
    if fit.packed is not None:
        _add_packed(rows, fit.packed)
    if fit.way is None:
        rows.append(("  engine", "cannot run it"))
        return
    where = {
        "shared": "read in place",
        "indexed": "chosen by its own index, and read in place in decode steps",
        "latent": "latents, read in place in decode steps",
        "joined": "concatenated layer by layer in each step",
    }
    rows.append(("  engine", f"{fit.way}: keys and values are {where[fit.way]}"))
    rows.append(("  because", fit.why))
    if fit.modules:
        rows.append(("  through", ", ".join(fit.modules)))
    if fit.kernels_off is not None:
        rows.append(("  kernels", f"off: {fit.kernels_off}"))
    for layer in fit.kernels_do_not_read:
        rows.append(("  kernels", f"none supports {layer}"))
    if fit.ways_cut_short:
        rows.append(
            ("  attention", "the test ran out of time: untested steps use plain operations")
        )
    if fit.attend_halves_from is not None:
        half = f"--attend-tokens 1024 halves the bytes of a step from {fit.attend_halves_from:,}"
        rows.append(("  choice", f"{half} tokens (weights included, one sequence)"))
    for steps in fit.choice:
        pays = "pays" if steps.pays else "does not pay"
        times = f"{steps.all_ms:.1f} ms, with a choice {steps.choice_ms:.1f}"
        behind = counted(steps.tokens, "token")
        rows.append(("  choice", f"{pays} after {behind}: a step takes {times}"))
    for timing in fit.attention:
        times = ", ".join(f"{way} {ms:.3f} ms" for way, ms in timing.milliseconds.items())
        what = f"{timing.layer}, {timing.situation}"
        rows.append(("  attention", f"{what}: {timing.chosen} ({times})"))


def _add_packed(rows: list[tuple[str, str]], packed: PackedParts) -> None:
    """Add rows that list which modules of a model multiply by packed weights."""
    kinds = (
        ("compiled layers", packed.layers),
        ("product by product", packed.products),
        ("in float32", packed.float32),
    )
    for what, names in kinds:
        if names:
            listed = ", ".join(f"{name} ({count})" for name, count in names.items())
            rows.append(("  weights", f"{what}: {listed}"))
