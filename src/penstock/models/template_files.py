"""Chat templates of a model's folder, including those that transformers' tokenizers ignore.

chat_template.jinja, additional_chat_templates/*.jinja    read by the tokenizer
tokenizer_config.json: a text, or texts by name           read by the tokenizer if those are missing
chat_template.json (older folders with a processor)       read here if the others have no default
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.models.source import read_object

DEFAULT = "default"
"""Name of the default template, used without tools."""
FILES = ("tokenizer_config.json", "chat_template.json")
"""Files that may contain a default template, in order of precedence."""


def completed(templates: Any, source: str | Path) -> str | dict[str, str] | None:
    """Return a tokenizer's templates, with a default template; None if the model has none."""
    if isinstance(templates, str):
        return templates
    named = dict(templates or {})
    if DEFAULT in named:
        return named
    for file in FILES:
        read = _templates(read_object(source, file))
        if DEFAULT in read:
            named = {**read, **named}
            break
    if not named:
        return None
    named = {DEFAULT: named[min(named)], **named}
    return named if len(named) > 1 else named[DEFAULT]


def _templates(content: Mapping[str, Any]) -> dict[str, str]:
    templates = content.get("chat_template")
    if isinstance(templates, str):
        return {DEFAULT: templates}
    if isinstance(templates, list):
        listed = [entry for entry in templates if isinstance(entry, dict)]
        templates = {entry.get("name"): entry.get("template") for entry in listed}
    if not isinstance(templates, Mapping):
        return {}
    return {
        name: text
        for name, text in templates.items()
        if isinstance(name, str) and isinstance(text, str)
    }
