"""The BLAS of `make test-rounding`: products are right except for the last digits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.blas import load_blas

SOURCE = Path(__file__).parents[1] / "tools" / "rounding_blas.c"
PRODUCTS = """
import penstock
import mlx.core as mx
import numpy as np
mx.random.seed(3)
a, b = mx.random.normal((8, 64)), mx.random.normal((64, 32))
once, again, fewer = (np.asarray(product) for product in (a @ b, a @ b, a[:7] @ b))
wide = np.asarray(a).astype(np.float64) @ np.asarray(b)
print((once == again).all(), (once[:7] == fewer).mean() < 0.5, np.abs(once - wide).max() < 1e-4)
print(once.tobytes().hex())
"""

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or "/libopenblas" not in load_blas().name,
    reason="needs cc, and the wheel of OpenBLAS",
)


def products(library: Path, seed: int) -> list[str]:
    named = {"PENSTOCK_BLAS": str(library), "ROUNDING_SEED": str(seed)}
    run = [sys.executable, "-c", PRODUCTS]
    return subprocess.run(
        run, env={**os.environ, **named}, check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_rounding_blas_rounds_by_seed_and_shape(tmp_path: Path) -> None:
    library = tmp_path / "librounding_blas.so"
    build = f"cc -O2 -Wall -Werror -shared -fPIC {SOURCE} -o {library}"
    blas = Path(load_blas().name)
    link = f"-Wl,--no-as-needed {blas} -Wl,-rpath,{blas.parent} -lm"
    subprocess.run([*build.split(), *link.split()], check=True)
    one, other = products(library, 1), products(library, 2)
    assert one[0] == other[0] == "True True True"
    assert one[1] != other[1], "the seed draws other numbers"
