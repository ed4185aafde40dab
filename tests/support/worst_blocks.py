"""Negative control of block selection: steps that read the worst blocks."""

from __future__ import annotations

import pytest

from penstock.attention import devices
from penstock.attention.selection import block_choice
from penstock.attention.selection.selected_reads import ChoiceReader


def choose_worst_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select by MLX's operations in reversed order."""
    lacks = block_choice._lacks
    monkeypatch.setattr(block_choice, "_lacks", lambda scores: -lacks(scores))
    device = type(devices.current())
    monkeypatch.setattr(
        device, "choice_reader", lambda self, how, *_: ChoiceReader(how, self, self.facts)
    )
