"""Frozen settings with their defaults; every number says its unit; parsed once, at the edge."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from penstock.errors import SettingError

MAX_KV_SIZE = 131_072
"""Tokens whose keys and values a sequence may hold."""
KEEP = 4_096
"""First tokens of a sequence that are never dropped."""
MAX_TOKENS = 512
"""Tokens generated at most for one answer."""
TEMP = 0.0
"""Sampling temperature, without unit; 0 takes the likeliest token."""
TOP_P = 1.0
"""Share of the probability that is sampled from, 0 to 1; 1 samples from all of it."""
MAX_BATCH_SIZE = 8
"""Sequences that the engine runs at the same time."""
BLOCK_SIZE = 32
"""Tokens of a block: what is shared, named and split as one."""
PREFILL_CHUNK = 512
"""Tokens of prompts that the engine reads in one step."""
MIN_QUANTIZE_TOKENS = 256
"""Tokens below which a prompt is not held in a codec; a longer one is, as a whole."""
RAW_FIRST_TOKENS = 0
"""First tokens of a prompt that a codec leaves as they are."""
SSD_CACHE_LIMIT = 20_000_000_000
"""Bytes of the folder of the cold tier, all who share it together."""
REMOTE_CACHE_TTL_SECONDS = 604_800
"""For which the remote tier keeps a block after its last use: a week."""
REMOTE_CACHE_TIMEOUT_SECONDS = 1.0
"""For an answer of the remote tier, and each 4 MB of a block to be taken."""
MAX_QUEUE = 256
"""Answers that may wait for their place in the batch."""
HOST = "127.0.0.1"
"""Address that the server listens on: this machine's own, which nobody else reaches."""
PORT = 8080
"""TCP port of the server; 0 takes a free one."""
REQUEST_TIMEOUT_SECONDS = 600.0
"""From a request's arrival to its last token, at most."""
DRAIN_TIMEOUT_SECONDS = 30.0
"""How long a server that is told to stop goes on with the answers that are open, at most."""
MAX_CONNECTIONS = 1_000
"""Connections to the server at the same time."""
HOLD_SECONDS = 300.0
"""How long a prefix that a client names (`prompt_cache_key`) is held after its last use."""
MLX_LM_MINOR = (0, 32)
"""The minor version of mlx-lm that the contract tests pass on."""


class Settings(BaseModel):
    """Base of all settings: frozen, and strict about unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class KVSettings(Settings):
    """How much a sequence's key/value caches may hold, and in which form."""

    max_kv_size: int = Field(MAX_KV_SIZE, ge=2)
    """Tokens."""
    keep_kv_size: int | None = Field(None, ge=0)
    """Tokens; None is `KEEP`, or less in a small window."""
    kv_bits: Literal[2, 3, 4, 5, 6, 8] | None = None
    """Bits of a stored number; None keeps the model's own precision."""
    kv_cache_quantization: str | None = None
    """The codec of full-attention layers, in place of `kv_bits`; None leaves them."""
    kv_cache_min_quantize_tokens: int = Field(MIN_QUANTIZE_TOKENS, ge=0)
    """Tokens below which a sequence stays in full precision; a longer one is encoded whole."""
    kv_cache_raw_first_tokens: int = Field(RAW_FIRST_TOKENS, ge=0)
    """First tokens of every sequence that stay in full precision; a `keep_kv_size` that is named
    counts instead if it is more."""

    @model_validator(mode="after")
    def _keep_leaves_room(self) -> KVSettings:
        if self.keep_kv_size is not None and self.keep_kv_size >= self.max_kv_size:
            raise ValueError(
                f"--keep-kv-size {self.keep_kv_size} leaves no room in a window of "
                f"--max-kv-size {self.max_kv_size} tokens; lower the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _one_way_for_fewer_bits(self) -> KVSettings:
        if self.kv_bits is not None and self.kv_cache_quantization is not None:
            raise ValueError("--kv-bits and --kv-cache-quantization are two ways; name one of them")
        return self


class SamplingSettings(Settings):
    """How the next token is chosen, and when to stop."""

    max_tokens: int = Field(MAX_TOKENS, ge=1)
    """Tokens."""
    temperature: float = Field(TEMP, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(TOP_P, gt=0.0, le=1.0)
    seed: int | None = Field(None, ge=0, lt=2**64)
    """None draws a new one each time."""


class EngineSettings(Settings):
    """What an engine is made with."""

    model_config = ConfigDict(strict=True)

    memory_limit: int = Field(ge=1)
    """Bytes, for all that is ever allocated, the weights included."""
    max_kv_size: int = Field(MAX_KV_SIZE, ge=2)
    """Tokens a sequence sees at most, the kept ones among them."""
    keep: int | None = Field(None, ge=0)
    """First tokens that it always sees; None is `KEEP`, or half of a smaller window."""
    max_batch_size: int = Field(MAX_BATCH_SIZE, ge=1)
    """Sequences that run at the same time."""
    block_size: int = Field(BLOCK_SIZE, ge=1)
    """Tokens of a block, the unit of sharing; a codec or a model that takes more tokens together
    has as many if this is not named."""
    prefill_chunk: int = Field(PREFILL_CHUNK, ge=1)
    """Tokens of prompts that are read in one step, between two decode steps."""
    max_queue: int = Field(MAX_QUEUE, ge=1)
    """Answers that may wait for their place."""
    memory_threshold: float = Field(1.0, gt=0.0, le=1.0)
    """Share of the machine's memory, in use by everybody, from which cold prefixes give way;
    1 looks at the own limit alone."""
    ssd_cache_dir: Path | None = None
    """Folder of the cold tier; None is none."""
    ssd_cache_limit: int = Field(SSD_CACHE_LIMIT, ge=1)
    """Bytes of that folder, all who share it together."""
    ssd_write_budget: int | None = Field(None, ge=0)
    """Bytes that all who share it may write there in a day; None is no limit."""
    remote_cache: str | None = Field(None, repr=False)
    """URL of the remote tier, which may hold a password; None is none."""
    remote_cache_ttl_seconds: int = Field(REMOTE_CACHE_TTL_SECONDS, ge=1)
    remote_cache_timeout_seconds: float = Field(
        REMOTE_CACHE_TIMEOUT_SECONDS, gt=0.0, allow_inf_nan=False
    )
    hot_cache_only: bool = False
    """Whether there must be no cold tier: no folder, no thread, no file."""
    kv_cache_quantization: str | None = None
    """The codec that nodes are held in; None leaves them as the model computes them."""
    kv_cache_min_quantize_tokens: int = Field(MIN_QUANTIZE_TOKENS, ge=0)
    """First tokens of every prompt that stay as they are, and so all of one that is not longer; a
    `keep` that is named counts instead if it is more."""
    kv_cache_skip_layers: tuple[int, ...] = ()
    """Numbers of layers that stay as they are, counted among those with keys and values."""
    kv_cache_quantize_when: Literal["active", "at-rest"] = "at-rest"
    """When: at rest, once nobody who runs reads a block, so that the answer which computes it has
    full precision, and one that finds it reads codes; or as soon as it is whole, so that an answer
    is the same whatever was held, and differs from that of full precision by the codec's error."""

    @model_validator(mode="after")
    def _one_way_for_the_cold(self) -> EngineSettings:
        if self.hot_cache_only and self.ssd_cache_dir is not None:
            raise ValueError(
                f"hot_cache_only (--hot-cache-only) leaves nothing to do for ssd_cache_dir "
                f"{self.ssd_cache_dir}; name one of them"
            )
        if self.hot_cache_only and self.remote_cache is not None:
            raise ValueError(
                "hot_cache_only (--hot-cache-only) leaves nothing to do for remote_cache "
                "(--remote-cache); name one of them"
            )
        return self

    @model_validator(mode="after")
    def _keep_leaves_room(self) -> EngineSettings:
        if self.keep is not None and self.keep >= self.max_kv_size:
            raise ValueError(
                f"keep {self.keep} leaves no room in a window of max_kv_size {self.max_kv_size}"
            )
        return self

    @property
    def has_cold_tier(self) -> bool:
        """Whether blocks are kept anywhere but in memory."""
        return self.ssd_cache_dir is not None or self.remote_cache is not None

    @property
    def step_tokens(self) -> int:
        """Tokens of prompts that one step may read: a chunk, or one block that is longer."""
        return max(self.prefill_chunk, self.block_size)

    @property
    def raw_first_tokens(self) -> int:
        """First tokens of a prompt that no codec touches."""
        return max(self.kv_cache_min_quantize_tokens, self.keep or 0)

    @property
    def keep_tokens(self) -> int:
        """First tokens of a window that are never dropped."""
        return min(KEEP, self.max_kv_size // 2) if self.keep is None else self.keep


LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that only programs on it can reach."""


class ServerSettings(Settings):
    """What the HTTP server is made with, besides its engine."""

    host: str = Field(HOST, min_length=1)
    port: int = Field(PORT, ge=0, le=65_535)
    api_key: str | None = Field(None, min_length=1, repr=False)
    """What clients must show; None lets everybody in who can reach the host."""
    cors_origin: tuple[str, ...] = ()
    """Origins whose pages may call the server from a browser; `*` is all."""
    max_tokens: int = Field(MAX_TOKENS, ge=1)
    """Tokens of an answer whose request does not say how many."""
    keep_billing_header: bool = False
    """Whether the line that Claude Code puts in front of its system prompt stays in the prompt."""
    request_timeout_seconds: float = Field(REQUEST_TIMEOUT_SECONDS, gt=0.0, allow_inf_nan=False)
    drain_timeout_seconds: float = Field(DRAIN_TIMEOUT_SECONDS, ge=0.0, allow_inf_nan=False)
    session_dir: Path | None = None
    """Folder of the sessions that are saved under a name; None keeps none."""
    hold_seconds: float = Field(HOLD_SECONDS, ge=0.0, allow_inf_nan=False)
    max_connections: int = Field(MAX_CONNECTIONS, ge=1)
    """Connections at the same time; fewer where the limit of open files is less."""
    max_head_bytes: int = Field(65_536, ge=1)
    """Of a request's line and headers, and of what is neither head nor body."""
    max_head_fields: int = Field(256, ge=1)
    """Headers of a request."""
    head_timeout_seconds: float = Field(10.0, gt=0.0)
    """For the head of a request to arrive; of the first one, from when the connection is open."""
    keep_alive_seconds: int = Field(6, ge=1)
    """Between the end of an answer and the next request on its connection."""
    max_body_bytes: int = Field(16_000_000, ge=1)
    max_depth: int = Field(64, ge=1)
    """Brackets within brackets of a JSON body."""
    body_timeout_seconds: float = Field(30.0, gt=0.0)
    """For a body to arrive."""
    max_unread: int = Field(1_024, ge=1)
    """Events of one request that wait for a slow reader; with more it is cancelled."""
    send_timeout_seconds: float = Field(30.0, gt=0.0)
    """For a reader to take the next piece of a stream, before its connection is closed."""
    ping_seconds: float = Field(5.0, gt=0.0)
    """Between two keep-alive comments of a stream."""
    stored_response_bytes: int = Field(32_000_000, ge=0)
    """Of responses that a later request may go on from by their ids; the oldest go first."""
    recent: int = Field(100, ge=0)
    """Requests that are remembered for the page and `penstock top`."""

    @property
    def on_loopback(self) -> bool:
        """Whether only programs on this machine can reach the server."""
        return self.host in LOOPBACK_HOSTS


SettingsT = TypeVar("SettingsT", bound=Settings)


def parse(kind: type[SettingsT], *, flags: bool = True, **values: Any) -> SettingsT:
    """Make settings; a bad value is one line that names it, as a flag unless told otherwise.

    >>> parse(KVSettings, max_kv_size=1024, keep_kv_size=16).max_kv_size
    1024
    >>> parse(KVSettings, kv_bits=7)
    Traceback (most recent call last):
    penstock.errors.SettingError: --kv-bits 7: Input should be 2, 3, 4, 5, 6 or 8

    Raises:
        SettingError: For the first value that is out of its range.
    """
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            name = str(first["loc"][0])
            field = kind.model_fields.get(name)
            given = f" {first['input']}" if field is None or field.repr else ""
            if flags:
                name = "--" + name.removesuffix("_seconds").replace("_", "-")
            message = f"{name}{given}: {message}"
        raise SettingError(message) from None
