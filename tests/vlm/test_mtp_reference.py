"""Multi-token heads against mlx-vlm's drafters, from the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from headed_models import QWEN, write_published
from tiny_families import prompt_of

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: make test-vlm")

from mlx_vlm.speculative.drafters.mtp_split import detect_mtp_splitter
from mlx_vlm.split_mtp import split_mtp

from penstock.errors import ModelError
from penstock.models.loading import load
from penstock.models.mlx_lm import kv_cache


def published(family: str, folder: Path) -> Path:
    """Write a folder with what mlx-vlm asks of its config, too."""
    write_published(family, folder)
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    if family != "qwen3_next":
        text["rope_parameters"]["mrope_section"] = [2, 1, 1]
        text["rope_parameters"]["partial_rotary_factor"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", QWEN)
def test_head_matches_mlx_vlm(family: str, tmp_path: Path) -> None:
    folder = published(family, tmp_path / "model")
    model, _ = load(folder, weights_dtype="native", mtp=True, model_source="mlx-lm")
    text = getattr(model, "language_model", model)
    drafter = detect_mtp_splitter(folder).load(folder)
    drafter.reset(model)
    tokens = mx.array([prompt_of(20)])
    hidden = text.model(tokens)
    previous = mx.concatenate([mx.zeros_like(hidden[:, :1]), hidden[:, :-1]], axis=1)
    expected = drafter._forward_tokens(tokens, previous, mx.int32)
    actual = model.mtp(text.model.embed_tokens(tokens), previous, kv_cache())
    assert mx.allclose(actual, expected, rtol=1e-3, atol=1e-4)


def test_head_after_last_layer_matches_mlx_vlm(tmp_path: Path) -> None:
    folder = write_published("glm_moe_dsa", tmp_path / "model")
    weights: Any = mx.load(str(folder / "model.safetensors"))
    repeated = ("embed_tokens.weight", "shared_head.head.weight")  # which mlx-vlm does not expect
    kept = {n: w for n, w in weights.items() if not (".4." in n and n.endswith(repeated))}
    mx.save_safetensors(str(folder / "model.safetensors"), kept)
    model, _ = load(folder, weights_dtype="native", mtp=True, model_source="mlx-lm")
    drafter: Any = detect_mtp_splitter(folder).load(folder)
    drafter.reset(model)
    tokens = mx.array([prompt_of(40)])  # beyond the number of tokens that an index selects
    hidden = model.model(tokens)
    expected = drafter._forward_tokens(tokens, hidden, mx.int32)
    kv, _ = model.make_cache()[-1]
    actual = model.mtp(model.model.embed_tokens(tokens), hidden, kv)
    assert mx.allclose(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", QWEN)
def test_split_folder_of_mlx_vlm_is_read(family: str, tmp_path: Path) -> None:
    folder = published(family, tmp_path / "model")
    head = split_mtp(str(folder), str(tmp_path / "head"))
    for bits in (None, 8):
        if bits is not None:
            head = split_mtp(str(folder), str(tmp_path / "coded"), q_bits=bits, q_group_size=32)
        loaded, _ = load(folder, weights_dtype="native", mtp=head, model_source="mlx-lm")
        own, _ = load(folder, weights_dtype="native", mtp=True, model_source="mlx-lm")
        logits = []
        for model in (own, loaded):
            caches = model.make_cache()
            model(mx.array([[3, 1, 4, 1, 5]]), cache=caches)
            kv, state = caches[-1]
            logits.append(model.predict(mx.array([[7]]), state[0], kv)[0])
        assert (
            mx.abs(logits[0] - logits[1]).max() < (0.3 if bits else 1e-4) * mx.abs(logits[0]).max()
        )


def test_head_of_mlx_lm_alone_is_refused_beside_mlx_vlm(tmp_path: Path) -> None:
    folder = write_published("glm4_moe", tmp_path / "model")
    with pytest.raises(ModelError, match="--model-source mlx-lm"):
        load(folder, mtp=True, model_source="mlx-vlm")
