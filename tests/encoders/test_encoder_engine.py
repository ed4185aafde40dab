"""The encoder engine: batches, turns, the ledger, and the end of requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from patience import SOON
from tiny_encoders import TinyEncoder, write_encoder

from penstock.encoders import encoder_engine
from penstock.encoders.bert import EncoderRow, batch_bytes
from penstock.encoders.encoder import load_encoder
from penstock.encoders.encoder_engine import EncoderEngine
from penstock.engine.turns import Turns
from penstock.errors import EngineStopped, NeverFits, StepFailed
from penstock.ledger import Kind, Ledger

LIMIT = 10_000_000


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyEncoder:
    return write_encoder(tmp_path_factory.mktemp("encoders") / "tiny")


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(LIMIT)


@pytest.fixture
def engine(tiny: TinyEncoder, ledger: Ledger) -> Iterator[EncoderEngine]:
    made = EncoderEngine(load_encoder(tiny.folder), ledger, Turns())
    yield made
    made.close()
    assert ledger.used_bytes == 0


def rows_of(count: int, seed: int = 0) -> list[EncoderRow]:
    random = np.random.default_rng(seed)
    return [
        EncoderRow([2, *random.integers(4, 20, random.integers(1, 20)).tolist(), 3])
        for _ in range(count)
    ]


def test_embeddings_keep_order_of_texts(engine: EncoderEngine, tiny: TinyEncoder) -> None:
    rows = rows_of(300)
    computed = engine.encode(rows).result(SOON)
    expected = np.stack([tiny.vector(row.tokens) for row in rows])
    np.testing.assert_allclose(computed, expected, atol=3e-6, rtol=3e-5)
    assert computed.dtype == np.float32
    assert engine.counts.rows == 300 and engine.counts.batches > 1
    engine.check()


def test_short_request_shares_batch_with_long_one(tiny: TinyEncoder, ledger: Ledger) -> None:
    """A short request behind a long one is in the next batch."""
    turns = Turns()
    engine = EncoderEngine(load_encoder(tiny.folder), ledger, turns)
    with turns.turn("held"):  # until both are there
        long = engine.encode(rows_of(3_000))
        short = engine.encode(rows_of(2, 1))
        time.sleep(0.05)
    short.result(SOON)
    assert not long.done()
    assert len(long.result(SOON)) == 3_000
    engine.close()


def test_batch_size_is_limited_by_free_memory(engine: EncoderEngine, ledger: Ledger) -> None:
    """Never more than the limit, and a single text waits for its bytes."""
    rows = [EncoderRow([2, *[9] * 22, 3])] * 40
    need = batch_bytes(engine.encoder.spec, [24])
    with ledger.reserve(Kind.NODES, ledger.free_bytes - need - 10):
        assert len(engine.encode(rows).result(SOON)) == 40
        assert engine.counts.batches == 40
    others = ledger.reserve(Kind.NODES, ledger.free_bytes - need + 1)
    waiting = engine.encode(rows)
    until = time.monotonic() + SOON
    while not engine.holdings().result().missing_bytes:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert engine.holdings().result().missing_bytes == 1 and not waiting.done()
    others.release()
    assert len(waiting.result(SOON)) == 40
    assert engine.holdings().result().missing_bytes == 0


def test_only_text_that_can_never_fit_is_refused(tiny: TinyEncoder) -> None:
    encoder = load_encoder(tiny.folder)
    short, long = EncoderRow([2, 5, 3]), EncoderRow([2, *[5] * 22, 3])
    room = batch_bytes(encoder.spec, [3]) + 10
    engine = EncoderEngine(encoder, Ledger(encoder.nbytes + room), Turns())
    with pytest.raises(NeverFits):
        engine.encode([long]).result(SOON)
    assert len(engine.encode([short]).result(SOON)) == 1
    engine.close()


def test_other_engines_get_turns_between_batches(tiny: TinyEncoder, ledger: Ledger) -> None:
    turns = Turns()
    engine = EncoderEngine(load_encoder(tiny.folder), ledger, turns)
    done = engine.encode(rows_of(1_500))
    taken = 0
    while not done.done():
        with turns.turn("other"):
            taken += 1
            time.sleep(0.002)
    assert taken > 3
    engine.close()


def test_failed_batch_fails_only_its_requests(
    engine: EncoderEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StepFailed):  # as a token outside the table of words may be
        engine.encode([EncoderRow([2, "x", 3])]).result(SOON)  # type: ignore[list-item]
    assert len(engine.encode(rows_of(3)).result(SOON)) == 3
    assert engine.alive


def test_cancelled_request_is_not_computed_further(engine: EncoderEngine) -> None:
    long = engine.encode(rows_of(8_000))
    assert long.cancel()
    assert len(engine.encode(rows_of(2)).result(SOON)) == 2
    assert engine.counts.rows < 8_000


def test_close_fails_open_requests(tiny: TinyEncoder, ledger: Ledger) -> None:
    turns = Turns()
    engine = EncoderEngine(load_encoder(tiny.folder), ledger, turns)
    with turns.turn("held"):
        answers = [engine.encode(rows_of(50, seed)) for seed in range(3)]
        closing = threading.Thread(target=engine.close)
        closing.start()
        time.sleep(0.05)
    closing.join(SOON)
    for answer in answers[1:]:
        with pytest.raises(EngineStopped):
            answer.result(SOON)
    with pytest.raises(EngineStopped):
        engine.encode(rows_of(1)).result(SOON)
    assert not engine.alive and ledger.used_bytes == 0


def test_batches_grow_with_measured_speed(tiny: TinyEncoder, ledger: Ledger) -> None:
    engine = EncoderEngine(load_encoder(tiny.folder), ledger, Turns())
    engine.encode(rows_of(4_000)).result(SOON)
    mean = engine.counts.tokens / engine.counts.batches
    assert mean > encoder_engine.FIRST_TOKENS  # a tiny model is quick
    engine.close()


def test_weights_beyond_limit_leave_ledger_empty(tiny: TinyEncoder, tmp_path: Path) -> None:
    encoder = load_encoder(tiny.folder)
    ledger = Ledger(encoder.nbytes - 1)
    with pytest.raises(NeverFits):
        EncoderEngine(encoder, ledger, Turns())
    assert ledger.used_bytes == 0
