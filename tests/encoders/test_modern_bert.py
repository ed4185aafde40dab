"""ModernBERT against a NumPy reference: windows, long texts, both configs, reranking."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from tiny_encoders import WORDS
from tiny_modern import GLOBAL_THETA, LOCAL_THETA, WINDOW, write_modern

from penstock.attention import devices
from penstock.attention.mlx_backend import GPUBackend
from penstock.encoders.bert import EncoderRow, batch_bytes
from penstock.encoders.encoder import expected_bytes, load_encoder
from penstock.errors import ModelError
from penstock.models.encoder_types import EMBEDDING, RERANK, kinds_of

EXACT = {"atol": 2e-5}
"""Float32 through four layers, against float64."""


@pytest.fixture(params=["device", "operations"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run on this device, and with MLX's operations as on a GPU."""
    if request.param == "device":
        yield
        return
    with devices.using(GPUBackend()):
        yield


def rows_of(*lengths: int) -> list[EncoderRow]:
    draw = np.random.default_rng(1)
    return [EncoderRow(draw.integers(4, len(WORDS), n).tolist()) for n in sorted(lengths)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_embeddings_match_reference(tmp_path: Path, pooling: str, prefix: str) -> None:
    tiny = write_modern(tmp_path / "tiny", pooling=pooling, prefix=prefix)
    assert kinds_of(tiny.folder) == EMBEDDING
    encoder = load_encoder(tiny.folder)
    rows = rows_of(1, 3, 3, WINDOW, 40, 40, 90)
    computed = np.array(encoder.model(rows))
    expected = np.stack([tiny.vector(row.tokens) for row in rows])
    np.testing.assert_allclose(computed, expected, **EXACT)
    assert expected_bytes(tiny.folder, 10**9) == encoder.nbytes


@pytest.mark.usefixtures("way")
def test_long_text_is_computed_in_parts(tmp_path: Path) -> None:
    tiny = write_modern(tmp_path / "tiny")
    encoder = load_encoder(tiny.folder)
    (row,) = rows_of(1100)
    computed = np.array(encoder.model([row]))[0]
    np.testing.assert_allclose(computed, tiny.vector(row.tokens), **EXACT)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    np.array(encoder.model([row]))
    peak = mx.get_peak_memory() - before
    whole = 4 * encoder.spec.heads * 1100**2
    assert peak <= batch_bytes(encoder.spec, [1100]) + 50_000
    assert peak < 3 * whole


def test_configs_of_new_and_old_releases_agree(tmp_path: Path) -> None:
    old = load_encoder(write_modern(tmp_path / "old").folder).spec
    kinds = {"full_attention": GLOBAL_THETA, "sliding_attention": LOCAL_THETA}
    new: dict[str, Any] = {
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in kinds.items()
        },
    }
    folder = write_modern(tmp_path / "new", **new).folder
    config = json.loads((folder / "config.json").read_text())
    for name in ("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"):
        del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    spec = load_encoder(folder).spec
    assert (spec.windows, spec.thetas) == (old.windows, old.thetas)
    assert spec.windows == [None, WINDOW // 2, WINDOW // 2, None]


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_reranker_scores_match_reference(tmp_path: Path, pooling: str) -> None:
    tiny = write_modern(tmp_path / "tiny", reranks=True, pooling=pooling, prefix="model.")
    assert kinds_of(tiny.folder) == RERANK
    rows = rows_of(5, 12, 30)
    computed = np.array(load_encoder(tiny.folder).model(rows))[:, 0]
    expected = [tiny.logit(row.tokens) for row in rows]
    np.testing.assert_allclose(computed, expected, atol=1e-4)


def test_unknown_activation_is_refused(tmp_path: Path) -> None:
    folder = write_modern(tmp_path / "tiny", hidden_activation="silu").folder
    with pytest.raises(ModelError, match="silu"):
        load_encoder(folder)
