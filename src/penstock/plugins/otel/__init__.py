"""Traces of requests with OpenTelemetry."""
