"""The ways to attend that an engine takes for a model: tried once, on the device it runs on."""

from __future__ import annotations

import logging
import os

from penstock.config import EngineSettings
from penstock.engine.model.runner import Runner
from penstock.errors import LedgerFull
from penstock.kv import backend
from penstock.kv.codecs import parse_scheme
from penstock.kv.codecs.names import RAW
from penstock.kv.kernels import OFF, selftest
from penstock.kv.kernels.attend import device_kernels
from penstock.kv.kernels.selftest import WayChoice
from penstock.kv.kernels.ways import AttentionForm, Ways
from penstock.ledger import Kind, Ledger

logger = logging.getLogger(__name__)


def turned_off(limits: EngineSettings | None = None) -> bool:
    """Tell whether the user turned the kernels off."""
    if limits is not None and "kernels" in limits.model_fields_set:
        return limits.kernels == "off"
    return os.environ.get(OFF) == "off"


def layer_forms(runner: Runner) -> list[AttentionForm]:
    """Return the forms of a model's layers that read keys and values where they lie."""
    if runner.fitness.way != "shared" or runner.layout.compression is not None:
        return []
    forms = (
        AttentionForm(runner.heads, one.kv_heads, one.key_dim, one.value_dim, one.dtype)
        for one in runner.shapes
    )
    return [form for form in dict.fromkeys(forms) if form.heads % form.kv_heads == 0]


def try_ways(runner: Runner, rows: int, codec: str | None, seconds: float) -> WayChoice | None:
    """Compare the ways to attend on this device; None where there is but one.

    Args:
        runner: the model's.
        rows: most sequences of a step.
        codec: name of the codec that keys and values are held in.
        seconds: time for all of it, without compilers.
    """
    kernels, layers = device_kernels(backend.current()), layer_forms(runner)
    if kernels is None or not layers:
        return None
    scheme = None if codec in (None, RAW) else parse_scheme(codec)
    return selftest.choose(layers, kernels, rows=rows, scheme=scheme, seconds=seconds)


def chosen_ways(runner: Runner, limits: EngineSettings, ledger: Ledger) -> Ways | None:
    """Return the ways that an engine takes; None: plain operations everywhere."""
    if turned_off(limits) or device_kernels(backend.current()) is None:
        return None
    rows = limits.max_batch_size
    try:
        with ledger.reserve(Kind.BUFFERS, selftest.nbytes(layer_forms(runner), rows)):
            codec = limits.kv_cache_quantization
            choice = try_ways(runner, rows, codec, selftest.SECONDS)
    except LedgerFull:
        logger.warning("attention kernels are off: no memory for their self-test")
        return None
    if choice is None:
        return None
    if choice.why_off is not None:
        logger.warning("attention kernels are off: %s", choice.why_off)
    elif choice.unread:
        unread = "; ".join(choice.unread)
        logger.warning("no attention kernel reads %s: plain operations do", unread)
    if choice.is_cut_short and choice.why_off is None:
        logger.warning(
            "the self-test of attention had %g s, too few for all of it: plain operations take "
            "the steps that it did not reach",
            selftest.SECONDS,
        )
    return choice.ways
