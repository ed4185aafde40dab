"""Settings of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, model_validator

from penstock.config.defaults import (
    ATTEND_BLOCK_TOKENS,
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
)
from penstock.config.setting import Setting, Settings, flag_of

WeightsDtype: TypeAlias = Literal["auto", "native", "float32", "packed", "packed-exact"]
COLD_TIERS = ("ssd_cache_dir", "remote_cache")
"""Fields of `EngineSettings` that name a cold tier each, the nearest first."""


class EngineSettings(Settings):
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
            "First tokens of a sequence that are never dropped.",
            "TOKENS",
            unset=f"{KEEP}, less in a small window",
            flag="keep-kv-size",
        ),
    ] = None
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
            "Read prompts for at most this long between two decode steps, by the speed that was "
            "measured at their length; 0 is no bound.",
            "MILLISECONDS",
        ),
    ] = MAX_STALL_MS
    speculative_tokens: Annotated[
        int,
        Field(ge=0, le=16),
        Setting(
            "Propose up to this many tokens a step, from text that followed the same tokens "
            "before, else from --draft-model, and check them together where that is faster; 0 is "
            "off. With a draft model it is 4 unless it is set.",
            "TOKENS",
        ),
    ] = 0
    draft_model: Annotated[
        str | None,
        Setting(
            "Small model with the same tokenizer whose tokens are proposed, and checked together: "
            "a folder, a .gguf file or a name.",
            "MODEL",
            unset="none",
        ),
    ] = None
    kernels: Annotated[
        Literal["auto", "off"],
        Setting(
            "Attention kernels of decode steps on a GPU. auto: used where a self-test finds them "
            "right and quickest; off: MLX's operations only."
        ),
    ] = "auto"
    attend_tokens: Annotated[
        int | None,
        Field(ge=LEAST_ATTEND_TOKENS),
        Setting(
            "Let a decode step read at most this many tokens of a sequence with each key head. "
            "They are the first, the recent, and the best by an index of the keys "
            "(docs/remembering.md).",
            "TOKENS",
            unset="all are read",
        ),
    ] = None
    attend_rest: Annotated[
        bool,
        Setting(
            "With --attend-tokens, read the other tokens, too, in two bits a number: nothing is "
            "left out. The index takes twice the memory, and a step some more time."
        ),
    ] = False
    attend_full_layers: Annotated[
        tuple[int, ...],
        Setting(
            "Numbers of layers that read all tokens whatever --attend-tokens says, with commas "
            "between; recurrent ones are not counted.",
            "LAYERS",
            unset="none",
        ),
    ] = ()
    active_kv_size: Annotated[
        int | None,
        Field(ge=LEAST_ATTEND_TOKENS),
        Setting(
            "Keep in memory the keys and values of only this many last tokens of a sequence, and a "
            "cache of as many older ones. A step reads other older tokens from the cold tier. "
            "Needs --attend-tokens, and --ssd-cache-dir or --remote-cache.",
            "TOKENS",
            unset="all stay in memory",
        ),
    ] = None
    block_size: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Tokens of a block. Prefixes are shared, looked up and evicted in whole blocks.",
            "TOKENS",
            unset=f"{BLOCK_SIZE}, or as many as the codec takes together",
        ),
    ] = BLOCK_SIZE
    max_queue: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Answers that may wait until others end; further requests are refused with 429.",
            "NUMBER",
        ),
    ] = MAX_QUEUE
    hot_cache_only: Annotated[
        bool,
        Setting(
            "Keep prefixes in memory only: no folder, no thread, no file. A setting of a cold "
            "tier beside it is an error."
        ),
    ] = False
    ssd_cache_dir: Annotated[
        Path | None,
        Setting(
            "Keep prefixes in this folder too, so that they survive eviction and restarts; it is "
            "made if it is not there. Its files reveal prompts.",
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
        Setting(
            "Wait at most this long for an answer of the store. If it takes longer, the store is "
            "not asked again for half a minute.",
            "SECONDS",
        ),
    ] = 1.0
    kv_cache_quantization: Annotated[
        str | None,
        Setting(
            "Hold keys and values in fewer bits: 8 (also without a CODEC), 4, k8v4, "
            "kivi5/turbo3.5, ... (docs/codecs.md; penstock bench-kv-cache compares them).",
            "[CODEC]",
            unset="full precision",
        ),
    ] = None
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
    kv_cache_raw_first_tokens: Annotated[
        int,
        Field(ge=0),
        Setting(
            "First tokens of every sequence that stay in full precision; --keep-kv-size counts "
            "instead where it is larger.",
            "TOKENS",
        ),
    ] = RAW_FIRST_TOKENS
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
    def _attends_one_way(self) -> EngineSettings:
        if self.attend_tokens is None:
            if self.attend_rest:
                raise ValueError(
                    "attend_rest (--attend-rest) says how tokens beside attend_tokens "
                    "(--attend-tokens) are read, which is not set; set both or neither"
                )
            if self.attend_full_layers:
                raise ValueError(
                    "attend_full_layers (--attend-full-layers) says which layers read more than "
                    "attend_tokens (--attend-tokens), which is not set; set both or neither"
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
                f"(--max-kv-size) {self.max_kv_size} tokens; lower the first or raise the second"
            )
        return self

    @property
    def cold_tiers(self) -> list[str]:
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
        """Shortest path of nodes at rest that is quantized, in tokens."""
        active = self.kv_cache_quantize_when == "active"
        return 0 if active else self.kv_cache_min_quantize_tokens

    @property
    def least_written_tokens(self) -> int:
        """Shortest path that is written to cold tiers, in tokens."""
        quantized = self.kv_cache_quantization is not None
        return max(self.block_size, self.least_quantized_tokens if quantized else 0)

    @property
    def keep_tokens(self) -> int:
        return min(KEEP, self.max_kv_size // 2) if self.keep is None else self.keep
