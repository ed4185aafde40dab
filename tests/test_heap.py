"""Memory that MLX frees stays with the process if the C library supports it."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Softmax weights of several sizes, one after the other. The kernel counts the pages that have to
# be mapped anew; they say whether memory was used again, which times would not.
SCRIPT = """
import resource, sys
import penstock
import mlx.core as mx
from penstock.heap import keep_freed_memory
from penstock.attention import devices
exp2 = devices.current().exp2
if sys.argv[1] == "kept":
    assert keep_freed_memory()
faults = 0
for columns in (8192, 2048, 2304):
    scores = -mx.abs(mx.random.normal((4, 32, columns)))
    for count in (5, 50):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(count):
            mx.eval(exp2(scores))
    faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


def page_faults(mode: str) -> int:
    command = [sys.executable, "-c", SCRIPT, mode]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_freed_heap_memory_is_reused_without_page_faults() -> None:
    by_default = page_faults("not kept")
    if by_default < 10_000:
        pytest.skip(f"this C library keeps it by itself: {by_default} faults")
    assert page_faults("kept") < by_default / 100


# Half of what is freed lies below memory that is still held, as nodes that were evicted do.
GIVING_BACK = """
import psutil
import penstock
import mlx.core as mx
from penstock.heap import give_back_freed_memory, keep_freed_memory
def resident():
    return psutil.Process().memory_info().rss >> 20
assert keep_freed_memory(300 << 20)
mx.set_cache_limit(0)
held = [mx.ones((1 << 20,)) for _ in range(50)]
mx.eval(held)
full = resident()
del held[::2], held[-1]
kept = resident()
assert give_back_freed_memory()
print(full - kept, kept - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_retained_heap_memory_can_be_released() -> None:
    command = [sys.executable, "-c", GIVING_BACK]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    gone_at_once, given_back = map(int, found.split())
    assert gone_at_once < 5, "mebibytes that were freed have gone back by themselves"
    assert 95 < given_back < 110, "26 arrays of 4 MiB were freed"


STARTED = """
import psutil
import penstock
import mlx.core as mx
from penstock.heap import keep_freed_memory
from penstock.recall import MODEL_PATH
model, tokenizer = penstock.load(MODEL_PATH)
assert keep_freed_memory(300 << 20)
held = [mx.ones((1 << 20,)) for _ in range(50)]
mx.eval(held)
del held[::2], held[-1]
before = psutil.Process().memory_info().rss
with penstock.Engine(model, tokenizer, memory_limit="200MB"):
    print((before - psutil.Process().memory_info().rss) >> 20)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_engine_start_releases_memory_freed_by_loading() -> None:
    command = [sys.executable, "-c", STARTED]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 50  # of the 100 MiB below arrays that are still there


# Before the block and behind it freed memory is kept; in it, only by what is allocated before.
LOADING = """
import psutil
import penstock
import mlx.core as mx
from penstock.heap import keep_freed_memory, without_keeping
def released():
    held = [mx.ones((1 << 20,)) for _ in range(50)]
    mx.eval(held)
    full = psutil.Process().memory_info().rss
    del held[::2]
    return (full - psutil.Process().memory_info().rss) >> 20
mx.set_cache_limit(0)
assert keep_freed_memory(300 << 20)
with without_keeping():
    inside = released()
print(inside, released())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_loading_keeps_no_freed_memory() -> None:
    command = [sys.executable, "-c", LOADING]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    inside, behind = map(int, done.stdout.split())
    assert 95 < inside < 105, "25 arrays of 4 MiB"
    assert behind < 5


CODE = """
import sys
from pathlib import Path
import mlx.core as mx
from penstock.heap import give_back_code
def resident():
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            named = rest[-1] == mx.__file__
        elif named and first == "Rss:":
            yield int(rest[0])
computed = mx.sum(mx.ones((100,))).item()
before = sum(resident())
given = give_back_code(sys.argv[1] or Path(mx.__file__).name)
print(before, sum(resident()), given)
assert mx.sum(mx.ones((100,))).item() == computed
"""


@pytest.mark.skipif(sys.platform != "linux", reason="its mappings are Linux's")
@pytest.mark.parametrize("name", ["", "no such library"])
def test_unwritten_pages_of_a_library_are_released(name: str) -> None:
    command = [sys.executable, "-c", CODE, name]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    before, after, given = map(int, run.stdout.split())
    assert (after < before / 2) == (not name)
    assert bool(given) == (not name)
