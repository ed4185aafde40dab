"""Integrity check of a folder: valid blocks, and consistency of index and files."""

from __future__ import annotations

import errno
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from penstock.prefix.block_hashes import HASH_BYTES, checkpoint_hash, is_hash_of
from penstock.tiers.disk.block_files import SUFFIX
from penstock.tiers.disk.disk_store import SSDStore
from penstock.tiers.disk.folder import Folder, Progress
from penstock.tiers.disk.index import Entry, is_alive
from penstock.tiers.record import MOST_DEPTH, TOKENS, Damaged, HostArray, Record, decode, header

UNBOUNDED_BYTES = 1 << 60
"""Limit in bytes that is never reached."""
NO_MODEL = ""
"""Fingerprint of a store opened for all models."""
FINGERPRINT_CHARACTERS = 256
"""Maximum length of a fingerprint in characters."""

Kind: TypeAlias = Literal["damaged", "missing", "unknown", "left over"]
"""Kind of fault: a block that differs from the one written; a block without a file; a file that
is not in the index; a file left behind by a dead writer."""


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    name: str
    """Path of the file within the folder."""
    what: str


@dataclass(slots=True)
class IntegrityReport:
    checked_blocks: int = 0
    checked_bytes: int = 0
    faults: list[Fault] = field(default_factory=list)
    repaired: bool = False

    def count(self, kind: Kind) -> int:
        return Counter(fault.kind for fault in self.faults)[kind]


@dataclass(frozen=True, slots=True)
class Checked:
    record: Record
    fingerprint: str


def check_block(raw: bytes) -> Checked:
    """Decode a block file from an untrusted source; raises Damaged if it is invalid.

    In addition to the checks of `decode`, header fields must be in range, and the key of a block
    must be the hash of its parent and tokens, that of a checkpoint the `checkpoint_hash` of its
    parent. It cannot be verified that the arrays are what the model computes from the tokens.
    """
    try:
        record, fingerprint = decode(raw), header(raw)["fingerprint"]
    except Damaged:
        raise
    # The header is JSON, and may come from an attacker.
    except (KeyError, ValueError, RecursionError) as error:
        raise Damaged(f"invalid header: {error}") from None
    if not fingerprint.isprintable() or not 0 < len(fingerprint) <= FINGERPRINT_CHARACTERS:
        raise Damaged("its fingerprint is invalid")
    if not 0 <= record.depth < MOST_DEPTH or len(record.parent) != HASH_BYTES:
        raise Damaged(f"invalid depth {record.depth} or parent {record.parent.hex()}")
    is_checkpoint = record.key == checkpoint_hash(record.parent)
    tokens = None if is_checkpoint else _tokens(record.arrays.get(TOKENS))
    if not is_hash_of(record.key, record.parent, tokens, record.blocks):
        raise Damaged("its key is not that of its tokens")
    return Checked(record, fingerprint)


def verify(folder: Folder, *, repair: bool, progress: Progress) -> IntegrityReport:
    """Check every block, and compare index and files; the folder may be in use.

    With `repair`, entries of damaged, missing and left-over files are removed, valid blocks missing
    in the index are added, and other files among the blocks are removed.
    """
    verdict = IntegrityReport(repaired=repair)
    for page in folder.index.pages():
        for entry in page:
            _check_entry(folder, entry, verdict)
            progress(entry.nbytes)
    for path in folder.files():
        _check_file(folder, path, verdict)
    for path, alive in folder.files_aside():
        if not alive and path.exists():
            verdict.faults.append(Fault("left over", _name(folder, path), "its writer has ended"))
    if repair:
        reconcile(folder.path)
    return verdict


def reconcile(path: Path) -> None:
    store = SSDStore(path, UNBOUNDED_BYTES, fingerprint=NO_MODEL)
    try:
        store.reconcile()
    finally:
        store.close()


def make_index(path: Path) -> None:
    """Rebuild a missing or damaged index from the files; servers reopen it at their next write."""
    SSDStore(path, UNBOUNDED_BYTES, fingerprint=NO_MODEL).close()


def _check_entry(folder: Folder, entry: Entry, verdict: IntegrityReport) -> None:
    """Check one block; if it fails, check again under the lock, as it may have changed."""
    wrong = _fault(folder, entry)
    if wrong is None:
        if entry.owner is None:
            verdict.checked_blocks += 1
            verdict.checked_bytes += entry.nbytes
        return
    faults: list[Fault] = []

    def is_wrong(now: Entry) -> bool:
        faults.extend(fault for fault in [_fault(folder, now)] if fault is not None)
        return bool(faults) and verdict.repaired

    folder.index.remove_if([entry.key], is_wrong, folder.unlink)
    verdict.faults += faults


def _fault(folder: Folder, entry: Entry) -> Fault | None:
    path = folder.file(entry.key)
    name = _name(folder, path)
    if entry.owner is not None:
        return None if is_alive(entry.owner) else Fault("left over", name, "its writer has ended")
    try:
        raw = path.read_bytes()
        content = check_block(raw)
    except FileNotFoundError:
        return Fault("missing", name, "the file is missing")
    except Damaged as error:
        return Fault("damaged", name, str(error))
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return Fault("damaged", name, str(error))
    record = content.record
    if (record.key, content.fingerprint) != (entry.key, entry.fingerprint):
        return Fault("damaged", name, "it is another block")
    if (record.parent, record.depth, len(raw)) != (entry.parent, entry.depth, entry.nbytes):
        return Fault("damaged", name, "its parent, depth or size differs from the index")
    return None


def _check_file(folder: Folder, path: Path, verdict: IntegrityReport) -> None:
    """Report a file that is not in the index; a repair removes it unless it is a valid block."""
    name = path.name.removesuffix(SUFFIX)
    try:
        key = bytes.fromhex(name)
    except ValueError:
        key = b""
    is_named = path == folder.file(key)
    if is_named and (folder.index.get(key) is not None or not path.is_file()):
        return  # indexed, or removed since listing
    if is_named and folder.index.get(key) is not None:
        return  # it was written since
    try:
        whole = is_named and check_block(path.read_bytes()).record.key == key
    except FileNotFoundError:
        return
    except Damaged:
        whole = False
    what = "a valid block that the index lacks" if whole else "it is not a block"
    verdict.faults.append(Fault("unknown", _name(folder, path), what))
    if verdict.repaired and not whole:
        path.unlink(missing_ok=True)


def _tokens(array: HostArray | None) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    if array is None or array.dtype != "uint32" or len(array.shape) != 1 or not array.shape[0]:
        raise Damaged("the tokens of the block are missing or invalid")
    return np.frombuffer(array.data.tobytes(), "<u4").astype(np.uint32)


def _name(folder: Folder, path: Path) -> str:
    return str(path.relative_to(folder.blocks.parent))
