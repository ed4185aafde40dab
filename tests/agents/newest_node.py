"""Programs of npm, and a Node that is new enough for the newest of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

NODE = 22
"""Least version of Node for the newest programs; for an older one npm installs older programs."""


def use_node(folder: Path) -> None:
    """Put a Node that is new enough in front of PATH: the system's, or one that npm installs.

    Args:
        folder: where that one is installed, as `node`.

    Raises:
        OSError: there is no Node at all.
        subprocess.CalledProcessError: npm could not install one.
    """
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True)
    if int(version.stdout.lstrip("v").partition(".")[0]) >= NODE:
        return
    package = folder.resolve() / "node" / "node_modules" / "node"
    if not (package / "bin" / "node").exists():
        npm_install(folder / "node", f"node@{NODE}")
        # npm does not run what puts the binary into its place.
        script = ["node", "installArchSpecificPackage"]
        subprocess.run(script, cwd=package, check=True, stdout=subprocess.DEVNULL)
    os.environ["PATH"] = f"{package / 'bin'}{os.pathsep}{os.environ['PATH']}"


def npm_install(folder: Path, *packages: str) -> None:
    """Install packages into a folder.

    Raises:
        subprocess.CalledProcessError: with npm's words in `stderr`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    quiet = ("--no-fund", "--no-audit", "--loglevel=error")
    command = ["npm", "install", *quiet, "--prefix", str(folder), *packages]
    subprocess.run(command, check=True, capture_output=True, text=True)
