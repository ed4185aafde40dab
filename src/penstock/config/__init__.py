"""Immutable settings and their defaults, validated once, where they enter the program."""

from penstock.config.api_keys import ApiKey, digest_of, read_keys
from penstock.config.defaults import (
    BLOCK_SIZE,
    EMBEDDED_LIMIT,
    HOST,
    KEEP,
    KERNELS_VARIABLE,
    MAX_BATCH_SIZE,
    MAX_KV_SIZE,
    MAX_QUEUE,
    MAX_TOKENS,
    MIN_QUANTIZE_TOKENS,
    MLX_LM_MINOR,
    PORT,
    PREFILL_CHUNK,
    RAW_FIRST_TOKENS,
    default_keep,
)
from penstock.config.engine_settings import MTP, EngineSettings, ModelSource, WeightsDtype
from penstock.config.fleet_settings import WORTH, FleetSettings, RoutingPolicy
from penstock.config.sampling_settings import SamplingSettings
from penstock.config.server_settings import LOOPBACK_HOSTS, NOTICES, SAMPLED, ServerSettings
from penstock.config.setting import Setting, Settings, flag_of, in_plain_words, parse, setting_of

__all__ = [
    "BLOCK_SIZE",
    "EMBEDDED_LIMIT",
    "HOST",
    "KEEP",
    "KERNELS_VARIABLE",
    "LOOPBACK_HOSTS",
    "MAX_BATCH_SIZE",
    "MAX_KV_SIZE",
    "MAX_QUEUE",
    "MAX_TOKENS",
    "MIN_QUANTIZE_TOKENS",
    "MLX_LM_MINOR",
    "MTP",
    "NOTICES",
    "PORT",
    "PREFILL_CHUNK",
    "RAW_FIRST_TOKENS",
    "SAMPLED",
    "WORTH",
    "ApiKey",
    "EngineSettings",
    "FleetSettings",
    "ModelSource",
    "RoutingPolicy",
    "SamplingSettings",
    "ServerSettings",
    "Setting",
    "Settings",
    "WeightsDtype",
    "default_keep",
    "digest_of",
    "flag_of",
    "in_plain_words",
    "parse",
    "read_keys",
    "setting_of",
]
