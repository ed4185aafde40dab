"""A chat template in place of the model's own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ModelError, SettingError
from penstock.models.chat_template import CHATML, MOST_BYTES, template_text, use_template
from penstock.models.loading import load_all
from penstock.models.mlx_lm import chat_templates, load_tokenizer, render
from penstock.recall import MODEL_PATH


def test_template_is_read_from_file_or_name(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{{ messages[0].content }}é")
    assert template_text(str(file)) == "{{ messages[0].content }}é"
    assert template_text("chatml") == CHATML


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"x" * (MOST_BYTES + 1)])
def test_unreadable_template_file_gives_one_line_error(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "own.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingError, match=r"--chat-template .*own\.jinja"):
        template_text(str(file))


def test_custom_template_renders_prompt() -> None:
    loaded = load_all(MODEL_PATH)
    talk = [{"role": "user", "content": "Hello"}]
    before = render(loaded.tokenizer, talk)
    use_template(loaded, "{{ messages[0].content }}!")
    assert loaded.tokenizer.decode(render(loaded.tokenizer, talk)).strip().endswith("Hello!")
    assert render(loaded.tokenizer, talk) != before
    with pytest.raises(ModelError, match="refuses"):
        use_template(loaded, "{% if %}")


# ---- the templates of a folder

TALK = [{"role": "user", "content": "Hello"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
JINJA, EXTRA = "chat_template.jinja", "additional_chat_templates"
CONFIG, LEGACY = "tokenizer_config.json", "chat_template.json"


def folder_with(folder: Path, files: dict[str, Any]) -> Path:
    """Return a copy of the embedded model with other chat templates."""
    shutil.copytree(MODEL_PATH, folder, copy_function=shutil.copyfile)
    (folder / JINJA).unlink()
    config = json.loads((folder / CONFIG).read_text())
    config.pop("chat_template", None)
    (folder / CONFIG).write_text(json.dumps(config | files.get(CONFIG, {})))
    for name, content in files.items():
        if name == CONFIG:
            continue
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def said(file: str) -> str:
    """Return a template that prints its file name."""
    return "{{ '" + file + "' }}"


NAMED = [{"name": "default", "template": said("d")}, {"name": "tool_use", "template": said("t")}]
FOLDERS = {
    "jinja before all": (
        {JINJA: said("j"), CONFIG: {"chat_template": said("c")}, LEGACY: {"chat_template": "x"}},
        ("j", "j"),
    ),
    "config": ({CONFIG: {"chat_template": said("c")}, LEGACY: {"chat_template": "x"}}, ("c", "c")),
    "legacy alone": ({LEGACY: {"chat_template": said("l")}}, ("l", "l")),
    "legacy of several": ({LEGACY: {"chat_template": NAMED}}, ("d", "t")),
    "legacy by names": (
        {LEGACY: {"chat_template": {"default": said("d"), "tool_use": said("t")}}},
        ("d", "t"),
    ),
    "config of several": ({CONFIG: {"chat_template": NAMED}}, ("d", "t")),
    "jinja and more": ({JINJA: said("j"), f"{EXTRA}/tool_use.jinja": said("t")}, ("j", "t")),
    "more beside config": (
        {CONFIG: {"chat_template": said("c")}, f"{EXTRA}/tool_use.jinja": said("t")},
        ("c", "t"),
    ),
    "more beside legacy": (
        {LEGACY: {"chat_template": said("l")}, f"{EXTRA}/tool_use.jinja": said("t")},
        ("l", "t"),
    ),
    "more alone": ({f"{EXTRA}/rag.jinja": said("r"), f"{EXTRA}/z.jinja": said("z")}, ("r", "r")),
    "broken legacy": ({LEGACY: "{", JINJA: said("j")}, ("j", "j")),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_templates_match_transformers(name: str, tmp_path: Path) -> None:
    files, expected = FOLDERS[name]
    tokenizer = load_tokenizer(folder_with(tmp_path / "model", files))
    assert tokenizer.has_chat_template
    rendered = [
        tokenizer.apply_chat_template(TALK, tools=tools, tokenize=False) for tools in (None, TOOLS)
    ]
    assert tuple(rendered) == expected


@pytest.mark.parametrize("content", [{}, [], {"chat_template": 1}, {"chat_template": [1]}, "{"])
def test_legacy_folder_without_template_has_none(tmp_path: Path, content: Any) -> None:
    tokenizer = load_tokenizer(folder_with(tmp_path / "model", {LEGACY: content}))
    assert not tokenizer.has_chat_template


def test_named_template_is_selected(tmp_path: Path) -> None:
    files = {JINJA: said("j"), f"{EXTRA}/rag.jinja": said("of documents")}
    loaded = load_all(folder_with(tmp_path / "model", files))
    assert sorted(chat_templates(loaded.tokenizer)) == ["default", "rag"]
    with pytest.raises(SettingError, match="name one, or default, rag, chatml"):
        use_template(loaded, "rags")
    use_template(loaded, "rag")
    assert loaded.tokenizer.decode(render(loaded.tokenizer, TALK)).strip() == "of documents"
