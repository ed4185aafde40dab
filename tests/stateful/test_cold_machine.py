"""The engine's state machine with a disk tier, on correct and broken engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from cold_machine import ColdMachine
from engine_reference import KINDS, Kind
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from test_engine_machine import examples
from test_machines import causes

from penstock.engine.offload import conversation_ends
from penstock.engine.offload.engine_tier import EngineTier, Restore
from penstock.kv import block_spans
from penstock.tiers import record


@pytest.fixture(autouse=True)
def small_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a record hold a block: prompts are too short for records of 320 tokens."""
    monkeypatch.setattr(block_spans, "SPAN_TOKENS", 16)
    monkeypatch.setattr(block_spans, "RECORD_TOKENS", 16)


def run(kind: Kind, how: settings) -> None:
    machine = type("Machine", (ColdMachine,), {"kind": kind})
    run_state_machine_as_test(machine, settings=how)


@pytest.mark.parametrize("kind", KINDS, ids=[kind.name for kind in KINDS])
def test_engine_matches_model_with_disk_faults(kind: Kind) -> None:
    run(kind, examples(3))


# ---- negative controls: each is wrong in one way

HUNT = settings(
    settings.get_profile("default"),
    max_examples=300,  # stops at the first that is noticed
    stateful_step_count=30,
    phases=[Phase.generate],
    print_blob=False,
)


def skip_hash_check(patch: pytest.MonkeyPatch) -> None:
    """Skips the hash comparison."""
    patch.setattr(record, "_hash_of", lambda words, arrays: words.get("xxh3", ""))


def read_previous_block(patch: pytest.MonkeyPatch) -> None:
    """Returns the block before the requested one."""
    real = EngineTier.begin

    def begin(self: EngineTier, keys: Sequence[bytes], first: int, own: object) -> list[Restore]:
        return real(self, [*keys[:-1], keys[0]], first, own)  # type: ignore[arg-type]

    patch.setattr(EngineTier, "begin", begin)


@pytest.mark.parametrize("broken", [skip_hash_check, read_previous_block])
def test_state_machine_detects_defects(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    monkeypatch.setattr(conversation_ends, "LINGER_SECONDS", 0.0)  # more lies on the disk
    with pytest.raises((AssertionError, BaseExceptionGroup)) as caught:
        run(KINDS[0], HUNT)
    assert {type(cause) for cause in causes(caught.value)} <= {AssertionError}
