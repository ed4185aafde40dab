"""A fast BLAS for MLX on a Linux CPU, loaded before MLX is.

MLX's Linux CPU wheel is linked against the reference BLAS: 6 GFLOPS in float32 on two cores where
OpenBLAS reaches 200. A CBLAS takes the place of the slow one if it is loaded *before* `mlx.core` is
imported, with its symbols global. Loaded afterwards it changes nothing, because MLX has bound its
symbols by then (measured with MLX 0.32.4).
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from importlib import metadata
from pathlib import Path

from threadpoolctl import ThreadpoolController

VARIABLE = "PENSTOCK_BLAS"
"""Path or soname of the CBLAS to load; `none` loads nothing."""

# The threaded builds come first: Fedora's plain `libopenblas.so.0` runs on one core.
_SONAMES = (
    "libopenblasp.so.0",
    "libopenblas.so.0",
    "libflexiblas.so.3",
    "libblis-mt.so.4",
    "libblis.so.4",
    "libmkl_rt.so.3",
    "libmkl_rt.so.2",
)
_WHEEL = ("mkl", "libmkl_rt.so*")
"""The distribution whose wheel brings a CBLAS with plain names, and the file. OpenBLAS's wheels
rename their symbols (scipy-openblas32) or need the system's libgfortran (cmeel-openblas)."""
INSTALL_COMMANDS = {
    "apt-get": "sudo apt-get install libopenblas0",
    "dnf": "sudo dnf install openblas-threads",
    "pacman": "sudo pacman -S openblas",
    "apk": "sudo apk add openblas",
}
"""Install command, by the package manager of the system."""
WHEEL_COMMAND = "pip install 'penstock[blas]'"
_UNPACKED_CORES = ("SkylakeX", "Cooperlake", "SapphireRapids")
"""OpenBLAS's names of CPUs for which it has kernels that copy nothing (0.3.13 and later)."""
CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12")


@dataclass(frozen=True, slots=True)
class Blas:
    """Which BLAS MLX multiplies with, and why it is that one."""

    is_fast: bool
    """Whether a fast BLAS is in place, or none is needed on this machine."""
    name: str
    """The library loaded, or the BLAS that multiplies instead."""
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
    """Let BLAS multiply on the calling thread alone meanwhile, for the whole process.

    For work that is spread over MLX's streams and a second thread: two that each call a threaded
    BLAS wait for each other. MLX's BLAS is meant and NumPy's, which brings its own. Accelerate
    takes no such limit.
    """
    if sys.platform != "linux":
        yield
        return
    with _pools().limit(limits=1, user_api="blas"):
        yield


@cache
def _pools() -> ThreadpoolController:
    """Return the thread pools of the libraries that are loaded when it is first asked for."""
    return ThreadpoolController()


@cache
def multiplies_unpacked() -> bool:
    """Tell whether BLAS multiplies small matrices where they lie: OpenBLAS's AVX-512 kernels do."""
    blas = load_blas()
    if sys.platform != "linux" or not blas.is_fast or uses_cuda():
        return False
    name = getattr(ctypes.CDLL(blas.name), "openblas_get_corename", None)
    if name is None:
        return False
    name.restype = ctypes.c_char_p
    return name().decode() in _UNPACKED_CORES


def install_hint() -> str:
    """Return the command that installs a fast BLAS on this system, and the one without root."""
    commands = [command for manager, command in INSTALL_COMMANDS.items() if shutil.which(manager)][
        :1
    ]
    if platform.machine() == "x86_64":
        commands.append(f"{WHEEL_COMMAND} (970 MB, no root needed)")
    return ", or ".join(commands) or "install OpenBLAS by your system's package manager"


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
    used = (
        f"using {instead.name} instead" if instead.is_fast else "MLX keeps the slow reference BLAS"
    )
    return Blas(
        instead.is_fast,
        instead.name,
        problem,
        f"{VARIABLE}={wanted} is not used: {problem}; {used}",
    )


def _load_first() -> Blas:
    """Load the first of the known libraries that this machine has."""
    for soname in _SONAMES:
        if _open(soname) is None:
            return Blas(True, soname, "the first fast BLAS found on this machine")
    for path in _in_wheel():
        if _open(path) is None:
            return Blas(True, path, f"from the wheel of {_WHEEL[0]}")
    advice = f"no fast BLAS found, float32 runs about 30 times slower; run: {install_hint()}"
    return Blas(False, "reference BLAS", "no fast BLAS is installed", advice)


def _in_wheel() -> list[str]:
    """Return where a wheel has put its CBLAS, if it is installed in this environment."""
    name, pattern = _WHEEL
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        return []
    return [str(Path(file.locate()).resolve()) for file in files if fnmatch(file.name, pattern)]


def _open(library: str) -> str | None:
    """Load `library` with global symbols; return the fault, or None.

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
