"""The C heap on a Linux CPU: what MLX frees is kept for its next array.

MLX's CPU back end takes every array from malloc and gives it back. By default glibc returns
memory to the system whenever the top of its heap is free, and takes arrays of some sizes from
the system one by one; each page is then zeroed again at its first use. A softmax in a dozen
passes over 1 MiB spends more time there than in computing: 1.1 to 2.9 ms where 0.44 are needed
(MLX 0.32.4, glibc 2.36, one core).
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache

KEPT_BYTES = 64 * 2**20
"""Free memory at the top of the heap that is not given back to the system."""

# mallopt's parameters, from glibc's malloc.h; 32 MiB is the largest threshold that it takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_MMAP_BYTES = 32 * 2**20


@cache
def keep_freed_memory() -> bool:
    """Let the heap keep what is freed, for the whole process; tell whether it will.

    Arrays over 32 MiB still go back to the system at once. One arena for all threads: in those
    that glibc gives to other threads than the first, none of this holds.
    """
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    accepted = [
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES),
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES),
        mallopt(_ARENA_MAX, 1),
    ]
    return accepted == [1, 1, 1]
