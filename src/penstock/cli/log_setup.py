"""Configuration of a server's logs and traces."""

from __future__ import annotations

import logging
import os

from penstock.config import NOTICES, ServerSettings

UNHEARD = ("uvicorn.error", "transformers.tokenization_utils_base")


def set_up_logs(settings: ServerSettings) -> None:
    """Log to standard error, as text or as JSON lines.

    Raises:
        SettingError: traces are enabled, but OpenTelemetry is not installed.
    """
    if settings.otlp_traces_endpoint is not None:
        from penstock.server.tracing import request_tracer

        request_tracer(settings, "")
    handler = logging.StreamHandler()
    if settings.log_format == "json":
        from penstock.server.log_lines import JSONLines
        from penstock.server.problems import REQUESTS

        handler.setFormatter(JSONLines())
        REQUESTS.setLevel(logging.INFO)
    else:
        handler.addFilter(_is_shown)  # StartProgress prints other INFO records
    logging.getLogger(NOTICES).setLevel(logging.INFO)
    logging.basicConfig(format="penstock: %(message)s", handlers=[handler])
    # Read when the library is imported. Its handler would print each retry a second time, as text.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    for name in UNHEARD:
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)


def _is_shown(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name == NOTICES
