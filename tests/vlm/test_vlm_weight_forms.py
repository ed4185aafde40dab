"""Weight formats that mlx-vlm reads: the text of its own loop, and the bytes that were planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: make test-vlm")

import mlx_vlm.utils
from mlx_vlm.models.cache import make_prompt_cache

from penstock import Engine
from penstock.cli import main
from penstock.engine.request import Request
from penstock.models.loading import expected_bytes, load_all
from support.weight_forms import FAMILIES, MODES, write_float8, write_quantized

PROMPT = [5, 260, 17, 301, 9, 33, 250, 8, 111, 64, 65, 66, 67, 3, 2, 1] * 3
TOKENS = 16


def own_tokens(folder: Path) -> list[int]:
    """Generate greedily with mlx-vlm's model on its own caches."""
    model = mlx_vlm.utils.load_model(folder).language_model
    caches, tokens, inputs = make_prompt_cache(model), [], PROMPT
    for _ in range(TOKENS):
        logits = model(mx.array([inputs]), cache=caches).logits[0, -1]
        tokens.append(int(mx.argmax(logits).item()))
        inputs = tokens[-1:]
    return tokens


def check_text(folder: Path, **settings: Any) -> None:
    loaded = load_all(folder, weights_dtype="native", **settings)
    assert loaded.source.name == "mlx-vlm"
    request = Request(prompt=tuple(PROMPT), max_tokens=TOKENS, ignore_eos=True)
    with Engine(loaded.model, loaded.tokenizer, memory_limit="200MB", block_size=16) as engine:
        for _ in range(2):  # cold, and warm
            assert list(engine.submit(request).result()[0].tokens) == own_tokens(folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_text_matches_mlx_vlm(mode: str, family: str, tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "model", family, mode, by_layer=True)
    check_text(folder, model_source="mlx-vlm")


@pytest.mark.parametrize("family", FAMILIES)
def test_float8_weights_are_read_as_mxfp8(family: str, tmp_path: Path) -> None:
    check_text(write_float8(tmp_path / "model", family, "float32"))


@pytest.mark.parametrize("dtype", ["native", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_planned_bytes_of_float8_weights_match_loaded_ones(
    family: str, dtype: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_float8(tmp_path / "model", family)
    loaded = load_all(folder, weights_dtype=dtype)
    held = sum(weight.nbytes for _, weight in tree_flatten(loaded.model.parameters()))
    flags = ["--json", "--memory-limit", "1GB", "--weights-dtype", dtype]
    assert main(["plan", str(folder), *flags]) == 0
    assert json.loads(capsys.readouterr().out)["weight_bytes"] == held
    assert expected_bytes(folder, dtype, 10**9) == held
