"""Traces of requests, with OpenTelemetry's exporter in memory, and requests in the log."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from patience import SOON
from servers import Running, serving, settings, wait_until

from penstock import __version__
from penstock.errors import SettingError
from penstock.server import tracing
from penstock.server.log_lines import REQUESTS, JSONLines

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PROMPT = "The code of the amber falcon is 4821. " * 20


@pytest.fixture
def exporter() -> Any:
    memory = pytest.importorskip(
        "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="no OpenTelemetry SDK"
    )
    return memory.InMemorySpanExporter()


@contextmanager
def traced(exporter: Any, **engine: Any) -> Iterator[Running]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from penstock.plugins.otel.request_tracer import RequestTracer

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(engine=engine) as running:
        running.service.listeners.append(RequestTracer(provider, "recall"))
        yield running


def complete(running: Running, **more: Any) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": 4, **more}
    headers = {"traceparent": PARENT, "x-request-id": "mine"}
    url = f"{running.url}/v1/completions"
    return httpx.post(url, json=body, headers=headers, timeout=SOON)


def spans_by_name(exporter: Any) -> dict[str, Any]:
    wait_until(lambda: any(span.name.startswith("penstock ") for span in spans(exporter)))
    return {span.name: span for span in spans(exporter)}


def spans(exporter: Any) -> list[Any]:
    return list(exporter.get_finished_spans())


def test_request_has_spans_of_its_phases(exporter: Any) -> None:
    with traced(exporter) as running:
        complete(running).raise_for_status()
        named = spans_by_name(exporter)
    request = named["penstock /v1/completions"]
    assert named.keys() == {request.name, "wait", "prefill", "decode"}
    assert f"{request.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{request.parent.span_id:016x}" == PARENT.split("-")[2]
    assert request.attributes["gen_ai.usage.output_tokens"] == 4
    assert request.attributes["penstock.request_id"] == "mine"
    phases = [named[name] for name in ("wait", "prefill", "decode")]
    assert {span.parent.span_id for span in phases} == {request.context.span_id}
    assert request.start_time == phases[0].start_time
    for span, after in pairwise(phases):
        assert span.start_time <= span.end_time == after.start_time
    assert phases[-1].end_time <= request.end_time + 50_000_000  # two clocks


@pytest.mark.usefixtures("reads_all")
def test_restore_from_disk_has_a_span(exporter: Any, tmp_path: Path) -> None:
    with serving(engine={"ssd_cache_dir": tmp_path}) as before:
        complete(before).raise_for_status()
    with traced(exporter, ssd_cache_dir=tmp_path) as running:
        complete(running).raise_for_status()
        named = spans_by_name(exporter)
    assert named["penstock /v1/completions"].attributes["penstock.cached_tokens"] > 0
    assert named["restore"].start_time < named["restore"].end_time


def test_cancelled_request_has_a_span(exporter: Any) -> None:
    with traced(exporter) as running:
        leave(running)
        request = spans_by_name(exporter)["penstock /v1/completions"]
    assert request.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)


def leave(running: Running) -> None:
    """Read the first line of a stream, and disconnect."""
    with (
        httpx.Client(timeout=SOON) as client,
        client.stream(
            "POST",
            f"{running.url}/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 400, "stream": True, "ignore_eos": True},
        ) as stream,
    ):
        next(stream.iter_lines())


def test_missing_library_is_named_in_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(name="opentelemetry")

    monkeypatch.setattr(tracing, "extension", absent)
    assert tracing.request_tracer(settings(), "recall") is None
    with pytest.raises(SettingError, match="pip install opentelemetry-sdk"):
        tracing.request_tracer(settings(otlp_traces_endpoint="http://127.0.0.1:4318"), "recall")


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "penstock"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=dam,site=north"}, "dam"),
        ({"OTEL_SERVICE_NAME": "weir", "OTEL_RESOURCE_ATTRIBUTES": "service.name=dam"}, "weir"),
    ],
)
def test_service_name_is_taken_from_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], name: str
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="no OpenTelemetry SDK")
    from penstock.plugins.otel.request_tracer import _resource

    for variable in ("OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    attributes = _resource().attributes
    assert (attributes["service.name"], attributes["service.version"]) == (name, __version__)
    assert ("site" in attributes) is ("site" in str(variables))


def test_log_has_an_object_per_request() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JSONLines())
    REQUESTS.addHandler(handler)
    level = REQUESTS.level
    REQUESTS.setLevel(logging.INFO)
    try:
        with serving(log_format="json") as running:
            complete(running).raise_for_status()
            wait_until(lambda: stream.getvalue().endswith("\n"))
    finally:
        REQUESTS.removeHandler(handler)
        REQUESTS.setLevel(level)
    (line,) = [json.loads(text) for text in stream.getvalue().splitlines()]
    assert line["request_id"] == "mine" and line["path"] == "/v1/completions"
    assert line["completion_tokens"] == 4 and line["finish"] == "length"
    assert 0 < line["first_token_seconds"] <= line["seconds"]
    assert "falcon" not in stream.getvalue()


def test_json_log_line_has_exception() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("a", 40, "f", 1, "it %s", ("failed",), sys.exc_info())
    line = json.loads(JSONLines().format(record))
    assert (line["level"], line["message"]) == ("error", "it failed")
    assert line["exception"].endswith("ValueError: no")
