"""Folders in each weight format: the text of mlx-lm's loop, and the bytes that were planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step

from penstock import Engine
from penstock.cli import main
from penstock.engine.request import Request
from penstock.errors import ModelError
from penstock.models.loading import expected_bytes, load_all
from support.weight_forms import FAMILIES, MODES, write_float8, write_quantized

PROMPTS = [[5, 260, 17, 301, 9, 33, 250, 8, 111, 64, 65, 66, 67, 3, 2, 1] * n for n in (1, 3)]
TOKENS = 16
LIMIT = 10**9


def planned_bytes(folder: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> int:
    """Return the bytes of weights that `penstock plan` prints."""
    capsys.readouterr()
    flags = ["--json", "--memory-limit", "1GB", "--weights-dtype", dtype]
    assert main(["plan", str(folder), *flags]) == 0
    return int(json.loads(capsys.readouterr().out)["weight_bytes"])


def each_form(test: Any) -> Any:
    by_layer = pytest.mark.parametrize("by_layer", [False, True], ids=["one", "by-layer"])
    family, mode = (pytest.mark.parametrize(*of) for of in (("family", FAMILIES), ("mode", MODES)))
    return by_layer(family(mode(test)))


@each_form
def test_text_matches_mlx_lm(mode: str, family: str, by_layer: bool, tmp_path: Path) -> None:
    folder = write_quantized(tmp_path / "model", family, mode, by_layer=by_layer)
    model, _ = mlx_lm.load(str(folder))
    expected = [
        [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=TOKENS)]
        for prompt in PROMPTS
    ]
    loaded = load_all(folder, weights_dtype="native")
    with Engine(loaded.model, loaded.tokenizer, memory_limit="200MB", block_size=16) as engine:
        for _ in range(2):  # cold, and warm
            handles = [
                engine.submit(Request(prompt=tuple(prompt), max_tokens=TOKENS, ignore_eos=True))
                for prompt in PROMPTS
            ]
            assert [list(handle.result()[0].tokens) for handle in handles] == expected


@each_form
@pytest.mark.parametrize("dtype", ["native", "float32"])
def test_planned_bytes_match_loaded_ones(
    dtype: Any,
    mode: str,
    family: str,
    by_layer: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "model"
    write_quantized(folder, family, mode, by_layer=by_layer, dtype="bfloat16")
    loaded = load_all(folder, weights_dtype=dtype)
    held = sum(weight.nbytes for _, weight in tree_flatten(loaded.model.parameters()))
    assert planned_bytes(folder, dtype, capsys) == held
    assert expected_bytes(folder, dtype, LIMIT) == held


def test_float8_weights_unknown_to_mlx_lm_give_one_line_error(tmp_path: Path) -> None:
    folder = write_float8(tmp_path / "model", "llama")
    with pytest.raises(ModelError, match="pip install mlx-vlm") as refused:
        load_all(folder, model_source="mlx-lm")
    assert "FP8" in str(refused.value) and "\n" not in str(refused.value)
