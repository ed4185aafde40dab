"""Session files: the KV of one prompt in a file, to continue later or on another machine.

    save   a prompt's cached blocks ──> the cold tier's folder ──> its blocks in one tar
    load   tar ──> the folder, each block checked ──> restored by the next request with that prompt

A file works with every engine of the same fingerprint. Both functions are thread-safe, and wait
for the engine's thread like other calls.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.core import Core
from penstock.engine.engine import Engine
from penstock.engine.offload.engine_tier import EngineTier
from penstock.engine.view import EngineView
from penstock.errors import SettingError
from penstock.plurals import counted
from penstock.prefix.block_hashes import checkpoint_hash
from penstock.tiers.disk.archive import export_blocks, import_blocks
from penstock.tiers.disk.folder import Folder

WRITE_SECONDS = 60.0
LOOK_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class SavedSession:
    tokens: int
    """Number of first prompt tokens in the file, in whole blocks."""
    nbytes: int


def save_session(engine: Engine, file: Path, tokens: Sequence[int], salt: str = "") -> SavedSession:
    """Write the cached blocks of a prompt, from memory or disk, to a file.

    An existing file is replaced once the new one is complete.

    Args:
        engine: engine with a disk tier.
        file: path of the tar file to write; only its owner can read it.
        tokens: tokens of the prompt, or of a conversation with its answers.

    Raises:
        SettingError: the engine has no disk tier, no block of the prompt is cached, or a token is
            outside the vocabulary.
        TimeoutError: the blocks were not written in time.
        OSError: writing failed; an existing file is unchanged.
    """
    about = _about(engine)
    block_hashes = engine._later(lambda core: _have_written(core, tokens, salt)).result(
        WRITE_SECONDS
    )
    until = time.monotonic() + WRITE_SECONDS
    while not engine._later(_is_written).result(WRITE_SECONDS):
        if time.monotonic() >= until:
            raise TimeoutError(f"the session was not written within {WRITE_SECONDS:.0f} s")
        time.sleep(LOOK_SECONDS)
    aside = file.with_name(f".{file.name}.{uuid.uuid4().hex[:8]}")
    try:
        counts = engine._later(lambda core: _disk(core).held(block_hashes)).result(WRITE_SECONDS)
        written = block_hashes[: counts.result(WRITE_SECONDS)]
        with Folder(about.folder) as opened:
            hashes = {*written, *map(checkpoint_hash, written)}
            done = export_blocks(opened, aside, hashes)
        if not done.blocks:
            raise SettingError(
                f"no block of this prompt of {counted(len(tokens), 'token')} is cached. Only whole "
                f"blocks of {about.block_size} tokens are, of prompts of at least "
                f"{counted(about.least_tokens, 'token')}. Ask the prompt first, then save it"
            )
        nbytes = aside.stat().st_size
        aside.replace(file)
    finally:
        aside.unlink(missing_ok=True)
    return SavedSession(done.tokens, nbytes)


def load_session(engine: Engine, file: Path) -> SavedSession:
    """Import the blocks of a session file, for the next request with its prompt.

    Raises:
        SettingError: the engine has no disk tier, the file is from another model or other
            settings, or a block is damaged or does not fit into the folder.
        CacheFileError: the file is not a session file.
        OSError: reading or writing failed.
    """
    about = _about(engine)
    done = import_blocks(about.folder, file, about.limit_bytes, about.fingerprint)
    if not done.is_all:
        why = done.broken or ", ".join([*done.refused, *(["damaged"] if done.damaged else [])])
        raise SettingError(f"not all of {file.name} could be imported: {why}")
    return SavedSession(done.tokens, file.stat().st_size)


@dataclass(frozen=True, slots=True)
class _About:
    folder: Path
    """Absolute path, so that no other words of an error's text equal it."""
    limit_bytes: int
    block_size: int
    least_tokens: int
    fingerprint: str


def _about(engine: Engine) -> _About:
    def ask(view: EngineView) -> _About:
        limits = view.limits
        if limits.ssd_cache_dir is None:
            raise SettingError("sessions need a cold tier: name a folder (ssd_cache_dir)")
        return _About(
            limits.ssd_cache_dir.absolute(),
            limits.ssd_cache_limit,
            limits.block_size,
            limits.least_written_tokens,
            view.fingerprint,
        )

    return engine.ask(ask).result(WRITE_SECONDS)


def _have_written(core: Core, tokens: Sequence[int], salt: str) -> list[bytes]:
    """Queue a prompt's blocks in memory for writing to disk; return all its block hashes."""
    core.intake.check_tokens(tokens)
    block_hashes = core.prefixes.block_hashes(list(tokens), salt)
    cached_blocks = core.prefixes.match(block_hashes).tokens // core.limits.block_size
    root = core.prefixes.root(salt)
    _disk(core).writer.note(block_hashes[:cached_blocks], root, 0, seen=True, ended=True)
    _note_checkpoints(core, block_hashes[:cached_blocks], root)
    _disk(core).writer.release_ends()
    return block_hashes


def _note_checkpoints(core: Core, block_hashes: Sequence[bytes], root: bytes) -> None:
    for node in core.prefixes.match(block_hashes).path:
        for checkpoint in node.segment.checkpoints:
            blocks = (node.start + checkpoint.offset) // core.limits.block_size
            if core.tiers.has_states and blocks <= len(block_hashes):
                core.tiers.note_checkpoint(block_hashes[:blocks], root, seen=True)
                _disk(core).writer.release_ends()  # the next one would replace it in the queue


def _is_written(core: Core) -> bool:
    return not core.tiers or _disk(core).is_written


def _disk(core: Core) -> EngineTier:
    return core.tiers.tiers["disk"]
