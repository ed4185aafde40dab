"""The back end of this process: all that is computed in another way on a CPU than on a GPU.

It is chosen once, from MLX's device, when it is first asked for. No other module asks for the
device or its memory. Both back ends run on every device and give the same numbers, to rounding:
tests run the GPU's on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from penstock.attention.attention_backend import AttentionBackend
from penstock.attention.attention_memory import DeviceFacts
from penstock.attention.mlx_backend import GPUBackend
from penstock.extensions import extension
from penstock.memory import MachineMemory, read_machine_memory

_chosen: AttentionBackend | None = None
logger = logging.getLogger(__name__)


def current() -> AttentionBackend:
    """Return the back end of this process: that of MLX's device when it is first asked for."""
    global _chosen
    if _chosen is None:
        _chosen = _of_cpu() if mx.default_device() == mx.cpu else _of_gpu()
    return _chosen


def _of_gpu() -> AttentionBackend:
    language = "metal" if mx.metal.is_available() else "cuda"
    return GPUBackend(DeviceFacts(own_memory=language == "cuda"), language)


def _of_cpu() -> AttentionBackend:
    """Return the plug-in's back end, or the reference, whose numbers are the same."""
    backend = extension("cpu")
    if backend is None:
        logger.warning("no CPU plug-in is installed: MLX computes attention alone, slower")
        return GPUBackend()
    of_cpu: AttentionBackend = backend()
    return of_cpu


@contextmanager
def using(backend: AttentionBackend) -> Iterator[AttentionBackend]:
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
