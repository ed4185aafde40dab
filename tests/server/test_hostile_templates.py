"""Templates that misbehave on some messages fail only those requests."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_processes import serving as process

from penstock.errors import ModelError
from penstock.models.template_renderer import TemplateOverrun, TemplateRefusal, TemplateRenderer
from penstock.models.template_trial import check_template

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
ENDLESS = """
{% if messages[0].content == 'loop' %}
  {% for a in range(99999) %}{% for b in range(99999) %}
    {% for c in range(99999) %}{% endfor %}
  {% endfor %}{% endfor %}
{% endif %}"""
HUGE = (
    "{% if messages[0].content == 'large' %}{{ 'a' * (messages | length * 9999999999) }}{% endif %}"
)
DOUBLING = """
{% if messages[0].content == 'double' %}{% set ns = namespace(x='aaaaaaaa') %}
  {% for _ in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}
{% endif %}"""
WIDE = """
{% if messages[0].content == 'wide' %}
  {{ 'a' | center(messages | length * 9999999999) }}
{% endif %}"""
CONSTANT = "{% if messages[0].content == 'never' %}{{ 'a' * 9999999999 }}{% endif %}"
HOSTILE = ENDLESS + HUGE + DOUBLING + WIDE + PLAIN
SOON = 60.0


def given(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "add_generation_prompt": True}


@pytest.mark.parametrize("content", ["large", "double", "wide"])
def test_template_memory_overrun_is_reported(content: str) -> None:
    renderer = TemplateRenderer(cpu_seconds=60)  # a busy machine takes long to fill a gigabyte
    renderer.render(HOSTILE, given("hello"))
    with pytest.raises(TemplateOverrun, match="takes more than 1,024 MiB for these messages"):
        renderer.render(HOSTILE, given(content))
    renderer.render(HOSTILE, given("hello"))


def test_template_memory_overrun_at_compile_is_reported() -> None:
    with pytest.raises(TemplateOverrun, match="takes more than 1,024 MiB"):
        TemplateRenderer().render(CONSTANT + PLAIN, given("hello"))
    with pytest.raises(ModelError, match="takes more than 1,024 MiB for a message of one word"):
        check_template("a.jinja", CONSTANT + PLAIN)


def test_endless_template_is_reported() -> None:
    renderer = TemplateRenderer(cpu_seconds=0.5)
    with pytest.raises(TemplateOverrun, match=r"does not end within 0.5 s for these messages"):
        renderer.render(HOSTILE, given("loop"))
    renderer.render(HOSTILE, given("hello"))


def test_time_limit_is_per_request() -> None:
    renderer = TemplateRenderer(cpu_seconds=0.5)
    slow = "{% for a in range(300) %}{% for b in range(4000) %}{% endfor %}{% endfor %}"
    for _ in range(12):
        renderer.render(slow, given("hello"))


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{{ raise_exception('no\nmore') }}", "TemplateError: no"),
        ("{% for %}", "TemplateSyntaxError: Expected an expression, got 'end of statement block'"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    ],
)
def test_template_errors_are_one_line(source: str, line: str) -> None:
    with pytest.raises(TemplateRefusal) as raised:
        TemplateRenderer().render(source, given("hello"))
    assert str(raised.value) == line


def test_rendering_stops_when_client_disconnects() -> None:
    began = time.monotonic()
    with pytest.raises(TemplateOverrun):
        TemplateRenderer(cpu_seconds=60).render(HOSTILE, given("loop"), lambda: True)
    assert time.monotonic() - began < 20


def test_template_overrun_ends_only_its_request(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(HOSTILE)
    with process("--chat-template", str(file)) as server, ThreadPoolExecutor(4) as pool:
        running, url = server.running, server.url

        def ask(content: str) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
            return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=SOON)

        bad = [pool.submit(ask, content) for content in ("loop", "large", "double")]
        assert ask("hello").status_code == 200
        for answer in bad:
            refused = answer.result(SOON)
            assert refused.status_code == 400
            message = refused.json()["error"]["message"]
            assert "the model's chat template" in message and "\n" not in message
        assert ask("hello").status_code == 200
        last = pool.submit(ask, "loop")
        time.sleep(0.3)
        running.send_signal(signal.SIGTERM)
        assert running.wait(SOON) == 0
        assert last.exception(SOON) is not None or last.result().status_code in (400, 503)
