"""The state machine with spilled KV of running sequences."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from cold_machine import SOON
from engine_machine import Asked
from engine_reference import Kind
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from spill_machine import SpillMachine
from test_engine_machine import examples
from test_machines import causes

from penstock.engine.offload import cold_blocks
from penstock.engine.offload.cold_blocks import ColdBlocks, PairCache, Slots, _Slice
from penstock.engine.offload.engine_tier import EngineTier
from penstock.engine.request import Finish, Request
from penstock.engine.schedule.admission import Admission
from penstock.errors import SpilledLost, StepFailed
from penstock.kv import block_spans
from penstock.kv import columns as col
from penstock.kv.codecs.coded import Coded
from penstock.kv.codecs.spilled import Checksums, HeldPairs, RawBlocks
from penstock.kv.segment import Segment
from penstock.plugins.cpu.choice_loops import Addresses


@pytest.fixture(autouse=True)
def small_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a record hold a block: prompts are too short for records of 320 tokens."""
    monkeypatch.setattr(block_spans, "SPAN_TOKENS", 16)
    monkeypatch.setattr(block_spans, "RECORD_TOKENS", 16)


def test_spilled_blocks_are_read_back_within_limit() -> None:
    run_state_machine_as_test(SpillMachine, settings=examples(5))


# ---- negative controls: each is wrong in one way

HUNT = settings(
    settings.get_profile("default"),
    max_examples=30,  # stops at the first that is noticed
    stateful_step_count=8,
    phases=[Phase.generate],
    print_blob=False,
)
SPILLS = Kind(
    name="spilling",
    family="llama",
    block_size=16,
    prefill_chunk=128,
    max_kv_size=1_024,
    attend_tokens=128,
    active_kv_size=128,
    piece_blocks=5,
    most_prompt=560,
    feed_forward=2_048,
)
PROMPT = tuple(token for piece in (0, 1, 2, 0, 1) for token in SPILLS.pieces[piece])
SPILLED = 192
"""Tokens of it that are spilled, at least, where a machine goes on."""


class SpillsMachine(SpillMachine):
    """An engine that spills, in the middle of an answer."""

    @initialize(how=st.sampled_from([None, "signs", "gone"]))
    def begin(self, how: str | None) -> None:  # type: ignore[override]
        """Open the engine with a spilled prompt, and perhaps lose all its blocks."""
        self.start(SPILLS, None, [])
        self.ask(Request(prompt=PROMPT, max_tokens=30, ignore_eos=True))
        for _ in range(6):
            self.run_step()
            self.tiers.write_all(time.monotonic() + SOON)
            self.rest()
        assert self.spilling is not None and self.spilling.spilled_tokens >= SPILLED
        if how is not None:
            self.spilling.blocks.forget_cached()
            for pick in range(len(self.files())):
                self._damage(0 if how == "gone" else pick, how, 0)

    def judge(self, asked: Asked, finish: Finish) -> None:
        """Check that no answer fails for lost blocks, even if its text is unknown."""
        if isinstance(finish.error, StepFailed) and asked.fault is None:
            assert isinstance(finish.error, tuple(asked.may_fail)), f"failed: {finish.error!r}"
        super().judge(asked, finish)


def skip_checksum_comparison(patch: pytest.MonkeyPatch) -> None:
    """Accepts whatever it reads."""

    class Equal:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: object) -> bool:
            return True

    patch.setattr(cold_blocks, "xxhash", SimpleNamespace(xxh3_64_intdigest=lambda data: Equal()))


def cache_blocks_under_wrong_key(patch: pytest.MonkeyPatch) -> None:
    """Mixes up cached blocks."""
    real = PairCache.keep

    def keep(self: PairCache, slots: Slots, checksums: Checksums, raw: Sequence[RawBlocks]) -> None:
        real(self, slots, checksums[::-1], raw)

    patch.setattr(PairCache, "keep", keep)


def overwrite_blocks_in_use(patch: pytest.MonkeyPatch) -> None:
    """Frees memory of other blocks of the same request."""

    def make_room(self: PairCache, count: int) -> Slots:
        return np.arange(min(count, len(self.room)))

    patch.setattr(PairCache, "make_room", make_room)


def return_wrong_addresses(patch: pytest.MonkeyPatch) -> None:
    """Mixes up the addresses of a layer's blocks."""
    real = HeldPairs.addresses

    def addresses(self: HeldPairs, number: int) -> Addresses:
        right = real(self, number)  # in another order they would give the same
        return right[np.zeros(len(right), np.int64)]

    patch.setattr(HeldPairs, "addresses", addresses)


def ignore_lost_blocks(patch: pytest.MonkeyPatch) -> None:
    """Continues with arbitrary memory in place of a block."""
    real = ColdBlocks._read_from

    def read(
        self: ColdBlocks, tier: EngineTier, by_record: dict[bytes, list[_Slice]]
    ) -> list[_Slice]:
        real(self, tier, by_record)
        return []

    patch.setattr(ColdBlocks, "_read_from", read)


def fail_on_lost_blocks(patch: pytest.MonkeyPatch) -> None:
    """Recomputes nothing."""

    def fail(self: Admission, error: SpilledLost) -> None:
        for sequence in self._scheduler.placed():
            self.fail(sequence, StepFailed("its blocks are lost"))

    patch.setattr(Admission, "compute_again", fail)


def do_not_count_spilled_kv(patch: pytest.MonkeyPatch) -> None:
    """Does not count checksums and locations in the ledger."""

    def kv_nbytes(self: Segment) -> int:
        sides = (side for layer in self.layers for side in layer)
        return col.nbytes(*(side for side in sides if not isinstance(side, Coded)))

    patch.setattr(Segment, "kv_nbytes", property(kv_nbytes))


def do_not_count_places(patch: pytest.MonkeyPatch) -> None:
    """Does not count its list of records in the ledger."""
    patch.setattr(cold_blocks, "RECORD_BYTES", 0)


@pytest.mark.parametrize(
    "broken",
    [
        skip_checksum_comparison,
        cache_blocks_under_wrong_key,
        overwrite_blocks_in_use,
        return_wrong_addresses,
        ignore_lost_blocks,
        fail_on_lost_blocks,
        do_not_count_spilled_kv,
        do_not_count_places,
    ],
)
def test_state_machine_detects_defects(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises((AssertionError, BaseExceptionGroup)) as caught:
        run_state_machine_as_test(SpillsMachine, settings=HUNT)
    assert {type(cause) for cause in causes(caught.value)} <= {AssertionError}
