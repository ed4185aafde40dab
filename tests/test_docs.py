"""The docs match the program."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from command_line import commands
from typer.main import get_command

from penstock.cli.commands import app
from penstock.recall import MODEL_PATH

ROOT = Path(__file__).parent.parent
TOOL = runpy.run_path(str(ROOT / "tools" / "write_cli_docs.py"))
FOLDERS = (ROOT, ROOT / "benchmarks", ROOT / "benchmarks" / "notes", ROOT / "docs")
PAGES = [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]


COMMANDS = [" ".join(words) for words, _ in commands(get_command(app))]
"""The root, every command and every command of a group, as they are typed."""


def typed_in(page: Path, command: str) -> list[str]:
    """Return matches of `command` in backticks and at the start of a page's shell lines."""
    text = page.read_text()
    shell = "\n".join(re.findall(r"```sh\n(.*?)```", text, re.DOTALL))
    return re.findall(f"`{command}", text) + re.findall(f"^{command}", shell, re.MULTILINE)


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text())
    pages = {page.relative_to(ROOT).as_posix() for page in PAGES if page.parent != ROOT}
    assert pages <= set(listed)
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_comments_behind_commands_fit_page_of_site(page: Path) -> None:
    """The site shows 108 characters of a command in a window of 1,280 pixels."""
    shell = "\n".join(re.findall(r"```(?:sh|console)\n(.*?)```", page.read_text(), re.DOTALL))
    assert [line for line in shell.splitlines() if " # " in line and len(line) > 108] == []


@pytest.mark.parametrize("path", TOOL["PAGES"], ids=lambda page: page.name)
def test_cli_page_matches_help(path: Path) -> None:
    page = path.read_text()
    assert TOOL["written"](page) == page, "make docs brings the pages of commands up to date"


def test_migrate_page_matches_translated_flags() -> None:
    page = TOOL["NAMES_PAGE"].read_text()
    assert TOOL["with_names"](page) == page, "make docs brings docs/migrate.md up to date"
    assert TOOL["with_names"](page.replace("`--max-num-seqs`", "`--max`")) == page


def test_check_detects_changed_help() -> None:
    page = TOOL["PAGES"][0].read_text()
    assert TOOL["written"](page.replace("Answer one prompt.", "Answer no prompt.")) == page


def test_cli_page_lists_every_command() -> None:
    """Each once; the benches' commands stand beside them."""
    texts = [page.read_text() for page in TOOL["PAGES"]]
    shown = [name for text in texts for name in re.findall(r"<!-- help:(.*?)-->", text)]
    assert sorted(name.strip() for name in shown) == sorted(COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_docs_exist(page: Path) -> None:
    """Every `penstock X` in backticks, or at the start of a line of a shell block."""
    groups = {name.split()[0] for name in COMMANDS if " " in name}
    for words in typed_in(page, "penstock ([a-z]+(?: [a-z][a-z-]*)?)"):
        first, _, second = words.partition(" ")
        wanted = words if first in groups and second else first
        assert wanted in COMMANDS, f"{page.name}: there is no penstock {wanted}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_in_docs_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split())
    assert set(typed_in(page, "make ([a-z]+(?:-[a-z]+)*)")) <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_resolve(page: Path) -> None:
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []


READ = {".py", ".md", ".yml", ".toml", ".sh", ".html", ".js", "", ".c"}
TEXTS = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), ROOT / "Makefile"]
for name in ("src", "docs", "benchmarks", "examples", "tools", "tests", ".github", ".ci"):
    TEXTS += [path for path in (ROOT / name).rglob("*") if path.is_file() and path.suffix in READ]
# A command and its arguments up to one that is ours by name; a path is none of an index.
INSTALLS_OURS = re.compile(r"""pip["']? install(?: +["']?[-\w.,=<>\[\]]+["']?)*? +["']?penstock""")
EXTRA_OF_OURS = re.compile(r"(?<!\.)\bpenstock\[[a-z]+\]")


def test_docs_never_install_penstock_from_index() -> None:
    """On the package index the name belongs to others."""
    named = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in TEXTS
        for pattern in (INSTALLS_OURS, EXTRA_OF_OURS)
        for match in pattern.finditer(path.read_text(encoding="utf-8"))
    }
    assert len(TEXTS) > 700
    assert named == set()


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        ("run `pip" + " install penstock`", True),
        ("pip" + " install 'penstock-mlx[cpu]'", True),
        ("pip" + " install --quiet gguf 'penstock'", True),
        ("uv pip" + " install penstock_mlx_bench", True),
        ("the extra `penstock" + "[ray]`", True),
        ("pip install ./benchmarks in a checkout of penstock", False),
        ("`pip install gguf` and penstock", False),
        ("pip install '.[cpu]'  # penstock", False),
        ("small.penstock['rows']", False),
    ],
)
def test_check_detects_install_from_index(text: str, ours: bool) -> None:
    assert bool(INSTALLS_OURS.search(text) or EXTRA_OF_OURS.search(text)) is ours


def test_readme_starts_with_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    first_code = re.search(r"```sh\n(.*?)```", readme, re.DOTALL)
    assert first_code is not None
    assert [line.split("#")[0].strip() for line in first_code[1].splitlines()] == [
        "make run",
        "make test",
    ]


def test_readme_is_short_and_its_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """With the embedded model in place of a folder."""
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 120
    example = next(
        code
        for code in re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
        if "import penstock" in code
    )
    assert len([line for line in example.splitlines() if line]) <= 12
    example = example.replace('"smollm2"', repr(str(MODEL_PATH))).replace("4GB", "1GB")
    exec(compile(example, "README.md", "exec"), {})  # the docs are ours
    assert capsys.readouterr().out.endswith("bytes held\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve_to_headings(page: Path) -> None:
    text = re.sub(r"<!--.*?-->", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text)
    assert [
        f"{target}#{heading}"
        for target, heading in links
        if heading not in headings(page.parent / target if target else page)
    ] == []


TIMES = re.compile(r"^\|.*\d ?(?:ms|s|tokens/s|x) *\|", re.MULTILINE)
DATED = re.compile(
    r"(?:benchmarks|\.\.)/results/[\w-]*20\d\d-\d\d-\d\d|Figures as of 20\d\d-\d\d-\d\d"
)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent != ROOT], ids=lambda page: page.name
)
def test_measured_times_have_date_or_record(page: Path) -> None:
    text = page.read_text()
    assert not TIMES.search(text) or DATED.search(text), "name a record, or say: Figures as of DATE"


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", title.lower()) for title in titles)
    return {title.replace(" ", "-") for title in plain}


def test_glossary_classes_exist() -> None:
    words = re.findall(r"`([A-Z][a-z]*[A-Z]\w*)`", (ROOT / "docs" / "glossary.md").read_text())
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    sources = "\n".join(path.read_text() for path in files)
    assert words
    assert set(words) <= set(re.findall(r"^class (\w+)", sources, re.MULTILINE))


def test_structure_page_lists_every_folder() -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    source = ROOT / "src" / "penstock"
    folders = {f"{path.parent.relative_to(source)}/" for path in source.rglob("__init__.py")}
    assert set(re.findall(r"^\| `([\w/]+/)`", page, re.MULTILINE)) == folders - {"./"}


@pytest.mark.parametrize("page", ["engine.md", "prefix.md", "start-mlx-lm.md"])
def test_examples_in_docs_run(page: str) -> None:
    """In order, with their assertions."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    names: dict[str, object] = {}
    assert examples
    for example in examples:
        example = example.replace("path/to/model", str(MODEL_PATH))
        exec(compile(example, page, "exec"), names)  # the docs are ours
