"""Import layers, checked in the sources."""

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
    ("plurals",),
    ("errors", "user_cache", "regular_files", "passing_folders", "extensions"),
    ("config",),
    ("memory", "blas", "heap", "open_files", "children", "recall"),
    ("ledger",),
    ("kv",),
    ("attention",),
    ("prefix", "routing"),
    ("tiers", "caches"),
    ("models",),
    ("engine",),
    ("encoders",),
    ("pool",),
    ("server",),
    ("plugins",),
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


def plugin_of(name: str) -> str:
    """Return the plug-in that a dotted name belongs to; empty for another part."""
    match name.split("."):
        case ["penstock", "plugins", plugin, *_]:
            return plugin
    return ""


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
            elif other == "plugins" and plugin_of(name) != plugin_of(module):
                found.append(f"{module} imports {name}; plug-ins are found by entry points alone")
            elif other != own and RANK[other] >= RANK[own]:
                found.append(f"{module} imports {name}, which is not below it")
    return found


def modules() -> Iterator[tuple[str, Path]]:
    for source in SOURCES:
        for file in sorted(source.rglob("*.py")):
            parts = file.relative_to(source).with_suffix("").parts
            yield ".".join((source.name, *parts)).removesuffix(".__init__"), file


@pytest.mark.parametrize(("module", "file"), list(modules()), ids=str)
def test_imports_follow_layers(module: str, file: Path) -> None:
    assert faults(module, file.read_text()) == []


def test_one_file_per_package_imports_mlx_lm() -> None:
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
def test_number_of_imports_per_module_is_bounded(module: str, file: Path) -> None:
    most = MOST_IN_ENGINE if module.startswith("penstock.engine.") else MOST_IMPORTS
    assert len(own_imports(module, file.read_text())) <= most


def test_function_and_module_imports_are_counted() -> None:
    source = (
        "from penstock import config\nfrom penstock.attention import devices\n"
        "def late():\n    from penstock.kv.segment import Layer, Segment\nimport numpy\n"
    )
    expected = {"penstock.config", "penstock.attention.devices", "penstock.kv.segment"}
    assert own_imports("penstock.engine.made_up", source) == expected


def test_only_ray_plugin_imports_ray() -> None:
    for module, file in modules():
        own = module.startswith("penstock.plugins.ray")
        tops = {name.split(".")[0] for name in imported(module, file.read_text())}
        assert own or "ray" not in tops, module


def test_only_vlm_plugin_imports_mlx_vlm() -> None:
    knowing = [
        module
        for module, file in modules()
        if any(name.split(".")[0] == "mlx_vlm" for name in imported(module, file.read_text()))
    ]
    assert knowing == ["penstock.plugins.vlm.vlm_reader"]


class WithoutTypes(ast.NodeTransformer):
    """Removes imports that only a type checker follows."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else node


def imports_at_run_time(module: str, source: str) -> set[str]:
    """Return the imports of a module, at import or when its functions are called."""
    return set(imported_in(module, WithoutTypes().visit(ast.parse(source))))


def imports_among(sources: Mapping[str, str], *, types: bool = False) -> dict[str, set[str]]:
    """Return the modules that each of these imports, at run time or for types as well."""
    read = imported if types else imports_at_run_time
    known = {name: {*read(name, text)} for name, text in sources.items()}
    return {
        name: {one if one in known else one.rpartition(".")[0] for one in names} & known.keys()
        for name, names in known.items()
    }


def test_no_import_cycles() -> None:
    sources = {module: file.read_text() for module, file in modules()}
    TopologicalSorter(imports_among(sources)).prepare()


def reached(imports: Mapping[str, set[str]], module: str) -> set[str]:
    """Return the modules that a module imports, directly or indirectly."""
    seen: set[str] = set()
    open_modules = [module]
    while open_modules:
        new = imports[open_modules.pop()] - seen
        seen |= new
        open_modules += new
    return seen - {module}


def test_service_depends_only_on_engine_methods() -> None:
    """Its imports reached 74 % of the lines while it named the engine's class."""
    sources = {name: file.read_text() for name, file in modules() if name.startswith("penstock.")}
    imports = imports_among(sources, types=True)
    modules_reached = reached(imports, "penstock.server.service")
    lines = {name: text.count("\n") for name, text in sources.items()}
    assert sum(lines[name] for name in modules_reached) <= 0.40 * sum(lines.values())
    assert "penstock.engine.core" not in modules_reached
    assert "penstock.engine.core" in reached(imports, "penstock.server.sessions")


def test_server_has_no_import_cycles_even_for_types() -> None:
    assert len(SERVER) > 80
    TopologicalSorter(imports_among(SERVER, types=True)).prepare()


# Folders of the server: imports go down this list only; those of one line are strangers.
SERVER_LEVELS = (
    ("page",),
    ("parsing",),
    ("tools",),
    ("anthropic", "openai"),
    ("decisions", "ollama"),
    ("encoders",),
)


def parts_among(sources: Mapping[str, str], parent: str) -> dict[str, set[str]]:
    """Return the files and folders of one folder that each of them imports, for types as well."""
    depth = parent.count(".") + 1
    imports: dict[str, set[str]] = {}
    for module, names in imports_among(sources, types=True).items():
        if module.startswith(f"{parent}."):
            part = module.split(".")[depth]
            others = {n.split(".")[depth] for n in names if n.startswith(f"{parent}.")}
            imports.setdefault(part, set()).update(others - {part})
    return imports


def upward(imports: Mapping[str, set[str]], levels: tuple[tuple[str, ...], ...]) -> list[str]:
    """List the imports among levels that do not go down."""
    rank = {part: number for number, parts in enumerate(levels) for part in parts}
    pairs = ((one, other) for one in rank for other in imports.get(one, ()) if other in rank)
    return sorted(f"{one} imports {other}" for one, other in pairs if rank[other] >= rank[one])


SERVER = {name: file.read_text() for name, file in modules() if name.startswith("penstock.server")}


def test_server_imports_follow_layers() -> None:
    imports = parts_among(SERVER, "penstock.server")
    folders = {file.parent.name for _, file in modules() if file.parent.parent.name == "server"}
    assert folders <= {part for level in SERVER_LEVELS for part in level}
    assert upward(imports, SERVER_LEVELS) == []
    TopologicalSorter(imports).prepare()
    for folder in folders:
        TopologicalSorter(parts_among(SERVER, f"penstock.server.{folder}")).prepare()


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        (
            "penstock.server.anthropic.made_up",
            "from penstock.server.openai import openai_objects",
            "anthropic imports openai",
        ),
        (
            "penstock.server.parsing.made_up",
            "if TYPE_CHECKING:\n    from penstock.server.tools.calls import CallGrammar",
            "parsing imports tools",
        ),
        (
            "penstock.server.tools.made_up",
            "def late():\n    from penstock.server.openai import responses",
            "tools imports openai",
        ),
    ],
)
def test_check_detects_upward_server_import(module: str, source: str, fault: str) -> None:
    assert upward(parts_among({**SERVER, module: source}, "penstock.server"), SERVER_LEVELS) == [
        fault
    ]


def test_check_detects_cycle_of_file_and_folder() -> None:
    back = {"penstock.server.forms": "from penstock.server.openai.openai_forms import Tool"}
    with pytest.raises(CycleError):
        TopologicalSorter(parts_among({**SERVER, **back}, "penstock.server")).prepare()


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
def test_check_detects_import_cycle(back: str) -> None:
    with pytest.raises(CycleError):
        TopologicalSorter(imports_among({"a.b": "from a.c import d", "a.c": back})).prepare()


def test_type_checking_imports_make_no_cycle() -> None:
    back = "if TYPE_CHECKING:\n    from a.b import E\ndef late():\n    import f"
    sources = {"a.b": "from a.c import d", "a.c": back}
    TopologicalSorter(imports_among(sources)).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(imports_among(sources, types=True)).prepare()


MOST_REACHED = {
    "penstock.kv.segment": 7,
    "penstock.prefix.prefixes": 13,
    "penstock.engine.schedule.sequence_kv": 30,
    "penstock.engine.schedule.budget": 36,
}
"""Most files of the package that these modules import, and those import, and so on."""


def sources_with_code() -> dict[str, str]:
    """Return the sources of all modules but packages' files without code."""
    texts = {name: file.read_text() for name, file in modules()}
    return {name: text for name, text in texts.items() if text.count("\n") > 4}


@pytest.mark.parametrize(("module", "most"), MOST_REACHED.items())
def test_sequence_kv_transitively_imports_few_files(module: str, most: int) -> None:
    imports = imports_among(sources_with_code(), types=True)
    assert len(reached(imports, module)) <= most


@pytest.mark.parametrize(
    "back",
    [
        "import a.c",
        "from a import c",
        "from a.c import d",
        "def late():\n    from a.c import d",
        "if TYPE_CHECKING:\n    from a.c import d",
    ],
)
def test_reach_includes_all_transitive_imports(back: str) -> None:
    imports = imports_among({"a.b": back, "a.c": "import a.e", "a.e": "", "a.f": ""}, types=True)
    assert reached(imports, "a.b") == {"a.c", "a.e"}


def test_engine_folders_do_not_import_each_other() -> None:
    engine = {name: file.read_text() for name, file in modules() if ".engine." in name}
    folders = {file.parent.name for _, file in modules() if file.parent.parent.name == "engine"}
    pairs = {
        (part, other)
        for part, others in parts_among(engine, "penstock.engine").items()
        for other in others
        if {part, other} <= folders
    }
    assert len(pairs) > 5
    assert {pair for pair in pairs if pair[::-1] in pairs} == set()


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
        ("penstock.server.made_up", "from penstock.plugins.ray.door import Door"),
        ("penstock.cli.made_up", "def late():\n    from penstock.plugins.ray.door import Door"),
        ("penstock.attention.made_up", "from penstock.plugins.cpu import cpu_rows"),
        ("penstock.plugins.cpu.made_up", "from penstock.plugins.kernels.ways import Ways"),
        ("penstock.kv.made_up", "from penstock.attention.span_attention import Partial"),
        ("penstock.kv.made_up", "import penstock.utils"),
        ("penstock.engine.made_up", "from penstock_bench.rivals import Batched"),
        ("penstock.models.made_up", "from penstock_bench import rivals"),
        ("penstock_bench.made_up", "from mlx_lm.generate import BatchGenerator"),
        (KNOWS_MLX_LM, "from mlx_lm.models.cache import _BaseCache"),
        (RIVALS, "from mlx_lm.generate import _merge_caches"),
    ],
)
def test_check_detects_forbidden_import(module: str, source: str) -> None:
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
def test_check_accepts_allowed_import(module: str, source: str) -> None:
    assert faults(module, source) == []
