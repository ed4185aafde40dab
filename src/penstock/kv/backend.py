"""The back end of this process: all that is computed in another way on a CPU than on a GPU.

It is chosen once, from MLX's device, when it is first asked for. No other module asks for the
device or its memory. Both back ends run on every device and give the same numbers, to rounding:
tests run the GPU's on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from penstock.kv.backend_base import Backend
from penstock.kv.cpu_backend import CPUBackend
from penstock.kv.gpu_backend import GPUBackend
from penstock.memory import MachineMemory, read_machine_memory

__all__ = [
    "Backend",
    "CPUBackend",
    "GPUBackend",
    "current",
    "default_stream",
    "device_name",
    "machine_memory",
    "using",
]

_chosen: Backend | None = None


def current() -> Backend:
    """Return the back end of this process: that of MLX's device when it is first asked for."""
    global _chosen
    if _chosen is None:
        language = "metal" if mx.metal.is_available() else "cuda"
        gpu = GPUBackend(language == "cuda", language)
        _chosen = CPUBackend() if mx.default_device() == mx.cpu else gpu
    return _chosen


@contextmanager
def using(backend: Backend) -> Iterator[Backend]:
    """Let the process compute with this back end meanwhile, on any device."""
    global _chosen
    before, _chosen = _chosen, backend
    try:
        yield backend
    finally:
        _chosen = before


def default_stream() -> mx.Stream:
    """Return the stream that MLX computes on here, of its device."""
    return mx.default_stream(mx.default_device())


def device_name() -> str:
    """Return MLX's name of its device."""
    return str(mx.device_info()["device_name"])


def machine_memory() -> MachineMemory:
    """Read the machine's memory, with the bytes that MLX's device recommends."""
    return read_machine_memory(mx.device_info())
