"""Frozen settings with their defaults; every number says its unit; parsed once, at the edge."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

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
MAX_BATCH_SIZE = 8
"""Sequences that the engine runs at the same time."""
BLOCK_SIZE = 32
"""Tokens of a block: what is shared, named and split as one."""
PREFILL_CHUNK = 512
"""Tokens of prompts that the engine reads in one step."""
MAX_STALL_MS = 200
"""Milliseconds of prompts between two decode steps: five tokens a second at least."""
MIN_QUANTIZE_TOKENS = 256
"""Tokens below which a prompt is not held in a codec; a longer one is, as a whole."""
RAW_FIRST_TOKENS = 0
"""First tokens of a prompt that a codec leaves as they are."""
MAX_QUEUE = 256
"""Answers that may wait for their place in the batch."""
HOST = "127.0.0.1"
"""Address that the server listens on: this machine's own, out of reach for other machines."""
PORT = 8080
"""TCP port of the server; 0 takes a free one."""
EMBEDDED_LIMIT = "200MB"
"""Memory limit for the embedded model: eight plain caches of 20,000 tokens would take 330 MB."""
MLX_LM_MINOR = (0, 32)
"""The minor version of mlx-lm that the contract tests pass on."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Description of a settings field: the text and the shape of its flag."""

    help: str
    unit: str | None = None
    """Unit or kind of the value, as help shows it; `BYTES` may be written as 16GB."""
    unset: str | None = None
    """Words for what happens without the flag, which then has no default."""
    flag: str | None = None
    """Name of the flag without dashes; None takes the field's, without `_seconds`."""
    is_flag: bool = True
    """Whether commands offer a flag; False is for limits that need no tuning."""
    is_local: bool = False
    """Whether the machines of one model may have different values."""


def _fixed(help_text: str) -> Setting:
    """Describe a limit without a flag."""
    return Setting(help_text, is_flag=False)


class Settings(BaseModel):
    """Base of all settings: frozen, and strict about unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def setting_of(kind: type[Settings], name: str) -> Setting:
    """Return the description of a settings field.

    >>> setting_of(KVSettings, "max_kv_size").unit
    'TOKENS'

    Raises:
        TypeError: the field has no description.
    """
    for annotation in kind.model_fields[name].metadata:
        if isinstance(annotation, Setting):
            return annotation
    raise TypeError(f"{kind.__name__}.{name} has no Setting: add its help and unit to the field")


def flag_of(kind: type[Settings], name: str) -> str:
    """Return the flag of a settings field, without dashes in front.

    >>> flag_of(EngineSettings, "keep"), flag_of(ServerSettings, "request_timeout_seconds")
    ('keep-kv-size', 'request-timeout')
    """
    field = kind.model_fields.get(name)
    flag = None if field is None else setting_of(kind, name).flag
    return flag or name.removesuffix("_seconds").replace("_", "-")


WeightsDtype: TypeAlias = Literal["auto", "native", "float32"]
"""Numbers of a model's weights once it is loaded; see `--weights-dtype`."""
MaxKVSize: TypeAlias = Annotated[
    int, Field(ge=2), Setting("Hold the keys and values of at most this many tokens.", "TOKENS")
]
KeepKVSize: TypeAlias = Annotated[
    int | None,
    Field(ge=0),
    Setting(
        "Never drop this many first tokens.",
        "TOKENS",
        unset=f"{KEEP}, less in a small window",
        flag="keep-kv-size",
    ),
]
KVCacheQuantization: TypeAlias = Annotated[
    str | None,
    Setting(
        "Hold keys and values in fewer bits: 8 (meant where no CODEC follows), 4, k8v4, "
        "kivi5/turbo3.5, ... (docs/codecs.md; penstock bench-kv-cache compares them).",
        "[CODEC]",
        unset="full precision",
    ),
]

RawFirstTokens: TypeAlias = Annotated[
    int,
    Field(ge=0),
    Setting(
        "First tokens of every sequence that stay in full precision; a --keep-kv-size that is "
        "more counts instead.",
        "TOKENS",
    ),
]


class KVSettings(Settings):
    """How much a sequence's key/value caches may hold, and in which form."""

    max_kv_size: MaxKVSize = MAX_KV_SIZE
    keep_kv_size: KeepKVSize = None
    kv_bits: Annotated[
        Literal[2, 3, 4, 5, 6, 8] | None,
        Setting(
            "Store keys and values in this many bits: 2, 3, 4, 5, 6 or 8.",
            "BITS",
            unset="the model's precision",
        ),
    ] = None
    kv_cache_quantization: KVCacheQuantization = None
    """The codec of full-attention layers, in place of `kv_bits`."""
    kv_cache_min_quantize_tokens: Annotated[
        int,
        Field(ge=0),
        Setting(
            "Leave a sequence of fewer tokens in full precision; encode a longer one whole.",
            "TOKENS",
        ),
    ] = MIN_QUANTIZE_TOKENS
    kv_cache_raw_first_tokens: RawFirstTokens = RAW_FIRST_TOKENS

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

    max_tokens: Annotated[
        int, Field(ge=1), Setting("Generate at most this many tokens an answer.", "TOKENS")
    ] = MAX_TOKENS
    temperature: Annotated[
        float,
        Field(ge=0.0, allow_inf_nan=False),
        Setting("Sampling temperature; 0 takes the likeliest token.", "NUMBER"),
    ] = TEMP
    top_p: Annotated[
        float,
        Field(gt=0.0, le=1.0),
        Setting("Sample from this share of the probability, above 0 up to 1.", "SHARE"),
    ] = 1.0
    seed: Annotated[
        int | None,
        Field(ge=0, lt=2**64),
        Setting("Seed of the sampling.", "NUMBER", unset="a new one each time"),
    ] = None


COLD_TIERS = ("ssd_cache_dir", "remote_cache")
"""Fields of `EngineSettings` that name a cold tier each, the nearest first."""


class EngineSettings(Settings):
    """What an engine is made with."""

    model_config = ConfigDict(strict=True)

    memory_limit: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Memory for everything, the weights included: 16GB is 16 x 10^9 bytes.",
            "BYTES",
            unset=f"{EMBEDDED_LIMIT} for the embedded model, else as penstock doctor shows",
            is_local=True,
        ),
    ]
    memory_threshold: Annotated[
        float,
        Field(gt=0.0, le=1.0),
        Setting(
            "Evict cold prefixes while the machine as a whole uses more than this share of its "
            "memory; at 1 the own limit alone counts.",
            "SHARE",
            unset="0.8 to 0.95, more on larger machines",
            is_local=True,
        ),
    ] = 1.0
    max_kv_size: MaxKVSize = MAX_KV_SIZE
    keep: KeepKVSize = None
    """None is `KEEP`, or half of a smaller window."""
    max_batch_size: Annotated[
        int, Field(ge=1), Setting("Run at most this many sequences at the same time.", "NUMBER")
    ] = MAX_BATCH_SIZE
    prefill_chunk: Annotated[
        int,
        Field(ge=1),
        Setting("Read at most this many tokens of prompts between two decode steps.", "TOKENS"),
    ] = PREFILL_CHUNK
    max_stall_ms: Annotated[
        int,
        Field(ge=0),
        Setting(
            "Read prompts for at most this long between two decode steps, by the measured speed "
            "and at least one block; 0 is no bound.",
            "MILLISECONDS",
        ),
    ] = MAX_STALL_MS
    speculative_tokens: Annotated[
        int,
        Field(ge=0, le=16),
        Setting(
            "Propose up to this many tokens a step from the sequence's own text and check them "
            "together, where that is faster; 0 is off.",
            "TOKENS",
        ),
    ] = 0
    block_size: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Share and name tokens by blocks of this many.",
            "TOKENS",
            unset=f"{BLOCK_SIZE}, or as many as the codec takes together",
        ),
    ] = BLOCK_SIZE
    max_queue: Annotated[
        int,
        Field(ge=1),
        Setting("Answers that may wait for their place; more are refused with 429.", "NUMBER"),
    ] = MAX_QUEUE
    hot_cache_only: Annotated[
        bool,
        Setting("Promise that prefixes are kept in memory alone: no folder, no thread, no file."),
    ] = False
    ssd_cache_dir: Annotated[
        Path | None,
        Setting(
            "Keep prefixes in this folder too, so that they survive eviction and restarts; it is "
            "made if it is not there. Prompts can be told from its files.",
            "FOLDER",
            unset="none: memory only",
            is_local=True,
        ),
    ] = None
    ssd_cache_limit: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Limit of the folder, for all processes that share it: 500MB, 100GB.",
            "BYTES",
            is_local=True,
        ),
    ] = 20_000_000_000
    ssd_write_budget: Annotated[
        int | None,
        Field(ge=0),
        Setting(
            "Write at most this much into the folder in a day, to spare the disk.",
            "BYTES",
            unset="no limit",
        ),
    ] = None
    remote_cache: Annotated[
        str | None,
        Field(repr=False),
        Setting(
            "Share prefixes with other servers through a store: redis://, rediss:// or unix:// "
            "for Valkey and Redis; s3://, gs://, az:// or file://. Read access to it reveals "
            "prompts. Other users of this machine can read flags, but not the environment.",
            "URL",
            unset="none",
        ),
    ] = None
    remote_cache_ttl_seconds: Annotated[
        int,
        Field(ge=1),
        Setting("Let Valkey or Redis keep a block for this long after its last use.", "SECONDS"),
    ] = 604_800
    remote_cache_timeout_seconds: Annotated[
        float,
        Field(gt=0.0, allow_inf_nan=False),
        Setting("Leave the store alone for half a minute if an answer takes longer.", "SECONDS"),
    ] = 1.0
    kv_cache_quantization: KVCacheQuantization = None
    """The codec of the nodes of the prefix tree."""
    kv_cache_min_quantize_tokens: Annotated[
        int,
        Field(ge=0),
        Setting(
            "Leave a sequence of fewer tokens in full precision, and out of cold tiers; encode a "
            "longer one whole. With --kv-cache-quantize-when active the first tokens of longer "
            "ones stay as well.",
            "TOKENS",
        ),
    ] = MIN_QUANTIZE_TOKENS
    kv_cache_raw_first_tokens: RawFirstTokens = RAW_FIRST_TOKENS
    kv_cache_skip_layers: Annotated[
        tuple[int, ...],
        Setting(
            "Numbers of layers that stay in full precision, with commas between; recurrent ones "
            "are not counted.",
            "LAYERS",
            unset="none",
        ),
    ] = ()
    kv_cache_quantize_when: Annotated[
        Literal["active", "at-rest"],
        Setting(
            "When blocks are quantized. at-rest: once no running request reads them; the answer "
            "that computes them has full precision, later ones read codes. active: as soon as "
            "they are whole; an answer is the same cold and from the cache, and prompts are read "
            "a block at a time."
        ),
    ] = "at-rest"

    @model_validator(mode="after")
    def _one_way_for_the_cold(self) -> EngineSettings:
        if self.hot_cache_only and self.cold_tiers:
            name = self.cold_tiers[0]
            raise ValueError(
                f"hot_cache_only (--hot-cache-only) leaves nothing to do for {name} "
                f"(--{flag_of(EngineSettings, name)}); name one of them"
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
    def cold_tiers(self) -> list[str]:
        """Fields of `COLD_TIERS` that name a tier here."""
        return [name for name in COLD_TIERS if getattr(self, name) is not None]

    @property
    def step_tokens(self) -> int:
        """Tokens of prompts that one step may read: a chunk, or one block that is longer."""
        return max(self.prefill_chunk, self.block_size)

    @property
    def raw_first_tokens(self) -> int:
        """First tokens of a prompt that no codec touches.

        An active codec fixes a block's form before the length of a path is known, so that short
        prompts stay raw only if all prompts begin so.
        """
        active = self.kv_cache_quantize_when == "active"
        short = self.kv_cache_min_quantize_tokens if active else 0
        return max(self.kv_cache_raw_first_tokens, self.keep or 0, short)

    @property
    def least_quantized_tokens(self) -> int:
        """Tokens below which a path of nodes at rest stays as it is."""
        active = self.kv_cache_quantize_when == "active"
        return 0 if active else self.kv_cache_min_quantize_tokens

    @property
    def least_written_tokens(self) -> int:
        """Tokens below which a path is not written to cold tiers."""
        quantized = self.kv_cache_quantization is not None
        return max(self.block_size, self.least_quantized_tokens if quantized else 0)

    @property
    def keep_tokens(self) -> int:
        """First tokens of a window that are never dropped."""
        return min(KEEP, self.max_kv_size // 2) if self.keep is None else self.keep


LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that only programs on it can reach."""


MODELS_OWN = "as generation_config.json of the model has it"
"""Help of sampling that a model's folder may have its own defaults for."""
SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of `ServerSettings` that win over those defaults."""


class ServerSettings(Settings):
    """What the HTTP server is made with, besides its engine."""

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
            "TEXT",
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
    """Fewer where the limit of open files is less."""
    max_tokens: Annotated[
        int,
        Field(ge=1),
        Setting("Tokens of an answer whose request does not say how many.", "TOKENS"),
    ] = MAX_TOKENS
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
        Setting("From a request's arrival to its last token, at most.", "SECONDS"),
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


RoutingPolicy: TypeAlias = Literal["round-robin", "hash", "prefix", "prefix+load"]
WORTH = 8.0
"""Cost of computing again a block of one conversation, counted in waiting blocks.

The block would be on two replicas then, and fewer others would fit. Replayed, 8 keeps 19 hits in 20
that 50 keeps, and at 1 a fifth is lost (docs/scale.md)."""


class FleetSettings(Settings):
    """How many replicas Ray Serve runs, and how prompts find theirs."""

    replicas: Annotated[
        int,
        Field(ge=1),
        Setting(
            "With --ray: engines at the start, and at least. --memory-limit is each one's.",
            "NUMBER",
        ),
    ] = 1
    max_replicas: Annotated[
        int | None,
        Field(ge=1),
        Setting(
            "With --ray: engines at most; how many there are goes by requests and ledgers.",
            "NUMBER",
            unset="always --replicas",
        ),
    ] = None
    cpus: Annotated[
        float,
        Field(ge=0.0),
        Setting(
            "With --ray: processors that Ray sets aside for a replica.",
            "NUMBER",
            flag="replica-cpus",
        ),
    ] = 1.0
    gpus: Annotated[
        float,
        Field(ge=0.0),
        Setting(
            "With --ray: GPUs that Ray sets aside for a replica.", "NUMBER", flag="replica-gpus"
        ),
    ] = 0.0
    routing: Annotated[
        RoutingPolicy, Setting("With --ray: which replica gets a prompt (docs/scale.md).")
    ] = "prefix+load"

    @model_validator(mode="after")
    def _the_most_is_not_below_the_least(self) -> FleetSettings:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(
                f"--max-replicas {self.max_replicas} is less than --replicas {self.replicas}"
            )
        return self


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
                name = f"--{flag_of(kind, name)}"
            message = f"{name}{given}: {message}"
        raise SettingError(message) from None
