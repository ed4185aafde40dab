"""Conversation with a server that supports OpenAI's chat completions."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from penstock.cli.answer_figures import AnswerFigures
from penstock.config import LOOPBACK_HOSTS, SamplingSettings
from penstock.errors import PenstockError, SettingError

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 300.0
"""Read timeout in seconds; penstock's server sends periodic comments during a long prefill."""


class RemoteError(PenstockError):
    status = 502


class Remote:
    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        system: str | None = None,
    ) -> None:
        self.url = base_url(url)
        self.system = system
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
            trust_env=not on_this_machine(self.url),
        )
        self.model = model if model is not None else self._first_model()
        self.reset()

    def reset(self) -> None:
        self.messages: list[dict[str, str]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.last: AnswerFigures | None = None
        self.turns = 0

    def answer(self, text: str, sampling: SamplingSettings) -> Generator[str]:
        """Stream the answer; closing the generator early drops the turn and disconnects."""
        said = [*self.messages, {"role": "user", "content": text}]
        body: dict[str, Any] = {
            "model": self.model,
            "messages": said,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed
        reply, usage = "", AnswerFigures()
        began = time.perf_counter()
        first = began
        for chunk in self._chunks(body):
            _count(chunk.get("usage"), usage)
            for choice in chunk.get("choices") or ():
                piece = (choice.get("delta") or {}).get("content") or ""
                if piece and not reply:
                    first = time.perf_counter()
                    usage.first_seconds = first - began
                reply += piece
                yield piece
        usage.seconds = time.perf_counter() - first
        self.messages = [*said, {"role": "assistant", "content": reply}]
        self.last = usage
        self.turns += 1

    def close(self) -> None:
        self._http.close()

    def stats(self) -> str:
        if self.last is None:
            return f"{self.model} at {self.url}; no answers yet"
        return self.last.line()

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with (
            self._reported(),
            self._http.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                response.read()
                raise RemoteError(refusal(response))
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if chunk.get("error"):
                    raise RemoteError(
                        f"{self.url} ended the answer with an error: {error_message(chunk)}"
                    )
                yield chunk
        raise RemoteError(f"{self.url} closed the stream before the answer ended")

    def _first_model(self) -> str:
        with self._reported():
            response = self._http.get("/v1/models")
            if response.status_code != httpx.codes.OK:
                raise RemoteError(refusal(response))
            return str(response.json()["data"][0]["id"])

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            with connected(self.url):
                yield
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RemoteError(
                f"{self.url} does not answer as an OpenAI-compatible server does"
            ) from error


def asked(url: str, api_key: str | None, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post a request to penstock's server; return its answer, or raise RemoteError."""
    address = base_url(url)
    with connected(address):
        response = httpx.post(
            f"{address}{path}",
            json=body,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS),
            trust_env=not on_this_machine(address),
        )
    if response.status_code != httpx.codes.OK:
        raise RemoteError(refusal(response))
    content: dict[str, Any] = response.json()
    return content


@contextmanager
def connected(url: str) -> Iterator[None]:
    try:
        yield
    except httpx.ConnectError as error:
        raise RemoteError(
            f"no server answers at {url}; start one with penstock serve, or use another with --url"
        ) from error
    except httpx.RemoteProtocolError as error:
        raise RemoteError(f"the server at {url} has ended") from error
    except httpx.HTTPError as error:
        raise RemoteError(
            f"connection to {url} lost: {str(error) or type(error).__name__}"
        ) from error


def base_url(url: str) -> str:
    """Return a validated URL without a trailing slash or `/v1`.

    >>> base_url("http://localhost:8080/v1/")
    'http://localhost:8080'
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise SettingError(f"--url {url}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise SettingError(f"--url {url} is not a URL like http://127.0.0.1:8080")
    return url.rstrip("/").removesuffix("/v1")


def on_this_machine(url: str) -> bool:
    """Return whether a server is on this machine, so that proxies do not apply.

    >>> on_this_machine("http://[::1]:8080"), on_this_machine("https://a.example")
    (True, False)
    """
    return httpx.URL(url).host in LOOPBACK_HOSTS


def _count(reported: dict[str, Any] | None, usage: AnswerFigures) -> None:
    if not reported:
        return
    usage.prompt_tokens = reported.get("prompt_tokens", 0)
    usage.completion_tokens = reported.get("completion_tokens", 0)
    usage.cached_tokens = (reported.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def refusal(response: httpx.Response) -> str:
    try:
        said = error_message(response.json())
    except ValueError:
        said = response.reason_phrase
    if response.status_code == httpx.codes.UNAUTHORIZED:
        said += " (--api-key, or PENSTOCK_API_KEY)"
    return f"{response.url} answers {response.status_code}: {said}"


def error_message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
