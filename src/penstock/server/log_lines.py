"""Log records as JSON lines, and one for each ended request."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from penstock.server.problems import REQUEST_ID, REQUESTS
from penstock.server.recent import Recent


class JSONLines(logging.Formatter):
    """Formats a record as a JSON object on one line, with the items of its attribute `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := REQUEST_ID.get()) is not None:
            line["request_id"] = request_id
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class RequestLog:
    """Listener that logs the statistics of each ended request, but none of its text."""

    def first_token(self, seconds: float) -> None: ...
    def next_token(self, seconds: float) -> None: ...

    def ended(self, recent: Recent) -> None:
        fields = {
            "request_id": recent.request_id,
            "path": recent.label,
            "state": recent.state,
            "finish": recent.finish,
            "prompt_tokens": recent.prompt_tokens,
            "cached_tokens": recent.cached_tokens,
            "completion_tokens": recent.completion_tokens,
            "first_token_seconds": _rounded(recent.first_token_seconds),
            "seconds": _rounded(recent.seconds),
        }
        REQUESTS.info("request ended", extra={"fields": fields})


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
