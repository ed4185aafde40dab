"""Replacement of a model's chat template (`--chat-template`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from penstock.errors import SettingError
from penstock.models.mlx_lm import Loaded, chat_templates, render, set_chat_template
from penstock.models.template_trial import check_template

MOST_BYTES = 1_000_000
TURN_END = "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML}
"""Templates by name, as accepted by `--chat-template`."""


def template_text(setting: str, named: Mapping[str, str] | None = None) -> str:
    """Return the template for a setting: a known name, a file, or the template text itself.

    >>> template_text("{{ messages[0].content }}")
    '{{ messages[0].content }}'
    """
    known = {**(named or {}), **TEMPLATES}
    if setting in known:
        return known[setting]
    if "{%" in setting or "{{" in setting:
        return setting
    file = Path(setting).expanduser()
    if not file.is_file():
        raise SettingError(
            f"--chat-template {setting}: there is no such file; name one, or {', '.join(known)}"
        )
    if file.stat().st_size > MOST_BYTES:
        raise SettingError(
            f"--chat-template {setting}: the file exceeds the limit of {MOST_BYTES:,} bytes"
        )
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--chat-template {setting}: {error}; name a text file") from None


def use_template(loaded: Loaded, setting: str) -> None:
    """Replace a model's chat template, and test it; SettingError or ModelError if that fails.

    With ChatML, the end-of-turn token also ends answers, if the vocabulary has it.
    """
    text = template_text(setting, chat_templates(loaded.tokenizer))
    check_template("--chat-template", text)
    set_chat_template(loaded.tokenizer, text)
    if text == CHATML and TURN_END in loaded.tokenizer.get_vocab():
        loaded.tokenizer.add_eos_token(TURN_END)
    render(loaded.tokenizer, [{"role": "user", "content": "Hello"}])
