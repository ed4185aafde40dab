"""`penstock cache` on real folders: output, removal, and what is left alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from blocks_on_disk import read
from cache_folders import FILE_BYTES, A, B, chain, file_of, files, fill, flip, held, opened
from run_command import open_terminal

from penstock import Engine, Request
from penstock.cli import main
from penstock.models.loading import load_all
from penstock.recall import MODEL_PATH
from penstock.tiers.disk import Record
from penstock.tiers.record import FORMAT
from penstock.tiers.store import TierCounts

USES = 256
"""Of a block that stays."""

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_user_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_SSD_CACHE_DIR", "PENSTOCK_SSD_CACHE_LIMIT"):
        monkeypatch.delenv(name, raising=False)


def run(capsys: Capture, command: str, folder: Path, *more: str | Path, code: int = 0) -> str:
    """Run a command and return its output."""
    capsys.readouterr()
    given = ["cache", command, "--ssd-cache-dir", str(folder), *map(str, more)]
    got = main(given)
    output, errors = capsys.readouterr()
    assert got == code, (output, errors)
    assert errors == ""
    return output


def ask(capsys: Capture, command: str, folder: Path, *more: str | Path, code: int = 0) -> Any:
    """Run a command and return the JSON object that it prints."""
    (line,) = run(capsys, command, folder, *more, "--json", code=code).splitlines()
    return json.loads(line)


def refused(capsys: Capture, *arguments: str | Path) -> str:
    """Return the one-line error of a refused command."""
    capsys.readouterr()
    assert main(["cache", *map(str, arguments)]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    (line,) = errors.splitlines()
    assert line.startswith("penstock: ")
    return line


def picture(folder: Path) -> dict[str, bytes]:
    """Return all files except the index's, which SQLite writes to even when reading."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith("index.sqlite")
    }


# ---- a folder that is none

COMMANDS = [
    ["ls"],
    ["stats"],
    ["verify"],
    ["verify", "--repair"],
    ["prune", "--to", "1GB"],
    ["clear", "--yes"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_missing_folder_is_refused_and_not_created(
    tmp_path: Path, capsys: Capture, command: list[str]
) -> None:
    assert "--ssd-cache-dir" in refused(capsys, *command)
    none, foreign = tmp_path / "none", tmp_path / "foreign"
    assert "the folder does not exist" in refused(capsys, *command, "--ssd-cache-dir", none)
    assert not none.exists()
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    line = refused(capsys, *command, "--ssd-cache-dir", foreign)
    assert "not a folder of penstock's blocks" in line
    assert [path.name for path in foreign.rglob("*")] == ["notes.txt"]
    line = refused(capsys, *command, "--ssd-cache-dir", foreign / "notes.txt")
    assert "the folder does not exist" in line


def test_folder_is_read_from_environment(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SSD_CACHE_DIR", str(fill(tmp_path / "cache", chain(2))))
    assert main(["cache", "ls", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["blocks"]) == 2


def test_locked_index_gives_one_line_error(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, chain(1))
    monkeypatch.setattr("penstock.tiers.disk.index.BUSY_SECONDS", 0.1)
    other = sqlite3.connect(tmp_path / FORMAT / "index.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert "another process locks the index" in refused(capsys, "ls", "--ssd-cache-dir", tmp_path)
    other.close()


def test_prune_requires_valid_size_or_model(tmp_path: Path, capsys: Capture) -> None:
    folder = fill(tmp_path / "cache", chain(1))
    where = ("--ssd-cache-dir", folder)
    assert "--to and --model" in refused(capsys, "prune", *where)
    assert "--to and --model" in refused(capsys, "prune", *where, "--to", "1", "--model", "a")
    assert "--to 'much'" in refused(capsys, "prune", *where, "--to", "much")
    assert len(files(folder)) == 1


# ---- ls and stats


def test_ls_sorts_blocks_by_value(tmp_path: Path, capsys: Capture) -> None:
    first, second = chain(3), chain(2, seed=1)
    fill(tmp_path, first, second)
    fill(tmp_path, chain(1, model=B), model=B)
    assert held(tmp_path, first) == 3  # three hits
    found = ask(capsys, "ls", tmp_path)
    assert found["folder"] == str(tmp_path)
    blocks = found["blocks"]
    assert len(blocks) == 6
    assert [block["key"] for block in blocks[:3]] == [record.key.hex() for record in first]
    one = blocks[1]
    assert (one["model"], one["depth"], one["hits"], one["uses_since"]) == (A, 1, 1, 0)
    assert (one["parent"], one["nbytes"]) == (first[0].key.hex(), FILE_BYTES)
    assert 0 <= one["age_seconds"] < 60
    assert not one["is_writing"]
    shown = run(capsys, "ls", tmp_path, "--limit", "4")
    assert len(shown.splitlines()) == 6
    assert "2 more blocks of less value" in shown
    assert first[2].key.hex()[:12] in shown
    assert second[0].key.hex()[:12] not in shown
    assert "more blocks" not in run(capsys, "ls", tmp_path)


def test_ls_groups_blocks_by_model(tmp_path: Path, capsys: Capture) -> None:
    fill(tmp_path, chain(1))
    fill(tmp_path, chain(1, seed=1), model=B)
    fill(tmp_path, chain(1, seed=2))
    lines = run(capsys, "ls", tmp_path).splitlines()[1:]
    assert [line.split()[0] for line in lines] == [A[:12], A[:12], B[:12]]


def test_control_characters_in_fingerprint_are_escaped(tmp_path: Path, capsys: Capture) -> None:
    fill(tmp_path, chain(1), model="\x1b[31m[bold]x")
    for command in ("ls", "stats"):
        shown = run(capsys, command, tmp_path)
        assert "\x1b" not in shown
        assert "?[31m[bold]x" in shown


def test_stats_are_shown_per_model_and_in_total(tmp_path: Path, capsys: Capture) -> None:
    fork = chain(3)
    fill(tmp_path, fork, chain(2, seed=1))
    fill(tmp_path, chain(1, model=B), model=B)
    held(tmp_path, fork)
    aside = tmp_path / FORMAT / "aside"
    with opened(tmp_path) as store:
        (aside / f"{'0' * 32}.{store._owner}").write_bytes(b"half")
        (aside / f"{'1' * 32}.1@1.00").write_bytes(b"half")
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / FORMAT / "what.txt").write_text("mine, too")
        (tmp_path / "penstock-block-0" / "deep").mkdir(parents=True)
        (tmp_path / "penstock-block-0" / "deep" / "x").write_bytes(bytes(777))
        found = ask(capsys, "stats", tmp_path)
    a, b = found["models"]
    assert (a["fingerprint"], a["blocks"], a["chains"], a["hits"]) == (A, 5, 2, 3)
    assert (b["fingerprint"], b["blocks"], b["chains"], b["hits"]) == (B, 1, 1, 0)
    size = sum(path.stat().st_size for path in files(tmp_path))
    assert a["nbytes"] + b["nbytes"] == found["total"]["nbytes"] == size
    assert found["written_today_bytes"] == size
    assert (found["writing_files"], found["left_over_files"]) == (1, 1)
    assert (found["other_formats"], found["other_format_bytes"]) == (["penstock-block-0"], 777)
    assert found["foreign"] == 2
    assert found["index_bytes"] > 0
    assert found["disk_free_bytes"] > 0
    shown = run(capsys, "stats", tmp_path)
    assert re.search(r"in all +6 ", shown)
    assert "penstock-block-0 (777 B), left alone" in shown


def test_read_only_commands_change_nothing(tmp_path: Path, capsys: Capture) -> None:
    fill(tmp_path, chain(3))
    aside = tmp_path / FORMAT / "aside" / f"{'1' * 32}.1@1.00"
    aside.write_bytes(b"half")
    (file_of(tmp_path, chain(1)[0]).parent / "x.safetensors").write_bytes(b"no block")
    before, blocks = picture(tmp_path), ask(capsys, "ls", tmp_path)["blocks"]
    for command, code in (("ls", 0), ("stats", 0), ("verify", 1)):
        run(capsys, command, tmp_path, code=code)
    assert picture(tmp_path) == before
    after = ask(capsys, "ls", tmp_path)["blocks"]
    for block in (*blocks, *after):
        del block["age_seconds"]
    assert after == blocks


# ---- verify


def damage_some(folder: Path) -> list[Record]:
    """Damage a folder in every way; return its blocks, of which 2, 3, 5 and 6 are lost."""
    records = chain(8)
    fill(folder, records)
    flip(file_of(folder, records[2]))
    file_of(folder, records[3]).write_bytes(file_of(folder, records[1]).read_bytes())
    file_of(folder, records[5]).unlink()
    whole = file_of(folder, records[6]).read_bytes()
    file_of(folder, records[6]).write_bytes(whole[:-1])
    with sqlite3.connect(folder / FORMAT / "index.sqlite") as db:
        db.create_function("log2", 1, float)
        db.execute("DELETE FROM blocks WHERE key = ?", (records[7].key,))  # its file stays
    file_of(folder, records[0]).with_name(f"{'f' * 32}.safetensors").write_bytes(b"no block")
    (folder / FORMAT / "aside" / f"{'1' * 32}.1@1.00").write_bytes(b"half")
    return records


def test_verify_passes_on_intact_folder(tmp_path: Path, capsys: Capture) -> None:
    fill(tmp_path, chain(5), chain(3, seed=1))
    fill(tmp_path, chain(2, model=B), model=B)
    found = ask(capsys, "verify", tmp_path)
    assert (found["checked_blocks"], found["faults"], found["repaired"]) == (10, [], False)
    assert found["checked_bytes"] == sum(path.stat().st_size for path in files(tmp_path))
    assert run(capsys, "verify", tmp_path).startswith("10 blocks (")


def test_verify_detects_and_repairs_all_kinds_of_damage(tmp_path: Path, capsys: Capture) -> None:
    records = damage_some(tmp_path)
    before = picture(tmp_path)
    found = ask(capsys, "verify", tmp_path, code=1)
    kinds = ("damaged", "missing", "unknown", "left_over", "checked_blocks")
    assert [found[kind] for kind in kinds] == [3, 1, 2, 1, 3]
    assert picture(tmp_path) == before, "without --repair nothing is changed"
    shown = run(capsys, "verify", tmp_path, code=1)
    assert "3 damaged, 1 missing, 2 unknown, 1 left over" in shown
    assert "checksum mismatch" in shown
    assert "--repair" in shown
    found = ask(capsys, "verify", tmp_path, "--repair")
    assert [found[kind] for kind in kinds] == [3, 1, 2, 1, 3]
    found = ask(capsys, "verify", tmp_path)
    assert (found["faults"], found["checked_blocks"]) == ([], 4)
    there = {path.name.removesuffix(".safetensors") for path in files(tmp_path)}
    assert there == {records[i].key.hex() for i in (0, 1, 4, 7)}
    assert not list((tmp_path / FORMAT / "aside").iterdir())
    with opened(tmp_path) as store:
        assert store.nbytes == sum(path.stat().st_size for path in files(tmp_path))
        for i in (2, 3):
            assert store.write(records[i]) == "claimed"
    assert held(tmp_path, records) == 5


def test_verify_removes_damaged_file_missing_from_index(tmp_path: Path, capsys: Capture) -> None:
    (record,) = chain(1)
    fill(tmp_path, chain(1, seed=1))
    path = file_of(tmp_path, record)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"no block")
    (fault,) = ask(capsys, "verify", tmp_path, code=1)["faults"]
    assert (fault["kind"], fault["what"]) == ("unknown", "it is not a block")
    run(capsys, "verify", tmp_path, "--repair")
    assert not path.exists()


@pytest.mark.parametrize("at", [0, 20, 300, FILE_BYTES // 2, FILE_BYTES - 1])
def test_verify_detects_any_flipped_bit(tmp_path: Path, capsys: Capture, at: int) -> None:
    records = chain(2)
    fill(tmp_path, records)
    flip(file_of(tmp_path, records[1]), at)
    assert ask(capsys, "verify", tmp_path, code=1)["damaged"] == 1


@pytest.mark.parametrize("column", ["parent", "depth", "nbytes", "fingerprint"])
def test_verify_detects_index_mismatch(tmp_path: Path, capsys: Capture, column: str) -> None:
    fill(tmp_path, chain(2))
    value = {"parent": b"x" * 16, "fingerprint": "else"}.get(column, 7)
    with sqlite3.connect(tmp_path / FORMAT / "index.sqlite") as db:
        db.execute(f"UPDATE blocks SET {column} = ? WHERE depth = 1", (value,))
    assert ask(capsys, "verify", tmp_path, code=1)["damaged"] == 1


def test_verify_detects_key_not_matching_tokens(tmp_path: Path, capsys: Capture) -> None:
    """The file's checksum is correct."""
    good, other = chain(1)[0], chain(1, seed=1)[0]
    lie = Record(good.key, good.parent, 0, {**good.arrays, "tokens": other.arrays["tokens"]})
    bare = Record(other.key, other.parent, 0, {"0.keys": other.arrays["0.keys"]})
    fill(tmp_path, [lie], [bare])
    found = ask(capsys, "verify", tmp_path, code=1)
    assert sorted(fault["what"] for fault in found["faults"]) == [
        "its key is not that of its tokens",
        "the tokens of the block are missing or invalid",
    ]


@pytest.mark.parametrize("damage", ["noise", "gone", "empty"])
def test_verify_reports_and_rebuilds_damaged_index(
    tmp_path: Path, capsys: Capture, damage: str
) -> None:
    records = chain(5)
    fill(tmp_path, records)
    index = tmp_path / FORMAT / "index.sqlite"
    if damage == "gone":
        index.unlink()
    else:
        index.write_bytes(os.urandom(50_000) if damage == "noise" else b"")
    if damage != "empty":  # which is an index of no blocks
        for command in ("ls", "stats"):
            assert "--repair" in refused(capsys, command, "--ssd-cache-dir", tmp_path)
        found = ask(capsys, "verify", tmp_path, code=1)
        assert "--repair" in found["index"]
        assert "--repair" in run(capsys, "verify", tmp_path, code=1)
        assert index.exists() == (damage == "noise"), "nothing is made without --repair"
    else:
        assert ask(capsys, "verify", tmp_path, code=1)["unknown"] == 5
    run(capsys, "verify", tmp_path, "--repair")
    assert ask(capsys, "verify", tmp_path)["checked_blocks"] == 5
    assert held(tmp_path, records) == 5


def test_verify_draws_progress_bar_only_on_terminal(tmp_path: Path) -> None:
    fill(tmp_path, chain(20))
    ours, theirs = open_terminal()
    command = [sys.executable, "-m", "penstock", "cache", "verify", "--ssd-cache-dir", tmp_path]
    environment = os.environ | {"TERM": "xterm"}
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment)
    os.close(theirs)
    drawn = b""
    with suppress(OSError):
        while more := os.read(ours, 10_000):
            drawn += more
    os.close(ours)
    assert done.returncode == 0
    assert b"verify" in drawn
    assert done.stdout.decode().startswith("20 blocks (")
    done = subprocess.run(command, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


# ---- prune and clear


def test_prune_removes_least_valuable_blocks_first(tmp_path: Path, capsys: Capture) -> None:
    often, seldom = chain(3), chain(4, seed=1)
    fill(tmp_path, often, seldom)
    held(tmp_path, often)
    found = ask(capsys, "prune", tmp_path, "--to", str(5 * FILE_BYTES + 100))
    assert found["blocks"] == 2
    size = sum(path.stat().st_size for path in files(tmp_path))
    assert found["held_bytes"] == size <= 5 * FILE_BYTES + 100
    assert (held(tmp_path, often), held(tmp_path, seldom)) == (3, 2)
    shown = run(capsys, "prune", tmp_path, "--to", "1GB")
    assert shown.startswith("0 blocks removed, 0 B freed")
    assert ask(capsys, "prune", tmp_path, "--to", "0")["blocks"] == 5
    assert files(tmp_path) == []


def test_prune_removes_block_only_below_exact_size(tmp_path: Path, capsys: Capture) -> None:
    fill(tmp_path, chain(4))
    size = sum(path.stat().st_size for path in files(tmp_path))
    assert ask(capsys, "prune", tmp_path, "--to", str(size))["blocks"] == 0
    assert ask(capsys, "prune", tmp_path, "--to", str(size - 1))["blocks"] == 1
    assert held(tmp_path, chain(4)) == 3


def test_large_prune_uses_short_transactions(tmp_path: Path, capsys: Capture) -> None:
    """Other processes wait up to five seconds for the index."""
    fill(tmp_path, chain(1_000))
    assert ask(capsys, "prune", tmp_path, "--to", str(300 * FILE_BYTES))["blocks"] >= 700
    assert len(files(tmp_path)) == held(tmp_path, chain(1_000)) <= 300
    assert ask(capsys, "clear", tmp_path, "--yes")["blocks"] >= 299


def test_prune_of_model_leaves_others(tmp_path: Path, capsys: Capture) -> None:
    mine, theirs = chain(3), chain(2, seed=1, model=B)
    fill(tmp_path, mine)
    fill(tmp_path, theirs, model=B)
    fill(tmp_path, chain(1, seed=2), model=A[:8] + "c")
    where = ("--ssd-cache-dir", tmp_path)
    assert "several fingerprints" in refused(capsys, "prune", *where, "--model", A[:8])
    line = refused(capsys, "prune", *where, "--model", "0")
    assert A[:12] in line
    assert "no fingerprint starts with it" in line
    assert "needs the beginning" in refused(capsys, "prune", *where, "--model", "")
    assert len(files(tmp_path)) == 6
    assert ask(capsys, "prune", tmp_path, "--model", A[:9])["blocks"] == 3
    assert (held(tmp_path, mine), held(tmp_path, theirs, B), len(files(tmp_path))) == (0, 2, 3)


def test_prune_with_empty_model_prefix_is_refused(tmp_path: Path, capsys: Capture) -> None:
    fill(tmp_path, chain(2))
    refused(capsys, "prune", "--ssd-cache-dir", tmp_path, "--model", "")
    assert len(files(tmp_path)) == 2


def test_clear_requires_yes_and_leaves_foreign_files(tmp_path: Path, capsys: Capture) -> None:
    fill(tmp_path, chain(3))
    fill(tmp_path, chain(2, model=B), model=B)
    foreign = [tmp_path / "notes.txt", tmp_path / FORMAT / "notes.txt"]
    foreign.append(tmp_path / "penstock-block-0" / "blocks" / f"{'0' * 32}.safetensors")
    for path in foreign:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("not ours")
    assert "--yes" in refused(capsys, "clear", "--ssd-cache-dir", tmp_path)
    assert len(files(tmp_path)) == 5
    found = ask(capsys, "clear", tmp_path, "--yes")
    assert (found["blocks"], found["held_bytes"]) == (5, 0)
    assert files(tmp_path) == []
    assert all(path.read_text() == "not ours" for path in foreign)


@pytest.mark.parametrize(("answer", "code", "left"), [("n", 1, 2), ("y", 0, 0)])
def test_clear_asks_for_confirmation_on_terminal(
    tmp_path: Path, answer: str, code: int, left: int
) -> None:
    fill(tmp_path, chain(2))
    ours, theirs = open_terminal()
    os.write(ours, f"{answer}\n".encode())
    command = [sys.executable, "-m", "penstock", "cache", "clear", "--ssd-cache-dir", tmp_path]
    done = subprocess.run(command, stdin=theirs, capture_output=True, timeout=60)
    os.close(theirs)
    os.close(ours)
    assert done.returncode == code
    assert b"Remove all 2 blocks" in done.stderr
    assert len(files(tmp_path)) == left


def test_blocks_being_written_are_not_removed(tmp_path: Path, capsys: Capture) -> None:
    records = chain(2)
    fill(tmp_path, records)
    with opened(tmp_path) as store, sqlite3.connect(tmp_path / FORMAT / "index.sqlite") as db:
        query = "UPDATE blocks SET owner = ? WHERE key = ?"
        db.execute(query, (store._owner, records[1].key))
        db.commit()
        assert ask(capsys, "stats", tmp_path)["total"]["writing_blocks"] == 1
        assert "being written" in run(capsys, "ls", tmp_path)
        found = ask(capsys, "prune", tmp_path, "--to", "0")
        assert found["blocks"] == 0, "it follows on the other"
        assert ask(capsys, "verify", tmp_path)["checked_blocks"] == 1
        found = ask(capsys, "clear", tmp_path, "--yes")
        assert (found["blocks"], found["held_bytes"]) == (1, FILE_BYTES)
        assert file_of(tmp_path, records[1]).exists()


# ---- a folder in another place


def test_copied_folder_is_readable_by_other_engine(
    tmp_path: Path, capsys: Capture, reads_all: None
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    written = ask_engine(here)
    assert (written.written_blocks, written.read_blocks) == (3, 0)
    shutil.copytree(here, there)
    assert ask(capsys, "verify", there)["checked_blocks"] == 3
    read = ask_engine(there)
    assert (read.written_blocks, read.read_blocks) == (0, 3)


@pytest.mark.parametrize("command", ["export", "import"])
def test_removed_command_names_replacement(capsys: Capture, command: str) -> None:
    line = refused(capsys, command, "x.tar", "--ssd-cache-dir", "cache")
    assert "copy the folder" in line


def ask_engine(folder: Path) -> TierCounts:
    """Let an engine read a prompt twice, and return the counts of its cold tier.

    The prompt has 15 blocks: three whole records of 320 tokens.
    """
    model = load_all(MODEL_PATH).model
    sizes: dict[str, Any] = {"memory_limit": "200MB", "block_size": 64, "ssd_cache_limit": "50MB"}
    with Engine(model, ssd_cache_dir=folder, **sizes) as engine:
        for _ in range(2):
            list(engine.submit(Request(prompt=[7 + i % 90 for i in range(1_000)], max_tokens=2)))
        until = time.monotonic() + 20
        while time.monotonic() < until:
            ssd = engine.stats().tiers["disk"]
            if ssd.counts.written_blocks + ssd.counts.read_blocks >= 3:
                return ssd.counts
            time.sleep(0.05)
    raise AssertionError(ssd)


# ---- beside a server

SERVER = """
import select, sqlite3, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from penstock.tiers.store import TierCounts
from blocks_on_disk import read
from cache_folders import chain, opened, FILE_BYTES
counts, faults, seed, until = TierCounts(), 0, 100, time.monotonic() + 60
def is_told_to_end():
    assert time.monotonic() < until
    return bool(select.select([sys.stdin], [], [], 0)[0])
while not is_told_to_end():
    try:
        with opened(Path(sys.argv[1]), limit_bytes=8_000_000 + 60 * FILE_BYTES) as store:
            store.counts = counts
            print("open", flush=True)
            while not is_told_to_end():
                seed += 1
                records = chain(4, seed=seed)
                for record in records:
                    assert store.write(record) in ("claimed", "known", "orphan"), seed
                read(store, records)
    except (OSError, sqlite3.Error) as error:  # as the tier does
        print(error, file=sys.stderr)
        faults += 1
print("counts", counts.written_blocks, counts.damaged_blocks, faults)
"""


@contextmanager
def serving(folder: Path) -> Iterator[Callable[[], list[int]]]:
    """Run another process that writes and reads all the time; ended, it tells its counts:
    blocks that were written, that were damaged, and faults of the folder."""
    command = [
        sys.executable,
        "-c",
        SERVER,
        str(folder),
        str(Path(__file__).parents[1] / "support"),
    ]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "open\n"

            def end() -> list[int]:
                output, _ = process.communicate("\n", timeout=60)
                assert process.returncode == 0
                return [int(word) for word in output.partition("counts")[2].split()]

            yield end
        finally:
            process.kill()


def test_cache_commands_work_during_writes_by_other_process(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = fill(tmp_path / "cache", chain(20))
    with serving(folder) as end:
        for _ in range(3):
            assert ask(capsys, "verify", folder)["faults"] == []
            assert ask(capsys, "verify", folder, "--repair")["faults"] == []
            ask(capsys, "ls", folder)
            ask(capsys, "stats", folder)
            ask(capsys, "prune", folder, "--to", str(20 * FILE_BYTES))
            ask(capsys, "clear", folder, "--yes")
        written, damaged, faults = end()
    assert (written > 0, damaged, faults) == (True, 0, 0)
    assert ask(capsys, "verify", folder)["faults"] == []
    with opened(folder) as store:
        assert store.nbytes == sum(path.stat().st_size for path in files(folder))


def test_rebuilt_index_is_used_by_running_process(tmp_path: Path, capsys: Capture) -> None:
    folder = fill(tmp_path / "cache", chain(3))
    with serving(folder) as end:
        (folder / FORMAT / "index.sqlite").unlink()
        run(capsys, "verify", folder, "--repair")
        time.sleep(0.5)
        written, damaged, faults = end()
    assert (written > 0, damaged, faults > 0) == (True, 0, True)
    run(capsys, "verify", folder, "--repair")
    assert ask(capsys, "verify", folder)["faults"] == []
    with opened(folder) as store:
        assert store.nbytes == sum(path.stat().st_size for path in files(folder))


def test_verify_detects_damage_during_writes_by_other_process(
    tmp_path: Path, capsys: Capture
) -> None:
    """Negative control: files that are checked twice are still reported."""
    folder = fill(tmp_path / "cache", chain(3))
    pinned = chain(1, seed=7, model=B)
    with opened(folder, B) as store:
        store.write(pinned[0])
        for _ in range(USES):
            read(store, pinned)
            store.note_uses()
    with serving(folder) as end:
        damaged = file_of(folder, pinned[0])
        flip(damaged)
        found = ask(capsys, "verify", folder, code=1)
        assert {fault["name"].rpartition("/")[2] for fault in found["faults"]} == {damaged.name}
        end()


def test_stats_ignore_unrelated_folders(tmp_path: Path, capsys: Capture) -> None:
    fill(tmp_path, chain(1))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a").write_bytes(b"a" * 1_000)
    assert "none (0 B)" in run(capsys, "stats", tmp_path)
