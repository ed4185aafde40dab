"""The steps of a release, checked on this checkout."""

from __future__ import annotations

import hashlib
import runpy
from pathlib import Path

import yaml

import penstock

ROOT = Path(__file__).parent.parent
RELEASE = runpy.run_path(str(ROOT / "tools" / "release.py"))
TAG = f"v{penstock.__version__}"


def test_checkout_can_be_released_under_its_version() -> None:
    assert RELEASE["faults"](TAG) == []


def test_wrong_tag_is_refused_with_reasons() -> None:
    problems = RELEASE["faults"]("9.9.9")
    assert len(problems) == 5
    assert "src/penstock/__init__.py" in " ".join(problems)


def test_release_notes_are_section_of_changelog() -> None:
    changelog = (
        "# Log\n\n## [Unreleased]\n\n- a\n\n## [1.2.3] - 2026-01-02\n\n- b\n\n## [1.2] - x\n"
    )
    assert RELEASE["notes"]("v1.2.3", changelog) == "- b"
    assert RELEASE["notes"]("v1.2", changelog) == ""
    assert RELEASE["notes"]("v1.2.4", changelog) == ""
    assert "###" in RELEASE["notes"](TAG)


def test_formula_names_source_distribution(tmp_path: Path) -> None:
    source = tmp_path / "penstock_mlx-1.2.3.tar.gz"
    source.write_bytes(b"source")
    text = RELEASE["formula"](source, RELEASE["FORMULA"].read_text())
    digest = hashlib.blake2b(b"source", digest_size=32).hexdigest()
    folder = f"{digest[:2]}/{digest[2:4]}/{digest[4:]}"
    assert f"/packages/{folder}/penstock_mlx-1.2.3.tar.gz" in text
    assert f'sha256 "{hashlib.sha256(b"source").hexdigest()}"' in text
    assert text.count("penstock_mlx-") == 1


def test_release_publishes_only_tested_tags() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    jobs = workflow["jobs"]
    assert jobs["test"]["needs"] == "build" and jobs["publish"]["needs"] == "test"
    assert jobs["publish"]["if"] == "github.event_name == 'push'"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
