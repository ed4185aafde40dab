"""Run the machine with keys and values on the disk that sequences still read."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test
from spill_machine import SpillMachine
from test_engine_machine import examples

from penstock.kv import block_spans


@pytest.fixture(autouse=True)
def small_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a record hold a block: prompts are too short for records of 320 tokens."""
    monkeypatch.setattr(block_spans, "SPAN_TOKENS", 16)
    monkeypatch.setattr(block_spans, "RECORD_TOKENS", 16)


def test_what_is_spilled_is_read_as_it_was_and_the_limit_holds() -> None:
    run_state_machine_as_test(SpillMachine, settings=examples(5))
