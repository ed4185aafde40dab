"""The import map: who may import whom, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = (ROOT / "src" / "penstock", ROOT / "benchmarks" / "src" / "penstock_bench")

# Imports go down this list only; the parts of one line do not import each other.
LEVELS = (
    ("errors",),
    ("config",),
    ("memory", "blas", "heap", "open_files", "recall"),
    ("ledger",),
    ("kv",),
    ("prefix", "routing"),
    ("tiers", "caches"),
    ("models",),
    ("engine",),
    ("server",),
    ("serve_ray",),
    ("cli",),
    ("__init__", "__main__"),
)
RANK = {part: rank for rank, parts in enumerate(LEVELS) for part in parts}
# A module that needs more of ours has more than one task.
MOST_IN_ENGINE = 18
MOST_IMPORTS = 21
KNOWS_MLX_LM = "penstock.models.mlx_lm"
BENCHES = "penstock_bench"
# Benches drive mlx-lm's own batching, which nothing that is served may lean on: what they need
# stands in a file of their package.
RIVALS = f"{BENCHES}.rivals"


def imported(module: str, source: str) -> Iterator[str]:
    """Yield the dotted name of everything that `source` imports, wherever in it."""
    yield from imported_in(module, ast.parse(source))


def imported_in(module: str, tree: ast.AST) -> Iterator[str]:
    """Yield the dotted name of everything that a syntax tree imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def part_of(name: str) -> str:
    """Return the part of the package that a dotted name belongs to."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def faults(module: str, source: str) -> list[str]:
    """List every import of `module` that the map does not allow."""
    own, of_benches = part_of(module), module.split(".")[0] == BENCHES
    found = []
    for name in imported(module, source):
        package, _, rest = name.partition(".")
        if package == "mlx_lm":
            if module not in (KNOWS_MLX_LM, RIVALS):
                found.append(f"{module} imports {name}; only {KNOWS_MLX_LM} and {RIVALS} may")
            if any(part.startswith("_") for part in rest.split(".")):
                found.append(f"{module} imports {name}, a private name")
        elif package == BENCHES and not of_benches:
            found.append(f"{module} imports {name}; penstock finds benches by entry points alone")
        elif package == "penstock" and rest != "__version__" and not of_benches:
            other = part_of(name)
            if other not in RANK:
                found.append(f"{module} imports {name}, which is not a part of the package")
            elif other != own and RANK[other] >= RANK[own]:
                found.append(f"{module} imports {name}, which is not below it")
    return found


def modules() -> Iterator[tuple[str, Path]]:
    for source in SOURCES:
        for file in sorted(source.rglob("*.py")):
            parts = file.relative_to(source).with_suffix("").parts
            yield ".".join((source.name, *parts)).removesuffix(".__init__"), file


@pytest.mark.parametrize(("module", "file"), list(modules()), ids=str)
def test_imports_go_down_the_map(module: str, file: Path) -> None:
    assert faults(module, file.read_text()) == []


def test_one_file_of_each_package_imports_mlx_lm() -> None:
    knowing = [
        module
        for module, file in modules()
        if any(name.split(".")[0] == "mlx_lm" for name in imported(module, file.read_text()))
    ]
    assert knowing == [KNOWS_MLX_LM, RIVALS]


KNOWN = {module for module, _ in modules()}


def own_imports(module: str, source: str) -> set[str]:
    """Return the modules of penstock that a module imports."""
    names = [name for name in imported(module, source) if name.split(".")[0] == "penstock"]
    return {name if name in KNOWN else name.rpartition(".")[0] for name in names}


@pytest.mark.parametrize(("module", "file"), list(modules()), ids=str)
def test_no_module_knows_too_many_others(module: str, file: Path) -> None:
    most = MOST_IN_ENGINE if module.startswith("penstock.engine.") else MOST_IMPORTS
    assert len(own_imports(module, file.read_text())) <= most


def test_imports_of_functions_and_of_modules_are_counted() -> None:
    source = (
        "from penstock import config\nfrom penstock.kv import backend\n"
        "def late():\n    from penstock.kv.segment import Layer, Segment\nimport numpy\n"
    )
    expected = {"penstock.config", "penstock.kv.backend", "penstock.kv.segment"}
    assert own_imports("penstock.engine.made_up", source) == expected


def test_ray_is_imported_by_its_own_part_alone_and_when_it_is_asked_for() -> None:
    for module, file in modules():
        own = module.startswith("penstock.serve_ray")
        tops = {name.split(".")[0] for name in imported(module, file.read_text())}
        assert own or "ray" not in tops, module
        at_once = imports_at_once(module, file.read_text())
        assert own or not any(name.startswith("penstock.serve_ray") for name in at_once), module


def imports_at_once(module: str, source: str) -> set[str]:
    """Return what is imported as soon as the module is."""
    top = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
    return {name for node in top for name in imported(module, ast.unparse(node))}


class WithoutTypes(ast.NodeTransformer):
    """Takes out of a source the imports that a type checker alone follows."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node


def imports_at_run_time(module: str, source: str) -> set[str]:
    """Return what a module imports, at once or when one of its functions is called."""
    return set(imported_in(module, WithoutTypes().visit(ast.parse(source))))


def imports_among(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return the modules that each of these imports at run time."""
    known = {name: imports_at_run_time(name, text) for name, text in sources.items()}
    return {
        name: {one if one in known else one.rpartition(".")[0] for one in names} & known.keys()
        for name, names in known.items()
    }


def test_no_import_is_a_circle() -> None:
    sources = {module: file.read_text() for module, file in modules()}
    TopologicalSorter(imports_among(sources)).prepare()


@pytest.mark.parametrize(
    "back",
    [
        "import a.b",
        "def late():\n    import a.b",
        "class C:\n    def late(self):\n        from a import b",
        "try:\n    from a.b import e\nexcept ImportError:\n    e = None",
        "if TYPE_CHECKING:\n    import f\nelse:\n    import a.b",
    ],
)
def test_a_circle_is_found(back: str) -> None:
    with pytest.raises(CycleError):
        TopologicalSorter(imports_among({"a.b": "from a.c import d", "a.c": back})).prepare()


def test_imports_for_types_alone_make_no_circle() -> None:
    back = "if TYPE_CHECKING:\n    from a.b import E\ndef late():\n    import f"
    TopologicalSorter(imports_among({"a.b": "from a.c import d", "a.c": back})).prepare()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("penstock.kv.made_up", "from penstock.engine.model.runner import Step"),
        ("penstock.kv.made_up", "def late():\n    from penstock.cli import main"),
        ("penstock.kv.made_up", "from ..models import mlx_lm"),
        ("penstock.kv.made_up", "import mlx_lm.models.cache"),
        ("penstock.kv.made_up", "from penstock import KVCache"),
        ("penstock.memory", "import penstock.recall"),
        ("penstock.server.made_up", "from penstock_bench.growth import run"),
        ("penstock.cli.made_up", "def late():\n    import penstock_bench"),
        ("penstock", "from penstock_bench import growth"),
        ("penstock.server.made_up", "from penstock.serve_ray.door import Door"),
        ("penstock.kv.made_up", "import penstock.utils"),
        ("penstock.engine.made_up", "from penstock_bench.rivals import Batched"),
        ("penstock.models.made_up", "from penstock_bench import rivals"),
        ("penstock_bench.made_up", "from mlx_lm.generate import BatchGenerator"),
        (KNOWS_MLX_LM, "from mlx_lm.models.cache import _BaseCache"),
        (RIVALS, "from mlx_lm.generate import _merge_caches"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert faults(module, source) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("penstock.cli.made_up", "from penstock import __version__"),
        ("penstock.kv.made_up", "from . import columns\nfrom penstock.errors import PoolFull"),
        (KNOWS_MLX_LM, "from mlx_lm.sample_utils import make_sampler"),
        (RIVALS, "from mlx_lm.generate import BatchGenerator"),
        ("penstock_bench.made_up", "from penstock_bench.rivals import Batched"),
    ],
)
def test_an_allowed_import_passes(module: str, source: str) -> None:
    assert faults(module, source) == []
