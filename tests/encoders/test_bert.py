"""The forward pass of encoders against a NumPy reference, and the settings of a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_encoders import SEP, WIDTH, WORDS, TinyEncoder, write_encoder

from penstock.attention import devices
from penstock.attention.mlx_backend import GPUBackend
from penstock.encoders import numpy_steps
from penstock.encoders.bert import EncoderRow, batch_bytes
from penstock.encoders.encoder import Encoder, expected_bytes, load_encoder
from penstock.errors import ModelError, NeverFits
from penstock.models.encoder_types import EMBEDDING, RERANK, WRITING, kinds_of
from penstock.models.loading import load_all
from penstock.recall import MODEL_PATH

TEXTS = [
    "the gate holds",
    "river",
    "water holds back the river gate",
    "code 1 2 3 4",
    "amber falcon",
    "what is the code",
    "why water",
]
EXACT = {"atol": 3e-6, "rtol": 3e-5}
"""Float32 through two layers of sums of 24 numbers, against float64."""


@pytest.fixture(params=["device", "operations"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run on this device, and with MLX's operations as on a GPU."""
    if request.param == "device":
        yield
        return
    with devices.using(GPUBackend()):
        yield


def vectors(encoder: Encoder, rows: list[EncoderRow]) -> np.ndarray:
    return np.array(encoder.model(sorted(rows, key=len)))


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max"])
@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.usefixtures("way")
def test_embeddings_match_reference(tmp_path: Path, pooling: str, normalizes: bool) -> None:
    tiny = write_encoder(tmp_path / "tiny", pooling=pooling, normalizes=normalizes)
    rows = sorted((EncoderRow(tiny.tokens(text)) for text in TEXTS), key=len)
    computed = vectors(load_encoder(tiny.folder), rows)
    expected = np.stack([tiny.vector(row.tokens) for row in rows])
    np.testing.assert_allclose(computed, expected, **EXACT)
    shifted = np.stack([tiny.vector([*row.tokens[:-1], 5, SEP]) for row in rows])
    assert np.abs(computed - shifted).max() > 0.01  # a token more is seen


@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta", "camembert"])
def test_roberta_positions_start_after_padding_index(tmp_path: Path, model_type: str) -> None:
    tiny = write_encoder(tmp_path / "tiny", model_type=model_type, prefix="roberta.")
    encoder = load_encoder(tiny.folder)
    tokens = tiny.tokens("water holds back the river")
    np.testing.assert_allclose(
        vectors(encoder, [EncoderRow(tokens)])[0], tiny.vector(tokens), **EXACT
    )
    assert encoder.spec.most_tokens == 24


def test_legacy_weight_names_and_bfloat16_are_loaded(tmp_path: Path) -> None:
    tiny = write_encoder(tmp_path / "tiny", prefix="bert.", dtype=mx.bfloat16)
    weights = mx.load(str(tiny.folder / "model.safetensors"))
    assert isinstance(weights, dict)
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in weights.items()
    }
    mx.save_safetensors(str(tiny.folder / "model.safetensors"), old)
    encoder = load_encoder(tiny.folder)
    tokens = tiny.tokens(TEXTS[0])
    np.testing.assert_allclose(
        vectors(encoder, [EncoderRow(tokens)])[0], tiny.vector(tokens), **EXACT
    )
    assert {array.dtype for array in encoder.model.arrays} == {mx.float32}
    assert expected_bytes(tiny.folder, 10**9) == encoder.nbytes


def test_embeddings_are_batch_invariant(tmp_path: Path) -> None:
    tiny = write_encoder(tmp_path / "tiny")
    encoder = load_encoder(tiny.folder)
    rows = sorted((EncoderRow(tiny.tokens(text)) for text in TEXTS), key=len)
    alone = np.stack([vectors(encoder, [row])[0] for row in rows])
    np.testing.assert_allclose(vectors(encoder, rows), alone, atol=1e-6)


@pytest.mark.usefixtures("way")
def test_reranker_scores_match_reference(tmp_path: Path) -> None:
    tiny = write_encoder(tmp_path / "tiny", reranks=True, prefix="bert.")
    encoder = load_encoder(tiny.folder)
    assert not encoder.spec.embeds and encoder.spec.labels == 1
    query = encoder.tokenizer.query(TEXTS[5], lambda: None)
    pairs = [encoder.tokenizer.pair(query, text, None, lambda: None).row for text in TEXTS]
    order = sorted(range(len(pairs)), key=lambda number: len(pairs[number]))
    logits = np.array(encoder.model([pairs[number] for number in order]))[:, 0]
    expected = [tiny.score(TEXTS[5], TEXTS[number]) for number in order]
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), expected, **EXACT)
    swapped = [tiny.score(TEXTS[number], TEXTS[5]) for number in order]
    assert np.abs(np.array(swapped) - expected).max() > 1e-3


@pytest.mark.usefixtures("way")
def test_batch_memory_stays_below_estimate(tmp_path: Path) -> None:
    """MLX's own peak of a pass, above what it held before."""
    encoder = load_encoder(write_encoder(tmp_path / "tiny").folder)
    for lengths in ([24] * 200, [3] * 900, [4, 9, 24] * 90, [24]):
        rows = [EncoderRow([2, *[5 + i % 9 for i in range(n - 2)], 3]) for n in sorted(lengths)]
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        np.array(encoder.model(rows))
        peak = mx.get_peak_memory() - before
        assert peak <= batch_bytes(encoder.spec, lengths) + 50_000
        assert peak >= batch_bytes(encoder.spec, lengths) / 6  # else the bound says little


def test_gelu_in_place_is_exact_to_float32() -> None:
    x = np.concatenate([np.linspace(-9, 9, 100_001), [0, 1e-30, -1e-30, 40, -40]])
    expected = [0.5 * value * (1 + math.erf(value / math.sqrt(2))) for value in x]
    computed = np.array(numpy_steps.gelu(mx.array(x.astype(np.float32)) + 0))
    np.testing.assert_allclose(computed, expected, atol=1e-6)
    assert np.array_equal(np.array(numpy_steps.gelu(mx.array([np.nan]) + 0)), [np.nan], True)


def test_model_kind_follows_config(tmp_path: Path) -> None:
    assert kinds_of(write_encoder(tmp_path / "a").folder) == EMBEDDING
    assert kinds_of(write_encoder(tmp_path / "b", reranks=True).folder) == RERANK
    assert kinds_of(MODEL_PATH) == WRITING
    with pytest.raises(ModelError, match="writes no text"):
        load_all(tmp_path / "a")


def change(tiny: TinyEncoder, name: str, **values: Any) -> None:
    file = tiny.folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("config.json", {"hidden_act": "swish"}, "swish"),
        ("config.json", {"position_embedding_type": "relative_key"}, "relative_key"),
        ("config.json", {"num_attention_heads": 3}, "3 heads"),
        ("config.json", {"num_hidden_layers": 3}, "no weight encoder.layer.2"),
        ("config.json", {"hidden_size": "16"}, "'16' as hidden_size"),
        ("config.json", {"vocab_size": 7}, "has the shape"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "pooling by"),
    ],
)
def test_unsupported_encoder_configs_are_refused(
    tmp_path: Path, name: str, values: dict[str, Any], message: str
) -> None:
    tiny = write_encoder(tmp_path / "tiny")
    change(tiny, name, **values)
    with pytest.raises(ModelError, match=message):
        load_encoder(tiny.folder)


def test_unsupported_sentence_transformers_modules_are_refused(tmp_path: Path) -> None:
    tiny = write_encoder(tmp_path / "tiny")
    file = tiny.folder / "modules.json"
    dense = {"idx": 3, "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    file.write_text(json.dumps([*json.loads(file.read_text()), dense]))
    with pytest.raises(ModelError, match="class Dense"):
        load_encoder(tiny.folder)


def test_max_tokens_is_minimum_of_configured_limits(tmp_path: Path) -> None:
    tiny = write_encoder(tmp_path / "tiny")
    assert load_encoder(tiny.folder).spec.most_tokens == 24
    (tiny.folder / "tokenizer_config.json").write_text('{"model_max_length": 12}')
    assert load_encoder(tiny.folder).spec.most_tokens == 12
    (tiny.folder / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    assert load_encoder(tiny.folder).spec.most_tokens == 8
    with pytest.raises(NeverFits, match="exceed the memory limit"):
        expected_bytes(tiny.folder, 1_000)


def test_tokenizer_matches_test_vocabulary(tmp_path: Path) -> None:
    tiny = write_encoder(tmp_path / "tiny")
    tokenizer = load_encoder(tiny.folder).tokenizer
    for text in TEXTS:
        assert tokenizer.text(text, None, lambda: None).row.tokens == tiny.tokens(text)
    assert len(WORDS) > WIDTH
