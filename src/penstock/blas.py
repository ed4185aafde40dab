"""A fast BLAS for MLX on a Linux CPU, loaded before MLX is.

MLX's Linux CPU wheel is linked against the reference BLAS: 6 GFLOPS in float32 on two cores
where OpenBLAS reaches 200. A CBLAS that is loaded with its symbols global *before*
`mlx.core` is imported takes the place of the slow one; loaded afterwards it changes nothing,
because MLX has bound its symbols by then (measured with MLX 0.32.4).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

VARIABLE = "PENSTOCK_BLAS"
"""Path or soname of the CBLAS to load; `none` loads nothing."""

# The threaded builds come first: Fedora's plain `libopenblas.so.0` runs on one core.
_SONAMES = (
    "libopenblasp.so.0",
    "libopenblas.so.0",
    "libflexiblas.so.3",
    "libblis-mt.so.4",
    "libblis.so.4",
    "libmkl_rt.so.2",
)
INSTALL_HINT = "Debian/Ubuntu: libopenblas0, Fedora: openblas-threads, Arch: openblas"
CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12")


@dataclass(frozen=True, slots=True)
class Blas:
    """Which BLAS MLX multiplies with, and why it is that one."""

    found: bool
    """Whether a fast BLAS is in place, or none is needed on this machine."""
    name: str
    """The library loaded, or what multiplies instead."""
    why: str
    advice: str | None = None
    """One line for the user when something should be done about it."""


@cache
def load_blas() -> Blas:
    """Load a CBLAS with global symbols if MLX would otherwise use a slow one.

    Never raises: without a fast BLAS everything works, only slower. The first call decides;
    later calls return the same answer.
    """
    if sys.platform != "linux":
        return Blas(True, "Accelerate", "MLX brings its own on this system")
    if uses_cuda():
        return Blas(True, "CUDA", "MLX multiplies on the NVIDIA device")
    wanted = os.environ.get(VARIABLE, "").strip()
    if wanted.lower() == "none":
        return Blas(False, "reference BLAS", f"{VARIABLE}=none")
    if "mlx.core" in sys.modules:
        late = "mlx.core was imported before penstock, so MLX keeps the slow reference BLAS"
        return Blas(False, "reference BLAS", late, f"{late}; import penstock first")
    return _load_named(wanted) if wanted else _load_first()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let OpenBLAS multiply on the calling thread alone meanwhile, for the whole process.

    For work that is spread over MLX's streams: two of them that each call a threaded BLAS wait
    for each other. Does nothing for other libraries.
    """
    library = _openblas()
    if library is None:
        yield
        return
    threads = library.openblas_get_num_threads()
    library.openblas_set_num_threads(1)
    try:
        yield
    finally:
        library.openblas_set_num_threads(threads)


@cache
def _openblas() -> ctypes.CDLL | None:
    """Return the OpenBLAS that MLX multiplies with, None if it is another library."""
    blas = load_blas()
    if sys.platform != "linux" or not blas.found or uses_cuda():
        return None
    library = ctypes.CDLL(blas.name)
    return library if hasattr(library, "openblas_set_num_threads") else None


def uses_cuda() -> bool:
    """Tell whether MLX's CUDA back end is installed and an NVIDIA device is there."""
    return nvidia_device() and any(installed(package) for package in CUDA_PACKAGES)


def nvidia_device() -> bool:
    """Tell whether the system shows an NVIDIA device."""
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/nvidia0"))


def installed(package: str) -> str | None:
    """Return the installed version of a distribution, None if it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _load_named(wanted: str) -> Blas:
    """Load the library the user named, or another one with a warning."""
    problem = _open(wanted)
    if problem is None:
        return Blas(True, wanted, f"named by {VARIABLE}")
    instead = _load_first()
    used = f"using {instead.name} instead" if instead.found else "MLX keeps the slow reference BLAS"
    return Blas(
        instead.found, instead.name, problem, f"{VARIABLE}={wanted} is not used: {problem}; {used}"
    )


def _load_first() -> Blas:
    """Load the first of the known libraries that this machine has."""
    for soname in _SONAMES:
        if _open(soname) is None:
            return Blas(True, soname, "the first fast BLAS found on this machine")
    advice = f"no fast BLAS found, float32 runs about 30 times slower; install {INSTALL_HINT}"
    return Blas(False, "reference BLAS", "no fast BLAS is installed", advice)


def _open(library: str) -> str | None:
    """Load `library` with global symbols; return what was wrong, None if nothing.

    It is looked at with local symbols first: a library without CBLAS must not stay in front
    of the symbols of others.
    """
    try:
        if not hasattr(ctypes.CDLL(library, mode=ctypes.RTLD_LOCAL), "cblas_sgemm"):
            return "it has no cblas_sgemm"
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error).splitlines()[0]
    return None
