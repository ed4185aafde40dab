"""Models of mlx-vlm's classes: selected, loaded, refused, and equal to their own loop's text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

pytest.importorskip("mlx_vlm", reason="needs mlx-vlm: make test-vlm")

import mlx_vlm.utils
from mlx_vlm.models import qwen2_vl
from mlx_vlm.models.cache import make_prompt_cache

from penstock import Engine, load
from penstock.cli import main
from penstock.engine.request import Request
from penstock.models.loading import check_fits, load_all
from penstock.models.mlx_lm import render
from penstock.plugins.vlm.vlm_reader import TextModel
from penstock.recall import MODEL_PATH

QUESTION = [
    {
        "role": "user",
        "content": "The code of the amber falcon is 4821. What is the code of the amber falcon?",
    }
]
LIMIT = "300MB"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a copy of the embedded model."""
    copied = tmp_path / "model"
    shutil.copytree(MODEL_PATH, copied, copy_function=shutil.copyfile)
    return copied


def change(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def own_tokens(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Generate greedily with mlx-vlm's model on its own caches."""
    model = mlx_vlm.utils.load_model(folder).language_model
    caches, tokens, inputs = make_prompt_cache(model), [], prompt
    for _ in range(count):
        logits = model(mx.array([inputs]), cache=caches).logits[0, -1]
        tokens.append(int(mx.argmax(logits).item()))
        inputs = tokens[-1:]
    return tokens


def test_text_matches_mlx_vlm_loop(folder: Path) -> None:
    loaded = load_all(folder, model_source="mlx-vlm")
    assert type(loaded.model) is TextModel
    prompt = render(loaded.tokenizer, QUESTION)
    expected = own_tokens(folder, prompt, 12)
    with Engine(loaded.model, loaded.tokenizer, memory_limit=LIMIT) as engine:
        for _ in range(2):  # cold, then from the cache
            answer = engine.submit(Request(prompt=tuple(prompt), max_tokens=12)).result()
            assert list(answer[0].tokens) == expected[: len(answer[0].tokens)]
    assert answer[0].tokens


def test_mlx_lm_loads_its_types_unless_mlx_vlm_is_requested(folder: Path) -> None:
    assert load_all(folder).source.name == "mlx-lm"
    assert load_all(folder, model_source="mlx-vlm").source.name == "mlx-vlm"


@pytest.fixture
def foreign(folder: Path) -> Path:
    """Return the embedded model with a model type that mlx-lm lacks."""
    change(folder, model_type="k2_horizon")
    return folder


def test_type_only_in_mlx_vlm_is_loaded_by_it(foreign: Path) -> None:
    loaded = load_all(foreign)
    assert loaded.source.name == "mlx-vlm"
    assert "mlx-lm" in loaded.source.why and "k2_horizon" in loaded.source.why
    with Engine(loaded.model, loaded.tokenizer, memory_limit=LIMIT) as engine:
        assert "4821" in str(engine.chat(QUESTION, max_tokens=24))


def test_doctor_reports_model_source(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", str(foreign), "--json"])
    model = json.loads(capsys.readouterr().out)["model"]
    assert (model["source"], model["way"]) == ("mlx-vlm", "shared")
    assert "k2_horizon" in model["source_why"]
    assert model["modules"] == ["mlx_vlm.models.k2_horizon.language"]


def said(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return the one-line error for a refused folder."""
    command = ["generate", "Hello", "--model", str(folder), "--max-tokens", "1", *flags]
    assert main(command) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    return shown.err


def test_model_source_mlx_lm_refuses_mlx_vlm_type(
    foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "k2_horizon" in said(foreign, capsys, "--model-source", "mlx-lm")


@pytest.mark.parametrize("model_type", ["no_such_type", "../utils", "a.b", "bert.bert"])
def test_unknown_type_is_refused(
    model_type: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, model_type=model_type)
    line = said(folder, capsys)
    assert model_type in line and "mlx-lm" in line and "mlx-vlm" in line


@pytest.mark.parametrize("flags", [(), ("--model-source", "mlx-vlm")])
def test_remote_code_in_folder_is_not_run(
    flags: tuple[str, ...], foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (foreign / "own.py").write_text("raise SystemExit(7)")
    change(foreign, model_file="own.py")
    assert "model_file" in said(foreign, capsys, *flags)


def test_model_without_language_model_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, model_type="yolo11")
    assert "model" in said(folder, capsys)


def test_weights_are_counted_without_reading(foreign: Path) -> None:
    check_fits(foreign, "native", "20MB")
    with pytest.raises(Exception, match="exceed the memory limit"):
        check_fits(foreign, "native", "1MB")


def test_quantized_weights_are_dequantized_to_float32(foreign: Path) -> None:
    model = mlx_vlm.utils.load_model(foreign)
    nn.quantize(model, group_size=64, bits=8)
    mx.save_safetensors(str(foreign / "model.safetensors"), dict(tree_flatten(model.parameters())))
    change(foreign, quantization={"group_size": 64, "bits": 8})
    model, _ = load(foreign, weights_dtype="float32")
    dtypes = {array.dtype for _, array in tree_flatten(model.parameters())}
    assert dtypes == {mx.float32}
    native, _ = load(foreign, weights_dtype="native")
    prompt = mx.array([[1, 5, 9, 300]])
    assert mx.allclose(model(prompt), native(prompt), atol=1e-2)


def test_positions_are_independent_of_previous_prompt() -> None:
    """A short prompt first: its positions would be cut to the next one's."""
    text = {
        "model_type": "qwen2_vl",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": 40,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    config = qwen2_vl.ModelConfig.from_dict(
        {"model_type": "qwen2_vl", "text_config": text, "vision_config": {}}
    )
    config.text_config = qwen2_vl.TextConfig.from_dict(text)
    config.vision_config = qwen2_vl.VisionConfig.from_dict({})
    model = TextModel(qwen2_vl.LanguageModel(config.text_config, config), config.text_config)
    prompt = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    expected = model(prompt, cache=model.make_cache())
    model(prompt[:, :3], cache=model.make_cache())
    caches = model.make_cache()
    model(prompt[:, :5], cache=caches)
    rest = model(prompt[:, 5:], cache=caches)
    assert mx.allclose(model(prompt, cache=model.make_cache()), expected, atol=1e-5)
    assert mx.allclose(rest, expected[:, 5:], atol=1e-5)
