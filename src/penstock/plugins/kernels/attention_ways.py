"""Choice of attention implementations for a model, by a self-test on its device."""

from __future__ import annotations

import logging

from penstock.attention.attention_backend import AttentionWays, PlainOperations
from penstock.config import EngineSettings
from penstock.engine.model.runner import Runner
from penstock.engine.settings import kernels_off
from penstock.errors import LedgerFull
from penstock.kv.codecs.names import RAW, parse_scheme
from penstock.ledger import Kind, Ledger
from penstock.plugins.kernels import selftest
from penstock.plugins.kernels.attend import device_kernels
from penstock.plugins.kernels.selftest import WayChoice
from penstock.plugins.kernels.ways import AttentionForm

logger = logging.getLogger(__name__)


def layer_forms(runner: Runner) -> list[AttentionForm]:
    """Return the distinct attention shapes of the layers that read KV in place."""
    if runner.fitness.way != "shared" or runner.layout.compresses:
        return []
    forms = (
        AttentionForm(runner.heads, shape.kv_heads, shape.key_dim, shape.value_dim, shape.dtype)
        for shape in runner.shapes
    )
    return [form for form in dict.fromkeys(forms) if form.heads % form.kv_heads == 0]


def try_ways(
    runner: Runner, rows: int, codec: str | None = None, seconds: float | None = None
) -> WayChoice | None:
    """Test the attention implementations on this device; None if there is only one."""
    seconds = selftest.SECONDS if seconds is None else seconds
    kernels, layers = device_kernels(runner.device), layer_forms(runner)
    if kernels is None or not layers:
        return None
    scheme = None if codec in (None, RAW) else parse_scheme(codec)
    return selftest.choose(layers, kernels, rows=rows, scheme=scheme, seconds=seconds)


def chosen_ways(runner: Runner, limits: EngineSettings, ledger: Ledger) -> AttentionWays:
    if kernels_off(limits) or device_kernels(runner.device) is None:
        return PlainOperations()
    rows = limits.max_batch_size
    try:
        with ledger.reserve(Kind.BUFFERS, selftest.nbytes(layer_forms(runner), rows)):
            codec = limits.kv_cache_quantization
            choice = try_ways(runner, rows, codec, selftest.SECONDS)
    except LedgerFull:
        logger.warning("attention kernels are disabled: not enough memory for their self-test")
        return PlainOperations()
    if choice is None:
        return PlainOperations()
    if choice.why_off is not None:
        logger.warning("attention kernels are disabled: %s", choice.why_off)
    elif choice.unread:
        unread = "; ".join(choice.unread)
        logger.warning("no attention kernel supports %s; plain operations are used there", unread)
    if choice.is_cut_short and choice.why_off is None:
        logger.warning(
            "the self-test of attention kernels did not finish in %g s; decode steps of untested "
            "shapes use plain operations",
            selftest.SECONDS,
        )
    return choice.ways
