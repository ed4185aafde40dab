"""The key file: its format, and that no error quotes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.config import digest_of, read_keys
from penstock.errors import SettingError

SECRET = "correct-horse-battery-staple"


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "keys.toml"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_key_may_be_plain_text_or_hash(tmp_path: Path) -> None:
    hashed = digest_of(b"another")
    file = written(
        tmp_path,
        f'[alice]\nkey = "{SECRET}"\nrequests_per_minute = 60\n'
        f'["team.b-1"]\nsha256 = "{hashed.upper()}"\ntokens_per_minute = 9\nsalt = "shared"\n'
        "admin = true\n",
    )
    alice, team = read_keys(file)
    assert (alice.name, alice.sha256, alice.requests_per_minute) == (
        "alice",
        digest_of(SECRET.encode()),
        60,
    )
    assert (alice.tokens_per_minute, alice.salt, alice.admin) == (None, "alice", False)
    assert (team.name, team.sha256, team.tokens_per_minute) == ("team.b-1", hashed, 9)
    assert (team.requests_per_minute, team.salt, team.admin) == (None, "shared", True)
    assert alice.sha256 not in repr(alice) and SECRET not in repr(alice)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666])
def test_key_file_must_be_private(tmp_path: Path, mode: int) -> None:
    file = written(tmp_path, f'[alice]\nkey = "{SECRET}"\n', mode)
    with pytest.raises(SettingError, match=f"mode {mode:04o}.*chmod 600"):
        read_keys(file)
    file.chmod(0o400)
    assert read_keys(file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no keys"),
        ("alice = 1", "alice must be a table"),
        ("[alice]\n", "give either key or sha256"),
        (f'[alice]\nkey = "{SECRET}"\nsha256 = "{"0" * 64}"\n', "give either key or sha256"),
        ('[alice]\nkey = ""\n', "not empty"),
        ("[alice]\nkey = 7\n", "must be a text"),
        (f'[alice]\nsha256 = "{SECRET}"\n', "alice: sha256"),
        ("[alice]\nsha256 = 7\n", "alice: sha256"),
        (f'[alice]\nkey = "{SECRET}"\nrequests_per_minute = 0\n', "requests_per_minute: must be"),
        (f'[alice]\nkey = "{SECRET}"\ntokens_per_minute = "many"\n', "tokens_per_minute: must be"),
        (f'[alice]\nkey = "{SECRET}"\nsalt = "a\\u001fb"\n', "alice: salt"),
        (f'[alice]\nkey = "{SECRET}"\nlimit = 5\n', "alice: limit"),
        (f'[alice]\nkey = "{SECRET}"\nname = "bob"\n', "own name"),
        (f'["a b"]\nkey = "{SECRET}"\n', "a b is not a valid name"),
        (f'[a]\nkey = "{SECRET}"\n[b]\nsha256 = "{digest_of(SECRET.encode())}"\n', "a and b have"),
        (f'[alice]\nkey = "{SECRET}\n', "not TOML"),
    ],
)
def test_invalid_key_file_error_never_quotes_keys(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SettingError, match=says) as raised:
        read_keys(written(tmp_path, text))
    line = str(raised.value)
    assert line.startswith("--keys: ") and "\n" not in line
    assert SECRET not in line and str(tmp_path) not in line


def test_special_or_huge_key_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, says in (
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "Is a directory"),
        (Path("/dev/zero"), "not a regular file"),
        (tmp_path / "none", "No such file"),
    ):
        with pytest.raises(SettingError, match=says):
            read_keys(path)
    with pytest.raises(SettingError, match="larger than"):
        read_keys(written(tmp_path, "#" * 1_000_001))
