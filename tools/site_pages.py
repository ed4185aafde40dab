"""Copy the pages of the documentation site into build/site-docs, with links that hold there.

    python tools/site_pages.py

The site has the folders of the checkout, so that links between pages stay as they are. A link to a
file or folder that is no page becomes one into the repository at REPOSITORY_URL, or its text.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "build" / "site-docs"
FOLDERS = (".", "docs", "benchmarks", "benchmarks/notes")
REPOSITORY = os.environ.get("REPOSITORY_URL", "")
LINK = re.compile(r"\[([^\[\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def site_path(path: Path) -> Path:
    """Return the place of a page or picture in the site, relative to its root."""
    relative = path.relative_to(ROOT)
    return Path("index.md") if relative == Path("README.md") else relative


def with_site_links(text: str, page: Path) -> str:
    """Return the text of a page with each link to a file that the site has, or the repository."""

    def replaced(link: re.Match[str]) -> str:
        label, path = link[1], (page.parent / link[2]).resolve()
        if is_shown(path):
            start = site_path(page).parent
            return f"[{label}]({os.path.relpath(site_path(path), start)}{link[3] or ''})"
        if not REPOSITORY:
            return label
        return f"[{label}]({REPOSITORY}/blob/main/{path.relative_to(ROOT).as_posix()})"

    return LINK.sub(replaced, text)


def is_shown(path: Path) -> bool:
    folder = path.parent.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return path.is_file() and path.suffix in (".md", ".png") and folder in FOLDERS


def copy_pages() -> int:
    """Write the site's pages and pictures anew; return their number."""
    shutil.rmtree(TARGET, ignore_errors=True)
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).iterdir())]
    shown = [path for path in files if is_shown(path)]
    for path in shown:
        target = TARGET / site_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(with_site_links(path.read_text(encoding="utf-8"), path))
        else:
            shutil.copyfile(path, target)
    return len(shown)


if __name__ == "__main__":
    print(f"{copy_pages()} files in {TARGET.relative_to(ROOT)}")
