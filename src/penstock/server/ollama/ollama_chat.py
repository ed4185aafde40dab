"""Ollama's chat and generate, as OpenAI's chat completions written in JSON lines.

body ──OllamaBody──> ChatRequest ──ChatCompletions──> deltas ──> lines, or one object
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from sse_starlette import ServerSentEvent

from penstock.engine.handle import Choice, PromptProgress
from penstock.engine.request import Event, Token
from penstock.server.answers import Delta, ToolCall
from penstock.server.ollama.ollama_forms import OllamaBody, OllamaGenerateBody
from penstock.server.openai.chat_completions import ChatCompletions
from penstock.server.openai.logprobs import Logprobs
from penstock.server.openai.openai_forms import ChatRequest
from penstock.server.problems import Problem, body_for, dumps
from penstock.server.service import Service

MEDIA_TYPE = "application/x-ndjson"
LINES = {"Content-Type": MEDIA_TYPE}


class OllamaLine(ServerSentEvent):
    """A JSON line of a stream, sent instead of a ping."""

    def __init__(self, line: bytes) -> None:
        super().__init__()
        self._line = line

    def encode(self) -> bytes:
        return self._line


class OllamaChat(ChatCompletions):
    path = "/api/chat"

    def __init__(
        self, service: Service, logprobs: Logprobs, asked: OllamaBody, body: ChatRequest
    ) -> None:
        super().__init__(service, logprobs, body)
        self.model = asked.model or service.model_name
        self.began = time.monotonic()

    def read(self) -> None:
        super().read()
        if self.streams:
            self.headers |= LINES

    @property
    def streams_usage(self) -> bool:
        return True

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        (choice,), (reader,) = choices, self.readers
        reader.read(choice)
        delta = Delta(reader.text, reader.reasoning, tuple(reader.calls))
        return self._line(delta, choice.logprobs) | self._end(usage)

    def chunk(self, events: Sequence[Event]) -> Iterator[bytes]:
        for delta, tokens, _ in self._read_all(events).values():
            if delta or tokens:
                yield encoded(self._line(delta, tokens))

    def progress(self) -> Iterator[bytes]:
        return iter(())

    def end(self, usage: dict[str, Any]) -> Iterator[bytes]:
        yield encoded(self._line(Delta(), []) | self._end(usage))

    def failure(self, problem: Problem) -> Iterator[bytes]:
        yield encoded(body_for(self.path, problem))

    def ping(self, progress: PromptProgress | None) -> ServerSentEvent:
        return OllamaLine(encoded(self._line(Delta(), [])))

    def content(self, delta: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": delta.text}
        if delta.reasoning:
            message["thinking"] = delta.reasoning
        if delta.calls:
            message["tool_calls"] = [_call(call) for call in delta.calls]
        return {"message": message}

    def _line(self, delta: Delta, tokens: Sequence[Token]) -> dict[str, Any]:
        line = {"model": self.model, "created_at": now(), **self.content(delta), "done": False}
        if self.body.logprobs and tokens:
            line["logprobs"] = self.logprobs.chat(tokens)
        return line

    def _end(self, usage: dict[str, Any]) -> dict[str, Any]:
        seconds = time.monotonic() - self.began
        first = min(self.answering.recent.first_token_seconds or seconds, seconds)
        return {
            "done": True,
            "done_reason": "length" if self.readers[0].reason == "length" else "stop",
            "total_duration": _nanoseconds(seconds),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": _nanoseconds(first),
            "eval_count": usage["completion_tokens"],
            "eval_duration": _nanoseconds(seconds - first),
        }


class OllamaGenerate(OllamaChat):
    path = "/api/generate"

    def __init__(
        self, service: Service, logprobs: Logprobs, asked: OllamaGenerateBody, body: ChatRequest
    ) -> None:
        super().__init__(service, logprobs, asked, body)
        self._raw = asked.prompt if asked.raw else None

    def read(self) -> None:
        if self._raw is None:
            return super().read()
        self.prompt = self.service.prompts.encode(self._raw)
        self.headers = dict(LINES) if self.streams else {}
        return None

    def content(self, delta: Delta) -> dict[str, Any]:
        thinking = {"thinking": delta.reasoning} if delta.reasoning else {}
        return {"response": delta.text, **thinking}


EMPTY: dict[str, dict[str, Any]] = {
    OllamaChat.path: {"message": {"role": "assistant", "content": ""}},
    OllamaGenerate.path: {"response": ""},
}
"""Fields of an empty answer, by path."""


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "function": {"name": call.name, "arguments": call.object}}


def encoded(line: dict[str, Any]) -> bytes:
    return dumps(line) + b"\n"
