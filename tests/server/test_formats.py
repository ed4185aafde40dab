"""Parsers detected from chat templates, and flags that override them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

import mlx_lm.tool_parsers
import pytest
from parrot import parrot

from penstock.errors import SettingError
from penstock.server import parsing
from penstock.server.parsing.deepseek import DeepSeekCalls
from penstock.server.parsing.formats import CALL_FORMATS, FORMATS, answer_format, call_names
from penstock.server.parsing.tag_formats import GLM, GLM_COMPACT
from penstock.server.prompts import Prompts

SHOWN = {
    "<|start|>assistant<|channel|>final<|message|>": ("harmony", "harmony"),
    "<｜tool▁calls▁begin｜> <think> </think>": ("deepseek", "think"),
    "{% set dsml_token = '｜DSML｜' %}": ("deepseek_tags", "none"),
    "<TOOLCALL>[": ("nemotron", "none"),
    "in <tool_call></tool_call>: <tool_calls>[{...}]</tool_calls>": ("apriel", "none"),
    "<|tool_call|>[<|/tool_call|>": ("phi", "none"),
    "<|start_of_role|> with <|tool_call|>; <think></think><response></response>": (
        "granite",
        "granite",
    ),
    'in the format {"name": function name, "parameters": dictionary': ("llama", "none"),
    "<|python_start|>": ("llama", "none"),
    '<tool_call>{"name": ': ("hermes", "none"),
    "<tool_call>\\n<function=": ("none", "none"),
    "<seed:tool_call>\\n<function=": ("seed", "none"),
    '<tool_call><invoke name="': ("none", "none"),
    "[THINK]": ("none", "mistral"),
    "Hello": ("none", "none"),
}


def tokenizer(template: Any) -> Any:
    return SimpleNamespace(
        chat_template=template,
        has_thinking=False,
        has_tool_calling=False,
        get_vocab=dict,
        eos_token_ids=[],
    )


def parser_of(name: str) -> Any:
    """Return the parser function that mlx-lm selects for a template."""
    return import_module(f"mlx_lm.tool_parsers.{name}").parse_tool_call


def test_non_json_template_is_not_taken_for_json_tools() -> None:
    """mlx-lm mistakes MiniMax M3's template for JSON between tags."""
    for text, name in (("{{ tool_call.name }}", "json_tools"), ('<invoke name="', "none")):
        made = tokenizer(f"<tool_call> tool_call.name <arg_key> {text}")
        made.has_tool_calling, made.tool_parser = True, parser_of("json_tools")
        assert answer_format(made).call_name == name


def test_muse_spark_format_reads_reasoning_from_headers() -> None:
    """Unless a flag turns headers off."""
    made = tokenizer("<atem:function_calls>")
    made.has_tool_calling = True
    made.tool_parser = parser_of("muse_spark")
    form = answer_format(made)
    assert (form.call_name, form.reasoning_name) == ("muse_spark", "muse_spark")
    assert answer_format(made, None, "none").reasoning is None
    assert answer_format(tokenizer(""), "muse_spark").reasoning_name == "muse_spark"


@pytest.mark.parametrize("template", SHOWN)
def test_answer_format_is_detected_from_template(template: str) -> None:
    form = answer_format(tokenizer(template))
    assert (form.call_name, form.reasoning_name) == SHOWN[template]
    tools_have_their_own = {"default": "Hello", "tool_use": template}
    assert answer_format(tokenizer(tools_have_their_own)).call_name == SHOWN[template][0]


def test_flags_override_template() -> None:
    form = answer_format(tokenizer("<TOOLCALL>"), "qwen3_coder", "seed")
    assert (form.call_name, form.reasoning_name) == ("qwen3_coder", "seed")
    form = answer_format(tokenizer("<TOOLCALL> <think></think>"), "none", "none")
    assert (form.calls, form.reasoning) == (None, None)


def test_unknown_parser_lists_known_ones() -> None:
    for name in ("nemotron", "kimi_k2", "none"):
        with pytest.raises(SettingError, match=rf"--tool-parser nothing: .*{name}"):
            answer_format(tokenizer(""), "nothing")
    with pytest.raises(SettingError, match=r"--reasoning-parser nothing: .*mistral"):
        answer_format(tokenizer(""), None, "nothing")


def test_every_mlx_lm_parser_is_supported() -> None:
    """A model with an unknown mlx-lm parser gets text."""
    names = {module.name for module in iter_modules(mlx_lm.tool_parsers.__path__)}
    assert len(names) >= 14 and names < set(call_names())
    made = tokenizer("Hello")
    made.has_tool_calling = True
    made.tool_parser = SimpleNamespace(__module__="mlx_lm.tool_parsers.of_tomorrow")
    assert answer_format(made).call_name == "none"


def test_tag_spacing_is_detected_from_template() -> None:
    made = tokenizer("<tool_call>{{ name }}<arg_key>k</arg_key><arg_value>")
    made.has_tool_calling, made.tool_parser = True, parser_of("glm47")
    calls = answer_format(made).calls
    made.chat_template = made.chat_template.replace("</arg_key>", "</arg_key>\\n")
    assert (calls, answer_format(made).calls) == (GLM_COMPACT, GLM)
    assert "\n" in GLM.tags.as_text and "\n" not in GLM_COMPACT.tags.as_text


@pytest.mark.parametrize(("behind", "fenced"), [("", False), ("\n```json\n", True), ("```", False)])
def test_fenced_arguments_are_detected_from_template(behind: str, fenced: bool) -> None:
    made = tokenizer(f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>x<｜tool▁sep｜>{behind}")
    assert answer_format(made).calls == DeepSeekCalls(fenced=fenced)


def test_plain_text_markers_open_reasoning(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}[/THINK]{% if add_generation_prompt %}[THINK]\n{% endif %}"
    prompts = Prompts(parrot(tmp_path, "Hello", template=template)[1])
    talk = [{"role": "user", "content": "[THINK]"}]
    assert prompts.starts_in_reasoning(prompts.render(talk))
    assert not prompts.starts_in_reasoning(prompts.render(talk, answer=False))
    assert prompts.reasoning_marks is None


def test_every_format_file_is_registered() -> None:
    files = [
        import_module(f"{parsing.__name__}.{module.name}")
        for module in iter_modules(parsing.__path__)
        if module.name != "formats"
    ]
    in_files = [one for file in files for one in getattr(file, "FORMATS", ())]
    assert sorted(one.name for one in in_files) == sorted(CALL_FORMATS)
    assert len(in_files) == len(FORMATS) == len(CALL_FORMATS) > 20
