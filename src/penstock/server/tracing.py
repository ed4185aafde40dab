"""Loading of the tracing plug-in, which listens to requests."""

from __future__ import annotations

from penstock.config import ServerSettings
from penstock.errors import SettingError
from penstock.extensions import extension
from penstock.server.recent import Listener


def request_tracer(settings: ServerSettings, model_name: str) -> Listener | None:
    """Return the listener that sends traces; None if no endpoint is set.

    Raises:
        SettingError: OpenTelemetry is not installed.
    """
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        trace_requests = extension("otel")
    except ModuleNotFoundError:  # the plug-in is present, but not its library
        trace_requests = None
    if trace_requests is None:
        raise SettingError(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install opentelemetry-sdk "
            "opentelemetry-exporter-otlp-proto-http"
        )
    listener: Listener = trace_requests(settings.otlp_traces_endpoint, model_name)
    return listener
