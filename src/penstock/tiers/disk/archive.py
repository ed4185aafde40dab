"""Blocks of a folder in one tar file, and back: their files as they are, under their own names.

    export   index -> file, checked -> tar aside -> sync -> rename
    import   tar -> heads, parents first -> file, checked -> the store's own way of writing

A tar may come from an attacker. Of a member only its name, type and size are looked at, and nothing
is unpacked: its bytes are a whole block, or they are refused. Nothing can check that the numbers
are those the model computes from the tokens: a tar deserves the trust that its maker does.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from penstock.errors import CacheFileError, SettingError
from penstock.memory import format_bytes
from penstock.prefix.block_hashes import checkpoint_hash
from penstock.tiers.disk.block_files import SUFFIX
from penstock.tiers.disk.disk_store import FLOOR_BYTES, SSDStore
from penstock.tiers.disk.folder import Folder, Progress, check_is_ours
from penstock.tiers.disk.index import Entry
from penstock.tiers.disk.integrity import NO_MODEL, check_block
from penstock.tiers.record import MOST_DEPTH, MOST_HEAD_BYTES, Damaged, header

NAME = re.compile(r"[0-9a-f]{32}" + re.escape(SUFFIX))
MOST_BLOCK_BYTES = 1 << 30
"""Largest file in a tar, in bytes: 1,024 tokens of 1 MB. Larger blocks make no sense."""
_NOTES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
"""Members that only say more about others, which need nothing said: they are passed over."""
_MOST_SECONDS = 8**11 - 1
"""A tar tells no later time."""


@dataclass(slots=True)
class Exported:
    """Figures of an export."""

    blocks: int = 0
    checkpoints: int = 0
    """States of recurrent layers, behind blocks."""
    tokens: int = 0
    """Tokens of the longest chain."""
    nbytes: int = 0
    """Bytes of the files of blocks and checkpoints."""
    damaged: int = 0
    """Blocks left out because their file is damaged."""
    gone: int = 0
    """Blocks that were evicted meanwhile."""


@dataclass(slots=True)
class Imported:
    """Figures of an import, by the fate of a tar's members."""

    blocks: int = 0
    """Blocks that are new in the folder."""
    checkpoints: int = 0
    """States of recurrent layers, behind blocks, new or known."""
    tokens: int = 0
    """Tokens of the longest chain, new or known."""
    nbytes: int = 0
    known: int = 0
    """Blocks that the folder had already."""
    damaged: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Refused members by reason, as in `Written`; or `name`, `type`, `size` for a member that is no
    block file."""
    broken: str | None = None
    """Why the tar could not be read to its end."""

    @property
    def is_all(self) -> bool:
        """Whether everything is in the folder now."""
        return not (self.damaged or self.refused or self.broken)

    def refuse(self, reason: str) -> None:
        """Count a member that does not come in."""
        self.refused[reason] = self.refused.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    at: int
    """Its first byte in the tar."""
    nbytes: int
    depth: int
    """Depth in the file's header; not to be trusted."""


def export_blocks(
    folder: Folder,
    file: Path,
    progress: Progress,
    fingerprint: str | None = None,
    block_hashes: Collection[bytes] | None = None,
) -> Exported:
    """Write the blocks of one model, or of all, into a new tar file; parents before children.

    With `keys` those blocks alone.

    It is written aside, and only its owner may read it. A block that is being written to the folder
    meanwhile may be missing.

    Raises:
        SettingError: there is such a file.
        OSError: a disk fails; nothing is left of the tar.
    """
    if file.exists() or file.is_symlink():
        raise SettingError(f"{file} is there; name another file, or remove it")
    descriptor, name = tempfile.mkstemp(dir=file.absolute().parent, prefix=f".{file.name}.")
    aside = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as out:
            done = _write(folder, out, progress, fingerprint, block_hashes)
            out.flush()
            os.fsync(out.fileno())
        aside.rename(file)
    finally:
        aside.unlink(missing_ok=True)
    return done


def import_blocks(
    path: Path,
    file: Path,
    limit_bytes: int,
    progress: Progress,
    *,
    floor_bytes: int = FLOOR_BYTES,
) -> Imported:
    """Take the blocks of a tar file into a folder that is one of the cold tier, or empty.

    Evicts the blocks worth least for them; beyond the limit the ends of chains stay out.

    Args:
        path: of the folder.
        file: the tar.
        limit_bytes: of the folder, as its server has it.
        progress: of the bytes of the tar's members.
        floor_bytes: free bytes of the disk that are never gone below.

    Raises:
        SettingError: the folder is none, or holds more than the limit already.
        CacheFileError: the file is no tar.
        OSError: a disk fails; blocks that are in the folder by then stay there.
        sqlite3.OperationalError: another process holds the index for too long.
    """
    if not path.is_dir() or any(path.iterdir()):
        check_is_ours(path)
    with file.open("rb") as tar:
        done = Imported()
        members = sorted(_members(tar, done), key=lambda member: member.depth)
        if done.broken is not None and not members:
            raise CacheFileError(f"{file} is no tar file with blocks in it: {done.broken}")
        store = SSDStore(path, limit_bytes, fingerprint=NO_MODEL, floor_bytes=floor_bytes)
        try:
            if store.nbytes > store.payload_bytes:
                raise SettingError(
                    f"{path} holds {format_bytes(store.nbytes)} of blocks, more than a limit of "
                    f"{format_bytes(limit_bytes)} has room for; name the limit of its server"
                )
            for member in members:
                _take(store, tar, member, done)
                progress(member.nbytes)
        finally:
            store.close()
    return done


# ---- out


def models_of(file: Path) -> set[str]:
    """Return the fingerprints that the heads of a tar's blocks tell of; not to be trusted.

    Raises:
        OSError: the file cannot be read.
    """
    fingerprints = set()
    with file.open("rb") as tar:
        for member in _members(tar, Imported()):
            tar.seek(member.at)
            size = tar.read(8)
            fingerprints.add(header(size + tar.read(int.from_bytes(size, "little")))["fingerprint"])
    return fingerprints


def _write(
    folder: Folder,
    out: BinaryIO,
    progress: Progress,
    fingerprint: str | None,
    block_hashes: Collection[bytes] | None,
) -> Exported:
    done = Exported()
    entries = [
        entry
        for entry in folder.entries(fingerprint)
        if entry.owner is None and (block_hashes is None or entry.key in block_hashes)
    ]
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for entry in sorted(entries, key=lambda entry: (entry.fingerprint, entry.depth)):
            raw, tokens = _whole(folder, entry, done)
            if raw is not None:
                tar.addfile(_info(entry, len(raw)), io.BytesIO(raw))
                if entry.key == checkpoint_hash(entry.parent):
                    done.checkpoints += 1
                else:
                    done.blocks += 1
                done.tokens = max(done.tokens, tokens)
                done.nbytes += len(raw)
            progress(entry.nbytes)
    return done


def _whole(folder: Folder, entry: Entry, done: Exported) -> tuple[bytes | None, int]:
    """Read a block's file, and the number of tokens up to its end.

    None, and counted as refused, if it is missing or damaged.
    """
    try:
        raw = folder.file(entry.key).read_bytes()
        content = check_block(raw)
    except FileNotFoundError:
        done.gone += 1
        return None, 0
    except Damaged:
        done.damaged += 1
        return None, 0
    if (content.record.key, content.fingerprint) != (entry.key, entry.fingerprint):
        done.damaged += 1
        return None, 0
    return raw, content.record.end_tokens


def _info(entry: Entry, nbytes: int) -> tarfile.TarInfo:
    info = tarfile.TarInfo(entry.key.hex() + SUFFIX)
    info.size = nbytes
    info.mode = 0o600
    info.mtime = min(max(0, int(entry.written_seconds)), _MOST_SECONDS)
    return info


# ---- in


def _members(tar: BinaryIO, done: Imported) -> Iterator[_Member]:
    """Yield the members that may be blocks; all others are counted.

    Headers are read one by one, so that none is longer than it may be.
    """
    end = os.fstat(tar.fileno()).st_size
    at = 0
    while True:
        tar.seek(at)
        raw = tar.read(tarfile.BLOCKSIZE)
        if raw == bytes(tarfile.BLOCKSIZE):
            return
        try:
            info = tarfile.TarInfo.frombuf(raw, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            done.broken = f"at byte {at:,}: {error}"
            return
        first = at + tarfile.BLOCKSIZE
        if not 0 <= info.size <= end - first:
            done.broken = f"at byte {at:,}: a file of {info.size:,} bytes does not end in it"
            return
        member = _member(tar, info, first, done)
        if member is not None:
            yield member
        at = first + -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _member(tar: BinaryIO, info: tarfile.TarInfo, at: int, done: Imported) -> _Member | None:
    """Look at one member; None, and it is counted, if it cannot be a block."""
    if info.type in _NOTES:
        return None
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        done.refuse("type")
    elif NAME.fullmatch(info.name) is None:
        done.refuse("name")
    elif info.size > MOST_BLOCK_BYTES:
        done.refuse("size")
    else:
        depth = _depth(tar, at, info.size)
        if depth is not None:
            return _Member(info.name, at, info.size, depth)
        done.damaged += 1
    return None


def _depth(tar: BinaryIO, at: int, nbytes: int) -> int | None:
    """Return the depth in a file's header; None if it makes no sense."""
    tar.seek(at)
    size = tar.read(8)
    length = int.from_bytes(size, "little")
    if not 8 + length <= nbytes or length > MOST_HEAD_BYTES:
        return None
    with suppress(KeyError, ValueError, RecursionError):
        depth = int(header(size + tar.read(length))["depth"])
        return depth if 0 <= depth < MOST_DEPTH else None
    return None


def _take(store: SSDStore, tar: BinaryIO, member: _Member, done: Imported) -> None:
    """Take one member in, or count why not."""
    tar.seek(member.at)
    raw = tar.read(member.nbytes)
    try:
        content = check_block(raw)
    except Damaged:
        done.damaged += 1
        return
    if content.record.key.hex() + SUFFIX != member.name:
        done.damaged += 1
    elif done.nbytes + len(raw) > store.payload_bytes:
        done.refuse("full")
    else:
        written = store.take(content.record, raw, content.fingerprint)
        is_checkpoint = content.record.key == checkpoint_hash(content.record.parent)
        if written == "claimed":
            done.nbytes += len(raw)
        if written in ("claimed", "known"):
            done.tokens = max(done.tokens, content.record.end_tokens)
        if written in ("claimed", "known") and is_checkpoint:
            done.checkpoints += 1
        elif written == "claimed":
            done.blocks += 1
        elif written == "known":
            done.known += 1
        else:
            done.refuse(written)
