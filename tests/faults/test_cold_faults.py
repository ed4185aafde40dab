"""Faults of cache folder, disk and processes never change text and cost few blocks."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from blocks_on_disk import size_of
from cold_engine import BLOCK, SAID, SOON, files, said, settle, ssd, submit
from cold_setup import (
    BLOCKS,
    PROMPT,
    SMALL_LIMIT,
    ask,
    assert_in_order,
    assert_right,
    family,
    running,
)
from combinations import SOAK
from core_parts import evict_all, hash_prompt
from fault_setup import prompt_of, solo

from penstock.engine.core import Core
from penstock.engine.handle import Handle
from penstock.kv.block_spans import RECORD_TOKENS
from penstock.tiers import record
from penstock.tiers.disk import index
from penstock.tiers.disk.index import Entry, Index
from penstock.tiers.record import FORMAT

SUPPORT = Path(__file__).parents[1] / "support"
WHOLE = BLOCKS * BLOCK
OTHER = prompt_of(60, 1)
KILLS = int(os.environ.get("PENSTOCK_KILLS", "3"))
"""More of them with `make soak`."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder with the conversation."""
    folder = tmp_path_factory.mktemp("written")
    with running(folder) as core:
        assert assert_right(core) == 0
    assert len(files(folder)) == BLOCKS + 1
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """Return a copy of it to damage."""
    return Path(shutil.copytree(written, tmp_path / "cache"))


def keys(core: Core) -> list[str]:
    return [key.hex() for key in hash_prompt(core, PROMPT)]


def path_of(folder: Path, key: str) -> Path:
    return folder / FORMAT / "blocks" / key[:2] / f"{key}.safetensors"


def assert_recovers(core: Core, restored: int = WHOLE) -> None:
    """Check that the tier is used again, and that no text is wrong before."""
    until = time.monotonic() + SOON
    found = -1
    while found < restored or ssd(core).off is not None:
        assert time.monotonic() < until, (found, ssd(core))
        evict_all(core)
        found = assert_right(core)
        time.sleep(0.01)


# ---- files

Damage = Callable[[random.Random, Path, Path], list[Path]]
"""Damages a file, perhaps with another one; returns those that are damaged then."""


def flip(dice: random.Random, path: Path, other: Path) -> list[Path]:
    raw = bytearray(path.read_bytes())
    for bit in dice.sample(range(8 * len(raw)), dice.choice([1, 1, 2, 9])):
        raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)
    return [path]


def flip_header_bit(dice: random.Random, path: Path, other: Path) -> list[Path]:
    raw = bytearray(path.read_bytes())
    size = 8 + int.from_bytes(raw[:8], "little")
    raw[dice.randrange(size)] ^= 1 << dice.randrange(8)
    path.write_bytes(raw)
    return [path]


def cut(dice: random.Random, path: Path, other: Path) -> list[Path]:
    os.truncate(path, dice.randrange(path.stat().st_size))
    return [path]


def lengthen(dice: random.Random, path: Path, other: Path) -> list[Path]:
    with path.open("ab") as file:
        file.write(dice.randbytes(dice.randrange(1, 5_000)))
    return [path]


def swap(dice: random.Random, path: Path, other: Path) -> list[Path]:
    first, second = path.read_bytes(), other.read_bytes()
    path.write_bytes(second)
    other.write_bytes(first)
    return [path, other]


def delete(dice: random.Random, path: Path, other: Path) -> list[Path]:
    path.unlink()
    return [path]


def link_to_another(dice: random.Random, path: Path, other: Path) -> list[Path]:
    path.unlink()
    path.symlink_to(other)
    return [path]


def link_to_nothing(dice: random.Random, path: Path, other: Path) -> list[Path]:
    path.unlink()
    path.symlink_to(path.with_name("nothing"))
    return [path]


def link_to_itself(dice: random.Random, path: Path, other: Path) -> list[Path]:
    path.unlink()
    path.symlink_to(path)
    return [path]


def folder_instead(dice: random.Random, path: Path, other: Path) -> list[Path]:
    path.unlink()
    path.mkdir()
    (path / "notes").write_text("not a block")
    return [path]


def another_version(dice: random.Random, path: Path, other: Path) -> list[Path]:
    raw = path.read_bytes()
    path.write_bytes(raw.replace(FORMAT.encode(), b"penstock-block-0"))
    return [path]


def noise(dice: random.Random, path: Path, other: Path) -> list[Path]:
    path.write_bytes(dice.randbytes(path.stat().st_size))
    return [path]


def nested(dice: random.Random, path: Path, other: Path) -> list[Path]:
    """Deeply nested brackets, which no parser accepts."""
    path.write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000)
    return [path]


DAMAGES: list[Damage] = [
    flip,
    flip,
    flip_header_bit,
    cut,
    lengthen,
    swap,
    delete,
    link_to_another,
    link_to_nothing,
    link_to_itself,
    folder_instead,
    another_version,
    noise,
    nested,
]


@pytest.mark.parametrize("seed", [1, 2] if SOAK else [1])
def test_only_damaged_and_following_blocks_are_recomputed(
    seed: int, folder: Path, patient: None
) -> None:
    with running(folder) as core:
        damage_records(core, seed, folder, PROMPT, 1)
    assert_in_order(folder, 10**9)


@pytest.mark.parametrize("seed", [1, 2] if SOAK else [1])
def test_damaged_multi_block_records_are_recomputed(
    seed: int, tmp_path: Path, patient: None
) -> None:
    """Records have their default size."""
    blocks = RECORD_TOKENS // BLOCK
    asked = prompt_of(3 * RECORD_TOKENS + 10)
    with running(tmp_path, record_tokens=RECORD_TOKENS) as core:
        assert assert_right(core, asked) == 0
    assert len(files(tmp_path)) == 4, "the answer ends a block more"
    with running(tmp_path, record_tokens=RECORD_TOKENS) as core:
        assert assert_right(core, asked) == 3 * RECORD_TOKENS
        damage_records(core, seed, tmp_path, asked, blocks)
    assert_in_order(tmp_path, 10**9)


def damage_records(
    core: Core, seed: int, folder: Path, asked: Sequence[int], record_blocks: int
) -> None:
    """Damage records in every way; each is detected when read, and written again."""
    dice = random.Random(seed)
    damages = [*DAMAGES]
    dice.shuffle(damages)
    names = [key.hex() for key in hash_prompt(core, asked)][record_blocks - 1 :: record_blocks]
    for damage in damages:
        paths = dice.sample([path_of(folder, name) for name in names], 2)
        damaged = damage(dice, *paths)
        until = sorted(names.index(path.name.partition(".")[0]) for path in damaged)
        for records in (*until, len(names)):
            evict_all(core)
            restored = records * record_blocks * BLOCK
            assert assert_right(core, asked) == restored, damage.__name__
        assert (ssd(core).off, ssd(core).faults) == (None, 0), damage.__name__


def test_many_damaged_records_are_recomputed(folder: Path, patient: None) -> None:
    dice = random.Random(3)
    with running(folder) as core:
        names = keys(core)
    for _ in range(3):
        damaged = []
        for path in dice.sample([path_of(folder, name) for name in names[6:]], 8):
            damaged += dice.choice(DAMAGES)(dice, path, path_of(folder, names[5]))
        first = min(names.index(path.name.partition(".")[0]) for path in damaged)
        with running(folder) as core:
            assert assert_right(core) == first * BLOCK
        with running(folder) as core:
            assert_recovers(core)
    assert_in_order(folder, 10**9)


def test_check_detects_flipped_bit_if_hash_is_not_checked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    """Negative control of this file: the text depends on what is read."""
    for path in files(folder):
        raw = bytearray(path.read_bytes())
        for at in range(8 + int.from_bytes(raw[:8], "little") + 3, len(raw), 4):
            raw[at] ^= 0x80  # the sign
        path.write_bytes(raw)
    with monkeypatch.context() as patch:
        patch.setattr(record, "_hash_of", lambda words, arrays: words.get("xxh3", ""))
        with running(folder) as core:
            assert ask(core) != solo(PROMPT, SAID)
            assert core.view.stats().restored_tokens == WHOLE
    with running(folder) as core:
        assert assert_right(core) == 0
        assert ssd(core).counts.damaged_blocks == 1, "nothing is read behind the first"


def test_unrelated_files_in_folder_are_ignored(folder: Path, patient: None) -> None:
    inside = folder / FORMAT
    some = files(folder)[0]
    header = {"format": FORMAT, "key": "00" * 16, "parent": "", "fingerprint": "x"}
    strange = json.dumps({"__metadata__": {**header, "depth": "9" * 40}}).encode()
    size = len(strange).to_bytes(8, "little")
    for path in (folder, inside, inside / "blocks", inside / "aside", some.parent):
        (path / ".DS_Store").write_bytes(b"Bud1")
        (path / "a folder").mkdir()
        (path / "a folder" / "notes.txt").write_text("mine")
        (path / "a link").symlink_to("/dev/null")
        (path / "a loop").symlink_to("a loop")
        (path / f"{some.name}.-7@x").write_text("of no process")
        (path / f"{some.name}.{10**30}@1.00").write_text("of no process")
        (path / f"{'00' * 16}.safetensors").write_bytes(size + strange)
    (inside / "blocks" / "zz").write_text("a file where a folder could be")
    os.mkfifo(some.parent / f"{'ab' * 16}.safetensors")
    with running(folder) as core:
        assert assert_right(core) == WHOLE
        wait_for_chores(core)
        evict_all(core)
        assert assert_right(core) == WHOLE
        assert (ssd(core).off, ssd(core).faults) == (None, 0)
        assert core.tiers is not None and core.tiers.tiers["disk"].tier._thread.is_alive()
    assert (folder / "a folder" / "notes.txt").read_text() == "mine"
    assert (folder / ".DS_Store").exists()


def wait_for_chores(core: Core) -> None:
    """Wait until index and files are reconciled."""
    assert core.tiers is not None
    tier, until = core.tiers.tiers["disk"].tier, time.monotonic() + SOON
    while tier._chores is not None and tier._thread.is_alive():
        assert time.monotonic() < until
        time.sleep(0.005)


# ---- the index


def index_of(folder: Path) -> Path:
    return folder / FORMAT / "index.sqlite"


def scribble(dice: random.Random, path: Path, times: int, length: int) -> None:
    """Write random bytes to random positions of a file."""
    with path.open("r+b") as file:
        for _ in range(times):
            file.seek(dice.randrange(path.stat().st_size))
            file.write(dice.randbytes(length))


@pytest.mark.parametrize("seed", range(8) if SOAK else (1, 2, 3, 5))
def test_damaged_index_is_rebuilt_or_harmless(seed: int, folder: Path, patient: None) -> None:
    dice = random.Random(seed)
    path = index_of(folder)
    if seed < 2:
        os.truncate(path, dice.randrange(path.stat().st_size))
    else:
        scribble(dice, path, *dice.choice([(1, 1), (1, 20), (20, 1), (5, 300)]))
    with running(folder) as core:
        assert_right(core)
        assert_recovers(core)
        wait_for_chores(core)
    assert_in_order(folder, 10**9)


@pytest.mark.parametrize(
    "change",
    [
        "nbytes = 1 << 60",
        "nbytes = -(1 << 60)",
        "nbytes = 'many'",
        "nbytes = x'00ff'",
        "owner = 'nobody'",
        "owner = x'00ff'",
        "owner = ''",
        "used = 'never', worth = 'much'",
        "depth = -5",
        "hits = 1 << 62",
        "fingerprint = x'80'",
        "parent = ''",
    ],
)
def test_nonsensical_index_rows_are_harmless(change: str, folder: Path, patient: None) -> None:
    with sqlite3.connect(index_of(folder)) as db:
        db.execute("PRAGMA ignore_check_constraints = ON")
        with suppress(sqlite3.IntegrityError):  # the table's own types do not let it in
            db.execute(f"UPDATE blocks SET {change} WHERE depth IN (3, 20)")
    db.close()
    with running(folder) as core:
        assert_right(core)
        wait_for_chores(core)
        assert_recovers(core)
    assert_in_order(folder, 10**9)


@pytest.mark.parametrize("total", ["-(1 << 60)", "1 << 60", "'none'", "NULL"])
def test_wrong_size_total_is_corrected_and_limit_holds(total: str, tmp_path: Path) -> None:
    with running(tmp_path, ssd_cache_limit=SMALL_LIMIT) as core:
        assert_right(core)
    with sqlite3.connect(index_of(tmp_path)) as db, suppress(sqlite3.IntegrityError):
        db.execute(f"UPDATE sums SET nbytes = {total}")
    db.close()
    with running(tmp_path, ssd_cache_limit=SMALL_LIMIT) as core:
        wait_for_chores(core)
        for seed in range(4):
            assert_right(core, prompt_of(400, seed))
            assert size_of(tmp_path) <= SMALL_LIMIT
        assert_recovers(core, 0)
        assert len(files(tmp_path)) > 40
    assert_in_order(tmp_path, SMALL_LIMIT)


@pytest.mark.parametrize("seed", range(4 if SOAK else 2))
def test_index_damaged_during_use_is_recovered(seed: int, folder: Path, patient: None) -> None:
    dice = random.Random(seed)
    with running(folder) as core:
        assert assert_right(core) == WHOLE
        scribble(dice, index_of(folder), 20, 300)
        assert_right(core, prompt_of(300, seed))
        assert_recovers(core)
    with running(folder) as core:
        assert_recovers(core)
    assert_in_order(folder, 10**9)


def test_index_removed_during_use_keeps_answers_and_limit(folder: Path, patient: None) -> None:
    """Two processes would have two indexes, each with the whole limit."""
    limit = SMALL_LIMIT
    with running(folder, ssd_cache_limit=limit) as core:
        assert_right(core)
        for path in folder.rglob("index.sqlite*"):
            path.unlink()
        with running(folder, ssd_cache_limit=limit) as other:
            for seed in range(4):
                for each in (core, other):
                    assert_right(each, prompt_of(400, seed + 10 * (each is core)))
                    time.sleep(0.06)
        assert_recovers(core)
        assert size_of(folder) <= limit
    assert_in_order(folder, limit)


def test_index_locked_by_other_process_does_not_block(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = 2.0
    monkeypatch.setattr(index, "BUSY_SECONDS", busy)
    with running(folder) as core:
        assert_recovers(core)
        db = sqlite3.connect(index_of(folder), isolation_level=None)
        db.execute("BEGIN EXCLUSIVE")
        for seed in range(2):
            evict_all(core)
            prompts = [PROMPT, prompt_of(200, seed)]
            handles = [submit(core, prompt) for prompt in prompts]
            assert run(core, *handles) < 0.9 * busy
            assert [said(handle) for handle in handles] == [solo(p, SAID) for p in prompts]
        settle(core)
        assert ssd(core).faults > 0
        db.execute("ROLLBACK")
        db.close()
        assert_recovers(core)
        written = ssd(core).counts.written_blocks
        assert_right(core, prompt_of(200, 7))
        assert ssd(core).counts.written_blocks == written + 12
    assert_in_order(folder, 10**9)


def run(core: Core, *handles: Handle) -> float:
    """Run until all requests ended; return the seconds of the longest step."""
    longest = 0.0
    while not all(handle.ends for handle in handles):
        started = time.monotonic()
        core.step()
        longest = max(longest, time.monotonic() - started)
        core.view.check()
    return longest


# ---- the disk


@contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Let the system refuse writes past a file size."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("nbytes", [0, 5_000, 40_000])
def test_failed_file_writes_do_not_change_answers(nbytes: int, folder: Path, patient: None) -> None:
    with running(folder) as core:
        with file_size_limit(nbytes):
            for seed in range(3):
                evict_all(core)
                assert_right(core)
                assert_right(core, prompt_of(200, seed))
                time.sleep(0.06)
            assert ssd(core).faults > 0 or nbytes > 5_000
        assert_recovers(core)
        assert assert_right(core, prompt_of(200, 5)) == 0
        evict_all(core)
        assert assert_right(core, prompt_of(200, 5)) == 192
    assert_in_order(folder, 10**9)


FULL = """
import os, subprocess, sys
from pathlib import Path
sys.path.append(sys.argv[2])
from cold_setup import *
from cold_engine import SOON
from penstock.engine.schedule import restoring
from penstock.engine.offload import engine_tier as tier_module
tier_module.LEAST_PATIENCE_SECONDS = restoring.ASK_SECONDS = SOON  # others use the machine as well
SSDStore.__init__.__kwdefaults__["floor_bytes"] = 0
import time
folder = Path(sys.argv[1])
def again(restored):
    until = time.monotonic() + SOON
    while True:
        evict_all(core)
        if assert_right(core) >= restored and ssd(core).off is None:
            return
        assert time.monotonic() < until, ssd(core)
        time.sleep(0.05)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", folder], check=True)
with running(folder) as core:
    assert_right(core)
    evict_all(core)
    assert_right(core)
    assert ssd(core).faults > 0
    subprocess.run(["mount", "-o", "remount,size=50m", folder], check=True)
    again(BLOCKS * BLOCK)
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
with running(folder) as core:
    for seed in range(2):
        assert_right(core, prompt_of(200, seed))
        evict_all(core)
        assert_right(core)
        time.sleep(0.06)
    assert ssd(core).off is not None
    subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
    again(BLOCKS * BLOCK)
    assert assert_right(core, prompt_of(200, 9)) == 0
    evict_all(core)
    assert assert_right(core, prompt_of(200, 9)) == 192
assert_in_order(folder, 10**9)
print("done")
"""


def test_full_and_read_only_disks_do_not_change_answers(tmp_path: Path) -> None:
    """A real disk in memory, visible only to this test's process."""
    unshare = ["unshare", "--map-root-user", "--mount"]
    try:
        subprocess.run(
            [*unshare, "mount", "-t", "tmpfs", "tmpfs", tmp_path], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this system lets nobody mount a disk of his own: {error}")
    command = [*unshare, sys.executable, "-c", FULL, tmp_path, SUPPORT]
    assert subprocess.run(command, stdout=-1, timeout=60).stdout == b"done\n"


def test_unreadable_file_pauses_tier_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    """A bad sector: its block is dropped, and everything else is still read."""
    bad = files(folder)[3].stat()
    real = os.preadv

    def preadv(descriptor: int, *rest: Any) -> int:
        found = os.fstat(descriptor)
        if (found.st_ino, found.st_mtime_ns) == (bad.st_ino, bad.st_mtime_ns):
            raise OSError(errno.EIO, "a bad spot")
        return real(descriptor, *rest)

    monkeypatch.setattr(os, "preadv", preadv)
    with running(folder) as core:
        assert_right(core)
        assert ssd(core).faults == 1
        for _ in range(2):
            evict_all(core)
            until = time.monotonic() + SOON
            while ssd(core).off is not None:
                assert core.tiers is not None
                core.tiers.tiers["disk"].held([b"anything"]).result(SOON)
                assert time.monotonic() < until
            assert_right(core)
        assert ssd(core).faults == 1
        assert core.view.stats().restored_tokens > 0
    assert len(files(folder)) >= BLOCKS


@pytest.mark.parametrize("name", ["preadv", "fsync", "open"])
def test_intermittent_disk_errors_do_not_change_answers(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    real = getattr(os, name)
    dice = random.Random(1)
    failing = True

    def fails(*arguments: Any, **more: Any) -> Any:
        if failing and _is_of_the_disk() and dice.random() < 0.1:
            raise OSError(errno.EIO, "Input/output error")
        return real(*arguments, **more)

    monkeypatch.setattr(os, name, fails)
    with running(folder) as core:
        for seed in range(6):
            evict_all(core)
            assert_right(core)
            assert_right(core, prompt_of(200, seed))
            time.sleep(0.06)
        assert ssd(core).faults > 0
        failing = False
        assert_recovers(core)
    assert_in_order(folder, 10**9)


def _is_of_the_disk() -> bool:
    """Return whether this is a thread of the disk tier."""
    return threading.current_thread().name.startswith("penstock-ssd")


def test_folder_that_vanishes_is_used_again_on_return(folder: Path, tmp_path: Path) -> None:
    away = tmp_path / "away"
    with running(folder) as core:
        assert_recovers(core)
        folder.rename(away)
        folder.write_text("a file in its place")
        for seed in range(3):
            evict_all(core)
            assert_right(core)
            assert_right(core, prompt_of(200, seed))
            time.sleep(0.06)
        assert ssd(core).off is not None
        folder.unlink()
        away.rename(folder)
        assert_recovers(core)
        shutil.rmtree(folder)
        assert_recovers(core)  # it is made again, and written again
    assert_in_order(folder, 10**9)


def test_slow_disk_does_not_block_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, waited_in_vain = threading.Event(), []

    def slowly(call: Callable[..., Any]) -> Callable[..., Any]:
        def waits(*arguments: Any) -> Any:
            if _is_of_the_disk() and not goes_on.wait(SOON):
                waited_in_vain.append(call)
            return call(*arguments)

        return waits

    with running(folder) as core:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", slowly(os.preadv))
            patch.setattr(os, "fsync", slowly(os.fsync))
            beside = submit(core, OTHER, max_tokens=150)
            core.step()
            reading = submit(core, PROMPT)
            run(core, beside, reading)
            assert said(beside) == solo(OTHER, 150)
            assert said(reading) == solo(PROMPT, SAID)
            new = submit(core, prompt_of(400, 2))
            run(core, new)
            assert said(new) == solo(prompt_of(400, 2), SAID)
            evict_all(core)  # what has not been copied by now cannot be written
            goes_on.set()
            settle(core)
        assert not waited_in_vain, "steps have waited for the disk"
        assert ssd(core).dropped_blocks > 0
        assert ssd(core).faults == 0
        assert_recovers(core)
    assert_in_order(folder, 10**9)


# ---- processes


def child(folder: Path, seed: int, rounds: int, limit: int) -> subprocess.Popen[str]:
    command = [sys.executable, SUPPORT / "cold_setup.py", folder, *map(str, (seed, rounds, limit))]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)


def first_words(process: subprocess.Popen[str]) -> None:
    """Wait until the process serves."""
    assert process.stdout is not None
    assert process.stdout.readline() == "0\n", process.wait(SOON)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=SOON)
    assert process.returncode == -signal.SIGKILL


def test_killed_processes_leave_valid_cache_folder(tmp_path: Path, patient: None) -> None:
    dice = random.Random()
    for number in range(KILLS):
        process = child(tmp_path, number, 100_000, SMALL_LIMIT)
        first_words(process)
        time.sleep(dice.uniform(0.0, 0.3))
        kill(process)
        assert size_of(tmp_path) <= SMALL_LIMIT
        with running(tmp_path, ssd_cache_limit=SMALL_LIMIT) as core:
            restored = sum(assert_right(core, prompt) for prompt in family()[:6])
            wait_for_chores(core)
            assert ssd(core).counts.damaged_blocks == 0
            assert restored > 0
        assert_in_order(tmp_path, SMALL_LIMIT)


def test_two_processes_share_folder_and_one_is_killed(tmp_path: Path) -> None:
    killed, other = (child(tmp_path, seed, 6 + 10**6 * seed, SMALL_LIMIT) for seed in (1, 0))
    most, done = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.001):  # and let the two have the processor meanwhile
            most = max(most, size_of(tmp_path))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        first_words(killed)
        first_words(other)
        kill(killed)
        assert other.wait(60) == 0
        # Not `communicate`, which passes over what was read along with the first words.
        assert other.stdout is not None
        with other.stdout as told:
            assert "written" in told.read()
    finally:
        killed.kill()
        other.kill()
        done.set()
        watching.join(SOON)
    assert most <= SMALL_LIMIT
    assert_in_order(tmp_path, SMALL_LIMIT)


def test_two_processes_write_no_block_twice(tmp_path: Path) -> None:
    """Both together write exactly the blocks that exist."""
    both = [child(tmp_path, seed, 3, 10**9) for seed in (1, 2)]
    written = [int(process.communicate(timeout=SOON)[0].split()[-1]) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert min(written) > 0
    assert sum(written) == len(files(tmp_path))
    assert_in_order(tmp_path, 10**9)


# ---- the clock

YEAR = 366 * 86_400.0


def test_clock_jump_does_not_change_write_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    now = time.time()
    with running(tmp_path) as core:
        assert_right(core, OTHER)
        each = ssd(core).counts.written_bytes // ssd(core).counts.written_blocks
    shutil.rmtree(tmp_path)
    budget = 10 * each + each // 2
    for jump, blocks in ((0, 10), (30, 10), (-60, 10), (0, 0), (-60, 0), (30, 0)):
        monkeypatch.setattr(time, "time", lambda jump=jump: now + jump * YEAR)
        with running(tmp_path, ssd_write_budget=budget) as core:
            assert_right(core, prompt_of(400, jump + blocks))
            assert ssd(core).counts.written_blocks == blocks, f"{jump} years from now"
    assert_in_order(tmp_path, 10**9)


def test_eviction_order_is_independent_of_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient: None
) -> None:
    now = time.time()
    first, second, third = (prompt_of(400, seed) for seed in range(3))
    with running(tmp_path, ssd_cache_limit=SMALL_LIMIT) as core:
        for prompt, jump in ((first, 50), (second, 0), (first, -50), (third, -80)):
            monkeypatch.setattr(time, "time", lambda jump=jump: now + jump * YEAR)
            evict_all(core)
            assert_right(core, prompt)
        evict_all(core)
        assert assert_right(core, first) == 399, "it was used after the second"
        evict_all(core)
        assert assert_right(core, second) < 399


def test_live_writer_is_recognized_after_clock_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The system reports process start times by its current clock."""
    me = index.new_writer()
    process = index.this_process()
    if sys.platform == "linux":
        boot = psutil.boot_time()
        monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot + 3_600)
    assert index.this_process() == process
    assert index.is_alive(me)
    index.end_writer(me)
    assert not index.is_alive(me)


# ---- the start


def test_index_of_20_000_blocks_opens_fast(tmp_path: Path) -> None:
    blocks = 20_000
    with closing(Index(tmp_path / "index.sqlite")) as made:
        made.adopt(
            Entry(number.to_bytes(16), "a model", number.to_bytes(16), 0, 1, 0, 0, 0.0, None)
            for number in range(blocks)
        )
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        with closing(Index(tmp_path / "index.sqlite")) as opened:
            seconds.append(time.perf_counter() - started)
            assert len(opened) == blocks
    assert min(seconds) < 0.5, "5 ms are usual, and 25 for five times as many"
