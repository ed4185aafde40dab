"""Frozen settings with their defaults; every number says its unit; parsed once, at the edge."""

from penstock.config.defaults import (
    BLOCK_SIZE,
    EMBEDDED_LIMIT,
    HOST,
    KEEP,
    MAX_BATCH_SIZE,
    MAX_KV_SIZE,
    MAX_QUEUE,
    MAX_TOKENS,
    MIN_QUANTIZE_TOKENS,
    MLX_LM_MINOR,
    PORT,
    PREFILL_CHUNK,
    RAW_FIRST_TOKENS,
)
from penstock.config.engine_settings import EngineSettings
from penstock.config.fleet_settings import WORTH, FleetSettings, RoutingPolicy
from penstock.config.kv_settings import KVSettings, SamplingSettings, WeightsDtype
from penstock.config.server_settings import LOOPBACK_HOSTS, SAMPLED, ServerSettings
from penstock.config.setting import Setting, Settings, flag_of, in_plain_words, parse, setting_of

__all__ = [
    "BLOCK_SIZE",
    "EMBEDDED_LIMIT",
    "HOST",
    "KEEP",
    "LOOPBACK_HOSTS",
    "MAX_BATCH_SIZE",
    "MAX_KV_SIZE",
    "MAX_QUEUE",
    "MAX_TOKENS",
    "MIN_QUANTIZE_TOKENS",
    "MLX_LM_MINOR",
    "PORT",
    "PREFILL_CHUNK",
    "RAW_FIRST_TOKENS",
    "SAMPLED",
    "WORTH",
    "EngineSettings",
    "FleetSettings",
    "KVSettings",
    "RoutingPolicy",
    "SamplingSettings",
    "ServerSettings",
    "Setting",
    "Settings",
    "WeightsDtype",
    "flag_of",
    "in_plain_words",
    "parse",
    "setting_of",
]
