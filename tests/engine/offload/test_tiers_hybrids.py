"""The SSD tier with recurrent layers: checkpoints are separate records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cold_engine import BLOCK, SETTINGS, SOON, ask, running, said, settle, submit
from core_parts import cached_nodes, fixed_bytes_of, hash_prompt, retentions_of
from engine_faults import VOCABULARY_TOKENS, model_of

from penstock.engine.core import Core
from penstock.engine.engine import Engine
from penstock.engine.retention.recurrent import RecurrentStates
from penstock.engine.session_files import load_session, save_session
from penstock.kv.states import StateForm
from penstock.prefix.block_hashes import checkpoint_hash
from penstock.tiers.disk.block_files import block_file
from penstock.tiers.disk.disk_store import BLOCKS_NAME
from penstock.tiers.record import FORMAT

FAMILY = "falcon_h1"
PROMPT = tuple((7 * i + 3) % VOCABULARY_TOKENS for i in range(70))
"""Four whole blocks and six tokens."""


pytestmark = pytest.mark.usefixtures("patient")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a cache folder with the prompt and the end of an answer to it."""
    with running(tmp_path / "cold", FAMILY) as core:
        ask(core, PROMPT)
    return tmp_path / "cold"


def fresh() -> tuple[int, ...]:
    """Return the answer of an engine without a disk."""
    with running(None, FAMILY) as core:
        return ask(core, PROMPT)


def checkpoint_file(folder: Path, core: Core, blocks: int) -> Path:
    key = hash_prompt(core, PROMPT)[blocks - 1]
    return block_file(folder / FORMAT / BLOCKS_NAME, checkpoint_hash(key))


def flip(folder: Path) -> None:
    """Flip a bit of the states at which the prompt would resume."""
    with running(folder, FAMILY) as core:
        file = checkpoint_file(folder, core, 4)
    raw = bytearray(file.read_bytes())
    raw[-100] ^= 4
    file.write_bytes(raw)


def restored(folder: Path) -> tuple[int, tuple[int, ...]]:
    with running(folder, FAMILY) as core:
        answer = ask(core, PROMPT)
        return core.view.stats().restored_tokens, answer


def test_prompt_resumes_after_restart(folder: Path) -> None:
    assert restored(folder) == (64, fresh())


@pytest.mark.parametrize("block_size", [1, 3, 7, 64])
def test_blocks_of_any_size_are_restored(block_size: int, tmp_path: Path) -> None:
    expected, boundary = fresh(), (len(PROMPT) - 1) // block_size * block_size
    for restored in (0, boundary, boundary):
        with running(tmp_path, FAMILY, block_size=block_size) as core:
            assert ask(core, PROMPT) == expected
            assert core.view.stats().restored_tokens == restored
            assert ask(core, PROMPT) == expected


def test_flipped_bit_is_a_miss(folder: Path) -> None:
    expected = fresh()
    flip(folder)
    assert restored(folder) == (0, expected)
    assert restored(folder) == (64, expected), "it was written again"


def test_sequence_without_room_after_restore_is_readmitted(folder: Path) -> None:
    """It is preempted after its blocks were restored; no idle steps while it waits."""
    expected = fresh()
    flip(folder)
    with running(folder, FAMILY) as core, pytest.MonkeyPatch.context() as patch:
        handle = submit(core, PROMPT)
        patch.setattr(core.budget, "reserve_anew", lambda sequence: False)  # others took the room
        settle(core)
        assert core.view.stats().preemptions == 1
        assert said(handle) == expected


def test_checkpoint_after_last_token_is_not_restored(folder: Path) -> None:
    """The last token is computed, so states after it are useless."""
    whole = PROMPT[: 4 * BLOCK]
    with running(None, FAMILY) as core:
        expected = ask(core, whole)
    with running(folder, FAMILY) as core:
        assert checkpoint_file(folder, core, 4).exists()
        assert ask(core, whole) == expected
        assert core.view.stats().restored_tokens < len(whole)
        assert core.view.stats().tiers["disk"].counts.read_blocks == 0


def test_missing_checkpoint_is_a_miss(folder: Path) -> None:
    with running(folder, FAMILY) as core:
        checkpoint_file(folder, core, 4).unlink()
    assert restored(folder) == (0, fresh())


def test_only_checkpoint_is_restored_if_blocks_are_in_memory(folder: Path) -> None:
    """A diverging prompt resumes from a checkpoint on disk behind blocks in memory."""
    with running(folder, FAMILY) as core:
        first = ask(core, PROMPT)
        (recurrent,) = retentions_of(core, RecurrentStates)
        for node in cached_nodes(core):
            recurrent.checkpoints._replace(node, [], range(1_000))
        read = core.view.stats().tiers["disk"]
        handle = submit(core, PROMPT)
        settle(core)
        assert said(handle) == first
        after = core.view.stats().tiers["disk"]
        assert after.counts.read_blocks - read.counts.read_blocks == 1
        assert core.view.stats().restored_tokens == 128


def test_most_valuable_blocks_are_preloaded_with_checkpoints(folder: Path) -> None:
    other = tuple(reversed(PROMPT))
    branch = (*PROMPT[:32], *other[:40])  # parts in the middle of what is there
    with running(folder, FAMILY) as core:
        expected = [ask(core, prompt) for prompt in (other, branch, PROMPT)]
    with running(folder, FAMILY) as core:
        assert core.preload() == 64 + 64 + 32
        core.view.check()
        held = [each.offset for node in cached_nodes(core) for each in node.segment.checkpoints]
        assert len(held) == 3
        read = core.view.stats().tiers["disk"]
        assert [ask(core, prompt) for prompt in (other, branch, PROMPT)] == expected
        assert core.view.stats().hit_tokens == 3 * 64
        after = core.view.stats().tiers["disk"]
        assert after.counts.read_blocks == read.counts.read_blocks
    with running(folder, FAMILY) as core:
        assert core.preload() == 160
        assert core.preload() == 0, "all is there"


def test_preload_evicts_nothing(folder: Path) -> None:
    with running(folder, FAMILY) as core:
        core.set_limit(fixed_bytes_of(core) + 70 * core.view.token_bytes)
        assert core.preload() == 0, "the states have no room"
        core.view.check()
        core.set_limit(200_000_000)
        assert core.preload() == 64


def test_damaged_checkpoint_is_not_preloaded(folder: Path) -> None:
    with running(folder, FAMILY) as core:
        file = checkpoint_file(folder, core, 4)
    raw = bytearray(file.read_bytes())
    raw[-100] ^= 4
    file.write_bytes(raw)
    with running(folder, FAMILY) as core:
        core.preload()
        core.view.check()
        assert ask(core, PROMPT) == fresh()


def test_verify_passes_with_checkpoints(folder: Path) -> None:
    from penstock.tiers.disk.folder import Folder
    from penstock.tiers.disk.integrity import verify

    with Folder(folder) as opened:
        verdict = verify(opened, repair=False, progress=lambda _: None)
        assert verdict.faults == []
        keys = {entry.key: entry for entry in opened.index.entries()}
        kept = [entry for entry in keys.values() if entry.key == checkpoint_hash(entry.parent)]
        assert kept and all(entry.parent in keys for entry in kept)
        assert verdict.checked_blocks == len(keys)


def test_hot_cache_only_writes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with running(None, FAMILY, hot_cache_only=True) as core:
        ask(core, PROMPT)
    assert list(tmp_path.iterdir()) == []


def test_states_of_other_shape_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: nothing can be restored."""
    with running(tmp_path / "cold", FAMILY) as core:
        assert core.tiers is not None
        core.tiers.tiers["disk"].writer._state_form = StateForm.of(())
        ask(core, PROMPT)
    assert restored(tmp_path / "cold")[0] == 0


def test_session_includes_checkpoints(tmp_path: Path) -> None:
    model: Any = model_of(FAMILY)
    settings = {**SETTINGS, "ssd_write_budget": None}
    file = tmp_path / "session.tar"
    for name in ("one", "other"):
        with Engine(model, None, ssd_cache_dir=tmp_path / name, **settings) as engine:
            engine._later(_write_everything_to_disk).result()
            if name == "one":
                answer = engine._later(lambda core: submit(core, PROMPT)).result().result(SOON)
                saved = save_session(engine, file, PROMPT)
                assert saved.tokens == 4 * BLOCK
                continue
            assert load_session(engine, file).tokens == saved.tokens
            again = engine._later(lambda core: submit(core, PROMPT)).result().result(SOON)
            assert again[0].tokens == answer[0].tokens
            assert engine.stats().restored_tokens == 64


def _write_everything_to_disk(core: Core) -> None:
    core.prefill_rate.prefill_seconds = lambda tokens: 1.0 * tokens  # type: ignore[method-assign]


@pytest.mark.parametrize(("family", "restored_tokens"), [(FAMILY, 0), ("llama", 64)])
def test_restore_replaces_partial_block_unless_model_is_recurrent(
    family: str, restored_tokens: int, tmp_path: Path
) -> None:
    """A recurrent layer cannot resume in front of it, and a checkpoint may have no room."""
    with running(None, family) as core:
        begun = ask(core, PROMPT[:40])
    longer = (*PROMPT[:40], *begun, *PROMPT[:30])
    with running(tmp_path, family) as core:
        expected = ask(core, longer)
    with running(tmp_path, family) as core:
        assert ask(core, PROMPT[:40]) == begun
        assert ask(core, longer) == expected
        assert core.view.stats().restored_tokens == restored_tokens
