"""Validation of engine settings, their adaptation to a model, and the fingerprint of KV."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, get_args

import mlx.core as mx

from penstock.attention import devices
from penstock.config import EngineSettings, parse, setting_of
from penstock.config.defaults import DRAFT_TOKENS, KERNELS_VARIABLE
from penstock.engine.calibration import Calibration
from penstock.engine.model.runner import Runner
from penstock.engine.model.runner_figures import figures_of
from penstock.engine.model.wide_steps import reads_several
from penstock.engine.ranks.process_group import ProcessGroup
from penstock.engine.schedule.costs import holds_all_scores
from penstock.engine.schedule.sequence import WHOLE_CHUNK
from penstock.errors import SettingError
from penstock.kv.codecs.names import RAW
from penstock.kv.codecs.spilled import BLOCK_TOKENS
from penstock.kv.quantization import QuantizationRule
from penstock.memory import parse_bytes
from penstock.models import weight_packer
from penstock.models.fingerprint import with_settings

logger = logging.getLogger(__name__)

LONG_CHUNK = 2_048
"""Tokens of a long prefill chunk on a GPU. Each chunk concatenates the segments of every layer
again, so a quarter of the chunks copies a quarter of the bytes."""
SPILLED_CHUNK = 1_024
"""Tokens of a prefill chunk if `active_kv_size` is at least as large: each chunk reads all
spilled KV again."""
LONG_CHUNK_ROOM = 8 * 10**9
"""Minimum bytes left by the weights for long chunks; their buffers then take a small part."""


def checked(settings: dict[str, Any], *, drafts: bool = False) -> EngineSettings:
    """Validate an engine's settings and fill in the defaults of this machine.

    Args:
        settings: settings by name; None means not set.
        drafts: whether there is a draft model, which sets a default for `speculative_tokens`.

    Raises:
        SettingError: a value is out of range, or a name is unknown.
    """
    values = {name: _typed(name, value) for name, value in settings.items() if value is not None}
    if devices.current().facts.own_memory:
        values.setdefault("memory_threshold", 1.0)
    if not {"memory_limit", "memory_threshold"} <= set(values):
        machine = devices.machine_memory()
        values.setdefault("memory_limit", machine.default_limit_bytes)
        values.setdefault("memory_threshold", machine.default_threshold)
    if drafts and not values.get("speculative_tokens"):
        values["speculative_tokens"] = DRAFT_TOKENS
    return parse(EngineSettings, flags=False, **values)


def _typed(name: str, value: Any) -> Any:
    """Convert a string to the setting's size or path; return other values unchanged."""
    field = EngineSettings.model_fields.get(name)
    if field is None or not isinstance(value, str):
        return value
    if setting_of(EngineSettings, name).unit == "BYTES":
        return parse_bytes(value)
    return Path(value).expanduser() if Path in get_args(field.annotation) else value


def _takes_long_chunks(runner: Runner, room_bytes: int) -> bool:
    """Return whether a long chunk is faster on this device and takes little more memory."""
    fuses = runner.device.facts.fuses_attention and not holds_all_scores(
        figures_of(runner), runner.device.memory
    )
    return fuses and room_bytes >= LONG_CHUNK_ROOM


def fitting(
    limits: EngineSettings, runner: Runner, room_bytes: int, ranks: int = 1
) -> EngineSettings:
    """Adapt the settings to the model and the number of ranks.

    Args:
        room_bytes: bytes of the memory limit left by the weights, equal on all ranks.

    Raises:
        SettingError: the model or the ranks do not support a setting.
    """
    if runner.divided and limits.kv_cache_skip_layers:
        raise SettingError(
            "kv_cache_skip_layers does not work with whole layers for each rank, which would "
            "not hold the same; leave it out, or divide the model by heads"
        )
    if runner.fitness.whole:
        limits = limits.model_copy(update={"prefill_chunk": WHOLE_CHUNK})
    elif "prefill_chunk" not in limits.model_fields_set:
        if _takes_long_chunks(runner, room_bytes):
            limits = limits.model_copy(update={"prefill_chunk": LONG_CHUNK})
        elif (limits.active_kv_size or 0) >= SPILLED_CHUNK:
            limits = limits.model_copy(update={"prefill_chunk": SPILLED_CHUNK})
    # Ranks would measure different times.
    # What a step with several tokens expands must fit into the scores of a reserved chunk. Such a
    # step reads all latents, and chooses none.
    expands = limits.prefill_chunk < runner.expanded_numbers or (
        not runner.fitness.several and limits.attend_tokens is not None
    )
    if limits.speculative_tokens and (ranks > 1 or expands or not reads_several(runner)):
        limits = limits.model_copy(update={"speculative_tokens": 0})
    _check_attends(limits, runner)
    _check_spills(limits, runner, ranks)
    compression = runner.layout.compression
    if "block_size" not in limits.model_fields_set:
        size = QuantizationRule.block_size(limits.kv_cache_quantization, compression.every)
        limits = limits.model_copy(update={"block_size": size})
    if not runner.layout.compresses:
        return limits
    if limits.block_size % compression.every:
        raise SettingError(
            f"block_size {limits.block_size}: the model's layers make one of {compression.every} "
            f"tokens; use a multiple of it"
        )
    if limits.kv_cache_quantization is not None:
        raise SettingError(
            "kv_cache_quantization: the model's layers compress what they keep by themselves"
        )
    return limits


def _check_attends(limits: EngineSettings, runner: Runner) -> None:
    """Raise SettingError if decode steps of the model cannot select tokens (`attend_tokens`)."""
    if limits.attend_tokens is None:
        return
    if runner.fitness.indexed:
        raise SettingError(
            "attend_tokens (--attend-tokens) does not work with this model, which chooses by an "
            "index of its own; leave it out"
        )
    if limits.attend_prompt is not None and runner.fitness.way == "latent":
        raise SettingError(
            "attend_prompt (--attend-prompt) does not work with this model, whose prompts read "
            "expanded latents; leave it out"
        )
    if runner.fitness.way == "joined":
        raise SettingError(
            f"attend_tokens (--attend-tokens) does not work with this model: {runner.fitness.why}, "
            f"so it reads contiguous keys and values; leave it out"
        )
    if runner.divided and limits.attend_full_layers:
        raise SettingError(
            "attend_full_layers does not work with whole layers for each rank, which would count "
            "them anew; leave it out, or divide the model by heads"
        )
    layers = runner.selectable_layers
    if unknown := sorted(set(limits.attend_full_layers) - layers):
        raise SettingError(
            f"attend_full_layers {unknown}: the layers that read all tokens are {sorted(layers)}, "
            f"counted without recurrent ones"
        )


def _check_spills(limits: EngineSettings, runner: Runner, ranks: int) -> None:
    """Raise SettingError if the KV of the model cannot be spilled (`active_kv_size`)."""
    if limits.active_kv_size is None:
        return
    name = f"active_kv_size (--active-kv-size) {limits.active_kv_size}"
    if runner.fitness.way == "latent":
        raise SettingError(
            f"{name} does not work with this model, whose prompts read latents from memory; leave "
            f"it out"
        )
    if ranks > 1:
        raise SettingError(
            f"{name} does not work with {ranks} ranks, which would wait for {ranks} disks at "
            f"different times; leave it out, or run the model on one machine"
        )
    if limits.kv_cache_quantization is not None:
        _check_rests(limits, name)
    if runner.fitness.whole or not runner.selectable_layers - set(limits.attend_full_layers):
        raise SettingError(
            f"{name}: this model has no layer that selects what it reads and shares its blocks; "
            f"leave it out"
        )


def _check_rests(limits: EngineSettings, name: str) -> None:
    """Raise SettingError if a codec cannot encode blocks restored from a cold tier."""
    if limits.kv_cache_quantize_when == "active":
        raise SettingError(
            f"{name} does not work with kv_cache_quantize_when (--kv-cache-quantize-when) active: "
            f"the cold tier has blocks as they were computed; use at-rest"
        )
    codec = limits.kv_cache_quantization
    rule = QuantizationRule.of(codec, block_size=limits.block_size, first_tokens=0)
    together = [part for part in rule.scheme.codecs if part.span > 1]
    if together:
        raise SettingError(
            f"{name} does not work with kv_cache_quantization (--kv-cache-quantization) {codec}: "
            f"{together[0].name} encodes {together[0].span} tokens together, and a step reads "
            f"{BLOCK_TOKENS} of them; use affine, rot or turbo codecs"
        )


def identity(
    limits: EngineSettings,
    runner: Runner,
    group: ProcessGroup,
    *,
    fingerprint: str,
    calibration: Calibration,
) -> tuple[QuantizationRule, str]:
    if limits.cold_tiers and not fingerprint:
        logger.info("hashing the weights to identify this model's blocks in the cold tiers")
        fingerprint = calibration.fingerprint
    settings: dict[str, object] = {
        "block_size": limits.block_size,  # keys and records name whole blocks
        "keep": limits.keep_tokens,
        "window": limits.max_kv_size,
    }
    if runner.kv_dtype is not None:
        settings["kv"] = str(runner.kv_dtype)
    if group.size > 1:
        settings["part"] = f"{group.rank} of {group.size}{runner.divided}"
    if limits.attend_tokens is not None:
        # The keys and values of a token depend on the tokens attended to.
        rest = ":rest" if limits.attend_rest else ""
        prompt = f":prompt {limits.attend_prompt}" if limits.attend_prompt else ""
        settings["attend"] = f"{limits.attend_tokens}:{limits.attend_full_layers}{rest}{prompt}"
    rule = QuantizationRule.of(
        limits.kv_cache_quantization,
        block_size=limits.block_size,
        first_tokens=limits.raw_first_tokens,
        skip_layers=limits.kv_cache_skip_layers,
        least_tokens=limits.least_quantized_tokens,
    )
    if not rule.is_raw:
        logger.info("measuring the scales of the keys for codec %s", limits.kv_cache_quantization)
        rule = rule.scaled(calibration.key_scales)
        settings["codec"] = f"{rule.identity}:{limits.kv_cache_quantize_when}"
        if limits.active_kv_size is not None:
            settings["records"] = RAW
    return rule, with_settings(fingerprint, **settings)


def kv_dtype(model: Any, limits: EngineSettings) -> mx.Dtype | None:
    """Return the dtype in which a model's KV is stored; None for the activations' dtype.

    Quantized and spilled KV are made from the activations.
    """
    as_computed = limits.kv_cache_quantization, limits.active_kv_size
    return weight_packer.kv_dtype(model) if as_computed == (None, None) else None


def kernels_off(limits: EngineSettings | None = None) -> bool:
    """Return whether the user disabled kernels and compiled loops."""
    if limits is not None and "kernels" in limits.model_fields_set:
        return limits.kernels == "off"
    return os.environ.get(KERNELS_VARIABLE) == "off"
