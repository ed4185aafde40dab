"""Self-test of decode steps with several tokens per row, before speculation is used."""

from __future__ import annotations

import logging

import mlx.core as mx

from penstock.attention.attention_plan import DecodeRow
from penstock.engine.model.model_probe import PROBE, differs
from penstock.engine.model.runner import Runner
from penstock.kv.states import States, arrays
from penstock.kv.tails import Tails

logger = logging.getLogger(__name__)
PROBE_WIDTH = len(PROBE) // 2
"""Tokens of each row of the test."""


def reads_several(runner: Runner) -> bool:
    """Return whether the model supports decode steps with several tokens per row.

    Compares the logits of two rows of three tokens with those of prompts. A model's own code may
    assume one token per row; a mismatch is logged.
    """
    if not runner.takes_several:
        return False
    try:
        off = _difference(runner)
    # The model's code may raise anything.
    except Exception as error:  # noqa: BLE001
        off = f"{type(error).__name__}: {error}"
    if off:
        logger.warning("speculation is off: the model fails with several tokens per row: %s", off)
    return not off


def skips_padding(runner: Runner) -> bool:
    """Return whether recurrent states leave out tokens after the lengths of rows."""
    first, second = PROBE[:PROBE_WIDTH], PROBE[PROBE_WIDTH:]
    rows = [DecodeRow((), 0, slot, 0) for slot in range(2)]

    def states(tokens: list[tuple[int, ...]], lengths: list[int] | None) -> list[States]:
        tails = Tails(2, PROBE_WIDTH, runner.shapes)
        output = runner.decode(tokens, rows, tails, [None] * 2, lengths)
        return [state.owned() for state in output.recurrent_states]

    try:
        padded = states([first, second], [1, PROBE_WIDTH])
        expected = states([first[:1], second[:1]], None)[0], states([first, second], None)[1]
    # A boundary, as above.
    except Exception:
        logger.debug("rejected rows of other lengths are computed apart", exc_info=True)
        return False
    pairs = zip(padded, expected, strict=True)
    return all(_are_close(a, b) for row in pairs for a, b in zip(*map(arrays, row), strict=True))


def _are_close(actual: mx.array, expected: mx.array) -> bool:
    off = differs(actual.astype(mx.float32), expected.astype(mx.float32), actual.dtype)
    return actual.shape == expected.shape and not off


def _difference(runner: Runner) -> str:
    """Return the deviation of the logits as text; empty if within tolerance."""
    tokens = PROBE[:PROBE_WIDTH], PROBE[PROBE_WIDTH:]
    rows = [DecodeRow((), 0, slot, 0) for slot in range(len(tokens))]
    states = [None] * len(rows) if runner.is_recurrent else []
    expected = mx.stack([runner.read(row, (), 0)[0] for row in tokens])
    logits = runner.decode(
        tokens, rows, Tails(len(rows), PROBE_WIDTH, runner.shapes), states
    ).logits
    dtype = runner.shapes[0].dtype if runner.shapes else logits.dtype
    return differs(logits.astype(mx.float32), expected.astype(mx.float32), dtype)
