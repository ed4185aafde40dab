"""Tokens of texts and pairs: special tokens, truncation, texts of many pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_encoders import CLS, SEP, TinyEncoder, write_encoder

from penstock.encoders import encoder_tokens
from penstock.encoders.encoder_tokens import EncoderTokenizer, TextTooLong
from penstock.errors import ModelError

GATE, RIVER, WATER = 7, 8, 11


def check() -> None:
    """Do nothing: the request is not cancelled."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyEncoder:
    return write_encoder(tmp_path_factory.mktemp("encoders") / "tiny")


@pytest.fixture
def tokenizer(tiny: TinyEncoder) -> EncoderTokenizer:
    return EncoderTokenizer(tiny.folder, 8)


def test_truncation_keeps_special_tokens(tokenizer: EncoderTokenizer) -> None:
    text = "gate " * 5 + "river " * 4
    with pytest.raises(TextTooLong) as raised:
        tokenizer.text(text, None, check)
    assert (raised.value.tokens, raised.value.most_tokens) == (11, 8)
    end = tokenizer.text(text, "end", check)
    assert end.row.tokens == [CLS, *[GATE] * 5, RIVER, SEP]
    assert end.tokens == 11 and end.truncated
    start = tokenizer.text(text, "start", check)
    assert start.row.tokens == [CLS, GATE, GATE, *[RIVER] * 4, SEP]
    short = tokenizer.text("gate", "end", check)
    assert short.row.tokens == [CLS, GATE, SEP] and not short.truncated


def test_pair_truncates_document_but_not_query(tokenizer: EncoderTokenizer) -> None:
    query = tokenizer.query("gate river", check)
    pair = tokenizer.pair(query, "water", None, check)
    assert pair.row.tokens == [CLS, GATE, RIVER, SEP, WATER, SEP]
    assert pair.row.first == 4
    cut = tokenizer.pair(query, "water river gate water", "end", check)
    assert cut.row.tokens == [CLS, GATE, RIVER, SEP, WATER, RIVER, GATE, SEP]
    assert cut.tokens == 9
    with pytest.raises(TextTooLong) as raised:
        tokenizer.pair(query, "water river gate water", None, check)
    assert raised.value.tokens == 9
    with pytest.raises(TextTooLong) as raised:
        tokenizer.query("gate " * 6, check)
    assert raised.value.tokens == 9


def test_long_texts_are_tokenized_in_pieces(
    tokenizer: EncoderTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are cut off are counted, and not kept."""
    monkeypatch.setattr(encoder_tokens, "PIECE_CHARACTERS", 100)
    text = "gate river water " * 1_000 + "river"
    for truncation, kept in (("end", [GATE, RIVER, WATER] * 2), ("start", None)):
        read = tokenizer.text(text, truncation, check)
        assert read.tokens == 3_003
        kept = kept or [WATER, GATE, RIVER, WATER, *[RIVER]]
        assert read.row.tokens[1:-1][-len(kept) :] == kept
        assert len(read.row) == 8
    with pytest.raises(TextTooLong) as raised:
        tokenizer.text(text, None, check)
    assert raised.value.tokens == 3_003
    calls: list[None] = []
    tokenizer.text(text, "end", lambda: calls.append(None))
    assert len(calls) > 150  # a client that goes away ends it soon


def test_folder_without_valid_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        EncoderTokenizer(tmp_path, 8)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot read"):
        EncoderTokenizer(tmp_path, 8)
