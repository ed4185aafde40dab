"""Settings of the HTTP server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from penstock.config.defaults import HOST, PORT
from penstock.config.setting import Setting, Settings

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Host names that only programs on this machine can reach."""
NOTICES = "penstock.notices"
"""Name of the logger whose INFO records are shown by default: replies to a process's signals."""
MODELS_OWN = "from the model's generation_config.json"
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
        Setting("Address to listen on; addresses other than loopback need a key.", "ADDRESS"),
    ] = HOST
    port: Annotated[
        int,
        Field(ge=0, le=65_535),
        Setting("TCP port to listen on; 0 chooses a free one.", "NUMBER"),
    ] = PORT
    api_key: Annotated[
        str | None,
        Field(min_length=1, repr=False),
        Setting(
            "Key that clients must send, as a bearer token or in x-api-key. Other users of this "
            "machine can read flags, but not the environment.",
            "KEY",
            unset="none",
        ),
    ] = None
    keys: Annotated[
        Path | None,
        Setting(
            "TOML file of named keys with their limits and salts; mode 0600, read again on SIGHUP.",
            "FILE",
            unset="none",
        ),
    ] = None
    cors_origin: Annotated[
        tuple[str, ...],
        Setting(
            "Origin whose pages may call the server from a browser; may be repeated. * allows all, "
            "and needs a key.",
            "ORIGIN",
        ),
    ] = ()
    max_connections: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Maximum number of connections; more are closed, except for /health and /ready.",
            "NUMBER",
        ),
    ] = 1_000
    """Upper bound; the limit of open files may lower it."""
    max_tokens: Annotated[
        int | None,
        Field(ge=1),
        Setting(
            "Maximum tokens of an answer, if the request does not set it.",
            "TOKENS",
            unset="to the end of the model's context",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Field(ge=0.0, le=100.0, allow_inf_nan=False),
        Setting("Default temperature of requests.", "NUMBER", unset=MODELS_OWN),
    ] = None
    top_p: Annotated[
        float | None,
        Field(gt=0.0, le=1.0),
        Setting(
            "Default top_p of requests.",
            "SHARE",
            unset=MODELS_OWN,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        Field(ge=0, lt=2**31),
        Setting(
            "Default top_k of requests; 0 means all tokens.",
            "NUMBER",
            unset=MODELS_OWN,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        Field(ge=0.0, le=1.0),
        Setting(
            "Default min_p of requests.",
            "SHARE",
            unset=MODELS_OWN,
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        Field(ge=0.01, le=100.0),
        Setting("Default repetition penalty of requests.", "NUMBER", unset=MODELS_OWN),
    ] = None
    system: Annotated[
        str | None,
        Field(min_length=1),
        Setting(
            "System message of conversations that have none.",
            "TEXT",
            unset="the chat template's own",
        ),
    ] = None
    ignore_model_context: Annotated[
        bool,
        Setting(
            "Accept prompts longer than the model's max_position_embeddings; its "
            "answers to them may be meaningless."
        ),
    ] = False
    keep_billing_header: Annotated[
        bool,
        Setting(
            "Keep Claude Code's x-anthropic-billing-header in the prompt. It varies by request, "
            "so that no prefixes are shared after it."
        ),
    ] = False
    tool_parser: Annotated[
        str | None,
        Setting(
            "Parse the model's tool calls in the format of this family: harmony, deepseek, llama "
            "... (docs/tools.md), none, or a parser of mlx-lm.",
            "NAME",
            unset="by the chat template",
        ),
    ] = None
    tools_without_template: Annotated[
        Literal["prompt", "refuse"],
        Setting(
            "Handling of tools that the chat template does not render: prompt describes them in "
            "the system message, in Hermes' format; refuse responds 400."
        ),
    ] = "prompt"
    reasoning_parser: Annotated[
        str | None,
        Setting(
            "Parse the model's reasoning between the marks of this family: think, harmony, mistral "
            "... (docs/tools.md), or none.",
            "NAME",
            unset="by the chat template",
        ),
    ] = None
    allow_remote_images: Annotated[
        bool,
        Setting(
            "Fetch images that requests name by an http or https address; private addresses are "
            "refused. Images in data URLs are read without it."
        ),
    ] = False
    request_timeout_seconds: Annotated[
        float,
        Field(gt=0.0, allow_inf_nan=False),
        Setting("Abort requests that have not ended this long after arrival.", "SECONDS"),
    ] = 600.0
    drain_timeout_seconds: Annotated[
        float,
        Field(ge=0.0, allow_inf_nan=False),
        Setting("Continue open answers for this long on shutdown.", "SECONDS"),
    ] = 30.0
    log_format: Annotated[
        Literal["text", "json"],
        Setting(
            "Format of the log on standard error. json: an object per line, and one for each "
            "request that has ended, with its id and without its text."
        ),
    ] = "text"
    otlp_traces_endpoint: Annotated[
        str | None,
        Field(min_length=1),
        Setting(
            "Send a trace of each request to this OTLP endpoint, such as "
            "http://127.0.0.1:4318/v1/traces; needs opentelemetry-sdk.",
            "URL",
            unset="none",
        ),
    ] = None
    session_dir: Annotated[
        Path | None,
        Setting(
            "Folder for conversations that clients save under a name; needs --ssd-cache-dir.",
            "FOLDER",
            unset="none",
        ),
    ] = None
    hold_seconds: Annotated[
        float,
        Field(ge=0.0, allow_inf_nan=False),
        _fixed("Seconds that a prefix with `prompt_cache_key` is held after its last use."),
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
