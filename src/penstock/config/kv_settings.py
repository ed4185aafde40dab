"""Settings of key/value caches, and of sampling with them in one process."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, model_validator

from penstock.config.defaults import (
    KEEP,
    MAX_KV_SIZE,
    MAX_TOKENS,
    MIN_QUANTIZE_TOKENS,
    RAW_FIRST_TOKENS,
    TEMPERATURE,
)
from penstock.config.setting import Setting, Settings

WeightsDtype: TypeAlias = Literal["auto", "native", "float32"]
"""Numbers of a model's weights once it is loaded; see `--weights-dtype`."""
MaxKVSize: TypeAlias = Annotated[
    int,
    Field(ge=2),
    Setting(
        "Hold the keys and values of at most this many tokens of a sequence. A longer sequence "
        "drops its oldest tokens, except the first --keep-kv-size.",
        "TOKENS",
    ),
]
KeepKVSize: TypeAlias = Annotated[
    int | None,
    Field(ge=0),
    Setting(
        "First tokens of a sequence that are never dropped.",
        "TOKENS",
        unset=f"{KEEP}, less in a small window",
        flag="keep-kv-size",
    ),
]
KVCacheQuantization: TypeAlias = Annotated[
    str | None,
    Setting(
        "Hold keys and values in fewer bits: 8 (also without a CODEC), 4, k8v4, "
        "kivi5/turbo3.5, ... (docs/codecs.md; penstock bench-kv-cache compares them).",
        "[CODEC]",
        unset="full precision",
    ),
]

RawFirstTokens: TypeAlias = Annotated[
    int,
    Field(ge=0),
    Setting(
        "First tokens of every sequence that stay in full precision; --keep-kv-size counts "
        "instead where it is larger.",
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
    ] = TEMPERATURE
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
