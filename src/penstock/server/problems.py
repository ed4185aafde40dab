"""Errors of the server, and their responses.

an exception ──problem_of──> Problem ──body_for(path)──> OpenAI's or Anthropic's error object

Messages of errors meant for clients say what is wrong and what to do. The text of other errors
is never sent: it may quote another client's prompt, or a path on this machine.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from penstock.errors import (
    EngineStopped,
    LedgerFull,
    NeverFits,
    PenstockError,
    QueueFull,
    SettingError,
)
from penstock.plurals import counted

RETRY_SECONDS = 2
REQUESTS = logging.getLogger("penstock.requests")
LOGGED_PATH_CHARACTERS = 128
ANTHROPIC_PATHS = "/v1/messages"
"""Path under which errors have Anthropic's format; others use OpenAI's, or Ollama's."""
OLLAMA_PATHS = "/api"
OPENAI_ENDINGS = ("/chat/completions", "/completions", "/models", "/responses")
"""Ends of paths that only OpenAI's clients ask for, also with a wrong base URL."""
UNTHREADED = "thread_unsupported_request"
"""Error code that makes Anthropic's clients resend the whole conversation."""
STOPPED = "the engine has stopped, or accepts no more requests; try again later"
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the current request, as sent in the headers `x-request-id` and `request-id`."""
TRACEPARENT: ContextVar[str] = ContextVar("traceparent", default="")
"""Header `traceparent` of the current request; empty if it has none."""
FROM_ANTHROPIC: ContextVar[bool] = ContextVar("from_anthropic", default=False)
"""Whether the current request was sent by an Anthropic client, on any path."""
SHOWN_CHARACTERS = 80


class ServerError(PenstockError):
    """Error returned to the client."""

    status = 500
    headers: Mapping[str, str] = {}

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status
        self.code = code
        self.param = param


class BadRequest(ServerError):
    status = 400


class PromptTooLong(BadRequest):
    """The prompt is too long; the message has the wording that clients recognize."""

    def __init__(self, tokens: int, context: int, param: str = "prompt") -> None:
        super().__init__(
            f"prompt is too long: {tokens} tokens > {context - 1} maximum. This model's maximum "
            f"context length is {context} tokens, prompt and answer together. Shorten the prompt",
            code="context_length_exceeded",
            param=param,
        )


class Unauthorized(ServerError):
    status = 401
    headers: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}

    def __init__(self, message: str = "the API key is missing or wrong") -> None:
        super().__init__(message, code="invalid_api_key")


class NotFound(ServerError):
    status = 404


class NoEmbeddings(NotFound):
    def __init__(self) -> None:
        super().__init__(
            "embeddings are not served: this server generates text; penstock serve MODEL ENCODER "
            "serves both",
            code="unsupported_endpoint",
        )


class TooLarge(ServerError):
    status = 413


class ClientGone(ServerError):
    status = 499


class TooSlow(ServerError):
    status = 408


class TimedOut(ServerError):
    status = 504

    def __init__(self, message: str = "the answer did not end within --request-timeout") -> None:
        super().__init__(message, code="timeout")


class Unavailable(ServerError):
    status = 503


class ShuttingDown(Unavailable):
    def __init__(self, message: str = "the server is shutting down") -> None:
        super().__init__(message, code="shutting_down")


def stopping_text(answers: int, seconds: float) -> str:
    """Return what the operator of a server that stops with open answers is told.

    >>> stopping_text(1, 30.0)[:50]
    'stopping with 1 answer open: waiting up to 30 s (-'
    """
    return (
        f"stopping with {counted(answers, 'answer')} open: waiting up to {seconds:g} s "
        "(--drain-timeout); a second signal stops at once"
    )


@dataclass(frozen=True, slots=True)
class Problem:
    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)


def problem_of(error: BaseException) -> Problem:
    if isinstance(error, ServerError):
        headers = {**_retry(error.status), **error.headers}
        of_field = isinstance(error, BadRequest) and error.param is not None
        code = error.code or ("invalid_value" if of_field else None)
        return Problem(error.status, str(error), code, error.param, headers)
    if isinstance(error, NeverFits):
        return Problem(400, str(error), "context_length_exceeded")
    if isinstance(error, QueueFull):
        return Problem(429, str(error), "queue_full", headers=_retry(429))
    if isinstance(error, LedgerFull):
        return Problem(503, str(error), "out_of_memory", headers=_retry(503))
    if isinstance(error, EngineStopped):  # its cause may quote a prompt
        return Problem(503, STOPPED, "engine_stopped", headers=_retry(503))
    if isinstance(error, PenstockError):
        return _own(error)
    if isinstance(error, RequestValidationError | ValidationError):
        return _validation(error.errors())
    if isinstance(error, HTTPException):
        return Problem(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    if isinstance(error, TimeoutError):
        return Problem(504, "this took too long", "timeout", headers=_retry(504))
    return Problem(500, "internal error; see the server's log")


def _own(error: PenstockError) -> Problem:
    if error.status == 500:  # a model's code has failed: its message may quote the prompt
        return Problem(500, "the model failed on this request; see the server's log")
    if error.status == 503:
        return Problem(503, str(error), "out_of_memory", headers=_retry(503))
    code = "invalid_value" if isinstance(error, SettingError) else None
    return Problem(error.status, str(error), code)


def _retry(status: int) -> dict[str, str]:
    """Return the headers that tell clients when to retry, or not to.

    >>> _retry(429), _retry(504), _retry(400)
    ({'Retry-After': '2'}, {'x-should-retry': 'false'}, {})
    """
    if status == 504:  # it would take as long again, and clients retry twice by default
        return {"x-should-retry": "false"}
    return {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else {}


def _validation(errors: Sequence[Any]) -> Problem:
    first: Mapping[str, Any] = errors[0] if errors else {}
    where = [str(part) for part in first.get("loc", ()) if part not in ("body", "query", "path")]
    message = str(first.get("msg", "the request has the wrong form"))
    message = message.removeprefix("Value error, ")
    if first.get("type") == "model_attributes_type":
        message = "Input should be an object"
    if first.get("type") == "json_invalid":
        message = f"the body is not JSON: {first.get('ctx', {}).get('error', message)}"
        return Problem(400, message, "invalid_json")
    # `loc` includes pydantic's names of the alternatives tried, which clients do not know.
    where = [part for part in where if part not in _TYPES and "[" not in part]
    param = ".".join(where) or None
    if param is None and first.get("type") in ("missing", "model_attributes_type"):
        return Problem(400, "the body must be a JSON object, sent as application/json")
    code = _code(str(first.get("type", "")))
    return Problem(400, f"{param}: {message}" if param else message, code, param)


def _code(kind: str) -> str:
    """Map a pydantic error type to OpenAI's code.

    >>> _code("missing"), _code("int_parsing"), _code("too_short")
    ('missing_required_parameter', 'invalid_type', 'invalid_value')
    """
    if kind == "missing":
        return "missing_required_parameter"
    is_type = kind.endswith(("_type", "_parsing", "_from_float")) or kind == "is_instance_of"
    return "invalid_type" if is_type else "invalid_value"


_TYPES = frozenset({"bool", "dict", "float", "int", "list", "str"})

# ---- the wire form

_OPENAI_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def openai_body(problem: Problem) -> dict[str, Any]:
    """Return OpenAI's error object.

    >>> openai_body(Problem(400, "n: too many", "invalid_value", "n"))["error"]["param"]
    'n'
    """
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    return {
        "error": {
            "message": problem.message,
            "type": _OPENAI_KINDS.get(problem.status, kind),
            "param": problem.param,
            "code": problem.code,
        }
    }


def anthropic_body(problem: Problem) -> dict[str, Any]:
    """Return Anthropic's error object.

    >>> anthropic_body(Problem(429, "full"))["error"]["type"]
    'rate_limit_error'
    """
    kind = "invalid_request_error" if problem.status < 500 else "api_error"
    kind = _ANTHROPIC_KINDS.get(problem.status, kind)
    error: dict[str, Any] = {"type": kind, "message": problem.message}
    if problem.code == UNTHREADED:
        error["details"] = {"error_code": UNTHREADED}
    return {"type": "error", "error": error}


def body_for(path: str, problem: Problem) -> dict[str, Any]:
    """Return the error object in the format of the path's API, with the request id."""
    if is_under(OLLAMA_PATHS, path) and not path.endswith(OPENAI_ENDINGS):
        return {"error": problem.message}
    is_anthropic = is_under(ANTHROPIC_PATHS, path) or FROM_ANTHROPIC.get()
    body = anthropic_body(problem) if is_anthropic else openai_body(problem)
    name = REQUEST_ID.get()
    return body if name is None else {**body, "request_id": name}


def is_under(folder: str, path: str) -> bool:
    """Return whether a path is a folder or lies in it.

    >>> [is_under("/api", path) for path in ("/api", "/api/pull", "/apis")]
    [True, True, False]
    """
    return path == folder or path.startswith(f"{folder}/")


class ErrorResponse(JSONResponse):
    def render(self, content: Any) -> bytes:
        return dumps(content, ascii_only=True)


def response_for(path: str, error: BaseException) -> JSONResponse:
    problem = problem_of(error)
    fields = {"path": path[:LOGGED_PATH_CHARACTERS], "status": problem.status, "code": problem.code}
    REQUESTS.info("error response", extra={"fields": fields})
    return ErrorResponse(body_for(path, problem), problem.status, problem.headers)


_UNICODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_ASCII = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def dumps(content: Any, *, ascii_only: bool = False) -> bytes:
    """Encode JSON as UTF-8; lone surrogates are escaped, NaN and infinity become null."""
    try:
        return (_ASCII if ascii_only else _UNICODE).encode(content).encode()
    except UnicodeEncodeError:  # a lone surrogate, which clients may send
        return dumps(content, ascii_only=True)
    except ValueError:
        return dumps(_finite(content), ascii_only=ascii_only)


def _finite(content: Any) -> Any:
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {name: _finite(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content
