"""Trial of a decode step of several tokens a row, before an engine speculates with a model."""

from __future__ import annotations

import logging

import mlx.core as mx

from penstock.attention.attention_plan import DecodeRow
from penstock.engine.model.model_probe import PROBE, differs
from penstock.engine.model.runner import Runner
from penstock.kv.tails import Tails

logger = logging.getLogger(__name__)


def reads_several(runner: Runner) -> bool:
    """Tell whether two rows of three new tokens have the logits of two prompts.

    A model's own code may be made for one token a row; a wrong result is logged.
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
    """Return by how much the logits differ, in words; empty if they are right."""
    half = len(PROBE) // 2
    tokens = PROBE[:half], PROBE[half:]
    rows = [DecodeRow((), 0, slot, 0) for slot in range(len(tokens))]
    states = [None] * len(rows) if runner.is_recurrent else []
    expected = mx.stack([runner.read(row, (), 0)[0] for row in tokens])
    logits = runner.decode(tokens, rows, Tails(len(rows), half, runner.shapes), states).logits
    dtype = runner.shapes[0].dtype if runner.shapes else logits.dtype
    return differs(logits.astype(mx.float32), expected.astype(mx.float32), dtype)
