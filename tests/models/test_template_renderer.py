"""Chat templates are rendered in bounded processes, equal to mlx-lm's rendering."""

from __future__ import annotations

import ast
import json
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlx_lm.chat_templates import deepseek_v32
from parrot import TEMPLATE, parrot

import penstock
from penstock import Engine
from penstock.errors import ModelError
from penstock.models.loading import load_all
from penstock.models.mlx_lm import TokenizerWrapper, render, rendered_text
from penstock.models.template_renderer import TemplateOverrun, TemplateRefusal, TemplateRenderer
from penstock.recall import MODEL_PATH
from penstock.server.problems import BadRequest
from penstock.server.prompts import Prompts
from penstock.server.remembered_answers import openings_of
from penstock.server.templates import TOOL

SOURCES = Path(penstock.__file__).parent
QUESTION = [{"role": "user", "content": "Hello"}]
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEN_GB = "{% set ns = namespace(x='a' * 1024) %}{{ ns.x * (messages | length * 9999999) }}"
EVERYTHING = (
    "{{ bos_token }}{{ messages | tojson }}{{ tools | tojson(indent=2) }}{{ documents }}"
    "{{ enable_thinking }}{{ add_generation_prompt }}{{ given }}{{ unknown }}"
    "{% generation %}{{ dict(a=1) }}{{ strftime_now('%Y') }}{% endgeneration %}"
    "{% for m in messages %}{% if m.thinking %}<{{ m.thinking }}>{% continue %}{% endif %}"
    "{{ m.content | upper }}\n{% endfor %}"
)
TALKS: list[list[dict[str, Any]]] = [
    QUESTION,
    [
        {"role": "system", "content": 'Être "bref" 🦫', "name": None},
        *QUESTION,
        {"role": "assistant", "content": "", "reasoning": "Hm.", "tool_calls": None},
        {"role": "assistant", "content": "Hi", "reasoning_content": "Ah.", "thinking": "B"},
        {"role": "user", "content": [{"type": "text", "text": "More?\u2028"}]},
    ],
]


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerWrapper:
    return load_all(MODEL_PATH).tokenizer


@pytest.mark.parametrize("source", [EVERYTHING, TEMPLATE, None], ids=["all", "parrot", "own"])
def test_rendered_text_matches_mlx_lm(source: str | None, tokenizer: TokenizerWrapper) -> None:
    given: dict[str, Any] = {} if source is None else {"chat_template": source}
    with TemplateRenderer(cpu_seconds=60) as renderer:
        for talk in TALKS if source is not None else TALKS[:1]:
            for more in ({}, {"enable_thinking": True, "given": [1, {"a": 0.5}, None]}):
                for tools in (None, [TOOL]):
                    own = tokenizer.apply_chat_template(
                        talk,
                        tokenize=False,
                        tools=tools,
                        add_generation_prompt=True,
                        **given,
                        **more,
                    )
                    ours = rendered_text(
                        tokenizer, talk, renderer, tools=tools, template_args={**given, **more}
                    )
                    assert ours == own
    assert render(tokenizer, QUESTION) == list(
        tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)
    )


def test_rendered_python_template_matches_mlx_lm(
    tokenizer: TokenizerWrapper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "_chat_template", deepseek_v32.apply_chat_template)
    own = tokenizer.apply_chat_template(
        list(QUESTION), tokenize=False, tools=[TOOL], add_generation_prompt=True
    )
    with TemplateRenderer() as renderer:
        assert rendered_text(tokenizer, QUESTION, renderer, tools=[TOOL]) == own


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("while True: pass", "does not end within 1 s"),
        ("return 'a' * 10**10", "takes more than 1,024 MiB"),
    ],
)
def test_python_template_rendering_is_bounded(
    lines: str,
    words: str,
    tokenizer: TokenizerWrapper,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, module = tmp_path / "hostile_template.py", {}  # type: ignore[var-annotated]
    file.write_text(f"def write(messages, **_):\n    {lines}\n")
    exec(compile(file.read_text(), file, "exec"), module)
    monkeypatch.setattr(tokenizer, "_chat_template", module["write"])
    seconds = 1 if "1 s" in words else 60
    with TemplateRenderer(seconds) as renderer, pytest.raises(TemplateOverrun, match=words):
        rendered_text(tokenizer, QUESTION, renderer)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (LOOP, "does not end within 2 s for these messages"),
        (TEN_GB, "takes more than 1,024 MiB for these messages"),
        ("{{ 'ab' * 1_000_000 }}", "makes 2,000,000 characters, more than 1,00"),
        ("{% if messages[0].missing.x %}{% endif %}", "refuses the messages: UndefinedError"),
    ],
    ids=["endless", "10 GB", "long", "raises"],
)
def test_engine_chat_bounds_template_rendering(source: str, words: str) -> None:
    loaded = load_all(MODEL_PATH)
    with Engine(loaded.model, loaded.tokenizer, memory_limit="200MB") as engine:
        with pytest.raises(ModelError, match=words) as raised:
            engine.chat("Hello", template_args={"chat_template": source})
        assert "\n" not in str(raised.value)
        assert engine.chat("Hello", max_tokens=1, ignore_eos=True) is not None


PROBED = "{% if messages | selectattr('content', 'eq', 'Heron.') | list %}"
"""Condition that holds for the probes of a template alone."""


@pytest.mark.parametrize("source", [LOOP, TEN_GB], ids=["endless", "10 GB"])
def test_template_probes_are_bounded_in_time(source: str, tmp_path: Path) -> None:
    hostile = PROBED + source + "{% endif %}" + TEMPLATE
    _, tokenizer = parrot(tmp_path, "A", template=hostile)
    prompts = Prompts(tokenizer)
    began = time.monotonic()
    assert any("the model's chat template" in row.outcome for row in prompts.traits.rows)
    assert time.monotonic() - began < 120  # of sixty probes none is rendered behind the first
    with TemplateRenderer() as renderer:
        openings_of(tokenizer, prompts.traits, renderer)
    assert "Hello" in prompts.template_text(QUESTION)
    with pytest.raises(BadRequest, match="the model's chat template"):
        prompts.render([*QUESTION, {"role": "assistant", "content": "Heron."}, *QUESTION])


def test_clock_dependent_template_is_rendered_once(
    tokenizer: TokenizerWrapper,
) -> None:
    source = "{{ strftime_now('%f') }}"
    with TemplateRenderer() as renderer:
        given = {"chat_template": source}
        texts = {
            rendered_text(tokenizer, QUESTION, renderer, template_args=given) for _ in range(8)
        }
    assert len(texts) > 1 and all(text.isdigit() for text in texts)


def test_non_json_argument_is_refused(tokenizer: TokenizerWrapper) -> None:
    around: list[Any] = []
    around.append(around)
    with TemplateRenderer() as renderer, pytest.raises(TemplateRefusal, match="Circular"):
        rendered_text(tokenizer, QUESTION, renderer, template_args={"gone": 1, "given": around})


def test_child_processes_end_with_renderer() -> None:
    renderer = TemplateRenderer()
    assert renderer.render("{{ a }}", {"a": 1}) == "1"
    process = renderer._process()
    renderer.close()
    assert process.poll() is not None
    assert renderer.render("{{ a }}", {"a": json.dumps("b")}) == '"b"'
    renderer.close()


def test_finished_thread_leaves_no_process() -> None:
    before = len(psutil.Process().children())
    with TemplateRenderer() as renderer:
        for _ in range(3):
            asked = threading.Thread(target=renderer.start)
            asked.start()
            asked.join()
        assert len(psutil.Process().children()) == before, "none waits to be reaped either"


def test_only_template_process_imports_jinja() -> None:
    """Only the bounded process imports Jinja, but for tokenizers that render by themselves."""
    calls, jinja = [], []
    for file in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "apply_chat_template":
                calls.append((file.name, ast.unparse(node)))
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module and module.split(".")[0] == "jinja2":
                jinja.append(file.name)
    assert set(jinja) == {"template_child.py"}
    assert sorted(calls) == [
        ("mlx_lm.py", "base.apply_chat_template"),
        ("mlx_lm.py", "tokenizer.apply_chat_template"),
        ("mlx_lm.py", "tokenizer_class.apply_chat_template"),
    ]
