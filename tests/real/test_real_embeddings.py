"""MiniLM's embeddings match sentence-transformers, and similar texts are neighbors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from penstock.encoders.encoder import Encoder, load_encoder
from penstock.encoders.encoder_engine import EncoderEngine
from penstock.engine.turns import Turns
from penstock.errors import ModelError
from penstock.ledger import Ledger
from penstock.models import named

FIRST = {
    "The cat sits outside": (0.13919, 0.00303, 0.04701, 0.03957),
    "A man is playing guitar": (0.02266, -0.00139, -0.00561, -0.06702),
    "The new movie is awesome": (-0.10044, -0.07739, -0.00137, -0.04846),
}
"""First numbers of vectors, by sentence-transformers 6.2 and torch 2.14."""


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    try:
        named.fetch("minilm")
    except ModelError as error:
        pytest.skip(str(error))
    return load_encoder("minilm")


@pytest.fixture(scope="module")
def engine(encoder: Encoder) -> Iterator[EncoderEngine]:
    made = EncoderEngine(encoder, Ledger(500_000_000), Turns())
    yield made
    made.close()


def vectors(engine: EncoderEngine, texts: list[str]) -> np.ndarray:
    tokenizer = engine.encoder.tokenizer
    rows = [tokenizer.text(text, "end", lambda: None).row for text in texts]
    return engine.encode(rows).result()


def test_embeddings_match_sentence_transformers(engine: EncoderEngine) -> None:
    computed = vectors(engine, list(FIRST))
    np.testing.assert_allclose(computed[:, :4], list(FIRST.values()), atol=2e-5)
    np.testing.assert_allclose(np.linalg.norm(computed, axis=1), 1, atol=1e-5)


def test_beginning_of_text_is_nearest_to_whole_text(
    engine: EncoderEngine, prose: list[str]
) -> None:
    """A long text's beginning is nearest to itself among paragraphs of real text."""
    texts = prose[:20]
    whole, begun = vectors(engine, texts), vectors(engine, [text[:150] for text in texts])
    nearest = (begun @ whole.T).argmax(axis=1)
    assert (nearest == np.arange(20)).mean() >= 0.9
