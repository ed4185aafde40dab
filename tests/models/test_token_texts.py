"""Texts of a vocabulary in one piece."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import pytest

from penstock.models.byte_level import TokenTexts, compact, detokenizer_of
from penstock.models.loading import load_all
from penstock.recall import MODEL_PATH

TEXTS = ["", "a", "é", "🦫x", "\udce9", "Ā\0", "<0x41>", "▁the"]


@pytest.mark.parametrize("kind", [str, bytes])
def test_texts_equal_the_list(kind: type) -> None:
    texts = TEXTS if kind is str else [text.encode(errors="surrogatepass") for text in TEXTS]
    compacted = TokenTexts(texts)
    assert list(compacted) == texts and len(compacted) == len(texts)
    assert compacted[-1] == texts[-1] and compacted[2:5] == texts[2:5]
    for index in (len(texts), -len(texts) - 1):
        with pytest.raises(IndexError):
            compacted[index]


def test_empty_list() -> None:
    assert len(TokenTexts([])) == 0


def test_lists_with_gaps_stay_as_they_are() -> None:
    """A vocabulary with unused numbers has None for them."""
    detokenizer = SimpleNamespace(tokenmap=["a", None])
    compact(detokenizer)
    assert detokenizer.tokenmap == ["a", None]
    compact(None)
    compact(SimpleNamespace())


def test_vocabulary_takes_a_quarter_of_the_list() -> None:
    tracemalloc.start()
    try:
        texts = [f"token{number}" for number in range(50_000)]
        listed = tracemalloc.get_traced_memory()[0]
        compacted = TokenTexts(texts)
        del texts
        assert 0 < 4 * tracemalloc.get_traced_memory()[0] < listed
    finally:
        tracemalloc.stop()
    assert len(compacted) == 50_000


def test_detokenizers_of_one_tokenizer_share_them() -> None:
    tokenizer = load_all(MODEL_PATH).tokenizer
    expected = list(tokenizer._detokenizer.tokenmap)
    compact(tokenizer._detokenizer)
    first, second = detokenizer_of(tokenizer), detokenizer_of(tokenizer)
    assert first.tokenmap is second.tokenmap and isinstance(first.tokenmap, TokenTexts)
    assert list(first.tokenmap) == expected
