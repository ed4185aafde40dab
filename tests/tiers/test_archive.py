"""Session files: blocks in a tar file, which may come from an attacker."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest
from cache_folders import (
    FILE_BYTES,
    ROOM_BYTES,
    A,
    B,
    chain,
    file_of,
    files,
    fill,
    flip,
    held,
)

from penstock.errors import CacheFileError, SettingError
from penstock.tiers.disk import Record
from penstock.tiers.disk.archive import Imported, export_blocks, import_blocks
from penstock.tiers.disk.folder import Folder
from penstock.tiers.disk.integrity import verify
from penstock.tiers.record import FORMAT, encode


def imported(folder: Path, tar: Path, limit_bytes: int = ROOM_BYTES, **more: Any) -> Imported:
    return import_blocks(folder, tar, limit_bytes, A, **{"floor_bytes": 0, **more})


def exported(folder: Path, tar: Path, *records: Record) -> tuple[int, int]:
    with Folder(folder) as opened:
        done = export_blocks(opened, tar, {record.key for record in records})
    return done.blocks, done.tokens


def is_whole(folder: Path) -> bool:
    with Folder(folder) as opened:
        return not verify(opened, repair=False, progress=lambda nbytes: None).faults


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


def test_blocks_round_trip_through_tar(tmp_path: Path) -> None:
    here, there, tar = tmp_path / "here", tmp_path / "there", tmp_path / "x.tar"
    first, second, theirs = chain(4), chain(2, seed=1), chain(3, model=B)
    fill(here, first, second)
    fill(here, theirs, model=B)
    assert exported(here, tar, *first, *second) == (6, 16)
    assert stat.S_IMODE(tar.stat().st_mode) == 0o600
    with tarfile.open(tar) as opened_tar:
        members = {
            info.name: opened_tar.extractfile(info).read()  # type: ignore[union-attr]
            for info in opened_tar.getmembers()
        }
    wanted = [file_of(here, record) for record in (*first, *second)]
    assert members == {path.name: path.read_bytes() for path in wanted}
    there.mkdir()
    done = imported(there, tar)
    assert (done.blocks, done.known, done.tokens, done.is_all) == (6, 0, 16, True)
    assert (held(there, first), held(there, second)) == (4, 2)
    assert is_whole(there)
    done = imported(there, tar)
    assert (done.blocks, done.known, done.tokens, done.is_all) == (0, 6, 16, True)
    for path in (there / FORMAT, *(there / FORMAT).rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_export_is_on_disk_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tar = tmp_path / "here", tmp_path / "file.tar"
    records = chain(3)
    fill(folder, records)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    exported(folder, tar, *records)
    assert synced[-1:] == [tar.stat().st_size]


def test_export_skips_damaged_blocks_and_never_overwrites(tmp_path: Path) -> None:
    folder, tar, thesis = tmp_path / "cache", tmp_path / "x.tar", tmp_path / "thesis.tar"
    records = chain(3)
    fill(folder, records)
    flip(file_of(folder, records[1]))
    file_of(folder, records[2]).unlink()
    assert exported(folder, tar, *records) == (1, 4)
    thesis.write_text("ten years")
    with pytest.raises(FileExistsError):
        exported(folder, thesis, *records)
    assert thesis.read_text() == "ten years"


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_child_blocks_may_precede_parents(tmp_path: Path, kind: int) -> None:
    records = chain(5)
    members = [block(record) for record in reversed(records)]
    for info, _ in members:
        info.mtime = 1.5  # which pax says in a member of its own
    tar = pack(tmp_path / "x.tar", *members, kind=kind)
    folder = tmp_path / "cache"
    done = imported(folder, tar)
    assert (done.blocks, done.is_all) == (5, True)
    assert held(folder, records) == 5


@pytest.mark.parametrize("other", [B, "", "a\x1b[2J"], ids=repr)
def test_tar_with_block_of_other_model_is_refused(tmp_path: Path, other: str) -> None:
    folder = fill(tmp_path / "cache", chain(1, seed=9))
    tar = pack(tmp_path / "x.tar", block(chain(1)[0]), block(chain(1, seed=1)[0], other))
    with pytest.raises(SettingError, match="is of another model"):
        imported(folder, tar)
    assert len(files(folder)) == 1


def test_hostile_tar_writes_only_valid_blocks(tmp_path: Path) -> None:
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
    done = imported(folder, tar)
    assert (done.blocks, done.known, done.damaged) == (1, 1, 9)
    assert done.refused == {"name": 7, "type": 6, "orphan": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "x.tar"]
    assert set(files(folder)) == {file_of(folder, records[0]), file_of(folder, good)}
    assert is_whole(folder)


@pytest.mark.parametrize("size", [1 << 62, -512, (1 << 30) + 1])
def test_extreme_sizes_are_refused(tmp_path: Path, size: int) -> None:
    folder = fill(tmp_path / "cache", chain(1))
    good, lie = block(chain(1, seed=1)[0]), block(chain(1, seed=2)[0])
    tar = pack(tmp_path / "x.tar", good)
    lie[0].size = size
    with tar.open("r+b") as file:
        file.seek(512 + -(-FILE_BYTES // 512) * 512)
        file.write(lie[0].tobuf(tarfile.GNU_FORMAT))
        file.truncate(file.tell() + min(max(size, 0), 1 << 31))  # full of holes
    began = time.process_time()
    done = imported(folder, tar)
    assert time.process_time() - began < 5
    assert (done.blocks, done.is_all) == (1, False)
    if size == (1 << 30) + 1:
        assert done.refused == {"size": 1}
    else:
        assert "is truncated" in str(done.broken)


@pytest.mark.parametrize("cut", [100, 512, 700, 512 + FILE_BYTES + 700])
def test_truncated_tar_imports_whole_blocks(tmp_path: Path, cut: int) -> None:
    folder, tar = fill(tmp_path / "cache", chain(1, seed=9)), tmp_path / "x.tar"
    pack(tar, *(block(record) for record in chain(4)))
    tar.write_bytes(tar.read_bytes()[:cut])
    if cut < FILE_BYTES:
        with pytest.raises(CacheFileError, match=r"x\.tar is not a session file"):
            imported(folder, tar)
        return
    done = imported(folder, tar)
    assert (done.blocks, done.is_all) == (1, False)
    assert done.broken is not None


@pytest.mark.parametrize("content", [b"", b"hello", os.urandom(5_000)], ids=len)
def test_invalid_tar_is_refused(tmp_path: Path, content: bytes) -> None:
    folder, tar = fill(tmp_path / "cache", chain(1)), tmp_path / "x.tar"
    tar.write_bytes(content)
    with pytest.raises(CacheFileError, match=r"x\.tar is not a session file"):
        imported(folder, tar)


def test_import_respects_limit(tmp_path: Path) -> None:
    """The index takes 8 MB of it; the rest holds six blocks."""
    folder = tmp_path / "cache"
    old, new = chain(4, seed=1), chain(5)
    fill(folder, old)
    limit_bytes = 8_000_000 + 6 * FILE_BYTES + 200
    tar = pack(tmp_path / "x.tar", *(block(record) for record in new))
    done = imported(folder, tar, limit_bytes)
    assert (done.blocks, done.refused) == (5, {})
    assert (held(folder, new), held(folder, old), len(files(folder))) == (5, 1, 6)
    more = pack(tmp_path / "y.tar", *(block(record) for record in chain(9, seed=3)))
    done = imported(folder, more, limit_bytes)
    assert not done.is_all
    assert done.blocks + done.refused["full"] + done.refused.get("orphan", 0) == 9
    assert len(files(folder)) <= 6
    assert sum(path.stat().st_size for path in files(folder)) <= 6 * FILE_BYTES + 200


def test_import_with_smaller_limit_is_refused(tmp_path: Path) -> None:
    folder = fill(tmp_path / "cache", chain(5, seed=1))
    tar = pack(tmp_path / "x.tar", block(chain(1)[0]))
    with pytest.raises(SettingError, match="name the limit of its server"):
        imported(folder, tar, 8_000_000 + 4 * FILE_BYTES)
    assert len(files(folder)) == 5


def test_import_leaves_nearly_full_disk_alone(tmp_path: Path) -> None:
    tar = pack(tmp_path / "x.tar", *(block(record) for record in chain(2)))
    folder = tmp_path / "cache"
    done = imported(folder, tar, floor_bytes=1 << 60)
    assert (done.blocks, dict(done.refused), files(folder)) == (0, {"disk": 2}, [])
