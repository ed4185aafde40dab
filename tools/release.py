"""Check a release, print its notes, and write the Homebrew formula of it.

python tools/release.py check v0.2.0
python tools/release.py notes v0.2.0
python tools/release.py formula dist/penstock_mlx-0.2.0.tar.gz
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FORMULA = ROOT / "packaging" / "homebrew" / "penstock.rb"
VERSION = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
FILES = "https://files.pythonhosted.org/packages"
SOURCES = ("src/penstock/__init__.py", "benchmarks/src/penstock_bench/__init__.py")


def faults(tag: str) -> list[str]:
    """List what keeps the checkout from being released under a tag."""
    version = tag.removeprefix("v")
    problems = [] if tag.startswith("v") else [f"the tag {tag} does not begin with v"]
    for source in SOURCES:
        (written,) = VERSION.findall((ROOT / source).read_text())
        if written != version:
            problems.append(f"{source} has version {written}, not {version}")
    benches = (ROOT / "benchmarks" / "pyproject.toml").read_text()
    if f'"penstock-mlx=={version}"' not in benches:
        problems.append(f"benchmarks/pyproject.toml does not need penstock-mlx=={version}")
    if not notes(version):
        problems.append(f"CHANGELOG.md has no section [{version}] with a date")
    return problems


def notes(tag: str, changelog: str | None = None) -> str:
    """Return the changelog's section of a version; empty if there is none."""
    text = (ROOT / "CHANGELOG.md").read_text() if changelog is None else changelog
    heading = rf"^## \[{re.escape(tag.removeprefix('v'))}\] - \d{{4}}-\d\d-\d\d\n"
    section = re.search(rf"{heading}(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return section[1].strip() if section else ""


def formula(source: Path, text: str) -> str:
    """Return the text of a formula with address and checksum of a source distribution.

    The package index keeps a file under the BLAKE2b digest of its bytes, so its address is known
    before it is uploaded.
    """
    data = source.read_bytes()
    digest = hashlib.blake2b(data, digest_size=32).hexdigest()
    address = f"{FILES}/{digest[:2]}/{digest[2:4]}/{digest[4:]}/{source.name}"
    text = re.sub(r'url ".*"', f'url "{address}"', text)
    return re.sub(r'sha256 "\w{64}"', f'sha256 "{hashlib.sha256(data).hexdigest()}"', text)


def main(words: list[str]) -> int:
    match words:
        case ["check", tag]:
            problems = faults(tag)
            print("\n".join(problems) or f"{tag} can be released")
            return 1 if problems else 0
        case ["notes", tag]:
            print(notes(tag))
            return 0 if notes(tag) else 1
        case ["formula", source]:
            FORMULA.write_text(formula(Path(source), FORMULA.read_text()))
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
