"""`SequenceKV` on plain figures, without an engine, a model or a tier."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import pytest

from penstock.engine.counters import Counters
from penstock.engine.model.figures import ModelFigures
from penstock.engine.model.prompt_logprobs import ScoredBlocks
from penstock.engine.retention.retention import Path, Retention
from penstock.engine.schedule.kv_stores import KVStores
from penstock.engine.schedule.sequence_kv import SequenceKV
from penstock.kv.segment import Segment
from penstock.kv.tails import LayerShape, Tails
from penstock.ledger import Kind, Ledger
from penstock.prefix.prefixes import Prefixes

BLOCK = 8
SHAPES = (LayerShape(2, 4, 4, mx.float32),)
TOKENS = list(range(4 * BLOCK + 3))


class NoTiers:
    """Cold tiers that store nothing and record the noted blocks."""

    def __init__(self) -> None:
        self.noted: list[int] = []

    def note(
        self, block_hashes: Sequence[bytes], root: bytes, first: int, *, seen: bool = False
    ) -> None:
        self.noted += range(first, len(block_hashes))

    def note_end(self, block_hashes: Sequence[bytes], root: bytes) -> None:
        pass

    def note_checkpoint(
        self, block_hashes: Sequence[bytes], root: bytes, *, answered: bool = False
    ) -> None:
        pass

    def close(self) -> None:
        pass


class EveryOther(Retention):
    """A kind of layer that resumes at every other block, and marks committed segments."""

    def __init__(self) -> None:
        self.committed_at: list[int] = []
        self.checked = 0

    def resume(self, path: Path, limit: int) -> int:
        return limit // (2 * BLOCK) * 2 * BLOCK

    def committed(self, segment: Segment, start: int) -> Segment:
        self.committed_at.append(start)
        return segment

    def check(self, path: Path, read: int, position: int) -> None:
        self.checked += 1


def stores(*retentions: Retention) -> tuple[KVStores, NoTiers]:
    tiers = NoTiers()
    prefixes: Prefixes[Segment] = Prefixes(Ledger(10_000_000), block_size=BLOCK, span_tokens=BLOCK)
    made = KVStores(
        prefixes=prefixes,
        retentions=retentions,
        tiers=tiers,
        scored=ScoredBlocks(prefixes, 10_000_000),
        tails=Tails(2, 4, SHAPES, 0),
        figures=ModelFigures(shapes=SHAPES),
        counters=Counters(),
        shared_tokens=100 * BLOCK,
    )
    return made, tiers


def chunk(tokens: int) -> Segment:
    keys = mx.random.normal((1, 2, tokens, 4), key=mx.random.key(tokens))
    return Segment(((keys, keys + 1),), length=tokens)


def opened(made: KVStores) -> SequenceKV:
    kv = SequenceKV(made, list(TOKENS), [])
    kv.hash_blocks()
    kv.attach()
    kv.reservation = made.prefixes.ledger.reserve(Kind.TAILS, 100_000)
    return kv


def closed(kv: SequenceKV) -> None:
    kv.check()
    kv.detach()
    assert kv.reservation is not None
    kv.reservation.release()


def test_committed_prompt_blocks_are_matched_by_next_sequence() -> None:
    made, tiers = stores()
    kv = opened(made)
    kv.append_chunk(chunk(len(TOKENS) - 1))
    assert kv.num_cached_tokens == 4 * BLOCK
    assert kv.position == len(TOKENS) - 1
    assert tiers.noted == [0, 1, 2, 3]
    closed(kv)
    again = opened(made)
    assert again.num_cached_tokens == 4 * BLOCK
    assert [span.columns for span in again.spans()] == [4 * BLOCK]
    closed(again)
    made.prefixes.check()


@pytest.mark.parametrize(("kept", "resumes"), [(4, 4), (3, 2), (1, 0)])
def test_custom_retention_limits_reused_tokens(kept: int, resumes: int) -> None:
    kind = EveryOther()
    made, _ = stores(kind)
    kv = opened(made)
    kv.append_chunk(chunk(kept * BLOCK))
    closed(kv)
    assert kind.committed_at == [0] and kind.checked == 1
    again = opened(made)
    assert again.num_cached_tokens == resumes * BLOCK
    closed(again)


def test_without_custom_retention_all_blocks_are_reused() -> None:
    made, _ = stores()
    kv = opened(made)
    kv.append_chunk(chunk(3 * BLOCK))
    closed(kv)
    again = opened(made)
    assert again.num_cached_tokens == 3 * BLOCK
    closed(again)


def test_retentions_agree_on_resume_position() -> None:
    class EveryThird(Retention):
        def resume(self, path: Path, limit: int) -> int:
            return limit // (3 * BLOCK) * 3 * BLOCK

    for kinds in ((EveryOther(), EveryThird()), (EveryThird(), EveryOther())):
        made, _ = stores(*kinds)
        kv = opened(made)
        kv.append_chunk(chunk(4 * BLOCK))
        assert made.resume(kv.pin.path if kv.pin else (), 4 * BLOCK) == (0, None)
        assert made.resume(kv.pin.path if kv.pin else (), 6 * BLOCK)[0] == 6 * BLOCK
        closed(kv)
