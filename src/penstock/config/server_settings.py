"""Settings of the HTTP server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from penstock.config.defaults import HOST, PORT
from penstock.config.setting import Setting, Settings

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that only programs on it can reach."""
MODELS_OWN = "as generation_config.json of the model has it"
"""Help of sampling that a model's folder may have its own defaults for."""
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of `ServerSettings` that win over those defaults."""


def _fixed(help_text: str) -> Setting:
    """Describe a limit without a flag."""
    return Setting(help_text, is_flag=False)


class ServerSettings(Settings):
    """Settings of the HTTP server, besides those of its engine."""

    host: Annotated[
        str,
        Field(min_length=1),
        Setting("Address to listen on; any but this machine's own needs --api-key.", "ADDRESS"),
    ] = HOST
    port: Annotated[
        int, Field(ge=0, le=65_535), Setting("TCP port to listen on; 0 takes a free one.", "NUMBER")
    ] = PORT
    api_key: Annotated[
        str | None,
        Field(min_length=1, repr=False),
        Setting(
            "Key that clients must show, as a bearer token or in x-api-key. Other users of this "
            "machine can read flags, but not the environment.",
            "KEY",
            unset="none",
        ),
    ] = None
    cors_origin: Annotated[
        tuple[str, ...],
        Setting(
            "Origin whose pages may call the server from a browser; may be repeated. * is all, "
            "and needs --api-key.",
            "ORIGIN",
        ),
    ] = ()
    max_connections: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Connections at the same time; more are closed at once, but for /health and /ready.",
            "NUMBER",
        ),
    ] = 1_000
    """Most connections at the same time. There are fewer where the limit of open files is less."""
    max_tokens: Annotated[
        int | None,
        Field(ge=1),
        Setting(
            "Tokens of an answer whose request does not say how many.",
            "TOKENS",
            unset="to the end of the model's context",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Field(ge=0.0, le=100.0, allow_inf_nan=False),
        Setting("Temperature of a request that does not say one.", "NUMBER", unset=MODELS_OWN),
    ] = None
    top_p: Annotated[
        float | None,
        Field(gt=0.0, le=1.0),
        Setting(
            "Share of the probability to draw from, where a request does not say one.",
            "SHARE",
            unset=MODELS_OWN,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Field(ge=0, lt=2**31),
        Setting(
            "Likeliest tokens to draw from, where a request does not say; 0 is all.",
            "NUMBER",
            unset=MODELS_OWN,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Field(ge=0.0, le=1.0),
        Setting(
            "Least probability, as a share of the likeliest, where a request says none.",
            "SHARE",
            unset=MODELS_OWN,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Field(ge=0.01, le=100.0),
        Setting(
            "Repetition penalty of a request that does not say one.", "NUMBER", unset=MODELS_OWN
        ),
    ] = None
    ignore_model_context: Annotated[
        bool,
        Setting(
            "Take prompts that are longer than the model's max_position_embeddings; its "
            "answers to them may make no sense."
        ),
    ] = False
    keep_billing_header: Annotated[
        bool,
        Setting(
            "Leave Claude Code's x-anthropic-billing-header in the prompt. It changes, and behind "
            "it nothing is shared."
        ),
    ] = False
    tool_parser: Annotated[
        str | None,
        Setting(
            "Read the model's calls of tools as this family writes them: harmony, deepseek, llama "
            "... (docs/server.md), none, or a parser of mlx-lm.",
            "NAME",
            unset="by the chat template",
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Setting(
            "Find the model's reasoning between the marks of this family: think, harmony, mistral "
            "... (docs/server.md), or none.",
            "NAME",
            unset="by the chat template",
        ),
    ] = None
    request_timeout_seconds: Annotated[
        float,
        Field(gt=0.0, allow_inf_nan=False),
        Setting("Break off a request that has not ended this long after its arrival.", "SECONDS"),
    ] = 600.0
    drain_timeout_seconds: Annotated[
        float,
        Field(ge=0.0, allow_inf_nan=False),
        Setting("Go on with open answers for this long when told to stop.", "SECONDS"),
    ] = 30.0
    session_dir: Annotated[
        Path | None,
        Setting(
            "Keep conversations that clients save under a name in this folder; needs "
            "--ssd-cache-dir.",
            "FOLDER",
            unset="none",
        ),
    ] = None
    hold_seconds: Annotated[
        float,
        Field(ge=0.0, allow_inf_nan=False),
        _fixed("Seconds that a named prefix is held after its last use."),
    ] = 300.0
    max_head_bytes: Annotated[
        int, Field(ge=1), _fixed("Bytes of a request's line and headers, at most.")
    ] = 65_536
    max_head_fields: Annotated[int, Field(ge=1), _fixed("Headers of a request, at most.")] = 256
    head_timeout_seconds: Annotated[
        float,
        Field(gt=0.0),
        _fixed(
            "Seconds for a request's head to arrive; for the first, from the connection's start."
        ),
    ] = 10.0
    keep_alive_seconds: Annotated[
        int,
        Field(ge=1),
        _fixed("Seconds between an answer's end and the next request on its connection."),
    ] = 6
    max_body_bytes: Annotated[int, Field(ge=1), _fixed("Bytes of a request's body, at most.")] = (
        16_000_000
    )
    max_depth: Annotated[int, Field(ge=1), _fixed("Brackets within brackets of a JSON body.")] = 64
    body_timeout_seconds: Annotated[
        float, Field(gt=0.0), _fixed("Seconds for a body to arrive.")
    ] = 30.0
    max_unread: Annotated[
        int,
        Field(ge=1),
        _fixed("Events of one request that wait for a slow reader; with more it is cancelled."),
    ] = 1_024
    send_timeout_seconds: Annotated[
        float,
        Field(gt=0.0),
        _fixed(
            "Seconds for a reader to take the next piece of a stream; then the connection closes."
        ),
    ] = 30.0
    ping_seconds: Annotated[
        float, Field(gt=0.0), _fixed("Seconds between two keep-alive comments of a stream.")
    ] = 5.0
    stored_response_bytes: Annotated[
        int,
        Field(ge=0),
        _fixed("Bytes of responses that a later request may name by id; the oldest go first."),
    ] = 32_000_000
    recent: Annotated[
        int, Field(ge=0), _fixed("Requests that are remembered for the page and `penstock top`.")
    ] = 100

    @property
    def on_loopback(self) -> bool:
        """Whether only programs on this machine can reach the server."""
        return self.host in LOOPBACK_HOSTS
