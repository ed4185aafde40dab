"""Errors are reported in full, and folders writable by others are refused."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from penstock.cli.options import check_writable
from penstock.errors import ModelError, SettingError
from penstock.models.loading import load_all
from penstock.recall import MODEL_PATH

FLAG = "--ssd-cache-dir"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
OTHER_USER = 65_533


def model(folder: Path, **changed: object) -> Path:
    """Copy the embedded model with changed config values; None removes a key."""
    shutil.copytree(MODEL_PATH, folder / "model")
    file = folder / "model" / "config.json"
    config = {**json.loads(file.read_text()), **changed}
    file.write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    return file.parent


def test_config_without_model_type_is_named_in_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json has no model_type"):
        load_all(model(tmp_path, model_type=None))


def test_multi_line_error_is_joined_to_one_line(tmp_path: Path) -> None:
    """transformers names the wrong field in the second line."""
    with pytest.raises(ModelError) as told:
        load_all(model(tmp_path, initializer_range="much"))
    assert "\n" not in str(told.value) and not str(told.value).endswith(":")
    assert "initializer_range" in str(told.value) and "'much'" in str(told.value)


def test_folder_of_own_user_is_accepted(tmp_path: Path) -> None:
    check_writable(FLAG, tmp_path / "new")
    (tmp_path / "link").symlink_to(tmp_path / "new")
    check_writable(FLAG, tmp_path / "link")


def test_world_writable_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(SettingError, match="chmod o-w"):
        check_writable(FLAG, tmp_path)


@needs_root
@pytest.mark.parametrize("what", ["folder", "content", "link", "planted"])
def test_folder_of_other_user_is_refused(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    given, theirs = folder, folder
    if what == "content":
        theirs = folder / "blocks"
        theirs.mkdir()
    elif what == "link":
        given = theirs = tmp_path / "link"
        theirs.symlink_to(folder)
    elif what == "planted":
        theirs = folder / "blocks"
        theirs.symlink_to(tmp_path)
    os.lchown(theirs, OTHER_USER, -1)
    with pytest.raises(SettingError, match="belongs to another user"):
        check_writable(FLAG, given)
