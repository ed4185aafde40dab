from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock.config import MLX_LM_MINOR, EngineSettings, SamplingSettings, parse
from penstock.errors import SettingError


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        SamplingSettings().max_tokens = 1  # type: ignore[misc]


def test_errors_do_not_repeat_secret_values() -> None:
    with pytest.raises(SettingError) as caught:
        parse(EngineSettings, memory_limit=1, remote_cache=["redis://:secret@host"])
    assert str(caught.value).startswith("--remote-cache: ") and "secret" not in str(caught.value)
    made = parse(EngineSettings, memory_limit=1, remote_cache="redis://:secret@host")
    assert "secret" not in repr(made)


@pytest.mark.parametrize("keep", [0, 15])
def test_keep_may_be_window_minus_one(keep: int) -> None:
    assert parse(EngineSettings, memory_limit=1, max_kv_size=16, keep=keep).keep_tokens == keep


@pytest.mark.parametrize("keep", [16, 17])
def test_keep_as_large_as_window_is_refused(keep: int) -> None:
    with pytest.raises(SettingError, match=rf"--keep-kv-size\) {keep} leaves no room .* 16 tokens"):
        parse(EngineSettings, memory_limit=1, max_kv_size=16, keep=keep)


def test_default_keep_is_below_small_window() -> None:
    assert parse(EngineSettings, memory_limit=1, max_kv_size=16).keep_tokens == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_error_of_invalid_number_names_flag(name: str, value: float) -> None:
    with pytest.raises(SettingError, match=f"^--{name.replace('_', '-')} "):
        parse(SamplingSettings, **{name: value})


def test_unknown_setting_is_refused() -> None:
    with pytest.raises(SettingError, match="nonsense is not a setting"):
        parse(SamplingSettings, nonsense=1)


def test_mlx_lm_minor_version_matches_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    major, minor = MLX_LM_MINOR
    wanted = [d for d in project["project"]["dependencies"] if d.startswith("mlx-lm>")]
    assert len(wanted) == 1
    assert wanted[0].startswith(f"mlx-lm>={major}.{minor}.")
    assert wanted[0].endswith(f",<{major}.{minor + 1}")
