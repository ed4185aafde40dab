"""Export of a folder's blocks to a tar file, and import; block files are copied unchanged.

    export   index -> file, checked -> tar -> sync
    import   tar -> headers, parents first -> file, checked -> written by the store

A tar file may come from an attacker. Only the name, type and size of members are used, and nothing
is unpacked: a member is refused unless it is a valid block. Whether its KV is what the model
computes from its tokens cannot be verified, so a tar file is only as trustworthy as its source.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from penstock.errors import CacheFileError, SettingError
from penstock.memory.sizes import format_bytes
from penstock.plurals import counted
from penstock.regular_files import open_regular
from penstock.tiers.disk.block_files import SUFFIX
from penstock.tiers.disk.disk_store import FLOOR_BYTES, SSDStore
from penstock.tiers.disk.folder import Folder
from penstock.tiers.disk.index import Entry
from penstock.tiers.disk.integrity import NO_MODEL, check_block
from penstock.tiers.record import MOST_DEPTH, MOST_HEAD_BYTES, Damaged, header

NAME = re.compile(r"[0-9a-f]{32}" + re.escape(SUFFIX))
MOST_BLOCK_BYTES = 1 << 30
"""Maximum size of a member of a tar file, in bytes: 1,024 tokens of 1 MB."""
_NOTES = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
"""Types of members with attributes of other members, which are ignored."""
_MOST_SECONDS = 8**11 - 1
"""Latest modification time that a tar file can store."""


@dataclass(slots=True)
class Exported:
    blocks: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Imported:
    blocks: int = 0
    tokens: int = 0
    nbytes: int = 0
    known: int = 0
    """Number of blocks and checkpoints already in the folder."""
    damaged: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Refused members by reason, as in `Written`; or `name`, `type`, `size` if a member is not a
    block file."""
    broken: str | None = None
    """Reason why the tar file could not be read to its end; None if it was."""

    @property
    def is_all(self) -> bool:
        return not (self.damaged or self.refused or self.broken)

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    offset: int
    """Position of the member's first byte in the tar file."""
    nbytes: int
    depth: int
    fingerprint: str
    """Fingerprint in the file's header; like the depth, not verified."""


def export_blocks(folder: Folder, file: Path, block_hashes: Collection[bytes]) -> Exported:
    """Write blocks to a new tar file, readable only by its owner, parents first.

    Omits damaged and missing blocks, and those still being written.
    """
    done = Exported()
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
            for entry in sorted(folder.entries(), key=lambda entry: entry.depth):
                if entry.owner is None and entry.key in block_hashes:
                    _add(tar, folder, entry, done)
        out.flush()
        os.fsync(out.fileno())
    return done


def import_blocks(
    path: Path, file: Path, limit_bytes: int, fingerprint: str, *, floor_bytes: int = FLOOR_BYTES
) -> Imported:
    """Import the blocks of a tar file into a folder of the cold tier.

    Evicts the least valuable blocks to make room; ends of chains beyond the limit are omitted.

    Args:
        path: folder of the cold tier.
        file: tar file to import.
        limit_bytes: limit of the folder, as configured for its server.
        fingerprint: fingerprint of the model whose blocks are imported.
        floor_bytes: bytes of the disk to leave free.

    Raises:
        SettingError: the tar file has a block of another model; no block is imported.
        CacheFileError: the file is not a tar, or has no blocks.
        OSError: a disk fails; blocks already imported stay in the folder.
        sqlite3.OperationalError: another process holds the index for too long.
    """
    with open_regular(file) as tar:
        done = Imported()
        members = sorted(_members(tar, done), key=lambda member: member.depth)
        if not members:
            raise CacheFileError(
                f"{file.name} is not a session file: {done.broken or 'it has no blocks'}"
            )
        if others := {member.fingerprint for member in members} - {fingerprint}:
            raise SettingError(
                f"{file.name} is of another model, or of this one with other settings: its "
                f"fingerprint is {min(others)[:12]}, the engine's {fingerprint[:12]}"
            )
        store = SSDStore(path, limit_bytes, fingerprint=NO_MODEL, floor_bytes=floor_bytes)
        try:
            if store.nbytes > store.payload_bytes:
                raise SettingError(
                    f"{path} holds {format_bytes(store.nbytes)} of blocks, more than a limit of "
                    f"{format_bytes(limit_bytes)} has room for; name the limit of its server"
                )
            for member in members:
                _take(store, tar, member, done)
        finally:
            store.close()
    return done


# ---- out


def _add(tar: tarfile.TarFile, folder: Folder, entry: Entry, done: Exported) -> None:
    try:
        raw = folder.file(entry.key).read_bytes()
        content = check_block(raw)
    except (FileNotFoundError, Damaged):
        return
    if (content.record.key, content.fingerprint) != (entry.key, entry.fingerprint):
        return
    info = tarfile.TarInfo(entry.key.hex() + SUFFIX)
    info.size = len(raw)
    info.mode = 0o600
    info.mtime = min(max(0, int(entry.written_seconds)), _MOST_SECONDS)
    tar.addfile(info, io.BytesIO(raw))
    done.blocks += 1
    done.tokens = max(done.tokens, content.record.end_tokens)


# ---- in


def _members(tar: BinaryIO, done: Imported) -> Iterator[_Member]:
    """Yield the members that may be blocks, and count the others in `done`.

    Headers are parsed one by one, so that their length is bounded.
    """
    end = os.fstat(tar.fileno()).st_size
    offset = 0
    while True:
        tar.seek(offset)
        raw = tar.read(tarfile.BLOCKSIZE)
        if raw == bytes(tarfile.BLOCKSIZE):
            return
        try:
            info = tarfile.TarInfo.frombuf(raw, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            done.broken = f"at byte {offset:,}: {error}"
            return
        first = offset + tarfile.BLOCKSIZE
        if not 0 <= info.size <= end - first:
            done.broken = (
                f"at byte {offset:,}: a member of {counted(info.size, 'byte')} is truncated"
            )
            return
        member = _member(tar, info, first, done)
        if member is not None:
            yield member
        offset = first + -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _member(tar: BinaryIO, info: tarfile.TarInfo, offset: int, done: Imported) -> _Member | None:
    if info.type in _NOTES:
        return None
    if info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        done.refuse("type")
    elif NAME.fullmatch(info.name) is None:
        done.refuse("name")
    elif info.size > MOST_BLOCK_BYTES:
        done.refuse("size")
    else:
        head = _head(tar, offset, info.size)
        if head is not None:
            return _Member(info.name, offset, info.size, *head)
        done.damaged += 1
    return None


def _head(tar: BinaryIO, offset: int, nbytes: int) -> tuple[int, str] | None:
    tar.seek(offset)
    size = tar.read(8)
    length = int.from_bytes(size, "little")
    if not 8 + length <= nbytes or length > MOST_HEAD_BYTES:
        return None
    with suppress(KeyError, ValueError, RecursionError):
        fields = header(size + tar.read(length))
        depth = int(fields["depth"])
        return (depth, fields["fingerprint"]) if 0 <= depth < MOST_DEPTH else None
    return None


def _take(store: SSDStore, tar: BinaryIO, member: _Member, done: Imported) -> None:
    tar.seek(member.offset)
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
        if written in ("claimed", "known"):
            done.tokens = max(done.tokens, content.record.end_tokens)
        if written == "claimed":
            done.nbytes += len(raw)
            done.blocks += 1
        elif written == "known":
            done.known += 1
        else:
            done.refuse(written)
