"""The engine's state machine with a cache folder.

Nothing that the disk's thread does is left to chance: a rule begins when it has come to rest, or
hangs where it was told to.
"""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blocks_on_disk import size_of
from core_parts import evict_all
from engine_machine import EngineMachine, picks
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from patience import SOON

from penstock.engine.offload import engine_tier as tier_module
from penstock.engine.request import Request
from penstock.tiers.disk import SSDStore
from penstock.tiers.record import FORMAT

PATIENCE_SECONDS = 0.02
"""On the machine's clock, as everything that is decided by time."""
LIMIT_BYTES = 8_000_000 + 150_000
"""Room for some dozens of blocks beside the index."""


class ColdMachine(EngineMachine):
    """The same core with a folder that is damaged, hangs, fails and is reopened."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-"))
        self.go, self.hangs = threading.Event(), threading.Event()
        self.go.set()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(tier_module, "LEAST_PATIENCE_SECONDS", PATIENCE_SECONDS)
        self.patch.setattr(SSDStore, "restore", self.hanging(SSDStore.restore))
        super().__init__()

    def more_settings(self) -> dict[str, Any]:
        return {"ssd_cache_dir": self.folder, "ssd_cache_limit": LIMIT_BYTES}

    def open_core(self) -> None:
        super().open_core()
        # Of such a small model nothing is worth the disk.
        self.core.prefill_rate.prefill_seconds = lambda tokens: 1.0 * tokens  # type: ignore[method-assign]
        self.tiers.read_rate.seconds = lambda nbytes: 1e-9 * nbytes  # type: ignore[method-assign]
        self.tiers.tier._retry_seconds = 0.0
        self.tiers.tier.call(lambda store: None, None).result(SOON)  # it has opened the folder
        self.rest()

    @property
    def tiers(self) -> tier_module.EngineTier:
        assert self.core.tiers is not None
        return self.core.tiers.tiers["disk"]

    def hanging(self, restore: Callable[..., int]) -> Callable[..., int]:
        def hangs(store: SSDStore, *rest: Any) -> int:
            if not self.go.is_set():
                self.hangs.set()
                assert self.go.wait(SOON)
                self.hangs.clear()
            return restore(store, *rest)

        return hangs

    def rest(self) -> None:
        """Wait until the disk's thread is idle or hangs."""
        tier, until = self.tiers.tier, time.monotonic() + SOON
        while (tier.is_busy or tier.is_off or tier._chores is not None) and not self.hangs.is_set():
            assert time.monotonic() < until
            assert tier._thread.is_alive()
            time.sleep(1e-4)
        self.tiers.sweep()

    @property
    def reading_bytes(self) -> int:
        restores = (*self.tiers._restores, *self.tiers._left)
        return sum(restore.buffer.nbytes for restore in restores)

    # ---- what is done to the disk

    @rule(pick=picks, over=st.integers(0, 7))
    def forget_and_ask_again(self, pick: int, over: int) -> None:
        """Evict everything possible, and request a cached prompt again."""
        evict_all(self.core)
        if known := self.texts(""):
            text = known[pick % len(known)][: self.kind.most_prompt - over]
            self.ask(Request(prompt=text[: len(text) - over] or text, max_tokens=6))

    @rule(
        pick=picks,
        how=st.sampled_from(["flip", "signs", "cut", "gone"]),
        seed=st.integers(0, 99),
        asked=st.none() | picks,
    )
    def damage(self, pick: int, how: str, seed: int, asked: int | None) -> None:
        """Damage a file, even one about to be read, and perhaps request it."""
        self._damage(pick, how, seed)
        if asked is not None:
            self.forget_and_ask_again(asked, 0)

    def files(self) -> list[Path]:
        """List the records on disk that are not truncated to nothing."""
        records = (self.folder / FORMAT / "blocks").rglob("*.safetensors")
        return sorted(path for path in records if path.stat().st_size)

    def _damage(self, pick: int, how: str, seed: int) -> None:
        evict_all(self.core)
        self.rest()  # what is evicted may be written, in place of other files
        files = self.files()
        if not files:
            return
        path = files[pick % len(files)]
        raw = bytearray(path.read_bytes())
        bit = random.Random(seed).randrange(8 * len(raw))
        if how == "gone":
            path.unlink()
            return
        if how == "cut":
            del raw[bit // 8 :]
        elif how == "signs":
            for at in range(8 + int.from_bytes(raw[:8], "little") + 3, len(raw), 4):
                raw[at] ^= 0x80
        else:
            raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)

    @rule(
        pick=picks,
        over=st.integers(0, 7),
        times=st.integers(1, 10),
        seconds=st.sampled_from([0.0, PATIENCE_SECONDS / 2]),
    )
    def hang(self, pick: int, over: int, times: int, seconds: float) -> None:
        """Let the disk hang while it is asked for something and some steps are taken, perhaps for
        longer than anybody waits for it."""
        self.go.clear()
        self.forget_and_ask_again(pick, over)
        for _ in range(times):
            self.now += seconds
            self.run_step()
            self.account_is_right()
        self.let_go()

    def let_go(self) -> None:
        self.go.set()
        self.hangs.clear()
        self.rest()

    @rule()
    def open_again(self) -> None:
        """Reopen the engine with the same folder."""
        if not self.open:
            self.close_core()
            self.open_core()

    @rule()
    def fail(self) -> None:
        """Let the folder fail once: the tier is switched off, and on again."""

        def fails(store: SSDStore) -> None:
            raise OSError("a disk's bad day")

        tier, faults = self.tiers.tier, self.tiers.stats().faults
        tier.call(fails, None).result(SOON)
        until = time.monotonic() + SOON
        while tier.stats().faults == faults or tier.stats().off is not None:
            tier.call(lambda store: store.held([b"anything"]), 0).result(SOON)  # makes it try again
            assert time.monotonic() < until
        assert tier.stats().faults == faults + 1
        self.rest()

    # ---- as before, but that the disk is there

    def run_step(self) -> bool:
        self.rest()
        more = super().run_step()
        self.rest()
        return more

    def judge_cached(self, tokens: int, found: int) -> None:
        assert tokens >= found  # and perhaps more from the disk

    @invariant()
    def folder_is_within_its_limit(self) -> None:
        assert size_of(self.folder) <= LIMIT_BYTES
        assert self.tiers.stats().counts.written_blocks >= 0
        assert self.tiers.tier._thread.is_alive()

    def teardown(self) -> None:
        try:
            self.let_go()
            super().teardown()
            store = SSDStore(self.folder, LIMIT_BYTES, fingerprint="nobody's")
            store.reconcile()
            files = self.folder.rglob("*.safetensors")
            assert store.nbytes == sum(path.stat().st_size for path in files)
            store.close()
        finally:
            self.patch.undo()
            shutil.rmtree(self.folder)
