"""Settings of the HTTP server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from penstock.config.defaults import HOST, PORT
from penstock.config.setting import Setting, Settings

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that only programs on it can reach."""
MODELS_OWN = "as generation_config.json of the model has it"
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of `ServerSettings` that override the model's generation_config.json."""


_Count = Annotated[int, Field(ge=1)]
_Seconds = Annotated[float, Field(gt=0.0)]


def _fixed(help_text: str) -> Setting:
    return Setting(help_text, is_flag=False)


class ServerSettings(Settings):
    host: Annotated[
        str,
        Field(min_length=1),
        Setting("Address to listen on; any but this machine's own needs a key.", "ADDRESS"),
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
    keys: Annotated[
        Path | None,
        Setting(
            "TOML file of keys with names, each with limits and a salt of its own; mode 0600, read "
            "again on SIGHUP.",
            "FILE",
            unset="none",
        ),
    ] = None
    cors_origin: Annotated[
        tuple[str, ...],
        Setting(
            "Origin whose pages may call the server from a browser; may be repeated. * is all, "
            "and needs a key.",
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
    """Upper bound; the limit of open files may lower it."""
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
    tools_without_template: Annotated[
        Literal["prompt", "refuse"],
        Setting(
            "Treatment of tools that the chat template does not render: prompt describes them in "
            "the system message, in Hermes's form, refuse answers 400."
        ),
    ] = "prompt"
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
    max_head_bytes: Annotated[_Count, _fixed("Bytes of a request's line and headers.")] = 65_536
    max_head_fields: Annotated[_Count, _fixed("Headers of a request.")] = 256
    head_timeout_seconds: Annotated[_Seconds, _fixed("Seconds for a head to arrive.")] = 10.0
    keep_alive_seconds: Annotated[_Count, _fixed("Seconds between two requests.")] = 6
    max_body_bytes: Annotated[_Count, _fixed("Bytes of a request's body.")] = 16_000_000
    max_depth: Annotated[_Count, _fixed("Nesting of a JSON body.")] = 64
    body_timeout_seconds: Annotated[_Seconds, _fixed("Seconds for a body to arrive.")] = 30.0
    max_unread: Annotated[_Count, _fixed("Queued events at which a slow reader is cut.")] = 1_024
    send_timeout_seconds: Annotated[_Seconds, _fixed("Seconds to read a piece of a stream.")] = 30.0
    ping_seconds: Annotated[_Seconds, _fixed("Seconds between a stream's keep-alives.")] = 5.0
    stored_response_bytes: Annotated[
        int, Field(ge=0), _fixed("Bytes of responses that are kept by id.")
    ] = 32_000_000
    recent: Annotated[int, Field(ge=0), _fixed("Requests shown by the page and `top`.")] = 100

    @property
    def needs_key(self) -> bool:
        return self.api_key is not None or self.keys is not None

    @property
    def on_loopback(self) -> bool:
        return self.host in LOOPBACK_HOSTS
