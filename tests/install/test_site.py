"""The documentation site: every page is in its navigation, and no link or anchor is broken."""

from __future__ import annotations

import os
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = runpy.run_path(str(ROOT / "tools" / "site_pages.py"))


def built(tools: Path) -> subprocess.CompletedProcess[str]:
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [tools / "mkdocs", "build", "--strict"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=quiet)


def test_site_is_built_without_warnings(tools: Path) -> None:
    assert PAGES["copy_pages"]() > 40
    done = built(tools)
    assert done.returncode == 0, done.stderr
    assert (ROOT / "build" / "site" / "docs" / "server" / "index.html").exists()


def test_site_check_detects_broken_anchor(tools: Path) -> None:
    PAGES["copy_pages"]()
    page = ROOT / "build" / "site-docs" / "docs" / "why.md"
    page.write_text(page.read_text() + "\n[there](server.md#no-such-heading)\n")
    done = built(tools)
    assert done.returncode != 0
    assert "no-such-heading" in done.stdout + done.stderr


def test_links_outside_docs_point_to_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    page, text = (
        ROOT / "docs" / "why.md",
        "[a](../Makefile), [b](server.md#access) and ![c](page.png)",
    )
    replaced = PAGES["with_site_links"]
    monkeypatch.setitem(replaced.__globals__, "REPOSITORY", "https://host/us")
    shown = "[b](server.md#access) and ![c](page.png)"
    assert replaced(text, page) == f"[a](https://host/us/blob/main/Makefile), {shown}"
    monkeypatch.setitem(replaced.__globals__, "REPOSITORY", "")
    assert replaced(text, page) == f"a, {shown}"
