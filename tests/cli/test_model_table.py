"""The models file of `--models FILE`: settings, and errors of invalid files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.cli.model_table import TableModel, name_of, table_models
from penstock.errors import SettingError

USUAL: dict[str, Any] = {
    "weights_dtype": "auto",
    "model_source": "auto",
    "chat_template": None,
}


def read(tmp_path: Path, text: str, *paths: str) -> list[TableModel]:
    file = tmp_path / "models.toml"
    file.write_text(text)
    return table_models(paths, file, **USUAL)


def test_models_have_separate_settings(tmp_path: Path) -> None:
    large, small, more = read(
        tmp_path,
        '[[model]]\npath = "a/large.gguf"\naliases = ["big"]\nttl = 60\nmax-kv-size = 8192\n'
        'adapters = { pirate = "c/pirate" }\n'
        '[[model]]\npath = "b"\nname = "small"\npin = true\ntemperature = 0.5\n'
        'weights-dtype = "native"\n',
        "owner/more",
    )
    assert (large.name, large.aliases, large.ttl_seconds) == ("large", ("big",), 60)
    assert large.adapters == {"pirate": Path("c/pirate")} and not small.adapters
    assert large.engine == {"max_kv_size": 8192}
    assert (small.name, small.pin, small.answering) == ("small", True, {"temperature": 0.5})
    assert (small.weights_dtype, large.weights_dtype) == ("native", "auto")
    assert (more.name, more.path, more.pin) == ("owner/more", "owner/more", False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"write a table \[\[model\]\]"),
        ("[[model]]\nname = 'a'\n", "model 1 has no path"),
        ("[[model]]\npath = 'a'\nfoo = 1\n", "model 1: foo is not a setting"),
        ("[[model]]\npath = 'a'\nmemory-limit = '1GB'\n", "memory-limit is the same for all"),
        ("[[model]]\npath = 'a'\nmax-kv-size = -1\n", "model 1: --max-kv-size -1: must be"),
        ("[[model]]\npath = 'a'\nttl = 0\n", "ttl 0: must be seconds"),
        ("[[model]]\npath = 'a'\npin = 'yes'\n", "pin is true or false"),
        ("[[model]]\npath = 'a'\nadapters = ['b']\n", "adapters is a table of folders"),
        ("[[model]]\npath = 'a'\nadapters = {'a+b' = 'b'}\n", "without a plus"),
        ("[[model]]\npath = 'a'\n[[model]]\npath = 'b'\naliases = ['a']\n", "have the name a"),
        ("[[model]\n", "is not TOML"),
    ],
)
def test_invalid_model_file_gives_one_line_error(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        read(tmp_path, text)


def test_duplicate_model_names_are_refused() -> None:
    with pytest.raises(SettingError, match="two models have the name same"):
        table_models(["same", "same"], None, **USUAL)


def test_model_is_named_after_resolved_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large").mkdir()
    (tmp_path / "small").symlink_to(tmp_path / "large")
    monkeypatch.chdir(tmp_path / "large")
    named = [name_of(path) for path in (".", "../large/", "../small", "owner/model", "a/b.gguf")]
    assert named == ["large", "large", "small", "owner/model", "b"]
