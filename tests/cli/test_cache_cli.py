"""`penstock cache` on real folders: what it tells, what it removes, and what it leaves alone."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import sqlite3
import stat
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks_on_disk import read

from penstock import Engine, Request
from penstock.cli import main
from penstock.models.mlx_lm import load_all
from penstock.prefix.block_hashes import hash_blocks, root_hash
from penstock.recall import MODEL_PATH
from penstock.tiers.disk import HostArray, Record, SSDStore
from penstock.tiers.disk.archive import import_blocks
from penstock.tiers.record import FORMAT, encode
from penstock.tiers.store import TierCounts

A, B = "aaaa" * 8, "bbbb" * 8
USES = 256
"""Of a block that stays."""
BLOCK = 4
ROOM_BYTES = 100_000_000

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_SSD_CACHE_DIR", "PENSTOCK_SSD_CACHE_LIMIT"):
        monkeypatch.delenv(name, raising=False)


def numbers(seed: int, count: int = 500) -> HostArray:
    raw = np.random.default_rng(seed).bytes(4 * count)
    return HostArray("float32", (1, 1, count, 1), np.frombuffer(raw, np.uint8))


def chain(blocks: int, seed: int = 0, model: str = A) -> list[Record]:
    """Return the blocks of a prompt as the engine makes them: with their tokens."""
    tokens = np.random.default_rng(seed).integers(0, 1_000, blocks * BLOCK).astype(np.uint32)
    root = root_hash(model)
    keys = hash_blocks(tokens, BLOCK, root)
    return [
        Record(
            key,
            ([root, *keys])[i],
            i,
            {
                "tokens": HostArray(
                    "uint32",
                    (BLOCK,),
                    np.frombuffer(tokens[i * BLOCK : (i + 1) * BLOCK].tobytes(), np.uint8),
                ),
                "0.keys": numbers(1_000 * seed + i),
            },
        )
        for i, key in enumerate(keys)
    ]


FILE_BYTES = len(encode(chain(1)[0], A))


@contextmanager
def opened(
    folder: Path, model: str = A, limit_bytes: int = ROOM_BYTES, **more: Any
) -> Iterator[SSDStore]:
    store = SSDStore(folder, limit_bytes, fingerprint=model, floor_bytes=0, **more)
    try:
        yield store
    finally:
        store.close()


def fill(folder: Path, *chains: list[Record], model: str = A) -> Path:
    with opened(folder, model) as store:
        for records in chains:
            assert [store.write(record) for record in records] == ["claimed"] * len(records)
    return folder


def held(folder: Path, records: list[Record], model: str = A) -> int:
    """Return how many blocks of a chain a server could read."""
    with opened(folder, model) as store:
        return len(read(store, records))


def file_of(folder: Path, record: Record) -> Path:
    name = record.key.hex()
    return folder / FORMAT / "blocks" / name[:2] / f"{name}.safetensors"


def files(folder: Path) -> list[Path]:
    return sorted((folder / FORMAT / "blocks").rglob("*.safetensors"))


def run(capsys: Capture, command: str, folder: Path, *more: str | Path, code: int = 0) -> str:
    """Run a command and return what it printed."""
    capsys.readouterr()
    given = ["cache", command, "--ssd-cache-dir", str(folder), *map(str, more)]
    got = main(given)
    output, errors = capsys.readouterr()
    assert got == code, (output, errors)
    assert errors == ""
    return output


def ask(capsys: Capture, command: str, folder: Path, *more: str | Path, code: int = 0) -> Any:
    """Run a command and return its one JSON object."""
    (line,) = run(capsys, command, folder, *more, "--json", code=code).splitlines()
    return json.loads(line)


def refused(capsys: Capture, *arguments: str | Path) -> str:
    """Return the one line a refusal consists of."""
    capsys.readouterr()
    assert main(["cache", *map(str, arguments)]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    (line,) = errors.splitlines()
    assert line.startswith("penstock: ")
    return line


def picture(folder: Path) -> dict[str, bytes]:
    """Return all files but the index's, which SQLite writes to when it is only read."""
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
    ["export", "x.tar"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_folder_that_is_none_is_refused_and_not_made(
    tmp_path: Path, capsys: Capture, command: list[str]
) -> None:
    assert "--ssd-cache-dir" in refused(capsys, *command)
    none, foreign = tmp_path / "none", tmp_path / "foreign"
    assert "there is no such folder" in refused(capsys, *command, "--ssd-cache-dir", none)
    assert not none.exists()
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    line = refused(capsys, *command, "--ssd-cache-dir", foreign)
    assert "no folder of penstock's blocks" in line
    assert [path.name for path in foreign.rglob("*")] == ["notes.txt"]
    line = refused(capsys, *command, "--ssd-cache-dir", foreign / "notes.txt")
    assert "there is no such folder" in line


def test_the_folder_may_come_from_the_environment(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SSD_CACHE_DIR", str(fill(tmp_path / "cache", chain(2))))
    assert main(["cache", "ls", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["blocks"]) == 2


def test_an_index_that_is_held_is_one_line(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, chain(1))
    monkeypatch.setattr("penstock.tiers.disk.index.BUSY_SECONDS", 0.1)
    other = sqlite3.connect(tmp_path / FORMAT / "index.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    assert "another process holds the index" in refused(capsys, "ls", "--ssd-cache-dir", tmp_path)
    other.close()


def test_commands_without_what_they_need(tmp_path: Path, capsys: Capture) -> None:
    folder = fill(tmp_path / "cache", chain(1))
    where = ("--ssd-cache-dir", folder)
    assert "--to and --model" in refused(capsys, "prune", *where)
    assert "--to and --model" in refused(capsys, "prune", *where, "--to", "1", "--model", "a")
    assert "--to 'much'" in refused(capsys, "prune", *where, "--to", "much")
    assert "FILE.tar" in refused(capsys, "export", *where)
    assert "no such file" in refused(capsys, "import", tmp_path / "none.tar", *where)
    assert "raise it" in refused(capsys, "import", "x", *where, "--ssd-cache-limit", "1MB")
    assert len(files(folder)) == 1


# ---- ls and stats


def test_ls_shows_those_worth_most_first(tmp_path: Path, capsys: Capture) -> None:
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
    assert "2 more blocks are worth less" in shown
    assert first[2].key.hex()[:12] in shown
    assert second[0].key.hex()[:12] not in shown
    assert "more blocks" not in run(capsys, "ls", tmp_path)


def test_blocks_of_a_model_stand_together(tmp_path: Path, capsys: Capture) -> None:
    fill(tmp_path, chain(1))
    fill(tmp_path, chain(1, seed=1), model=B)
    fill(tmp_path, chain(1, seed=2))
    lines = run(capsys, "ls", tmp_path).splitlines()[1:]
    assert [line.split()[0] for line in lines] == [A[:12], A[:12], B[:12]]


def test_a_fingerprint_that_would_paint_the_terminal_is_only_text(
    tmp_path: Path, capsys: Capture
) -> None:
    fill(tmp_path, chain(1), model="\x1b[31m[bold]x")
    for command in ("ls", "stats"):
        shown = run(capsys, command, tmp_path)
        assert "\x1b" not in shown
        assert "?[31m[bold]x" in shown


def test_stats_by_model_and_in_all(tmp_path: Path, capsys: Capture) -> None:
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


def test_looking_changes_nothing(tmp_path: Path, capsys: Capture) -> None:
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


def flip(path: Path, at: int = -1) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def damage_some(folder: Path) -> list[Record]:
    """Damage a folder in all the ways there are; return its blocks. 2, 3, 5 and 6 are lost."""
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


def test_verify_finds_nothing_wrong_with_a_folder_that_is_whole(
    tmp_path: Path, capsys: Capture
) -> None:
    fill(tmp_path, chain(5), chain(3, seed=1))
    fill(tmp_path, chain(2, model=B), model=B)
    found = ask(capsys, "verify", tmp_path)
    assert (found["checked_blocks"], found["faults"], found["repaired"]) == (10, [], False)
    assert found["checked_bytes"] == sum(path.stat().st_size for path in files(tmp_path))
    assert run(capsys, "verify", tmp_path).startswith("10 blocks (")


def test_verify_finds_each_kind_of_damage_and_repairs_it(tmp_path: Path, capsys: Capture) -> None:
    records = damage_some(tmp_path)
    before = picture(tmp_path)
    found = ask(capsys, "verify", tmp_path, code=1)
    kinds = ("damaged", "missing", "unknown", "left_over", "checked_blocks")
    assert [found[kind] for kind in kinds] == [3, 1, 2, 1, 3]
    assert picture(tmp_path) == before, "without --repair nothing is changed"
    shown = run(capsys, "verify", tmp_path, code=1)
    assert "3 damaged, 1 missing, 2 unknown, 1 left over" in shown
    assert "its bytes are not those that were written" in shown
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


@pytest.mark.parametrize("at", [0, 20, 300, FILE_BYTES // 2, FILE_BYTES - 1])
def test_one_bit_anywhere_is_found(tmp_path: Path, capsys: Capture, at: int) -> None:
    records = chain(2)
    fill(tmp_path, records)
    flip(file_of(tmp_path, records[1]), at)
    assert ask(capsys, "verify", tmp_path, code=1)["damaged"] == 1


@pytest.mark.parametrize("column", ["parent", "depth", "nbytes", "fingerprint"])
def test_an_index_that_tells_something_else_is_found(
    tmp_path: Path, capsys: Capture, column: str
) -> None:
    fill(tmp_path, chain(2))
    value = {"parent": b"x" * 16, "fingerprint": "else"}.get(column, 7)
    with sqlite3.connect(tmp_path / FORMAT / "index.sqlite") as db:
        db.execute(f"UPDATE blocks SET {column} = ? WHERE depth = 1", (value,))
    assert ask(capsys, "verify", tmp_path, code=1)["damaged"] == 1


def test_a_key_that_is_not_that_of_the_tokens_is_found(tmp_path: Path, capsys: Capture) -> None:
    """Its hash is right: somebody has written it so."""
    good, other = chain(1)[0], chain(1, seed=1)[0]
    lie = Record(good.key, good.parent, 0, {**good.arrays, "tokens": other.arrays["tokens"]})
    bare = Record(other.key, other.parent, 0, {"0.keys": other.arrays["0.keys"]})
    fill(tmp_path, [lie], [bare])
    found = ask(capsys, "verify", tmp_path, code=1)
    assert sorted(fault["what"] for fault in found["faults"]) == [
        "it does not hold the tokens of a block",
        "its key is not that of its tokens",
    ]


@pytest.mark.parametrize("damage", ["noise", "gone", "empty"])
def test_an_index_that_is_damaged_is_told_and_made_anew(
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


def test_verify_draws_a_bar_only_on_a_terminal(tmp_path: Path) -> None:
    fill(tmp_path, chain(20))
    ours, theirs = pty.openpty()
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


def test_prune_shrinks_to_a_size_those_worth_least_first(tmp_path: Path, capsys: Capture) -> None:
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


def test_prune_removes_nothing_at_the_limit_and_one_block_below_it(
    tmp_path: Path, capsys: Capture
) -> None:
    fill(tmp_path, chain(4))
    size = sum(path.stat().st_size for path in files(tmp_path))
    assert ask(capsys, "prune", tmp_path, "--to", str(size))["blocks"] == 0
    assert ask(capsys, "prune", tmp_path, "--to", str(size - 1))["blocks"] == 1
    assert held(tmp_path, chain(4)) == 3


def test_a_large_folder_is_pruned_in_short_transactions(tmp_path: Path, capsys: Capture) -> None:
    """Others wait five seconds at most for the index: no transaction takes all blocks."""
    fill(tmp_path, chain(1_000))
    assert ask(capsys, "prune", tmp_path, "--to", str(300 * FILE_BYTES))["blocks"] >= 700
    assert len(files(tmp_path)) == held(tmp_path, chain(1_000)) <= 300
    assert ask(capsys, "clear", tmp_path, "--yes")["blocks"] >= 299


def test_prune_of_a_model_leaves_the_others(tmp_path: Path, capsys: Capture) -> None:
    mine, theirs = chain(3), chain(2, seed=1, model=B)
    fill(tmp_path, mine)
    fill(tmp_path, theirs, model=B)
    fill(tmp_path, chain(1, seed=2), model=A[:8] + "c")
    where = ("--ssd-cache-dir", tmp_path)
    assert "more than one" in refused(capsys, "prune", *where, "--model", A[:8])
    line = refused(capsys, "prune", *where, "--model", "0")
    assert A[:12] in line
    assert "no fingerprint begins so" in line
    assert "needs the beginning" in refused(capsys, "prune", *where, "--model", "")
    assert len(files(tmp_path)) == 6
    assert ask(capsys, "prune", tmp_path, "--model", A[:9])["blocks"] == 3
    assert (held(tmp_path, mine), held(tmp_path, theirs, B), len(files(tmp_path))) == (0, 2, 3)


def test_an_empty_prefix_is_no_model_even_if_there_is_only_one(
    tmp_path: Path, capsys: Capture
) -> None:
    fill(tmp_path, chain(2))
    refused(capsys, "prune", "--ssd-cache-dir", tmp_path, "--model", "")
    assert len(files(tmp_path)) == 2


def test_clear_needs_a_yes_and_leaves_what_is_not_ours(tmp_path: Path, capsys: Capture) -> None:
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
def test_clear_asks_at_a_terminal(tmp_path: Path, answer: str, code: int, left: int) -> None:
    fill(tmp_path, chain(2))
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    command = [sys.executable, "-m", "penstock", "cache", "clear", "--ssd-cache-dir", tmp_path]
    done = subprocess.run(command, stdin=theirs, capture_output=True, timeout=60)
    os.close(theirs)
    os.close(ours)
    assert done.returncode == code
    assert b"Remove all 2 blocks" in done.stderr
    assert len(files(tmp_path)) == left


def test_what_is_being_written_stays(tmp_path: Path, capsys: Capture) -> None:
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


# ---- export and import


def exported(capsys: Capture, folder: Path, file: Path, *more: str) -> Any:
    return ask(capsys, "export", folder, file, *more)


def test_blocks_go_into_a_tar_and_back(tmp_path: Path, capsys: Capture) -> None:
    here, there, tar = tmp_path / "here", tmp_path / "there", tmp_path / "x.tar"
    first, second, theirs = chain(4), chain(2, seed=1), chain(3, model=B)
    fill(here, first, second)
    fill(here, theirs, model=B)
    found = exported(capsys, here, tar)
    assert (found["blocks"], found["damaged"], found["gone"]) == (9, 0, 0)
    assert stat.S_IMODE(tar.stat().st_mode) == 0o600
    with tarfile.open(tar) as opened_tar:
        held_there = {
            info.name: opened_tar.extractfile(info).read()  # type: ignore[union-attr]
            for info in opened_tar.getmembers()
        }
    assert held_there == {path.name: path.read_bytes() for path in files(here)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "x.tar"]
    there.mkdir()
    found = ask(capsys, "import", there, tar)
    counts = ("blocks", "known", "damaged", "refused", "broken")
    assert [found[count] for count in counts] == [9, 0, 0, {}, None]
    assert (held(there, first), held(there, second), held(there, theirs, B)) == (4, 2, 3)
    assert ask(capsys, "verify", there)["faults"] == []
    found = ask(capsys, "import", there, tar)
    assert [found[count] for count in counts] == [0, 9, 0, {}, None]
    for path in (there / FORMAT, *(there / FORMAT).rglob("*")):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path
    assert "9 known" in run(capsys, "import", there, tar)


def test_export_of_one_model(tmp_path: Path, capsys: Capture) -> None:
    folder = fill(tmp_path / "cache", chain(2))
    fill(folder, chain(3, model=B), model=B)
    assert exported(capsys, folder, tmp_path / "b.tar", "--model", "bb")["blocks"] == 3
    shown = run(capsys, "export", folder, tmp_path / "a.tar", "--model", "aa")
    assert shown.startswith("2 blocks (")
    for wrong in ("c", ""):
        more = ("--ssd-cache-dir", folder, "--model", wrong)
        refused(capsys, "export", tmp_path / "c.tar", *more)
    assert not (tmp_path / "c.tar").exists()


def test_export_leaves_damaged_blocks_out_and_files_that_are_there_alone(
    tmp_path: Path, capsys: Capture
) -> None:
    folder, tar = tmp_path / "cache", tmp_path / "x.tar"
    records = chain(3)
    fill(folder, records)
    flip(file_of(folder, records[1]))
    file_of(folder, records[2]).unlink()
    found = exported(capsys, folder, tar)
    assert (found["blocks"], found["damaged"], found["gone"]) == (1, 1, 1)
    thesis = tmp_path / "thesis.tar"
    thesis.write_text("ten years")
    assert "is there" in refused(capsys, "export", thesis, "--ssd-cache-dir", folder)
    assert thesis.read_text() == "ten years"
    nowhere = tmp_path / "none" / "x.tar"
    refused(capsys, "export", nowhere, "--ssd-cache-dir", folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "thesis.tar", "x.tar"]


def member(name: str, raw: bytes = b"", **more: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(raw)
    for field, value in more.items():
        setattr(info, field, value)
    return info, raw


def block(record: Record, model: str = A) -> tuple[tarfile.TarInfo, bytes]:
    return member(f"{record.key.hex()}.safetensors", encode(record, model))


def pack(
    file: Path, *members: tuple[tarfile.TarInfo, bytes], kind: int = tarfile.GNU_FORMAT
) -> Path:
    with tarfile.open(file, "w", format=kind) as tar:
        for info, raw in members:
            tar.addfile(info, io.BytesIO(raw))
    return file


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_children_may_lie_before_their_parents(tmp_path: Path, capsys: Capture, kind: int) -> None:
    records = chain(5)
    members = [block(record) for record in reversed(records)]
    for info, _ in members:
        info.mtime = 1.5  # which pax says in a member of its own
    tar = pack(tmp_path / "x.tar", *members, kind=kind)
    folder = tmp_path / "cache"
    folder.mkdir()
    found = ask(capsys, "import", folder, tar)
    assert (found["blocks"], found["refused"]) == (5, {})
    assert held(folder, records) == 5


def test_a_hostile_tar_writes_nothing_but_its_whole_blocks(tmp_path: Path, capsys: Capture) -> None:
    folder, outside = tmp_path / "cache", tmp_path / "outside.safetensors"
    records = chain(2)
    fill(folder, records[:1])
    good = chain(1, seed=1)[0]
    raw = encode(good, A)
    name = f"{good.key.hex()}.safetensors"
    other = chain(1, seed=2)[0]
    flipped = bytearray(encode(other, A))
    flipped[-1] ^= 1
    liar = Record(other.key, other.parent, 0, {**other.arrays, "tokens": good.arrays["tokens"]})
    deep = Record(other.key, other.parent, 1 << 70, other.arrays)
    tar = pack(
        tmp_path / "x.tar",
        member("../outside.safetensors", raw),
        member(str(outside), raw),
        member(f"blocks/{name}", raw),
        member(name.upper(), raw),
        member(f"{name}\n", raw),
        member("index.sqlite", raw),
        member(name, type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member(name, type=tarfile.LNKTYPE, linkname="../outside"),
        member(name, type=tarfile.DIRTYPE),
        member(name, type=tarfile.FIFOTYPE),
        member(name, type=tarfile.CHRTYPE),
        member("a" * 200 + ".safetensors", raw),  # a long name has a member of its own
        member(f"{other.key.hex()}.safetensors", bytes(flipped)),
        member(f"{other.key.hex()}.safetensors", encode(liar, A)),
        member(f"{other.key.hex()}.safetensors", encode(deep, A)),
        member(f"{other.key.hex()}.safetensors", encode(other, "a\x1b[2J")),
        member(f"{other.key.hex()}.safetensors", encode(other, "")),
        member(f"{other.key.hex()}.safetensors", b"{" * 100),
        member(f"{other.key.hex()}.safetensors", (900).to_bytes(8, "little") + b"[" * 900),
        member(f"{other.key.hex()}.safetensors", (90_000).to_bytes(8, "little") + b"[" * 90_000),
        member(f"{other.key.hex()}.safetensors", b"\xff" * 100),
        member(f"{other.key.hex()}.safetensors", raw),  # another's
        member(f"{other.key.hex()}.safetensors"),
        block(records[0]),
        block(good),
        block(chain(3, seed=5)[2]),
    )
    found = ask(capsys, "import", folder, tar, code=1)
    assert (found["blocks"], found["known"], found["damaged"]) == (1, 1, 11)
    assert found["refused"] == {"name": 7, "type": 6, "orphan": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "x.tar"]
    assert set(files(folder)) == {file_of(folder, records[0]), file_of(folder, good)}
    assert ask(capsys, "verify", folder)["faults"] == []
    shown = run(capsys, "import", folder, tar, code=1)
    assert "7 whose name is not a block's" in shown


@pytest.mark.parametrize("size", [1 << 62, -512, (1 << 30) + 1])
def test_sizes_beyond_reason_are_refused(tmp_path: Path, capsys: Capture, size: int) -> None:
    folder = fill(tmp_path / "cache", chain(1))
    good, lie = block(chain(1, seed=1)[0]), block(chain(1, seed=2)[0])
    tar = pack(tmp_path / "x.tar", good)
    lie[0].size = size
    with tar.open("r+b") as file:
        file.seek(512 + -(-FILE_BYTES // 512) * 512)
        file.write(lie[0].tobuf(tarfile.GNU_FORMAT))
        file.truncate(file.tell() + min(max(size, 0), 1 << 31))  # full of holes
    began = time.perf_counter()
    found = ask(capsys, "import", folder, tar, code=1)
    assert time.perf_counter() - began < 5
    assert found["blocks"] == 1
    if size == (1 << 30) + 1:
        assert found["refused"] == {"size": 1}
    else:
        assert "does not end in it" in found["broken"]


@pytest.mark.parametrize("cut", [100, 512, 700, 512 + FILE_BYTES + 700])
def test_a_tar_that_was_cut_short(tmp_path: Path, capsys: Capture, cut: int) -> None:
    folder, tar = fill(tmp_path / "cache", chain(1, seed=9)), tmp_path / "x.tar"
    pack(tar, *(block(record) for record in chain(4)))
    tar.write_bytes(tar.read_bytes()[:cut])
    if cut < FILE_BYTES:
        line = refused(capsys, "import", tar, "--ssd-cache-dir", folder)
        assert "no tar file with blocks in it" in line
        return
    found = ask(capsys, "import", folder, tar, code=1)
    assert found["blocks"] == 1
    assert "the tar is broken" in run(capsys, "import", folder, tar, code=1)


@pytest.mark.parametrize("content", [b"", b"hello", os.urandom(5_000)])
def test_what_is_no_tar_is_one_line(tmp_path: Path, capsys: Capture, content: bytes) -> None:
    folder, tar = fill(tmp_path / "cache", chain(1)), tmp_path / "x.tar"
    tar.write_bytes(content)
    assert "no tar file" in refused(capsys, "import", tar, "--ssd-cache-dir", folder)


def test_import_goes_into_an_empty_folder_but_no_other(tmp_path: Path, capsys: Capture) -> None:
    tar = pack(tmp_path / "x.tar", block(chain(1)[0]))
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_text("mine")
    for folder in (tmp_path / "none", foreign):
        refused(capsys, "import", tar, "--ssd-cache-dir", folder)
    assert not (tmp_path / "none").exists()
    assert [path.name for path in foreign.iterdir()] == ["notes.txt"]


def test_import_goes_into_a_folder_that_a_server_is_just_making(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "new"
    (folder / FORMAT).mkdir(parents=True)  # and nothing in it yet
    tar = pack(tmp_path / "in.tar", *(block(record) for record in chain(2)))
    assert ask(capsys, "import", folder, tar)["blocks"] == 2
    assert len(files(folder)) == 2


def test_import_keeps_the_limit(tmp_path: Path, capsys: Capture) -> None:
    """The index takes 8 MB of it; the rest is for six blocks."""
    folder = tmp_path / "cache"
    old, new = chain(4, seed=1), chain(5)
    fill(folder, old)
    limit = 8_000_000 + 6 * FILE_BYTES + 200
    tar = pack(tmp_path / "x.tar", *(block(record) for record in new))
    found = ask(capsys, "import", folder, tar, "--ssd-cache-limit", str(limit))
    assert (found["blocks"], found["refused"]) == (5, {})
    assert (held(folder, new), held(folder, old), len(files(folder))) == (5, 1, 6)
    more = pack(tmp_path / "y.tar", *(block(record) for record in chain(9, seed=3)))
    found = ask(capsys, "import", folder, more, "--ssd-cache-limit", str(limit), code=1)
    assert found["blocks"] + found["refused"]["full"] + found["refused"].get("orphan", 0) == 9
    assert len(files(folder)) <= 6
    assert sum(path.stat().st_size for path in files(folder)) <= 6 * FILE_BYTES + 200


def test_import_does_not_shrink_a_folder_whose_limit_it_was_not_told(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = fill(tmp_path / "cache", chain(5, seed=1))
    tar = pack(tmp_path / "x.tar", block(chain(1)[0]))
    limit = str(8_000_000 + 4 * FILE_BYTES)
    more = ("--ssd-cache-dir", folder, "--ssd-cache-limit", limit)
    assert "name the limit of its server" in refused(capsys, "import", tar, *more)
    assert len(files(folder)) == 5


def test_import_leaves_a_disk_that_is_nearly_full_alone(tmp_path: Path) -> None:
    tar = pack(tmp_path / "x.tar", *(block(record) for record in chain(2)))
    folder = tmp_path / "cache"
    folder.mkdir()
    done = import_blocks(folder, tar, ROOM_BYTES, lambda nbytes: None, floor_bytes=1 << 60)
    assert (done.blocks, dict(done.refused), files(folder)) == (0, {"disk": 2}, [])


def test_what_an_engine_wrote_is_read_by_another_from_an_imported_folder(
    tmp_path: Path, capsys: Capture, reads_all: None
) -> None:
    here, there, tar = tmp_path / "here", tmp_path / "there", tmp_path / "x.tar"
    there.mkdir()
    written = ask_engine(here)
    assert (written.written_blocks, written.read_blocks) == (3, 0)
    assert ask(capsys, "verify", here)["checked_blocks"] == 3
    exported(capsys, here, tar)
    assert ask(capsys, "import", there, tar)["blocks"] == 3
    read = ask_engine(there)
    assert (read.written_blocks, read.read_blocks) == (0, 3)


def ask_engine(folder: Path) -> TierCounts:
    """Have an engine read a prompt twice, and return what its cold tier did.

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
import os, select, sqlite3, sys, time
sys.path[:0] = [sys.argv[2], f"{os.path.dirname(sys.argv[2])}/support"]
from pathlib import Path
from penstock.tiers.store import TierCounts
from blocks_on_disk import read
from test_cache_cli import chain, opened, FILE_BYTES
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
    command = [sys.executable, "-c", SERVER, str(folder), str(Path(__file__).parent)]
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


def test_all_of_it_beside_a_process_that_writes(tmp_path: Path, capsys: Capture) -> None:
    """The folder is full most of the time, so that what is imported may have to give way again."""
    folder = fill(tmp_path / "cache", chain(20))
    others = pack(tmp_path / "in.tar", *(block(record) for record in chain(3, seed=50)))
    limit = ("--ssd-cache-limit", str(8_000_000 + 60 * FILE_BYTES))
    out = 0
    with serving(folder) as end:
        for turn in range(3):
            assert ask(capsys, "verify", folder)["faults"] == []
            assert ask(capsys, "verify", folder, "--repair")["faults"] == []
            ask(capsys, "ls", folder)
            ask(capsys, "stats", folder)
            found = exported(capsys, folder, tmp_path / f"{turn}.tar")
            assert found["damaged"] == 0
            out += found["blocks"]
            main(["cache", "import", str(others), "--ssd-cache-dir", str(folder), *limit, "--json"])
            found = json.loads(capsys.readouterr().out)
            assert found["blocks"] + found["known"] > 0
            assert set(found["refused"]) <= {"orphan"}
            ask(capsys, "prune", folder, "--to", str(20 * FILE_BYTES))
            ask(capsys, "clear", folder, "--yes")
        written, damaged, faults = end()
    assert (out > 0, written > 0, damaged, faults) == (True, True, 0, 0)
    assert ask(capsys, "verify", folder)["faults"] == []
    with opened(folder) as store:
        assert store.nbytes == sum(path.stat().st_size for path in files(folder))


def test_an_index_that_is_made_anew_under_a_process_is_the_one_it_goes_on_with(
    tmp_path: Path, capsys: Capture
) -> None:
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


def test_damage_beside_a_process_that_writes_is_still_found(
    tmp_path: Path, capsys: Capture
) -> None:
    """The negative control: what is looked at twice is not excused. It is asked for so often that
    it does not give way meanwhile."""
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
