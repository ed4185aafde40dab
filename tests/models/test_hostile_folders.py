"""Hostile model folders give a one-line error and exit code 2, or load."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Engine
from penstock.cli import main
from penstock.config import ServerSettings
from penstock.errors import PenstockError
from penstock.models import template_child, template_trial
from penstock.models.loading import load_all
from penstock.models.template_trial import check_template
from penstock.recall import MODEL_PATH
from penstock.server.service import Service

Change = Callable[[Path], object]
READ = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "model.safetensors",
    "model-2.safetensors",
    "additional_chat_templates/tool.jinja",
)
"""Files that loaders read where they are there."""
VALUES: tuple[Any, ...] = (
    *("x", "", None, True, False, -1, 0, 1, 2, 7, 10**9, 10**12, 2**63, 10**30),
    *(1.5, -0.5, 1e300, math.nan, math.inf, [], [1], ["x"], [[1]], {}, {"x": 1}),
    *({"rope_type": "default", "rope_theta": "x"}, {"type": "linear", "factor": "x"}),
)
"""Values of any type, put in the place of a right one."""
ADDED = (
    *("rope_scaling", "rope_parameters", "quantization", "quantization_config", "text_config"),
    *("layer_types", "sliding_window", "auto_map", "model_file", "num_experts", "vision_config"),
    *("eos_token_id", "chat_template", "model_max_length", "extra_special_tokens"),
)
"""Keys that a mutation adds."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the embedded model."""
    copied = tmp_path / "model"
    shutil.copytree(MODEL_PATH, copied, copy_function=shutil.copyfile)
    return copied


def said(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one-line error for a refused folder."""
    capsys.readouterr()
    assert main(["generate", "Hello", "--model", str(folder), "--max-tokens", "1"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    return shown.err


def change(folder: Path, name: str, **values: Any) -> None:
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_unchanged_folder_loads(folder: Path) -> None:
    assert load_all(folder).tokenizer.eos_token_ids


# ---- files


def pipe(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def endless(file: Path) -> None:
    """Make a sparse file of a terabyte."""
    with file.open("wb") as stream:
        stream.truncate(1 << 40)


@pytest.mark.parametrize("make", [pipe, device, endless])
@pytest.mark.parametrize("name", READ)
def test_device_files_and_pipes_are_not_read(
    name: str, make: Change, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)
    message = said(folder, capsys)
    assert name in message or make is endless
    if make is not endless:
        assert "it is not a regular file" in message


@pytest.mark.parametrize("make", [pipe, device])
def test_settings_and_gguf_must_be_regular_files(
    make: Change, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("settings.toml", "model.gguf"):
        make(tmp_path / name)
    assert main(["serve", "--config", str(tmp_path / "settings.toml")]) == 2
    assert "it is not a regular file" in capsys.readouterr().err
    for command in ("generate", "plan"):
        words = ["Hello", "--model"] if command == "generate" else []
        assert main([command, *words, str(tmp_path / "model.gguf")]) == 2
        assert capsys.readouterr().err.count("\n") == 1


# ---- values


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": "x"},
        {"rope_theta": [1.0]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}, "rope_theta": "x"},
        {"rms_norm_eps": "x"},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -1},
        {"text_config": {"num_hidden_layers": 10**9}},
        {"hidden_size": 10**9},
        {"vocab_size": 10**12},
        {"num_attention_heads": 0},
        {"num_attention_heads": math.nan},
        {"eos_token_id": [[1]]},
        {"model_type": ["llama"]},
        {"model_file": "code.py"},
    ],
    ids=str,
)
def test_extreme_config_values_are_refused(
    values: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, "config.json", **values)
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    assert "penstock: " in said(folder, capsys)
    assert not (folder / "ran").exists()


def test_plan_refuses_extreme_layer_count(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change(folder, "config.json", num_hidden_layers=10**9)
    assert main(["plan", str(folder), "--memory-limit", "1GB"]) == 2
    assert "num_hidden_layers is 1,000,000,000, more than" in capsys.readouterr().err


@pytest.mark.slow
def test_remote_code_is_refused_without_prompt(folder: Path) -> None:
    change(folder, "tokenizer_config.json", auto_map={"AutoTokenizer": ["code.T", None]})
    change(folder, "tokenizer_config.json", tokenizer_class="T")
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "generate", "Hello", "--model", str(folder)],
        input="y\n" * 10,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "custom code" in done.stderr and not (folder / "ran").exists()


# ---- any values


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of values in a JSON document, for lists only the first items."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value[:5]):
            yield from places(inner, (*path, index))


def mutate(value: dict[str, Any], rng: random.Random) -> None:
    """Change, remove or add a random value."""
    *path, last = rng.choice([*places(value), (rng.choice(ADDED),)])
    inner: Any = value
    for key in path:
        inner = inner[key]
    if rng.random() < 0.15 and (isinstance(last, int) or last in inner):
        del inner[last]
    else:
        inner[last] = copy.deepcopy(rng.choice(VALUES))


@pytest.mark.parametrize("seed", range(25))
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"]
)
def test_random_config_values_load_or_give_one_line_error(
    seed: int, name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(f"{name} {seed}")
    value = json.loads((folder / name).read_text())
    for _ in range(rng.choice((1, 1, 2))):
        mutate(value, rng)
    (folder / name).write_text(json.dumps(value))
    capsys.readouterr()
    if seed % 2:
        code = main(["generate", "Hello", "--model", str(folder), "--max-tokens", "2"])
        told = [line for line in capsys.readouterr().err.splitlines() if "penstock: " in line]
        assert code == 0 or (code == 2 and len(told) == 1)
        return
    try:
        loaded = load_all(folder)
        with Engine(loaded.model, loaded.tokenizer, memory_limit="200MB") as engine:
            settings = ServerSettings(port=0)
            Service(engine, loaded.tokenizer, settings, "any", sampling=loaded.sampling).close()
    except PenstockError as error:
        assert "\n" not in str(error)


# ---- chat templates

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 9 ** (9 ** 9) }}", "does not end within 1 s"),
        ("{% if messages|length > 1 %}" + LOOP + "{% endif %}", "does not end within 1 s"),
        ("{{ strftime_now('%Y') }}{% if tools %}" + LOOP + "{% endif %}", "does not end within"),
        ("{{ 'a' * 20000000000 }}", "takes more than 1,024 MiB"),
    ],
    ids=["power", "loop", "loop behind a date", "memory"],
)
def test_template_that_never_ends_is_refused(
    source: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_trial, "CPU_SECONDS", 1)
    with pytest.raises(PenstockError, match=words) as raised:
        check_template("bad", source)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0]['content'] }}", "{{ raise_exception('no') }}", "{% for %}", "{{ 1 / 0 }}"],
)
def test_ordinary_and_failing_templates_are_accepted(source: str) -> None:
    """Errors of the template are reported when it is used."""
    check_template("good", source)


def test_template_time_limit_excludes_jinja_import() -> None:
    """A cold import on a busy machine takes seconds."""
    assert template_trial._exit_code("{{ 1 }}", 0.1, template_trial.MEMORY_BYTES) == 0
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    assert template_trial._exit_code(endless, 0.1, template_trial.MEMORY_BYTES) < 0


@pytest.mark.parametrize("place", ["chat_template.jinja", "additional_chat_templates/tool.jinja"])
def test_folder_with_oversized_template_is_refused(
    place: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(template_trial, "MEMORY_BYTES", 256 << 20)
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / place).write_text("{{ 'a' * 999999999 }}")
    assert "its chat template takes more than 256 MiB" in said(folder, capsys)


def test_template_trial_provides_transformers_globals() -> None:
    source = (
        "{% generation %}{{ {'a': 'ä'}|tojson(indent=1) }}{{ bos_token }}{% endgeneration %}"
        "{{ strftime_now('%Y')|length }}{% for m in messages %}{% break %}{% endfor %}"
    )
    rendered = template_child.environment().from_string(source)
    assert rendered.render(messages=[1], bos_token="<s>") == '{\n "a": "ä"\n}<s>4'
