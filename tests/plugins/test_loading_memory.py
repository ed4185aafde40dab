"""Memory while weights are packed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="weights are packed by loops that Numba compiles")

from patience import SOON

from support.gguf_files import small_file, write_random_llama

LOAD = r"""
import re, sys
from pathlib import Path
from penstock.models.loading import load_all

def status(name):
    return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

small, large = sys.argv[1:]
load_all(small, weights_dtype="packed")  # libraries, and compiled loops
Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what there is now
before = status("VmRSS")
model = load_all(large, weights_dtype="packed").model
print(sum(getattr(x, "packed_bytes", 0) for x in model.modules()), status("VmHWM") - before)
"""
TENSORS = 10
"""Largest tensors whose bytes are taken beside the packed weights: the pages of a file, its codes
as MLX has them, and the numbers between."""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much memory was taken")
def test_loading_holds_one_tensor_beside_packed_weights(tmp_path: Path) -> None:
    large = tmp_path / "large.gguf"
    tensor_bytes = write_random_llama(large, 8, 1024, 3072, "Q4_1")
    command = [sys.executable, "-c", LOAD, str(small_file(tmp_path)), str(large)]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=SOON, check=True)
    packed_bytes, taken_bytes = map(int, loaded.stdout.split())
    assert packed_bytes > 30 * tensor_bytes
    assert taken_bytes < packed_bytes + TENSORS * tensor_bytes
