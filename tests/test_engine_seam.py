"""Only `engine` uses the core; others use `EngineView`, checked in the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = (ROOT / "src" / "penstock", ROOT / "benchmarks" / "src")
CORE = "penstock.engine.core"
STEPS_ITSELF = "penstock_bench"
"""The package that may make a core, to time single steps of it."""
ACTS = frozenset({"submit", "step", "flush_tiers", "close", "view"})
"""Attributes of a core that a bench may use."""
ENGINES = frozenset({"engine", "_engine"})
CORES = frozenset({"core", "_core"})


def name_of(node: ast.expr) -> str | None:
    """Return the last name of an attribute chain."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def imports_the_core(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name == CORE for alias in node.names)
    if not isinstance(node, ast.ImportFrom):
        return False
    names = {f"{node.module}.{alias.name}" for alias in node.names}
    return node.module == CORE or CORE in names


def accesses_core_part(node: ast.AST) -> bool:
    """Return whether a node is `engine._core`, `core.<part>` or the like."""
    if not isinstance(node, ast.Attribute):
        return False
    owner = name_of(node.value)
    private = owner in ENGINES and node.attr.startswith("_")
    return private or (owner in CORES and node.attr not in ACTS)


def faults(module: str, source: str) -> list[str]:
    """List accesses of `module` to the core that only `engine` may make."""
    steps_itself = module.split(".", 1)[0] == STEPS_ITSELF
    return [
        f"{module}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if accesses_core_part(node) or (imports_the_core(node) and not steps_itself)
    ]


def modules() -> Iterator[tuple[str, Path]]:
    for folder in SOURCES:
        base = folder if folder.name != "penstock" else folder.parent
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(base).with_suffix("").parts
            if parts[:2] != ("penstock", "engine"):
                yield ".".join(parts).removesuffix(".__init__"), file


@pytest.mark.parametrize(("module", "file"), list(modules()), ids=str)
def test_core_is_used_only_by_engine(module: str, file: Path) -> None:
    assert faults(module, file.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("penstock.server.made_up", "from penstock.engine.core import Core"),
        ("penstock.cli.made_up", "def late():\n    import penstock.engine.core"),
        ("penstock.cli.made_up", "from penstock.engine import core"),
        ("penstock.server.made_up", "service.engine._later(lambda core: core.clear())"),
        ("penstock.server.made_up", "self._engine._core"),
        ("penstock.plugins.ray.made_up", "ask(lambda core: core.prefixes.fingerprint)"),
        ("penstock_bench.made_up", "self._core.counters.hit_tokens"),
        ("penstock_bench.made_up", "core.executor.runner = watch"),
    ],
)
def test_check_detects_core_access(module: str, source: str) -> None:
    assert faults(module, source) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("penstock.server.made_up", "service.ask(EngineView.stats)"),
        ("penstock.server.made_up", "engine.ask(lambda view: view.limits.max_queue)"),
        ("penstock_bench.made_up", "from penstock.engine.core import Core\ncore.step()"),
        ("penstock_bench.made_up", "core.view.stats().hit_tokens"),
        ("penstock_bench.made_up", "import mlx.core as mx"),
    ],
)
def test_check_accepts_view_access(module: str, source: str) -> None:
    assert faults(module, source) == []
