"""Plug-ins: the package works without any one of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import penstock

PACKAGE = Path(penstock.__file__).parent
PLUGINS = sorted(p.name for p in (PACKAGE / "plugins").iterdir() if (p / "__init__.py").exists())
SOON = 540.0
ANSWERS = """
import json, sys
from importlib import import_module
from pathlib import Path

import penstock
from penstock.recall import MODEL_PATH

root = Path(penstock.__file__).parent
names = [".".join(p.relative_to(root.parent).with_suffix("").parts) for p in root.rglob("*.py")]
for name in names:
    if ".plugins." not in name and not name.endswith("__main__"):
        import_module(name.removesuffix(".__init__"))
from penstock.engine.offload.tier_kinds import TIER_KINDS
from penstock.attention import devices

engine = penstock.Engine(*penstock.load(MODEL_PATH), memory_limit="200MB")
messages = [{"role": "user", "content": "Who are you?"}]
with engine:
    text = str(engine.chat(messages, max_tokens=24))
print(json.dumps([str(root), text, sorted(TIER_KINDS), type(devices.current()).__name__]))
"""


def without(plugins: Sequence[str], folder: Path) -> Path:
    """Copy the package without some plug-ins."""
    gone = {PACKAGE / "plugins" / plugin for plugin in plugins}

    def left_out(at: str, names: list[str]) -> list[str]:
        return [name for name in names if Path(at, name) in gone or name == "__pycache__"]

    shutil.copytree(PACKAGE, folder / "penstock", ignore=left_out)
    return folder


def run(folder: Path, *command: str) -> str:
    """Run Python with the copy first on its path."""
    path = os.pathsep.join([str(folder), *sys.path])
    done = subprocess.run(
        (sys.executable, *command),
        capture_output=True,
        text=True,
        timeout=SOON,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
        cwd=PACKAGE.parent.parent,
    )
    assert done.returncode == 0, done.stdout[-3_000:] + done.stderr[-3_000:]
    return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    folder = without((), tmp_path_factory.mktemp("whole"))
    return parsed(run(folder, "-c", ANSWERS), folder)


def parsed(out: str, folder: Path) -> list[object]:
    import json

    root, *rest = json.loads(out.splitlines()[-1])
    assert root == str(folder / "penstock"), "another copy was imported"
    return rest


def test_list_of_plugins_is_complete() -> None:
    assert PLUGINS == ["cpu", "gguf", "kernels", "otel", "ray", "remote", "vlm"]


@pytest.mark.parametrize("plugin", PLUGINS)
def test_package_works_without_any_single_plugin(
    plugin: str, tmp_path: Path, whole: list[object]
) -> None:
    folder = without([plugin], tmp_path)
    text, tiers, device = parsed(run(folder, "-c", ANSWERS), folder)
    assert text == whole[0]
    assert tiers == (["disk"] if plugin == "remote" else ["disk", "remote"])
    if plugin == "cpu":
        assert device == "GPUBackend"
    else:
        assert device == whole[2]


@pytest.mark.slow
def test_core_tests_pass_without_plugins(tmp_path: Path) -> None:
    folder = without(PLUGINS, tmp_path)
    core = ("tests/kv", "tests/prefix", "tests/engine/schedule", "tests/engine/test_step.py")
    paths = f"pythonpath={folder} tests/support"
    quick = ("-m", "not slow", "-p", "no:cacheprovider", "-o", paths)
    run(folder, "-m", "pytest", "-q", "-x", *quick, *core)
