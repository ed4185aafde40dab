"""Programs outside pytest start, and something runs every Makefile target.

A program that only people run breaks unseen when a name that it imports moves. Each is imported in
`make test`, runs in a short form in `make test-all`, and runs whole in the weekly workflow.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("tools", "tests/agents", "tests/clients", "tests/peers")
PROGRAMS = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).glob("*.py"))
    if not path.name.startswith("test_")
]
SCRIPTS = sorted(
    [*(ROOT / "tests" / "clients" / "python").glob("*.py"), *ROOT.glob("examples/*.py")]
)
"""Programs that need packages of their own: `make test-clients` and `make run` run them."""


def load(program: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Import a program, as Python does before it runs `main`."""
    monkeypatch.syspath_prepend(str(program.parent))
    before = set(sys.modules)
    spec = importlib.util.spec_from_file_location(f"program_{program.stem}", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # a dataclass looks its module up
    try:
        spec.loader.exec_module(module)
        return module
    finally:
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file is not None and Path(file).parent == program.parent:
                del sys.modules[name]


def missing_names(source: str) -> list[str]:
    """Return names that a source imports from penstock and that do not exist."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            wanted = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            wanted = [(node.module or "", alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            if module.partition(".")[0] not in ("penstock", "penstock_bench"):
                continue
            try:
                holder = importlib.import_module(module)
                has = not name or hasattr(holder, name)
                has = has or importlib.util.find_spec(f"{module}.{name}") is not None
            except ImportError:
                has = False
            if not has:
                missing.append(f"{module}.{name}" if name else module)
    return missing


def program_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("program", PROGRAMS, ids=program_id)
def test_programs_can_be_imported(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        load(program, monkeypatch)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "mlx_vlm"):  # training the model; the extra vlm
            raise
        pytest.skip(f"needs {error.name}")


def test_check_detects_moved_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "stale.py"
    program.write_text("from penstock.kv import KVCache\n")
    with pytest.raises(ImportError, match="KVCache"):
        load(program, monkeypatch)


@pytest.mark.parametrize("program", [*PROGRAMS, *SCRIPTS], ids=program_id)
def test_names_imported_by_programs_exist(program: Path) -> None:
    """Also imports inside functions, and beside packages that are not installed."""
    assert missing_names(program.read_text()) == []


def test_check_detects_moved_name() -> None:
    source = "def main():\n    from penstock.kv import KVCache, segment\n    import penstock.gone\n"
    assert missing_names(source) == ["penstock.kv.KVCache", "penstock.gone"]


def test_peers_replace_existing_mlx_lm_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each class and function of mlx-lm that `make peers` replaces."""
    stand_ins = vars(load(ROOT / "tests" / "peers" / "stand_ins.py", monkeypatch))
    for home in stand_ins["HOMES"].values():
        held = vars(importlib.import_module(home))
        assert {*stand_ins["CACHES"], *stand_ins["FUNCTIONS"]} <= set(held), home


# ---- short forms


def run(*command: str | Path, status: tuple[int, ...] = (0,), cwd: Path | None = None) -> str:
    """Run a program; return what it printed."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=600, cwd=cwd
    )
    assert done.returncode in status, done.stdout + done.stderr
    return done.stdout + done.stderr


PEER_TEST = """
import unittest
import mlx.core as mx
from mlx_lm.models.cache import KVCache

class TestCache(unittest.TestCase):
    def test_keys_come_back(self):
        cache = KVCache()
        keys = mx.ones((1, 1, 3, 4))
        self.assertTrue(mx.array_equal(cache.update_and_fetch(keys, keys)[0], keys))

    def test_mlx_lm_fails_it_too(self):
        self.assertTrue(KVCache().is_unheard_of)
"""


@pytest.mark.slow
def test_peer_tests_run(tmp_path: Path) -> None:
    """On a test file of one class."""
    tests = tmp_path / "tests"
    tests.mkdir()
    for name in ("test_prompt_cache", "test_generate", "test_models", "test_server"):
        (tests / f"{name}.py").write_text(PEER_TEST)
    peers = (ROOT / "tests/peers/run_peers.py", "--mlx-lm", tmp_path)
    result = json.loads(run(*peers, "--files", "test_prompt_cache", "--json"))
    counts = {"passed": 1, "failed": 0, "error": 1, "skipped": 0}
    assert result["files"]["test_prompt_cache"] == {"mlx-lm": counts, "penstock": counts}
    assert result["calls"]["KVCache"]["update_and_fetch"] == 1


@pytest.mark.slow
def test_real_template_check_runs(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}[assistant]"
    for number in range(40):
        (tmp_path / f"{number}.jinja").write_text(template)
    shown = run(ROOT / "tests/peers/real_templates.py", tmp_path)
    assert "40 chat templates" in shown and "ok: each message is in its place" in shown


@pytest.mark.slow
def test_vocabulary_check_runs(tmp_path: Path) -> None:
    """Tokens lie beside a file; one of them is wrong in the second run."""
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    program = ROOT / "tests/peers/real_tokens.py"
    file.with_name("small.gguf.inp").write_text(
        "ab\n__ggml_vocab_test__\nba\n__ggml_vocab_test__\n"
    )
    for second, status, words in ((" 1 0", 0, "2 equal"), (" 1 1", 1, "1 equal, 1 WRONG")):
        file.with_name("small.gguf.out").write_text(f" 2\n{second}\n")
        assert words in run(program, tmp_path, status=(status,))
    file.unlink()
    run(program, tmp_path, status=(2,))


@pytest.mark.slow
def test_mutation_testing_runs() -> None:
    shown = run(
        *(ROOT / "tools/mutants.py", "ledger.py", "--sample", "3", "--seed", "1"),
        *("--workers", "1", "--pool", "tests/test_ledger.py"),
    )
    assert re.search(r"[1-3] of 3 noticed", shown), "no change reached the tests: " + shown


@pytest.mark.slow
def test_hostile_body_fuzzing_runs() -> None:
    """Latency is judged by `make hostile` on a quiet machine."""
    shown = run(ROOT / "tools/hostile.py", "--minutes", "0.2", status=(0, 1))
    sent = re.search(r"hostile requests: {(.+)}", shown)
    assert sent is not None, shown
    assert "failed: the server" not in shown


@pytest.mark.slow
def test_recall_measurement_runs() -> None:
    shown = run(ROOT / "tools/eval_recall.py", "--tokens", "128", "--questions", "2")
    assert re.search(r"^ +128 +2 +[01]\.", shown, re.MULTILINE), shown


@pytest.mark.slow
def test_restore_measurement_runs() -> None:
    assert "as a restore does" in run(ROOT / "tools/restore_passes.py")


@pytest.mark.slow
def test_cost_measurement_runs(tmp_path: Path) -> None:
    """For one slow test in a tree of its own."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "tools/measure_tests.py", tmp_path / "tools")
    costs = tmp_path / "tests" / "quick_costs.txt"
    costs.write_text("0.50 tests/test_gone.py::test_one\n")
    (tmp_path / "tests" / "test_one.py").write_text(
        "import time\n\ndef test_it():\n    until = time.process_time() + 0.3\n"
        "    while time.process_time() < until:\n        pass\n"
    )
    run(tmp_path / "tools/measure_tests.py", "tests/test_one.py", cwd=tmp_path)
    kept, new = costs.read_text().splitlines()
    assert kept == "0.50 tests/test_gone.py::test_one"
    seconds, name = new.split()
    assert name == "tests/test_one.py::test_it" and float(seconds) >= 0.3


@pytest.mark.slow
def test_gguf_fuzzing_runs(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "some.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_tensor("token_embd.weight", np.zeros((8, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shown = run(ROOT / "tools/fuzz_gguf.py", file, "--seconds", "0.5", cwd=tmp_path)
    assert "damaged headers" in shown


# ---- who runs what

WORKFLOWS = [*(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / ".ci" / "run"]
OTHERWISE = {
    "help": "test_every_make_target_is_in_help",
    "bench": "the weekly workflow runs penstock bench all, and looks at its exit status",
    "clean": "removes what others make",
    "docs": "test_cli_page_matches_help",
    "test-cpus": "each run of .ci/run draws one of its CPUs: test-drawn",
    "test-costs": "test_cost_measurement_runs",
    "run": "test_first_run_prints_working_examples",
}
"""Targets that no workflow names: a test of the suite that does the same, or the reason."""
UNSTARTED = {
    "newest_node.py": "a part of the other programs",
    "real_calls.py": "a part of real_templates.py",
    "real_histories.py": "a part of real_templates.py",
    "scenarios.py": "a part of run_agents.py",
    "scripted_model.py": "a part of run_agents.py",
    "comply.py": "a part of run_clients.py",
    "worker.py": "run_peers.py starts it",
    "recall_files.py": "a part of eval_recall.py and train_recall.py",
    "train_recall.py": "trains the embedded model, for hours and with torch; its README says when",
}
"""Programs that no target, workflow or test starts by their file names, with the reason."""


def targets(makefile: str) -> dict[str, str]:
    """Return the Makefile's public targets with their prerequisites and commands."""
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    rules: dict[str, str] = {}
    for names, body in re.findall(
        r"^([a-z][a-z -]*):(?!=)((?:.*\n)(?:\t.*\n|\\\n)*)", makefile, re.MULTILINE
    ):
        for name in names.split():
            rules[name] = rules.get(name, "") + body
    return {name: rules[name] for name in phony.split()}


def run_by(makefile: str, workflows: str) -> set[str]:
    """Return the targets that workflows run, with their prerequisites."""
    rules = targets(makefile)
    found: set[str] = set()
    waiting = {name for name in rules if re.search(rf"\bmake {name}(?![\w-])", workflows)}
    waiting |= set(re.findall(r"^ +- target: ([a-z-]+)", workflows, re.MULTILINE))
    while waiting:
        name = waiting.pop()
        found.add(name)
        needed = rules[name].splitlines()
        words = set(needed[0].split())
        for line in needed[1:]:
            if "$(MAKE)" in line:
                words |= set(line.split())
        waiting |= (words & set(rules)) - found
    return found


def test_every_make_target_is_run_by_workflow_or_test() -> None:
    makefile = (ROOT / "Makefile").read_text()
    workflows = "\n".join(path.read_text() for path in WORKFLOWS)
    left = set(targets(makefile)) - run_by(makefile, workflows)
    assert left == set(OTHERWISE), "run it in .github/workflows/weekly.yml, or say what does"


def test_check_detects_unused_make_target() -> None:
    makefile = ".PHONY: a b c-d e\na: b\n\techo a\nb:\n\t@$(MAKE) -j3 e\nc-d:\n\techo\ne:\n\techo\n"
    assert run_by(makefile, "run: make a\n") == {"a", "b", "e"}
    assert run_by(makefile, "  - target: c-d\nmake ab\n") == {"c-d"}


def test_every_make_target_is_in_help() -> None:
    makefile = (ROOT / "Makefile").read_text()
    shown = set(re.findall(r"@echo 'make ([a-z-]+)", makefile))
    assert shown == set(targets(makefile)) - {"help", "doctest", "bytecode"}


def test_every_program_is_started() -> None:
    starters = [ROOT / "Makefile", *WORKFLOWS, *(ROOT / "tests").rglob("test_*.py")]
    text = "\n".join(path.read_text() for path in starters if path.name != Path(__file__).name)
    text += Path(__file__).read_text().partition("# ---- who runs what")[0]
    left = {path.name for path in PROGRAMS if path.name not in text}
    assert left == set(UNSTARTED)


def test_tests_listed_instead_of_make_targets_exist() -> None:
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    reasons = [*OTHERWISE.values(), *UNSTARTED.values()]
    assert {reason for reason in reasons if reason.startswith("test_")} <= defined
