"""Settings of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, model_validator

from penstock.config.defaults import (
    ATTEND_BLOCK_TOKENS,
    ATTEND_GROUP_TOKENS,
    BLOCK_SIZE,
    EMBEDDED_LIMIT,
    KEEP,
    LEAST_ATTEND_TOKENS,
    MAX_BATCH_SIZE,
    MAX_KV_SIZE,
    MAX_QUEUE,
    MAX_STALL_MS,
    MIN_QUANTIZE_TOKENS,
    PREFILL_CHUNK,
    RAW_FIRST_TOKENS,
    default_keep,
)
from penstock.config.setting import Setting, Settings, flag_of
from penstock.plurals import counted

WeightsDtype: TypeAlias = Literal["auto", "native", "float32", "packed", "packed-exact"]
ModelSource: TypeAlias = Literal["auto", "mlx-lm", "mlx-vlm"]
MTP = "mtp"
"""Value of `draft_model` for the multi-token head of the model itself."""
COLD_TIERS = ("ssd_cache_dir", "remote_cache")
"""Fields of `EngineSettings` that each enable a cold tier, nearest first."""


class EngineSettings(Settings):
    model_config = ConfigDict(strict=True)

    memory_limit: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Memory for everything, including the weights: 16GB is 16 x 10^9 bytes.",
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
            "memory; 1 disables this.",
            "SHARE",
            unset="0.8 to 0.95, more on larger machines",
            is_local=True,
        ),
    ] = 1.0
    max_kv_size: Annotated[
        int,
        Field(ge=2),
        Setting(
            "Hold the keys and values of at most this many tokens of a sequence. A longer sequence "
            "drops its oldest tokens, except the first --keep-kv-size.",
            "TOKENS",
        ),
    ] = MAX_KV_SIZE
    keep: Annotated[
        int | None,
        Field(ge=0),
        Setting(
            "Number of first tokens of a sequence that are never dropped.",
            "TOKENS",
            unset=f"{KEEP}, less in a small window",
            flag="keep-kv-size",
        ),
    ] = None
    """Number of first tokens never dropped; None means `KEEP`, or half of a smaller window."""
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
            "Process prompts for at most this long between two decode steps, based on the speed "
            "measured at their length; 0 means no limit.",
            "MILLISECONDS",
        ),
    ] = MAX_STALL_MS
    speculative_tokens: Annotated[
        int,
        Field(ge=0, le=16),
        Setting(
            "Propose up to this many tokens per step, from text that followed the same tokens "
            "before, else from --draft-model, and verify them together if that is faster; 0 is "
            "off. With a draft model, the default is 4.",
            "TOKENS",
        ),
    ] = 0
    draft_model: Annotated[
        str | None,
        Setting(
            "Small model with the same tokenizer, or drafter made for the model (DFlash, EAGLE-3), "
            "that proposes tokens for speculative decoding: a folder, a .gguf file or a name; mtp "
            "is the multi-token head in the model's folder.",
            "MODEL",
            unset="none",
        ),
    ] = None
    kernels: Annotated[
        Literal["auto", "off"],
        Setting(
            "Attention kernels for decode steps on a GPU. auto: used if a self-test finds them "
            "correct and fastest; off: MLX's operations only."
        ),
    ] = "auto"
    attend_tokens: Annotated[
        int | None,
        Field(ge=LEAST_ATTEND_TOKENS),
        Setting(
            "Let a decode step attend to at most this many tokens of a sequence per key head. "
            "These are the first, the recent, and the best according to an index of the keys "
            "(docs/remembering.md).",
            "TOKENS",
            unset="all are read",
        ),
    ] = None
    attend_rest: Annotated[
        bool,
        Setting(
            "With --attend-tokens, also read the other tokens at two bits per number, so none is "
            "left out. The index takes twice the memory, and steps take slightly longer."
        ),
    ] = False
    attend_prompt: Annotated[
        int | None,
        Field(ge=LEAST_ATTEND_TOKENS),
        Setting(
            "With --attend-tokens, also let a chunk of a prompt attend to at most this many tokens "
            "in front of it. The end of the prompt reads all.",
            "TOKENS",
            unset="all are read",
        ),
    ] = None
    attend_full_layers: Annotated[
        tuple[int, ...],
        Setting(
            "Layers that attend to all tokens despite --attend-tokens, as comma-separated "
            "numbers; recurrent layers are not counted.",
            "LAYERS",
            unset="none",
        ),
    ] = ()
    active_kv_size: Annotated[
        int | None,
        Field(ge=LEAST_ATTEND_TOKENS),
        Setting(
            "Keep in memory only the keys and values of this many last tokens of a sequence, and a "
            "cache of as many older ones. Steps read other tokens from the cold tier. "
            "Needs --attend-tokens, and --ssd-cache-dir or --remote-cache.",
            "TOKENS",
            unset="all stay in memory",
        ),
    ] = None
    block_size: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Number of tokens per block. Prefixes are shared, matched and evicted in whole blocks.",
            "TOKENS",
            unset=f"{BLOCK_SIZE}, or the number that the codec encodes together",
        ),
    ] = BLOCK_SIZE
    max_queue: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Maximum number of waiting answers; further requests are refused with 429.",
            "NUMBER",
        ),
    ] = MAX_QUEUE
    hot_cache_only: Annotated[
        bool,
        Setting(
            "Keep prefixes in memory only, without a folder, thread or file. Settings of cold "
            "tiers are then errors."
        ),
    ] = False
    ssd_cache_dir: Annotated[
        Path | None,
        Setting(
            "Also keep prefixes in this folder, so that they survive eviction and restarts; it is "
            "created if missing. Its files reveal prompts.",
            "FOLDER",
            unset="none: memory only",
            is_local=True,
        ),
    ] = None
    ssd_cache_limit: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Size limit of --ssd-cache-dir, for all processes that share it: 500MB, 100GB.",
            "BYTES",
            is_local=True,
        ),
    ] = 20_000_000_000
    ssd_write_budget: Annotated[
        int | None,
        Field(ge=0),
        Setting(
            "Write at most this much to --ssd-cache-dir per day, to limit disk wear.",
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
        Setting(
            "Timeout for answers of the remote store. After a timeout, the store is "
            "not used for half a minute.",
            "SECONDS",
        ),
    ] = 1.0
    kv_cache_quantization: Annotated[
        str | None,
        Setting(
            "Store keys and values in fewer bits: 8 (also without a CODEC), 4, k8v4, "
            "kivi5/turbo3.5, ... (docs/codecs.md; penstock bench-kv-cache compares them).",
            "[CODEC]",
            unset="full precision",
        ),
    ] = None
    kv_cache_min_quantize_tokens: Annotated[
        int,
        Field(ge=0),
        Setting(
            "Keep sequences of fewer tokens in full precision, and out of cold tiers; encode "
            "longer ones whole. With --kv-cache-quantize-when active, the first tokens of longer "
            "ones also stay in full precision.",
            "TOKENS",
        ),
    ] = MIN_QUANTIZE_TOKENS
    kv_cache_raw_first_tokens: Annotated[
        int,
        Field(ge=0),
        Setting(
            "Number of first tokens of every sequence that stay in full precision; --keep-kv-size "
            "is used instead if larger.",
            "TOKENS",
        ),
    ] = RAW_FIRST_TOKENS
    kv_cache_skip_layers: Annotated[
        tuple[int, ...],
        Setting(
            "Layers that stay in full precision, as comma-separated numbers; recurrent layers "
            "are not counted.",
            "LAYERS",
            unset="none",
        ),
    ] = ()
    kv_cache_quantize_when: Annotated[
        Literal["active", "at-rest"],
        Setting(
            "When to quantize blocks. at-rest: once no running request reads them; the answer "
            "that computes them has full precision, later ones read codes. active: as soon as "
            "they are complete; answers are the same with or without cache, and prompts are read "
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
    def _attends_one_way(self) -> EngineSettings:
        if self.attend_tokens is None:
            if self.attend_rest:
                raise ValueError(
                    "attend_rest (--attend-rest) says how tokens beside attend_tokens "
                    "(--attend-tokens) are read, which is not set; set both or neither"
                )
            if self.attend_prompt is not None:
                raise ValueError(
                    "attend_prompt (--attend-prompt) needs the index of attend_tokens "
                    "(--attend-tokens), which is not set; set both or neither"
                )
            if self.attend_full_layers:
                raise ValueError(
                    "attend_full_layers (--attend-full-layers) says which layers read more than "
                    "attend_tokens (--attend-tokens), which is not set; set both or neither"
                )
        if self.attend_prompt is not None and self.block_size % ATTEND_GROUP_TOKENS:
            raise ValueError(
                f"attend_prompt (--attend-prompt): block_size {self.block_size} is not a multiple "
                f"of {ATTEND_GROUP_TOKENS}, the positions of a prompt that share a choice; use one"
            )
        return self

    @model_validator(mode="after")
    def _spills_somewhere(self) -> EngineSettings:
        active, attended = self.active_kv_size, self.attend_tokens
        if active is None:
            return self
        name = f"active_kv_size (--active-kv-size) {active}"
        if attended is None or attended > active:
            raise ValueError(
                f"{name}: set attend_tokens (--attend-tokens) to at most as many; a step that "
                "reads all tokens would read all of them from the cold tier"
            )
        if self.attend_prompt is not None and self.attend_prompt > active:
            raise ValueError(
                f"{name}: set attend_prompt (--attend-prompt) {self.attend_prompt} to at most as "
                "many; a chunk's blocks of the cold tier take the same room as a step's"
            )
        if not self.cold_tiers:
            raise ValueError(
                f"{name}: there is no cold tier for the other tokens; set ssd_cache_dir "
                "(--ssd-cache-dir) or remote_cache (--remote-cache)"
            )
        if self.block_size % ATTEND_BLOCK_TOKENS:
            raise ValueError(
                f"{name}: block_size {self.block_size} is not a multiple of "
                f"{ATTEND_BLOCK_TOKENS}, the tokens that are chosen together; use one"
            )
        return self

    @model_validator(mode="after")
    def _keep_leaves_room(self) -> EngineSettings:
        if self.keep is not None and self.keep >= self.max_kv_size:
            raise ValueError(
                f"keep (--keep-kv-size) {self.keep} leaves no room in a window of max_kv_size "
                f"(--max-kv-size) {counted(self.max_kv_size, 'token')}; lower the first or raise "
                "the second"
            )
        return self

    @property
    def cold_tiers(self) -> list[str]:
        return [name for name in COLD_TIERS if getattr(self, name) is not None]

    @property
    def step_tokens(self) -> int:
        """Maximum number of prompt tokens per step: a chunk, or a block if that is longer."""
        return max(self.prefill_chunk, self.block_size)

    @property
    def raw_first_tokens(self) -> int:
        """Number of first tokens of a prompt that are never quantized.

        With `active`, a block's format is chosen before the prompt's length is known, so short
        prompts stay in full precision only if the beginning of every prompt does.
        """
        active = self.kv_cache_quantize_when == "active"
        short = self.kv_cache_min_quantize_tokens if active else 0
        return max(self.kv_cache_raw_first_tokens, self.keep or 0, short)

    @property
    def least_quantized_tokens(self) -> int:
        """Minimum length in tokens of a path that is quantized when no running request reads it."""
        active = self.kv_cache_quantize_when == "active"
        return 0 if active else self.kv_cache_min_quantize_tokens

    @property
    def least_written_tokens(self) -> int:
        """Minimum length of a path to be written to cold tiers, in tokens."""
        quantized = self.kv_cache_quantization is not None
        return max(self.block_size, self.least_quantized_tokens if quantized else 0)

    @property
    def keep_tokens(self) -> int:
        return default_keep(self.max_kv_size) if self.keep is None else self.keep
