"""Installation of the wheels by common tools from a local index.

What the packages need comes from the index that the tool uses by itself. `make test-rest` installs
with uv; `make test-install` tries pipx and pip as well, and each Python here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from patience import SOON

ROOT = Path(__file__).parents[2]
OURS = "penstock-mlx"
BENCHES = "penstock-mlx-bench"
EXTRA = "[cpu]" if sys.platform == "linux" else ""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
INSTALL_SECONDS = 1_800
WHOLE = pytest.mark.skipif(
    os.environ.get("PENSTOCK_INSTALLERS") != "all", reason="make test-install runs it"
)
ASKED = "The code of the amber falcon is 4821. What is the code of the amber falcon?"
STARTUP_MODULES = 1_700
"""Bound of the modules that a server has imported at its first answer: 1,470 were measured."""
NEVER_AT_STARTUP = {
    *("numba", "llvmlite", "torch", "matplotlib", "pandas", "scipy", "mlx_vlm", "ray"),
    *("redis", "obstore", "gguf", "openai", "datasets", "sklearn"),
}


def run(*command: str | Path, **environment: str | Path) -> str:
    """Run a command without this environment's packages, and return its output."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PENSTOCK_", "PYTHON", "VIRTUAL_ENV"))
    }
    more = {name: str(value) for name, value in environment.items()}
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean | more, timeout=INSTALL_SECONDS
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class LocalIndex:
    """An index with our distributions, over HTTP."""

    url: str
    folder: Path

    def file(self, package: str, suffix: str) -> Path:
        (path,) = (self.folder / package).glob(f"*{suffix}")
        return path


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="session")
def index(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalIndex]:
    """Build both packages; a wheel is built from the files of its source distribution."""
    folder = tmp_path_factory.mktemp("index")
    for package, source in ((OURS, ROOT), (BENCHES, ROOT / "benchmarks")):
        run(tools / "uv", "build", "--quiet", "--out-dir", folder / package, source)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield LocalIndex(f"http://127.0.0.1:{server.server_port}", folder)
    server.shutdown()
    thread.join()
    server.server_close()


def interpreter(version: str) -> str:
    """Return the Python of a version; skip if it is not installed."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return str(Path(sys.base_prefix) / "bin" / f"python{version}")
    candidates = [shutil.which(f"python{version}"), *_of_pyenv(version)]
    for candidate in candidates:
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return str(candidate)
    pytest.skip(f"no Python {version} here")


def _of_pyenv(version: str) -> list[Path]:
    return sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))


def installed_by_uv(tools: Path, index: LocalIndex, folder: Path, python: str) -> Path:
    run(
        *(tools / "uv", "tool", "install", "--quiet", "--python", python),
        *("--index", index.url, "--with", BENCHES, f"{OURS}{EXTRA}"),
        UV_TOOL_DIR=folder / "tools",
        UV_TOOL_BIN_DIR=folder / "bin",
    )
    return folder / "bin"


def installed_by_pipx(tools: Path, index: LocalIndex, folder: Path, python: str) -> Path:
    homes = {"PIPX_HOME": folder / "pipx", "PIPX_BIN_DIR": folder / "bin"}
    source = f"--pip-args=--extra-index-url {index.url}"
    run(tools / "pipx", "install", "--python", python, source, f"{OURS}{EXTRA}", **homes)
    run(tools / "pipx", "inject", source, OURS, BENCHES, **homes)
    return folder / "bin"


def installed_by_pip(tools: Path, index: LocalIndex, folder: Path, python: str) -> Path:
    run(python, "-m", "venv", folder)
    pip = (folder / "bin" / "pip", "install", "--quiet", "--extra-index-url", index.url)
    run(*pip, f"{OURS}{EXTRA}", BENCHES)
    return folder / "bin"


HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.mark.parametrize(
    ("install", "version"),
    [
        (installed_by_uv, HERE),
        pytest.param(installed_by_pipx, HERE, marks=WHOLE),
        pytest.param(installed_by_pip, HERE, marks=WHOLE),
        *(
            pytest.param(installed_by_uv, version, marks=WHOLE)
            for version in PYTHONS
            if version != HERE
        ),
    ],
)
def test_installed_command_generates_text(
    install: object, version: str, tools: Path, index: LocalIndex, tmp_path: Path
) -> None:
    assert callable(install)
    command = install(tools, index, tmp_path, interpreter(version)) / "penstock"
    home = {"HOME": tmp_path, "XDG_CACHE_HOME": tmp_path / "cache"}
    assert re.fullmatch(r"penstock \d+\.\d+\.\d+\n", run(command, "--version", **home))
    assert "4821" in run(command, "generate", ASKED, **home)
    assert "single" in run(command, "bench", **home)
    modules = modules_at_first_answer(command, tmp_path)
    assert not {name.partition(".")[0] for name in modules} & NEVER_AT_STARTUP
    assert len(modules) < STARTUP_MODULES


@WHOLE
def test_uvx_runs_benches_from_their_package(
    tools: Path, index: LocalIndex, tmp_path: Path
) -> None:
    uvx = (tools / "uv", "tool", "run", "--quiet", "--python", interpreter(HERE))
    source = ("--index", index.url, "--from", BENCHES, "--with", f"{OURS}{EXTRA}")
    shown = run(*uvx, *source, "penstock", "bench", "mac", "--help", UV_TOOL_DIR=tmp_path)
    assert "Record a GPU in one file" in shown


def modules_at_first_answer(command: Path, home: Path) -> set[str]:
    """Return the modules of a server after its first answer."""
    report = home / "imports"
    with report.open("w") as errors:
        server = subprocess.Popen(
            [command, "serve", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPROFILEIMPORTTIME": "1"},
        )
    try:
        assert server.stdout is not None
        urls = (re.search(r"http://\S+?:\d+", line) for line in server.stdout)
        url = next(match[0] for match in urls if match)
        question = {"messages": [{"role": "user", "content": ASKED}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=question, timeout=SOON)
        assert "4821" in answer.json()["choices"][0]["message"]["content"]
    finally:
        server.terminate()
        server.communicate(timeout=SOON)
    lines = report.read_text().splitlines()
    return {line.split("|")[-1].strip() for line in lines if line.startswith("import time:")}


@pytest.mark.parametrize(
    "version",
    [pytest.param(version, marks=() if version == HERE else WHOLE) for version in PYTHONS],
)
@pytest.mark.parametrize(
    ("platform", "extra"),
    [
        ("x86_64-manylinux_2_35", "[cpu]"),
        ("aarch64-manylinux_2_35", "[cpu]"),
        ("x86_64-manylinux_2_35", "[cuda]"),
        ("aarch64-apple-darwin", ""),
        ("aarch64-apple-darwin", "[vlm,gguf,remote]"),
    ],
)
def test_dependencies_have_wheels_for_every_python(
    version: str, platform: str, extra: str, tools: Path, index: LocalIndex, tmp_path: Path
) -> None:
    """Each package that is needed has a wheel for this Python and system, and none conflicts."""
    wanted = tmp_path / "requirements.in"
    wanted.write_text(f"{OURS}{extra}\n{BENCHES}\ntransformers>=5.24\n")
    resolved = run(
        *(tools / "uv", "pip", "compile", "--quiet", "--no-header", "--only-binary", ":all:"),
        *("--python-version", version, "--python-platform", platform, "--index", index.url, wanted),
        MACOSX_DEPLOYMENT_TARGET="14.0",  # uv takes 13 by itself, for which MLX has no wheel
    )
    assert f"{OURS}{extra or '=='}" in resolved.replace(f"{OURS}==", f"{OURS}{extra or '=='}")


def names_in_wheel(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize(
    ("package", "source"),
    [(OURS, "src/penstock"), (BENCHES, "benchmarks/src/penstock_bench")],
)
def test_wheel_contains_only_sources(package: str, source: str, index: LocalIndex) -> None:
    wheel = names_in_wheel(index.file(package, ".whl"))
    listed = run(
        "git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", source
    )
    parent = Path(source).parent
    tracked = {Path(name).relative_to(parent).as_posix() for name in listed.splitlines()}
    assert {name for name in wheel if ".dist-info/" not in name} == {
        name for name in tracked if (ROOT / parent / name).exists()
    }
    assert index.file(package, ".whl").stat().st_size < 8e6


def test_source_distribution_has_tests_and_docs(index: LocalIndex) -> None:
    with tarfile.open(index.file(OURS, ".tar.gz")) as archive:
        folders = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    assert folders >= {"src", "tests", "docs", "benchmarks", "README.md", "CHANGELOG.md", "LICENSE"}
    assert not folders & {".venv", ".git", "dist"}
