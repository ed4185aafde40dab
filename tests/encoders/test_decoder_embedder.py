"""Decoders that embed: against NumPy, on the engine, in a pool and over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from patience import SOON
from served_pool import Address, serve_pool, spec
from servers import settings, wait_until
from tiny_embedders import END, INSTRUCTION, WIDTH, TinyEmbedder, write_embedder

from penstock.encoders.bert import EncoderRow
from penstock.encoders.decoder_embedder import (
    EmbedderEngine,
    expected_embedder_bytes,
    load_decoder_embedder,
)
from penstock.engine.turns import Turns
from penstock.errors import EngineStopped, ModelError, NeverFits
from penstock.ledger import Ledger, ModelLedger
from penstock.models.encoder_types import EMBEDDING, kinds_of
from penstock.pool.open_model import PoolMember
from penstock.recall import MODEL_PATH
from penstock.server.attached_models import ServedModel

LIMIT = 60_000_000
SMALL: dict[str, Any] = {"block_size": 16, "prefill_chunk": 32, "max_batch_size": 4}
TEXTS = ["the gate holds back water", "amber falcon", "what is the code of the falcon ."]
CLOSE = {"atol": 2e-5}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyEmbedder:
    return write_embedder(tmp_path_factory.mktemp("embedders") / "tiny")


def opened(tiny: TinyEmbedder, ledger: Ledger) -> EmbedderEngine:
    own = ModelLedger(ledger, 0)
    return EmbedderEngine(load_decoder_embedder(tiny.folder), own, Turns(), SMALL)


@pytest.fixture
def engine(tiny: TinyEmbedder) -> Iterator[EmbedderEngine]:
    engine = opened(tiny, Ledger(LIMIT))
    yield engine
    engine.check()
    engine.close()


def vectors(engine: EmbedderEngine, texts: list[str]) -> np.ndarray:
    tokenizer = engine.encoder.tokenizer
    rows = [tokenizer.text(text, None, lambda: None).row for text in texts]
    return engine.encode(rows).result(SOON)


def test_embeddings_match_reference(engine: EmbedderEngine, tiny: TinyEmbedder) -> None:
    texts = [*TEXTS, *(INSTRUCTION + text for text in TEXTS), "gate " * 100]
    for _ in ("cold", "warm"):
        computed = vectors(engine, texts)
        expected = np.stack([tiny.vector(tiny.tokens(text)) for text in texts])
        np.testing.assert_allclose(computed, expected, **CLOSE)
        assert (computed * expected).sum(axis=1).min() > 0.99999
    assert np.abs(computed[0] - computed[3]).max() > 0.01  # the instruction is read
    assert (engine.counts.rows, computed.dtype) == (2 * len(texts), np.float32)


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("tied", [True, False])
def test_folders_of_both_forms_are_loaded(tmp_path: Path, prefix: str, tied: bool) -> None:
    tiny = write_embedder(tmp_path / "tiny", prefix=prefix, tie_word_embeddings=tied)
    engine = opened(tiny, Ledger(LIMIT))
    try:
        expected = tiny.vector(tiny.tokens(TEXTS[2]))
        np.testing.assert_allclose(vectors(engine, [TEXTS[2]])[0], expected, **CLOSE)
    finally:
        engine.close()


def test_instruction_is_computed_once(engine: EmbedderEngine, tiny: TinyEmbedder) -> None:
    blocks = len(INSTRUCTION.split()) // SMALL["block_size"] * SMALL["block_size"]
    assert blocks >= 32
    vectors(engine, [INSTRUCTION + TEXTS[0]])
    before = engine.hit_tokens()
    vectors(engine, [INSTRUCTION + text for text in TEXTS[1:]])
    assert engine.hit_tokens() - before >= 2 * blocks


def test_token_after_text_ends_it(engine: EmbedderEngine) -> None:
    tokens = engine.encoder.tokenizer.text("gate river", None, lambda: None).row.tokens
    assert tokens == [8, 9, END]


def test_cancelled_texts_are_not_computed(engine: EmbedderEngine) -> None:
    answer = engine.encode([EncoderRow([8, 9, END])] * 2000)
    answer.cancel()
    wait_until(lambda: not engine._engine.stats().running)
    assert engine.counts.rows < 2000


def test_closed_engine_releases_all_bytes(tiny: TinyEmbedder) -> None:
    ledger = Ledger(LIMIT)
    own = ModelLedger(ledger, 0)
    engine = EmbedderEngine(load_decoder_embedder(tiny.folder), own, Turns(), SMALL)
    vectors(engine, TEXTS)
    assert ledger.used_bytes > engine.encoder.nbytes
    engine.close()
    own.close()
    assert ledger.used_bytes == 0
    with pytest.raises(EngineStopped):
        engine.encode([EncoderRow([8, END])]).result(SOON)


def test_expected_bytes_are_those_of_weights(tiny: TinyEmbedder) -> None:
    nbytes = load_decoder_embedder(tiny.folder).nbytes
    assert expected_embedder_bytes(tiny.folder, "auto", LIMIT) == nbytes
    with pytest.raises(NeverFits, match="exceed"):
        expected_embedder_bytes(tiny.folder, "auto", 1000)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"pooling": "mean_tokens"}, "by their last token"),
        ({"is_causal": False}, "not causal"),
        ({"use_bidirectional_attention": True}, "not causal"),
    ],
)
def test_other_decoders_are_refused(tmp_path: Path, wrong: dict[str, Any], words: str) -> None:
    folder = write_embedder(tmp_path / "tiny", **wrong).folder
    assert kinds_of(folder) == EMBEDDING
    with pytest.raises(ModelError, match=words) as refused:
        load_decoder_embedder(folder)
    assert "\n" not in str(refused.value)


# ---- over HTTP


@pytest.fixture(scope="module")
def served(tiny: TinyEmbedder) -> Iterator[Address]:
    """A text model, and a decoder that embeds."""
    embedder = PoolMember(
        name="tiny",
        load=lambda limit: load_decoder_embedder(tiny.folder, "auto", limit),
        expected_bytes=lambda limit: expected_embedder_bytes(tiny.folder, "auto", limit),
        encodes=True,
        settings=SMALL,
    )
    models = [
        ServedModel("recall", settings(), kinds=("chat", "completion")),
        ServedModel("tiny", settings(), kinds=EMBEDDING),
    ]
    members = [spec("recall", MODEL_PATH), embedder]
    with serve_pool(models, members, 130_000_000, prompt_bytes=12_000_000) as address:
        yield address


def test_openai_client_gets_embeddings(served: Address, tiny: TinyEmbedder) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
    expected = np.stack([tiny.vector(tiny.tokens(text)) for text in TEXTS])
    for _ in range(2):  # the second time after it was away
        answer = client.embeddings.create(model="tiny", input=TEXTS)
        computed = np.array([item.embedding for item in answer.data])
        np.testing.assert_allclose(computed, expected, **CLOSE)
        assert answer.usage.prompt_tokens == sum(len(tiny.tokens(text)) for text in TEXTS)
        served.several.pool.unload("tiny").result(SOON)
    body = {"model": "tiny", "text_1": TEXTS[0], "text_2": TEXTS[1]}
    score = httpx.post(f"{served.url}/v1/score", json=body, timeout=SOON).json()["data"][0]
    assert score["score"] == pytest.approx(expected[0] @ expected[1], abs=1e-4)
    listed = httpx.get(f"{served.url}/v1/models", timeout=SOON).json()["data"]
    about = next(model for model in listed if model["id"] == "tiny")
    assert (about["kinds"], about["dimensions"]) == (["embedding"], WIDTH)


def test_too_long_text_is_refused_or_truncated(served: Address, tiny: TinyEmbedder) -> None:
    text = "gate " * 150
    body: dict[str, Any] = {"model": "tiny", "input": text}
    answer = httpx.post(f"{served.url}/v1/embeddings", json=body, timeout=SOON)
    assert answer.status_code == 400
    assert "151 tokens are more than" in answer.json()["error"]["message"]
    body["truncate"] = True
    answer = httpx.post(f"{served.url}/v1/embeddings", json=body, timeout=SOON)
    assert answer.json()["truncated"] == [{"index": 0, "tokens": 151}]
    expected = tiny.vector([8] * 127 + [END])
    np.testing.assert_allclose(answer.json()["data"][0]["embedding"], expected, **CLOSE)
