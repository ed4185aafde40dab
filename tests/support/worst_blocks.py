"""Negative control of a choice: steps that read the blocks wanted least."""

from __future__ import annotations

import pytest

from penstock.attention import devices
from penstock.attention.selection import selection
from penstock.attention.selection.selected_reads import ChoiceReader


def choose_worst_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let NumPy choose, and turn its order round."""
    wanted = selection._wanted
    monkeypatch.setattr(selection, "_wanted", lambda scores: -wanted(scores))
    device = type(devices.current())
    monkeypatch.setattr(device, "choice_reader", lambda self, how, *_: ChoiceReader(how, self))
