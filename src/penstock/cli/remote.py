"""A conversation with a server that speaks OpenAI's chat completions, ours or another."""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from penstock.config import SamplingSettings
from penstock.errors import PenstockError, SettingError

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 300.0
"""Seconds to wait for the next byte; penstock's server sends a comment now and then while it reads
a prompt."""


class RemoteError(PenstockError):
    """The server is not there, refuses, or breaks an answer off."""

    status = 502


@dataclass(frozen=True, slots=True)
class RemotePiece:
    """Some text of an answer, or its end."""

    text: str
    finish_reason: str | None = None
    """`stop` or `length` with the last piece, None before."""


@dataclass(slots=True)
class RemoteUsage:
    """Costs of answers: tokens by the server's count, seconds by the client's clock."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens read from the cache."""
    completion_tokens: int = 0
    first_seconds: float = 0.0
    """Seconds from the request to the first text."""
    seconds: float = 0.0
    """Seconds from the first text to the last."""

    def line(self) -> str:
        """Say it in one line.

        >>> RemoteUsage(400, 384, 21, 0.1, 0.5).line()
        'prompt 400 tokens, 384 cached (96%); answer 21 tokens, 40 tokens/s, first after 0.10 s'
        """
        cached = self.cached_tokens / max(1, self.prompt_tokens)
        speed = ""
        if self.completion_tokens > 1 and self.seconds > 0:
            speed = f" {(self.completion_tokens - 1) / self.seconds:,.0f} tokens/s,"
        return (
            f"prompt {self.prompt_tokens:,} tokens, {self.cached_tokens:,} cached ({cached:.0%}); "
            f"answer {self.completion_tokens:,} tokens,{speed} first after "
            f"{self.first_seconds:.2f} s"
        )


class Remote:
    """A dialogue with a server; every turn sends all of it, and the server's cache knows most.

    Args:
        url: `http://host:port`, with or without `/v1`.
        api_key: sent as a bearer token.
        model: the server's name of it; by default the first that it lists.
        system: a system prompt before the conversation.

    Raises:
        SettingError: `url` is not one of HTTP.
        RemoteError: the server is not there, or refuses the key.
    """

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
        )
        self.model = model if model is not None else self._first_model()
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages: list[dict[str, str]] = []
        if self.system is not None:
            self.messages.append({"role": "system", "content": self.system})
        self.last: RemoteUsage | None = None
        self.turns = 0

    def answer(self, text: str, sampling: SamplingSettings) -> Generator[RemotePiece]:
        """Yield the answer to `text` piece by piece.

        A turn counts once its last piece was taken; one that is broken off is forgotten, and
        the server sees that its client has gone.

        Raises:
            RemoteError: the server refuses, or breaks the answer off.
        """
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
        reply, usage = "", RemoteUsage()
        began = time.perf_counter()
        first = began
        for chunk in self._chunks(body):
            _count(chunk.get("usage"), usage)
            for choice in chunk.get("choices") or ():
                piece = RemotePiece(
                    (choice.get("delta") or {}).get("content") or "", choice.get("finish_reason")
                )
                if piece.text and not reply:
                    first = time.perf_counter()
                    usage.first_seconds = first - began
                reply += piece.text
                yield piece
        usage.seconds = time.perf_counter() - first
        self.messages = [*said, {"role": "assistant", "content": reply}]
        self.last = usage
        self.turns += 1

    def stats(self) -> str:
        """Describe tokens and times of the last answer."""
        if self.last is None:
            return f"{self.model} at {self.url}; nothing was asked yet"
        return self.last.line()

    def _chunks(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of one streamed answer.

        Raises:
            RemoteError: also if the stream ends before it says that it does.
        """
        with (
            self._reported(),
            self._http.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                response.read()
                raise RemoteError(_refusal(response))
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if chunk.get("error"):
                    raise RemoteError(f"{self.url} broke the answer off: {_said(chunk)}")
                yield chunk
        raise RemoteError(f"{self.url} ended the answer before its end")

    def _first_model(self) -> str:
        with self._reported():
            response = self._http.get("/v1/models")
            if response.status_code != httpx.codes.OK:
                raise RemoteError(_refusal(response))
            return str(response.json()["data"][0]["id"])

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Turn a fault of the connection into one line."""
        try:
            yield
        except httpx.ConnectError as error:
            raise RemoteError(
                f"no server answers at {self.url}; start one with penstock serve, or name another "
                f"with --url"
            ) from error
        except httpx.RemoteProtocolError as error:
            raise RemoteError(f"the server at {self.url} has ended") from error
        except httpx.HTTPError as error:
            what = str(error) or type(error).__name__
            raise RemoteError(f"{self.url} is lost: {what}") from error
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise RemoteError(
                f"{self.url} does not answer as an OpenAI-compatible server does"
            ) from error


def base_url(url: str) -> str:
    """Return the URL without a slash or `/v1` at its end.

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


def _count(reported: dict[str, Any] | None, usage: RemoteUsage) -> None:
    if not reported:
        return
    usage.prompt_tokens = reported.get("prompt_tokens", 0)
    usage.completion_tokens = reported.get("completion_tokens", 0)
    usage.cached_tokens = (reported.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _refusal(response: httpx.Response) -> str:
    """Say in one line why a server refuses: its own message, if it has one."""
    try:
        said = _said(response.json())
    except ValueError:
        said = response.reason_phrase
    if response.status_code == httpx.codes.UNAUTHORIZED:
        said += " (--api-key, or PENSTOCK_API_KEY)"
    return f"{response.url} answers {response.status_code}: {said}"


def _said(body: Any) -> str:
    """Return the message of an error object, OpenAI's or a plainer one."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)
