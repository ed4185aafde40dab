"""Hostile GGUF metadata: one-line errors, before memory or time is spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFValue, GGUFValueType

from penstock.cli import main
from penstock.errors import ModelError
from penstock.models import template_trial
from penstock.models.loading import load_all
from penstock.models.mlx_lm import render
from penstock.plugins.gguf.architectures import ARCHITECTURES, module_of
from penstock.plugins.gguf.header import Header
from penstock.plugins.gguf.tokenizer import LONGEST_PIECE, write_tokenizer
from support.gguf_files import small_model, write_model


def file_with(folder: Path, key: str, value: Any, kind: GGUFValueType, name: str = "llama") -> Path:
    """Write a small model with one value of its metadata replaced."""
    model, config = small_model(name)
    sub = GGUFValueType.FLOAT32 if kind == GGUFValueType.ARRAY else None
    file = folder / "bad.gguf"
    write_model(file, name, model, config, "Q8_0", {key: GGUFValue(value, kind, sub)})
    return file


HUGE = GGUFValueType.UINT64


@pytest.mark.parametrize(
    ("key", "value", "kind", "words"),
    [
        ("llama.block_count", 1 << 60, HUGE, "layers, its tensors have 4"),
        ("llama.block_count", 3, HUGE, "3 layers, its tensors have 4"),
        ("llama.embedding_length", 1 << 60, HUGE, "numbers a token, its tensors have 64"),
        ("llama.feed_forward_length", 1 << 31, HUGE, "ffn_down, its tensors have 96"),
        ("llama.attention.key_length", 1 << 60, HUGE, "attn_q, its tensors have 64"),
        ("llama.attention.head_count", 1 << 60, HUGE, "are no model"),
        ("llama.attention.head_count", [float("nan")], GGUFValueType.ARRAY, "is not one integer"),
        ("llama.attention.head_count", [float("inf")], GGUFValueType.ARRAY, "is not one integer"),
        ("llama.attention.head_count_kv", 3, HUGE, "attn_k, its tensors have 32"),
        ("llama.rope.freq_base", 0.0, GGUFValueType.FLOAT32, "a RoPE base of 0, are no model"),
        ("tokenizer.ggml.eos_token_id", -1, GGUFValueType.INT64, "is -1, which is not a count"),
    ],
)
def test_size_not_matching_tensors_is_refused(
    key: str, value: Any, kind: GGUFValueType, words: str, tmp_path: Path, capsys: Any
) -> None:
    """By `plan`, which reads only the header, and by loading."""
    file = file_with(tmp_path, key, value, kind)
    assert main(["plan", str(file), "--memory-limit", "1GB"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err, err
    with pytest.raises(ModelError, match=words.partition(",")[0]):
        load_all(file)


def test_vocabulary_larger_than_embedding_is_refused(tmp_path: Path) -> None:
    """MLX would read past the end of the embedding."""
    key, texts = "tokenizer.ggml.tokens", [f"t{number}" for number in range(321)]
    model, config = small_model("llama")
    value = GGUFValue(texts, GGUFValueType.ARRAY, GGUFValueType.STRING)
    write_model(tmp_path / "bad.gguf", "llama", model, config, "Q8_0", {key: value})
    with pytest.raises(ModelError, match="321 tokens, its tensors have 320"):
        load_all(tmp_path / "bad.gguf")


def test_size_matching_tensors_is_accepted(tmp_path: Path) -> None:
    file = file_with(tmp_path, "llama.block_count", 4, HUGE)
    assert len(load_all(file).model.layers) == 4


def test_model_with_oversized_template_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(template_trial, "MEMORY_BYTES", 256 << 20)
    key, kind = "tokenizer.chat_template", GGUFValueType.STRING
    file = file_with(tmp_path, key, "{{ 'a' * 999999999 }}", kind)
    assert main(["generate", "Hello", "--model", str(file)]) == 2
    assert capsys.readouterr().err == (
        "penstock: bad.gguf: its chat template takes more than 256 MiB for a message of one word\n"
    )


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ 1 / 0 }}", "refuses the messages: ZeroDivisionError: division by zero"),
        ("{{ messages[7].content.x }}", "refuses the messages: UndefinedError"),
        ("{# nothing #}", "renders the messages to an empty text"),
    ],
)
def test_template_error_is_one_line(source: str, words: str, tmp_path: Path) -> None:
    file = file_with(tmp_path, "tokenizer.chat_template", source, GGUFValueType.STRING)
    with pytest.raises(ModelError, match=words) as raised:
        render(load_all(file).tokenizer, [{"role": "user", "content": "Hello"}])
    assert "\n" not in str(raised.value)


def test_oversized_vocabulary_piece_is_refused(tmp_path: Path) -> None:
    """Tokenizing it would be quadratic in its length."""
    texts = ["<unk>", "a", "a" * 1_000_000]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": np.zeros(3, np.float32),
        "tokenizer.ggml.unknown_token_id": 0,
    }
    with pytest.raises(ModelError, match="up to 1,000,000 characters"):
        write_tokenizer(Header("bad.gguf", metadata, {}), tmp_path)
    metadata["tokenizer.ggml.tokens"] = [*texts[:2], "a" * LONGEST_PIECE]
    write_tokenizer(Header("good.gguf", metadata, {}), tmp_path)
    assert (tmp_path / "tokenizer.json").is_file()


def test_ten_thousand_digit_layer_number_is_ignored() -> None:
    """Python refuses to parse so many digits."""
    kind = ARCHITECTURES["llama"]
    assert module_of(kind, f"blk.{'9' * 10_000}.attn_q.weight") is None
    assert module_of(kind, "blk.99.attn_q.weight") == "model.layers.99.self_attn.q_proj.weight"
