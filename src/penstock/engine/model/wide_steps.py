"""Self-test of decode steps with several tokens per row, before speculation is used."""

from __future__ import annotations

import logging

import mlx.core as mx

from penstock.attention.attention_plan import DecodeRow
from penstock.engine.model.model_probe import PROBE, differs
from penstock.engine.model.runner import Runner
from penstock.kv.tails import Tails

logger = logging.getLogger(__name__)


def reads_several(runner: Runner) -> bool:
    """Return whether two rows of three new tokens get the same logits as two prompts.

    A model's own code may assume one token per row; a mismatch is logged.
    """
    if not runner.takes_several:
        return False
    try:
        off = _difference(runner)
    # A boundary, as in `Runner`: a model's own code may raise anything.
    except Exception as error:  # noqa: BLE001
        off = f"{type(error).__name__}: {error}"
    if off:
        logger.warning("speculation is off: the model fails with several tokens per row: %s", off)
    return not off


def _difference(runner: Runner) -> str:
    """Return the deviation of the logits as text; empty if within tolerance."""
    half = len(PROBE) // 2
    tokens = PROBE[:half], PROBE[half:]
    rows = [DecodeRow((), 0, slot, 0) for slot in range(len(tokens))]
    states = [None] * len(rows) if runner.is_recurrent else []
    expected = mx.stack([runner.read(row, (), 0)[0] for row in tokens])
    logits = runner.decode(tokens, rows, Tails(len(rows), half, runner.shapes), states).logits
    dtype = runner.shapes[0].dtype if runner.shapes else logits.dtype
    return differs(logits.astype(mx.float32), expected.astype(mx.float32), dtype)
