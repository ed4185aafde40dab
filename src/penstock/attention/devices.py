"""Attention backend of this process, chosen by MLX's default device at first use.

No other module queries the device or its memory. Both backends run on every device with equal
results, up to rounding; tests run the GPU's backend on a CPU.
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
    """Return the backend of this process, chosen by MLX's default device at the first call."""
    global _chosen
    if _chosen is None:
        _chosen = _of_cpu() if mx.default_device() == mx.cpu else _of_gpu()
    return _chosen


def _of_gpu() -> AttentionBackend:
    language = "metal" if mx.metal.is_available() else "cuda"
    return GPUBackend(DeviceFacts(own_memory=language == "cuda"), language)


def _of_cpu() -> AttentionBackend:
    """Return the CPU plug-in's backend, or the reference backend if it is not installed."""
    backend = extension("cpu")
    if backend is None:
        logger.warning("the CPU plug-in is not installed: attention uses MLX alone and is slower")
        return GPUBackend()
    of_cpu: AttentionBackend = backend()
    return of_cpu


@contextmanager
def using(backend: AttentionBackend) -> Iterator[AttentionBackend]:
    """Replace the process's backend within a `with` block."""
    global _chosen
    before, _chosen = _chosen, backend
    try:
        yield backend
    finally:
        _chosen = before


def default_stream() -> mx.Stream:
    """Return MLX's default stream on its default device."""
    return mx.default_stream(mx.default_device())


def claim_main_thread() -> None:
    """Make the calling thread MLX's main thread, unless another one has already used MLX.

    An operation of the main thread that fails, such as reading a damaged file, may leave MLX
    waiting for tasks that do not exist. Operations of other threads do not.
    """
    mx.synchronize(mx.default_stream(mx.cpu))


def device_name() -> str:
    return str(mx.device_info()["device_name"])


def machine_memory() -> MachineMemory:
    """Return the machine's total memory, and the maximum that MLX's device recommends to use."""
    return read_machine_memory(mx.device_info())
