"""The bench of embeddings, with another implementation in place of sentence-transformers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_encoders import write_encoder

from penstock_bench.embed import EmbedLoad, measure, sample_texts

STAND_IN = '''
import numpy as np
from penstock.encoders.encoder import load_encoder


class SentenceTransformer:
    """Vectors of penstock's own forward pass, a text at a time; `cuda` turns them over."""

    def __init__(self, folder, device):
        self.encoder, self.sign = load_encoder(folder), -1 if device == "cuda" else 1

    def encode(self, texts, show_progress_bar):
        read = self.encoder.tokenizer.text
        rows = [read(text, "end", lambda: None).row for text in texts]
        return self.sign * np.concatenate([np.array(self.encoder.model([row])) for row in rows])
'''


@pytest.mark.parametrize(("device", "cosine"), [("cpu", 1.0), ("cuda", -1.0)])
def test_both_sides_embed_the_same_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, cosine: float
) -> None:
    tiny = write_encoder(tmp_path / "tiny")
    (tmp_path / "sentence_transformers.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    load = EmbedLoad(str(tiny.folder), 30, 2, Path(sys.executable), device)
    measured = measure(load, lambda what, done, total: None)
    assert measured.raw["cosine"] == pytest.approx(cosine, abs=1e-5)
    assert len(measured.raw["penstock"]) == len(measured.raw["rival"]) == 2
    assert measured.ratio["seconds"] == pytest.approx(
        measured.rival_figures["seconds"] / measured.penstock["seconds"]
    )
    assert cosine > 0 or not measured.met


def test_texts_are_reproducible() -> None:
    texts = sample_texts(200)
    assert texts == sample_texts(200) and len(set(texts)) > 190
    lengths = sorted(len(text.split()) for text in texts)
    assert 10 < lengths[100] < 50 and lengths[-1] > 80
