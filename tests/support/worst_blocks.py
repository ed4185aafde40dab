"""Negative control of a choice: steps that read the blocks wanted least."""

from __future__ import annotations

import pytest

from penstock.kv import selection
from penstock.kv.selection import Selection


def choose_worst_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let NumPy choose, and turn its order round."""
    wanted = selection._wanted
    monkeypatch.setattr(selection, "_wanted", lambda scores: -wanted(scores))
    monkeypatch.setattr(Selection, "loops", lambda *_: None)
